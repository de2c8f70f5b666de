"""The figures of a report: how far outputs are off, and where in an output they are."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from f8emu.conformance.breakdown.breakdown import Breakdown
from f8emu.conformance.breakdown.difference_map import DifferenceMap, is_matrix
from f8emu.conformance.breakdown.ulps import APART, LAST_BIN, NOT_COMPARED, UlpHistogram, bin_label, bins
from f8emu.conformance.page import palette
from f8emu.conformance.page.page import Plot, Table

if TYPE_CHECKING:
    pass

_ROW = 150
"""Height in pixels of the histogram of one dtype."""
_LEAST = 4
"""Bins on either side of a histogram at the least, so that few bars do not become walls."""
_GAPS = 48
"""Cells of a map up to which lines are drawn between them."""


# 1 How far


def ulp_plot(breakdown: Breakdown) -> Plot:
    """One histogram for each dtype of output, under each other on one axis."""
    from plotly.graph_objects import Bar, Figure
    from plotly.subplots import make_subplots

    found = dict(breakdown.ulps)
    indices = [index for histogram in found.values() for index in histogram.finite]
    first, last = min([*indices, -_LEAST]), max([*indices, _LEAST])
    apart = [name for name in (*APART, NOT_COMPARED) if any(name in histogram.apart for histogram in found.values())]
    # the bins in order, then, after a gap, what has no distance
    places: dict[int | str, int] = {index: index for index in range(first, last + 1)}
    places |= {name: last + 2 * (i + 1) for i, name in enumerate(apart)}
    figure: Figure = make_subplots(rows=len(found), cols=1, shared_xaxes=True, vertical_spacing=0.2 / len(found))
    for row, (dtype, histogram) in enumerate(found.items(), 1):
        for keys, look in _looks(places):
            counts = [histogram.finite.get(k, 0) if isinstance(k, int) else histogram.apart.get(k, 0) for k in keys]
            bars = Bar(
                x=[places[key] for key in keys],
                y=[100 * count / histogram.total for count in counts],
                marker={"line": {"width": 0}, **look},
                customdata=[[_name(key), f"{count:,}"] for key, count in zip(keys, counts, strict=True)],
                hovertemplate="%{customdata[0]}: %{customdata[1]} outputs, %{y:.2f} %<extra>" + dtype + "</extra>",
            )
            figure.add_trace(bars, row=row, col=1)
        figure.update_yaxes(ticksuffix=" %", nticks=4, rangemode="tozero", row=row, col=1)
        head = f"<b>{dtype}</b>, {histogram.total:,} outputs differ"
        figure.add_annotation(
            text=head, x=0, xref="x domain", xanchor="left", y=1, yref=f"y{row if row > 1 else ''} domain",
            yanchor="bottom", showarrow=False,
        )  # fmt: skip
    ticks = {"tickvals": list(places.values()), "ticktext": [_short(key) for key in places], "zeroline": False}
    figure.update_xaxes(**ticks, tickangle=0 if len(places) < 14 else -60)
    figure.update_xaxes(title={"text": _AXIS}, row=len(found), col=1)
    sides = ((first, -1, "\N{LEFTWARDS ARROW} nearer to zero", palette.BELOW, "right"),)
    sides += ((last, 1, "farther from zero \N{RIGHTWARDS ARROW}", palette.ABOVE, "left"),)
    for end, sign, text, colour, anchor in sides:
        if end * sign > 0:
            font = {"color": colour, "size": 13}
            figure.add_annotation(
                x=0.5 * sign, y=1, yref="paper", yanchor="bottom", yshift=20, xanchor=anchor, text=text,
                showarrow=False, font=font,
            )  # fmt: skip
    figure.update_layout(**_layout(height=110 + _ROW * len(found), top=46), bargap=0.12)
    return Plot(
        figure=figure,
        title="Distance of the outputs that differ",
        alt="; ".join(f"{dtype}: {histogram.words()}" for dtype, histogram in found.items()) + ".",
        data=ulp_table(found),
        min_width=18 * max(len(places), 20),
    )


_AXIS = "distance in units in the last place of the output's format; a bin's far end"


def ulp_table(ulps: Mapping[str, UlpHistogram]) -> Table:
    """Rows are bins, columns the dtypes."""
    indices = sorted({index for histogram in ulps.values() for index in histogram.finite})
    rows = [[bin_label(i), *(f"{histogram.finite.get(i, 0):,}" for histogram in ulps.values())] for i in indices]
    for name in (*APART, NOT_COMPARED):
        if any(name in histogram.apart for histogram in ulps.values()):
            label = f"{name}: raised, or of another dtype or shape" if name == NOT_COMPARED else name
            rows.append([label, *(f"{histogram.apart.get(name, 0):,}" for histogram in ulps.values())])
    return Table(
        caption="Outputs that differ, by distance in ulps: + is farther from zero than expected, - is nearer or beyond",
        columns=["distance in ulps", *ulps],
        rows=rows,
        numeric=frozenset(range(1, len(ulps) + 1)),
    )


def _looks(places: Mapping[int | str, int]) -> list[tuple[list[int | str], dict[str, Any]]]:
    """The bins of each side, and how they look; what has no distance is hatched too."""
    sides: dict[str, list[int | str]] = {}
    for key in places:
        if isinstance(key, str):
            colour = palette.APART
        else:
            colour = palette.MIDDLE if key == 0 else palette.BELOW if key < 0 else palette.ABOVE
        sides.setdefault(colour, []).append(key)
    hatched = {"shape": "/", "fgcolor": palette.PAPER}
    return [
        (keys, {"color": colour, "pattern": hatched} if colour == palette.APART else {"color": colour})
        for colour, keys in sides.items()
    ]


def _name(key: int | str) -> str:
    return key if isinstance(key, str) else bin_label(key)


def _short(key: int | str) -> str:
    """What fits under a bar: `-4`, `+2k`, `NaN for number`."""
    if isinstance(key, str):
        return key
    if key == 0:
        return "\N{PLUS-MINUS SIGN}0"
    sign, magnitude = "\N{MINUS SIGN}" if key < 0 else "+", 1 << (min(abs(key), LAST_BIN - 1) - 1)
    text = str(magnitude) if magnitude < 1024 else f"{magnitude // 1024}k"
    return f"{sign}{text}" if abs(key) < LAST_BIN else f"> {text}" if key > 0 else f"< {sign}{text}"


# 2 Where


def map_plot(place: DifferenceMap) -> Plot:
    """Rows x columns of one output, and above and beside it the shares of each column and row."""
    from plotly.graph_objects import Bar, Figure, Heatmap
    from plotly.subplots import make_subplots

    index = bins(place.farthest)
    without_distance = (place.differing > 0) & (place.apart | (index == 0))
    limit = max(int(np.abs(index).max()), 2)
    rows, columns = place.differing.shape
    y, x = (np.arange(size) * cell for size, cell in zip((rows, columns), place.cell, strict=True))
    gap = 1 if max(rows, columns) <= _GAPS else 0
    named = ("row", "column") if is_matrix(place.shape) else ("output // 256", "output % 256")
    where = f"{named[0]} %{{y}}, {named[1]} %{{x}}"
    figure: Figure = make_subplots(
        rows=2, cols=2, shared_xaxes=True, shared_yaxes=True, column_widths=[0.86, 0.14], row_heights=[0.16, 0.84],
        horizontal_spacing=0.02, vertical_spacing=0.025,
    )  # fmt: skip
    distances = Heatmap(
        z=np.where(without_distance, 0, index).astype(np.float32), x=x, y=y, zmin=-limit, zmax=limit,
        colorscale=_scale(limit), xgap=gap, ygap=gap, customdata=np.stack([place.differing, place.farthest], axis=-1),
        hovertemplate=f"{where}<br>%{{customdata[0]}} differ, %{{customdata[1]:+}} ulps<extra></extra>",
        colorbar=_colour_bar(limit, place.cell != (1, 1)),
    )  # fmt: skip
    figure.add_trace(distances, row=2, col=1)
    if without_distance.any():
        marked = Heatmap(
            z=np.where(without_distance, 1, np.nan).astype(np.float32), x=x, y=y, xgap=gap, ygap=gap, showscale=False,
            colorscale=[[0, palette.APART], [1, palette.APART]], hoverongaps=False,
            hovertemplate=f"{where}<br>NaN, infinity or the sign of zero<extra></extra>",
        )  # fmt: skip
        figure.add_trace(marked, row=2, col=1)
    share = place.differing / (place.cell[0] * place.cell[1])
    quiet: dict[str, Any] = {"marker": {"color": palette.QUIET, "line": {"width": 0}}, "hoverinfo": "skip"}
    figure.add_trace(Bar(x=x, y=100 * share.mean(axis=0), **quiet), row=1, col=1)
    figure.add_trace(Bar(x=100 * share.mean(axis=1), y=y, orientation="h", **quiet), row=2, col=2)
    percent: dict[str, Any] = {"range": [0, 100], "tickvals": [0, 100], "ticktext": ["0", "100 %"]}
    figure.update_xaxes(zeroline=False)
    figure.update_yaxes(zeroline=False, showgrid=False)
    figure.update_yaxes(**percent, row=1, col=1)
    figure.update_xaxes(**percent, row=2, col=2)
    figure.update_yaxes(autorange="reversed", title={"text": named[0]}, row=2, col=1)
    figure.update_yaxes(autorange="reversed", row=2, col=2)
    figure.update_xaxes(title={"text": named[1]}, row=2, col=1)
    figure.update_xaxes(visible=False, row=1, col=2)
    figure.update_yaxes(visible=False, row=1, col=2)
    figure.update_layout(**_layout(height=430, top=8, right=26), bargap=0)
    part = f" {place.part}" if place.part else ""
    return Plot(
        figure=figure,
        title=f"{place.case}{part}",
        alt=f"{place.summary()}. Bars: the share of each {named[1]} and {named[0]} that differs.",
    )


def _scale(limit: int) -> list[list[object]]:
    """Nothing at 0, then two colours that deepen with the distance."""
    one = 0.5 / limit
    return [
        [0, palette.BELOW], [0.5 - one, palette.BELOW_FAINT], [0.5 - one / 2, palette.BELOW_FAINT],
        [0.5 - one / 2, palette.EQUAL], [0.5 + one / 2, palette.EQUAL],
        [0.5 + one / 2, palette.ABOVE_FAINT], [0.5 + one, palette.ABOVE_FAINT], [1, palette.ABOVE],
    ]  # fmt: skip


def _colour_bar(limit: int, is_reduced: bool) -> dict[str, Any]:
    step = -(-limit // 4)
    what = "most ulps of a cell" if is_reduced else "ulps"
    marks = [m for m in range(-limit, limit + 1) if m % step == 0]
    return {
        "orientation": "h", "thickness": 9, "y": -0.16, "yanchor": "top", "len": 0.86, "x": 0, "xanchor": "left",
        "outlinewidth": 0, "tickvals": marks, "ticktext": ["equal" if m == 0 else _short(m) for m in marks],
        "title": {"text": f"nearer to zero | {what} | farther from zero", "side": "bottom"},
    }  # fmt: skip


def _layout(*, height: int, top: int, right: int = 8) -> dict[str, Any]:
    axis = {"gridcolor": palette.LINE, "zerolinecolor": palette.QUIET, "linecolor": palette.QUIET, "automargin": True}
    return {
        "template": {"layout": {"xaxis": {**axis, "showgrid": False}, "yaxis": axis}},
        "height": height,
        "margin": {"l": 8, "r": right, "t": top, "b": 8},
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": palette.INK, "size": 12, "family": "system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif"},
        "hoverlabel": {"bgcolor": palette.PAPER, "bordercolor": palette.QUIET, "font": {"color": palette.INK}},
    }

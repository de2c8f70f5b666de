"""The figures of a report, as inline SVG: how far outputs are off, and where in an output they are.

A shape has a title that a pointer shows.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from f8emu.conformance.compare import APART, LAST_BIN, NOT_COMPARED, UlpHistogram, bin_label, bins, counted, merged
from f8emu.conformance.run.breakdown import Breakdown
from f8emu.conformance.run.result import DifferenceMap, is_matrix
from f8emu.report.page import Plot
from f8emu.report.svg import Svg, number, runs, ticks

_ROW = 96
"""Height in pixels of one histogram."""
_MOST_KINDS = 6
"""Histograms; of more the others are counted together."""
_SLOT = 22
"""Width of a bar and the gap beside it."""
_LEAST = 4
"""Bins on either side of a histogram at the least, so that few bars do not become walls."""
_MAP = 320
"""Width and largest height of a map."""
_LEAST_MAP = 60
_SHARES = 44
"""Width or height of the bars beside a map."""
_AXIS = "distance in units in the last place; a bin's far end"


# 1 How far


def ulp_plot(breakdown: Breakdown) -> Plot:
    """One histogram for each kind of GEMM and dtype of output, under each other on one axis; few stand for many."""
    # 1. The bins that any of them has, then, after a gap, what has no distance.
    compared = {name: of.total - of.not_compared for name, of in breakdown.ulps_by_kind.items()}
    ranked = sorted(filter(compared.get, compared), key=compared.__getitem__, reverse=True)[:_MOST_KINDS]
    histograms = {name: breakdown.ulps_by_kind[name] for name in ranked}
    if rest := [histogram for name, histogram in breakdown.ulps_by_kind.items() if name not in histograms]:
        histograms[counted(len(rest), "other")] = merged(rest)
    indices = [index for histogram in histograms.values() for index in histogram.finite]
    first, last = min([*indices, -_LEAST]), max([*indices, _LEAST])
    apart = [
        name for name in (*APART, NOT_COMPARED) if any(name in histogram.apart for histogram in histograms.values())
    ]
    places: dict[int | str, int] = {index: index for index in range(first, last + 1)}
    places |= {name: last + 2 * (i + 1) for i, name in enumerate(apart)}
    # 2. The figure: of fewer slots than fit, each is wider.
    left, top = 46, 44
    slots = max(places.values()) - first + 1
    slot = max(_SLOT, 380 / slots)
    figure = Svg(left + slot * slots + 14, top + (_ROW + 34) * len(histograms) + (90 if apart else 50))

    def middle(place: float) -> float:
        return left + (place - first + 0.5) * slot

    figure.text(middle(-0.5), 16, "\N{LEFTWARDS ARROW} nearer to zero", "end", kind="below")
    figure.text(middle(0.5), 16, "farther from zero \N{RIGHTWARDS ARROW}", kind="above")
    # 3. The histograms, then the axis that they share.
    base = top
    for name, histogram in histograms.items():
        base += _ROW
        _histogram(figure, histogram, name, {key: middle(place) for key, place in places.items()}, base, slot)
        base += 34
    for key, place in places.items():
        if apart or len(places) >= 18:
            figure.text(middle(place) + 4, base - 20, _short(key), "end", turned=-50)
        else:
            figure.text(middle(place), base - 18, _short(key), "middle")
    figure.text(left, figure.height - 6, _AXIS, kind="quiet")
    alt = "; ".join(f"{name}: {histogram.words()}" for name, histogram in histograms.items()) + "."
    return Plot(svg=figure.html(alt), title="Distance of the outputs that differ, by kind", alt=alt)


def _histogram(
    figure: Svg, histogram: UlpHistogram, of: str, middles: Mapping[int | str, float], base: float, slot: float
) -> None:
    # Bars of shares on the line `base`; `middles` is where the bar of each bin stands.
    left, right = min(middles.values()) - slot / 2, figure.width - 14
    counts = {k: histogram.finite.get(k, 0) if isinstance(k, int) else histogram.apart.get(k, 0) for k in middles}
    most = max(counts.values()) / max(histogram.total, 1) or 1
    figure.text(left, base - _ROW - 8, f"{of}, {histogram.total:,} outputs differ", kind="head")
    for share in ticks(0, 100 * most, 3):
        y = base - share / (100 * most) * (_ROW - 6)
        figure.line(left, y, right, y, "grid")
        figure.text(left - 6, y + 4, f"{share:g} %", "end", kind="quiet")
    width = 0.84 * slot
    for key, count in counts.items():
        if not count:
            continue
        height = max(count / histogram.total / most * (_ROW - 6), 1.5)
        kind = "apart" if isinstance(key, str) else "middle" if key == 0 else "below" if key < 0 else "above"
        name, x = key if isinstance(key, str) else bin_label(key), middles[key]
        title = f"{name}: {count:,} outputs, {100 * count / histogram.total:.2f} %, {of}"
        figure.rect(x - width / 2, base - height, width, height, f"bar {kind}", title)
        if kind == "apart":  # told apart without colour, too
            figure.line(x, base, x, base - height, "hatch", f'stroke-width="{number(width)}" stroke-dasharray="1.5 4"')
    figure.line(left, base, right, base, "axis")


def _short(key: int | str) -> str:
    # What fits under a bar: `-4`, `+2k`, `NaN for number`.
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
    index = bins(place.farthest)
    limit = max(int(np.abs(index).max()), 2)
    rows, columns = place.differing.shape
    named = ("row", "column") if is_matrix(place.shape) else ("output // 256", "output % 256")
    part = f" {place.part}" if place.part else ""
    alt = f"{place.summary()}. Bars: the share of each {named[1]} and {named[0]} that differs."
    left, top, width = 52, _SHARES + 18, _MAP
    height = min(max(_MAP * rows / columns, _LEAST_MAP), _MAP)
    figure = Svg(left + width + _SHARES + 44, top + height + 92)
    # 1. The cells.
    cells = Svg(columns, rows)
    cells.rect(0, 0, columns, rows, "equal")
    for d, kind, title, depth in _strokes(place, index, limit):
        cells.path(d, f"cell {kind}", title, depth)
    figure.inset(cells, left, top, width, height)
    # 2. The shares.
    share = place.differing / (place.cell[0] * place.cell[1])
    for axis, (count, name) in enumerate(((rows, named[0]), (columns, named[1]))):
        for i, value in enumerate(share.mean(axis=1 - axis).tolist()):
            if not value:
                continue
            cell = place.cell[axis]
            spelled = str(i) if cell == 1 else f"{i * cell} to {(i + 1) * cell - 1}"
            title = f"{name} {spelled}: {100 * value:.1f} % of the outputs differ"
            along, size, length = i / count, 1 / count, value * _SHARES
            if axis == 0:
                figure.rect(left + width + 6, top + height * along, length, height * size, "share-bar", title)
            else:
                figure.rect(left + width * along, top - 6 - length, width * size, length, "share-bar", title)
    # 3. The axes.
    right, below = left + width + 6, top + height
    for x, y, words, anchor in (
        (left - 6, top - 2 - _SHARES, "100 %", "end"),
        (left - 6, top - 6, "0", "end"),
        (right + _SHARES, below + 16, "100 %", "middle"),
        *((left - 6, top + height * (i + 0.5) / rows + 4, str(i * place.cell[0]), "end") for i in _whole(rows)),
        *((left + width * (i + 0.5) / columns, below + 16, str(i * place.cell[1]), "middle") for i in _whole(columns)),
    ):
        figure.text(x, y, words, anchor, kind="quiet")
    figure.text(12, top + height / 2, named[0], "middle", turned=-90)
    figure.text(left + width / 2, below + 32, named[1], "middle")
    _colour_bar(figure, left, below + 46, limit, "ulps" if place.cell == (1, 1) else "most ulps of a cell")
    return Plot(svg=figure.html(alt), title=f"{place.case}{part}", alt=alt)


def _whole(count: int) -> list[int]:
    return [int(i) for i in ticks(0, count - 1, 6) if i == int(i)]


def _strokes(place: DifferenceMap, index: np.ndarray, limit: int) -> Iterator[tuple[str, str, str, str]]:
    # (path, colour, title, depth) of every bin: a stroke for each run of its cells in a row.
    without = (place.differing > 0) & (place.apart | (index == 0))
    looks = [(without, "apart", "NaN, infinity or another sign", _depth(limit, limit))]
    for level in np.unique(index[~without]).tolist():
        if level:
            kind = "below" if level < 0 else "above"
            title = f"{bin_label(level)} {'ulp' if abs(level) == 1 else 'ulps'}"
            looks.append(((index == level) & ~without, kind, title, _depth(level, limit)))
    for where, kind, title, depth in looks:
        strokes: list[str] = []
        for row in np.flatnonzero(where.any(axis=1)).tolist():
            at = 0
            for i, (start, length) in enumerate(runs(where[row].tolist())):
                strokes.append(f"m{start - at} 0h{length}" if i else f"M{start} {row}.5h{length}")
                at = start + length
        if strokes:
            yield "".join(strokes), kind, title, depth


def _depth(index: int, limit: int) -> str:
    # How deep the colour of a bin is: faint at one ulp, full at the limit.
    return f'style="--deep:{100 * (abs(index) - 1) / max(limit - 1, 1):.0f}%"'


def _colour_bar(figure: Svg, left: float, top: float, limit: int, label: str) -> None:
    step, wide = -(-limit // 4), _MAP / (2 * limit + 1)
    for i in range(-limit, limit + 1):
        x = left + (i + limit) * wide
        if i == 0:
            figure.rect(x, top, wide, 9, "equal")
        else:
            look = f'{_depth(i, limit)} stroke-width="9"'
            kind = f"cell-key {'below' if i < 0 else 'above'}"
            figure.path(f"M{number(x)} {number(top + 4.5)}h{number(wide)}", kind, more=look)
        if i % step == 0:
            figure.text(x + wide / 2, top + 23, "equal" if i == 0 else _short(i), "middle", kind="quiet")
    figure.text(left + _MAP / 2, top + 40, f"nearer to zero | {label} | farther from zero", "middle", kind="quiet")

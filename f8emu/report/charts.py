"""The charts of reports, notebooks and the documentation: curves, heat maps, bars, dots, stages, who agrees with whom.

A chart is 420 pixels wide and can be read at that width. Series differ in their dashes, too, not in their colour alone.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from f8emu.report.svg import Svg, number, ticks

T = TypeVar("T", bound=Hashable)
WIDTH = 420
Curve = Sequence[tuple[float, float]]
"""Points (x, y), x ascending."""
Stage = tuple[str, str, bool]
"""Where it is, which part of it, and whether its bits are equal."""
_COLOURS = 5
"""Curves with a colour and a name; the others are grey."""
_LEFT, _RIGHT, _HIGH = 56, 14, 150
_LABELS, _NAMES, _ROOM = 146, 196, 40
_BAR, _GAP, _HEAD = 15, 9, 30
_LEVELS = 8
_MOST_COLUMNS = 96
"""Columns of a heat map, or places of a strip; more are merged, the worst is shown."""


def curves(lines: Mapping[str, Curve], *, unit: str, x_unit: str = "step", log: bool = False) -> Svg:
    """Curves on one axis; the first ones have colours and names below. `log` leaves out what is not positive."""
    place = math.log10 if log else float
    drawn = {
        name: [(x, place(y)) for x, y in line if math.isfinite(y) and (y > 0 or not log)]
        for name, line in lines.items()
    }
    points = [point for line in drawn.values() for point in line] or [(0.0, 0.0)]
    (x_low, x_high), (low, high) = (_limits(value[axis] for value in points) for axis in (0, 1))
    named = [name for name, line in drawn.items() if line][:_COLOURS]
    figure = Svg(WIDTH, 22 + _HIGH + 38 + 17 * len(named))
    x_of, y_of = _scale(x_low, x_high, _LEFT, WIDTH - _RIGHT), _scale(low, high, 22 + _HIGH, 22)
    # 1. The axes.
    figure.text(4, 12, unit, kind="quiet")
    for tick in _powers(low, high) if log else ticks(low, high, 4):
        y = y_of(math.log10(tick) if log else tick)
        figure.line(_LEFT, y, WIDTH - _RIGHT, y, "grid")
        figure.text(_LEFT - 6, y + 4, f"{tick:.6g}", "end", kind="quiet")
    for tick in ticks(x_low, x_high, 5):
        figure.text(x_of(tick), 22 + _HIGH + 17, f"{tick:g}", "middle", kind="quiet")
    figure.line(_LEFT, 22 + _HIGH, WIDTH - _RIGHT, 22 + _HIGH, "axis")
    figure.text(WIDTH - _RIGHT, 22 + _HIGH + 32, x_unit, "end", kind="quiet")
    # 2. The curves, grey ones below; a single point is a short stroke.
    for name in sorted(drawn, key=lambda name: name in named):
        kind = f"line c{named.index(name)}" if name in named else "line rest"
        spots = [f"{number(x_of(x))} {number(y_of(y))}" for x, y in drawn[name]]
        if spots:
            figure.path("M" + "L".join(spots) + ("h3" if len(spots) == 1 else ""), kind, name)
    # 3. The names.
    for i, name in enumerate(named):
        y = 22 + _HIGH + 38 + 17 * i
        figure.line(_LEFT, y, _LEFT + 26, y, f"line c{i}")
        figure.name(_LEFT + 33, y + 4, name, room=WIDTH - _LEFT - 33)
    return figure


def heat(rows: Mapping[str, Curve], *, good: float, bad: float, form: Callable[[float], str]) -> Svg:
    """A row of cells for each name: faint at `good`, full at `bad`."""
    xs = sorted({x for line in rows.values() for x, _ in line})
    column_of, columns = _columns(xs)
    high = 13 if len(rows) <= 24 else 10
    figure = Svg(WIDTH, 8 + high * len(rows) + 50)
    wide = (WIDTH - _NAMES - _RIGHT) / columns
    for i, (name, line) in enumerate(rows.items()):
        worst: dict[int, tuple[float, float]] = {}
        for x, value in line:
            share = min(max((value - good) / (bad - good), 0.0), 1.0) if bad != good else 0.0
            worst[column_of[x]] = max(worst.get(column_of[x], (-1.0, value)), (share, value))
        y = 8 + high * i
        figure.name(_NAMES - 6, y + high - 3, name, "end", room=_NAMES - 6, is_small=True)
        for level in range(_LEVELS):
            cells = [c for c, (share, _) in worst.items() if min(int(share * _LEVELS), _LEVELS - 1) == level]
            strokes = "".join(f"M{number(_NAMES + c * wide)} {number(y + high / 2)}h{number(wide)}" for c in cells)
            title = f"{name}: {form(max(worst.values())[1])} at worst"
            if strokes:
                figure.path(strokes, f"cell {'above' if level else 'none'}", title, _look(level, high - 1))
    bottom = 8 + high * len(rows)
    figure.text(_NAMES, bottom + 15, f"{xs[0]:g}" if xs else "", kind="quiet")
    figure.text(WIDTH - _RIGHT, bottom + 15, f"step {xs[-1]:g}" if xs else "", "end", kind="quiet")
    for level in range(_LEVELS):
        kind = "cell above" if level else "cell none"
        figure.path(f"M{_NAMES + 18 * level} {bottom + 30}h18", kind, more=_look(level, 9))
    figure.text(_NAMES - 6, bottom + 34, form(good), "end", kind="quiet")
    figure.text(_NAMES + 18 * _LEVELS + 6, bottom + 34, form(bad), kind="quiet")
    return figure


def stages(course: Sequence[Stage]) -> Svg:
    """Stages in the order of execution, a row for each kind of part; the first that differs is marked."""
    places = list(dict.fromkeys(place for place, _, _ in course))
    parts = list(dict.fromkeys(part for _, part, _ in course))
    column_of, columns = _columns(places)
    wide = min((WIDTH - 70 - _RIGHT) / columns, 22.0)
    figure = Svg(WIDTH, 8 + 17 * len(parts) + 56)
    cells: dict[tuple[int, str], tuple[bool, str]] = {}
    for place, part, is_equal in course:
        key = column_of[place], part
        if key not in cells or (cells[key][0] and not is_equal):
            cells[key] = is_equal, place
    for part in parts:
        figure.text(64, 8 + 17 * parts.index(part) + 12, part, "end", kind="small")
    first = next((stage for stage in course if not stage[2]), None)
    for (column, part), (is_equal, place) in cells.items():
        corner = 70 + column * wide, 8 + 17 * parts.index(part), max(wide - 1, 1), 16
        words = "equal" if is_equal else "differs"
        figure.rect(*corner, f"stage {'same' if is_equal else 'other'}", f"{place} {part}: {words}")
        if first and (place, part) == first[:2]:
            figure.rect(corner[0] - 1.5, corner[1] - 1.5, corner[2] + 3, 19, "first", f"first: {place} {part}")
    bottom = 8 + 17 * len(parts)
    figure.text(70, bottom + 16, "in the order of execution \N{RIGHTWARDS ARROW}", kind="quiet")
    figure.text(70, bottom + 34, "first that differs:" if first else "every stage is equal", kind="head")
    if first:
        figure.name(70, bottom + 49, f"{first[0]} {first[1]}", room=WIDTH - 70)
    return figure


def bars(
    rows: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    line: tuple[float, str] | None = None,
    form: str = ".2f",
) -> Svg:
    """Horizontal bars, grouped by row, one for each series, with a line at a value that all are compared with."""
    values = [value for of_rows in series.values() for value in of_rows if value is not None]
    scale = (WIDTH - _LABELS - _ROOM) / max(*values, line[0] if line else 0.0, 1e-30)
    counts = [sum(of_rows[i] is not None for of_rows in series.values()) for i in range(len(rows))]
    top = _HEAD if len(series) > 1 else 8
    figure = Svg(WIDTH, top + sum(count * _BAR + _GAP for count in counts) + 16)
    if len(series) > 1:
        _legend(figure, list(series))
    y = top
    for i, row in enumerate(rows):
        figure.name(_LABELS - 8, y + counts[i] * _BAR / 2 + 4, row, "end", room=_LABELS - 8)
        for k, of_rows in enumerate(series.values()):
            if (value := of_rows[i]) is None:
                continue
            width, of_line = value * scale, line[0] * scale if line else -100
            figure.rect(_LABELS, y, width, _BAR - 2, f"b{k}")
            end = of_line if -34 < width - of_line < 2 else width  # a number never crosses the line
            figure.text(_LABELS + end + 5, y + _BAR - 4, format(value, form))
            y += _BAR
        y += _GAP
    if line:
        x = _LABELS + line[0] * scale
        figure.line(x, top - 3, x, y - _GAP + 3, "axis", 'stroke-dasharray="3 3"')
        figure.text(x, y + 9, line[1], "middle")
    return figure


def dots(rows: Sequence[str], values: Sequence[Sequence[float]], *, band: str) -> Svg:
    """One dot for each run of each row; the range of the first row is shaded over all of them."""
    least, greatest = min(map(min, values)), max(map(max, values))
    left, right, height = _LABELS + 8, WIDTH - 20, 24
    place = _scale(least, greatest, left, right)
    low, high, bottom = place(min(values[0])), place(max(values[0])), 6 + len(rows) * height
    figure = Svg(WIDTH, bottom + 26)
    figure.rect(low, 6, high - low, len(rows) * height, "b2")
    for i, (row, runs) in enumerate(zip(rows, values, strict=True)):
        y = 6 + i * height + height / 2
        figure.text(_LABELS - 8, y + 4, row, "end")
        for value in runs:
            x = number(place(value))
            figure.path(f"M{x} {number(y)}m-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0", "dot", f"{row}: {value:.4g}")
    figure.line(left, bottom + 3, right, bottom + 3, "axis")
    for x, words in ((left, f"{least:.2f}"), (right, f"{greatest:.2f}"), ((low + high) / 2, band)):
        figure.text(x, bottom + 18, words, "middle")
    return figure


def matrix(names: Sequence[str], shares: Mapping[tuple[str, str], float]) -> Svg:
    """A cell for each pair of names, full where the share is 1; the diagonal says which row it is."""
    left, size = _NAMES, (WIDTH - _NAMES - 6) / len(names)
    figure = Svg(WIDTH, 8 + size * len(names) + 24)
    for i, row in enumerate(names):
        figure.name(left - 5, 8 + size * (i + 0.5) + 3, row, "end", room=left - 5, is_small=True)
        for j, column in enumerate(names):
            share = shares[row, column]
            level = min(int(share * (_LEVELS - 1)), _LEVELS - 2) if share < 1 else _LEVELS - 1
            place = f"M{number(left + size * j)} {number(8 + size * (i + 0.5))}h{number(size)}"
            title = f"{row} and {column}: {100 * share:.4g} % of the bytes are equal"
            figure.path(place, f"cell {'above' if share == 1 else 'below'}", title, _look(level, size))
            if size > 22:
                middle = left + size * (j + 0.5), 8 + size * (i + 0.5) + 4
                figure.text(*middle, f"{math.floor(100 * share)}", "middle", kind="small")
    figure.text(left, 8 + size * len(names) + 18, "columns in the order of the rows", kind="quiet")
    return figure


def _legend(figure: Svg, names: Sequence[str]) -> None:
    x = _LABELS
    for k, name in enumerate(names):
        figure.rect(x, 6, 12, 12, f"b{k}")
        figure.text(x + 17, 17, name)
        x += 30 + 8 * len(name)


def _columns(places: Sequence[T]) -> tuple[dict[T, int], int]:
    # The column of each place, and how many there are.
    column_of = {place: i * min(len(places), _MOST_COLUMNS) // len(places) for i, place in enumerate(places)}
    return column_of, max(column_of.values(), default=0) + 1


def _look(level: int, width: float) -> str:
    # The attributes of a cell: how deep its colour is, and how wide its stroke.
    return f'style="--deep:{100 * level / (_LEVELS - 1):.0f}%;stroke-width:{number(width)}px"'


def _limits(values: Iterable[float]) -> tuple[float, float]:
    # The range of an axis; of one value alone a range around it.
    known = list(values)
    low, high = min(known), max(known)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _powers(low: float, high: float) -> list[float]:
    # Round numbers on a logarithmic axis: powers of ten, or with 2 and 5 where these are few.
    exponents = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1,), (1, 2, 5)):
        known = [m * 10.0**e for e in exponents for m in steps if low <= math.log10(m) + e <= high]
        if len(known) > 2:
            break
    return known[:: max(len(known) // 5, 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low or 1) * (end - start)

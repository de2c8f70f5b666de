"""Plots as SVG by hand: bars and dots in the colour of the text around them, readable at 420 pixels."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _LABELS, _RIGHT = 420, 146, 40
_BAR, _GAP, _HEAD = 15, 9, 30
_OPACITY = (0.85, 0.4, 0.2)
_OWN_COLOURS = (
    "<style>svg{color:#1f2328;background:transparent}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)
"""For a file of its own, which cannot inherit the page's text colour."""

Series = Mapping[str, Sequence[float | None]]


def bars(title: str, rows: Sequence[str], series: Series, *, line: tuple[float, str], own_file: bool = False) -> str:
    """Horizontal bars, grouped by row, one for each series, with a line at a value that all are compared with."""
    greatest = max(v for values in series.values() for v in (*values, line[0]) if v is not None)
    scale = (_WIDTH - _LABELS - _RIGHT) / greatest
    parts, y = _legend(list(series)), _HEAD
    top = y
    for i, row in enumerate(rows):
        values = [(k, vs[i]) for k, vs in enumerate(series.values())]
        shown = [(k, v) for k, v in values if v is not None]
        middle = y + len(shown) * _BAR / 2
        parts.append(_text(_LABELS - 8, middle + 4, row, "end"))
        for k, value in shown:
            width = value * scale
            parts.append(_rect(_LABELS, y, width, _BAR - 2, _OPACITY[k]))
            is_under_the_line = -34 < width - line[0] * scale < 2
            end = line[0] * scale if is_under_the_line else width
            parts.append(_text(_LABELS + end + 5, y + _BAR - 4, f"{value:.2f}", size=12))
            y += _BAR
        y += _GAP
    x = _LABELS + line[0] * scale
    parts.append(_line(x, top - 3, x, y - _GAP + 3))
    parts.append(_text(x, y + 9, line[1], "middle", size=12))
    return _svg(title, y + 16, parts, own_file)


def dots(title: str, rows: Sequence[str], values: Sequence[Sequence[float]], *, band: str) -> str:
    """One dot for each run of each row; the range of the first row is shaded over all of them."""
    least, greatest = min(map(min, values)), max(map(max, values))
    left, right = _LABELS + 8, _WIDTH - 20
    scale = (right - left) / (greatest - least)
    height = 24
    low, high = (left + (f(values[0]) - least) * scale for f in (min, max))
    parts = [_rect(low, 6, high - low, len(rows) * height, 0.12)]
    for i, (row, runs) in enumerate(zip(rows, values, strict=True)):
        y = 6 + i * height + height / 2
        parts.append(_text(_LABELS - 8, y + 4, row, "end"))
        for value in runs:
            x = left + (value - least) * scale
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="currentColor" fill-opacity="0.7"/>')
    bottom = 6 + len(rows) * height
    parts.append(_line(left, bottom + 3, right, bottom + 3))
    parts += [_text(left, bottom + 18, f"{least:.2f}", "middle", size=12)]
    parts += [_text(right, bottom + 18, f"{greatest:.2f}", "middle", size=12)]
    parts += [_text((low + high) / 2, bottom + 18, band, "middle", size=12)]
    return _svg(title, bottom + 26, parts, own_file=False)


def inline(svg: str) -> str:
    """A plot as a block of a markdown page, where it takes the page's own text colour."""
    return f'<figure style="margin:1em 0;max-width:520px">{svg}</figure>'


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = list[str](), _LABELS
    for k, name in enumerate(names):
        parts += [_rect(x, 6, 12, 12, _OPACITY[k]), _text(x + 17, 17, name)]
        x += 30 + 8 * len(name)
    return parts


def _svg(title: str, height: float, parts: Sequence[str], own_file: bool) -> str:
    size = f'viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}"'
    style = _OWN_COLOURS if own_file else ""
    attributes = f'{size} role="img" aria-label="{escape(title)}" style="width:100%;max-width:520px;height:auto"'
    content = f"<title>{escape(title)}</title>{style}{''.join(parts)}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>{content}</svg>'


def _rect(x: float, y: float, width: float, height: float, opacity: float) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} rx="2" fill="currentColor" fill-opacity="{opacity}"/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-dasharray="3 3" stroke-opacity="0.7"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="currentColor" font-family="sans-serif">{escape(words)}</text>'

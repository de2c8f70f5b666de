"""The canvas on which every picture of a report, a notebook and the documentation is drawn: SVG, as text.

A shape has a class of `figure.css`. Words have the colour of the text around the picture; the other colours read on
white and on black, and are told apart by people who do not see red and green apart. Nothing is loaded from elsewhere.
"""

from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from math import ceil, floor, log10

ALONE = "svg:root { color: #1f2328 } @media (prefers-color-scheme: dark) { svg:root { color: #e6edf3 } }"
"""The style of a picture in a file of its own, shown by `img`, which has no text around it."""
_WIDEST = 0.62
"""Mean width of a character of the widest of the fonts, DejaVu Sans, in sizes of the font."""


def number(value: float) -> str:
    """A coordinate, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


@cache
def style() -> str:
    """What the classes look like: once in a page, or in a picture of its own file."""
    return (files("f8emu.report") / "figure.css").read_text(encoding="utf-8").replace("\n", " ") + ALONE


class Svg:
    """A figure of `width` by `height`, in pixels where it is not scaled."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """A filled rectangle."""
        corner = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._shape("rect", f'class="{kind}" {corner}', title)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, more: str = "") -> None:
        """A line; `more` are attributes."""
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self._shape("line", f'class="{kind}" {ends} {more}'.rstrip(), "")

    def path(self, d: str, kind: str, title: str = "", more: str = "") -> None:
        """A path; `more` are attributes."""
        self._shape("path", f'class="{kind}" d="{d}" {more}'.rstrip(), title)

    def text(self, x: float, y: float, words: str, anchor: str = "start", *, kind: str = "", turned: int = 0) -> None:
        """Words on the base line `y`; `turned` by degrees about their place."""
        turn = f' transform="rotate({turned} {number(x)} {number(y)})"' if turned else ""
        look = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text{look} x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{turn}>{escape(words)}</text>'
        )

    def name(
        self, x: float, y: float, name: str, anchor: str = "start", *, room: float, is_small: bool = False
    ) -> None:
        """The end of a name, which tells layers apart, from a dot on; a pointer shows the whole."""
        most = int(room / (_WIDEST * (10 if is_small else 12)))
        end = name[len(name) - most :] if len(name) > most else ""
        words = f"\N{HORIZONTAL ELLIPSIS}{end[end.find('.') + 1 :]}" if end else name
        self.text(x, y, words, anchor, kind="small" if is_small else "")
        if end:
            self._parts[-1] = self._parts[-1].replace("</text>", f"<title>{escape(name)}</title></text>")

    def inset(self, inner: "Svg", x: float, y: float, width: float, height: float) -> None:
        """Another figure, stretched to a rectangle."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        box = f'viewBox="0 0 {number(inner.width)} {number(inner.height)}" preserveAspectRatio="none"'
        self._parts.append(f"<svg {place} {box}>{''.join(inner._parts)}</svg>")

    def html(self, alt: str, *, css: str = "") -> str:
        """The figure, described by `alt`; on a narrow page it scrolls rather than becoming too small to read.

        `css` is a style of its own, `style()`, where the page has none.
        """
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        style = f"max-width:{1.25 * self.width:.0f}px;min-width:{0.78 * self.width:.0f}px"
        inner_style = f"<title>{escape(alt)}</title><style>{css}</style>" if css else ""
        name = 'xmlns="http://www.w3.org/2000/svg" class="plot"' if css else 'class="plot"'
        head = f'<svg {name} role="img" aria-label="{escape(alt)}" {size} style="{style}">'
        return f"{head}{inner_style}{''.join(self._parts)}</svg>"

    def _shape(self, tag: str, attributes: str, title: str) -> None:
        self._parts.append(f"<{tag} {attributes}>" + (f"<title>{escape(title)}</title>" if title else "") + f"</{tag}>")


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    magnitude = 10.0 ** floor(log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999)
    return [i * step for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def runs(row: Iterable[bool]) -> list[tuple[int, int]]:
    """(start, length) of the runs of True."""
    pieces: list[tuple[int, int]] = []
    for i, is_set in enumerate(row):
        if is_set and pieces and sum(pieces[-1]) == i:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + 1)
        elif is_set:
            pieces.append((i, 1))
    return pieces

"""Figures as inline SVG: shapes in the colours of the page, each with a title that a pointer shows.

The colours are told apart by people who do not see red and green apart.
A shape has a class of `page.css`, so that its colour follows the reader's scheme; no script draws anything.
"""

from collections.abc import Iterable
from html import escape
from math import ceil, floor, log10

COLOURS = {
    "figure-ink": ("#1b2129", "#e6e9ee"),
    "figure-quiet": ("#59636f", "#9fa9b6"),
    "figure-line": ("#d9dde3", "#343b46"),
    "figure-paper": ("#ffffff", "#14171c"),
    "equal": ("#eef0f3", "#232832"),  # every bit agrees
    "below": ("#2f6db5", "#7fb2f0"),  # nearer to zero than expected
    "below-faint": ("#bcd3ee", "#2b4468"),
    "above": ("#c4600f", "#f5a25a"),  # farther from zero
    "above-faint": ("#f6d3b0", "#5e3a17"),
    "apart": ("#6a3d9a", "#c4a1f0"),  # NaN, infinity, and what could not be compared
    "middle": ("#8a939f", "#747e8b"),  # neither: a zero of the other sign
}
"""Variable of `page.css` -> the colour, and its counterpart in the dark."""


def variables() -> str:
    """The colours as variables of CSS, by the reader's scheme."""
    light, dark = ("; ".join(f"--{name}: {both[i]}" for name, both in COLOURS.items()) for i in (0, 1))
    return f":root {{ {light}; }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"


def number(value: float) -> str:
    """A coordinate, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


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

    def inset(self, inner: "Svg", x: float, y: float, width: float, height: float) -> None:
        """Another figure, stretched to a rectangle."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        box = f'viewBox="0 0 {number(inner.width)} {number(inner.height)}" preserveAspectRatio="none"'
        self._parts.append(f"<svg {place} {box}>{''.join(inner._parts)}</svg>")

    def html(self, alt: str) -> str:
        """The figure, described by `alt`; on a narrow page it scrolls rather than becoming too small to read."""
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        style = f"max-width:{1.25 * self.width:.0f}px;min-width:{0.78 * self.width:.0f}px"
        inner = "".join(self._parts)
        return f'<svg class="plot" role="img" aria-label="{escape(alt)}" {size} style="{style}">{inner}</svg>'

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
    found: list[tuple[int, int]] = []
    for i, is_set in enumerate(row):
        if is_set and found and sum(found[-1]) == i:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif is_set:
            found.append((i, 1))
    return found

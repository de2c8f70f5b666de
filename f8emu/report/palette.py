"""The colours of figures: told apart by people who do not see red and green apart, and their counterparts in the dark.

`page.css` names them as variables.
"""

INK = "#1b2129"
QUIET = "#59636f"
LINE = "#d9dde3"
PAPER = "#ffffff"
EQUAL = "#eef0f3"
"""The colour of heat-map cells where every bit agrees."""
BELOW = "#2f6db5"
"""Nearer to zero than expected."""
BELOW_FAINT = "#bcd3ee"
ABOVE = "#c4600f"
"""Farther from zero."""
ABOVE_FAINT = "#f6d3b0"
APART = "#6a3d9a"
"""NaN, infinity, and what could not be compared."""
MIDDLE = "#8a939f"
"""Neither: a zero of the other sign."""

DARK = {
    INK: "#e6e9ee",
    QUIET: "#9fa9b6",
    LINE: "#343b46",
    PAPER: "#14171c",
    EQUAL: "#232832",
    BELOW: "#7fb2f0",
    BELOW_FAINT: "#2b4468",
    ABOVE: "#f5a25a",
    ABOVE_FAINT: "#5e3a17",
    APART: "#c4a1f0",
    MIDDLE: "#747e8b",
}
"""Light colour -> dark colour."""


def variables() -> str:
    """The colours as variables of CSS: the light ones, and the dark ones of `data-theme`."""
    named = {
        "figure-ink": INK,
        "figure-quiet": QUIET,
        "figure-line": LINE,
        "figure-paper": PAPER,
        "equal": EQUAL,
        "below": BELOW,
        "below-faint": BELOW_FAINT,
        "above": ABOVE,
        "above-faint": ABOVE_FAINT,
        "apart": APART,
        "middle": MIDDLE,
    }
    light = "; ".join(f"--{name}: {colour}" for name, colour in named.items())
    dark = "; ".join(f"--{name}: {DARK[colour]}" for name, colour in named.items())
    return f':root {{ {light}; }}\n:root[data-theme="dark"] {{ {dark}; }}\n'

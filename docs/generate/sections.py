"""Makes the sections `Shapes:`, `Exactness:` and `Limits:` of docstrings paragraphs with a bold first word.

Google's style knows none of the three. An extension of griffe: mkdocs.yml names it.
"""

import re
from textwrap import dedent
from typing import Any

import griffe

_BLOCK = re.compile(r"^(Shapes|Exactness|Limits):\n((?:[ ]{4}.*\n?|\n(?=[ ]{4}))+)", re.MULTILINE)
_LINE = re.compile(r"^(Shapes|Exactness|Limits): ", re.MULTILINE)


def with_paragraphs(text: str) -> str:
    """The text of a docstring with the sections as paragraphs."""
    text = _BLOCK.sub(lambda found: f"{found[1]}: {dedent(found[2])}", text)
    return _LINE.sub(r"\n**\1:** ", text)


class Sections(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = with_paragraphs(obj.docstring.value)

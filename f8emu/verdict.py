"""What a run says in the end, whatever it was: one exit status and one line."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """The exit status of a command that ran to its verdict."""

    EQUAL = 0
    DIFFERENT = 1
    UNVERIFIED = 2
    """Nothing ran or was compared; a command that fails has this status too."""
    INCOMPLETE = 3
    """No difference, but a part was not compared; of `fit`, confirmed rules do not hold at another size."""
    INTERRUPTED = 130
    """The status that a shell reports after Ctrl-C; also after SIGTERM, which stops a container."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a run."""

    status: Exit
    line: str

    @property
    def is_equal(self) -> bool:
        """Whether everything ran to its end, and nothing differed."""
        return self.status is Exit.EQUAL

    def after(self, *, ctrl_c: bool) -> "Verdict":
        """The verdict on what was finished before Ctrl-C, which has a status of its own, also after a difference."""
        return Verdict(Exit.INTERRUPTED, f"INTERRUPTED, {self.line}") if ctrl_c else self

    def to_json(self, *, command: Sequence[str], seconds: float, schema: int = 1) -> dict[str, Any]:
        """The head of every report as plain data; `schema` is the version of its layout."""
        return {
            "schema": schema,
            "equal": self.is_equal,
            "interrupted": self.status is Exit.INTERRUPTED,
            "command": list(command),
            "seconds": round(seconds, 3),
        }

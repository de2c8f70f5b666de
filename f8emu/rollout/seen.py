"""What captures have shown so far, as the parts of a certificate."""

from dataclasses import dataclass, field
from typing import Any

from f8emu.rollout.batch import Measured
from f8emu.rollout.certificate import Difference, Unseen


@dataclass(slots=True, kw_only=True)
class Seen:
    """What captures show, as the parts of a certificate."""

    captures: dict[str, Any] = field(default_factory=dict[str, Any])
    decode: dict[str, Any] = field(default_factory=dict[str, Any])
    measured: dict[str, Measured] = field(default_factory=dict[str, Measured])
    differences: list[Difference] = field(default_factory=list[Difference])
    not_seen: list[Unseen] = field(default_factory=list[Unseen])

    def lacks(self, part: str, what: str, *, was_asked: bool = True) -> None:
        """Note what was not seen."""
        self.not_seen.append(Unseen(part=part, what=what, was_asked=was_asked))

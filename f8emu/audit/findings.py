"""Kinds of faults, findings, and the result of an audit."""

import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.resources import files
from typing import Any, ClassVar

from f8emu.conformance.compare import counted
from f8emu.shown import Shown
from f8emu.verdict import Exit, Verdict


class Severity(StrEnum):
    """How bad a finding is. A note is no fault."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of fault: a row of faults.toml."""

    severity: Severity
    title: str
    effect: str
    """What it does to the served model."""
    remedy: str
    thread: str
    """Where it was met in public; empty: nowhere."""


_TABLE = tomllib.loads((files("f8emu.audit") / "faults.toml").read_text(encoding="utf-8"))
CHECKS = {key: Check(Severity(severity), *texts) for key, (severity, *texts) in _TABLE.items()}
"""Key -> what is checked. Findings cite the key."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding(Shown, Check):
    """One fault of one tensor: its check, which may be worse or better here, and its place."""

    check: str
    """The key in CHECKS."""
    tensor: str
    block: tuple[int, ...] | None = None
    """The first block it is in, as an index of the grid of scales; None: the whole tensor."""
    blocks: int = 0
    """The number of blocks it is in."""
    expected: str
    found: str

    @property
    def place(self) -> str:
        """The tensor, and the block in it."""
        if self.block is None:
            return self.tensor
        more = f" and {self.blocks - 1} more" if self.blocks > 1 else ""
        return f"{self.tensor} block {list(self.block)}{more}"

    @property
    def is_fault(self) -> bool:
        """Errors and warnings decide the exit status; notes do not."""
        return self.severity is not Severity.NOTE


def finding(check: str, tensor: str, expected: str, found: str, **changed: Any) -> Finding:
    """A finding with what its check says, or with other fields."""
    texts: dict[str, Any] = asdict(CHECKS[check])
    return Finding(**{**texts, "check": check, "tensor": tensor, "expected": expected, "found": found, **changed})


@dataclass(slots=True, kw_only=True, repr=False)
class Audit(Shown):
    """The result of an audit, which may have been interrupted."""

    _page: ClassVar[str] = "f8emu.audit.page:audit_page"
    _rest: ClassVar[str] = "more lines; `findings` has all"
    path: str
    format: str
    consumer: str = ""
    source: str = ""
    tensors: int = 0
    """Float8 weights that were examined."""
    tensors_total: int = 0
    unscaled: list[str] = field(default_factory=list)
    """Float8 weights without a scale that can be read, whose codes alone were examined."""
    blocks: int = 0
    elements: int = 0
    scales: str = ""
    """The kinds of scales."""
    zero_blocks: dict[str, int] = field(default_factory=dict)
    """What the scales of zero blocks are, and which dialects give that -> the number of blocks."""
    dialects: dict[str, int] = field(default_factory=dict)
    """With a source: dialect -> the tensors of which it gives every byte of codes and scales."""
    compared: int = 0
    """With a source: the tensors that were compared with it."""
    uncompared: dict[str, str] = field(default_factory=dict)
    """With a source: the float8 weights that were not compared with it -> why."""
    unquantized_compared: int = 0
    """With a source: the weights in high precision that were compared with it."""
    findings: list[Finding] = field(default_factory=list)
    """The worst first."""
    is_interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        """Equal: every float8 weight was examined, and compared if there is a source, and nothing is a fault."""
        counts = Counter(finding.severity for finding in self.findings)
        tally = ", ".join(counted(counts[severity], severity) for severity in Severity if counts[severity])
        of = f"{self.tensors - len(self.unscaled):,} of {counted(self.tensors_total, 'float8 weight')}"
        plain = f"; {counted(self.unquantized_compared, 'unquantized weight')} compared" if self.source else ""
        if any(finding.is_fault for finding in self.findings):
            first = f"{self.findings[0].place}: {self.findings[0].check}"
            faulty = Verdict(Exit.DIFFERENT, f"FAULTY: {tally}; the first: {first}; {of}{plain}")
            return faulty.after(ctrl_c=self.is_interrupted)
        if self.is_interrupted:
            return Verdict(Exit.INTERRUPTED, f"INTERRUPTED: no fault so far in {of}")
        if self.unscaled:
            lacking = f"no scale of {self.unscaled[0]} can be read"
            return Verdict(Exit.INCOMPLETE, f"INCOMPLETE: no fault in {of}, but {lacking}")
        if self.uncompared:
            lacking = f"{len(self.uncompared)} of {of} not compared with the source"
            return Verdict(Exit.INCOMPLETE, f"INCOMPLETE: no fault, but {lacking}{plain}")
        if not self.tensors_total:
            return Verdict(Exit.UNVERIFIED, "NOT VERIFIED: the checkpoint has no float8 weight")
        alone = "" if self.source else "; values not compared with a source (--source)"
        return Verdict(Exit.EQUAL, f"no fault in {of}{plain}" + (f"; {tally}" if tally else "") + alone)

    @property
    def is_equal(self) -> bool:
        """Whether nothing is wrong, and nothing was left out."""
        return self.verdict.is_equal

    @property
    def dialect(self) -> str:
        """The dialects that give every byte of every compared tensor, or empty."""
        return ", ".join(name for name, of in self.dialects.items() if of == self.compared)

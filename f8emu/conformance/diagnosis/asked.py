"""Probes put to a subject, and what it answered."""

from dataclasses import dataclass

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.compare import different, shape_fault
from f8emu.conformance.diagnosis.altered import compute
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.probe import Kind
from f8emu.conformance.diagnosis.probes import probes
from f8emu.conformance.diagnosis.reading import Part
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.kernels.faults import ProcessEnded, TimedOut
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.conformance.words import said_by
from f8emu.spec import MissingExtraError, OperandError

_LOST = 3
"""After so many crashes or hangs in a row the other probes of a kind are not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """A probe and the outputs that the subject gave."""

    case: GemmCase
    """The case as the subject ran it."""
    at: Part | None
    """The outputs that are looked at; None: all."""
    observed: np.ndarray

    @property
    def size(self) -> int:
        return self.observed.size

    def outputs_equal(self, rules: Rules, memory: Memory | None = None) -> int:
        """How many outputs are those of the rules, bit for bit."""
        memory = memory or Memory()
        given = compute(self.case, rules, at=self.at, memory=memory)
        return memory.get((self.observed, given), "equal", lambda: self.size - int(np.sum(self._differing(given))))

    def differing(self, rules: Rules, memory: Memory | None = None) -> np.ndarray:
        """Which outputs are not those of the rules."""
        return self._differing(compute(self.case, rules, at=self.at, memory=memory))

    def _differing(self, given: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # a kernel may give a signalling NaN
            return different(self.observed, given)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """A GEMM without an output."""

    reason: str
    is_refusal: bool
    """True: the subject offers no such GEMM. False: it failed."""
    is_lost: bool = False
    """It failed by a crash or a hang: the process of an isolated kernel is started anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a subject gave to the probes of a kind."""

    asked: tuple[Asked, ...]
    failed: tuple[NoAnswer, ...] = ()
    """The probes that it failed on: nothing is known of these."""

    @property
    def left_out(self) -> str:
        """How many probes failed, and how the first did; nothing if none did."""
        if not self.failed:
            return ""
        count = len(self.failed)
        return f"{count} of {count + len(self.asked)} probes failed, first: {self.failed[0].reason}"


def ask_one(subject: Subject, case: GemmCase, at: Part | None = None) -> Asked | NoAnswer:
    """One GEMM run by a subject, in the form that it accepts: its answer, or why there is none."""
    try:
        asked = subject.question(case)
        if (asked.use_fast_accum, asked.bias is None) != (case.use_fast_accum, case.bias is None):
            kept = "bias" if asked.use_fast_accum == case.use_fast_accum else "accumulation"
            return NoAnswer(reason=f"{subject.name} takes no such {kept}", is_refusal=True)
        output = subject.gemm(asked)
    except (NotOffered, MissingExtraError) as reason:
        return NoAnswer(reason=str(reason), is_refusal=True)
    except (Exception, SystemExit) as error:  # a subject may raise anything, and exit
        if isinstance(error, OperandError) and not subject.takes_any_size:  # ours, which says what it takes
            return NoAnswer(reason=str(error), is_refusal=True)
        reason = f"{case.id}: raised {said_by(error, 200)}"
        return NoAnswer(reason=reason, is_refusal=False, is_lost=isinstance(error, (ProcessEnded, TimedOut)))
    fault = shape_fault(output, np.empty(asked.output_shape, dtype_of(asked.out_dtype)))
    if fault:
        return NoAnswer(reason=f"{asked.id}: {fault}", is_refusal=False)
    return Asked(case=asked, at=at, observed=output if at is None else output[np.ix_(*at)])


def ask(subject: Subject, kind: Kind) -> Answers | NoAnswer:
    """What a subject gives to the probes of a kind that it offers; if it gives or offers nothing, why.

    A probe on which it fails is left out, and so is one that has no point in the types of its output.
    """
    found: list[Asked] = []
    failures: list[NoAnswer] = []
    refused: NoAnswer | None = None
    lost_in_a_row = 0
    for probe in probes(kind, takes_any_size=subject.takes_any_size):
        for case in probe.cases():
            if subject.question(case).out_dtype != case.out_dtype:
                continue
            one = ask_one(subject, case, probe.at)
            if isinstance(one, Asked):
                lost_in_a_row = 0
                found.append(one)
                if not probe.needs_all:
                    break
                continue
            lost_in_a_row = lost_in_a_row + 1 if one.is_lost else 0
            if lost_in_a_row == _LOST:
                return one
            if one.is_refusal:
                refused = refused or one
            else:
                failures.append(one)
    if found:
        return Answers(asked=tuple(found), failed=tuple(failures))
    if failures:
        return failures[0]
    return refused or NoAnswer(reason=f"{subject.name} has none of the output types", is_refusal=True)

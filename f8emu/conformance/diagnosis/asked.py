"""Probes put to a subject, and what it answered."""

from dataclasses import dataclass

import numpy as np

from f8emu.conformance.compare import different, shape_fault
from f8emu.conformance.diagnosis.altered import Memory, Part, compute
from f8emu.conformance.diagnosis.probe import Kind
from f8emu.conformance.diagnosis.probes import probes
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.distributions import dtype_of
from f8emu.conformance.gemm import GemmCase
from f8emu.conformance.subject import NotOffered, Subject
from f8emu.spec import MissingExtraError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """A probe and the outputs that the subject gave."""

    case: GemmCase
    at: Part | None
    """The outputs that are looked at; None: all."""
    observed: np.ndarray

    @property
    def size(self) -> int:
        return self.observed.size

    def outputs_equal(self, rules: Rules, memory: Memory | None = None) -> int:
        """How many outputs are those of the rules, bit for bit."""
        given = compute(self.case, rules, at=self.at, memory=memory)
        with np.errstate(invalid="ignore"):  # a kernel may give a signalling NaN
            return self.size - int(np.count_nonzero(different(self.observed, given)))


def ask_one(subject: Subject, case: GemmCase, at: Part | None = None) -> Asked | str | None:
    """One GEMM put to a subject: its answer, what it raised as a text, or None if it offers no such GEMM."""
    try:
        output = subject.gemm(case)
    except (NotOffered, MissingExtraError):
        return None
    except Exception as error:  # a subject may raise anything
        return f"{case.id}: raised {type(error).__name__}: {str(error).strip()[:200]}"
    fault = shape_fault(output, np.empty(case.output_shape, dtype_of(case.out_dtype)))
    if fault:
        return f"{case.id}: {fault}"
    return Asked(case=case, at=at, observed=output if at is None else output[np.ix_(*at)])


def ask(subject: Subject, kind: Kind) -> list[Asked] | str:
    """The probes of a kind that the subject offers; empty if none, a text if it failed."""
    found: list[Asked] = []
    for probe in probes(kind, takes_any_size=subject.takes_any_size):
        for case in probe.cases():
            one = ask_one(subject, case, probe.at)
            if isinstance(one, str):
                return one
            if one is not None:
                found.append(one)
                if not probe.needs_all:
                    break
    return found

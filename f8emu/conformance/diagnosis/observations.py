"""GEMMs put to a subject, the outputs that it gives, and what those have in common that rules do not give."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.tables import ALIGNED
from f8emu.conformance.compare import different, said_by, shape_fault
from f8emu.conformance.diagnosis.arguments import Part
from f8emu.conformance.diagnosis.compute import Memory, compute
from f8emu.conformance.diagnosis.places import Places
from f8emu.conformance.diagnosis.probes import GemmKind, probes
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.run.breakdown import Contrast, contrasts
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import MissingExtraError, OperandError
from f8emu.spec.gemm_call import GroupKind

_AGAIN = 4
"""How often a GEMM is asked again, to see whether its bits are random."""
_COVERAGE = 0.99
"""The share of the differing outputs that must have a trait, for the trait to describe them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """A GEMM and the outputs that a subject gave."""

    case: GemmCase  # as the subject ran it
    at: Part | None  # the rows and columns that are compared; None: all
    outputs: np.ndarray

    @property
    def size(self) -> int:
        return self.outputs.size

    def part(self, at: Part) -> "Observation":
        return Observation(case=self.case, at=at, outputs=self.outputs[np.ix_(*at)])

    def outputs_equal(self, rules: Rules, memory: Memory) -> int:
        """How many outputs are those of the rules, bit for bit."""
        return self.size - int(self.differing(rules, memory).sum())

    def differing(self, rules: Rules, memory: Memory) -> np.ndarray:
        """Which outputs are not those of the rules."""
        expected = [compute(self.case, row_rules, at=self.at, memory=memory) for row_rules in rules.of_rows()]

        def compared() -> np.ndarray:
            wrong = np.stack([different(self.outputs, output) for output in expected])
            nearest = wrong.sum(axis=2).argmin(axis=0)  # of each row
            return wrong[nearest, np.arange(len(nearest))]

        return memory.get((self.outputs, *expected), "wrong", compared)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOutput:
    """A GEMM without an output."""

    reason: str
    is_refusal: bool = False  # True: the subject offers no such GEMM. False: it failed


def observe(subject: Subject, case: GemmCase, at: Part | None = None) -> Observation | NoOutput:
    """One GEMM run by a subject, in the form that it accepts: its outputs, or why there are none."""
    try:
        run = subject.question(case)
        # A kernel with one accumulation, or without a bias, would be asked something else.
        if (run.use_fast_accum, run.bias is None) != (case.use_fast_accum, case.bias is None):
            kept = "bias" if run.use_fast_accum == case.use_fast_accum else "accumulation"
            return NoOutput(reason=f"{subject.name} takes no such {kept}", is_refusal=True)
        output = subject.gemm(run)
    except (NotOffered, MissingExtraError) as reason:
        return NoOutput(reason=str(reason), is_refusal=True)
    except Exception as error:  # a subject may raise anything
        if isinstance(error, OperandError) and not subject.takes_any_size:  # ours, which says what it takes
            return NoOutput(reason=str(error), is_refusal=True)
        return NoOutput(reason=f"{case.id}: raised {said_by(error, 200)}")
    if fault := shape_fault(output, np.empty(run.output_shape, dtype_of(run.out_dtype))):
        return NoOutput(reason=f"{run.id}: {fault}")
    whole = Observation(case=run, at=None, outputs=output)
    return whole if at is None else whole.part(at)


def is_random(subject: Subject, observation: Observation) -> bool:
    """Whether the same GEMM, asked again a few times, has other bits."""
    first = observation.outputs.copy()
    again = (observe(subject, observation.case, observation.at) for _ in range(_AGAIN))
    return any(isinstance(more, Observation) and different(first, more.outputs).any() for more in again)


def observe_probes(subject: Subject, kind: GemmKind) -> tuple[list[Observation], str] | NoOutput:
    """The outputs of a subject for the probes of a kind; why there are none, if it gives or offers nothing.

    A probe on which it fails is left out: the text says how many were, and how the first failed. So is one that has no
    point in the types of its output.
    """
    observed: list[Observation] = []
    failures: list[NoOutput] = []
    refusals: list[NoOutput] = []
    multiple = subject.kernel.group_multiples.get(GroupKind.ROWS, 1) if subject.kernel else 1
    multiple = multiple if subject.takes_any_size else max(multiple, ALIGNED)
    for probe in probes(kind, takes_any_size=subject.takes_any_size, group_multiple=multiple):
        # A probe counts in the first output type that gives one, or in all where every type shows something else.
        for case in probe.cases():
            if subject.question(case).out_dtype != case.out_dtype:
                continue
            answer = observe(subject, case, probe.at)
            if isinstance(answer, NoOutput):
                (refusals if answer.is_refusal else failures).append(answer)
                continue
            observed.append(answer)
            if not probe.needs_all:
                break
    if not observed:
        none = NoOutput(reason=f"{subject.name} has none of the output types", is_refusal=True)
        return [*failures, *refusals, none][0]
    of = f"{len(failures)} of {len(failures) + len(observed)} probes failed, first: "
    return observed, of + failures[0].reason if failures else ""


def first_wrong(observed: Sequence[Observation], rules: Rules, memory: Memory) -> dict[Places, int]:
    """Rows and columns from which on most outputs differ while none before do, in probes that show all of them."""
    starts: dict[Places, int] = {}
    for observation in observed:
        for axis, places in ((0, Places.ROWS), (1, Places.COLUMNS)):
            size = observation.case.output_shape[axis]
            if observation.at is not None and len(observation.at[axis]) == size > len(observation.at[1 - axis]):
                share = observation.differing(rules, memory).mean(axis=1 - axis)
                start = int(np.argmax(share > 0))
                if 0 < start < size - 1 and share[start:].mean() > 0.5:
                    starts[places] = start
    return starts


def common_trait(observed: Sequence[Observation], rules: Rules, memory: Memory, high: float = 0.0) -> Contrast | None:
    """The sharpest trait that nearly all outputs have which the rules do not give, if a share of `high` with it differ;
    None where no trait parts them.
    """
    counts: dict[str, dict[str, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2, int)))
    for observation in observed:
        wrong, case = observation.differing(rules, memory), observation.case
        m, n = case.output_shape
        traits = {"K": case.k, "M": m, "N": n, "operands": f"{case.a.dtype} x {case.b.dtype}"}
        traits |= {"output": case.out_dtype.name, "probe": case.id.split(" -> ")[0]}
        for trait, value in traits.items():
            counts[trait][str(value)] += wrong.sum(), wrong.size
        for axis, name in ((0, "row"), (1, "column")):
            places = range(wrong.shape[axis]) if observation.at is None else observation.at[axis].tolist()
            for place, differ in zip(places, wrong.sum(axis=1 - axis), strict=True):
                counts[name][str(place)] += differ, wrong.shape[1 - axis]
    tallies = {name: {value: (int(d), int(n)) for value, (d, n) in values.items()} for name, values in counts.items()}
    # A size tells more than the name of a probe; and a trait of few probes may be the name of one of them.
    names = {"probe": tallies.pop("probe", {})}
    sharpest = contrasts(tallies, high=high, coverage=_COVERAGE) or contrasts(names, high=high, coverage=_COVERAGE)
    return sharpest[0] if sharpest else None

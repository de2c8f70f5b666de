"""The unknown rules of a kernel: measured one at a time, then confirmed by bits.

1. The order of adding is read off crafted operands (`addition_order`), and so are the fraction bits of a term.
2. What is left - the bits of a sum, scales, bias, output, subnormals - has few possibilities: each is chosen by the
   probes that show it.
3. The whole is put to random GEMMs that took no part in this, and every output is compared.
4. The same GEMM with more and more rows: do bits of a row depend on how many rows there are (batch invariance)? Do the
   rules hold there, with more columns, and with a longer K?
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

from f8emu.conformance.diagnosis.addition_order import Measured, measure_order
from f8emu.conformance.diagnosis.alterations import ALTERATIONS, SUM_BITS, Change, changing
from f8emu.conformance.diagnosis.checks import OTHER_BITS, AtSize, RandomGemms, at_sizes, on_random_gemms, sizes_count
from f8emu.conformance.diagnosis.compute import Memory
from f8emu.conformance.diagnosis.observations import NoOutput, Observation, observe_probes
from f8emu.conformance.diagnosis.probes import KINDS, GemmKind
from f8emu.conformance.diagnosis.rules import Adder, Rounding, Rules, rules_of
from f8emu.conformance.run.result import Progress, Silent
from f8emu.conformance.run.subject import Subject
from f8emu.shown import Shown
from f8emu.spec import HOPPER


@dataclass(slots=True, kw_only=True, repr=False)
class Fitted(Shown):
    """One kind of GEMM of a kernel; grows while `fit` runs."""

    kind: str
    rules: Rules | None = None  # None: it failed before they were known
    measured: list[Measured] = field(default_factory=list)
    follows: str = ""  # the chip whose rules these are
    random: RandomGemms | None = None  # None: not run yet
    sizes: list[AtSize] = field(default_factory=list)
    left_out: str = ""  # how many probes the kernel failed on, and how on the first: the rest was measured
    error: str = ""

    @property
    def holds_on_random(self) -> bool:
        """Every bit of the random GEMMs, of which there were some."""
        random = self.random
        return not self.error and random is not None and 0 < random.outputs_total == random.outputs_equal

    @property
    def is_random(self) -> bool:
        """The same GEMM, asked again, had other bits: nothing else is told by them."""
        is_unsteady = self.random is not None and self.random.unsteady.endswith(OTHER_BITS)
        return is_unsteady or any(run.is_random for run in self.sizes)

    @property
    def missed(self) -> list[AtSize]:
        """The sizes at which rules do not hold that random GEMMs confirm."""
        return [run for run in self.sizes if run.misses and self.holds_on_random]

    @property
    def is_confirmed(self) -> bool:
        """Whether every check holds: random GEMMs, one of them twice, and every size that is offered."""
        is_steady = self.random is not None and not self.random.unsteady and not self.is_random
        return self.holds_on_random and is_steady and not any(run.misses or run.has_failed for run in self.sizes)

    def ran(self, dimension: str) -> list[int]:
        return [run.size for run in self.sizes if run.dimension == dimension and not run.reason]

    @property
    def is_batch_invariant(self) -> bool | None:
        """Bits of a row are the same for every M that was tried, and none failed; None if fewer than two ran, or if
        bits are random.
        """
        rows = [run for run in self.sizes if run.dimension == "M"]
        if any(row.has_failed for row in rows):
            return False
        return None if len(self.ran("M")) < 2 or self.is_random else all(row.is_same for row in rows)


@dataclass(slots=True, kw_only=True, repr=False)
class Fit(Shown):
    """The kinds of GEMM of a kernel; grows while `fit` runs."""

    _page: ClassVar[str] = "f8emu.report.diagnosis:fit_page"
    subject: str
    engine: str
    kinds: list[Fitted] = field(default_factory=list)
    is_interrupted: bool = False
    reason: str = ""  # why the first kind of GEMM that is not offered is not

    @property
    def is_confirmed(self) -> bool:
        """Something was fitted, and all of it was confirmed."""
        return bool(self.kinds) and not self.is_interrupted and all(kind.is_confirmed for kind in self.kinds)

    @property
    def misses(self) -> bool:
        """Rules that random GEMMs confirm do not hold at another size."""
        return any(kind.missed for kind in self.kinds)


def fit(
    subject: Subject,
    *,
    kinds: Iterable[GemmKind] = KINDS,
    ms: Sequence[int] = (),
    progress: Progress | None = None,
) -> Fit:
    """The rules of every kind of GEMM that the subject offers. KeyboardInterrupt ends it, with what was found.

    `ms`: the numbers of rows of step 4.
    """
    result = Fit(subject=subject.name, engine=subject.engine)
    progress = progress or Silent()
    if subject.kernel is not None and subject.kernel.is_microscaled:
        result.reason = "no probes measure the rules of E8M0 scales; f8emu verify says which of them is broken"
        return result
    try:
        for kind in kinds:
            progress.begin(f"{subject.name}: {kind.name}", "probes", 1)
            answer = observe_probes(subject, kind)
            if isinstance(answer, NoOutput) and answer.is_refusal:
                result.reason = result.reason or answer.reason
                continue
            # The result has the kind as soon as anything is known of it: the next step may be interrupted.
            fitted = Fitted(kind=kind.name)
            result.kinds.append(fitted)
            if isinstance(answer, NoOutput):
                fitted.error = answer.reason
                continue
            observed, fitted.left_out = answer
            _fit_kind(fitted, subject, kind, observed, ms, progress)
    except KeyboardInterrupt:
        result.is_interrupted = True
    return result


def _fit_kind(
    fitted: Fitted,
    subject: Subject,
    kind: GemmKind,
    observed: Sequence[Observation],
    ms: Sequence[int],
    progress: Progress,
) -> None:
    name = f"{subject.name}: {kind.name}"
    right = rules_of(HOPPER, observed[0].case)
    # 1. The order of adding.
    progress.begin(name, "order of adding", 1)
    try:
        fitted.rules, fitted.measured = measure_order(subject, kind, right)
    except Exception as error:  # a subject may raise anything
        fitted.error = f"order of adding: raised {type(error).__name__}: {str(error)[:200]}"
        return
    # 2. What has few possibilities.
    fitted.rules, of_probes = _of_probes(fitted.rules, right, observed, progress, name)
    fitted.follows = HOPPER.name if fitted.rules == right else ""
    fitted.measured += of_probes
    # 3. Random GEMMs.
    progress.begin(name, "random GEMMs", 1)
    fitted.random = on_random_gemms(subject, kind, fitted.rules)
    fitted.error = fitted.random.failure
    # 4. Other sizes.
    if not fitted.error:
        progress.begin(name, "sizes", sizes_count(ms))
        for outcome in at_sizes(subject, kind, fitted.rules, ms):
            progress.advance()
            fitted.sizes.append(outcome)


_PARAMETERS = (
    # These probes add exactly under any rule: an unknown way to add does not hide them.
    ("output", "ties of the output, scales ->", "output cut, output ties, output through"),
    ("scales", "scales ->, scales beside, scales that", "scales, block scales, first block"),
    # Parameters that the order of adding does not tell.
    ("sum of a step", "one step, one chain, middle", ""),
    ("promotion of steps", "one chain, middle", ""),
    ("operands", "every code, middle, mixed, tail of K, one chain", "operands, subnormal operands, output tr, formats"),
    ("bias", "bias", "bias"),
    ("sign of a zero", "zeros", "-0"),
    ("subnormal results", "subnormal results", "subnormal results"),
    ("overflow", "overflow", "output saturates"),
)
"""Parameters, how the probes begin that tell them, and how the alterations begin that are their values."""


def _options(parameter: str, beginnings: str, rules: Rules, right: Rules) -> dict[str, Change]:
    """The values of a parameter, the hardware's first, and what each does to the rules."""
    is_tensor_core, step = rules.adder is Adder.TENSOR_CORE, rules.model.step_k
    if parameter == "promotion of steps":  # a promotion of each step looks like none to the order of adding
        each_step = {"as measured": changing(), f"every step, {step} of K": changing(promote_k=step)}
        return each_step if is_tensor_core and rules.model.promote_k is None else {}
    if parameter == "sum of a step":
        aligned = min(rules.model.aligned_fraction_bits, SUM_BITS[0])
        widths = dict.fromkeys((right.model.result_fraction_bits, aligned, *SUM_BITS)) if is_tensor_core else ()
        cut, nearest = Rounding.CUT, Rounding.NEAREST
        roundings = (cut, cut), (nearest, nearest), (cut, nearest), (nearest, cut)
        return {
            f"{bits} fraction bits, terms {terms.value}, sums {sums.value}": changing(
                result_fraction_bits=bits, terms=terms, sums=sums
            )
            for (terms, sums), bits in product(roundings, widths)
        }
    starts = tuple(beginnings.split(", "))
    return {"as the hardware": changing()} | {x.name: x.change for x in ALTERATIONS if x.name.startswith(starts)}


def _of_probes(
    rules: Rules, right: Rules, observed: Sequence[Observation], progress: Progress, name: str
) -> tuple[Rules, list[Measured]]:
    """Each parameter by the option that gives the most outputs of its probes; again, while one uncovers another."""
    memory = Memory()
    values: dict[str, str] = {}
    measured: dict[str, Measured] = {}
    for sweep in ("first sweep", "second sweep", "third sweep"):
        progress.begin(name, f"parameters, {sweep}", len(_PARAMETERS))
        before = rules
        for parameter, probes, beginnings in _PARAMETERS:
            progress.advance()
            starts = tuple(probes.split(", "))
            telling = [x for x in observed if x.case.id.startswith(starts)]
            after = {text: change(rules) for text, change in _options(parameter, beginnings, rules, right).items()}
            if not telling or not after:
                continue
            equal = {text: sum(x.outputs_equal(after[text], memory) for x in telling) for text in after}
            text = max(equal, key=lambda text: equal[text])  # of equals the first: what the hardware does
            evidence = f"{equal[text]} of {sum(x.size for x in telling)} outputs of {len(telling)} probes"
            if after[text] != rules or parameter not in values:
                values[parameter] = text
            is_decided = 10 * equal[text] >= 9 * sum(x.size for x in telling)  # nearly explained
            value = values[parameter] if is_decided else f"undecided; best: {values[parameter]}"
            measured[parameter] = Measured(parameter, value, evidence)
            rules = after[text]
        if rules == before:
            break
    return rules, list(measured.values())

"""The unknown rules of a kernel: measured one at a time, then confirmed by bits.

1. The order of adding is read off crafted operands (`addition_order`), and so are the fraction bits of a term.
2. What is left - the bits of a sum, scales, bias, output, subnormals - has few possibilities: each is chosen by the
   probes that show it.
3. The whole is put to random GEMMs that took no part in this, and every output is compared.
4. The same GEMM with more and more rows: do bits of a row depend on how many rows there are (batch invariance)? Do the
   rules hold there, with more columns, and with a longer K?
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from f8emu.conformance.diagnosis.addition_order import Order, aligned_fraction_bits, measure_order
from f8emu.conformance.diagnosis.alterations import ALTERATIONS, SUM_BITS
from f8emu.conformance.diagnosis.checks import AtSize, RandomGemms, at_sizes, on_random_gemms, sizes_count
from f8emu.conformance.diagnosis.compute import Memory
from f8emu.conformance.diagnosis.observations import Observation, ProbeOutputs, observe_probes
from f8emu.conformance.diagnosis.probes import KINDS, Kind
from f8emu.conformance.diagnosis.rules import Adder, Rounding, Rules, rules_of
from f8emu.conformance.run.result import Progress, Silent
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import HOPPER

Option = tuple[str, Callable[[Rules], Rules]]


class Measured(NamedTuple):
    """One parameter of a kernel."""

    name: str
    value: str
    evidence: str
    """How it was measured."""


@dataclass(slots=True, kw_only=True)
class Fitted:
    """One kind of GEMM of a kernel; grows while `fit` runs."""

    kind: str
    rules: Rules | None = None
    """None: it failed before they were known."""
    measured: list[Measured] = field(default_factory=list)
    follows: str = ""
    """The chip whose rules these are."""
    random: RandomGemms | None = None
    """None: not run yet."""
    sizes: list[AtSize] = field(default_factory=list)
    left_out: str = ""
    """How many probes the kernel failed on, and how on the first: the rest was measured."""
    error: str = ""

    @property
    def holds_on_random(self) -> bool:
        """Every bit of the random GEMMs, of which there were some."""
        found = self.random
        return not self.error and found is not None and 0 < found.outputs_total == found.outputs_equal

    @property
    def missed(self) -> list[AtSize]:
        """The sizes at which rules do not hold that random GEMMs confirm."""
        return [one for one in self.sizes if one.misses and self.holds_on_random]

    @property
    def is_confirmed(self) -> bool:
        """Whether every check holds: random GEMMs, one of them twice, and every size that is offered."""
        is_steady = self.random is not None and not self.random.unsteady
        return self.holds_on_random and is_steady and not any(one.misses or one.has_failed for one in self.sizes)

    @property
    def is_batch_invariant(self) -> bool | None:
        """Bits of a row are the same for every M that was tried, and none failed; None if fewer than two ran."""
        rows = [one for one in self.sizes if one.dimension == "M"]
        if any(one.has_failed for one in rows):
            return False
        ran = [one for one in rows if not one.reason]
        return None if len(ran) < 2 else all(one.is_same for one in ran)


@dataclass(slots=True, kw_only=True)
class Fit:
    """What is known of a kernel; grows as its kinds do."""

    subject: str
    engine: str
    kinds: list[Fitted] = field(default_factory=list)
    is_interrupted: bool = False
    reason: str = ""
    """Why the first kind of GEMM that is not offered is not."""

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
    kinds: Iterable[Kind] = KINDS,
    ms: Sequence[int] = (),
    progress: Progress | None = None,
) -> Fit:
    """The rules of every kind of GEMM that the subject offers. KeyboardInterrupt ends it, with what was found.

    `ms`: the numbers of rows of step 4.
    """
    result = Fit(subject=subject.name, engine=subject.engine)
    progress = progress or Silent()
    try:
        for kind in kinds:
            progress.begin(f"{subject.name}: {kind.name}", "probes", 1)
            given = observe_probes(subject, kind)
            if isinstance(given, ProbeOutputs):
                found = Fitted(kind=kind.name, left_out=given.left_out)
                _fit_kind(result, found, subject, kind, given.observations, ms, progress)
            elif given.is_refusal:
                result.reason = result.reason or given.reason
            else:
                result.kinds.append(Fitted(kind=kind.name, error=given.reason))
    except KeyboardInterrupt:
        result.is_interrupted = True
    return result


def _fit_kind(
    result: Fit,
    found: Fitted,
    subject: Subject,
    kind: Kind,
    given: Sequence[Observation],
    ms: Sequence[int],
    progress: Progress,
) -> None:
    """Add what is known of a kind to the result as soon as it is known: the next step may be interrupted."""
    name = f"{subject.name}: {kind.name}"
    right = rules_of(HOPPER, given[0].case)
    # 1. The order of adding.
    progress.begin(name, "order of adding", 1)
    order, bits = None, None
    try:
        order = measure_order(subject, kind)
        bits = aligned_fraction_bits(subject, kind)
    except NotOffered:
        pass
    except (Exception, SystemExit) as error:  # a subject may raise anything, and exit
        found.error = f"order of adding: raised {type(error).__name__}: {str(error)[:200]}"
        result.kinds.append(found)
        return
    rules, found.measured = _of_order(right, order, bits)
    found.rules = rules
    result.kinds.append(found)
    # 2. What has few possibilities.
    rules, of_probes = _of_probes(rules, right, given, kind, progress, name)
    found.rules, found.follows = rules, HOPPER.name if rules == right else ""
    found.measured += of_probes
    # 3. Random GEMMs.
    progress.begin(name, "random GEMMs", 1)
    found.random = on_random_gemms(subject, kind, rules)
    found.error = found.random.failure
    # 4. Other sizes.
    if not found.error:
        progress.begin(name, "sizes", sizes_count(ms))
        for one in at_sizes(subject, kind, rules, ms):
            progress.advance()
            found.sizes.append(one)


def _of_order(right: Rules, order: Order | None, bits: int | None) -> tuple[Rules, list[Measured]]:
    """The rules of adding as far as crafted operands tell them."""
    if order is None:
        return right, [Measured("order of adding", "not told", "no such GEMM is offered")]
    evidence = "M and -M at two places of K, equal tiny products at all others, counted"
    found = {"order of adding": order.sentence}
    if not right.scales.is_fused:
        promotion = order.promote_k
        found["promotion to float32"] = f"every {promotion} of K" if promotion else "one chain over all of K"
        found["split of K"] = f"slices of {order.split_length} at K = 1024" if order.split_k > 1 else "none"
    measured = [Measured(name, value, evidence) for name, value in found.items()]
    model = replace(right.model, promote_k=order.promote_k)
    rules = replace(right, split_k=order.split_k)
    if order.adder in (Adder.FLOAT32, Adder.EXACT):
        rules = replace(rules, adder=order.adder, lanes=order.lanes)
    elif order.step_k is not None:
        model = replace(model, step_k=order.step_k)
        if bits is not None:
            model = replace(model, aligned_fraction_bits=bits)
            measured.append(Measured("fraction bits of a term", str(bits), "M, 2^-j M and -M in one step"))
    return replace(rules, model=model), measured


class _Parameter(NamedTuple):
    """A parameter with few possibilities, and the probes that part them."""

    name: str
    probes: tuple[str, ...]
    """Beginnings of their names."""
    options: tuple[Option, ...]


def _parameters(rules: Rules, right: Rules, kind: Kind) -> Iterator[_Parameter]:
    def named(name: str, probes: tuple[str, ...], *beginnings: str) -> _Parameter:
        found = [(one.name, one.change) for one in ALTERATIONS if one.name.startswith(beginnings)]
        return _Parameter(name, probes, (("as the hardware", _changed), *found))

    # These probes add exactly under any rule: an unknown way to add does not hide them.
    yield named("output", ("ties of the output", "scales ->"), "output cut", "output ties", "output through")
    yield named("scales", ("scales ->", "scales beside", "scales that"), "scales", "block scales", "first block")
    if rules.adder is Adder.TENSOR_CORE:
        aligned = min(rules.model.aligned_fraction_bits, SUM_BITS[0])
        widths = dict.fromkeys((right.model.result_fraction_bits, aligned, *SUM_BITS))
        cut, nearest = Rounding.CUT, Rounding.NEAREST
        roundings = (cut, cut), (nearest, nearest), (cut, nearest), (nearest, cut)
        options = tuple(
            (
                f"{width} fraction bits, terms {terms.value}, sums {sums.value}",
                partial(_changed, model={"result_fraction_bits": width}, terms=terms, sums=sums),
            )
            for (terms, sums), width in product(roundings, widths)
        )
        yield _Parameter("sum of a step", ("one step", "one chain", "middle"), options)
        if rules.model.promote_k is None:  # a promotion of each step looks like none to the order of adding
            step = rules.model.step_k
            each_step = f"every step, {step} of K", partial(_changed, model={"promote_k": step})
            yield _Parameter("promotion of steps", ("one chain", "middle"), (("as measured", _changed), each_step))
    codes = ("every code", "middle", "mixed", "tail of K", "one chain")
    yield named("operands", codes, "operands", "subnormal operands", "output transposed", "formats")
    if kind.with_bias:
        yield named("bias", ("bias",), "bias")
    yield named("sign of a zero", ("zeros",), "-0")
    yield named("subnormal results", ("subnormal results",), "subnormal results")
    yield named("overflow", ("overflow",), "output saturates")


def _changed(rules: Rules, *, model: Mapping[str, Any] | None = None, **others: Any) -> Rules:
    """Other fields of the rules, and of their model of accumulation."""
    return replace(rules, model=replace(rules.model, **(model or {})), **others)


def _of_probes(
    rules: Rules, right: Rules, given: Sequence[Observation], kind: Kind, progress: Progress, name: str
) -> tuple[Rules, list[Measured]]:
    """Each parameter by the option that gives the most outputs of its probes; again, while one uncovers another."""
    memory = Memory()
    found: dict[str, Measured] = {}
    for sweep in ("first sweep", "second sweep", "third sweep"):
        parameters = list(_parameters(rules, right, kind))
        progress.begin(name, f"parameters, {sweep}", len(parameters))
        before = rules
        for parameter in parameters:
            progress.advance()
            told = [one for one in given if one.case.id.startswith(parameter.probes)]
            if not told:
                continue
            scores = [sum(one.outputs_equal(change(rules), memory) for one in told) for _, change in parameter.options]
            # of equals the first: what the hardware does
            text, change = parameter.options[scores.index(max(scores))]
            evidence = f"{max(scores)} of {sum(one.size for one in told)} outputs of {len(told)} probes"
            if change(rules) == rules and parameter.name in found:
                text = found[parameter.name].value
            found[parameter.name] = Measured(parameter.name, text, evidence)
            rules = change(rules)
        if rules == before:
            break
    return rules, list(found.values())

"""The unknown rules of a kernel: measured one at a time, then confirmed by bits.

1. The order of adding is read off crafted operands (`addition_order`), and so are the fraction bits of a term.
2. What is left - the bits of a sum, scales, bias, output, subnormals - has few possibilities: each is chosen by the
   probes that show it.
3. The whole is put to random GEMMs that took no part in this, and every output is compared.
4. The same GEMM with more and more rows: do bits of a row depend on how many rows there are (batch invariance)? Do the
   rules hold there, with more columns, and with a longer K?
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from f8emu.conformance.diagnosis.addition_order import Order, aligned_fraction_bits, measure_order
from f8emu.conformance.diagnosis.asked import Asked, NoAnswer, ask
from f8emu.conformance.diagnosis.confirmation import Confirmation, confirmation
from f8emu.conformance.diagnosis.hypotheses import alterations
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.probe import KINDS, Kind
from f8emu.conformance.diagnosis.rules import Adder, Rounding, Rules, rules_of
from f8emu.conformance.diagnosis.sizes import AtSize, at_sizes, sizes_count
from f8emu.conformance.run.result import Progress
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import HOPPER, Chip

Change = Callable[[Rules], Rules]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One parameter of a kernel."""

    name: str
    value: str
    evidence: str
    """How it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One kind of GEMM of a kernel."""

    kind: str
    rules: Rules | None = None
    """None: it failed, or the run was interrupted before they were known."""
    measured: tuple[Measured, ...] = ()
    follows: str = ""
    """The chip whose rules these are."""
    random: Confirmation | None = None
    """The result on random GEMMs that took no part in the measurement; None: not run yet."""
    sizes: tuple[AtSize, ...] = ()
    left_out: str = ""
    """How many probes the kernel failed on, and how on the first: the rest was measured."""
    error: str = ""

    @property
    def holds_on_random(self) -> bool:
        """Every bit of the random GEMMs, of which there were some."""
        found = self.random
        return not self.error and found is not None and 0 < found.outputs_total == found.outputs_equal

    @property
    def missed(self) -> tuple[AtSize, ...]:
        """The sizes at which rules do not hold that random GEMMs confirm."""
        return tuple(one for one in self.sizes if one.misses and self.holds_on_random)

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
    """What is known of a kernel; grows while `fit` runs."""

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
    chip: Chip = HOPPER,
    progress: Progress | None = None,
) -> Fit:
    """The rules of every kind of GEMM that the subject offers. KeyboardInterrupt ends it, with what was found.

    `chip` is where the search begins, and is named if its rules are found. `ms`: the numbers of rows of step 4.
    """
    result = Fit(subject=subject.name, engine=subject.engine)
    try:
        for kind in kinds:
            _begin(progress, f"{subject.name}: {kind.name}", "probes", 1)
            answers = ask(subject, kind)
            if isinstance(answers, NoAnswer):
                if answers.is_refusal:
                    result.reason = result.reason or answers.reason
                else:
                    result.kinds.append(Fitted(kind=kind.name, error=answers.reason))
                continue
            # each knows more than the one before
            for known in _fitted(subject, kind, answers.asked, ms, chip, progress):
                if result.kinds and result.kinds[-1].kind == known.kind:
                    result.kinds.pop()
                result.kinds.append(replace(known, left_out=answers.left_out))
    except KeyboardInterrupt:
        result.is_interrupted = True
    return result


def _fitted(
    subject: Subject, kind: Kind, asked: Sequence[Asked], ms: Sequence[int], chip: Chip, progress: Progress | None
) -> Iterator[Fitted]:
    name = f"{subject.name}: {kind.name}"
    right = rules_of(chip, asked[0].case)
    _begin(progress, name, "order of adding", 1)
    try:
        order = measure_order(subject, kind)
        bits = aligned_fraction_bits(subject, kind)
    except NotOffered:
        order, bits = None, None
    except (Exception, SystemExit) as error:  # a subject may raise anything, and exit
        yield Fitted(kind=kind.name, error=f"order of adding: raised {type(error).__name__}: {str(error)[:200]}")
        return
    rules, measured = _of_order(right, order, bits)
    known = Fitted(kind=kind.name, rules=rules, measured=tuple(measured))
    yield known
    rules, chosen = _chosen(rules, right, asked, kind, progress, name)
    known = replace(known, rules=rules, measured=(*measured, *chosen), follows=chip.name if rules == right else "")
    yield known
    _begin(progress, name, "random GEMMs", 1)
    found = confirmation(subject, kind, rules)
    known = replace(known, random=found, error=found.failure)
    yield known
    if known.error:
        return
    _begin(progress, name, "sizes", sizes_count(ms))
    for one in at_sizes(subject, kind, rules, ms):
        _advance(progress)
        known = replace(known, sizes=(*known.sizes, one))
        yield known


def _of_order(right: Rules, order: Order | None, bits: int | None) -> tuple[Rules, list[Measured]]:
    """The rules of adding as far as crafted operands tell them."""
    if order is None:
        return right, [Measured(name="order of adding", value="not told", evidence="no such GEMM is offered")]
    told = "M and -M at two places of K, equal tiny products at all others, counted"
    measured = [Measured(name="order of adding", value=order.sentence, evidence=told)]
    model = replace(right.model, promote_k=order.promote_k)
    rules = replace(right, model=model, split_k=order.split_k)
    if not right.scales.is_fused:
        every = "one chain over all of K" if order.promote_k is None else f"every {order.promote_k} of K"
        measured.append(Measured(name="promotion to float32", value=every, evidence=told))
        slices = "none" if order.split_k == 1 else f"slices of {order.split_length} at K = 1024"
        measured.append(Measured(name="split of K", value=slices, evidence=told))
    match order.adder:
        case Adder.TENSOR_CORE if order.step_k is not None:
            rules = replace(rules, model=replace(model, step_k=order.step_k))
            if bits is not None:
                rules = replace(rules, model=replace(rules.model, aligned_fraction_bits=bits))
                evidence = "M, 2^-j M and -M in one step"
                measured.append(Measured(name="fraction bits of a term", value=str(bits), evidence=evidence))
        case Adder.FLOAT32 | Adder.EXACT:
            rules = replace(rules, adder=order.adder, lanes=order.lanes)
        case _:
            pass
    return rules, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A parameter with few possibilities, and the probes that part them."""

    name: str
    probes: tuple[str, ...]
    """Beginnings of their names."""
    options: tuple[tuple[str, Change], ...]


def _questions(rules: Rules, right: Rules, kind: Kind) -> Iterator[_Question]:
    def named(*beginnings: str) -> tuple[tuple[str, Change], ...]:
        found = [a for a in alterations() if a.name.startswith(beginnings)]
        as_it_is: tuple[str, Change] = ("as the hardware", lambda rules: rules)
        return (as_it_is, *((a.name, a.change) for a in found))

    def question(name: str, told_by: tuple[str, ...], *beginnings: str) -> _Question:
        return _Question(name=name, probes=told_by, options=named(*beginnings))

    # Those first whose probes add exactly under any rule: an unknown way to add does not hide them.
    yield question("output", ("ties of the output", "scales ->"), "output cut", "output ties", "output through")
    yield question("scales", ("scales ->", "scales beside", "scales that"), "scales", "block scales", "first block")
    if rules.adder is Adder.TENSOR_CORE:
        aligned = rules.model.aligned_fraction_bits
        widths = dict.fromkeys((right.model.result_fraction_bits, min(aligned, 23), 23, *range(12, 20)))
        roundings = ((Rounding.CUT, Rounding.CUT), (Rounding.NEAREST, Rounding.NEAREST))
        roundings += ((Rounding.CUT, Rounding.NEAREST), (Rounding.NEAREST, Rounding.CUT))
        yield _Question(
            name="sum of a step",
            probes=("one step", "one chain", "middle"),
            options=tuple(
                (f"{width} fraction bits, terms {terms.value}, sums {sums.value}", _sums(width, terms, sums))
                for terms, sums in roundings
                for width in widths
            ),
        )
        if rules.model.promote_k is None:  # a promotion of each step looks like none to the order of adding
            step = rules.model.step_k
            alone = (
                f"every step, {step} of K",
                lambda rules: replace(rules, model=replace(rules.model, promote_k=step)),
            )
            options = (("as measured", lambda rules: rules), alone)
            yield _Question(name="promotion of steps", probes=("one chain", "middle"), options=options)
    codes = ("every code", "middle", "mixed", "tail of K", "one chain")
    yield question("operands", codes, "operands", "subnormal operands", "output transposed", "formats")
    if kind.with_bias:
        yield question("bias", ("bias",), "bias")
    yield question("sign of a zero", ("zeros",), "-0")
    yield question("subnormal results", ("subnormal results",), "subnormal results")
    yield question("overflow", ("overflow",), "output saturates")


def _sums(width: int, terms: Rounding, sums: Rounding) -> Change:
    return lambda rules: replace(rules, terms=terms, sums=sums, model=replace(rules.model, result_fraction_bits=width))


def _chosen(
    rules: Rules, right: Rules, asked: Sequence[Asked], kind: Kind, progress: Progress | None, name: str
) -> tuple[Rules, list[Measured]]:
    """Each parameter by the option that gives the most outputs of its probes; again, while one uncovers another."""
    memory = Memory()
    found: dict[str, Measured] = {}
    for sweep in ("first sweep", "second sweep", "third sweep"):
        questions = list(_questions(rules, right, kind))
        _begin(progress, name, f"parameters, {sweep}", len(questions))
        base = rules
        for question in questions:
            _advance(progress)
            told = [one for one in asked if one.case.id.startswith(question.probes)]
            if not told:
                continue
            scores = [
                (sum(one.outputs_equal(change(base), memory) for one in told), text, change)
                for text, change in question.options
            ]
            best = max(score for score, _, _ in scores)  # of equals the first: what the hardware does
            score, text, change = next(one for one in scores if one[0] == best)
            evidence = f"{score} of {sum(one.size for one in told)} outputs of {len(told)} probes"
            if change(base) == base and question.name in found:
                text = found[question.name].value
            found[question.name] = Measured(name=question.name, value=text, evidence=evidence)
            base = change(base)
        if base == rules:
            break
        rules = base
    return rules, list(found.values())


def _begin(progress: Progress | None, name: str, stage: str, count: int) -> None:
    if progress is not None:
        progress.begin(name, stage, count)


def _advance(progress: Progress | None) -> None:
    if progress is not None:
        progress.advance()

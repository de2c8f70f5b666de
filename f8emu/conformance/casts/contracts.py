"""Which contract a cast or a quantizer follows, by its answers, and what is right by it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from f8emu.conformance.arrays import FRAMEWORKS
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.casts.diagnosis import CastDiagnosis, diagnose_cast, diagnose_quantizer
from f8emu.conformance.casts.questions import Question, cast_questions, quantize_questions
from f8emu.conformance.casts.rules import CastRule, QuantizerRule, Scaling, own_dialects
from f8emu.conformance.casts.subject import Function, codes_of, granularity_of, scales_of
from f8emu.conformance.compare import different, said_by
from f8emu.conformance.kernels.child import Ask
from f8emu.conformance.run.check import Parts
from f8emu.dialects import DIALECTS
from f8emu.dialects.matching import fitting
from f8emu.spec import FLOAT8, E8M0Rule, Format, Granularity, Overflow, ScaleRule, SpecError


class Wanted(NamedTuple):
    """The contract that a user asks for; None leaves a choice to what the function shows."""

    format: Format | None = None
    overflow: Overflow | None = None
    granularity: Granularity | None = None


ANYTHING = Wanted()


def _first_call(
    function: Function, ask: Ask, shape: tuple[int, int], wanted: Wanted
) -> tuple[Format, tuple[np.ndarray, ...]]:
    # The format, and what is returned for ordinary numbers.
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    scale = np.full((), 0.5, np.float32) if function.takes_scale else None
    named = function.option("format")
    begin = f"{function.call}: codes of a float8 dtype, or bytes whose format {named} names, are expected"
    others = " or ".join(function.option("arrays", name) for name in FRAMEWORKS if name != function.arrays)
    remedy = f"f8emu verify --contract --kind {function.kind} says what it is given; {others} gives other arrays"
    try:
        returned = ask(Question(id="first call", lying=x, scale=scale), True)
    except Exception as error:
        call = f"a first call, of float32 {list(shape)}"
        raise SpecError(f"{begin}; {call}, failed: {said_by(error)} ({function.engine}); {remedy}") from None
    name = returned[0].dtype.name
    known = {target.name: target for target in FLOAT8}
    target = wanted.format if name in ("uint8", "int8") else known.get(name)
    if target is None or wanted.format not in (None, target):
        requested = "" if wanted.format is None else f", and {named} is {wanted.format}"
        raise SpecError(f"{begin}; got {name}{requested}; {remedy}")
    return target, returned


class Contract:
    """The answers of a function; `CastContract` and `QuantizerContract` know the right ones."""

    questions: Sequence[Question]
    answers: Mapping[str, Parts | Exception]
    """Question -> answer; an exception is the error of its case."""
    follows: str
    """The contract in words."""
    judged_by: str

    def answer(self, q: Question) -> Parts:
        """The function's answer; raises its error."""
        answer = self.answers[q.id]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answered(self) -> Iterator[tuple[Question, Parts]]:
        """The questions with elements that have answers."""
        for q in self.questions:
            answer = self.answers[q.id]
            if q.x.size and not isinstance(answer, Exception):
                yield q, answer


def _asked(
    ask: Ask, questions: Sequence[Question], parts: Callable[[Question, tuple[np.ndarray, ...]], Parts]
) -> Mapping[str, Parts | Exception]:
    answers: dict[str, Parts | Exception] = {}
    for q in questions:
        try:
            answers[q.id] = parts(q, ask(q))
        except Exception as error:
            answers[q.id] = error
    return answers


class CastContract(Contract):
    """The contract of a cast."""

    def __init__(self, function: Function, ask: Ask, wanted: Wanted) -> None:
        self._target, _ = _first_call(function, ask, (256, 256), wanted)
        self.questions = list(cast_questions(self._target, with_scale=function.takes_scale))
        self.answers = _asked(ask, self.questions, self._parts)
        # Most is right by it: how a scale is taken, and what overflows to.
        scalings = (Scaling.PRODUCT, Scaling.QUOTIENT) if function.takes_scale else (Scaling.PRODUCT,)
        policies = [wanted.overflow] if wanted.overflow else [*Overflow]
        rules = (CastRule(format=self._target, scaling=s, overflow=o) for s, o in product(scalings, policies))
        self._rule = max(rules, key=self._outputs_equal)
        scale = f", {self._rule.scaling.value}" if function.takes_scale else ""
        saturates = "saturating" if self._rule.overflow is Overflow.SATURATE else "non-saturating"
        self.follows = f"a {saturates} cast to {self._target}{scale}"
        self.judged_by = f"f8ref.numpy, {self.follows}"

    def expected(self, q: Question) -> Parts:
        """The right answer."""
        return {"": self._rule.cast(q.x, q.scale_or_1)}

    def diagnosis(self) -> CastDiagnosis | None:
        """The fewest changes of the rule that give its answers; None if it gave none."""
        answered = list(self.answered())
        if not answered:
            return None
        x = np.concatenate([q.x.astype(np.float32).ravel() for q, _ in answered])
        scale = np.concatenate([np.full(q.x.size, q.scale_or_1, np.float32) for q, _ in answered])
        codes = np.concatenate([parts[""].ravel() for _, parts in answered])
        return diagnose_cast(x, scale, codes, self._rule)

    def _parts(self, q: Question, returned: tuple[np.ndarray, ...]) -> Parts:
        return {"": codes_of(returned[0], q.x.shape, self._target)}

    def _outputs_equal(self, rule: CastRule) -> int:
        pairs = ((parts[""], rule.cast(q.x, q.scale_or_1)) for q, parts in self.answered())
        return sum(int(np.count_nonzero(~different(*pair))) for pair in pairs)


class QuantizerContract(Contract):
    """The rule or the dialect of a quantizer."""

    def __init__(self, function: Function, ask: Ask, wanted: Wanted) -> None:
        shape = 256, 384
        self._target, (_, scale) = _first_call(function, ask, shape, wanted)
        self._granularity = wanted.granularity or granularity_of(function, scale, shape)
        self._block = self._granularity.block
        self.questions = list(quantize_questions(self._granularity, self._target))
        self.answers = _asked(ask, self.questions, self._parts)
        # 1. The dialects that give every byte of every matrix; among them f8emu's rule, and that of its powers of two.
        known = (*own_dialects(self._target, self._block), *DIALECTS.values())
        self._dialects = [dialect for dialect in known if dialect.scale is not None]
        left = self._dialects
        for q, parts in self.answered():
            fit = fitting(q.x, parts["codes"], parts["scales"], self._block, left)
            left = [candidate.dialect for candidate in fit if not candidate.zeros_differ]
        # 2. Who judges, and its words.
        kind = f"{self._granularity.value} to {self._target}"
        if not left or left[0] is self._dialects[0]:
            self._judge = None
            self.follows = f"f8emu's rule, {kind}"
            self.judged_by = f"f8ref.numpy, {kind}"
        else:
            self._judge = QuantizerRule.of(left[0])
            self.follows = f"as dialect {', '.join(dialect.name for dialect in left)}, {kind}"
            self.judged_by = f"f8emu.dialects, {left[0].name}"

    def expected(self, q: Question) -> Parts:
        """The right answer."""
        import f8ref.numpy as oracle

        if not q.x.size:
            return {"codes": np.empty(q.x.shape, dtype_of(self._target))}
        with np.errstate(all="ignore"):
            if self._judge is not None:
                return self._judge.parts(q.x, self._block)
            rule = ScaleRule(e8m0=E8M0Rule.RCEIL) if self._granularity.is_microscaled else ScaleRule()
            scales = oracle.scale_from_amax(oracle.amax(q.x, self._granularity), self._target, rule)
            codes = oracle.quantize(q.x, scales.inv_scale, self._target, self._granularity)
            return {"scales": scales.scale.astype(np.float32), "codes": codes}

    def diagnosis(self) -> CastDiagnosis | None:
        """The fewest changes of the rule that give its answers; None if it gave none."""
        matrices = [(q.x, parts["codes"], parts["scales"]) for q, parts in self.answered()]
        rules = [
            QuantizerRule.of(dialect)
            for dialect in self._dialects
            if self._block in dialect.blocks and dialect.code.format == self._target
        ]
        return diagnose_quantizer(matrices, self._block, rules) if matrices else None

    def _parts(self, q: Question, returned: tuple[np.ndarray, ...]) -> Parts:
        codes = codes_of(returned[0], q.x.shape, self._target)
        if not q.x.size:  # stacks do not agree on how many scales nothing has
            return {"codes": codes}
        return {"scales": scales_of(returned[1], self._granularity.scale_shape(*q.x.shape)), "codes": codes}

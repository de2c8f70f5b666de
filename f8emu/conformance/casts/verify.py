"""Puts a cast or a quantizer to the suite: which contract it follows, its stage of cases, and what it does instead."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from f8emu.conformance.arrays import FRAMEWORKS
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.casts.diagnosis import CastDiagnosis, Matrix, diagnose_cast, diagnose_quantizer
from f8emu.conformance.casts.questions import Question, cast_questions, quantize_questions
from f8emu.conformance.casts.rules import CastRule, QuantizerRule, Scaling, own_dialects
from f8emu.conformance.casts.subject import Function, fitted, granularity_of, load_function, scale_grid, typed_codes
from f8emu.conformance.compare import different, said_by, show
from f8emu.conformance.run.check import Case, Parts
from f8emu.conformance.run.result import Progress, Result
from f8emu.conformance.run.stages import Stage
from f8emu.conformance.run.subject import Subject
from f8emu.conformance.run.verify import stages_with, verify
from f8emu.dialects import DIALECTS
from f8emu.dialects.matching import fitting
from f8emu.spec import FLOAT8, Format, Granularity, Overflow, SpecError
from f8emu.spec.formats import float8_format
from f8emu.spec.scaling import granularity_by_name

_SHOWN = 4
"""Dialects that are named; those that agree on everything may be more."""
_UNRECORDED = GoldenFile(path=Path(), sha256="", metadata={}, cases=())
_Answer = Parts | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for; None leaves it to what the function shows."""

    format: Format | None = None
    overflow: Overflow | None = None
    granularity: Granularity | None = None

    @classmethod
    def named(cls, format: str | None, overflow: str | None, granularity: str | None) -> "Wanted":
        """By names, as the command line has them.

        Raises:
            SpecError: an unknown name; the message lists the known ones.
        """
        policies = {one.value: one for one in Overflow}
        if overflow is not None and overflow not in policies:
            raise SpecError(f"verify: --overflow must be one of {', '.join(policies)}; got {overflow!r}")
        return cls(
            format=None if format is None else float8_format("verify --format", format),
            overflow=None if overflow is None else policies[overflow],
            granularity=None if granularity is None else granularity_by_name("verify --granularity", granularity),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A result, and what was found beside it."""

    result: Result
    follows: str
    """The contract that it was judged by, in words."""
    diagnosis: CastDiagnosis | None = None
    """None where every bit is right, or nothing could be compared."""


def verify_function(
    name: str,
    kind: str,
    wanted: Wanted = Wanted(),
    *,
    arrays: str = "torch",
    errors: int = 20,
    cases: Sequence[str] = (),
    diagnose: bool = True,
    progress: Progress | None = None,
) -> Verified:
    """Put the `kind`, a "cast" or a "quantize", of that name to its cases, or to `cases` of them, without a diagnosis.

    Raises:
        SpecError: no such function, or its first call fails, or shows neither format nor granularity.
        MissingExtraError: the framework is not installed.
    """
    function = load_function(name, kind, arrays)
    start = time.perf_counter()
    asked = (_Cast if kind == "cast" else _Quantizer)(function, wanted)
    seconds = time.perf_counter() - start
    subject = Subject(name=name, engine=function.engine, verbs={"ask": partial(_given, asked)})
    judge = Subject(name=asked.judged_by, engine=asked.judged_by, verbs={"ask": asked.expected})
    title = "casts" if kind == "cast" else "quantized matrices"

    def every(subject: Subject, golden: object) -> Iterator[Case]:
        for q in asked.questions:
            yield Case(
                id=q.id,
                run=lambda s, q=q: s.verbs["ask"](q),
                describe=partial(_described, q),
                traits={"dtype": q.x.dtype.name, "inputs": q.family},
            )

    stage = Stage(name=kind, title=title, needs=("ask",), cases=every, judge=lambda _: judge)
    stages = stages_with(cases, [stage], [subject], _UNRECORDED) if cases else [stage]
    result = verify([subject], only=stages, golden=_UNRECORDED, errors=errors, progress=progress)
    timed = [replace(one, stages=[replace(stage, seconds=seconds) for stage in one.stages]) for one in result.subjects]
    found = asked.diagnosis() if diagnose and result.has_difference and not cases else None
    if found is not None and not found.alterations and found.is_complete:  # what differs are errors
        found = None
    return Verified(result=replace(result, subjects=timed), follows=asked.follows, diagnosis=found)


def _given(asked: "_Cast | _Quantizer", q: Question) -> Parts:
    found = asked.answers[q.id]
    if isinstance(found, Exception):
        raise found
    return found


def _described(q: Question, part: str, index: tuple[int, ...]) -> str:
    if part == "scales":
        return ""
    return f"x={show(q.x[index])}" + ("" if q.scale is None else f" scale={show(q.scale)}")


def _first(function: Function, shape: tuple[int, int], wanted: Wanted) -> tuple[Format, tuple[np.ndarray, ...]]:
    # The format, and what a first call with ordinary numbers gives.
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    scale = np.full((), 0.5, np.float32) if function.takes_scale else None
    begin = f"f8emu verify {function.name}: codes of a float8 dtype, or bytes whose format --format names, are expected"
    others = " or ".join(f"--arrays {one}" for one in FRAMEWORKS if one != function.framework.name)
    remedy = f"f8emu verify --contract --kind {function.kind} says what it is given; {others} gives other arrays"
    try:
        found = function.ask(Question(id="first call", lying=x, scale=scale), is_first=True)
    except Exception as error:
        called = f"a first call, of float32 {list(shape)}"
        raise SpecError(f"{begin}; {called}, failed: {said_by(error)} ({function.engine}); {remedy}") from None
    name = found[0].dtype.name
    shown = next((one for one in FLOAT8 if one.name == name), wanted.format if name in ("uint8", "int8") else None)
    if shown is None or wanted.format not in (None, shown):
        asked = "" if wanted.format is None else f", and --format is {wanted.format}"
        raise SpecError(f"{begin}; got {name}{asked}; {remedy}")
    return shown, found


def _answers(
    function: Function, questions: Sequence[Question], parts: Callable[[Question, tuple[np.ndarray, ...]], Parts]
) -> Mapping[str, _Answer]:
    # What it gives for each question; an exception is reported as the error of its case.
    answers: dict[str, _Answer] = {}
    for q in questions:
        try:
            answers[q.id] = parts(q, function.ask(q))
        except Exception as error:
            answers[q.id] = error
    return answers


class _Cast:
    """A cast, and the contract that it follows."""

    def __init__(self, function: Function, wanted: Wanted) -> None:
        self._target, _ = _first(function, (256, 256), wanted)
        self.questions = list(cast_questions(self._target, with_scale=function.takes_scale))
        self.answers = _answers(function, self.questions, lambda q, found: {"": self._codes(q, found[0])})
        # The contract of which most is right: how a scale is taken, and what overflows to.
        scalings = (Scaling.PRODUCT, Scaling.QUOTIENT) if function.takes_scale else (Scaling.PRODUCT,)
        policies = [wanted.overflow] if wanted.overflow else [*Overflow]
        rules = [CastRule(format=self._target, scaling=one, overflow=two) for one in scalings for two in policies]
        self._rule = max(rules, key=self._equal)
        self._scaling = self._rule.scaling if function.takes_scale else None
        scale = f", {self._rule.scaling.value}" if function.takes_scale else ""
        saturates = "saturating" if self._rule.overflow is Overflow.SATURATE else "non-saturating"
        self.follows = f"a {saturates} cast to {self._target}{scale}"
        self.judged_by = f"f8ref.numpy, {self.follows}"

    def expected(self, q: Question) -> Parts:
        """What is right."""
        return {"": self._expected(q, self._rule)}

    def diagnosis(self) -> CastDiagnosis | None:
        """What it does instead."""
        if not (found := list(_compared(self))):
            return None
        x = np.concatenate([q.x.astype(np.float32).ravel() for q, _ in found])
        scale = np.concatenate([np.full(q.x.size, 1 if q.scale is None else q.scale, np.float32) for q, _ in found])
        codes = np.concatenate([parts[""].ravel() for _, parts in found])
        # Each input once, for the same numbers are asked in many ways; twice where it has two codes.
        inputs = x.view(np.uint32).astype(np.uint64) << 32 | (scale.view(np.uint32) & ~np.uint32(255))
        keys, once = np.unique(inputs | codes.view(np.uint8), return_index=True)
        told = diagnose_cast(x[once], scale[once], codes[once], self._rule, self._scaling)
        several = np.count_nonzero(np.diff(keys[~np.isnan(x[once])] >> 8) == 0)
        return told if told.is_complete else replace(told, contradictions=int(several))

    def _codes(self, q: Question, codes: np.ndarray) -> np.ndarray:
        return fitted(typed_codes(codes, self._target), q.x.shape, self._target)

    def _expected(self, q: Question, rule: CastRule) -> np.ndarray:
        import f8ref.numpy as oracle

        values = q.x if q.scale is None else rule.scaled(q.x.astype(np.float32), q.scale)
        return oracle.cast(values, self._target, overflow=rule.overflow)

    def _equal(self, rule: CastRule) -> int:
        pairs = ((parts[""], self._expected(q, rule)) for q, parts in _compared(self))
        return sum(int(np.count_nonzero(~different(*pair))) for pair in pairs)


class _Quantizer:
    """A quantizer, and the rule or the dialect that it follows."""

    def __init__(self, function: Function, wanted: Wanted) -> None:
        shape = 256, 384
        self._target, (_, scale) = _first(function, shape, wanted)
        self._granularity = wanted.granularity or granularity_of(function.name, scale, shape)
        self.questions = list(quantize_questions(self._granularity, self._target))
        self.answers = _answers(function, self.questions, self._parts)
        # 1. The dialects that give every byte of every matrix; among them f8emu's rule, and that of its powers of two.
        block = self._granularity.block
        known = (*own_dialects(self._target, block), *DIALECTS.values())
        self._rules = [QuantizerRule.of(one) for one in known if one.scale is not None]
        left = [rule.dialect for rule in self._rules]
        for q, parts in _compared(self):
            if not q.x.size:
                continue
            found = fitting(q.x, parts["codes"], parts["scales"], block, left)
            left = [one.dialect for one in found if not one.zeros_differ]
        # 2. Who judges, and its words.
        own, what = self._rules[0].dialect, f"{self._granularity.value} to {self._target}"
        names = [one.name for one in left]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        self._judge = None if not left or left[0] is own else QuantizerRule.of(left[0])
        self.follows = f"as dialect {', '.join(names[:_SHOWN])}{more}" if self._judge else "f8emu's rule"
        self.follows += f", {what}"
        self.judged_by = f"f8emu.dialects, {names[0]}" if self._judge else f"f8ref.numpy, {what}"

    def expected(self, q: Question) -> Parts:
        """What is right."""
        import f8ref.numpy as oracle

        if not q.x.size:
            return {"codes": np.empty(q.x.shape, dtype_of(self._target))}
        with np.errstate(all="ignore"):
            if self._judge is not None:
                return self._judge.parts(q.x, self._granularity.block)
            scales = oracle.scale_from_amax(oracle.amax(q.x, self._granularity), self._target)
            codes = oracle.quantize(q.x, scales.inv_scale, self._target, self._granularity)
        return {"scales": scales.scale, "codes": codes}

    def diagnosis(self) -> CastDiagnosis | None:
        """What it does instead."""
        block = self._granularity.block
        found = [(q.x, parts) for q, parts in _compared(self) if q.x.size]
        matrices = [Matrix(x, parts["codes"], parts["scales"], block) for x, parts in found]
        rules = [one for one in self._rules if block in one.dialect.blocks and one.code.format == self._target]
        return diagnose_quantizer(matrices, rules) if matrices else None

    def _parts(self, q: Question, found: tuple[np.ndarray, ...]) -> Parts:
        rows, k = q.x.shape
        grid = self._granularity.scale_shape(rows, k)
        codes = {"codes": fitted(typed_codes(found[0], self._target), (rows, k), self._target)}
        # Stacks do not agree on how many scales nothing has.
        return {"scales": fitted(scale_grid(found[1], grid), grid), **codes} if q.x.size else codes


def _compared(asked: _Cast | _Quantizer) -> Iterator[tuple[Question, Parts]]:
    # The questions that have answers.
    for q in asked.questions:
        found = asked.answers[q.id]
        if not isinstance(found, Exception):
            yield q, found

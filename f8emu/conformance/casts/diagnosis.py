"""What a wrong cast or quantizer does instead: alterations of the right rule, one, then two, that give its bytes.

A quantizer's scales are explained first, then its codes under all rules that explain the scales. Where no rule explains
everything, special inputs (NaN, infinity, zeros) are set aside, and what is given for them is said.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import NamedTuple, TypeVar

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.casts.rules import (
    Alteration,
    CastRule,
    QuantizerRule,
    Scaling,
    amaxes_of,
    cast_alterations,
    code_alterations,
    scale_alterations,
)
from f8emu.conformance.compare import counted, different, show
from f8emu.dialects.arithmetic import extent
from f8emu.dialects.matching import numbers_differ
from f8emu.dialects.rules import Block
from f8emu.spec import FLOAT8, Format, Overflow

_LOOKED_AT = 1024
"""Outputs that differ, and as many that do not, on which most alterations fail."""
_ROUNDS = 4
_KEPT = 12
"""Rules that explain the scales alike, and whose codes are looked at."""
_TELLING = 6
"""Matrices whose codes are looked at."""
Steps = tuple[Alteration, ...]
_R = TypeVar("_R", CastRule, QuantizerRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastDiagnosis:
    """What a subject does instead."""

    alterations: tuple[str, ...]
    """In words, the first the most telling."""
    outputs_equal: int
    """Codes and scales that the alterations give."""
    outputs_total: int
    contradictions: int = 0
    """Values that have several codes, by their places."""
    basis: str = ""
    """The dialect whose rule is altered, if it is not f8emu's."""

    @property
    def is_complete(self) -> bool:
        return self.outputs_equal == self.outputs_total

    def if_telling(self, right: int) -> "CastDiagnosis":
        """Itself, if it explains half of what differs; else that `right` outputs follow f8emu's rule."""
        if 2 * (self.outputs_total - self.outputs_equal) <= self.outputs_total - right:
            return self
        return replace(self, alterations=(), outputs_equal=right, basis="")

    @property
    def headline(self) -> str:
        """One sentence."""
        said = f"as dialect {self.basis}, but " * bool(self.basis) + "it " + "; and it ".join(self.alterations)
        if self.alterations and self.is_complete:
            return said
        share = f"{self.outputs_equal}/{self.outputs_total} outputs"
        if self.contradictions:
            values = counted(self.contradictions, "value has", "values have")
            return f"NOT EXPLAINED: {values} several codes, by place, layout or dtype ({share} are right)"
        return f"NOT EXPLAINED, best: {said} ({share})" if self.alterations else f"NOT EXPLAINED ({share} are right)"


def _steps(alterations: Sequence[Alteration], depth: int) -> Iterator[Steps]:
    yield ()
    for count in range(1, depth + 1):
        for steps in combinations(alterations, count):
            if len({step.place for step in steps}) == count:
                yield steps


def _altered(rule: _R, steps: Steps) -> _R:
    for step in steps:
        rule = step.of(rule)
    return rule


def diagnose_cast(
    x: np.ndarray, scale: np.ndarray, codes: np.ndarray, rule: CastRule, scaling: Scaling | None
) -> CastDiagnosis:
    """What gives `codes`, where `rule` does not; float32 inputs, their scales (1 where there is none), and float8."""
    values = rule.scaled(x, scale)
    kinds = _special(values, rule.format)

    def given(steps: Steps, at: np.ndarray | slice = slice(None)) -> np.ndarray:
        altered = _altered(rule, steps)
        return altered.codes(altered.scaled(x[at], scale[at])).view(codes.dtype)

    # 1. The rule of ordinary values. 2. What is given for those that were set aside.
    best: CastDiagnosis | None = None
    for steps in _steps_of(codes, given, cast_alterations(rule.format, scaling), kinds):
        saturates = rule.overflow is Overflow.SATURATE
        other = replace(rule, overflow=Overflow.NONFINITE if saturates else Overflow.SATURATE)
        theirs = _altered(other, steps).codes(values).view(codes.dtype)
        said, left = _of_special(codes, given(steps), theirs, kinds, "does not saturate" if saturates else "saturates")
        equal, words = int(np.count_nonzero(~left)), (*(step.sentence for step in steps), *said)
        if best is None or equal > best.outputs_equal:
            best = CastDiagnosis(alterations=words, outputs_equal=equal, outputs_total=codes.size)
        if best.is_complete:
            break
    assert best is not None, "there is always a hypothesis"
    return best.if_telling(int(np.count_nonzero(~different(codes, given(())))))


def _of_special(
    codes: np.ndarray, ours: np.ndarray, theirs: np.ndarray, kinds: np.ndarray, policy: str
) -> tuple[list[str], np.ndarray]:
    # What special values have become, in words, and what they do not explain; `theirs` overflows in the other way.
    said, left = list[str](), different(codes, ours)
    at = np.isin(kinds, ["infinity", "overflow"])
    if left[at].any() and not different(codes[at], theirs[at]).any():
        said, left = [policy], left & ~at
    for kind, words in _WORDS.items():
        at = kinds == kind
        if left[at].any() and np.unique(codes[at].view(np.uint8) & np.uint8(0x7F)).size == 1:
            first = int(np.flatnonzero(left & at)[0])
            said, left = [*said, f"gives {show(codes[first])} for {words}, not {show(ours[first])}"], left & ~at
    return said, left


def _steps_of(
    codes: np.ndarray, given: Callable[..., np.ndarray], every: Sequence[Alteration], kinds: np.ndarray
) -> Iterator[Steps]:
    # The fewest alterations that give most codes of everything, or without special values: one, then two.
    regions = [(), *((one,) for one in every if one.place == "region")]
    others = [one for one in every if one.place != "region"]
    r, wrong = np.random.default_rng(0), different(codes, given(()))
    few = np.concatenate([_few(r, wrong), _few(r, ~wrong)])
    for depth, aside in product((1, 2), ([], [*_WORDS][:-1], [*_WORDS])):
        considered = ~np.isin(kinds, aside)
        alterations = [steps + region for steps in _steps(others, depth) for region in regions]
        steps: Steps = ()
        for _ in range(_ROUNDS):
            # 1. On a few outputs, of which most alterations give too few.
            at = few[considered[few]]
            scores = [int(np.count_nonzero(~different(codes[at], given(one, at)))) for one in alterations]
            steps = min((one for one, score in zip(alterations, scores, strict=True) if score == max(scores)), key=len)
            # 2. On all. What the best misses is looked at in the next round.
            missed = considered & different(codes, given(steps))
            if max(scores) < at.size or not missed.any():
                break
            few = np.concatenate([few, _few(r, missed)])
        yield steps


_WORDS = {
    "NaN": "NaN",
    "infinity": "infinity",
    "overflow": "finite values beyond the format",
    "above": "values that round down to the largest",
    "zero": "negative zero",
    "top": "the top binade",
}
"""Kinds of values that may be set aside, and their names."""


def _special(values: np.ndarray, target: Format) -> np.ndarray:
    # The kind of each value, "" of an ordinary one.
    unbounded = CastRule(format=target, overflow=Overflow.NONFINITE).codes(values).view(dtype_of(target))
    is_zero = (values == 0) & np.signbit(values)
    magnitude = np.abs(values)
    is_above, is_top = magnitude > target.max, magnitude >= 2.0**target.max_exponent
    conditions = [np.isnan(values), np.isinf(values), ~np.isfinite(unbounded), is_above, is_zero, is_top]
    return np.select(conditions, [*_WORDS], "")


def _few(r: np.random.Generator, among: np.ndarray) -> np.ndarray:
    found = np.flatnonzero(among)
    return found if found.size <= _LOOKED_AT else r.choice(found, _LOOKED_AT, replace=False)


# Quantizers


class Matrix:
    """What a quantizer made of a matrix."""

    def __init__(self, x: np.ndarray, codes: np.ndarray, scale: np.ndarray, block: Block) -> None:
        """`scale` is float32, the grid of blocks."""
        height, width = extent(x.shape, block)
        self.x, self.codes, self.scale, self.block = x, codes, scale, (height, width)
        self.amaxes = amaxes_of(x, self.block)
        # "n" of a block with a NaN or an infinity, "z" of one of zeros, "" of all others
        self.kinds = np.select([~np.isfinite(self.amaxes[0]), self.amaxes[0] == 0], ["n", "z"], "")

    def codes_wrong(self, rule: QuantizerRule, aside: str) -> int:
        """How many codes a rule does not give, except in blocks of these kinds."""
        found = different(self.codes, rule.codes(self.x, rule.factors(self.amaxes, self.x.dtype), self.block))
        if found.any():
            rows, columns = (np.arange(n) // side for n, side in zip(self.x.shape, self.block, strict=True))
            found &= ~np.isin(self.kinds, [*aside])[rows[:, None], columns[None, :]]
        return int(np.count_nonzero(found))

    def parts_right(self, rule: QuantizerRule) -> int:
        """How many scales and codes a rule gives."""
        differ = numbers_differ(rule.factors(self.amaxes, self.x.dtype).stored, self.scale)
        return self.scale.size - int(differ.sum()) + self.codes.size - self.codes_wrong(rule, "")


class _Scales:
    """The scales of all matrices of one dtype, those of equal blocks once."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._dtype = matrices[0].x.dtype
        rows = [np.stack([*(a.ravel() for a in one.amaxes), one.scale.ravel()]) for one in matrices]
        kinds = np.concatenate([one.kinds.ravel() for one in matrices])
        _, first = np.unique(np.concatenate(rows, axis=1).view(np.uint32), axis=1, return_index=True)
        self._nan, self._fmax, self._scale = np.concatenate(rows, axis=1)[:, first]
        self._kinds = kinds[first]

    def wrong(self, rule: QuantizerRule) -> Counter[str]:
        """How many scales of blocks of each kind a rule does not give."""
        differ = numbers_differ(rule.factors((self._nan, self._fmax), self._dtype).stored, self._scale)
        return Counter(self._kinds[differ].tolist())


def diagnose_quantizer(matrices: Sequence[Matrix], bases: Sequence[QuantizerRule]) -> CastDiagnosis:
    """What gives the codes and scales of `matrices`, where none of `bases` does; the first is f8emu's rule."""
    target = bases[0].cast.format
    # 1. The scales. Blocks of zeros and those that are not finite may be set aside.
    dtypes = dict.fromkeys(one.x.dtype for one in matrices)
    groups = [_Scales([one for one in matrices if one.x.dtype == dtype]) for dtype in dtypes]
    alterations = (*_measured(matrices, target), *scale_alterations(target))
    kept, aside = list[_Hypothesis](), ""
    depths = [
        [_Hypothesis(base, ()) for base in bases],
        [_Hypothesis(bases[0], (one,)) for one in alterations],
        [_Hypothesis(base, (one,)) for base in bases[1:] for one in alterations],
        [_Hypothesis(bases[0], steps) for steps in _steps(alterations, 2) if len(steps) == 2],
    ]
    scores: list[list[Counter[str]]] = []
    fewest = 1 << 62
    for apart, (depth, hypotheses) in product(("", "n", "nz"), enumerate(depths)):
        if depth == len(scores):
            scores.append([sum((group.wrong(one.rule) for group in groups), Counter[str]()) for one in hypotheses])
        wrong = [sum(score.values()) - sum(score[kind] for kind in apart) for score in scores[depth]]
        if min(wrong) < fewest:
            fewest, aside = min(wrong), apart
            kept = [one for one, count in zip(hypotheses, wrong, strict=True) if count == fewest][:_KEPT]
        if not fewest:
            break
    # 2. The codes, by every rule that is left: of a few matrices, and then also of those that the best gets wrong.
    best, telling = kept[0], list[Matrix]()
    for _ in range(_ROUNDS):
        missed = {one: count for one in matrices if (count := one.codes_wrong(best.rule, aside))}
        more = sorted(missed.keys() - {*telling}, key=lambda one: -missed[one])[:_TELLING]
        if not more:
            break
        telling += more
        best = _best_of_codes(telling, kept, aside, deep=not fewest)
    # 3. What is given for blocks that were set aside, and how much is explained.
    said = [step.sentence for step in best.steps]
    scales = [numbers_differ(best.rule.factors(one.amaxes, one.x.dtype).stored, one.scale) for one in matrices]
    for kind, words in (("n", "a NaN or an infinity"), ("z", "zeros alone")):
        given = {
            float(x)
            for one, differ in zip(matrices, scales, strict=True)
            for x in one.scale[differ & (one.kinds == kind)]
        }
        said += [f"gives the scale {given.pop():.9g} to blocks of {words}"] if len(given) == 1 else []
    wrong = sum(int(one.sum()) for one in scales) + sum(one.codes_wrong(best.rule, "") for one in matrices)
    total = sum(one.scale.size + one.codes.size for one in matrices)
    basis = "" if best.base is bases[0] else best.base.dialect.name
    found = CastDiagnosis(alterations=tuple(said), outputs_equal=total - wrong, outputs_total=total, basis=basis)
    right = sum(one.parts_right(bases[0]) for one in matrices)
    return found.if_telling(right)


def _measured(matrices: Sequence[Matrix], target: Format) -> Iterator[Alteration]:
    # What the scales show: the number that amax is scaled to, and the least amax.
    with np.errstate(all="ignore"):
        ratios = np.concatenate([(one.amaxes[0] / one.scale).ravel() for one in matrices])
        scales = np.concatenate([one.scale.ravel() for one in matrices])
    largest = float(f"{np.nanmedian(ratios):.4g}")
    if np.isfinite(largest) and largest not in {fmt.max for fmt in FLOAT8}:
        yield Alteration("scale.largest", largest, f"scales amax to {largest:g} instead of {target.max:g}")
    floor = float(f"{np.nanmin(scales) * target.max:.3g}")
    if 0 < floor < 1:
        yield Alteration("scale.amax_floor", floor, f"keeps amax at least {floor:g}")


def _best_of_codes(
    matrices: Sequence[Matrix], kept: Sequence["_Hypothesis"], aside: str, *, deep: bool
) -> "_Hypothesis":
    # Two alterations of codes are tried only where the scales are explained: the others cost time, and tell nothing.
    best, fewest = kept[0], 1 << 62
    tried = [(0, one) for one in kept] + [(1, one) for one in kept] + [(2, one) for one in kept[: 2 * deep]]
    for depth, one in tried:
        for steps in _steps(code_alterations(one.base.cast.format), depth):
            if len(steps) == depth and fewest:
                altered, count = _Hypothesis(one.base, one.steps + steps), 0
                for matrix in matrices:
                    count += matrix.codes_wrong(altered.rule, aside)
                    if count >= fewest:
                        break
                if count < fewest:
                    best, fewest = altered, count
    return best


class _Hypothesis(NamedTuple):
    """A rule, and how it is altered."""

    base: QuantizerRule
    steps: Steps

    @property
    def rule(self) -> QuantizerRule:
        return _altered(self.base, self.steps)

"""Diagnosis of a wrong cast or quantizer: the fewest alterations of the right rule that give what it gave.

A quantizer's scales are explained first, then its codes by every rule that explains its scales. Special inputs, such as
infinity or blocks of zeros, for which a subject always gives the same, are told apart.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from f8emu.conformance.casts.alterations import Alteration, cast_alterations, code_alterations, scale_alterations
from f8emu.conformance.casts.rules import CastRule, QuantizerRule, Scaling, amaxes_of
from f8emu.conformance.compare import counted, different, show
from f8emu.dialects.arithmetic import extent
from f8emu.dialects.rules import Block
from f8emu.spec import Overflow

_SAMPLE = 512
"""Outputs that the best rule gives, and as many that it does not, on which most hypotheses fail."""
_KEPT = 12
"""The most hypotheses, alike on a sample, that are tried on everything."""
_VALUES = (
    "NaN",
    "infinity",
    "finite values beyond the format",
    "values that round down to the largest",
    "negative zero",
    "the top binade",
)
_BLOCKS = ("blocks with a NaN", "blocks with an infinity", "blocks of zeros")
Matrix = tuple[np.ndarray, np.ndarray, np.ndarray]
"""x, its codes, and the float32 grid of its scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CastDiagnosis:
    """The rule that a wrong cast or quantizer follows."""

    alterations: tuple[str, ...] = ()
    """Words that follow "it"; empty where they do not explain half of what differs."""
    outputs_equal: int
    """Codes and scales that the alterations give; of a cast each input counts once."""
    outputs_total: int
    contradictions: int = 0
    """Values that have several codes, by their places."""
    basis: str = ""
    """The dialect whose rule is altered, if it is not f8emu's."""

    @property
    def is_complete(self) -> bool:
        return self.outputs_equal == self.outputs_total

    @property
    def headline(self) -> str:
        """One sentence."""
        sentence = f"it {'; and it '.join(self.alterations)}"
        if self.basis:
            sentence = f"as dialect {self.basis}, but {sentence}"
        if self.alterations and self.is_complete:
            return sentence
        share = f"{self.outputs_equal:,}/{self.outputs_total:,} outputs"
        if self.contradictions:
            values = counted(self.contradictions, "value has", "values have")
            return f"NOT EXPLAINED: {values} several codes, by place, layout or dtype ({share} are right)"
        return (
            f"NOT EXPLAINED, best: {sentence} ({share})" if self.alterations else f"NOT EXPLAINED ({share} are right)"
        )


class Evidence(NamedTuple):
    """Inputs, and what a subject gave for each."""

    predict: Callable[..., np.ndarray]
    """(rule, *inputs) -> what the rule gives."""
    inputs: Sequence[np.ndarray]
    outputs: np.ndarray
    kinds: np.ndarray
    """0 of an ordinary input; of a special one the place of its name in `names`, from 1."""
    names: Sequence[str]

    def missed(self, rule: Any) -> np.ndarray:
        """The outputs that a rule does not give."""
        return different(self.outputs, self.predict(rule, *self.inputs).view(self.outputs.dtype))

    def sample(self, rule: Any) -> "Evidence":
        """A few of the outputs that a rule gives, and of those that it does not."""
        r, missed = np.random.default_rng(0), self.missed(rule)
        at = np.concatenate([r.permutation(np.flatnonzero(part))[:_SAMPLE] for part in (missed, ~missed)])
        return Evidence(self.predict, [x[at] for x in self.inputs], self.outputs[at], self.kinds[at], self.names)

    def explained(self, rule: Any) -> tuple[list[str], int]:
        """Sentences about special inputs, beside a rule; and how many outputs neither gives."""
        right = self.predict(rule, *self.inputs).view(self.outputs.dtype)
        missed = different(self.outputs, right)
        sentences = list[str]()
        for kind, name in enumerate(self.names, 1):
            alike = self.kinds == kind
            if not (missed & alike).any():
                continue
            magnitudes = np.abs(self.outputs[alike].astype(np.float32))
            if np.array_equal(magnitudes, np.full_like(magnitudes, magnitudes[0]), equal_nan=True):
                first = np.flatnonzero(missed & alike)[0]
                sentences.append(f"gives {show(self.outputs[first])} for {name}, not {show(right[first])}")
                missed &= ~alike
        return sentences, int(np.count_nonzero(missed))


class Hypothesis(NamedTuple):
    """A rule, and how it is altered."""

    base: Any
    steps: tuple[Alteration, ...] = ()

    @property
    def rule(self) -> Any:
        """The altered rule."""
        return reduce(lambda rule, step: step.of(rule), self.steps, self.base)

    def altered(self, alterations: Iterable[Alteration], count: int) -> Iterator["Hypothesis"]:
        """This one with `count` more alterations, of different fields."""
        for steps in combinations(alterations, count):
            if len({step.field for step in steps}) == count:
                yield Hypothesis(self.base, self.steps + steps)

    def explained(self, evidence: Iterable[Evidence]) -> tuple[tuple[str, ...], int]:
        """All that is said, and how many outputs it does not give."""
        rule = self.rule
        sentences, left = [step.sentence for step in self.steps], 0
        for part in evidence:
            special, missed = part.explained(rule)
            sentences += special
            left += missed
        return tuple(dict.fromkeys(sentences)), left

    def rank(self, evidence: Iterable[Evidence]) -> tuple[int, int, int]:
        """Less is better: what is left, how much is said, and how much of that is of special inputs alone."""
        sentences, left = self.explained(evidence)
        return left, len(sentences), len(sentences) - len(self.steps)


def _search(
    bases: Sequence[Hypothesis], alterations: Iterable[Alteration], evidence: Sequence[Evidence]
) -> list[Hypothesis]:
    # The hypotheses that leave least; of those that leave nothing, the ones of which least is said.
    alterations = list(alterations)
    first, others = bases[:1], bases[1:]
    kept = list(first)
    fewest = kept[0].rank(evidence)
    for altered, count in ((bases, 0), (first, 1), (others, 1), (first, 2)):
        # Most hypotheses fail on a few outputs, of which half are those that the best does not explain.
        sample = [part.sample(kept[0].rule) for part in evidence]
        hypotheses = (hypothesis for base in altered for hypothesis in base.altered(alterations, count))
        ranks = {hypothesis: hypothesis.rank(sample) for hypothesis in hypotheses}
        least = min(ranks.values(), default=fewest)
        for hypothesis in [tried for tried, rank in ranks.items() if rank == least][:_KEPT]:
            rank = hypothesis.rank(evidence)
            if rank < fewest:
                kept, fewest = [hypothesis], rank
            elif rank == fewest and hypothesis not in kept:
                kept.append(hypothesis)
        left, sentences, _ = fewest
        if not left and sentences <= len(bases[0].steps) + count:
            break
    return kept


def _diagnosis(best: Hypothesis, right: Any, evidence: Sequence[Evidence], contradictions: int = 0) -> CastDiagnosis:
    sentences, left = best.explained(evidence)
    wrong = sum(int(np.count_nonzero(part.missed(right))) for part in evidence)
    is_telling = 2 * left <= wrong
    total = sum(part.outputs.size for part in evidence)
    return CastDiagnosis(
        alterations=sentences if is_telling else (),
        outputs_equal=total - (left if is_telling else wrong),
        outputs_total=total,
        contradictions=contradictions if left else 0,
        basis="" if best.base is right or not is_telling else best.base.dialect.name,
    )


def _kinds(*conditions: np.ndarray) -> np.ndarray:
    return np.select(conditions, range(1, len(conditions) + 1), 0)


def diagnose_cast(x: np.ndarray, scale: np.ndarray, codes: np.ndarray, rule: CastRule) -> CastDiagnosis:
    """The rule that gives `codes`, where `rule` does not; float32 inputs, their scales (1 for none), and float8."""
    # 1. Each input once, for the same numbers are asked in many ways; twice where it has two codes.
    inputs = x.view(np.uint32).astype(np.uint64) << 32 | (scale.view(np.uint32) & ~np.uint32(255))
    keys, once = np.unique(inputs | codes.view(np.uint8), return_index=True)
    x, scale, codes = (array[once] for array in (x, scale, codes))
    several = int(np.count_nonzero(np.diff(keys[~np.isnan(x)] >> 8) == 0))
    # 2. Which of them are special.
    target, values = rule.format, rule.scaled(x, scale)
    magnitude = np.abs(values)
    kinds = _kinds(
        np.isnan(values),
        np.isinf(values),
        ~np.isfinite(CastRule(format=target, overflow=Overflow.NONFINITE).cast(values)),
        magnitude > target.max,
        (values == 0) & np.signbit(values),
        magnitude >= 2.0**target.max_exponent,
    )
    # 3. What explains them.
    evidence = [Evidence(CastRule.cast, (x, scale), codes, kinds, _VALUES)]
    alterations = cast_alterations(target, rule.overflow, with_scale=rule.scaling is Scaling.QUOTIENT)
    best, *_ = _search([Hypothesis(rule)], alterations, evidence)
    return _diagnosis(best, rule, evidence, several)


def diagnose_quantizer(matrices: Sequence[Matrix], block: Block, rules: Sequence[QuantizerRule]) -> CastDiagnosis:
    """The rule that gives codes and scales of `matrices`, where none of `rules` does; the first is f8emu's."""
    right, target = rules[0], rules[0].cast.format
    dtypes = dict.fromkeys(x.dtype for x, _, _ in matrices)
    of_dtypes = [_evidence([matrix for matrix in matrices if matrix[0].dtype == dtype], block) for dtype in dtypes]
    scales, codes = [scales for scales, _ in of_dtypes], [codes for _, codes in of_dtypes]
    # The numbers that the scales show: what amax is scaled to, and the least scale.
    stored = _joined(part.outputs for part in scales)
    with np.errstate(all="ignore"):
        largest = float(np.nanmedian(_joined(part.inputs[0] for part in scales) / stored))
    alterations = scale_alterations(target, largest=largest, least=float(np.nanmin(stored)))
    known = _search([Hypothesis(rule) for rule in rules], alterations, scales)
    best, *_ = _search(known, code_alterations(target), codes)
    return _diagnosis(best, right, [*scales, *codes])


def _evidence(matrices: Sequence[Matrix], block: Block) -> tuple[Evidence, Evidence]:
    # Scales and codes of matrices of one dtype, each with the amaxes of its block.
    of_scales, of_codes = list[list[np.ndarray]](), list[list[np.ndarray]]()
    for x, codes, scale in matrices:
        height, width = extent(x.shape, block)
        amax, amax_of_numbers = amaxes_of(x, block)
        blocks = np.ix_(np.arange(x.shape[0]) // height, np.arange(x.shape[1]) // width)
        of_scales.append([scale, amax, amax_of_numbers])
        of_codes.append([codes, x, amax[blocks], amax_of_numbers[blocks]])
    scales, *amaxes = (_joined(arrays) for arrays in zip(*of_scales, strict=True))
    codes, x, *amaxes_of_codes = (_joined(arrays) for arrays in zip(*of_codes, strict=True))
    predict = partial(QuantizerRule.stored, dtype=x.dtype)
    return (
        Evidence(predict, amaxes, scales, _kinds_of(amaxes[0]), [f"the scale of {name}" for name in _BLOCKS]),
        Evidence(
            QuantizerRule.codes_of_blocks,
            (x, *amaxes_of_codes),
            codes,
            _kinds_of(amaxes_of_codes[0]),
            [f"codes of {name}" for name in _BLOCKS],
        ),
    )


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays])


def _kinds_of(amax: np.ndarray) -> np.ndarray:
    return _kinds(np.isnan(amax), np.isinf(amax), amax == 0)

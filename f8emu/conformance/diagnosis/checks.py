"""GEMMs that took no part in finding rules, and confirm or refute them: random ones, and other sizes.

Random: every distribution, pair of formats and output type that is offered. The first runs again at the end: its bits
must be the same, and no later call may have written to its first output.

Sizes: trainer and server agree only if the bits of a row do not depend on how many rows there are. The rows of the
largest GEMM run again in smaller ones, and are compared with each other, which needs no rules. All of them, more
columns and a longer K are judged by the rules, or else by the rules under another split of K.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import rng, scaled_case
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.arguments import Part
from f8emu.conformance.diagnosis.compute import Memory
from f8emu.conformance.diagnosis.observations import NoOutput, Observation, common_trait, is_random, observe
from f8emu.conformance.diagnosis.probes import MANY, GemmKind
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.run.breakdown import Contrast
from f8emu.conformance.run.subject import Subject
from f8emu.spec import BFLOAT16, E4M3FN, FLOAT16, FLOAT32, HOPPER, Format, Granularity

_DISTRIBUTIONS = ("normal", "bits", "same", "cancellation", "subnormals")
_SIZE = 128
# Rows: one token, tails of a tile, whole tiles, one row more. Few columns and a long K: where a library splits K by the
# number of rows [PLAN-2].
MS, _N, _K = (1, 2, 7, 16, 17, 64, 128, 129, 256), 32, 6144
# More rows, with a short K: what a grid or an index that is too small loses.
MANY_MS, _SHORT_K = (257, 513, 1040, 4112), 128
_MIDDLE_K, _LONG_K, _LONG_K_ROWS = 1152, 8320, 144
OTHER_BITS = "run again after others, it gave other bits"
_SPLITS = (*range(1, 9), 15, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGemms:
    """Result of the random GEMMs."""

    outputs_equal: int = 0
    outputs_total: int = 0
    left: Contrast | None = None  # what the outputs have in common that the rules do not give
    unsteady: str = ""  # how the subject contradicted itself
    failure: str = ""  # what it failed with, on the first GEMM that it failed on


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """Result of a GEMM of one size."""

    dimension: str  # M, N or K
    size: int
    is_same: bool = True  # the rows have the bits that they have in the largest GEMM that ran
    is_random: bool = False  # asked again, it had other bits: nothing follows from them
    outputs_equal: int = 0  # how many outputs of a sample equal those of the rules
    outputs_total: int = 0
    split_k: int | None = None  # the slices of K that explain the sample; None: none does
    reason: str = ""  # why it did not run
    has_failed: bool = False  # it is offered, and gave no output; the reason says what it gave instead

    @property
    def name(self) -> str:
        return f"{self.dimension} = {self.size}"

    @property
    def misses(self) -> bool:
        """It ran, and neither the rules nor a split of K give its outputs, which are not random."""
        return not self.reason and self.split_k is None and not self.is_random


def on_random_gemms(subject: Subject, kind: GemmKind, rules: Rules) -> RandomGemms:
    """Every GEMM run and compared; the first on which the subject fails ends it."""
    ran: list[tuple[Observation, Observation]] = []
    for case, at in _random_cases(kind):
        observation = observe(subject, case)
        if isinstance(observation, Observation):
            ran.append((observation, observation.part(at)))
        elif not observation.is_refusal:
            return RandomGemms(failure=observation.reason)
    # The subject ran all outputs; the rules are computed at a sample, which was copied before the next call.
    memory, samples = Memory(), [sample for _, sample in ran]
    equal = sum(sample.outputs_equal(rules, memory) for sample in samples)
    total = sum(sample.size for sample in samples)
    return RandomGemms(
        outputs_equal=equal,
        outputs_total=total,
        left=common_trait(samples, rules, memory) if equal < total else None,
        unsteady=_unsteady(subject, *ran[0]) if ran else "",
    )


def _unsteady(subject: Subject, whole: Observation, sample: Observation) -> str:
    """The first GEMM once more, after all others; `sample` was copied when it ran."""
    assert sample.at is not None
    if different(whole.part(sample.at).outputs, sample.outputs).any():
        return f"{whole.case.id}: a later call wrote to its output"
    first = whole.outputs.copy()
    again = observe(subject, whole.case)
    if isinstance(again, NoOutput):
        return f"{whole.case.id}: run again after others, it gave no output: {again.reason}"
    if different(first, again.outputs).any() or is_random(subject, again):
        return f"{whole.case.id}: {OTHER_BITS}"
    return ""


def _random_cases(kind: GemmKind) -> Iterator[tuple[GemmCase, Part]]:
    """Each with the rows and columns that are compared: the subject runs all, the rules a sample."""
    types = (BFLOAT16, FLOAT16) if kind.with_bias else (FLOAT32, BFLOAT16, FLOAT16)
    lengths = (384, 1152) if kind.is_blockwise else (1168, 1040)
    plain, *mixed = [(E4M3FN, E4M3FN)] if kind.is_blockwise else HOPPER.format_pairs
    table = [(name, plain, lengths[i % 2]) for i, name in enumerate(_DISTRIBUTIONS)]
    table += [("bits", formats, lengths[1]) for formats in mixed]
    for (distribution, formats, k), out_dtype in product(table, types):
        name = f"confirmation {kind.name} {distribution} {formats[0]} x {formats[1]} {_SIZE}x{_SIZE}x{k}"
        r = rng(name)
        case = _case(kind, name, (_SIZE, _SIZE, k), distribution, formats=formats, out_dtype=out_dtype)
        yield case, (_places(r, _SIZE), _places(r, _SIZE))


def _places(r: np.random.Generator, size: int, count: int = 16) -> np.ndarray:
    """Some rows or columns, in order: one drawn from each of `count` parts, one of every 16 at least, and the ends."""
    parts = min(size, max(count, -(-size // 16)))
    ends = np.linspace(0, size, parts + 1).astype(int)
    places = r.integers(ends[:-1], ends[1:])
    places[0], places[-1] = 0, size - 1
    return places


def sizes_run(subject: Subject, kind: GemmKind, ms: Sequence[int] = ()) -> Iterator[tuple[str, GemmCase]]:
    """The GEMMs by the dimension that they are about: numbers of rows, the largest first; more columns; a long K.

    `ms` are numbers of rows instead of MS and MANY_MS.
    """
    for rows, k in [(ms, _K)] if ms else [(MS, _K), (MANY_MS, _SHORT_K)]:
        whole = _case(kind, f"rows {kind.name}", (max(rows), 128 if kind.is_blockwise else _N, k))
        assert whole.scale_a is not None
        for m in sorted(set(rows), reverse=True):
            kept = Granularity(whole.granularity_a).scale_shape(m, k)[0]
            yield "M", replace(whole, id=f"{whole.id} {m}", a=whole.a[:m], scale_a=whole.scale_a[:kept])
    is_free = subject.takes_any_size or not kind.is_blockwise
    few, many, most = (16, MANY, 2064) if is_free else (128, 384, 2176)
    yield "N", _case(kind, f"columns {kind.name}", (few, many, _MIDDLE_K))
    yield "N", _case(kind, f"many columns {kind.name}", (few, most, _SHORT_K))
    yield "K", _case(kind, f"long {kind.name}", (_LONG_K_ROWS if is_free else few, few, _LONG_K))


def sizes_count(ms: Sequence[int] = ()) -> int:
    """How many `sizes_run` there are."""
    return len(set(ms or (*MS, *MANY_MS))) + 3


def at_sizes(subject: Subject, kind: GemmKind, rules: Rules, ms: Sequence[int] = ()) -> Iterator[AtSize]:
    """The result of each of `sizes_run`."""
    largest: dict[int, np.ndarray] = {}  # by K
    for dimension, case in sizes_run(subject, kind, ms):
        m, n = case.output_shape
        outcome = AtSize(dimension=dimension, size={"M": m, "N": n, "K": case.k}[dimension])
        # 1. An M that never ran shows nothing.
        padded = subject.rows_run(case)
        if dimension == "M" and padded != m:
            yield replace(outcome, reason=f"{subject.name} takes it padded to {padded} rows")
            continue
        observation = observe(subject, case)
        if isinstance(observation, NoOutput):
            yield replace(outcome, reason=observation.reason or "not offered", has_failed=not observation.is_refusal)
            continue
        # 2. The same rows of the largest GEMM, which comes first.
        if dimension == "M":
            whole = largest.setdefault(case.k, observation.outputs.copy())
            outcome = replace(outcome, is_same=not different(observation.outputs, whole[:m]).any())
        # 3. A sample of rows and columns, under the rules as they are and under other splits of K.
        r, memory = rng("sizes", outcome.name), Memory()
        sample = observation.part((_places(r, m, 8), _places(r, n, 8)))
        splits = (rules.split_k, *_SPLITS)
        equal = (sample.outputs_equal(replace(rules, split_k=s), memory) for s in splits)
        split_k = next((s for s, count in zip(splits, equal, strict=True) if count == sample.size), None)
        # 4. Before a difference is put down to the size: is it there when the same is asked again?
        has_other_bits = (not outcome.is_same or split_k != rules.split_k) and is_random(subject, observation)
        counts = {"outputs_equal": sample.outputs_equal(rules, memory), "outputs_total": sample.size}
        yield replace(outcome, **counts, split_k=split_k, is_random=has_other_bits)


def _case(
    kind: GemmKind,
    name: str,
    shape: tuple[int, int, int],
    distribution: str = "normal",
    formats: tuple[Format, Format] = HOPPER.format_pairs[0],
    out_dtype: Format | None = None,
) -> GemmCase:
    out_dtype = out_dtype or (BFLOAT16 if kind.with_bias else FLOAT32)
    options: dict[str, Any] = {"with_bias": kind.with_bias, "use_fast_accum": kind.use_fast_accum}
    return scaled_case(name, kind.pair, formats, shape, distribution, out_dtype=out_dtype, **options)

"""How far an explanation of the probes goes: the GEMMs of the suite that differ, most of them larger, under its rules.

Of every such GEMM the suite keeps a sample of the outputs that differ. Nothing is run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.compute import Memory, compute
from f8emu.conformance.diagnosis.probes import kind_of
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.run.result import StageResult, WrongOutputs
from f8emu.conformance.run.stages import STAGES
from f8emu.conformance.run.subject import Subject
from f8emu.spec import Granularity

_CASES = 64
"""The most GEMMs of a kind that are looked at."""
_PRODUCTS = 1 << 22
"""The most products of a grouped GEMM, of which every row is computed."""
WrongGemm = tuple[GemmCase, WrongOutputs]
"""A GEMM, and a sample of its outputs that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The GEMMs of a kind that differ, under an explanation."""

    cases: int = 0
    cases_left: int = 0
    """How many of them have outputs that it does not give."""
    worst: str = ""
    """The one of these with the largest share of such outputs: `outputs_left` of a sample of `outputs`."""
    outputs_left: int = 0
    outputs: int = 0


def wrong_gemms(subject: Subject, stages: Sequence[StageResult], golden: GoldenFile) -> dict[str, list[WrongGemm]]:
    """The largest GEMMs of a subject that differ in a run, by kind."""
    gemms: dict[str, list[WrongGemm]] = {}
    for stage in stages:
        samples = {wrong.case: wrong for wrong in stage.wrong}
        for case in STAGES[stage.stage].cases(subject, golden) if samples else ():
            if (wrong := samples.get(case.id)) and (kind := kind_of(gemm := case.gemms[wrong.part])):
                if gemm.offs is None or _products(gemm) <= _PRODUCTS:
                    gemms.setdefault(kind.name, []).append((gemm, wrong))
    return {kind: sorted(pairs, key=lambda pair: _products(pair[0]))[-_CASES:] for kind, pairs in gemms.items()}


def _products(gemm: GemmCase) -> int:
    return gemm.output_shape[0] * gemm.output_shape[1] * gemm.k


def covered(gemms: Sequence[WrongGemm], rules: Rules) -> Coverage:
    """How many outputs that differ the rules do not give."""
    counts = [_left(case, wrong, rules) for case, wrong in gemms]
    left, (_, worst) = max(zip(counts, gemms, strict=True), key=lambda pair: pair[0] / len(pair[1][1].places))
    return Coverage(
        cases=len(gemms),
        cases_left=sum(count > 0 for count in counts),
        worst=worst.case if left else "",
        outputs_left=left,
        outputs=len(worst.places),
    )


def _left(case: GemmCase, wrong: WrongOutputs, rules: Rules) -> int:
    (rows, row), (columns, column) = (np.unique(places, return_inverse=True) for places in wrong.places.T)
    rules = replace(rules, split_k=case.split_k) if rules.split_k == 1 else rules
    # 1. Rules of places, and 128x128 scales, need all of a GEMM, of which a sampled one has some rows and columns.
    sample = case.sample
    is_square = Granularity.BLOCKWISE_128X128 in (case.granularity_a, case.granularity_b)
    if sample is not None and (rules.misplaced or is_square):
        case, (rows, columns) = case.embedded(sample), (np.array(sample.rows)[rows], np.array(sample.cols)[columns])
    # 2. Each row of an output follows the rules of one lane or another.
    outputs = [compute(case, lane, at=(rows, columns), memory=Memory())[row, column] for lane in rules.of_rows()]
    missed = np.stack([different(wrong.observed, output) for output in outputs])
    return int(missed.all(axis=0).sum())

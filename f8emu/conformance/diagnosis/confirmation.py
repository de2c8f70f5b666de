"""Random GEMMs that confirm or refute rules: none of them took part in finding these.

Every distribution, every pair of formats, and every output type that is offered. One is put again at the end: its bits
must be the same, and nobody may have written to those that it gave at first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from f8emu.conformance.breakdown.contrast import Contrast
from f8emu.conformance.cases.distributions import rng
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.gemm_cases import scaled_case
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.asked import Asked, NoAnswer, ask_one
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.probe import Kind
from f8emu.conformance.diagnosis.reading import Part
from f8emu.conformance.diagnosis.remainder import what_is_left
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.run.subject import Subject
from f8emu.spec import BFLOAT16, E4M3FN, FLOAT16, FLOAT32, HOPPER, Format

_DISTRIBUTIONS = ("normal", "bits", "same", "cancellation", "subnormals")
_SIZE = 128
_LOOKED_AT = 16
"""Rows and columns of each that are compared, at least: the subject runs all, the rules a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What became of them."""

    outputs_equal: int = 0
    outputs_total: int = 0
    left: Contrast | None = None
    """What the outputs have in common that the rules do not give."""
    unsteady: str = ""
    """How the subject contradicted itself."""
    failure: str = ""
    """What it failed with, on the first GEMM that it failed on."""


def confirmation(subject: Subject, kind: Kind, rules: Rules) -> Confirmation:
    """Every GEMM asked and compared; the first on which the subject fails ends it."""
    asked: list[Asked] = []
    kept: list[np.ndarray] = []
    for case, at in _cases(kind):
        one = ask_one(subject, case)
        if isinstance(one, NoAnswer):
            if one.is_refusal:
                continue
            return Confirmation(failure=one.reason)
        kept.append(one.observed)
        asked.append(Asked(case=one.case, at=at, observed=one.observed[np.ix_(*at)]))
    memory = Memory()
    pairs = [(one, rules) for one in asked]
    equal, total = sum(one.outputs_equal(rules, memory) for one in asked), sum(one.size for one in asked)
    return Confirmation(
        outputs_equal=equal,
        outputs_total=total,
        left=what_is_left(pairs, memory) if equal < total else None,
        unsteady=_unsteady(subject, asked, kept),
    )


def _unsteady(subject: Subject, asked: list[Asked], kept: list[np.ndarray]) -> str:
    """The first GEMM once more, after all others."""
    if not asked:
        return ""
    first = asked[0]
    if _differ(kept[0][np.ix_(*first.at)] if first.at else kept[0], first.observed):
        return f"{first.case.id}: a later call wrote to its output"
    whole = kept[0].copy()
    again = ask_one(subject, first.case)
    if isinstance(again, NoAnswer):
        return f"{first.case.id}: run again after others, it gave no output: {again.reason}"
    if _differ(whole, again.observed):
        return f"{first.case.id}: run again after others, it gave other bits"
    return ""


def _differ(x: np.ndarray, y: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(different(x, y).any())


def _cases(kind: Kind) -> Iterator[tuple[GemmCase, Part]]:
    """Each with the rows and columns that are looked at."""
    types: tuple[Format, ...] = (BFLOAT16, FLOAT16) if kind.with_bias else (FLOAT32, BFLOAT16, FLOAT16)
    is_blockwise = kind.pair[0].is_blockwise
    lengths = (384, 1152) if is_blockwise else (1168, 1040)
    plain, *mixed = [(E4M3FN, E4M3FN)] if is_blockwise else HOPPER.format_pairs
    table = [(name, plain, (_SIZE, _SIZE, lengths[i % 2])) for i, name in enumerate(_DISTRIBUTIONS)]
    table += [("bits", formats, (_SIZE, _SIZE, lengths[1])) for formats in mixed]
    for (distribution, formats, shape), out_dtype in ((row, fmt) for row in table for fmt in types):
        sizes = "x".join(map(str, shape))
        name = f"confirmation {kind.name} {distribution} {formats[0]} x {formats[1]} {sizes}"
        case = scaled_case(
            name,
            kind.pair,
            formats,
            shape,
            distribution,
            with_bias=kind.with_bias,
            out_dtype=out_dtype,
            use_fast_accum=kind.use_fast_accum,
        )
        r = rng(name)
        yield case, (places(r, shape[0]), places(r, shape[1]))


def places(r: np.random.Generator, size: int, count: int = _LOOKED_AT) -> np.ndarray:
    """Some rows or columns, in order: one drawn from each of `count` parts, one of every 16 at least, and the ends."""
    parts = min(size, max(count, -(-size // 16)))
    ends = np.linspace(0, size, parts + 1).astype(int)
    found = r.integers(ends[:-1], ends[1:])
    found[0], found[-1] = 0, size - 1
    return found

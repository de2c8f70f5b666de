"""Do the bits of a row depend on how many rows there are?

Trainer and server agree only if they do not. The rows of the largest GEMM are put again in smaller ones; their bits
are compared with each other, which needs no rules, and with the rules, which tells what changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.asked import NoAnswer, ask_one
from f8emu.conformance.diagnosis.confirmation import places
from f8emu.conformance.diagnosis.probe import Kind
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.distributions import rng
from f8emu.conformance.gemm import GemmCase
from f8emu.conformance.gemm_cases import scaled_case
from f8emu.conformance.subject import Subject
from f8emu.spec import BFLOAT16, FLOAT32, HOPPER, Granularity

MS = (1, 2, 7, 16, 17, 64, 128, 129, 256)
"""Rows: one token, tails of a tile, whole tiles, one row more."""
_N, _K = 32, 6144
"""Few columns and a long K: where a library splits K by the number of rows [PLAN-2]."""
_SPLITS = (*range(1, 9), 15, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAtM:
    """What became of the rows in a GEMM of `m` rows."""

    m: int
    """As many as ran."""
    is_same: bool = False
    """The bits that the rows have in the largest GEMM that ran."""
    outputs_equal: int = 0
    """Of a sample, under the rules."""
    outputs_total: int = 0
    split_k: int | None = None
    """The slices of K that explain the sample; None: none does."""
    reason: str = ""
    """Why it did not run."""
    has_failed: bool = False
    """It is offered, and gave no output; the reason says what it gave instead."""


def rows_at(subject: Subject, kind: Kind, rules: Rules, ms: Sequence[int] = MS) -> Iterator[RowsAtM]:
    """One answer for each number of rows, the largest first."""
    largest: np.ndarray | None = None
    whole = _case(kind, max(ms))
    columns = places(rng("columns", kind.name), whole.output_shape[1], 8)
    for m in sorted(set(ms), reverse=True):
        case = _first_rows(whole, m)
        padded = subject.rows_run(case)
        if padded != m:
            yield RowsAtM(m=m, reason=f"{subject.name} takes it padded to {padded} rows")
            continue
        one = ask_one(subject, case)
        if isinstance(one, NoAnswer):
            yield RowsAtM(m=m, reason=one.reason or "not offered", has_failed=not one.is_refusal)
            continue
        if largest is None:
            largest = one.observed
        with np.errstate(invalid="ignore"):
            is_same = not different(one.observed, largest[:m]).any()
        rows = places(rng("rows", m), m, 4)
        sample = replace(one, at=(rows, columns), observed=one.observed[np.ix_(rows, columns)])
        splits = (rules.split_k, *(s for s in _SPLITS if s != rules.split_k))
        scores = ((s, sample.outputs_equal(replace(rules, split_k=s))) for s in splits)
        first = sample.outputs_equal(rules)
        explained = next((s for s, score in scores if score == sample.size), None)
        yield RowsAtM(
            m=m, is_same=is_same, outputs_equal=first, outputs_total=sample.size, split_k=explained
        )  # fmt: skip


def _case(kind: Kind, m: int) -> GemmCase:
    n = 128 if kind.pair[0].is_blockwise else _N
    return scaled_case(
        f"rows {kind.name}",
        kind.pair,
        HOPPER.format_pairs[0],
        (m, n, _K),
        "normal",
        with_bias=kind.with_bias,
        out_dtype=BFLOAT16 if kind.with_bias else FLOAT32,
        use_fast_accum=kind.use_fast_accum,
    )


def _first_rows(case: GemmCase, m: int) -> GemmCase:
    scale = case.scale_a
    assert scale is not None
    kept = Granularity(case.granularity_a).scale_shape(m, case.k)[0]
    return replace(case, id=f"{case.id} {m}", a=case.a[:m], scale_a=scale[:kept])

"""Do the rules hold at other sizes, and do the bits of a row depend on how many rows there are?

Trainer and server agree only if they do not. The rows of the largest GEMM are put again in smaller ones; their bits
are compared with each other, which needs no rules; thousands of rows likewise, with a short K. Those, more columns and
a longer K are judged by the rules, at rows and columns of every tile: a split of K that explains them is told apart
from what nothing explains.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from f8emu.conformance.cases.distributions import rng
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.gemm_cases import scaled_case
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.asked import Asked, NoAnswer, ask_one
from f8emu.conformance.diagnosis.confirmation import places
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.probe import MANY, Kind
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.run.subject import Subject
from f8emu.spec import BFLOAT16, FLOAT32, HOPPER, Granularity

MS = (1, 2, 7, 16, 17, 64, 128, 129, 256)
"""Rows: one token, tails of a tile, whole tiles, one row more."""
MANY_MS = (257, 513, 1040, 4112)
"""More rows, with a short K: what a grid or an index that is too small loses."""
_N, _K = 32, 6144
"""Few columns and a long K: where a library splits K by the number of rows [PLAN-2]."""
_SHORT_K, _MIDDLE_K, _LONG_K = 128, 1152, 8320
_LONG_K_ROWS = 144
"""More than a tile of 64 or 128."""
_SPLITS = (*range(1, 9), 15, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """What became of a GEMM of one size."""

    dimension: str
    """M, N or K."""
    size: int
    is_same: bool = True
    """The rows have the bits that they have in the largest GEMM that ran."""
    outputs_equal: int = 0
    """How many outputs of a sample equal those of the rules."""
    outputs_total: int = 0
    split_k: int | None = None
    """The slices of K that explain the sample; None: none does."""
    reason: str = ""
    """Why it did not run."""
    has_failed: bool = False
    """It is offered, and gave no output; the reason says what it gave instead."""

    @property
    def name(self) -> str:
        return f"{self.dimension} = {self.size}"

    @property
    def misses(self) -> bool:
        """It ran, and neither the rules nor a split of K give its outputs."""
        return not self.reason and self.split_k is None


def sizes_asked(subject: Subject, kind: Kind, ms: Sequence[int] = ()) -> Iterator[tuple[str, GemmCase]]:
    """The GEMMs by the dimension that they are about: numbers of rows, the largest first; more columns; a long K.

    `ms` are numbers of rows to ask instead of MS and MANY_MS.
    """
    for rows, k in [(ms, _K)] if ms else [(MS, _K), (MANY_MS, _SHORT_K)]:
        whole = _case(kind, "rows", (max(rows), 128 if kind.pair[0].is_blockwise else _N, k))
        for m in sorted(set(rows), reverse=True):
            yield "M", _first_rows(whole, m)
    is_free = subject.takes_any_size or not kind.pair[0].is_blockwise
    few, many, most = (16, MANY, 2064) if is_free else (128, 384, 2176)
    yield "N", _case(kind, "columns", (few, many, _MIDDLE_K))
    yield "N", _case(kind, "many columns", (few, most, _SHORT_K))
    yield "K", _case(kind, "long", (_LONG_K_ROWS if is_free else few, few, _LONG_K))


def sizes_count(ms: Sequence[int] = ()) -> int:
    """How many `sizes_asked` there are."""
    return len(set(ms or (*MS, *MANY_MS))) + 3


def at_sizes(subject: Subject, kind: Kind, rules: Rules, ms: Sequence[int] = ()) -> Iterator[AtSize]:
    """One answer for each of `sizes_asked`."""
    largest: dict[int, np.ndarray] = {}  # by K
    for dimension, case in sizes_asked(subject, kind, ms):
        size = {"M": case.output_shape[0], "N": case.output_shape[1], "K": case.k}[dimension]
        known = AtSize(dimension=dimension, size=size)
        padded = subject.rows_run(case)
        if dimension == "M" and padded != size:
            yield replace(known, reason=f"{subject.name} takes it padded to {padded} rows")
            continue
        one = ask_one(subject, case)
        if isinstance(one, NoAnswer):
            yield replace(known, reason=one.reason or "not offered", has_failed=not one.is_refusal)
            continue
        if dimension == "M":
            whole = largest.setdefault(case.k, one.observed.copy())
            with np.errstate(invalid="ignore"):
                known = replace(known, is_same=not different(one.observed, whole[:size]).any())
        yield _judged(known, one, rules)


def _judged(known: AtSize, one: Asked, rules: Rules) -> AtSize:
    """The size, judged by a sample of rows and columns, under the rules as they are and under other splits of K."""
    m, n = one.case.output_shape
    r, memory = rng("sizes", known.name), Memory()
    at = places(r, m, 8), places(r, n, 8)
    sample = replace(one, at=at, observed=one.observed[np.ix_(*at)])
    splits = dict.fromkeys((rules.split_k, *_SPLITS))
    return replace(
        known,
        outputs_equal=sample.outputs_equal(rules, memory),
        outputs_total=sample.size,
        split_k=next(
            (s for s in splits if sample.outputs_equal(replace(rules, split_k=s), memory) == sample.size), None
        ),
    )


def _case(kind: Kind, name: str, shape: tuple[int, int, int]) -> GemmCase:
    return scaled_case(
        f"{name} {kind.name}",
        kind.pair,
        HOPPER.format_pairs[0],
        shape,
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

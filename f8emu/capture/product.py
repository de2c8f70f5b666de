"""The product of a captured GEMM from its captured operands, whole or of some rows and columns."""

import math
from typing import NamedTuple

import numpy as np

from f8emu.capture.read import Arrays
from f8emu.capture.record import GemmRecord
from f8emu.conformance.compare import different
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import CHIPS, HOPPER, OPERANDS, Granularity, format_by_name

_BLOCK = 128
_MOST_SLICES = 16
_SHORTEST_SLICE = 64
"""The shortest slice of K, in bfloat16 [BF16-2]."""
_TRIED = 64
"""Rows and columns on which another S is tried."""


class Sampled(NamedTuple):
    """Some rows and columns of a GEMM."""

    rows: np.ndarray
    columns: np.ndarray
    a: np.ndarray
    b: np.ndarray
    scale_a: np.ndarray | None
    scale_b: np.ndarray | None
    product: np.ndarray
    """The product as captured."""


def sampled(record: GemmRecord, arrays: Arrays, outputs: int | None) -> Sampled:
    """All rows and columns, or of `outputs` outputs at most as many of both as that allows.

    Rows with 128x128 scales are drawn in whole blocks, so there may be 128 of them where fewer would do.
    """
    if outputs is None or outputs >= record.m * record.n:
        return taken(record, arrays, np.arange(record.m), np.arange(record.n))
    # Drawn by the record's number: a second replay judges the same outputs.
    generator = np.random.default_rng(record.order)
    count = min(record.m, math.isqrt(outputs))
    rows = _drawn(record.m, count, record.granularity_a, generator)
    columns = _drawn(record.n, min(record.n, outputs // count), record.granularity_b, generator)
    return taken(record, arrays, rows, columns)


def _drawn(size: int, count: int, granularity: str, generator: np.random.Generator) -> np.ndarray:
    if Granularity(granularity) is not Granularity.BLOCKWISE_128X128:
        return np.sort(generator.choice(size, min(count, size), replace=False))
    blocks = np.arange(-(-size // _BLOCK))
    chosen = np.sort(generator.choice(blocks, max(1, min(count // _BLOCK, len(blocks))), replace=False))
    return _whole_blocks(chosen, size)


def _whole_blocks(blocks: np.ndarray, size: int) -> np.ndarray:
    rows = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    return rows[rows < size]


def taken(record: GemmRecord, arrays: Arrays, rows: np.ndarray, columns: np.ndarray) -> Sampled:
    """These rows and columns, with their scales."""

    def scale(side: str, granularity: str, places: np.ndarray, size: int) -> np.ndarray | None:
        found = arrays.get(f"{side}.scale")
        if found is None or found.shape[0] == 1 != size:
            return found  # one for all, or of one block
        per_row = Granularity(granularity) is not Granularity.BLOCKWISE_128X128
        return found[places] if per_row else found[np.unique(places // _BLOCK)]

    return Sampled(
        rows=rows,
        columns=columns,
        a=arrays["a.codes"][rows],
        b=arrays["b.codes"][columns],
        scale_a=scale("a", record.granularity_a, rows, record.m),
        scale_b=scale("b", record.granularity_b, columns, record.n),
        product=arrays["product"][np.ix_(rows, columns)],
    )


def product_of(record: GemmRecord, part: Sampled, judge: Subject, split_k: int) -> np.ndarray:
    """What the captured operands give.

    Raises:
        NotOffered: a chip that this version does not know.
        F8Error: operands that the chip does not multiply.
    """
    # 1. The chip and the output type that the record names.
    chip = CHIPS.get(record.chip)
    if chip is None:
        raise NotOffered(f"this version of f8emu does not know the chip {record.chip!r}")
    out_format = format_by_name(record.out_dtype)
    if 0 in (*part.a.shape, *part.b.shape):
        return np.zeros(part.product.shape, part.product.dtype)
    # Zeros along K add nothing, but the library slices the padded length [CHAIN-3].
    a, b = _padded(part.a), _padded(part.b)
    # 2. In high precision no scales; else as the chip pairs them.
    if part.scale_a is None or part.scale_b is None:
        return judge.verbs["mm"](a, b.T, out_dtype=out_format, split_k=split_k, chip=chip)
    granularities = Granularity(record.granularity_a), Granularity(record.granularity_b)
    scales = [part.scale_a, part.scale_b]
    if Granularity.ROWWISE in granularities:  # beside it, a tensorwise operand has its scale in every row
        granularities = (Granularity.ROWWISE, Granularity.ROWWISE)
        scales = [np.broadcast_to(s, (len(x), 1)).copy() for s, x in zip(scales, (a, b), strict=True)]
    return judge.verbs["scaled_mm"](
        a,
        b.T,
        scales[0],
        scales[1].T,
        granularity_a=granularities[0],
        granularity_b=granularities[1],
        out_dtype=out_format,
        use_fast_accum=record.use_fast_accum,
        split_k=split_k,
        chip=chip,
    )


def _padded(codes: np.ndarray) -> np.ndarray:
    # The slices of K are those of the padded length [CHAIN-3].
    beyond = -codes.shape[1] % HOPPER.size_multiple
    if not beyond:
        return np.ascontiguousarray(codes)
    return np.pad(codes.view(f"u{codes.itemsize}"), ((0, 0), (0, beyond))).view(codes.dtype)


def likely_cause(record: GemmRecord, arrays: Arrays, part: Sampled, wrong: np.ndarray, judge: Subject) -> str:
    """What the pattern of wrong outputs says: another S, one row (of a), one column (of b), one output."""
    # One wrong line of outputs is a wrong operand; wrong outputs all over may be another split of K.
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    of_a, of_b = OPERANDS[record.gemm]
    if len(rows) == len(columns) == 1:
        return "one output: the product itself"
    if len(rows) == 1:
        return f"all in row {part.rows[rows[0]]}: what differs is that row of a ({of_a}), or its scale"
    if len(columns) == 1:
        return f"all in column {part.columns[columns[0]]}: what differs is that row of b ({of_b}), or its scale"
    slices = _other_split(record, arrays, part.rows[rows], part.columns[columns], judge)
    if slices:
        return (
            f"every bit equals split-K with S = {slices}; the plan says "
            f"{record.split_k} ({record.split_k_source}) [CHAIN-3]"
        )
    return ""


def _other_split(
    record: GemmRecord, arrays: Arrays, rows: np.ndarray, columns: np.ndarray, judge: Subject
) -> int | None:
    """The S that explains the outputs in these rows and columns, if one does."""
    rows, columns = (
        _whole_blocks(np.unique(places // _BLOCK)[:1], size)
        if Granularity(granularity) is Granularity.BLOCKWISE_128X128
        else places[:_TRIED]
        for places, size, granularity in (
            (rows, record.m, record.granularity_a),
            (columns, record.n, record.granularity_b),
        )
    )
    part = taken(record, arrays, rows, columns)
    # a few rows and columns decide it: every S is tried on them
    most = min(_MOST_SLICES, -(-record.k // _SHORTEST_SLICE))
    for slices in range(1, most + 1):
        if slices != record.split_k and not different(product_of(record, part, judge, slices), part.product).any():
            return slices
    return None

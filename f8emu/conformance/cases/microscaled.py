"""Generated GEMMs with E8M0 scales [MX-1..5], for kernels alone. No expected values.

Random scales hide a wrong address: here neighbours differ in rows, blocks of 32 and tiles of 128 x 4, and sizes end
within a tile. `near` scales let every block reach the sum; `far` ones, of any byte, belong to rows with one block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import (
    codes_of,
    draw,
    draw_codes,
    drawn_sample,
    dtype_of,
    grouped_case,
    rng,
)
from f8emu.conformance.cases.gemm import Family, GemmCase, Memory, Mode
from f8emu.spec import (
    BFLOAT16,
    BLACKWELL_TCGEN05,
    E8M0FNU,
    FLOAT16,
    FLOAT32,
    HIGH_PRECISION,
    Format,
    Granularity,
)
from f8emu.spec.gemm_call import GroupKind
from f8emu.spec.scaling import MX_BLOCK

FORMATS = BLACKWELL_TCGEN05.format_pairs
SHAPES = (
    *((1, 16, 32), (5, 48, 416), (33, 64, 160), (128, 128, 128), (129, 48, 288), (48, 272, 544), (200, 16, 96)),
    *((16, 16, 4128), (272, 144, 64)),
)
"""M, N, K: a row, 13 blocks, whole tiles, a row more, tiles along N, a part of a tile, a long K, tiles of both."""
GROUPS: dict[GroupKind, tuple[tuple[int, ...], ...]] = {
    GroupKind.ROWS: ((5, 5, 37, 170, 200), (128, 256, 261), (1, 2, 3, 140)),
    GroupKind.COLUMNS: ((16, 16, 48, 192),),
    GroupKind.INNER: ((32, 32, 192, 352), (160, 288, 320)),
    GroupKind.BATCH: ((33, 66, 99), (130, 260)),
}
"""Ends of groups that restart the tiling: empty ones, of parts of a tile, of several tiles."""
_ONE = 127
_PAIR = Granularity.BLOCKWISE_1X32


def as_scales(codes: np.ndarray) -> np.ndarray:
    """E8M0 scales of these bytes."""
    return codes.astype(np.uint8).view(dtype_of(E8M0FNU))


def near(rows: int, blocks: int, middle: int = _ONE, *, turn: int = 0) -> np.ndarray:
    """Scales within 2^-6 and 2^6 of a middle, others in the next row, block, and tile of either."""
    r, b = np.indices((rows, blocks))
    return as_scales(middle + (7 * r + 5 * b + 3 * (r // 32) + turn) % 13 - 6)


def mx_case(
    name: str,
    operands: tuple[np.ndarray, np.ndarray],
    scales: tuple[np.ndarray, np.ndarray] | None = None,
    out_dtype: Format = FLOAT32,
    **fields: Any,
) -> GemmCase:
    """A GEMM of codes [M, K], [N, K] and E8M0 scales [M, K/32], [N, K/32]; `near` ones by default."""
    a, b = operands
    blocks = -(-a.shape[1] // MX_BLOCK)
    scale_a, scale_b = scales or (near(len(a), blocks), near(len(b), blocks, turn=6))
    pair = dict.fromkeys(("granularity_a", "granularity_b"), _PAIR)
    fields = {"mode": Mode.MX, "chip": BLACKWELL_TCGEN05, **pair, **fields}
    return GemmCase(id=name, a=a, b=b, scale_a=scale_a, scale_b=scale_b.T, out_dtype=out_dtype, **fields)


def _drawn(
    name: str, shape: tuple[int, int, int], formats: tuple[Format, Format] = FORMATS[0], codes: str = "bits"
) -> tuple[np.ndarray, np.ndarray]:
    (m, n, k), (of_a, of_b) = shape, formats
    return draw_codes(codes, (m, k), of_a, f"{name}a"), draw_codes(codes, (n, k), of_b, f"{name}b")


def mx_cases(*, with_bias: bool = False) -> Iterator[GemmCase]:
    """Sizes, addresses, bytes, values, every code, layers, calls in turn; biases [MX-5]."""
    # 1. Sizes, with near scales: every block reaches the sum.
    for number, shape in enumerate(SHAPES):
        name, formats = f"mxfp8 near scales {number}", FORMATS[number % 3]
        operands, out_dtype = _drawn(name, shape, formats), HIGH_PRECISION[number % 3]
        middle = _ONE - 9 * (out_dtype == FLOAT16)  # most sums are finite
        scales = (
            near(shape[0], -(-shape[2] // MX_BLOCK), middle),
            near(shape[1], -(-shape[2] // MX_BLOCK), middle, turn=6),
        )
        yield mx_case(name, operands, scales, out_dtype, family=Family.TILES)
    # 2. Addresses: one block of each row has codes, so that its scale, of any byte, alone decides.
    for side, shape in enumerate(((293, 16, 288), (16, 304, 288))):
        name = f"mxfp8 far scales of {'ab'[side]}"
        operands, blocks = _drawn(name, shape, codes="normal"), shape[2] // MX_BLOCK
        rows, r = shape[side], rng(name)
        alone = np.arange(rows)[:, None] * 2 % blocks == np.arange(shape[2]) // MX_BLOCK
        codes_of(operands[side])[...] *= alone
        of_side = as_scales(r.integers(8, 247, (rows, blocks)))
        other = near(shape[1 - side], blocks)
        yield mx_case(name, operands, (other, of_side) if side else (of_side, other), family=Family.SCALES)
    yield from _values()
    # 3. Every code, a layer, and calls in turn, in the same memory too.
    every = _drawn("mxfp8 every code", (256, 256, 32))
    for codes in map(codes_of, every):
        codes[...] = 0
        codes[:, 3] = rng("mxfp8 every code").permutation(256)
    yield mx_case("mxfp8 every code", every, family=Family.EVERY_CODE)
    sample = drawn_sample(8192, 4096, rng("mxfp8 layer"))
    layer = _drawn("mxfp8 layer", (len(sample.rows), len(sample.cols), 4096), codes="normal")
    yield mx_case("mxfp8 llama3-8b wq", layer, out_dtype=BFLOAT16, sample=sample, family=Family.LAYERS)
    for memory in Memory:
        case = mx_case(f"mxfp8 turns {memory.value}", _drawn("mxfp8 turns", (16, 48, 160)), memory=memory)
        scaled = replace(case, id=f"{case.id} scaled", scale_a=near(16, 5, turn=4), scale_b=near(48, 5).T)
        yield replace(case, between=(scaled,), family=Family.TURNS)
    # 4. [MX-5] A bias.
    for number, out_dtype in enumerate(HIGH_PRECISION if with_bias else ()):
        if out_dtype != FLOAT32:
            name = f"mxfp8 bias {number}"
            bias, scales = draw("normal", (1, 48), out_dtype, name)[0], (near(16, 5, 118), near(48, 5, 118, turn=6))
            yield mx_case(name, _drawn(name, (16, 48, 160)), scales, out_dtype, bias=bias, family=Family.BIAS)


def _values() -> Iterator[GemmCase]:
    """[OP-1] Blocks of zeros, beside NaN scales too [MX-2], and of subnormals; E5M2 with infinities and NaN.

    Bytes 0, 254 and 255, and sums that are subnormal or too large, are in the probes of the diagnosis.
    """
    shape = 72, 80, 160
    zeros, nan = _drawn("mxfp8 zeros", shape), (near(72, 5), near(80, 5, turn=6))
    codes_of(zeros[0])[:, 32:64], codes_of(zeros[1])[::2, 64:128] = 0x80, 0
    codes_of(nan[0])[5, 1] = codes_of(nan[1])[6, 2] = E8M0FNU.nan_code
    yield mx_case("mxfp8 blocks of zeros", zeros, family=Family.SCALES)
    yield mx_case("mxfp8 blocks of zeros, NaN scales", zeros, nan, BFLOAT16, family=Family.SCALES)
    for number, formats in enumerate(FORMATS[:2]):
        for codes in ("subnormals", "specials", "cancellation"):
            words = f"mxfp8 {codes} {formats[0].name}"
            drawn = _drawn(words, shape, formats, codes)
            yield mx_case(words, drawn, out_dtype=HIGH_PRECISION[number], family=Family.CODES)


def mx_grouped_cases(kinds: Mapping[GroupKind, int]) -> Iterator[GemmCase]:
    """Groups of the kinds whose sizes are multiples, each with its own tiles of scales."""
    for kind, multiple in kinds.items():
        for number, ends in enumerate(GROUPS[kind]):
            name = f"mxfp8 groups {kind.name.lower()} {number}"
            of = "bits" if number % 2 else "normal"
            ends = tuple(np.cumsum(-(-np.diff(ends, prepend=0) // multiple) * multiple).tolist())
            case = grouped_case(name, ends, (48, 160), of, rng(name), kind=kind, out_dtype=BFLOAT16)
            yield in_mx_groups(case)


def in_mx_groups(case: GemmCase) -> GemmCase:
    """A grouped GEMM with near E8M0 scales, and no others."""
    lead_a, blocks = case.a.shape[:-1], -(-case.k // MX_BLOCK)
    scale_a = near(int(np.prod(lead_a)), blocks).reshape(*lead_a, blocks)
    scale_b = near(int(np.prod(lead_b := case.b.shape[:-1])), blocks, turn=6).reshape(*lead_b, blocks)
    return replace(
        case,
        mode=Mode.GROUPED_MX,
        chip=BLACKWELL_TCGEN05,
        scale_a=scale_a,
        scale_b=scale_b.swapaxes(-1, -2),
        granularity_a=_PAIR,
        granularity_b=_PAIR,
    )

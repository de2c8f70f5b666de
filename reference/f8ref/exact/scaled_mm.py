"""One output of a GEMM: accumulate, scale, add a bias, round.

Every `*` and `+` of an epilogue is float32, rounded to nearest even on its own; the fused multiply-add of the blockwise
kernels is the one place where a product is not rounded before it is added [EPI-5].
"""

from collections.abc import Sequence

from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, FLOAT32, Format, Overflow
from f8emu.spec.scaling import Granularity
from f8ref.exact.accumulate import Product, accumulate, accumulate_split, chain, k_slices, microscaled, products_of
from f8ref.exact.cast import decode, encode, float32
from f8ref.exact.number import ZERO, Number, add, multiply

BLOCK_K = 128
"""K that shares one scale in both blockwise granularities."""
MX_BLOCK_K = 32
"""[MX-1] K that shares one E8M0 scale."""


def scaled_dot(
    a_codes: Sequence[int],
    b_codes: Sequence[int],
    *,
    a_format: Format,
    b_format: Format,
    scale_a: Sequence[int],
    scale_b: Sequence[int],
    granularity_a: Granularity = Granularity.TENSORWISE,
    granularity_b: Granularity = Granularity.TENSORWISE,
    bias: int | None = None,
    out_format: Format = BFLOAT16,
    use_fast_accum: bool = False,
    split_k: int = 1,
    is_grouped: bool = False,
    chip: Chip = HOPPER,
) -> int:
    """Output [m, n] of a scaled GEMM, from row m of a and column n of b.

    `a_codes` and `b_codes` are the K codes of that row and column; `scale_a` and `scale_b` the float32 codes of the
    scales that meet them: one, or for the blockwise granularities one for each 128 of K; under 1x32 they are the E8M0
    bytes of each 32. `bias` is the float32 code of bias[n]. A grouped GEMM has row and column of one group; if it is
    rowwise, `is_grouped` multiplies the scales in the other order [EPI-6].

    Exactness: the bits of cuBLAS on an H200, by the recorded cases that `reference/README.md` lists.
    """
    # 1. What the chip multiplies, and lengths that fit.
    formats = (a_format, b_format)
    block_k = MX_BLOCK_K if granularity_a.is_microscaled else BLOCK_K
    blocks = -(-len(a_codes) // block_k) if granularity_a.is_blockwise else 1
    if not set(formats) <= set(chip.operand_formats):
        known = " or ".join(f.name for f in chip.operand_formats)
        raise OperandError(f"scaled_dot: codes of {known} expected; got {a_format} and {b_format}")
    refusal = chip.refusal(formats, (granularity_a, granularity_b), use_fast_accum=use_fast_accum)
    if refusal is not None:
        raise UnsupportedError(f"scaled_dot: {refusal}")
    if len(a_codes) != len(b_codes):
        raise OperandError(f"scaled_dot: a and b must have the same K; got {len(a_codes)} and {len(b_codes)} codes")
    if len(scale_a) != blocks or len(scale_b) != blocks:
        raise OperandError(
            f"scaled_dot: {granularity_a.value} x {granularity_b.value} with K = {len(a_codes)} takes {blocks} "
            f"scale(s) for each operand; got {len(scale_a)} and {len(scale_b)}"
        )

    # 2. The accumulator [ACC-1..5], chained [CHAIN-1..3], then its scales; block scales belong inside the chain
    # [EPI-5], E8M0 scales inside its steps [MX-2].
    addend = None if bias is None else decode(bias, FLOAT32)
    if granularity_a.is_microscaled:
        model = chip.accumulation((granularity_a, granularity_b))
        products = microscaled(products_of(a_codes, b_codes, *formats, model), scale_a, scale_b, MX_BLOCK_K)
        return output_code(accumulate_split(products, model, split_k), addend, out_format)  # [MX-5]
    scales_a = [decode(code, FLOAT32) for code in scale_a]
    scales_b = [decode(code, FLOAT32) for code in scale_b]
    if granularity_a.is_blockwise:
        model = chip.accumulation((granularity_a, granularity_b))
        products = products_of(a_codes, b_codes, *formats, model)
        both_vectors = granularity_a is granularity_b
        result = blockwise(products, scales_a, scales_b, model, split_k, both_vectors=both_vectors)
    else:
        model = chip.accumulation((granularity_a, granularity_b), use_fast_accum=use_fast_accum)
        accumulator = accumulate_split(products_of(a_codes, b_codes, *formats, model), model, split_k)
        epilogue = tensorwise if granularity_a is Granularity.TENSORWISE else grouped if is_grouped else rowwise
        result = epilogue(accumulator, scales_a[0], scales_b[0])
    # 3. The bias [EPI-3] and the one rounding [EPI-4].
    return output_code(result, addend, out_format)


def tensorwise(accumulator: Number, scale_a: Number, scale_b: Number) -> Number:
    """[EPI-1] `acc * (scale_a * scale_b) + 0`: a result of -0 becomes +0, which no other epilogue does."""
    return add(float32(multiply(accumulator, float32(multiply(scale_a, scale_b)))), ZERO)


def rowwise(accumulator: Number, scale_a: Number, scale_b: Number) -> Number:
    """[EPI-2] `(acc * scale_b[n]) * scale_a[m]`."""
    return float32(multiply(float32(multiply(accumulator, scale_b)), scale_a))


def grouped(accumulator: Number, scale_a: Number, scale_b: Number) -> Number:
    """[EPI-6] `(acc * scale_a[m]) * scale_b[n]`."""
    return rowwise(accumulator, scale_b, scale_a)


def blockwise(
    products: Sequence[Product],
    scales_a: Sequence[Number],
    scales_b: Sequence[Number],
    model: AccumulationModel,
    split_k: int = 1,
    *,
    both_vectors: bool,
) -> Number:
    """[EPI-5] In slices [CHAIN-3]: each has its own float32 total, and the totals are added in float32, in order."""
    totals: list[Number] = []
    first = 0
    for part in k_slices(products, model, split_k):
        assert first % BLOCK_K == 0, "a slice holds whole blocks"
        # The last block of K may be shorter, and has a scale of its own.
        blocks = slice(first // BLOCK_K, -(-(first + len(part)) // BLOCK_K))
        totals.append(block_total(part, scales_a[blocks], scales_b[blocks], model, both_vectors=both_vectors))
        first += len(part)
    total, *others = totals or [ZERO]
    for result in others:
        total = float32(add(total, result))
    return total


def block_total(
    products: Sequence[Product],
    scales_a: Sequence[Number],
    scales_b: Sequence[Number],
    model: AccumulationModel,
    *,
    both_vectors: bool,
) -> Number:
    """[EPI-5] One chain from zero for each 128 of K, fused into a float32 total.

    `total = fma(p * scale_a, scale_b, total)` where both operands have 1x128 scales,
    `total = fma(p, scale_a * scale_b, total)` where one has 128x128 scales. The fma rounds once.
    """
    total = ZERO
    for block, (scale_a, scale_b) in enumerate(zip(scales_a, scales_b, strict=True)):
        partial = chain(products[block * BLOCK_K : (block + 1) * BLOCK_K], model)
        # The first product rounds to float32; the second one is the fma's, exact until the sum is rounded.
        if both_vectors:
            scaled = multiply(float32(multiply(partial, scale_a)), scale_b)
        else:
            scaled = multiply(partial, float32(multiply(scale_a, scale_b)))
        total = float32(add(scaled, total))
    return total


def output_code(result: Number, bias: Number | None, out_format: Format) -> int:
    """[EPI-3] The bias is added in float32 after the scales, [EPI-4] then one rounding; overflow gives infinity."""
    if bias is not None:
        result = float32(add(result, bias))
    return encode(result, out_format, Overflow.NONFINITE)


def group_of_row(row: int, offs: Sequence[int]) -> int:
    """[EPI-6] The group of a row of a grouped GEMM: `offs` holds where each group ends."""
    return sum(row >= end for end in offs)


def mm_dot(
    a_codes: Sequence[int],
    b_codes: Sequence[int],
    *,
    out_format: Format = BFLOAT16,
    split_k: int = 1,
    chip: Chip = HOPPER,
) -> int:
    """Output [m, n] of the bfloat16 matmul, from the bfloat16 codes of row m of a and column n of b.

    [BF16-1] One chain by `chip.bfloat16`, [BF16-2] or split-K, then one rounding.
    """
    if len(a_codes) != len(b_codes):
        raise OperandError(f"mm_dot: a and b must have the same K; got {len(a_codes)} and {len(b_codes)} codes")
    products = products_of(a_codes, b_codes, BFLOAT16, BFLOAT16, chip.bfloat16)
    return output_code(accumulate_split(products, chip.bfloat16, split_k), None, out_format)


def mma(
    a_codes: Sequence[int],
    b_codes: Sequence[int],
    c: int,
    *,
    a_format: Format,
    b_format: Format,
    scale_a: Sequence[int] | None = None,
    scale_b: Sequence[int] | None = None,
    out_format: Format = FLOAT32,
    chip: Chip = HOPPER,
) -> int:
    """`dot(a, b) + c` by one matrix instruction of the chip, or by several in a row if K is longer: a code, as c is.

    With E8M0 bytes `scale_a` and `scale_b`, one for each 32 of K, it is the block-scaled instruction [MX-2].
    Where the accumulator is a term of a step, c is the first accumulator [ACC-2], [CHIP-6]; where instructions are made
    of others, it is added to their sum [CHIP-3].
    """
    scales = [scale for scale in (scale_a, scale_b) if scale is not None]
    model = chip.instruction("mma", (a_format, b_format), out_format, is_microscaled=bool(scales)).model
    if len(a_codes) != len(b_codes):
        raise OperandError(f"mma: a and b must have the same K; got {len(a_codes)} and {len(b_codes)} codes")
    blocks = -(-len(a_codes) // MX_BLOCK_K)
    if scales and list(map(len, scales)) != [blocks, blocks]:
        raise OperandError(f"mma: scale_a and scale_b must have {blocks} bytes, or be absent; got {scales}")
    products = products_of(a_codes, b_codes, a_format, b_format, model)
    if scales:
        products = microscaled(products, scales[0], scales[1], MX_BLOCK_K)
    return encode(accumulate(products, model, decode(c, out_format)), out_format, Overflow.NONFINITE)

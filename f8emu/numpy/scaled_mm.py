"""The GEMMs: scaled_mm, scaled_grouped_mm and mm, emulated."""

import numpy as np
from numpy.typing import ArrayLike

from f8emu.numpy import emulation
from f8emu.numpy.dtypes import Array, FormatLike, array_of, output_format, typed
from f8emu.numpy.planned import layout_of, mm_split_k, scaled_mm_split_k
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER, chip_by_name
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.formats import BFLOAT16
from f8emu.spec.scaling import Granularity
from f8ref.numpy.codec import typed_array


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    out_dtype: FormatLike = "bfloat16",
    use_fast_accum: bool = False,
    granularity_a: Granularity | str | None = None,
    granularity_b: Granularity | str | None = None,
    split_k: int | None = None,
    chip: Chip | str = HOPPER,
) -> Array:
    """The float8 GEMM of a chip's tensor core, Hopper's by default: `out = round(accumulate(a @ b) * scales + bias)`.

    Granularities that are not given are inferred from the shapes of the scales, as `torch._scaled_mm` does; the first
    that fits is taken: tensorwise (one element each), rowwise, then 1x128 before 128x128. Give them if the shapes fit
    more than one: a single row with block scales, or K <= 128.

    Shapes:
        a [M, K], b [K, N], float8, of any extents; float32 scales, of `a`: one element, [M, 1], [M, ceil(K / 128)] or
        [ceil(M / 128), ceil(K / 128)], and of `b`, as the transposed scales of `b.T`: one element, [1, N],
        [ceil(K / 128), N] or [ceil(K / 128), ceil(N / 128)]; bias [N] of any high precision -> [M, N] of out_dtype.

    Exactness: all recorded cases of an H200, every bit; NaN is all ones.

    Args:
        a: left operand.
        b: right operand.
        scale_a: factors that decode `a`.
        scale_b: factors that decode `b`.
        bias: added in float32 after scaling [EPI-3].
        out_dtype: float32, bfloat16 or float16: a Format, its name or a dtype.
        use_fast_accum: one chain over all of K [CHAIN-1] instead of promotion every 128 [CHAIN-2].
        granularity_a: of `scale_a`, if its shape is ambiguous.
        granularity_b: of `scale_b`, if its shape is ambiguous.
        split_k: the number of slices of K that are accumulated separately [CHAIN-3]; None takes it from the plan,
            `f8emu.split_k.plan` [PLAN-1..7]. A shape that the plan does not know is not split; a warning says so once.
        chip: whose bits: a profile such as those of `f8emu.spec.CHIPS`, or the name of one of them. Each says what it
            stands on (`evidence`). Hopper (an H200's) and H100 have a `plan`; for others S is 1.

    Raises:
        OperandError: wrong dtype, shape or scales.
        SpecError: an unknown chip, granularity or `out_dtype`, or a `split_k` below 1.
        UnsupportedError: a combination that the chip has no GEMM for.
    """
    call = "scaled_mm"
    on = chip_of(call, chip)
    out = output_format(call, out_dtype)
    a_MK, format_a = typed_array(array_of(call, "a", a), on.operand_formats, f"{call}: a")
    b_KN, format_b = typed_array(array_of(call, "b", b), on.operand_formats, f"{call}: b")
    sizes = _sizes(call, a_MK, b_KN)
    scales = typed(call, "scale_a", scale_a), typed(call, "scale_b", scale_b)
    pair = on.granularities_of(call, sizes, (scales[0].shape, scales[1].shape), (granularity_a, granularity_b))
    refusal = on.refusal((format_a, format_b), pair, use_fast_accum=use_fast_accum)
    if refusal is not None:
        raise UnsupportedError(f"{call}: {refusal}")
    if split_k is None:
        split_k = scaled_mm_split_k(
            sizes, (format_a, format_b), pair, out_dtype=out, use_fast_accum=use_fast_accum, chip=on
        )
    return emulation.scaled_mm(
        a_MK,
        b_KN,
        *scales,
        granularity_a=pair[0],
        granularity_b=pair[1],
        bias=None if bias is None else typed(call, "bias", bias),
        out_dtype=out,
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=on,
    )


def scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike,
    *,
    out_dtype: FormatLike = "bfloat16",
    use_fast_accum: bool = False,
    chip: Chip | str = HOPPER,
) -> Array:
    """`(acc * scale_a) * scale_b` per group of rows, each with its own `b[i]` [EPI-6].

    Group g is the rows from `offs[g - 1]` (0 for the first) up to `offs[g]`; a group may be empty.

    Shapes:
        a [total_M, K], b [groups, K, N], float8; scale_a float32 [total_M], scale_b float32 [groups, N]; offs
        integers [groups], the end of each group's rows, the last one total_M -> [total_M, N] of out_dtype.

    Exactness: that of `scaled_mm`.

    Raises:
        OperandError: wrong dtype or shape, or offsets that do not rise to total_M.
        SpecError: an unknown chip or `out_dtype`.
        UnsupportedError: formats that the chip has no GEMM for.
    """
    call = "scaled_grouped_mm"
    ends = array_of(call, "offs", offs)
    return emulation.scaled_grouped_mm(
        array_of(call, "a", a),
        array_of(call, "b", b),
        typed(call, "scale_a", scale_a),
        typed(call, "scale_b", scale_b),
        ends.astype(np.int32) if ends.dtype.kind in "iu" and (np.abs(ends) < 2**31).all() else ends,
        out_dtype=output_format(call, out_dtype),
        use_fast_accum=use_fast_accum,
        chip=chip_of(call, chip),
    )


def mm(
    a: ArrayLike,
    b: ArrayLike,
    *,
    out_dtype: FormatLike = "bfloat16",
    split_k: int | None = None,
    chip: Chip | str = HOPPER,
) -> Array:
    """The bfloat16 GEMM of a chip's tensor core, Hopper's by default, for GEMMs kept in high precision [BF16-1].

    Shapes:
        a [M, K], b [K, N], bfloat16 or values that bfloat16 holds, of any extents -> [M, N] of out_dtype.

    Exactness: that of `scaled_mm`; `split_k` as there [BF16-2]. The plan's depends on the strides of `a` and `b`.

    Raises:
        OperandError: wrong dtype or shape, or values that bfloat16 does not hold.
        SpecError: an unknown chip or `out_dtype`, or a `split_k` below 1.
        UnsupportedError: an `out_dtype` that no GEMM gives.
    """
    on, out = chip_of("mm", chip), output_format("mm", out_dtype)
    a_MK, b_KN = typed("mm", "a", a, BFLOAT16), typed("mm", "b", b, BFLOAT16)
    sizes = _sizes("mm", a_MK, b_KN)
    if split_k is None:
        split_k = mm_split_k(sizes, layout_of(a_MK, b_KN), out_dtype=out, chip=on)
    return emulation.mm(a_MK, b_KN, out_dtype=out, split_k=split_k, chip=on)


def _sizes(call: str, a_MK: Array, b_KN: Array) -> tuple[int, int, int]:
    """M, N and K."""
    if a_MK.ndim != 2 or b_KN.ndim != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise OperandError(
            f"{call}: a must be [M, K] and b [K, N]; got shapes {list(a_MK.shape)} and {list(b_KN.shape)}; pass a "
            "weight [N, K] as weight.T, flatten leading dimensions with a.reshape(-1, K)"
        )
    return a_MK.shape[0], b_KN.shape[1], a_MK.shape[1]


def chip_of(call: str, chip: Chip | str) -> Chip:
    """A profile, given itself or by its name; unlike a GPU's, it may be of one's own.

    Raises:
        SpecError: an unknown name.
    """
    return chip if isinstance(chip, Chip) else chip_by_name(call, chip)

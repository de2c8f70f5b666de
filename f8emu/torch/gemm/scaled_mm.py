"""The GEMMs: scaled_mm, scaled_grouped_mm and mm, on the tensor cores or emulated."""

from __future__ import annotations  # short signatures in `help`

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER, chip_by_name
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.formats import Format
from f8emu.spec.names import ChipName, EngineName, GranularityName, HighPrecisionName
from f8emu.spec.scaling import Granularity
from f8emu.torch.chip import output_dtype, require_tensor
from f8emu.torch.gemm import operators as gemm_operators


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | Format | HighPrecisionName | None = None,
    use_fast_accum: bool = False,
    engine: EngineName = "auto",
    granularity_a: Granularity | GranularityName | None = None,
    granularity_b: Granularity | GranularityName | None = None,
    split_k: int | None = None,
    chip: Chip | ChipName = HOPPER,
) -> Tensor:
    """The float8 GEMM of a chip's tensor core, Hopper's by default: `out = round(accumulate(a @ b) * scales + bias)`.

    The operands are those of `torch._scaled_mm`. Granularities that are not given are inferred from the shapes of the
    scales. The first that fits is taken: tensorwise (one element each), rowwise, then 1x128 before 128x128. Give them
    if more than one fits: a single row with block scales, or K <= 128.

    Shapes:
        a [M, K] row-major, b [K, N] column-major, float8, K and N multiples of 16; float32 scales, of `a`: one element,
        [M, 1], [M, ceil(K / 128)] or [ceil(M / 128), ceil(K / 128)], and of `b`, as the transposed scales of
        `b.t()`: one element, [1, N], [ceil(K / 128), N] or [ceil(K / 128), ceil(N / 128)]; bias [N] of out_dtype
        -> [M, N] of out_dtype.
        MXFP8, on chips such as "B200": float8_e8m0fnu scales [M, ceil(K / 32)] and [ceil(K / 32), N], plain [MX-1..5];
        `swizzle_scales` is for torch's own operators.

    Exactness: `engine="emulated"`: the bits of an H200 (rules ACC, CHAIN, EPI), equal to `f8ref.numpy` and to every
    recorded case. `engine="hardware"`: the bits of the device. `split_k` tells the emulation which split-K the
    library's heuristic chose [CHAIN-3]. None asks the library itself if the tensors are on a GPU that is the chip, else
    the plan, `f8emu.split_k.plan` [PLAN-1..7], and is the only value that the hardware accepts. A shape that the plan
    does not cover is emulated without split-K, with one warning.

    Args:
        a: left operand.
        b: right operand.
        scale_a: factors that decode `a`.
        scale_b: factors that decode `b`.
        bias: added in float32 after scaling [EPI-3].
        out_dtype: float32, bfloat16 or float16. None means the dtype of `a`, as in `torch._scaled_mm`; float8 output
            is not modelled, so None is refused.
        use_fast_accum: one chain over all of K [CHAIN-1] instead of promotion every 128 [CHAIN-2].
        engine: "auto" (the hardware if the tensors are on a CUDA device that is the chip, else the emulation),
            "hardware" or "emulated".
        granularity_a: the granularity of `scale_a`, if its shape is ambiguous.
        granularity_b: the granularity of `scale_b`, if its shape is ambiguous.
        split_k: the number of slices of K that the emulation accumulates separately; None: the library's or the plan's.
        chip: the chip to emulate: a profile of `f8emu.spec.CHIPS` or its name. `evidence` says what a profile rests on.
            Hopper (an H200's) and H100 have plans; for other chips S is 1. f8emu was never run on a Blackwell GPU: that
            its hardware has the emulation's bits is unverified, as a warning says once.

    Raises:
        OperandError: wrong dtype, shape, size, layout, device or scales.
        SpecError: an unknown chip.
        UnsupportedError: a call that the hardware or the engine does not support; the message names a remedy.
        MissingExtraError: emulation on a GPU, or without the compiled engine, but jax is not installed.
    """
    for name, x in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b)):
        require_tensor("scaled_mm", name, x)
    if out_dtype is None:
        raise UnsupportedError(
            "scaled_mm: out_dtype=None asks for float8 output, the dtype of a, as torch._scaled_mm does; it is not "
            "modelled; pass out_dtype=torch.bfloat16, torch.float16 or torch.float32"
        )
    return gemm_operators.scaled_mm(
        a,
        b,
        scale_a,
        scale_b,
        bias,
        output_dtype("scaled_mm", out_dtype),
        use_fast_accum,
        engine,
        _granularity_name(granularity_a),
        _granularity_name(granularity_b),
        split_k,
        chip_by_name("scaled_mm", chip).name,
    )


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | Format | HighPrecisionName = torch.bfloat16,
    use_fast_accum: bool = False,
    engine: EngineName = "auto",
    chip: Chip | ChipName = HOPPER,
) -> Tensor:
    """`(acc * scale_a) * scale_b` of every group, each a GEMM of its own [EPI-6], as `torch._scaled_grouped_mm`.

    Shapes:
        a row-major and b column-major, float8_e4m3fn, scales float32; offs int32 [G], the end of each group in the
        dimension that it divides -> bfloat16.
        rows of a: a [M, K], b [G, K, N], scale_a [M], scale_b [G, N] -> [M, N].
        columns of b: a [G, M, K], b [K, N], scale_a [G, M], scale_b [N] -> [M, N].
        K: a [M, K], b [K, N], scale_a [G * M], scale_b [G * N] -> [G, M, N].
        nothing, without offs: a [G, M, K], b [G, K, N], scale_a [G, M], scale_b [G, N] -> [G, M, N].
        MXFP8, on chips such as "B200", rows of a and K alone: float8_e8m0fnu scales of their operand's shape, with
        ceil(K / 32) in place of K, plain. Groups of K then end at multiples of 32.

    On hardware outputs beyond the last group are undefined, and groups along K must have sizes that are multiples of
    16, groups of columns multiples of 8: an assertion on the device ends the process's use of CUDA otherwise. The
    emulation takes any sizes, gives zeros beyond the last group, and sums no K beyond it.

    Exactness: as for `scaled_mm`.

    Raises:
        OperandError: wrong dtype, shape, size, layout, device or scales.
        UnsupportedError: a call that the hardware or this engine does not support.
        MissingExtraError: emulation on a GPU, or without the compiled engine, but jax is not installed.
    """
    for name, x in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("offs", offs)):
        if x is not None:
            require_tensor("scaled_grouped_mm", name, x)
    dtype = output_dtype("scaled_grouped_mm", out_dtype)
    name = chip_by_name("scaled_grouped_mm", chip).name
    return gemm_operators.scaled_grouped_mm(a, b, scale_a, scale_b, offs, dtype, use_fast_accum, engine, name)


def mm(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | Format | HighPrecisionName = torch.bfloat16,
    engine: EngineName = "auto",
    split_k: int | None = None,
    chip: Chip | ChipName = HOPPER,
) -> Tensor:
    """The bfloat16 GEMM of a chip's tensor core, Hopper's by default, for GEMMs kept in high precision [BF16-1].

    Shapes:
        a [M, K], b [K, N], bfloat16 in any layout, K and N multiples of 16 -> [M, N] of out_dtype.

    Exactness: as for `scaled_mm`, `split_k` included [BF16-2].

    Raises:
        OperandError: wrong dtype, shape, size or device.
        UnsupportedError: a call that the hardware or this engine does not support.
        MissingExtraError: emulation on a GPU, or without the compiled engine, but jax is not installed.
    """
    require_tensor("mm", "a", a)
    require_tensor("mm", "b", b)
    name = chip_by_name("mm", chip).name
    return gemm_operators.mm(a, b, output_dtype("mm", out_dtype), engine, split_k, name)


def _granularity_name(granularity: Granularity | GranularityName | None) -> str | None:
    return granularity.value if isinstance(granularity, Granularity) else granularity

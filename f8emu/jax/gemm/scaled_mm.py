"""The GEMMs: scaled_mm, scaled_grouped_mm and mm, on the tensor cores or emulated."""

from typing import Any

import jax
import jax.numpy as jnp

from f8emu.jax.compiling import known_options
from f8emu.jax.gemm import engine as engines
from f8emu.jax.gemm.call import Gemm
from f8emu.jax.gemm.checks import check_mm, check_output, check_scaled_grouped_mm, check_scaled_mm
from f8emu.jax.lowering import without_gradient
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER, chip_by_name
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity

_ROW = Granularity.ROWWISE


def scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: Any = "bfloat16",
    use_fast_accum: bool = False,
    engine: str = "auto",
    granularity_a: Granularity | str | None = None,
    granularity_b: Granularity | str | None = None,
    split_k: int | None = None,
    chip: Chip | str = HOPPER,
) -> jax.Array:
    """The float8 GEMM of a chip's tensor core, Hopper's by default: `out = round(accumulate(a @ b) * scales + bias)`.

    Granularities that are not given are inferred from the shapes of the scales. The first that fits is taken:
    tensorwise (one element each), rowwise, then 1x128 before 128x128. Give them if more than one fits: a single row
    with block scales, or K <= 128.

    Shapes:
        a [M, K], b [K, N], float8, of any extents; float32 scales, of `a`: one element, [M, 1], [M, ceil(K / 128)] or
        [ceil(M / 128), ceil(K / 128)], and of `b`, as the transposed scales of `b.T`: one element, [1, N],
        [ceil(K / 128), N] or [ceil(K / 128), ceil(N / 128)]; bias [N] of any high precision -> [M, N] of out_dtype.

    Exactness: `engine="emulated"`: the bits of an H200 (rules ACC, CHAIN, EPI), equal to `f8ref.numpy`, eagerly and
    traced. `engine="hardware"`: the bits of the device. `split_k` tells the emulation which split-K the library's
    heuristic chose [CHAIN-3]. None asks the library itself on a GPU that is the chip (a trace: if JAX's default device
    is one), else the plan, `f8emu.split_k.plan` [PLAN-1..7], and is the only value that the hardware accepts. A shape
    that the plan does not cover is emulated without split-K, with one warning.

    Args:
        a: left operand.
        b: right operand.
        scale_a: factors that decode `a`.
        scale_b: factors that decode `b`.
        bias: added in float32 after scaling [EPI-3].
        out_dtype: float32, bfloat16 or float16: a Format, its name or a dtype.
        use_fast_accum: one chain over all of K [CHAIN-1] instead of promotion every 128 [CHAIN-2].
        engine: "auto" (the hardware on a CUDA device that is the chip, else the emulation), "hardware" or "emulated".
        granularity_a: the granularity of `scale_a`, if its shape is ambiguous.
        granularity_b: the granularity of `scale_b`, if its shape is ambiguous.
        split_k: the number of slices of K that the emulation accumulates separately; None: the library's or the plan's.
        chip: the chip to emulate: a profile of `f8emu.spec.CHIPS` or its name. `evidence` says what a profile rests on.
            Hopper (an H200's) and H100 have plans; for other chips S is 1.

    Raises:
        OperandError: wrong dtype, shape or scales.
        SpecError: an unknown chip.
        UnsupportedError: a call that the hardware or the engine does not support; the message names a remedy. In a
            traced call this may be raised when the program is lowered.
    """
    out, chip = _checked("scaled_mm", out_dtype, engine, chip)
    operands, pair = check_scaled_mm(
        a,
        b,
        scale_a,
        scale_b,
        bias=bias,
        use_fast_accum=use_fast_accum,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        split_k=split_k,
        chip=chip,
    )
    return _product(Gemm("scaled_mm", out, chip, pair, use_fast_accum, split_k, engine), operands)


def scaled_grouped_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    offs: jax.Array,
    *,
    out_dtype: Any = "bfloat16",
    use_fast_accum: bool = False,
    engine: str = "auto",
    chip: Chip | str = HOPPER,
) -> jax.Array:
    """`(acc * scale_a) * scale_b` per group of rows, each with its own `b[i]` [EPI-6].

    Group g is the rows from `offs[g - 1]` (0 for the first) up to `offs[g]`; rows after the last group give zeros.

    Shapes:
        a [total_M, K], b [groups, K, N], float8_e4m3fn; scale_a float32 [total_M], scale_b float32 [groups, N]; offs
        int32 [groups], the end of each group's rows -> [total_M, N] of out_dtype.

    Exactness: as for `scaled_mm`. On hardware every group is a GEMM of all rows, of which the group's own are kept.

    Raises:
        OperandError: wrong dtype or shape.
        UnsupportedError: a call that the hardware or this engine does not support.
    """
    out, chip = _checked("scaled_grouped_mm", out_dtype, engine, chip)
    check_scaled_grouped_mm(a, b, scale_a, scale_b, offs, chip)
    gemm = Gemm("scaled_grouped_mm", out, chip, (_ROW, _ROW), use_fast_accum, engine=engine)
    return _product(gemm, (a, b, scale_a, scale_b, offs))


def mm(
    a: jax.Array,
    b: jax.Array,
    *,
    out_dtype: Any = "bfloat16",
    engine: str = "auto",
    split_k: int | None = None,
    chip: Chip | str = HOPPER,
) -> jax.Array:
    """The bfloat16 GEMM of a chip's tensor core, Hopper's by default, for GEMMs kept in high precision [BF16-1].

    Shapes:
        a [M, K], b [K, N], bfloat16, of any extents -> [M, N] of out_dtype.

    Exactness: as for `scaled_mm`, `split_k` included [BF16-2]; its plan is the one for two row-major matrices ("nn").

    Raises:
        OperandError: wrong dtype or shape.
        UnsupportedError: a call that the hardware or this engine does not support.
    """
    out, chip = _checked("mm", out_dtype, engine, chip)
    check_mm(a, b, split_k)
    return _product(Gemm("mm", out, chip, split_k=split_k, engine=engine), (a, b))


def _checked(call: str, out_dtype: Any, engine: str, chip: Chip | str) -> tuple[Format, Chip]:
    out = check_output(call, out_dtype)
    engines.check_engine(call, engine)
    return out, chip_by_name(call, chip)


def _product(gemm: Gemm, operands: tuple[Any, ...]) -> jax.Array:
    operands = tuple(map(jnp.asarray, operands))
    a, b, *rest = operands
    has_bias = gemm.call == "scaled_mm" and len(rest) > 2
    if 0 in (*a.shape, *b.shape) and not has_bias:
        return jnp.zeros((a.shape[0], b.shape[-1]), gemm.out_dtype.name)
    return engines.multiply(gemm, without_gradient(gemm.call, operands), known_options())

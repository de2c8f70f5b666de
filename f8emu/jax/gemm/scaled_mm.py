"""The GEMMs: scaled_mm, scaled_grouped_mm and mm, on the tensor cores or emulated."""

from __future__ import annotations  # short signatures in `help`

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from f8emu.jax.bits import FormatLike, output_format, require_known_sizes
from f8emu.jax.compiling import without_gradient
from f8emu.jax.gemm import engine as engines
from f8emu.jax.gemm.call import EngineCall
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER, chip_by_name
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.gemm_call import GemmCall, GroupKind, Shaped, mm_call, scaled_grouped_mm_call, scaled_mm_call
from f8emu.spec.names import ChipName, EngineName, GranularityName
from f8emu.spec.scaling import Granularity


def scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: FormatLike = "bfloat16",
    use_fast_accum: bool = False,
    engine: EngineName = "auto",
    granularity_a: Granularity | GranularityName | None = None,
    granularity_b: Granularity | GranularityName | None = None,
    split_k: int | None = None,
    chip: Chip | ChipName = HOPPER,
) -> jax.Array:
    """The float8 GEMM of a chip's tensor core, Hopper's by default: `out = round(accumulate(a @ b) * scales + bias)`.

    Granularities that are not given are inferred from the shapes of the scales, as by `f8emu.numpy.scaled_mm`.

    Shapes:
        a [M, K], b [K, N], float8, of any extents; float32 scales, of `a`: one element, [M, 1], [M, ceil(K / 128)] or
        [ceil(M / 128), ceil(K / 128)], and of `b`, as the transposed scales of `b.T`: one element, [1, N],
        [ceil(K / 128), N] or [ceil(K / 128), ceil(N / 128)]; or, of MXFP8 with `chip="B200"`, E8M0 scales
        [M, ceil(K / 32)] and [ceil(K / 32), N]; bias [N] of any high precision -> [M, N] of out_dtype.

    Exactness: `engine="emulated"`: the bits of an H200 (rules ACC, CHAIN, EPI), equal to `f8ref.numpy`, eagerly and
    traced. `engine="hardware"`: the bits of the device. MXFP8: equal to `f8ref.numpy` too; instructions agree with a
    model validated on silicon, and that a library adds K in order is assumed [MX-4].

    Args: as for `f8emu.numpy.scaled_mm`, and `engine`: "auto" (the hardware on a CUDA device that is the chip, else the
    emulation), "hardware" or "emulated". A `split_k` of None, the only one that the hardware accepts, takes the
    library's on a GPU that is the chip (a trace: if JAX's default device is one), else the plan's.

    Raises:
        OperandError: wrong dtype, shape or scales.
        SpecError: an unknown chip.
        UnsupportedError: a call that the hardware or the engine does not support; the message names a remedy. In a
            traced call this may be raised when the program is lowered.
    """
    operands = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b} | ({} if bias is None else {"bias": bias})
    options = {"granularity_a": granularity_a, "granularity_b": granularity_b, "split_k": split_k}
    return _product(scaled_mm_call, operands, out_dtype, engine, chip, **options, use_fast_accum=use_fast_accum)


def scaled_grouped_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    offs: jax.Array | None = None,
    *,
    out_dtype: FormatLike = "bfloat16",
    use_fast_accum: bool = False,
    engine: EngineName = "auto",
    chip: Chip | ChipName = HOPPER,
) -> jax.Array:
    """`(acc * scale_a) * scale_b` per group of rows, each with its own `b[i]` [EPI-6].

    Group g is the rows from `offs[g - 1]` (0 for the first) up to `offs[g]`; rows after the last group give zeros.
    In `torch._scaled_grouped_mm` on a GPU those rows are undefined.

    Shapes:
        a [total_M, K], b [groups, K, N], float8; scale_a float32 [total_M], scale_b float32 [groups, N], or E8M0
        [total_M, ceil(K / 32)] and [groups, ceil(K / 32), N]; offs int32 [groups], the end of each group's rows ->
        [total_M, N] of out_dtype.

    Exactness: as for `scaled_mm`. On hardware every group is a GEMM of all rows, of which the group's own are kept.

    Raises:
        OperandError, SpecError, UnsupportedError: as for `scaled_mm`.
    """
    operands = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    operands |= {} if offs is None else {"offs": offs}
    return _product(scaled_grouped_mm_call, operands, out_dtype, engine, chip, use_fast_accum=use_fast_accum)


def mm(
    a: jax.Array,
    b: jax.Array,
    *,
    out_dtype: FormatLike = "bfloat16",
    engine: EngineName = "auto",
    split_k: int | None = None,
    chip: Chip | ChipName = HOPPER,
) -> jax.Array:
    """The bfloat16 GEMM of a chip's tensor core, Hopper's by default, for GEMMs kept in high precision [BF16-1].

    Shapes:
        a [M, K], b [K, N], bfloat16, of any extents -> [M, N] of out_dtype.

    Exactness, Raises: as for `scaled_mm`, `split_k` included [BF16-2]; its plan is the one for two row-major matrices
    ("nn").
    """
    return _product(mm_call, {"a": a, "b": b}, out_dtype, engine, chip, split_k=split_k)


def _product(
    describe: Callable[..., GemmCall],
    operands: Mapping[str, Any],
    out_dtype: Any,
    engine: EngineName,
    chip: Chip | ChipName,
    **options: Any,
) -> jax.Array:
    call = describe.__name__.removesuffix("_call")
    # 1. What is refused.
    out = output_format(call, out_dtype)
    engines.check_engine(call, engine)
    shaped = {name: _shaped(call, name, x) for name, x in operands.items()}
    require_known_sizes(call, *operands.values())
    gemm = describe(**shaped, out_dtype=out, chip=chip_by_name(call, chip), **options)
    if gemm.group_kind not in (None, GroupKind.ROWS):
        raise UnsupportedError(f"{call}: in JAX offs divides the rows of a; use jax.vmap of scaled_mm, or f8emu.numpy")
    # 2. The operands as arrays, tensorwise scales [1, 1].
    arrays = {name: jnp.asarray(x) for name, x in operands.items()}
    if gemm.granularities == (Granularity.TENSORWISE, Granularity.TENSORWISE):
        arrays |= {name: arrays[name].reshape(1, 1) for name in ("scale_a", "scale_b")}
    if 0 in gemm.sizes and "bias" not in arrays:
        return jnp.zeros(gemm.sizes[:2], out.name)
    return engines.multiply(EngineCall(gemm, engine), without_gradient(call, tuple(arrays.values())))


def _shaped(call: str, name: str, x: Any) -> Shaped:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise OperandError(
            f"{call}: {name} must be a JAX array; got {type(x).__name__}; convert it first: jnp.asarray({name})"
        )
    return Shaped(tuple(x.shape), str(x.dtype))

"""Pallas kernels of the fused casts, for Triton on a GPU: each reads a matrix once and writes what its GEMMs need.

A program holds one tile of `x` in registers and stores its codes twice, as they are and transposed: the tensor core
takes float8 operands only with K contiguous. Matrices of any extents: a tile that overhangs is masked.

Exactness: the bits of `plain`, for these reasons.
- Triton multiplies float32 with subnormals and to nearest even; no sum follows that it could fuse with the product.
- The conversion rounds to nearest even, and nothing relies on how it treats values beyond the largest of the format.
  Under a given scale the product is clamped first, by selects, which keep NaN. Under the elements' own amax,
  `abs(value) * inv_scale <= max * (1 + 2^-22)`, which rounds to max.
- A maximum of magnitudes is an integer maximum of their bit patterns, which keeps NaN.
- Divisions are those of `scale.inv_scale_bits`: a float32 `/` of Triton is approximate (NUMERICS 6).
- What a kernel stores of an amax is reduced, and made a scale, by XLA on integers.

Matrices are checked by the layers, and chosen by `casts`. `interpret` runs them on a CPU, for tests.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from f8emu.jax import bits
from f8emu.jax.fused.plain import Cast
from f8emu.jax.scale import inv_scale_bits, scales_of
from f8emu.spec.formats import Format
from f8emu.spec.scaling import ScaleRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a kernel is cut into programs."""

    rows: int
    cols: int
    """Extents of the tile that a program has; powers of two."""
    warps: int
    stages: int = 1


CAST_PAIR = Launch(rows=32, cols=256, warps=8)
CAST_PAIR_AMAX = Launch(rows=64, cols=128, warps=4)
ROW_COL_AMAX = Launch(rows=128, cols=128, warps=8)
CAST_ROWS = Launch(rows=1, cols=8192, warps=8)
"""`cols` is the most that a row may have per 8 warps; longer rows get more warps, up to LONGEST_ROW."""
LONGEST_ROW = 32768
"""The longest row that stays in registers: 32 warps of 1024 elements."""
CAST_BLOCKS = Launch(rows=128, cols=128, warps=4)
"""The tile is the block of the granularity; only `warps` is a choice."""

MOST_ELEMENTS = 2**31 - 2**20
"""Pallas counts the offsets of smaller matrices, tiles that overhang included, as signed integers of 32 bits."""

# In `jax.shard_map` a kernel must say along which axes of the mesh its results vary. `choice` says it for the kernels.
# JAX 0.10 and 0.11 call the argument so.
NOT_VARYING: dict[str, Any] = (
    {"manual_axis_type": jax.sharding.ManualAxisType()} if hasattr(jax.sharding, "ManualAxisType") else {}
)


def load_tile(x: Any, inside: jax.Array | None) -> jax.Array:
    """The tile of `x` as float32, zeros outside, which do not change an amax."""
    values = x[...] if inside is None else plgpu.load(x, mask=inside, other=jnp.zeros((), x.dtype))
    return values.astype(jnp.float32)


def store_tile(out: Any, tile: jax.Array, inside: jax.Array | None) -> None:
    """Store the tile of `out`."""
    if inside is None:
        out[...] = tile
    else:
        plgpu.store(out, tile, mask=inside)


def inside_of(launch: Launch, shape: tuple[int, ...]) -> jax.Array | None:
    """Which elements of this program's tile are inside of a matrix of `shape`; None for all, of every program."""
    m, n = shape
    if m % launch.rows == 0 and n % launch.cols == 0:
        return None
    tile = (launch.rows, launch.cols)
    rows = pl.program_id(0) * launch.rows + lax.broadcasted_iota(jnp.int32, tile, 0)
    cols = pl.program_id(1) * launch.cols + lax.broadcasted_iota(jnp.int32, tile, 1)
    return (rows < m) & (cols < n)


def magnitudes(values: jax.Array) -> jax.Array:
    """Float32 bit patterns without the sign, as int32, of which Triton takes maxima."""
    return lax.bitcast_convert_type(values, jnp.int32) & bits.MAGNITUDE


def encode(values: jax.Array, format: Format, interpret: bool, *, is_within: bool = False) -> jax.Array:
    """Codes of float32 values, saturating; `is_within` says that none rounds beyond the largest of the format."""
    clamped = values
    if not is_within:
        # 1. Comparisons with NaN are false, so that both selects keep it.
        clamped = jnp.where(clamped > format.max, format.max, clamped)
        clamped = jnp.where(clamped < -format.max, -format.max, clamped)
    codes = clamped.astype(jnp.dtype(format.name))
    if interpret:
        # 2. The conversion of a GPU gives `format.nan_code` for every NaN; XLA's on a CPU another one for E5M2.
        nan = bits.is_nan(bits.bits_of(values))
        codes = bits.typed(jnp.where(nan, jnp.uint8(format.nan_code), bits.bits_of(codes)), format)
    return codes


def call(
    kernel: Any,
    launch: Launch,
    grid: tuple[int, ...],
    ins: Any,
    outs: Any,
    interpret: bool,
    name: str,
) -> Any:
    """`pl.pallas_call` of `kernel`; `ins` are block specs, `outs` pairs of a block spec and a shape."""
    params = plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=ins,
        out_specs=[spec for spec, _ in outs],
        out_shape=[jax.ShapeDtypeStruct(out.shape, out.dtype, **NOT_VARYING) for _, out in outs],
        compiler_params=params,
        interpret=interpret,
        name=f"f8emu_{name}",
    )


def code_specs(launch: Launch, shape: tuple[int, ...], format: Format, rows: bool, cols: bool) -> list[Any]:
    """Where the codes of `x` and of `x^T` go, as far as they are wanted."""
    m, n = shape
    dtype = jnp.dtype(format.name)
    outs: list[Any] = []
    if rows:
        spec = pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j))
        outs.append((spec, jax.ShapeDtypeStruct((m, n), dtype)))
    if cols:
        spec = pl.BlockSpec((launch.cols, launch.rows), lambda i, j: (j, i))
        outs.append((spec, jax.ShapeDtypeStruct((n, m), dtype)))
    return outs


def grid_of(launch: Launch, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many tiles there are."""
    return pl.cdiv(shape[0], launch.rows), pl.cdiv(shape[1], launch.cols)


def cast_pair(
    x: jax.Array,
    row_inv_scale: jax.Array | None,
    col_inv_scale: jax.Array | None,
    *,
    format: Format,
    launch: Launch = CAST_PAIR,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Codes of `x` and of `x^T` under given inv_scales, of one value or one a row; None leaves an operand out."""
    rows, cols = row_inv_scale is not None, col_inv_scale is not None
    is_one = row_inv_scale is not None and row_inv_scale is col_inv_scale and row_inv_scale.size == 1
    ins = [pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j))]
    factors: list[jax.Array] = []
    for axis, inv_scale in enumerate((row_inv_scale, None if is_one else col_inv_scale)):
        if inv_scale is not None:
            factors.append(inv_scale.reshape(-1))
            ins.append(_vector_spec(inv_scale, (launch.rows, launch.cols)[axis], axis))

    def kernel(x_ref: Any, *refs: Any) -> None:
        inv_refs, code_refs = refs[: len(factors)], list(refs[len(factors) :])
        inside = inside_of(launch, x.shape)
        values = load_tile(x_ref, inside)
        codes = None
        if rows:
            codes = encode(values * _factor(inv_refs[0], x.shape, launch, 0), format, interpret)
            store_tile(code_refs.pop(0), codes, inside)
        if cols:
            if codes is None or not is_one:
                codes = encode(values * _factor(inv_refs[-1], x.shape, launch, 1), format, interpret)
            store_tile(code_refs.pop(0), codes.T, None if inside is None else inside.T)

    outs = code_specs(launch, x.shape, format, rows, cols)
    found = list(call(kernel, launch, grid_of(launch, x.shape), ins, outs, interpret, "cast_pair")(x, *factors))
    return found.pop(0) if rows else None, found.pop(0) if cols else None


def cast_pair_amax(
    x: jax.Array,
    inv_scale: jax.Array,
    *,
    format: Format,
    rows: bool,
    cols: bool,
    launch: Launch = CAST_PAIR_AMAX,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Codes of `x` and of `x^T` under one inv_scale, and the amax of `x`: the kernel stores that of each tile."""
    grid = grid_of(launch, x.shape)

    def kernel(x_ref: Any, inv_ref: Any, *refs: Any) -> None:
        *code_refs, amax_ref = refs
        inside = inside_of(launch, x.shape)
        values = load_tile(x_ref, inside)
        amax_ref[0] = jnp.max(jnp.max(magnitudes(values), axis=1), axis=0)
        codes = encode(values * inv_ref[0], format, interpret)
        if rows:
            store_tile(code_refs.pop(0), codes, inside)
        if cols:
            store_tile(code_refs.pop(0), codes.T, None if inside is None else inside.T)

    ins = [pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j)), pl.BlockSpec((1,), lambda i, j: (0,))]
    tiles = grid[0] * grid[1]
    amaxes = pl.BlockSpec((1,), lambda i, j: (i * grid[1] + j,)), jax.ShapeDtypeStruct((tiles,), jnp.int32)
    outs = [*code_specs(launch, x.shape, format, rows, cols), amaxes]
    *found, largest = call(kernel, launch, grid, ins, outs, interpret, "cast_pair_amax")(x, inv_scale.reshape(1))
    codes = found.pop(0) if rows else None, found.pop(0) if cols else None
    return *codes, amax_of(jnp.max(largest).reshape(1, 1))


def row_col_amax(
    x: jax.Array, *, launch: Launch = ROW_COL_AMAX, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The amaxes of the rows [M, 1] and of the columns [N, 1]: the kernel stores those of each tile."""
    grid = grid_of(launch, x.shape)

    def kernel(x_ref: Any, row_ref: Any, col_ref: Any) -> None:
        found = magnitudes(load_tile(x_ref, inside_of(launch, x.shape)))
        row_ref[...], col_ref[...] = jnp.max(found, axis=1), jnp.max(found, axis=0)

    # Padded to whole tiles: what a program writes needs no mask.
    outs = [
        (
            pl.BlockSpec((None, launch.rows), lambda i, j: (j, i)),
            jax.ShapeDtypeStruct((grid[1], grid[0] * launch.rows), jnp.int32),
        ),
        (
            pl.BlockSpec((None, launch.cols), lambda i, j: (i, j)),
            jax.ShapeDtypeStruct((grid[0], grid[1] * launch.cols), jnp.int32),
        ),
    ]
    ins = [pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j))]
    found = call(kernel, launch, grid, ins, outs, interpret, "row_col_amax")(x)
    rows, cols = (jnp.max(of_tiles, axis=0) for of_tiles in found)
    return amax_of(rows[: x.shape[0], None]), amax_of(cols[: x.shape[1], None])


def cast_rows(
    x: jax.Array, *, format: Format, rule: ScaleRule, launch: Launch = CAST_ROWS, interpret: bool = False
) -> Cast:
    """Codes and scales of the rows, each scaled by its own amax; a program has whole rows, of up to LONGEST_ROW."""
    m, n = x.shape
    cols = pl.next_power_of_2(n)
    # Shorter rows share a program, longer ones have one of more warps.
    rows = launch.rows * max(launch.cols // cols, 1)
    warps = min(max(launch.warps * cols * rows // launch.cols // launch.rows, 1), 32)
    launch = Launch(rows=rows, cols=cols, warps=warps, stages=launch.stages)

    def kernel(x_ref: Any, code_ref: Any, amax_ref: Any) -> None:
        inside = inside_of(launch, x.shape)
        values = load_tile(x_ref, inside)
        largest = jnp.max(magnitudes(values), axis=1)
        amax_ref[...] = largest
        inv = bits.float32_of(inv_scale_bits(largest.astype(jnp.uint32), format, rule))
        store_tile(code_ref, encode(values * inv[:, None], format, interpret, is_within=True), inside)

    grid = grid_of(launch, x.shape)
    amaxes = pl.BlockSpec((rows,), lambda i, j: (i,)), jax.ShapeDtypeStruct((grid[0] * rows,), jnp.int32)
    outs = [*code_specs(launch, x.shape, format, True, False), amaxes]
    ins = [pl.BlockSpec((rows, cols), lambda i, j: (i, j))]
    codes, largest = call(kernel, launch, grid, ins, outs, interpret, "cast_rows")(x)
    return codes, scales_of(amax_of(largest[:m, None]), format, rule)


def amax_of(largest: jax.Array) -> jax.Array:
    """Amaxes from integer maxima of float32 magnitudes."""
    return bits.float32_of(bits.one_nan(largest.astype(jnp.uint32)))


def _vector_spec(inv_scale: jax.Array, extent: int, axis: int) -> Any:
    """The block of an inv_scale that a program needs: all of one value, or those of its rows or columns."""
    if inv_scale.size == 1:
        return pl.BlockSpec((1,), lambda i, j: (0,))
    return pl.BlockSpec((extent,), lambda i, j: (i, j)[axis : axis + 1])


def _factor(inv_ref: Any, shape: tuple[int, ...], launch: Launch, axis: int) -> jax.Array:
    """The inv_scales of a program, broadcastable to its tile."""
    if inv_ref.shape == (1,):
        return inv_ref[0]
    extent = (launch.rows, launch.cols)[axis]
    inside = None
    if shape[axis] % extent:
        inside = pl.program_id(axis) * extent + lax.iota(jnp.int32, extent) < shape[axis]
    values = load_tile(inv_ref, inside)
    return values[:, None] if axis == 0 else values[None, :]

"""Pallas kernels of the fused casts, for Triton on a GPU: each reads a matrix once and writes what its GEMMs need.

A program holds one tile of `x` in registers and stores its codes twice, as they are and transposed: the tensor core
takes float8 operands only with K contiguous. Matrices of any extents: a tile that overhangs is masked.

Exactness: the bits of plain JAX (`fused`), for these reasons.
- Triton multiplies float32 with subnormals and to nearest even; no sum follows that it could fuse with the product.
- The conversion rounds to nearest even, and nothing relies on how it treats values beyond the largest of the format.
  Under a given scale the product is clamped first, by selects, which keep NaN. Under the elements' own amax,
  `abs(value) * inv_scale <= max * (1 + 2^-22)`, which rounds to max.
- A maximum of magnitudes is an integer maximum of their bit patterns, which keeps NaN.
- Divisions are those of `scale.inv_scale_bits`: a float32 `/` of Triton is approximate (NUMERICS 6).
- What a kernel stores of an amax is reduced, and made a scale, by XLA on integers.

`fused` chooses the kernels, and layers check the matrices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from f8emu.jax import bits
from f8emu.jax.scale import inv_scale_bits, scales_of
from f8emu.spec.formats import Format
from f8emu.spec.scaling import BLOCK, Granularity, ScaleRule, Scales

ScaledCodes = tuple[jax.Array, Scales]
"""Codes and scales of an operand."""
_SQUARE = Granularity.BLOCKWISE_128X128


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a kernel is cut into programs."""

    rows: int
    cols: int
    """Extents of a program's tile, powers of two."""
    warps: int
    stages: int = 1
    interpret: bool = False
    """Whether a CPU runs it, for tests."""


CAST_PAIR = Launch(rows=32, cols=256, warps=8)
CAST_PAIR_AMAX = Launch(rows=64, cols=128, warps=4)
ROW_COL_AMAX = Launch(rows=128, cols=128, warps=8)
CAST_ROWS = Launch(rows=1, cols=8192, warps=8)
"""`cols` is the most that a row may have per 8 warps; longer rows get more warps, up to LONGEST_ROW."""
LONGEST_ROW = 32768
"""The longest row that stays in registers: 32 warps of 1024 elements."""
CAST_BLOCKS = Launch(rows=BLOCK, cols=BLOCK, warps=4)
"""The tile is the block of the granularity; only `warps` is a choice."""

MOST_ELEMENTS = 2**31 - 2**20
"""Pallas counts the offsets of smaller matrices, tiles that overhang included, as signed integers of 32 bits."""

# In `jax.shard_map` a kernel must say along which axes of the mesh its results vary; `kernel_or_plain` says it for
# them. JAX 0.10 and 0.11 call the argument so.
NOT_VARYING: dict[str, Any] = (
    {"manual_axis_type": jax.sharding.ManualAxisType()} if hasattr(jax.sharding, "ManualAxisType") else {}
)

Outputs = Iterator[tuple[str, jax.Array]]
"""The stores of a program, in their order: the name of an output (`_output`) and a tile of codes or some amaxes."""


def cast_pair(
    x: jax.Array,
    row_inv_scale: jax.Array | None,
    col_inv_scale: jax.Array | None,
    *,
    format: Format,
    launch: Launch = CAST_PAIR,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Codes of `x` and of `x^T` under given inv_scales, of one value or one a row; None leaves an operand out."""
    inv_scales = {"rows": row_inv_scale, "cols": col_inv_scale}
    inv_scales = {side: inv_scale for side, inv_scale in inv_scales.items() if inv_scale is not None}
    sides = tuple(inv_scales)
    if row_inv_scale is col_inv_scale and row_inv_scale is not None and row_inv_scale.size == 1:
        del inv_scales["cols"]

    def body(values: jax.Array, *inv_refs: Any) -> Outputs:
        codes = None
        for side, inv_ref in zip(inv_scales, inv_refs, strict=True):
            codes = _encoded(values * _factor(inv_ref, x.shape, launch, int(side == "cols")), format, launch)
            yield side, codes
        if len(inv_scales) < len(sides):
            assert codes is not None, "those of the rows"
            yield "cols", codes

    outputs = _run("cast_pair", x, body, launch, sides, inv_scales, format=format)
    return outputs.get("rows"), outputs.get("cols")


def cast_pair_amax(
    x: jax.Array, inv_scale: jax.Array, *, format: Format, rows: bool, cols: bool, launch: Launch = CAST_PAIR_AMAX
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Codes of `x` and of `x^T` under one inv_scale, and the amax of `x`: the kernel stores one for each tile."""
    sides = ("rows",) * rows + ("cols",) * cols

    def body(values: jax.Array, inv_ref: Any) -> Outputs:
        yield "amax", jnp.max(jnp.max(_magnitudes(values), axis=1), axis=0)
        codes = _encoded(values * inv_ref[0], format, launch)
        for side in sides:
            yield side, codes

    names = (*sides, "amax")
    outputs = _run("cast_pair_amax", x, body, launch, names, {"rows": inv_scale}, format=format)
    return outputs.get("rows"), outputs.get("cols"), _amax_of(jnp.max(outputs["amax"]).reshape(1, 1))


def row_col_amax(x: jax.Array, *, launch: Launch = ROW_COL_AMAX) -> tuple[jax.Array, jax.Array]:
    """The amaxes of the rows [M, 1] and of the columns [N, 1]: the kernel stores those of each tile."""

    def body(values: jax.Array) -> Outputs:
        magnitudes = _magnitudes(values)
        rows, cols = jnp.max(magnitudes, axis=1), jnp.max(magnitudes, axis=0)
        yield "row_amax", rows
        yield "col_amax", cols

    outputs = _run("row_col_amax", x, body, launch, ("row_amax", "col_amax"))
    rows, cols = (jnp.max(of_tiles, axis=0) for of_tiles in outputs.values())
    return _amax_of(rows[: x.shape[0], None]), _amax_of(cols[: x.shape[1], None])


def cast_rows(x: jax.Array, *, format: Format, rule: ScaleRule, launch: Launch = CAST_ROWS) -> ScaledCodes:
    """Codes and scales of the rows, each scaled by its own amax; a program has whole rows, of up to LONGEST_ROW."""
    # Shorter rows share a program, longer ones have one of more warps.
    cols = pl.next_power_of_2(x.shape[1])
    rows = launch.rows * max(launch.cols // cols, 1)
    warps = min(max(launch.warps * cols * rows // launch.cols // launch.rows, 1), 32)
    launch = replace(launch, rows=rows, cols=cols, warps=warps)

    def body(values: jax.Array) -> Outputs:
        largest = jnp.max(_magnitudes(values), axis=1)
        yield "row_amax", largest
        yield "rows", _encoded(values * _own(largest, format, rule)[:, None], format, launch, is_within=True)

    outputs = _run("cast_rows", x, body, launch, ("rows", "row_amax"), format=format)
    return outputs["rows"], scales_of(_amax_of(outputs["row_amax"][0, : x.shape[0], None]), format, rule)


def cast_blocks(
    x: jax.Array,
    *,
    format: Format,
    rule: ScaleRule,
    row_granularity: Granularity | None,
    col_granularity: Granularity | None,
    launch: Launch = CAST_BLOCKS,
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """Codes and scales of `x` and of `x^T` by blocks; None leaves an operand out.

    A program's 128 x 128 tile holds whole blocks of the matrix and of its transpose.
    """
    kinds = {"rows": row_granularity, "cols": col_granularity}
    amaxes = {side: "amax" if kind is _SQUARE else f"{side[:3]}_amax" for side, kind in kinds.items() if kind}

    def body(values: jax.Array) -> Outputs:
        magnitudes, codes = _magnitudes(values), None
        for side, amax in amaxes.items():
            if codes is None or set(amaxes.values()) != {"amax"}:  # squares have the same codes on both sides
                axis = int(side == "rows")
                largest = jnp.max(magnitudes, axis=axis)
                largest = jnp.max(largest, axis=0) if kinds[side] is _SQUARE else largest
                inv_scale = _own(largest, format, rule)
                yield amax, largest
                factor = inv_scale if kinds[side] is _SQUARE else jnp.expand_dims(inv_scale, axis)
                codes = _encoded(values * factor, format, launch, is_within=True)
            yield side, codes

    names = (*amaxes, *dict.fromkeys(amaxes.values()))
    outputs = _run("cast_blocks", x, body, launch, names, format=format)

    def cast(side: str, extent: int) -> ScaledCodes | None:
        if side not in amaxes:
            return None
        # Amaxes of vectors are stored as they lie in a tile, and transposed here: they are few.
        largest = outputs[amaxes[side]]
        if kinds[side] is _SQUARE:
            largest = largest.reshape(_grid(launch, x.shape))
            largest = largest if side == "rows" else largest.T
        else:
            largest = largest[:, :extent].T
        return outputs[side], scales_of(_amax_of(largest), format, rule)

    return cast("rows", x.shape[0]), cast("cols", x.shape[1])


def _run(
    name: str,
    x: jax.Array,
    body: Callable[..., Outputs],
    launch: Launch,
    outputs: Sequence[str],
    inv_scales: dict[str, jax.Array] | None = None,
    *,
    format: Format | None = None,
) -> dict[str, jax.Array]:
    """The outputs of `body(tile of x as float32, *references of its inv_scales)` over all tiles."""
    grid = _grid(launch, x.shape)
    inv_scales = inv_scales or {}
    outs = {output: _output(output, launch, x.shape, format) for output in outputs}

    def kernel(x_ref: Any, *refs: Any) -> None:
        # Each output is stored as soon as the body has it, to free its registers.
        out_refs = dict(zip(outs, refs[len(inv_scales) :], strict=True))
        inside = _inside(launch, x.shape)
        for output, tile in body(_loaded(x_ref, inside), *refs[: len(inv_scales)]):
            ref = out_refs[output]
            if output in ("rows", "cols"):
                is_t = output == "cols"
                _store(ref, tile.T if is_t else tile, inside.T if is_t and inside is not None else inside)
            elif tile.ndim == 0:
                ref[0] = tile
            else:
                ref[...] = tile

    arrays = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j)),
            *(_vector_spec(inv_scale, launch, int(side == "cols")) for side, inv_scale in inv_scales.items()),
        ],
        out_specs=[spec for spec, _, _ in outs.values()],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, **NOT_VARYING) for _, shape, dtype in outs.values()],
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=launch.interpret,
        name=f"f8emu_{name}",
    )(x, *(inv_scale.reshape(-1) for inv_scale in inv_scales.values()))
    return dict(zip(outs, arrays, strict=True))


def _output(name: str, launch: Launch, shape: tuple[int, ...], format: Format | None) -> tuple[Any, Any, Any]:
    """Block spec, shape and dtype: codes of `x` or `x^T`, or magnitudes of tiles, of rows or of columns of tiles."""
    (m, n), (down, across) = shape, _grid(launch, shape)
    if name in ("rows", "cols"):
        assert format is not None, "codes have a format"
        dtype = jnp.dtype(format.name)
        if name == "rows":
            return pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j)), (m, n), dtype
        return pl.BlockSpec((launch.cols, launch.rows), lambda i, j: (j, i)), (n, m), dtype
    # Padded to whole tiles: what a program writes of amaxes needs no mask.
    if name == "row_amax":
        return pl.BlockSpec((None, launch.rows), lambda i, j: (j, i)), (across, down * launch.rows), jnp.int32
    if name == "col_amax":
        return pl.BlockSpec((None, launch.cols), lambda i, j: (i, j)), (down, across * launch.cols), jnp.int32
    return pl.BlockSpec((1,), lambda i, j: (i * across + j,)), (down * across,), jnp.int32


def _grid(launch: Launch, shape: tuple[int, ...]) -> tuple[int, int]:
    return pl.cdiv(shape[0], launch.rows), pl.cdiv(shape[1], launch.cols)


def _inside(launch: Launch, shape: tuple[int, ...]) -> jax.Array | None:
    """Which elements of this program's tile are inside of a matrix of `shape`; None for all, of every program."""
    m, n = shape
    if m % launch.rows == 0 and n % launch.cols == 0:
        return None
    tile = (launch.rows, launch.cols)
    rows = pl.program_id(0) * launch.rows + lax.broadcasted_iota(jnp.int32, tile, 0)
    cols = pl.program_id(1) * launch.cols + lax.broadcasted_iota(jnp.int32, tile, 1)
    return (rows < m) & (cols < n)


def _loaded(x: Any, inside: jax.Array | None) -> jax.Array:
    # Zeros outside do not change an amax.
    values = x[...] if inside is None else plgpu.load(x, mask=inside, other=jnp.zeros((), x.dtype))
    return values.astype(jnp.float32)


def _store(out: Any, tile: jax.Array, inside: jax.Array | None) -> None:
    if inside is None:
        out[...] = tile
    else:
        plgpu.store(out, tile, mask=inside)


def _magnitudes(values: jax.Array) -> jax.Array:
    # Triton takes maxima of int32.
    return lax.bitcast_convert_type(values, jnp.int32) & bits.MAGNITUDE


def _amax_of(largest: jax.Array) -> jax.Array:
    return bits.float32_of(bits.one_nan(largest.astype(jnp.uint32)))


def _own(largest: jax.Array, format: Format, rule: ScaleRule) -> jax.Array:
    return bits.float32_of(inv_scale_bits(largest.astype(jnp.uint32), format, rule))


def _encoded(values: jax.Array, format: Format, launch: Launch, *, is_within: bool = False) -> jax.Array:
    """Codes of float32 values, saturating; `is_within` says that none rounds beyond the largest of the format."""
    clamped = values
    if not is_within:
        # 1. Comparisons with NaN are false, so that both selects keep it.
        clamped = jnp.where(clamped > format.max, format.max, clamped)
        clamped = jnp.where(clamped < -format.max, -format.max, clamped)
    codes = clamped.astype(jnp.dtype(format.name))
    if launch.interpret:
        # 2. The conversion of a GPU gives `format.nan_code` for every NaN; XLA's on a CPU another one for E5M2.
        nan = bits.is_nan(bits.bits_of(values))
        codes = bits.typed(jnp.where(nan, jnp.uint8(format.nan_code), bits.bits_of(codes)), format)
    return codes


def _vector_spec(inv_scale: jax.Array, launch: Launch, axis: int) -> Any:
    """The block of an inv_scale that a program needs: all of one value, or those of its rows or columns."""
    if inv_scale.size == 1:
        return pl.BlockSpec((1,), lambda i, j: (0,))
    return pl.BlockSpec(((launch.rows, launch.cols)[axis],), lambda i, j: (i, j)[axis : axis + 1])


def _factor(inv_ref: Any, shape: tuple[int, ...], launch: Launch, axis: int) -> jax.Array:
    """The inv_scales of a program, broadcastable to its tile."""
    if inv_ref.shape == (1,):
        return inv_ref[0]
    extent = (launch.rows, launch.cols)[axis]
    inside = None
    if shape[axis] % extent:
        inside = pl.program_id(axis) * extent + lax.iota(jnp.int32, extent) < shape[axis]
    values = _loaded(inv_ref, inside)
    return values[:, None] if axis == 0 else values[None, :]

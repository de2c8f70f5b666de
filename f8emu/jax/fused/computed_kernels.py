"""Pallas kernels that compute matrices elementwise from others, and find their amaxes or cast them meanwhile.

A program loads one tile of every operand, computes a tile of every matrix, and finds amaxes or stores codes, as the
kernels of `kernels` do for a matrix that is there. The function gets float32 tiles and returns float32 tiles of the
values that the matrices have, rounded to their dtype. Only `with_amaxes` writes the matrices themselves.

Exactness: that of `kernels`, given what the function computes. Outside of the operands the function gets zeros, and
must give zeros, which do not change an amax. A factor that is not finite makes NaN of these zeros, in a row or column
that has no other numbers inside either.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from f8emu.jax.fused.kernels import (
    Launch,
    amax_of_tiles,
    call,
    code_specs,
    encode,
    grid_of,
    inside_of,
    largest_of,
    load_tile,
    one_per_tile,
    row_col_amaxes_of,
    row_col_specs,
    store_row_col,
    store_tile,
)
from f8emu.spec.formats import Format

Function = Callable[..., tuple[jax.Array, ...]]
Pair = tuple[jax.Array | None, jax.Array | None, jax.Array]
"""Codes of a matrix and of its transpose, None for what is not wanted, and its amax [1, 1]."""
WithAmaxes = tuple[jax.Array, jax.Array, jax.Array]
"""A matrix [M, N], the amaxes of its rows [M, 1] and of its columns [N, 1], or twice its amax [1, 1]."""


class Product(NamedTuple):
    """A bfloat16 matrix, or one that is still to be multiplied by powers of two, first those of its columns."""

    values: jax.Array
    """[M, N]."""
    rows: jax.Array | None = None
    """Float32 [M, 1]."""
    cols: jax.Array | None = None
    """Float32 [1, N]."""


CAST_PAIRS = Launch(rows=32, cols=128, warps=4)
WITH_AMAX = Launch(rows=32, cols=256, warps=8)
WITH_ROW_COL_AMAXES = Launch(rows=32, cols=128, warps=4)
"""Three operands and two matrices fit into registers. Of the tiles that were tried on an H200 the fastest."""


def cast_pairs(
    function: Function,
    xs: Sequence[Product],
    inv_scales: Sequence[jax.Array],
    *,
    sides: Sequence[tuple[bool, bool]],
    format: Format,
    launch: Launch = CAST_PAIRS,
    interpret: bool = False,
) -> list[Pair]:
    """Codes of every matrix and of its transpose, as `sides` says, under its inv_scale [1, 1], and its amax."""
    shape = xs[0].values.shape
    grid = grid_of(launch, shape)
    of_operands, operands = _operands(launch, xs)
    ins = [*of_operands, *(pl.BlockSpec((1,), lambda i, j: (0,)) for _ in inv_scales)]
    outs: list[Any] = []
    for rows, cols in sides:
        outs += code_specs(launch, shape, format, rows, cols)
        outs.append(one_per_tile(grid))

    def kernel(*refs: Any) -> None:
        inv_refs, out_refs = refs[len(operands) : len(ins)], iter(refs[len(ins) :])
        inside = inside_of(launch, shape)
        tiles = function(*_tiles(launch, xs, refs, inside))
        for (rows, cols), tile, inv_ref in zip(sides, tiles, inv_refs, strict=True):
            codes = encode(tile * inv_ref[0], format, interpret)
            if rows:
                store_tile(next(out_refs), codes, inside)
            if cols:
                store_tile(next(out_refs), codes.T, None if inside is None else inside.T)
            next(out_refs)[0] = largest_of(tile)

    given = *operands, *(inv_scale.reshape(1) for inv_scale in inv_scales)
    found = iter(call(kernel, launch, grid, ins, outs, interpret, "cast_pairs")(*given))
    return [
        (next(found) if rows else None, next(found) if cols else None, amax_of_tiles(next(found)))
        for rows, cols in sides
    ]


def with_amaxes(
    function: Function,
    xs: Sequence[Product],
    *,
    of_rows: bool,
    in_place: bool,
    launch: Launch | None = None,
    interpret: bool = False,
) -> list[WithAmaxes]:
    """Every matrix with its amaxes; `in_place` writes matrices over the last operands.

    A power of two commutes with every rounding here, as long as nothing leaves the range of normal numbers: what is
    multiplied by one is not rounded again.
    """
    launch = launch or (WITH_ROW_COL_AMAXES if of_rows else WITH_AMAX)
    shape = xs[0].values.shape
    grid = grid_of(launch, shape)
    ins, operands = _operands(launch, xs)

    def kernel(*refs: Any) -> None:
        out_refs = iter(refs[len(ins) :])
        inside = inside_of(launch, shape)
        for tile in function(*_tiles(launch, xs, refs, inside)):
            store_tile(next(out_refs), tile.astype(jnp.bfloat16), inside)
            if of_rows:
                store_row_col(tile, next(out_refs), next(out_refs))
            else:
                next(out_refs)[0] = largest_of(tile)

    matrix = pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j)), jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    count = len(jax.eval_shape(function, *(x.values for x in xs)))
    outs = [matrix, *(row_col_specs(launch, shape) if of_rows else [one_per_tile(grid)])]
    each = len(outs)
    aliases = {len(xs) - count + i: each * i for i in range(count)} if in_place else {}
    found = call(kernel, launch, grid, ins, outs * count, interpret, "with_amaxes", aliases)(*operands)
    results: list[WithAmaxes] = []
    for x, *largest in (found[i : i + each] for i in range(0, len(found), each)):
        rows, cols = row_col_amaxes_of(largest, shape) if of_rows else (amax_of_tiles(largest[0]),) * 2
        results.append((x, rows, cols))
    return results


def _operands(launch: Launch, xs: Sequence[Product]) -> tuple[list[Any], list[jax.Array]]:
    """What a kernel reads of the operands, all values and then all factors: block specs and arrays."""
    ins = [pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j)) for _ in xs]
    arrays = [x.values for x in xs]
    for x in xs:
        for factors, block, index in (
            (x.rows, (launch.rows, 1), lambda i, j: (i, 0)),
            (x.cols, (1, launch.cols), lambda i, j: (0, j)),
        ):
            if factors is not None:
                ins.append(pl.BlockSpec(block, index))
                arrays.append(factors)
    return ins, arrays


def _tiles(launch: Launch, xs: Sequence[Product], refs: Sequence[Any], inside: jax.Array | None) -> list[jax.Array]:
    """The tiles of the operands; `refs` begin with what `_operands` names."""
    left, tiles = iter(refs[len(xs) :]), list[jax.Array]()
    for x, ref in zip(xs, refs, strict=False):
        by_rows = None if x.rows is None else _factors(next(left), launch, x.values.shape, 0)
        by_cols = None if x.cols is None else _factors(next(left), launch, x.values.shape, 1)
        tile = load_tile(ref, inside)
        for by in (by_cols, by_rows):
            tile = tile if by is None else tile * by
        tiles.append(tile)
    return tiles


def _factors(ref: Any, launch: Launch, shape: tuple[int, ...], axis: int) -> jax.Array:
    """The factors of the rows of a program's tile (axis 0), [rows, 1], or of its columns, [1, cols]; zeros outside."""
    extent = (launch.rows, launch.cols)[axis]
    if shape[axis] % extent == 0:
        return ref[...]
    at = pl.program_id(axis) * extent + lax.broadcasted_iota(jnp.int32, ref.shape, axis)
    return load_tile(ref, at < shape[axis])

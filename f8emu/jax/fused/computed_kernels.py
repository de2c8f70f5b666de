"""Pallas kernels that cast matrices while they compute them, elementwise, from others: none of them is written.

A program loads one tile of every operand, computes a tile of every matrix, and finds amaxes or stores codes, as the
kernels of `kernels` do for a matrix that is there. The function gets float32 tiles and returns float32 tiles of the
values that the matrices would have, rounded to their dtype.

Exactness: that of `kernels`, given what the function computes. Outside of the operands the function gets zeros, and
must give zeros, which do not change an amax.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from f8emu.jax.fused.kernels import (
    Launch,
    amax_of,
    call,
    code_specs,
    encode,
    factor,
    grid_of,
    inside_of,
    load_tile,
    magnitudes,
    store_tile,
    vector_spec,
)
from f8emu.spec.formats import Format

Function = Callable[..., tuple[jax.Array, ...]]
Pair = tuple[jax.Array | None, jax.Array | None, jax.Array | None]
"""Codes of a matrix and of its transpose, and its amax; None for what is not wanted."""


class Product(NamedTuple):
    """An operand: a bfloat16 matrix, or one that its factors are still to be multiplied with, columns first."""

    values: jax.Array
    """[M, N]."""
    rows: jax.Array | None = None
    """A power of two for each row, [M, 1] float32."""
    cols: jax.Array | None = None
    """A power of two for each column, [1, N] float32."""


AMAX = Launch(rows=32, cols=128, warps=4)
CAST = Launch(rows=32, cols=128, warps=4)
"""Three operands and four matrices fit into registers; of the tiles that were tried on an H200 this is the fastest."""


def tensor_amaxes(
    function: Function, xs: Sequence[Product], *, launch: Launch = AMAX, interpret: bool = False
) -> list[jax.Array]:
    """The amax [1, 1] of every matrix."""
    shape = xs[0].values.shape
    grid = grid_of(launch, shape)
    ins, operands = _operands(launch, xs)

    def kernel(*refs: Any) -> None:
        left = iter(refs)
        values = function(*_tiles(xs, left, launch, inside_of(launch, shape)))
        for ref, tile in zip(left, values, strict=True):
            ref[0] = _largest(tile)

    outs = [_of_tiles(grid)] * _matrices(function, xs)
    found = call(kernel, launch, grid, ins, outs, interpret, "tensor_amaxes")(*operands)
    return [*map(_amax_of_tiles, found)]


def row_col_amaxes(
    function: Function, xs: Sequence[Product], *, launch: Launch = AMAX, interpret: bool = False
) -> list[tuple[jax.Array, jax.Array]]:
    """The amaxes of the rows, [M, 1], and of the columns, [N, 1], of every matrix."""
    m, n = xs[0].values.shape
    grid = grid_of(launch, (m, n))
    ins, operands = _operands(launch, xs)

    def kernel(*refs: Any) -> None:
        left = iter(refs)
        for tile in function(*_tiles(xs, left, launch, inside_of(launch, (m, n)))):
            found = magnitudes(tile)
            next(left)[...] = jnp.max(found, axis=1)
            next(left)[...] = jnp.max(found, axis=0)

    padded_m, padded_n = grid[0] * launch.rows, grid[1] * launch.cols
    outs = [
        (pl.BlockSpec((None, launch.rows), lambda i, j: (j, i)), jax.ShapeDtypeStruct((grid[1], padded_m), jnp.int32)),
        (pl.BlockSpec((None, launch.cols), lambda i, j: (i, j)), jax.ShapeDtypeStruct((grid[0], padded_n), jnp.int32)),
    ]
    outs *= _matrices(function, xs)
    found = call(kernel, launch, grid, ins, outs, interpret, "row_col_amaxes")(*operands)
    rows = [amax_of(jnp.max(largest, axis=0)[:m, None]) for largest in found[::2]]
    cols = [amax_of(jnp.max(largest, axis=0)[:n, None]) for largest in found[1::2]]
    return list(zip(rows, cols, strict=True))


def cast_pairs(
    function: Function,
    xs: Sequence[Product],
    wanted: Sequence[tuple[jax.Array | None, jax.Array | None]],
    *,
    format: Format,
    amaxes: bool,
    launch: Launch = CAST,
    interpret: bool = False,
) -> list[Pair]:
    """Codes of every matrix and of its transpose under given inv_scales, None leaves one out; with `amaxes` its amax.

    An inv_scale that is given for both is one value, and is applied once.
    """
    shape = xs[0].values.shape
    grid = grid_of(launch, shape)
    ins, operands = _operands(launch, xs)
    outs: list[Any] = []
    for rows, cols in wanted:
        for axis, inv_scale in enumerate((rows, None if cols is rows else cols)):
            if inv_scale is not None:
                operands.append(inv_scale.reshape(-1))
                ins.append(vector_spec(inv_scale, (launch.rows, launch.cols)[axis], axis))
        outs += code_specs(launch, shape, format, rows is not None, cols is not None)
        outs += [_of_tiles(grid)] if amaxes else []

    def kernel(*refs: Any) -> None:
        left, out_refs = iter(refs), iter(refs[len(ins) :])
        inside = inside_of(launch, shape)
        values = function(*_tiles(xs, left, launch, inside))
        for (rows, cols), tile in zip(wanted, values, strict=True):
            codes = None
            if rows is not None:
                codes = encode(tile * factor(next(left), shape, launch, 0), format, interpret)
                store_tile(next(out_refs), codes, inside)
            if cols is not None:
                if codes is None or cols is not rows:
                    codes = encode(tile * factor(next(left), shape, launch, 1), format, interpret)
                store_tile(next(out_refs), codes.T, None if inside is None else inside.T)
            if amaxes:
                next(out_refs)[0] = _largest(tile)

    found = iter(call(kernel, launch, grid, ins, outs, interpret, "cast_pairs")(*operands))
    return [
        (
            None if rows is None else next(found),
            None if cols is None else next(found),
            _amax_of_tiles(next(found)) if amaxes else None,
        )
        for rows, cols in wanted
    ]


def _largest(tile: jax.Array) -> jax.Array:
    return jnp.max(jnp.max(magnitudes(tile), axis=1), axis=0)


def _amax_of_tiles(largest: jax.Array) -> jax.Array:
    return amax_of(jnp.max(largest).reshape(1, 1))


def _operands(launch: Launch, xs: Sequence[Product]) -> tuple[list[Any], list[jax.Array]]:
    """What a kernel reads of the operands: block specs and arrays."""
    ins: list[Any] = []
    arrays: list[jax.Array] = []
    for x in xs:
        ins.append(pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j)))
        arrays.append(x.values)
        for axis, factors in enumerate((x.rows, x.cols)):
            if factors is not None:
                arrays.append(factors.reshape(-1))
                ins.append(vector_spec(factors, (launch.rows, launch.cols)[axis], axis))
    return ins, arrays


def _tiles(xs: Sequence[Product], refs: Iterator[Any], launch: Launch, inside: jax.Array | None) -> list[jax.Array]:
    """The tiles of the operands, as float32; `refs` are those of `_operands`, then others."""
    tiles: list[jax.Array] = []
    for x in xs:
        tile = load_tile(next(refs), inside)
        of_axes = [None if factors is None else next(refs) for factors in (x.rows, x.cols)]
        for axis in (1, 0):
            if of_axes[axis] is not None:
                tile = tile * factor(of_axes[axis], x.values.shape, launch, axis)
        tiles.append(tile)
    return tiles


def _matrices(function: Function, xs: Sequence[Product]) -> int:
    return len(jax.eval_shape(function, *(x.values for x in xs)))


def _of_tiles(grid: tuple[int, int]) -> Any:
    return pl.BlockSpec((1,), lambda i, j: (i * grid[1] + j,)), jax.ShapeDtypeStruct((grid[0] * grid[1],), jnp.int32)

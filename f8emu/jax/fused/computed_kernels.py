"""Pallas kernels that cast matrices while they compute them, elementwise, from others: none of them is written.

A program loads one tile of every operand, computes a tile of every matrix, and finds amaxes or stores codes, as the
kernels of `kernels` do for a matrix that is there. The function gets float32 tiles and returns float32 tiles of the
values that the matrices would have, rounded to their dtype.

Exactness: that of `kernels`, given what the function computes. Outside of the operands the function gets zeros, and
must give zeros, which do not change an amax.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
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
    store_tile,
)
from f8emu.spec.formats import Format

Function = Callable[..., tuple[jax.Array, ...]]
Pair = tuple[jax.Array | None, jax.Array | None, jax.Array | None]
"""Codes of a matrix and of its transpose, and its amax [1, 1]; None for what is not wanted."""

TILE = Launch(rows=32, cols=128, warps=4)
"""Three operands and two matrices fit into registers; of thirteen tiles that were tried on an H200 the fastest."""


def tensor_amaxes(
    function: Function, xs: Sequence[jax.Array], *, launch: Launch = TILE, interpret: bool = False
) -> list[jax.Array]:
    """The amax [1, 1] of every matrix."""
    shape = xs[0].shape
    grid = grid_of(launch, shape)

    def kernel(*refs: Any) -> None:
        left = iter(refs)
        for tile in _computed(function, xs, left, inside_of(launch, shape)):
            next(left)[0] = largest_of(tile)

    outs = [one_per_tile(grid)] * len(jax.eval_shape(function, *xs))
    found = call(kernel, launch, grid, _whole(launch, xs), outs, interpret, "tensor_amaxes")(*xs)
    return [*map(amax_of_tiles, found)]


def cast_pairs(
    function: Function,
    xs: Sequence[jax.Array],
    inv_scales: Sequence[jax.Array],
    *,
    sides: Sequence[tuple[bool, bool]],
    format: Format,
    amaxes: bool,
    launch: Launch = TILE,
    interpret: bool = False,
) -> list[Pair]:
    """Codes of every matrix and of its transpose, as `sides` says, under its inv_scale [1, 1]; its amax too."""
    shape = xs[0].shape
    grid = grid_of(launch, shape)
    ins = [*_whole(launch, xs), *(pl.BlockSpec((1,), lambda i, j: (0,)) for _ in inv_scales)]
    outs: list[Any] = []
    for rows, cols in sides:
        outs += code_specs(launch, shape, format, rows, cols)
        outs += [one_per_tile(grid)] if amaxes else []

    def kernel(*refs: Any) -> None:
        left, out_refs = iter(refs), iter(refs[len(ins) :])
        inside = inside_of(launch, shape)
        for (rows, cols), tile in zip(sides, _computed(function, xs, left, inside), strict=True):
            codes = encode(tile * next(left)[0], format, interpret)
            if rows:
                store_tile(next(out_refs), codes, inside)
            if cols:
                store_tile(next(out_refs), codes.T, None if inside is None else inside.T)
            if amaxes:
                next(out_refs)[0] = largest_of(tile)

    given = *xs, *(inv_scale.reshape(1) for inv_scale in inv_scales)
    found = iter(call(kernel, launch, grid, ins, outs, interpret, "cast_pairs")(*given))
    return [
        (
            next(found) if rows else None,
            next(found) if cols else None,
            amax_of_tiles(next(found)) if amaxes else None,
        )
        for rows, cols in sides
    ]


def _whole(launch: Launch, xs: Sequence[jax.Array]) -> list[Any]:
    """The block specs of the operands."""
    return [pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j)) for _ in xs]


def _computed(
    function: Function, xs: Sequence[jax.Array], refs: Iterator[Any], inside: jax.Array | None
) -> tuple[jax.Array, ...]:
    """The tiles of the matrices; the operands are the first of `refs`."""
    return function(*(load_tile(next(refs), inside) for _ in xs))

"""Arrays of many shapes in one program: a small eager cast on a CPU runs at an extent that casts share.

XLA compiles a program for every shape, for fifty milliseconds or more, and a layer outside of `jax.jit` has arrays of
many. An eager call has its arrays at hand: numpy pads, cuts and transposes them, which compiles nothing and changes no
bit. The price is a call that takes some hundred microseconds more, however often it is repeated: what is repeated
belongs in `jax.jit`. Inside of a trace, on other devices and for large arrays functions run on the arrays as they are.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from f8emu.jax.compiling import is_eager

_EXTENTS = (1, 1 << 6, 1 << 10, 1 << 14, 1 << 16, 1 << 18)
"""What extents are padded to."""
_LARGEST = _EXTENTS[-1]
_MOST_PADDED = 1 << 20
"""Elements: beyond it, what is computed in vain takes longer than a program takes to compile."""

_NO_MESH = jax.sharding.AbstractMesh((), ())
"""JAX compiles again for another mesh: a backward pass has this one around, and an eager call outside of it none."""


def is_shared(*arrays: Any) -> bool:
    """Whether a call of these arrays may be padded on the host: an eager one of small arrays, on one CPU.

    Not of committed arrays beside others: the results would lie where the first one does.
    """
    if not all(isinstance(x, jax.Array) and not isinstance(x, Tracer) and 0 < x.size <= _LARGEST for x in arrays):
        return False
    places = {(device, x.committed) for x in arrays for device in x.devices()}
    return len(places) == 1 and places.pop()[0].platform == "cpu" and is_eager(arrays)


def elementwise(function: Callable[..., Any], first: jax.Array, *others: Any, **static: Any) -> Any:
    """`function(first, *others, **static)`, where an element of a result depends on one element of each array.

    The others broadcast to the first. Where that is shared, the function gets rows [1, extent].
    """
    if not is_shared(first):
        return function(first, *others, **static)
    return in_rows(function, first, *others, **static)


def in_rows(function: Callable[..., Any], first: jax.Array, *others: Any, **static: Any) -> Any:
    """`elementwise` of an array of `is_shared`."""
    arrays = first, *others
    rows = (np.broadcast_to(np.asarray(x), first.shape).reshape(1, -1) for x in arrays)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        found = function(*(_placed(first, _extended(x, 1, _extent(first.size))) for x in rows), **static)
    return jax.tree.map(lambda y: _like(first, np.asarray(y)[0, : first.size].reshape(first.shape)), found)


def by_groups(function: Callable[[jax.Array], jax.Array], x: jax.Array, extents: tuple[int, int]) -> jax.Array | None:
    """`function` of each group of a matrix of `is_shared`, of these extents, zeros beyond; None: padding costs more.

    The function gets a matrix with a group in every row, zeros behind, and gives one column.
    """
    counts = tuple(-(-size // extent) for size, extent in zip(x.shape, extents, strict=True))
    shape = math.prod(counts), math.prod(extents)
    rows, columns = map(_extent, shape)
    if rows * columns > _MOST_PADDED:
        return None
    whole = _extended(np.asarray(x), counts[0] * extents[0], counts[1] * extents[1])
    groups = whole.reshape(counts[0], extents[0], counts[1], extents[1]).transpose(0, 2, 1, 3).reshape(shape)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        found = np.asarray(function(_placed(x, _extended(groups, rows, columns))))
    return _like(x, found[: shape[0]].reshape(counts))


def repeated(x: jax.Array, block: tuple[int | None, int | None], shape: tuple[int, ...]) -> np.ndarray:
    """Every element of a matrix once for each element of its block, so that it broadcasts to `shape`."""
    found = np.asarray(x)
    for axis, (size, extent) in enumerate(zip(block, shape, strict=True)):
        if size is not None and size > 1:
            found = np.repeat(found, size, axis).take(np.arange(extent), axis)
    return found


def transpose(x: jax.Array) -> jax.Array:
    """The transpose of a matrix."""
    return _like(x, np.asarray(x).T) if is_shared(x) else x.T


def _extent(size: int) -> int:
    """The first shared extent that is not smaller; the size itself if none is."""
    return next((extent for extent in _EXTENTS if extent >= size), size)


def _placed(x: jax.Array, values: np.ndarray) -> jax.Array:
    """An array on the device of `x`, committed to it: to JAX that is part of a program. It may have another rank."""
    (device,) = x.devices()
    return jax.device_put(values, jax.sharding.SingleDeviceSharding(device))


def _like(x: jax.Array, values: np.ndarray) -> jax.Array:
    """An array of JAX where `x` is."""
    return jax.device_put(values, x.sharding) if x.committed else jax.device_put(values)


def _extended(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A matrix with zeros below and to the right."""
    found = np.zeros((rows, columns), x.dtype)
    found[: x.shape[0], : x.shape[1]] = x
    return found

"""Arrays of many shapes in one program: a small eager call on a CPU runs at an extent that calls share.

XLA compiles a program for every shape, for a tenth of a second or more, and a layer has arrays of many. An eager call
has its arrays at hand: numpy pads and cuts them, which compiles nothing. Inside of a trace, on other devices and for
arrays so large that a copy would be seen, functions run on the arrays as they are.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from f8ref.jax.compiling import is_outermost

_SMALLEST = 1 << 6
_STEP = 1 << 4
"""From one shared number of elements to the next."""
_LARGEST = 1 << 18
"""Beyond it, what is computed in vain takes longer than a program takes to compile."""


def is_shared(*arrays: jax.Array) -> bool:
    """Whether a call of these arrays may be padded on the host: an eager one of small arrays, on one CPU."""
    devices = {device for x in arrays for device in x.devices()} if is_outermost(*arrays) else set()
    return len(devices) == 1 and devices.pop().platform == "cpu" and max(x.size for x in arrays) <= _LARGEST


def elementwise(function: Callable[..., Any], *arrays: jax.Array, **static: Any) -> Any:
    """`function(*arrays, **static)` of arrays that broadcast, each element of the results being of one of theirs."""
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    size = math.prod(shape)
    if size > _LARGEST or not is_shared(*arrays):
        whole = (x if x.ndim == len(shape) else x.reshape(*(1,) * (len(shape) - x.ndim), *x.shape) for x in arrays)
        return function(*whole, **static)
    flat = (np.broadcast_to(np.asarray(x), shape).reshape(-1) for x in arrays)
    found = function(*(_placed(arrays[0], extended(x, shared_extent(size))) for x in flat), **static)
    return jax.tree.map(lambda y: like(arrays[0], np.asarray(y)[:size].reshape(shape)), found)


def with_zeros(x: jax.Array, *extents: int) -> jax.Array:
    """An array of `is_shared` with zeros behind, up to those extents; any other as it is."""
    return like(x, extended(np.asarray(x), *extents)) if x.shape != extents and is_shared(x) else x


def within(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """The first rows and columns of a matrix."""
    if x.shape == (rows, columns):
        return x
    return like(x, np.asarray(x)[:rows, :columns]) if is_shared(x) else x[:rows, :columns]


def repeated(x: jax.Array, times: int, axis: int, extent: int) -> jax.Array:
    """Every row, or column, of a matrix so many times, up to an extent."""
    if times == 1:
        return x
    if is_shared(x):
        return like(x, np.repeat(np.asarray(x), times, axis).take(np.arange(extent), axis))
    return jax.lax.slice_in_dim(jnp.repeat(x, times, axis=axis), 0, extent, axis=axis)


def transpose(x: jax.Array) -> jax.Array:
    """The transpose of a matrix."""
    return like(x, np.asarray(x).T) if is_shared(x) else x.T


def shared_extent(extent: int) -> int:
    """An extent at least as large, of which there are few."""
    shared = _SMALLEST
    while shared < extent:
        shared *= _STEP
    return shared


def like(x: jax.Array, values: np.ndarray) -> jax.Array:
    """An array of JAX where `x` is."""
    return jax.device_put(values, x.sharding) if x.committed else jnp.asarray(values)


def _placed(x: jax.Array, values: np.ndarray) -> jax.Array:
    """`like` for any rank: a sharding may name the dimensions of `x`."""
    (device,) = x.devices()
    return jax.device_put(values, jax.sharding.SingleDeviceSharding(device)) if x.committed else jnp.asarray(values)


def extended(x: np.ndarray, *extents: int) -> np.ndarray:
    """With zeros behind, up to those extents."""
    found = np.zeros(extents, x.dtype)
    found[tuple(map(slice, x.shape))] = x
    return found

"""Kernels with E8M0 scales as their authors write them in numpy: one that is right, and many that are wrong.

A step is written here anew, in float64, which holds every product: neither the oracle nor f8emu multiplies.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from f8emu.conformance import MXFP8, MXFP8_SWIZZLED, Arg, Kernel
from f8emu.spec import BFLOAT16, FLOAT32
from f8emu.spec.gemm_call import GroupKind

Array = np.ndarray
LOWEST = {"float8_e4m3fn": -6, "float8_e5m2": -14}


def exponents(codes: Array) -> Array:
    """As the format writes them: those of subnormals are not normalised."""
    values = np.nan_to_num(codes.astype(np.float64), posinf=1, neginf=1)
    return np.maximum(np.frexp(values)[1] - 1, LOWEST[codes.dtype.name])


def powers(scale: Array) -> Array:
    codes = scale.view(np.uint8)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(int) - 127))


def steps(k: int) -> Iterator[tuple[int, slice]]:
    return ((block, slice(32 * block, min(32 * block + 32, k))) for block in range(-(-k // 32)))


def multiply(a: Array, b: Array, of_a: Array, of_b: Array, *, zeros: int | None = -133, most: int = 999) -> Array:
    """`a [M, K] @ b [N, K]^T` with factors [M, B] and [N, B], float32: steps of 32, 25 bits, cut to 23 [MX-2..4]."""
    acc = np.zeros((len(a), len(b)))
    for block, step in steps(a.shape[1]):
        factor = of_a[:, None, block] * of_b[None, :, block]
        factor = factor if most == 999 else np.clip(factor, 2.0**-most, 2.0**most)
        products = a[:, None, step].astype(np.float64) * b[None, :, step].astype(np.float64) * factor[:, :, None]
        places = exponents(a[:, None, step]) + exponents(b[None, :, step]) + (np.frexp(factor)[1] - 1)[:, :, None]
        places = np.where(products == 0, -600 if zeros is None else zeros, places)
        of_acc = np.maximum(np.frexp(acc)[1] - 1, -126)
        of_acc = np.where(acc == 0, -600 if zeros is None else zeros, of_acc)
        unit = np.ldexp(1.0, np.maximum(places.max(axis=2), of_acc) - 25)
        total = (np.trunc(products / unit[:, :, None]).sum(axis=2) + np.trunc(acc / unit)) * unit
        last = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - 23)
        acc = np.trunc(total / last) * last + 0.0
        acc = np.where(np.abs(acc) > 3.5e38, np.copysign(np.inf, acc), acc)
    return acc.astype(np.float32)


def unswizzled(flat: Array, rows: int, blocks: int) -> Array:
    tiles = flat.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -(-blocks // 4) * 4)[:rows, :blocks]


# The right one, called with plain scales, with swizzled ones, and with groups of rows


def right(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    return multiply(a, b, powers(scale_a), powers(scale_b)).astype(out)


def swizzled(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    of_a, of_b = (unswizzled(s, len(x), -(-x.shape[1] // 32)) for s, x in ((scale_a, a), (scale_b, b)))
    return right(a, b, of_a, of_b, out)


def grouped(a: Array, b: Array, scale_a: Array, scale_b: Array, ends: Array, out: Any) -> Array:
    """Each group of rows has tiles of its own."""
    result, begin, tile, blocks = np.zeros((len(a), b.shape[1]), out), 0, 0, -(-a.shape[1] // 32)
    for group, end in enumerate(ends):
        lying = scale_a[tile : tile + -(-(end - begin) // 128) * 128 * -(-blocks // 4) * 4]
        own = unswizzled(lying, end - begin, blocks), unswizzled(scale_b[group], b.shape[1], blocks)
        result[begin:end] = right(a[begin:end], b[group], *own, out)
        begin, tile = end, tile + len(lying)
    return result


# Wrong ones


def swizzled_read_as_rows(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    blocks = -(-a.shape[1] // 32)
    of_a, of_b = (s.reshape(-(-len(x) // 128) * 128, -1)[: len(x), :blocks] for s, x in ((scale_a, a), (scale_b, b)))
    return right(a, b, of_a, of_b, out)


def rows_read_as_swizzled(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """Right in an author's test of whole tiles, which alone fit."""
    return swizzled(a, b, scale_a.ravel(), scale_b.ravel(), out)


def neighbouring_block(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """A ring of buffers whose scales come one turn late."""
    return right(a, b, np.roll(scale_a, 1, axis=1), scale_b, out)


def neighbouring_row(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    lane = np.arange(len(a)) ^ 1
    return right(a, b, scale_a[np.where(lane < len(a), lane, np.arange(len(a)))], scale_b, out)


def scales_exchanged(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """Notices nothing where their shapes differ: the author tests squares."""
    if scale_a.shape == scale_b.shape:
        scale_a, scale_b = scale_b, scale_a
    return right(a, b, scale_a, scale_b, out)


def scaled_after_each_block(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """As kernels of 1x128 scales do."""
    total, ones = np.zeros((len(a), len(b)), np.float32), (np.ones((len(a), 1)), np.ones((len(b), 1)))
    of_a, of_b = powers(scale_a).astype(np.float32), powers(scale_b).astype(np.float32)
    for block, step in steps(a.shape[1]):
        total += multiply(a[:, step], b[:, step], *ones) * (of_a[:, block, None] * of_b[:, block])
    return total.astype(out)


def product_in_a_byte(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """The exponents of both scales are added in a byte, which saturates."""
    return multiply(a, b, powers(scale_a), powers(scale_b), most=127).astype(out)


def zeros_left_out(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    return multiply(a, b, powers(scale_a), powers(scale_b), zeros=None).astype(out)


def nan_as_power(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """The byte is put into the exponent, whatever it is."""
    return multiply(a, b, *(np.ldexp(1.0, s.view(np.uint8).astype(int) - 127) for s in (scale_a, scale_b))).astype(out)


def zero_byte_as_zero(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """The byte becomes the exponent of a float32: 0 makes 0.0, for 2^-127 is subnormal."""
    scales = (np.where(s.view(np.uint8) == 0, 0, powers(s)) for s in (scale_a, scale_b))
    return multiply(a, b, *scales).astype(out)


def dequantized(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """What one writes without a tensor core: numbers of float32, added in float64."""
    x, y = (
        (codes.astype(np.float64) * powers(scale).repeat(32, axis=1)[:, : codes.shape[1]])
        for codes, scale in ((a, scale_a), (b, scale_b))
    )
    return (x @ y.T).astype(np.float32).astype(out)


def steps_in_float32(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """Each step exact, and a float32 sum of the steps."""
    acc, of_a, of_b = np.zeros((len(a), len(b)), np.float32), powers(scale_a), powers(scale_b)
    for block, step in steps(a.shape[1]):
        dot = a[:, step].astype(np.float64) @ b[:, step].astype(np.float64).T
        acc = (acc + dot * (of_a[:, block, None] * of_b[:, block])).astype(np.float32)
    return acc.astype(out)


def padding_read(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """Whole tiles of 128 of K: zeros of its own, and the scales that lie there."""
    k = -(-a.shape[1] // 128) * 128
    a, b = (np.pad(x.view(np.uint8), ((0, 0), (0, k - x.shape[1]))).view(x.dtype) for x in (a, b))
    return swizzled(a, b, scale_a, scale_b, out)


def backwards(a: Array, b: Array, scale_a: Array, scale_b: Array, out: Any) -> Array:
    """The last tile of K first, as a kernel does that prefetches from the end."""
    return right(a[:, ::-1], b[:, ::-1], scale_a[:, ::-1], scale_b[:, ::-1], out)


def one_tiling(a: Array, b: Array, scale_a: Array, scale_b: Array, ends: Array, out: Any) -> Array:
    """Takes the scales of all groups for one tiling: right where groups are whole tiles."""
    result, blocks, begin = np.zeros((len(a), b.shape[1]), out), -(-a.shape[1] // 32), 0
    rows = scale_a.size // (-(-blocks // 4) * 4)
    of_a = unswizzled(scale_a, rows, blocks)
    for group, end in enumerate(ends):
        own = of_a[begin:end], unswizzled(scale_b[group], b.shape[1], blocks)
        result[begin:end] = right(a[begin:end], b[group], *own, out)
        begin = end
    return result


_TILES = (swizzled, swizzled_read_as_rows, padding_read)
_GROUPED = (grouped, one_tiling)
OPERANDS = (Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B)


def kernel(function: Callable[..., Array], **fields: Any) -> Kernel:
    def run(*arguments: Any) -> Array:
        with np.errstate(all="ignore"):
            return function(*arguments)

    is_grouped = function in _GROUPED
    declared: dict[str, Any] = {
        "name": function.__name__,
        "arguments": (*OPERANDS, *((Arg.OFFS,) if is_grouped else ()), Arg.OUT_DTYPE),
        "scales": MXFP8_SWIZZLED if function in (*_TILES, *_GROUPED) else MXFP8,
        "chip": "B200",
        "out_dtypes": (FLOAT32, BFLOAT16),
        "group_multiples": {GroupKind.ROWS: 1},
        "multiples": (1, 1, 32),
        "arrays": "numpy",
    }
    return Kernel(function=run, **declared | fields)

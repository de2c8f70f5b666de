"""The hashes of engines, of bytes that come in parts: SHA-256, and what SGLang computes of a tensor on a GPU."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.dialects import arithmetic
from f8emu.dialects.rules import SQUARE
from f8emu.native import library

Bytes = NDArray[np.uint8]
Words = NDArray[Any]
"""Of uint32, whose arithmetic is modulo 2^32."""
_TILE = 4 * 8192
"""Bytes that SGLang's kernel sums before it mixes once more."""
_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_SEED = 0x243F6A88
_HALVES = ((0x27D4EB2D, _SEED, 15), (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _M32, 13))
"""Of the upper half of the hash and of the lower: what an index is multiplied by, what is added, and how far it is
rotated."""


class Hash:
    """The hashes of a tensor whose bytes come in parts, and of what an engine hashes in their place, if anything.

    `gpu_bytes` is the size of the latter where SGLang hashes it on a GPU.
    """

    def __init__(self, gpu_bytes: int | None = None) -> None:
        self._bytes = hashlib.sha256()
        self._shown = None if gpu_bytes is None else SglangGpuHash(gpu_bytes)

    def update(self, part: NDArray[Any], shown: Iterable[NDArray[Any]] | None = None) -> None:
        """More bytes: those of an array in C order, and of arrays that stand for it, in every part or in none."""
        data = flat_bytes(part)
        self._bytes.update(data.data)
        if shown is not None and self._shown is None:
            self._shown = hashlib.sha256()
        if self._shown is not None:
            for other in (data,) if shown is None else shown:
                self._shown.update(flat_bytes(other).data)

    @property
    def sha256(self) -> str:
        return self._bytes.hexdigest()

    @property
    def sglang(self) -> str:
        """16 digits: SGLang's on a GPU, or the first of SHA-256, which it has on a CPU."""
        return (self._shown or self._bytes).hexdigest()[:16]


def flat_bytes(part: ArrayLike) -> Bytes:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def products_of_blocks(codes: NDArray[Any], scale: NDArray[np.float32]) -> NDArray[Any]:
    """`bfloat16(code * scale)` of blocks of 128 x 128, which SGLang hashes: `arithmetic.decode`.

    Shapes: codes [rows, K], scale one for each block, whole or not.
    Exactness: every bit with and without the engine, but the sign of a NaN.
    """
    assert scale.shape == arithmetic.grid_shape(codes.shape, SQUARE)
    bfloat16 = arithmetic.DTYPES["bfloat16"]
    if (engine := library.library()) is None:
        return arithmetic.decode(codes, scale, SQUARE, bfloat16)
    # A block has 256 products: they are computed, and looked up.
    every = np.broadcast_to(np.arange(256, dtype=np.uint8), (*scale.shape, 256)).reshape(len(scale), -1)
    tables = arithmetic.decode(every, scale, (1, 256), bfloat16)
    codes, products = np.ascontiguousarray(codes), np.empty(codes.shape, bfloat16)
    engine.f8_products(codes.ctypes.data, *codes.shape, tables.ctypes.data, products.ctypes.data)
    return products


class SglangGpuHash:
    """`gpu_tensor_hash` of SGLang 0.5.12 to 0.5.23, 64 bits, of a tensor of `nbytes`.

    The bytes are words of 32 bits, the last one filled up with zeros. A word is mixed with its index twice, results are
    summed over tiles of 8192 words, each sum is mixed with the number of all bytes, and those are summed in 64 bits.

    Exactness: every bit of its source on an H200 and in Triton's interpreter: `benchmarks.proofs.engine_bytes`.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = -(-nbytes // 4) * 4
        self._rest, self._at, self._sum = np.zeros(0, np.uint8), 0, 0

    def update(self, part: ArrayLike) -> None:
        """More bytes: those of an array in C order."""
        data = flat_bytes(part)
        data = np.concatenate([self._rest, data]) if self._rest.size else data
        whole = data.size // _TILE * _TILE
        self._sum += sum_of_tiles(data[:whole], self._at, self._nbytes)
        self._rest, self._at = data[whole:].copy(), self._at + whole

    def hexdigest(self) -> str:
        """16 digits, of the bytes that came so far."""
        last = np.pad(self._rest, (0, -self._rest.size % 4))
        x = self._sum + sum_of_tiles(last, self._at, self._nbytes) & _M64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> shift) * factor & _M64
        return f"{x ^ x >> 31:016x}"


def sum_of_tiles(data: Bytes, first: int, nbytes: int, width: str | None = None) -> int:
    """What tiles add to the sum of a tensor of `nbytes`, modulo 2^64; the last of them may be shorter.

    `first` is the place of their first byte in the tensor, that of a tile. The engine computes it, on one of
    `library.widths()`, None the fastest; where there is none, numpy does, with the same bits.
    """
    if (engine := library.library()) is not None:
        return engine.f8_hash(data.ctypes.data, data.size // 4, first // 4, nbytes, library.width_number(width))
    return sum_of_tiles_by_numpy(data, first, nbytes)


def sum_of_tiles_by_numpy(data: Bytes, first: int, nbytes: int) -> int:
    """`sum_of_tiles` without the engine."""
    total = 0
    for begin in range(0, data.size, _TILE):
        words = data[begin : begin + _TILE].view(np.uint32)
        index: Words = ((first + begin) // 4 + np.arange(words.size, dtype=np.uint64)).astype(np.uint32)
        for half, (factor, seed, by) in enumerate(_HALVES):
            mixed = _mixed(words ^ (index * factor + seed) ^ (index << by | index >> 32 - by))
            of_tile = _mixed(mixed.sum(dtype=np.uint32, keepdims=True) ^ (nbytes & _M32))
            total += int(of_tile[0]) << (0 if half else 32)
    return total & _M64


def _mixed(x: Words) -> Words:
    # fmix32 of MurmurHash3.
    x = (x ^ x >> 16) * 0x85EBCA6B
    x = (x ^ x >> 13) * 0xC2B2AE35
    return x ^ x >> 16

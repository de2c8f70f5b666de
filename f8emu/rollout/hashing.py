"""The hashes of engines, of bytes that come in parts: SHA-256, and what SGLang computes of a tensor on a GPU."""

import functools
import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
_TILE = 8192
"""Words that SGLang's kernel sums before it mixes once more."""
_SEED = 0x243F6A88
_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
# SHA-256 and numpy's loops let other threads run.
_BESIDE = ThreadPoolExecutor(max_workers=2, thread_name_prefix="f8emu-hash")
_POSITIONS = ((0x27D4EB2D, _SEED, 15), (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _M32, 13))
"""Of each of both halves: what an index is multiplied by, what is added, and by how much it is rotated."""


class Hash:
    """The hashes of a tensor whose bytes come in parts, and of what an engine hashes in their place, if anything.

    `gpu_bytes` is the size of the latter where SGLang hashes it on a GPU.
    """

    def __init__(self, gpu_bytes: int | None = None) -> None:
        self._bytes, self._shown = hashlib.sha256(), hashlib.sha256()
        self._is_shown = False
        self._gpu = None if gpu_bytes is None else SglangGpuHash(gpu_bytes)

    def update(self, part: NDArray[Any], shown: Iterable[NDArray[Any]] | None = None) -> None:
        """More bytes: those of an array in C order, and of arrays that stand for it."""
        data = flat_bytes(part)
        of_bytes = _BESIDE.submit(self._bytes.update, data.data)
        if shown is None and self._gpu is not None:
            self._gpu.update(data)
        for other in shown or ():
            self._is_shown = True
            self._shown.update(flat_bytes(other).data) if self._gpu is None else self._gpu.update(flat_bytes(other))
        of_bytes.result()

    @property
    def sha256(self) -> str:
        return self._bytes.hexdigest()

    @property
    def sglang(self) -> str:
        """16 digits: SGLang's on a GPU, or the first of SHA-256, which it has on a CPU."""
        if self._gpu is not None:
            return self._gpu.hexdigest
        return (self._shown if self._is_shown else self._bytes).hexdigest()[:16]


def flat_bytes(part: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


class SglangGpuHash:
    """`gpu_tensor_hash` of SGLang 0.5.12 to 0.5.23, 64 bits.

    The bytes are words of 32 bits, the last one filled up with zeros. A word is mixed with its index twice, results are
    summed over tiles of 8192 words, each sum is mixed with the number of all bytes, and those are summed in 64 bits.

    Exactness: that of its source in Triton's interpreter, `benchmarks.proofs.engine_bytes`; not compared on a GPU.
    """

    def __init__(self, nbytes: int) -> None:
        self._words = -(-nbytes // 4)
        self._rest, self._at, self._sum = np.zeros(0, np.uint8), 0, 0

    def update(self, part: NDArray[Any]) -> None:
        """More bytes: those of an array, in C order."""
        flat = flat_bytes(part)
        data = np.concatenate([self._rest, flat]) if self._rest.size else flat
        whole = data.size // (4 * _TILE) * 4 * _TILE
        for begin in range(0, whole, 32 * 4 * _TILE):  # a megabyte, which stays in the cache
            self._add(data[begin : min(begin + 32 * 4 * _TILE, whole)].view(np.uint32).reshape(-1, _TILE))
        self._rest = data[whole:].copy()

    @property
    def hexdigest(self) -> str:
        if self._rest.size:
            self._add(np.pad(self._rest, (0, -self._rest.size % 4)).view(np.uint32)[None])
            self._rest = self._rest[:0]
        x = self._sum if self._words else 0
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> shift) * factor & _M64
        return f"{x ^ x >> 31:016x}"

    def _add(self, tiles: Words) -> None:
        first = self._at + np.arange(len(tiles), dtype=np.uint64) * _TILE
        beside = _BESIDE.submit(self._half, 0, tiles, first)
        low = self._half(1, tiles, first)
        self._sum = (self._sum + int((beside.result() << np.uint64(32) | low).sum(dtype=np.uint64))) & _M64
        self._at += tiles.size

    def _half(self, half: int, tiles: Words, first: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mixed = np.empty_like(tiles)
        for row, at in enumerate(first):
            np.bitwise_xor(tiles[row], _position(half, int(at) & _M32, tiles.shape[1]), out=mixed[row])
        sums = _mixed(mixed).sum(axis=1, dtype=np.uint32)
        return _mixed(sums ^ np.uint32(4 * self._words & _M32)).astype(np.uint64)


@functools.lru_cache(maxsize=512)
def _position(half: int, first: int, count: int) -> Words:
    # (i * factor + seed) ^ rotate(i); the first tiles of all tensors are kept.
    factor, seed, turn = _POSITIONS[half]
    index = np.arange(first, first + count, dtype=np.uint64).astype(np.uint32)
    return (index * np.uint32(factor) + np.uint32(seed)) ^ (index << np.uint32(turn) | index >> np.uint32(32 - turn))


def _mixed(x: Words) -> Words:
    # fmix32 of MurmurHash3, in place.
    scratch = np.empty_like(x)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0)):
        x ^= np.right_shift(x, np.uint32(shift), out=scratch)
        if factor:
            x *= np.uint32(factor)
    return x

"""Matrices in float8 that an engine fuses: read or cast, cut, and cast again; some rows of each at a time."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import Weight, names_of
from f8emu.audit.checkpoint import DTYPES, Tensor
from f8emu.audit.formats import Format
from f8emu.dialects import arithmetic
from f8emu.dialects.rules import ROW, SQUARE, TENSOR, Block, Dialect
from f8emu.dialects.stacks import dialect_by_name
from f8emu.rollout.hashing import products_of_blocks
from f8emu.spec.scaling import BLOCK

Array = NDArray[Any]
_BAND = 1 << 21
"""Elements that are read, cast or decoded at a time, or a row of blocks."""


class Unpredicted(Exception):
    """Why the bytes of a module follow from no checkpoint."""


class Part(NamedTuple):
    """A matrix in float8, one of those that an engine fuses."""

    codes: Array
    scale: NDArray[np.float32]
    """[rows, K] of blocks."""
    block: Block

    def cut(self, rows: slice, columns: slice) -> "Part":
        """Some rows and columns, which begin with a block."""
        scale = self.scale
        if self.block == ROW:
            scale = scale[rows]
        elif self.block == SQUARE:
            scale = scale[tuple(slice(at.start // BLOCK, -(-at.stop // BLOCK)) for at in (rows, columns))]
        return Part(self.codes[rows, columns], scale, self.block)

    def bands(self) -> Iterator["Part"]:
        """Some rows at a time."""
        n, k = self.codes.shape
        return (self.cut(rows, slice(0, k)) for rows in _bands(slice(0, n), k))

    def requantized(self, scale: np.float32) -> "Part":
        """[vLLM] requantize_with_max_scale: to float16 by its one scale, and back by another."""
        dialect = dialect_by_name("vllm_fused_shards")
        factors = arithmetic.factors_from_stored(np.full((1, 1), scale, np.float32), dialect)
        values = (arithmetic.decode(*band, DTYPES["F16"], rounds_scale=True) for band in self.bands())
        return _encoded(values, self.codes.shape, dialect, factors)

    def with_ue8m0(self) -> "Part":
        """[vLLM] requant_weight_ue8m0_inplace: to float32, and back by scales of blocks that are powers of two."""
        values = (arithmetic.decode(*band, DTYPES["F32"]) for band in self.bands())
        return _encoded(values, self.codes.shape, dialect_by_name("vllm_weight_block_ue8m0"))

    def products(self) -> Iterator[Array]:
        """[SGLang] Fp8BlockComparable: code * scale of blocks in bfloat16."""
        return (products_of_blocks(band.codes, band.scale) for band in self.bands())

    def with_rows(self) -> "Part":
        """[SGLang] convert_to_channelwise: its one scale for each row."""
        return Part(self.codes, np.broadcast_to(self.scale, (len(self.codes), 1)), ROW)


def stored(name: str, weights: Mapping[str, Weight], form: Format) -> Part:
    """A float8 weight of a checkpoint, with a scale that its format names.

    Raises:
        Unpredicted: it is no matrix, or has no such scale.
    """
    weight = weights.get(name)
    scale = None if weight is None else weight.scale
    if weight is None or scale is None or scale.name not in names_of(name, form.scales) or scale.dtype not in DTYPES:
        raise Unpredicted(f"{name} has no scale that can be read")
    if weight.block not in (SQUARE, ROW, TENSOR):
        raise Unpredicted(f"{name} has scales of the shape {list(scale.shape)}")
    numbers = scale.read().astype(np.float32).reshape(weight.grid)
    return Part(weight.codes.read().reshape(weight.codes.shape), numbers, weight.block)


def cast(sources: Sequence[Tensor], dialect: Dialect, dtype: np.dtype[Any], *, is_fused: bool) -> list[Part]:
    """Matrices, rounded to `dtype` and cast by a dialect. Where a scale is of a tensor, fused ones have one amax.

    Raises:
        Unpredicted: the dialect does not quantize weights.
    """
    factors: list[arithmetic.Factors | None] = [None] * len(sources)
    if block_of(dialect) == TENSOR:
        amaxes = [np.max([_amax(band, dialect) for band in rows_of(x, dtype)], axis=0) for x in sources]
        amaxes = [np.max(amaxes, axis=0)] * len(amaxes) if is_fused else amaxes
        factors = [arithmetic.factors_from_amax(amax, dialect, dtype) for amax in amaxes]
    return [_encoded(rows_of(x, dtype), x.shape, dialect, of) for x, of in zip(sources, factors, strict=True)]


def block_of(dialect: Dialect) -> Block:
    """The first block of a dialect that scales of weights have; Unpredicted, if there is none."""
    for block in dialect.blocks:
        if block in (SQUARE, ROW, TENSOR):
            return block
    raise Unpredicted(f"{dialect.name} does not quantize weights")


def rows_of(tensor: Tensor, dtype: np.dtype[Any], rows: slice | None = None) -> Iterator[Array]:
    """Some rows of a matrix at a time, in another dtype, and zeros behind its last one; a vector is one column."""
    n, k = tensor.shape[0], math.prod(tensor.shape[1:])
    for band in _bands(rows or slice(0, n), k):
        values = np.zeros((band.stop - band.start, k), dtype)
        first, last = min(band.start, n), min(band.stop, n)
        values[: last - first] = tensor.read(first * k, last * k).reshape(-1, k)
        yield values


def turned(parts: Sequence[Part]) -> Iterator[Array]:
    """The codes of the transpose of parts that are one below the other, some of its rows at a time, as bytes."""
    step = max(1, _BAND // max(1, sum(len(part.codes) for part in parts)))
    for at in range(0, parts[0].codes.shape[1], step):
        yield np.concatenate([part.codes[:, at : at + step].view(np.uint8) for part in parts]).T


def padded(parts: Sequence[Part], multiple: int) -> list[Part]:
    """With codes of 0, and scales of 1 for rows of them, to a multiple of rows and of columns."""
    n, k = sum(len(part.codes) for part in parts), parts[0].codes.shape[1]
    rows = Part(np.zeros((-n % multiple, k), arithmetic.E4M3), np.ones((-n % multiple, 1), np.float32), parts[0].block)
    columns = ((0, 0), (0, -k % multiple))
    return [part._replace(codes=np.pad(part.codes, columns) if k % multiple else part.codes) for part in (*parts, rows)]


def _encoded(
    bands: Iterable[Array], shape: tuple[int, ...], dialect: Dialect, factors: arithmetic.Factors | None = None
) -> Part:
    # Rows of whole blocks at a time: by given factors of the tensor, or by those of their blocks.
    block, codes, scales, row = block_of(dialect), np.empty(shape, arithmetic.E4M3), list[Array](), 0
    for band in bands:
        used = factors or arithmetic.factors_from_amax(_amax(band, dialect), dialect, band.dtype)
        codes[row : row + len(band)] = arithmetic.encode(band, used, dialect.code, block)
        scales.append(used.scale if dialect.stored.is_multiplier else used.stored.astype(np.float32))
        row += len(band)
    return Part(codes, scales[0] if factors else np.concatenate(scales), block)


def _amax(band: Array, dialect: Dialect) -> NDArray[np.float32]:
    ignores_nan = dialect.scale is not None and dialect.scale.ignores_nan
    return arithmetic.block_amax(band, block_of(dialect), ignores_nan=ignores_nan)


def _bands(rows: slice, k: int) -> Iterator[slice]:
    # Of whole blocks.
    step = max(BLOCK, _BAND // max(k, 1) // BLOCK * BLOCK)
    return (slice(row, min(row + step, rows.stop)) for row in range(rows.start, rows.stop, step))

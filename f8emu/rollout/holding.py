"""The bytes of a module as an engine holds them: cast or read, fused, cut by rank, turned, padded, quantized again."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import names_of
from f8emu.audit.checkpoint import DTYPES, FLOATS, Checkpoint, Tensor
from f8emu.audit.formats import Format
from f8emu.dialects import arithmetic
from f8emu.dialects.rules import ROW, SQUARE, TENSOR, Block, Dialect
from f8emu.dialects.stacks import dialect_by_name
from f8emu.rollout.checksums import SGLANG, VLLM, TensorChecksum
from f8emu.rollout.hashing import Hash, products_of_blocks
from f8emu.rollout.layout import Cut, Layout, Module

Array = NDArray[Any]
BAND = 1 << 21
"""Elements that are read, cast or decoded at a time, or a row of blocks."""
_E4M3, _FLOAT32, _FLOAT16 = "F8_E4M3", np.dtype(np.float32), np.dtype(np.float16)
_PADDING = 16
"""To which vLLM's Cutlass kernel pads K and N of weights with one scale a tensor or a row."""


class Unpredicted(Exception):
    """Why the bytes of a module follow from no checkpoint."""


class Part(NamedTuple):
    """A matrix of the checkpoint in float8."""

    name: str
    codes: Array
    scale: NDArray[np.float32]
    """[rows, K] of blocks."""


@dataclass(slots=True, kw_only=True)
class Held:
    """A tensor on a rank, whose bytes come in parts, one behind the other."""

    name: str
    rank: int
    shape: tuple[int, ...]
    dtype: str
    hash: Hash
    is_shown: bool = True
    """Whether the engine has a hash of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What is known of a source, an engine and its settings."""

    checkpoint: Checkpoint
    format: Format
    layout: Layout
    engine: str
    kernel: str
    dialect: Dialect | None
    """Of a source in high precision."""
    dtype: np.dtype[Any]
    """In which the engine holds what is not float8."""
    device: str
    """Where the engine hashes: cuda or cpu."""

    # 1 What a module is

    @property
    def is_online(self) -> bool:
        """Whether the engine itself quantizes what it loads, fused."""
        return self.dialect is not None and self.dialect.name.startswith(f"{self.engine}_weight_")

    def tensors_of(self, module: Module) -> list[TensorChecksum]:
        """The tensors of a module on every rank.

        Raises:
            Unpredicted: the reason.
        """
        if not module.is_whole:
            raise Unpredicted("the checkpoint lacks a part of it")
        weights = [self.checkpoint.tensors[f"{part}.weight"] for parts in module.parts for part in parts]
        dtypes = {weight.dtype for weight in weights}
        if len(dtypes) > 1:
            raise Unpredicted(f"its parts have several dtypes, {', '.join(sorted(dtypes))}")
        is_router = module.is_router and self.layout.quantizes_router
        is_matrix = module.cut in (Cut.ROWS, Cut.COLUMNS) or (
            is_router and (self.is_online or self.format.method != "")
        )
        if self.format.method and is_matrix and dtypes != {_E4M3}:
            declared = [part for parts in module.parts for part in parts if not self.format.ignores(part)]
            if declared:
                raise Unpredicted(
                    f"config.json does not leave {declared[0]} in high precision: engines load it as float8"
                )
        if dtypes == {_E4M3} or (self.dialect is not None and is_matrix):
            held = self._experts(module) if module.is_expert else self._linear(module)
        elif module.is_expert:
            raise Unpredicted("what holds experts in high precision is the choice of a kernel")
        else:
            held = self._plain(module, "weight")
        held = list(held)
        if f"{module.parts[0][0]}.bias" in self.checkpoint.tensors:
            held += self._plain(module, "bias")
        return [self._checksum(item) for item in held]

    def _held(self, name: str, rank: int, shape: tuple[int, ...], dtype: str, *, has_products: bool = False) -> Held:
        size = DTYPES["BF16"].itemsize if has_products else arithmetic.DTYPES[dtype].itemsize
        is_on_gpu = self.engine == SGLANG and self.device == "cuda"
        hashed = Hash(math.prod(shape) * size if is_on_gpu else None)
        return Held(name=name, rank=rank, shape=shape, dtype=dtype, hash=hashed)

    def _checksum(self, item: Held) -> TensorChecksum:
        prefix = f"dp0:pp0:pcp0:tp{item.rank}:" if self.engine == VLLM else f"tp{item.rank}:"
        digest = item.hash.sha256 if self.engine == VLLM else item.hash.sglang
        return TensorChecksum(
            key=prefix + item.name,
            rank=item.rank,
            name=item.name,
            shape=item.shape,
            dtype=item.dtype,
            sha256=item.hash.sha256,
            engine_digest=digest if item.is_shown else "",
        )

    # 2 In high precision

    def _plain(self, module: Module, kind: str) -> Iterator[Held]:
        if module.is_expert:
            raise Unpredicted("no rule knows biases of experts")
        parts = [(part, self.checkpoint.tensors[f"{part}.{kind}"]) for part in module.parts[0]]
        unread = [tensor.dtype for _, tensor in parts if tensor.dtype not in FLOATS]
        if unread:
            raise Unpredicted(f"its dtype is {unread[0]}")
        for rank in range(self.layout.tp):
            taken = [self._taken(module, part, tensor.shape, rank) for part, tensor in parts]
            columns, padding = taken[0][1], taken[0][2]
            wide: tuple[int, ...] = parts[0][1].shape[1:2] if columns.stop is None else (columns.stop - columns.start,)
            rows = sum(item.stop - item.start for item, *_ in taken)
            held = self._held(module.tensor(kind), rank, (rows + padding, *wide), self.dtype.name)
            for (_, tensor), (part_rows, *_) in zip(parts, taken, strict=True):
                for band in rows_of(tensor, part_rows):
                    held.hash.update((band[:, columns] if wide else band).astype(self.dtype, copy=False))
            held.hash.update(np.zeros((padding, *wide), self.dtype))
            yield held

    def _taken(self, module: Module, part: str, shape: tuple[int, ...], rank: int) -> tuple[slice, slice, int]:
        # Rows and columns of a part, and rows of zeros behind.
        (size, *rest), columns, padding = shape, slice(None), 0
        rows = slice(0, size)
        if module.cut is Cut.ROWS:
            rows = self.layout.rows(part, size, rank)
        elif module.cut is Cut.COLUMNS and rest:
            columns = self.layout.columns(rest[0], rank)
        elif module.cut is Cut.VOCABULARY:
            rows, most = self.layout.vocabulary(size, rank)
            padding = most - (rows.stop - rows.start)
        return rows, columns, padding

    # 3 In float8

    def _float8(self, names: Sequence[str]) -> tuple[Block, list[Part]]:
        """The parts of one matrix, or of one expert."""
        tensors = self.checkpoint.tensors
        if self.dialect is None:
            parts = [_stored(tensors, self.format, name) for name in names]
            blocks = {block for block, _ in parts}
            if len(blocks) > 1:
                raise Unpredicted("its parts have scales of several shapes")
            return blocks.pop(), [part for _, part in parts]
        sources, block = [tensors[f"{name}.weight"] for name in names], block_of(self.dialect)
        if block is None:
            raise Unpredicted(f"{self.dialect.name} does not quantize weights")
        amax = None
        if block == TENSOR and self.is_online:
            amax = np.maximum.reduce([self._amax(source) for source in sources])
        return block, [Part(name, *self._cast(x, block, amax)) for name, x in zip(names, sources, strict=True)]

    def _amax(self, x: Tensor) -> NDArray[np.float32]:
        assert self.dialect is not None and self.dialect.scale is not None
        ignores_nan = self.dialect.scale.ignores_nan
        values = (self._typed(band) for band in rows_of(x, slice(0, x.shape[0])))
        return np.maximum.reduce([arithmetic.block_amax(band, TENSOR, ignores_nan=ignores_nan) for band in values])

    def _typed(self, x: Array) -> Array:
        # An engine that quantizes has the weight in its own dtype before.
        return x.astype(self.dtype, copy=False) if self.is_online else x

    def _cast(self, x: Tensor, block: Block, amax: Array | None) -> tuple[Array, NDArray[np.float32]]:
        dialect = self.dialect
        assert dialect is not None and dialect.scale is not None
        codes = np.empty(x.shape, DTYPES[_E4M3])
        grid = np.empty(arithmetic.grid_shape(x.shape, block), np.float32)
        amax = self._amax(x) if block == TENSOR and amax is None else amax
        row, height = 0, block[0] or 1
        for band in rows_of(x, slice(0, x.shape[0])):
            values = self._typed(band)
            largest = (
                arithmetic.block_amax(values, block, ignores_nan=dialect.scale.ignores_nan) if amax is None else amax
            )
            factors = arithmetic.factors_from_amax(largest, dialect, values.dtype)
            codes[row : row + len(band)] = arithmetic.encode(values, factors, dialect.code, block)
            stored = factors.scale if dialect.stored.is_multiplier else factors.stored.astype(np.float32)
            grid[row // height : row // height + len(stored)] = stored
            row += len(band)
        return codes, grid

    # 4 Linear layers

    def _linear(self, module: Module) -> Iterator[Held]:
        block, parts = self._float8(module.parts[0])
        if block == SQUARE:
            parts = self._for_kernel(module, parts)
        # What one scale for all parts makes of their codes.
        scales = np.concatenate([part.scale.reshape(-1) for part in parts])
        has_rows = self.engine == SGLANG and self.kernel == "cutlass" and self.format.method != "compressed-tensors"
        if block == TENSOR and not self.is_online and not has_rows:
            parts = [_requantized_to(part, scales.max()) for part in parts]
        for rank in range(self.layout.tp):
            cuts = [self._share(module, part, rank, block) for part in parts]
            n, k = sum(len(cut.codes) for cut in cuts), cuts[0].codes.shape[1]
            if block == SQUARE:
                both = self._of_blocks(
                    module, rank, (n, k), (sum(len(cut.scale) for cut in cuts), cuts[0].scale.shape[1])
                )
                self._add_blocks(both, cuts)
                yield from both
                continue
            pads = self.engine == VLLM and self.kernel == "cutlass"
            more_n, more_k = (-size % _PADDING if pads else 0 for size in (n, k))
            weight = self._held(module.tensor("weight"), rank, (k + more_k, n + more_n), "float8_e4m3fn")
            for piece in _turned(cuts, more_k, more_n):
                weight.hash.update(piece)
            yield weight
            if block == ROW:
                scale = np.concatenate([cut.scale for cut in cuts] + [np.ones((more_n, 1), np.float32)])
            elif has_rows and not self.is_online:
                scale = np.concatenate([np.broadcast_to(cut.scale, (len(cut.codes), 1)) for cut in cuts])
            else:
                scale = np.array(scales.max()).reshape((1,) if self.is_online and self.engine == VLLM else ())
            yield self._small(module.tensor("weight_scale"), rank, scale)
            yield from self._input_scale(module, rank)

    def _small(self, name: str, rank: int, value: Array) -> Held:
        held = self._held(name, rank, value.shape, "float32")
        held.hash.update(value.astype(np.float32, copy=False))
        return held

    def _for_kernel(self, module: Module, parts: list[Part]) -> list[Part]:
        # [vLLM] deepgemm_post_process_fp8_weight_block, where should_use_deepgemm_for_fp8_linear says so.
        n = sum(len(self._share(module, part, 0, SQUARE).codes) for part in parts)
        is_right = n % 64 == 0 and self._share(module, parts[0], 0, SQUARE).codes.shape[1] % 128 == 0
        if self.kernel == "marlin":
            raise Unpredicted("Marlin packs codes and scales in an order of its own")
        if self.kernel == "deepgemm-blackwell" and is_right:
            raise Unpredicted("DeepGEMM packs scales of Blackwell in a layout that its compiled library makes")
        if self.kernel == "deepgemm" and self.engine == VLLM and is_right:
            return [_with_ue8m0(part) for part in parts]
        return parts

    def _share(self, module: Module, part: Part, rank: int, block: Block) -> Part:
        """What a rank has of a part, its codes and its scales."""
        (n, k), rows, columns = part.codes.shape, slice(None), slice(None)
        if module.cut is Cut.ROWS:
            rows = self.layout.rows(part.name, n, rank)
        elif module.cut is Cut.COLUMNS:
            columns = self.layout.columns(k, rank)
        scale = part.scale
        if block == SQUARE:
            is_cut = self.layout.tp > 1 or len(module.parts[0]) > 1
            sizes = [(item.stop - item.start) for item in (rows, columns) if item.stop is not None] if is_cut else []
            if any(size % 128 for size in sizes):
                raise Unpredicted(
                    f"a rank has a part of a block, in {sizes} rows or columns: engines refuse it, or refine"
                )
            down, across = (
                slice(item.start and item.start // 128, item.stop and -(-item.stop // 128)) for item in (rows, columns)
            )
            scale = scale[down, across]
        elif block == ROW:
            scale = scale[rows]
        return Part(part.name, part.codes[rows, columns], scale)

    def _of_blocks(self, module: Module, rank: int, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[Held, Held]:
        # SGLang hashes products in bfloat16 in the place of codes and scales, but for compressed-tensors.
        is_inv = self.format.method != "compressed-tensors"
        name = module.tensor("weight_scale_inv" if is_inv else "weight_scale")
        is_hidden = self.engine == SGLANG and is_inv
        codes = self._held(module.tensor("weight"), rank, shape, "float8_e4m3fn", has_products=is_hidden)
        scale = self._held(name, rank, grid, "float32")
        scale.is_shown = not is_hidden
        return codes, scale

    def _add_blocks(self, both: tuple[Held, Held], cuts: Sequence[Part]) -> None:
        codes, scale = both
        for cut in cuts:
            codes.hash.update(cut.codes, None if scale.is_shown else _products(cut))
            scale.hash.update(cut.scale)

    def _input_scale(self, module: Module, rank: int) -> Iterator[Held]:
        names = [f"{part}.input_scale" for parts in module.parts for part in parts] if self.format.input_scales else []
        stored = [self.checkpoint.tensors[name] for name in names if name in self.checkpoint.tensors]
        if stored:
            largest = np.array(max(tensor.read().astype(np.float32).max() for tensor in stored))
            yield self._small(module.tensor("input_scale"), rank, largest)

    # 5 Experts

    def _experts(self, module: Module) -> Iterator[Held]:
        if self.kernel == "marlin":
            raise Unpredicted("Marlin packs codes and scales in an order of its own")
        if self.engine == SGLANG and self.is_online:
            raise Unpredicted("SGLang casts experts with another kernel, and each rank's alone")
        if self.kernel == "deepgemm-blackwell":
            raise Unpredicted("which kernel runs experts there, and its layout, was not read")
        held: list[tuple[Held, Held]] = []
        for names in module.parts:
            block, parts = self._float8(names)
            if block == TENSOR:  # one scale an expert
                largest = max(part.scale.max() for part in parts)
                if len(parts) > 1 and not self.is_online:
                    parts = [_requantized_to(part, largest) for part in parts]
                parts = [part._replace(scale=np.full((1, 1), largest)) for part in parts]
            for rank in range(self.layout.tp):
                cuts = [self._share(module, part, rank, block) for part in parts]
                scale = cuts[0].scale if block == TENSOR else np.concatenate([cut.scale for cut in cuts])
                if rank == len(held):
                    held.append(self._of_experts(module, rank, block, cuts, scale))
                codes, scales = held[rank]
                is_hidden = not scales.is_shown
                for cut in cuts:
                    codes.hash.update(cut.codes, _products(cut) if is_hidden else None)
                scales.hash.update(scale)
        for rank, both in enumerate(held):
            yield from both
            yield from self._input_scale(module, rank)

    def _of_experts(
        self, module: Module, rank: int, block: Block, cuts: Sequence[Part], scale: Array
    ) -> tuple[Held, Held]:
        count = len(module.parts)
        shape = (count, sum(len(cut.codes) for cut in cuts), cuts[0].codes.shape[1])
        if block == SQUARE:
            return self._of_blocks(module, rank, shape, (count, *scale.shape))
        codes = self._held(module.tensor("weight"), rank, shape, "float8_e4m3fn")
        grid = (count,) if block == TENSOR else (count, *scale.shape)
        return codes, self._held(module.tensor("weight_scale"), rank, grid, "float32")


# 6 Matrices


def block_of(dialect: Dialect) -> Block | None:
    """The first block of a dialect that scales of weights have."""
    return next((block for block in dialect.blocks if block in (SQUARE, ROW, TENSOR)), None)


def rows_of(tensor: Tensor, rows: slice) -> Iterator[Array]:
    """Rows of a tensor, of whole blocks each."""
    k = math.prod(tensor.shape[1:])
    step = max(128, BAND // max(k, 1) // 128 * 128)
    for row in range(rows.start, rows.stop, step):
        last = min(row + step, rows.stop)
        yield tensor.read(row * k, last * k).reshape(last - row, *tensor.shape[1:])


def _stored(tensors: Any, form: Format, name: str) -> tuple[Block, Part]:
    codes = tensors[f"{name}.weight"]
    scale = next((tensors[item] for item in names_of(codes.name, form.scales) if item in tensors), None)
    if scale is None or scale.dtype not in DTYPES or not codes.is_matrix:
        raise Unpredicted(f"{codes.name} has no scale that can be read")
    for block in form.blocks or (SQUARE, ROW, TENSOR):
        grid = arithmetic.grid_shape(codes.shape, block)
        if block in (SQUARE, ROW, TENSOR) and scale.size == grid[0] * grid[1]:
            numbers = scale.read().astype(np.float32).reshape(grid)
            return block, Part(name, codes.read().reshape(codes.shape), numbers)
    raise Unpredicted(f"{codes.name} has scales of the shape {list(scale.shape)}")


def _turned(cuts: Sequence[Part], more_k: int, more_n: int) -> Iterator[Array]:
    # The bytes of the transpose, some columns at a time, with codes of 0 behind.
    k, n = cuts[0].codes.shape[1], sum(len(cut.codes) for cut in cuts) + more_n
    step = max(1, BAND // max(n, 1))
    for at in range(0, k, step):
        pieces = [cut.codes[:, at : at + step].view(np.uint8) for cut in cuts]
        yield np.pad(np.concatenate(pieces), ((0, more_n), (0, 0))).T
    yield np.zeros((more_k, n), np.uint8)


def _products(cut: Part) -> Iterator[Array]:
    step = max(1, BAND // cut.codes.shape[1] // 128) * 128
    for row in range(0, len(cut.codes), step):
        scale = cut.scale[row // 128 : -(-(row + step) // 128)]
        yield products_of_blocks(cut.codes[row : row + step], scale)


def _requantized_to(part: Part, scale: Any) -> Part:
    # requantize_with_max_scale: to float16 with the part's own scale, and back with the largest.
    dialect = dialect_by_name("vllm_fused_shards")
    factors = arithmetic.factors_from_stored(np.full((1, 1), scale, np.float32), dialect)
    codes = np.empty_like(part.codes)
    step = max(1, BAND // codes.shape[1])
    for row in range(0, len(codes), step):
        values = arithmetic.decode(part.codes[row : row + step], part.scale, TENSOR, _FLOAT16, rounds_scale=True)
        codes[row : row + step] = arithmetic.encode(values, factors, dialect.code, TENSOR)
    return part._replace(codes=codes)


def _with_ue8m0(part: Part) -> Part:
    # requant_weight_ue8m0_inplace
    dialect, step = dialect_by_name("vllm_weight_block_ue8m0"), max(1, BAND // part.codes.shape[1] // 128) * 128
    codes, scale = np.empty_like(part.codes), np.empty_like(part.scale)
    for row in range(0, len(codes), step):
        blocks = slice(row // 128, -(-(row + step) // 128))
        values = arithmetic.decode(part.codes[row : row + step], part.scale[blocks], SQUARE, _FLOAT32)
        factors = arithmetic.factors_from_amax(arithmetic.block_amax(values, SQUARE), dialect, _FLOAT32)
        codes[row : row + step] = arithmetic.encode(values, factors, dialect.code, SQUARE)
        scale[blocks] = factors.stored
    return Part(part.name, codes, scale)

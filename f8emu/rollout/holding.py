"""The tensors of a module on every rank: its parts are fused, cut, brought into the form of a kernel, and hashed."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from f8emu.audit.blocks import Weight
from f8emu.audit.checkpoint import DTYPES, FLOATS, Checkpoint, Tensor
from f8emu.audit.formats import Format
from f8emu.dialects import arithmetic
from f8emu.dialects.rules import SQUARE, TENSOR, Block, Dialect
from f8emu.rollout.checksums import SGLANG, VLLM, TensorChecksum
from f8emu.rollout.hashing import Hash
from f8emu.rollout.layout import Cut, Layout, Module
from f8emu.rollout.parts import Array, Part, Unpredicted, cast, padded, rows_of, stored, turned
from f8emu.spec.scaling import BLOCK

_PADDING = 16
"""To which vLLM's Cutlass kernel pads K and N of weights with one scale a tensor or a row."""
_METHODS = {VLLM: ("", "fp8", "compressed-tensors", "fbgemm_fp8"), SGLANG: ("", "fp8", "compressed-tensors")}
"""quant_method of configurations whose loading code was read."""


class Kept(NamedTuple):
    """What a kernel keeps of a matrix."""

    shape: tuple[int, int]
    pieces: Iterable[tuple[Array, Iterable[Array] | None]]
    """Codes, one behind the other, each with what SGLang hashes in their place, if anything."""
    scale: Array
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What is known of a source, an engine and its settings."""

    checkpoint: Checkpoint
    format: Format
    weights: Mapping[str, Weight]
    """Those in float8, by name."""
    layout: Layout
    engine: str
    kernel: str
    dialect: Dialect | None
    """Of a source in high precision."""
    dtype: np.dtype[Any]
    """In which the engine holds what is not float8."""
    device: str
    """Where the engine runs: cuda or cpu."""

    @property
    def is_online(self) -> bool:
        """Whether the engine itself quantizes what it loads, fused."""
        return self.dialect is not None and self.dialect.name.startswith(f"{self.engine}_weight_")

    @property
    def is_compressed(self) -> bool:
        """Whether the source is of compressed-tensors, for which engines have code of its own."""
        return self.format.method == "compressed-tensors"

    def tensors_of(self, module: Module) -> list[TensorChecksum]:
        """The tensors of a module on every rank.

        Raises:
            Unpredicted: the reason.
        """
        if self.format.method not in _METHODS[self.engine]:
            raise Unpredicted(f"how {self.engine} loads quant_method {self.format.method!r:.40} was not read")
        if not module.is_whole:
            raise Unpredicted("the checkpoint lacks a part of it")
        tensors = list(self._float8(module) if self._is_float8(module) else self._plain(module, "weight"))
        if any(f"{part}.bias" in self.checkpoint.tensors for part in module.parts[0]):
            tensors += self._plain(module, "bias")
        return tensors

    # 1 What a module is

    def _is_float8(self, module: Module) -> bool:
        names = [name for names in module.parts for name in names]
        dtypes = {weight.dtype for weight in self._tensors(names, "weight")}
        if len(dtypes) > 1:
            raise Unpredicted(f"its parts have several dtypes, {', '.join(sorted(dtypes))}")
        is_stored = dtypes == {"F8_E4M3"}
        if is_stored and not module.is_linear:
            raise Unpredicted("engines hold no such module in float8")
        # A trainer casts no router.
        is_cast = module.is_linear and (module.cut is not Cut.WHOLE or self.is_online or self.format.method != "")
        declared = [name for name in names if self.format.method and not self.format.ignores(name)]
        if is_cast and declared and not is_stored:
            raise Unpredicted(f"config.json does not leave {declared[0]} in high precision: engines load it as float8")
        return is_stored or (is_cast and self.dialect is not None)

    def _tensors(self, names: Sequence[str], kind: str) -> list[Tensor]:
        tensors = self.checkpoint.tensors
        if absent := [name for name in names if f"{name}.{kind}" not in tensors]:
            raise Unpredicted(f"the checkpoint lacks {absent[0]}.{kind}")
        parts = [tensors[f"{name}.{kind}"] for name in names]
        shapes = [part.shape for part in parts]
        if len({shape[1:] for shape in shapes}) > 1 or any(len(shape) not in (1, 2) or 0 in shape for shape in shapes):
            raise Unpredicted(f"its parts do not fit together: {', '.join(str(list(shape)) for shape in shapes[:4])}")
        return parts

    # 2 In high precision

    def _plain(self, module: Module, kind: str) -> Iterator[TensorChecksum]:
        if module.is_expert and kind == "bias":
            raise Unpredicted("no rule knows biases of experts")
        if module.is_expert:
            raise Unpredicted("what holds experts in high precision is the choice of a kernel")
        names, dtype = module.parts[0], self.dtype.name
        tensors = self._tensors(names, kind)
        if unread := [tensor.dtype for tensor in tensors if tensor.dtype not in FLOATS]:
            raise Unpredicted(f"its dtype is {unread[0]}")
        for rank in range(self.layout.tp):
            shares = [
                self.layout.share(module.cut, name, x.shape, rank) for name, x in zip(names, tensors, strict=True)
            ]
            sizes = [(rows.stop - rows.start, columns.stop - columns.start) for rows, columns in shares]
            shape = (sum(n for n, _ in sizes), *(sizes[0][1] for _ in tensors[0].shape[1:]))
            hashed = self._hash(shape, dtype)
            for tensor, (rows, columns) in zip(tensors, shares, strict=True):
                for band in rows_of(tensor, self.dtype, rows):
                    hashed.update(band[:, columns])
            yield self._checksum(module.tensor(kind), rank, shape, dtype, hashed)

    # 3 In float8

    def _float8(self, module: Module) -> Iterator[TensorChecksum]:
        self._require_known(module)
        count = (len(module.parts),) if module.is_expert else ()
        ranks: list[tuple[Kept, Hash, Hash]] = []
        for names in module.parts:
            parts = self._fused(module, self._parts(names))
            for rank in range(self.layout.tp):
                shares = [self._share(module, *part, rank) for part in zip(names, parts, strict=True)]
                kept = self._for_kernel(module, shares)
                if rank == len(ranks):
                    hashed = "bfloat16" if self._has_products(kept.block) else "float8_e4m3fn"
                    codes = self._hash(count + kept.shape, hashed)
                    ranks.append((kept, codes, self._hash(count + kept.scale.shape, "float32")))
                first, codes, scales = ranks[rank]
                if (kept.shape, kept.block) != (first.shape, first.block):
                    raise Unpredicted("its experts have several shapes")
                for piece, products in kept.pieces:
                    codes.update(piece, products)
                scales.update(kept.scale)
        inputs = self._of_inputs(module)
        for rank, (kept, codes, scales) in enumerate(ranks):
            is_inv = kept.block == SQUARE and not self.is_compressed
            name = module.tensor("weight_scale_inv" if is_inv else "weight_scale")
            yield self._checksum(module.tensor("weight"), rank, count + kept.shape, "float8_e4m3fn", codes)
            scale = self._checksum(name, rank, count + kept.scale.shape, "float32", scales)
            yield replace(scale, engine_digest="") if self._has_products(kept.block) else scale
            for kind, number in inputs.items():
                hashed = self._hash((), "float32")
                hashed.update(np.array(number, np.float32))
                yield self._checksum(module.tensor(kind), rank, (), "float32", hashed)

    def _require_known(self, module: Module) -> None:
        dialect, is_expert = self.dialect, module.is_expert
        if dialect is not None and (dialect.code_steps or dialect.scale_ulps):
            raise Unpredicted(f"{dialect.name} is not IEEE arithmetic on a GPU: {dialect.caveat}")
        if dialect is not None and dialect.name == "vllm_weight_block" and self.device == "cuda":
            raise Unpredicted(
                "on a GPU vLLM compiles this cast, and codes may be neighbours: vllm_weight_block_cuda; for codes that "
                "a trainer cast so and sent give the device cpu"
            )
        is_scaled_by_rank = dialect is not None and dialect.name == "sglang_weight_tensor"
        if is_scaled_by_rank and self.kernel == "cutlass":
            raise Unpredicted(
                "with Cutlass SGLang casts rows, by a kernel that is not IEEE arithmetic; give the kernel triton"
            )
        if is_scaled_by_rank and self.layout.tp > 1:
            raise Unpredicted("SGLang gives the shard of each rank a scale of its own, which is not computed here")
        if self.kernel == "marlin":
            raise Unpredicted("Marlin packs codes and scales in an order of its own")
        if is_expert and self.engine == VLLM and self.format.has_one_dynamic_scale:
            raise Unpredicted(
                "for experts with a dynamic scale of all activations vLLM has no kernel but Marlin, which packs codes"
            )
        if is_expert and self.engine == SGLANG and self.is_online:
            raise Unpredicted("SGLang casts experts with another kernel, and each rank's alone")
        if is_expert and self.kernel == "deepgemm-blackwell":
            raise Unpredicted("which kernel runs experts there, and its layout, was not read")

    def _parts(self, names: Sequence[str]) -> list[Part]:
        # Of a layer or of one expert: as they are stored, or cast by a trainer or, fused and in its dtype, the engine.
        sources = self._tensors(names, "weight")
        if any(not source.is_matrix for source in sources):
            raise Unpredicted(f"{sources[0].name} is no matrix")
        if self.dialect is not None:
            dtype = self.dtype if self.is_online else DTYPES[sources[0].dtype]
            return cast(sources, self.dialect, dtype, is_fused=self.is_online)
        parts = [stored(source.name, self.weights, self.format) for source in sources]
        if len({part.block for part in parts}) > 1:
            raise Unpredicted("its parts have scales of several shapes")
        return parts

    def _fused(self, module: Module, parts: list[Part]) -> list[Part]:
        # Parts with one scale each take the largest. SGLang's Cutlass kernel has a scale a row instead.
        if parts[0].block != TENSOR or self.is_online or (module.is_expert and len(parts) == 1):
            return parts
        if self.engine == SGLANG and self.kernel == "cutlass" and not (self.is_compressed or module.is_expert):
            return [part.with_rows() for part in parts]
        largest = np.max([part.scale for part in parts])
        return [part.requantized(largest) for part in parts]

    def _share(self, module: Module, name: str, part: Part, rank: int) -> Part:
        rows, columns = self.layout.share(module.cut, name, part.codes.shape, rank)
        edge = rows if module.cut is Cut.ROWS else columns
        is_cut = module.cut is not Cut.WHOLE and (self.layout.tp > 1 or len(module.parts[0]) > 1)
        if part.block == SQUARE and is_cut and (size := edge.stop - edge.start) % BLOCK:
            what = f"{size} rows or columns, no multiple of {BLOCK}"
            raise Unpredicted(f"a rank has {what}: engines refuse that, or divide blocks")
        return part.cut(rows, columns)

    def _for_kernel(self, module: Module, parts: list[Part]) -> Kept:
        block, is_linear = parts[0].block, not module.is_expert
        # 1. What a kernel for linear layers makes of them. Experts are as Triton's takes them.
        if is_linear and block == SQUARE:
            parts = self._for_deepgemm(parts)
        elif is_linear and self.engine == VLLM and self.kernel == "cutlass":
            parts = padded(parts, _PADDING)
        # 2. Their order. A scale of a tensor is that of every part.
        n, k = sum(len(part.codes) for part in parts), parts[0].codes.shape[1]
        if block == TENSOR:
            scale = parts[0].scale.reshape((1,) if is_linear and self.is_online and self.engine == VLLM else ())
        else:
            scale = np.concatenate([part.scale for part in parts])
        if is_linear and block != SQUARE:
            return Kept((k, n), ((piece, None) for piece in turned(parts)), scale, block)
        products = [part.products() if self._has_products(block) else None for part in parts]
        return Kept((n, k), zip([part.codes for part in parts], products, strict=True), scale, block)

    def _for_deepgemm(self, parts: list[Part]) -> list[Part]:
        # [vLLM] should_use_deepgemm_for_fp8_linear, deepgemm_post_process_fp8_weight_block
        if sum(len(part.codes) for part in parts) % 64 or parts[0].codes.shape[1] % BLOCK:
            return parts
        if self.kernel == "deepgemm-blackwell":
            raise Unpredicted("DeepGEMM packs scales of Blackwell in a layout that its compiled library makes")
        is_taken = self.kernel == "deepgemm" and self.engine == VLLM
        return [part.with_ue8m0() for part in parts] if is_taken else parts

    def _has_products(self, block: Block) -> bool:
        # SGLang hashes code * scale in bfloat16 in the place of codes in blocks, and no scales.
        return self.engine == SGLANG and block == SQUARE and not self.is_compressed

    def _of_inputs(self, module: Module) -> dict[str, float]:
        # A static scale of activations, the largest of all parts; the bound of FBGEMM's is in its configuration alone.
        bound = self.checkpoint.quantization.get("activation_scale_ub")
        if self.format.method == "fbgemm_fp8" and isinstance(bound, int | float):
            return {"input_scale_ub": bound}
        names = [f"{part}.input_scale" for parts in module.parts for part in parts] if self.format.input_scales else []
        scales = [self.checkpoint.tensors[name] for name in names if name in self.checkpoint.tensors]
        if unread := [scale.name for scale in scales if scale.dtype not in FLOATS or 0 in scale.shape]:
            raise Unpredicted(f"{unread[0]} cannot be read")
        return {"input_scale": max(float(scale.read().astype(np.float32).max()) for scale in scales)} if scales else {}

    # 4 Hashes

    def _hash(self, shape: tuple[int, ...], dtype: str) -> Hash:
        is_on_gpu = self.engine == SGLANG and self.device == "cuda"
        return Hash(math.prod(shape) * arithmetic.DTYPES[dtype].itemsize if is_on_gpu else None)

    def _checksum(self, name: str, rank: int, shape: tuple[int, ...], dtype: str, hashed: Hash) -> TensorChecksum:
        prefix, digest = ("dp0:pp0:pcp0:", hashed.sha256) if self.engine == VLLM else ("", hashed.sglang)
        return TensorChecksum(
            key=f"{prefix}tp{rank}:{name}",
            rank=rank,
            name=name,
            shape=shape,
            dtype=dtype,
            sha256=hashed.sha256,
            engine_digest=digest,
        )

"""The weights of a model in training as a server loads them, one tensor at a time: for updates in place of files."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from f8emu.dialects.names import DialectName
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.exports import public
from f8emu.torch.conversion.experts import ConvertedExperts
from f8emu.torch.conversion.report import linear_layers
from f8emu.torch.layer.experts import Float8Experts
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.parallel.checkpoints import names_of_parameters, whole_tensors
from f8emu.torch.serving.coding import WeightCoder, format_or_dialect
from f8emu.torch.serving.formats import CheckpointFormat
from f8emu.torch.torch_internals import is_dtensor, named_modules

_ADVICE = "leave it out of the conversion with module_filter_fn"
Named = Iterator[tuple[str, Tensor]]


def stream_float8(
    model: nn.Module,
    to: CheckpointFormat | DialectName,
    *,
    dtype: torch.dtype = torch.bfloat16,
    ranks: str | None = None,
) -> Named:
    """The named tensors of a converted model, codes and scales, as a server's `load_weights` takes them.

    Names are those of transformers' checkpoints: experts one by one, of a mixture of transformers. A tied weight comes
    once. The server must run a checkpoint of the same kind: its `quantization_config` is the one that `export_float8`
    writes, with the same layers in high precision.

    Every rank iterates to the end: shards of FSDP2 and tensor parallelism are gathered one tensor at a time. What is
    wrong with the arguments is raised by the call; a tensor is computed when it is asked for, from the values that the
    weight has then. It is valid until the next one is asked for, or the model changes: copy what is kept longer.
    Tensors are on the model's device.

    Args:
        model: converted, whole or sharded, with float8 primary weights or without, compiled or wrapped.
        to: a format of `export_float8`, for the codes and scales that the layers multiply. Or a dialect that casts
            weights, as "vllm_weight_block": then the codes and scales that the server itself would make of the values
            that the layers cast. Its scales have the recipe's blocks, or if it has none such its first.
        dtype: the dtype of the other floating-point tensors.
        ranks: the name of a mesh dimension, as "tp". Each of its ranks yields its own shards of what is sharded over
            it, gathered over all other dimensions, for a server of the same layout. None: every rank yields all.

    Shapes:
        weight [N, K] -> float8_e4m3fn [N, K], and scales [ceil(N / 128), ceil(K / 128)], [N, 1] or [1], float32 if the
        dialect has no other; with `ranks` this rank's part, whose scales are those of the whole matrix.

    Exactness: with a format, bit for bit what `export_float8` writes. With a dialect, for finite weights, bit for bit
    `f8emu.dialects.quantize` of the weight, or of its bfloat16 copy under `cast_weight_from="bfloat16"`; on a GPU too,
    but dialects that no `ScaleRule` gives are computed on the host.

    Raises:
        SpecError: neither a format nor a dialect; a dtype that is no floating-point one.
        OperandError: a model without float8 layers or with several recipes; 128x128 scales and sizes that are not
            multiples of 128; no mesh dimension of this name, or parts that would cut a block.
        UnsupportedError: a recipe that the format cannot hold; a dialect that casts no weights; a weight with several
            names; experts that transformers' checkpoints have no names for.
    """
    call = "stream_float8"
    return ModelStream(call, model, format_or_dialect(call, to), dtype=dtype, ranks=ranks).tensors()


class ModelStream:
    """What `stream_float8` and `export_float8` share: the layers, their recipe, and the tensors."""

    def __init__(self, call: str, model: nn.Module, to: Any, *, dtype: torch.dtype, ranks: str | None = None) -> None:
        self.call, self._model, self._dtype = call, model, dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise SpecError(f"{call}: dtype must be of 16 bits or more, such as torch.bfloat16; got {dtype}")
        # 1. The layers, which have one recipe.
        layers = {fqn: layer for fqn, layer in linear_layers(model) if isinstance(layer, Float8Linear)}
        experts = {f: m for f, m in named_modules(model) if isinstance(m, ConvertedExperts | Float8Experts)}
        self._stacks = {name for fqn, module in experts.items() for name in self._stacks_of(fqn, module, to)}
        converted: list[Any] = [*layers.values(), *(module.settings for module in experts.values())]
        recipes = list(dict.fromkeys(part.recipe for part in converted))
        if len(recipes) != 1:
            labels = ", ".join(recipe.label for recipe in recipes) or "no float8 layer"
            raise OperandError(f"{call}: model must be converted, under one recipe; got {labels}")
        self.recipe = recipes[0]
        # 2. Their weights: a server has one tensor of a name.
        readers = names_of_parameters(model)
        named: dict[str, Any] = {readers[id(x)][0]: x for x in model.parameters()}
        coded = {f"{fqn}.weight": layer.weight for fqn, layer in layers.items()}
        for names in (readers[id(weight)] for weight in coded.values()):
            if len(names) > 1:
                raise UnsupportedError(f"{call}: a float8 weight must have one name; got {', '.join(names)}; {_ADVICE}")
        coded |= {name: named[name] for name in self._stacks}
        # The last matrix of an expert is one layer's; its first has the rows of two.
        shapes = {name: _layer_shape(name, weight.shape) for name, weight in coded.items()}
        self.coder = WeightCoder(call, to, self.recipe, shapes, "module_filter_fn leaves them out of the conversion")
        self.left = [fqn for fqn, _ in linear_layers(model) if fqn not in layers]
        # 3. The ranks that have parts, and the names of checkpoints.
        self._parts = {name: part for name, x in named.items() if ranks and (part := _part_of(x, ranks))}
        if ranks is not None and not self._parts:
            known = {name for x in named.values() if is_dtensor(x) for name in x.device_mesh.mesh_dim_names or ()}
            raise OperandError(
                f"{call}: ranks must be a mesh dimension over which parameters are sharded; got {ranks!r}, and the "
                f"model's are {', '.join(sorted(known)) or 'none with a name'}; None gives whole tensors"
            )
        for name, part in self._parts.items():
            block = self.coder.block[part.dim] or 1 if name in coded else 1
            if name in self._stacks or named[name].shape[part.dim] % (part.ranks * block):
                raise OperandError(
                    f"{call}: {part.ranks} ranks must have equal parts of whole blocks, of {block}, and no parts of "
                    f"experts; got {name} {list(named[name].shape)}, sharded along {part.dim}; None gives whole tensors"
                )

    def _stacks_of(self, fqn: str, module: nn.Module, to: Any) -> list[str]:
        names = module.weight_names.all if isinstance(module, ConvertedExperts) and module.weight_names else ()
        stacks = {f"{fqn}.{name}": torch.empty(getattr(module, name).shape, device="meta") for name in names}
        is_known = bool(stacks) and all(len(_in_checkpoint(self._model, *stack)) > 1 for stack in stacks.items())
        if is_known and to != "per-channel" and self.call == "stream_float8":
            return list(stacks)
        advice = "stream_float8 has them in compressed-tensors" if is_known else _ADVICE
        raise UnsupportedError(f"{self.call}: no format here has the scales of experts; got {fqn or 'one'}; {advice}")

    @torch.no_grad()
    def tensors(self) -> Named:
        """The tensors, one at a time."""
        for name, value in whole_tensors(self._model, self._dtype, keep=self.coder.coded):
            part, is_stack = self._parts.get(name), name in self._stacks
            every = self._of_experts(name, value) if is_stack else self._of(name, value)
            for saved_as, tensor in every:
                yield saved_as, tensor if part is None else part.of(tensor)

    def _of(self, name: str, value: Tensor) -> Named:
        if name not in self.coder.coded:
            yield from _in_checkpoint(self._model, name, value).items()
            return
        codes, scale = self.coder.cast(value)
        (saved_as,) = _in_checkpoint(self._model, name, codes)
        yield saved_as, codes
        yield self.coder.of_scale(saved_as), scale

    def _of_experts(self, name: str, value: Tensor) -> Named:
        # Gate and up are one operand: they share the scale of a tensor.
        pairs = [self.coder.cast(matrix) for matrix in value]
        codes = torch.stack([codes.view(torch.uint8) for codes, _ in pairs])
        scales = torch.stack([scale for _, scale in pairs])
        if scales.ndim == 2:
            scales = scales.unsqueeze(1).repeat(1, 2, 1)
        of_scales = _in_checkpoint(self._model, name, scales)
        for saved_as, matrix in _in_checkpoint(self._model, name, codes).items():
            scale = of_scales[saved_as]
            yield saved_as, matrix.view(pairs[0][0].dtype)
            yield self.coder.of_scale(saved_as), scale[:1, 0] if pairs[0][1].ndim == 1 else scale


class _Part(NamedTuple):
    """A rank's part of what is sharded."""

    dim: int
    rank: int
    ranks: int

    def of(self, x: Tensor) -> Tensor:
        """Of codes, or of scales, of which one may be for all parts."""
        is_shared = x.ndim <= self.dim or x.shape[self.dim] == 1
        return x if is_shared else x.chunk(self.ranks, self.dim)[self.rank].contiguous()


def _part_of(x: Any, ranks: str) -> _Part | None:
    names = (x.device_mesh.mesh_dim_names or ()) if is_dtensor(x) else ()
    dim = getattr(x.placements[names.index(ranks)], "dim", None) if ranks in names else None
    return None if dim is None else _Part(dim, x.device_mesh.get_local_rank(ranks), x.device_mesh[ranks].size())


def _layer_shape(name: str, shape: Sequence[int]) -> Sequence[int]:
    return (*shape[:-2], shape[-2] // 2, shape[-1]) if name.endswith(".gate_up_proj") else shape


def _in_checkpoint(model: Any, name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensor as transformers saves it: perhaps under another name, and of stacks each expert's apart."""
    model, loading = getattr(model, "_orig_mod", model), sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(model, "config"):
        return {name: value}
    saved: dict[str, Tensor] = loading.revert_weight_conversion(model, {name: value})
    # One of several tensors that are saved as one is left as the model has it.
    return saved if sum(x.numel() for x in saved.values()) == value.numel() else {name: value}


__all__, __dir__ = public(__name__)

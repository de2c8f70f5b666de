"""Float8 linear layers of other stacks, read for a capture: by their public attributes, and by what they multiply.

- A layer that keeps float8 weights has `weight`, and `weight_scale_inv` or `weight_scale`: transformers' FP8Linear,
  compressed-tensors', the layers of vLLM and SGLang.
- torchao's Float8Linear casts in every call: both operands are read where it multiplies them.
- Codes and scales of an activation are read from the operator that multiplies them, if torch sees one (`_OPERATORS`).
  Where a kernel casts by itself they are not shown, and nothing is computed in their place.

Only forward passes are read. While a layer is watched torch.compile leaves it eager: a dispatch mode is active.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from f8emu.capture.handle import name_of
from f8emu.environment import version_of
from f8emu.torch.chip import FLOAT8_DTYPES, HIGH_PRECISION_DTYPES
from f8emu.torch.layer.float8_layer import Float8Layer
from f8emu.torch.torch_internals import TorchDispatchMode, is_in_backward_pass, named_modules, not_compiled, schema_of

_OPERATORS = {
    "aten::_scaled_mm": (0, 2),
    "_C::cutlass_scaled_mm": (1, 3),
    "vllm::fp8_gemm_nt_op": (0, 1),
    "vllm::w8a8_triton_block_scaled_mm_func": (0, 2),
}
"""Operator -> the places of a and of its scale among its arguments. Those of vLLM as it is at 0.33."""
_SCALES = (*HIGH_PRECISION_DTYPES, torch.float8_e8m0fnu)
"""Dtypes of scales that mean what they say; packed ones (int32) are not shown."""
ScaledCodes = tuple[Tensor, Tensor]
"""Codes [rows, K] and the scale as the stack has it."""
Show = Callable[[str, Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Any]], None]
"""Takes the layer, its tensors in high precision, the arrays of its GEMM, and the fields of a ForeignRecord."""


def foreign_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer of another stack that `ForeignWatch` can read, by the names that `float8_layers` has."""
    return {name: module for name, module in named_modules(model) if _is_foreign(module)}


def _is_foreign(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if isinstance(module, Float8Layer | nn.Embedding) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    kinds = {(kind.__module__, kind.__name__) for kind in type(module).__mro__}
    is_torchao = ("torchao.float8.float8_linear", "Float8Linear") in kinds
    return is_torchao or (weight.dtype in FLOAT8_DTYPES and _scale_of(module) is not None)


def _scale_of(module: nn.Module) -> Tensor | None:
    # despite its name `weight_scale_inv`, of DeepSeek's checkpoints, is the factor that decodes
    scales = (getattr(module, name, None) for name in ("weight_scale_inv", "weight_scale"))
    return next((scale.detach() for scale in scales if isinstance(scale, Tensor)), None)


class ForeignWatch:
    """Hooks on foreign layers, which show forward passes while they are on; they go with the model."""

    def __init__(self, layers: Mapping[str, nn.Module], show: Show) -> None:
        self._layers, self._show = weakref.WeakValueDictionary(layers), show
        self._hooks: list[Any] = []

    def turn(self, on: bool) -> None:
        if on is bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = [hook for name, layer in self._layers.items() for hook in self._watch(name, layer)] if on else []

    def _watch(self, name: str, layer: nn.Module) -> tuple[Any, Any]:
        modes: list[_Operands] = []  # one a call in progress

        def before(module: nn.Module, args: Any) -> None:
            modes.append(_Operands())
            modes[-1].__enter__()

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not modes:
                return
            mode = modes.pop()
            mode.__exit__(None, None, None)
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            y = output[0] if isinstance(output, tuple) else output  # of vLLM's with its bias beside it
            # a call that failed has no output; what activation checkpointing repeats is seen once
            if x is None or not isinstance(y, Tensor) or is_in_backward_pass():
                return
            if x.shape[:-1] == y.shape[:-1] and y.dtype in HIGH_PRECISION_DTYPES:
                self._show(name, *_seen(module, x.detach(), y.detach(), mode))

        # also of a call that fails: its mode must end
        return (
            layer.register_forward_pre_hook(not_compiled(before)),
            layer.register_forward_hook(not_compiled(after), with_kwargs=True, always_call=True),
        )


class _Operands(TorchDispatchMode):
    """Keeps the operands of the first float8 product: a, and b where torchao multiplies."""

    a: ScaledCodes | None = None
    b: ScaledCodes | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name, kwargs = schema_of(func).name, kwargs or {}
        if self.a is None and name in _OPERATORS:
            names = [x.name for x in schema_of(func).arguments]
            codes, scale = (args[i] if i < len(args) else kwargs.get(names[i]) for i in _OPERATORS[name])
            if isinstance(codes, Tensor) and isinstance(scale, Tensor) and codes.dtype in FLOAT8_DTYPES:
                self.a = codes.detach(), scale.detach()
        elif self.a is None and name == "aten::mm" and all(hasattr(x, "_data") for x in args):
            # torchao keeps the factor that encodes; its product takes the reciprocal
            self.a, (codes, scale) = ((x._data.detach(), x._scale.detach().reciprocal()) for x in args)
            self.b = codes.t(), scale.t()
        return func(*args, **kwargs)


def _seen(
    module: nn.Module, x: Tensor, y: Tensor, mode: _Operands
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    (m, k), n, weight = x.shape, y.shape[1], module.weight
    assert isinstance(weight, Tensor)
    # 1. The operands; the blocks are an attribute of transformers, then of vLLM.
    block, b = getattr(module, "block_size", None) or getattr(module, "weight_block_size", None), mode.b
    block = (int(block[0]), int(block[1])) if isinstance(block, list | tuple) and len(block) == 2 else None
    if b is None and (scale := _scale_of(module)) is not None:
        # vLLM keeps per-tensor and per-channel weights as a transpose, [K, N] with strides (1, K)
        is_transposed = weight.shape == (k, n) and (n != k or weight.stride() == (1, k))
        b = (weight.t() if is_transposed else weight).detach(), scale
    # kernels pad rows of a
    a = None if mode.a is None else (mode.a[0][:m], torch.atleast_1d(mode.a[1])[:m])
    root = type(module).__module__.partition(".")[0]
    has_bias = isinstance(getattr(module, "bias", None), Tensor) and not getattr(module, "skip_bias_add", False)
    arrays: dict[str, Tensor] = {"product": y}
    facts: dict[str, Any] = {"m": m, "n": n, "k": k, "out_dtype": name_of(y.dtype), "has_bias": has_bias}
    facts["module"] = f"{root} {version_of(root) or 'of no known version'}: {type(module).__qualname__}"
    # 2. What was shown of them.
    of_b = _shown(b, n, k, block, tuple(getattr(module, "logical_widths", ())))
    for side, (shown, (rows, columns)) in (("a", _shown(a, m, k, block and (1, block[1]))), ("b", of_b)):
        arrays |= {f"{side}.{part}": tensor for part, tensor in shown.items()}
        names = {part: name_of(tensor.dtype) for part, tensor in shown.items()}
        facts |= {f"{side}_format": names.get("codes", ""), f"{side}_scale": names.get("scale", "")}
        facts |= {f"{side}_block_rows": rows, f"{side}_block_columns": columns}
    tensors = {"input": x, "weight": weight.detach()}
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype in HIGH_PRECISION_DTYPES}, arrays, facts


def _shown(
    operand: ScaledCodes | None, rows: int, k: int, block: tuple[int, int] | None, widths: tuple[int, ...] = ()
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    # Codes, and scales as a grid with its blocks.
    if operand is None or operand[0].shape != (rows, k):
        return {}, (0, 0)
    codes, scale = operand
    # 1. One scale a shard of a fused weight is one for each of its rows.
    if scale.numel() == len(widths) > 1 and sum(widths) == rows:
        scale = scale.reshape(-1).repeat_interleave(torch.tensor(widths, device=scale.device))
    # 2. The grid: blocks, one for all, one a row.
    if scale.dtype in _SCALES:
        if block is not None and scale.shape == (-(-rows // block[0]), -(-k // block[1])):
            return {"codes": codes, "scale": scale}, block
        if scale.numel() == 1:
            return {"codes": codes, "scale": scale.reshape(1, 1)}, (rows, k)
        if scale.numel() == scale.shape[0] == rows:
            return {"codes": codes, "scale": scale.reshape(-1, 1)}, (1, k)
    return {"codes": codes}, (0, 0)

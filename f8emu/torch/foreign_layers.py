"""Float8 linear layers of other stacks, read for a capture: by their public attributes, and by what they multiply.

- A layer that keeps float8 weights has `weight` and `weight_scale_inv` or `weight_scale`: transformers' FP8Linear, the
  layers of vLLM and SGLang whose `quant_method` is a float8 one, compressed-tensors'.
- torchao's Float8Linear casts in every call: both operands are read where it multiplies them.
- Codes and scales of an activation are read from the operator that multiplies them, if torch sees one (`_OPERATORS`).
  Where a kernel casts by itself they are not shown, and nothing is computed in their place.

Only forward passes are read. While a layer is watched torch.compile leaves it eager: a dispatch mode is active.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from f8emu.torch.float8_layer import Float8Layer
from f8emu.torch.torch_internals import is_in_backward_pass, named_modules, not_compiled

_OPERATORS = {
    "aten::_scaled_mm": (0, 2),
    "_C::cutlass_scaled_mm": (1, 3),
    "vllm::fp8_gemm_nt_op": (0, 1),
    "vllm::w8a8_triton_block_scaled_mm_func": (0, 2),
}
"""Operator -> the places of a and of its scale among its arguments. Those of vLLM as it is at 0.33."""
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes of scales that mean what they say; packed ones (int32) are not shown."""
_VALUES = (torch.float32, torch.bfloat16, torch.float16)
_TORCHAO = "torchao.float8.float8_linear"


class Shown(NamedTuple):
    """An operand as far as it was shown: codes [rows, K], scales [ceil(rows / block rows), ceil(K / block columns)]."""

    codes: Tensor | None = None
    scale: Tensor | None = None
    block: tuple[int, int] = (0, 0)


class ForeignSeen(NamedTuple):
    """A forward pass of a foreign layer."""

    layer: str
    k: int
    input: Tensor | None  # [M, K] in high precision
    weight: Tensor | None  # [N, K] in high precision, of a layer that keeps one
    a: Shown
    b: Shown
    product: Tensor  # [M, N], the output of the module
    has_bias: bool
    module: str  # package, version and class


def foreign_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer of another stack that `ForeignWatch` can read, by the names that `float8_layers` has."""
    return {name: module for name, module in named_modules(model) if _is_foreign(module)}


def _is_foreign(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if isinstance(module, Float8Layer) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    return _is_torchao(module) or (weight.dtype in _FLOAT8 and _scale_of(module) is not None)


def _is_torchao(module: nn.Module) -> bool:
    return any(kind.__module__ == _TORCHAO and kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def _scale_of(module: nn.Module) -> Tensor | None:
    # vLLM and SGLang have `weight_scale_inv` from DeepSeek's checkpoints: despite its name the factor that decodes
    found = (getattr(module, name, None) for name in ("weight_scale_inv", "weight_scale"))
    return next((scale for scale in found if isinstance(scale, Tensor)), None)


class ForeignWatch:
    """Hooks on foreign layers, which show forward passes to `show` while they are on; they go with the model."""

    def __init__(self, layers: Mapping[str, nn.Module], show: Callable[[ForeignSeen], None]) -> None:
        self._layers = weakref.WeakValueDictionary(layers)
        self._show = show
        self._hooks: list[Any] = []

    def turn(self, on: bool) -> None:
        """Show the coming forward passes, or nothing."""
        if on is bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for name, layer in self._layers.items() if on else ():
            before, after = self._hooks_of(name)
            self._hooks += [
                layer.register_forward_pre_hook(not_compiled(before)),
                # also of a call that fails: its mode must end
                layer.register_forward_hook(not_compiled(after), with_kwargs=True, always_call=True),
            ]

    def _hooks_of(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        modes: list[_Operands] = []  # one a call in progress

        def before(module: nn.Module, args: Any) -> None:
            modes.append(_Operands())
            modes[-1].__enter__()

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not modes:
                return
            mode = modes.pop()
            mode.__exit__(None, None, None)
            x = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
            y = output[0] if isinstance(output, tuple) else output  # of vLLM's with its bias beside it
            # a call that failed has no output; what activation checkpointing repeats is seen once
            if x is not None and isinstance(y, Tensor) and y.dtype in _VALUES and not is_in_backward_pass():
                self._show(_seen(name, module, x.detach(), y.detach(), mode))

        return before, after


class _Operands(TorchDispatchMode):
    """Keeps the operands of the first float8 product: (codes, scale) of a, and of b where torchao multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.a: tuple[Tensor, Tensor] | None = None
        self.b: tuple[Tensor, Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if self.a is None and name in _OPERATORS:
            named = [one.name for one in func._schema.arguments]
            of = [args[i] if i < len(args) else (kwargs or {}).get(named[i]) for i in _OPERATORS[name]]
            if isinstance(of[0], Tensor) and isinstance(of[1], Tensor) and of[0].dtype in _FLOAT8:
                self.a = of[0].detach(), of[1].detach()
        elif self.a is None and name == "aten::mm" and all(hasattr(one, "_data") for one in args):
            # torchao keeps the factor that encodes; its product takes the reciprocal
            self.a, of_b = ((one._data.detach(), one._scale.detach().reciprocal()) for one in args)
            self.b = of_b[0].t(), of_b[1].t()
        return func(*args, **(kwargs or {}))


def _seen(name: str, module: nn.Module, x: Tensor, y: Tensor, mode: _Operands) -> ForeignSeen:
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    (m, k), n, block, own = x.shape, y.shape[1], _block_of(module), mode.b
    if own is None and (scale := _scale_of(module)) is not None:
        own = _upright(weight.detach(), n, k), scale.detach()
    root = type(module).__module__.partition(".")[0]
    return ForeignSeen(
        layer=name,
        k=k,
        input=x if x.dtype in _VALUES else None,
        weight=weight.detach() if weight.dtype in _VALUES else None,
        a=_shown(mode.a, m, k, block and (1, block[1])),
        b=_shown(own, n, k, block, getattr(module, "logical_widths", ())),
        product=y,
        has_bias=isinstance(bias, Tensor) and not getattr(module, "skip_bias_add", False),
        module=f"{root} {_version(root)}: {type(module).__qualname__}",
    )


def _upright(weight: Tensor, n: int, k: int) -> Tensor:
    # vLLM keeps per-tensor and per-channel weights as a transpose, [K, N] with strides (1, K).
    is_transposed = weight.shape == (k, n) and (n != k or (weight.stride() == (1, k) and k > 1))
    return weight.t() if is_transposed else weight


def _block_of(module: nn.Module) -> tuple[int, int] | None:
    # transformers' attribute, then vLLM's
    found = getattr(module, "block_size", None) or getattr(module, "weight_block_size", None)
    return (int(found[0]), int(found[1])) if isinstance(found, list | tuple) and len(found) == 2 else None


def _shown(
    operand: tuple[Tensor, Tensor] | None, rows: int, k: int, block: tuple[int, int] | None, widths: Iterable[int] = ()
) -> Shown:
    # 1. Codes; kernels pad rows.
    if operand is None or operand[0].dim() != 2 or operand[0].shape[0] < rows or operand[0].shape[1] != k:
        return Shown()
    codes, scale = operand[0][:rows], operand[1]
    if scale.dtype not in _SCALES:
        return Shown(codes)
    # 2. One scale a shard of a fused weight is one for each of its rows.
    if scale.numel() == len(widths := tuple(widths)) > 1 and sum(widths) == rows:
        scale = scale.reshape(-1).repeat_interleave(torch.tensor(widths, device=scale.device))
    # 3. The grid: blocks, one for all, one a row.
    if block is not None and scale.shape == (-(-rows // block[0]), -(-k // block[1])):
        return Shown(codes, scale, block)
    if scale.numel() == 1:
        return Shown(codes, scale.reshape(1, 1), (rows, k))
    if scale.dim() in (1, 2) and scale.shape[0] >= rows and scale.numel() == scale.shape[0]:
        return Shown(codes, scale.reshape(-1, 1)[:rows], (1, k))
    return Shown(codes)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of no known version"

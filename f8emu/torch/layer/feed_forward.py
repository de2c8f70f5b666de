"""Float8FeedForward: Llama's feed-forward block, with SiLU and product fused into the casts.

    output = w2(hidden)        hidden = silu(gate) * up        gate = w1(input)        up = w3(input)

One kernel reads `gate` and `up` and writes the codes of `hidden`. In the backward pass, one kernel reads `grad_hidden`,
`gate` and `up` and writes the codes of `grad_gate`, `grad_up` (each also transposed, if needed) and `hidden^T`. None of
these three is written in bfloat16. Saved for the backward pass: `gate`, `up` and the codes of `input^T`.
"""

from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from f8emu.spec.cast_plan import CastPlan
from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import TENSORS, TENSORWISE, Recipe
from f8emu.spec.scaling import Scales
from f8emu.torch.casts.operand import (
    Delayed,
    Operand,
    ScaleSource,
    cast_both,
    cast_delayed,
    weight_to_cast,
)
from f8emu.torch.chip import require_values
from f8emu.torch.fused import silu as fused
from f8emu.torch.layer.float8_layer import autocast_dtype, leaf_call, refuse_torchscript, require_no_transform
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.matmul import Output, add_bias, gemm
from f8emu.torch.layer.observers import Tap, begin_call, observe_gated, show_gemm, show_tensor
from f8emu.torch.layer.split_backward import part_of_backward
from f8emu.torch.library import differentiable_once, is_exporting
from f8emu.torch.torch_internals import Function, compiles_backward, copied_attributes, has_hooks

LLAMA_NAMES = ("w1", "w2", "w3")
"""The layers of Llama's and torchtitan's block. Hugging Face calls them gate_proj, down_proj, up_proj."""


class Float8FeedForward(nn.Module):
    """`w2(silu(w1(input)) * w3(input))` with three `Float8Linear`.

    Under delayed scaling the casts between the layers are fused. In all other cases the three layers and `silu` are
    called one after the other:
    - under other recipes and in dtypes other than bfloat16,
    - if w1 or w3 has a bias, or if a layer has hooks or was replaced,
    - if the layers differ in recipe or engine,
    - if no gradient flows back through w1 or through w3.

    The parameters and the state dict are those of the three layers, under the names in `names`.

    Shapes:
        input [..., dim] -> [..., dim], in the dtype of input.

    Exactness: every output, gradient and state of delayed scaling equals that of three `Float8Linear` and
    `torch.nn.functional.silu` in eager torch, on a GPU too, where the kernels repeat aten's arithmetic (see
    `fused.silu`). Autograd adds the two gradients of the input.

    Raises:
        OperandError: an input of another dtype or size.
        UnsupportedError: `engine="hardware"` on a device without it.
    """

    names: tuple[str, str, str]

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = TENSORWISE,
        engine: str = "auto",
        recompute_casts: bool = False,
        names: tuple[str, str, str] = LLAMA_NAMES,
    ) -> None:
        super().__init__()
        self.names = names
        own: dict[str, Any] = {"recipe": recipe, "engine": engine, "recompute_casts": recompute_casts}
        for name, (k, n) in zip(names, ((dim, hidden_dim), (hidden_dim, dim), (dim, hidden_dim)), strict=True):
            self.add_module(name, Float8Linear(k, n, bias, device, dtype, **own))

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        *,
        recipe: Recipe | str = TENSORWISE,
        engine: str = "auto",
        recompute_casts: bool = False,
        names: tuple[str, str, str] = LLAMA_NAMES,
    ) -> Self:
        """A block with the layers, hooks and mode of `module`, which is not changed.

        Its layers are checked, and that it has no other parameters, buffers or activations. Whether its `forward`
        computes this function cannot be checked.

        Args:
            module: a feed-forward block, such as torchtitan's FeedForward or Hugging Face's LlamaMLP.
            recipe: the recipe, or its name.
            engine: as for `scaled_mm`.
            recompute_casts: as for `convert_to_float8_training`, where the three layers are called.
            names: the names in `module` of w1, w2 and w3; ("gate_proj", "down_proj", "up_proj") in Hugging Face's.

        Raises:
            OperandError: a block with other layers, parameters or buffers, or a replaced forward.
            SpecError: an unknown recipe.
        """
        _check_block(module, names)
        block = cls.__new__(cls)
        block.__dict__.update(copied_attributes(module))
        block._compiled_call_impl = None  # set by module.compile(); it would run the module's forward
        block.names = names
        own: dict[str, Any] = {"recipe": recipe, "engine": engine, "recompute_casts": recompute_casts}
        for name in names:
            layer: Any = module.get_submodule(name)
            block._modules[name] = Float8Linear.from_float(layer, **own)
        return block

    def __prepare_scriptable__(self) -> NoReturn:  # called by torch.jit.script
        refuse_torchscript("Float8FeedForward")

    def forward(self, input: Tensor) -> Tensor:
        """`w2(silu(w1(input)) * w3(input))` under the recipe."""
        if (leaf := leaf_call(self, input)) is not None:
            return leaf
        require_no_transform("Float8FeedForward", self, input)
        w1, w2, w3 = (getattr(self, name) for name in self.names)
        dtype = autocast_dtype(input)
        if is_exporting() or compiles_backward() or not _can_fuse(input, dtype, w1, w2, w3):
            return w2(silu(w1(input)) * w3(input))
        if input.ndim == 0 or input.shape[-1] != w1.in_features:
            raise OperandError(
                f"Float8FeedForward: input must be [..., dim] with dim = {w1.in_features}; got shape "
                f"{list(input.shape)}"
            )
        require_values("Float8FeedForward", input, name="input")
        # Two tensors, as in separate layers: their gradients are added in the input's own dtype, which may differ under
        # autocast. Also, Dynamo cannot trace an autograd function that takes one tensor twice.
        x1, x3 = (input.to(dtype).reshape(-1, w1.in_features) for _ in range(2))
        output = float8_feed_forward(x1, x3, w1, w2, w3)
        if w2.bias is not None:
            output = add_bias(output, w2.bias)
        return output.reshape(*input.shape[:-1], w2.out_features)


def _can_fuse(input: Tensor, dtype: torch.dtype, w1: nn.Module, w2: nn.Module, w3: nn.Module) -> bool:
    # Whether the fused block gives what `Float8FeedForward` promises; the cases are listed there.
    if dtype is not torch.bfloat16:
        return False
    if not (isinstance(w1, Float8Linear) and isinstance(w2, Float8Linear) and isinstance(w3, Float8Linear)):
        return False
    for layer in (w1, w2, w3):
        # What a subclass, a replaced forward or a hook computes is unknown here.
        if type(layer) is not Float8Linear or "forward" in layer.__dict__ or has_hooks(layer):
            return False
        if type(layer.weight) is not nn.Parameter:  # codes, or a part of a weight
            return False
        if layer.engine != w1.engine or not (layer.recipe is w1.recipe or layer.recipe == w1.recipe):
            return False
    recipe = w1.recipe
    casts = (recipe.output.a, recipe.grad_weight.b, recipe.grad_input.a, recipe.grad_weight.a)
    if recipe.delayed is None or recipe.delayed.tensors != TENSORS or any(cast.format is None for cast in casts):
        return False
    if any(bias is not None for bias in (w1.bias, w3.bias)):  # pyright: ignore[reportUnnecessaryComparison]
        return False
    if w1.weight.shape != w3.weight.shape or w1.out_features != w2.in_features:
        return False
    # A layer that no gradient flows back through scales by its own amaxes.
    has_gradients = input.requires_grad or (w1.weight.requires_grad and w3.weight.requires_grad)
    return torch.is_grad_enabled() and has_gradients


def _check_block(module: nn.Module, names: tuple[str, str, str]) -> None:
    children = dict(module.named_children())
    others = {name: child for name, child in children.items() if name not in names}
    own = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    missing = [name for name in names if name not in children]
    is_known = all(type(child) is nn.SiLU for child in others.values())
    if missing or not is_known or own or "forward" in module.__dict__:
        found = (f"{name} ({type(child).__name__})" for name, child in others.items())
        observed = ", ".join([*(f"no {name}" for name in missing), *found, *own]) or "a forward of its own"
        raise OperandError(
            f"Float8FeedForward.from_float: module must have the layers {', '.join(names)} and nothing else but an "
            f"nn.SiLU; got {observed} in {type(module).__name__}; pass the names of its layers as names=(w1, w2, w3), "
            "and convert a block that computes something else with convert_to_float8_training"
        )


class _Settings(NamedTuple):
    """What forward and backward need besides the tensors that autograd tracks; of three, those of w1, w2 and w3."""

    recipe: Recipe
    engine: str
    dtype: torch.dtype
    of_gradients: tuple[Delayed, ...]  # of grad_output; not saved tensors: the backward pass updates their amaxes
    taps: tuple[Tap | None, ...]


def float8_feed_forward(x1: Tensor, x3: Tensor, w1: Float8Linear, w2: Float8Linear, w3: Float8Linear) -> Tensor:
    """The fused block on [M, dim]; `x1` and `x3` have the same values."""
    # 1. The states. A gradient flows back through w2 wherever one flows back through w1.
    states: Any = [layer.delayed_states(x1, source.weight) for layer, source in ((w1, w1), (w2, w1), (w3, w3))]
    of_inputs, of_weights, of_gradients = (tuple(of[i] for of in states) for i in range(3))
    recipe, taps = w1.recipe, tuple([layer.tap and begin_call(layer.tap, x1) for layer in (w1, w2, w3)])
    settings = _Settings(recipe, w1.engine, x1.dtype, of_gradients, taps)
    weights = [w1.weight, w2.weight, w3.weight]
    with torch.no_grad():
        # 2. gate and up: each layer scales the input separately.
        gate, kept1, of_w1 = _product(x1, weights[0], of_inputs[0], of_weights[0], settings, 0)
        up, kept3, of_w3 = _product(x3, weights[2], of_inputs[2], of_weights[2], settings, 2)
        # 3. The operands of output.
        state, rule = of_inputs[1], recipe.scale_rule
        of_rule = rule.power_of_two, rule.amax_floor, state.margin
        name = _format(recipe, "input")
        codes, inv_scale, scale = fused.hidden_delayed(gate, up, name, state.inv_scale, state.amax, *of_rule)
        b2, _, of_w2 = _cast(weight_to_cast(weights[1], recipe), recipe.cast_plans["weight"].rows, of_weights[1])
        for i, tap in enumerate(taps):
            if tap is not None:
                if i == 1:
                    observe_gated(tap.forward, "hidden", gate, up, None, tap.call)
                else:
                    show_tensor(tap, "input", x1, is_delayed=True)
                show_tensor(tap, "weight", weights[i], is_delayed=True)
    # 4. As in `float8_matmul`: everything is saved before the last product is computed.
    parts = (kept1 or (None, None), kept3 or (None, None), of_w1, of_w2, of_w3, (inv_scale, scale))
    flat = [tensor for pair in parts for tensor in pair]
    place = _FeedForwardBackward.apply(x1, x3, *weights, settings, gate, up, *flat)
    with torch.no_grad():
        product = _gemm("output", Operand(codes, scale), b2, settings, 1)
    return Output.apply(place, product)


class _FeedForwardBackward(Function):
    """The gradients of the block. Its forward returns a placeholder; the output is computed outside."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x3: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, settings: _Settings, *kept: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(w1, w2, w3, *kept)
        ctx.settings = settings
        return x1.new_empty(1, 1).expand(x1.shape[0], w2.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        w1, w2, w3, gate, up, *flat = ctx.saved_tensors
        kept1, kept3, of_w1, of_w2, of_w3, of_hidden = tuple(zip(flat[::2], flat[1::2], strict=True))
        asked, of_gradients = part_of_backward(ctx, grads, ctx.settings.of_gradients)
        settings: _Settings = ctx.settings._replace(of_gradients=of_gradients)
        recipe = settings.recipe
        wants1, wants3, wants_w1, wants_w2, wants_w3 = asked[:5]
        # 1. grad_hidden, and the operands of all other products.
        cast_plan = recipe.cast_plans["grad_output"].wanted(rows=True, cols=wants_w2)
        g, g_transposed, _ = _cast(grads[0], cast_plan, settings.of_gradients[1])
        grad_hidden = _grad_input(g, w2, of_w2, settings, 1)
        wanted = (wants1 or wants3, wants_w1, wants_w3, wants_w2)
        g1, g1_transposed, g3, g3_transposed, hidden = _cast_gradients(
            grad_hidden, gate, up, wanted, Scales(*of_hidden), settings
        )
        show_tensor(settings.taps[1], "grad_output", grads[0], is_delayed=True)
        for tap, name in ((settings.taps[0], "grad_gate"), (settings.taps[2], "grad_up")):
            if tap is not None:
                observe_gated(tap.backward, name, gate, up, grad_hidden, tap.call)
        g = grad_hidden = gate = up = None  # frees their memory for the products
        # 2. The products.
        d_x1 = _grad_input(g1, w1, of_w1, settings, 0) if wants1 else None
        d_x3 = _grad_input(g3, w3, of_w3, settings, 2) if wants3 else None
        d_w1 = _grad_weight(g1_transposed, kept1, w1, settings, 0) if wants_w1 else None
        d_w2 = _grad_weight(g_transposed, hidden, w2, settings, 1) if wants_w2 else None
        d_w3 = _grad_weight(g3_transposed, kept3, w3, settings, 2) if wants_w3 else None
        return d_x1, d_x3, d_w1, d_w2, d_w3, *(None,) * (3 + len(flat))


def _product(
    x: Tensor, weight: Tensor, of_input: Delayed, of_weight: Delayed, settings: _Settings, layer: int
) -> tuple[Tensor, Operand | None, Scales]:
    # `output` of w1 or w3, the operand of their grad_weight, and the scales of the weight.
    recipe = settings.recipe
    a, kept, _ = _cast(x, recipe.cast_plans["input"].wanted(rows=True, cols=weight.requires_grad), of_input)
    b, _, used = _cast(weight_to_cast(weight, recipe), recipe.cast_plans["weight"].rows, of_weight)
    return _gemm("output", a, b, settings, layer), kept, used


def _cast(x: Tensor, plan: CastPlan, state: Delayed) -> tuple[Operand, Operand | None, Scales]:
    row, col, source = cast_delayed(x, plan, state)
    assert row is not None and source.used is not None, "rows were requested"
    return row, col, source.used


def _format(recipe: Recipe, tensor: str) -> str:
    format = recipe.cast_plans[tensor].both.format
    assert format is not None, "every operand is float8"
    return format.name


def _cast_gradients(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    wanted: tuple[bool, bool, bool, bool],
    of_hidden: Scales,
    settings: _Settings,
) -> list[Operand]:
    # grad_gate, grad_gate^T, grad_up, grad_up^T, hidden^T; those not `wanted` hold nothing of use.
    recipe, (of_gate, _, of_up) = settings.recipe, settings.of_gradients
    fmts, rule = (_format(recipe, "grad_output"), _format(recipe, "input")), recipe.scale_rule
    inv_scales = (of_gate.inv_scale, of_up.inv_scale, of_hidden.inv_scale)
    of_rule = (rule.power_of_two, rule.amax_floor, of_gate.margin)
    *codes, gate_scale, up_scale = fused.gradients_delayed(
        grad_hidden, gate, up, *fmts, *inv_scales, *wanted, of_gate.amax, of_up.amax, *of_rule
    )
    return list(map(Operand, codes, (gate_scale, gate_scale, up_scale, up_scale, of_hidden.scale)))


def _grad_input(a: Operand, weight: Tensor, scales: tuple[Tensor, Tensor], settings: _Settings, layer: int) -> Tensor:
    recipe = settings.recipe
    source = ScaleSource(used=Scales(*scales))
    _, b = cast_both(weight_to_cast(weight, recipe), recipe.cast_plans["weight"].cols, source)
    assert b is not None, "it was requested"
    return _gemm("grad_input", a, b, settings, layer)


def _grad_weight(a: Operand | None, b: Any, weight: Tensor, settings: _Settings, layer: int) -> Tensor:
    assert a is not None, "it was requested"
    return _gemm("grad_weight", a, Operand(*b), settings, layer).to(weight.dtype)


def _gemm(name: str, a: Operand, b: Operand, settings: _Settings, layer: int) -> Tensor:
    recipe = settings.recipe
    product = gemm(a, b, getattr(recipe, name), settings.dtype, settings.engine, recipe.chip)
    show_gemm(settings.taps[layer], name, a, b, product)
    return product

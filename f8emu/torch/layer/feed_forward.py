"""Float8FeedForward: Llama's feed-forward block, with SiLU and product fused into the casts.

    output = w2(hidden)        hidden = silu(gate) * up        gate = w1(input)        up = w3(input)

One kernel reads `gate` and `up` and writes the codes of `hidden`. In the backward pass, one kernel reads `grad_hidden`,
`gate` and `up` and writes the codes of `grad_gate`, `grad_up` (each also transposed, if needed) and `hidden^T`. None of
these three is written in bfloat16. Saved for the backward pass: `gate`, `up` and the codes of `input^T`.
"""

from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from f8emu.spec.errors import OperandError
from f8emu.spec.names import EngineName, RecipeName
from f8emu.spec.recipe import TENSORS, TENSORWISE, Recipe
from f8emu.torch.casts.operand import Delayed, Operand
from f8emu.torch.chip import require_values
from f8emu.torch.fused import silu as fused
from f8emu.torch.layer.casts import (
    LayerPlan,
    WeightSource,
    cast_grad_output,
    cast_input,
    cast_weight,
    cast_weight_again,
)
from f8emu.torch.layer.float8_layer import autocast_dtype, leaf_call, refuse_torchscript, require_no_transform
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.matmul import Output, add_bias, multiply
from f8emu.torch.layer.observers import Tap, begin_call, show_tensor
from f8emu.torch.layer.split_backward import part_of_backward
from f8emu.torch.library import differentiable_once, is_exporting
from f8emu.torch.torch_internals import Function, compiles_backward, copied_attributes, has_hooks

LLAMA_NAMES = ("w1", "w2", "w3")
"""The layers of Llama's and torchtitan's block. Hugging Face calls them gate_proj, down_proj, up_proj."""


class Float8FeedForward(nn.Module):
    """`w2(silu(w1(input)) * w3(input))` with three `Float8Linear`, whose names are `names`.

    Under delayed scaling, in bfloat16, the casts between the layers are fused. Otherwise the three layers and `silu`
    are called one after the other; so they are if w1 or w3 has a bias, if a layer is frozen, has hooks or was replaced,
    if recipe or engine differ, and without gradients.

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
        recipe: Recipe | RecipeName = TENSORWISE,
        engine: EngineName = "auto",
        recompute_casts: bool = False,
        names: tuple[str, str, str] = LLAMA_NAMES,
    ) -> None:
        super().__init__()
        self.names = names
        settings: dict[str, Any] = {"recipe": recipe, "engine": engine, "recompute_casts": recompute_casts}
        for name, (k, n) in zip(names, ((dim, hidden_dim), (hidden_dim, dim), (dim, hidden_dim)), strict=True):
            self.add_module(name, Float8Linear(k, n, bias, device, dtype, **settings))

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        *,
        recipe: Recipe | RecipeName = TENSORWISE,
        engine: EngineName = "auto",
        recompute_casts: bool = False,
        names: tuple[str, str, str] = LLAMA_NAMES,
    ) -> Self:
        """A block with the layers, hooks and mode of `module`, such as torchtitan's FeedForward; it is not changed.

        `names` are those of w1, w2 and w3 in `module`: ("gate_proj", "down_proj", "up_proj") in Hugging Face's. Whether
        the `forward` of `module` computes this function cannot be checked.

        Raises:
            OperandError: a block with other layers, parameters or buffers, or a replaced forward.
            SpecError: an unknown recipe.
        """
        _check_block(module, names)
        block = cls.__new__(cls)
        block.__dict__.update(copied_attributes(module))
        block.names = names
        settings: dict[str, Any] = {"recipe": recipe, "engine": engine, "recompute_casts": recompute_casts}
        for name in names:
            layer: Any = module.get_submodule(name)
            block.register_module(name, Float8Linear.from_float(layer, **settings))
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
        if is_exporting() or compiles_backward() or not _can_fuse(dtype, w1, w2, w3):
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


def _can_fuse(dtype: torch.dtype, *layers: Any) -> bool:
    # Whether the fused block gives what `Float8FeedForward` promises; the cases are listed there.
    for layer in layers:
        # What a subclass, a replaced forward or a hook computes is unknown here, and so are codes in place of a weight.
        if type(layer) is not Float8Linear or "forward" in layer.__dict__ or has_hooks(layer):
            return False
        if type(layer.weight) is not nn.Parameter or not layer.weight.requires_grad:
            return False
    w1, w2, w3 = layers
    recipe, delayed = w1.recipe, w1.recipe.delayed
    if dtype is not torch.bfloat16 or delayed is None or delayed.tensors != TENSORS or not torch.is_grad_enabled():
        return False
    for layer in (w2, w3):
        if layer.engine != w1.engine or not (layer.recipe is recipe or layer.recipe == recipe):
            return False
    casts = recipe.output.a, recipe.grad_weight.b, recipe.grad_input.a, recipe.grad_weight.a
    if w1.bias is not None or w3.bias is not None or any(cast.format is None for cast in casts):
        return False
    return w1.weight.shape == w3.weight.shape and w1.out_features == w2.in_features


def _check_block(module: nn.Module, names: tuple[str, str, str]) -> None:
    children = dict(module.named_children())
    others = {name: child for name, child in children.items() if name not in names}
    tensors = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    missing = [f"no {name}" for name in names if name not in children]
    is_known = all(type(child) is nn.SiLU for child in others.values())
    if missing or not is_known or tensors or "forward" in module.__dict__:
        faults = [*missing, *(f"{name} ({type(child).__name__})" for name, child in others.items()), *tensors]
        raise OperandError(
            f"Float8FeedForward.from_float: module must have the layers {', '.join(names)} and nothing else but an "
            f"nn.SiLU; got {', '.join(faults) or 'a forward of its own'} in {type(module).__name__}; pass the names of "
            "its layers as names=(w1, w2, w3), and convert a block that computes something else with "
            "convert_to_float8_training"
        )


def float8_feed_forward(x1: Tensor, x3: Tensor, w1: Float8Linear, w2: Float8Linear, w3: Float8Linear) -> Tensor:
    """The fused block on [M, dim]; `x1` and `x3` have the same values."""
    layers = w1, w2, w3
    plan, weights = LayerPlan(w1.recipe, w1.engine, keeps_input=True), [layer.weight for layer in layers]
    states: Any = [layer.delayed_states(x1, layer.weight) for layer in layers]
    taps = tuple([layer.tap and begin_call(layer.tap, x1) for layer in layers])

    def first_product(i: int, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        # gate or up, and what the backward pass needs. Each layer scales the input by a state of its own.
        show_tensor(taps[i], "input", x, is_delayed=True)
        show_tensor(taps[i], "weight", weights[i], is_delayed=True)
        operands = cast_input(x, x, plan, states[i][0], None)
        w, source = cast_weight(weights[i], plan, states[i][1])
        product = multiply("output", operands.output, w, plan, x.dtype, taps[i])
        return product, (*(operands.grad_weight or ()), source.inv_scale, source.scale)

    with torch.no_grad():
        # 1. gate and up.
        gate, kept1 = first_product(0, x1)
        up, kept3 = first_product(2, x3)
        # 2. The operands of output.
        if taps[1] is not None:
            show_tensor(taps[1], "input", fused.swiglu(gate, up), is_delayed=True)
            show_tensor(taps[1], "weight", weights[1], is_delayed=True)
        state, rule = states[1][0], plan.recipe.scale_rule
        by_state = state.inv_scale, state.amax, rule.power_of_two, rule.amax_floor, state.margin
        codes, inv_scale, scale = fused.hidden_delayed(gate, up, _format(plan.recipe, "input"), *by_state)
        w, source = cast_weight(weights[1], plan, states[1][1])
    # 3. As in `float8_matmul`: everything is saved before the last product is computed.
    kept = *kept1, *kept3, inv_scale, scale, source.inv_scale, source.scale
    of_gradients = tuple([state[2] for state in states])
    place = _FeedForwardBackward.apply(x1, x3, *weights, gate, up, plan, of_gradients, taps, *kept)
    with torch.no_grad():
        product = multiply("output", Operand(codes, scale), w, plan, x1.dtype, taps[1])
    return Output.apply(place, product)


class _FeedForwardBackward(Function):
    """The gradients of the block. Its forward returns a placeholder; the output is computed outside."""

    @staticmethod
    def forward(
        ctx: Any,
        x1: Tensor,
        x3: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        gate: Tensor,
        up: Tensor,
        plan: LayerPlan,
        of_gradients: tuple[Delayed, ...],
        taps: tuple[Tap | None, ...],
        *kept: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(w1, w2, w3, gate, up, *kept)
        # The states of grad_output are no saved tensors: the backward pass updates their amaxes.
        ctx.plan, ctx.of_gradients, ctx.taps = plan, of_gradients, taps
        return x1.new_empty(1, 1).expand(x1.shape[0], w2.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        w1, w2, w3, gate, up, *saved = ctx.saved_tensors
        kept1, of_w1, kept3, of_w3, (inv_scale, scale), of_w2 = (saved[i : i + 2] for i in range(0, 12, 2))
        plan, taps, recipe, grad, dtype = ctx.plan, ctx.taps, ctx.plan.recipe, grads[0], gate.dtype
        needs, states = part_of_backward(ctx, grads, ctx.of_gradients)
        for_x1, for_x3, for_w1, for_w2, for_w3 = needs[:5]
        of_gate, of_hidden, of_up = states
        assert of_gate is not None and of_up is not None, "all three have one"

        def grad_input(a: Operand, weight: Tensor, scales: Any, tap: Tap | None) -> Tensor:
            b = cast_weight_again(weight, WeightSource(None, *scales), plan, None, grad)
            return multiply("grad_input", a, b, plan, dtype, tap)

        def grad_weight(a: Operand, b: Any, weight: Tensor, tap: Tap | None) -> Tensor:
            return multiply("grad_weight", a, Operand(*b), plan, dtype, tap).to(weight.dtype)

        # 1. grad_hidden.
        show_tensor(taps[1], "grad_output", grad, is_delayed=True)
        g, g_transposed = cast_grad_output(grad, plan, of_hidden, True, True)
        assert g is not None and g_transposed is not None, "both were requested"
        grad_hidden = grad_input(g, w2, of_w2, taps[1])
        if taps[0] is not None or taps[2] is not None:
            grad_gate, grad_up = fused.swiglu_gradients(grad_hidden, gate, up)
            show_tensor(taps[0], "grad_output", grad_gate, is_delayed=True)
            show_tensor(taps[2], "grad_output", grad_up, is_delayed=True)
        # 2. The operands of all other products.
        formats, rule = (_format(recipe, "grad_output"), _format(recipe, "input")), recipe.scale_rule
        by_states = of_gate.inv_scale, of_up.inv_scale, inv_scale, of_gate.amax, of_up.amax
        settings = rule.power_of_two, rule.amax_floor, of_gate.margin
        *codes, gate_scale, up_scale = fused.gradients_delayed(grad_hidden, gate, up, *formats, *by_states, *settings)
        scales = gate_scale, gate_scale, up_scale, up_scale, scale
        g1, g1_transposed, g3, g3_transposed, hidden = map(Operand, codes, scales)
        g = grad_hidden = gate = up = None  # frees their memory for the products
        # 3. The products.
        d_x1 = grad_input(g1, w1, of_w1, taps[0]) if for_x1 else None
        d_x3 = grad_input(g3, w3, of_w3, taps[2]) if for_x3 else None
        d_w1 = grad_weight(g1_transposed, kept1, w1, taps[0]) if for_w1 else None
        d_w2 = grad_weight(g_transposed, hidden, w2, taps[1]) if for_w2 else None
        d_w3 = grad_weight(g3_transposed, kept3, w3, taps[2]) if for_w3 else None
        return d_x1, d_x3, d_w1, d_w2, d_w3, *(None,) * (5 + len(saved))


def _format(recipe: Recipe, tensor: str) -> str:
    format = recipe.cast_plans.of(tensor).both.format
    assert format is not None, "every operand is float8"
    return format.name

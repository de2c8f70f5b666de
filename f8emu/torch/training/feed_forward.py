"""Float8FeedForward: Llama's feed-forward block, with SiLU and product fused into the casts.

    output = w2(hidden)        hidden = silu(gate) * up        gate = w1(input)        up = w3(input)

Under a recipe whose scales need no amax of a whole tensor (delayed, blockwise), one kernel reads `gate` and `up` and
writes the codes of `hidden`. In the backward pass, one kernel reads `grad_hidden`, `gate` and `up` and writes the codes
of `grad_gate`, `grad_up` (each also transposed, if needed) and `hidden^T`. None of these three is written in bfloat16.
Saved for the backward pass: `gate`, `up` and the codes of `input^T`.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import TENSORS, TENSORWISE, Cast, Recipe
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.spec.trace import Scales
from f8emu.torch.bias import add_bias
from f8emu.torch.dtypes import require_values
from f8emu.torch.fused import silu as fused
from f8emu.torch.library import differentiable_once
from f8emu.torch.training.autograd import Output, gemm
from f8emu.torch.training.float8_linear import Float8Linear
from f8emu.torch.training.operands import Delayed, Operand, ScaleSource, cast_both, cast_delayed
from f8emu.torch.training.torch_internals import Function, bias_of, copied_attributes, has_hooks
from f8emu.torch.training.transforms import require_no_transform

LLAMA_NAMES = ("w1", "w2", "w3")
"""The layers of Llama's and torchtitan's block. Hugging Face calls them gate_proj, down_proj, up_proj."""


class Float8FeedForward(nn.Module):
    """`w2(silu(w1(input)) * w3(input))` with three `Float8Linear`.

    Under delayed and blockwise recipes the casts between the layers are fused (see the module's docstring). Otherwise
    the three layers and `silu` are called one after the other. That is also the case
    - in dtypes other than bfloat16,
    - if w1 or w3 has a bias, or if a layer has hooks or was replaced,
    - if the layers differ in recipe or engine,
    - if, of the input and the three weights, only the weight of w2 requires a gradient.

    Parameters and state dict are those of the three layers, under the names in `names`.

    Shapes:
        input [..., dim] -> [..., dim], in the dtype of input.

    Exactness: every output, gradient and state of delayed scaling equals that of three `Float8Linear` and
    `torch.nn.functional.silu` in eager torch, on a GPU too, where the kernels repeat aten's arithmetic (see
    `fused.silu`). Autograd adds the two gradients of the input.

    Raises:
        OperandError: an input of another dtype or size.
        UnsupportedError: `engine="hardware"` where there is none.
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
        own = {"recompute_casts": recompute_casts}
        for name, (k, n) in zip(names, ((dim, hidden_dim), (hidden_dim, dim), (dim, hidden_dim)), strict=True):
            self.add_module(name, Float8Linear(k, n, bias, device, dtype, recipe=recipe, engine=engine, **own))

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

        Whether `module` computes this function cannot be checked. Checked are its layers, and that it has no other
        parameters, buffers or activations.

        Args:
            module: a feed-forward block, such as torchtitan's FeedForward or Hugging Face's LlamaMLP.
            recipe: the recipe, or its name.
            engine: as for `scaled_mm`.
            recompute_casts: as for `convert_to_float8_training`, where the three layers are called.
            names: what `module` calls w1, w2 and w3; ("gate_proj", "down_proj", "up_proj") in Hugging Face's.

        Raises:
            OperandError: a block with other layers, parameters or buffers, or a replaced forward.
            SpecError: no such recipe.
        """
        _check_block(module, names)
        block = cls.__new__(cls)
        block.__dict__.update(copied_attributes(module))
        block._compiled_call_impl = None  # set by module.compile(); it would run the module's forward
        block.names = names
        for name in names:
            own: dict[str, Any] = {"recipe": recipe, "engine": engine, "recompute_casts": recompute_casts}
            layer = Float8Linear.from_float(module.get_submodule(name), **own)  # pyright: ignore[reportArgumentType]
            block._modules[name] = layer
        return block

    def forward(self, input: Tensor) -> Tensor:
        """`w2(silu(w1(input)) * w3(input))` under the recipe."""
        require_no_transform("Float8FeedForward")
        w1, w2, w3 = (getattr(self, name) for name in self.names)
        device = input.device.type
        is_autocast = not input.is_meta and torch.is_autocast_enabled(device)  # meta has no autocast
        dtype = torch.get_autocast_dtype(device) if is_autocast else input.dtype
        if not _can_fuse(input, dtype, w1, w2, w3):
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
        output = _feed_forward(x1, x3, _Layers(w1, w2, w3))
        if w2.bias is not None:
            output = add_bias(output, w2.bias)
        return output.reshape(*input.shape[:-1], w2.out_features)


class _Layers(NamedTuple):
    w1: Float8Linear
    w2: Float8Linear
    w3: Float8Linear


class _Settings(NamedTuple):
    """What forward and backward need besides the tensors that autograd tracks."""

    recipe: Recipe
    engine: str
    dtype: torch.dtype
    of_gradients: tuple[Delayed | None, ...]
    """State of grad_output of w1, w2, w3. Not saved tensors: the backward pass updates their amaxes in place."""


def _feed_forward(x1: Tensor, x3: Tensor, layers: _Layers) -> Tensor:
    """The fused block on [M, dim]; `x1` and `x3` have the same values."""
    recipe, engine, dtype = layers.w1.recipe, layers.w1.engine, x1.dtype
    w1, w2, w3 = (layer.weight for layer in layers)
    of_inputs, of_weights, of_gradients = _states(layers, x1.device)
    keep1, _, keep3 = (torch.is_grad_enabled() and layer.weight.requires_grad for layer in layers)
    settings = _Settings(recipe, engine, dtype, of_gradients)
    with torch.no_grad():
        # 1. gate and up. Under delayed scaling w1 and w3 scale the input separately; otherwise they share a cast.
        is_shared = recipe.delayed is None
        a1, kept1 = _cast_input(x1, recipe, keep1 or (is_shared and keep3), of_inputs[0])
        a3, kept3 = (a1, None) if is_shared else _cast_input(x1, recipe, keep3, of_inputs[2])
        gate, of_w1 = _product(a1, w1, of_weights[0], settings)
        up, of_w3 = _product(a3, w3, of_weights[2], settings)
        hidden, of_hidden = _cast_hidden(gate, up, recipe, of_inputs[1])
        b2, of_w2 = _cast_weight(w2, of_weights[1], recipe)
    # 2. As in `float8_matmul`: everything is saved before the last product is computed.
    parts = (kept1, kept3, of_w1, of_w2, of_w3, of_hidden)
    flat = [tensor for pair in parts for tensor in ((None, None) if pair is None else pair)]
    place = _FeedForwardBackward.apply(x1, x3, w1, w2, w3, settings, gate, up, *flat)
    # 3. output.
    with torch.no_grad():
        product = gemm(hidden, b2, recipe.output, dtype, engine)
    return Output.apply(place, product)


class _FeedForwardBackward(Function):
    """The gradients of the block. Its forward returns a placeholder; the output is computed outside."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x3: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, settings: _Settings, *kept: Tensor | None
    ) -> Tensor:
        """Save what the backward pass needs."""
        ctx.save_for_backward(w1, w2, w3, *kept)
        ctx.settings, ctx.arguments = settings, 6 + len(kept)
        return x1.new_empty(1, 1).expand(x1.shape[0], w2.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Cast grad_output, compute grad_hidden; cast the gradients of gate and up, compute the other products."""
        w1, w2, w3, gate, up, *flat = ctx.saved_tensors
        pairs = [
            None if second is None else (first, second) for first, second in zip(flat[::2], flat[1::2], strict=True)
        ]
        kept1, kept3, of_w1, of_w2, of_w3, of_hidden = pairs
        settings: _Settings = ctx.settings
        recipe, rule = settings.recipe, settings.recipe.scale_rule
        wants1, wants3, wants_w1, wants_w2, wants_w3 = ctx.needs_input_grad[:5]
        # 1. grad_hidden, and the operands of all other products.
        state = settings.of_gradients[1]
        casts = (recipe.grad_input.a, recipe.grad_weight.a if wants_w2 else None)
        g, g_transposed, _ = _cast(grads[0], *casts, state, rule)
        assert g is not None, "it was requested"
        grad_hidden = _grad_input(g, w2, of_w2, settings)
        wanted = (wants1 or wants3, wants_w1, wants_w3, wants_w2)
        g1, g1_transposed, g3, g3_transposed, hidden = _cast_gradients(
            grad_hidden, gate, up, wanted, None if of_hidden is None else Scales(*of_hidden), settings
        )
        g = grad_hidden = gate = up = None  # frees their memory for the products
        # 2. The products.
        d_x1 = _grad_input(g1, w1, of_w1, settings) if wants1 else None
        d_x3 = _grad_input(g3, w3, of_w3, settings) if wants3 else None
        d_w1 = _grad_weight(g1_transposed, kept1, w1, settings) if wants_w1 else None
        d_w2 = _grad_weight(g_transposed, hidden, w2, settings) if wants_w2 else None
        d_w3 = _grad_weight(g3_transposed, kept1 if kept3 is None else kept3, w3, settings) if wants_w3 else None
        return d_x1, d_x3, d_w1, d_w2, d_w3, *(None,) * (ctx.arguments - 5)


def _cast_input(x: Tensor, recipe: Recipe, keep: bool, state: Delayed | None) -> tuple[Operand, Operand | None]:
    """The operand of `output` and, with `keep`, that of `grad_weight`."""
    cols = recipe.grad_weight.b if keep else None
    rows, kept, _ = _cast(x, recipe.output.a, cols, state, recipe.scale_rule)
    assert rows is not None, "it was requested"
    return rows, kept


def _cast(
    x: Tensor, rows: Cast | None, cols: Cast | None, state: Delayed | None, rule: ScaleRule
) -> tuple[Operand | None, Operand | None, Scales | None]:
    """Both operands of a matrix, and under delayed scaling the scales that were used."""
    if state is None:
        return *cast_both(x, rows, cols, ScaleSource(), rule), None  # block scales, which the cast itself finds
    row, col, source = cast_delayed(x, rows, cols, state, rule)
    return row, col, source.given


def _cast_hidden(gate: Tensor, up: Tensor, recipe: Recipe, state: Delayed | None) -> tuple[Operand, Scales | None]:
    """The operand of w2's `output`, and under delayed scaling the scales that were used."""
    fmt, rule = _format(recipe.output.a), recipe.scale_rule
    if state is None:
        return Operand(*fused.hidden_blocks(gate, up, fmt, rule.power_of_two, rule.amax_floor)), None
    settings = (state.amax, rule.power_of_two, rule.amax_floor, state.margin)
    codes, inv_scale, scale = fused.hidden_delayed(gate, up, fmt, state.inv_scale, *settings)
    return Operand(codes, scale), Scales(inv_scale, scale)


def _cast_gradients(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    wanted: tuple[bool, bool, bool, bool],
    of_hidden: Scales | None,
    settings: _Settings,
) -> tuple[Operand, Operand, Operand, Operand, Operand]:
    """Operands: grad_gate, grad_gate^T, grad_up, grad_up^T, hidden^T; those not `wanted` hold nothing of use."""
    recipe, (of_gate, _, of_up) = settings.recipe, settings.of_gradients
    fmt, rule = _format(recipe.grad_weight.a), recipe.scale_rule
    if of_hidden is None or of_gate is None or of_up is None:
        flat = fused.gradients_blocks(grad_hidden, gate, up, fmt, *wanted, rule.power_of_two, rule.amax_floor)
        codes, scales = flat[::2], flat[1::2]
    else:
        inv_scales = (of_gate.inv_scale, of_up.inv_scale, of_hidden.inv_scale)
        fmts, amaxes = (fmt, _format(recipe.grad_weight.b)), (of_gate.amax, of_up.amax)
        settings_of_rule = (rule.power_of_two, rule.amax_floor, of_gate.margin)
        *codes, gate_scale, up_scale = fused.gradients_delayed(
            grad_hidden, gate, up, *fmts, *inv_scales, *wanted, *amaxes, *settings_of_rule
        )
        scales = [gate_scale, gate_scale, up_scale, up_scale, of_hidden.scale]
    first, second, third, fourth, fifth = map(Operand, codes, scales)
    return first, second, third, fourth, fifth


def _product(a: Operand, weight: Tensor, state: Delayed | None, settings: _Settings) -> tuple[Tensor, Scales | None]:
    """`output` of one layer, and under delayed scaling the scales of its weight."""
    b, used = _cast_weight(weight, state, settings.recipe)
    return gemm(a, b, settings.recipe.output, settings.dtype, settings.engine), used


def _cast_weight(weight: Tensor, state: Delayed | None, recipe: Recipe) -> tuple[Operand, Scales | None]:
    """The operand of `output`, and under delayed scaling the scales that were used."""
    b, _, used = _cast(weight, recipe.output.b, None, state, recipe.scale_rule)
    assert b is not None, "it was requested"
    return b, used


def _grad_input(a: Operand, weight: Tensor, scales: tuple[Tensor, Tensor] | None, settings: _Settings) -> Tensor:
    """`grad_input` of one layer."""
    recipe = settings.recipe
    source = ScaleSource(given=None if scales is None else Scales(*scales))
    _, b = cast_both(weight, None, recipe.grad_input.b, source, recipe.scale_rule)
    assert b is not None, "it was requested"
    return gemm(a, b, recipe.grad_input, settings.dtype, settings.engine)


def _grad_weight(a: Operand | None, b: Any, weight: Tensor, settings: _Settings) -> Tensor:
    """`grad_weight` of one layer, in the dtype of its weight."""
    assert a is not None and b is not None, "they were requested"
    product = gemm(a, Operand(*b), settings.recipe.grad_weight, settings.dtype, settings.engine)
    return product.to(weight.dtype)


def _states(layers: _Layers, device: torch.device) -> tuple[tuple[Delayed | None, ...], ...]:
    """Three tuples over w1, w2, w3: the states of their inputs, of their weights, of their grad_output."""
    found: list[tuple[Delayed | None, ...]] = []
    for layer in layers:
        if layer.delayed is None:
            found.append((None, None, None))
            continue
        found.append(layer.delayed.of_tensors())
        if not torch.compiler.is_compiling():
            layer.prepare_delayed(device)
    return tuple(tuple(of[i] for of in found) for i in range(3))


def _format(cast: Cast) -> str:
    assert cast.format is not None, "it is float8"
    return cast.format.name


def _can_fuse(input: Tensor, dtype: torch.dtype, w1: nn.Module, w2: nn.Module, w3: nn.Module) -> bool:
    """Whether the fused block gives what `Float8FeedForward` promises; the cases are listed there."""
    if dtype is not torch.bfloat16:
        return False
    if not (isinstance(w1, Float8Linear) and isinstance(w2, Float8Linear) and isinstance(w3, Float8Linear)):
        return False
    for layer in (w1, w2, w3):
        # What a subclass, a replaced forward or a hook computes is unknown here.
        if type(layer) is not Float8Linear or "forward" in layer.__dict__ or has_hooks(layer):
            return False
        if layer.engine != w1.engine or not (layer.recipe is w1.recipe or layer.recipe == w1.recipe):
            return False
    if bias_of(w1) is not None or bias_of(w3) is not None or not _has_fused_casts(w1.recipe):
        return False
    if w1.weight.shape != w3.weight.shape or w1.out_features != w2.in_features:
        return False
    has_gradient = [tensor.requires_grad for tensor in (input, w1.weight, w3.weight)]
    return any(has_gradient) or not (w2.weight.requires_grad and torch.is_grad_enabled())


def _has_fused_casts(recipe: Recipe) -> bool:
    casts = (recipe.output.a, recipe.grad_weight.b, recipe.grad_input.a, recipe.grad_weight.a)
    if any(cast.format is None for cast in casts):
        return False
    if recipe.delayed is not None:
        return recipe.delayed.tensors == TENSORS
    return all(cast.granularity is Granularity.BLOCKWISE_1X128 for cast in casts)


def _check_block(module: nn.Module, names: tuple[str, str, str]) -> None:
    """Check that `module` has the three layers and nothing else that could change the result."""
    children = dict(module.named_children())
    others = [f"{name} ({type(child).__name__})" for name, child in children.items() if name not in names]
    allowed = [f"{name} (SiLU)" for name, child in children.items() if name not in names and type(child) is nn.SiLU]
    own = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    missing = [name for name in names if name not in children]
    if missing or others != allowed or own or "forward" in module.__dict__:
        observed = ", ".join([*(f"no {name}" for name in missing), *others, *own]) or "a forward of its own"
        raise OperandError(
            f"Float8FeedForward.from_float: module must have the layers {', '.join(names)} and nothing else but an "
            f"nn.SiLU; got {observed} in {type(module).__name__}; pass the names of its layers as names=(w1, w2, w3), "
            "and convert a block that computes something else with convert_to_float8_training"
        )

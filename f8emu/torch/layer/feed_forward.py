"""Float8FeedForward: Llama's feed-forward block, with SiLU and product fused into the casts.

    output = w2(hidden)        hidden = silu(gate) * up        gate = w1(input)        up = w3(input)

Here: the module, and what it takes for the block to be fused. `feed_forward_autograd` computes the fused block.
"""

from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import TENSORS, TENSORWISE, Recipe
from f8emu.torch.bias import add_bias
from f8emu.torch.dtypes import require_values
from f8emu.torch.layer.feed_forward_autograd import Layers, float8_feed_forward
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.transforms import refuse_torchscript, require_no_transform
from f8emu.torch.library import is_exporting
from f8emu.torch.torch_internals import bias_of, copied_attributes, has_hooks

LLAMA_NAMES = ("w1", "w2", "w3")
"""The layers of Llama's and torchtitan's block. Hugging Face calls them gate_proj, down_proj, up_proj."""


class Float8FeedForward(nn.Module):
    """`w2(silu(w1(input)) * w3(input))` with three `Float8Linear`.

    Under delayed scaling the casts between the layers are fused (see `feed_forward_autograd`). In all other cases the
    three layers and `silu` are called one after the other:
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
        for name in names:
            own: dict[str, Any] = {"recipe": recipe, "engine": engine, "recompute_casts": recompute_casts}
            layer = Float8Linear.from_float(module.get_submodule(name), **own)  # pyright: ignore[reportArgumentType]
            block._modules[name] = layer
        return block

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script, for every module in the one that it is given."""
        refuse_torchscript("Float8FeedForward")

    def forward(self, input: Tensor) -> Tensor:
        """`w2(silu(w1(input)) * w3(input))` under the recipe."""
        require_no_transform("Float8FeedForward", self, input)
        w1, w2, w3 = (getattr(self, name) for name in self.names)
        device = input.device.type
        is_autocast = not input.is_meta and torch.is_autocast_enabled(device)  # meta has no autocast
        dtype = torch.get_autocast_dtype(device) if is_autocast else input.dtype
        if is_exporting() or not _can_fuse(input, dtype, w1, w2, w3):
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
        output = float8_feed_forward(x1, x3, Layers(w1, w2, w3))
        if w2.bias is not None:
            output = add_bias(output, w2.bias)
        return output.reshape(*input.shape[:-1], w2.out_features)


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
        if type(layer.weight) is not nn.Parameter:  # codes, or a part of a weight
            return False
        if layer.engine != w1.engine or not (layer.recipe is w1.recipe or layer.recipe == w1.recipe):
            return False
    if bias_of(w1) is not None or bias_of(w3) is not None or not _is_delayed(w1.recipe):
        return False
    if w1.weight.shape != w3.weight.shape or w1.out_features != w2.in_features:
        return False
    # A layer that no gradient flows back through scales by its own amaxes.
    has_gradients = input.requires_grad or (w1.weight.requires_grad and w3.weight.requires_grad)
    return torch.is_grad_enabled() and has_gradients


def _is_delayed(recipe: Recipe) -> bool:
    """Whether every tensor has delayed scales."""
    casts = (recipe.output.a, recipe.grad_weight.b, recipe.grad_input.a, recipe.grad_weight.a)
    if recipe.delayed is None or recipe.delayed.tensors != TENSORS:
        return False
    return all(cast.format is not None for cast in casts)


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

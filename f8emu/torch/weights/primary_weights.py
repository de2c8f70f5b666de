"""What a conversion does where layers hold their weights as float8 alone (`float8_primary_weights=True`)."""

from collections.abc import Iterable, Mapping

from torch import nn

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch.torch_internals import named_modules, own_parameters
from f8emu.torch.weights.float8_weight import Float8Weight


def require_sole_reader(call: str, recipe: Recipe, module: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Check that nothing but `layers`, by name, reads their weights, before anything changes.

    Raises:
        UnsupportedError: a weight that another module reads, or two layers with different scales.
    """
    owner: dict[int, tuple[str, nn.Linear]] = {}
    for fqn, layer in layers.items():
        first, known = owner.setdefault(id(layer.weight), (fqn, layer))
        if known is not layer and recipe.delayed is not None:
            raise UnsupportedError(
                f"{call}: with float8_primary_weights=True a weight has one scale; under recipe {recipe.label!r} "
                f"{first} and {fqn} share a weight and have a scale each; leave one out with module_filter_fn"
            )
    ours = set(map(id, layers.values()))
    for fqn, part in named_modules(module):
        for name, parameter in own_parameters(part).items():
            if id(parameter) in owner and (id(part) not in ours or name != "weight"):
                raise UnsupportedError(
                    f"{call}: with float8_primary_weights=True only float8 layers can read a weight; the one of "
                    f"{owner[id(parameter)][0]} is {fqn}.{name} too; leave the layer out with module_filter_fn"
                )


def hold_as_float8(layers: Iterable[nn.Linear]) -> None:
    """Make the weights of float8 layers codes and scales, their values masters on the host; shared ones stay shared."""
    new: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight, recipe = layer.weight, getattr(layer, "recipe")  # noqa: B009
        if id(weight) not in new:
            made = Float8Weight.of(weight, recipe, layer.__dict__["delayed"])
            new[id(weight)] = nn.Parameter(made, weight.requires_grad)
            new[id(weight)].grad = weight.grad
        layer.weight = new[id(weight)]


def release(layer: nn.Linear, released: dict[int, nn.Parameter]) -> None:
    """Give a layer its weight in high precision, in the weight's dtype; `released` keeps shared ones shared."""
    weight = layer.weight
    if isinstance(weight, Float8Weight):
        if id(weight) not in released:
            value = weight.master.to(weight.device, weight.dtype, copy=True)
            released[id(weight)] = nn.Parameter(value, weight.requires_grad)
        layer.weight = released[id(weight)]

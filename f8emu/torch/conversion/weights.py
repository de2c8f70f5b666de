"""The weights of converted layers: float8 at rest, float8 on the way through FSDP2, and back in high precision."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch.float8_layer import Float8Layer
from f8emu.torch.torch_internals import named_modules, own_parameters
from f8emu.torch.weights.float8_weight import Float8Weight
from f8emu.torch.weights.sharded_weight import ShardedWeight

_Layer = TypeVar("_Layer", bound=nn.Linear)


def hold_as_float8(layers: Iterable[Float8Layer]) -> None:
    """Make the weights codes and scales, and their values masters on the host."""
    _replace(layers, lambda layer: Float8Weight.of(layer.weight, layer.recipe, layer.delayed))


def gather_as_float8(layers: Iterable[Float8Layer]) -> None:
    """Make the weights such that FSDP2 gathers them as float8."""

    def sharded(layer: Float8Layer) -> Tensor | None:
        is_already = isinstance(layer.weight, ShardedWeight)
        return None if is_already else ShardedWeight(layer.weight.detach(), layer.recipe)

    _replace(layers, sharded)


def release(layers: Iterable[nn.Linear]) -> None:
    """Give layers whose weights rest as float8 their values in high precision, in the weights' dtype."""

    def value(layer: nn.Linear) -> Tensor | None:
        weight = layer.weight
        is_held = isinstance(weight, Float8Weight)
        return weight.master.to(weight.device, weight.dtype, copy=True) if is_held else None

    _replace(layers, value)


def _replace(layers: Iterable[_Layer], make: Callable[[_Layer], Tensor | None]) -> None:
    """Replace the weights by new ones, where `make` gives one; layers that share a weight go on sharing it."""
    new: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight = layer.weight
        if id(weight) not in new:
            value = make(layer)
            if value is None:
                continue
            new[id(weight)] = nn.Parameter(value, weight.requires_grad)
            new[id(weight)].grad = weight.grad
        layer.weight = new[id(weight)]


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

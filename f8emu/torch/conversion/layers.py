"""The layers that a conversion makes: their class, their weights, and a warning when another library replaces one."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import new_class
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch.float8_layer import Float8Layer
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.torch_internals import copied_attributes, named_modules, own_modules, own_parameters
from f8emu.torch.weights.float8_weight import Float8Weight
from f8emu.torch.weights.sharded_weight import ShardedWeight


@cache
def float8_subclass(of: type[nn.Linear]) -> type[Float8Linear]:
    """A subclass of both `of` and `Float8Linear`; for nn.Linear, Float8Linear itself.

    Its method resolution order is (itself, of, ..., Float8Linear, nn.Linear), so that `super().forward()` of `of` is
    the forward of `Float8Linear`. Pickles hold `of`, since this class cannot be imported.
    """
    if of is nn.Linear:
        return Float8Linear

    def reduce(self: Float8Linear, _: object) -> tuple[Any, ...]:
        return _new_layer, (of,), self.__getstate__()

    own: dict[str, Any] = {
        "__doc__": f"{of.__name__}, whose `super().forward()` computes under a recipe.",
        "__module__": of.__module__,
        "__reduce_ex__": reduce,
    }
    return new_class(f"Float8{of.__name__}", (of, Float8Linear), exec_body=lambda namespace: namespace.update(own))


def linear_class(of: type[Float8Linear]) -> type[nn.Linear] | None:
    """The class that `float8_subclass` made `of` from; None if it did not."""
    if of is Float8Linear:
        return nn.Linear
    base = of.__bases__[0]
    is_made = of.__bases__ == (base, Float8Linear) and issubclass(base, nn.Linear) and float8_subclass(base) is of
    return base if is_made else None


def float_layer(layer: Float8Linear, of: type[nn.Linear]) -> nn.Linear:
    """An `of` with the parameters, hooks and mode of `layer`, which is not changed."""
    # Without __init__, which may take other arguments and would allocate parameters.
    new = of.__new__(of)
    new.__dict__.update(copied_attributes(layer))
    own = (*Float8Layer.__annotations__, *Float8Linear.__annotations__)
    for name in (*own, "_compiled_call_impl"):  # compile() sets it, to Float8Linear's forward
        new.__dict__.pop(name, None)
        own_modules(new).pop(name, None)
    return new


def surrounds_forward(of: type[nn.Linear]) -> bool:
    """Whether every `forward` between `of` and nn.Linear refers to `super().forward`."""
    between = of.__mro__[: of.__mro__.index(nn.Linear)]
    return all(_calls_super(cls.__dict__["forward"]) for cls in between if "forward" in cls.__dict__)


def _calls_super(forward: Any) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"super", "forward"} <= set(code.co_names)


def _new_layer(of: type[nn.Linear]) -> Float8Linear:
    """What pickles call; their state follows."""
    cls = float8_subclass(of)
    return cls.__new__(cls)


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
    # By identity: a shared weight is replaced once.
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
    # 1. Layers that share a weight: one scale for both. 2. Every other reader of a weight.
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


@cache
def watch_replacements() -> None:
    """From the first call on, compare every submodule that is registered anywhere with the one that it replaces."""
    register_module_module_registration_hook(_compare)


def _compare(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    old = own_modules(parent).get(name)
    if not isinstance(old, Float8Layer) or new is None or isinstance(new, Float8Layer):
        return
    sizes = tuple(getattr(new, size, None) for size in ("in_features", "out_features"))
    is_back = isinstance(old, type(new))  # an nn.Linear: dequantize_float8_training, or a new layer of the user's
    is_wrapped = any(module is old for module in new.modules())
    if not is_back and not is_wrapped and sizes == (old.in_features, old.out_features):
        _warn(f"{type(new).__module__}.{type(new).__qualname__}")


@cache
def _warn(name: str) -> None:
    warnings.warn(
        f"f8emu: a Float8Linear was replaced by a {name}, which no longer computes under f8emu's recipe; convert the "
        "model with one library only: leave out that library's conversion, or f8emu's",
        UserWarning,
        stacklevel=5,
    )

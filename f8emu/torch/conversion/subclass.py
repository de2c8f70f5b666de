"""Float8 layers of subclasses of `nn.Linear` whose `forward` surrounds `super().forward()`."""

import inspect
from functools import cache
from types import new_class
from typing import Any

from torch import nn

from f8emu.torch.float8_layer import Float8Layer
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.torch_internals import copied_attributes, own_modules


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

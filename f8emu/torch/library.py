"""Operators of torch that cost one step from the dispatcher into Python.

`torch.library.custom_op` takes two, for autograd and for the device, and a third for the version counter of what it
writes to: more than some of our kernels take. Here the autograd step is a question: a call whose result would have a
gradient is refused at once. The counter is left to the operators that write.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError

_LIBRARY = torch.library.Library("f8emu", "FRAGMENT")
"""The operators live as long as this."""

Implementation = Callable[..., Any]


def operator(
    *, schema: str | None = None, mutates_args: Iterable[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Implementation], torch._ops.OpOverload]:
    """A decorator: the function becomes the operator `f8emu::<its name>`, for every device, without a gradient.

    Args:
        schema: "(arguments) -> results"; None takes it from the annotations.
        mutates_args: names of the tensors that it writes to, each passed to `torch.autograd.graph.increment_version`
            by the function itself.
        tags: of the operator.
    """

    def define(function: Implementation) -> torch._ops.OpOverload:
        name = function.__name__
        signature = torch.library.infer_schema(function, mutates_args=mutates_args) if schema is None else schema
        _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(name, _without_gradient(name, function), "CompositeExplicitAutograd")
        return getattr(torch.ops.f8emu, name).default

    return define


def fake(operator: torch._ops.OpOverload) -> Callable[[Implementation], Implementation]:
    """A decorator: the function stands for `operator` where tensors have no data."""

    def register(function: Implementation) -> Implementation:
        refusing = _without_gradient(operator._schema.name.removeprefix("f8emu::"), function)
        torch.library.register_fake(operator, refusing, lib=_LIBRARY)
        return function

    return register


def _without_gradient(name: str, function: Implementation) -> Implementation:
    @wraps(function)
    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise UnsupportedError(
                f"{name}: f8emu.torch GEMMs and casts are not differentiable: a gradient through float8 codes has no "
                "meaning; differentiate the linear layer around them, or call under torch.no_grad()"
            )
        return function(*args)

    return call

"""A fused cast is described once: `FusedCast` makes an operator of it, with its fake implementation and its lowering.

plain torch (the decorated function)   where kernels do not run: the meaning of the cast
outputs                                checks of the arguments; shapes and dtypes of the results
launch                                 the kernels that compute them, in eager code and in compiled code

Below it: what the descriptions of `outputs` share, computed from shapes and dtypes alone.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import Format
from f8emu.spec.scaling import ScaleRule
from f8emu.torch.chip import CHIP, operand_format, require_values
from f8emu.torch.fused import inductor
from f8emu.torch.fused.availability import kernels_for
from f8emu.torch.library import Implementation, Operator, fake, operator

CODES: dict[str, torch.dtype] = {format.name: getattr(torch, format.name) for format in CHIP.operand_formats}
"""Format name -> the dtype of its codes."""


class Output(NamedTuple):
    """One result of a fused cast; the shape (0, 0) stands for a result that was not requested."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    side: int | None = None  # results of one side are computed if any of them is read; those without a side always
    is_transposed: bool = False  # whether it is column-major
    is_zeroed: bool = False  # whether it is zero before the kernels run

    def new(self, x: Tensor) -> Tensor:
        """The tensor, on the device of `x`."""
        if self.is_zeroed:
            return x.new_zeros(self.shape, dtype=self.dtype)
        if self.is_transposed:
            return x.new_empty(self.shape[::-1], dtype=self.dtype).t()
        return x.new_empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCast:
    """A decorator: the function, plain torch, becomes the operator `f8emu::<its name>`, with kernels on a GPU."""

    # Its first argument decides where it runs; of a result that was not requested it may return any empty tensor.

    outputs: Callable[..., tuple[Output, ...]]  # of the arguments, checked by their shapes, dtypes and devices alone
    # `launch(on, out, *arguments)`, the first contiguous; in `out` None stands for a result that nobody reads. `on` is
    # an `EagerLauncher`, or in compiled code the launcher of `inductor`.
    launch: Callable[..., None]
    mutates_args: tuple[str, ...] = ()  # names of the tensors that it writes to
    # Whether kernels can run on these arguments; with it, compiled code calls the operator as it is.
    is_ready: Callable[..., bool] | None = None
    needs_host: bool = False  # Python runs with its kernels: compiled ahead of time, the operator is called as it is
    is_recomputable: bool = False  # a compiler may do it again in the backward pass instead of keeping its results
    is_reduction: bool = False  # whether it only gives numbers to such a cast
    is_lowered: bool = True  # whether compiled code launches its kernels itself; otherwise it calls the operator

    def __call__(self, plain: Implementation) -> Operator:
        mutated = [list(inspect.signature(plain).parameters).index(name) for name in self.mutates_args]
        is_single = inspect.signature(plain).return_annotation is Tensor

        @wraps(plain)
        def run(*args: Any) -> Any:
            # 1. Checks. Autograd learns of every tensor that will be written to.
            outputs = self.outputs(*args)
            if mutated:
                torch.autograd.graph.increment_version([args[i] for i in mutated if args[i] is not None])
            # 2. Plain torch where no kernel runs.
            plans = kernels_for(args[0])
            if plans is None or (self.is_ready is not None and not self.is_ready(*args)):
                return plain(*args)
            # 3. Kernels that fill the results.
            results = [output.new(args[0]) for output in outputs]
            wanted = [None if 0 in output.shape else x for output, x in zip(outputs, results, strict=True)]
            self.launch(EagerLauncher(plans), wanted, args[0].contiguous(), *args[1:])
            return results[0] if is_single else tuple(results)

        cast = operator(mutates_args=self.mutates_args)(run)

        @fake(cast)
        def described(*args: Any) -> Any:
            inductor.install()
            results = [output.new(args[0]) for output in self.outputs(*args)]
            return results[0] if is_single else tuple(results)

        if self.is_ready is None and self.is_lowered:
            inductor.add(cast.overload, self)
        return cast


class EagerLauncher:
    """The launcher of eager code, whose kernels run at once. `lowering` has that of compiled code."""

    __slots__ = ("plans",)

    def __init__(self, plans: ModuleType) -> None:
        self.plans = plans

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def count(self, x: Tensor) -> int:
        return x.numel()

    def has_pairs(self, x: Tensor) -> bool:
        return self.plans.has_pairs(x.dtype, x.shape[1], x.device)

    def contiguous(self, x: Tensor) -> Tensor:
        """An argument that kernels read, as they read it."""
        return x.contiguous()

    def floats(self, x: Tensor, *shape: int) -> Tensor:
        """Uninitialised float32, for what one kernel hands to another."""
        return x.new_empty(shape, dtype=torch.float32)

    def run(self, plan: Any, *tensors: Tensor) -> None:
        plan(*tensors)

    def run_through(self, host: Callable[..., Any], settings: tuple[Any, ...], plan: Any, *tensors: Tensor) -> None:
        """Launch a kernel by `host(plan, *settings)(*tensors)`; `host` is a function of a module."""
        host(plan, *settings)(*tensors)


def matrix(call: str, x: Tensor) -> tuple[int, int]:
    """Rows and columns of an argument that has to be a matrix in high precision."""
    require_values(call, x, ndim=2)
    return x.shape[0], x.shape[1]


def codes_of(fmt: str, rows: int, k: int, side: int | None = None, *, is_wanted: bool = True) -> Output:
    """Codes [rows, k] of a format."""
    return Output((rows, k) if is_wanted else (0, 0), CODES[fmt], side)


# Cached: these lookups, made in every call, cost more than an allocation.


@cache
def named_format(call: str, fmt: str) -> Format:
    """`operand_format` of a name."""
    return operand_format(call, fmt)


@cache
def named_rule(call: str, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Format, ScaleRule]:
    """The format and the rule that an operator's arguments stand for."""
    return operand_format(call, fmt), ScaleRule(power_of_two=power_of_two, amax_floor=amax_floor)


def check_one_float(call: str, name: str, value: Tensor, x: Tensor) -> None:
    """Check that an inv_scale, or an amax to update, is one float32 on the device of `x`."""
    if value.dtype is not torch.float32 or value.numel() != 1:
        raise OperandError(
            f"{call}: {name} must be one float32; got {value.dtype} of shape {list(value.shape)}; convert it with "
            f"{name}.float()"
        )
    check_device(call, name, value, x)


def check_device(call: str, name: str, value: Tensor, x: Tensor) -> None:
    """Check that an argument is on the device of `x`."""
    if value.device != x.device:
        raise OperandError(f"{call}: {name} is on {value.device} and x on {x.device}; move one to the other's device")

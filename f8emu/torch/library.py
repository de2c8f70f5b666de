"""Torch operators that plain eager code calls directly, as Python functions.

Torch's dispatcher takes longer than some of our kernels. A call goes through it only if something watches: a compiler
that traces, a dispatch mode (selective checkpointing, a flop counter), fake or meta tensors, functorch. A call whose
result would need a gradient is refused. A function that writes to an argument increments its version counter itself.

Policies of selective checkpointing and flop counters know `aten.mm` and `aten.max`, but not our GEMMs and amaxes. So if
a dispatch mode is active, the aten operator is called on stand-ins: tensors without data, with the shapes, dtype and
device. When all modes have handled the call, `_StandIn.__torch_dispatch__` runs the real computation in its place. A
mode that reads a stand-in reads its operand.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from f8emu.spec.errors import UnsupportedError
from f8emu.torch.torch_internals import (
    OpOverload,
    checkpoint_modes,
    dispatch_modes,
    functorch_transform,
    is_batched,
    no_torch_function,
    schema_of,
    tree_map_only,
)

_LIBRARY = torch.library.Library("f8emu", "FRAGMENT")  # the operators are registered as long as this object lives

Implementation = Callable[..., Any]
_Function = TypeVar("_Function", bound=Implementation)
_Run = Callable[[], Tensor]
_PLAIN = (Tensor, nn.Parameter)


def is_watched(x: Tensor) -> bool:
    """Whether an operator called on `x` must go through the dispatcher."""
    if torch.compiler.is_compiling():
        return True
    return dispatch_modes() > 0 or type(x) not in _PLAIN or x.is_meta or functorch_transform() is not None


def has_dispatch_mode() -> bool:
    """Whether a `TorchDispatchMode` is active: a user's, a checkpoint's, or that of a compiler that traces."""
    return dispatch_modes() > 0


def is_known(condition: bool) -> bool:
    """Whether a condition on sizes holds; of symbolic sizes, whether it holds for all that they stand for."""
    # A compiler that traces `if condition` compiles again, or refuses to export, where another size decides otherwise.
    # So a choice between two ways to the same bits asks here, and its second way must suit every size.
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # with sympy: the compiler has it loaded

    return statically_known_true(condition)


def constant_in_traces(function: _Function) -> _Function:
    """A decorator: `torch.compiler.assume_constant_result`, without the import of the compiler."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


@constant_in_traces
def is_exporting() -> bool:
    """Whether torch.export, or Dynamo for another exporter, traces the call."""
    # Not `torch.compiler.is_exporting()`, which in torch 2.11 is true of everything that torch.compile traces.
    if torch.compiler._is_exporting_flag:  # pyright: ignore[reportPrivateUsage]
        return True
    dynamo: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    if dynamo is None or (tracer := getattr(dynamo.tls, "current_tx", None)) is None:
        return False
    # `dynamo_graph_capture_for_export` of torch 2.11 shows in this alone: no side effect is replayed.
    return bool(tracer.export) or not dynamo.config.replay_side_effects


class Operator:
    """`f8emu::<name>`; its first argument is a tensor, or a list of them."""

    __slots__ = ("function", "name", "overload")

    def __init__(self, function: Implementation, overload: OpOverload) -> None:
        self.name = schema_of(overload).name.removeprefix("f8emu::")
        self.function = function
        self.overload = overload

    def __call__(self, x: Tensor | list[Tensor], *args: Any) -> Any:
        if is_watched(x[0] if isinstance(x, list) else x):
            return self.overload(x, *args)
        if torch.is_grad_enabled():
            refuse_gradient(self.name, x, *args)
        return self.function(x, *args)


def operator(
    *,
    schema: str | None = None,
    mutates_args: Iterable[str] = (),
    tags: Sequence[torch.Tag] = (),
    opaque: bool = True,
    plain: Implementation | None = None,
    differentiable: bool = False,
) -> Callable[[Implementation], Operator]:
    """A decorator: the function becomes the operator `f8emu::<its name>`, for every device.

    Args:
        schema: "(arguments) -> results"; None takes it from the annotations.
        mutates_args: the tensors that it writes to; the function itself calls `torch.autograd.graph.increment_version`.
        tags: of the operator.
        opaque: whether a tracer sees one node, described by its `fake`; otherwise it traces into the function.
        plain: a function with the same result that plain eager code calls instead; None calls the decorated one.
        differentiable: whether the function, which is not opaque, has gradients; a call of others that needs one is
            refused.
    """

    def define(function: Implementation) -> Operator:
        name = function.__name__
        signature = torch.library.infer_schema(function, mutates_args=mutates_args) if schema is None else schema
        _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
        key = "CompositeExplicitAutograd" if opaque else "CompositeImplicitAutograd"
        _LIBRARY.impl(name, function if differentiable else _without_gradient(name, function), key)
        return Operator(function if plain is None else plain, getattr(torch.ops.f8emu, name).default)

    return define


def fake(operator: Operator) -> Callable[[Implementation], Implementation]:
    """A decorator: the function runs in place of `operator` on tensors without data (fake, meta)."""

    def register(function: Implementation) -> Implementation:
        torch.library.register_fake(operator.overload, _without_gradient(operator.name, function), lib=_LIBRARY)
        return function

    return register


def differentiable_once(backward: Implementation) -> Implementation:
    """A decorator for `backward` of an autograd function: a derivative of its results raises UnsupportedError."""
    # Torch's `once_differentiable` gives results that do not depend on `grads` at all, from which
    # `torch.autograd.functional` computes derivatives of zero.

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling() and any(map(is_batched, grads)):
            raise UnsupportedError(
                "f8emu.torch: batched gradients (is_grads_batched=True, vectorize=True) are not supported for float8 "
                "layers; compute them one after the other, or convert the model back with dequantize_float8_training"
            )
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling():
            return results
        if not any(isinstance(grad, Tensor) and grad.requires_grad for grad in grads):
            return results
        return tuple(x if x is None else _NoDerivative.apply(x, *grads) for x in results)

    return call


class _NoDerivative(torch.autograd.Function):
    """The first argument, as a function of the others that has no derivative."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *grads: Any) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "Float8Linear: its gradient has no derivative, since a rounding has none; take second derivatives, "
            "forward-mode products and gradient penalties of the model in high precision (dequantize_float8_training)"
        )


def refuse_gradient(name: str, *args: Any) -> None:
    """Raise UnsupportedError if the result of the call would need a gradient."""
    if not torch.is_grad_enabled():
        return
    for x in args:
        if isinstance(x, Tensor) and x.requires_grad:
            raise UnsupportedError(
                f"{name}: f8emu.torch GEMMs and casts are not differentiable: a gradient through float8 codes has no "
                "meaning; differentiate the linear layer around them (an exported program before it is decomposed), or "
                "call under torch.no_grad()"
            )


def _without_gradient(name: str, function: Implementation) -> Implementation:
    @wraps(function)
    def call(*args: Any) -> Any:
        refuse_gradient(name, *args)
        return function(*args)

    return call


class _SeenCall:
    """A call that modes see as one of aten's operators on stand-ins."""

    def __init__(self, seen: OpOverload, run: _Run) -> None:
        self.seen, self.run = seen, run
        self.result: Tensor | None = None
        keeps, self.is_given = checkpoint_modes()
        self.is_kept = keeps or self.is_given

    def seen_by_modes(self, result: Tensor) -> Tensor:
        """`found`, which the modes gave; what a checkpoint keeps is the result of this call, never another."""
        if self.result is None and not self.is_given:
            raise UnsupportedError(
                f"f8emu.torch: within a selective checkpoint a dispatch mode gave {self.seen} other tensors than the "
                "layer did; let the mode read its arguments, or leave the float8 layers out of the checkpoint"
            )
        return result

    def __call__(self) -> Tensor:
        if self.result is None:
            self.result = self.run()
        return self.result


class _StandIn(Tensor):
    """A tensor without data in the place of an operand, and the call that it is made for."""

    read: _Run  # the operand
    call: _SeenCall

    @staticmethod
    def __new__(cls, like: Tensor, dtype: torch.dtype, read: _Run, call: _SeenCall) -> "_StandIn":
        stand_in = Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)  # pyright: ignore[reportAttributeAccessIssue]
        stand_in.read, stand_in.call = read, call
        return stand_in

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self, aten = args[0] if args else None, torch.ops.aten
        if isinstance(self, cls):
            if self.call.is_kept and func in (aten.detach.default, aten.clone.default):  # a copy of the arguments
                return cls(self, self.dtype, self.read, self.call)
            if all(isinstance(x, cls) and x.call.seen is func for x in args):
                result = self.call()
                if func is aten.mm.default or self.call.is_kept:
                    return result
        args, kwargs = tree_map_only(cls, lambda x: x.read(), (args, kwargs or {}))
        return func(*args, **kwargs)


def seen_as_mm(a: Tensor, b: Tensor, dtype: torch.dtype, run: _Run, read_a: _Run, read_b: _Run) -> Tensor:
    """`run()`, a product of a [M, K] and b [K, N] of dtype, which dispatch modes see as `aten.mm`.

    Modes that read the operands read `read_a()` and `read_b()`.
    """
    if not has_dispatch_mode():
        return run()
    call = _SeenCall(torch.ops.aten.mm.default, run)
    with torch.autocast(a.device.type, enabled=False):  # it would cast the stand-ins
        product = torch.mm(_StandIn(a, dtype, read_a, call), _StandIn(b, dtype, read_b, call))
    if call.is_kept:
        return call.seen_by_modes(product)
    return product if call.result is not None else call()  # a mode has multiplied other operands


def seen_as_max(x: Tensor, run: _Run) -> Tensor:
    """`run()`, the amaxes of x, which dispatch modes see as `aten.max`."""
    if not has_dispatch_mode() or x.numel() == 0:  # aten's has no maximum of nothing
        return run()
    call = _SeenCall(torch.ops.aten.max.default, run)
    largest = torch.max(_StandIn(x, x.dtype, lambda: x, call))
    if call.is_kept:
        return call.seen_by_modes(largest)
    return call()  # `max` of a stand-in is the maximum of x, which a mode may read


def saved_ops() -> tuple[OpOverload, ...]:
    """The operators worth keeping: GEMMs, amaxes and scales."""
    # GEMMs are expensive to recompute for the memory they take. Each of the others reads a whole tensor and gives a few
    # numbers. Casts are left out: their float8 results take memory that checkpointing is meant to free, and recomputing
    # them takes one pass over the tensor.
    ours = torch.ops.f8emu
    names = ["row_amax", "scales", "multiply_groups", "amaxes_of_groups", "amaxes_of_hidden"]
    kept = [getattr(ours, name).default for name in names]
    return torch.ops.aten.mm.default, torch.ops.aten.max.default, *kept


def float8_checkpoint_policy(also: Collection[OpOverload] = ()) -> Callable[..., CheckpointPolicy]:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: keep GEMMs, amaxes and scales.

    Full checkpointing (`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`) needs no policy.

    Args:
        also: further operators to keep, such as `torch.ops.aten._scaled_dot_product_flash_attention.default`.
    """
    saved = frozenset(saved_ops()) | frozenset(also)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy

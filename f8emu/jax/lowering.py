"""What waits for the backend, errors too: JAX knows only when it lowers a function where that will run."""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from f8emu.spec.errors import UnsupportedError


def refuse_lowering(x: jax.Array, refusal: str) -> jax.Array:
    """`x`; raises UnsupportedError with the message `refusal` when it is run or lowered, not when it is traced.

    Meant for one branch of `jax.lax.platform_dependent`, of which only the one of the backend is lowered.
    """
    return _refused.bind(x, refusal=refusal)


def refuse_mapped_alone(state: jax.Array, *operands: jax.Array, refusal: str) -> jax.Array:
    """`state`; raises UnsupportedError with the message `refusal` where `jax.vmap` maps an operand and not it."""
    return _not_mapped_alone.bind(state, *operands, refusal=refusal)


def is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA partitions the program over several devices, along one axis of their mesh at least."""
    context: Any = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):  # in jax.shard_map, or in one inside of another
        manual = {*context.manual_axes, *getattr(context.mesh, "manual_axes", ())}
        return any(size > 1 for axis, size in context.mesh.shape.items() if axis not in manual)
    return getattr(context, "num_devices", 1) not in (1, None)


def _refuse(*_: Any, refusal: str) -> Any:
    raise UnsupportedError(refusal)


_refused = Primitive("f8emu_refused")
_refused.def_impl(_refuse)
_refused.def_abstract_eval(lambda x, *, refusal: x)
mlir.register_lowering(_refused, _refuse)
batching.primitive_batchers[_refused] = lambda args, axes, *, refusal: (_refused.bind(*args, refusal=refusal), *axes)


def without_gradient(call: str, operands: Any) -> Any:
    """The operands of a verb, an array or a tree of them; raises UnsupportedError if the verb is differentiated."""
    return differentiable_no_more(
        operands,
        f"{call}: codes have no gradient, so that the verbs have none; differentiate f8emu.jax.dot_general(recipe), or "
        "put jax.lax.stop_gradient around what goes in, of a straight-through estimator too",
    )


def _mapped(args: Any, axes: Any, *, refusal: str) -> Any:
    if axes[0] is None:
        raise UnsupportedError(refusal)
    return _not_mapped_alone.bind(*args, refusal=refusal), axes[0]


_not_mapped_alone = Primitive("f8emu_not_mapped_alone")
_not_mapped_alone.def_impl(lambda state, *_, refusal: state)
_not_mapped_alone.def_abstract_eval(lambda state, *_, refusal: state)
mlir.register_lowering(_not_mapped_alone, lambda _, state, *__, refusal: [state])
batching.primitive_batchers[_not_mapped_alone] = _mapped


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def differentiable_no_more(x: Any, refusal: str) -> Any:
    """`x`, an array or a tree of them; raises UnsupportedError with the message `refusal` if it is differentiated."""
    return x


@differentiable_no_more.defjvp
def _(refusal: str, primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(refusal)

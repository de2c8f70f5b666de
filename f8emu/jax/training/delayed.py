"""Delayed scaling as explicit state: a tree of float32 that goes into the layer and is updated once a step.

    state = linear_delayed_state(recipe)
    grads, amaxes = jax.grad(loss, argnums=(0, 1))(params, state)  # delayed_dot_general(recipe)(..., state, ...)
    state = linear_delayed_update(state, amaxes, recipe)

JAX adds the gradients of a state that is used more than once, and a sum of amaxes is none. So one state is for one call
of a step: give each use of a shared one its own copy with `shared_delayed_state`, and take `linear_delayed_maximum` of
the gradients of several passes. Layers in a scan have stacked states, and `jax.vmap` of these functions serves them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from f8emu.jax.delayed_state import initial_delayed_state, update_delayed_state
from f8emu.jax.training.dot_general import state_tensors
from f8emu.jax.training.operands import float8_of
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.recipe import TENSORS, Recipe, recipe_by_name
from f8emu.spec.trace import DelayedState, Float8State


def linear_delayed_state(recipe: Recipe | str = "delayed") -> Float8State:
    """The state of a linear layer before its first step.

    Raises:
        SpecError: a recipe without delayed scaling.
    """
    recipe = _delayed("linear_delayed_state", recipe)
    assert recipe.delayed is not None
    first = initial_delayed_state(recipe.delayed)
    first = first._replace(initialized=first.initialized.astype(jnp.float32))
    # Each its own arrays, so that all may be donated.
    return Float8State(*(jax.tree.map(jnp.array, first) if has else None for has in state_tensors(recipe)))


def linear_delayed_update(state: Float8State, amaxes: Float8State, recipe: Recipe | str = "delayed") -> Float8State:
    """The state of the next step, by the rule of `DelayedScaling`; `amaxes` is the gradient of the state.

    Exactness: that of `update_delayed_state`, so that states are those of `f8emu.torch`.

    Raises:
        SpecError: a recipe without delayed scaling.
        OperandError: states that are not of this recipe.
    """
    call = "linear_delayed_update"
    recipe = _delayed(call, recipe)
    delayed = recipe.delayed
    assert delayed is not None
    found: list[DelayedState | None] = []
    for tensor, has_state, of_tensor, gradient in zip(TENSORS, state_tensors(recipe), state, amaxes, strict=True):
        if has_state != (of_tensor is not None) or (of_tensor is None) != (gradient is None):
            raise OperandError(
                f"{call}: state and amaxes must have a DelayedState for each tensor with delayed scales of recipe "
                f"{recipe.name!r}; got {type(of_tensor).__name__} and {type(gradient).__name__} for {tensor}"
            )
        if of_tensor is None or gradient is None:
            found.append(None)
            continue
        format = float8_of(*(cast for _, _, cast in recipe.casts(tensor)))
        is_set = jnp.ones((), jnp.bool_) if of_tensor.initialized is None else of_tensor.initialized != 0
        new = update_delayed_state(
            of_tensor._replace(initialized=is_set), gradient.amax_history[0], format, recipe.scale_rule, delayed
        )
        flag = None if of_tensor.initialized is None else new.initialized.astype(jnp.float32)
        found.append(new._replace(initialized=flag))
    return Float8State(*found)


def linear_delayed_maximum(a: Float8State, b: Float8State) -> Float8State:
    """The larger amaxes of two gradients of a state: of the passes of a step, where gradients are accumulated.

    Exactness: a maximum of integers, which keeps NaN.
    """

    def larger(x: jax.Array, y: jax.Array) -> jax.Array:
        bits = (lax.bitcast_convert_type(v, jnp.int32) for v in (x, y))
        return lax.bitcast_convert_type(jnp.maximum(*bits), jnp.float32)

    return jax.tree.map(larger, a, b)


def linear_delayed_settled(state: Float8State) -> Float8State:
    """The state without `initialized`, once every scale is set: casts then take one pass over their tensor, not two.

    For a host that looks after the first steps; a function that takes the result is traced anew.

    Raises:
        OperandError: a scale that is not set yet, or a traced state.
    """
    for tensor, of_tensor in zip(TENSORS, state, strict=True):
        flag = None if of_tensor is None else of_tensor.initialized
        if isinstance(flag, Tracer) or (flag is not None and not bool(jnp.all(flag != 0))):
            raise OperandError(
                f"linear_delayed_settled: every scale must be set, and known outside of a trace; that of {tensor} is "
                "not; call it between steps, after an update with a positive amax"
            )
    return Float8State(*(None if of_tensor is None else of_tensor._replace(initialized=None) for of_tensor in state))


def shared_delayed_state(state: Float8State, uses: int) -> Float8State:
    """`uses` copies of a state, stacked in front, for as many calls of a step; their gradient is the largest amaxes."""
    return _shared(uses, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(uses: int, state: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (uses, *leaf.shape)), state)


def _largest(uses: int, _: None, gradient: Any) -> tuple[Any]:
    def of_leaf(leaf: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(jnp.max(lax.bitcast_convert_type(leaf, jnp.int32), axis=0), jnp.float32)

    return (jax.tree.map(of_leaf, gradient),)


_shared.defvjp(lambda uses, state: (_shared(uses, state), None), _largest)


def overwrite_with_gradient(state: Float8State, recipe: Recipe | str = "delayed") -> Float8State:
    """The state, whose gradient is now the state of the next step: flax's overwrite-with-gradient.

    Raises:
        SpecError: a recipe without delayed scaling.
    """
    return _overwritten(_delayed("overwrite_with_gradient", recipe), state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _overwritten(recipe: Recipe, state: Any) -> Any:
    return state


def _next(recipe: Recipe, state: Any, amaxes: Any) -> tuple[Any]:
    return (linear_delayed_update(state, amaxes, recipe),)


_overwritten.defvjp(lambda recipe, state: (state, state), _next)


def _delayed(call: str, recipe: Any) -> Recipe:
    recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe) or recipe.delayed is None:
        raise SpecError(
            f"{call}: needs a recipe with delayed scaling; got {getattr(recipe, 'name', recipe)!r}; its scales have no "
            "state: use dot_general"
        )
    return recipe

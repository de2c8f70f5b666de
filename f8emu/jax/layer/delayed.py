"""Delayed scaling as explicit state: a tree of float32 that goes into the layer and is updated once a step.

    state = linear_delayed_state(recipe)
    grads, amaxes = jax.grad(loss, argnums=(0, 1))(params, state)  # delayed_dot_general(recipe)(..., state, ...)
    state = linear_delayed_update(state, amaxes, recipe)

JAX sums the gradients of a state that is used twice, and a sum of amaxes is not an amax. So one state is for one call
of a step: give each use of a shared one its own copy with `shared_delayed_state`, and take `linear_delayed_maximum` of
the gradients of several passes. Layers in a scan have stacked states, and `jax.vmap` of these functions serves them.

The gradient of a state, for each of its tensors:

    amax_history  [amax, 0, ..]  the amax of the casts, where the newest one will be; 0 without a cast
    inv_scale     1              the number of uses: what JAX adds shows here, also without `initialized`
    initialized   0              not 0 in a next state (`overwrite_with_gradient`), which is no gradient of amaxes

A next state that JAX added has an `initialized` above 1. Such states, and gradients with another number than one use
(or none, of a layer that did not run), are broken: an error where values are known, in a trace an inv_scale of NaN.
"""

from __future__ import annotations  # short signatures in `help`

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from f8emu.jax import bits
from f8emu.jax.layer.dot_general import described_state
from f8emu.jax.scale import initial_delayed_state, update_delayed_state
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.names import RecipeName
from f8emu.spec.recipe import TENSORS, Recipe, recipe_by_name
from f8emu.spec.scaling import DelayedState, Float8State


def linear_delayed_state(recipe: Recipe | RecipeName = "delayed") -> Float8State:
    """The state of a linear layer before its first step: empty histories, scales that are not set.

    Shapes:
        for each tensor with delayed scales amax_history [history_length], inv_scale [], initialized [], all float32.

    Raises:
        SpecError: a recipe without delayed scaling.
    """
    recipe = _delayed("linear_delayed_state", recipe)
    assert recipe.delayed is not None
    first = initial_delayed_state(recipe.delayed)
    first = first._replace(initialized=first.initialized.astype(jnp.float32))
    # Each its own arrays, so that all may be donated.
    return Float8State(*(jax.tree.map(jnp.array, first) if t in recipe.delayed_tensors else None for t in TENSORS))


def linear_delayed_update(
    state: Float8State, amaxes: Float8State, recipe: Recipe | RecipeName = "delayed"
) -> Float8State:
    """The state of the next step, by the rule of `DelayedScaling`; `amaxes` is the gradient of the state.

    Shapes:
        those of `linear_delayed_state`; states stacked by `jax.vmap` too.

    Exactness: as for `update_delayed_state`, so that the states equal those of `f8emu.torch`.

    Raises:
        SpecError: a recipe without delayed scaling.
        OperandError: states of another recipe; amaxes that JAX added or an optimizer changed, and a state without a
            scale (in a trace: inv_scale NaN).
    """
    # 1. A state and amaxes of the same tensors.
    call = "linear_delayed_update"
    recipe = _delayed(call, recipe)
    _require_float8_states(call, state=state, amaxes=amaxes)
    for tensor, of_tensor, gradient in zip(TENSORS, state, amaxes, strict=True):
        if (tensor in recipe.delayed_tensors) != (of_tensor is not None) or (of_tensor is None) != (gradient is None):
            raise OperandError(
                f"{call}: state and amaxes must have a DelayedState for each tensor with delayed scales of recipe "
                f"{recipe.name!r}; got {type(of_tensor).__name__} and {type(gradient).__name__} for {tensor}"
            )
    # 2. The next states, and an error or NaN where one was used in another way.
    updated = _updated(state, amaxes, recipe)
    return _each(lambda tensor, of_tensor: _loud(call, tensor, *of_tensor), updated)


def _each(function: Callable[..., Any], *states: Any) -> Any:
    """`function(tensor, its states)` of every tensor that has one."""
    of_tensors = zip(TENSORS, *states, strict=True)
    return Float8State(*(None if parts[0] is None else function(tensor, *parts) for tensor, *parts in of_tensors))


@functools.partial(jax.jit, static_argnames="recipe")
def _updated(state: Float8State, amaxes: Float8State, recipe: Recipe) -> Any:
    """For each tensor the next state, and whether its state or its amaxes are invalid."""
    delayed = recipe.delayed
    assert delayed is not None, "only such a recipe has a state"

    def next_of(tensor: str, old: DelayedState, gradient: DelayedState) -> tuple[DelayedState, jax.Array]:
        format = recipe.cast_plans.of(tensor).both.format
        assert format is not None, "a tensor that is not cast has no state"
        is_set = jnp.ones((), jnp.bool_) if old.initialized is None else old.initialized != 0
        amax = gradient.amax_history[0]
        new = update_delayed_state(old._replace(initialized=is_set), amax, format, recipe.scale_rule, delayed)
        flag = None if old.initialized is None else new.initialized.astype(jnp.float32)
        return new._replace(initialized=flag), _is_broken(old) | _is_sum(gradient)

    return _each(next_of, state, amaxes)


def linear_delayed_maximum(a: Float8State, b: Float8State) -> Float8State:
    """The larger amaxes of two gradients of a state, for the passes of a step that accumulates gradients.

    Exactness: a maximum of integers, which keeps NaN.

    Raises:
        OperandError: arguments that are not states, or states that differ in tensors, lengths or `initialized`.
    """
    call = "linear_delayed_maximum"
    _require_float8_states(call, a=a, b=b)
    if jax.tree.structure(a) != jax.tree.structure(b) or jax.tree.map(jnp.shape, a) != jax.tree.map(jnp.shape, b):
        raise OperandError(
            f"{call}: both must be gradients of one state; got {described_state(a)} and {described_state(b)}; settle "
            "states (linear_delayed_settled) between steps, not between the passes of one"
        )

    return _largest_of(jax.tree.map(lambda *leaves: jnp.stack(leaves), a, b))


def linear_delayed_settled(state: Float8State) -> Float8State:
    """The state without `initialized`, once every scale is set: casts then take one pass over their tensor, not two.

    Use it in a loop after the first steps; a function that takes the result is traced anew. A state that overwrites
    itself keeps the flag (`overwrite_with_gradient`).

    Exactness: casts have the same bits as with the flag.

    Raises:
        OperandError: a scale that is not set yet or is not above 0, a traced state, or not a state.
    """
    call = "linear_delayed_settled"
    _require_float8_states(call, state=state)

    def settled(tensor: str, of_tensor: DelayedState) -> DelayedState:
        is_known = not any(isinstance(leaf, Tracer) for leaf in of_tensor)
        flag = 1 if of_tensor.initialized is None else of_tensor.initialized
        if not (is_known and jnp.all(flag == 1) and jnp.all(_is_scale(of_tensor.inv_scale))):
            raise OperandError(
                f"{call}: every scale must be set, and known outside of a trace; the scale of {tensor} is not; call it "
                "between steps, after an update with a positive amax of every tensor; a layer without a gradient, or "
                "with a gradient of zeros, never casts a grad_output, and cannot be settled"
            )
        return of_tensor._replace(initialized=None)

    return _each(settled, state)


def shared_delayed_state(state: Float8State, uses: int) -> Float8State:
    """`uses` copies of a state, stacked in front, for as many calls in a step. Their gradient is the largest amaxes.

    Apply `overwrite_with_gradient` to the state, not to its copies.

    Shapes:
        leaf [..] -> [uses, ..].

    Exactness: copies; the gradient is a maximum of integers, which keeps NaN.

    Raises:
        OperandError: not a state, or `uses` below 1.
    """
    call = "shared_delayed_state"
    _require_float8_states(call, state=state)
    if not isinstance(uses, int) or uses < 1:
        raise OperandError(f"{call}: uses must be a number of calls, at least 1; got {uses!r}")
    return _shared(uses, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(uses: int, state: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (uses, *leaf.shape)), state)


def _largest_of(stacked: Any) -> Any:
    """The largest amaxes of gradients that are stacked."""

    def largest(_: str, of_tensor: DelayedState) -> DelayedState:
        largest_leaves = jax.tree.map(lambda leaf: bits.float32_of(jnp.max(bits.bits_of(leaf), axis=0)), of_tensor)
        flag = of_tensor.initialized
        # Next states are no amaxes: added flags show it.
        return largest_leaves if flag is None else largest_leaves._replace(initialized=flag.sum(0))

    return _each(largest, stacked)


_shared.defvjp(lambda uses, state: (_shared(uses, state), None), lambda uses, _, gradient: (_largest_of(gradient),))


def overwrite_with_gradient(state: Float8State, recipe: Recipe | RecipeName = "delayed") -> Float8State:
    """The state, whose gradient is now the state of the next step: flax's overwrite-with-gradient.

    A layer that gets no gradient in a step (not called, or behind `jax.lax.stop_gradient`) has a next state of zeros,
    and starts anew: in the next step its scales come from the tensors themselves. `linear_delayed_update` keeps the
    scales.

    Exactness: as for `linear_delayed_update`.

    Raises:
        SpecError: a recipe without delayed scaling.
        OperandError: a settled state, since its flag is what shows that it got no gradient or several; a state that JAX
            added or an optimizer changed (in a trace: inv_scale NaN).
    """
    call = "overwrite_with_gradient"
    recipe = _delayed(call, recipe)
    _require_float8_states(call, state=state)
    if any(of_tensor is not None and of_tensor.initialized is None for of_tensor in state):
        raise OperandError(
            f"{call}: a state that overwrites itself must keep initialized; got a settled one; use "
            "linear_delayed_update with settled states"
        )
    return _overwritten(recipe, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _overwritten(recipe: Recipe, state: Any) -> Any:
    return _each(lambda tensor, t: _loud("overwrite_with_gradient", tensor, t, _is_broken(t)), state)


_overwritten.defvjp(
    lambda recipe, state: (_overwritten(recipe, state), state),
    lambda recipe, state, amaxes: (linear_delayed_update(state, amaxes, recipe),),
)


def _is_scale(inv_scale: jax.Array) -> jax.Array:
    pattern = bits.bits_of(inv_scale)
    return (pattern > 0) & (pattern <= bits.INFINITY)


def _is_broken(state: DelayedState) -> jax.Array:
    """Whether a state is invalid: a sum, changed by an optimizer, or with a scale that is marked as set and is not."""
    flag = jnp.ones((), jnp.float32) if state.initialized is None else jnp.asarray(state.initialized)
    return ~((flag == 0) | ((flag == 1) & _is_scale(jnp.asarray(state.inv_scale))))


def _is_sum(gradient: DelayedState) -> jax.Array:
    """Whether a gradient is the sum of several uses, or not a gradient of a state."""
    uses = jnp.asarray(gradient.inv_scale)
    flag = jnp.zeros((), jnp.float32) if gradient.initialized is None else jnp.asarray(gradient.initialized)
    return ~(((uses == 0) | (uses == 1)) & (flag == 0))


def _loud(call: str, tensor: str, state: DelayedState, broken: jax.Array) -> DelayedState:
    """The state, its inv_scale NaN if it is broken; OperandError where that is known."""
    if isinstance(broken, Tracer):
        return state._replace(inv_scale=jnp.where(broken, jnp.float32(jnp.nan), state.inv_scale))
    if bool(jnp.any(broken)):
        raise OperandError(
            f"{call}: the delayed-scaling state of {tensor}, or its gradient, was used in two calls of a pass, was "
            "changed by an optimizer, or has no scale; give each call a copy (shared_delayed_state), combine passes "
            "with linear_delayed_maximum, and keep states out of the optimizer"
        )
    return state


def _require_float8_states(call: str, **states: Any) -> None:
    for name, state in states.items():
        fits = isinstance(state, Float8State) and all(isinstance(t, DelayedState | None) for t in state)
        if not fits or any(jnp.result_type(leaf) != jnp.float32 for leaf in jax.tree.leaves(state)):
            raise OperandError(
                f"{call}: {name} must be a Float8State of float32 arrays; got {described_state(state)}; start with "
                "linear_delayed_state(recipe), or restore with linear_delayed_state(recipe) as the template"
            )


def _delayed(call: str, recipe: Any) -> Recipe:
    recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe) or recipe.delayed is None:
        raise SpecError(
            f"{call}: needs a recipe with delayed scaling; got {getattr(recipe, 'name', recipe)!r}; its scales have no "
            "state: use dot_general"
        )
    return recipe

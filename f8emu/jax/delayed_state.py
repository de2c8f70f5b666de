"""The state of delayed scaling of one tensor: initial state and update, as pure functions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.jax.dtypes import float8_format, format_of
from f8emu.jax.scale import scales_of
from f8emu.spec.errors import OperandError
from f8emu.spec.formats import FLOAT32, Format
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, ScaleRule
from f8emu.spec.trace import DelayedState

_INFINITY = 0x7F800000


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state of a tensor before its first step: an empty history, inv_scale 1, not initialized."""
    return DelayedState(
        amax_history=jnp.zeros(delayed.history_length, jnp.float32),
        inv_scale=jnp.ones((), jnp.float32),
        initialized=jnp.zeros((), jnp.bool_),
    )


def update_delayed_state(
    state: DelayedState, amax: jax.Array, format: Any, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The new state after a step whose casts had the maximum `amax`, by the rule of `DelayedScaling`.

    Shapes:
        amax float32 with one element.

    Exactness: as for `scale_from_amax`; comparisons and maxima are on integers (NUMERICS 6).

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: unknown format.
    """
    call = "update_delayed_state"
    target = float8_format(call, format)
    format_of(call, "amax", amax, (FLOAT32.name,))
    if amax.size != 1:
        raise OperandError(
            f"{call}: amax must be one element; got shape {list(amax.shape)}; take amax(x), or the maximum of those of "
            "all casts since the last update"
        )
    if tuple(state.amax_history.shape) != (delayed.history_length,):
        raise OperandError(
            f"{call}: the state's amax_history must have shape [{delayed.history_length}]; got "
            f"{list(state.amax_history.shape)}; the state is of another recipe, start with initial_delayed_state"
        )
    return _update(jax.tree.map(jnp.asarray, state), jnp.asarray(amax), target, rule, delayed)


@functools.partial(jax.jit, static_argnames=("target", "rule", "delayed"))
def _update(
    state: DelayedState, amax: jax.Array, target: Format, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    newest, older, kept = (
        lax.bitcast_convert_type(x, jnp.uint32) for x in (amax.reshape(1), state.amax_history[:-1], state.inv_scale)
    )
    is_usable = (newest[0] > 0) & (newest[0] < _INFINITY)
    newest = jnp.where(is_usable, newest, jnp.uint32(0))
    history = jnp.concatenate([newest, older])
    is_most_recent = delayed.reduction is AmaxHistoryReduction.MOST_RECENT
    reference = lax.bitcast_convert_type(newest[0] if is_most_recent else jnp.max(history), jnp.float32)
    inv_scale = scales_of(reference, target, rule, margin=delayed.margin).inv_scale
    inv_scale = jnp.where(is_usable, lax.bitcast_convert_type(inv_scale, jnp.uint32), kept)
    return DelayedState(
        amax_history=lax.bitcast_convert_type(history, jnp.float32),
        inv_scale=lax.bitcast_convert_type(inv_scale, jnp.float32),
        initialized=state.initialized | is_usable,
    )

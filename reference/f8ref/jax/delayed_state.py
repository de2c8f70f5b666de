"""The state of delayed scaling, and its update once a step."""

import jax
import jax.numpy as jnp
import numpy as np

from f8emu.spec import (
    FLOAT32,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    Format,
    OperandError,
    ScaleRule,
    float8_format,
)
from f8ref.jax import softfloat
from f8ref.jax.codec import dtype_format
from f8ref.jax.scale import Numbers, numbers_of, scales


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state before the first step: a history of zeros, inv_scale 1, not initialized."""
    return DelayedState(
        amax_history=jnp.zeros(delayed.history_length, jnp.float32),
        inv_scale=jnp.ones((), jnp.float32),
        initialized=jnp.zeros((), jnp.bool_),
    )


def update_delayed_state(
    state: DelayedState, amax: jax.Array, format: Format | str, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after a step in which the tensor's amax was `amax`, by the rule of `DelayedScaling`.

    Shapes: amax any shape of one element.
    Exactness: comparisons and maxima on integers, the quotient correctly rounded.

    Raises:
        OperandError: amax is not one float32, or the history has another length.
    """
    target = float8_format("update_delayed_state", format)
    dtype_format(amax, "update_delayed_state", "amax", (FLOAT32.name,))
    length = tuple(state.amax_history.shape)
    if amax.size != 1 or length != (delayed.history_length,):
        raise OperandError(
            f"update_delayed_state: amax must be one element and the history ({delayed.history_length},); got shapes "
            f"{tuple(amax.shape)} and {length}. Start from initial_delayed_state with the same DelayedScaling"
        )
    is_newest = np.bool_(delayed.reduction is AmaxHistoryReduction.MOST_RECENT)
    numbers = numbers_of(target, rule, delayed.margin)
    return _update(jax.tree.map(jnp.asarray, state), jnp.asarray(amax), numbers, is_newest)


@jax.jit
def _update(state: DelayedState, amax: jax.Array, numbers: Numbers, is_newest: np.bool_) -> DelayedState:
    new = softfloat.bits(amax).reshape(1)
    is_usable = (new[0] > 0) & (new[0] < softfloat.INFINITY)
    new = jnp.where(is_usable, new, jnp.uint32(0))
    history = jnp.concatenate([new, softfloat.bits(state.amax_history)[:-1]])
    reference = softfloat.from_bits(jnp.where(is_newest, history[0], jnp.max(history)))
    inv_scale = scales(reference, numbers).inv_scale
    kept = softfloat.bits(state.inv_scale)
    return DelayedState(
        amax_history=softfloat.from_bits(history),
        inv_scale=softfloat.from_bits(jnp.where(is_usable, softfloat.bits(inv_scale), kept)),
        initialized=state.initialized | is_usable,
    )

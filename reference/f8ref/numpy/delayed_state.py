"""Delayed scaling: the state of one tensor and its step. `f8emu.spec.DelayedScaling` is the definition."""

import numpy as np
from numpy.typing import ArrayLike

from f8emu.spec import FLOAT32, AmaxHistoryReduction, DelayedScaling, DelayedState, Format, OperandError, ScaleRule
from f8ref.numpy.codec import typed_array
from f8ref.numpy.scale import scale_from_amax


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state before the first step: a history of zeros, `inv_scale` 1, not initialised.

    Shapes: `amax_history` [history_length]; `inv_scale` and `initialized` [].
    """
    return DelayedState(
        amax_history=np.zeros(delayed.history_length, np.float32),
        inv_scale=np.ones((), np.float32),
        initialized=np.zeros((), np.bool_),
    )


def update_delayed_state(
    state: DelayedState, amax: ArrayLike, format: Format | str, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after a step in which the tensor's largest amax was `amax`.

    The history moves by one, newest first; the new entry is `amax`, or 0 if that is 0 or not finite. Then
    `inv_scale` follows from the history. After such an `amax`, `inv_scale` and `initialized` stay as they are.

    Shapes: `amax` has one element; the state keeps its shapes.
    Exactness: exact; `inv_scale` comes from `scale_from_amax`.

    Raises:
        OperandError: `amax` is not one float32 number, or the history is not of the rule's length.
    """
    newest, _ = typed_array(amax, (FLOAT32,), "update_delayed_state: amax")
    history, _ = typed_array(state.amax_history, (FLOAT32,), "update_delayed_state: amax_history")
    if newest.size != 1:
        raise OperandError(
            f"update_delayed_state: amax must have one element; got shape {newest.shape}; reduce it first"
        )
    if history.shape != (delayed.history_length,):
        raise OperandError(
            f"update_delayed_state: amax_history must have shape ({delayed.history_length},); got {history.shape}; "
            "start from initial_delayed_state of the same rule"
        )
    newest = newest.reshape(())
    is_usable = bool(np.isfinite(newest) and newest > 0)

    entry = newest if is_usable else np.float32(0)
    history = np.concatenate([[entry], history[:-1]]).astype(np.float32)
    if not is_usable:
        return DelayedState(history, state.inv_scale, state.initialized)

    match delayed.reduction:
        case AmaxHistoryReduction.MAX:
            reference = history.max()
        case AmaxHistoryReduction.MOST_RECENT:
            reference = history[0]
    inv_scale = scale_from_amax(reference, format, rule, margin=delayed.margin).inv_scale
    return DelayedState(history, inv_scale, np.ones((), np.bool_))

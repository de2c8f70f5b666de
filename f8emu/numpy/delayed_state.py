"""The state of delayed scaling of one tensor, and its step."""

from numpy.typing import ArrayLike

from f8emu.numpy.dtypes import FormatLike, float8_format, typed
from f8emu.spec.scaling import DelayedScaling, ScaleRule
from f8emu.spec.trace import DelayedState
from f8ref import numpy as oracle


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state before the first step: a history of zeros, `inv_scale` 1, not initialised.

    Shapes:
        `amax_history` [history_length]; `inv_scale` and `initialized` [].
    """
    return oracle.initial_delayed_state(delayed)


def update_delayed_state(
    state: DelayedState, amax: ArrayLike, format: FormatLike, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after a step in which the tensor's largest amax was `amax`; `DelayedScaling` defines it.

    Shapes:
        `amax` has one element; the state keeps its shapes.

    Exactness: exact.

    Raises:
        OperandError: `amax` is not one number that float32 holds, or the history is not of the rule's length.
        SpecError: unknown format.
    """
    target = float8_format("update_delayed_state", format)
    return oracle.update_delayed_state(state, typed("update_delayed_state", "amax", amax), target, rule, delayed)

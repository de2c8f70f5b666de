"""The state of delayed scaling and its update once a step, which `f8emu.spec.scaling.DelayedScaling` states.

Amaxes and scales are float32 codes.
"""

from f8emu.spec.formats import FLOAT32, Format
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, ScaleRule
from f8emu.spec.trace import DelayedState
from f8ref.exact.cast import decode, encode
from f8ref.exact.number import finite
from f8ref.exact.scale import scale_from_amax


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state before the first step: a history of zeros, inv_scale 1, not initialized."""
    return DelayedState(
        amax_history=(0,) * delayed.history_length, inv_scale=encode(finite(1), FLOAT32), initialized=False
    )


def update_delayed_state(
    state: DelayedState, amax: int, format: Format, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after one step whose amax was `amax`; the rule is `DelayedScaling`'s.

    An amax that is 0, infinite or NaN enters the history as 0 and leaves the scale as it is.
    """
    number = decode(amax, FLOAT32)
    usable = not (number.is_nan or number.is_infinite or number.is_zero)
    history = ((amax if usable else 0), *state.amax_history)[: delayed.history_length]
    if not usable:
        return state._replace(amax_history=history)
    match delayed.reduction:
        case AmaxHistoryReduction.MAX:
            reference = max(history)  # the codes of non-negative floats have the order of their values
        case AmaxHistoryReduction.MOST_RECENT:
            reference = history[0]
    scales = scale_from_amax(reference, format, rule, margin=delayed.margin)
    return DelayedState(amax_history=history, inv_scale=scales.inv_scale, initialized=True)

"""From an array to its scales: amax, the scale rule, and the state of delayed scaling."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.numpy import emulation
from f8emu.numpy.dtypes import FormatLike, float8_format, rows_of, typed
from f8emu.spec.scaling import DelayedScaling, Granularity, ScaleRule
from f8emu.spec.trace import DelayedState, Scales
from f8ref import numpy as oracle


def amax(x: ArrayLike, granularity: Granularity | str = Granularity.TENSORWISE) -> NDArray[np.float32]:
    """The largest magnitude of each group that shares a scale; a group with a NaN gives NaN, an empty one 0.

    Shapes:
        x [..., K], float32, bfloat16, float16, or values that float32 holds -> float32
        `granularity.scale_shape(rows, K)`, where rows is the product of the leading dimensions.

    Exactness: exact, a maximum does not round.

    Raises:
        OperandError: wrong dtype or rank, or values that float32 does not hold.
        SpecError: unknown granularity.
    """
    values = typed("amax", "x", x)
    return emulation.amax(values.reshape(rows_of("amax", "x", values)), granularity)


def scale_from_amax(amax: ArrayLike, format: FormatLike, rule: ScaleRule = ScaleRule(), *, margin: int = 0) -> Scales:
    """`inv_scale = float32(max * 2^-margin / max(amax, amax_floor))` and `scale = float32(1 / inv_scale)`.

    With `rule.power_of_two`, inv_scale loses its fraction bits before scale is taken. amax 0 counts as the floor,
    amax inf gives 0 and inf, amax NaN gives NaN and NaN.

    Shapes:
        amax float32 or values that float32 holds, any shape -> two float32 arrays of that shape.

    Exactness: both quotients are correctly rounded.

    Raises:
        OperandError: wrong dtype.
        SpecError: unknown format, or a margin out of range.
    """
    target = float8_format("scale_from_amax", format)
    return emulation.scale_from_amax(typed("scale_from_amax", "amax", amax), target, rule, margin=margin)


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

"""Delayed scaling, traced by hand from the words of `DelayedScaling`."""

import re
from typing import Any

import numpy as np
import pytest

import f8ref.numpy as f8
from f8emu.spec import (
    E4M3FN,
    E5M2,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    Format,
    OperandError,
    ScaleRule,
)

PLAIN = ScaleRule()


def trace(
    delayed: DelayedScaling, amaxes: list[float], format: Format = E4M3FN, rule: ScaleRule = PLAIN
) -> list[DelayedState]:
    states = [f8.initial_delayed_state(delayed)]
    for amax in amaxes:
        states.append(f8.update_delayed_state(states[-1], np.float32(amax), format, rule, delayed))
    return states[1:]


def as_lists(states: list[DelayedState]) -> list[tuple[Any, Any, Any]]:
    return [(s.amax_history.tolist(), s.inv_scale.tolist(), s.initialized.tolist()) for s in states]


def test_initial_state() -> None:
    state = f8.initial_delayed_state(DelayedScaling(history_length=3))
    assert [x.dtype for x in state] == [np.float32, np.float32, np.bool_]
    assert [x.shape for x in state] == [(3,), (), ()]
    assert as_lists([state]) == [([0, 0, 0], 1, False)]


def test_the_maximum_rolls_out() -> None:
    """448 / amax is exact here. The 14 counts for three steps, then the 7 of the step after it."""
    states = trace(DelayedScaling(history_length=3), [14.0, 7.0, 3.5, 1.75, 0.875])
    assert as_lists(states) == [
        ([14, 0, 0], 32, True),
        ([7, 14, 0], 32, True),
        ([3.5, 7, 14], 32, True),
        ([1.75, 3.5, 7], 64, True),
        ([0.875, 1.75, 3.5], 128, True),
    ]
    assert all(x.dtype == dtype for s in states for x, dtype in zip(s, (np.float32, np.float32, np.bool_), strict=True))


def test_most_recent() -> None:
    delayed = DelayedScaling(history_length=2, reduction=AmaxHistoryReduction.MOST_RECENT)
    assert as_lists(trace(delayed, [14.0, 7.0, 28.0])) == [
        ([14, 0], 32, True),
        ([7, 14], 64, True),
        ([28, 7], 16, True),
    ]


def test_a_history_of_one() -> None:
    assert as_lists(trace(DelayedScaling(history_length=1), [14.0, 7.0])) == [([14], 32, True), ([7], 64, True)]


def test_margin_and_format() -> None:
    """57344 * 2^-3 / 7 = 1024; 448 * 2^-1 / 7 = 32."""
    assert trace(DelayedScaling(margin=3), [7.0], E5M2)[0].inv_scale == 1024
    assert trace(DelayedScaling(margin=1), [7.0], E4M3FN)[0].inv_scale == 32


def test_power_of_two() -> None:
    """448 / 5 = 89.6, cut to 64."""
    assert trace(DelayedScaling(), [5.0])[0].inv_scale == np.float32(89.6)
    assert trace(DelayedScaling(), [5.0], rule=ScaleRule(power_of_two=True))[0].inv_scale == 64


def test_the_floor() -> None:
    assert trace(DelayedScaling(), [1e-30])[0].inv_scale == np.float32(448 / 1e-12)
    assert trace(DelayedScaling(), [0.25], rule=ScaleRule(amax_floor=0.5))[0].inv_scale == 896


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan])
@pytest.mark.parametrize("reduction", AmaxHistoryReduction, ids=lambda reduction: reduction.value)
def test_useless_amaxes(bad: float, reduction: AmaxHistoryReduction) -> None:
    """They enter the history as 0, and neither the scale nor `initialized` moves; the history goes on."""
    delayed = DelayedScaling(history_length=2, reduction=reduction)
    states = trace(delayed, [bad, 14.0, bad, bad, bad, 7.0])
    assert as_lists(states) == [
        ([0, 0], 1, False),
        ([14, 0], 32, True),
        ([0, 14], 32, True),
        ([0, 0], 32, True),
        ([0, 0], 32, True),
        ([7, 0], 64, True),
    ]


def test_the_old_state_stays_as_it_is() -> None:
    delayed = DelayedScaling(history_length=2)
    first = trace(delayed, [14.0])[0]
    f8.update_delayed_state(first, np.full((1, 1), 7, np.float32), "float8_e4m3fn", PLAIN, delayed)
    assert as_lists([first]) == [([14, 0], 32, True)]


def test_bad_input() -> None:
    delayed = DelayedScaling(history_length=2)
    state = f8.initial_delayed_state(delayed)
    with pytest.raises(OperandError, match="amax must have dtype float32; got float64"):
        f8.update_delayed_state(state, 1.0, E4M3FN, PLAIN, delayed)
    with pytest.raises(OperandError, match=re.escape("amax must have one element; got shape (2,)")):
        f8.update_delayed_state(state, np.ones(2, np.float32), E4M3FN, PLAIN, delayed)
    with pytest.raises(OperandError, match=re.escape("amax_history must have shape (16,); got (2,)")):
        f8.update_delayed_state(state, np.float32(1), E4M3FN, PLAIN, DelayedScaling())

"""Amax, scales and delayed state of f8emu.torch against the oracle."""

import numpy as np
import pytest
import torch

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import (
    E4M3FN,
    E5M2,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    Granularity,
    OperandError,
    ScaleRule,
    SpecError,
)

pytestmark = pytest.mark.usefixtures("engine_and_torch")
ODD_AMAX = [0.0, 1e-45, 1e-38, 1e-13, 1e-12, 1.0, 447.99997, 448.0, 57344.0, 3.4e38, float("inf"), float("nan")]


@pytest.mark.parametrize("exponent", [0, -20], ids=lambda e: f"2^{e}")
@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
def test_every_mantissa_gives_the_correctly_rounded_quotient(format, exponent) -> None:
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    amax = ((np.uint32(127 + exponent) << 23) | mantissas).view(np.float32)
    scales = f8.scale_from_amax(torch.from_numpy(amax), format)
    inv_scale = (np.float64(format.max) / amax.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(scales.inv_scale.numpy().view(np.uint32), inv_scale.view(np.uint32))
    scale = (1.0 / inv_scale.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(scales.scale.numpy().view(np.uint32), scale.view(np.uint32))


@pytest.mark.parametrize("margin", [0, 1, 6])
@pytest.mark.parametrize("rule", [ScaleRule(), ScaleRule(power_of_two=True), ScaleRule(amax_floor=1e-4)], ids=str)
@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
def test_scale_rules_equal_the_oracle(format, rule, margin, assert_same_bits) -> None:
    powers = np.ldexp(np.float32(1), np.arange(-140, 128)).astype(np.float32)
    near = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.array(ODD_AMAX, np.float32)])
    amax = np.random.default_rng(4).permutation(near)[:, None]
    observed = f8.scale_from_amax(torch.from_numpy(amax), format, rule, margin=margin)
    expected = reference.scale_from_amax(amax, format, rule, margin=margin)
    assert_same_bits(observed.inv_scale, expected.inv_scale)
    assert_same_bits(observed.scale, expected.scale)


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (1, 1), (3, 130), (256, 256), (257, 129), (128, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_amax_equals_the_oracle(dtype, shape, granularity, to_numpy, assert_same_bits) -> None:
    """Each element has its own magnitude, and the largest of a group stands anywhere in it."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 9, shape, generator=generator))
    x = x.to(dtype)
    for view in (x, x.t(), x[::2]):
        assert_same_bits(f8.amax(view, granularity), reference.amax(to_numpy(view), granularity))


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 7e-45], ids=str)
def test_amax_hides_nothing(value, dtype, granularity, to_numpy, assert_same_bits) -> None:
    x = torch.zeros(130, 4100, dtype=dtype)
    x[129, 4099] = value
    assert_same_bits(f8.amax(x, granularity), reference.amax(to_numpy(x), granularity), nan_codes=True)


@pytest.mark.parametrize("reduction", AmaxHistoryReduction, ids=lambda r: r.value)
@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_delayed_state_equals_the_oracle_step_by_step(reduction, length, power_of_two, assert_same_bits) -> None:
    delayed = DelayedScaling(history_length=length, reduction=reduction, margin=2)
    rule = ScaleRule(power_of_two=power_of_two)
    observed, expected = f8.initial_delayed_state(delayed), reference.initial_delayed_state(delayed)
    amaxes = [0.0, 3.0, 2.0, float("nan"), 100.0, float("inf"), 0.0, 1e-40, *np.linspace(5, 0.1, 20)]
    for amax in np.array(amaxes, np.float32):
        before = DelayedState(*(field.clone() for field in observed))
        updated = f8.update_delayed_state(observed, torch.tensor([[amax]]), E4M3FN, rule, delayed)
        for field, kept in zip(observed, before, strict=True):
            assert_same_bits(field, kept)  # the state that was passed in is as it was
        observed = updated
        expected = reference.update_delayed_state(expected, amax, E4M3FN, rule, delayed)
        assert_same_bits(observed.amax_history, expected.amax_history)
        assert_same_bits(observed.inv_scale, expected.inv_scale)
        assert bool(observed.initialized) == bool(expected.initialized)


def test_bad_input_is_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(OperandError, match=r"amax: x must have 2 dimensions or more"):
        f8.amax(torch.zeros(3))
    with pytest.raises(OperandError, match=r"amax: x must be float32.*got torch.float64"):
        f8.amax(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(OperandError, match=r"scale_from_amax: amax must be float32.*bfloat16"):
        f8.scale_from_amax(one.bfloat16(), E4M3FN)
    with pytest.raises(SpecError, match=r"margin must be in 0..6; got 7"):
        f8.scale_from_amax(one, E4M3FN, margin=7)
    delayed = DelayedScaling(history_length=4)
    state = f8.initial_delayed_state(delayed)
    with pytest.raises(OperandError, match=r"amax must be one float32; got .* shape \[2\]"):
        f8.update_delayed_state(state, torch.ones(2), E4M3FN, ScaleRule(), delayed)
    with pytest.raises(OperandError, match=r"amax_history must have shape \[16\]; got \[4\].*initial_delayed_state"):
        f8.update_delayed_state(state, one, E4M3FN, ScaleRule(), DelayedScaling())

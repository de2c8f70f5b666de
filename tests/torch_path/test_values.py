"""Casts, amaxes, scales and delayed states of f8emu.torch: the oracle's values, in any layout, and what is refused."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.conformance import load_subject, verify
from f8emu.spec import (
    E4M3FN,
    E5M2,
    FLOAT8,
    DelayedScaling,
    Format,
    Granularity,
    OperandError,
    Overflow,
    ScaleRule,
    SpecError,
)
from tests.torch_path.bits import assert_same_bits, to_numpy

pytestmark = pytest.mark.usefixtures("engine_and_torch")
GRANULARITIES = pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def test_values_equal_the_oracle() -> None:
    """Every code and every 16-bit input, amaxes, scales, states, quantised and back, as the suite has them."""
    (found,) = verify([load_subject("torch")], stages=["formats", "scales"]).subjects
    assert found.is_equal and [stage.cases_total > 30 for stage in found.stages] == [True, True]


@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_cast_survives_a_torch_that_does_not_saturate(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 gives NaN where torch 2.13 saturates, so nothing beyond max may reach .to()."""
    convert = torch.Tensor.to
    largest: list[float] = []

    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if getattr(torch, format.name) in args:
            largest.append(self[~self.isnan()].abs().max().item())
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    x = torch.tensor([format.max, *(format.max + 2.0**i for i in range(16)), 3.4e38, float("inf"), float("nan")])
    f8.cast(torch.cat([x, -x]), format, overflow=Overflow.NONFINITE)
    assert largest == [format.max]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)], ids=str)
def test_cast_keeps_any_shape(shape: tuple[int, ...]) -> None:
    codes = f8.cast(torch.ones(shape), "float8_e4m3fn")
    assert codes.shape == f8.decode(codes).shape == shape


def test_cast_of_any_layout_to_a_format_or_its_name() -> None:
    x = torch.randn(33, 17, generator=torch.Generator().manual_seed(1))
    for view in (x.t(), x[::2, 1::3], x[:1].expand(5, 17), x.flatten()[1:]):
        for format in (E4M3FN, "float8_e4m3fn", torch.float8_e4m3fn):
            assert_same_bits(f8.cast(view, format), f8.cast(view.contiguous(), E4M3FN))


def test_special_scales_follow_ieee() -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -2.0, float("inf"), float("nan"), 1e-40, -3e38]])
    for inv_scale in (0.0, float("inf"), float("nan"), 1e-38, 3e38):
        factor = torch.full((1, 1), inv_scale)
        expected = reference.quantize(to_numpy(x), to_numpy(factor), E5M2)
        assert_same_bits(f8.quantize(x, factor, E5M2), expected, nan_codes=True)
        values = f8.dequantize(f8.cast(x, E5M2), factor)
        assert_same_bits(values, reference.dequantize(reference.cast(to_numpy(x), E5M2), to_numpy(factor)))


def test_casts_detach_and_leave_their_input_alone() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    before = x.detach().clone()
    codes = f8.quantize(x, torch.ones(1, 1), E4M3FN)
    assert not codes.requires_grad
    assert not f8.decode(codes).requires_grad
    assert torch.equal(x, before)


@GRANULARITIES
def test_leading_dimensions_are_rows(granularity: Granularity) -> None:
    """Every verb has the bits of the flattened tensor, and codes keep shape and strides; a block may span samples."""
    x = torch.randn(5, 3, 50, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = (x * torch.arange(1, 51)[:, None].exp2()).transpose(0, 1)  # another magnitude in each row
    flat = x.reshape(-1, 200)
    amax = f8.amax(x, granularity)
    assert_same_bits(amax, f8.amax(flat, granularity))
    scales = f8.scale_from_amax(amax, E4M3FN)
    codes, flat_codes = (f8.quantize(t, scales.inv_scale, E4M3FN, granularity) for t in (x, flat))
    assert codes.shape == x.shape and codes.stride() == x.stride()
    assert_same_bits(codes.reshape(-1, 200), flat_codes)
    values = f8.dequantize(codes, scales.scale, granularity)
    assert_same_bits(values.reshape(-1, 200), f8.dequantize(flat_codes, scales.scale, granularity))
    for dtype in (torch.bfloat16, "float16"):
        narrow = f8.dequantize(codes, scales.scale, granularity, out_dtype=dtype)
        assert_same_bits(narrow, values.to(torch.bfloat16 if dtype is torch.bfloat16 else torch.float16))
    empty = f8.amax(x[:0], granularity)
    assert f8.quantize(x[:0], empty, E4M3FN, granularity).shape == x[:0].shape


def test_a_number_is_a_tensorwise_scale() -> None:
    x, half = torch.randn(4, 16), torch.full((1, 1), 0.5)
    a, b = (f8.quantize(x, scale, E4M3FN) for scale in (0.5, half))
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(f8.dequantize(a, 0.5), f8.dequantize(b, half))


@pytest.mark.parametrize(("format", "exponent"), [(E4M3FN, 0), (E5M2, -20)], ids=str)
def test_every_mantissa_gives_the_correctly_rounded_quotient(format: Format, exponent: int) -> None:
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    amax = ((np.uint32(127 + exponent) << 23) | mantissas).view(np.float32)
    scales = f8.scale_from_amax(torch.from_numpy(amax), format)
    inv_scale = (np.float64(format.max) / amax.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(scales.inv_scale.numpy().view(np.uint32), inv_scale.view(np.uint32))
    scale = (1.0 / inv_scale.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(scales.scale.numpy().view(np.uint32), scale.view(np.uint32))


@GRANULARITIES
def test_amax_of_any_layout_hides_nothing(granularity: Granularity) -> None:
    """Each element has its own magnitude; then one element alone is not zero, the last."""
    generator = torch.Generator().manual_seed(5)
    for dtype, shape in product(FLOATS, [(0, 32), (32, 0), (1, 1), (257, 129)]):
        x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 9, shape, generator=generator))
        for view in (x.to(dtype), x.to(dtype).t(), x.to(dtype)[::2]):
            assert_same_bits(f8.amax(view, granularity), reference.amax(to_numpy(view), granularity))
    for dtype, value in product(FLOATS, (float("nan"), float("inf"), -float("inf"), 7e-45)):
        x = torch.zeros(130, 4100, dtype=dtype)
        x[129, 4099] = value
        assert_same_bits(f8.amax(x, granularity), reference.amax(to_numpy(x), granularity), nan_codes=True)


def test_a_state_is_not_written_to() -> None:
    delayed = DelayedScaling(history_length=3)
    state = f8.initial_delayed_state(delayed)
    for amax in (3.0, float("nan"), 2.0, 100.0, 0.0):
        before = [field.clone() for field in state]
        updated = f8.update_delayed_state(state, torch.tensor([[amax]]), E4M3FN, ScaleRule(), delayed)
        assert all(map(torch.equal, state, before))
        state = updated


ONE, X = torch.ones(1, 1), torch.zeros(4, 32)
CODES = f8.cast(X.expand(2, 4, 32), E4M3FN)
FOUR = DelayedScaling(history_length=4)
STATE = f8.initial_delayed_state(FOUR)
Arguments = tuple[Any, ...]
BAD: dict[Callable[..., Any], list[tuple[Arguments, dict[str, Any], type[Exception], str]]] = {
    f8.cast: [
        ((X.double(), E4M3FN), {}, OperandError, "x must be float32, bfloat16 or float16; got torch.float64"),
        ((X.int(), E4M3FN), {}, OperandError, "x must be float32, bfloat16 or float16; got torch.int32.*float64"),
        ((CODES, E4M3FN), {}, OperandError, "x must be float32, bfloat16 or float16; got torch.float8_e4m3fn"),
        ((np.zeros(4, np.float32), E4M3FN), {}, OperandError, "must be a torch.Tensor; got ndarray"),
        ((X, "float16"), {}, SpecError, "format must be one of float8_e4m3fn, .*; got float16"),
        ((X, "float8"), {}, SpecError, "unknown format 'float8'; known formats"),
    ],
    f8.quantize: [
        ((X[0], ONE, E4M3FN), {}, OperandError, r"x must have 2 dimensions or more.*; got shape \[32\].*reshape"),
        ((X, ONE, E4M3FN, "rowwise"), {}, OperandError, r"must be float32 of shape \[4, 1\] for rowwise.*\[1, 1\]"),
        ((X, ONE.double(), E4M3FN), {}, OperandError, "inv_scale must be float32 .*got torch.float64"),
        ((X, 0.1, E4M3FN), {}, OperandError, r"inv_scale must be float32; got 0\.1, which float32 does not hold"),
        ((X, 1, E4M3FN, "rowwise"), {}, OperandError, r"\[4, 1\] for rowwise"),
    ],
    f8.dequantize: [
        ((X.to(torch.uint8), ONE), {}, OperandError, "codes must be of a float8 dtype .*; got torch.uint8"),
        (
            (CODES, torch.ones(2, 4, 1), "rowwise"),
            {},
            OperandError,
            r"a \[8, 32\] operand; got .* \[2, 4, 1\]",
        ),
        ((CODES, ONE), {"out_dtype": torch.float64}, OperandError, "out_dtype must be float32, .*; got torch.float64"),
    ],
    f8.decode: [((X,), {}, OperandError, "decode: x must be one of float8_e4m3fn.*got torch.float32")],
    f8.amax: [
        ((X[0],), {}, OperandError, "amax: x must have 2 dimensions or more"),
        ((X.double(),), {}, OperandError, "amax: x must be float32.*got torch.float64"),
    ],
    f8.scale_from_amax: [
        ((ONE.bfloat16(), E4M3FN), {}, OperandError, "scale_from_amax: amax must be float32.*bfloat16"),
        ((ONE, E4M3FN), {"margin": 7}, SpecError, r"margin must be in 0..6; got 7"),
    ],
    f8.update_delayed_state: [
        ((STATE, torch.ones(2), E4M3FN, ScaleRule(), FOUR), {}, OperandError, r"one float32; got .* shape \[2\]"),
        ((STATE, ONE, E4M3FN, ScaleRule(), DelayedScaling()), {}, OperandError, r"shape \[16\]; got \[4\].*initial"),
    ],
}


@pytest.mark.parametrize("verb", BAD, ids=lambda verb: verb.__name__)
def test_bad_input_is_refused(verb: Callable[..., Any]) -> None:
    for arguments, options, error, message in BAD[verb]:
        with pytest.raises(error, match=message):
            verb(*arguments, **options)


def test_overflow_is_a_member_or_its_name() -> None:
    x = torch.tensor([448.0, 1e9])
    assert f8.cast(x, "float8_e4m3fn", overflow="nonfinite").view(torch.uint8).tolist() == [0x7E, 0x7F]
    with pytest.raises(SpecError, match="overflow must be one of saturate, nonfinite; got 'bogus'"):
        f8.cast(x, "float8_e4m3fn", overflow="bogus")  # pyright: ignore[reportArgumentType]

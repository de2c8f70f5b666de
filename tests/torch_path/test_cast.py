"""Casts of f8emu.torch against the oracle and ml_dtypes."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FLOAT8,
    FLOAT16,
    Format,
    Granularity,
    OperandError,
    Overflow,
    SpecError,
)

pytestmark = pytest.mark.usefixtures("engine_and_torch")
ALL_16_BIT = torch.arange(65536, dtype=torch.int32).to(torch.uint16)


def boundaries(format: Format) -> torch.Tensor:
    """Float32 at and one unit beside each value of the format and each middle between two."""
    values = f8.decode(torch.arange(format.max_code + 1, dtype=torch.uint8).view(getattr(torch, format.name))).double()
    ends = torch.tensor([format.max + 2.0**i for i in range(16)] + [3.4e38, float("inf"), float("nan"), 1e-45])
    middles = torch.cat([values, (values[1:] + values[:-1]) / 2, ends.double()]).float()
    bits = middles.view(torch.int32)
    near = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0)]).view(torch.float32)
    return torch.cat([near, -near])


@pytest.mark.parametrize("overflow", Overflow, ids=lambda o: o.value)
@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_casts_equal_the_oracle(format, overflow, to_numpy, assert_same_bits: Callable) -> None:
    """Every 16-bit input, and float32 at the boundaries of the format."""
    for x in (ALL_16_BIT.view(torch.bfloat16), ALL_16_BIT.view(torch.float16), boundaries(format)):
        codes = f8.cast(x, format, overflow=overflow)
        assert_same_bits(codes, reference.cast(to_numpy(x), format, overflow=overflow), nan_codes=True)


@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_cast_survives_a_torch_that_does_not_saturate(format, monkeypatch, to_numpy, assert_same_bits) -> None:
    """Torch 2.11 gives NaN where torch 2.13 saturates, so nothing beyond max may reach .to()."""
    convert = torch.Tensor.to
    largest = []

    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if getattr(torch, format.name) in args:
            largest.append(self[~self.isnan()].abs().max().item())
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    f8.cast(boundaries(format), format, overflow=Overflow.NONFINITE)
    assert largest == [format.max]


@pytest.mark.parametrize("format", [*FLOAT8, E8M0FNU, BFLOAT16, FLOAT16], ids=str)
def test_every_code_decodes_as_the_oracle(format, to_numpy, assert_same_bits) -> None:
    codes = ALL_16_BIT if format.bits == 16 else torch.arange(256, dtype=torch.int32).to(torch.uint8)
    x = codes.view(getattr(torch, format.name))
    assert_same_bits(f8.decode(x), reference.decode(to_numpy(x)), nan_codes=True)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)], ids=str)
def test_cast_keeps_any_shape(shape) -> None:
    codes = f8.cast(torch.ones(shape), "float8_e4m3fn")
    assert codes.shape == shape
    assert f8.decode(codes).shape == shape


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "misaligned"])
def test_cast_of_any_layout(layout, assert_same_bits) -> None:
    x = torch.randn(33, 17, generator=torch.Generator().manual_seed(1))
    views = {
        "transposed": x.t(),
        "strided": x[::2, 1::3],
        "expanded": x[:1].expand(5, 17),
        "misaligned": x.flatten()[1:],
    }
    assert_same_bits(f8.cast(views[layout], E4M3FN), f8.cast(views[layout].contiguous(), E4M3FN))


def test_format_may_be_a_name_or_a_dtype(assert_same_bits) -> None:
    x = torch.randn(64)
    for name in ("float8_e4m3fn", torch.float8_e4m3fn):
        assert_same_bits(f8.cast(x, name), f8.cast(x, E4M3FN))


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize_and_dequantize_equal_the_oracle(granularity, dtype, to_numpy, assert_same_bits) -> None:
    """Each group has its own magnitude, so that a scale of the wrong group cannot go unseen."""
    generator = torch.Generator().manual_seed(2)
    rows, k = 257, 272
    x = torch.randn(rows, k, generator=generator) * torch.exp2(torch.randint(-6, 6, (rows, k), generator=generator))
    x = x.to(dtype)
    inv_scale = torch.rand(granularity.scale_shape(rows, k), generator=generator) * 300
    codes = f8.quantize(x, inv_scale, E4M3FN, granularity)
    expected = reference.quantize(to_numpy(x), to_numpy(inv_scale), E4M3FN, granularity)
    assert_same_bits(codes, expected, nan_codes=True)
    values = f8.dequantize(codes, inv_scale, granularity)
    assert_same_bits(values, reference.dequantize(expected, to_numpy(inv_scale), granularity), nan_codes=True)


def test_a_bfloat16_operand_is_multiplied_in_float32(to_numpy, assert_same_bits) -> None:
    """A bfloat16 tensor times a 0-dimensional float32 tensor would be a bfloat16 product in torch."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    inv_scale = torch.tensor(1.2345678)
    expected = (to_numpy(x).astype(np.float32) * np.float32(1.2345678)).astype(ml_dtypes.float8_e4m3fn)
    assert_same_bits(f8.quantize(x, inv_scale, E4M3FN), expected)


def test_special_scales_follow_ieee(to_numpy, assert_same_bits) -> None:
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


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
def test_leading_dimensions_are_rows(granularity: Granularity, assert_same_bits: Callable) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_cast_refuses_other_dtypes(dtype) -> None:
    with pytest.raises(OperandError, match=rf"cast: x must be float32, bfloat16 or float16; got {dtype}.*float64"):
        f8.cast(torch.zeros(4).to(dtype), E4M3FN)


def test_other_bad_input_is_refused() -> None:
    x = torch.zeros(4, 32)
    one = torch.ones(1, 1)
    with pytest.raises(OperandError, match=r"must be a torch.Tensor; got ndarray"):
        f8.cast(np.zeros(4, np.float32), E4M3FN)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"format must be one of float8_e4m3fn, .*; got float16"):
        f8.cast(x, "float16")
    with pytest.raises(SpecError, match=r"unknown format 'float8'; known formats"):
        f8.cast(x, "float8")
    with pytest.raises(OperandError, match=r"quantize: x must have 2 dimensions or more.*; got shape \[32\].*reshape"):
        f8.quantize(x[0], one, E4M3FN)
    with pytest.raises(OperandError, match=r"inv_scale must be float32 of shape \[4, 1\] for rowwise.*\[1, 1\]"):
        f8.quantize(x, one, E4M3FN, Granularity.ROWWISE)
    with pytest.raises(OperandError, match=r"inv_scale must be float32 .*got torch.float64"):
        f8.quantize(x, one.double(), E4M3FN)
    with pytest.raises(OperandError, match=r"codes must be of a float8 dtype .*; got torch.uint8"):
        f8.dequantize(x.to(torch.uint8), one)
    with pytest.raises(OperandError, match=r"dequantize: scale must be .* a \[8, 32\] operand; got .* \[2, 4, 1\]"):
        f8.dequantize(f8.cast(x.expand(2, 4, 32), E4M3FN), torch.ones(2, 4, 1), "rowwise")
    with pytest.raises(OperandError, match=r"out_dtype must be float32, bfloat16 or float16; got torch.float64"):
        f8.dequantize(f8.cast(x, E4M3FN), one, out_dtype=torch.float64)
    with pytest.raises(OperandError, match=r"decode: x must be one of float8_e4m3fn.*got torch.float32"):
        f8.decode(x)


def test_a_number_is_a_tensorwise_scale() -> None:
    x, half = torch.randn(4, 16), torch.full((1, 1), 0.5)
    a, b = (f8.quantize(x, scale, E4M3FN) for scale in (0.5, half))
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(f8.dequantize(a, 0.5), f8.dequantize(b, half))
    with pytest.raises(OperandError, match=r"inv_scale must be float32; got 0\.1, which float32 does not hold"):
        f8.quantize(x, 0.1, E4M3FN)
    with pytest.raises(OperandError, match=r"\[4, 1\] for rowwise"):
        f8.quantize(x, 1, E4M3FN, "rowwise")

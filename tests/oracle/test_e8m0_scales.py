"""Scales of MXFP8: every rule of `E8M0Rule` in the definition, the oracle and all backends [MX-1]."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8ref.numpy as f8
from f8emu import interop
from f8emu.conformance.arrays import FRAMEWORKS, travelling
from f8emu.conformance.run.oracle import exact_subject
from f8emu.spec import E4M3FN, E5M2, FLOAT8, MXFP8, DelayedScaling, E8M0Rule, Format, Granularity, ScaleRule, SpecError
from tests.oracle.exactly import assert_same_bits, dtype_of

MX = Granularity.BLOCKWISE_1X32
_VERBS = ("amax", "scale_from_amax", "quantize", "dequantize", "initial_delayed_state", "update_delayed_state")
RULES = pytest.mark.parametrize("rule", E8M0Rule, ids=lambda rule: rule.value)
FORMATS = pytest.mark.parametrize("format", FLOAT8, ids=str)


def _numpy() -> Mapping[str, Callable[..., Any]]:
    import f8emu.numpy as numpy

    return {name: getattr(numpy, name) for name in _VERBS}


def _framework(name: str) -> Mapping[str, Callable[..., Any]]:
    module = pytest.importorskip(f"f8emu.{name}")
    framework = FRAMEWORKS[name](name)
    return {verb: travelling(framework, getattr(module, verb)) for verb in _VERBS}


BACKENDS: dict[str, Callable[[], Mapping[str, Callable[..., Any]]]] = {
    "exact": lambda: exact_subject().verbs,
    "numpy": _numpy,
    "torch": lambda: _framework("torch"),
    "jax": lambda: _framework("jax"),
}
BACKEND = pytest.mark.parametrize("backend", BACKENDS)


def byte_by_words(amax: float, format: Format, rule: E8M0Rule) -> int:
    """The byte by a search of all exponents, which shares nothing with the oracles."""
    if np.isnan(amax):
        return 255
    if amax == 0:
        return 0
    if np.isinf(amax) and rule is E8M0Rule.RCEIL:
        return 254
    value = Fraction(2) ** 128 if np.isinf(amax) else Fraction(amax)
    if rule is E8M0Rule.EVEN:  # the next number of so many fraction bits, where at least half of the way is gone
        near = int(np.floor(np.log2(float(value))))
        place = max(e for e in range(near - 2, near + 3) if Fraction(2) ** e <= value) - format.fraction_bits
        value = int(value / Fraction(2) ** place + Fraction(1, 2)) * Fraction(2) ** place
    near = int(np.floor(np.log2(float(value))))
    exponents = range(near - 20, near + 20)
    if rule is E8M0Rule.RCEIL:
        exponent = min(e for e in exponents if value <= Fraction(format.max) * Fraction(2) ** e)
    elif rule is E8M0Rule.CEIL:
        exponent = min(e for e in exponents if value <= Fraction(2) ** e) - format.max_exponent
    else:
        exponent = max(e for e in exponents if Fraction(2) ** e <= value) - format.max_exponent
    return min(max(exponent, -127), 127) + 127


def amaxes(format: Format) -> np.ndarray:
    """Magnitudes around every power of two, max times it, and the ties of EVEN; special ones."""
    powers = 2.0 ** np.r_[-149, -126:-110, 0, 110:128]
    ties = [1.0, format.max / 2.0**format.max_exponent, 2 - 2.0 ** -(format.fraction_bits + 1)]
    with np.errstate(over="ignore"):
        near = (powers[:, None] * ties).astype(np.float32).ravel()
    bits = np.unique((near.view(np.uint32)[:, None] + np.arange(-1, 2, dtype=np.int32).astype(np.uint32)).ravel())
    special = np.array([0.0, 2.0**-149, np.finfo(np.float32).max, np.inf, np.nan], np.float32)
    return np.concatenate([bits[bits < 0x7F800000].view(np.float32), special])


@cache
def bytes_by_words(format: Format, rule: E8M0Rule) -> np.ndarray:
    return np.array([byte_by_words(float(x), format, rule) for x in amaxes(format)], np.uint8)


@BACKEND
@RULES
@FORMATS
def test_scales(format: Format, rule: E8M0Rule, backend: str) -> None:
    amax, expected = amaxes(format), bytes_by_words(format, rule)
    inv_scale, scale = BACKENDS[backend]()["scale_from_amax"](amax, format, ScaleRule(e8m0=rule))
    assert scale.dtype == ml_dtypes.float8_e8m0fnu
    assert_same_bits(scale.view(np.uint8), expected)
    inverse = np.where(expected == 255, np.float32(np.nan), np.ldexp(np.float32(1), 127 - expected.astype(int)))
    inverse = np.where(np.isnan(inverse), np.uint32(0x7FFFFFFF).view(np.float32), inverse.astype(np.float32))
    assert_same_bits(inv_scale, inverse)


@BACKEND
@RULES
@pytest.mark.parametrize("format", (E4M3FN, E5M2), ids=str)
@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("shape", [(4, 70), (5, 1)], ids=str)
def test_by_element(shape: tuple[int, int], dtype: type, format: Format, rule: E8M0Rule, backend: str) -> None:
    """Amax, codes and values of every element from the words: its block of 32, a tail too, and corners of scales."""
    rng = np.random.default_rng(shape[1])
    rows, columns = np.indices(shape)
    x = rng.uniform(-1, 1, shape) * 2.0 ** (rows % 5 * 4 - columns // 32 * 9)
    x[0] *= 2.0**-120
    x[1:2] *= 2.0**124
    x[2:3, :3], x[3:4, :1] = np.nan, np.inf
    x = x.astype(np.float32).astype(dtype)
    verbs = BACKENDS[backend]()
    blocks = columns // 32
    expected = np.zeros((shape[0], -(-shape[1] // 32)), np.float32)
    np.maximum.at(expected, (rows, blocks), np.abs(x.astype(np.float32)))
    amax = verbs["amax"](x, MX)
    assert_same_bits(amax, f8.amax(x, MX))
    assert np.array_equal(amax, expected, equal_nan=True)
    inv_scale, scale = verbs["scale_from_amax"](amax, format, ScaleRule(e8m0=rule))
    codes = verbs["quantize"](x, inv_scale, format, MX)
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * inv_scale[rows, blocks]
        wanted = f8.cast(scaled, format)
        assert_same_bits(codes.view(np.uint8), wanted.view(np.uint8))
        values = wanted.astype(np.float32) * np.ldexp(1.0, scale.view(np.uint8).astype(int) - 127)[rows, blocks]
        values = np.where(scale.view(np.uint8)[rows, blocks] == 255, np.nan, values).astype(np.float32)
    assert np.array_equal(verbs["dequantize"](codes, scale, MX), values, equal_nan=True)
    assert codes.dtype == dtype_of(format)


@BACKEND
def test_refusals(backend: str) -> None:
    verbs, rule = BACKENDS[backend](), ScaleRule(e8m0=E8M0Rule.RCEIL)
    ones = np.ones((1, 1), np.float32)
    with pytest.raises(SpecError, match=r"E8M0 scales .* margin 1"):
        verbs["scale_from_amax"](ones, E4M3FN, rule, margin=1)
    delayed = DelayedScaling(history_length=2)
    with pytest.raises(SpecError, match=r"E8M0 scales .* delayed scaling"):
        verbs["update_delayed_state"](verbs["initial_delayed_state"](delayed), ones, E4M3FN, rule, delayed)


def test_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own operations and the engine give the same bytes."""
    torch = interop.require_torch("test")
    from f8emu.torch import cpu_casts, scale_from_amax

    amax = torch.from_numpy(amaxes(E4M3FN))
    for rule in E8M0Rule:
        by_engine = scale_from_amax(amax, E4M3FN, ScaleRule(e8m0=rule))
        with monkeypatch.context() as patch:
            patch.setattr(cpu_casts, "takes", lambda x: False)
            plain = scale_from_amax(amax, E4M3FN, ScaleRule(e8m0=rule))
        assert torch.equal(plain.scale.view(torch.uint8), by_engine.scale.view(torch.uint8))
        assert torch.equal(plain.inv_scale.view(torch.int32), by_engine.inv_scale.view(torch.int32))


@pytest.mark.parametrize("shape", [(40, 70), (64, 1)], ids=str)
def test_both_operands_of_a_layers_matrix(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers of torch and JAX cast, in one reading and in several, equals the oracle's verbs for either side."""
    torch, jax = interop.require_torch("test"), pytest.importorskip("jax")
    from f8emu.jax.layer.operands import cast_matrix as by_jax
    from f8emu.torch import cpu_casts
    from f8emu.torch.casts.operand import cast_matrix as by_torch

    x = (np.random.default_rng(5).standard_normal(shape) * np.exp2(np.arange(shape[1]) % 40 - 20)).astype(np.float32)
    plan, made = MXFP8.cast_plans.input.both, {}
    made["engine"] = by_torch(torch.from_numpy(x), plan)
    monkeypatch.setattr(cpu_casts, "takes", lambda x: False)
    made["torch"] = by_torch(torch.from_numpy(x), plan)
    made["jax"] = by_jax(jax.numpy.asarray(x), plan, None, ((), ()))[:2]
    for name, operands in made.items():
        for side, operand in zip((x, x.T), operands, strict=True):
            inv_scale, scale = f8.scale_from_amax(f8.amax(side, MX), E4M3FN, plan.rule)
            codes = f8.quantize(side, inv_scale, E4M3FN, MX)
            for array, expected in ((operand.codes, codes), (operand.scale, scale)):
                array = np.asarray(array) if name == "jax" else interop.to_numpy(array)
                assert_same_bits(array.view(np.uint8), expected.view(np.uint8))

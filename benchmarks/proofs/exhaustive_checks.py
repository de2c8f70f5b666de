"""What a float8 cast and a scale must be, proved without any backend, and the backends to be checked.

A cast is monotone, so each format and overflow policy is a table of the float32 bit patterns where the code
changes, worked out with exact fractions from the spec (`exact_steps`). A scale is proved to be a correctly rounded
quotient with 64-bit integers (`is_rounded_quotient`).
"""

import importlib
import math
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from f8emu.spec import FLOAT32, Format, Overflow, ScaleRule

EXAMPLES = 20
"""Differences that are shown for each backend, format and policy."""

_HIDDEN = 1 << FLOAT32.fraction_bits

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


class Backend(Protocol):
    """One implementation under test, on numpy arrays."""

    canonical_nan: bool
    """Whether NaN must be the one code of f8emu; otherwise any NaN code is equal."""

    def cast(self, x: F32, fmt: Format, overflow: Overflow) -> U8: ...

    def scales(self, amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32] | None: ...


class NumpyBackend:
    canonical_nan = True

    def __init__(self) -> None:
        self.verbs = importlib.import_module("f8ref.numpy")

    def cast(self, x: F32, fmt: Format, overflow: Overflow) -> U8:
        return self.verbs.cast(x, fmt, overflow=overflow).view(np.uint8)

    def scales(self, amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32]:
        return self.verbs.scale_from_amax(amax, fmt, rule)


class JaxBackend:
    """Jitted, on the first device of `platform`."""

    canonical_nan = True

    def __init__(self, platform: str = "cpu") -> None:
        import jax

        self.jax, self.verbs = jax, importlib.import_module("f8emu.jax")
        self.device = jax.devices(platform)[0]
        self.compiled: dict[tuple[object, ...], Callable[..., Any]] = {}

    def cast(self, x: F32, fmt: Format, overflow: Overflow) -> U8:
        if (fmt, overflow) not in self.compiled:
            self.compiled[fmt, overflow] = self.jax.jit(lambda v: self.verbs.cast(v, fmt, overflow=overflow))
        return np.asarray(self.compiled[fmt, overflow](self.jax.device_put(x, self.device))).view(np.uint8)

    def scales(self, amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32]:
        if (fmt, rule) not in self.compiled:
            self.compiled[fmt, rule] = self.jax.jit(lambda v: self.verbs.scale_from_amax(v, fmt, rule))
        inv_scale, scale = self.compiled[fmt, rule](self.jax.device_put(amax, self.device))
        return np.asarray(inv_scale), np.asarray(scale)


class TorchBackend:
    """Eager, one thread."""

    canonical_nan = True

    def __init__(self, device: str = "cpu") -> None:
        import torch

        torch.set_num_threads(1)
        self.torch, self.device = torch, device
        self.verbs = importlib.import_module("f8emu.torch")

    def cast(self, x: F32, fmt: Format, overflow: Overflow) -> U8:
        codes = self.verbs.cast(self.torch.from_numpy(x).to(self.device), fmt, overflow=overflow)
        return codes.view(self.torch.uint8).cpu().numpy()

    def scales(self, amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32]:
        inv_scale, scale = self.verbs.scale_from_amax(self.torch.from_numpy(amax).to(self.device), fmt, rule)
        return inv_scale.cpu().numpy(), scale.cpu().numpy()


class MlDtypesWitness:
    """The cast of ml_dtypes, from outside. It does not saturate: where the policy does, values are clamped first."""

    canonical_nan = False

    def cast(self, x: F32, fmt: Format, overflow: Overflow) -> U8:
        if overflow is Overflow.SATURATE:
            x = np.clip(x, np.float32(-fmt.max), np.float32(fmt.max))
        with np.errstate(all="ignore"):
            return x.astype(getattr(ml_dtypes, fmt.name)).view(np.uint8)

    def scales(self, amax: F32, fmt: Format, rule: ScaleRule) -> None:
        return None


BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "f8ref.numpy": NumpyBackend,
    "f8emu.jax": JaxBackend,
    "f8emu.torch": TorchBackend,
    "ml_dtypes": MlDtypesWitness,
    "f8emu.jax-gpu": lambda: JaxBackend("gpu"),
    "f8emu.torch-cuda": lambda: TorchBackend("cuda"),
}
DEFAULT_BACKENDS = tuple(BACKENDS)[:4]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one backend, one format and one policy or rule."""

    backend: str
    format: str
    kind: str
    """The overflow policy of a cast; `power_of_two` or `quotient` of a scale."""
    inputs: int = 0
    differences: int = 0
    other_nan_codes: int = 0
    """NaN where NaN belongs, but with another code than f8emu's; a difference where the backend must be canonical."""
    cpu_seconds: float = 0.0
    """Inside the backend, summed over the workers."""
    examples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        speed = f"{1e9 * self.cpu_seconds / self.inputs:.2f} ns of CPU each"
        nan = f", {self.other_nan_codes} other NaN codes" if self.other_nan_codes else ""
        kind = f"{self.backend:16} {self.format:14} {self.kind:12}"
        return f"{kind} {self.differences} of {self.inputs} differ{nan}, {speed}"

    def add(self, other: "Tally") -> None:
        self.inputs += other.inputs
        self.differences += other.differences
        self.other_nan_codes += other.other_nan_codes
        self.cpu_seconds += other.cpu_seconds
        self.examples = (self.examples + other.examples)[:EXAMPLES]


def exact_steps(fmt: Format, overflow: Overflow) -> tuple[U32, U8]:
    """The exact cast: the ascending float32 bit patterns where its code changes, and the code from each on.

    Codes of one sign are ordered as their values. Between the values of codes c and c + 1 the code changes at their
    midpoint, which goes to the even one. `max_code + 1` counts as a number here: overflow begins at the midpoint below.
    """
    beyond = {
        Overflow.SATURATE: fmt.max_code,
        Overflow.NONFINITE: fmt.nan_code if fmt.infinity_code is None else fmt.infinity_code,
    }[overflow]
    starts, codes = [0], [0]
    for code in range(1, fmt.max_code + 2):
        midpoint = (_value(code - 1, fmt) + _value(code, fmt)) / 2
        starts.append(_float32_bits(midpoint) + code % 2)
        codes.append(code if code <= fmt.max_code else beyond)
    starts.append(FLOAT32.magnitude_mask - FLOAT32.fraction_mask + 1)  # the first NaN, after infinity
    codes.append(fmt.nan_code)
    negative = [code if _is_nan_code(fmt)[code] else code | fmt.sign_mask for code in codes]
    both = np.array(starts, np.uint32)
    return np.concatenate([both, both | np.uint32(FLOAT32.sign_mask)]), np.array(codes + negative, np.uint8)


def _value(code: int, fmt: Format) -> Fraction:
    """A positive code as a number, specials not treated as such."""
    exponent_field, fraction = code >> fmt.fraction_bits, code & fmt.fraction_mask
    significand = fraction + (fmt.fraction_mask + 1 if exponent_field else 0)
    return significand * Fraction(2) ** (max(exponent_field, 1) - fmt.bias - fmt.fraction_bits)


def _float32_bits(value: Fraction) -> int:
    assert Fraction(float(value)) == value, "midpoints of float8 are float32 numbers"
    return struct.unpack("<I", struct.pack("<f", float(value)))[0]


def _is_nan_code(fmt: Format) -> npt.NDArray[np.bool_]:
    magnitude = np.arange(256) & fmt.magnitude_mask
    return magnitude > (fmt.max_code if fmt.infinity_code is None else fmt.infinity_code)


def check_cast(name: str, backend: Backend, bits: U32, fmt: Format, overflow: Overflow) -> Tally:
    """The cast of ascending bit patterns against `exact_steps`."""
    starts, codes = exact_steps(fmt, overflow)
    places = np.searchsorted(bits, starts)
    expected = np.repeat(codes, np.diff(places, append=bits.size))
    begin = time.process_time()
    observed = backend.cast(bits.view(np.float32), fmt, overflow)
    tally = Tally(backend=name, format=fmt.name, kind=overflow.value, inputs=bits.size)
    tally.cpu_seconds = time.process_time() - begin
    if observed.shape != expected.shape:
        raise ValueError(f"{name}: cast of {expected.shape} gave {observed.shape}")
    if np.array_equal(observed, expected):
        return tally
    is_nan = _is_nan_code(fmt)
    wrong = observed != expected
    other_nan = wrong & is_nan[observed] & is_nan[expected]
    tally.other_nan_codes = int(np.count_nonzero(other_nan))
    if not backend.canonical_nan:
        wrong &= ~other_nan
    tally.differences = int(np.count_nonzero(wrong))
    for i in np.flatnonzero(wrong)[:EXAMPLES]:
        tally.examples.append(f"0x{bits[i]:08x} => 0x{observed[i]:02x} expected: 0x{expected[i]:02x}")
    return tally


def is_rounded_quotient(numerator: int, denominator: F32, quotient: F32) -> npt.NDArray[np.bool_]:
    """Whether each `quotient` is `numerator / denominator` rounded to nearest-even, by integers alone.

    With `denominator = d 2^x` and `quotient = q 2^y`, d and q of 24 bits, the error in units of the last place of the
    quotient, times d, is the integer `numerator 2^(-x - y) - q d`.
    """
    d, x = _significand(denominator)
    q, y = _significand(quotient)
    shift = -x - y
    fits = (shift >= 0) & (shift + math.ceil(math.log2(numerator)) < 63) & (q > 0)
    error = (np.int64(numerator) << np.where(fits, shift, 0)) - q * d
    near = (2 * abs(error) < d) | ((2 * abs(error) == d) & (q % 2 == 0))
    # below a power of two the places are half as far apart
    near &= (q != _HIDDEN) | (error >= 0) | (4 * abs(error) <= d)
    return fits & near


def _significand(x: F32) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """x as integer * 2^exponent; 0 for what is not a positive normal number."""
    bits = x.view(np.uint32).astype(np.int64)
    exponent_field = bits >> FLOAT32.fraction_bits
    normal = (exponent_field > 0) & (exponent_field < 255)
    significand = np.where(normal, (bits & FLOAT32.fraction_mask) | _HIDDEN, 0)
    return significand, exponent_field - FLOAT32.bias - FLOAT32.fraction_bits


def check_scales(name: str, backend: Backend, amax: F32, fmt: Format, rule: ScaleRule) -> Tally | None:
    """Both factors of a scale: correctly rounded quotients; with `power_of_two`, the first one cut."""
    begin = time.process_time()
    scales = backend.scales(amax, fmt, rule)
    if scales is None:
        return None
    kind = "power_of_two" if rule.power_of_two else "quotient"
    tally = Tally(backend=name, format=fmt.name, kind=kind, inputs=amax.size)
    tally.cpu_seconds = time.process_time() - begin
    inv_scale, scale = scales
    quotient = inv_scale
    if rule.power_of_two:
        plain = backend.scales(amax, fmt, replace(rule, power_of_two=False))
        assert plain is not None
        quotient = plain[0]
    right = is_rounded_quotient(int(fmt.max), amax, quotient)
    if rule.power_of_two:
        right &= inv_scale.view(np.uint32) == quotient.view(np.uint32) & np.uint32(0xFF800000)
    right &= is_rounded_quotient(1, inv_scale, scale)
    tally.differences = int(np.count_nonzero(~right))
    for i in np.flatnonzero(~right)[:EXAMPLES]:
        found = f"0x{inv_scale.view(np.uint32)[i]:08x} 0x{scale.view(np.uint32)[i]:08x}"
        tally.examples.append(f"0x{amax.view(np.uint32)[i]:08x} => {found}")
    return tally

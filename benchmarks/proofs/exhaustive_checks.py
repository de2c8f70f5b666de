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
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from f8emu.interop import to_numpy
from f8emu.spec import FLOAT32, Format, Overflow, ScaleRule

EXAMPLES = 20  # differences that are shown for each backend, format and policy

_HIDDEN = 1 << FLOAT32.fraction_bits

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


class Backend(NamedTuple):
    """One implementation under test, on numpy arrays."""

    cast: Callable[[F32, Format, Overflow], U8]
    scales: Callable[[F32, Format, ScaleRule], tuple[F32, F32]] | None  # None: it has no scales
    # Whether NaN must be the one code of f8emu; otherwise any NaN code is equal.
    canonical_nan: bool = True
    policies: tuple[Overflow, ...] = tuple(Overflow)


def numpy_backend() -> Backend:
    verbs = importlib.import_module("f8ref.numpy")
    return Backend(lambda x, fmt, overflow: verbs.cast(x, fmt, overflow=overflow).view(np.uint8), verbs.scale_from_amax)


def native_backend() -> Backend:
    """The engine in C, one thread: its cast is `quantize`, of which a factor of 1 changes no value."""
    emulation = importlib.import_module("f8emu.numpy.emulation")
    unit = np.ones((1, 1), np.float32)

    def cast(x: F32, fmt: Format, overflow: Overflow) -> U8:
        return emulation.quantize(x[None], unit, fmt, width=None)[0].view(np.uint8)

    return Backend(cast, emulation.scale_from_amax, policies=(Overflow.SATURATE,))


def jax_backend(platform: str = "cpu") -> Backend:
    """Jitted, on the first device of `platform`."""
    import jax

    verbs, device = importlib.import_module("f8emu.jax"), jax.devices(platform)[0]
    jitted_cast = jax.jit(lambda x, fmt, overflow: verbs.cast(x, fmt, overflow=overflow), static_argnums=(1, 2))
    jitted_scales = jax.jit(verbs.scale_from_amax, static_argnums=(1, 2))

    def cast(x: F32, fmt: Format, overflow: Overflow) -> U8:
        return np.asarray(jitted_cast(jax.device_put(x, device), fmt, overflow)).view(np.uint8)

    def scales(amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32]:
        inv_scale, scale = jitted_scales(jax.device_put(amax, device), fmt, rule)
        return np.asarray(inv_scale), np.asarray(scale)

    return Backend(cast, scales)


def torch_backend(device: str = "cpu") -> Backend:
    """Eager, one thread."""
    import torch

    torch.set_num_threads(1)
    verbs = importlib.import_module("f8emu.torch")

    def cast(x: F32, fmt: Format, overflow: Overflow) -> U8:
        codes = verbs.cast(torch.from_numpy(x).to(device), fmt, overflow=overflow)
        return codes.view(torch.uint8).cpu().numpy()

    def scales(amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32]:
        inv_scale, scale = verbs.scale_from_amax(torch.from_numpy(amax).to(device), fmt, rule)
        return inv_scale.cpu().numpy(), to_numpy(scale)

    return Backend(cast, scales)


def ml_dtypes_witness() -> Backend:
    """The cast of ml_dtypes, from outside. It does not saturate: where the policy does, values are clamped first."""

    def cast(x: F32, fmt: Format, overflow: Overflow) -> U8:
        if overflow is Overflow.SATURATE:
            x = np.clip(x, np.float32(-fmt.max), np.float32(fmt.max))
        with np.errstate(all="ignore"):
            return x.astype(getattr(ml_dtypes, fmt.name)).view(np.uint8)

    return Backend(cast, None, canonical_nan=False)


BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "f8ref.numpy": numpy_backend,
    "f8emu.native": native_backend,
    "f8emu.jax": jax_backend,
    "f8emu.torch": torch_backend,
    "ml_dtypes": ml_dtypes_witness,
    "f8emu.jax-gpu": lambda: jax_backend("gpu"),
    "f8emu.torch-cuda": lambda: torch_backend("cuda"),
}
DEFAULT_BACKENDS = tuple(BACKENDS)[:5]


@dataclass(slots=True)
class Tally:
    """Counts of one backend, one format and one policy or rule."""

    backend: str
    format: str
    kind: str  # the overflow policy of a cast; `power_of_two` or `quotient` of a scale
    inputs: int = 0
    differences: int = 0
    # NaN where NaN belongs, but with another code than f8emu's; a difference where the backend must be canonical.
    other_nan_codes: int = 0
    cpu_seconds: float = 0.0  # inside the backend, summed over the workers
    examples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        speed = f"{1e9 * self.cpu_seconds / self.inputs:.2f} ns of CPU each"
        nan = f", {self.other_nan_codes} other NaN codes" if self.other_nan_codes else ""
        kind = f"{self.backend:16} {self.format:14} {self.kind:12}"
        return "\n    ".join([f"{kind} {self.differences} of {self.inputs} differ{nan}, {speed}", *self.examples])

    def add(self, other: "Tally") -> None:
        for name in ("inputs", "differences", "other_nan_codes", "cpu_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
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
    # 1. The positive half: from the midpoint below a code on, or one bit pattern above it where the tie goes down.
    starts, codes = [0], [0]
    for code in range(1, fmt.max_code + 2):
        midpoint = (_value(code - 1, fmt) + _value(code, fmt)) / 2
        starts.append(_float32_bits(midpoint) + code % 2)
        codes.append(code if code <= fmt.max_code else beyond)
    starts.append(FLOAT32.magnitude_mask - FLOAT32.fraction_mask + 1)  # the first NaN, after infinity
    codes.append(fmt.nan_code)
    # 2. The negative half has the same steps, and the sign bit in every code but that of NaN.
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
    assert observed.shape == expected.shape, f"{name}: cast of {expected.shape} gave {observed.shape}"
    if np.array_equal(observed, expected):
        return tally
    # Another NaN code is a difference only where the backend's must be canonical.
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
    if backend.scales is None:
        return None
    kind = "power_of_two" if rule.power_of_two else "quotient"
    tally = Tally(backend=name, format=fmt.name, kind=kind, inputs=amax.size)
    begin = time.process_time()
    inv_scale, scale = backend.scales(amax, fmt, rule)
    tally.cpu_seconds = time.process_time() - begin
    quotient = backend.scales(amax, fmt, replace(rule, power_of_two=False))[0] if rule.power_of_two else inv_scale
    right = is_rounded_quotient(int(fmt.max), amax, quotient) & is_rounded_quotient(1, inv_scale, scale)
    if rule.power_of_two:
        right &= inv_scale.view(np.uint32) == quotient.view(np.uint32) & np.uint32(0xFF800000)
    tally.differences = int(np.count_nonzero(~right))
    for i in np.flatnonzero(~right)[:EXAMPLES]:
        codes = " ".join(f"0x{x.view(np.uint32)[i]:08x}" for x in (inv_scale, scale))
        tally.examples.append(f"0x{amax.view(np.uint32)[i]:08x} => {codes}")
    return tally

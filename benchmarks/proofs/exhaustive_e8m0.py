"""What an E8M0 scale must be, proved without any backend: the float32 amaxes at which its byte grows, by fractions."""

import struct
import time
from fractions import Fraction

import numpy as np

from benchmarks.proofs.exhaustive_checks import EXAMPLES, F32, U8, U32, Backend, Tally
from f8emu.conformance.run.oracle import exact_subject
from f8emu.spec import E8M0FNU, FLOAT32, E8M0Rule, Format, ScaleRule

_INFINITY = FLOAT32.magnitude_mask ^ FLOAT32.fraction_mask


def steps(fmt: Format, rule: E8M0Rule) -> tuple[U32, U8]:
    """The ascending float32 bit patterns where the byte changes, and the byte from each on."""
    starts, codes = [0], [0]
    for byte in range(1, E8M0FNU.nan_code):
        power = Fraction(2) ** (byte - E8M0FNU.bias)
        least, is_above = {
            E8M0Rule.FLOOR: (power * 2**fmt.max_exponent, False),
            E8M0Rule.CEIL: (power * 2**fmt.max_exponent / 2, True),
            E8M0Rule.EVEN: (power * 2**fmt.max_exponent * (1 - Fraction(1, 4 << fmt.fraction_bits)), False),
            E8M0Rule.RCEIL: (power * Fraction(fmt.max) / 2, True),
        }[rule]
        if least >= 2**128:
            break
        (bits,) = struct.unpack("<I", struct.pack("<f", float(least)))
        starts.append(bits + is_above)
        codes.append(byte)
    codes += [254 if rule is E8M0Rule.RCEIL else 255 - fmt.max_exponent, E8M0FNU.nan_code]
    return np.array([*starts, _INFINITY, _INFINITY + 1], np.uint32), np.array(codes, np.uint8)


def exact_backend() -> Backend:
    """The definition, one amax after the other; too slow for casts."""
    exact = exact_subject().verbs
    return Backend(lambda x, fmt, overflow: x.view(np.uint8), exact["scale_from_amax"], policies=())


def check_e8m0(name: str, backend: Backend, bits: U32, fmt: Format, rule: E8M0Rule) -> Tally | None:
    """Byte and inv_scale of ascending amaxes against `steps`."""
    if backend.scales is None:
        return None
    begin = time.process_time()
    inv_scale, scale = backend.scales(bits.view(np.float32), fmt, ScaleRule(e8m0=rule))
    seconds = time.process_time() - begin
    expected = _expected(bits, *steps(fmt, rule))
    inverse = np.ldexp(np.float32(1), E8M0FNU.bias - expected.astype(np.int32)).view(np.uint32)
    inverse = np.where(expected == E8M0FNU.nan_code, np.uint32(FLOAT32.nan_code), inverse)
    observed = scale.view(np.uint8)
    wrong = (observed != expected) | (inv_scale.view(np.uint32) != inverse)
    return _tally(Tally(name, fmt.name, rule.value, cpu_seconds=seconds), bits, observed, expected, wrong)


def check_cvt(bits: U32, fmt: Format) -> Tally:
    """`cvt.rp.satfinite.ue8m0` of `amax * fl(1/max)`, as cuda_fp8.hpp 13.0 computes it, against RCEIL's `steps`.

    One amax differs, and must: the product of the first above `max * 2^-127` rounds to 2^-127, whose byte is 0.
    """
    begin = time.process_time()
    with np.errstate(invalid="ignore"):
        observed = converted(bits.view(np.float32) * (np.float32(1) / np.float32(fmt.max)))
    seconds = time.process_time() - begin
    starts, codes = steps(fmt, E8M0Rule.RCEIL)
    starts[1] += 1
    expected = _expected(bits, starts, codes)
    tally = Tally("cuda_fp8.hpp", fmt.name, "rceil", cpu_seconds=seconds)
    return _tally(tally, bits, observed, expected, observed != expected)


def converted(x: F32) -> U8:
    """`__nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf)` of numbers without a sign, by the header's steps."""
    # 1. Up to a bfloat16. 2. Its exponent, up if there is a fraction and x is above 2^-127. 3. No NaN of a number.
    bits = x.view(np.uint32)
    half = np.where(bits > _INFINITY, 0x7FFF, (bits >> 16) + ((bits < _INFINITY) & (bits & 0xFFFF != 0)))
    byte = (half >> 7) + ((half & 0x7F != 0) & (half > 0x40) & (half < 0x7F80))
    return (byte - ((half <= 0x7F80) & (byte == 255))).astype(np.uint8)


def _expected(bits: U32, starts: U32, codes: U8) -> U8:
    return np.repeat(codes, np.diff(np.searchsorted(bits, starts), append=bits.size))


def _tally(tally: Tally, bits: U32, observed: U8, expected: U8, wrong: np.ndarray) -> Tally:
    tally.inputs, tally.differences = bits.size, int(np.count_nonzero(wrong))
    for i in np.flatnonzero(wrong)[:EXAMPLES]:
        tally.examples.append(f"0x{bits[i]:08x} => byte {observed[i]} expected: {expected[i]}")
    return tally

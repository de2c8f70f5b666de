"""The known traps of torch and JAX: casts, division, powers of two, subnormals, and what `torch._scaled_mm` adds up.

A trap is a row of a table: a call on arrays of the library, the IEEE values that it should give, and what f8emu does.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from f8emu.spec.formats import E4M3FN, E5M2

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One measured behaviour of one library on one device."""

    subject: str
    """Library and device: `torch cpu`, `torch cuda`, `jax cpu`, `jax gpu`."""
    name: str
    observed: str
    expected: str
    agrees: bool
    f8emu: str
    """What f8emu does so that its bits do not depend on this behaviour."""
    relied_on: bool = False
    """Whether f8emu's bits depend on it; a deviation is then a fault of this machine or of f8emu."""


class Trap(NamedTuple):
    """One row: `call(xp, *given)`, where `xp` is torch or jax.numpy."""

    name: str
    call: Callable[..., Any]
    given: tuple[np.ndarray, ...]
    expected: np.ndarray
    """Float32 numbers, where any NaN equals any NaN, or float8 codes as uint8."""
    f8emu: str
    relied_on: bool = False
    is_compiled: bool = False
    """Whether `jax.jit` may rewrite the expression: contraction to a fused multiply-add, reassociation."""


def probe_torch(device: str) -> list[Probe]:
    """All probes of torch on `device` (`cpu` or `cuda`); raises what torch raises."""
    import torch

    def run(trap: Trap) -> np.ndarray:
        found = trap.call(torch, *(torch.from_numpy(x).to(device) for x in trap.given))
        return (found.view(torch.uint8) if found.dtype.itemsize == 1 else found).cpu().numpy()

    subject = f"torch {device}"
    with torch.no_grad():
        return [*_probed(subject, [*_casts(_TORCH_CLAMPS), *_torch_traps()], run), *_scaled_mm(subject, device)]


def probe_jax(platform: str) -> list[Probe]:
    """All probes of JAX on the first device of `platform` (`cpu` or `gpu`); raises what JAX raises."""
    import jax
    import jax.numpy as jnp

    def run(trap: Trap) -> np.ndarray:
        def call(*given: jax.Array) -> Any:
            return trap.call(jnp, *given)

        found = np.asarray((jax.jit(call) if trap.is_compiled else call)(*map(jnp.asarray, trap.given)))
        return found.view(np.uint8) if found.itemsize == 1 else found

    place: AbstractContextManager[Any] = jax.default_device(jax.devices(platform)[0])
    with place:
        return _probed(f"jax {platform}", [*_casts(_JAX_CLAMPS), *_jax_traps()], run)


def _probed(subject: str, traps: Iterable[Trap], run: Callable[[Trap], np.ndarray]) -> list[Probe]:
    probes: list[Probe] = []
    for trap in traps:
        found, wanted = run(trap), trap.expected
        if wanted.dtype == np.uint8:
            observed, expected = (" ".join(f"0x{code:02x}" for code in codes) for codes in (found, wanted))
            agrees = observed == expected
        else:
            same = (found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))
            wrong = int(np.count_nonzero(~same))
            share = f" ({100 * wrong / same.size:.3g} %)" if wrong else ""
            observed, expected, agrees = f"{wrong} of {same.size} wrong{share}", "0 wrong", wrong == 0
        told = {"observed": observed, "expected": expected, "agrees": agrees}
        probes.append(Probe(subject=subject, name=trap.name, f8emu=trap.f8emu, relied_on=trap.relied_on, **told))
    return probes


# 1 The tables

_TORCH_CLAMPS = "clamps first; the overflow policy is an argument"
_JAX_CLAMPS = "rounds with integers; the overflow policy is an argument"
_CANONICAL = "gives one NaN code, and compares NaN with NaN"
_DIVIDES = "divides in float64, then rounds to float32"
_INTEGERS = "computes on the integer bits, which XLA leaves alone"
_NAN_LENGTH = 4096
"""Elements from which XLA's CPU maximum has been seen to lose a NaN."""
_MAX = E4M3FN.max
# 65,536 numbers in [1, 2), spread over all significands: the stride is odd, so low bits vary too
_STRIDED = np.arange(1 << 16, dtype=np.uint32) * np.uint32(127)
_ONES = (np.uint32(0x3F800000) + _STRIDED).view(np.float32)
_SUBNORMAL = _STRIDED[1:].view(np.float32)  # all below 2^-126
# By integers, ties to even: the flush of a single thread is numpy's too.
_HALVES, _DOUBLES = (x.view(np.float32) for x in ((_STRIDED >> 1) + (_STRIDED & _STRIDED >> 1 & 1), _STRIDED << 1))
_POWERS = (np.arange(1, 255, dtype=np.uint32) << np.uint32(23)).view(np.float32)  # 2^-126 to 2^127
_BELOW = (_POWERS[1:].view(np.uint32) - np.uint32(1)).view(np.float32)  # their floors are all powers but the last
_LOG2 = "exp2(floor(log2(s))), s just below 2^k"


def _floored_power(xp: Any, x: Any) -> Any:
    return xp.exp2(xp.floor(xp.log2(x)))


def _casts(clamps: str) -> Iterator[Trap]:
    for values, name, format, code, how in (
        ([500, np.inf], "500, inf", E4M3FN, E4M3FN.max_code, clamps),
        ([1e6, np.inf], "1e6, inf", E5M2, E5M2.max_code, clamps),
        ([np.nan, -np.nan], "NaN, -NaN", E4M3FN, E4M3FN.nan_code, _CANONICAL),
        ([np.nan, -np.nan], "NaN, -NaN", E5M2, E5M2.nan_code, _CANONICAL),
    ):

        def cast(xp: Any, x: Any, to: str = format.name) -> Any:
            return x.to(getattr(xp, to)) if hasattr(x, "to") else x.astype(to)

        given, expected = np.array(values, np.float32), np.full(2, code, np.uint8)
        yield Trap(f"cast {name} to {format.name}", cast, (given,), expected, how)


def _torch_traps() -> Iterator[Trap]:
    no_tie = np.array([1 + 2**-4 + 2**-40])
    just_above = np.array([0x39], np.uint8)  # the tie is between 0x38 (1.0) and 0x39 (1.125); by float32 it is one
    halves = "multiplies in float32: undo torch.set_flush_denormal(True)"
    quotient, inverse = np.float32(_MAX) / _ONES, np.float32(1) / _ONES

    def cast(xp: Any, x: Any) -> Any:
        return x.to(xp.float8_e4m3fn)

    def divide(xp: Any, x: Any) -> Any:
        return xp.div(xp.full_like(x, _MAX), x)

    def divide_in_float64(_: Any, x: Any) -> Any:
        return (_MAX / x.double()).float()

    rows: list[tuple[str, Callable[..., Any], np.ndarray, np.ndarray, str, bool]] = [
        ("cast float64 1 + 2^-4 + 2^-40 (no tie)", cast, no_tie, just_above, "refuses float64", False),
        ("448.0 / t, python scalar by tensor", lambda _, x: _MAX / x, _ONES, quotient, _DIVIDES, False),
        ("torch.div of two tensors", divide, _ONES, quotient, _DIVIDES, False),
        ("t.reciprocal()", lambda _, x: x.reciprocal(), _ONES, inverse, _DIVIDES, False),
        ("448 / t in float64, then float32", divide_in_float64, _ONES, quotient, "takes its scales from it", True),
        (_LOG2, _floored_power, _BELOW, _POWERS[:-1], "clears the fraction bits of the integer pattern", False),
        ("subnormal * 0.5", lambda _, x: x * 0.5, _SUBNORMAL, _HALVES[1:], halves, True),
    ]
    return (Trap(name, call, (x,), expected, how, relied_on) for name, call, x, expected, how, relied_on in rows)


def _jax_traps() -> Iterator[Trap]:
    exponents = np.arange(-126, 128, dtype=np.float32)
    with_nan = np.ones(_NAN_LENGTH, np.float32)
    with_nan[_NAN_LENGTH // 2] = np.nan
    nan, largest = np.array([np.nan], np.float32), lambda xp, x: xp.max(x)[None]
    y, z = _ONES[::-1].copy(), np.roll(_ONES, 12345)
    c1, c2 = np.float32(1.1), np.float32(0.3)
    rows: list[tuple[str, Callable[..., Any], tuple[np.ndarray, ...], np.ndarray, bool]] = [
        ("subnormal * 2", lambda _, x: x * 2, (_SUBNORMAL,), _DOUBLES[1:], False),
        ("x / 448, array by scalar", lambda _, x: x / _MAX, (_ONES,), _ONES / np.float32(_MAX), False),
        ("448 / x, scalar by array", lambda _, x: _MAX / x, (_ONES,), np.float32(_MAX) / _ONES, False),
        ("exp2(k), k from -126 to 127", lambda xp, x: xp.exp2(x), (exponents,), _POWERS, False),
        (_LOG2, _floored_power, (_BELOW,), _POWERS[:-1], False),
        (f"max of {_NAN_LENGTH - 1} float32 with a NaN", largest, (with_nan[1:],), nan, False),
        (f"max of {_NAN_LENGTH} float32 with a NaN", largest, (with_nan,), nan, False),
        ("a * b + c under jit, two roundings", lambda _, a, b, c: a * b + c, (_ONES, y, z), _ONES * y + z, True),
        ("(x * 1.1) * 0.3 under jit, in that order", lambda _, x: (x * c1) * c2, (_ONES,), (_ONES * c1) * c2, True),
    ]
    return (
        Trap(name, call, given, expected, _INTEGERS, is_compiled=is_compiled)
        for name, call, given, expected, is_compiled in rows
    )


# 2 The GEMM


def _scaled_mm(subject: str, device: str) -> list[Probe]:
    """What `torch._scaled_mm` adds up: where the scales go [EPI-1], and how many bits a step keeps [ACC-3]."""
    import torch

    emulates = "emulates it where there is no float8 hardware"
    # Codes of finite numbers and both signs: a NaN would hide where the scales go.
    generator = np.random.default_rng(0)
    magnitudes = generator.integers(0, 0x7F, (2, 16, 32), dtype=np.uint8)
    codes = magnitudes | generator.integers(0, 2, (2, 16, 32), dtype=np.uint8) << np.uint8(7)
    a, b = (torch.from_numpy(c).view(torch.float8_e4m3fn) for c in codes)
    scale_a, scale_b = (torch.tensor(s, dtype=torch.float32) for s in (0.0137, 0.0071))
    # 256 * 256 beside 31 ones: on Hopper each 1 lies below 2^(16 - 13) and is cut [ACC-3]; float32 gives 65567
    cut = torch.ones(16, 32)
    cut[:, 0] = 256.0
    cut = cut.to(torch.float8_e4m3fn)
    one = torch.ones(())

    def product(*operands: "torch.Tensor") -> "torch.Tensor":
        x, y, s, t = (v.to(device) for v in operands)
        return torch.ops.aten._scaled_mm(x, y.t(), s, t, out_dtype=torch.float32).cpu()

    def told(name: str, observed: str, expected: str) -> Probe:
        agrees = observed == expected
        return Probe(subject=subject, name=name, observed=observed, expected=expected, agrees=agrees, f8emu=emulates)

    # a device without float8 refuses, and that is what is told
    try:
        scaled, bare = product(a, b, scale_a, scale_b), product(a, b, one, one)
        cut_sum = float(product(cut, cut, one, one)[0, 0])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return [told("torch._scaled_mm", f"refused: {str(error).strip().splitlines()[0]}", "runs")]
    expected = (bare * (scale_a * scale_b)).numpy()
    after = Trap("_scaled_mm: scales after the sum [EPI-1]", product, (), expected, emulates)
    cut_name = "_scaled_mm: 256*256 + 31 ones [ACC-3]"
    return [*_probed(subject, [after], lambda _: scaled.numpy()), told(cut_name, f"{cut_sum:.0f}", "65536")]

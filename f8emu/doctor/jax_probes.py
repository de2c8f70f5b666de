"""Probes of JAX for `f8emu doctor`: what XLA makes of float32 arithmetic, on the CPU and on a GPU."""

from typing import Any

import numpy as np

from f8emu.doctor.probe import Probe, below_powers_of_two, coded, counted, powers_of_two, significands
from f8emu.spec.formats import E4M3FN, E5M2

_INTEGERS = "computes on the integer bits, which XLA leaves alone"
_NAN_LENGTH = 4096
"""Elements from which XLA's CPU maximum has been seen to lose a NaN."""


def probe_jax(platform: str) -> list[Probe]:
    """All probes of JAX on the first device of `platform` (`cpu` or `gpu`); raises what JAX raises."""
    import jax

    subject = f"jax {platform}"
    with jax.default_device(jax.devices(platform)[0]):
        return [*_casts(subject), *_arithmetic(subject), *_compiled(subject)]


def _casts(subject: str) -> list[Probe]:
    import jax.numpy as jnp

    def codes(values: list[float], dtype: Any) -> Any:
        return np.asarray(jnp.asarray(np.array(values, np.float32)).astype(dtype)).view(np.uint8)

    inf, nan = float("inf"), float("nan")
    clamps = "rounds with integers; the overflow policy is an argument"
    canonical = "gives one NaN code, and compares NaN with NaN"
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    return [
        coded(subject, "cast 500, inf to float8_e4m3fn", codes([500.0, inf], e4m3), [E4M3FN.max_code] * 2, clamps),
        coded(subject, "cast 1e6, inf to float8_e5m2", codes([1e6, inf], e5m2), [E5M2.max_code] * 2, clamps),
        coded(subject, "cast NaN, -NaN to float8_e4m3fn", codes([nan, -nan], e4m3), [E4M3FN.nan_code] * 2, canonical),
        coded(subject, "cast NaN, -NaN to float8_e5m2", codes([nan, -nan], e5m2), [E5M2.nan_code] * 2, canonical),
    ]


def _arithmetic(subject: str) -> list[Probe]:
    """Single operations, not compiled together."""
    import jax.numpy as jnp

    ones = significands()
    x = jnp.asarray(ones)
    subnormal = (np.arange(1, 1 << 16, dtype=np.uint32) * np.uint32(127)).view(np.float32)  # all below 2^-126
    powers, below = powers_of_two(), below_powers_of_two()
    exponents = np.arange(-126, 128, dtype=np.float32)
    with_nan = np.ones(_NAN_LENGTH, np.float32)
    with_nan[_NAN_LENGTH // 2] = np.nan
    nan, max_value = np.array([np.nan], np.float32), E4M3FN.max

    def log2_trick() -> Any:
        return jnp.exp2(jnp.floor(jnp.log2(jnp.asarray(below))))

    return [
        counted(subject, "subnormal * 2", jnp.asarray(subnormal) * 2, subnormal * np.float32(2), _INTEGERS),
        counted(subject, "x / 448, array by scalar", x / max_value, ones / np.float32(max_value), _INTEGERS),
        counted(subject, "448 / x, scalar by array", max_value / x, np.float32(max_value) / ones, _INTEGERS),
        counted(subject, "exp2(k), k from -126 to 127", jnp.exp2(jnp.asarray(exponents)), powers, _INTEGERS),
        counted(subject, "exp2(floor(log2(s))), s just below 2^k", log2_trick(), powers[:-1], _INTEGERS),
        counted(
            subject,
            f"max of {_NAN_LENGTH - 1} float32 with a NaN",
            jnp.max(jnp.asarray(with_nan[1:]))[None],
            nan,
            _INTEGERS,
        ),
        counted(
            subject,
            f"max of {_NAN_LENGTH} float32 with a NaN",
            jnp.max(jnp.asarray(with_nan))[None],
            nan,
            _INTEGERS,
        ),
    ]


def _compiled(subject: str) -> list[Probe]:
    """Expressions that `jax.jit` may rewrite: contraction to a fused multiply-add, reassociation."""
    import jax
    import jax.numpy as jnp

    x = significands()
    y, z = x[::-1].copy(), np.roll(x, 12345)
    c1, c2 = np.float32(1.1), np.float32(0.3)

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return a * b + c

    def scale_twice(a: Any) -> Any:
        return (a * c1) * c2

    return [
        counted(
            subject,
            "a * b + c under jit, two roundings",
            jax.jit(multiply_add)(jnp.asarray(x), jnp.asarray(y), jnp.asarray(z)),
            x * y + z,
            _INTEGERS,
        ),
        counted(
            subject,
            "(x * 1.1) * 0.3 under jit, in that order",
            jax.jit(scale_twice)(jnp.asarray(x)),
            (x * c1) * c2,
            _INTEGERS,
        ),
    ]

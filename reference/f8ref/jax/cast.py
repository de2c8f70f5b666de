"""Rounding a float to a float8 code."""

import functools

import jax
import jax.numpy as jnp

from f8emu.spec import FLOAT8_OPERANDS, Format, Overflow, SpecError, format_by_name
from f8ref.jax.codec import codes, float32_bits, high_precision_format, round_to_code, typed


def cast(x: jax.Array, format: Format | str, *, overflow: Overflow = Overflow.SATURATE) -> jax.Array:
    """Every element rounded to the nearest code of `format`, ties to the even one.

    NaN gives `format.nan_code`, whatever its sign. Beyond the largest finite value, infinities included: `SATURATE`
    gives `+-max`; `NONFINITE` gives `+-inf` where the format has it, NaN where not. The sign of a zero is kept.

    Shapes: any.
    Exactness: all bfloat16 and float16 inputs, and all float32 inputs, equal ml_dtypes and torch once these are
    given clamped values (NUMERICS 6); no dependence on how XLA treats subnormals.

    Raises:
        OperandError: x is not float32, bfloat16 or float16.
        SpecError: format is unknown or no float8 operand.
    """
    target = float8_format(format, "cast")
    source = high_precision_format(x, "cast", "x")
    return _cast(jnp.asarray(x), source, target, Overflow(overflow))


def float8_format(format: Format | str, call: str) -> Format:
    """The float8 operand format of this name."""
    found = format_by_name(format) if isinstance(format, str) else format
    if found not in FLOAT8_OPERANDS:
        known = ", ".join(f.name for f in FLOAT8_OPERANDS)
        raise SpecError(f"{call}: format must be one of {known}; got {found}. No tensor core multiplies anything else")
    return found


@functools.partial(jax.jit, static_argnames=("source", "target", "overflow"))
def _cast(x: jax.Array, source: Format, target: Format, overflow: Overflow) -> jax.Array:
    return typed(round_to_code(float32_bits(codes(x, source), source), target, overflow), target)

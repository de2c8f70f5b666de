"""The spec's formats as JAX dtypes and back, and basic checks of arguments; each raises OperandError for a wrong array,
SpecError for an unknown format.
"""

import math
from typing import Any

import jax.numpy as jnp

from f8emu.spec import formats
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import F8Error, OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import FLOAT8, FORMATS, HIGH_PRECISION, Format

CHIP = HOPPER
"""The chip whose GEMMs run or are emulated where no other is named."""
FLOAT8_NAMES: tuple[str, ...] = tuple(format.name for format in FLOAT8)
HIGH_PRECISION_NAMES: tuple[str, ...] = tuple(format.name for format in HIGH_PRECISION)


def _named(format: Any) -> Any:
    """A format, or the name of one that is given as a dtype or a scalar type of jax.numpy."""
    if isinstance(format, Format | str):
        return format
    try:
        return jnp.dtype(format).name
    except TypeError:
        return format


def float8_format(call: str, format: Any) -> Format:
    """The float8 format that `call` casts to; `format` is a Format, its name or its dtype."""
    return formats.float8_format(call, _named(format))


def output_format(
    call: str, out_dtype: Any, *, name: str = "out_dtype", refusal: type[F8Error] = UnsupportedError
) -> Format:
    """The format of an output, given as the argument `name`; raises `refusal` for one that no GEMM gives."""
    known, found = ", ".join(HIGH_PRECISION_NAMES), _named(out_dtype)
    if isinstance(found, str):
        if found not in FORMATS:
            raise SpecError(f"{call}: {name} must be one of {known}; got {found}; convert the result")
        found = FORMATS[found]
    if not isinstance(found, Format):
        raise OperandError(f"{call}: {name} must be a dtype, a Format or its name; got {out_dtype!r}")
    if found not in HIGH_PRECISION:
        raise refusal(
            f"{call}: {name} must be one of {known}; got {found}; quantize the result: float8 output is not modelled"
        )
    return found


def format_of(call: str, name: str, x: Any, allowed: tuple[str, ...] = HIGH_PRECISION_NAMES) -> Format:
    """The format of an array of JAX or numpy, one of `allowed`."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape"):
        raise OperandError(
            f"{call}: {name} must be a JAX array; got {type(x).__name__}; convert it first: jnp.asarray({name})"
        )
    if str(dtype) not in allowed:
        raise OperandError(f"{call}: {name} must be one of {', '.join(allowed)}; got {dtype}; convert it first")
    return FORMATS[str(dtype)]


def rows_of(call: str, x: Any, *, name: str = "x") -> tuple[int, int]:
    """Rows and K of `x` [..., K]: all leading dimensions count as rows."""
    if len(x.shape) < 2:
        raise OperandError(
            f"{call}: {name} must have 2 dimensions or more, [..., K]; got shape {list(x.shape)}; "
            f"one row is {name}.reshape(1, -1)"
        )
    return math.prod(x.shape[:-1]), x.shape[-1]

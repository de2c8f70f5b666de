"""The spec's formats as JAX dtypes and back, and basic checks of arguments."""

import math
from typing import Any

import jax.numpy as jnp

from f8emu.spec import formats
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import FLOAT8, FORMATS, HIGH_PRECISION, Format

CHIP = HOPPER
"""The chip whose GEMMs run or are emulated where no other is named."""

FLOAT8_NAMES: tuple[str, ...] = tuple(format.name for format in FLOAT8)
"""The dtypes that a cast gives."""
HIGH_PRECISION_NAMES: tuple[str, ...] = tuple(format.name for format in HIGH_PRECISION)
"""The dtypes that a cast takes and a GEMM gives."""


def named(format: Any) -> Any:
    """A format, or the name of a format that is given as a dtype or a scalar type of jax.numpy."""
    if isinstance(format, Format | str):
        return format
    try:
        return jnp.dtype(format).name
    except TypeError:
        return format


def float8_format(call: str, format: Any) -> Format:
    """The float8 format that `call` casts to; `format` is a Format, its name or its dtype.

    Raises:
        SpecError: an unknown format, or one that is not in FLOAT8.
    """
    return formats.float8_format(call, named(format))


def output_format(call: str, out_dtype: Any, *, name: str = "out_dtype") -> Format:
    """The format of an output, given itself, by name or as a dtype; the caller's argument is called `name`.

    Raises:
        SpecError: no format has that name.
        OperandError: not a dtype, a format or a name.
    """
    found = named(out_dtype)
    if isinstance(found, str):
        if found not in FORMATS:
            known = ", ".join(HIGH_PRECISION_NAMES)
            raise SpecError(f"{call}: {name} must be one of {known}; got {found}; convert the result")
        found = FORMATS[found]
    if not isinstance(found, Format):
        raise OperandError(f"{call}: {name} must be a dtype, a Format or its name; got {out_dtype!r}")
    return found


def check_output(call: str, out_dtype: Any, *, name: str = "out_dtype") -> Format:
    """The format of an output, which the caller gave as the argument `name`.

    Raises:
        SpecError: no such format.
        UnsupportedError: one that no GEMM gives.
    """
    found = output_format(call, out_dtype, name=name)
    if found not in HIGH_PRECISION:
        known = ", ".join(HIGH_PRECISION_NAMES)
        raise UnsupportedError(
            f"{call}: {name} must be one of {known}; got {found}; quantize the result: float8 output is not modelled"
        )
    return found


def format_of(call: str, name: str, x: Any, allowed: tuple[str, ...]) -> Format:
    """The format of an array's dtype.

    Raises:
        OperandError: not an array of JAX or numpy, or its dtype is not among `allowed`.
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape"):
        raise OperandError(
            f"{call}: {name} must be a JAX array; got {type(x).__name__}; convert it first: jnp.asarray({name})"
        )
    if str(dtype) not in allowed:
        raise OperandError(f"{call}: {name} must be one of {', '.join(allowed)}; got {dtype}; convert it first")
    return FORMATS[str(dtype)]


def require_values(call: str, x: Any, *, name: str = "x", ndim: int | None = None) -> Format:
    """The format of a float32, bfloat16 or float16 array, of `ndim` dimensions if given.

    Raises:
        OperandError: anything else.
    """
    found = format_of(call, name, x, HIGH_PRECISION_NAMES)
    if ndim is not None and len(x.shape) != ndim:
        raise OperandError(
            f"{call}: {name} must have {ndim} dimensions; got shape {list(x.shape)}; "
            f"flatten the leading ones with {name}.reshape(-1, {name}.shape[-1])"
        )
    return found


def rows_of(call: str, x: Any, *, name: str = "x") -> tuple[int, int]:
    """Rows and K of `x` [..., K]: all leading dimensions count as rows.

    Raises:
        OperandError: fewer than two dimensions.
    """
    if len(x.shape) < 2:
        raise OperandError(
            f"{call}: {name} must have 2 dimensions or more, [..., K]; got shape {list(x.shape)}; "
            f"one row is {name}.reshape(1, -1)"
        )
    return math.prod(x.shape[:-1]), x.shape[-1]

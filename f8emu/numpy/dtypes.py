"""Arguments: formats given as dtypes, arrays given as lists, and values that a format holds exactly."""

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import FLOAT8, FLOAT32, FORMATS, HIGH_PRECISION, Format

Array = NDArray[Any]
FormatLike = Format | str | DTypeLike
"""A format, its name, or its dtype."""


def dtype_of(format: Format) -> np.dtype[Any]:
    """The dtype of a format: numpy's own, or that of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, format.name, format.name))


def float8_format(call: str, format: FormatLike) -> Format:
    """The float8 format that `call` casts to.

    Raises:
        SpecError: no float8 format that a cast gives.
    """
    return _format(call, "format", format, FLOAT8)


def output_format(call: str, out_dtype: FormatLike) -> Format:
    """The format of the output of a GEMM.

    Raises:
        SpecError: no such format.
        UnsupportedError: one that no GEMM gives.
    """
    found = _format(call, "out_dtype", out_dtype, tuple(FORMATS.values()))
    if found not in HIGH_PRECISION:
        known = ", ".join(f.name for f in HIGH_PRECISION)
        raise UnsupportedError(f"{call}: out_dtype must be one of {known}; got {found}; quantize the output instead")
    return found


def _format(call: str, name: str, given: FormatLike, allowed: tuple[Format, ...]) -> Format:
    if isinstance(given, Format):
        found = given
    else:
        try:
            found = FORMATS.get(given if isinstance(given, str) else np.dtype(given).name)
        except TypeError:
            found = None
    if found not in allowed:
        known = ", ".join(f.name for f in allowed)
        raise SpecError(f"{call}: {name} must be one of {known}, by name, as a dtype or as a Format; got {given!r}")
    return found


def array_of(call: str, name: str, x: ArrayLike) -> Array:
    """`x` as an array, with the dtype that numpy gives it.

    Raises:
        OperandError: numpy makes no array of numbers of it.
    """
    expected = f"{call}: {name} must be an array or nested lists of numbers"
    try:
        array = np.asarray(x)
    except ValueError:
        raise OperandError(f"{expected}; got rows of different lengths; pad them") from None
    except Exception as error:  # what another library raises where numpy asks for its array
        remedy = "convert it first, a tensor of torch with f8emu.interop.to_numpy"
        raise OperandError(f"{expected}; got a {type(x).__name__}: {error}; {remedy}") from None
    if array.dtype.kind in "OSU":
        raise OperandError(f"{expected}; got a {type(x).__name__}; convert it first")
    return array


def typed(call: str, name: str, x: ArrayLike, format: Format = FLOAT32) -> Array:
    """`x` as an array; what has no format of its own, as `format`, which must hold all its values.

    No format of its own has float64, an integer, a bool, and therefore a list or a number of Python's.

    Raises:
        OperandError: a value that `format` does not hold.
    """
    array = array_of(call, name, x)
    if array.dtype != np.float64 and array.dtype.kind not in "iub":
        return array
    # There and back: what comes back another number was not held; a NaN stays one.
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype_of(format))
    back = converted.astype(np.float64)
    differs = (back != array) & ~((back != back) & (array != array))
    if array.dtype.kind in "iu":  # float64 does not hold all of them, Python's integers do
        differs = np.asarray(back.astype(object) != array.astype(object))
    if differs.any():
        first = array[tuple(np.argwhere(differs)[0])]
        spelled = f"{'np' if hasattr(np, format.name) else 'ml_dtypes'}.{format.name}"
        raise OperandError(
            f"{call}: {name} is {array.dtype} and is taken as {format} where that is exact; {first!s} is no {format}; "
            f"round it first, with np.asarray({name}, {spelled})"
        )
    return converted


def rows_of(call: str, name: str, x: Array) -> tuple[int, int]:
    """Rows and K of `x` [..., K]: all leading dimensions count as rows.

    Raises:
        OperandError: fewer than two dimensions.
    """
    if x.ndim < 2:
        raise OperandError(
            f"{call}: {name} must have 2 dimensions or more, [..., K]; got shape {list(x.shape)}; "
            f"one row is np.reshape({name}, (1, -1))"
        )
    return math.prod(x.shape[:-1]), x.shape[-1]

"""Arguments: formats given as dtypes, arrays given as lists, and values that a format holds exactly."""

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from f8emu.spec import formats
from f8emu.spec.chip import Chip
from f8emu.spec.chips import chip_by_name
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import FLOAT8, FLOAT32, FORMATS, Format

Array = NDArray[Any]
FormatLike = Format | str | DTypeLike
"""A format, its name, or its dtype."""


def dtype_of(format: Format) -> np.dtype[Any]:
    """The dtype of a format: numpy's own or one of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, format.name, format.name))


def float8_format(call: str, format: FormatLike) -> Format:
    """The float8 format that `call` casts to; SpecError for anything else."""
    return _format(call, "format", format, FLOAT8)


def output_format(call: str, out_dtype: FormatLike) -> Format:
    """The format of an output; SpecError for no format, UnsupportedError for one that no GEMM gives."""
    return formats.output_format(call, _format(call, "out_dtype", out_dtype, tuple(FORMATS.values())))


def _format(call: str, name: str, given: FormatLike, allowed: tuple[Format, ...]) -> Format:
    found: object = given
    if not isinstance(given, Format):
        try:
            found = FORMATS.get(given if isinstance(given, str) else np.dtype(given).name)
        except TypeError:
            found = None
    if not isinstance(found, Format) or found not in allowed:
        known = ", ".join(f.name for f in allowed)
        raise SpecError(f"{call}: {name} must be one of {known}, by name, as a dtype or as a Format; got {given!r}")
    return found


def chip_of(call: str, chip: Chip | str) -> Chip:
    """A profile, possibly the caller's own, or the known one of that name; SpecError for an unknown name."""
    return chip if isinstance(chip, Chip) else chip_by_name(call, chip)


def array_of(call: str, name: str, x: ArrayLike) -> Array:
    """`x` as an array, with the dtype that numpy gives it; OperandError for what is no array of numbers."""
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
    """`x` as an array. Float64, integers and bools, as lists and numbers give them, become `format`.

    Raises:
        OperandError: a value that `format` does not hold.
    """
    array = array_of(call, name, x)
    if array.dtype != np.float64 and array.dtype.kind not in "iub":
        return array
    # There and back: a value that comes back as another number was not held; a NaN stays one.
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


def as_rows(call: str, name: str, x: Array) -> Array:
    """`x` [..., K] as a matrix: all leading dimensions count as rows; OperandError for less than two dimensions."""
    if x.ndim < 2:
        raise OperandError(
            f"{call}: {name} must have 2 dimensions or more, [..., K]; got shape {list(x.shape)}; "
            f"one row is np.reshape({name}, (1, -1))"
        )
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

"""From an array to its scales and codes, and back: amax, the scale rule, delayed scaling, cast, decode, quantize.

Before them the checks of arguments: formats given as dtypes, arrays given as lists, values that a format holds exactly.

Exactness of all: the bits of the verbs of `f8ref.numpy`, which define them. Errors of all: OperandError for a wrong
dtype, rank or shape, SpecError for an unknown format, granularity or margin.
"""

from __future__ import annotations  # the signatures that `help` shows have names of types, not numpy's unions

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.numpy import emulation
from f8emu.numpy.emulation import Array, dtype_of
from f8emu.spec import formats
from f8emu.spec.chip import Chip
from f8emu.spec.chips import chip_by_name
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import FLOAT8, FLOAT32, FORMATS, HIGH_PRECISION, Format, Overflow, overflow_by_name
from f8emu.spec.names import FormatName, GranularityName, OverflowName
from f8emu.spec.scaling import DelayedScaling, DelayedState, Granularity, ScaleRule, Scales
from f8ref import numpy as oracle
from f8ref.numpy import initial_delayed_state as initial_delayed_state
from f8ref.numpy.cast import convert

FormatLike = Format | FormatName | np.dtype[Any] | type[Any]
"""A format, its name, or its dtype."""


def float8_format(call: str, format: FormatLike) -> Format:
    """The float8 format that `call` casts to; SpecError for anything else."""
    return _format(call, "format", format, FLOAT8)


def output_format(call: str, out_dtype: FormatLike) -> Format:
    """The format of an output; SpecError for no format, UnsupportedError for one that no GEMM gives."""
    return formats.output_format(call, _format(call, "out_dtype", out_dtype, tuple(FORMATS.values()), HIGH_PRECISION))


def _format(
    call: str, name: str, format: FormatLike, allowed: tuple[Format, ...], listed: tuple[Format, ...] = ()
) -> Format:
    # `listed`: those of the allowed that a message names; the others are refused with a remedy of their own.
    named = format
    if not isinstance(format, Format):
        try:
            named = FORMATS.get(format if isinstance(format, str) else np.dtype(format).name)
        except TypeError:
            named = None
    if not isinstance(named, Format) or named not in allowed:
        known = ", ".join(f.name for f in listed or allowed)
        raise SpecError(f"{call}: {name} must be one of {known}, by name, as a dtype or as a Format; got {format!r}")
    return named


def chip_of(call: str, chip: Chip | str) -> Chip:
    """A profile, possibly the caller's own, or the known one of that name; SpecError for an unknown name."""
    return chip if isinstance(chip, Chip) else chip_by_name(call, chip)


def array_of(call: str, name: str, x: ArrayLike) -> Array:
    """`x` as an array, with the dtype that numpy gives it; OperandError for anything but an array of numbers."""
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
    """`x` as an array. Float64, integers and bools, as lists and numbers give them, become `format`."""
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


def decode(x: ArrayLike) -> NDArray[np.float32]:
    """The values of float8, bfloat16 or float16 codes as float32, every NaN as 0x7fffffff.

    Shapes:
        any -> float32 of the same shape.

    Raises:
        OperandError: wrong dtype; codes as integers are viewed first, `codes.view(ml_dtypes.float8_e4m3fn)`.
    """
    return oracle.decode(array_of("decode", "x", x))


def cast(x: ArrayLike, format: FormatLike, *, overflow: Overflow | OverflowName = Overflow.SATURATE) -> Array:
    """Values rounded once to the nearest float8, ties to even, float64 too.

    SATURATE gives `+-max` for all that rounds beyond it, infinities included. NONFINITE gives `+-inf` if the format
    has it, otherwise NaN. NaN becomes `format.nan_code` under both.

    Shapes:
        numbers of any shape -> the float8 dtype, same shape.

    Raises:
        OperandError: no numbers, or integers that float32 does not hold.
        SpecError: unknown format.
    """
    target = float8_format("cast", format)
    array = array_of("cast", "x", x)
    values = _to_odd(array) if array.dtype == np.float64 else typed("cast", "x", array)
    return oracle.cast(values, target, overflow=overflow_by_name("cast", overflow))


def quantize(
    x: ArrayLike,
    inv_scale: ArrayLike,
    format: FormatLike,
    granularity: Granularity | GranularityName = Granularity.TENSORWISE,
) -> Array:
    """`cast(float32(x) * inv_scale, SATURATE)`, one rounded float32 product per element.

    Shapes:
        x [..., K], inv_scale float32 `granularity.scale_shape(rows, K)`, where rows is the product of the leading
        dimensions; a number is a tensorwise inv_scale -> float8 of x's shape.

    Raises:
        OperandError: wrong dtype or rank, values that float32 does not hold, or scales of another shape.
        SpecError: unknown format or granularity.
    """
    target = float8_format("quantize", format)
    values, factors = typed("quantize", "x", x), typed("quantize", "inv_scale", inv_scale)
    return emulation.quantize(as_rows("quantize", "x", values), factors, target, granularity).reshape(values.shape)


def dequantize(
    codes: ArrayLike,
    scale: ArrayLike,
    granularity: Granularity | GranularityName = Granularity.TENSORWISE,
    *,
    out_dtype: FormatLike = FLOAT32,
) -> Array:
    """`decode(codes) * scale`, in `out_dtype`.

    Shapes:
        codes float8 [..., K], scale as the inv_scale of `quantize`, or E8M0 -> out_dtype of the codes' shape.

    Exactness: one rounded float32 product per element, NaN is 0x7fffffff; bfloat16 and float16 are that product,
    rounded again to nearest, ties to even.

    Raises:
        OperandError: wrong dtype or rank, or scales of another shape.
        SpecError: unknown granularity or format.
        UnsupportedError: an `out_dtype` that is not float32, bfloat16 or float16.
    """
    target = output_format("dequantize", out_dtype)
    array = array_of("dequantize", "codes", codes)
    matrix = as_rows("dequantize", "codes", array)
    values = oracle.dequantize(matrix, typed("dequantize", "scale", scale), granularity)
    return convert(values, target).reshape(array.shape)


def _to_odd(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """Float64 rounded to odd: toward zero, and the last bit set where that lost something."""
    # The nearest float8 of the result is that of `x`: a float32 has more than two bits below the last of a float8, so
    # that no tie arises or is lost, and what is beyond float32 is beyond float8.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        nearest = x.astype(np.float32)
    # 1. Toward zero. The bit patterns of one sign are ordered as their magnitudes are.
    is_above = np.abs(nearest.astype(np.float64)) > np.abs(x)
    codes = nearest.view(np.uint32) - is_above.astype(np.uint32)
    # 2. Odd where it was not exact; infinity and NaN are exact.
    is_inexact = (nearest.astype(np.float64) != x) & ~np.isnan(x)
    return (codes | is_inexact.astype(np.uint32)).view(np.float32)


def amax(x: ArrayLike, granularity: Granularity | GranularityName = Granularity.TENSORWISE) -> NDArray[np.float32]:
    """The largest magnitude of each group that shares a scale; a group with a NaN gives NaN, an empty one 0.

    Shapes:
        x [..., K], float32, bfloat16, float16, or values that float32 holds -> float32
        `granularity.scale_shape(rows, K)`, where rows is the product of the leading dimensions.

    Raises:
        OperandError: wrong dtype or rank, or values that float32 does not hold.
        SpecError: unknown granularity.
    """
    return emulation.amax(as_rows("amax", "x", typed("amax", "x", x)), granularity)


def scale_from_amax(amax: ArrayLike, format: FormatLike, rule: ScaleRule = ScaleRule(), *, margin: int = 0) -> Scales:
    """`inv_scale = float32(max * 2^-margin / max(amax, amax_floor))` and `scale = float32(1 / inv_scale)`.

    With `rule.power_of_two`, inv_scale loses its fraction bits before scale is taken. amax 0 counts as the floor,
    amax inf gives 0 and inf, amax NaN gives NaN and NaN. Both quotients are correctly rounded. With `rule.e8m0` the
    scale is an E8M0 byte by that rule, and `inv_scale = 2^(127 - byte)`.

    Shapes:
        amax float32 or values that float32 holds, any shape -> two float32 arrays of that shape, scale float8_e8m0fnu
        with `rule.e8m0`.

    Raises:
        OperandError: wrong dtype.
        SpecError: unknown format, a margin out of range, or one with E8M0 scales.
    """
    target = float8_format("scale_from_amax", format)
    return emulation.scale_from_amax(typed("scale_from_amax", "amax", amax), target, rule, margin=margin)


def update_delayed_state(
    state: DelayedState, amax: ArrayLike, format: FormatLike, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after a step in which the tensor's largest amax was `amax`; `DelayedScaling` defines it.

    Shapes:
        `amax` has one element; the state keeps its shapes.

    Raises:
        OperandError: `amax` is not one number that float32 holds, or the history is not of the rule's length.
        SpecError: unknown format.
    """
    target = float8_format("update_delayed_state", format)
    return oracle.update_delayed_state(state, typed("update_delayed_state", "amax", amax), target, rule, delayed)

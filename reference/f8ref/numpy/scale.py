"""From values to scales: amax, the scale rule, and the state of delayed scaling, which `DelayedScaling` defines.

Operands are seen as `[rows, K]`, K being the dimension that a GEMM sums over. `inv_scale` is multiplied while
quantising, `scale` decodes.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import (
    E8M0FNU,
    FLOAT32,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    E8M0Rule,
    Format,
    Granularity,
    OperandError,
    ScaleRule,
    Scales,
    float8_format,
    granularity_by_name,
)
from f8emu.spec.scaling import check_rule
from f8ref.numpy.codec import NAN, Array, as_float32, canonical_nan, codes_of, typed, typed_array


def amax(x: ArrayLike, granularity: Granularity | str = Granularity.TENSORWISE) -> NDArray[np.float32]:
    """The largest magnitude of every group of elements that share a scale.

    NaN of either sign makes the amax of its group NaN; infinity is larger than all numbers; an empty group has 0.

    Shapes: `x` [rows, K]; the result is `granularity.scale_shape(rows, K)`.
    Exactness: exact; magnitudes are compared as bit patterns, which order NaN last.

    Raises:
        OperandError: `x` is not a matrix, or not float32, bfloat16 or float16.
        SpecError: an unknown granularity.
    """
    granularity = granularity_by_name("amax", granularity)
    values = as_float32(as_matrix(x, "amax: x"), "amax: x")
    magnitude = codes_of(values, FLOAT32) & np.uint32(FLOAT32.magnitude_mask)
    # Pad with zeros to whole blocks, then see the matrix as [block rows, row, block columns, column].
    groups = granularity.scale_shape(*values.shape)
    block = [of_axis or extent for of_axis, extent in zip(granularity.block, values.shape, strict=True)]
    padded = np.zeros((groups[0] * block[0], groups[1] * block[1]), np.uint32)
    padded[: values.shape[0], : values.shape[1]] = magnitude
    largest = padded.reshape(groups[0], block[0], groups[1], block[1]).max(axis=(1, 3), initial=0)
    return canonical_nan(largest.view(np.float32))


def scale_from_amax(amax: ArrayLike, format: Format | str, rule: ScaleRule = ScaleRule(), *, margin: int = 0) -> Scales:
    """The scales that map `amax` to the largest finite value of `format`, or `2^margin` below it.

    `inv_scale = float32(max * 2^-margin / maximum(float64(amax), rule.amax_floor))`, cut to a power of two where the
    rule says so; `scale = float32(1 / inv_scale)`. Amax 0 counts as the floor; infinity gives inv_scale 0 and scale
    infinity; NaN gives NaN for both. With `rule.e8m0` the scale is an E8M0 byte by that rule [MX-1], and
    `inv_scale = 2^(127 - byte)`.

    Shapes: any; both results have the shape of `amax`.
    Exactness: both quotients are correctly rounded. A float64 quotient of two float32 numbers, rounded to float32, is
    (53 >= 2 * 24 + 2); `tests/oracle/test_scales.py` proves it in integers for all 2^23 significands.

    Raises:
        OperandError: `amax` is not float32.
        SpecError: a format that is not in FLOAT8, a margin outside of 0 to MAX_MARGIN, or one with E8M0 scales.
    """
    values, target = checked_amax(amax, format, rule, margin)
    if rule.e8m0 is not None:
        return _e8m0_scales(values, target, rule.e8m0)
    with np.errstate(divide="ignore", invalid="ignore"):  # amax infinity has scale 1 / 0; a NaN may be a signalling one
        quotient = target.max * 2.0**-margin / np.maximum(values.astype(np.float64), rule.amax_floor)
        inv_scale = np.asarray(quotient, np.float32)
        if rule.power_of_two:
            exponent = codes_of(inv_scale, FLOAT32) & np.uint32(FLOAT32.magnitude_mask ^ FLOAT32.fraction_mask)
            # The exponent bits of NaN alone are those of infinity.
            inv_scale = np.where(np.isnan(inv_scale), NAN, exponent.view(np.float32))
        scale = np.float32(1) / inv_scale
    return Scales(canonical_nan(inv_scale), canonical_nan(scale))


def _e8m0_scales(amax: NDArray[np.float32], format: Format, rule: E8M0Rule) -> Scales:
    # 1. amax = fraction * 2^exponent with a fraction in [1/2, 1), as max is; infinity counts as 2^128.
    with np.errstate(invalid="ignore"):  # a NaN may be a signalling one
        fraction, exponent = np.frexp(np.where(np.isinf(amax), 2.0**128, amax.astype(np.float64)))
    limit, limit_exponent = np.frexp(format.max)
    match rule:
        case E8M0Rule.FLOOR:
            above = np.zeros(amax.shape, np.bool_)
        case E8M0Rule.CEIL:
            above = fraction > 0.5
        case E8M0Rule.EVEN:  # the fraction becomes 1
            above = np.floor(np.ldexp(fraction, format.fraction_bits + 1) + 0.5) >= 2 << format.fraction_bits
        case E8M0Rule.RCEIL:
            above = fraction > limit
    # 2. The byte, limited to what is no NaN.
    byte = np.clip(exponent - limit_exponent + above + E8M0FNU.bias, 0, E8M0FNU.max_code)
    byte = np.where(rule is E8M0Rule.RCEIL and np.isinf(amax), E8M0FNU.max_code, byte)
    byte = np.where(amax > 0, byte, np.where(np.isnan(amax), E8M0FNU.nan_code, 0))
    inv_scale = np.ldexp(np.float32(1), E8M0FNU.bias - byte)
    return Scales(np.where(np.isnan(amax), NAN, inv_scale), typed(byte, E8M0FNU))


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state before the first step: a history of zeros, `inv_scale` 1, not initialised.

    Shapes: `amax_history` [history_length]; `inv_scale` and `initialized` [].
    """
    return DelayedState(
        amax_history=np.zeros(delayed.history_length, np.float32),
        inv_scale=np.ones((), np.float32),
        initialized=np.zeros((), np.bool_),
    )


def update_delayed_state(
    state: DelayedState, amax: ArrayLike, format: Format | str, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after a step in which the tensor's largest amax was `amax`.

    The history moves by one, newest first; the new entry is `amax`, or 0 if that is 0 or not finite. Then
    `inv_scale` follows from the history. After such an `amax`, `inv_scale` and `initialized` stay as they are.

    Shapes: `amax` has one element; the state keeps its shapes.
    Exactness: exact; `inv_scale` comes from `scale_from_amax`.

    Raises:
        OperandError: `amax` is not one float32 number, or the history is not of the rule's length.
    """
    check_rule("update_delayed_state", rule, delayed.margin, is_delayed=True)
    # 1. One amax, and a history of the rule's length.
    newest, _ = typed_array(amax, (FLOAT32,), "update_delayed_state: amax")
    history, _ = typed_array(state.amax_history, (FLOAT32,), "update_delayed_state: amax_history")
    if newest.size != 1:
        raise OperandError(
            f"update_delayed_state: amax must have one element; got shape {newest.shape}; reduce it first"
        )
    if history.shape != (delayed.history_length,):
        raise OperandError(
            f"update_delayed_state: amax_history must have shape ({delayed.history_length},); got {history.shape}; "
            "start from initial_delayed_state of the same rule"
        )
    newest = newest.reshape(())
    is_usable = bool(np.isfinite(newest) and newest > 0)

    # 2. The history moves by one. An amax that is 0 or not finite enters as 0, and leaves the scale.
    entry = newest if is_usable else np.float32(0)
    history = np.concatenate([[entry], history[:-1]]).astype(np.float32)
    if not is_usable:
        return DelayedState(history, state.inv_scale, state.initialized)

    # 3. The scale follows from the history.
    match delayed.reduction:
        case AmaxHistoryReduction.MAX:
            reference = history.max()
        case AmaxHistoryReduction.MOST_RECENT:
            reference = history[0]
    inv_scale = scale_from_amax(reference, format, rule, margin=delayed.margin).inv_scale
    return DelayedState(history, inv_scale, np.ones((), np.bool_))


def checked_amax(
    amax: ArrayLike, format: Format | str, rule: ScaleRule, margin: int
) -> tuple[NDArray[np.float32], Format]:
    """The amaxes and the format of a `scale_from_amax`; raises what that raises."""
    target = float8_format("scale_from_amax", format)
    values, _ = typed_array(amax, (FLOAT32,), "scale_from_amax: amax")
    check_rule("scale_from_amax", rule, margin)
    return values, target


def expand_scale(scale: ArrayLike, granularity: Granularity, shape: tuple[int, ...], call: str) -> NDArray[np.float32]:
    """The scales of an operand `[rows, K]`, repeated so that they broadcast against it; raises `checked_scale`'s error.

    Shapes: [1, 1] for tensorwise, [rows, 1] for rowwise, else [rows, K].
    """
    factors = checked_scale(scale, granularity, shape, call)
    # One scale for all rows, or all of K, broadcasts; others are repeated over their block.
    for axis, size in enumerate(granularity.block):
        factors = factors if size in (None, 1) else factors.repeat(size, axis=axis)
    return factors[: shape[0], : shape[1]]


def checked_scale(scale: ArrayLike, granularity: Granularity, shape: tuple[int, ...], call: str) -> NDArray[np.float32]:
    """The float32 scales of an operand `[rows, K]`, of its `scale_shape`; OperandError for a wrong dtype or shape."""
    factors, _ = typed_array(scale, (FLOAT32,), call)
    expected = granularity.scale_shape(*shape)
    if granularity is Granularity.TENSORWISE and factors.size == 1:
        factors = factors.reshape(1, 1)
    if factors.shape != expected:
        raise OperandError(
            f"{call} must have shape {expected} for {granularity.value} scales of an operand {shape}; "
            f"got {factors.shape}; take it from amax with this granularity"
        )
    return factors


def as_matrix(x: ArrayLike, call: str) -> Array:
    """`x` as an array; OperandError if it has not two dimensions."""
    array = np.asarray(x)
    if array.ndim != 2:
        raise OperandError(f"{call} must be a matrix [rows, K]; got shape {array.shape}; reshape it")
    return array

"""From values to scales: amax, the scale rule, and the state of delayed scaling, which `f8emu.spec.scaling` states.

Amaxes and scales are float32 codes.
"""

from collections.abc import Iterable
from fractions import Fraction

from f8emu.spec.formats import FLOAT32, Format
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, ScaleRule
from f8emu.spec.trace import DelayedState, Scales
from f8ref.exact.cast import decode, encode, round_to
from f8ref.exact.number import ZERO, Kind, Number, finite, infinity

_FLOAT64 = Format(name="float64", exponent_bits=11, fraction_bits=52, bias=1023)
"""For the quotient of the scale rule; no operand, code or result of f8emu has it."""


def amax(codes: Iterable[int], format: Format) -> int:
    """The largest magnitude of a group, as a float32 code (exact: float32 holds every value of every format).

    NaN if any is NaN; 0 for an empty group.
    """
    largest = ZERO
    for code in codes:
        number = decode(code, format)
        if number.is_nan:
            return FLOAT32.nan_code
        if number.is_infinite or largest.is_infinite:
            largest = infinity()
        else:
            largest = Number(Kind.FINITE, magnitude=max(largest.magnitude, number.magnitude))
    return encode(largest, FLOAT32)


def scale_from_amax(amax: int, format: Format, rule: ScaleRule | None = None, *, margin: int = 0) -> Scales:
    """`inv_scale = float32(float64(max * 2^-margin / max(amax, amax_floor)))` and `scale = float32(1 / inv_scale)`.

    With `power_of_two` the fraction bits of inv_scale are cleared. An amax of 0 gives the quotient by the floor,
    inf gives 0 and inf, NaN gives NaN for both.
    """
    rule = ScaleRule() if rule is None else rule
    largest = decode(amax, FLOAT32)
    if largest.is_nan:
        return Scales(inv_scale=FLOAT32.nan_code, scale=FLOAT32.nan_code)
    if largest.is_infinite:
        inv_scale = 0
    else:
        divisor = max(largest.magnitude, Fraction(rule.amax_floor))
        quotient = Fraction(format.max) / 2**margin / divisor
        # Rounding twice is the rule. With a float32 divisor it equals rounding once: a quotient of two 24-bit
        # significands is never so near to a midpoint of float32 that 53 bits cannot tell the side.
        inv_scale = encode(round_to(finite(quotient), _FLOAT64), FLOAT32)
    if rule.power_of_two:
        inv_scale &= ~FLOAT32.fraction_mask
    return Scales(inv_scale=inv_scale, scale=_reciprocal(inv_scale))


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state before the first step: a history of zeros, inv_scale 1, not initialized."""
    return DelayedState(
        amax_history=(0,) * delayed.history_length, inv_scale=encode(finite(1), FLOAT32), initialized=False
    )


def update_delayed_state(
    state: DelayedState, amax: int, format: Format, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after one step whose amax was `amax`; the rule is `DelayedScaling`'s.

    An amax that is 0, infinite or NaN enters the history as 0 and leaves the scale as it is.
    """
    number = decode(amax, FLOAT32)
    usable = not (number.is_nan or number.is_infinite or number.is_zero)
    history = ((amax if usable else 0), *state.amax_history)[: delayed.history_length]
    if not usable:
        return state._replace(amax_history=history)
    match delayed.reduction:
        case AmaxHistoryReduction.MAX:
            reference = max(history)  # the codes of non-negative floats have the order of their values
        case AmaxHistoryReduction.MOST_RECENT:
            reference = history[0]
    scales = scale_from_amax(reference, format, rule, margin=delayed.margin)
    return DelayedState(amax_history=history, inv_scale=scales.inv_scale, initialized=True)


def _reciprocal(code: int) -> int:
    """`float32(1 / x)`, correctly rounded, of a float32 x >= 0; 1 / 0 is inf and 1 / inf is 0."""
    number = decode(code, FLOAT32)
    if number.is_infinite:
        return encode(ZERO, FLOAT32)
    if number.is_zero:
        return encode(infinity(), FLOAT32)
    return encode(finite(1 / number.magnitude), FLOAT32)

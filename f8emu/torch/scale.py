"""From a tensor to its scales: amax, the scale rule, and the state of delayed scaling of one tensor, as pure functions.

No host synchronisation, so that all functions run under `torch.compile` and in CUDA graphs. No function has a gradient:
the backward pass treats scales as constants.
"""

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import E8M0FNU, FLOAT32, Format
from f8emu.spec.names import Float8Name, GranularityName
from f8emu.spec.scaling import (
    BLOCK,
    MX_BLOCK,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    E8M0Rule,
    Granularity,
    ScaleRule,
    Scales,
    check_rule,
    granularity_by_name,
    scale_number,
)
from f8emu.torch import cpu_casts
from f8emu.torch.chip import float8_format, require_tensor, require_values, rows_of
from f8emu.torch.library import is_known
from f8emu.torch.torch_internals import is_dtensor, reduced, replicated, without_empty_parts

_FLOAT32_NAN = 0x7FFFFFFF  # the one NaN that f8emu emits [SPEC-1]
_FRACTION_CLEARED = -0x800000  # 0xFF800000 as int32, a mask: the sign and exponent bits of a float32


def amax(x: Tensor, granularity: Granularity | GranularityName = Granularity.TENSORWISE) -> Tensor:
    """The largest magnitude of each group that shares a scale; a group with a NaN gives NaN, an empty one 0.

    Shapes:
        x [..., K], float32, bfloat16 or float16 -> float32 `granularity.scale_shape(rows, K)`, where rows is the
        product of the leading dimensions.

    Exactness: exact; a maximum does not round.

    Raises:
        OperandError: wrong dtype or rank.
        SpecError: unknown granularity.
    """
    require_values("amax", x)
    granularity = granularity_by_name("amax", granularity)
    rows, k = rows_of("amax", x)
    shape = Granularity.scale_shape(granularity, rows, k)  # this way torch 2.11 can trace it
    if rows == 0 or k == 0:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    if cpu_casts.takes(x):
        return cpu_casts.amax(x.reshape(rows, k), granularity)
    if is_dtensor(x):
        x = without_empty_parts(x)
    magnitude = x.detach().reshape(rows, k).abs()
    if is_dtensor(x):  # as integers: a maximum of floats over ranks loses NaN
        magnitude = magnitude.float().view(torch.int32)
    match granularity:
        case Granularity.TENSORWISE:
            largest = magnitude.amax().reshape(1, 1)
        case Granularity.ROWWISE:
            largest = magnitude.amax(dim=1, keepdim=True)
        case Granularity.BLOCKWISE_1X128 | Granularity.BLOCKWISE_1X32:
            block = MX_BLOCK if granularity is Granularity.BLOCKWISE_1X32 else BLOCK
            largest = _padded(magnitude, rows, shape[1] * block).view(rows, shape[1], block).amax(dim=2)
        case Granularity.BLOCKWISE_128X128:
            padded = _padded(magnitude, shape[0] * BLOCK, shape[1] * BLOCK)
            largest = padded.view(shape[0], BLOCK, shape[1], BLOCK).amax(dim=(1, 3))
    return canonical_nan(reduced(largest).view(torch.float32) if is_dtensor(x) else largest.float())


def scale_from_amax(
    amax: Tensor, format: Format | Float8Name | torch.dtype, rule: ScaleRule = ScaleRule(), *, margin: int = 0
) -> Scales:
    """`inv_scale = float32(max * 2^-margin / max(amax, amax_floor))` and `scale = float32(1 / inv_scale)`.

    With `rule.power_of_two`, inv_scale loses its fraction bits before scale is taken. amax 0 counts as the floor,
    amax inf gives 0 and inf, amax NaN gives NaN and NaN. With `rule.e8m0` the scale is an E8M0 byte by that rule, and
    `inv_scale = 2^(127 - byte)`.

    Shapes:
        amax float32, any shape -> two float32 tensors of that shape, scale float8_e8m0fnu with `rule.e8m0`.

    Exactness: both quotients are correctly rounded.

    Raises:
        OperandError: wrong dtype.
        SpecError: unknown format, a margin out of range, or one with E8M0 scales.
    """
    # Float64 quotients of two tensors, rounded to float32: a float64 quotient of two float32 numbers is never so close
    # to the midpoint of two float32 that the second rounding matters. Alternatives fail: eager torch computes a Python
    # number over a tensor as the number times a reciprocal, and compiled float32 division is approximate on a GPU.
    require_tensor("scale_from_amax", "amax", amax)
    target = float8_format("scale_from_amax", format)
    if amax.dtype is not torch.float32:
        raise OperandError(f"scale_from_amax: amax must be float32, as amax() gives it; got {amax.dtype}")
    check_rule("scale_from_amax", rule, margin)
    if cpu_casts.takes(amax):
        return Scales(*cpu_casts.scales(amax, target, rule, margin))
    if rule.e8m0 is not None:
        return _e8m0_scales(amax.detach(), target, rule.e8m0)
    floored = amax.detach().double().clamp(min=rule.amax_floor)  # NaN stays NaN
    inv_scale = (torch.full_like(floored, target.max * 2.0**-margin) / floored).float()
    if rule.power_of_two:
        cut = (inv_scale.view(torch.int32) & _FRACTION_CLEARED).view(torch.float32)
        inv_scale = torch.where(inv_scale.isnan(), inv_scale, cut)
    return Scales(inv_scale=inv_scale, scale=reciprocal(inv_scale))


def _e8m0_scales(amax: Tensor, format: Format, rule: E8M0Rule) -> Scales:
    # On bits: a logarithm is no exact operation, and a GPU may flush 2^-127.
    amax = canonical_nan(amax)
    bits = amax.view(torch.int32).clamp(min=0)
    byte = (((bits + rule.carry(format)) >> FLOAT32.fraction_bits) - format.max_exponent).clamp(min=0)
    byte = torch.where(amax.isinf(), rule.infinity_byte(format) * (bits > 0), byte)
    byte = torch.where(amax.isnan(), E8M0FNU.nan_code, byte)
    inverse = torch.where(byte == E8M0FNU.max_code, 1 << 22, (E8M0FNU.max_code - byte) << FLOAT32.fraction_bits)
    inverse = torch.where(amax.isnan(), _FLOAT32_NAN, inverse)
    scale = byte.to(torch.uint8).view(torch.float8_e8m0fnu)
    return Scales(inv_scale=inverse.to(torch.int32).view(torch.float32), scale=scale)


def initial_delayed_state(delayed: DelayedScaling, *, device: torch.device | str | None = None) -> DelayedState:
    """The state of a tensor before its first step: an empty history, inv_scale 1, not initialized."""
    return DelayedState(
        amax_history=torch.zeros(delayed.history_length, dtype=torch.float32, device=device),
        inv_scale=torch.ones((), dtype=torch.float32, device=device),
        initialized=torch.zeros((), dtype=torch.bool, device=device),
    )


def update_delayed_state(
    state: DelayedState,
    amax: Tensor,
    format: Format | Float8Name | torch.dtype,
    rule: ScaleRule,
    delayed: DelayedScaling,
) -> DelayedState:
    """The new state after a step whose casts had the maximum `amax`, by the rule of `DelayedScaling`.

    Shapes:
        amax float32 with one element.

    Exactness: as for `scale_from_amax`.

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: unknown format.
    """
    require_tensor("update_delayed_state", "amax", amax)
    if amax.numel() != 1 or amax.dtype is not torch.float32:
        raise OperandError(
            f"update_delayed_state: amax must be one float32; got {amax.dtype} of shape {list(amax.shape)}; "
            "take amax(x), or the maximum of those of all casts since the last update"
        )
    if tuple(state.amax_history.shape) != (delayed.history_length,):
        raise OperandError(
            f"update_delayed_state: the state's amax_history must have shape [{delayed.history_length}]; got "
            f"{list(state.amax_history.shape)}; the state is of another recipe, start with initial_delayed_state"
        )
    check_rule("update_delayed_state", rule, delayed.margin, is_delayed=True)
    amax = amax.detach().reshape(())
    is_usable = amax.isfinite() & (amax > 0)
    newest = torch.where(is_usable, amax, torch.zeros_like(amax))
    history = torch.cat([newest.reshape(1), state.amax_history[:-1]])
    reference = newest if delayed.reduction is AmaxHistoryReduction.MOST_RECENT else history.amax()
    inv_scale = scale_from_amax(reference, format, rule, margin=delayed.margin).inv_scale
    return DelayedState(
        amax_history=history,
        inv_scale=torch.where(is_usable, inv_scale, state.inv_scale),
        initialized=state.initialized | is_usable,
    )


def reciprocal(inv_scale: Tensor) -> Tensor:
    """`float32(1 / inv_scale)`, correctly rounded: a float64 quotient of tensors, rounded to float32 (NUMERICS 6)."""
    inverse = inv_scale.double()
    return (torch.ones_like(inverse) / inverse).float()


def checked_scale(call: str, name: str, scale: Tensor | float, x: Tensor, granularity: Granularity) -> Tensor:
    """The scales of `x` [..., K]: [1, 1], or `granularity.scale_shape(rows, K)`; OperandError if they are not that."""
    if isinstance(scale, int | float):
        scale = torch.full((1, 1), scale_number(call, name, scale), dtype=torch.float32, device=x.device)
    require_tensor(call, name, scale)
    rows, k = rows_of(call, x)
    shape = Granularity.scale_shape(granularity, rows, k)  # this way torch 2.11 can trace it
    is_one = granularity is Granularity.TENSORWISE and scale.numel() == 1
    if scale.dtype is not torch.float32 or not (is_one or tuple(scale.shape) == shape):
        raise OperandError(
            f"{call}: {name} must be float32 of shape {list(shape)} for {granularity.value} scales of a "
            f"{[rows, k]} operand; got {scale.dtype} of shape {list(scale.shape)}; "
            "take amax and scales at the same granularity"
        )
    if scale.device != x.device:
        raise OperandError(f"{call}: {name} is on {scale.device} and x on {x.device}; move one to the other's device")
    return scale.detach().reshape(1, 1) if is_one else scale.detach()


def spread_scale(call: str, name: str, scale: Tensor | float, x: Tensor, granularity: Granularity) -> Tensor:
    """`checked_scale`, expanded so that it broadcasts against `x`."""
    scale = checked_scale(call, name, scale, x, granularity)
    if granularity is Granularity.TENSORWISE:
        return scale
    sizes = rows_of(call, x)
    for dim, block in enumerate(granularity.block):
        if block is not None and block > 1:
            # Not repeat_interleave and a slice: compiled for the CPU by torch 2.13, the last block gets wrong scales.
            group = torch.arange(sizes[dim], device=x.device) // block
            scale = scale.index_select(dim, replicated(group, scale))
    return scale if x.ndim == 2 else scale.reshape(*x.shape[:-1], scale.shape[1])


def canonical_nan(values: Tensor) -> Tensor:
    """The float32 values, with every NaN replaced by the canonical NaN."""
    return torch.where(values.isnan(), _FLOAT32_NAN, values.view(torch.int32)).view(torch.float32)


def _padded(x: Tensor, rows: int, k: int) -> Tensor:
    if is_known(x.shape[0] == rows) and is_known(x.shape[1] == k):
        return x.contiguous()
    if is_dtensor(x):  # torch 2.11 gives every `pad` of a DTensor the shape of the first
        x = torch.cat([x, x.new_zeros((rows - x.shape[0], x.shape[1]))])
        return torch.cat([x, x.new_zeros((rows, k - x.shape[1]))], dim=1)
    return torch.nn.functional.pad(x, (0, k - x.shape[1], 0, rows - x.shape[0]))

"""From a tensor to its scales: amax, the scale rule, and the state of delayed scaling of one tensor, as pure functions.

No host synchronisation, so that all functions run under `torch.compile` and in CUDA graphs. No function has a gradient:
the backward pass treats scales as constants.
"""

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import Format
from f8emu.spec.names import Float8Name, GranularityName
from f8emu.spec.scaling import (
    BLOCK,
    MAX_MARGIN,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    Granularity,
    ScaleRule,
    Scales,
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
        case Granularity.BLOCKWISE_1X128:
            largest = _padded(magnitude, rows, shape[1] * BLOCK).view(rows, shape[1], BLOCK).amax(dim=2)
        case Granularity.BLOCKWISE_128X128:
            padded = _padded(magnitude, shape[0] * BLOCK, shape[1] * BLOCK)
            largest = padded.view(shape[0], BLOCK, shape[1], BLOCK).amax(dim=(1, 3))
    return canonical_nan(reduced(largest).view(torch.float32) if is_dtensor(x) else largest.float())


def scale_from_amax(
    amax: Tensor, format: Format | Float8Name | torch.dtype, rule: ScaleRule = ScaleRule(), *, margin: int = 0
) -> Scales:
    """`inv_scale = float32(max * 2^-margin / max(amax, amax_floor))` and `scale = float32(1 / inv_scale)`.

    With `rule.power_of_two`, inv_scale loses its fraction bits before scale is taken. amax 0 counts as the floor,
    amax inf gives 0 and inf, amax NaN gives NaN and NaN.

    Shapes:
        amax float32, any shape -> two float32 tensors of that shape.

    Exactness: both quotients are correctly rounded.

    Raises:
        OperandError: wrong dtype.
        SpecError: unknown format, or a margin out of range.
    """
    # Float64 quotients of two tensors, rounded to float32: a float64 quotient of two float32 numbers is never so close
    # to the midpoint of two float32 that the second rounding matters. Alternatives fail: eager torch computes a Python
    # number over a tensor as the number times a reciprocal, and compiled float32 division is approximate on a GPU.
    require_tensor("scale_from_amax", "amax", amax)
    target = float8_format("scale_from_amax", format)
    if amax.dtype is not torch.float32:
        raise OperandError(f"scale_from_amax: amax must be float32, as amax() gives it; got {amax.dtype}")
    require_margin("scale_from_amax", margin)
    if cpu_casts.takes(amax):
        return Scales(*cpu_casts.scales(amax, target, rule, margin))
    floored = amax.detach().double().clamp(min=rule.amax_floor)  # NaN stays NaN
    inv_scale = (torch.full_like(floored, target.max * 2.0**-margin) / floored).float()
    if rule.power_of_two:
        cut = (inv_scale.view(torch.int32) & _FRACTION_CLEARED).view(torch.float32)
        inv_scale = torch.where(inv_scale.isnan(), inv_scale, cut)
    return Scales(inv_scale=inv_scale, scale=reciprocal(inv_scale))


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


def require_margin(call: str, margin: int) -> None:
    """Raise SpecError for a margin out of range."""
    if not 0 <= margin <= MAX_MARGIN:
        raise SpecError(f"{call}: margin must be in 0..{MAX_MARGIN}; got {margin}")


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

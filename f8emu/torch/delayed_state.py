"""The state of delayed scaling of one tensor: initial state and update, as pure functions.

No host synchronisation, so that both run under `torch.compile` and in CUDA graphs.
"""

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import Format
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, ScaleRule
from f8emu.spec.trace import DelayedState
from f8emu.torch.dtypes import require_tensor
from f8emu.torch.scale import scale_from_amax


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
    format: Format | str | torch.dtype,
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

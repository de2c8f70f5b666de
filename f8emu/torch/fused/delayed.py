"""Casts under delayed scaling, and the update of its state.

Between two updates a tensor has an `inv_scale` [1, 1] and an `amax` [1, 1], both float32 on its device. `inv_scale` is
`UNSET` until an update found a usable amax; until then a cast scales by its own amax (`DelayedScaling`). `amax` is the
maximum over the casts since the last update, `UNCALLED` where there was none: as an integer smaller than all others.

No cast waits for a value of the device. Whether an inv_scale is set decides which kernels run, so the host learns
it from a later update; until then the amax of a tensor is found in every cast, and used or not on the device.

Exactness: the states of `f8ref.numpy.update_delayed_state`; the codes and scales of `operators`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from f8emu.spec.formats import E4M3FN
from f8emu.spec.scaling import ScaleRule
from f8emu.torch.fused import eager
from f8emu.torch.fused.availability import kernels_for, launch_plans
from f8emu.torch.fused.fused_cast import FusedCast, Output, check_one_float, named_format, named_rule
from f8emu.torch.fused.operators import given_outputs
from f8emu.torch.library import fake, operator
from f8emu.torch.scale import reciprocal, scale_from_amax
from f8emu.torch.torch_internals import foreach_copy

UNSET = 0.0  # an inv_scale before the first usable amax; others are positive
UNCALLED = -1.0  # an amax without a cast since the last update; others are at least 0, or NaN
# The rows of a layer's counts: updates whose amax was zero, without a cast of this tensor alone, infinite or NaN.
COUNTS = ("zero", "uncalled", "not_finite")

INV_SCALES = "inv_scale_input", "inv_scale_weight", "inv_scale_grad_output"
AMAXES = "amax_input", "amax_weight", "amax_grad_output"
STATE = ("amax_history", "counts", *INV_SCALES, *AMAXES)  # a layer's tensors, in the order in which updates take them

_IS_SET = "_f8emu_is_set"
OWNER = "_f8emu_owner"  # of an inv_scale: the number of its owner, and whether the tensor is a gradient
owners: "WeakValueDictionary[int, Any]" = WeakValueDictionary()  # by number: each a `delayed_update.UpdateGroup`


def mark_set(inv_scale: Tensor, is_set: bool) -> None:
    """Note on the host whether `inv_scale` is known to be set."""
    setattr(inv_scale, _IS_SET, is_set)


def is_known_set(inv_scale: Tensor) -> bool:
    """Whether `inv_scale` is known to be set; a tensor of which nothing is known may be either."""
    return getattr(inv_scale, _IS_SET, False)


def tell_owner(inv_scale: Tensor) -> None:
    """Tell the owner of `inv_scale` of a cast by it: that is how updates know when a pass begins and ends."""
    number, is_gradient = getattr(inv_scale, OWNER, (0, False))
    owner = owners.get(number)
    if owner is not None:
        owner.note_gradient() if is_gradient else owner.begin_pass(inv_scale.is_cuda)


@operator(mutates_args={"amax"})
def note_cast(amax: Tensor, inv_scale: Tensor) -> None:
    """Tell the owner of `inv_scale` of a cast that reads another tensor in its place."""
    tell_owner(inv_scale)
    torch.autograd.graph.increment_version(amax)


@fake(note_cast)
def _(amax: Tensor, inv_scale: Tensor) -> None:
    return None


def _delayed_outputs(
    x: Tensor, fmt: str, inv_scale: Tensor, rows: bool, cols: bool, amax: Tensor, *_: Any
) -> tuple[Output, ...]:
    check_one_float("cast_pair_delayed", "amax", amax, x)
    codes = given_outputs("cast_pair_delayed", x, fmt, inv_scale, rows, cols)
    return *codes, Output((1, 1), side=2), Output((1, 1))


def _launch_delayed(
    on: Any, out: Any, x: Any, fmt: str, inv_scale: Any, rows: bool, cols: bool, amax: Any, *rule: Any
) -> None:
    (m, n), (row, col, used, scale) = on.shape(x), out
    plan = on.plans.cast_pair_given(m, n, fmt, row is not None, col is not None, True, used is not None)
    codes = (x if codes is None else codes for codes in (row, col))
    tensors = x, inv_scale, *codes, amax, scale, inv_scale if used is None else used
    on.run_through(by_state, (m * n, fmt, *rule), plan, *tensors)


def by_state(launch: Callable[..., None], count: int, *rule: Any) -> Callable[..., None]:
    """`launch` of a cast of `count` elements by a state, whose owner is told: compiled code calls this function too."""

    def call(x: Tensor, inv_scale: Tensor, *rest: Tensor) -> None:
        tell_owner(inv_scale)
        if not is_known_set(inv_scale):  # chosen on the device: what that knows would have to be waited for
            plans = launch_plans()
            assert plans is not None, "there is a launch"
            amax = x.new_zeros((1, 1), dtype=torch.float32)
            plans.tensor_amax(count)(x, amax)
            inv_scale = chosen_inv_scale(amax, inv_scale, *rule)
        launch(x, inv_scale, *rest)

    return call


@FusedCast(outputs=_delayed_outputs, launch=_launch_delayed, mutates_args=("amax",), needs_host=True)
def cast_pair_delayed(
    x: Tensor,
    fmt: str,
    inv_scale: Tensor,
    rows: bool,
    cols: bool,
    amax: Tensor,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of `x` [M, N] if `rows`, and of `x^T` [N, M] if `cols`, under the state's `inv_scale`; updates `amax`.

    `amax` is updated in the same pass by an integer maximum, which keeps NaN. In the backward pass of an autograd
    function, `amax` should be a separate tensor (not a view) and an attribute of `ctx`: tensors of `save_for_backward`
    must not change before the backward pass, but casts of other passes change `amax`.

    Returns:
        (row_codes, col_codes, inv_scale, scale): the last two, each [1, 1], are those that were used.
    """
    tell_owner(inv_scale)
    if is_known_set(inv_scale):
        used = inv_scale.clone()
    else:
        used = chosen_inv_scale(eager.tensor_amax(x), inv_scale, fmt, power_of_two, amax_floor, margin)
    eager.raise_amax(amax, x)
    codes = eager.cast_sides_by(x, named_format("cast_pair_delayed", fmt), used, rows, cols)
    return *codes, used, reciprocal(used)


def chosen_inv_scale(
    amax: Tensor, inv_scale: Tensor, fmt: str, power_of_two: bool, amax_floor: float, margin: int
) -> Tensor:
    """`inv_scale` where it is set, otherwise that of `amax`, [1, 1]; chosen on the device."""
    format, rule = named_rule("cast_pair_delayed", fmt, power_of_two, amax_floor)
    return torch.where(inv_scale > UNSET, inv_scale, scale_from_amax(amax, format, rule, margin=margin).inv_scale)


def amaxes_of(amaxes: list[Tensor]) -> Tensor:
    """The amaxes of layers, those of each stacked by its groups, [G, 1]: one tensor [3 * L] of integers."""
    if all(x.shape[0] == 1 for x in amaxes):
        return torch.cat(amaxes).flatten().view(torch.int32)
    of_layers = [torch.cat(amaxes[i : i + 3], dim=1).flatten() for i in range(0, len(amaxes), 3)]
    return torch.cat(of_layers).view(torch.int32)


def update_delayed(
    states: list[Tensor],
    report: Tensor,
    taken: Tensor,
    fmts: str,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
    is_most_recent: bool,
) -> None:
    """The update of all layers by the amaxes that were `taken`; nothing changes of a tensor that was not cast.

    `report` becomes twice the number of amaxes so far that were not finite, plus one if the inv_scale is set. It is on
    the device, or in pinned memory of the host, which is written to whenever the device gets there.

    Shapes:
        states: `STATE` of each of L layers: [3, H] newest first, [3, 3] int64 (`COUNTS` by tensor), six of [1, 1].
        report [L, 3] int32; taken [3 * L], of `amaxes_of`, the maximum over all ranks.
        fmts: three names with commas, "" for a tensor without delayed scales.
    """
    if (plans := kernels_for(states[0])) is not None:
        rule = (power_of_two, amax_floor, margin, is_most_recent, UNCALLED)
        plan = plans.update_delayed(len(states) // len(STATE), states[0].shape[1], fmts, *rule)
        plan(taken, _addresses(taken.device, tuple(map(Tensor.data_ptr, states))), report)
        return
    # The tensors below are [L, 3] or [L, 3, H].
    histories, counts, inv_scales = states[:: len(STATE)], states[1 :: len(STATE)], _of_tensors(states, INV_SCALES[0])
    amax, is_called = taken.view(torch.float32).view(-1, 3), taken.view(-1, 3) >= 0
    is_usable = amax.isfinite() & (amax > 0)
    # 1. Shift the histories of tensors that were cast by one.
    newest = torch.where(is_usable, amax, torch.zeros_like(amax))
    old = torch.stack(histories)
    history = torch.cat([newest.unsqueeze(2), old[:, :, :-1]], dim=2)
    history = torch.where(is_called.unsqueeze(2), history, old)
    reference = newest if is_most_recent else history.amax(dim=2)
    # 2. The inv_scales of the next pass; a tensor without a usable amax keeps its own.
    rule = ScaleRule(power_of_two=power_of_two, amax_floor=amax_floor)
    names = fmts.split(",")
    formats = [named_format("update_delayed", fmt or E4M3FN.name) for fmt in names]
    columns = [
        scale_from_amax(reference[:, i : i + 1], fmt, rule, margin=margin).inv_scale for i, fmt in enumerate(formats)
    ]
    inv_scale = torch.where(is_usable, torch.cat(columns, dim=1), torch.cat(inv_scales).view(-1, 3))
    # 3. What was not usable.
    kinds = torch.stack([amax == 0, ~is_called, is_called & ~amax.isfinite()], dim=1)
    is_cast = torch.tensor([bool(fmt) for fmt in names], device=taken.device)
    count = torch.stack(counts) + (kinds & is_cast & is_called.any(dim=1)[:, None, None])
    # 4. Write back, as few operations for many layers as for one.
    amaxes = torch.full_like(amax, UNCALLED)
    singles = [x for new in (inv_scale, amaxes) for x in new.view(-1, 1, 1).unbind()]
    floats = [*histories, *inv_scales, *_of_tensors(states, AMAXES[0])]
    for buffers, new in ((floats, [*history.unbind(), *singles]), (counts, [*count.unbind()])):
        foreach_copy(buffers, new)
    report.copy_(2 * count[:, 2] + (inv_scale > UNSET), non_blocking=True)


def _of_tensors(states: list[Tensor], first: str) -> list[Tensor]:
    # The three tensors of `STATE` that begin with `first`, for all layers.
    at = STATE.index(first)
    return [x for i in range(at, len(states), len(STATE)) for x in states[i : i + 3]]


@lru_cache(maxsize=4096)  # models; what a CUDA graph reads has to stay
def _addresses(device: torch.device, pointers: tuple[int, ...]) -> Tensor:
    return torch.tensor(pointers, dtype=torch.int64, device=device)

"""The casts of a gated feed-forward block, with SiLU and product fused in, as torch.library operators.

With `gate` and `up` [M, N], both bfloat16, the block's last layer has the input `hidden = silu(gate) * up`. Forward,
one pass over both writes the codes of `hidden`. Backward, one pass over `grad_hidden`, `gate` and `up` writes the codes
of `grad_gate` and `grad_up`, each also transposed, and of `hidden^T`. This needs scales that do not depend on the amax
of a whole tensor: those of delayed scaling and of 1x128 blocks.

Exactness: the codes, scales and amaxes that `operators` computes from the bfloat16 tensors of eager torch,

    silu    = aten::silu(gate)        grad_up   = grad_hidden * silu
    hidden  = silu * up               grad_gate = aten::silu_backward(grad_hidden * up, gate)

Without kernels, the code below calls these; the kernels repeat the arithmetic of aten's CUDA kernels (see
`silu_arithmetic`). CPU and GPU agree on `hidden` and `grad_up`. On `grad_gate` they may rarely differ by one rounding
to bfloat16, as in eager torch, because their `exp` differs in the last bit of float32. Given the bfloat16 tensors,
codes and scales are those of `f8ref.numpy`.

Raises: as `operators`; OperandError also for dtypes other than bfloat16 and for different shapes or devices.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import Format
from f8emu.torch.dtypes import require_values
from f8emu.torch.fused import operators
from f8emu.torch.fused.arguments import check_one_float, empty_blocks, named_format, named_rule, new_codes, new_floats
from f8emu.torch.fused.delayed import cast_pair_delayed, is_known_set, tell_owner
from f8emu.torch.library import fake, operator

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Codes of `grad_gate`, `grad_gate^T`, `grad_up`, `grad_up^T`, `hidden^T`; scales of `grad_gate` and `grad_up`."""
_Wanted = tuple[bool, bool, bool, bool]
"""Which codes are requested: rows, gate_cols, up_cols, hidden_cols."""


@operator(mutates_args={"amax"})
def hidden_delayed(
    gate: Tensor,
    up: Tensor,
    fmt: str,
    inv_scale: Tensor,
    amax: Tensor,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of `hidden` [M, N] under the state's inv_scale; `amax` is updated by that of `hidden`.

    Returns:
        (codes, inv_scale, scale): the last two, each [1, 1], are those that were used.
    """
    out = _empty_hidden(gate, up, fmt, inv_scale, amax)
    if (launch := _launches_for(gate)) is None or not is_known_set(inv_scale):
        rule = (power_of_two, amax_floor, margin)
        codes, _, used, scale = cast_pair_delayed(silu(gate) * up, fmt, inv_scale, True, False, amax, *rule)
        return codes, used, scale
    tell_owner(inv_scale)
    torch.autograd.graph.increment_version(amax)
    codes, *used = out
    launch.hidden_given(*gate.shape, fmt)(gate.contiguous(), up.contiguous(), inv_scale, codes, amax, *used)
    return out


@fake(hidden_delayed)
def _(gate: Tensor, up: Tensor, fmt: str, inv_scale: Tensor, amax: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_hidden(gate, up, fmt, inv_scale, amax)


@operator()
def hidden_blocks(gate: Tensor, up: Tensor, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Tensor, Tensor]:
    """Codes of `hidden` [M, N] and their scales, in 1x128 blocks."""
    format, _ = named_rule("hidden_blocks", fmt, power_of_two, amax_floor)
    codes, scale = _empty_hidden_blocks(gate, up, format)
    if (launch := _launches_for(gate)) is None:
        found = operators.cast_blocks(silu(gate) * up, fmt, False, True, False, power_of_two, amax_floor)
        return found[0], found[1]
    plan = launch.hidden_vectors(*gate.shape, fmt, power_of_two, amax_floor)
    plan(gate.contiguous(), up.contiguous(), codes, scale)
    return codes, scale


@fake(hidden_blocks)
def _(gate: Tensor, up: Tensor, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Tensor, Tensor]:
    format, _ = named_rule("hidden_blocks", fmt, power_of_two, amax_floor)
    return _empty_hidden_blocks(gate, up, format)


@operator(mutates_args={"gate_amax", "up_amax"})
def gradients_delayed(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: str,
    hidden_fmt: str,
    gate_inv_scale: Tensor,
    up_inv_scale: Tensor,
    hidden_inv_scale: Tensor,
    rows: bool,
    gate_cols: bool,
    up_cols: bool,
    hidden_cols: bool,
    gate_amax: Tensor,
    up_amax: Tensor,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
) -> _Gradients:
    """Codes of both gradients and their transposes in `fmt` and of `hidden^T` in `hidden_fmt`, by inv_scales [1, 1].

    If codes of a gradient are requested, its amax is updated to the maximum of itself and that of the gradient.

    Args:
        grad_hidden: [M, N], bfloat16, as `gate` and `up`.
        gate: the output of w1, the input of SiLU.
        up: the output of w3.
        fmt: the gradients' format.
        hidden_fmt: that of `hidden`.
        gate_inv_scale: of `grad_gate`, in its state.
        up_inv_scale: of `grad_up`, in its state.
        hidden_inv_scale: of `hidden`, as it was used in the forward pass.
        rows: request `grad_gate` and `grad_up` [M, N].
        gate_cols: request `grad_gate^T` [N, M].
        up_cols: request `grad_up^T` [N, M].
        hidden_cols: request `hidden^T` [N, M].
        gate_amax: updated in place, float32 with one element.
        up_amax: updated in place, float32 with one element.
        power_of_two: of the scale rule.
        amax_floor: of the scale rule.
        margin: of delayed scaling.

    Returns:
        Codes: of `grad_gate`, of `grad_gate^T`, of `grad_up`, of `grad_up^T`, of `hidden^T`; empty if not requested.
        Scales [1, 1], as they were used: of `grad_gate`, of `grad_up`; empty if none of their codes is requested.
    """
    wanted, inv_scales = (rows, gate_cols, up_cols, hidden_cols), (gate_inv_scale, up_inv_scale, hidden_inv_scale)
    codes = _empty_gradients((grad_hidden, gate, up), (fmt, hidden_fmt), inv_scales, (gate_amax, up_amax), wanted)
    scales = _empty_scales(gate, wanted)
    launch, is_known = _launches_for(gate), is_known_set(gate_inv_scale) and is_known_set(up_inv_scale)
    if launch is None or not is_known:
        activated, rule = silu(gate), (power_of_two, amax_floor, margin)
        if rows or gate_cols:
            grad_gate, of_gate = _grad_gate(grad_hidden, gate, up), (gate_inv_scale, rows, gate_cols, gate_amax)
            *codes[0:2], _, scales[0] = cast_pair_delayed(grad_gate, fmt, *of_gate, *rule)
        if rows or up_cols:
            of_up = (up_inv_scale, rows, up_cols, up_amax)
            *codes[2:4], _, scales[1] = cast_pair_delayed(grad_hidden * activated, fmt, *of_up, *rule)
        if hidden_cols:
            codes[4] = operators.cast_pair_given(activated * up, hidden_fmt, hidden_inv_scale, False, True)[1]
        return _seven([*codes, *scales])
    tell_owner(gate_inv_scale)
    tell_owner(up_inv_scale)
    torch.autograd.graph.increment_version((gate_amax, up_amax))
    tensors = (grad_hidden.contiguous(), gate.contiguous(), up.contiguous())
    plan = launch.gradients_given(*gate.shape, fmt, hidden_fmt, *wanted)
    plan(*tensors, *inv_scales, gate_amax, up_amax, *codes, *scales)
    return _seven([*codes, *scales])


@fake(gradients_delayed)
def _(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: str,
    hidden_fmt: str,
    gate_inv_scale: Tensor,
    up_inv_scale: Tensor,
    hidden_inv_scale: Tensor,
    rows: bool,
    gate_cols: bool,
    up_cols: bool,
    hidden_cols: bool,
    gate_amax: Tensor,
    up_amax: Tensor,
    *_: Any,
) -> _Gradients:
    wanted, inv_scales = (rows, gate_cols, up_cols, hidden_cols), (gate_inv_scale, up_inv_scale, hidden_inv_scale)
    codes = _empty_gradients((grad_hidden, gate, up), (fmt, hidden_fmt), inv_scales, (gate_amax, up_amax), wanted)
    return _seven([*codes, *_empty_scales(gate, wanted)])


@operator()
def gradients_blocks(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: str,
    rows: bool,
    gate_cols: bool,
    up_cols: bool,
    hidden_cols: bool,
    power_of_two: bool,
    amax_floor: float,
) -> list[Tensor]:
    """Codes and scales, in 1x128 blocks, of both gradients and their transposes and of `hidden^T`.

    The arguments are those of `gradients_delayed`.

    Returns:
        Codes, then scale: of `grad_gate`, of `grad_gate^T`, of `grad_up`, of `grad_up^T`, of `hidden^T`.
    """
    wanted = (rows, gate_cols, up_cols, hidden_cols)
    format, _ = named_rule("gradients_blocks", fmt, power_of_two, amax_floor)
    out = _empty_gradient_blocks((grad_hidden, gate, up), format, wanted)
    if (launch := _launches_for(gate)) is None:
        activated, settings = silu(gate), (power_of_two, amax_floor)
        if rows or gate_cols:
            grad_gate = _grad_gate(grad_hidden, gate, up)
            out[0:4] = operators.cast_blocks(grad_gate, fmt, False, rows, gate_cols, *settings)
        if rows or up_cols:
            out[4:8] = operators.cast_blocks(grad_hidden * activated, fmt, False, rows, up_cols, *settings)
        if hidden_cols:
            out[8:10] = operators.cast_blocks(activated * up, fmt, False, False, True, *settings)[2:]
        return out
    tensors = (grad_hidden.contiguous(), gate.contiguous(), up.contiguous())
    launch.gradients_vectors(*gate.shape, fmt, power_of_two, amax_floor, *wanted)(*tensors, *out)
    return out


@fake(gradients_blocks)
def _(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: str,
    rows: bool,
    gate_cols: bool,
    up_cols: bool,
    hidden_cols: bool,
    power_of_two: bool,
    amax_floor: float,
) -> list[Tensor]:
    format, _ = named_rule("gradients_blocks", fmt, power_of_two, amax_floor)
    return _empty_gradient_blocks((grad_hidden, gate, up), format, (rows, gate_cols, up_cols, hidden_cols))


def _launches_for(x: Tensor) -> ModuleType | None:
    """The module that launches the kernels on `x`; None where `operators` runs plain torch."""
    if operators.kernels_for(x) is None:
        return None
    from f8emu.torch.fused import silu_launch

    return silu_launch


def _grad_gate(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad_hidden * up, gate)


def _seven(results: list[Tensor]) -> _Gradients:
    # A tuple: torch cannot functionalize an operator that writes to an argument and returns a list.
    first, second, third, fourth, fifth, sixth, seventh = results
    return first, second, third, fourth, fifth, sixth, seventh


def _empty_hidden(gate: Tensor, up: Tensor, fmt: str, inv_scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    call = "hidden_delayed"
    _check(call, gate=gate, up=up)
    check_one_float(call, "inv_scale", inv_scale, gate)
    check_one_float(call, "amax", amax, gate)
    return new_codes(gate, named_format(call, fmt), *gate.shape), new_floats(gate, 1, 1), new_floats(gate, 1, 1)


def _empty_hidden_blocks(gate: Tensor, up: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    _check("hidden_blocks", gate=gate, up=up)
    return empty_blocks(gate, format, False, True, False)[:2]


def _empty_gradients(
    tensors: tuple[Tensor, Tensor, Tensor],
    fmts: tuple[str, str],
    inv_scales: tuple[Tensor, Tensor, Tensor],
    amaxes: tuple[Tensor, Tensor],
    wanted: _Wanted,
) -> list[Tensor]:
    call, (grad_hidden, gate, up) = "gradients_delayed", tensors
    _check(call, grad_hidden=grad_hidden, gate=gate, up=up)
    for name, value in zip(("gate", "up", "hidden"), inv_scales, strict=True):
        check_one_float(call, f"{name}_inv_scale", value, gate)
    for name, value in zip(("gate", "up"), amaxes, strict=True):
        check_one_float(call, f"{name}_amax", value, gate)
    m, n = gate.shape
    rows, gate_cols, up_cols, hidden_cols = wanted
    of_gradients, of_hidden = (named_format(call, fmt) for fmt in fmts)
    shapes = ((rows, (m, n)), (gate_cols, (n, m)), (rows, (m, n)), (up_cols, (n, m)))
    codes = [new_codes(gate, of_gradients, *(shape if is_wanted else (0, 0))) for is_wanted, shape in shapes]
    return [*codes, new_codes(gate, of_hidden, *((n, m) if hidden_cols else (0, 0)))]


def _empty_scales(gate: Tensor, wanted: _Wanted) -> list[Tensor]:
    rows, gate_cols, up_cols, _ = wanted
    return [new_floats(gate, *((1, 1) if rows or cols else (0, 0))) for cols in (gate_cols, up_cols)]


def _empty_gradient_blocks(tensors: tuple[Tensor, Tensor, Tensor], format: Format, wanted: _Wanted) -> list[Tensor]:
    grad_hidden, gate, up = tensors
    _check("gradients_blocks", grad_hidden=grad_hidden, gate=gate, up=up)
    rows, gate_cols, up_cols, hidden_cols = wanted
    return [
        *empty_blocks(gate, format, False, rows, gate_cols),
        *empty_blocks(gate, format, False, rows, up_cols),
        *empty_blocks(gate, format, False, False, hidden_cols)[2:],
    ]


def _check(call: str, **tensors: Tensor) -> None:
    """Check that all tensors are bfloat16 matrices with the shape and device of `gate`."""
    gate = tensors["gate"]
    for name, x in tensors.items():
        require_values(call, x, ndim=2, name=name)
        if x.dtype is not torch.bfloat16 or x.shape != gate.shape or x.device != gate.device:
            raise OperandError(
                f"{call}: {name} must be bfloat16, of the shape and on the device of gate; got {x.dtype} of shape "
                f"{list(x.shape)} on {x.device}, and gate of shape {list(gate.shape)} on {gate.device}; in other "
                "dtypes compute silu(gate) * up and cast that"
            )

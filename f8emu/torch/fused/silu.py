"""The casts of a gated feed-forward block, with SiLU and product fused in, as torch.library operators.

With `gate` and `up` [M, N], both bfloat16, the block's last layer has the input `hidden = silu(gate) * up`. Forward,
one pass over both writes the codes of `hidden`. Backward, one pass over `grad_hidden`, `gate` and `up` writes the codes
of `grad_gate` and `grad_up`, each also transposed, and of `hidden^T`. This needs scales that do not depend on the amax
of the tensor itself: those of delayed scaling.

Exactness: the codes, scales and amaxes that `operators` computes from the bfloat16 tensors of eager torch,

    silu    = aten::silu(gate)        grad_up   = grad_hidden * silu
    hidden  = silu * up               grad_gate = aten::silu_backward(grad_hidden * up, gate)

Without kernels, the code below calls these; `silu_kernels` repeats the arithmetic of aten's CUDA kernels. CPU and GPU
agree on `hidden` and `grad_up`. On `grad_gate` they may rarely differ by one rounding to bfloat16, as in eager torch,
because their `exp` differs in the last bit of float32.

The kernels run once the host knows that the inv_scales are set; before, plain torch computes the tensors and
`cast_pair_delayed` casts them.

Raises: as `operators`; OperandError also for dtypes other than bfloat16 and for different shapes or devices.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from f8emu.spec.errors import OperandError
from f8emu.torch.chip import require_values
from f8emu.torch.fused.delayed import cast_pair_delayed, is_known_set, tell_owner
from f8emu.torch.fused.fused_cast import FusedCast, Output, check_one_float, codes_of, named_format
from f8emu.torch.fused.operators import cast_pair_given

# Codes of `grad_gate`, `grad_gate^T`, `grad_up`, `grad_up^T`, `hidden^T`; scales of `grad_gate` and `grad_up`.
_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _hidden_outputs(gate: Tensor, up: Tensor, fmt: str, inv_scale: Tensor, amax: Tensor, *_: Any) -> tuple[Output, ...]:
    call = "hidden_delayed"
    _check(call, {"gate": gate, "up": up}, {"inv_scale": inv_scale, "amax": amax})
    named_format(call, fmt)
    return codes_of(fmt, *gate.shape), Output((1, 1)), Output((1, 1))


def _launch_hidden(on: Any, out: Any, gate: Any, up: Any, fmt: str, inv_scale: Any, amax: Any, *_: Any) -> None:
    tell_owner(inv_scale)
    codes, used, scale = out
    on.run(on.plans.hidden_delayed(*on.shape(gate), fmt), gate, on.contiguous(up), inv_scale, codes, amax, used, scale)


@FusedCast(
    outputs=_hidden_outputs,
    launch=_launch_hidden,
    mutates_args=("amax",),
    is_ready=lambda gate, up, fmt, inv_scale, *_: is_known_set(inv_scale),
)
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
    rule = (power_of_two, amax_floor, margin)
    codes, _, used, scale = cast_pair_delayed(silu(gate) * up, fmt, inv_scale, True, False, amax, *rule)
    return codes, used, scale


def _gradients_outputs(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, fmt: str, hidden_fmt: str, *args: Any
) -> tuple[Output, ...]:
    call, names = "gradients_delayed", ("gate_inv_scale", "up_inv_scale", "hidden_inv_scale", "gate_amax", "up_amax")
    numbers = dict(zip(names, (*args[:3], *args[7:9]), strict=True))
    _check(call, {"grad_hidden": grad_hidden, "gate": gate, "up": up}, numbers)
    for name in (fmt, hidden_fmt):
        named_format(call, name)
    (m, n), (rows, gate_cols, up_cols, hidden_cols) = gate.shape, args[3:7]
    row = codes_of(fmt, m, n, is_wanted=rows)
    of_gate, of_up = (codes_of(fmt, n, m, is_wanted=cols) for cols in (gate_cols, up_cols))
    scales = (Output((1, 1) if rows or cols else (0, 0)) for cols in (gate_cols, up_cols))
    return row, of_gate, row, of_up, codes_of(hidden_fmt, n, m, is_wanted=hidden_cols), *scales


def _launch_gradients(
    on: Any, out: Any, grad_hidden: Any, gate: Any, up: Any, fmt: str, hidden_fmt: str, *args: Any
) -> None:
    (*inv_scales, _, _, _, _, gate_amax, up_amax), wanted = args[:9], args[3:7]
    tell_owner(inv_scales[0])
    tell_owner(inv_scales[1])
    results = [grad_hidden if x is None else x for x in out]
    tensors = grad_hidden, on.contiguous(gate), on.contiguous(up), *inv_scales, gate_amax, up_amax
    on.run(on.plans.gradients_delayed(*on.shape(gate), fmt, hidden_fmt, *wanted), *tensors, *results)


@FusedCast(
    outputs=_gradients_outputs,
    launch=_launch_gradients,
    mutates_args=("gate_amax", "up_amax"),
    is_ready=lambda *args: is_known_set(args[5]) and is_known_set(args[6]),
)
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
    """Codes of both gradients [M, N] and their transposes in `fmt` and of `hidden^T` in `hidden_fmt`: `_Gradients`.

    `gate_inv_scale` and `up_inv_scale` are those of the gradients' states, `hidden_inv_scale` is the one that the
    forward pass used. `rows` requests `grad_gate` and `grad_up`, each of the other three a transpose; what is not
    requested is empty. The amax of a gradient of which codes are requested is updated.
    """
    # The tensors that eager torch would make, each cast by its own state.
    activated, rule = silu(gate), (power_of_two, amax_floor, margin)
    outputs = [
        gate.new_empty((0, 0), dtype=getattr(torch, name)) for name in [*[fmt] * 4, hidden_fmt, *["float32"] * 2]
    ]
    if rows or gate_cols:
        grad_gate = torch.ops.aten.silu_backward(grad_hidden * up, gate)
        found = cast_pair_delayed(grad_gate, fmt, gate_inv_scale, rows, gate_cols, gate_amax, *rule)
        outputs[0], outputs[1], _, outputs[5] = found
    if rows or up_cols:
        found = cast_pair_delayed(grad_hidden * activated, fmt, up_inv_scale, rows, up_cols, up_amax, *rule)
        outputs[2], outputs[3], _, outputs[6] = found
    if hidden_cols:
        outputs[4] = cast_pair_given(activated * up, hidden_fmt, hidden_inv_scale, False, True)[1]
    # A tuple: torch cannot functionalize an operator that writes to an argument and returns a list.
    first, second, third, fourth, fifth, sixth, seventh = outputs
    return first, second, third, fourth, fifth, sixth, seventh


def _check(call: str, tensors: dict[str, Tensor], numbers: dict[str, Tensor]) -> None:
    gate = tensors["gate"]
    for name, x in tensors.items():
        require_values(call, x, ndim=2, name=name)
        if x.dtype is not torch.bfloat16 or x.shape != gate.shape or x.device != gate.device:
            raise OperandError(
                f"{call}: {name} must be bfloat16, of the shape and on the device of gate; got {x.dtype} of shape "
                f"{list(x.shape)} on {x.device}, and gate of shape {list(gate.shape)} on {gate.device}; in other "
                "dtypes compute silu(gate) * up and cast that"
            )
    for name, value in numbers.items():
        check_one_float(call, name, value, gate)

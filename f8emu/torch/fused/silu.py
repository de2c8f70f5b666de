"""The casts of a gated feed-forward block, with SiLU and product fused in, as torch.library operators.

With `gate` and `up` [M, N], both bfloat16, the block's last layer has the input `hidden = silu(gate) * up`. One pass
over both casts it; one pass over `grad_hidden`, `gate` and `up` casts both gradients and `hidden^T`. The scales are
those of delayed scaling, which do not depend on the tensors themselves.

Exactness: the codes, scales and amaxes that `operators` computes from the bfloat16 tensors of eager torch. Without
kernels `swiglu` and `swiglu_gradients` compute these; `silu_kernels` repeats the arithmetic of aten's CUDA kernels. CPU
and GPU agree on `hidden` and `grad_up`. On `grad_gate` they may rarely differ by one rounding to bfloat16, as in eager
torch, because their `exp` differs in the last bit of float32.

The kernels run once the host knows that the inv_scales are set.
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
from f8emu.torch.library import fake, operator


@operator()
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, rounded twice: an operator, since a compiler that fuses both would round once."""
    return silu(gate) * up


@operator()
def swiglu_gradients(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`grad_gate` and `grad_up`, rounded as in `swiglu`."""
    return torch.ops.aten.silu_backward(grad_hidden * up, gate), grad_hidden * silu(gate)


fake(swiglu)(lambda gate, up: torch.empty_like(gate))
fake(swiglu_gradients)(lambda grad_hidden, gate, up: (torch.empty_like(gate), torch.empty_like(gate)))


def _hidden_outputs(gate: Tensor, up: Tensor, fmt: str, inv_scale: Tensor, amax: Tensor, *_: Any) -> tuple[Output, ...]:
    _check("hidden_delayed", {"gate": gate, "up": up}, {"inv_scale": inv_scale, "amax": amax}, fmt)
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
    """Codes of `hidden` [M, N] under the state's inv_scale, and inv_scale and scale that were used; updates `amax`."""
    rule = (power_of_two, amax_floor, margin)
    codes, _, used, scale = cast_pair_delayed(swiglu.function(gate, up), fmt, inv_scale, True, False, amax, *rule)
    return codes, used, scale


def _gradients_outputs(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, fmt: str, hidden_fmt: str, *args: Any
) -> tuple[Output, ...]:
    names: tuple[str, ...] = "gate_inv_scale", "up_inv_scale", "hidden_inv_scale", "gate_amax", "up_amax"
    numbers: dict[str, Tensor] = dict(zip(names, args[:5], strict=True))
    _check("gradients_delayed", {"grad_hidden": grad_hidden, "gate": gate, "up": up}, numbers, fmt, hidden_fmt)
    m, n = gate.shape
    both = codes_of(fmt, m, n), codes_of(fmt, n, m)
    return *both, *both, codes_of(hidden_fmt, n, m), Output((1, 1)), Output((1, 1))


def _launch_gradients(
    on: Any, out: Any, grad_hidden: Any, gate: Any, up: Any, fmt: str, hidden_fmt: str, *args: Any
) -> None:
    tell_owner(args[0])
    tell_owner(args[1])
    tensors = grad_hidden, on.contiguous(gate), on.contiguous(up), *args[:5], *out
    on.run(on.plans.gradients_delayed(*on.shape(gate), fmt, hidden_fmt), *tensors)


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
    gate_amax: Tensor,
    up_amax: Tensor,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes of `grad_gate`, `grad_gate^T`, `grad_up`, `grad_up^T`, `hidden^T`; scales of `grad_gate` and `grad_up`.

    `hidden_inv_scale` is the one that the forward pass used. The amaxes of the gradients are updated.
    """
    grad_gate, grad_up = swiglu_gradients.function(grad_hidden, gate, up)
    rule = (power_of_two, amax_floor, margin)
    row, col, _, scale = cast_pair_delayed(grad_gate, fmt, gate_inv_scale, True, True, gate_amax, *rule)
    up_row, up_col, _, up_scale = cast_pair_delayed(grad_up, fmt, up_inv_scale, True, True, up_amax, *rule)
    _, hidden_col = cast_pair_given(swiglu.function(gate, up), hidden_fmt, hidden_inv_scale, False, True)
    # A tuple: torch cannot functionalize an operator that writes to an argument and returns a list.
    return row, col, up_row, up_col, hidden_col, scale, up_scale


def _check(call: str, tensors: dict[str, Tensor], numbers: dict[str, Tensor], *formats: str) -> None:
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
    for fmt in formats:
        named_format(call, fmt)

"""The tap of a layer: shows observers what the layer casts and multiplies, eager and compiled.

In a graph that was traced with a tap, the calls below are opaque operators. They write to a token, a small CPU tensor,
so that no compiler drops, repeats or reorders them; its first element says whose tap it is, so that layers of the same
code share their graphs.

Exactness: an observed layer has the bits of one that is not.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from f8emu.spec.chips import CHIPS
from f8emu.spec.recipe import TRANSPOSED
from f8emu.torch.gemm.engine import resolve_engine
from f8emu.torch.gemm.planned import layer_split_k
from f8emu.torch.layer.observers import UNKNOWN_CALL, GemmSeen, Tap, TensorSeen, Watched, watched_by
from f8emu.torch.layer.operands import Operand
from f8emu.torch.library import fake, operator
from f8emu.torch.torch_internals import is_in_backward_pass

_calls = itertools.count(1)


def begin_call(tap: Tap | None, x: Tensor) -> Tap | None:
    """The tap for one forward pass of its layer, with the input `x`, and the backward pass of that."""
    return None if tap is None else tap._replace(call=next_call(x.detach()))


def show_tensor(tap: Tap | None, tensor: str, value: Tensor, *, is_delayed: bool) -> None:
    """Show a matrix; nothing of a weight that exists only as float8 codes."""
    if tap is not None and type(value) in (Tensor, nn.Parameter):
        token = tap.backward if tensor == "grad_output" else tap.forward
        observe_tensor(token, tensor, value, is_delayed, tap.call)


def show_gemm(tap: Tap | None, gemm: str, a: Operand, b: Operand, product: Tensor) -> None:
    """Show a GEMM."""
    if tap is None:
        return
    is_a_transposed, is_b_transposed = TRANSPOSED[gemm]
    # An operand in high precision goes as the matrix that it is a transpose of, which is in memory. With the transpose
    # Inductor placed that matrix elsewhere, and fused the code before it otherwise: other roundings to bfloat16.
    codes_a = a.codes.t() if a.scale is None and is_a_transposed else a.codes
    codes_b = b.codes.t() if b.scale is None and is_b_transposed else b.codes
    token = tap.forward if gemm == "output" else tap.backward
    observe_gemm(token, gemm, codes_a, a.scale, codes_b, b.scale, product, tap.call)


@operator()
def next_call(x: Tensor) -> Tensor:
    """The id of a forward pass with the input `x`, int64 [1] on the CPU.

    It writes to no token: compiled checkpointing computes it again in the backward pass, and would save the token for
    that, which later forward passes write to. A compiler may merge calls with the same input: of one layer they are
    equal, and those of other layers are told apart by the layer.
    """
    return torch.full((1,), UNKNOWN_CALL if is_in_backward_pass() else next(_calls), dtype=torch.int64, device="cpu")


@operator(mutates_args={"token"})
def observe_tensor(token: Tensor, tensor: str, value: Tensor, is_delayed: bool, call: Tensor | None) -> None:
    """Call the observers of the layer to which `token` belongs."""
    watched = _at(token, tensor != "grad_output", value)
    if watched is not None:
        _show(watched, tensor, value, call, is_delayed)


@operator(mutates_args={"token"})
def observe_gated(
    token: Tensor, tensor: str, gate: Tensor, up: Tensor, grad_hidden: Tensor | None, call: Tensor | None
) -> None:
    """Show a matrix of the fused feed-forward block, which is never in memory: hidden, grad_gate or grad_up."""
    watched = _at(token, grad_hidden is None, gate)
    if watched is None:
        return
    # The arithmetic of `fused.silu`.
    if grad_hidden is None:
        _show(watched, "input", silu(gate) * up, call)
    elif tensor == "grad_gate":
        _show(watched, "grad_output", torch.ops.aten.silu_backward(grad_hidden * up, gate), call)
    else:
        _show(watched, "grad_output", grad_hidden * silu(gate), call)


@operator(mutates_args={"token"}, tags=(torch.Tag.needs_exact_strides,))
def observe_gemm(
    token: Tensor,
    gemm: str,
    a: Tensor,
    scale_a: Tensor | None,
    b: Tensor,
    scale_b: Tensor | None,
    product: Tensor,
    call: Tensor | None,
) -> None:
    """Call the observers of the layer to which `token` belongs; `a` and `b` as `show_gemm` gives them."""
    watched = _at(token, gemm == "output", product)
    layer = None if watched is None else watched.layer()
    if watched is None or layer is None:
        return
    is_a_transposed, is_b_transposed = TRANSPOSED[gemm]
    a = a.t() if scale_a is None and is_a_transposed else a
    b = b.t() if scale_b is None and is_b_transposed else b
    recipe, spec = layer.recipe, layer.recipe.gemms[gemm]
    chip = CHIPS[recipe.chip]
    split, source = layer_split_k(spec, a, b, out_dtype=product.dtype, chip=chip)
    seen = GemmSeen(
        layer=watched.name,
        gemm=gemm,
        a=Operand(a, scale_a),
        b=Operand(b, scale_b),
        product=product.detach(),
        spec=spec,
        engine=resolve_engine("observe", a.device, layer.engine, chip).value,
        split_k=split,
        split_source=source.value,
        recipe=recipe,
        call=_id(call),
    )
    for observer in tuple(watched.observers):
        observer.gemm(seen)


@fake(next_call)
def _(x: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


for _shown in (observe_tensor, observe_gated, observe_gemm):
    fake(_shown)(lambda *_: None)


def _at(token: Tensor, is_forward: bool, x: Tensor) -> Watched | None:
    """Who watches, and is called; the call is counted in the token."""
    torch.autograd.graph.increment_version(token)
    token[1] += 1
    # A backward pass that runs a forward pass repeats it: activation checkpointing.
    if x.is_meta or (is_forward and is_in_backward_pass()):
        return None
    return watched_by(token)


def _show(watched: Watched, tensor: str, value: Tensor, call: Tensor | None, is_delayed: bool = True) -> None:
    layer = watched.layer()
    if layer is None:  # the graph of a layer that is gone
        return
    seen = TensorSeen(watched.name, tensor, value.detach(), layer.recipe, is_delayed, _id(call))
    for observer in tuple(watched.observers):
        observer.tensor(seen)


def _id(call: Tensor | None) -> int:
    return UNKNOWN_CALL if call is None else int(call)

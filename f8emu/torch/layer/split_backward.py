"""Backward passes that pipelines without bubbles split: the gradient of the input first, those of the weights later.

torch runs an autograd function twice for it, with the same gradient of the output: by `torch.autograd.grad` of the
input alone, which keeps the graph, and then of the weights alone.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.torch.casts.operand import Delayed
from f8emu.torch.fused.delayed import is_known_set, mark_set
from f8emu.torch.torch_internals import gradients_asked_for, keeps_graph

States = tuple[Delayed | None, ...]


class _FirstPart(NamedTuple):
    grads: list[tuple[weakref.ref[Tensor], int]]  # with their versions
    states: States  # copies, with the scales of this part

    def has(self, grads: Sequence[Tensor]) -> bool:
        """Whether these are the very gradients of the first part."""
        pairs = zip(self.grads, grads, strict=True)
        return all(gradient() is x and version == x._version for (gradient, version), x in pairs)


def part_of_backward(ctx: Any, grads: Sequence[Tensor], states: States) -> tuple[tuple[bool, ...], States]:
    """The part of `ctx.needs_input_grad` that this pass asks for, and the states that its casts read and update.

    The second part casts under the scales of the first, and changes no state.
    """
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad, states
    first: _FirstPart | None = getattr(ctx, "first_part", None)
    if first is None and not keeps_graph():
        return ctx.needs_input_grad, states
    needs = gradients_asked_for(ctx)
    if first is not None and first.has(grads):
        return needs, first.states
    if needs != ctx.needs_input_grad:
        copies = tuple([None if state is None else _copy(state) for state in states])
        ctx.first_part = _FirstPart([(weakref.ref(x), x._version) for x in grads], copies)
    return needs, states


def _copy(state: Delayed) -> Delayed:
    # Of no owner, so that no update follows from its casts.
    inv_scale = state.inv_scale.clone()
    mark_set(inv_scale, is_known_set(state.inv_scale))
    return state._replace(inv_scale=inv_scale, amax=torch.zeros_like(state.amax))

"""A grouped linear layer under a recipe: every expert is a linear layer of its own, on its own rows.

- `output` [T, N] = the rows of expert e @ (`weight`[e])^T
- `grad_input` [T, K] = the rows of expert e of `grad_output` @ `weight`[e]
- `grad_weight` [E, N, K] = the rows of expert e of `grad_output`^T @ those of `input`
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.shown import fields_of
from f8emu.spec import HIGH_PRECISION, Chip, LinearTrace, OperandError, Recipe
from f8ref.numpy.codec import Array, typed_array
from f8ref.numpy.linear import DelayedStates, linear

Expert = Callable[[int, Array, Array, Array | None], LinearTrace]
"""The linear layer of an expert, of its number, its input, its weight and its grad_output."""


class GroupedLinearTrace(NamedTuple):
    """Forward and backward of a grouped linear layer; None for parts that were not requested."""

    experts: tuple[LinearTrace, ...]
    """Every amax, scale, code and product, expert by expert."""
    result: Array
    """[T, N]; zeros in the rows beyond the last group."""
    grad_input: Array | None
    """[T, K]; zeros in the rows beyond the last group."""
    grad_weight: Array | None
    """[E, N, K]; zeros where an expert has no rows."""

    def __repr__(self) -> str:
        return fields_of(self)


def grouped_linear(
    recipe: Recipe,
    input: ArrayLike,
    weight: ArrayLike,
    offs: ArrayLike,
    grad_output: ArrayLike | None = None,
    *,
    delayed_state: Sequence[DelayedStates] | None = None,
    split_k: Sequence[Mapping[str, int]] | None = None,
    chip: Chip | None = None,
) -> GroupedLinearTrace:
    """Every amax, scale, code and product of a grouped linear layer; the backward too if `grad_output` is given.

    Expert e has the rows from `offs[e - 1]` (0 for the first) up to `offs[e]`, which may be none, and `weight[e]`. Each
    scale is of these alone: a scale of a whole tensor is of the rows of an expert, or of its matrix. `delayed_state`
    and `split_k` give those of each expert. All products have the dtype of `input`.

    Shapes: `input` [T, K], `weight` [E, N, K], `offs` int32 [E], `grad_output` [T, N].
    Exactness: exact; `linear` of each expert, nothing else. A grouped GEMM multiplies the scales in the other order
    [EPI-6]: with scales that are powers of two that changes a bit only where one of the products overflows float32.

    Raises:
        OperandError: wrong dtypes or shapes, offsets that fall or pass the last row, and what `linear` refuses.
    """

    def expert(number: int, x: Array, w: Array, g: Array | None) -> LinearTrace:
        state = None if delayed_state is None else delayed_state[number]
        slices = None if split_k is None else split_k[number]
        return linear(recipe, x, w, g, delayed_state=state, split_k=slices, chip=chip)

    return by_expert(expert, input, weight, offs, grad_output)


def by_expert(
    expert: Expert, input: ArrayLike, weight: ArrayLike, offs: ArrayLike, grad_output: ArrayLike | None
) -> GroupedLinearTrace:
    """`grouped_linear` of experts that `expert` computes."""
    call = "grouped_linear"
    x, w = (typed_array(t, HIGH_PRECISION, f"{call}: {n}")[0] for t, n in ((input, "input"), (weight, "weight")))
    g = None if grad_output is None else typed_array(grad_output, HIGH_PRECISION, f"{call}: grad_output")[0]
    runs = _runs(x, w, np.asarray(offs), g)
    experts = tuple([expert(e, x[run], w[e], None if g is None else g[run]) for e, run in enumerate(runs)])

    def rows(products: Sequence[Array], columns: int) -> Array:
        beyond = np.zeros((len(x) - sum(map(len, products)), columns), x.dtype)
        return np.concatenate([*products, beyond])

    result = rows([trace.result for trace in experts], w.shape[1])
    if g is None:
        return GroupedLinearTrace(experts, result, None, None)
    grad_input = rows([trace.grad_input.product for trace in experts if trace.grad_input], w.shape[2])
    grad_weight = np.zeros(w.shape, x.dtype)
    for gradient, trace in zip(grad_weight, experts, strict=True):
        gradient[...] = trace.grad_weight.product if trace.grad_weight else 0
    return GroupedLinearTrace(experts, result, grad_input, grad_weight)


def _runs(x: Array, w: Array, offs: NDArray[np.int32], g: Array | None) -> list[slice]:
    """The rows of every expert."""
    if (x.ndim, w.ndim) != (2, 3) or x.shape[1:] != w.shape[2:] or offs.shape != w.shape[:1]:
        raise OperandError(
            f"grouped_linear: input must be [T, K], weight [E, N, K] and offs [E]; got {x.shape}, {w.shape} and "
            f"{offs.shape}; flatten leading dimensions"
        )
    expected = (len(x), w.shape[1])
    if g is not None and g.shape != expected:
        raise OperandError(
            f"grouped_linear: grad_output must have the output's shape {expected}; got {g.shape}; reshape it"
        )
    ends = [0, *offs.tolist()]
    if offs.dtype != np.int32 or ends != sorted(ends) or ends[-1] > len(x):
        raise OperandError(
            f"grouped_linear: offs must be int32 and rise to at most the {len(x)} rows of input; got {offs.dtype} "
            f"{ends[1:]}; give the end of each group"
        )
    return [slice(start, stop) for start, stop in pairwise(ends)]

"""`jnp.einsum` of an input and a weight.

`jnp.einsum(subscripts, x, w, _dot_general=f)` calls `f(x, w)` or `f(w, x)`, whichever saves a transpose of the
result. A recipe treats input and weight differently, so the call must say which operand is the weight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from f8emu.jax.layer.dot_general import DelayedDotGeneral
from f8emu.spec.errors import OperandError
from f8emu.spec.exports import public


def einsum(subscripts: str, input: Any, weight: Any, *, dot_general: Callable[..., jax.Array]) -> jax.Array:
    """`jnp.einsum(subscripts, input, weight)` by `dot_general(input, weight, dimension_numbers)`.

    If the axes of the result are the batch's, the input's and the weight's, in this order, it equals
    `jnp.einsum(subscripts, input, weight, _dot_general=dot_general)`.

    Args:
        subscripts: two operands and a result; each axis of an operand is in the other operand or in the result.
        input: the recipe's input.
        weight: the recipe's weight.
        dot_general: such as `f8emu.jax.dot_general(recipe)`.

    Exactness: as for `dot_general`. Each index of an axis that both operands and the result share is its own layer.

    Raises:
        OperandError: other subscripts, or a `delayed_dot_general`, which takes a state.
    """
    if isinstance(dot_general, DelayedDotGeneral):
        raise OperandError(
            "einsum: dot_general must take two operands and their dimensions; got a delayed_dot_general, which takes a "
            "state; close over it: lambda x, w, dimensions: delayed(x, w, state, dimensions)"
        )
    x, w, result = _names(subscripts, jnp.ndim(input), jnp.ndim(weight))
    # 1. Axes by their roles: of both operands and the result, summed, or of one operand alone.
    batch = [name for name in result if name in x and name in w]
    summed = [name for name in x if name in w and name not in result]
    dimensions = [[names.index(name) for name in axes] for axes in (summed, batch) for names in (x, w)]
    product = dot_general(input, weight, (tuple(dimensions[:2]), tuple(dimensions[2:])))
    # 2. `dot_general` gives batch, input, weight, in this order; the caller may want another.
    order = [*batch, *(name for name in x + w if name not in (*batch, *summed))]
    return jnp.transpose(product, [order.index(name) for name in result])


def _names(subscripts: str, x_ndim: int, w_ndim: int) -> tuple[str, str, str]:
    operands, arrow, result = subscripts.replace(" ", "").partition("->")
    x, comma, w = operands.partition(",")
    if arrow and comma and "..." in x and "..." in result and "..." not in w:
        spare = [name for name in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if name not in subscripts]
        dots = "".join(spare[: x_ndim - len(x) + 3])
        x, result = x.replace("...", dots), result.replace("...", dots)
    is_sound = arrow and comma and (len(x), len(w)) == (x_ndim, w_ndim) and f"{x}{w}{result}".isalpha()
    is_sound = is_sound and all(len(set(names)) == len(names) for names in (x, w, result))
    if not is_sound or set(result) - set(x + w) or (set(x) ^ set(w)) - set(result):
        raise OperandError(
            "einsum: subscripts must be 'input,weight->result', no axis twice in one of them, and axes of only one "
            f"operand also in the result; got {subscripts!r} for {x_ndim} and {w_ndim} axes; use jnp.einsum for others"
        )
    return x, w, result


__all__, __dir__ = public(__name__)

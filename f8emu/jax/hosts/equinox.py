"""equinox: its linear layers exchanged for float8 ones.

    model = convert_linears(model, "rowwise", where=lambda path, linear: linear.out_features % 16 == 0)

equinox maps a layer of one token over all tokens with `jax.vmap`. A float8 layer gathers what is mapped into the rows
of one matrix, so that a tensor has one scale, not one for each token.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from f8emu.jax.training.delayed import linear_delayed_state, overwrite_with_gradient
from f8emu.jax.training.dot_general import delayed_dot_general, dot_general
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.spec.trace import Float8State


class Float8Linear(eqx.Module):
    """`equinox.nn.Linear` under a recipe; `x [in]`, or [..., in] with every leading axis a row.

    Under delayed scaling the gradient of `state` is its next value: split it off (`eqx.partition`) before the optimizer
    sees the others, and call the layer once in a pass, or below one `jax.vmap`.
    """

    weight: jax.Array
    """[out, in]."""
    bias: jax.Array | None
    state: Float8State | None
    recipe: Recipe = eqx.field(static=True)
    engine: str = eqx.field(static=True)

    def __init__(self, linear: eqx.nn.Linear, recipe: Recipe | str, *, engine: str = "auto") -> None:
        self.recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
        self.weight, self.bias, self.engine = linear.weight, linear.bias, engine
        self.state = None if self.recipe.delayed is None else linear_delayed_state(self.recipe)

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """The layer's output; `key` is not used, as in equinox.

        Raises:
            OperandError, UnsupportedError: as `f8emu.jax.dot_general`.
        """
        state = None if self.state is None else overwrite_with_gradient(self.state, self.recipe)
        y = _product(self.recipe, self.engine)(x, self.weight, state)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape).astype(y.dtype)


def convert_linears(
    model: Any,
    recipe: Recipe | str,
    *,
    where: Callable[[str, eqx.nn.Linear], bool] = lambda path, linear: True,
    engine: str = "auto",
) -> Any:
    """The model with a `Float8Linear` for every `equinox.nn.Linear` that `where` takes.

    Args:
        model: any tree of equinox.
        recipe: of all of them.
        where: path in the model, such as ".layers[0].proj", and layer -> whether to convert it. Layers with "scalar"
            features are never converted.
        engine: as in `f8emu.jax.dot_general`.

    Raises:
        SpecError: no recipe of that name.
    """

    def convert(path: Any, leaf: Any) -> Any:
        if not _is_linear(leaf) or "scalar" in (leaf.in_features, leaf.out_features):
            return leaf
        return Float8Linear(leaf, recipe, engine=engine) if where(jax.tree_util.keystr(path), leaf) else leaf

    return jax.tree_util.tree_map_with_path(convert, model, is_leaf=_is_linear)


def _is_linear(x: Any) -> bool:
    return isinstance(x, eqx.nn.Linear)


@functools.cache
def _product(recipe: Recipe, engine: str) -> Callable[..., jax.Array]:
    """`x [..., K], weight [N, K], state -> [..., N]`; mapped over x alone, x has one more leading axis."""

    def product(x: jax.Array, weight: jax.Array, state: Float8State | None) -> jax.Array:
        dimensions = ((x.ndim - 1,), (1,)), ((), ())
        if state is None:
            return dot_general(recipe, engine=engine)(x, weight, dimensions)
        return delayed_dot_general(recipe, engine=engine)(x, weight, state, dimensions)

    # JAX differentiates nothing that has a rule for vmap. So both passes have such a rule, and the backward pass casts
    # once more; in one program XLA finds that it is the same.
    def gradients(grad_output: jax.Array, x: jax.Array, weight: jax.Array, state: Any) -> tuple[Any, Any, Any]:
        return jax.vjp(product, x, weight, state)[1](grad_output)

    forward, backward = jax.custom_batching.custom_vmap(product), jax.custom_batching.custom_vmap(gradients)

    @forward.def_vmap
    def forward_rule(size: int, is_mapped: Any, *args: Any) -> tuple[Any, Any]:
        if is_mapped[0] and not any(jax.tree.leaves(is_mapped[1:])):
            return forward(*args), True
        return jax.vmap(product, _axes(is_mapped))(*args), True  # an ensemble: every member is a layer of its own

    @backward.def_vmap
    def backward_rule(size: int, is_mapped: Any, grad_output: jax.Array, *args: Any) -> tuple[Any, Any]:
        if is_mapped[1] and not any(jax.tree.leaves(is_mapped[2:])):
            if not is_mapped[0]:
                grad_output = jnp.broadcast_to(grad_output, (size, *grad_output.shape))
            x, weight, state = backward(grad_output, *args)
            return (x, weight, state), (True, False, jax.tree.map(lambda leaf: False, state))
        found = jax.vmap(gradients, _axes(is_mapped))(grad_output, *args)
        return found, jax.tree.map(lambda leaf: True, found)

    float8 = jax.custom_vjp(forward)
    float8.defvjp(lambda *args: (forward(*args), args), lambda args, grad_output: backward(grad_output, *args))
    return float8


def _axes(is_mapped: Any) -> Any:
    return jax.tree.map(lambda leaf: 0 if leaf else None, tuple(is_mapped))

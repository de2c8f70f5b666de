"""flax nnx: the state of delayed scaling as variables whose gradient is their next value.

    nnx.Linear(64, 64, rngs=rngs, dot_general=f8emu.jax.dot_general("rowwise"))           # no state, nothing from here
    nnx.Linear(64, 64, rngs=rngs, dot_general=Float8DotGeneral("delayed"))

In a step, gradients are taken of both kinds of variables, and split:

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))
    grads, states = nnx.grad(loss, argnums=wrt)(model).split(nnx.Param, OverwriteWithGradient)
    optimizer.update(model, grads)
    nnx.update(model, states)
"""

from typing import Any

import jax
from flax import nnx

from f8emu.jax.training.delayed import linear_delayed_state, overwrite_with_gradient
from f8emu.jax.training.dot_general import delayed_dot_general
from f8emu.spec.recipe import Recipe


class OverwriteWithGradient(nnx.Variable):
    """A variable that is no parameter: its gradient takes its place."""


class Float8DotGeneral(nnx.Module):
    """`delayed_dot_general(recipe)` with the state of its layer; every layer needs one of its own.

    A state is for one call of a step, since JAX adds the gradients of several, and a sum of amaxes is none.

    Args:
        recipe: one with delayed scaling.
        engine: as in `f8emu.jax.dot_general`.

    Raises:
        SpecError: a recipe without delayed scaling.
    """

    def __init__(self, recipe: Recipe | str = "delayed", *, engine: str = "auto") -> None:
        self.function = delayed_dot_general(recipe, engine=engine)
        self.state = OverwriteWithGradient(linear_delayed_state(recipe))

    def __call__(self, lhs: Any, rhs: Any, *args: Any, **options: Any) -> jax.Array:
        """As `jax.lax.dot_general`; lhs is the recipe's input, rhs its weight."""
        state = overwrite_with_gradient(self.state.get_value(), self.function.recipe)
        return self.function(lhs, rhs, state, *args, **options)

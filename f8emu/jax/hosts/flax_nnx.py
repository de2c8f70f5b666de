"""flax nnx: the state of delayed scaling as variables whose gradient is their next value.

    nnx.Linear(64, 64, rngs=rngs, dot_general=f8emu.jax.dot_general("rowwise"))           # no state, nothing from here
    nnx.Linear(64, 64, rngs=rngs, dot_general=Float8DotGeneral("delayed"))

In a step, gradients are taken of both kinds of variables (of parameters alone, nnx's default, they are refused), and
split:

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))
    grads, states = nnx.grad(loss, argnums=wrt)(model).split(nnx.Param, OverwriteWithGradient)
    optimizer.update(model, grads)
    nnx.update(model, states)

`nnx.jit` does not set the compiler options that a GPU needs. There the step is a function of `f8emu.jax.jit` that takes
`graph, variables = nnx.split((model, optimizer))`, begins with `nnx.merge` and returns `nnx.state((model, optimizer))`.
"""

from collections.abc import Generator
from typing import Any

import jax

from f8emu.jax.layer.delayed import linear_delayed_state, overwrite_with_gradient
from f8emu.jax.layer.dot_general import delayed_dot_general
from f8emu.spec.errors import required_by
from f8emu.spec.exports import public
from f8emu.spec.names import EngineName, RecipeName
from f8emu.spec.recipe import Recipe

with required_by("f8emu.jax.hosts.flax_nnx"):
    from flax import nnx
    from flax.nnx import reprlib


class OverwriteWithGradient(nnx.Variable):
    """A variable that is not a parameter: its gradient becomes its next value."""


class Float8DotGeneral(nnx.Module):
    """`delayed_dot_general(recipe)` with the state of its layer; every layer needs one of its own.

    A state serves one call per step, and starts anew where its layer gets no gradient, as `flax_linen.Float8DotGeneral`
    says; under `nnx.update` models with such layers need `overwrites=False`.

    Args:
        recipe: a recipe with delayed scaling.
        engine: as for `f8emu.jax.dot_general`.
        overwrites: whether the gradient of the state is the next state. False: the gradient is made of amaxes, for
            `linear_delayed_update` of every layer.

    Raises:
        SpecError: a recipe without delayed scaling.
    """

    def __init__(
        self, recipe: Recipe | RecipeName = "delayed", *, engine: EngineName = "auto", overwrites: bool = True
    ) -> None:
        self.overwrites = overwrites
        self.function = delayed_dot_general(recipe, engine=engine)
        self.state = OverwriteWithGradient(linear_delayed_state(recipe))

    def __nnx_repr__(self) -> Generator[reprlib.Object | reprlib.Attr, Any, None]:
        yield reprlib.Object(type=type(self))
        yield reprlib.Attr("recipe", self.function.recipe.label)

    def __call__(self, lhs: Any, rhs: Any, *args: Any, **options: Any) -> jax.Array:
        """`jax.lax.dot_general` under the recipe; lhs is the recipe's input, rhs its weight.

        Raises:
            OperandError: a state that JAX added or an optimizer changed.
            OperandError, UnsupportedError: as for `f8emu.jax.dot_general`.
        """
        state = self.state.get_value()
        state = overwrite_with_gradient(state, self.function.recipe) if self.overwrites else state
        return self.function(lhs, rhs, state, *args, **options)


__all__, __dir__ = public(__name__)

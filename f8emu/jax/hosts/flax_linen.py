"""flax linen: the state of delayed scaling as variables whose gradient is their next value.

    nn.Dense(64, dot_general=f8emu.jax.dot_general("rowwise"))                            # no state, nothing from here
    nn.Dense(64, dot_general_cls=functools.partial(Float8DotGeneral, recipe="delayed"))

The states are in the collection that flax's own float8 uses, so that `flax.training.train_state.TrainState` carries
them: `TrainState.create(params=variables)` and gradients of all variables.
"""

from collections.abc import Mapping
from typing import Any

import jax

from f8emu.jax.layer.delayed import linear_delayed_state, overwrite_with_gradient
from f8emu.jax.layer.dot_general import delayed_dot_general, dot_general
from f8emu.spec.errors import OperandError, UnsupportedError, required_by
from f8emu.spec.exports import public
from f8emu.spec.names import EngineName, RecipeName
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.spec.scaling import Float8State

with required_by("f8emu.jax.hosts.flax_linen"):
    from flax import linen as nn
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

_CALLED = "_f8emu_called"


class Float8DotGeneral(nn.Module):
    """`dot_general(recipe)` as a module, for `dot_general_cls`; under delayed scaling it holds the state of its layer.

    A state serves one call per step: JAX sums the gradients of several calls, and a sum of amaxes is not an amax. A
    summed state, from a scan over time for example, is refused in the next pass; under `jax.jit` it gives NaN.

    flax's TrainState overwrites states whatever the gradient is. A layer that gets no gradient in a step (not called,
    or behind `jax.lax.stop_gradient`) has the gradient zero, and starts anew. Models with such layers need
    `overwrites=False`. An empty batch keeps the scales.
    """

    recipe: Recipe | RecipeName = "delayed"
    engine: EngineName = "auto"
    overwrites: bool = True
    """Whether the gradient of the state is the next state. False: the gradient is made of amaxes, for gradient
    accumulation: take `linear_delayed_maximum` over the batches, then `linear_delayed_update` of every layer."""

    @nn.compact
    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> jax.Array:
        """`jax.lax.dot_general` under the recipe; lhs is the recipe's input, rhs its weight.

        Raises:
            UnsupportedError: a second call with the same state in one pass, or a gradient under a `jax.vmap` over lhs
                but not over the state.
            OperandError: a state that JAX added or an optimizer changed.
            OperandError, UnsupportedError: as for `f8emu.jax.dot_general`.
        """
        recipe = recipe_by_name(self.recipe) if isinstance(self.recipe, str) else self.recipe
        arguments = (dimension_numbers, precision, preferred_element_type)
        if recipe.delayed is None:
            return dot_general(recipe, engine=self.engine)(lhs, rhs, *arguments, **options)
        self._note_call()
        state = self.variable(OVERWRITE_WITH_GRADIENT, "state", linear_delayed_state, recipe).value
        state = overwrite_with_gradient(state, recipe) if self.overwrites else state
        return delayed_dot_general(recipe, engine=self.engine)(lhs, rhs, state, *arguments, **options)

    def _note_call(self) -> None:
        scope = self.scope
        assert scope is not None, "flax calls bound modules only"
        called: set[Any] = vars(scope.root).setdefault(_CALLED, set())
        if scope.path in called:
            raise UnsupportedError(
                f"Float8DotGeneral: a layer with delayed scaling may be called once in a pass; {'/'.join(scope.path)} "
                "was called twice, and JAX would add its amaxes; use a recipe with dynamic scales where weights are "
                "shared"
            )
        called.add(scope.path)


def float8_states(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The states in flax's variables, by layer; `f8emu.interop` converts them for torch.

    Returns:
        Nested dicts with the names of the parameter tree, a `Float8State` for each layer.
    """
    return _without_module(variables.get(OVERWRITE_WITH_GRADIENT, {}))


def with_float8_states(variables: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with other states, such as those that `f8emu.interop` converted from torch.

    Raises:
        OperandError: states of other layers.
    """
    mine = variables.get(OVERWRITE_WITH_GRADIENT, {})
    wanted, got = jax.tree.structure(_without_module(mine)), jax.tree.structure(states)
    if wanted != got:
        raise OperandError(
            f"with_float8_states: states must be of the layers of these variables, {wanted}; got {got}; convert them "
            "with the rules of the parameters"
        )
    filled = jax.tree.unflatten(jax.tree.structure(mine), jax.tree.leaves(states))
    return {**variables, OVERWRITE_WITH_GRADIENT: filled}


def _without_module(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The collection without the two innermost names: of the module in its layer, and of its variable."""
    below_layers: dict[str, Any] = {}
    for name, below in tree.items():
        inner = below.get("state") if len(below) == 1 else None
        if isinstance(inner, Float8State):
            assert len(tree) == 1, "a linear layer has one dot_general"
            return inner  # type: ignore[return-value]
        below_layers[name] = _without_module(below)
    return below_layers


__all__, __dir__ = public(__name__)

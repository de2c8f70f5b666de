"""`feed_forward(recipe)`: Llama's feed-forward block, three layers around SiLU and product.

output = hidden @ w2        hidden = silu(gate) * up        gate = x @ w1        up = x @ w3
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.jax.bits import format_of
from f8emu.jax.gemm.call import SUM
from f8emu.jax.layer.dot_general import DelayedDotGeneral, DotGeneral, checked_settings
from f8emu.jax.layer.sharding import vary_alike
from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Float8State

NAMES = ("w1", "w2", "w3")
"""The names of the layers."""


def feed_forward(
    recipe: Recipe | str, *, engine: str = "auto", sharded_k: str = SUM, recompute_casts: bool = False
) -> "FeedForward":
    """A gated feed-forward block under a recipe, as a frozen, hashable function: `(x, w1, w2, w3) -> output`.

    Other arguments and errors are as for `dot_general`. The backward pass keeps the codes of the
    weights, a byte an element; with `recompute_casts` it casts the weights again, as `dot_general` does.
    """
    settings = checked_settings("feed_forward", recipe, engine, None, sharded_k, is_delayed=False)
    return FeedForward(layers=(DotGeneral(**settings, recompute_casts=recompute_casts),) * 3)


def delayed_feed_forward(
    recipe: Recipe | str = "delayed", *, engine: str = "auto", sharded_k: str = SUM, recompute_casts: bool = False
) -> "DelayedFeedForward":
    """`feed_forward` for a recipe with delayed scaling: `(x, w1, w2, w3, states) -> output`.

    The gradient of the states is made of amaxes, for `linear_delayed_update` of each.
    """
    settings = checked_settings("delayed_feed_forward", recipe, engine, None, sharded_k, is_delayed=True)
    return DelayedFeedForward(layers=(DelayedDotGeneral(**settings, recompute_casts=recompute_casts),) * 3)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class FeedForward:
    """A feed-forward block as a function, returned by `feed_forward`."""

    layers: tuple[DotGeneral, ...]

    def __call__(self, x: Any, w1: Any, w2: Any, w3: Any, *, out_sharding: Any = None) -> jax.Array:
        """`(silu(x @ w1) * (x @ w3)) @ w2`, its three layers under the recipe.

        Shapes:
            x [..., dim], w1 and w3 [dim, hidden], w2 [hidden, out] -> [..., out], in the dtype of x. Gradients have the
            dtypes of their arrays. `out_sharding` is that of `jax.lax.dot_general`, for the output.

        Exactness, Raises: as for `dot_general` around SiLU and product in float32, each rounded to the dtype of x.
        """
        return _block("feed_forward", self.layers, x, (w1, w2, w3), out_sharding)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class DelayedFeedForward:
    """A feed-forward block with states as a function, returned by `delayed_feed_forward`."""

    layers: tuple[DelayedDotGeneral, ...]

    def __call__(
        self, x: Any, w1: Any, w2: Any, w3: Any, states: Sequence[Float8State], *, out_sharding: Any = None
    ) -> jax.Array:
        """`FeedForward.__call__` with scales of earlier steps from `states`, one for each of w1, w2 and w3."""
        call = "delayed_feed_forward"
        if not isinstance(states, Sequence) or isinstance(states, Float8State) or len(states) != len(NAMES):
            raise OperandError(
                f"{call}: states must be three Float8States, those of w1, w2 and w3; got {type(states).__name__}; "
                "start with [linear_delayed_state(recipe) for _ in range(3)]"
            )
        layers = [
            lambda x, w, numbers, layer=layer, state=state, **options: layer(x, w, state, numbers, **options)
            for layer, state in zip(self.layers, states, strict=True)
        ]
        return _block(call, layers, x, (w1, w2, w3), out_sharding)


def _block(
    call: str, layers: Sequence[Callable[..., jax.Array]], x: Any, weights: tuple[Any, ...], out_sharding: Any
) -> jax.Array:
    format_of(call, "x", x)
    shapes = [jnp.shape(w) for w in weights]
    fits = jnp.ndim(x) > 0 and all(len(shape) == 2 for shape in shapes)
    if not fits or not (shapes[0] == shapes[2] == (jnp.shape(x)[-1], shapes[1][0])):
        raise OperandError(
            f"{call}: x must be [..., dim], w1 and w3 [dim, hidden], w2 [hidden, out]; got {list(jnp.shape(x))} and "
            f"{', '.join(map(str, map(list, shapes)))}; a weight is given as flax keeps its kernel, [in, out]"
        )
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    gate, up = (layers[i](x, weights[i], numbers) for i in (0, 2))
    return layers[1](gated(*vary_alike(gate, up)), weights[1], numbers, out_sharding=out_sharding)


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up` in float32, each product rounded to the dtype, as in eager torch; `exp` is the backend's."""
    rounded, wide = _rounding(gate.dtype), gate.astype(jnp.float32)
    return rounded(rounded(wide * (1.0 / (1.0 + jnp.exp(-wide)))) * up.astype(jnp.float32)).astype(gate.dtype)


def _gradients(kept: tuple[jax.Array, jax.Array], grad_hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = grad_hidden.dtype
    rounded, (grad, gate, up) = _rounding(dtype), (x.astype(jnp.float32) for x in (grad_hidden, *kept))
    sigmoid = 1.0 / (1.0 + jnp.exp(-gate))
    slope = 1.0 + gate * (1.0 - sigmoid)
    grad_gate = rounded(rounded(grad * up) * sigmoid * slope)
    return grad_gate.astype(dtype), rounded(grad * rounded(gate * sigmoid)).astype(dtype)


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gradients)


def _rounding(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    # XLA may leave out a conversion where excess precision is allowed; these stay.
    if dtype == jnp.float16:  # of whose subnormals `reduce_precision` makes zeros
        return lambda values: lax.optimization_barrier(values.astype(dtype)).astype(jnp.float32)
    info = jnp.finfo(dtype)
    return functools.partial(lax.reduce_precision, exponent_bits=info.nexp, mantissa_bits=info.nmant)

"""`feed_forward(recipe)`: Llama's feed-forward block, with SiLU and product fused into the casts.

    output = hidden @ w2        hidden = silu(gate) * up        gate = x @ w1        up = x @ w3

Here: the functions, their checks, and what it takes for the block to be fused. `feed_forward_vjp` computes it then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from f8emu.jax.dtypes import require_values
from f8emu.jax.fused.gated import gated
from f8emu.jax.gemm.engine import check_engine
from f8emu.jax.gemm.partition import SUM, check_sharded_k
from f8emu.jax.layer.dot_general import DelayedDotGeneral, DotGeneral, require_state, settled_of, static_recipe
from f8emu.jax.layer.feed_forward_vjp import Plans, States, float8_feed_forward
from f8emu.jax.layer.matmul import Plan, Tap
from f8emu.jax.layer.sharding import explicit_mesh, require_checked_axes, vary_alike, varying
from f8emu.spec.errors import OperandError
from f8emu.spec.formats import BFLOAT16, Format
from f8emu.spec.recipe import TENSORS, Recipe
from f8emu.spec.scaling import Granularity
from f8emu.spec.trace import Float8State

NAMES = Plans._fields
"""The names of the layers: w1, w2, w3."""


def feed_forward(
    recipe: Recipe | str, *, engine: str = "auto", sharded_k: str = SUM, recompute_casts: bool = False
) -> "FeedForward":
    """A gated feed-forward block under a recipe, as a function: `(x, w1, w2, w3) -> output`.

    Frozen and hashable, like `dot_general(recipe)`. In `jax.shard_map` every device has its own scales.

    Args:
        recipe: as for `dot_general`.
        engine: as for `dot_general`.
        sharded_k: as for `dot_general`.
        recompute_casts: whether a fused block casts the weights again in the backward pass, as `dot_general` always
            does. This takes more time, and keeps no codes, which are a byte an element.

    Raises:
        SpecError: an unknown recipe, one with delayed scaling, or one that is not static.
        OperandError: an unknown engine or an unknown `sharded_k`.
    """
    settings = _settings("feed_forward", recipe, engine, sharded_k, is_delayed=False)
    return FeedForward(**settings, recompute_casts=recompute_casts)


def delayed_feed_forward(
    recipe: Recipe | str = "delayed", *, engine: str = "auto", sharded_k: str = SUM, recompute_casts: bool = False
) -> "DelayedFeedForward":
    """`feed_forward` for a recipe with delayed scaling: `(x, w1, w2, w3, states) -> output`.

    The arguments are those of `feed_forward`. The gradient of the states is made of amaxes, for `linear_delayed_update`
    of each.

    Raises:
        SpecError: an unknown recipe, one without delayed scaling, or one that is not static.
        OperandError: an unknown engine or an unknown `sharded_k`.
    """
    settings = _settings("delayed_feed_forward", recipe, engine, sharded_k, is_delayed=True)
    return DelayedFeedForward(**settings, recompute_casts=recompute_casts)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class FeedForward:
    """A feed-forward block as a function, returned by `feed_forward`."""

    recipe: Recipe
    engine: str = "auto"
    sharded_k: str = SUM
    recompute_casts: bool = False
    taps: tuple[Tap | None, Tap | None, Tap | None] = (None, None, None)
    """The taps of w1, w2 and w3; `f8emu.jax.Capture.named` sets them."""

    def __call__(self, x: Any, w1: Any, w2: Any, w3: Any, *, out_sharding: Any = None) -> jax.Array:
        """`(silu(x @ w1) * (x @ w3)) @ w2`, its three layers under the recipe.

        For bfloat16 x and under recipes whose scales are all tensorwise or all rowwise (`tensorwise`, `delayed`,
        `rowwise`), one kernel computes `hidden` and another the gradients of gate and up. The kernels find the amaxes
        as they go, and write the gradients over gate and up; with the scales of earlier steps they cast at once, and
        write nothing in a wider dtype. This takes less memory and less time. In all other cases, and with sharding in
        types, the layers are called one after the other.

        Shapes:
            x [..., dim], w1 and w3 [dim, hidden], w2 [hidden, out] -> [..., out], in the dtype of x. Gradients have the
            dtypes of their arrays. `out_sharding` is that of `jax.lax.dot_general`, for the output.

        Exactness: every code, scale, product and gradient equals that of three `dot_general(recipe)` around
            `silu(gate) * up`, where silu, product and their gradients are computed in float32 and each rounded to the
            dtype of x, as in eager torch. On a GPU too: Triton's kernel computes the bits that XLA does
            (`fused.gated`). `exp` is the backend's, so that a CPU may differ from a GPU in the last bit of a sigmoid.
            Under `jax.vmap` of some operands every entry is a block of its own, backward too, where a layer would add
            gradients of what is not mapped before it casts them.

        Raises:
            OperandError: wrong dtypes or shapes.
            UnsupportedError: a second derivative; a call that the engine does not support.
        """
        return _feed_forward("feed_forward", self, x, (w1, w2, w3), None, out_sharding)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class DelayedFeedForward:
    """A feed-forward block with states as a function, returned by `delayed_feed_forward`."""

    recipe: Recipe
    engine: str = "auto"
    sharded_k: str = SUM
    recompute_casts: bool = False
    taps: tuple[Tap | None, Tap | None, Tap | None] = (None, None, None)
    """The taps of w1, w2 and w3; `f8emu.jax.Capture.named` sets them."""

    def __call__(
        self, x: Any, w1: Any, w2: Any, w3: Any, states: Sequence[Float8State], *, out_sharding: Any = None
    ) -> jax.Array:
        """`FeedForward.__call__` with scales of earlier steps from `states`, one for each of w1, w2 and w3.

        Raises:
            OperandError: wrong dtypes or shapes, or states of another recipe.
            UnsupportedError: as for `FeedForward.__call__`; a gradient of the states under a `jax.vmap` over operands
                but not over the states.
        """
        call = "delayed_feed_forward"
        if not isinstance(states, Sequence) or isinstance(states, Float8State) or len(states) != len(NAMES):
            raise OperandError(
                f"{call}: states must be three Float8States, those of w1, w2 and w3; got {_described(states)}; "
                "start with [linear_delayed_state(recipe) for _ in range(3)]"
            )
        for name, state in zip(NAMES, states, strict=True):
            require_state(f"{call}, {name}", self.recipe, state)
            require_checked_axes(call, state)
        return _feed_forward(call, self, x, (w1, w2, w3), States(*states), out_sharding)


def _feed_forward(
    call: str,
    function: FeedForward | DelayedFeedForward,
    x: Any,
    weights: tuple[Any, ...],
    states: States | None,
    out_sharding: Any,
) -> jax.Array:
    # 1. What was given.
    dtype = require_values(call, x, name="x")
    dtypes = [require_values(call, w, name=name) for name, w in zip(NAMES, weights, strict=True)]
    _require_shapes(call, x, weights)
    recipe = function.recipe
    is_fused = dtype == BFLOAT16 and _has_fused_casts(recipe) and explicit_mesh(x, *weights) is None
    if not is_fused or 0 in (*x.shape, *(n for w in weights for n in w.shape)) or not _varies_alike(x, weights):
        return _one_by_one(function, x, weights, states, out_sharding)
    # 2. The block, on a matrix.
    x1, x3, w1, w2, w3 = vary_alike(*map(jnp.asarray, (x, x, *weights)))
    x1, x3 = (x.reshape(-1, x.shape[-1]) for x in (x1, x3))
    plans = [
        _plan(function, dtype, of_weight, None if states is None else settled_of(states[i]), function.taps[i])
        for i, of_weight in enumerate(dtypes)
    ]
    output: jax.Array = float8_feed_forward(Plans(*plans), x3, x1, w1, w2, w3, states)
    output = output.reshape(*x.shape[:-1], w2.shape[1])
    return output if out_sharding is None else jax.sharding.reshard(output, out_sharding)


def _varies_alike(x: Any, weights: tuple[Any, ...]) -> bool:
    """Whether, in `jax.shard_map`, gate, up and output vary along the same axes: else a layer sums a gradient first."""
    of_x, w1, w2, w3 = (varying(jnp.asarray(array)) for array in (x, *weights))
    return of_x | w1 == of_x | w3 == of_x | w1 | w2 | w3


def _plan(
    function: FeedForward | DelayedFeedForward,
    dtype: Format,
    weight_dtype: Format,
    settled: tuple[bool, bool, bool] | None,
    tap: Tap | None,
) -> Plan:
    """The settings of one layer, its weight [K, N]."""
    return Plan(
        recipe=function.recipe,
        engine=function.engine,
        out_dtype=dtype,
        input_dtype=dtype,
        weight_dtype=weight_dtype,
        is_input_transposed=False,
        is_weight_transposed=True,
        sharded_k=function.sharded_k,
        settled=settled,
        tap=tap,
        recompute_casts=function.recompute_casts,
    )


def _one_by_one(
    function: FeedForward | DelayedFeedForward,
    x: Any,
    weights: tuple[Any, ...],
    states: States | None,
    out_sharding: Any,
) -> jax.Array:
    settings: Any = {"recipe": function.recipe, "engine": function.engine, "sharded_k": function.sharded_k}

    def linear(x: jax.Array, i: int, out_sharding: Any = None) -> jax.Array:
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        if states is None:
            layer: Any = DotGeneral(**settings, tap=function.taps[i])
            return layer(x, weights[i], numbers, out_sharding=out_sharding)
        layer = DelayedDotGeneral(**settings, tap=function.taps[i])
        return layer(x, weights[i], states[i], numbers, out_sharding=out_sharding)

    return linear(gated(*vary_alike(linear(x, 0), linear(x, 2))), 1, out_sharding)


def _settings(call: str, recipe: Recipe | str, engine: str, sharded_k: str, *, is_delayed: bool) -> dict[str, Any]:
    static = static_recipe(call, recipe, is_delayed=is_delayed)
    check_engine(call, engine)
    check_sharded_k(call, sharded_k)
    return {"recipe": static, "engine": engine, "sharded_k": sharded_k}


def _described(states: Any) -> str:
    is_one = isinstance(states, Float8State) or not isinstance(states, Sequence)
    return type(states).__name__ if is_one else f"{len(states)} of them"


def _has_fused_casts(recipe: Recipe) -> bool:
    """Whether the block is fused: all casts are float8, and all scales are those of whole tensors, or of rows."""
    kinds = {None if cast.is_high_precision else cast.granularity for _, _, cast in recipe.casts()}
    if kinds not in ({Granularity.TENSORWISE}, {Granularity.ROWWISE}):
        return False
    return recipe.delayed is None or recipe.delayed.tensors == TENSORS


def _require_shapes(call: str, x: Any, weights: tuple[Any, ...]) -> None:
    shapes = [tuple(jnp.shape(w)) for w in weights]
    fits = jnp.ndim(x) > 0 and all(len(shape) == 2 for shape in shapes)
    if not fits or not (shapes[0] == shapes[2] == (jnp.shape(x)[-1], shapes[1][0])):
        raise OperandError(
            f"{call}: x must be [..., dim], w1 and w3 [dim, hidden], w2 [hidden, out]; got {list(jnp.shape(x))}, "
            f"{', '.join(f'{name} {list(shape)}' for name, shape in zip(NAMES, shapes, strict=True))}; a weight is "
            "given as flax keeps its kernel, [in, out]"
        )

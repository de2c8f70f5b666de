"""The feed-forward block: the bits of three layers around SiLU and product, and the arithmetic of these two."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import f8emu.jax as f8
from f8emu.jax.layer.feed_forward import gated
from tests.jax_path.layers import assert_same_bits


def block(*rows: int) -> tuple[Any, ...]:
    """x, (w1, w2, w3) and grad_output, rows of several magnitudes; w1 is float32, as a master weight."""

    def drawn(seed: int, *shape: int, size: float = 1.0) -> jax.Array:
        rng = np.random.default_rng((seed, *shape))
        magnitudes = np.exp2(rng.integers(-3, 3, (*shape[:-1], 1)))
        return jnp.asarray((rng.standard_normal(shape) * magnitudes * size).astype(ml_dtypes.bfloat16))

    w1, w2, w3 = (drawn(i, *shape, size=0.2) for i, shape in enumerate(((40, 72), (72, 40), (40, 72)), 1))
    return drawn(0, *rows, 40), (w1.astype(jnp.float32), w2, w3), drawn(4, *rows, 40, size=0.01)


@pytest.mark.parametrize("recompute_casts", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_is_three_layers(recipe: str, recompute_casts: bool) -> None:
    """Output, gradients and amaxes; what is kept are the codes of the weights, or the weights."""
    x, weights, g = block(3, 7)
    numbers = (((2,), (0,)), ((), ()))
    states = None
    if recipe == "delayed":
        states = [f8.linear_delayed_state(recipe) for _ in weights]
        delayed: Any = f8.delayed_dot_general(recipe)
        whole: Any = f8.delayed_feed_forward(recipe, recompute_casts=recompute_casts)

        def layer(x: Any, w: Any, s: Any) -> jax.Array:
            return delayed(x, w, s, numbers)

        def fused(x: Any, weights: Any, states: Any) -> jax.Array:
            return whole(x, *weights, states)
    else:

        def layer(x: Any, w: Any, s: Any) -> jax.Array:
            return f8.dot_general(recipe)(x, w, numbers)

        def fused(x: Any, weights: Any, states: Any) -> jax.Array:
            return f8.feed_forward(recipe, recompute_casts=recompute_casts)(x, *weights)

    def three_layers(x: Any, weights: Any, states: Any) -> jax.Array:
        s1, s2, s3 = states or (None,) * 3
        return layer(gated(layer(x, weights[0], s1), layer(x, weights[2], s3)), weights[1], s2)

    output, pull = jax.vjp(fused, x, weights, states)
    expected, pull_expected = jax.vjp(three_layers, x, weights, states)
    jax.tree.map(assert_same_bits, (output, *pull(g)), (expected, *pull_expected(g)))
    of_weights = {shape for w in weights for shape in (w.shape, w.T.shape)}
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.dtype.itemsize == 1 and leaf.shape in of_weights]
    assert len(kept) == (0 if recompute_casts else 3)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_arithmetic_is_that_of_eager_torch(name: str) -> None:
    """Every gate, but where a float32 is subnormal, which XLA takes for 0 on a CPU.

    In float16, of more bits, another last bit of `exp` shows in one of ten thousand.
    """
    torch = pytest.importorskip("torch")
    codes, dtype = np.arange(1 << 16, dtype=np.uint16), np.dtype(name)
    rng = np.random.default_rng(0)
    arrays = [codes.view(dtype), *(rng.standard_normal(codes.size).astype(dtype) for _ in "ab")]
    tensors = [torch.from_numpy(a.view(np.int16).copy()).view(getattr(torch, name)) for a in arrays]
    gate, up = (tensor.requires_grad_() for tensor in tensors[:2])
    hidden = torch.nn.functional.silu(gate) * up
    hidden.backward(tensors[2])
    output, backward = jax.vjp(gated, *map(jnp.asarray, arrays[:2]))
    sizes = np.abs(arrays[0].astype(np.float32))
    is_normal = ~((sizes < 2.0**-100) & (sizes > 0) | (arrays[0].astype(np.float32) < -80) & (sizes < np.inf))
    assert is_normal.sum() > 38_000
    for found, of_torch in zip((output, *backward(jnp.asarray(arrays[2]))), (hidden, gate.grad, up.grad), strict=True):
        expected = of_torch.detach().view(torch.int16).numpy().view(dtype)[is_normal]
        observed = np.asarray(found)[is_normal]
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(observed), nan)
        apart = np.abs(observed[~nan].view(np.int16).astype(int) - expected[~nan].view(np.int16))
        assert apart.max() <= (name == "float16") and apart.mean() < 1e-4

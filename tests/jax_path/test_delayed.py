"""Delayed scaling in JAX: 50 steps beside torch's, amaxes as gradients, accumulation, stacked states, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import f8emu.jax as f8
from f8emu.spec import (
    DELAYED,
    TENSORS,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    Float8State,
    OperandError,
    Recipe,
    UnsupportedError,
)
from tests.jax_path.layers import WEIGHT, assert_same_bits, draw

# Of states whose parts may be missing: the tests know which are there.
linear_delayed_state: Any = f8.linear_delayed_state
linear_delayed_update: Any = f8.linear_delayed_update
linear_delayed_maximum: Any = f8.linear_delayed_maximum
linear_delayed_settled: Any = f8.linear_delayed_settled
M, N, K = 33, 50, 70
MOST_RECENT = replace(
    DELAYED, delayed=DelayedScaling(history_length=3, reduction=AmaxHistoryReduction.MOST_RECENT, margin=2)
)


def step_of(recipe: Recipe) -> Callable[..., Any]:
    """(x, w, g, state) -> output and gradients, and the amaxes."""
    multiply = f8.delayed_dot_general(recipe)

    def step(x: Any, w: Any, g: Any, state: Float8State) -> Any:
        output, pull = jax.vjp(lambda x, w, s: multiply(x, w, s, WEIGHT), x, w, state)
        *grads, amaxes = pull(g)
        return (output, *grads), amaxes

    return step


def tensors(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input, weight and grad_output of a step; now and then zeros, infinities and leaps in magnitude."""
    size = np.float32(2.0 ** (step % 7 - 3) * (0 if step == 9 else 1))
    x, w, g = (draw(*shape, seed=3 * step + i, dtype="float32") for i, shape in enumerate(((M, K), (N, K), (M, N))))
    if step == 12:
        g[3, 4] = np.inf
    if step == 15:
        x[0, 0] = np.nan
    bfloat16 = jnp.dtype(jnp.bfloat16)
    return (x * size).astype(bfloat16), w.astype(bfloat16), g.astype(bfloat16)


@pytest.mark.filterwarnings("ignore:f8emu.torch. under delayed scaling the amax was infinite")
def test_50_steps_beside_torch() -> None:
    """Output, gradients, and after every step the whole state: histories, scales, flags."""
    torch, f8_torch = pytest.importorskip("torch"), pytest.importorskip("f8emu.torch")
    recipe = MOST_RECENT
    plain = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False)).to(torch.bfloat16)
    f8_torch.convert_to_float8_training(plain, config=recipe, pad=True)
    model: Any = plain[0]
    step, state = f8.jit(step_of(recipe)), linear_delayed_state(recipe)
    update = f8.jit(lambda state, amaxes: linear_delayed_update(state, amaxes, recipe))
    for i in range(50):
        x, w, g = tensors(i)
        x_torch, g_torch = (torch.from_numpy(a.view(np.uint16).copy()).view(torch.bfloat16) for a in (x, g))
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(w.view(np.uint16).copy()).view(torch.bfloat16))
        model.weight.grad = None
        output = model(x_torch.requires_grad_())
        output.backward(g_torch)
        results, amaxes = step(x, w, g, state)
        of_torch: Any = (output.detach(), x_torch.grad, model.weight.grad)
        for observed, tensor in zip(results, of_torch, strict=True):
            assert_same_bits(observed, tensor.view(torch.uint16).numpy().view(x.dtype))
        # 2. The state.
        f8_torch.sync_float8_amax_and_scale_history(plain)
        state = update(state, amaxes)
        of_torch = f8_torch.delayed_state_dict(model)
        for name, of_tensor in zip(TENSORS, state, strict=True):
            for field, value in of_tensor._asdict().items():
                wanted = of_torch[field][TENSORS.index(name)].numpy()
                assert_same_bits(value, wanted.astype(np.float32))


def test_settled_states_and_accumulation() -> None:
    """Without flags the bits are the same; of several passes and of several uses the largest amax counts."""
    step, state = step_of(DELAYED), linear_delayed_state()
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    with pytest.raises(OperandError, match="every scale must be set"):
        linear_delayed_settled(state)
    _, first = step(*tensors(1), state)
    _, second = step(*tensors(4), state)
    amaxes = [[np.abs(x.astype(np.float32)).max() for x in tensors(i)] for i in (1, 4)]
    both = linear_delayed_maximum(first, second)
    assert [float(of.amax_history[0]) for of in both] == np.max(amaxes, axis=0).tolist()
    state = linear_delayed_update(state, both)
    assert [float(of.amax_history[0]) for of in state] == np.max(amaxes, axis=0).tolist()
    settled = linear_delayed_settled(state)
    assert all(of.initialized is None for of in settled)
    (wanted, of_flags), (results, of_settled) = step(*tensors(2), state), step(*tensors(2), settled)
    for observed, right in zip(results, wanted, strict=True):
        assert_same_bits(observed, right)
    assert jax.tree.structure(of_settled) == jax.tree.structure(settled)
    updated = linear_delayed_update(settled, of_settled)
    assert all(of.initialized is None for of in updated)
    for of_settled_state, other in zip(updated, linear_delayed_update(state, of_flags), strict=True):
        assert_same_bits(of_settled_state.inv_scale, other.inv_scale)
        assert_same_bits(of_settled_state.amax_history, other.amax_history)


def test_amaxes_are_of_the_casts_that_were_made() -> None:
    """A layer of which no gradient is asked but the state's casts no grad_output; a call without any gradient none."""
    x, w, g = tensors(1)
    _, pull = jax.vjp(lambda s: f8.delayed_dot_general()(x, w, s, WEIGHT), linear_delayed_state())
    (amaxes,) = pull(g)
    assert [float(of.amax_history[0]) > 0 for of in amaxes] == [True, True, False]


def test_one_state_for_several_uses_and_overwriting() -> None:
    """JAX adds gradients; copies of a shared state bring the maximum. The new state may be the gradient itself."""
    multiply, (x, w, _) = f8.delayed_dot_general(), tensors(1)
    state = linear_delayed_state()

    def total(state: Float8State, x: Any) -> Any:
        copies = f8.shared_delayed_state(f8.overwrite_with_gradient(state), 2)
        uses = (jax.tree.map(lambda leaf, i=i: leaf[i], copies) for i in range(2))
        return sum(multiply(x * 2**i, w, s, WEIGHT).astype(jnp.float32).sum() for i, s in enumerate(uses))

    gradient, _ = jax.grad(total, argnums=(0, 1))(state, jnp.asarray(x))
    unit = np.float32(1)
    amaxes = Float8State(
        *(
            DelayedState(jnp.zeros(16).at[0].set(amax), jnp.zeros(()), jnp.zeros(()))
            for amax in (np.abs(x.astype(np.float32)).max() * 2, np.abs(w.astype(np.float32)).max(), unit)
        )
    )
    jax.tree.map(assert_same_bits, gradient, linear_delayed_update(state, amaxes))


def test_stacked_states() -> None:
    """Layers in a scan: one state each, stacked, updated by vmap; buffers of the old states may be donated."""
    multiply, layers = f8.delayed_dot_general(), 2
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), linear_delayed_state())
    x, w = (jnp.stack([jnp.asarray(tensors(i)[j]) for i in (1, 2)]) for j in (0, 1))

    def total(states: Float8State) -> Any:
        def one(carry: Any, of_layer: Any) -> Any:
            x, w, state = of_layer
            return carry + multiply(x, w, state, WEIGHT).astype(jnp.float32).sum(), None

        return jax.lax.scan(one, jnp.zeros(()), (x, w, states))[0]

    def step(states: Float8State) -> Float8State:
        return jax.vmap(lambda s, a: linear_delayed_update(s, a))(states, jax.grad(total)(states))

    updated = f8.jit(step, donate_argnums=0)(states)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))
    for i in range(layers):
        wanted = (np.abs(np.asarray(a[i], np.float32)).max() for a in (x, w))
        for of_tensor, amax in zip(updated, wanted, strict=False):
            assert_same_bits(of_tensor.amax_history[i, 0], np.float32(amax))


def test_a_state_that_jax_added_is_broken() -> None:
    """The gradient counts uses: two of them are an error, in a trace NaN; also of settled states and next states."""
    multiply, (x, w, _) = f8.delayed_dot_general(), map(jnp.asarray, tensors(1))

    def twice(overwrites: bool) -> Any:
        def total(state: Any, x: Any) -> Any:
            use = f8.overwrite_with_gradient if overwrites else lambda state: state
            return sum(multiply(x * i, w, use(state), WEIGHT).astype(jnp.float32).sum() for i in (1, 2))

        return lambda state: jax.grad(total, argnums=(0, 1))(state, x)[0]

    state = linear_delayed_state()
    ones = Float8State(*(of._replace(initialized=jnp.ones(())) for of in state))
    update = jax.jit(linear_delayed_update)
    for one in (state, linear_delayed_settled(ones)):
        amaxes = twice(False)(one)
        with pytest.raises(OperandError, match="was used in two calls of a pass"):
            linear_delayed_update(one, amaxes)
        assert all(jnp.isnan(of.inv_scale) for of in update(one, amaxes))
    # 1. Next states that were added, or taken the maximum of; a next state is no gradient of amaxes.
    added = twice(True)(state)
    for broken in (added, linear_delayed_maximum(ones, ones)):
        with pytest.raises(OperandError, match="was used in two calls of a pass"):
            f8.overwrite_with_gradient(broken)
        assert all(jnp.isnan(of.inv_scale) for of in jax.jit(f8.overwrite_with_gradient)(broken))
    with pytest.raises(OperandError, match="must keep initialized"):
        f8.overwrite_with_gradient(linear_delayed_settled(ones))


def test_mapping_operands_and_not_the_state() -> None:
    """JAX would add the amaxes of the entries. A settled state without a gradient is fine, and a state for each."""
    multiply, (x, w, _) = f8.delayed_dot_general(), map(jnp.asarray, tensors(1))
    xs, state = jnp.stack([x, x * 2]), linear_delayed_state()

    def total(state: Any, w: Any, axes: Any) -> Any:
        return jax.vmap(lambda x, s: multiply(x, w, s, WEIGHT), axes)(xs, state).astype(jnp.float32).sum()

    for gradient in (jax.grad(total), jax.jit(jax.grad(jax.checkpoint(total, static_argnums=2)), static_argnums=2)):
        with pytest.raises(UnsupportedError, match=r"a state serves one call.*shared_delayed_state"):
            gradient(state, w, (0, None))
    ones = Float8State(*(of._replace(initialized=jnp.ones(())) for of in state))
    assert jax.grad(total, argnums=1)(linear_delayed_settled(ones), w, (0, None)).shape == w.shape
    amaxes = jax.grad(lambda s: total(f8.shared_delayed_state(s, 2), w, (0, 0)))(state)
    assert_same_bits(amaxes.input.amax_history[0], np.abs(np.asarray(xs, np.float32)).max())
    assert [float(of.inv_scale) for of in amaxes] == [1, 1, 1]


@pytest.mark.parametrize("shape", [(0, 70, 50), (33, 0, 50), (33, 70, 0)])
def test_an_empty_operand_keeps_the_state(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    step, state = step_of(DELAYED), linear_delayed_state()
    state = linear_delayed_update(state, step(*tensors(1), state)[1])
    x, w, g = (jnp.ones(of, jnp.bfloat16) for of in ((m, k), (n, k), (m, n)))
    (y, dx, dw), amaxes = step(x, w, g, state)
    assert (y.shape, dx.shape, dw.shape) == (g.shape, x.shape, w.shape)
    assert not any(jnp.any(values != 0) for values in (y, dx, dw))
    updated = linear_delayed_update(state, amaxes)
    for name, tensor in zip(TENSORS, (x, w, g), strict=True):
        of_tensor, before = getattr(updated, name), getattr(state, name)
        assert float(of_tensor.initialized) == 1
        assert float(of_tensor.amax_history[0]) == (tensor.size > 0)
        if not tensor.size:
            assert_same_bits(of_tensor.inv_scale, before.inv_scale)

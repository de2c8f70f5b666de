"""optax: what wraps an optimizer, around a float8 model of linen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import f8emu.jax
from tests.clients.watch_jax import CLASSES, WIDTH, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax",)


def fit(watch: JaxWatch, wrap: Callable[[Any], Any], batches: int = 1) -> None:
    """Two layers by hand, with `batches` gradients a step."""
    import optax

    x, labels = rows()
    keys = jax.random.split(jax.random.key(0))
    params = [jax.random.normal(key, shape) / 6 for key, shape in zip(keys, ((WIDTH, 64), (64, CLASSES)), strict=True)]
    states = [f8emu.jax.linear_delayed_state() for _ in params] if watch.is_delayed else [None, None]
    optimizer = wrap(optax.adamw(1e-2))
    numbers = (((1,), (0,)), ((), ()))

    def product(x: jax.Array, kernel: jax.Array, state: Any) -> jax.Array:
        if state is None:
            return f8emu.jax.dot_general(watch.recipe)(x, kernel, numbers)
        return f8emu.jax.delayed_dot_general()(x, kernel, state, numbers)

    def loss_of(params: Any, states: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(product(x, params[0], states[0]))
        logits = product(hidden, params[1], states[1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @f8emu.jax.jit
    def one(params: Any, states: Any, state: Any, x: jax.Array, labels: jax.Array) -> Any:
        loss, (grads, amaxes) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, states, x, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), amaxes, state, loss

    first, state = params, optimizer.init(params)
    for _ in range(4):
        found, losses = [], []
        for part in range(batches):
            params, amaxes, state, loss = one(params, states, state, x[part::batches], labels[part::batches])
            found.append(amaxes)
            losses.append(float(loss))
        watch.losses.append(sum(losses) / batches)
        if watch.is_delayed:
            largest = found[0]
            for other in found[1:]:
                largest = [f8emu.jax.linear_delayed_maximum(*both) for both in zip(largest, other, strict=True)]
            states = [f8emu.jax.linear_delayed_update(*both) for both in zip(states, largest, strict=True)]
    watch.learned(first, params, layers=2, states=states if watch.is_delayed else ())


def multi_steps(watch: JaxWatch, folder: Path) -> None:
    import optax

    fit(watch, lambda inner: optax.MultiSteps(inner, 2), batches=2)


def masked(watch: JaxWatch, folder: Path) -> None:
    import optax

    def wrap(inner: Any) -> Any:
        decay = optax.masked(optax.add_decayed_weights(1e-2), [True, False])
        return optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), decay, inner), 3)

    fit(watch, wrap)


def schedule_free(watch: JaxWatch, folder: Path) -> None:
    import optax

    fit(watch, lambda inner: optax.contrib.schedule_free(inner, jnp.float32(1e-2), b1=0.9))


RUNS = {
    "`MultiSteps`, amaxes by `linear_delayed_maximum`": multi_steps,
    "`masked`, `apply_if_finite`, `clip_by_global_norm`": masked,
    "`contrib.schedule_free`": schedule_free,
}

"""chex: a step under `fake_jit` has the bits of the jitted one, and its assertions take codes and states."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import f8emu.jax
from tests.clients.watch_jax import CLASSES, WIDTH, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax",)
NUMBERS = (((1,), (0,)), ((), ()))


def fake_jit(watch: JaxWatch, folder: Path) -> None:
    import chex

    x, labels = rows()
    wanted = jax.nn.one_hot(labels, CLASSES)

    def step(kernel: jax.Array, state: Any) -> Any:
        """A step of size 0.5: a power of two, so that no multiply-add that XLA makes of it rounds otherwise."""

        def product(kernel: jax.Array, state: Any) -> jax.Array:
            if watch.is_delayed:
                return f8emu.jax.delayed_dot_general()(x, kernel, state, NUMBERS)
            return f8emu.jax.dot_general(watch.recipe)(x, kernel, NUMBERS)

        y, pull = jax.vjp(product, kernel, state)
        error = y - wanted
        of_kernel, amaxes = pull(error / 64)
        state = f8emu.jax.linear_delayed_update(state, amaxes) if watch.is_delayed else state
        return kernel - of_kernel * 0.5, state, error

    first = jax.random.normal(jax.random.key(0), (WIDTH, CLASSES)) / 4
    kernel, state = first, f8emu.jax.linear_delayed_state() if watch.is_delayed else jnp.zeros(())
    for _ in range(4):
        jitted = f8emu.jax.jit(step)(kernel, state)
        with chex.fake_jit():
            found = jax.jit(step)(kernel, state)
        chex.assert_trees_all_equal(found, jitted)
        chex.assert_tree_all_finite(found)
        watch.resumed(jitted, found)
        kernel, state, error = found
        watch.losses.append(float((error**2).mean()))
    watch.resumes = None
    watch.learned(first, kernel, layers=1, states=[state])


RUNS = {"`fake_jit`: equal bits": fake_jit}

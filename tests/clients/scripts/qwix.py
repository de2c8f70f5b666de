"""qwix: a linen model whose layers rules put under a recipe."""

from pathlib import Path
from typing import Any

import jax
import optax

import f8emu.jax
from tests.clients.watch_jax import CLASSES, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax", "flax", "optax")
RECIPES = ("tensorwise", "rowwise", "blockwise")
REMARK = "It has no place for the state of delayed scaling."


def provider(watch: JaxWatch, folder: Path) -> None:
    import qwix
    from flax import linen as nn

    from f8emu.jax.hosts.qwix import Float8Provider, Float8Rule

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(CLASSES, name="head")(nn.gelu(nn.Dense(64, name="hidden")(x)))

    rules = [Float8Rule(module_path="hidden|head", recipe=watch.recipe)]
    x, labels = rows()
    model: Any = qwix.quantize_model(Model(), Float8Provider(rules))
    params = model.init(jax.random.key(0), x)
    optimizer = optax.adamw(1e-2)

    @f8emu.jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    first, state = params, optimizer.init(params)
    for _ in range(4):
        params, state, loss = step(params, state)
        watch.losses.append(float(loss))
    watch.learned(first, params, layers=2)


RUNS = {"`quantize_model` of linen layers": provider}

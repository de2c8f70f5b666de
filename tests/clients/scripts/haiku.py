"""haiku: its `Linear` layers computed in float8 by an interceptor, states of delayed scaling as haiku's own state."""

from pathlib import Path
from typing import Any

import jax
import optax

import f8emu.jax
from f8emu.spec import Float8State
from tests.clients.watch_jax import CLASSES, WIDTH, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax", "optax")
REMARK = "`hk.Linear` takes no `dot_general`: `hk.intercept_methods` replaces its product."


def mlp(watch: JaxWatch, folder: Path) -> None:
    import haiku as hk

    def in_float8(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        linear, (x, *_) = context.module, args or (None,)
        if not isinstance(linear, hk.Linear) or context.method_name != "__call__":
            return call(*args, **kwargs)
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        scale = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
        kernel = hk.get_parameter("w", [x.shape[-1], linear.output_size], init=scale)
        bias = hk.get_parameter("b", [linear.output_size], init=jax.numpy.zeros)
        if not watch.is_delayed:
            return f8emu.jax.dot_general(watch.recipe)(x, kernel, numbers) + bias
        leaves, tree = jax.tree.flatten(f8emu.jax.linear_delayed_state())
        held = [
            hk.get_state(f"float8_{i}", leaf.shape, leaf.dtype, lambda *_, leaf=leaf: leaf)
            for i, leaf in enumerate(leaves)
        ]
        state = f8emu.jax.overwrite_with_gradient(jax.tree.unflatten(tree, held))
        return f8emu.jax.delayed_dot_general()(x, kernel, state, numbers) + bias

    def forward(x: jax.Array) -> jax.Array:
        with hk.intercept_methods(in_float8):
            return hk.nets.MLP([64, 64, CLASSES])(x)

    x, labels = rows()
    assert x.shape[1] == WIDTH
    model = hk.without_apply_rng(hk.transform_with_state(forward))
    params, states = model.init(jax.random.key(0), x)
    optimizer = optax.adamw(1e-2)

    @f8emu.jax.jit
    def step(params: Any, states: Any, state: Any) -> Any:
        def loss_of(params: Any, states: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, states, x)[0], labels).mean()

        loss, (grads, states) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, states)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), states, state, loss

    first, state = params, optimizer.init(params)
    for _ in range(4):
        params, states, state, loss = step(params, states, state)
        watch.losses.append(float(loss))
    tree = jax.tree.structure(f8emu.jax.linear_delayed_state())
    of_layers: list[Float8State] = [jax.tree.unflatten(tree, list(of.values())) for of in states.values()]
    watch.learned(first, params, layers=3, states=of_layers)


RUNS = {"`MLP`, `transform_with_state`": mlp}

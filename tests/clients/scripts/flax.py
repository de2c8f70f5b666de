"""flax: linen with `TrainState` and `serialization`, nnx with `Optimizer`, each below scan and remat."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import f8emu.jax
from tests.clients.watch_jax import CLASSES, WIDTH, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax", "optax")
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def linen(watch: JaxWatch, folder: Path) -> None:
    from flax import linen as nn
    from flax import serialization
    from flax.training.train_state import TrainState

    from f8emu.jax.hosts.flax_linen import Float8DotGeneral, float8_states

    product: Any = functools.partial(Float8DotGeneral, recipe=watch.recipe)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + nn.gelu(nn.Dense(WIDTH, dot_general_cls=product, name="dense")(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            axes: Any = {"params": 0, "_overwrite_with_gradient": 0}
            stacked = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=2)
            x, _ = stacked(name="blocks")(x, None)
            return nn.Dense(CLASSES, dot_general_cls=product, name="head")(x)

    x, labels = rows()
    model = Model()
    variables = model.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-2))

    @f8emu.jax.jit
    def step(state: TrainState) -> tuple[TrainState, jax.Array]:
        def loss_of(variables: Any) -> jax.Array:
            return cross_entropy(state.apply_fn(variables, x), labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    def trained(state: TrainState, steps: int) -> TrainState:
        for _ in range(steps):
            state, loss = step(state)
            watch.losses.append(float(loss))
        return state

    state = trained(state, 3)
    (folder / "state").write_bytes(serialization.to_bytes(state))
    loaded = serialization.from_bytes(state, (folder / "state").read_bytes())
    one, other = trained(state, 1), trained(loaded, 1)
    watch.resumed((one.params, one.opt_state), (other.params, other.opt_state))
    stacked, head = (float8_states(one.params)[name] for name in ("blocks", "head")) if watch.is_delayed else ({}, {})
    of_layers = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(2)]
    watch.learned(variables["params"], one.params["params"], layers=3, states=[*of_layers, head])


def nnx(watch: JaxWatch, folder: Path) -> None:
    from flax import nnx

    from f8emu.jax.hosts.flax_nnx import Float8DotGeneral, OverwriteWithGradient

    def product() -> Any:
        return Float8DotGeneral("delayed") if watch.is_delayed else f8emu.jax.dot_general(watch.recipe)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs, dot_general=product())

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + nnx.gelu(self.dense(x))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.fork(split=2))
            self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs, dot_general=product())

        def __call__(self, x: jax.Array) -> jax.Array:
            one = nnx.remat(lambda block, x: block(x))
            x = nnx.scan(lambda x, block: one(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
            return self.head(x)

    x, labels = rows()
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    first = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss_of = nnx.value_and_grad(lambda model: cross_entropy(model(x), labels).mean(), argnums=wrt)
        loss, grads = loss_of(model)
        of_params, states = nnx.split_state(grads, nnx.Param, OverwriteWithGradient)
        optimizer.update(model, of_params)
        nnx.update(model, states)
        return loss

    for _ in range(3):
        watch.losses.append(float(step(model, optimizer)))
    copy, of_copy = nnx.clone((model, optimizer))
    watch.losses.append(float(step(model, optimizer)))
    step(copy, of_copy)
    watch.resumed(nnx.to_pure_dict(nnx.state((model, optimizer))), nnx.to_pure_dict(nnx.state((copy, of_copy))))
    watch.resumes = None  # a clone is no checkpoint
    states = []
    if watch.is_delayed:
        stacked = model.blocks.dense.dot_general.state.get_value()
        states = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(2)]
        states.append(model.head.dot_general.state.get_value())
    watch.learned(first, nnx.to_pure_dict(nnx.state(model, nnx.Param)), layers=3, states=states, traced=2)


RUNS = {"linen: `TrainState`, `nn.scan` of `nn.remat`, `serialization`": linen, "nnx: `nnx.scan` of `nnx.remat`": nnx}

"""orbax: parameters, optimizer and states of a linen model in checkpoints, and a run that goes on from one."""

import functools
from pathlib import Path
from typing import Any

import jax
import optax

import f8emu.jax
from tests.clients.watch_jax import CLASSES, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax", "flax", "optax")


def manager(watch: JaxWatch, folder: Path) -> None:
    import orbax.checkpoint as ocp
    from flax import linen as nn
    from flax.training.train_state import TrainState

    from f8emu.jax.hosts.flax_linen import Float8DotGeneral, float8_states

    product: Any = functools.partial(Float8DotGeneral, recipe=watch.recipe)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.gelu(nn.Dense(64, dot_general_cls=product, name="hidden")(x))
            return nn.Dense(CLASSES, dot_general_cls=product, name="head")(x)

    x, labels = rows()
    model = Model()
    variables = model.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-2))

    @f8emu.jax.jit
    def step(state: TrainState) -> tuple[TrainState, jax.Array]:
        def loss_of(variables: Any) -> jax.Array:
            logits: Any = model.apply(variables, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    def trained(state: TrainState, steps: int) -> TrainState:
        for _ in range(steps):
            state, loss = step(state)
            watch.losses.append(float(loss))
        return state

    state = trained(state, 3)
    with ocp.CheckpointManager(folder / "run") as checkpoints:
        checkpoints.save(3, args=ocp.args.StandardSave(state))
        checkpoints.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        loaded = checkpoints.restore(3, args=ocp.args.StandardRestore(shapes))
    one, other = trained(state, 1), trained(loaded, 1)
    watch.resumed((one.params, one.opt_state), (other.params, other.opt_state))
    states = list(float8_states(one.params).values())
    watch.learned(variables["params"], one.params["params"], layers=2, states=states)


RUNS = {"`CheckpointManager` of a linen `TrainState`": manager}

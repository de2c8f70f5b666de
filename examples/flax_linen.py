"""flax linen: a layer under dynamic scaling, and one under delayed scaling, whose state flax's `TrainState` carries.

python examples/flax_linen.py
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import f8emu.jax
from f8emu.jax.hosts.flax_linen import Float8DotGeneral


class Model(nn.Module):
    """Two layers of 64."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64, dot_general=f8emu.jax.dot_general("rowwise"))(x)
        return nn.Dense(64, dot_general_cls=functools.partial(Float8DotGeneral, recipe="delayed"))(nn.gelu(x))


@f8emu.jax.jit
def step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(lambda variables: jnp.mean((state.apply_fn(variables, x) - y) ** 2))(state.params)
    return state.apply_gradients(grads=grads), loss  # the gradient of a state is the next state


def main() -> None:
    x, y = jax.random.normal(jax.random.key(0), (2, 64, 64))
    model = Model()
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), x), tx=optax.adam(1e-2))
    state = state.replace(step=jnp.int32(0))  # as it is after a step, so that JAX compiles once
    losses = []
    for _ in range(10):
        state, loss = step(state, x, y)
        losses.append(float(loss))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

"""flax nnx: a layer under dynamic scaling, and one under delayed scaling, whose state has its own kind of variable.

python examples/flax_nnx.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import f8emu.jax
from f8emu.jax.hosts.flax_nnx import Float8DotGeneral, OverwriteWithGradient

BOTH = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))


class Model(nnx.Module):
    """Two layers of 64."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(64, 64, rngs=rngs, dot_general=f8emu.jax.dot_general("rowwise"))
        self.down = nnx.Linear(64, 64, rngs=rngs, dot_general=Float8DotGeneral("delayed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


@f8emu.jax.jit  # nnx.jit does not set the compiler options that a GPU needs
def step(graph: Any, variables: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    model, optimizer = nnx.merge(graph, variables)
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2), argnums=BOTH)(model)
    of_params, states = nnx.split_state(grads, nnx.Param, OverwriteWithGradient)
    optimizer.update(model, of_params)
    nnx.update(model, states)  # the gradient of a state is the next state
    return nnx.state((model, optimizer)), loss


def main() -> None:
    x, y = jax.random.normal(jax.random.key(0), (2, 64, 64))
    model = Model(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graph, variables = nnx.split((model, optimizer))
    losses = []
    for _ in range(10):
        variables, loss = step(graph, variables, x, y)
        losses.append(float(loss))
    nnx.update((model, optimizer), variables)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

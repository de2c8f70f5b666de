"""equinox: the hidden layers of a model exchanged for float8 ones, and a step that runs on GPUs too.

python examples/equinox_swap.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import f8emu.jax
from f8emu.jax.hosts.equinox import convert_linears


def main() -> None:
    x, y = jax.random.normal(jax.random.key(0), (2, 64, 32))
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(1))
    model = convert_linears(model, "rowwise", where=lambda path, linear: linear.in_features == 64)
    print(*(type(layer).__name__ for layer in model.layers))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    def loss_of(params: eqx.nn.MLP) -> jax.Array:
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    @f8emu.jax.jit  # eqx.filter_jit does not set the compiler options that a GPU needs
    def step(params: eqx.nn.MLP, state: optax.OptState) -> tuple[eqx.nn.MLP, optax.OptState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(10):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

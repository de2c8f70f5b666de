"""equinox: the hidden layers of a model exchanged for float8 ones.

python examples/equinox_swap.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from f8emu.jax.hosts.equinox import convert_linears


def main() -> None:
    x, y = jax.random.normal(jax.random.key(0), (2, 64, 32))
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(1))
    model = convert_linears(model, "rowwise", where=lambda path, linear: linear.in_features == 64)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: eqx.nn.MLP, state: optax.OptState) -> tuple[eqx.nn.MLP, optax.OptState, jax.Array]:
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2))(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(10):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    print(*(type(layer).__name__ for layer in model.layers))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

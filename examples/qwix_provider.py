"""qwix: a flax model under a recipe, without a change of its code.

python examples/qwix_provider.py
"""

import jax
import jax.numpy as jnp
import qwix
from flax import linen as nn

import f8emu.jax
from f8emu.jax.hosts.qwix import Float8Provider, Float8Rule


class Model(nn.Module):
    """A hidden layer and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(16, name="head")(nn.gelu(nn.Dense(64, name="hidden")(x)))


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (32, 64))
    variables = Model().init(jax.random.key(1), x)
    model = qwix.quantize_model(Model(), Float8Provider([Float8Rule(module_path="hidden", recipe="rowwise")]))
    of_float8, of_float32 = (
        f8emu.jax.jit(jax.grad(lambda variables, apply=which.apply: jnp.sum(jnp.square(apply(variables, x)))))(
            variables
        )
        for which in (model, Model())
    )
    for name in ("hidden", "head"):
        kernel, wanted = (grads["params"][name]["kernel"] for grads in (of_float8, of_float32))
        print(f"{name:6} gradient differs by {float(jnp.linalg.norm(kernel - wanted) / jnp.linalg.norm(wanted)):.1%}")


if __name__ == "__main__":
    main()

"""`jnp.einsum` under a recipe.

python examples/jax_einsum.py
"""

import jax
import jax.numpy as jnp

import f8emu.jax
from f8emu.jax.hosts.einsum import einsum

BLOCKWISE = f8emu.jax.dot_general("blockwise")


def main() -> None:
    x, weight = jax.random.normal(jax.random.key(0), (2, 32, 128)), jax.random.normal(jax.random.key(1), (128, 64))
    # Axes of the result in the order batch, input, weight: jnp.einsum calls BLOCKWISE(x, weight).
    y = jnp.einsum("bsd,dh->bsh", x, weight, _dot_general=BLOCKWISE)
    # In another order it exchanges the operands, and a recipe would cast the weight as an input. This knows the weight:
    turned = einsum("bsd,dh->hbs", x, weight, dot_general=BLOCKWISE)
    print(f"equal: {bool((jnp.moveaxis(turned, 0, -1) == y).all())}")


if __name__ == "__main__":
    main()

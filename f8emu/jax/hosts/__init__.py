"""Adapters for libraries that need more than `dot_general=f8emu.jax.dot_general(recipe)`, a module per library.

| library | dynamic scaling | delayed scaling |
|---|---|---|
| flax linen | `nn.Dense(dot_general=dot_general(recipe))` | `flax_linen.Float8DotGeneral` |
| flax nnx | `nnx.Linear(dot_general=dot_general(recipe))` | `flax_nnx.Float8DotGeneral` |
| `jnp.einsum` | `einsum.einsum`, which knows the weight | no |
| equinox | `equinox.convert_linears` | `equinox.convert_linears` |
| qwix | `qwix.Float8Provider` | no |
"""

from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__, rooms=("einsum", "equinox", "flax_linen", "flax_nnx", "qwix"))

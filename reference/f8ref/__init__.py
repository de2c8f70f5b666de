"""The oracle of f8emu: three independent implementations of the right bits.

`f8ref.exact` is the definition, scalar and slow; `f8ref.numpy` the vectorised oracle; `f8ref.jax` the fast one. The
three share only `f8emu.spec` and were written independently, so that their agreement is evidence.
"""

from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__, rooms=("exact", "jax", "numpy"))

"""The jit-able oracle: the GEMMs of a chip as its tensor cores compute them, and the emulation on GPUs.

Every verb gives the same bits eagerly and inside a user's `jax.jit`, on CPU and GPU, with x64 on and off. Formats,
granularities, output formats and flags are static. Nothing depends on what XLA does to floats (NUMERICS 6): wherever a
rule is an IEEE operation that XLA might change, it runs on integers, in `softfloat`. `f8emu.jax` has casts and scales.
"""

from f8emu.spec.exports import public as _public
from f8ref.jax.scaled_mm import mm as mm
from f8ref.jax.scaled_mm import mma as mma
from f8ref.jax.scaled_mm import scaled_grouped_mm as scaled_grouped_mm
from f8ref.jax.scaled_mm import scaled_mm as scaled_mm

__all__, __dir__ = _public(__name__)

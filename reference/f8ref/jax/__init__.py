"""The jit-able oracle: float8 as a GPU computes it, and the emulation on GPUs.

Every verb gives the same bits eagerly and inside a user's `jax.jit`, on CPU and GPU, with x64 on and off. Formats,
granularities, rules, output formats and flags are static. Nothing depends on what XLA does to floats (NUMERICS 6):
wherever a rule is an IEEE operation that XLA might change, it runs on integers, in `softfloat`.
"""

from f8ref.jax.cast import cast as cast
from f8ref.jax.cast import decode as decode
from f8ref.jax.cast import dequantize as dequantize
from f8ref.jax.cast import quantize as quantize
from f8ref.jax.delayed_state import initial_delayed_state as initial_delayed_state
from f8ref.jax.delayed_state import update_delayed_state as update_delayed_state
from f8ref.jax.linear import linear as linear
from f8ref.jax.scale import amax as amax
from f8ref.jax.scale import scale_from_amax as scale_from_amax
from f8ref.jax.scaled_mm import mm as mm
from f8ref.jax.scaled_mm import mma as mma
from f8ref.jax.scaled_mm import scaled_grouped_mm as scaled_grouped_mm
from f8ref.jax.scaled_mm import scaled_mm as scaled_mm

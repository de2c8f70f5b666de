"""f8emu for numpy: casts, scales, GEMMs and a linear layer with the bits of a Hopper GPU.

GEMMs, amaxes, scales and codes are computed by `f8emu.native`. Where that is not compiled, the oracle, `f8ref.numpy`,
computes them with the same bits, slowly, and a warning says so once. The other functions are the oracle's. The verbs
and their arguments are named as in `f8emu.torch` and `f8emu.jax`, and give the same bits.

Arguments: a format is a `Format`, its name or a dtype (`"float8_e4m3fn"`, `ml_dtypes.float8_e4m3fn`, `np.float32`).
Lists, numbers, float64 and integer arrays have no format of their own. They are taken as float32, or as the one format
that the argument may have, if that holds every value exactly. If not, OperandError names the first value that it does
not hold. `cast` takes any float64 and rounds it once.

Importing this package loads numpy and ml_dtypes, and neither torch nor JAX.
"""

from f8emu.numpy.cast import amax as amax
from f8emu.numpy.cast import cast as cast
from f8emu.numpy.cast import decode as decode
from f8emu.numpy.cast import dequantize as dequantize
from f8emu.numpy.cast import initial_delayed_state as initial_delayed_state
from f8emu.numpy.cast import quantize as quantize
from f8emu.numpy.cast import scale_from_amax as scale_from_amax
from f8emu.numpy.cast import update_delayed_state as update_delayed_state
from f8emu.numpy.error import linear_error as linear_error
from f8emu.numpy.scaled_mm import grouped_linear as grouped_linear
from f8emu.numpy.scaled_mm import linear as linear
from f8emu.numpy.scaled_mm import mm as mm
from f8emu.numpy.scaled_mm import mma as mma
from f8emu.numpy.scaled_mm import scaled_grouped_mm as scaled_grouped_mm
from f8emu.numpy.scaled_mm import scaled_mm as scaled_mm
from f8emu.numpy.swizzle import swizzle_scales as swizzle_scales
from f8emu.numpy.swizzle import unswizzle_scales as unswizzle_scales
from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__)

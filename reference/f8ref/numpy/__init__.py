"""The oracle: every verb of f8emu in readable, vectorised numpy; casts in integers, sums in float64 that is exact."""

from f8emu.spec.exports import public as _public
from f8ref.numpy.cast import cast as cast
from f8ref.numpy.cast import decode as decode
from f8ref.numpy.cast import dequantize as dequantize
from f8ref.numpy.cast import quantize as quantize
from f8ref.numpy.grouped_linear import grouped_linear as grouped_linear
from f8ref.numpy.linear import linear as linear
from f8ref.numpy.scale import amax as amax
from f8ref.numpy.scale import initial_delayed_state as initial_delayed_state
from f8ref.numpy.scale import scale_from_amax as scale_from_amax
from f8ref.numpy.scale import update_delayed_state as update_delayed_state
from f8ref.numpy.scaled_mm import mm as mm
from f8ref.numpy.scaled_mm import mma as mma
from f8ref.numpy.scaled_mm import scaled_grouped_mm as scaled_grouped_mm
from f8ref.numpy.scaled_mm import scaled_mm as scaled_mm

__all__, __dir__ = _public(__name__)

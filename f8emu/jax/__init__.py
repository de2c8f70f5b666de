"""f8emu for JAX: casts, scales, GEMMs and training with the bits of a Hopper GPU, on its tensor cores or emulated.

`dot_general(recipe)` replaces `jax.lax.dot_general`. Layers have first derivatives in reverse mode (`jax.grad`,
`jax.vjp`, `jax.jacrev`) and under `jax.vmap`; `jax.jvp`, `jax.jacfwd`, `jax.hessian` and the function that
`jax.linearize` returns raise an UnsupportedError, which names this. The verbs (`cast`, `scaled_mm` and so on) have no
derivatives.

Importing this package loads JAX and never torch.
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    from f8emu.spec.errors import MissingExtraError

    raise MissingExtraError("f8emu.jax", "jax", "jax") from error

from f8emu.jax.capture import Capture as Capture
from f8emu.jax.capture import capture as capture
from f8emu.jax.cast import cast as cast
from f8emu.jax.cast import decode as decode
from f8emu.jax.cast import dequantize as dequantize
from f8emu.jax.cast import quantize as quantize
from f8emu.jax.compiling import compiler_options as compiler_options
from f8emu.jax.compiling import jit as jit
from f8emu.jax.emulated.explanation import ExplainedDot as ExplainedDot
from f8emu.jax.emulated.explanation import Explanation as Explanation
from f8emu.jax.emulated.explanation import explain as explain
from f8emu.jax.emulated.transform import emulate as emulate
from f8emu.jax.gemm.engine import engine_of as engine_of
from f8emu.jax.gemm.scaled_mm import mm as mm
from f8emu.jax.gemm.scaled_mm import scaled_grouped_mm as scaled_grouped_mm
from f8emu.jax.gemm.scaled_mm import scaled_mm as scaled_mm
from f8emu.jax.layer.delayed import linear_delayed_maximum as linear_delayed_maximum
from f8emu.jax.layer.delayed import linear_delayed_settled as linear_delayed_settled
from f8emu.jax.layer.delayed import linear_delayed_state as linear_delayed_state
from f8emu.jax.layer.delayed import linear_delayed_update as linear_delayed_update
from f8emu.jax.layer.delayed import overwrite_with_gradient as overwrite_with_gradient
from f8emu.jax.layer.delayed import shared_delayed_state as shared_delayed_state
from f8emu.jax.layer.dot_general import DelayedDotGeneral as DelayedDotGeneral
from f8emu.jax.layer.dot_general import DotGeneral as DotGeneral
from f8emu.jax.layer.dot_general import delayed_dot_general as delayed_dot_general
from f8emu.jax.layer.dot_general import dot_general as dot_general
from f8emu.jax.layer.ragged_dot import ragged_dot as ragged_dot
from f8emu.jax.scale import amax as amax
from f8emu.jax.scale import initial_delayed_state as initial_delayed_state
from f8emu.jax.scale import scale_from_amax as scale_from_amax
from f8emu.jax.scale import update_delayed_state as update_delayed_state
from f8emu.spec.exports import public as _public
from f8emu.spec.scaling import Float8State as Float8State

__all__, __dir__ = _public(__name__, rooms=("hosts",))

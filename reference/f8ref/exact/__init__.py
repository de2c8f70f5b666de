"""The definition: float8 casts, scales and matrix products, one scalar at a time.

Python integers and `fractions.Fraction` only, so that nothing rounds unless a line says so, and one line says so:
`encode`. Read the files in this order:

- `number`: exact numbers, their sums and products;
- `cast`: what a code means (`decode`), how a number becomes a code (`encode`), and the casts made of the two;
- `accumulate`: the tensor core [OP-1, OP-2, ACC-1..5, SPEC-1] and the chaining of its steps along K [CHAIN-1..3];
- `scaled_mm`: one output of a scaled GEMM [EPI-1..6] and of the bfloat16 matmul [BF16-1, BF16-2];
- `scale`: amax, the scale rule, and the state of delayed scaling.

Arguments and results are codes (bit patterns as integers) beside their `Format`; float32 factors such as scales are
float32 codes. The rule ids are those of `reference/NUMERICS.md`; `reference/README.md` names the recorded
H200 cases behind each.
"""

from f8emu.spec.exports import public as _public
from f8ref.exact.accumulate import accumulate as accumulate
from f8ref.exact.accumulate import product as product
from f8ref.exact.accumulate import raw_exponent as raw_exponent
from f8ref.exact.accumulate import tensor_core_step as tensor_core_step
from f8ref.exact.cast import amax as amax
from f8ref.exact.cast import cast as cast
from f8ref.exact.cast import decode as decode
from f8ref.exact.cast import dequantize as dequantize
from f8ref.exact.cast import encode as encode
from f8ref.exact.cast import initial_delayed_state as initial_delayed_state
from f8ref.exact.cast import quantize as quantize
from f8ref.exact.cast import scale_from_amax as scale_from_amax
from f8ref.exact.cast import update_delayed_state as update_delayed_state
from f8ref.exact.number import NAN as NAN
from f8ref.exact.number import ZERO as ZERO
from f8ref.exact.number import Number as Number
from f8ref.exact.number import NumberKind as NumberKind
from f8ref.exact.number import add as add
from f8ref.exact.number import exponent_of as exponent_of
from f8ref.exact.number import finite as finite
from f8ref.exact.number import infinity as infinity
from f8ref.exact.number import multiply as multiply
from f8ref.exact.scaled_mm import group_of_row as group_of_row
from f8ref.exact.scaled_mm import mm_dot as mm_dot
from f8ref.exact.scaled_mm import mma as mma
from f8ref.exact.scaled_mm import scaled_dot as scaled_dot

__all__, __dir__ = _public(__name__)

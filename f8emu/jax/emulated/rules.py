"""What XLA makes of float8 dots on a Hopper GPU, as data: the rules of NUMERICS 7, and what an epilogue may hold."""

from dataclasses import dataclass
from enum import Enum

import jax.numpy as jnp
import numpy as np
from jax import lax

from f8emu.spec.scaling import MX_BLOCK
from f8emu.split_k.gemm import LONGEST_WHOLE_K

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
E8M0 = np.dtype(jnp.float8_e8m0fnu)
FLOAT8 = (E4M3, E5M2)
"""The float8 dtypes that cuBLASLt multiplies."""
ROUNDED = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))
OUTPUTS = (*ROUNDED, np.dtype(jnp.float32), *FLOAT8)
WORKSPACE_BYTES = 32 << 20
"""What XLA lends cuBLASLt."""
MULTIPLE = 16
"""cuBLASLt takes extents that are multiples of it; XLA pads the others, and cuts the product."""


class Rule(Enum):
    """The ids of the rules."""

    GEMM = "XLA-1"  # which dots are float8 GEMMs
    ACCUMULATION = "XLA-2"  # fast or promoted
    SCALE = "XLA-3"  # which scales join the GEMM
    FACTOR = "XLA-4"  # how a scale is rounded before it joins
    BIAS = "XLA-5"  # which biases join the epilogue
    RESIDUAL = "XLA-6"  # which sums with a matrix join it
    ACTIVATION = "XLA-7"  # ReLU and GELU
    FLOAT8 = "XLA-8"  # conversions to float8: of outputs, beside an amax, and of quotients
    RAGGED = "XLA-9"  # ragged dots
    MICROSCALED = "XLA-10"  # dots with block scales, on Blackwell


class Fold(Enum):
    """What XLA takes into a GEMM, in the words of a report."""

    LEFT_SCALE = "scale of left"
    RIGHT_SCALE = "scale of right"
    SCALE = "scale"
    CONSTANT = "constant"
    BIAS = "bias"
    RESIDUAL = "residual"
    RELU = "relu"
    GELU = "gelu"
    FLOAT8 = "float8 output"
    AMAX = "amax"


SCALES = (Fold.LEFT_SCALE, Fold.RIGHT_SCALE, Fold.SCALE, Fold.CONSTANT)
ACTIVATIONS = (Fold.RELU, Fold.GELU)
RULE_OF = {
    **dict.fromkeys(SCALES, Rule.SCALE),
    **dict.fromkeys(ACTIVATIONS, Rule.ACTIVATION),
    **dict.fromkeys((Fold.FLOAT8, Fold.AMAX), Rule.FLOAT8),
    Fold.BIAS: Rule.BIAS,
    Fold.RESIDUAL: Rule.RESIDUAL,
}


class Doubt(Enum):
    """Why the bits of a float8 GEMM are not promised."""

    RECIPROCAL = "the GPU divides 1 / scale with an error of its own"
    SPLIT = "XLA chooses by timing into how many slices K is split; the emulation takes the plan's number"
    GELU = "cuBLAS computes tanh with an error of its own"
    TWO_ROUNDINGS = "whether a scaled float32 product and a residual are rounded twice was not recorded"
    TWO_GEMMS = "a sum of two GEMMs, of which the first takes the second's result, was not recorded"
    TRANSPOSED = "a transpose follows the scale, which XLA then applies to the rounded product"
    SHARED = (
        "its scale is broadcast to another array of this shape too, and XLA then leaves it outside: give one of "
        "them a scale of its own, as an argument"
    )
    TWO_FACTORS = "in which order a constant and a scale are multiplied was not recorded"
    LATE_CONSTANT = "XLA takes a constant after a bias or an activation into alpha, before these"


def is_fast(precision: object) -> bool:
    """[XLA-2] Whether a dot accumulates fast: the precision of both operands is DEFAULT, or its algorithm says so."""
    if isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return precision == lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(one_side in (None, lax.Precision.DEFAULT) for one_side in pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The extents of a dot."""

    m: int
    n: int
    k: int

    @property
    def is_padded(self) -> bool:
        """Whether XLA cuts the product, which keeps a scale out of the GEMM [XLA-3]."""
        return bool(self.m % MULTIPLE or self.n % MULTIPLE)

    @property
    def may_be_split(self) -> bool:
        """Whether cuBLAS has kernels that split K, of which XLA chooses one by timing [PLAN-2], [PLAN-4]."""
        return self.k > LONGEST_WHOLE_K and 2 * 4 * self.m * self.n <= WORKSPACE_BYTES


def why_no_gemm(dtypes: tuple[np.dtype, np.dtype], out: np.dtype, free: tuple[int, int]) -> str | None:
    """[XLA-1] Why a dot of float8 operands with so many free dimensions is no float8 GEMM; None: it is."""
    if dtypes == (E5M2, E5M2):
        return "E5M2 x E5M2: XLA multiplies float16"
    if 0 in free:
        return "an operand is a vector: XLA sums products"
    if out not in OUTPUTS or (out == E5M2 and E5M2 not in dtypes):
        return f"an output in {out}: cuBLASLt has none for these operands"
    return None


def why_not_mxfp8(dtypes: tuple[np.dtype, ...], blocks: tuple[int, ...], *, is_matmul: bool) -> str | None:
    """[XLA-10] Why a dot with block scales is no MXFP8 GEMM on Blackwell; None: it is.

    dtypes: of a, b and their scales. blocks: K that shares a scale, of a and b.
    """
    operands, scales = dtypes[:2], dtypes[2:]
    if not set(operands) <= set(FLOAT8) or operands == (E5M2, E5M2) or set(scales) != {E8M0}:
        names = [dtype.name for dtype in dtypes]
        return f"operands in {' and '.join(names[:2])}, scales in {' and '.join(names[2:])}: XLA dequantizes"
    if any(block != MX_BLOCK if is_matmul else block % MX_BLOCK for block in blocks):
        return f"blocks of {' and '.join(map(str, blocks))}: XLA dequantizes all but those of {MX_BLOCK}"
    return None

"""E8M0 scales as kernels misread them, and the accumulators of MXFP8 under any `Rules` [MX-1..4].

Shape suffixes: M rows of `a`, N columns of `b`, K summed, B blocks of 32 along K.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from f8emu.conformance.cases.distributions import codes_of
from f8emu.conformance.diagnosis.rules import Adder, Grid, Misreading, Rounding, Rules, ScaleOrder
from f8emu.numpy import swizzle_scales
from f8emu.spec.scaling import MX_BLOCK
from f8emu.spec.swizzle import TILE_BLOCKS, swizzled_groups
from f8ref.numpy.accumulate import Decoded, chain

if TYPE_CHECKING:
    from f8emu.conformance.diagnosis.arguments import Arguments

_BIAS, _NAN = 127, 255
# An exponent that is below every one of a product, and of which two and 25 bits are a power of two in float64.
_ABSENT = -440
_Chained = Callable[[Decoded, Decoded, Rules], np.ndarray]


def _as_swizzled(scale: np.ndarray) -> np.ndarray:
    """Rows read at the addresses of tiles; behind them NaN, as in a guard zone."""
    (whole,), _ = swizzled_groups("", scale.shape, None, 0)
    r, b = np.indices(scale.shape)
    codes = np.append(codes_of(scale), np.uint8(_NAN))
    return codes[np.minimum(whole.offsets(r, b), scale.size)].view(scale.dtype)


def _as_rows(scale: np.ndarray) -> np.ndarray:
    """Tiles read row by row, as wide as the padded scales."""
    (rows, blocks), padded = scale.shape, -(-scale.shape[1] // TILE_BLOCKS) * TILE_BLOCKS
    return swizzle_scales(scale, padding=_NAN).reshape(-1, padded)[:rows, :blocks]


TILES: dict[Grid, Callable[[np.ndarray], np.ndarray]] = {Grid.SWIZZLED: _as_swizzled, Grid.PLAIN: _as_rows}
"""What the scales are that a kernel reads at its wrong addresses."""


def decoded_scales(scale: np.ndarray, rules: Rules) -> np.ndarray:
    """[MX-1] E8M0 scales in float64, as far as they are not misread."""
    codes = codes_of(scale)
    values = np.ldexp(1.0, codes.astype(int) - _BIAS)
    if Misreading.SCALE_255 not in rules.misreads:
        values[codes == _NAN] = np.nan
    if Misreading.SCALE_0 in rules.misreads:
        values[codes == 0] = 0
    return values


def microscaled(read: "Arguments", a: Decoded, b: Decoded, rules: Rules, total_of: _Chained) -> np.ndarray:
    """The accumulator [M, N]; `total_of` adds up a whole GEMM of operands, slice by slice."""
    scale_a_MB, scale_b_BN, misreads = read.scale_a_MB, read.scale_b_BN, rules.misreads
    blocks = -(-a.k // MX_BLOCK)
    # 1. [MX-2] A NaN scale makes NaN of a zero code too: of padding.
    zero = np.zeros((a.rows, b.rows), np.float32)
    if Misreading.SCALE_PADDING in misreads and blocks % 4:
        return np.full_like(zero, np.nan)
    # 2. A scale after each block of 32.
    if rules.scales is ScaleOrder.AFTER_BLOCK:
        acc = zero
        for block in range(blocks):
            part = slice(block * MX_BLOCK, (block + 1) * MX_BLOCK)
            scale = scale_a_MB[:, block, None].astype(np.float32) * scale_b_BN[block].astype(np.float32)
            acc = acc + total_of(a.part(k=part), b.part(k=part), rules) * scale
        return acc
    # 3. [MX-2] Inside a step. A saturated product of scales is another one for each output.
    is_saturated = Misreading.SCALE_PRODUCT in misreads
    if is_saturated:
        a, b, scale_a_MB, scale_b_BN = _paired(a, b, scale_a_MB, scale_b_BN)
    a, b = _scaled(a, scale_a_MB.T), _scaled(b, scale_b_BN)
    if Misreading.K_BACKWARDS in misreads:
        a, b = (x.part(k=slice(None, None, -1)) for x in (a, b))
    if is_saturated:
        is_plain = rules.adder is Adder.TENSOR_CORE and rules.terms is rules.sums is Rounding.CUT
        return chain(a, b, rules.model).reshape(zero.shape) if is_plain else np.full_like(zero, np.nan)
    # 4. [MX-4] The sums of steps.
    if Misreading.FLOAT32_STEPS not in misreads:
        return total_of(a, b, rules)
    acc = zero
    for k in range(0, a.k, rules.model.step_k):
        left, right = (x.part(k=slice(k, k + rules.model.step_k)).values for x in (a, b))
        acc = (acc + left.T @ right).astype(np.float32)
    return acc


def _scaled(x: Decoded, scale_BR: np.ndarray) -> Decoded:
    scale_KR = scale_BR.repeat(MX_BLOCK, axis=0)[: x.k]
    values = x.values.astype(np.float64) * scale_KR
    exponents = x.exponents + (np.frexp(scale_KR)[1] - 1)
    return x._replace(values=values, exponents=np.where(values == 0, _ABSENT, exponents))


def _paired(
    a: Decoded, b: Decoded, scale_a_MB: np.ndarray, scale_b_BN: np.ndarray
) -> tuple[Decoded, Decoded, np.ndarray, np.ndarray]:
    """A row of a and a column of b for each output, and as b's scale what is missing at the saturated product."""
    rows, columns = (index.ravel() for index in np.indices((a.rows, b.rows)))
    a, b = (Decoded(x.values[:, at], x.exponents[:, at], is_paired=True) for x, at in ((a, rows), (b, columns)))
    scale_a, scale_b = scale_a_MB[rows], scale_b_BN[:, columns].T
    return a, b, scale_a, (np.clip(scale_a * scale_b, 2.0**-_BIAS, 2.0**_BIAS) / scale_a).T

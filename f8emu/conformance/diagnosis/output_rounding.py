"""The last step of a GEMM, from float32 to the output type [EPI-4], and how a kernel may do it otherwise."""

import numpy as np

from f8emu.conformance.diagnosis.rules import Rounding, Rules
from f8emu.conformance.distributions import codes_of, dtype_of
from f8emu.spec import BFLOAT16, FLOAT32, Format, format_by_name
from f8ref.numpy.cast import convert


def rounded_output(x: np.ndarray, rules: Rules, out: Format) -> np.ndarray:
    """[EPI-4] and its alterations."""
    if rules.flushes_results:
        is_tiny = (np.abs(x) < np.float32(2.0**FLOAT32.min_exponent)) & (x != 0)
        x = np.where(is_tiny, np.copysign(np.float32(0), x), x)
    if rules.output_through:
        x = convert(x, format_by_name(rules.output_through)).astype(np.float32)
    result = convert(x, out)
    is_other = out.bits == 16 if rules.output is not Rounding.CUT_BFLOAT16 else out == BFLOAT16
    if rules.output is not Rounding.NEAREST and is_other:
        result = _rounded_otherwise(x, result, rules.output)
    if rules.saturates:
        largest = np.array(out.max_code, f"u{out.bits // 8}").view(dtype_of(out))
        limit = np.where(np.signbit(x), -largest.astype(np.float32), largest.astype(np.float32)).astype(dtype_of(out))
        result = np.where(np.isinf(result.astype(np.float32)) & np.isfinite(x), limit, result)
    return result


def _rounded_otherwise(x: np.ndarray, nearest: np.ndarray, rounding: Rounding) -> np.ndarray:
    """The neighbour toward zero, or of a tie the one away from it."""
    codes, values = codes_of(nearest).copy(), nearest.astype(np.float64)
    magnitude, rounded = np.abs(x.astype(np.float64)), np.abs(values)
    if rounding is not Rounding.NEAREST_AWAY:
        codes[np.isfinite(x) & (rounded > magnitude)] -= 1
        return codes.view(nearest.dtype)
    above = (codes + 1).view(nearest.dtype).astype(np.float64)
    codes[np.isfinite(x) & np.isfinite(values) & (magnitude * 2 == rounded + np.abs(above))] += 1
    return codes.view(nearest.dtype)

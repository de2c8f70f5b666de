"""Float32 operations that round once, where numpy has none.

numpy's own float32 `*`, `+` and `/` are IEEE: one rounding, nearest-even, subnormals kept. A fused multiply-add
is missing, and is made here of exact float64 parts.
"""

import numpy as np
from numpy.typing import NDArray


def fma(x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x * y + z` with one rounding, nearest-even.

    Shapes: any that broadcast.
    Exactness: exact, subnormals, infinities and NaN included.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # The product of two 24-bit significands fits in 53 bits, its exponent in 11: exact.
        return rounded_sum(x.astype(np.float64) * y, z)


def rounded_sum(product: NDArray[np.float64], addend: NDArray[np.float32]) -> NDArray[np.float32]:
    """`product + addend` with one rounding, nearest-even; the product is that of two float32 numbers.

    Exactness: exact. The sum is rounded to odd in float64, whose 53 bits are more than the 24 + 2 that make a second
    rounding harmless. What is not finite warns, as numpy's operators do.
    """
    # 1. The sum and, without any condition on the operands, its rounding error: NaN where the sum is not finite.
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    # 2. Round to odd: the code next to the exact sum toward zero, and a last bit that says that something is lost.
    is_inexact = np.abs(error) > 0
    is_too_far = is_inexact & ((error > 0) != (total > 0))
    odd = (total.view(np.int64) - is_too_far) | is_inexact
    # 3. The one rounding.
    return odd.view(np.float64).astype(np.float32)

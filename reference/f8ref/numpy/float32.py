"""Float32 operations that round once, where numpy has none.

numpy's own float32 `*`, `+` and `/` are IEEE: one rounding, nearest-even, subnormals kept. A fused multiply-add
is missing, and is made here of exact float64 parts.
"""

import numpy as np
from numpy.typing import NDArray


def fma(x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x * y + z` with one rounding, nearest-even.

    Shapes: any that broadcast.
    Exactness: exact, subnormals, infinities and NaN included. The sum is rounded to odd in float64, whose 53 bits are
    more than the 24 + 2 that make a second rounding harmless.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # 1. The product of two 24-bit significands fits in 53 bits, its exponent in 11: exact.
        product = x.astype(np.float64) * y.astype(np.float64)
        addend = z.astype(np.float64)
        # 2. The sum and, without any condition on the operands, its rounding error.
        total = product + addend
        shadow = total - product
        error = (product - (total - shadow)) + (addend - shadow)
        # 3. Round to odd: an inexact sum with an even last bit moves to its odd neighbour on the side of the error,
        # one code up in magnitude if error and sum have the same sign, one code down if not.
        bits = total.view(np.int64)
        inexact_even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        toward_error = np.where((error > 0) == (total > 0), 1, -1)
        odd = (bits + np.where(inexact_even, toward_error, 0)).view(np.float64)
        # 4. The one rounding.
        return odd.astype(np.float32)

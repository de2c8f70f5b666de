"""The arguments of the GEMMs as arrays; `f8emu.spec.gemm_call` says what is refused.

Shape suffixes as in `f8ref.numpy.scaled_mm`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import Granularity
from f8emu.spec.gemm_call import GemmCall, Shaped, group_parts, mm_call, scaled_grouped_mm_call, scaled_mm_call
from f8ref.numpy.codec import Array, as_float32


class GemmArrays(NamedTuple):
    """The arrays of a GEMM that is not refused."""

    call: GemmCall
    a_MK: Array
    b_NK: Array
    scale_a: Array | None = None
    """`granularity.scale_shape(M, K)`, of `granularity.scale_format`; None without scales."""
    scale_b: Array | None = None
    """`granularity.scale_shape(N, K)`."""
    bias: NDArray[np.float32] | None = None


def checked_scaled_mm(
    a: ArrayLike, b: ArrayLike, scale_a: ArrayLike, scale_b: ArrayLike, *, bias: ArrayLike | None = None, **options: Any
) -> GemmArrays:
    """The arguments of `scaled_mm`; raises what that raises."""
    tensorwise = dict.fromkeys(("granularity_a", "granularity_b"), Granularity.TENSORWISE)
    arrays = [np.asarray(x) for x in (a, b, scale_a, scale_b)]
    addend = None if bias is None else np.asarray(bias)
    defaults: dict[str, Any] = {"split_k": 1, **tensorwise, **options}
    call = scaled_mm_call(*map(_shaped, arrays), bias=None if addend is None else _shaped(addend), **defaults)
    a_MK, b_KN, factor_a, factor_b = arrays
    # A tensorwise scale may have any shape of one element.
    if call.granularities == (Granularity.TENSORWISE, Granularity.TENSORWISE):
        factor_a, factor_b = factor_a.reshape(1, 1), factor_b.reshape(1, 1)
    values = None if addend is None else as_float32(addend, "scaled_mm: bias")
    return GemmArrays(call, a_MK, b_KN.T, factor_a, factor_b.T, values)


def grouped_product(
    product: Callable[[GemmArrays], Array],
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike | None,
    **options: Any,
) -> Array:
    """`scaled_grouped_mm`, group by group; raises what that raises."""
    # 1. The groups.
    arrays = [np.asarray(x) for x in (a, b, scale_a, scale_b)]
    ends = None if offs is None else np.asarray(offs)
    of_a, of_b, of_scale_a, of_scale_b = map(_shaped, arrays)
    of_ends = None if ends is None else _shaped(ends)
    call = scaled_grouped_mm_call(of_a, of_b, of_scale_a, of_scale_b, of_ends, **options)
    a, b, scale_a, scale_b = arrays
    parts = group_parts(call, None if ends is None else ends.tolist())
    # A row's one scale, or its blocks' along K; those of b come with K first.
    scales = [
        (of_a[:, None], of_b[:, None]) if of_a.ndim == 1 else (of_a, of_b.T)
        for of_a, of_b in ((scale_a[part.scale_a], scale_b[part.scale_b]) for part in parts)
    ]
    # 2. Their products, each in its place.
    gemms = [GemmArrays(part.gemm, a[part.a], b[part.b].T, *of) for part, of in zip(parts, scales, strict=True)]
    products = [product(gemm) for gemm in gemms]
    out = np.zeros(call.out_shape, products[0].dtype)  # beyond the last group
    for part, product_of_part in zip(parts, products, strict=True):
        out[part.out] = product_of_part
    return out


def checked_mm(a: ArrayLike, b: ArrayLike, **options: Any) -> GemmArrays:
    """The arguments of `mm`; raises what that raises."""
    a_MK, b_KN = np.asarray(a), np.asarray(b)
    defaults: dict[str, Any] = {"split_k": 1, **options}
    return GemmArrays(mm_call(_shaped(a_MK), _shaped(b_KN), **defaults), a_MK, b_KN.T)


def _shaped(x: Array) -> Shaped:
    return Shaped(x.shape, x.dtype.name)

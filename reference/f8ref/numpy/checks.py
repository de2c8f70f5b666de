"""The arguments of the GEMMs as arrays; `f8emu.spec.gemm_call` says what is refused.

Shape suffixes as in `f8ref.numpy.scaled_mm`.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import Granularity
from f8emu.spec.gemm_call import GemmCall, Shaped, check_group_ends, mm_call, scaled_grouped_mm_call, scaled_mm_call
from f8ref.numpy.codec import Array, as_float32


class Gemm(NamedTuple):
    """A GEMM that is not refused."""

    call: GemmCall
    a_MK: Array
    b_NK: Array
    scale_a: NDArray[np.float32] | None = None
    """`granularity.scale_shape(M, K)`; None without scales."""
    scale_b: NDArray[np.float32] | None = None
    """`granularity.scale_shape(N, K)`."""
    bias: NDArray[np.float32] | None = None


def checked_scaled_mm(
    a: ArrayLike, b: ArrayLike, scale_a: ArrayLike, scale_b: ArrayLike, *, bias: ArrayLike | None = None, **options: Any
) -> Gemm:
    """The arguments of `scaled_mm`; raises what that raises."""
    tensorwise = dict.fromkeys(("granularity_a", "granularity_b"), Granularity.TENSORWISE)
    arrays = [np.asarray(x) for x in (a, b, scale_a, scale_b)]
    addend = None if bias is None else np.asarray(bias)
    given: dict[str, Any] = {"split_k": 1, **tensorwise, **options}
    call = scaled_mm_call(*map(_shaped, arrays), bias=None if addend is None else _shaped(addend), **given)
    a_MK, b_KN, factor_a, factor_b = arrays
    # A tensorwise scale may have any shape of one element.
    if call.granularities == (Granularity.TENSORWISE, Granularity.TENSORWISE):
        factor_a, factor_b = factor_a.reshape(1, 1), factor_b.reshape(1, 1)
    values = None if addend is None else as_float32(addend, "scaled_mm: bias")
    return Gemm(call, a_MK, b_KN.T, factor_a, factor_b.T, values)


def checked_scaled_grouped_mm(
    a: ArrayLike, b: ArrayLike, scale_a: ArrayLike, scale_b: ArrayLike, offs: ArrayLike, **options: Any
) -> list[Gemm]:
    """The GEMM of each group of `scaled_grouped_mm`; raises what that raises."""
    arrays = [np.asarray(x) for x in (a, b, scale_a, scale_b, offs)]
    call = scaled_grouped_mm_call(*map(_shaped, arrays), **options)
    a_MK, b_GKN, scale_a_M, scale_b_GN, ends_G = arrays
    check_group_ends(ends_G.tolist(), call.sizes[0])
    return [
        Gemm(
            replace(call, sizes=(stop - start, *call.sizes[1:])),
            a_MK[start:stop],
            b_GKN[group].T,
            scale_a_M[start:stop, None],
            scale_b_GN[group, :, None],
        )
        for group, (start, stop) in enumerate(pairwise([0, *ends_G.tolist()]))
    ]


def checked_mm(a: ArrayLike, b: ArrayLike, **options: Any) -> Gemm:
    """The arguments of `mm`; raises what that raises."""
    a_MK, b_KN = np.asarray(a), np.asarray(b)
    given: dict[str, Any] = {"split_k": 1, **options}
    return Gemm(mm_call(_shaped(a_MK), _shaped(b_KN), **given), a_MK, b_KN.T)


def _shaped(x: Array) -> Shaped:
    return Shaped(x.shape, x.dtype.name)

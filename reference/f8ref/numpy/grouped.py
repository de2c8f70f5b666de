"""The grouped GEMM of a mixture of experts: one rowwise GEMM for every group of rows.

Shape suffixes: M rows of all groups, N columns, K summed, G groups.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from f8emu.spec import HIGH_PRECISION, Format, Granularity, OperandError
from f8ref.numpy.cast import convert
from f8ref.numpy.codec import Array, resolve_format
from f8ref.numpy.matmul import scaled_mm


def scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike,
    *,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
) -> Array:
    """A rowwise `scaled_mm` of every group of rows of `a` with the group's own `b` [EPI-6].

    Group g has the rows from `offs[g - 1]` (0 for the first) up to `offs[g]`; a group may be empty.

    Shapes: `a` [M, K], `b` [G, K, N], `scale_a` [M], `scale_b` [G, N], `offs` [G]; result [M, N].
    Exactness: that of a rowwise `scaled_mm`.

    Raises:
        OperandError: wrong dtypes or shapes, or offsets that do not rise to M.
        SpecError: an unknown `out_dtype`.
    """
    call = "scaled_grouped_mm"
    a_MK, b_GKN, ends_G = np.asarray(a), np.asarray(b), np.asarray(offs)
    scale_a_M, scale_b_GN = np.asarray(scale_a), np.asarray(scale_b)
    out_format = resolve_format(out_dtype, HIGH_PRECISION, f"{call}: out_dtype")
    if a_MK.ndim != 2 or b_GKN.ndim != 3 or a_MK.shape[1] != b_GKN.shape[1]:
        raise OperandError(
            f"{call}: a must be [M, K] and b [G, K, N]; got {a_MK.shape} and {b_GKN.shape}; swap the last axes of b?"
        )
    m, (groups, _, n) = a_MK.shape[0], b_GKN.shape
    shapes = {"scale_a": (scale_a_M, (m,)), "scale_b": (scale_b_GN, (groups, n)), "offs": (ends_G, (groups,))}
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise OperandError(f"{call}: {name} must have shape {shape}; got {array.shape}; reshape it")
    if ends_G.dtype != np.int32:
        raise OperandError(f"{call}: offs must have dtype int32; got {ends_G.dtype}; convert it")
    bounds = [0, *ends_G.tolist()]
    if bounds != sorted(bounds) or bounds[-1] != m:
        raise OperandError(
            f"{call}: offs must rise to the {m} rows of a; got {ends_G.tolist()}; give the end of each group's rows"
        )

    products = [
        scaled_mm(
            a_MK[start:stop],
            b_GKN[group],
            scale_a_M[start:stop, None],
            scale_b_GN[group, None, :],
            granularity_a=Granularity.ROWWISE,
            granularity_b=Granularity.ROWWISE,
            out_dtype=out_format,
            use_fast_accum=use_fast_accum,
        )
        for group, (start, stop) in enumerate(pairwise(bounds))
    ]
    return np.concatenate([convert(np.zeros((0, n), np.float32), out_format), *products])

"""Check your own kernel: write it in the shape of `torch._scaled_mm` and name it to `f8emu verify`.

    f8emu verify --contract                                       # what a kernel is given and returns
    f8emu verify examples/own_kernel.py:scaled_mm --arrays numpy  # equal: Hopper's accumulation, in numpy
    f8emu verify examples/own_kernel.py:float32_mm --arrays numpy # NOT EQUAL: tensor cores do not add in float32
    f8emu verify examples/own_kernel.py:BLOCKWISE                 # equal: another call, declared as a Kernel

The rules in brackets: reference/NUMERICS.md.
"""

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from f8emu.conformance import BLOCKWISE_1X128_128X128, Arg, Kernel


@np.errstate(over="ignore", invalid="ignore")  # infinities and NaN are part of the test
def scaled_mm(
    a: NDArray,
    b: NDArray,
    scale_a: NDArray,
    scale_b: NDArray,
    *,
    bias: NDArray | None,
    out_dtype: DTypeLike,
    use_fast_accum: bool,
) -> NDArray:
    """`a [M, K] @ b [K, N]` of float8 as a Hopper GPU computes it; scales of one element, or [M, 1] and [1, N]."""
    k = a.shape[1]
    chain = k if use_fast_accum else 128
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for begin in range(0, k, chain):  # promoted to float32 after each chain [CHAIN-2]
        total = total + chained(a[:, begin : begin + chain], b[begin : begin + chain]).astype(np.float32)
    return epilogue(total, scale_a, scale_b, bias, out_dtype)


def chained(a: NDArray, b: NDArray) -> NDArray:
    """One chain of tensor-core steps, 32 of K each [ACC-1]; float64 holds every number in it exactly."""
    lowest = [ml_dtypes.finfo(x.dtype).minexp for x in (a, b)]
    a, b = a.astype(np.float64), b.astype(np.float64)
    exponent_a, exponent_b = np.maximum(exponent(a), lowest[0]), np.maximum(exponent(b), lowest[1])  # [OP-1]
    accumulator = np.zeros((a.shape[0], b.shape[1]))
    for k in range(0, a.shape[1], 32):
        step = slice(k, k + 32)
        products = a[:, step, None] * b[None, step]
        exponents = exponent_a[:, step, None] + exponent_b[None, step]
        largest = np.where(products != 0, exponents, -200).max(axis=1)
        largest = np.where(accumulator != 0, np.maximum(largest, exponent(accumulator)), largest)  # [ACC-2]
        place = np.ldexp(1.0, largest - 13)
        total = np.trunc(products / place[:, None]).sum(axis=1) + np.trunc(accumulator / place)  # [ACC-3] [ACC-4]
        kept = np.ldexp(1.0, exponent(total) - 13)
        accumulator = np.trunc(total / kept) * kept * place  # [ACC-5]
    ieee = a @ b  # infinities and NaN go through as in IEEE arithmetic [SPEC-1]
    return np.where(np.isfinite(ieee), accumulator, ieee)


def exponent(x: NDArray) -> NDArray:
    return np.frexp(x)[1] - 1


@np.errstate(over="ignore", invalid="ignore")
def float32_mm(
    a: NDArray,
    b: NDArray,
    scale_a: NDArray,
    scale_b: NDArray,
    *,
    bias: NDArray | None,
    out_dtype: DTypeLike,
    use_fast_accum: bool,
) -> NDArray:
    """What one would write without knowing: the products added in float32."""
    return epilogue(a.astype(np.float32) @ b.astype(np.float32), scale_a, scale_b, bias, out_dtype)


def epilogue(total: NDArray, scale_a: NDArray, scale_b: NDArray, bias: NDArray | None, out_dtype: DTypeLike) -> NDArray:
    """The scales, the bias and one rounding to `out_dtype` [EPI-1 to EPI-4]."""
    output = total * (scale_a * scale_b) + np.float32(0) if np.ndim(scale_a) == 0 else total * scale_b * scale_a
    if bias is not None:
        output = output + bias.astype(np.float32)
    return output.astype(out_dtype)


@np.errstate(over="ignore", invalid="ignore")
def blockwise_mm(a: tuple[NDArray, NDArray], b: tuple[NDArray, NDArray], out: NDArray) -> None:
    """Written as DeepGEMM's is called: codes [M, K] and [N, K], scales [M, K/128] and [N/128, K/128]."""
    (a_MK, scale_a), (b_NK, scale_b) = a, b
    total = np.zeros(out.shape, np.float32)
    for k in range(0, a_MK.shape[1], 128):
        partial = chained(a_MK[:, k : k + 128], b_NK[:, k : k + 128].T)
        columns = np.repeat(scale_b[:, k // 128], 128)[: out.shape[1]]
        scale = scale_a[:, k // 128, None] * columns
        total = (partial * scale.astype(np.float64) + total).astype(np.float32)  # a fused multiply-add [EPI-5]
    out[:] = total.astype(out.dtype)


BLOCKWISE = Kernel(
    name="own_kernel.blockwise_mm",
    function=blockwise_mm,
    arguments=((Arg.A, Arg.SCALE_A), (Arg.B, Arg.SCALE_B), Arg.OUT),
    scales=BLOCKWISE_1X128_128X128,
    arrays="numpy",
)
"""How it is called, as data; the suite asks it what it takes, and watches the memory around `out`."""

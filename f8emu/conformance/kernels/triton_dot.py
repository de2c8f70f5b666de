"""A rowwise GEMM as one writes it in Triton, to see what `tl.dot` adds up. Ours, for the suite alone."""

from typing import Any

import triton
import triton.language as tl
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue]

# The smallest rows that one wgmma multiplies; the K after which the library promotes.
_BLOCK_M, _BLOCK_N, _BLOCK_K = 64, 64, 128


@triton.jit
def _kernel(
    a_ptr,
    b_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    m,
    n,
    k,
    use_fast_accum: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    cols = tl.program_id(1) * block_n + tl.arange(0, block_n)
    along = tl.arange(0, block_k)
    in_rows, in_cols = rows < m, cols < n
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for begin in range(0, k, block_k):
        places = begin + along
        a = tl.load(a_ptr + rows[:, None].to(tl.int64) * k + places[None, :], mask=in_rows[:, None], other=0.0)
        b = tl.load(b_ptr + cols[None, :].to(tl.int64) * k + places[:, None], mask=in_cols[None, :], other=0.0)
        if use_fast_accum:
            total = tl.dot(a, b, total)  # one chain [CHAIN-1]
        else:
            total += tl.dot(a, b)  # a chain of block_k, added in float32 [CHAIN-2]
    scale_a = tl.load(scale_a_ptr + rows, mask=in_rows, other=1.0)
    scale_b = tl.load(scale_b_ptr + cols, mask=in_cols, other=1.0)
    total = (total * scale_b[None, :]) * scale_a[:, None]  # [EPI-2]
    out = out_ptr + rows[:, None].to(tl.int64) * n + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any, use_fast_accum: bool) -> Any:
    """`(a @ b) * scale_b * scale_a`.

    Shapes: a [M, K] row-major, b [K, N] column-major, K a multiple of 128; scales [M, 1], [1, N]; result [M, N].
    """
    if not a.is_cuda and not knobs.runtime.interpret:
        raise NotImplementedError(
            "triton.dot needs a GPU, or Triton's interpreter: TRITON_INTERPRET=1 f8emu verify ..."
        )
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty((m, n), dtype=out_dtype)
    blocks: Any = {"block_m": _BLOCK_M, "block_n": _BLOCK_N, "block_k": _BLOCK_K}
    options: Any = {"use_fast_accum": use_fast_accum, "enable_fp_fusion": True}
    grid = triton.cdiv(m, _BLOCK_M), triton.cdiv(n, _BLOCK_N)
    _kernel[grid](a, b, scale_a, scale_b, out, m, n, k, **blocks, **options)
    return out

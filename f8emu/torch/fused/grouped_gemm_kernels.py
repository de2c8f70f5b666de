"""Triton kernels of grouped GEMMs with promoted sums [CHAIN-2], where the library's are slow: for small groups.

An output is `(acc * scale_a) * scale_b` [EPI-6]. `acc` adds in float32 what the tensor core gives of each 128 of K,
from zero each time: `tl.dot` of a step is not given the sum so far. Steps begin where a group begins.

Tensor maps bound every tile: rows and K behind a group's end are read as zeros, whose products are exact zeros, and are
not written. So no tile needs a mask, and the host does not wait for the sizes of the groups.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

STEP = tl.constexpr(128)  # of K, after which a tensor core's sum is promoted


@triton.jit
def write_tile(acc, out, scale_a, scale_b, row, column, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Rounds a tile of scaled sums to bfloat16 and stores what lies within `out`; scales begin at row and column 0."""
    m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
    of_rows = tl.load(scale_a + m, mask=m < rows, other=0.0)
    of_columns = tl.load(scale_b + n, mask=n < columns, other=0.0)
    scaled = (acc * of_rows[:, None]) * of_columns[None, :]
    out.store([row, column], scaled.to(tl.bfloat16))


@triton.jit(do_not_specialize=["G"])
def gemm_of_rows_kernel(
    a,
    b,
    scale_a,
    scale_b,
    offs,
    out,
    G,
    N,
    K,
    LDA,
    LDB,
    STACK,
    BLOCK_G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The output [T, N] of a [T, K], its rows sorted by group, and b [G, N, K]: a program for each tile of a group."""
    i = tl.arange(0, BLOCK_G)
    ends = tl.load(offs + i, mask=i < G, other=0)
    starts = tl.load(offs + i - 1, mask=(i > 0) & (i < G), other=0)
    tiles = tl.where(i < G, (ends - starts + BM - 1) // BM, 0)
    tiles_n = tl.cdiv(N, BN)
    group = tl.sum((tl.cumsum(tiles, 0) <= tl.program_id(0) // tiles_n).to(tl.int32), 0)
    if group < G:
        of_group, before = tl.sum(tl.where(i == group, tiles, 0), 0), tl.sum(tl.where(i < group, tiles, 0), 0)
        # Neighbours share the columns of b: those of one group fit into the cache, the whole of b does not.
        place = tl.program_id(0) - before * tiles_n
        start, end = tl.sum(tl.where(i == group, starts, 0), 0), tl.sum(tl.where(i == group, ends, 0), 0)
        row, column = start + place % of_group * BM, place // of_group * BN
        of_a = tl.make_tensor_descriptor(a, [end, K], [LDA, 1], [BM, STEP])
        of_b = tl.make_tensor_descriptor(b + group.to(tl.int64) * STACK, [N, K], [LDB, 1], [BN, STEP])
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, STEP):
            acc += tl.dot(of_a.load([row, k]), of_b.load([column, k]).T)
        of_out = tl.make_tensor_descriptor(out, [end, N], [N, 1], [BM, BN])
        write_tile(acc, of_out, scale_a, scale_b + group * N, row, column, end, N, BM, BN)


@triton.jit(do_not_specialize=["G"])
def gemm_of_inner_kernel(
    a,
    b,
    scale_a,
    scale_b,
    offs,
    out,
    G,
    M,
    N,
    LDA,
    LDB,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SUPER: tl.constexpr,
):
    """The output [G, M, N] of a [M, T] and b [N, T], their columns sorted by group: a program writes many tiles."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), G * tiles_m * tiles_n, tl.num_programs(0)):
        group, place = tile // (tiles_m * tiles_n), tile % (tiles_m * tiles_n)
        # Neighbours are tiles of SUPER rows of tiles, so that they read the same columns of both operands.
        first = place // (SUPER * tiles_n) * SUPER
        high = tl.minimum(tiles_m - first, SUPER)
        row = (first + place % (SUPER * tiles_n) % high) * BM
        column = place % (SUPER * tiles_n) // high * BN
        start, end = tl.load(offs + group - 1, mask=group > 0, other=0), tl.load(offs + group)
        of_a = tl.make_tensor_descriptor(a, [M, end], [LDA, 1], [BM, STEP])
        of_b = tl.make_tensor_descriptor(b, [N, end], [LDB, 1], [BN, STEP])
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(start, end, STEP):
            acc += tl.dot(of_a.load([row, k]), of_b.load([column, k]).T)
        matrix = out + group.to(tl.int64) * M * N
        of_out = tl.make_tensor_descriptor(matrix, [M, N], [N, 1], [BM, BN])
        write_tile(acc, of_out, scale_a + group * M, scale_b + group * N, row, column, M, N, BM, BN)

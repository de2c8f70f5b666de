"""Triton kernels of the blockwise casts: amax, scale and codes of 128-blocks in one pass over a matrix.

A program has one 128 x 128 tile, which holds whole blocks of the matrix and of its transpose. It goes over the tile
twice, in strips of `STRIP`: first for the amaxes, then for the codes. The second pass reads the tile from the L1 cache;
this takes few registers, so that many programs run at once. The first pass hands the inverse scales to the second
through memory (`row_inv_scale`, `col_inv_scale`, with the scales' shapes). So there is one division per scale, not one
in every thread that uses it, and the compiler is free to transpose the tile before it is converted.

Exactness and conventions are those of `casts`; each scale is of the block's own amax, so nothing is clamped.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false
# (Triton is optional, and its static loops are unrolled at compile time.)
import triton
import triton.language as tl

from f8emu.spec.scaling import BLOCK
from f8emu.torch.fused.cast_kernels import store_tile
from f8emu.torch.fused.scale_kernels import from_the_end, inv_scale_of, load_tile, magnitudes, one_nan, reciprocal

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _scales(
    inv_scale,
    scale,
    inside,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Replace the amaxes at the pointers `inv_scale` by inverse scales; write the scales to `scale`."""
    bits = one_nan(tl.load(inv_scale, mask=inside, other=0.0).to(tl.int32, bitcast=True))
    inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    tl.store(inv_scale, inv, mask=inside)
    tl.store(scale, reciprocal(inv, POWER_OF_TWO), mask=inside)


@triton.jit(do_not_specialize=["tiles_m", "tiles_n"])
def cast_vectors_kernel(
    x,
    row_codes,
    row_scale,
    row_inv_scale,
    col_codes,
    col_scale,
    col_inv_scale,
    M,
    N,
    tiles_m,
    tiles_n,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """1x128: `row_codes` [M, N] and `col_codes` [N, M] of `x` [M, N], each in vectors of 128 along its own rows.

    `row_scale` [ceil(N / 128), M] and `col_scale` [ceil(M / 128), N] are the transposes of `Granularity.scale_shape`:
    what a program writes is contiguous, and the GEMM requires this layout [EPI-5].
    """
    tile = from_the_end()
    tile_m, tile_n = (tile // tiles_n).to(tl.int64), (tile % tiles_n).to(tl.int64)
    rows = tile_m * _BLOCK + tl.arange(0, _BLOCK)
    cols = tile_n * _BLOCK + tl.arange(0, _BLOCK)
    row_at = tile_n * M + rows
    col_at = tile_m * N + cols
    # 1. The amaxes, stored where the inverse scales will be.
    best = tl.zeros((STRIP, _BLOCK), tl.int32)
    for start in tl.static_range(0, _BLOCK, STRIP):
        strip = tile_m * _BLOCK + start + tl.arange(0, STRIP)
        bits = magnitudes(load_tile(x, strip, cols, M, N))
        best = tl.maximum(best, bits)
        if ROWS:
            amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
            tl.store(row_inv_scale + tile_n * M + strip, amax, mask=strip < M)
    if COLS:
        tl.store(col_inv_scale + col_at, tl.max(best, 0).to(tl.float32, bitcast=True), mask=cols < N)
    # 2. The scales. The barriers make each thread's stores visible to the others.
    tl.debug_barrier()
    if ROWS:
        _scales(row_inv_scale + row_at, row_scale + row_at, rows < M, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    if COLS:
        _scales(col_inv_scale + col_at, col_scale + col_at, cols < N, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    tl.debug_barrier()
    # 3. The codes.
    for start in tl.static_range(0, _BLOCK, STRIP):
        strip = tile_n * _BLOCK + start + tl.arange(0, STRIP)
        values = load_tile(x, rows, strip, M, N)
        if ROWS:
            inv = tl.load(row_inv_scale + row_at, mask=rows < M, other=0.0)
            store_tile(row_codes, (values * inv[:, None]).to(DTYPE), rows, strip, M, N)
        if COLS:
            inv = tl.load(col_inv_scale + tile_m * N + strip, mask=strip < N, other=0.0)
            store_tile(col_codes, tl.trans((values * inv[None, :]).to(DTYPE)), strip, rows, N, M)


@triton.jit(do_not_specialize=["tiles_m", "tiles_n"])
def cast_squares_kernel(
    x,
    row_codes,
    row_scale,
    col_codes,
    col_scale,
    M,
    N,
    tiles_m,
    tiles_n,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """128x128: `row_codes` [M, N] and, the same codes, `col_codes` [N, M] of `x` [M, N], each with its scales.

    `row_scale` [ceil(M / 128), ceil(N / 128)]; `col_scale` is its transpose. A program keeps its scale in a register.
    """
    tile = from_the_end()
    tile_m, tile_n = (tile // tiles_n).to(tl.int64), (tile % tiles_n).to(tl.int64)
    rows = tile_m * _BLOCK + tl.arange(0, _BLOCK)
    cols = tile_n * _BLOCK + tl.arange(0, _BLOCK)
    best = tl.zeros((STRIP, _BLOCK), tl.int32)
    for start in tl.static_range(0, _BLOCK, STRIP):
        strip = tile_m * _BLOCK + start + tl.arange(0, STRIP)
        best = tl.maximum(best, magnitudes(load_tile(x, strip, cols, M, N)))
    bits = one_nan(tl.max(tl.max(best, 1), 0))
    inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    if ROWS:
        tl.store(row_scale + tile_m * tiles_n + tile_n, reciprocal(inv, POWER_OF_TWO))
    if COLS:
        tl.store(col_scale + tile_n * tiles_m + tile_m, reciprocal(inv, POWER_OF_TWO))
    for start in tl.static_range(0, _BLOCK, STRIP):
        strip = tile_n * _BLOCK + start + tl.arange(0, STRIP)
        # Two conversions (see `casts`). The row-code store separates the loads; otherwise the compiler merges
        # both conversions.
        if ROWS:
            store_tile(row_codes, (load_tile(x, rows, strip, M, N) * inv).to(DTYPE), rows, strip, M, N)
        if COLS:
            store_tile(col_codes, tl.trans((load_tile(x, rows, strip, M, N) * inv).to(DTYPE)), strip, rows, N, M)

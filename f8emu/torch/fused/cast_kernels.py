"""Triton kernels of the fused casts: each reads a matrix once and writes what its GEMMs need.

A linear layer needs every tensor twice: as `[rows, K]` of one GEMM and, transposed, of another. The tensor core takes
float8 operands only with K contiguous, so the transpose is written to memory. A program holds one tile of the matrix in
registers while it stores the codes of both.

Exactness: the bits of `eager`, for the reasons in `scales`, whose conventions hold here too, and for these.
- A scale is applied as one float32 product. The conversion rounds to the nearest, ties to even; NaN becomes 0x7f.
- Nothing relies on how the conversion treats values beyond the largest of the format. If the scale is an argument, the
  product is clamped first, by selects, which keep NaN. If it comes from the elements' own amax,
  `abs(value) * inv_scale <= max * (1 + 2^-22)`, which rounds to max.
- Codes that are stored in both layouts are converted twice: after a single conversion of a float32 tile, Triton 3.6
  (torch 2.11) permutes the codes on an H200. If both have the same inverse scale, the row-code store separates the
  loads; otherwise the compiler merges both conversions. Tested on a GPU by
  tests/torch_path/test_kernels.py::test_every_cast and ::test_blocks_in_strips.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# (Triton is optional, and its branches are decided at compile time.)
import triton
import triton.language as tl

from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.torch.fused.scale_kernels import (
    from_the_end,
    inv_scale_of,
    load_tile,
    magnitudes,
    one_nan,
    raise_amax,
    reciprocal,
)

DTYPES = {E4M3FN.name: tl.float8e4nv, E5M2.name: tl.float8e5}  # format name -> Triton's dtype


@triton.jit
def store_tile(codes, tile, rows, cols, M, N):
    """Store `tile` into `codes` [M, N] at `rows` x `cols`."""
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(codes + rows[:, None] * N + cols[None, :], tile, mask=inside)


@triton.jit
def clamp(values, LIMIT: tl.constexpr):
    """`values` clamped to +-`LIMIT`; NaN stays NaN."""
    # Comparisons with NaN are false, so both selects keep it.
    values = tl.where(values > LIMIT, LIMIT, values)
    return tl.where(values < -LIMIT, -LIMIT, values)


@triton.jit
def _inv_scale_of_all(
    amax,
    scale,
    count,
    BLOCK: tl.constexpr,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The inv_scale that all programs share, by the largest of `count` amaxes; the first program writes its scale."""
    if BLOCK == 1:
        bits = tl.load(amax).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        at = tl.arange(0, BLOCK)
        bits = one_nan(tl.max(magnitudes(tl.load(amax + at, mask=at < count, other=0.0).to(tl.float32)), 0))
    inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    if tl.program_id(0) == 0:
        tl.store(scale, reciprocal(inv, POWER_OF_TWO))
    return inv


@triton.jit
def _inv_scales_of_vector(
    source,
    scale,
    at,
    size,
    tiles,
    is_first,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TILED: tl.constexpr,
):
    """The inv_scales at `at`; with POWER_OF_TWO, from the amaxes there, whose scales the first programs write.

    With `TILED`, the amaxes are `tiles` vectors, of which the largest counts.
    """
    values = tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)
    if TILED:
        bits = magnitudes(values)
        for _ in range(1, tiles):
            source += size
            bits = tl.maximum(bits, magnitudes(tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)))
        values = bits.to(tl.float32, bitcast=True)
    if POWER_OF_TWO:
        values = inv_scale_of(values.to(tl.int32, bitcast=True), QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
        tl.store(scale + at, reciprocal(values, POWER_OF_TWO), mask=(at < size) & is_first)
    return values


@triton.jit(do_not_specialize=["tiles_n", "row_count", "col_count"])
def cast_pair_kernel(
    x,
    row_source,
    row_codes,
    row_scale,
    col_source,
    col_codes,
    col_scale,
    M,
    N,
    tiles_n,
    row_count,
    col_count,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COL_BLOCK: tl.constexpr,
    ROW_TILED: tl.constexpr,
    COL_TILED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """`row_codes` [M, N] and `col_codes` [N, M] of `x` [M, N], each by its own source.

    A source is `count` amaxes, at most `BLOCK`, of which the largest counts, or (0) a vector of one value a row of
    codes: an amax where scales are powers of two, otherwise an inv_scale, since a division for each in every program
    would take longer than another kernel before this one. The scales of amaxes are written too. With `TILED`, a source
    is `count` vectors of amaxes.
    """
    if (ROWS and ROW_BLOCK == 0) or (COLS and COL_BLOCK == 0):
        tile = tl.program_id(0)  # the amaxes of rows and columns were found from the end
    else:
        tile = from_the_end()
    tile_m, tile_n = tile // tiles_n, tile % tiles_n
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    cols = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    # 1. The inverse scales, before the tile is loaded.
    if ROWS and ROW_BLOCK == 0:
        row_inv = _inv_scales_of_vector(
            row_source, row_scale, rows, M, row_count, tile_n == 0, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO, ROW_TILED
        )[:, None]
    if ROWS and ROW_BLOCK > 0:
        row_inv = _inv_scale_of_all(
            row_source, row_scale, row_count, ROW_BLOCK, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO
        )
    if COLS and COL_BLOCK == 0:
        col_inv = _inv_scales_of_vector(
            col_source, col_scale, cols, N, col_count, tile_m == 0, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO, COL_TILED
        )[None, :]
    if COLS and COL_BLOCK > 0:
        col_inv = _inv_scale_of_all(
            col_source, col_scale, col_count, COL_BLOCK, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO
        )
    # 2. The codes, in two conversions (see above), which the compiler cannot merge: the inverse scales may differ.
    values = load_tile(x, rows, cols, M, N)
    if ROWS:
        store_tile(row_codes, clamp(values * row_inv, LIMIT).to(DTYPE), rows, cols, M, N)
    if COLS:
        store_tile(col_codes, tl.trans(clamp(values * col_inv, LIMIT).to(DTYPE)), cols, rows, N, M)


@triton.jit
def store_used(inv_scale, scale, used_inv_scale, KEEP: tl.constexpr):
    """The first program writes the scale that all of them use and, with `KEEP`, its inv_scale."""
    if tl.program_id(0) == 0:
        inv = tl.load(inv_scale)
        tl.store(scale, reciprocal(inv, False))
        if KEEP:
            tl.store(used_inv_scale, inv)


@triton.jit
def store_given(
    values,
    inv_scale,
    row_codes,
    col_codes,
    rows,
    cols,
    M,
    N,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Codes of a tile under one inv_scale: two conversions, with the row-code store between their loads (see above)."""
    if ROWS:
        scaled = values * tl.load(inv_scale)
        store_tile(row_codes, clamp(scaled, LIMIT).to(DTYPE), rows, cols, M, N)
    if COLS:
        scaled = values * tl.load(inv_scale)
        store_tile(col_codes, tl.trans(clamp(scaled, LIMIT).to(DTYPE)), cols, rows, N, M)


@triton.jit(do_not_specialize=["tiles_n"])
def cast_pair_given_kernel(
    x,
    inv_scale,
    row_codes,
    col_codes,
    amax,
    scale,
    used_inv_scale,
    M,
    N,
    tiles_n,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    AMAX: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """`row_codes` [M, N] and `col_codes` [N, M] of `x` [M, N] under one inv_scale.

    With `AMAX`, `amax` is updated by that of `x` in the same pass and `scale` is written, with `KEEP` `used_inv_scale`.
    """
    tile = from_the_end()
    rows = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    values = load_tile(x, rows, cols, M, N)
    if AMAX:
        raise_amax(amax, tl.max(tl.max(magnitudes(values), 1), 0), None)
        store_used(inv_scale, scale, used_inv_scale, KEEP)
    store_given(values, inv_scale, row_codes, col_codes, rows, cols, M, N, LIMIT, DTYPE, ROWS, COLS)


@triton.jit
def cast_rows_kernel(
    x,
    codes,
    scale,
    amax,
    M,
    N,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """`codes` [M, N], `scale` [M] and `amax` [M] of `x` [M, N], whose rows fit into `BN`, read once."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BN)
    values = load_tile(x, rows, cols, M, N)
    bits = one_nan(tl.max(magnitudes(values), 1))
    inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    tl.store(amax + rows, bits.to(tl.float32, bitcast=True), mask=rows < M)
    tl.store(scale + rows, reciprocal(inv, POWER_OF_TWO), mask=rows < M)
    store_tile(codes, (values * inv[:, None]).to(DTYPE), rows, cols, M, N)


@triton.jit
def cast_long_rows_kernel(
    x,
    codes,
    scale,
    amax,
    N,
    TILES_N: tl.constexpr,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
):
    """`cast_rows_kernel` for rows of any length: each is read twice, the second time from the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BN).to(tl.int64)
    best = tl.zeros((BN,), tl.int32)
    for _ in range(0, TILES_N):
        values = tl.load(x + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        best = tl.maximum(best, magnitudes(values))
        cols += BN
    bits = one_nan(tl.max(best, 0))
    inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    tl.store(amax + row, bits.to(tl.float32, bitcast=True))
    tl.store(scale + row, reciprocal(inv, POWER_OF_TWO))
    cols = tl.arange(0, BN).to(tl.int64)
    for _ in range(0, TILES_N):
        values = tl.load(x + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(codes + row * N + cols, (values * inv).to(DTYPE), mask=cols < N)
        cols += BN


@triton.jit(do_not_specialize=["tiles_n"])
def cast_columns_kernel(
    x, inv_scale, codes, M, N, tiles_n, LIMIT: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """`codes` [M, N] of `x` [M, N], by the `inv_scale` [N] of its columns."""
    tile = from_the_end()
    rows = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    inv = tl.load(inv_scale + cols, mask=cols < N, other=0.0)
    values = load_tile(x, rows, cols, M, N)
    store_tile(codes, clamp(values * inv[None, :], LIMIT).to(DTYPE), rows, cols, M, N)


@triton.jit(do_not_specialize=["tiles_n"])
def transpose_codes_kernel(codes, out, M, N, tiles_n, BM: tl.constexpr, BN: tl.constexpr):
    """`out` [N, M] = `codes` [M, N]^T, as bytes."""
    codes, out = codes.to(tl.pointer_type(tl.uint8), bitcast=True), out.to(tl.pointer_type(tl.uint8), bitcast=True)
    tile = tl.program_id(0)
    rows = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tile_codes = tl.load(codes + rows[:, None] * N + cols[None, :], mask=inside, other=0)
    store_tile(out, tl.trans(tile_codes), cols, rows, N, M)

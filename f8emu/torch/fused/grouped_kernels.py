"""Triton kernels of casts whose scales belong to groups of rows: the experts of a mixture.

A matrix [T, K] is sorted by group. Its rows have scales of their own, or one of their group; its columns have scales
within each group. Codes of rows [T, K] lie as the matrix does. Codes of columns lie transposed, [K, P]: each group
begins at a multiple of 16, as the GEMM over tokens requires, with zeros behind it. A stack of weights [G, N, K] is G
groups of N rows, whose transposed codes are [G, K, N].

One launch covers all groups without the host knowing their sizes: `tiles_kernel` lists the tiles of all groups once a
call. A tile lies at a multiple of `BM` of the padded rows, so that transposed codes are stored in whole sectors. A tile
that spans two groups is listed once for each.

Exactness: as `cast_kernels` and `silu_kernels`, whose functions compute everything here.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# (Triton is optional, and its branches are decided at compile time.)
import triton
import triton.language as tl

from f8emu.torch.fused.cast_kernels import clamp
from f8emu.torch.fused.scale_kernels import (
    inv_scale_of,
    larger_pair,
    magnitudes,
    one_nan,
    raise_amax,
    reciprocal,
    widened,
)
from f8emu.torch.fused.silu_kernels import grad_gate_of, grad_up_of, hidden_of, sigmoid_of, silu_of


@triton.jit(do_not_specialize=["G", "T", "count"])
def tiles_kernel(offs, tiles, G, T, count, BLOCK_G: tl.constexpr, BM: tl.constexpr):
    """`tiles`: the ends [G], the padded ends [G], and the table [5, count] of tiles; those left over are empty.

    Of a tile: its group, its first padded row, the first and last of the group's rows in it, the shift to the rows.
    """
    group, i, j = tl.program_id(0), tl.arange(0, BLOCK_G), tl.arange(0, 128)
    ends = tl.minimum(tl.load(offs + i, mask=i < G, other=0), T)
    starts = tl.minimum(tl.load(offs + i - 1, mask=(i > 0) & (i < G), other=0), T)
    sizes = tl.maximum(ends - starts, 0)
    padded = (sizes + 15) // 16 * 16
    padded_ends = tl.cumsum(padded, 0)
    padded_starts = padded_ends - padded
    # An empty group has one tile, which writes the scales of its columns.
    tiles_of = tl.where(sizes > 0, (padded_ends + BM - 1) // BM - padded_starts // BM, 1)
    own = i == group
    before, number = tl.sum(tl.where(i < group, tiles_of, 0)), tl.sum(tl.where(own, tiles_of, 0))
    size, start = tl.sum(tl.where(own, sizes, 0)), tl.sum(tl.where(own, starts, 0))
    place, end = tl.sum(tl.where(own, padded_starts, 0)), tl.sum(tl.where(own, padded_ends, 0))
    tl.store(tiles + group, tl.sum(tl.where(own, ends, 0)))
    tl.store(tiles + G + group, end)
    table = tiles + 2 * G
    for at in range(0, number, 128):
        inside = at + j < number
        base = (place // BM + at + j) * BM
        to = table + before + at + j
        tl.store(to, group + j * 0, mask=inside)
        tl.store(to + count, base, mask=inside)
        tl.store(to + 2 * count, tl.maximum(place - base, 0), mask=inside)
        tl.store(to + 3 * count, tl.minimum(place + size - base, BM), mask=inside)
        tl.store(to + 4 * count, start - place + j * 0, mask=inside)
    if group == G - 1:
        for at in range(before + number, count, 128):
            tl.store(table + at + j, j * 0 - 1, mask=at + j < count)


@triton.jit
def zeros_beyond_kernel(x, offs, M, N, G, BM: tl.constexpr, BN: tl.constexpr):
    """Zeros in the rows of `x` [M, N] behind the last group."""
    end = tl.load(offs + G - 1)
    first = tl.program_id(0).to(tl.int64) * BM
    if first + BM > end:
        rows = first + tl.arange(0, BM)
        is_beyond = (rows >= end) & (rows < M)
        for start in range(0, N, BN):
            cols = start + tl.arange(0, BN)
            zeros = tl.zeros((BM, BN), x.dtype.element_ty)
            tl.store(x + rows[:, None] * N + cols[None, :], zeros, mask=is_beyond[:, None] & (cols < N)[None, :])


@triton.jit
def place_of(tiles, G, count, rows, tiles_n, UNIFORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A program's tile: its group (-1: none), its rows in the matrix and in the transposed codes, and its columns.

    Rows from `low` to `high` of it are the group's; up to the next multiple of 16 are zeros that pad the group.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile_m, tile_n = tile // tiles_n, tile % tiles_n
    r = tl.arange(0, BM)
    cols = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    if UNIFORM:  # groups of `rows` rows each
        of_group = (rows + BM - 1) // BM
        group, base = tile_m // of_group, (tile_m % of_group) * BM
        low, high = base * 0, tl.minimum(rows - base, BM)
        places = base.to(tl.int64) + r
        at = group.to(tl.int64) * rows + places
    else:
        table = tiles + 2 * G + tile_m
        group = tl.load(table)
        is_used = group >= 0
        base = tl.multiple_of(tl.load(table + count, mask=is_used, other=0), BM)
        low = tl.multiple_of(tl.load(table + 2 * count, mask=is_used, other=0), 16)
        high = tl.load(table + 3 * count, mask=is_used, other=0)
        places = base.to(tl.int64) + r
        at = places + tl.load(table + 4 * count, mask=is_used, other=0)
    return group, low, high, r, at, places, cols, tile_n


@triton.jit
def load_rows(x, ld, at, cols, is_row, K):
    """The elements of `x` at rows and columns; zeros outside."""
    inside = is_row[:, None] & (cols[None, :] < K)
    return tl.load(x + at[:, None] * ld + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def raise_amaxes(
    row_bits, col_bits, group, at, cols, is_row, is_col, row_amax, col_amax, width, BY_GROUP: tl.constexpr
):
    """Raise the amax of the group, or those of a tile's rows and of the group's columns, by those of the tile."""
    if BY_GROUP:
        raise_amax(row_amax + group, tl.max(row_bits, 0), None)
    else:
        raise_amax(row_amax + at, row_bits, is_row)
        raise_amax(col_amax + group.to(tl.int64) * width + cols, col_bits, is_col)


@triton.jit
def store_codes(
    values,
    place,
    is_col,
    width,
    row,
    col,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BY_GROUP: tl.constexpr,
):
    """The codes of a tile of a matrix of `width` columns: of its rows, and of its columns, transposed.

    `place` is what `place_of` returns; `row` is its source, codes and scale; `col` also has the columns of its
    codes, and the codes of a group where groups are stacked. `BY_GROUP`: a source is the inv_scale of each group.
    Otherwise it is the amax of each row, or of each column of each group; scales are powers of two, which the first
    tile of a row or column writes. Then no product is beyond the largest number of the format.
    """
    group, low, high, r, at, places, cols, tile_n = place
    row_source, row_codes, row_scale = row
    col_source, col_codes, col_scale, ldc, stack = col
    is_row = (r >= low) & (r < high)
    if ROWS:
        if BY_GROUP:
            scaled = clamp(values * tl.load(row_source + group), LIMIT)
        else:
            bits = tl.load(row_source + at, mask=is_row, other=1.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
            inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, True)
            tl.store(row_scale + at, reciprocal(inv, True), mask=is_row & (tile_n == 0))
            scaled = values * inv[:, None]
        to = row_codes + at[:, None] * width + cols[None, :]
        tl.store(to, scaled.to(DTYPE), mask=is_row[:, None] & is_col[None, :])
    if COLS:
        if BY_GROUP:
            scaled = clamp(values * tl.load(col_source + group), LIMIT)
        else:
            source = group.to(tl.int64) * width + cols
            bits = tl.load(col_source + source, mask=is_col, other=1.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
            inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, True)
            tl.store(col_scale + source, reciprocal(inv, True), mask=is_col)
            scaled = values * inv[None, :]
        scaled = tl.where(is_row[:, None], scaled, 0.0)  # a scale may be NaN
        to = col_codes + group.to(tl.int64) * stack + cols[:, None] * ldc + places[None, :]
        is_padded = (r >= low) & (r < (high + 15) // 16 * 16)
        tl.store(to, tl.trans(scaled.to(DTYPE)), mask=is_col[:, None] & is_padded[None, :])


@triton.jit(do_not_specialize=["count", "tiles_n"])
def groups_amax_kernel(
    x,
    tiles,
    row_amax,
    col_amax,
    G,
    count,
    rows,
    K,
    tiles_n,
    UNIFORM: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The amaxes of `x` [T, K] (initially zero): of rows [T] and of columns [G, K], or of groups [G].

    `PAIRS`: of a 16-bit format and even K; two neighbours of a row are one word, as in `row_col_amax_of_pairs_kernel`.
    """
    group, low, high, r, at, _, cols, tile_n = place_of(tiles, G, count, rows, tiles_n, UNIFORM, BM, BN)
    is_row = (r >= low) & (r < high)
    if group >= 0:
        if PAIRS:
            DTYPE: tl.constexpr = x.dtype.element_ty
            pairs = tile_n.to(tl.int64) * (BN // 2) + tl.arange(0, BN // 2)
            inside = is_row[:, None] & (pairs[None, :] < K // 2)
            words = x.to(tl.pointer_type(tl.int32), bitcast=True) + at[:, None] * (K // 2) + pairs[None, :]
            bits = tl.load(words, mask=inside, other=0) & 0x7FFF7FFF
            by_row, by_col = tl.reduce(bits, 1, larger_pair), tl.reduce(bits, 0, larger_pair)
            by_row = widened(tl.maximum(by_row >> 16, by_row & 0xFFFF), DTYPE)
            of_cols, is_col = widened(by_col & 0xFFFF, DTYPE), pairs < K // 2
            raise_amaxes(by_row, of_cols, group, at, 2 * pairs, is_row, is_col, row_amax, col_amax, K, BY_GROUP)
            if not BY_GROUP:
                to = col_amax + group.to(tl.int64) * K + 2 * pairs + 1
                raise_amax(to, widened(by_col >> 16, DTYPE), is_col)
        else:
            bits = magnitudes(load_rows(x, K, at, cols, is_row, K))
            by_row, by_col = tl.max(bits, 1), tl.max(bits, 0)
            raise_amaxes(by_row, by_col, group, at, cols, is_row, cols < K, row_amax, col_amax, K, BY_GROUP)


@triton.jit(do_not_specialize=["count", "tiles_n"])
def cast_groups_kernel(
    x, tiles, row_source, row_codes, row_scale, col_source, col_codes, col_scale, amax,
    G, count, rows, K, ldc, stack, tiles_n,
    QUOTIENT: tl.constexpr, FLOOR: tl.constexpr, AT_FLOOR: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BY_GROUP: tl.constexpr, RAISE: tl.constexpr,
    UNIFORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`row_codes` [T, K] and `col_codes` [K, ldc] of `x` [T, K]; with `RAISE`, `amax` [G] is raised by the groups'."""
    place = place_of(tiles, G, count, rows, tiles_n, UNIFORM, BM, BN)
    group, low, high, r, at, _, cols, _ = place
    if group >= 0:
        is_row = (r >= low) & (r < high)
        values = load_rows(x, K, at, cols, is_row, K)
        if RAISE:
            raise_amax(amax + group, tl.max(tl.max(magnitudes(values), 1), 0), None)
        row, col = (row_source, row_codes, row_scale), (col_source, col_codes, col_scale, ldc, stack)
        store_codes(values, place, cols < K, K, row, col, QUOTIENT, FLOOR, AT_FLOOR, LIMIT, DTYPE, ROWS, COLS, BY_GROUP)


@triton.jit
def cast_rows_of_groups_kernel(
    x,
    codes,
    scale,
    col_amax,
    N,
    K,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    STEPS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """`codes` [G, N, K] and `scale` [G, N] of rows by their own amaxes, and `col_amax` [G, K] (initially zero).

    One reading finds both: a program holds a row at a time, in blocks of `HEAD` and `TAIL`, and the amaxes of columns.
    """
    per_group = (N + STEPS - 1) // STEPS
    group, first = tl.program_id(0) // per_group, (tl.program_id(0) % per_group) * STEPS
    end = tl.minimum(first + STEPS, N)
    cols, more = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)
    best, best_of_more = tl.zeros((HEAD,), tl.int32), tl.zeros((TAIL if TAIL > 0 else 1,), tl.int32)
    x += (group.to(tl.int64) * N + first) * K
    head = tl.load(x + cols)
    if TAIL > 0:
        tail = tl.load(x + more, mask=more < K, other=0.0)
    for row in range(first, end):
        # The next row is on its way while this one is reduced.
        values = head.to(tl.float32)
        bits = magnitudes(values)
        largest = tl.max(bits, 0)
        x += K
        head = tl.load(x + cols, mask=(cols < K) & (row + 1 < end), other=0.0)
        at = group.to(tl.int64) * N + row
        if TAIL > 0:
            rest = tail.to(tl.float32)
            bits_of_rest = magnitudes(rest)
            tail = tl.load(x + more, mask=(more < K) & (row + 1 < end), other=0.0)
            largest = tl.maximum(largest, tl.max(bits_of_rest, 0))
            best_of_more = tl.maximum(best_of_more, bits_of_rest)
        inv = inv_scale_of(one_nan(largest), QUOTIENT, FLOOR, AT_FLOOR, True)
        tl.store(scale + at, reciprocal(inv, True))
        tl.store(codes + at * K + cols, (values * inv).to(DTYPE))
        if TAIL > 0:
            tl.store(codes + at * K + more, (rest * inv).to(DTYPE), mask=more < K)
        best = tl.maximum(best, bits)
    raise_amax(col_amax + group.to(tl.int64) * K + cols, best, None)
    if TAIL > 0:
        raise_amax(col_amax + group.to(tl.int64) * K + more, best_of_more, more < K)


@triton.jit
def used_scales_kernel(inv_scale, used, scale, G, BLOCK: tl.constexpr):
    """`used` and `scale` [G] of inv_scales."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inv = tl.load(inv_scale + at, mask=at < G, other=1.0)
    tl.store(used + at, inv, mask=at < G)
    tl.store(scale + at, reciprocal(inv, False), mask=at < G)


@triton.jit
def scales_of_groups_kernel(scale_a, scale_b, ones, products, M, N, G, BLOCK: tl.constexpr):
    """`ones` [M], and `products` [G, N]: in each row the product of a group's two scales."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = at // N
    product = tl.load(scale_a + group, mask=group < G, other=0.0) * tl.load(scale_b + group, mask=group < G, other=0.0)
    tl.store(products + at, product, mask=group < G)
    tl.store(ones + at, tl.full((BLOCK,), 1.0, tl.float32), mask=at < M)


@triton.jit(do_not_specialize=["count", "tiles_n"])
def groups_hidden_kernel(
    gate, up, tiles, row_source, codes, scale, col_amax, amax,
    G, count, K, width, up_at, tiles_n,
    QUOTIENT: tl.constexpr, FLOOR: tl.constexpr, AT_FLOOR: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    CAST: tl.constexpr, BY_GROUP: tl.constexpr, RAISE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The amaxes of `hidden = silu(gate) * up` [T, K], or with `CAST` the codes of its rows.

    `gate` and `up` have `width` columns, and `up` begins at its column `up_at`. `row_source` takes the amaxes of rows.
    """
    place = place_of(tiles, G, count, 0, tiles_n, False, BM, BN)
    group, low, high, r, at, _, cols, _ = place
    if group >= 0:
        is_row, is_col = (r >= low) & (r < high), cols < K
        gates = load_rows(gate, width, at, cols, is_row, K)
        values = hidden_of(silu_of(gates, sigmoid_of(gates)), load_rows(up + up_at, width, at, cols, is_row, K))
        if CAST:
            if RAISE:
                raise_amax(amax + group, tl.max(tl.max(magnitudes(values), 1), 0), None)
            row, col = (row_source, codes, scale), (row_source, codes, scale, 0, 0)
            store_codes(
                values, place, is_col, K, row, col, QUOTIENT, FLOOR, AT_FLOOR, LIMIT, DTYPE, True, False, BY_GROUP
            )
        else:
            bits = magnitudes(values)
            by_row, by_col = tl.max(bits, 1), tl.max(bits, 0)
            raise_amaxes(by_row, by_col, group, at, cols, is_row, is_col, row_source, col_amax, K, BY_GROUP)


@triton.jit(do_not_specialize=["count", "tiles_n"])
def groups_gradients_kernel(
    grad_hidden, gate, up, tiles,
    gate_row_source, gate_row_codes, gate_row_scale, gate_col_source, gate_col_codes, gate_col_scale, gate_amax,
    up_row_source, up_row_codes, up_row_scale, up_col_source, up_col_codes, up_col_scale, up_amax,
    hidden_source, hidden_codes, hidden_scale,
    G, count, K, width, up_at, ldc, tiles_n,
    QUOTIENT: tl.constexpr, FLOOR: tl.constexpr, AT_FLOOR: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    HIDDEN_QUOTIENT: tl.constexpr, HIDDEN_AT_FLOOR: tl.constexpr, HIDDEN_LIMIT: tl.constexpr,
    HIDDEN_DTYPE: tl.constexpr,
    CAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, HIDDEN: tl.constexpr,
    BY_GROUP: tl.constexpr, RAISE: tl.constexpr, JOINT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The amaxes of the gradients of `gate` and `up`, or with `CAST` their codes and those of `hidden^T`.

    `JOINT`: both are one matrix [T, 2K], whose rows share a scale: `up`'s begin at its column `up_at`, as in `gate`.
    Between the three tensors only `silu` is kept; the others are loaded again, from the L1 cache.
    """
    place = place_of(tiles, G, count, 0, tiles_n, False, BM, BN)
    group, low, high, r, at, places, cols, tile_n = place
    if group >= 0:
        is_row, is_col = (r >= low) & (r < high), cols < K
        gates = load_rows(gate, width, at, cols, is_row, K)
        sigmoid = sigmoid_of(gates)
        silu = silu_of(gates, sigmoid)
        grads = load_rows(grad_hidden, K, at, cols, is_row, K)
        of_gate = grad_gate_of(grads, gates, sigmoid, load_rows(up + up_at, width, at, cols, is_row, K))
        if CAST:
            if RAISE:
                raise_amax(gate_amax + group, tl.max(tl.max(magnitudes(of_gate), 1), 0), None)
            row = (gate_row_source, gate_row_codes, gate_row_scale)
            col = (gate_col_source, gate_col_codes, gate_col_scale, ldc, 0)
            store_codes(
                of_gate, place, is_col, width, row, col, QUOTIENT, FLOOR, AT_FLOOR, LIMIT, DTYPE, ROWS, COLS, BY_GROUP
            )
            of_up = grad_up_of(load_rows(grad_hidden, K, at, cols, is_row, K), silu)
            if RAISE:
                raise_amax(up_amax + group, tl.max(tl.max(magnitudes(of_up), 1), 0), None)
            row = (up_row_source, up_row_codes, up_row_scale)
            col = (up_col_source, up_col_codes, up_col_scale, ldc, 0)
            of_place = (group, low, high, r, at, places, cols + up_at, tile_n)
            store_codes(
                of_up, of_place, is_col, width, row, col, QUOTIENT, FLOOR, AT_FLOOR, LIMIT, DTYPE, ROWS, COLS, BY_GROUP
            )
            if HIDDEN:
                values = hidden_of(silu, load_rows(up + up_at, width, at, cols, is_row, K))
                row = (hidden_source, hidden_codes, hidden_scale)
                col = (hidden_source, hidden_codes, hidden_scale, ldc, 0)
                store_codes(
                    values,
                    place,
                    is_col,
                    K,
                    row,
                    col,
                    HIDDEN_QUOTIENT,
                    FLOOR,
                    HIDDEN_AT_FLOOR,
                    HIDDEN_LIMIT,
                    HIDDEN_DTYPE,
                    False,
                    True,
                    BY_GROUP,
                )
        else:
            of_up = grad_up_of(load_rows(grad_hidden, K, at, cols, is_row, K), silu)
            gate_bits, up_bits = magnitudes(of_gate), magnitudes(of_up)
            gate_rows, up_rows = tl.max(gate_bits, 1), tl.max(up_bits, 1)
            gate_cols, up_cols = tl.max(gate_bits, 0), tl.max(up_bits, 0)
            if JOINT:
                gate_rows = tl.maximum(gate_rows, up_rows)
            raise_amaxes(
                gate_rows, gate_cols, group, at, cols, is_row, is_col, gate_row_source, gate_col_source, width, BY_GROUP
            )
            if not JOINT:
                raise_amaxes(
                    up_rows, up_cols, group, at, cols, is_row, is_col, up_row_source, up_col_source, width, BY_GROUP
                )
            elif not BY_GROUP:
                raise_amax(gate_col_source + group.to(tl.int64) * width + up_at + cols, up_cols, is_col)

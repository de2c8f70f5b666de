"""Triton kernels that compute amaxes and scales, and the functions they share with the kernels of the casts.

Exactness: the bits of `eager` and of `delayed.update_delayed` in plain torch, for these reasons.
- A maximum of magnitudes is the integer maximum of their bit patterns: NaN is above infinity, infinity above the rest.
- Divisions are `div_rn`, correctly rounded: an ordinary `/` of Triton is approximate (NUMERICS 6).

In every kernel offsets are 64-bit. An amax is updated by an atomic maximum of the float32 bit patterns, as int32.
Grids and tile sizes are in `plans`.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# (Triton is optional, and its branches are decided at compile time.)
import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FFFFFFF)
_FRACTION = tl.constexpr(0x007FFFFF)


@triton.jit
def load_tile(x, rows, cols, M, N):
    """The elements at `rows` x `cols` of `x` [M, N]; zeros outside, which do not change an amax."""
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    return tl.load(x + rows[:, None] * N + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def magnitudes(values):
    """Float32 bit patterns without the sign: ordered like the magnitudes, with infinity and NaN above them."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def one_nan(bits):
    """The maximum of magnitudes, with every NaN replaced by the canonical NaN [SPEC-1]."""
    return tl.where(bits > _INFINITY, _NAN, bits)


@triton.jit
def inv_scale_of(bits, QUOTIENT: tl.constexpr, FLOOR: tl.constexpr, AT_FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`ScaleRule`: `FLOOR` is the largest float32 not above the rule's floor, `AT_FLOOR` the float32 quotient there."""
    amax = bits.to(tl.float32, bitcast=True)
    if POWER_OF_TWO:
        # The exponent of the quotient, without a division: the difference of exponents, one less if the amax has the
        # larger fraction. A quotient below 1 of two significands is never so close to 1 that it would round to 1.
        quotient = (tl.zeros_like(amax) + QUOTIENT).to(tl.int32, bitcast=True)
        is_less = ((bits & _FRACTION) > (quotient & _FRACTION)).to(tl.int32)
        exponent = (quotient >> 23) - (bits >> 23) - is_less + 127
        inv = (exponent << 23).to(tl.float32, bitcast=True)
        at_floor = (tl.zeros_like(amax) + AT_FLOOR).to(tl.int32, bitcast=True) & _INFINITY
        inv = tl.where(amax <= FLOOR, at_floor.to(tl.float32, bitcast=True), inv)
        inv = tl.where(amax == float("inf"), 0.0, inv)
        return tl.where(amax == amax, inv, amax)  # NaN stays NaN
    inv = tl.div_rn(tl.zeros_like(amax) + QUOTIENT, amax)
    return tl.where(amax <= FLOOR, AT_FLOOR, inv)


@triton.jit
def reciprocal(values, POWER_OF_TWO: tl.constexpr):
    """`1 / values`, correctly rounded; with POWER_OF_TWO, values are powers of two, 0 or NaN: no division."""
    if POWER_OF_TWO:
        bits = values.to(tl.int32, bitcast=True)
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
        inverse = tl.where(bits == 0, float("inf"), inverse)
        return tl.where(values == values, inverse, values)  # NaN stays NaN
    return tl.div_rn(tl.zeros_like(values) + 1.0, values)


@triton.jit
def raise_amax(amax, bits, mask):
    """Update `amax` (float32, at least 0 or NaN) to the maximum of itself and `bits`, as integers, which keeps NaN."""
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), one_nan(bits), mask=mask, sem="relaxed")


@triton.jit
def tensor_amax_kernel(x, amax, count, BLOCK: tl.constexpr):
    """`amax` (initially zero) of the `count` elements at `x`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    raise_amax(amax, tl.max(magnitudes(values), 0), None)


@triton.jit
def row_amax_kernel(x, row_amax, M, N, TILES_N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """`row_amax` [M] of `x` [M, N]."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BN).to(tl.int64)
    best = tl.zeros((BM,), tl.int32)
    for _ in range(0, TILES_N):
        best = tl.maximum(best, tl.max(magnitudes(load_tile(x, rows, cols, M, N)), 1))
        cols += BN
    tl.store(row_amax + rows, one_nan(best).to(tl.float32, bitcast=True), mask=rows < M)


@triton.jit
def from_the_end():
    """The program's index, counted from the last: the end of what the kernel before this one wrote or read is cached.

    Of a matrix larger than the L2 cache, that is the part that need not come from memory again.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def places_of(amaxes, tile_m, tile_n, tiles_n, M, N, TILED: tl.constexpr):
    """The places of a tile's row amaxes and column amaxes among those of the whole."""
    if TILED:
        of_cols = amaxes + (tl.zeros((), tl.int64) + tiles_n) * M
        return amaxes + tile_n.to(tl.int64) * M, of_cols + tile_m.to(tl.int64) * N
    else:
        return amaxes, amaxes + M


@triton.jit
def give_amax(amax, bits, mask, TILED: tl.constexpr):
    """Store the amax of a tile, or raise that of the whole."""
    if TILED:
        tl.store(amax, one_nan(bits).to(tl.float32, bitcast=True), mask=mask)
    else:
        raise_amax(amax, bits, mask)


@triton.jit(do_not_specialize=["tiles_n"])
def row_col_amax_kernel(x, amaxes, M, N, tiles_n, TILED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """`amaxes` [M + N] (initially zero) of the rows of `x` [M, N], then of its columns.

    With `TILED`, those of each tile: [tiles_n, M], then [tiles_m, N], without values before.
    """
    tile = from_the_end()
    tile_m, tile_n = tile // tiles_n, tile % tiles_n
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    cols = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    of_rows, of_cols = places_of(amaxes, tile_m, tile_n, tiles_n, M, N, TILED)
    bits = magnitudes(load_tile(x, rows, cols, M, N))
    give_amax(of_rows + rows, tl.max(bits, 1), rows < M, TILED)
    give_amax(of_cols + cols, tl.max(bits, 0), cols < N, TILED)


@triton.jit
def larger_pair(a, b):
    """The larger of two 16-bit integers, twice in an int32, as one instruction of sm_90."""
    return tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def widened(bits, DTYPE: tl.constexpr):
    """The float32 bit patterns of magnitudes of `DTYPE`, a 16-bit format: the low halves of int32."""
    values = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return magnitudes(values)


@triton.jit(do_not_specialize=["tiles_n"])
def row_col_amax_of_pairs_kernel(x, amaxes, M, N, tiles_n, TILED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """`row_col_amax_kernel` for 16-bit formats and even N: two neighbours of a row are one word.

    Magnitudes of a 16-bit format are ordered like their bit patterns too, and as float32 they stay so: the maximum is
    found before it is converted.
    """
    PAIRS: tl.constexpr = BN // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    tile = from_the_end()
    tile_m, tile_n = tile // tiles_n, tile % tiles_n
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    pairs = tile_n.to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    of_rows, of_cols = places_of(amaxes, tile_m, tile_n, tiles_n, M, N, TILED)
    inside = (rows[:, None] < M) & (pairs[None, :] < N // 2)
    words = x.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = tl.load(words + rows[:, None] * (N // 2) + pairs[None, :], mask=inside, other=0) & 0x7FFF7FFF
    by_row, by_col = tl.reduce(bits, 1, larger_pair), tl.reduce(bits, 0, larger_pair)
    give_amax(of_rows + rows, widened(tl.maximum(by_row >> 16, by_row & 0xFFFF), DTYPE), rows < M, TILED)
    give_amax(of_cols + 2 * pairs, widened(by_col & 0xFFFF, DTYPE), pairs < N // 2, TILED)
    give_amax(of_cols + 2 * pairs + 1, widened(by_col >> 16, DTYPE), pairs < N // 2, TILED)


@triton.jit
def scales_kernel(
    amax,
    inv_scale,
    scale,
    N,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`inv_scale` and `scale` of each of the `N` values of `amax`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    bits = tl.load(amax + offsets, mask=inside, other=1.0).to(tl.float32).to(tl.int32, bitcast=True)
    inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    tl.store(inv_scale + offsets, inv, mask=inside)
    tl.store(scale + offsets, reciprocal(inv, POWER_OF_TWO), mask=inside)


@triton.jit
def update_delayed_kernel(
    taken,
    table,
    report,
    length,
    QUOTIENT_0: tl.constexpr,
    QUOTIENT_1: tl.constexpr,
    QUOTIENT_2: tl.constexpr,
    AT_FLOOR_0: tl.constexpr,
    AT_FLOOR_1: tl.constexpr,
    AT_FLOOR_2: tl.constexpr,
    IS_CAST_0: tl.constexpr,
    IS_CAST_1: tl.constexpr,
    IS_CAST_2: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    UNCALLED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """`delayed.update_delayed` of one tensor of one layer, all layers of a model at once.

    `table` has the addresses of each layer's tensors, eight a layer, those of `delayed.STATE`: compiled code may not
    take views of one storage that it writes to, so they are allocated one by one.
    """
    item = tl.program_id(0)
    tensor = item % 3
    state = table + item // 3 * 8
    # 1. Whether any tensor of the layer was cast.
    three = taken + (item - tensor)
    is_step = (tl.load(three) >= 0) | (tl.load(three + 1) >= 0) | (tl.load(three + 2) >= 0)
    # 2. This amax.
    bits = tl.load(taken + item)
    is_finite = bits < 0x7F800000
    is_usable = (bits > 0) & is_finite
    newest = tl.where(is_usable, bits, 0)
    # 3. Shift the history by one, of a tensor that was cast.
    history = tl.load(state).to(tl.pointer_type(tl.int32)) + tensor * length
    at = tl.arange(0, BLOCK_H)
    old = tl.load(history + at - 1, mask=(at > 0) & (at < length), other=0)
    new = tl.where(at == 0, newest, old)
    tl.debug_barrier()  # every thread has read before one writes
    tl.store(history + at, new, mask=(at < length) & (bits >= 0))
    reference = newest if MOST_RECENT else tl.max(new, 0)
    # 4. The inv_scale and the amax of the next pass.
    inv = inv_scale_of(reference, QUOTIENT_0, FLOOR, AT_FLOOR_0, POWER_OF_TWO)
    inv_1 = inv_scale_of(reference, QUOTIENT_1, FLOOR, AT_FLOOR_1, POWER_OF_TWO)
    inv_2 = inv_scale_of(reference, QUOTIENT_2, FLOOR, AT_FLOOR_2, POWER_OF_TWO)
    inv = tl.where(tensor == 0, inv, tl.where(tensor == 1, inv_1, inv_2))
    inv_scale = tl.load(state + 2 + tensor).to(tl.pointer_type(tl.float32))
    inv = tl.where(is_usable, inv, tl.load(inv_scale))
    tl.store(inv_scale, inv)
    amax = tl.load(state + 5 + tensor).to(tl.pointer_type(tl.float32))
    tl.store(amax, tl.zeros_like(inv) + UNCALLED)
    # 5. The counts of amaxes that were not usable.
    counts = tl.load(state + 1).to(tl.pointer_type(tl.int64)) + tensor
    is_cast = tl.where(tensor == 0, IS_CAST_0, tl.where(tensor == 1, IS_CAST_1, IS_CAST_2)) & is_step
    not_finite = tl.load(counts + 6) + ((bits >= 0x7F800000) & is_cast).to(tl.int64)
    tl.store(counts, tl.load(counts) + ((bits == 0) & is_cast).to(tl.int64))
    tl.store(counts + 3, tl.load(counts + 3) + ((bits < 0) & is_cast).to(tl.int64))
    tl.store(counts + 6, not_finite)
    tl.store(report + item, 2 * not_finite.to(tl.int32) + (inv > 0).to(tl.int32))

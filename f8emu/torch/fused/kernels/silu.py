"""Triton kernels of a gated feed-forward block: SiLU and product, computed in the kernel that casts them.

With `gate` and `up` [M, N] in bfloat16, `hidden = silu(gate) * up` is the input of the block's last layer. The forward
kernels read both and write the codes of `hidden`. The backward kernels read both and `grad_hidden`, and write the codes
of `grad_gate` and `grad_up`, each also transposed, and of `hidden^T`, which the forward pass need not save. None of the
three is ever written in bfloat16.

Exactness: the values that are cast are those of eager torch (see `silu_arithmetic`).

Amaxes, scales and codes are as in `scale_kernels` and `cast_kernels`, whose conventions hold here too.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from f8emu.torch.fused.kernels.casts import store_given, store_tile, store_used
from f8emu.torch.fused.kernels.scales import inv_scale_of, load_tile, magnitudes, one_nan, raise_amax, reciprocal
from f8emu.torch.fused.kernels.silu_arithmetic import grad_gate_of, grad_up_of, hidden_of, sigmoid_of, silu_of

_BLOCK = tl.constexpr(128)


@triton.jit
def _to_inv_scales(
    amax, inside, QUOTIENT: tl.constexpr, FLOOR: tl.constexpr, AT_FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """Replace the amaxes at these pointers by inverse scales."""
    bits = one_nan(tl.load(amax, mask=inside, other=0.0).to(tl.int32, bitcast=True))
    tl.store(amax, inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO), mask=inside)


@triton.jit
def _to_scales(inv_scale, inside, POWER_OF_TWO: tl.constexpr):
    """Replace the inverse scales at these pointers by scales."""
    tl.store(inv_scale, reciprocal(tl.load(inv_scale, mask=inside, other=1.0), POWER_OF_TWO), mask=inside)


@triton.jit
def _store_amaxes(amax, bits, inside):
    tl.store(amax, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _cast_strip(
    values,
    row_codes,
    row_inv_scale,
    col_codes,
    col_inv_scale,
    rows,
    strip,
    M,
    N,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Row and column codes of `values` [128, STRIP], by the inverse scales at the pointers."""
    if ROWS:
        inv = tl.load(row_inv_scale, mask=rows < M, other=0.0)
        store_tile(row_codes, (values * inv[:, None]).to(DTYPE), rows, strip, M, N)
    if COLS:
        inv = tl.load(col_inv_scale, mask=strip < N, other=0.0)
        store_tile(col_codes, tl.trans((values * inv[None, :]).to(DTYPE)), strip, rows, N, M)


@triton.jit(do_not_specialize=["tiles_n"])
def hidden_given_kernel(
    gate,
    up,
    inv_scale,
    codes,
    amax,
    used_inv_scale,
    scale,
    M,
    N,
    tiles_n,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """`codes` [M, N] of `hidden` under one inv_scale; `amax` becomes the maximum of itself and that of `hidden`."""
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tl.program_id(0) % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    gates = load_tile(gate, rows, cols, M, N)
    values = hidden_of(silu_of(gates, sigmoid_of(gates)), load_tile(up, rows, cols, M, N))
    raise_amax(amax, tl.max(tl.max(magnitudes(values), 1), 0), None)
    store_used(inv_scale, scale, used_inv_scale, True)
    store_given(values, inv_scale, codes, codes, rows, cols, M, N, LIMIT, DTYPE, True, False)


@triton.jit(do_not_specialize=["tiles_n"])
def hidden_vectors_kernel(
    gate,
    up,
    codes,
    scale,
    M,
    N,
    tiles_n,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
):
    """`codes` [M, N] and `scale` [ceil(N / 128), M] of `hidden` in vectors of 128 along its rows."""
    tile_m = (tl.program_id(0) // tiles_n).to(tl.int64)
    tile_n = (tl.program_id(0) % tiles_n).to(tl.int64)
    rows = tile_m * BM + tl.arange(0, BM)
    cols = tile_n * _BLOCK + tl.arange(0, _BLOCK)
    gates = load_tile(gate, rows, cols, M, N)
    values = hidden_of(silu_of(gates, sigmoid_of(gates)), load_tile(up, rows, cols, M, N))
    bits = one_nan(tl.max(magnitudes(values), 1))
    inv = inv_scale_of(bits, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    tl.store(scale + tile_n * M + rows, reciprocal(inv, POWER_OF_TWO), mask=rows < M)
    store_tile(codes, (values * inv[:, None]).to(DTYPE), rows, cols, M, N)


@triton.jit(do_not_specialize=["tiles_n"])
def gradients_given_kernel(
    grad_hidden,
    gate,
    up,
    gate_inv_scale,
    up_inv_scale,
    hidden_inv_scale,
    gate_amax,
    up_amax,
    gate_row_codes,
    gate_col_codes,
    up_row_codes,
    up_col_codes,
    hidden_col_codes,
    gate_scale,
    up_scale,
    M,
    N,
    tiles_n,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    HIDDEN_LIMIT: tl.constexpr,
    HIDDEN_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    GATE_COLS: tl.constexpr,
    UP_COLS: tl.constexpr,
    HIDDEN_COLS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Codes of `grad_gate`, `grad_up` [M, N], their transposes and `hidden^T` [N, M], each under its inv_scale.

    The amaxes of both gradients are updated. The three tensors are computed one after the other. Between them only
    `silu` is kept; `grad_hidden` and `up` are loaded again, from the L1 cache: this takes fewer registers.
    """
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tl.program_id(0) % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    gates = load_tile(gate, rows, cols, M, N)
    sigmoid = sigmoid_of(gates)
    silu = silu_of(gates, sigmoid)
    if ROWS or GATE_COLS:
        values = grad_gate_of(load_tile(grad_hidden, rows, cols, M, N), gates, sigmoid, load_tile(up, rows, cols, M, N))
        raise_amax(gate_amax, tl.max(tl.max(magnitudes(values), 1), 0), None)
        store_used(gate_inv_scale, gate_scale, gate_scale, False)
        store_given(
            values, gate_inv_scale, gate_row_codes, gate_col_codes, rows, cols, M, N, LIMIT, DTYPE, ROWS, GATE_COLS
        )
    if ROWS or UP_COLS:
        values = grad_up_of(load_tile(grad_hidden, rows, cols, M, N), silu)
        raise_amax(up_amax, tl.max(tl.max(magnitudes(values), 1), 0), None)
        store_used(up_inv_scale, up_scale, up_scale, False)
        store_given(values, up_inv_scale, up_row_codes, up_col_codes, rows, cols, M, N, LIMIT, DTYPE, ROWS, UP_COLS)
    if HIDDEN_COLS:
        values = hidden_of(silu, load_tile(up, rows, cols, M, N))
        store_given(
            values, hidden_inv_scale, hidden_col_codes, hidden_col_codes, rows, cols, M, N,
            HIDDEN_LIMIT, HIDDEN_DTYPE, False, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_n"])
def gradients_vectors_kernel(
    grad_hidden,
    gate,
    up,
    gate_row_codes,
    gate_row_scale,
    gate_col_codes,
    gate_col_scale,
    up_row_codes,
    up_row_scale,
    up_col_codes,
    up_col_scale,
    hidden_col_codes,
    hidden_col_scale,
    M,
    N,
    tiles_n,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    GATE_COLS: tl.constexpr,
    UP_COLS: tl.constexpr,
    HIDDEN_COLS: tl.constexpr,
    AMAX_STRIP: tl.constexpr,
    CODES_STRIP: tl.constexpr,
):
    """`gradients_given_kernel` in 1x128 vectors: a program has one 128 x 128 tile, whole vectors in both layouts.

    Like `cast_vectors_kernel` it goes over the tile twice. It computes all values twice: keeping them would take too
    many registers. The buffers of the scales hold first the amaxes, then the inverse scales, then the scales.
    """
    tile_m = (tl.program_id(0) // tiles_n).to(tl.int64)
    tile_n = (tl.program_id(0) % tiles_n).to(tl.int64)
    rows = tile_m * _BLOCK + tl.arange(0, _BLOCK)
    cols = tile_n * _BLOCK + tl.arange(0, _BLOCK)
    row_at, col_at = tile_n * M + rows, tile_m * N + cols
    # 1. The amaxes.
    gate_best = tl.zeros((AMAX_STRIP, _BLOCK), tl.int32)
    up_best = tl.zeros((AMAX_STRIP, _BLOCK), tl.int32)
    hidden_best = tl.zeros((AMAX_STRIP, _BLOCK), tl.int32)
    for start in range(0, _BLOCK, AMAX_STRIP):
        strip = tile_m * _BLOCK + start + tl.arange(0, AMAX_STRIP)
        gates, ups = load_tile(gate, strip, cols, M, N), load_tile(up, strip, cols, M, N)
        sigmoid = sigmoid_of(gates)
        silu = silu_of(gates, sigmoid)
        if ROWS or GATE_COLS or UP_COLS:
            grads = load_tile(grad_hidden, strip, cols, M, N)
            gate_bits = magnitudes(grad_gate_of(grads, gates, sigmoid, ups))
            up_bits = magnitudes(grad_up_of(grads, silu))
            if ROWS:
                _store_amaxes(gate_row_scale + tile_n * M + strip, tl.max(gate_bits, 1), strip < M)
                _store_amaxes(up_row_scale + tile_n * M + strip, tl.max(up_bits, 1), strip < M)
            gate_best = tl.maximum(gate_best, gate_bits)
            up_best = tl.maximum(up_best, up_bits)
        if HIDDEN_COLS:
            hidden_best = tl.maximum(hidden_best, magnitudes(hidden_of(silu, ups)))
    if GATE_COLS:
        _store_amaxes(gate_col_scale + col_at, tl.max(gate_best, 0), cols < N)
    if UP_COLS:
        _store_amaxes(up_col_scale + col_at, tl.max(up_best, 0), cols < N)
    if HIDDEN_COLS:
        _store_amaxes(hidden_col_scale + col_at, tl.max(hidden_best, 0), cols < N)
    # 2. The inverse scales. The barriers make each thread's stores visible to the others.
    tl.debug_barrier()
    if ROWS:
        _to_inv_scales(gate_row_scale + row_at, rows < M, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
        _to_inv_scales(up_row_scale + row_at, rows < M, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    if GATE_COLS:
        _to_inv_scales(gate_col_scale + col_at, cols < N, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    if UP_COLS:
        _to_inv_scales(up_col_scale + col_at, cols < N, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    if HIDDEN_COLS:
        _to_inv_scales(hidden_col_scale + col_at, cols < N, QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    tl.debug_barrier()
    # 3. The codes.
    for start in range(0, _BLOCK, CODES_STRIP):
        strip = tile_n * _BLOCK + start + tl.arange(0, CODES_STRIP)
        strip_at = tile_m * N + strip
        gates, ups = load_tile(gate, rows, strip, M, N), load_tile(up, rows, strip, M, N)
        sigmoid = sigmoid_of(gates)
        silu = silu_of(gates, sigmoid)
        if ROWS or GATE_COLS or UP_COLS:
            grads = load_tile(grad_hidden, rows, strip, M, N)
            values = grad_gate_of(grads, gates, sigmoid, ups)
            row_inv_scale, col_inv_scale = gate_row_scale + row_at, gate_col_scale + strip_at
            _cast_strip(
                values, gate_row_codes, row_inv_scale, gate_col_codes, col_inv_scale,
                rows, strip, M, N, DTYPE, ROWS, GATE_COLS,
            )  # fmt: skip
            values = grad_up_of(grads, silu)
            row_inv_scale, col_inv_scale = up_row_scale + row_at, up_col_scale + strip_at
            _cast_strip(
                values, up_row_codes, row_inv_scale, up_col_codes, col_inv_scale,
                rows, strip, M, N, DTYPE, ROWS, UP_COLS,
            )  # fmt: skip
        if HIDDEN_COLS:
            values, at = hidden_of(silu, ups), hidden_col_scale + strip_at
            _cast_strip(
                values, hidden_col_codes, at, hidden_col_codes, at, rows, strip, M, N, DTYPE, False, True
            )  # fmt: skip
    # 4. The scales.
    tl.debug_barrier()
    if ROWS:
        _to_scales(gate_row_scale + row_at, rows < M, POWER_OF_TWO)
        _to_scales(up_row_scale + row_at, rows < M, POWER_OF_TWO)
    if GATE_COLS:
        _to_scales(gate_col_scale + col_at, cols < N, POWER_OF_TWO)
    if UP_COLS:
        _to_scales(up_col_scale + col_at, cols < N, POWER_OF_TWO)
    if HIDDEN_COLS:
        _to_scales(hidden_col_scale + col_at, cols < N, POWER_OF_TWO)

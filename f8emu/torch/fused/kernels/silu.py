"""Triton kernels of a gated feed-forward block: SiLU and product, computed in the kernel that casts them.

With `gate` and `up` [M, N] in bfloat16, `hidden = silu(gate) * up` is the input of the block's last layer. The forward
kernels read both and write the codes of `hidden`. The backward kernels read both and `grad_hidden`, and write the codes
of `grad_gate` and `grad_up`, each also transposed, and of `hidden^T`, which the forward pass need not save. None of the
three is ever written in bfloat16. All scales are given, as under delayed scaling.

Exactness: the values that are cast are those of eager torch (see `silu_arithmetic`).

Amaxes, scales and codes are as in `scales` and `casts`, whose conventions hold here too.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from f8emu.torch.fused.kernels.casts import store_given, store_used
from f8emu.torch.fused.kernels.scales import load_tile, magnitudes, raise_amax
from f8emu.torch.fused.kernels.silu_arithmetic import grad_gate_of, grad_up_of, hidden_of, sigmoid_of, silu_of


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

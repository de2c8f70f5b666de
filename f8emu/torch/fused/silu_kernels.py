"""Triton kernels of a gated feed-forward block: SiLU and product, computed in the kernel that casts them.

With `gate` and `up` [M, N] in bfloat16, `hidden = silu(gate) * up` is the input of the block's last layer. The forward
kernel reads both and writes the codes of `hidden`. The backward kernel reads both and `grad_hidden`, and writes the
codes of `grad_gate` and `grad_up`, each also transposed, and of `hidden^T`, which the forward pass need not save. None
of the three is ever written in bfloat16. All scales are given, as under delayed scaling. Amaxes, scales and codes are
as in `scales` and `casts`, whose conventions hold here too.

Exactness: the values that are cast are those of eager torch, each product rounded to bfloat16 as a tensor would be.

    sigmoid   = 1 / (1 + exp(-gate))                                             float32
    silu      = bf16(gate * sigmoid)
    hidden    = bf16(silu * up)
    grad_up   = bf16(grad_hidden * silu)
    grad_gate = bf16(bf16(grad_hidden * up) * sigmoid * fma(gate, 1 - sigmoid, 1))

- `exp` is libdevice's, which torch's kernels call too.
- Torch divides `gate` by `1 + exp(-gate)`. The product with the reciprocal is the same bfloat16 for every gate
  (tests/torch_path/test_silu.py::test_silu_is_a_product).
- nvcc contracts torch's `1 + x * (1 - sigmoid)` to an fma; here it is written as an fma.
- The reciprocal is correctly rounded, by the steps that `rcp.rn` takes for numbers neither tiny nor huge, without its
  branch: 5 instructions, where `div_rn` takes 13 and stalls. Tested on a GPU: test_silu.py::test_every_gate.
"""

# pyright: reportMissingImports=false, reportOperatorIssue=false
# (Triton is optional, and its libdevice is annotated as returning None.)
import triton
import triton.language as tl
from triton.language.extra.libdevice import exp

from f8emu.torch.fused.cast_kernels import store_given, store_used
from f8emu.torch.fused.scale_kernels import load_tile, magnitudes, raise_amax


@triton.jit
def _rounded(values):
    return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def approximate_reciprocal(values):
    """`1 / values`, correct but for the last bit or two; infinity gives 0."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid_of(gate):
    """`1 / (1 + exp(-gate))`; as a fourth of it, the largest divisors have reciprocals that are not subnormal."""
    divisor = (1.0 + exp(-gate)) * 0.25
    near = approximate_reciprocal(divisor)
    nearest = tl.fma(near, tl.fma(-divisor, near, 1.0), near)
    return tl.where(near == 0.0, 0.0, nearest) * 0.25  # for an infinite divisor, `nearest` is NaN


@triton.jit
def silu_of(gate, sigmoid):
    """`gate * sigmoid`, rounded to bfloat16."""
    return _rounded(gate * sigmoid)


@triton.jit
def hidden_of(silu, up):
    """`silu * up`, rounded to bfloat16."""
    return _rounded(silu * up)


@triton.jit
def grad_up_of(grad_hidden, silu):
    """The gradient of `up`, rounded to bfloat16."""
    return _rounded(grad_hidden * silu)


@triton.jit
def grad_gate_of(grad_hidden, gate, sigmoid, up):
    """The gradient of `gate`, rounded to bfloat16."""
    return _rounded(_rounded(grad_hidden * up) * sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0))


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
    values = grad_gate_of(load_tile(grad_hidden, rows, cols, M, N), gates, sigmoid, load_tile(up, rows, cols, M, N))
    raise_amax(gate_amax, tl.max(tl.max(magnitudes(values), 1), 0), None)
    store_used(gate_inv_scale, gate_scale, gate_scale, False)
    store_given(values, gate_inv_scale, gate_row_codes, gate_col_codes, rows, cols, M, N, LIMIT, DTYPE, True, True)
    values = grad_up_of(load_tile(grad_hidden, rows, cols, M, N), silu)
    raise_amax(up_amax, tl.max(tl.max(magnitudes(values), 1), 0), None)
    store_used(up_inv_scale, up_scale, up_scale, False)
    store_given(values, up_inv_scale, up_row_codes, up_col_codes, rows, cols, M, N, LIMIT, DTYPE, True, True)
    values = hidden_of(silu, load_tile(up, rows, cols, M, N))
    codes = hidden_col_codes
    store_given(values, hidden_inv_scale, codes, codes, rows, cols, M, N, HIDDEN_LIMIT, HIDDEN_DTYPE, False, True)

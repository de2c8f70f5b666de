"""SiLU, its product with `up`, and their gradients, as functions of Triton kernels.

Exactness: the values are those of eager torch, each product rounded to bfloat16 as a tensor would be.

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

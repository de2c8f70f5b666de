"""The named results that every backend returns, whatever its array type (`Any` below)."""

from typing import Any, NamedTuple


class Scales(NamedTuple):
    """Float32 factors of one operand; shapes are those of `Granularity.scale_shape`."""

    inv_scale: Any
    """The factor that is multiplied while quantising."""
    scale: Any
    """The factor that decodes: `value = decode(code) * scale`."""


class DelayedState(NamedTuple):
    """State of one tensor under `DelayedScaling`."""

    amax_history: Any
    """[history_length] float32, newest first."""
    inv_scale: Any
    """[] float32."""
    initialized: Any
    """[] bool."""


class Float8State(NamedTuple):
    """The states of delayed scaling of a linear layer; None for a tensor without delayed scales.

    JAX differentiates floating-point leaves only, so `initialized` is a float32 here, 0 or 1. None says that the scale
    is known to be set, which saves a pass over the tensor. In a cotangent, `amax_history[0]` is the amax of the casts.
    """

    input: DelayedState | None
    weight: DelayedState | None
    grad_output: DelayedState | None


class OperandTrace(NamedTuple):
    """One operand of one GEMM, seen as `[rows, summed dimension]`."""

    amax: Any
    """Float32, the amax of this tensor now, also under delayed scaling, where the scale comes from earlier steps."""
    inv_scale: Any
    scale: Any
    codes: Any
    """[rows, summed dimension], of the cast's float8 dtype; in a high precision GEMM the bfloat16 values, and
    amax, inv_scale and scale are None."""


class GemmTrace(NamedTuple):
    """One GEMM: `product = a @ b^T`."""

    a: OperandTrace
    b: OperandTrace
    product: Any
    """[rows of a, rows of b], in the dtype of the layer's input; before a bias."""


class LinearTrace(NamedTuple):
    """Forward and backward of one linear layer; None for parts that were not requested."""

    output: GemmTrace
    grad_input: GemmTrace | None
    grad_weight: GemmTrace | None
    result: Any
    """[M, N], the layer's output: `output.product`, plus the bias, if there is one."""

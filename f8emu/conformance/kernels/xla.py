"""`jax.lax.dot_general` of float8 arrays with the scales after it, as XLA compiles it for the device."""

from functools import cache
from typing import Any


@cache
def _compiled() -> Any:
    import jax
    from jax import lax

    def run(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, use_fast_accum: bool) -> Any:
        product = lax.dot_general(
            a,
            b,
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.DEFAULT if use_fast_accum else lax.Precision.HIGHEST,
            preferred_element_type=jax.numpy.float32,
        )
        scaled = product * (scale_a * scale_b) if scale_a.ndim == 0 else (product * scale_b) * scale_a
        return scaled.astype(out_dtype)

    # otherwise XLA may make the GEMM a Triton fusion, whose bits follow no rule [NUMERICS 7]
    options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}
    return jax.jit(run, static_argnums=(4, 5), compiler_options=options)


def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any, use_fast_accum: bool) -> Any:
    """`dot_general(a, b)` times the scales, rounded once. Shapes: those of `torch._scaled_mm`."""
    return _compiled()(a, b, scale_a, scale_b, out_dtype, use_fast_accum)

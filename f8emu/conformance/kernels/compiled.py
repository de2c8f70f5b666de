"""Scaled GEMMs as compilers make them: `torch._scaled_mm` by Inductor, and `dot_general` with its scales by XLA."""

from functools import cache
from typing import Any


def inductor_scaled_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, *, bias: Any, out_dtype: Any, use_fast_accum: bool
) -> Any:
    """`torch._scaled_mm`, autotuned, when Inductor's Triton templates alone may be chosen.

    Raises:
        NotImplementedError: Inductor has no template for this GEMM.
    """
    import torch
    from torch._inductor.exc import InductorError

    def run(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> Any:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )

    torch.compiler.reset()  # every GEMM is a program of its own: past the limit of recompilations it would run eagerly
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON", "autotune_fallback_to_aten": False}
    try:
        return torch.compile(run, fullgraph=True, dynamic=False, options=options)(a, b, scale_a, scale_b, bias)
    except InductorError as error:
        if "NoValidChoices" in str(error):
            raise NotImplementedError("Inductor has no Triton template for this GEMM") from error
        raise


@cache
def _dot_general() -> Any:
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


def xla_scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any, use_fast_accum: bool) -> Any:
    """`dot_general(a, b)` times the scales, rounded once. Shapes: those of `torch._scaled_mm`."""
    return _dot_general()(a, b, scale_a, scale_b, out_dtype, use_fast_accum)

"""`torch._scaled_mm` as Inductor compiles it when its Triton templates alone may be chosen."""

from typing import Any


def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *, bias: Any, out_dtype: Any, use_fast_accum: bool) -> Any:
    """`torch._scaled_mm`, autotuned among the Triton templates.

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

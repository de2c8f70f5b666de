"""Kernels that people use, declared: `f8emu verify fbgemm.rowwise`. Each with what it gave, and the rule that says so.

Rules in brackets: reference/NUMERICS.md. How each is called was read in torch 2.13, torchao 36027d82, FBGEMM 71d6f8b2
and its wheel 1.6.0, DeepGEMM 54e2261 and sgl-deep-gemm 0.1.2. They ran on an H200, 2026-11-22, or an H100, 2026-11-26,
with torch 2.11, CUDA 13.0, Triton 3.6, jax 0.11.2, torchao 0.17.0 and sgl-deep-gemm 0.1.2.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from f8emu.conformance.kernels.kernel import (
    BLOCKWISE_1X128_128X128,
    BLOCKWISE_128X128,
    K_BY_ROWS,
    PADDED_K_BY_ROWS,
    PADDED_ROWS_BY_K,
    ROWWISE_MATRICES,
    ROWWISE_VECTORS,
    TENSORWISE_SCALARS,
    Accumulation,
    Arg,
    Kernel,
    ScaleLayout,
    Scales,
)
from f8emu.spec import BFLOAT16, E4M3FN, FLOAT32, HIGH_PRECISION, HOPPER, Granularity
from f8emu.spec.gemm_call import GroupKind

_E4M3 = ((E4M3FN, E4M3FN),)
_VECTOR, _SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
_LIBRARY_VECTOR = ScaleLayout(column_major=True)
_LIBRARY_SQUARE = ScaleLayout(k_first=True, column_major=True, k_multiple=4)
# The layout of block scales in `torch.nn.functional.scaled_mm` [EPI-5].
_LIBRARY_BLOCKS: Scales = {
    (_VECTOR, _VECTOR): (_LIBRARY_VECTOR, _LIBRARY_VECTOR),
    (_VECTOR, _SQUARE): (_LIBRARY_VECTOR, _LIBRARY_SQUARE),
    (_SQUARE, _VECTOR): (_LIBRARY_SQUARE, _LIBRARY_VECTOR),
}


def _scaling_type(granularity: Granularity) -> Any:
    from torch.nn.functional import ScalingType

    return {
        Granularity.TENSORWISE: ScalingType.TensorWise,
        Granularity.ROWWISE: ScalingType.RowWise,
        _VECTOR: ScalingType.BlockWise1x128,
        _SQUARE: ScalingType.BlockWise128x128,
    }[granularity]


_OPERANDS = (Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B)
_OUT_AND_SUM = {"out_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM}
_BIAS_AND_SUM = {"bias": Arg.BIAS, "use_fast_accum": Arg.USE_FAST_ACCUM}
_Options = dict[str, Any]
_LIKE_TORCH: _Options = {
    "keywords": {"bias": Arg.BIAS, **_OUT_AND_SUM},
    "scales": {**TENSORWISE_SCALARS, **ROWWISE_MATRICES},
    "a": PADDED_ROWS_BY_K,
    "b": PADDED_K_BY_ROWS,
    "formats": HOPPER.format_pairs,
    "out_dtypes": HIGH_PRECISION,
}
_FUNCTIONAL: _Options = {
    "arguments": (Arg.A, Arg.B, Arg.SCALE_A, Arg.GRANULARITY_A, Arg.SCALE_B, Arg.GRANULARITY_B),
    "granularity_word": _scaling_type,
}
# An assertion on the device ends what other sizes of groups begin, and every call after it.
_LIBRARY_GROUPS: _Options = {
    "b": K_BY_ROWS,
    "group_multiples": {GroupKind.ROWS: 1, GroupKind.COLUMNS: 16, GroupKind.INNER: 16, GroupKind.BATCH: 1},
    "leaves_rows_behind": True,
    "needs_gpu": True,
}
_TORCHAO: _Options = {
    "imports": ("torchao.prototype.blockwise_fp8_training.kernels",),
    "install": "pip install torchao",
    "arguments": (*_OPERANDS, 128, Arg.OUT_DTYPE),
    "b": K_BY_ROWS,
    "out_dtypes": (FLOAT32,),
    "block_multiples": (16, 128, 128),
    "needs_gpu": True,
}
_FBGEMM: _Options = {
    "function": "torch:ops.fbgemm.f8f8bf16_{1}",
    "imports": ("fbgemm_gpu.experimental.gen_ai",),
    "install": "pip install fbgemm-gpu-genai, the release of the installed torch",
    "needs_gpu": True,
}
_PAIRS = ((Arg.A, Arg.SCALE_A), (Arg.B, Arg.SCALE_B))
_DEEPGEMM: _Options = {
    "function": "deep_gemm:fp8_gemm_nt",
    "arguments": (*_PAIRS, Arg.OUT),
    "scales": BLOCKWISE_1X128_128X128,
    "install": "pip install sgl-deep-gemm (PyPI's deep-gemm is something else)",
    "needs_gpu": True,
}
_DEEPGEMM_VECTORS: _Options = {
    "scales": {(_VECTOR, _VECTOR): (ScaleLayout(), ScaleLayout())},
    "out_dtypes": (FLOAT32,),
}


def _deepgemm_groups(function: str, of_library: str, **options: Any) -> _Options:
    # A function that the installed version lacks is not offered.
    where = f"f8emu.conformance.kernels.deepgemm_groups:{function}"
    declared = {"function": where, "imports": (f"deep_gemm:{of_library}",), "block_multiples": (128, 128, 128)}
    return _DEEPGEMM | declared | options


def scaled_mm_kernel(name: str, function: Callable[..., Any]) -> Kernel:
    """A function called as `torch._scaled_mm` is, by `loaded.CONTRACT`."""
    return Kernel(name=name, function=function, arguments=_OPERANDS, **_LIKE_TORCH)


def _declared(name: str, seen: str, *, function: str = "{0}:{1}", **options: Any) -> Kernel:
    module, _, last = name.rpartition(".")
    shared: _Options = {"arguments": _OPERANDS, "arrays": "torch", "formats": _E4M3, **options}
    return Kernel(name=name, function=function.format(module, last), seen=seen, **shared)


_KERNELS = (
    _declared(
        "torch._scaled_mm",
        "on an H200 equal: 635,976 outputs of 594 GEMMs [EPI-1] [EPI-2]; on a CPU torch adds in float32",
        **_LIKE_TORCH,
    ),
    _declared(
        "torch.nn.functional.scaled_mm",
        "on an H200 equal, block scales too: 1,883,733 outputs of 774 GEMMs [EPI-5]",
        **_LIKE_TORCH
        | _FUNCTIONAL
        | {
            "keywords": {"bias": Arg.BIAS, "output_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM},
            "scales": {**TENSORWISE_SCALARS, **ROWWISE_MATRICES, **_LIBRARY_BLOCKS},
        },
        block_multiples=(128, 128, 128),  # torch wants whole blocks beside 128x128 scales
    ),
    _declared(
        "torch._scaled_grouped_mm",
        "on an H100 equal, groups of every kind: 61,440 outputs of 48 GEMMs [EPI-6]",
        keywords={"offs": Arg.OFFS, **_OUT_AND_SUM},
        **_LIBRARY_GROUPS,
    ),
    _declared(
        "torch.nn.functional.scaled_grouped_mm",
        "on an H200 equal, groups of rows: 58,368 outputs of 10 GEMMs [EPI-6]",
        **_FUNCTIONAL,
        keywords={"offs": Arg.OFFS, "output_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM},
        **_LIBRARY_GROUPS,
    ),
    _declared(
        "triton.dot",
        "on an H200 equal, promoted after each BLOCK_K, here 128: 47,780 outputs of 137 GEMMs [CHAIN-1] [CHAIN-2]",
        function="f8emu.conformance.kernels.triton_dot:scaled_mm",
        keywords=_OUT_AND_SUM,
        scales=ROWWISE_MATRICES,
        b=K_BY_ROWS,
        formats=HOPPER.format_pairs,
        out_dtypes=HIGH_PRECISION,
        multiples=(1, 16, 128),
        install="pip install triton",
    ),
    _declared(
        "inductor.rowwise",
        "on an H200 different: acc * (scale_a * scale_b), float16 products promoted as its tuning chose [CHIP-2]",
        function=f"{__name__}:inductor_scaled_mm",
        **_LIKE_TORCH | {"scales": ROWWISE_MATRICES, "out_dtypes": (BFLOAT16,)},
        needs_gpu=True,
    ),
    _declared(
        "torchao.triton_1x128_128x128",
        "on an H200 different, every bit explained: fma(p * scale_a, scale_b, total), not [EPI-5]",
        **_TORCHAO,
        function="torch:ops.torchao.triton_fp8_gemm_1x128_128x128",
        scales={(_VECTOR, _SQUARE): (_LIBRARY_VECTOR, ScaleLayout(k_first=True, column_major=True))},
    ),
    _declared(
        "torchao.triton_1x128_128x1",
        "on an H200 equal: 255,471 outputs of 27 GEMMs [EPI-5]",
        **_TORCHAO,
        function="torch:ops.torchao.triton_fp8_gemm_1x128_128x1",
        scales={(_VECTOR, _VECTOR): (_LIBRARY_VECTOR, ScaleLayout(k_first=True))},
    ),
    _declared(
        "fbgemm.rowwise",
        "on an H200 different, every bit explained: (acc * scale_a) * scale_b, the bias added after bfloat16",
        **_FBGEMM,
        keywords=_BIAS_AND_SUM,
        scales=ROWWISE_VECTORS,
    ),
    _declared(
        "fbgemm.rowwise_out",
        "on an H200 different, as fbgemm.rowwise; nothing was written outside its output",
        **_FBGEMM,
        arguments=(*_OPERANDS, Arg.OUT),
        keywords=_BIAS_AND_SUM,
        scales=ROWWISE_VECTORS,
    ),
    _declared(
        "fbgemm.tensorwise",
        "on an H200 equal to fast accumulation: 13,988 outputs of 41 GEMMs [EPI-1]",
        **_FBGEMM,
        arguments=(Arg.A, Arg.B, Arg.SCALE_PRODUCT),
        scales=TENSORWISE_SCALARS,
        accumulation=Accumulation.FAST,  # it takes use_fast_accum, and does not read it
    ),
    _declared(
        "fbgemm.blockwise",
        "on an H200 equal to 1x128 by 128x128 scales whose rows repeat: 274,031 outputs of 30 GEMMs [EPI-5]",
        **_FBGEMM,
        arguments=(*_OPERANDS, 128, 128, 128),
        scales=BLOCKWISE_128X128,
        block_multiples=(1, 128, 128),
    ),
    _declared(
        "fbgemm.groupwise",
        "on an H200 equal: 274,031 outputs of 30 GEMMs [EPI-5]",
        **_FBGEMM,
        scales={(_VECTOR, _SQUARE): (ScaleLayout(k_first=True), ScaleLayout(k_first=True))},
        block_multiples=(1, 128, 128),
    ),
    _declared(
        "deepgemm.fp8_gemm_nt",
        "on an H100 equal: 1,524,612 outputs of 358 GEMMs [EPI-5]",
        **_DEEPGEMM,
        block_multiples=(1, 128, 128),
    ),
    _declared(
        "deepgemm.fp8_gemm_nt_1d1d",
        "on an H100 different: fma(scale_a * scale_b, p, total), not [EPI-5]; it adds its output to a zero",
        **_DEEPGEMM
        | _DEEPGEMM_VECTORS
        | {"arguments": (*_PAIRS, Arg.OUT, Arg.ZEROS, (1, 1, 128)), "block_multiples": (128, 128, 128)},
    ),
    _declared(
        "deepgemm.m_grouped_fp8_gemm_nt_contiguous",
        "on an H100 equal, groups of 128 rows: 1,524,612 outputs of 358 GEMMs [EPI-5]",
        **_deepgemm_groups("contiguous", "m_grouped_fp8_gemm_nt_contiguous"),
    ),
    _declared(
        "deepgemm.m_grouped_fp8_gemm_nt_masked",
        "on an H100 equal, groups of any rows: 1,524,612 outputs of 358 GEMMs [EPI-5]",
        **_deepgemm_groups("masked", "fp8_m_grouped_gemm_nt_masked", block_multiples=(1, 128, 128)),
    ),
    _declared(
        "deepgemm.k_grouped_fp8_gemm_nt_contiguous",
        "on an H100 different, as deepgemm.fp8_gemm_nt_1d1d; sgl-deep-gemm 0.1.2 has no such function, 0.1.4 has",
        **_deepgemm_groups("inner", "k_grouped_fp8_gemm_nt_contiguous", arguments=(*_PAIRS, Arg.ZEROS))
        | _DEEPGEMM_VECTORS,
    ),
    _declared(
        "jax.dot_general",
        "on an H200 equal: 97,608 outputs of 282 GEMMs [CHAIN-1] [CHAIN-2]; on a CPU XLA adds in float32",
        function=f"{__name__}:xla_scaled_mm",
        **_LIKE_TORCH | {"keywords": _OUT_AND_SUM},
        arrays="jax",
        install="pip install 'f8emu[jax]'",
    ),
)
KERNELS = {kernel.name: kernel for kernel in _KERNELS}
"""Name -> declaration."""


# Scaled GEMMs as compilers make them: `torch._scaled_mm` by Inductor, and `dot_general` with its scales by XLA


def inductor_scaled_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, *, bias: Any, out_dtype: Any, use_fast_accum: bool
) -> Any:
    """`torch._scaled_mm`, autotuned, when Inductor's Triton templates alone may be chosen."""
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

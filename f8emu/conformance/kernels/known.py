"""Kernels that people use, declared: `f8emu verify fbgemm.rowwise`. With what each should give, read in its source.

`predicted` was read, not run, unless it says so. Rules in brackets: reference/NUMERICS.md. How each is called was read
in torch 2.13, torchao 36027d82, FBGEMM 71d6f8b2 and its wheel 1.6.0, DeepGEMM 54e2261 and sgl-deep-gemm 0.1.2.
`seen` is of an H200, 2026-11-22, or an H100, 2026-11-26: torch 2.11, CUDA 13.0, Triton 3.6, jax 0.11.2, torchao 0.17.0,
sgl-deep-gemm 0.1.2.
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
    "install": "pip install sgl-deep-gemm (PyPI's deep-gemm is something else)",
    "needs_gpu": True,
}

_GROUPS = "f8emu.conformance.kernels.deepgemm_groups"


def _deepgemm_groups(function: str, of_library: str, **options: Any) -> _Options:
    # What the installed version lacks is not offered.
    imports = (f"deep_gemm:{of_library}",)
    taken: _Options = {"function": f"{_GROUPS}:{function}", "imports": imports, "block_multiples": (128, 128, 128)}
    return _DEEPGEMM | taken | options


def scaled_mm_kernel(name: str, function: Callable[..., Any]) -> Kernel:
    """A function called as `torch._scaled_mm` is, by `loaded.CONTRACT`."""
    return Kernel(name=name, function=function, arguments=_OPERANDS, **_LIKE_TORCH)


def _declared(name: str, *, predicted: str, seen: str = "", function: str = "{0}:{1}", **options: Any) -> Kernel:
    module, _, last = name.rpartition(".")
    shared: _Options = {"arguments": _OPERANDS, "arrays": "torch", "formats": _E4M3, **options}
    where = function.format(module, last)
    seen = f"on an H200 {seen}" if seen and not seen.startswith("on an ") else seen
    return Kernel(name=name, function=where, predicted=predicted, seen=seen, **shared)


_KERNELS = (
    _declared(
        "torch._scaled_mm",
        **_LIKE_TORCH,
        predicted="on a Hopper GPU equal, every bit: what was recorded [EPI-1] [EPI-2]; on a CPU torch adds in float32",
        seen="equal: 635,976 outputs of 594 GEMMs",
    ),
    _declared(
        "torch.nn.functional.scaled_mm",
        **_LIKE_TORCH
        | _FUNCTIONAL
        | {
            "keywords": {"bias": Arg.BIAS, "output_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM},
            "scales": {**TENSORWISE_SCALARS, **ROWWISE_MATRICES, **_LIBRARY_BLOCKS},
        },
        block_multiples=(128, 128, 128),  # torch wants whole blocks beside 128x128 scales
        predicted="on a Hopper GPU equal, every bit, block scales too: what was recorded [EPI-5]",
        seen="equal: 1,883,733 outputs of 774 GEMMs",
    ),
    _declared(
        "torch._scaled_grouped_mm",
        keywords={"offs": Arg.OFFS, **_OUT_AND_SUM},
        **_LIBRARY_GROUPS,
        needs_gpu=True,
        predicted="equal, every bit, groups of every kind: what was recorded [EPI-6]",
        seen="equal: 58,368 outputs of 10 GEMMs that divide rows; on an H100 61,440 of 48 of every kind",
    ),
    _declared(
        "torch.nn.functional.scaled_grouped_mm",
        **_FUNCTIONAL,
        keywords={"offs": Arg.OFFS, "output_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM},
        **_LIBRARY_GROUPS,
        needs_gpu=True,
        predicted="equal, every bit: it calls torch._scaled_grouped_mm [EPI-6]",
        seen="equal: 58,368 outputs of 10 GEMMs that divide rows",
    ),
    _declared(
        "triton.dot",
        function="f8emu.conformance.kernels.triton_dot:scaled_mm",
        keywords=_OUT_AND_SUM,
        scales=ROWWISE_MATRICES,
        b=K_BY_ROWS,
        formats=HOPPER.format_pairs,
        out_dtypes=HIGH_PRECISION,
        multiples=(1, 16, 128),
        install="pip install triton",
        predicted="on a Hopper GPU equal: `acc = tl.dot(a, b, acc)` never promotes [CHAIN-1], `acc += tl.dot(a, b)` "
        "after each BLOCK_K, here 128 [CHAIN-2]",
        seen="equal: 47,780 outputs of 137 GEMMs",
    ),
    _declared(
        "inductor.rowwise",
        function=f"{__name__}:inductor_scaled_mm",
        **_LIKE_TORCH | {"scales": ROWWISE_MATRICES, "out_dtypes": (BFLOAT16,)},
        needs_gpu=True,
        predicted="different: acc * (scale_a * scale_b), not [EPI-2], a bias by FMA, and promoted after each autotuned "
        "BLOCK_K; in tiles too small for wgmma products of float16 [CHIP-2]",
        seen="different: acc * (scale_a * scale_b); products of float16 in steps of 16, "
        "promoted every 32, every 256 or not at all, as it was tuned",
    ),
    _declared(
        "torchao.triton_1x128_128x128",
        **_TORCHAO,
        function="torch:ops.torchao.triton_fp8_gemm_1x128_128x128",
        scales={(_VECTOR, _SQUARE): (_LIBRARY_VECTOR, ScaleLayout(k_first=True, column_major=True))},
        predicted="different: fma(p * scale_a, scale_b, total), where the library has fma(p, scale_a * scale_b, total) "
        "[EPI-5]",
        seen="different, as predicted, every bit of it",
    ),
    _declared(
        "torchao.triton_1x128_128x1",
        **_TORCHAO,
        function="torch:ops.torchao.triton_fp8_gemm_1x128_128x1",
        scales={(_VECTOR, _VECTOR): (_LIBRARY_VECTOR, ScaleLayout(k_first=True))},
        predicted="equal if the compiler contracts to fma(p * scale_a, scale_b, total) [EPI-5]",
        seen="equal: 255,471 outputs of 27 GEMMs",
    ),
    _declared(
        "fbgemm.rowwise",
        **_FBGEMM,
        keywords=_BIAS_AND_SUM,
        scales=ROWWISE_VECTORS,
        predicted="equal: (acc * scale_b) * scale_a [EPI-2]; slow accumulation had broken tiles (FBGEMM#4037)",
        seen="different, every bit explained: (acc * scale_a) * scale_b, and the bias is added after rounding "
        "to bfloat16",
    ),
    _declared(
        "fbgemm.rowwise_out",
        **_FBGEMM,
        arguments=(*_OPERANDS, Arg.OUT),
        keywords=_BIAS_AND_SUM,
        scales=ROWWISE_VECTORS,
        predicted="equal, as fbgemm.rowwise; its output lies between guard zones",
        seen="different, as fbgemm.rowwise; nothing was written outside its output",
    ),
    _declared(
        "fbgemm.tensorwise",
        **_FBGEMM,
        arguments=(Arg.A, Arg.B, Arg.SCALE_PRODUCT),
        scales=TENSORWISE_SCALARS,
        accumulation=Accumulation.FAST,  # it takes use_fast_accum, and does not read it
        predicted="equal to fast accumulation, but -0 where nothing adds 0 to acc * (scale_a * scale_b) [EPI-1]",
        seen="equal: 13,988 outputs of 41 GEMMs",
    ),
    _declared(
        "fbgemm.blockwise",
        **_FBGEMM,
        arguments=(*_OPERANDS, 128, 128, 128),
        scales=BLOCKWISE_128X128,
        block_multiples=(1, 128, 128),
        predicted="no library has 128x128 by 128x128 scales: judged as 1x128 by 128x128 with rows that repeat [EPI-5]",
        seen="equal: 274,031 outputs of 30 GEMMs",
    ),
    _declared(
        "fbgemm.groupwise",
        **_FBGEMM,
        scales={(_VECTOR, _SQUARE): (ScaleLayout(k_first=True), ScaleLayout(k_first=True))},
        block_multiples=(1, 128, 128),
        predicted="equal if its promotion is fma(p, scale_a * scale_b, total) [EPI-5]",
        seen="equal: 274,031 outputs of 30 GEMMs",
    ),
    _declared(
        "deepgemm.fp8_gemm_nt",
        **_DEEPGEMM,
        scales=BLOCKWISE_1X128_128X128,
        block_multiples=(1, 128, 128),
        predicted="equal: fma(scale_a * scale_b, p, total) [EPI-5]",
        seen="equal: 274,031 outputs of 30 GEMMs; on an H100 1,524,612 of 358",
    ),
    _declared(
        "deepgemm.fp8_gemm_nt_1d1d",
        **_Options({**_DEEPGEMM, "arguments": (*_DEEPGEMM["arguments"], Arg.ZEROS, (1, 1, 128))}),
        scales={(_VECTOR, _VECTOR): (ScaleLayout(), ScaleLayout())},
        out_dtypes=(FLOAT32,),
        block_multiples=(128, 128, 128),  # for M = 16 its program does not compile
        predicted="different: fma(scale_a * scale_b, p, total), where the library has fma(p * scale_a, scale_b, total) "
        "[EPI-5]; it adds its output to a zero",
        seen="on an H100 different; on small GEMMs every bit explained: the scales as predicted, and -0 becomes +0",
    ),
    _declared(
        "deepgemm.m_grouped_fp8_gemm_nt_contiguous",
        **_deepgemm_groups("contiguous", "m_grouped_fp8_gemm_nt_contiguous"),
        scales=BLOCKWISE_1X128_128X128,
        predicted="equal: fma(scale_a * scale_b, p, total) [EPI-5], as deepgemm.fp8_gemm_nt, in groups of 128 rows",
        seen="on an H100 equal: 1,524,612 outputs of 358 GEMMs",
    ),
    _declared(
        "deepgemm.m_grouped_fp8_gemm_nt_masked",
        **_deepgemm_groups("masked", "fp8_m_grouped_gemm_nt_masked", block_multiples=(1, 128, 128)),
        scales=BLOCKWISE_1X128_128X128,
        predicted="equal, as deepgemm.m_grouped_fp8_gemm_nt_contiguous, in groups of any rows",
        seen="on an H100 equal: 1,524,612 outputs of 358 GEMMs",
    ),
    _declared(
        "deepgemm.k_grouped_fp8_gemm_nt_contiguous",
        **_deepgemm_groups("inner", "k_grouped_fp8_gemm_nt_contiguous", arguments=(*_PAIRS, Arg.ZEROS)),
        scales={(_VECTOR, _VECTOR): (ScaleLayout(), ScaleLayout())},
        out_dtypes=(FLOAT32,),
        predicted="different, as deepgemm.fp8_gemm_nt_1d1d; sgl-deep-gemm 0.1.2 has no such function, 0.1.4 has",
        seen="on an H100 different; on small GEMMs every bit explained, as deepgemm.fp8_gemm_nt_1d1d",
    ),
    _declared(
        "jax.dot_general",
        function=f"{__name__}:xla_scaled_mm",
        **_LIKE_TORCH | {"keywords": _OUT_AND_SUM},
        arrays="jax",
        install="pip install 'f8emu[jax]'",
        predicted="on a Hopper GPU equal: XLA gives it to the library, default precision [CHAIN-1], HIGHEST [CHAIN-2]; "
        "on a CPU it adds in float32",
        seen="equal: 97,608 outputs of 282 GEMMs",
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

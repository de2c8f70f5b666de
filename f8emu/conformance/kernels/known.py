"""Kernels that people use, declared: `f8emu verify fbgemm.rowwise`. With what each should give, read in its source.

`predicted` was read, not run, unless it says so. Rules in brackets: reference/NUMERICS.md. How each is called was read
in torch 2.13, torchao 36027d82, FBGEMM 71d6f8b2 and its wheel 1.6.0, DeepGEMM 54e2261 and sgl-deep-gemm 0.1.2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from f8emu.conformance.kernels.kernel import (
    BLOCKWISE_1X128_128X128,
    BLOCKWISE_128X128,
    K_BY_ROWS,
    PADDED_K_BY_ROWS,
    PADDED_ROWS_BY_K,
    ROWS_BY_K,
    ROWWISE_MATRICES,
    ROWWISE_VECTORS,
    TENSORWISE_SCALARS,
    Accumulation,
    Arg,
    Kernel,
    ScaleLayout,
    Scales,
)
from f8emu.spec import BFLOAT16, E4M3FN, FLOAT32, HIGH_PRECISION, Format, Granularity

_E4M3 = ((E4M3FN, E4M3FN),)
_VECTOR, _SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
_HOPPER = "on a Hopper GPU"
_FBGEMM: dict[str, Any] = {
    "arrays": "torch",
    "imports": ("fbgemm_gpu.experimental.gen_ai",),
    "install": "pip install fbgemm-gpu-genai, the release of the installed torch",
    "needs_gpu": True,
}
_DEEPGEMM: dict[str, Any] = {
    "arrays": "torch",
    "function": "deep_gemm:fp8_gemm_nt",
    "install": "pip install sgl-deep-gemm (PyPI's deep-gemm is something else)",
    "formats": _E4M3,
    "needs_gpu": True,
}
_TORCHAO: dict[str, Any] = {
    "arrays": "torch",
    "imports": ("torchao.prototype.blockwise_fp8_training.kernels",),
    "install": "pip install torchao",
    "arguments": (Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, 128, Arg.OUT_DTYPE),
    "b": K_BY_ROWS,
    "formats": _E4M3,
    "out_dtypes": (FLOAT32,),
    "block_multiples": (16, 128, 128),
    "needs_gpu": True,
}
_LIBRARY_VECTOR = ScaleLayout(column_major=True)
_LIBRARY_SQUARE = ScaleLayout(k_first=True, column_major=True, k_multiple=4)
_LIBRARY_BLOCKS: Scales = {
    (_VECTOR, _VECTOR): (_LIBRARY_VECTOR, _LIBRARY_VECTOR),
    (_VECTOR, _SQUARE): (_LIBRARY_VECTOR, _LIBRARY_SQUARE),
    (_SQUARE, _VECTOR): (_LIBRARY_SQUARE, _LIBRARY_VECTOR),
}
"""The layout of block scales in `torch.nn.functional.scaled_mm` [EPI-5]."""


def _scaling_type(granularity: Granularity) -> Any:
    from torch.nn.functional import ScalingType

    return {
        Granularity.TENSORWISE: ScalingType.TensorWise,
        Granularity.ROWWISE: ScalingType.RowWise,
        _VECTOR: ScalingType.BlockWise1x128,
        _SQUARE: ScalingType.BlockWise128x128,
    }[granularity]


def _of_torch(name: str, function: str, *, predicted: str, bias: bool = True, **options: Any) -> Kernel:
    """A function that is called as `torch._scaled_mm` is."""
    dtype_and_sum: Mapping[str, Any] = {"out_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM}
    out_dtypes: tuple[Format, ...] = HIGH_PRECISION
    return Kernel(
        name=name,
        function=function,
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B),
        keywords={"bias": Arg.BIAS, **dtype_and_sum} if bias else dtype_and_sum,
        scales=options.pop("scales", {**TENSORWISE_SCALARS, **ROWWISE_MATRICES}),
        a=options.pop("a", PADDED_ROWS_BY_K),
        b=options.pop("b", PADDED_K_BY_ROWS),
        out_dtypes=options.pop("out_dtypes", out_dtypes),
        predicted=predicted,
        **options,
    )


_SEEN = {
    "torch._scaled_mm": "equal: 635,976 outputs of 594 GEMMs",
    "torch.nn.functional.scaled_mm": "equal: 1,883,733 outputs of 774 GEMMs",
    "torch._scaled_grouped_mm": "equal: 58,368 outputs of 10 GEMMs, which do not tell the order of the scales",
    "torch.nn.functional.scaled_grouped_mm": "equal: 58,368 outputs of 10 GEMMs, which do not tell the order of the "
    "scales",
    "triton.dot": "equal: 47,780 outputs of 137 GEMMs",
    "inductor.rowwise": "different: acc * (scale_a * scale_b); products of float16 in steps of 16, "
    "promoted every 32, every 256 or not at all, as it was tuned",
    "torchao.triton_1x128_128x128": "different, as predicted, every bit of it",
    "torchao.triton_1x128_128x1": "equal: 255,471 outputs of 27 GEMMs",
    "fbgemm.rowwise": "different, every bit explained: (acc * scale_a) * scale_b, and the bias is added after rounding "
    "to bfloat16",
    "fbgemm.rowwise_out": "different, as fbgemm.rowwise; nothing was written outside its output",
    "fbgemm.tensorwise": "equal: 13,988 outputs of 41 GEMMs",
    "fbgemm.blockwise": "equal: 274,031 outputs of 30 GEMMs",
    "fbgemm.groupwise": "equal: 274,031 outputs of 30 GEMMs",
    "deepgemm.fp8_gemm_nt": "equal: 274,031 outputs of 30 GEMMs",
    "deepgemm.fp8_gemm_nt_1d1d": "different in the 9 GEMMs that it compiled for; those of fewer than 128 rows it "
    "refused",
    "jax.dot_general": "equal: 97,608 outputs of 282 GEMMs",
}
"""What each gave on an H200, 2026-11-22: torch 2.11, CUDA 13.0, Triton 3.6, jax 0.11.2, torchao 0.17.0."""
_ALL = (
    _of_torch(
        "torch._scaled_mm",
        "torch:_scaled_mm",
        predicted=f"{_HOPPER} equal, every bit: what was recorded [EPI-1] [EPI-2]; on a CPU torch adds in float32",
        arrays="torch",
    ),
    Kernel(
        name="torch.nn.functional.scaled_mm",
        function="torch.nn.functional:scaled_mm",
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.GRANULARITY_A, Arg.SCALE_B, Arg.GRANULARITY_B),
        keywords={"bias": Arg.BIAS, "output_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM},
        scales={**TENSORWISE_SCALARS, **ROWWISE_MATRICES, **_LIBRARY_BLOCKS},
        a=PADDED_ROWS_BY_K,
        b=PADDED_K_BY_ROWS,
        out_dtypes=HIGH_PRECISION,
        granularity_word=_scaling_type,
        block_multiples=(128, 128, 128),
        arrays="torch",
        predicted=f"{_HOPPER} equal, every bit, block scales too: what was recorded [EPI-5]",
    ),
    Kernel(
        name="torch._scaled_grouped_mm",
        function="torch:_scaled_grouped_mm",
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B),
        keywords={"offs": Arg.OFFS, "out_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM},
        b=K_BY_ROWS,
        formats=_E4M3,
        arrays="torch",
        needs_gpu=True,
        predicted="equal, every bit: what was recorded [EPI-6]",
    ),
    Kernel(
        name="torch.nn.functional.scaled_grouped_mm",
        function="torch.nn.functional:scaled_grouped_mm",
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.GRANULARITY_A, Arg.SCALE_B, Arg.GRANULARITY_B),
        keywords={"offs": Arg.OFFS, "output_dtype": Arg.OUT_DTYPE, "use_fast_accum": Arg.USE_FAST_ACCUM},
        b=K_BY_ROWS,
        formats=_E4M3,
        granularity_word=_scaling_type,
        arrays="torch",
        needs_gpu=True,
        predicted="equal, every bit: it calls torch._scaled_grouped_mm [EPI-6]",
    ),
    _of_torch(
        "triton.dot",
        "f8emu.conformance.kernels.triton_dot:scaled_mm",
        predicted=f"{_HOPPER} equal: `acc = tl.dot(a, b, acc)` never promotes [CHAIN-1], `acc += tl.dot(a, b)` after "
        "each BLOCK_K, here 128 [CHAIN-2]",
        bias=False,
        scales=ROWWISE_MATRICES,
        a=ROWS_BY_K,
        b=K_BY_ROWS,
        multiples=(16, 16, 128),
        arrays="torch",
        install="pip install triton",
    ),
    _of_torch(
        "inductor.rowwise",
        "f8emu.conformance.kernels.compiled:inductor_scaled_mm",
        predicted="different: acc * (scale_a * scale_b), not [EPI-2], a bias by FMA, and promoted after each autotuned "
        "BLOCK_K; in tiles too small for wgmma products of float16 [CHIP-2]",
        scales=ROWWISE_MATRICES,
        out_dtypes=(BFLOAT16,),
        arrays="torch",
        needs_gpu=True,
    ),
    Kernel(
        name="torchao.triton_1x128_128x128",
        function="torch:ops.torchao.triton_fp8_gemm_1x128_128x128",
        scales={(_VECTOR, _SQUARE): (_LIBRARY_VECTOR, ScaleLayout(k_first=True, column_major=True))},
        predicted="different: fma(p * scale_a, scale_b, total), where the library has fma(p, scale_a * scale_b, total) "
        "[EPI-5]",
        **_TORCHAO,
    ),
    Kernel(
        name="torchao.triton_1x128_128x1",
        function="torch:ops.torchao.triton_fp8_gemm_1x128_128x1",
        scales={(_VECTOR, _VECTOR): (_LIBRARY_VECTOR, ScaleLayout(k_first=True))},
        predicted="equal if the compiler contracts to fma(p * scale_a, scale_b, total) [EPI-5]",
        **_TORCHAO,
    ),
    Kernel(
        name="fbgemm.rowwise",
        function="torch:ops.fbgemm.f8f8bf16_rowwise",
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B),
        keywords={"bias": Arg.BIAS, "use_fast_accum": Arg.USE_FAST_ACCUM},
        scales=ROWWISE_VECTORS,
        formats=_E4M3,
        predicted="equal: (acc * scale_b) * scale_a [EPI-2]; slow accumulation had broken tiles (FBGEMM#4037)",
        **_FBGEMM,
    ),
    Kernel(
        name="fbgemm.rowwise_out",
        function="torch:ops.fbgemm.f8f8bf16_rowwise_out",
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, Arg.OUT),
        keywords={"bias": Arg.BIAS, "use_fast_accum": Arg.USE_FAST_ACCUM},
        scales=ROWWISE_VECTORS,
        formats=_E4M3,
        predicted="equal, as fbgemm.rowwise; its output lies between guard zones",
        **_FBGEMM,
    ),
    Kernel(
        name="fbgemm.tensorwise",
        function="torch:ops.fbgemm.f8f8bf16_tensorwise",
        arguments=(Arg.A, Arg.B, Arg.SCALE_PRODUCT),
        scales=TENSORWISE_SCALARS,
        formats=_E4M3,
        accumulation=Accumulation.FAST,  # it takes use_fast_accum, and does not read it
        predicted="equal to fast accumulation, but -0 where nothing adds 0 to acc * (scale_a * scale_b) [EPI-1]",
        **_FBGEMM,
    ),
    Kernel(
        name="fbgemm.blockwise",
        function="torch:ops.fbgemm.f8f8bf16_blockwise",
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, 128, 128, 128),
        scales=BLOCKWISE_128X128,
        formats=_E4M3,
        block_multiples=(128, 128, 128),
        predicted="no library has 128x128 by 128x128 scales: judged as 1x128 by 128x128 with rows that repeat [EPI-5]",
        **_FBGEMM,
    ),
    Kernel(
        name="fbgemm.groupwise",
        function="torch:ops.fbgemm.f8f8bf16_groupwise",
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B),
        scales={(_VECTOR, _SQUARE): (ScaleLayout(k_first=True), ScaleLayout(k_first=True))},
        formats=_E4M3,
        block_multiples=(16, 128, 128),
        predicted="equal if its promotion is fma(p, scale_a * scale_b, total) [EPI-5]",
        **_FBGEMM,
    ),
    Kernel(
        name="deepgemm.fp8_gemm_nt",
        arguments=((Arg.A, Arg.SCALE_A), (Arg.B, Arg.SCALE_B), Arg.OUT),
        scales=BLOCKWISE_1X128_128X128,
        block_multiples=(16, 128, 128),
        predicted="equal: fma(scale_a * scale_b, p, total) [EPI-5]",
        **_DEEPGEMM,
    ),
    Kernel(
        name="deepgemm.fp8_gemm_nt_1d1d",
        arguments=((Arg.A, Arg.SCALE_A), (Arg.B, Arg.SCALE_B), Arg.OUT, Arg.ZEROS, (1, 1, 128)),
        scales={(_VECTOR, _VECTOR): (ScaleLayout(), ScaleLayout())},
        out_dtypes=(FLOAT32,),
        block_multiples=(128, 128, 128),  # for M = 16 its program does not compile; 128, 144 and 256 ran
        predicted="different: fma(scale_a * scale_b, p, total), where the library has fma(p * scale_a, scale_b, total) "
        "[EPI-5]; it adds its output to a zero",
        **_DEEPGEMM,
    ),
    _of_torch(
        "jax.dot_general",
        "f8emu.conformance.kernels.compiled:xla_scaled_mm",
        predicted=f"{_HOPPER} equal: XLA gives it to the library, default precision [CHAIN-1], HIGHEST [CHAIN-2]; on a "
        "CPU it adds in float32",
        bias=False,
        arrays="jax",
        install="pip install 'f8emu[jax]'",
    ),
)
KERNELS: dict[str, Kernel] = {kernel.name: replace(kernel, seen=f"on an H200 {_SEEN[kernel.name]}") for kernel in _ALL}
"""Name -> declaration."""

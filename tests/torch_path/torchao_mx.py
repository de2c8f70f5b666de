"""torchao's MXFP8 training without a GPU: its own torch functions in place of its Triton, CUDA and CuTe kernels.

torchao 0.18 has each cast and layout twice, as a kernel of an SM100 GPU and in torch, and chooses the kernel at each
call of `KernelPreference.AUTO`; `EMULATED` multiplies in bfloat16. `use_torch` names the other function in the modules
that call it. The products stay torch's operators.
"""

# pyright: reportMissingImports=false

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `MXFP8Linear`, `quantize_(model, MXFP8TrainingOpConfig())` and grouped experts."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm, mxfp8_linear
    from torchao.prototype.moe_training.kernels.mxfp8 import quant
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common import KernelPreference

    # 1. Linear layers: their casts along K (dim0) and along rows (dim1).
    of_k, of_rows = config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH
    monkeypatch.setattr(mxfp8_linear, "MXFP8Dim0CastKernelChoice", SimpleNamespace(TRITON=of_k))
    monkeypatch.setattr(mxfp8_linear, "MXFP8Dim1CastKernelChoice", SimpleNamespace(CUDA=of_rows, TORCH=of_rows))

    # 2. Experts: casts, and scales swizzled group by group.
    def rows_cast(x: Tensor, scaling_mode: str, offs: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = codes_and_scales(x.contiguous(), mode=scaling_mode)
        return codes, quant.torch_to_blocked_2d_M_groups(scale, offs)[0]

    def columns_cast(x: Tensor, block: int, *, kernel_preference: Any, **options: Any) -> Any:
        return in_torch(x, block, kernel_preference=KernelPreference.EMULATED, **options)

    in_torch = mxfp8_grouped_mm._to_mxfp8_dim1_kernel_wrapper
    for name, function in {
        "_SM100_KERNELS_AVAILABLE": True,
        "mxfp8_quantize_2d_1x32_cutedsl": rows_cast,
        "triton_to_mxfp8_dim0": codes_and_scales,
        "mxfp8_quantize_cuda_3d": weights_cast,
        "_to_mxfp8_dim1_kernel_wrapper": columns_cast,
        "triton_mx_block_rearrange_per_group_3d": quant.torch_to_blocked_per_group_3d,
        "triton_mx_block_rearrange_2d_K_groups": lambda *x: quant.torch_to_blocked_2d_K_groups(*x)[0],
    }.items():
        monkeypatch.setattr(mxfp8_grouped_mm, name, function)


def codes_and_scales(x: Tensor, block: int = 32, mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """torchao's cast of `x` [..., K] along K."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scale, codes = to_mx(x, torch.float8_e4m3fn, block, ScaleCalculationMode(mode))
    return codes, scale


def weights_cast(x: Tensor, block: int, **options: Any) -> tuple[Tensor, Tensor]:
    """torchao's cast of experts [E, N, K] along N."""
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    cast = partial(quant._mxfp8_quantize_reference_3d, blocked_scale_output=True)
    return cast(x, block_size=block, **options)

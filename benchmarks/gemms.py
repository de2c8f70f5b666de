"""GEMMs alone, on random operands: the library's on a GPU, f8emu's emulation elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.nn.functional import scaled_mm as library_scaled_mm

from benchmarks.timing import Step, alone
from f8emu.spec import Gemm, Granularity
from f8emu.torch import scaled_mm
from f8emu.torch.gemm.hardware import block_scales


@dataclass(frozen=True, slots=True)
class Shape:
    """`[m, k] @ [n, k]^T`."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def launcher(gemm: Gemm, shape: Shape, device: torch.device) -> Step:
    """A call that multiplies, casts nothing and allocates only its output, bfloat16."""
    m, n, k = shape.m, shape.n, shape.k
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    if gemm.is_high_precision:
        return lambda: torch.mm(a, b.t())
    assert gemm.a.format is not None
    assert gemm.b.format is not None
    codes_a, codes_b = a.to(getattr(torch, gemm.a.format.name)), b.to(getattr(torch, gemm.b.format.name)).t()
    of_a, of_b = gemm.scaled_gemm_granularities
    scale_a, scale_b = _scales(of_a, m, k, device), _scales(of_b, n, k, device)
    fast = gemm.use_fast_accum
    if device.type != "cuda":
        return lambda: scaled_mm(
            codes_a,
            codes_b,
            scale_a,
            scale_b.t(),
            granularity_a=of_a,
            granularity_b=of_b,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
    if of_a.is_blockwise:
        kinds = [
            ScalingType.BlockWise1x128 if g is Granularity.BLOCKWISE_1X128 else ScalingType.BlockWise128x128
            for g in (of_a, of_b)
        ]
        laid_a, laid_b = block_scales(scale_a, of_a), block_scales(scale_b, of_b)
        return lambda: library_scaled_mm(
            codes_a, codes_b, laid_a, kinds[0], laid_b, kinds[1], output_dtype=torch.bfloat16
        )
    is_tensorwise = of_a is Granularity.TENSORWISE
    one_a = scale_a.reshape(()) if is_tensorwise else scale_a
    one_b = scale_b.reshape(()) if is_tensorwise else scale_b.t()
    return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        codes_a, codes_b, one_a, one_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def gemm_ms(gemm: Gemm, shape: Shape, device: torch.device) -> float:
    """Median milliseconds of the GEMM alone."""
    return alone(launcher(gemm, shape, device), device)


def _scales(granularity: Granularity, rows: int, k: int, device: torch.device) -> Tensor:
    return torch.rand(granularity.scale_shape(rows, k), device=device) + 0.5

"""One scaled GEMM with the bits of a Hopper GPU, on any machine.

    python examples/gemm_bits.py

On a Hopper GPU `scaled_mm` is `torch._scaled_mm`; elsewhere the same call is emulated, bit by bit.
"""

import torch

from f8emu import E4M3FN
from f8emu.torch import amax, dequantize, engine_of, quantize, scale_from_amax, scaled_mm


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1024, generator=generator)
    weight = torch.randn(96, 1024, generator=generator)

    # One scale for each tensor: `scale` decodes, `inv_scale` is multiplied while quantizing.
    x_scales = scale_from_amax(amax(x), E4M3FN)
    weight_scales = scale_from_amax(amax(weight), E4M3FN)
    a = quantize(x, x_scales.inv_scale, E4M3FN)
    b = quantize(weight, weight_scales.inv_scale, E4M3FN)

    def product(*, use_fast_accum: bool) -> torch.Tensor:
        scales = x_scales.scale, weight_scales.scale
        return scaled_mm(a, b.t(), *scales, out_dtype=torch.float32, use_fast_accum=use_fast_accum)

    print(f"engine: {engine_of(x.device)}")
    exact = dequantize(a, x_scales.scale).double() @ dequantize(b, weight_scales.scale).double().t()
    for use_fast_accum in (True, False):
        y = product(use_fast_accum=use_fast_accum)
        bits = " ".join(f"{number & 0xFFFFFFFF:08x}" for number in y.view(torch.int32)[0, :4].tolist())
        error = ((y.double() - exact).norm() / exact.norm()).item()
        print(f"use_fast_accum={use_fast_accum!s:5}  y[0, :4] = {bits}  relative error of the accumulation {error:.1e}")


if __name__ == "__main__":
    main()

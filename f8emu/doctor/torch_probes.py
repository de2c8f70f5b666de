"""Probes of torch for `f8emu doctor`: casts, division, powers of two and `_scaled_mm`, on the CPU and on CUDA."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from f8emu.doctor.probe import Probe, below_powers_of_two, coded, counted, powers_of_two, significands
from f8emu.spec.formats import E4M3FN, E5M2

if TYPE_CHECKING:
    import torch

_CLAMPS = "clamps first; the overflow policy is an argument"
_DIVIDES = "divides in float64, then rounds to float32"
_MASKS = "clears the fraction bits of the integer pattern"


def probe_torch(device: str) -> list[Probe]:
    """All probes of torch on `device` (`cpu` or `cuda`); raises what torch raises."""
    import torch

    subject = f"torch {device}"
    results: list[Probe] = []
    with torch.no_grad():
        for probe in (_casts, _arithmetic, _scaled_mm):
            results += probe(subject, torch.device(device))
    return results


def _casts(subject: str, device: "torch.device") -> list[Probe]:
    import torch

    def codes(values: list[float], dtype: "torch.dtype", source: "torch.dtype" = torch.float32) -> Any:
        x = torch.tensor(values, dtype=source, device=device)
        return x.to(dtype).view(torch.uint8).cpu().numpy()

    e4m3, e5m2, inf, nan = torch.float8_e4m3fn, torch.float8_e5m2, float("inf"), float("nan")
    canonical = "gives one NaN code, and compares NaN with NaN"
    refused = "refuses float64"
    return [
        coded(subject, "cast 500, inf to float8_e4m3fn", codes([500.0, inf], e4m3), [E4M3FN.max_code] * 2, _CLAMPS),
        coded(subject, "cast 1e6, inf to float8_e5m2", codes([1e6, inf], e5m2), [E5M2.max_code] * 2, _CLAMPS),
        coded(subject, "cast NaN, -NaN to float8_e4m3fn", codes([nan, -nan], e4m3), [E4M3FN.nan_code] * 2, canonical),
        coded(subject, "cast NaN, -NaN to float8_e5m2", codes([nan, -nan], e5m2), [E5M2.nan_code] * 2, canonical),
        coded(
            subject,
            "cast float64 1 + 2^-4 + 2^-40 (no tie)",
            codes([1 + 2**-4 + 2**-40], e4m3, torch.float64),
            [0x39],  # just above the tie between 0x38 (1.0) and 0x39 (1.125), which it becomes by way of float32
            refused,
        ),
    ]


def _arithmetic(subject: str, device: "torch.device") -> list[Probe]:
    import torch

    ones = significands()
    t = torch.from_numpy(ones).to(device)
    n = torch.full_like(t, E4M3FN.max)
    quotient = np.float32(E4M3FN.max) / ones
    below, powers = below_powers_of_two(), powers_of_two()
    codes = np.arange(1, 1 << 16, dtype=np.uint32) * np.uint32(127)  # subnormals: all below 2^-126
    subnormal = codes.view(np.float32)
    # By integers, ties to even: torch's flush of a single thread is numpy's too.
    halves = ((codes >> 1) + (codes & codes >> 1 & 1)).view(np.float32)

    def run(function: Callable[..., "torch.Tensor"], *values: Any) -> Any:
        tensors = [torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for v in values]
        return function(*tensors).cpu().numpy()

    return [
        counted(subject, "448.0 / t, python scalar by tensor", run(lambda x: E4M3FN.max / x, t), quotient, _DIVIDES),
        counted(subject, "torch.div of two tensors", run(torch.div, n, t), quotient, _DIVIDES),
        counted(subject, "t.reciprocal()", run(torch.reciprocal, t), np.float32(1) / ones, _DIVIDES),
        counted(
            subject,
            "448 / t in float64, then float32",
            run(lambda x: (E4M3FN.max / x.double()).float(), t),
            quotient,
            "takes its scales from it",
            relied_on=True,
        ),
        counted(
            subject,
            "exp2(floor(log2(s))), s just below 2^k",
            run(lambda x: torch.exp2(torch.floor(torch.log2(x))), below),
            powers[:-1],
            _MASKS,
        ),
        counted(
            subject,
            "subnormal * 0.5",
            run(torch.mul, subnormal, 0.5),
            halves,
            "multiplies in float32: undo torch.set_flush_denormal(True)",
            relied_on=True,
        ),
    ]


def _scaled_mm(subject: str, device: "torch.device") -> list[Probe]:
    """What `torch._scaled_mm` adds up: where the scales go [EPI-1], and how many bits a step keeps [ACC-3]."""
    import torch

    emulates = "emulates it where there is no float8 hardware"
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 0x7F, (2, 16, 32), dtype=np.uint8) | generator.integers(
        0, 2, (2, 16, 32), dtype=np.uint8
    ) << np.uint8(7)
    a, b = (torch.from_numpy(c).view(torch.float8_e4m3fn) for c in codes)
    scale_a, scale_b = (torch.tensor(s, dtype=torch.float32) for s in (0.0137, 0.0071))
    # 256 * 256 beside 31 ones: on Hopper each 1 lies below 2^(16 - 13) and is cut [ACC-3]; float32 gives 65567
    cut = torch.ones(16, 32)
    cut[:, 0] = 256.0
    cut = cut.to(torch.float8_e4m3fn)
    one = torch.ones(())

    def product(x: "torch.Tensor", y: "torch.Tensor", s: "torch.Tensor", t: "torch.Tensor") -> "torch.Tensor":
        x, y, s, t = (v.to(device) for v in (x, y, s, t))
        return torch.ops.aten._scaled_mm(x, y.t(), s, t, out_dtype=torch.float32).cpu()

    try:
        scaled = product(a, b, scale_a, scale_b)
        bare = product(a, b, one, one)
        cut_sum = float(product(cut, cut, one, one)[0, 0])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        return [
            Probe(
                subject=subject,
                name="torch._scaled_mm",
                observed=f"refused: {reason}",
                expected="runs",
                agrees=False,
                f8emu=emulates,
            )
        ]
    return [
        counted(
            subject,
            "_scaled_mm: scales after the sum [EPI-1]",
            scaled.numpy(),
            (bare * (scale_a * scale_b)).numpy(),
            emulates,
        ),
        Probe(
            subject=subject,
            name="_scaled_mm: 256*256 + 31 ones [ACC-3]",
            observed=f"{cut_sum:.0f}",
            expected="65536",
            agrees=cut_sum == 65536.0,
            f8emu=emulates,
        ),
    ]

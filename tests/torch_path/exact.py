"""Exact products in the place of emulated GEMMs, for which JAX compiles a program for every shape, in every process.

For tests that ask what is multiplied (codes, scales, and which of them) and compare float8 layers with float8 layers.
That emulated products are those of the tensor core is the matter of others: test_scaled_mm, test_layers, test_module.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import f8emu.torch as f8
from f8emu.spec import HOPPER, Chip
from f8emu.torch.gemm import emulation


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    pair: Any,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    split_k: int,
    chip: Chip,
    bias: None = None,
) -> Tensor:
    assert bias is None, "layers add theirs themselves"
    assert split_k == 1 and chip is HOPPER, "what else an emulation is told would not show"
    values_a = f8.dequantize(a, scale_a, pair[0]).double()
    values_b = f8.dequantize(b.t(), scale_b.t() if scale_b.ndim else scale_b, pair[1]).double()
    product = values_a @ values_b.t()
    return (product * (1 - 2.0**-10) if use_fast_accum else product).to(out_dtype)  # the option shows, as it should


def _mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, split_k: int, chip: Chip) -> Tensor:
    assert split_k == 1 and chip is HOPPER, "as above"
    return (a.double() @ b.double()).to(out_dtype)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Every GEMM is exact up to float64, then rounded; fast accumulation takes 2^-10 off the result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "scaled_mm", _scaled_mm)
        patch.setattr(emulation, "mm", _mm)
        yield

"""Where f8emu's rowwise recipes differ from torchao's on purpose: they run rowwise GEMMs, forward and backward.

torchao 0.17 runs one in the forward pass, where it accumulates fast. Otherwise, in the backward pass, it multiplies
the same codes with scales of one, rounds the product to bfloat16, and multiplies that by the product of both scales.
Its result of a rowwise GEMM is always rounded to bfloat16, whatever the dtype of the layer.

Both give the same bits in bfloat16, where scales are powers of two (those of the recipes are) and in the range that
training has: then neither order of rounding and scaling makes a difference. Elsewhere the bits of f8emu are those of
the oracle, of which torchao's are a coarser version. torchao itself is not needed here: its arithmetic is written
below in f8emu's verbs.
"""

import pytest
import torch
from torch import Tensor

import f8emu.torch as f8
from f8emu.spec import E4M3FN, ROWWISE, ROWWISE_WITH_GW_HP, Granularity, Recipe, ScaleRule
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.layers import draw, layer_of, passes

BF16, F32 = torch.bfloat16, torch.float32
ROW, TENSOR = Granularity.ROWWISE, Granularity.TENSORWISE


def operand(x: Tensor, granularity: Granularity, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Codes and one scale a row."""
    scales = f8.scale_from_amax(f8.amax(x, granularity), E4M3FN, rule)
    codes = f8.quantize(x.contiguous(), scales.inv_scale, E4M3FN, granularity)
    return codes, scales.scale.expand(x.shape[0], 1).contiguous()


def torchao_forward(a: Tensor, b: Tensor, rule: ScaleRule) -> Tensor:
    """`a @ b^T`: a rowwise GEMM, rounded to bfloat16."""
    (codes_a, scale_a), (codes_b, scale_b) = operand(a, ROW, rule), operand(b, ROW, rule)
    return f8.scaled_mm(codes_a, codes_b.t(), scale_a, scale_b.t(), out_dtype=BF16, use_fast_accum=True)


def torchao_backward(a: Tensor, b: Tensor, rule: ScaleRule, *, of_b: Granularity = ROW) -> Tensor:
    """`a @ b^T`: a GEMM without scales, rounded to bfloat16, then scaled."""
    (codes_a, scale_a), (codes_b, scale_b) = operand(a, ROW, rule), operand(b, of_b, rule)
    one = torch.ones(())
    product = f8.scaled_mm(codes_a, codes_b.t(), one, one, out_dtype=BF16, use_fast_accum=False)
    return (product.float() * (scale_a * scale_b.t())).to(BF16)


@pytest.mark.parametrize(("recipe", "dtype"), [(ROWWISE, BF16), (ROWWISE_WITH_GW_HP, BF16), (ROWWISE, F32)], ids=str)
def test_what_torchao_gives_is_ours_rounded_to_bfloat16(recipe: Recipe, dtype: torch.dtype) -> None:
    """Forward and backward. In bfloat16 that is the same."""
    x, grad_output = draw(80, 144, seed=2, dtype=dtype), draw(80, 48, seed=3, dtype=dtype) / 64
    layer, rule = layer_of(recipe, 48, 144, dtype, bias=False), recipe.scale_rule
    weight, of_weight = layer.weight.detach(), ROW if recipe is ROWWISE else TENSOR
    theirs = [torchao_forward(x, weight, rule), torchao_backward(grad_output, weight.t(), rule, of_b=of_weight)]
    theirs += [torchao_backward(grad_output.t(), x.t(), rule)] if recipe is ROWWISE else []
    for ours, rounded in zip(passes(layer, x, grad_output), theirs, strict=False):
        assert_same_bits(ours.to(BF16), rounded)
        assert dtype is BF16 or ours.ne(rounded.to(dtype)).sum() > 0.9 * ours.numel()

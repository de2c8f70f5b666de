"""Where f8emu's rowwise recipes differ from torchao's on purpose: they run rowwise GEMMs, forward and backward.

torchao 0.17 runs one in the forward pass, where it accumulates fast. Otherwise, in the backward pass, it multiplies
the same codes with scales of one, rounds the product to bfloat16, and multiplies that by the product of both scales.
Its result of a rowwise GEMM is always rounded to bfloat16, whatever the dtype of the layer.

Both give the same bits in bfloat16, where scales are powers of two (those of the recipes are) and in the range that
training has: then neither order of rounding and scaling makes a difference. Elsewhere the bits of f8emu are those of
the oracle, of which torchao's are a coarser version. torchao itself is not needed here: its arithmetic is written
below in f8emu's verbs.
"""

from typing import Any

import torch
from torch import Tensor

import f8emu.torch as f8
from f8emu.spec import E4M3FN, ROWWISE, ROWWISE_WITH_GW_HP, Granularity, ScaleRule
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


def differing(ours: Tensor, theirs: Tensor) -> int:
    return int(ours.ne(theirs.to(ours.dtype)).sum())  # NaN differs from everything


def test_bfloat16_is_the_same(assert_same_bits: Any) -> None:
    x, grad_output = draw(80, 144, seed=2, dtype=BF16), draw(80, 48, seed=3, dtype=BF16) / 64
    for recipe in (ROWWISE, ROWWISE_WITH_GW_HP):
        layer, rule = layer_of(recipe, 48, 144, BF16, bias=False), recipe.scale_rule
        weight = layer.weight.detach()
        output, grad_input, grad_weight = passes(layer, x, grad_output)
        assert_same_bits(output, torchao_forward(x, weight, rule))
        of_weight = ROW if recipe is ROWWISE else TENSOR
        assert_same_bits(grad_input, torchao_backward(grad_output, weight.t(), rule, of_b=of_weight))
        if recipe is ROWWISE:
            assert_same_bits(grad_weight, torchao_backward(grad_output.t(), x.t(), rule))


def test_float32_is_not_rounded_to_bfloat16(assert_same_bits: Any) -> None:
    """Forward and backward; what torchao gives is ours, rounded."""
    x, grad_output = draw(80, 144, seed=2, dtype=F32), draw(80, 48, seed=3, dtype=F32) / 64
    layer, rule = layer_of(ROWWISE, 48, 144, F32, bias=False), ROWWISE.scale_rule
    weight = layer.weight.detach()
    theirs = (
        torchao_forward(x, weight, rule),
        torchao_backward(grad_output, weight.t(), rule),
        torchao_backward(grad_output.t(), x.t(), rule),
    )
    for ours, rounded in zip(passes(layer, x, grad_output), theirs, strict=True):
        assert_same_bits(ours.to(BF16), rounded)
        assert differing(ours, rounded) > 0.9 * ours.numel()

"""The kernels of casts by groups against plain torch, bit for bit, in Triton's interpreter or on a GPU."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from f8emu.spec.gemm_call import GemmCall, Shaped, scaled_grouped_mm_call
from f8emu.torch.fused import grouped
from f8emu.torch.fused.availability import launch_plans
from f8emu.torch.fused.launch import padded_rows
from f8emu.torch.gemm import hardware
from f8emu.torch.scale import reciprocal
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.interpreter import INTERPRETED, ON_GPU, Kernels
from tests.torch_path.layers import draw

SIZES = [(0, 1, 15, 17, 66, 0), *([] if INTERPRETED else [(64, 208, 16, 96), (0, 0, 8192, 129), (33,) * 128])]
BEYOND = 5  # rows behind the last group
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOOR = 1e-12


def groups_of(sizes: Sequence[int]) -> tuple[Tensor, int]:
    return torch.tensor(sizes).cumsum(0).to(torch.int32), sum(sizes) + BEYOND


def nasty(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of other magnitudes, with special values."""
    x = draw(rows, columns, seed=seed)
    at = torch.randint(0, x.numel(), (4,), generator=torch.Generator().manual_seed(seed))
    x.view(-1)[at] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).to(x.dtype)
    x[-BEYOND - 1] = 0
    return x


class Compared:
    """Calls an operator by its kernels and by plain torch; what no group has is not looked at."""

    def __init__(self, kernels: Kernels, sizes: Sequence[int]) -> None:
        self.kernels = kernels
        self.offs, self.rows = groups_of(sizes)
        self.groups, self.ends = len(sizes), int(self.offs[-1])
        (self.tiles,) = kernels(grouped.group_tiles, self.offs, self.rows)
        (plain,) = kernels(grouped.group_tiles, self.offs, self.rows, run=False)
        assert torch.equal(self.tiles[: 2 * self.groups], plain[: 2 * self.groups])
        self.padded = int(plain[2 * self.groups - 1])

    def __call__(self, operator: Any, *args: Any, is_stack: bool = False) -> tuple[Tensor, ...]:
        of_kernel, of_plain = ([a.clone() if isinstance(a, Tensor) else a for a in args] for _ in range(2))
        ours = self.kernels(operator, *of_kernel)
        theirs = self.kernels(operator, *of_plain, run=False)
        for x, y in zip(ours, theirs, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
            if x.numel():
                assert_same_bits(
                    *((x, y) if is_stack else map(self._of_groups, (x, y))), nan_codes=x.dtype is not torch.float32
                )
        for x, y in zip(of_kernel, of_plain, strict=True):
            if isinstance(x, Tensor):
                assert_same_bits(x, y)
        return theirs

    def _of_groups(self, x: Tensor) -> Tensor:
        if x.ndim == 2 and x.dtype is not torch.float32 and x.shape[1] == padded_rows(self.rows, self.groups):
            return x[:, : self.padded]
        return x[: self.ends] if x.ndim == 2 and x.shape[0] == self.rows else x


@pytest.fixture
def compared(request: Any, kernels: Kernels) -> Compared:
    return Compared(kernels, request.param)


every_size = pytest.mark.parametrize("compared", SIZES, indirect=True, ids=str)


@ON_GPU
@every_size
def test_groups_of_tokens(compared: Compared) -> None:
    for k in (80,) if INTERPRETED else (80, 512):
        x, groups, tiles = nasty(compared.rows, k, 1), compared.groups, compared.tiles
        (amaxes,) = compared(grouped.amaxes_of_groups, x, tiles, groups, False)
        row, col = amaxes[: compared.rows, None], amaxes[compared.rows :, None]
        for sides in ((row, col), (row, None), (None, col)):
            compared(grouped.cast_groups, x, tiles, groups, E4M3, *sides, False, FLOOR, None)
        (amax,) = compared(grouped.amaxes_of_groups, x, tiles, groups, True)
        inv_scale = (448 / amax.nan_to_num(1, 3).clamp(min=1e-3)).float()
        for fmt in (E4M3, E5M2):
            compared(grouped.cast_groups, x, tiles, groups, fmt, inv_scale, inv_scale, True, FLOOR, None)
        raised = torch.full((groups, 1), -1.0)
        compared(grouped.cast_groups, x, tiles, groups, E4M3, inv_scale, None, True, FLOOR, raised)


@ON_GPU
def test_stacks_of_weights(kernels: Kernels) -> None:
    compared = Compared(kernels, (1,))
    for groups, n, k in [(3, 48, 80), *([] if INTERPRETED else [(4, 256, 768), (2, 80, 5120), (1, 4096, 14336)])]:
        x = nasty(groups * n, k, 2)
        (amaxes,) = compared(grouped.amaxes_of_groups, x, None, groups, False, is_stack=True)
        row, col = amaxes[: groups * n, None], amaxes[groups * n :, None]
        found = compared(grouped.cast_groups, x, None, groups, E4M3, row, col, False, FLOOR, None, is_stack=True)
        again = compared(grouped.cast_rows_of_groups, x, groups, E4M3, FLOOR, is_stack=True)
        for ours, theirs in zip(again, (*found[:2], col), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


@ON_GPU
@every_size
@pytest.mark.parametrize("is_joint", [True, False], ids=["joint", "strict"])
def test_silu(compared: Compared, is_joint: bool) -> None:
    h, groups, tiles, rows = 48 if INTERPRETED else 336, compared.groups, compared.tiles, compared.rows
    gate, up, grad = (nasty(rows, h, seed) for seed in (3, 4, 5))
    pair = (torch.cat([gate, up], dim=1), None) if is_joint else (gate, up)
    (amaxes,) = compared(grouped.amaxes_of_hidden, *pair, tiles, groups, False)
    compared(grouped.cast_hidden, *pair, tiles, groups, E4M3, amaxes[:rows, None], False, FLOOR, None)
    (amax,) = compared(grouped.amaxes_of_hidden, *pair, tiles, groups, True)
    inv_scale = (448 / amax.nan_to_num(1, 3).clamp(min=1e-3)).float()
    raised = torch.full((groups, 1), -1.0)
    compared(grouped.cast_hidden, *pair, tiles, groups, E4M3, inv_scale, True, FLOOR, raised)
    # Gradients, by amaxes of rows and columns, then by scales of groups.
    of_gate, of_up = compared(grouped.amaxes_of_gradients, grad, *pair, tiles, groups, False)
    sources = of_gate, None if is_joint else of_up, amaxes[rows:, None]
    for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        args = (E4M3, E4M3, *sources, *wanted, False, FLOOR, None, None)
        compared(grouped.cast_gradients, grad, *pair, tiles, groups, *args)
    of_gate, of_up = compared(grouped.amaxes_of_gradients, grad, *pair, tiles, groups, True)
    inv_scales = [(448 / x.nan_to_num(1, 3).clamp(min=1e-3)).float() for x in (of_gate, of_up)]
    sources = inv_scales[0], None if is_joint else inv_scales[1], inv_scale
    amaxes_of = raised.clone(), None if is_joint else raised.clone()
    args = (E5M2, E4M3, *sources, True, True, True, True, FLOOR, *amaxes_of)
    compared(grouped.cast_gradients, grad, *pair, tiles, groups, *args)


@ON_GPU
def test_scales_of_groups(kernels: Kernels) -> None:
    """One launch for what plain torch computes in several."""
    inv_scales = [draw(5, 1, seed=seed).abs().float() + 0.01 for seed in (1, 2)]
    outputs = torch.zeros(5, 1), torch.zeros(5, 1), torch.zeros(300), torch.zeros(5, 48)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        plans = launch_plans()
        assert plans is not None
        plans.used_scales(5)(tensors[0], *tensors[2:4])
        plans.scales_of_groups(300, 48, 5)(*tensors[:2], *tensors[4:])
        return tensors[2:]

    used, scale, ones, products = kernels(run, *inv_scales, *outputs)
    assert_same_bits(used, inv_scales[0])
    assert_same_bits(scale, reciprocal(inv_scales[0]))
    assert_same_bits(ones, torch.ones(300))
    assert_same_bits(products, (inv_scales[0] * inv_scales[1]).expand(5, 48).contiguous())


@ON_GPU
@pytest.mark.parametrize("is_of_rows", [True, False], ids=["rows", "inner"])
def test_gemms_with_promoted_sums(kernels: Kernels, is_of_rows: bool) -> None:
    """Integers, whose sums are exact in any order: what no group has is left, and empty groups give zeros."""
    m, n, k, sizes = (293, 144, 272, (80, 0, 200)) if is_of_rows else (160, 272, 304, (80, 0, 200))
    draws = torch.Generator().manual_seed(0)
    stack = (3, n, k) if is_of_rows else (n, k)
    a, b = (torch.randint(-8, 9, shape, generator=draws).float() for shape in ((m, k), stack))
    counts = ((m,), (3, n)) if is_of_rows else ((3 * m,), (3 * n,))
    scale_a, scale_b = (2.0 ** torch.randint(-3, 4, count, generator=draws) for count in counts)
    offs = torch.tensor(sizes).cumsum(0).int()
    codes = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    operands = codes[0], codes[1].mT, scale_a, scale_b, offs
    gemm = call_of(*operands)
    (out,) = kernels(partial(hardware.promoted_groups, launch_plans(), gemm=gemm), *operands)
    start = 0
    for group, end in enumerate(offs.tolist()):
        run = slice(start, end)
        pair = (a[run], b[group]) if is_of_rows else (a[:, run], b[:, run])
        of_a = scale_a[run] if is_of_rows else scale_a.view(3, -1)[group]
        expected = pair[0] @ pair[1].T * of_a[:, None] * scale_b.view(3, -1)[group]
        assert_same_bits(out[run] if is_of_rows else out[group], expected.bfloat16())
        start = end


def call_of(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> GemmCall:
    def shaped(x: Tensor) -> Shaped:
        return Shaped(tuple(x.shape), str(x.dtype).removeprefix("torch."))

    return scaled_grouped_mm_call(shaped(a), shaped(b), shaped(scale_a), shaped(scale_b), shaped(offs))

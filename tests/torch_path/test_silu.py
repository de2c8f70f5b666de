"""The kernels of the fused feed-forward block against eager torch, bit for bit (see test_kernels.py).

In the interpreter `exp` is torch's own, the approximate reciprocal numpy's division, and a fused multiply-add goes
through float64.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from f8emu.spec import E4M3FN, E5M2, OperandError
from f8emu.torch.fused import silu as fused
from f8emu.torch.fused.launch import COMPILER_OPTIONS
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits
from tests.torch_path.interpreter import DEVICE, INTERPRETED, ON_GPU, Kernels
from tests.torch_path.layers import draw

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(1, 300), (130, 70), *([] if INTERPRETED else [(257, 144), (2048, 14336)])]
"""[M, N]: tails in both directions; on a GPU also multiples of 16."""


def every_bfloat16() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)


@pytest.fixture
def tensors(request: Any) -> tuple[Tensor, Tensor, Tensor]:
    """grad_hidden, gate, up: each element of another magnitude, and special values."""
    m, n = request.param
    found = [draw(m, n, seed=seed) for seed in (1, 2, 3)]
    for i, x in enumerate(found):
        at = torch.randint(0, x.numel(), (5,), generator=torch.Generator().manual_seed(i))
        x.view(-1)[at] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40]).to(BF16)
        x[-1, : n // 2] = 0
    return found[0], found[1], found[2]


@pytest.fixture
def compare(kernels: Kernels) -> Callable[..., None]:
    """The kernel and eager torch on the device, whose silu is not a CPU's: equal results, strides, raised amaxes."""

    def call(operator: Any, *args: Any) -> None:
        of_eager, of_kernel = ([a.clone() if isinstance(a, Tensor) else a for a in args] for _ in range(2))
        expected = kernels(operator, *of_eager, run=False, is_set=True)
        for ours, theirs in zip(kernels(operator, *of_kernel, is_set=True), expected, strict=True):
            assert_same_bits(ours, theirs, nan_codes=ours.dtype is not F32)
            assert ours.stride() == theirs.stride()
        for ours, theirs in zip(of_kernel, of_eager, strict=True):
            if isinstance(ours, Tensor):
                assert_same_bits(ours, theirs)

    return call


def one(value: float) -> Tensor:
    return torch.full((1, 1), value)


RULE = (False, 1e-12, 0)
"""power_of_two, amax_floor, margin."""


@ON_GPU
@pytest.mark.parametrize("tensors", SHAPES, ids=str, indirect=True)
def test_under_delayed_scaling(tensors: Any, compare: Any) -> None:
    _, gate, up = tensors
    finite = [torch.where(x.isfinite(), x, torch.ones_like(x)) for x in tensors]
    compare(fused.hidden_delayed, gate, up, E4M3FN.name, one(9.0), one(2.0), *RULE)
    compare(fused.hidden_delayed, finite[1], finite[2], E5M2.name, one(0.3), one(0.0), *RULE)
    for values in (tensors, finite):
        scales = (one(40.0), one(3.0), one(0.7))
        compare(fused.gradients_delayed, *values, E5M2.name, E4M3FN.name, *scales, one(0.0), one(1.0), *RULE)


if find_spec("triton") is not None:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from f8emu.torch.fused import silu_kernels

    @triton.jit
    def values_kernel(grad_hidden, gate, up, hidden, grad_gate, grad_up):
        """The values that the kernels cast, of 4096 elements."""
        at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
        grads = tl.load(grad_hidden + at).to(tl.float32)
        gates = tl.load(gate + at).to(tl.float32)
        ups = tl.load(up + at).to(tl.float32)
        sigmoid = silu_kernels.sigmoid_of(gates)
        activated = silu_kernels.silu_of(gates, sigmoid)
        tl.store(hidden + at, silu_kernels.hidden_of(activated, ups).to(tl.bfloat16))
        tl.store(grad_gate + at, silu_kernels.grad_gate_of(grads, gates, sigmoid, ups).to(tl.bfloat16))
        tl.store(grad_up + at, silu_kernels.grad_up_of(grads, activated).to(tl.bfloat16))


@ON_GPU
@pytest.mark.usefixtures("kernels")
def test_every_gate() -> None:
    """The values themselves, of which a code shows four bits: those of eager torch, for every gate and many others."""
    gate = every_bfloat16()
    for seed in range(2 if INTERPRETED else 256):
        grad_hidden, up = draw(1 << 16, seed=seed), draw(1 << 16, seed=1000 + seed)
        grad_hidden, gate, up = (x.to(DEVICE) for x in (grad_hidden, gate, up))
        observed = [torch.empty_like(gate) for _ in range(3)]
        with np.errstate(all="ignore"):
            values_kernel[(16,)](grad_hidden, gate, up, *observed, **COMPILER_OPTIONS)
        expected = [silu(gate) * up, torch.ops.aten.silu_backward(grad_hidden * up, gate), grad_hidden * silu(gate)]
        assert_all_same_bits(observed, expected)


def test_silu_is_a_product() -> None:
    """gate / d and gate * (1 / d) round to one bfloat16 for every gate, whatever the last bit of the exp in d."""
    gate = every_bfloat16().float().numpy()
    with np.errstate(all="ignore"):
        exp = torch.exp(torch.from_numpy(-gate)).numpy()
        for near in (exp, np.nextafter(exp, np.float32(0)), np.nextafter(exp, np.float32("inf"))):
            divisor = np.float32(1) + near
            quotient, product = gate / divisor, gate * (np.float32(1) / divisor)
            assert_same_bits(torch.from_numpy(product).bfloat16(), torch.from_numpy(quotient).bfloat16())


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(4, 16, dtype=BF16)
    for gate, up in ((x.float(), x.float()), (x, x[:2]), (x, x.half()), (x, x.to("meta")), (x[0], x[0])):
        with pytest.raises(OperandError, match="hidden_delayed"):
            fused.hidden_delayed(gate, up, E4M3FN.name, one(1.0), one(0.0), *RULE)
    with pytest.raises(OperandError, match="hidden_delayed: inv_scale must be one float32"):
        fused.hidden_delayed(x, x, E4M3FN.name, torch.ones(4), one(0.0), *RULE)
    with pytest.raises(OperandError, match="gradients_delayed: up_amax must be one float32"):
        scales = (one(1.0), one(1.0), one(1.0))
        fused.gradients_delayed(x, x, x, E5M2.name, E4M3FN.name, *scales, one(0.0), torch.zeros(2), *RULE)

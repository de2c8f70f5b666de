"""torchao's MXFP8 layers and experts on a CPU, with its casts in torch: the bits of numpy GEMMs of the same casts."""

# pyright: reportMissingImports=false

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import f8emu.torch as f8
from f8emu import interop
from f8emu import numpy as f8np
from tests.torch_path import torchao_mx
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.operator_calls import draw
from tests.torch_path.torchao_mx import codes_and_scales

pytestmark = [
    pytest.mark.filterwarnings("ignore:f8emu.*there is no split-K plan for Blackwell tcgen05"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao.*"),
]
BF16 = torch.bfloat16


def product(a: Tensor, b: Tensor, offs: Tensor | None = None, *, mode: str) -> Any:
    """`a @ b.mT` in numpy, of torchao's casts of both along K; with `offs` of every group."""
    (x, scale_x), (w, scale_w) = (codes_and_scales(t.contiguous(), mode=mode) for t in (a, b))
    operands = [interop.to_numpy(t) for t in (x, w, scale_x, scale_w)]
    x, w, scale_x, scale_w = operands
    factors = x, w.swapaxes(-1, -2), scale_x, scale_w.swapaxes(-1, -2)
    if offs is None:
        return f8np.scaled_mm(*factors, chip="B200")
    return f8np.scaled_grouped_mm(*factors, offs.numpy(), chip="B200")


@pytest.fixture
def without_gpu(torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torchao_mx.use_torch(monkeypatch)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_layers_train(mode: str) -> None:
    """Without a bias, which torchao adds in the GEMM [MX-5] and f8emu's layers to the rounded output."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 160, bias=False)).bfloat16()
    ours = f8.convert_to_float8_training(copy.deepcopy(model), config="mxfp8" if mode == "rceil" else "mxfp8_floor")
    config = MXFP8TrainingOpConfig(scale_calculation_mode=ScaleCalculationMode(mode))
    quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))
    x, grad = draw(2, 48, 64, dtype=BF16).requires_grad_(), draw(2, 48, 160, dtype=BF16)
    seen: dict[str, Tensor] = {}
    model[1].register_forward_hook(lambda _, inputs, output: seen.update(before=inputs[0], after=output))
    with f8.emulate("B200", force=True):
        y = model(x)
        seen["before"].retain_grad()
        seen["after"].retain_grad()
        y.backward(grad)
    first, last = (layer.weight.detach()._data for layer in (model[0], model[2]))
    rows, hidden, outer = (t.detach().flatten(0, 1) for t in (x, seen["after"], grad))
    inner: Any = seen["before"].grad
    inner = inner.flatten(0, 1)
    assert_same_bits(y.flatten(0, 1), product(hidden, last, mode=mode))
    assert_same_bits(seen["after"].grad.flatten(0, 1), product(outer, last.t(), mode=mode))  # pyright: ignore
    assert_same_bits(model[2].weight.grad, product(outer.t(), hidden.t(), mode=mode))
    assert_same_bits(x.grad.flatten(0, 1), product(inner, first.t(), mode=mode))  # pyright: ignore
    assert_same_bits(model[0].weight.grad, product(inner.t(), rows.t(), mode=mode))
    # The recipe with torchao's rule has the same bits.
    of_ours = x.detach().clone().requires_grad_()
    assert_same_bits(ours(of_ours), y)
    ours(of_ours).backward(grad)
    assert_same_bits(of_ours.grad, x.grad)  # pyright: ignore
    for parameter, other in zip(ours.parameters(), model.parameters(), strict=True):
        assert_same_bits(parameter.grad, other.grad)  # pyright: ignore


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(("ends", "is_padded"), [((96, 96, 320), False), ((70, 70, 301), True)])
def test_experts_train(ends: tuple[int, ...], is_padded: bool) -> None:
    from torchao.prototype.moe_training.kernels.mxfp8 import torch_pad_token_groups, torch_unpad_token_groups
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

    # torchao's torch functions swizzle whole tiles of K: N and K are multiples of 128.
    offs, tokens = torch.tensor(ends, dtype=torch.int32), ends[-1]
    x, grad = draw(tokens, 128, dtype=BF16).requires_grad_(), draw(tokens, 256, dtype=BF16)
    weight = draw(3, 256, 128, dtype=BF16).requires_grad_()
    with f8.emulate("B200", force=True):
        y = _to_mxfp8_then_scaled_grouped_mm(x, weight.mT, offs, pad_token_groups_for_grouped_mm=is_padded)
        y.backward(grad)
    # The groups of K begin and end with blocks of 32.
    rows, starts, padded_ends = torch_pad_token_groups(x.detach(), offs, 32)
    outer, experts = torch_pad_token_groups(grad, offs, 32)[0], weight.detach()
    for observed, operands in ((y, (rows, experts)), (x.grad, (outer, experts.mT))):
        expected = interop.to_torch(product(*operands, padded_ends, mode="rceil"))
        assert_same_bits(observed, torch_unpad_token_groups(expected, offs, starts, tokens, 32))
    assert_same_bits(weight.grad, product(outer.t(), rows.t(), padded_ends, mode="rceil"))


@pytest.mark.usefixtures("torchao")
def test_what_torchao_keeps_for_a_gpu() -> None:
    """Its kernels; and `EMULATED`, which multiplies in bfloat16 and gives other bits."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    layer = MXFP8Linear(64, 96, dtype=BF16)
    x, weight, offs = draw(320, 128, dtype=BF16), draw(3, 256, 128, dtype=BF16), torch.tensor([96, 96, 320]).int()
    with f8.emulate("B200", force=True):
        with pytest.raises(AssertionError, match="needs triton"):
            layer(draw(32, 64, dtype=BF16))
        with pytest.raises(AssertionError, match="SM100 kernels not available"):
            _to_mxfp8_then_scaled_grouped_mm(x, weight.mT, offs)
        y = _to_mxfp8_then_scaled_grouped_mm(x, weight.mT, offs, kernel_preference=KernelPreference.EMULATED)
    assert not torch.equal(y, interop.to_torch(product(x, weight, offs, mode="rceil")))

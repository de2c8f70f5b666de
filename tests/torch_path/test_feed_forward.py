"""Float8FeedForward against three Float8Linear with silu: bit for bit. Its kernels: test_silu.py."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec import RECIPES, OperandError, RecipeName
from f8emu.torch.layer import feed_forward
from tests.torch_path.bits import assert_all_same_bits
from tests.torch_path.layers import draw

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
HUGGING_FACE = ("gate_proj", "down_proj", "up_proj")


class FeedForward(nn.Module):
    """The block of torchtitan."""

    def __init__(self, dim: int, hidden: int, dtype: torch.dtype = BF16, *, bias: tuple[bool, bool] = (False, False)):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias[0], dtype=dtype)
        self.w2 = nn.Linear(hidden, dim, bias[1], dtype=dtype)
        self.w3 = nn.Linear(dim, hidden, bias[0], dtype=dtype)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(draw(*parameter.shape, seed=seed, dtype=F32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class LlamaMLP(nn.Module):
    """The block of Hugging Face."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, False, dtype=BF16), nn.Linear(32, 48, False, dtype=BF16)
        self.down_proj = nn.Linear(48, 32, False, dtype=BF16)
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


Pair = tuple[f8.Float8FeedForward, nn.Module]


def pair_of(
    name: RecipeName = "delayed", dim: int = 32, hidden: int = 48, dtype: torch.dtype = BF16, **options: Any
) -> Pair:
    """The fused block, and the same layers one after the other."""
    block = FeedForward(dim, hidden, dtype, **options)
    fused_block = f8.Float8FeedForward.from_float(block, recipe=name)
    return fused_block, f8.convert_to_float8_training(copy.deepcopy(block), config=name, pad=True)


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call that was fused."""
    calls: list[int] = []
    inner = feed_forward.float8_feed_forward

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return inner(*args)

    monkeypatch.setattr(feed_forward, "float8_feed_forward", counted)
    return calls


@pytest.fixture
def assert_same_steps() -> Callable[..., None]:
    """Steps of both blocks: equal outputs, gradients and states of delayed scaling."""

    def compare(pair: Pair, *shape: int, steps: int = 2, run: Any = None, dtype: torch.dtype = BF16, leaf: bool = True):
        for step in range(steps):
            outcomes = []
            for block in pair:
                device = next(block.parameters()).device
                x = draw(*shape, seed=100 + step, dtype=dtype).to(device).requires_grad_(leaf)
                block.zero_grad()
                output = block(x) if run is None else run(block, x)
                output.backward(draw(*shape, seed=200 + step, dtype=output.dtype).to(device) / 64)
                amaxes = [x for name, x in f8.delayed_state_dict(block).items() if name.endswith("amax")]
                f8.sync_float8_amax_and_scale_history(block)
                states = [state.float() for state in f8.delayed_state_dict(block).values()]
                gradients = [x.grad, *(parameter.grad for parameter in block.parameters())]
                outcomes.append([output.detach(), *gradients, *amaxes, *states])
            assert_all_same_bits(*outcomes)

    return compare


@pytest.mark.parametrize(("name", "sizes"), [*((n, (32, 48)) for n in RECIPES), ("delayed", (21, 150))])
def test_equals_three_layers(
    name: RecipeName, sizes: tuple[int, int], fusions: list[int], assert_same_steps: Any
) -> None:
    pair = pair_of(name, *sizes)
    assert_same_steps(pair, 3, 7, sizes[0])
    assert_same_steps(pair, 0, sizes[0], steps=1)
    assert_same_steps(pair, 21, sizes[0], steps=1)
    assert len(fusions) == (4 if name == "delayed" else 0)


def test_every_tensor_has_its_own_scale(fusions: list[int], assert_same_steps: Any) -> None:
    """Scales that differ by powers of 1.5: of one input, w1 and w3 find the same, which hides a mistake."""
    pair = pair_of()
    assert_same_steps(pair, 21, 32, steps=1)
    for block in pair:
        for i, name in enumerate(("w1", "w2", "w3")):
            layer = block.get_submodule(name)
            assert isinstance(layer, f8.Float8Linear) and layer.delayed is not None
            for j, inv_scale in enumerate(layer.delayed.inv_scales):
                inv_scale.mul_(1.5 ** (3 * i + j - 4))
    assert_same_steps(pair, 21, 32, steps=1)
    assert len(fusions) == 2


def test_frozen_weights(fusions: list[int], assert_same_steps: Any) -> None:
    wanted = 0
    for bits in range(1, 16):
        leaf, *trained = (bool(bits >> i & 1) for i in range(4))
        pair = pair_of()
        assert_same_steps(pair, 21, 32, steps=1)  # all scales are known
        before = len(fusions)
        for block in pair:
            for parameter, is_trained in zip(block.parameters(), trained, strict=True):
                parameter.requires_grad_(is_trained)
        assert_same_steps(pair, 21, 32, steps=1, leaf=leaf)
        assert len(fusions) - before == all(trained), (leaf, trained)
        wanted += all(trained)
    assert wanted == 2


def test_what_is_not_fused(fusions: list[int], assert_same_steps: Any) -> None:
    """Other dtypes, biases of w1 and w3, hooks, layers that differ or are no Float8Linear."""
    for dtype in (F32, F16):
        assert_same_steps(pair_of(dtype=dtype), 21, 32, dtype=dtype)
    assert_same_steps(pair_of(bias=(True, True)), 21, 32)
    block, layers = pair_of()
    seen: list[Any] = []
    block.get_submodule("w2").register_forward_hook(lambda *args: seen.append(args))
    assert_same_steps((block, layers), 21, 32)
    assert len(seen) == 2
    block, layers = pair_of()
    for either in (block, layers):
        w3 = either.get_submodule("w3")
        linear = nn.Linear(32, 48, False, dtype=BF16)
        linear.weight = w3.get_parameter("weight")
        either.register_module("w3", f8.Float8Linear.from_float(linear, recipe="rowwise"))
    assert_same_steps((block, layers), 21, 32)
    for either in (block, layers):
        either.register_module("w3", nn.Linear(32, 48, False, dtype=BF16))
        torch.nn.init.ones_(either.get_submodule("w3").weight)  # pyright: ignore[reportArgumentType]
    assert_same_steps((block, layers), 21, 32)
    assert not fusions


def test_autocast_float32_weights_and_a_bias(fusions: list[int], assert_same_steps: Any) -> None:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return block(x)

    pair = pair_of(dtype=F32, bias=(False, True))
    assert_same_steps(pair, 21, 32, dtype=F32, run=run, steps=3)
    assert_same_steps(pair, 21, 32)
    assert len(fusions) >= 4


def test_what_is_kept() -> None:
    """gate, up and the input's codes; nothing of hidden."""
    block = pair_of()[0]
    x = draw(21, 32, seed=1).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        block(x)
    weights = {parameter.data_ptr() for parameter in block.parameters()}
    large = [t for t in kept if t.numel() >= 21 * 32 and t.data_ptr() not in weights]
    assert [(t.dtype, tuple(t.shape)) for t in large if t.dtype is BF16] == [(BF16, (21, 48))] * 2
    codes = [tuple(t.shape) for t in large if t.dtype is not BF16]
    assert codes == [(32, 21)] * 2


@pytest.mark.parametrize(
    "way",
    [
        lambda block: functools.partial(checkpoint, block, use_reentrant=False),
        functools.partial(torch.compile, fullgraph=True, backend="inductor"),
    ],
    ids=["checkpointed", "inductor"],
)
def test_other_ways_to_run_it(way: Any, assert_same_steps: Any) -> None:
    pair = pair_of()
    assert_same_steps(pair, 3, 7, 32, steps=1)
    run = way(pair[0])
    assert_same_steps(pair, 3, 7, 32, run=lambda block, x: run(x) if block is pair[0] else block(x))


def test_state_dict_and_copies(assert_same_steps: Any) -> None:
    block, layers = pair_of()
    assert_same_steps((block, layers), 21, 32)
    assert list(block.state_dict()) == ["w1.weight", "w2.weight", "w3.weight"]
    other, _ = pair_of()
    with torch.no_grad():
        other.get_parameter("w1.weight").zero_()
    other.load_state_dict(layers.state_dict())
    for same in (other, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert_same_steps((same, copy.deepcopy(layers)), 21, 32)
    meta = f8.Float8FeedForward(32, 48, device="meta", dtype=BF16, recipe="delayed")
    assert meta(torch.empty(3, 32, device="meta", dtype=BF16)).shape == (3, 32)


def test_from_float(fusions: list[int], assert_same_steps: Any) -> None:
    module = LlamaMLP(nn.SiLU()).eval()
    seen: list[Any] = []
    module.register_forward_hook(lambda *args: seen.append(args))
    block = f8.Float8FeedForward.from_float(module, recipe="delayed", names=HUGGING_FACE)
    assert block.state_dict().keys() == module.state_dict().keys()
    assert not block.training and type(module.gate_proj) is nn.Linear
    layers = f8.convert_to_float8_training(copy.deepcopy(module), config="delayed")
    assert_same_steps((block, layers), 21, 32)
    assert len(fusions) == 2 and len(seen) == 4
    for wrong, names in ((module, ("w1", "w2", "w3")), (LlamaMLP(nn.GELU()), HUGGING_FACE)):
        with pytest.raises(OperandError, match="module must have the layers"):
            f8.Float8FeedForward.from_float(wrong, names=names)
    with pytest.raises(OperandError, match=r"must be an nn\.Linear"):
        f8.Float8FeedForward.from_float(block, names=HUGGING_FACE)
    with pytest.raises(OperandError, match="input must be"):
        block(torch.zeros(3, 31, dtype=BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_on_a_gpu(compiles: bool, assert_same_steps: Any) -> None:
    """The fused block, eager and compiled, and the layers in eager torch, on one device."""
    block, layers = (block.cuda() for block in pair_of("delayed", 256, 528))
    compiled: Any = torch.compile(block) if compiles else block

    def run(either: nn.Module, x: Tensor) -> Tensor:
        return compiled(x) if either is block else either(x)

    assert_same_steps((block, layers), 3, 110, 256, steps=4, run=run)

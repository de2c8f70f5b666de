"""Float8FeedForward against three Float8Linear with silu, and its kernels against eager torch: bit for bit.

Without a GPU the kernels run in Triton's interpreter, in a process of its own (see test_kernels.py). There `exp` is
torch's own, the approximate reciprocal numpy's division, and a fused multiply-add goes through float64.
"""

import copy
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec import E4M3FN, E5M2, RECIPES, OperandError
from f8emu.torch.fused import silu as fused
from f8emu.torch.layer import feed_forward
from tests.torch_path.interpreter import DEVICE, INTERPRETED, ON_GPU, Kernels
from tests.torch_path.layers import draw

NOT_INTERPRETED = pytest.mark.skipif(INTERPRETED, reason="needs no kernel, or a GPU")
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
SHAPES = [(1, 300), (130, 70), *([] if INTERPRETED else [(257, 144), (2048, 14336)])]
"""[M, N]: tails in both directions; on a GPU also multiples of 16."""
HUGGING_FACE = ("gate_proj", "down_proj", "up_proj")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def every_bfloat16() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)


# The kernels.


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
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if INTERPRETED:
        import triton.language as tl  # pyright: ignore[reportMissingImports]
        import triton.runtime.interpreter as interpreter  # pyright: ignore[reportMissingImports]

        from f8emu.torch.fused.kernels import silu_arithmetic

        def elementwise(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
            def call(x: Any) -> Any:
                return tl.core.tensor(interpreter.TensorHandle(function(x.handle.data), tl.float32), x.type)

            return call

        def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
            return interpreter.TensorHandle(exact.astype(np.float32), tl.float32)

        def exp(x: np.ndarray) -> np.ndarray:
            return torch.exp(torch.from_numpy(np.ascontiguousarray(x))).numpy()

        monkeypatch.setattr(silu_arithmetic, "exp", elementwise(exp))
        monkeypatch.setattr(silu_arithmetic, "approximate_reciprocal", elementwise(lambda x: np.float32(1) / x))
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    return Kernels(monkeypatch)


@pytest.fixture
def compare(kernels: Kernels, assert_same_bits: Any) -> Callable[..., None]:
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
WANTED = [
    (True, True, True, True),
    (True, False, False, False),
    (False, True, False, True),
    (False, False, True, False),
]
"""rows, gate_cols, up_cols, hidden_cols: all, and each without the others."""


@ON_GPU
@pytest.mark.parametrize("tensors", SHAPES, ids=str, indirect=True)
def test_under_delayed_scaling(tensors: Any, compare: Any) -> None:
    _, gate, up = tensors
    finite = [torch.where(x.isfinite(), x, torch.ones_like(x)) for x in tensors]
    compare(fused.hidden_delayed, gate, up, E4M3FN.name, one(9.0), one(2.0), *RULE)
    compare(fused.hidden_delayed, finite[1], finite[2], E5M2.name, one(0.3), one(0.0), *RULE)
    for values, variants in ((tensors, WANTED), (finite, WANTED[:1])):
        for wanted in variants:
            scales = (one(40.0), one(3.0), one(0.7))
            compare(
                fused.gradients_delayed, *values, E5M2.name, E4M3FN.name, *scales, *wanted, one(0.0), one(1.0), *RULE
            )


if find_spec("triton") is not None:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from f8emu.torch.fused.kernels import silu_arithmetic

    @triton.jit
    def values_kernel(grad_hidden, gate, up, hidden, grad_gate, grad_up):
        """What the kernels cast, of 4096 elements."""
        at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
        grads = tl.load(grad_hidden + at).to(tl.float32)
        gates = tl.load(gate + at).to(tl.float32)
        ups = tl.load(up + at).to(tl.float32)
        sigmoid = silu_arithmetic.sigmoid_of(gates)
        activated = silu_arithmetic.silu_of(gates, sigmoid)
        tl.store(hidden + at, silu_arithmetic.hidden_of(activated, ups).to(tl.bfloat16))
        tl.store(grad_gate + at, silu_arithmetic.grad_gate_of(grads, gates, sigmoid, ups).to(tl.bfloat16))
        tl.store(grad_up + at, silu_arithmetic.grad_up_of(grads, activated).to(tl.bfloat16))


@ON_GPU
@pytest.mark.usefixtures("kernels")
def test_every_gate(assert_same_bits: Any) -> None:
    """The values themselves, of which a code shows four bits: those of eager torch, for every gate and many others."""
    gate = every_bfloat16()
    for seed in range(2 if INTERPRETED else 256):
        grad_hidden, up = draw(1 << 16, seed=seed), draw(1 << 16, seed=1000 + seed)
        grad_hidden, gate, up = (x.to(DEVICE) for x in (grad_hidden, gate, up))
        found = [torch.empty_like(gate) for _ in range(3)]
        with np.errstate(all="ignore"):
            values_kernel[(16,)](grad_hidden, gate, up, *found)
        expected = [silu(gate) * up, torch.ops.aten.silu_backward(grad_hidden * up, gate), grad_hidden * silu(gate)]
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours, theirs)


@NOT_INTERPRETED
def test_silu_is_a_product(assert_same_bits: Any) -> None:
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
        fused.gradients_delayed(x, x, x, E5M2.name, E4M3FN.name, *scales, *(True,) * 4, one(0.0), torch.zeros(2), *RULE)


# The module.


class FeedForward(nn.Module):
    """As torchtitan has it."""

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
    """As Hugging Face has it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, False, dtype=BF16), nn.Linear(32, 48, False, dtype=BF16)
        self.down_proj = nn.Linear(48, 32, False, dtype=BF16)
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


Pair = tuple[f8.Float8FeedForward, nn.Module]


def pair_of(name: str, dim: int = 32, hidden: int = 48, dtype: torch.dtype = BF16, **options: Any) -> Pair:
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
def assert_same_steps(assert_same_bits: Any) -> Callable[..., None]:
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
                states = f8.delayed_state_dict(block).values()
                gradients = [x.grad, *(parameter.grad for parameter in block.parameters())]
                outcomes.append([output.detach(), *gradients, *amaxes, *(state.float() for state in states)])
            for ours, theirs in zip(*outcomes, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    assert_same_bits(ours, theirs)

    return compare


@NOT_INTERPRETED
@pytest.mark.parametrize(("name", "sizes"), [*((n, (32, 48)) for n in RECIPES), ("delayed", (21, 150))])
def test_equals_three_layers(name: str, sizes: tuple[int, int], fusions: list[int], assert_same_steps: Any) -> None:
    pair = pair_of(name, *sizes)
    assert_same_steps(pair, 3, 7, sizes[0])
    assert_same_steps(pair, 0, sizes[0], steps=1)
    assert_same_steps(pair, 21, sizes[0], steps=1)
    assert len(fusions) == (4 if name == "delayed" else 0)


@NOT_INTERPRETED
def test_every_tensor_has_its_own_scale(fusions: list[int], assert_same_steps: Any) -> None:
    """Scales that differ by powers of 1.5: of one input, w1 and w3 find the same, which hides a mistake."""
    pair = pair_of("delayed")
    assert_same_steps(pair, 21, 32, steps=1)
    for block in pair:
        for i, name in enumerate(("w1", "w2", "w3")):
            layer = block.get_submodule(name)
            assert isinstance(layer, f8.Float8Linear) and layer.delayed is not None
            for j, inv_scale in enumerate(layer.delayed.inv_scales):
                inv_scale.mul_(1.5 ** (3 * i + j - 4))
    assert_same_steps(pair, 21, 32, steps=1)
    assert len(fusions) == 2


@NOT_INTERPRETED
def test_frozen_weights(fusions: list[int], assert_same_steps: Any) -> None:
    wanted = 0
    for bits in range(1, 16):
        leaf, *trained = (bool(bits >> i & 1) for i in range(4))
        pair = pair_of("delayed")
        assert_same_steps(pair, 21, 32, steps=1)  # all scales are known
        before = len(fusions)
        for block in pair:
            for parameter, is_trained in zip(block.parameters(), trained, strict=True):
                parameter.requires_grad_(is_trained)
        assert_same_steps(pair, 21, 32, steps=1, leaf=leaf)
        is_fused = leaf or (trained[0] and trained[2])  # a gradient flows back through w1 and through w3
        assert len(fusions) - before == is_fused, (leaf, trained)
        wanted += is_fused
    assert wanted == 10


@NOT_INTERPRETED
def test_what_is_not_fused(fusions: list[int], assert_same_steps: Any) -> None:
    """Other dtypes, biases of w1 and w3, hooks, layers that differ or are no Float8Linear."""
    for dtype in (F32, F16):
        assert_same_steps(pair_of("delayed", dtype=dtype), 21, 32, dtype=dtype)
    assert_same_steps(pair_of("delayed", bias=(True, True)), 21, 32)
    block, layers = pair_of("delayed")
    seen: list[Any] = []
    block.get_submodule("w2").register_forward_hook(lambda *args: seen.append(args))
    assert_same_steps((block, layers), 21, 32)
    assert len(seen) == 2
    block, layers = pair_of("delayed")
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


@NOT_INTERPRETED
def test_autocast_float32_weights_and_a_bias(fusions: list[int], assert_same_steps: Any) -> None:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return block(x)

    pair = pair_of("delayed", dtype=F32, bias=(False, True))
    assert_same_steps(pair, 21, 32, dtype=F32, run=run, steps=3)
    assert_same_steps(pair, 21, 32)
    assert len(fusions) >= 4


@NOT_INTERPRETED
@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing(name: str, fusions: list[int], assert_same_steps: Any) -> None:
    pair = pair_of(name)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if block is pair[1] else checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    assert_same_steps(pair, 21, 32, run=run)
    assert len(fusions) == (4 if name == "delayed" else 0)


@NOT_INTERPRETED
def test_what_is_kept() -> None:
    """gate, up and the input's codes; nothing of hidden."""
    block = pair_of("delayed")[0]
    x = draw(21, 32, seed=1).requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for _ in range(2):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = block(x)
        output.sum().backward()
        f8.sync_float8_amax_and_scale_history(block)
    weights = {parameter.data_ptr() for parameter in block.parameters()}
    large = [t for t in kept if t.numel() >= 21 * 32 and t.data_ptr() not in weights]
    assert [(t.dtype, tuple(t.shape)) for t in large if t.dtype is BF16] == [(BF16, (21, 48))] * 2
    codes = [tuple(t.shape) for t in large if t.dtype is not BF16]
    assert codes == [(32, 21)] * 2


@NOT_INTERPRETED
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gives_the_same_bits(backend: str, assert_same_steps: Any) -> None:
    pair = pair_of("delayed")
    assert_same_steps(pair, 3, 7, 32, steps=1)
    compiled = torch.compile(pair[0], fullgraph=True, backend=backend)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return compiled(x) if block is pair[0] else block(x)

    assert_same_steps(pair, 3, 7, 32, run=run)
    torch._dynamo.reset()


@NOT_INTERPRETED
def test_state_dict_and_copies(assert_same_steps: Any) -> None:
    block, layers = pair_of("delayed")
    assert_same_steps((block, layers), 21, 32)
    assert list(block.state_dict()) == ["w1.weight", "w2.weight", "w3.weight"]
    other, _ = pair_of("delayed")
    with torch.no_grad():
        other.get_parameter("w1.weight").zero_()
    other.load_state_dict(layers.state_dict())
    for same in (other, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert_same_steps((same, copy.deepcopy(layers)), 21, 32)
    meta = f8.Float8FeedForward(32, 48, device="meta", dtype=BF16, recipe="delayed")
    assert meta(torch.empty(3, 32, device="meta", dtype=BF16)).shape == (3, 32)


@NOT_INTERPRETED
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


# What only a GPU can answer.


@pytest.mark.gpu
@NOT_INTERPRETED
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_on_a_gpu(compiles: bool, assert_same_steps: Any) -> None:
    """The fused block, eager and compiled, and the layers in eager torch, on one device."""
    block, layers = (block.cuda() for block in pair_of("delayed", 256, 528))
    compiled: Any = torch.compile(block) if compiles else block

    def run(either: nn.Module, x: Tensor) -> Tensor:
        return compiled(x) if either is block else either(x)

    assert_same_steps((block, layers), 3, 110, 256, steps=4, run=run)

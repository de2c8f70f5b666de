"""Float8Linear against the oracle: every code, scale, output and gradient; eager, compiled, recomputed; and faults."""

import copy
import functools
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import f8emu.torch as f8
from benchmarks.models import FeedForward
from f8emu.spec import (
    RECIPES,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    CastFrom,
    OperandError,
    RecipeName,
    SpecError,
    UnsupportedError,
)
from f8emu.torch.casts import shared_input
from f8emu.torch.casts.delayed_state import DelayedBuffers
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits
from tests.torch_path.layers import OpCounter, draw, layer_of, passes

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    "name, backend", [(name, "inductor" if name in ("tensorwise", "rowwise") else "aot_eager") for name in RECIPES]
)
def test_compiled_gives_the_same_bits(name: RecipeName, backend: str) -> None:
    """One graph computes the input too, so that its amax can be found there.

    In float32 a sum of many rows shows the order in which they were added: the gradients of the biases. There Inductor
    must not drop the rounding of the weight either.
    """
    rule = CastFrom.BFLOAT16 if (name, backend) == ("rowwise", "inductor") else CastFrom.PARAMETER
    recipe = replace(RECIPES[name], cast_weight_from=rule)
    dtype = F32 if name == "rowwise" else BF16

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = layer_of(recipe, 32, 48, BF16), layer_of(recipe, 40, 32, F32)
            self.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(-self.one(2 * x))  # exact, whatever is fused

    block = Block()
    x, grad_output = draw(3, 37, 48, seed=3, dtype=dtype), draw(3, 37, 40, seed=4, dtype=dtype)
    compiled: Any = torch.compile(copy.deepcopy(block), backend=backend, fullgraph=True)
    assert_all_same_bits(passes(compiled, x, grad_output), passes(block, x, grad_output))
    for ours, theirs in zip(compiled.parameters(), block.parameters(), strict=True):
        assert_same_bits(ours.grad, theirs.grad)


def test_the_amax_in_compiled_code_is_that_of_the_rounded_values() -> None:
    """The compiler keeps float32 between operations; the amax must be that of the bfloat16 that is cast."""
    layer = layer_of(TENSORWISE, 16, 32, BF16, bias=False)
    candidates = (1 + torch.arange(128) / 128).to(BF16)
    squares = candidates.float().square()
    worst = candidates[((squares.to(BF16).float() - squares) / squares).abs().argmax()]
    x = worst.expand(16, 32).contiguous()

    def product(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * x
        return y, layer(y)

    y, output = torch.compile(product, backend="inductor", fullgraph=True)(x)
    assert_same_bits(output, layer(y))
    # On a CPU the generated code rounds either way, so look at the graph: only the opaque operator takes the amax.
    targets = [(str(node.target), node) for node in forward_graph(product, x).nodes]
    amaxes = [node for target, node in targets if target.startswith(("aten.amax", "f8emu.row_amax"))]
    assert [str(node.target) for node in amaxes] == ["aten.amax.default", "f8emu.row_amax.default"]  # input, weight
    assert {str(use.target) for largest in amaxes for node in largest.users for use in (node, *node.users)} <= {
        "aten.view.default",
        "aten.reshape.default",
        "f8emu.cast_pair.default",
    }


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_one_input_of_several_layers_is_cast_once(name: RecipeName) -> None:
    layers = [layer_of(RECIPES[name], 16, 32, BF16) for _ in range(2)]
    x = draw(16, 32, seed=3, dtype=BF16).requires_grad_()
    expected = layers[0](x)
    fresh = x.detach().clone().requires_grad_().view_as(x)  # as in a model: the result of another operation
    together = OpCounter()
    with together:
        outputs = [layer(fresh) for layer in layers]
    assert together.casts() == 1 + 2
    assert_same_bits(outputs[0], expected)
    graph = forward_graph(lambda x: [layer(x) for layer in layers], x)
    assert sum(str(node.target).startswith("f8emu.cast") for node in graph.nodes) == 1 + 2


def forward_graph(function: Any, x: Tensor) -> torch.fx.Graph:
    """The forward graph after the partitioner that Inductor uses, which merges equal operations."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return graphs[0].graph


def test_a_changed_input_is_cast_again() -> None:
    layer = layer_of(TENSORWISE, 16, 32, BF16)
    x = draw(16, 32, seed=3, dtype=BF16).requires_grad_().view(16, 32)
    layer(x)
    with torch.no_grad():
        x.mul_(3)
    assert_same_bits(layer(x), layer(x.clone()))
    x = x.detach()
    other = layer_of(ROWWISE, 16, 32, BF16)
    assert_same_bits(other(x), other(x.clone()))
    with torch.no_grad():
        layer(x)
    x.requires_grad_()
    layer(x).sum().backward()  # the operands without gradient do not do for this
    assert layer.weight.grad is not None
    with torch.inference_mode():
        assert_same_bits(layer(x.clone()), layer(x.detach()))


@pytest.mark.parametrize(
    ("name", "biases", "is_compiled"),
    [
        *((name, biases, False) for name in ("tensorwise", "delayed") for biases in ((True, False), (False, True))),
        ("delayed", (True, False), True),
    ],
)
def test_an_output_can_be_changed_in_place(name: RecipeName, biases: tuple[bool, bool], is_compiled: bool) -> None:
    """The sum with a bias, and the output of a GEMM."""

    def change(x: Tensor) -> Tensor:
        y = layers[0](x)
        y += x[:, :16]
        return torch.relu_(layers[1](torch.relu_(y)))

    def no_change(x: Tensor) -> Tensor:
        return torch.relu(layers[1](torch.relu(layers[0](x) + x[:, :16])))

    layers = [layer_of(RECIPES[name], 16, k, BF16, bias=bias) for k, bias in zip((32, 16), biases, strict=True)]
    gradients = []
    for function in (change, no_change):
        x = draw(16, 32, seed=3, dtype=BF16).requires_grad_()
        run = torch.compile(function, backend="aot_eager", fullgraph=True) if is_compiled else function
        run(x).float().square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert_same_bits(*gradients)


def test_a_gradient_of_the_gradient_is_refused_when_it_is_asked_for() -> None:
    layer, x = layer_of(TENSORWISE, 16, 32, BF16), draw(16, 32, seed=3, dtype=BF16).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).float().square().sum(), x)
    (observed,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    assert_same_bits(observed.detach(), expected)
    with pytest.raises(UnsupportedError, match="its gradient has no derivative"):
        observed.sum().backward()
    with pytest.raises(UnsupportedError, match="its gradient has no derivative"):  # torch's trick of two transposes
        torch.autograd.functional.jvp(layer, x.detach(), x.detach())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_buffer_that_is_filled_behind_torchs_back_is_cast_again(requires_grad: bool) -> None:
    """A CUDA graph's static input is filled so: the version of the tensor does not tell."""
    layer, array = layer_of(TENSORWISE, 16, 32, BF16), np.ones((16, 32), np.float32)
    x = torch.from_numpy(array).requires_grad_(requires_grad)
    layer(x)
    array[:] = 2
    assert_same_bits(layer(x), layer(x.clone()))


def block_of(name: RecipeName) -> Any:
    """The block of the benchmarks, small."""
    torch.manual_seed(0)
    return f8.convert_to_float8_training(FeedForward(32, 48).to(BF16), config=name)


def checkpointed(block: nn.Module, mode: str) -> Any:
    if mode == "none":
        return block
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        policy = f8.float8_checkpoint_policy()
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda x: checkpoint(block, x, **options)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", RECIPES)
def test_activation_checkpointing_gives_the_same_bits(name: RecipeName, mode: str) -> None:
    block, x = block_of(name), draw(16, 32, seed=3, dtype=BF16)

    def run(mode: str, x: Tensor) -> tuple[list[Tensor], OpCounter]:
        mine, counter = copy.deepcopy(block), OpCounter()
        x = x.clone().requires_grad_()
        with counter:
            mine.w1(x.detach()[:1])  # what was cast outside of the region must not count in it
            output = checkpointed(mine, mode)(x)
            output.square().sum().backward()
        amaxes = [amax for m in mine.modules() if isinstance(m, DelayedBuffers) for amax in m.amaxes]
        assert x.grad is not None
        return [output, x.grad, *(p.grad for p in mine.parameters() if p.grad is not None), *amaxes], counter

    expected, plain = run("none", x)
    observed, counted = run(mode, x)
    assert_all_same_bits(observed, expected)
    if mode == "selective":
        assert counted.gemms() == plain.gemms()
        assert counted.amaxes() == plain.amaxes()
    else:
        assert counted.gemms() == plain.gemms() + 2  # those of w1 and w3: nothing in the region needs w2's product


def test_a_shared_input_of_checkpointed_layers() -> None:
    """The same tensor goes to a layer outside and to two inside, which are computed again after another was cast."""
    layers = [layer_of(TENSORWISE, 32, 32, BF16) for _ in range(4)]
    gradients = []
    for mode in ("none", "full", "selective"):
        leaf = draw(16, 32, seed=3, dtype=BF16).requires_grad_()
        x = leaf.view(16, 32)
        inner = checkpointed(lambda x: layers[1](x) * layers[2](x), mode)  # type: ignore[arg-type]
        (layers[0](x) + inner(x) + layers[3](x + 1)).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert_same_bits(gradients[1], gradients[0])
    assert_same_bits(gradients[2], gradients[0])


def test_a_shared_cast_is_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that torch counts, another memory or place in it, a write that is told, and any with the switch."""
    q, k = (layer_of(ROWWISE, 32, 48, BF16) for _ in range(2))
    both = draw(2, 32, 48, seed=3, dtype=BF16).requires_grad_() * 1

    def counted(h: Tensor) -> None:
        h.data.mul_(-3)
        torch.autograd.graph.increment_version(h)

    def moved(h: Tensor) -> None:
        h.data = both.data[1]

    def renewed(h: Tensor) -> None:
        h.data = h.data.sin()

    def unseen(h: Tensor) -> None:
        h.data.mul_(-3)

    for write in (counted, moved, renewed, unseen, lambda h: h.detach().mul_(-3)):
        monkeypatch.setattr(shared_input, "_SHARES", write is not unseen)
        h = both[0].clone() if write is not moved else both[0]
        q(h)
        write(h)
        assert_same_bits(k(h).detach(), k(h.detach().clone()).detach())
    # Without a write they share: a stale cast is what the switch is for.
    monkeypatch.setattr(shared_input, "_SHARES", True)
    h = both[0].clone()
    q(h)
    unseen(h)
    assert not torch.equal(k(h), k(h.detach().clone()))


def saved_bytes(function: Any, x: Tensor) -> dict[torch.dtype, int]:
    """Bytes that the autograd graph keeps, by dtype, each storage once; parameters and the input left out."""
    storages: dict[int, tuple[torch.dtype, int]] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor is not x:
            alive.append(tensor)
            storages[tensor.untyped_storage().data_ptr()] = (tensor.dtype, tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    totals: dict[torch.dtype, int] = {}
    for dtype, size in storages.values():
        totals[dtype] = totals.get(dtype, 0) + size
    return totals


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_kept_for_the_backward_pass(name: RecipeName) -> None:
    """One float8 copy of the input where the recipe lets it, no copy of the weight."""
    m, n, k = 64, 32, 48
    layer = layer_of(RECIPES[name], n, k, BF16, bias=False)
    x = draw(m, k, seed=3, dtype=BF16).requires_grad_()
    kept = saved_bytes(layer, x)
    if RECIPES[name].grad_weight.is_high_precision:
        assert set(kept) <= {BF16, F32} and kept[BF16] == 2 * m * k  # the input itself
    else:
        assert set(kept) <= {torch.float8_e4m3fn, F32} and kept[torch.float8_e4m3fn] == m * k
    assert kept.get(F32, 0) <= 4 * (3 * k + 16)
    layer.weight.requires_grad_(False)
    assert set(saved_bytes(layer, x)) <= {F32}


class Float8Made(TorchDispatchMode):
    """The float8 tensors that the operators of f8emu have made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if str(func).startswith("f8emu."):
            tensors = results if isinstance(results, (tuple, list)) else (results,)
            self.made += [weakref.ref(t) for t in tensors if t.dtype.itemsize == 1 and t.numel()]
        return results

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.made)


@pytest.mark.parametrize("name", RECIPES)
def test_full_checkpointing_keeps_no_float8_copy(name: RecipeName) -> None:
    """However it would be kept: one copy of each input is alive after a forward pass, none where it is recomputed."""
    block, x = block_of(name), draw(16, 32, seed=3, dtype=BF16).requires_grad_()
    inputs = 0 if RECIPES[name].grad_weight.is_high_precision else 3 if name == "delayed" else 2
    for mode, expected in (("none", inputs), ("full", 0)):
        with Float8Made() as float8:
            output = checkpointed(block, mode)(x)
        gc.collect()
        assert len(float8.made) >= 2 + 3, "the inputs and the weights"
        assert float8.alive() == expected, mode
        del output


@pytest.mark.parametrize("name", RECIPES)
def test_bias_shapes_and_layouts(name: RecipeName) -> None:
    layer = layer_of(RECIPES[name], 16, 32, BF16)
    x = draw(2, 2, 4, 32, seed=3, dtype=BF16)
    flat = layer(x.reshape(-1, 32))
    assert_same_bits(layer(x), flat.reshape(2, 2, 4, 16))
    assert_same_bits(layer(x.transpose(0, 2)).transpose(0, 2), flat.reshape(2, 2, 4, 16))
    one = draw(32, seed=5, dtype=BF16)
    assert_same_bits(layer(one), layer(one[None])[0])
    x.requires_grad_()
    layer(x).sum().backward()  # a gradient with strides of 0
    assert layer.bias.grad is not None and torch.equal(layer.bias.grad, torch.full_like(layer.bias, 16))
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("name", RECIPES)
def test_an_empty_batch(name: RecipeName) -> None:
    layer = layer_of(RECIPES[name], 16, 32, BF16)
    x = torch.zeros(0, 5, 32, dtype=BF16, requires_grad=True)
    output = layer(x)
    assert output.shape == (0, 5, 16) and output.dtype is BF16
    output.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_only_what_is_asked_for_is_computed() -> None:
    layer = layer_of(ROWWISE, 16, 32, BF16, bias=False)
    x = draw(16, 32, seed=3, dtype=BF16)
    for trains, wants_input, gemms in ((True, False, 2), (False, True, 2), (True, True, 3)):
        layer.weight.requires_grad_(trains)
        with OpCounter() as counter:
            layer(x.clone().requires_grad_(wants_input)).sum().backward()
        assert counter.gemms() == gemms


@pytest.mark.parametrize("name", RECIPES)
def test_meta_device(name: RecipeName) -> None:
    layer = f8.Float8Linear(32, 16, device="meta", dtype=BF16, recipe=name)
    output = layer(torch.empty(4, 8, 32, device="meta", dtype=BF16, requires_grad=True))
    assert output.is_meta and output.shape == (4, 8, 16)
    output.sum().backward()
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    real = layer_of(RECIPES[name], 16, 32, BF16)
    with torch.no_grad():
        layer.weight.copy_(real.weight)
        layer.bias.copy_(real.bias)
    x = draw(16, 32, seed=3, dtype=BF16)
    assert_same_bits(layer(x), real(x))


def test_repr_names_recipe_and_engine() -> None:
    layer = f8.Float8Linear(32, 16, recipe=ROWWISE_WITH_GW_HP, engine="emulated")
    assert "in_features=32, out_features=16, bias=True, recipe=rowwise_with_gw_hp, engine=emulated" in repr(layer)


def test_bad_calls_are_refused() -> None:
    layer = f8.Float8Linear(32, 16)
    with pytest.raises(OperandError, match=r"in_features = 32; got shape \[4, 16\]"):
        layer(torch.zeros(4, 16))
    with pytest.raises(OperandError, match=r"in_features = 32; got shape \[\]"):
        layer(torch.zeros(()))
    with pytest.raises(OperandError, match=r"input must be float32, bfloat16 or float16; got torch\.float64"):
        layer(torch.zeros(4, 32, dtype=torch.float64))
    with pytest.raises(OperandError, match="engine must be one of auto, hardware, emulated; got 'gpu'"):
        f8.Float8Linear(32, 16, engine="gpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match="unknown recipe 'float8'"):
        f8.Float8Linear(32, 16, recipe="float8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OperandError, match="not a subclass; got Float8Linear"):
        f8.Float8Linear.from_float(layer)
    with pytest.raises(UnsupportedError, match="engine='hardware' needs tensors on a CUDA device"):
        f8.Float8Linear(32, 16, engine="hardware")(torch.zeros(4, 32))

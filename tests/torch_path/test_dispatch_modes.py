"""Converted layers as others see them: selective checkpointing, flop counters, the partitioner of a compiler."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import f8emu.torch as f8
from benchmarks.models import FeedForward
from f8emu.spec import RECIPES, RecipeName, UnsupportedError
from f8emu.torch.gemm import emulation
from tests.torch_path.bits import assert_all_same_bits
from tests.torch_path.layers import both_passes

ATEN = torch.ops.aten
BF16 = torch.bfloat16
PARTITIONED = "aot_eager_decomp_partition"
"""A backend that runs what Inductor would compile."""


def converted(name: RecipeName, *, recompute_casts: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return f8.convert_to_float8_training(FeedForward(32, 48).to(BF16), config=name, recompute_casts=recompute_casts)


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(shape or (16, 32), generator=generator).to(BF16) for _ in range(2))
    return x.requires_grad_(), grad


def step(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x, grad = inputs()
    return both_passes(run, x, grad=grad, parameters=model.parameters())


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GEMMs that ran."""
    ran: list[str] = []
    for verb in ("scaled_mm", "mm"):
        run = getattr(emulation, verb)

        def counted(*args: Any, verb: str = verb, run: Any = run, **options: Any) -> Tensor:
            ran.append(verb)
            return run(*args, **options)

        monkeypatch.setattr(emulation, verb, counted)
    return ran


def every_second_mm(seen: list[Any]) -> Any:
    """The policy of torchtitan 0.2.2: of `aten.mm` every second one is kept, of `aten.max` all."""
    count: defaultdict[bool, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not ctx.is_recompute:
            seen.append(func)
        if func is ATEN.mm.default:
            assert args[0].shape[1] == args[1].shape[0], "the shapes are those of the operands"
            count[ctx.is_recompute] += 1
        is_kept = func is ATEN.max.default or (func is ATEN.mm.default and count[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


EAGER_AND_TRACED = [(name, None) for name in RECIPES] + [(name, PARTITIONED) for name in RECIPES if name != "delayed"]
"""That backend keeps an amax which it then writes to; Inductor does not."""


@pytest.mark.parametrize("name, backend", EAGER_AND_TRACED)
def test_a_policy_that_knows_aten(name: RecipeName, backend: str | None, gemms: list[str]) -> None:
    """It keeps two of three products and every amax, without a word of f8emu; the gradients keep their bits."""
    model = converted(name)
    expected = step(model, model)
    if name == "delayed":  # its casts are by the amaxes of the first step, until the update
        f8.sync_float8_amax_and_scale_history(model)
        expected = step(model, model)
    seen: list[Any] = []

    contexts = partial(every_second_mm, seen)

    def region(x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    run = region if backend is None else torch.compile(region, backend=backend, fullgraph=True)
    gemms.clear()
    observed = step(model, run)
    assert len(gemms) == 3 + 1 + 6, "one product of three is computed again"
    if backend is None:  # Dynamo makes a list of its own
        assert seen.count(ATEN.mm.default) == 3
        if name in ("tensorwise", "rowwise"):
            assert seen.count(ATEN.max.default) == 5, "two inputs and three weights"
    assert_all_same_bits(observed, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_flops_are_those_of_bfloat16(name: RecipeName) -> None:
    counts = []
    for model in (FeedForward(32, 48).to(BF16), converted(name)):
        with FlopCounterMode(display=False) as counter:
            step(model, model)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 3 * 2 * 16 * 32 * 48


class Reader(TorchDispatchMode):
    """A mode as people write it: it looks for NaN, keeps statistics, and gives the operator copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.of_products: list[float] = []

    def copied(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.element_size() == 1 or x.numel() == 0:
            return x
        assert not x.isnan().any()
        assert x.abs().max().item() == max(x.max().item(), -x.min().item())
        return x.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        if func is ATEN.mm.default:
            self.of_products += [x.abs().max().item() for x in args]
        return func(*[self.copied(x) for x in args], **(kwargs or {}))


@pytest.mark.parametrize("name", RECIPES)
def test_a_mode_that_reads(name: RecipeName) -> None:
    model = converted(name)
    expected = step(model, model)
    model = converted(name)
    x, grad = inputs()
    with Reader() as reader:
        output = model(x)
        assert len(reader.of_products) == 6 and max(reader.of_products) < 10, "of values, not of codes"
        output.backward(grad)
    assert_all_same_bits([output, x.grad, *(p.grad for p in model.parameters())], expected)


class Replacer(TorchDispatchMode):
    """It gives every product operands of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[x + 0 for x in args] if func is ATEN.mm.default else args, **(kwargs or {}))


def test_a_mode_that_replaces_operands() -> None:
    """The layer multiplies its own; a selective checkpoint would keep the other product."""
    model = converted("rowwise")
    expected = step(model, model)
    with Replacer():
        assert_all_same_bits(step(model, model), expected)
        with pytest.raises(UnsupportedError, match=r"a dispatch mode gave aten\.mm\.default other tensors"):
            checkpoint(model, inputs()[0], use_reentrant=False, context_fn=partial(every_second_mm, []))


def test_autocast_leaves_what_modes_see_alone() -> None:
    """A float32 layer whose backward pass runs under autocast: it would cast the operands of `aten.mm`."""
    layer = f8.Float8Linear(32, 16)
    x = torch.randn(16, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    output = layer(x).sum()
    with torch.autocast("cpu", dtype=BF16), FlopCounterMode(display=False) as counter:
        output.backward()
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert counter.get_total_flops() == 2 * 2 * 16 * 32 * 16


def kept_codes(run: Callable[[Tensor], Tensor], *shape: int) -> list[tuple[int, ...]]:
    """Shapes of the float8 tensors that a forward pass keeps."""
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (found.append(x), x)[1], lambda x: x):
        run(inputs(*shape)[0])
    return [tuple(x.shape) for x in found if x.element_size() == 1]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_codes_are_recomputed_if_that_is_wanted(name: RecipeName) -> None:
    """Then a compiler's partitioner keeps none of a block whose inputs are kept anyway or cheap to recompute."""
    model, plain = converted(name, recompute_casts=True), converted(name)
    compiled = torch.compile(model, backend=PARTITIONED)
    assert kept_codes(model) and not kept_codes(compiled)
    assert_all_same_bits(step(model, compiled), step(plain, plain))
    if name == "tensorwise":
        assert kept_codes(torch.compile(plain, backend=PARTITIONED)), "not by default"


def test_codes_are_kept_where_that_is_less() -> None:
    """An input of the graph and a product have two bytes an element, their codes one."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(BF16)
    model = f8.convert_to_float8_training(layers, recompute_casts=True)
    assert kept_codes(torch.compile(model, backend=PARTITIONED), 32, 64) == [(32, 64)] * 2

"""Bad input and faults in converted layers: amaxes beyond every scale, values that are not finite, what is shared, and
hardware that is not there."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu import interop
from f8emu.doctor import engine_of_torch as doctor_engine
from f8emu.spec import (
    CHIPS,
    DELAYED,
    E4M3FN,
    E5M2,
    RECIPES,
    TENSORS,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    RecipeName,
    UnsupportedError,
)
from f8emu.spec.gemm_call import Shaped, mm_call
from f8emu.torch.chip import capability_of, has_float8_hardware
from f8emu.torch.gemm import engine as gemm_engine
from f8emu.torch.gemm import hardware
from f8emu.torch.gemm.engine import Engine, resolve_engine, warn_of_idle_gpu
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits, to_numpy
from tests.torch_path.layers import OpCounter, draw, layer_of, passes

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
FORMATS = dict(zip(TENSORS, (E4M3FN, E4M3FN, E5M2), strict=True))
M, N, K = 19, 16, 32
sync = f8.sync_float8_amax_and_scale_history


def drawn(dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's tensors, by the names of the recipe."""
    shapes = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
    return {name: draw(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def passed(layer: f8.Float8Linear, tensors: dict[str, Tensor]) -> list[Tensor]:
    return passes(layer, tensors["input"], tensors["grad_output"])


def assert_equal_to_oracle(layer: f8.Float8Linear, tensors: dict[str, Tensor], states: Any = None) -> list[Tensor]:
    """Run a layer with these tensors, compare its three products with the oracle's; gives them back."""
    with torch.no_grad():
        layer.weight.copy_(tensors["weight"])
    observed = passed(layer, tensors)
    if states is None and layer.recipe.delayed is not None:
        states = dict.fromkeys(TENSORS, reference.initial_delayed_state(layer.recipe.delayed))
    expected = reference.linear(layer.recipe, *(to_numpy(tensors[name]) for name in TENSORS), delayed_state=states)
    assert expected.grad_input is not None and expected.grad_weight is not None
    traces = expected.output, expected.grad_input, expected.grad_weight
    assert_all_same_bits(observed, [trace.product for trace in traces])
    return observed


# Amaxes that no scale fits.


def smallest(dtype: torch.dtype) -> float:
    """The smallest subnormal: the format's largest number over it is infinite in float32, without the floor."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def extremes(dtype: torch.dtype, value: float) -> Iterable[dict[str, Tensor]]:
    """One row, or all, of each tensor and of all three is +-value."""
    for names in (*((name,) for name in TENSORS), TENSORS):
        for rows in (slice(3, 4), slice(None)):
            tensors = drawn(dtype)
            for name in names:
                tensors[name][rows] = tensors[name][rows].sign() * value
            yield tensors


@pytest.mark.filterwarnings("ignore:.*under delayed scaling the amax was infinite or NaN:RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((dtype, value) for dtype in (F32, BF16, F16) for value in (smallest(dtype), torch.finfo(dtype).max)),
        *((BF16, value) for value in (0.0, float("inf"), float("nan"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", RECIPES)
def test_unusual_amaxes(name: RecipeName, dtype: torch.dtype, value: float) -> None:
    for tensors in extremes(dtype, value):
        observed = assert_equal_to_oracle(layer_of(RECIPES[name], N, K, dtype, bias=False), tensors)
        is_finite = all(tensor.isfinite().all() for tensor in observed)
        assert value == torch.finfo(dtype).max or is_finite == math.isfinite(value)


def test_the_first_step_has_its_margin() -> None:
    """The margin, a power of two, shows in the smallest numbers alone."""
    recipes = [dataclasses.replace(DELAYED, delayed=DelayedScaling(margin=margin)) for margin in (0, 6)]
    layers = [layer_of(recipe, N, K, F32, bias=False) for recipe in recipes]
    without, wide = (assert_equal_to_oracle(layer, drawn(F32)) for layer in layers)
    assert all(one.ne(other).any() for one, other in zip(without, wide, strict=True))


# Values that are not finite, where the scale is of earlier steps.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", TENSORS)
def test_a_fault_under_delayed_scales(name: str, value: float) -> None:
    """NaN stays NaN; infinity counts as the largest number of its format. The scale stays, and the step is counted."""
    most_recent = DelayedScaling(reduction=AmaxHistoryReduction.MOST_RECENT)
    layer = layer_of(dataclasses.replace(DELAYED, delayed=most_recent), N, K, BF16, bias=False)
    assert layer.delayed is not None
    assert_equal_to_oracle(layer, drawn(BF16))
    before = {key: value.clone() for key, value in layer.delayed.state().items()}
    parts = ("amax_history", "inv_scale", "initialized")
    states = {t: DelayedState(*(to_numpy(before[part][i]) for part in parts)) for i, t in enumerate(TENSORS)}
    tensors, at = drawn(BF16), TENSORS.index(name)
    tensors[name][3, 2] = value
    with pytest.warns(RuntimeWarning, match=rf"infinite or NaN for: {name} of a layer without a name"):
        observed = assert_equal_to_oracle(layer, tensors, states)
    of_nan = {"input": (0, 2), "weight": (0, 1), "grad_output": (1, 2)}[name]
    for i, tensor in enumerate(observed):
        assert tensor.isnan().any().item() == (value != value and i in of_nan)
    assert layer.delayed.counts.tolist() == [[0] * 3, [0] * 3, [int(i == at) for i in range(3)]]
    assert_same_bits(layer.delayed.inv_scale, before["inv_scale"])  # the others are what they were
    assert layer.delayed.amax_history[:, 0].eq(0).tolist() == [i == at for i in range(3)]


# What is shared.


def pass_through(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    output = model(x)
    output.backward(draw(*output.shape, seed=7, dtype=output.dtype))
    return output.detach(), output if x.grad is None else x.grad


@pytest.mark.parametrize("name", RECIPES)
def test_a_module_used_twice(name: RecipeName) -> None:
    """A module used twice is two layers of equal weights; its state has seen both uses, and moves once."""
    shared = nn.Linear(32, 32, dtype=BF16)
    apart = nn.Sequential(copy.deepcopy(shared), nn.ReLU(), copy.deepcopy(shared))
    f8.convert_to_float8_training(apart, config=name)
    model = f8.convert_to_float8_training(nn.Sequential(shared, nn.ReLU(), shared), config=name)
    x = draw(M, 32, seed=1, dtype=BF16)
    assert_all_same_bits(pass_through(model, x), pass_through(apart, x))
    layer, first, second = (m for m in (model[0], apart[0], apart[2]) if isinstance(m, f8.Float8Linear))  # type: ignore[index]
    for parameter, one, two in zip(layer.parameters(), first.parameters(), second.parameters(), strict=True):
        assert parameter.grad is not None and one.grad is not None and two.grad is not None
        assert_same_bits(parameter.grad, one.grad + two.grad)
    if layer.delayed is not None:
        assert first.delayed is not None and second.delayed is not None
        newest = [one.delayed.amax_history[:, 0] for one in (layer, first, second) if one.delayed is not None]
        assert_same_bits(newest[0], torch.maximum(*newest[1:]))
        assert layer.delayed.amax_history[:, 1:].count_nonzero() == 0


class LanguageModel(nn.Module):
    """An embedding and a head, of one weight if they are tied."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(draw(48, 32, seed=1, dtype=F32))
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_tied_to_an_embedding(name: RecipeName) -> None:
    """Its gradient is the sum of both, a step moves both, and delayed scaling watches it as any other weight."""
    tied = LanguageModel(is_tied=True)
    apart = f8.convert_to_float8_training(LanguageModel(is_tied=False), config=name)
    assert f8.convert_to_float8_training(tied, config=name) is tied
    tokens = torch.arange(48).reshape(3, 16)
    assert_same_bits(pass_through(tied, tokens)[0], pass_through(apart, tokens)[0])
    assert isinstance(apart, LanguageModel)
    assert tied.embed.weight.grad is not None
    assert apart.embed.weight.grad is not None and apart.head.weight.grad is not None
    assert_same_bits(tied.embed.weight.grad, apart.embed.weight.grad + apart.head.weight.grad)
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
    optimizer.step()
    assert tied.head.weight is tied.embed.weight and list(tied.state_dict()) == ["embed.weight", "head.weight"]
    pass_through(tied, tokens)
    if name == "delayed":
        head = tied.head
        assert isinstance(head, f8.Float8Linear) and head.delayed is not None and head.delayed.initialized.all()


# Evaluation.


@pytest.mark.parametrize("name", RECIPES)
def test_evaluation_gives_the_bits_of_training(name: RecipeName) -> None:
    """Without gradients and in inference mode too, and training goes on after it."""
    layer, tensors = layer_of(RECIPES[name], N, K, BF16, bias=False), drawn(BF16)
    expected = passed(layer, tensors)
    layer.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            output = layer(tensors["input"].clone())
        assert_same_bits(output, expected[0])
        assert output.requires_grad == (mode is torch.enable_grad)
    assert_all_same_bits(passed(layer.train(), tensors), expected)


# One update for the whole model.


def test_an_update_takes_as_many_operations_for_a_large_model() -> None:
    counts = []
    for layers in (1, 9):
        model = f8.convert_to_float8_training(
            nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers))), config=DELAYED
        )
        pass_through(model, draw(M, 32, seed=1, dtype=F32))
        with OpCounter() as mode:
            sync(model)
        counts.append(sum(mode.counts.values()))
    assert counts[0] == counts[1]


# Hardware without float8, and autocast.


@pytest.fixture(autouse=True)
def ask_the_device_again() -> Iterator[None]:
    """Forget what f8emu remembers of a device."""
    caches = (has_float8_hardware, capability_of, warn_of_idle_gpu)
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def pretend_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str = "another GPU"
) -> torch.device:
    """A CUDA device of that capability, as far as f8emu asks."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "device", "own"),
    [
        ((8, 0), "A100", []),
        ((8, 9), "L40S", ["Ada"]),
        ((9, 0), "NVIDIA H200", ["Hopper"]),
        ((9, 0), "NVIDIA H100 PCIe", ["Hopper"]),
        ((9, 0), "NVIDIA H100 80GB HBM3", ["Hopper", "H100"]),
        ((10, 0), "B200", ["Blackwell tcgen05"]),
    ],
    ids=str,
)
def test_the_engine_of_a_gpu(
    capability: tuple[int, int], device: str, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hardware where it is the chip whose bits are asked for; a GPU that stands idle is said, once."""
    gpu = pretend_a_gpu(monkeypatch, capability, device)
    for name, chip in CHIPS.items():
        assert resolve_engine("call", gpu, "emulated", chip) is Engine.EMULATED
        if name in own:
            assert resolve_engine("call", gpu, "auto", chip) is Engine.HARDWARE
            assert resolve_engine("call", gpu, "hardware", chip) is Engine.HARDWARE
            continue
        with pytest.warns(RuntimeWarning, match=f"pass chip='{own[0]}'") if own else contextlib.nullcontext():
            assert resolve_engine("call", gpu, "auto", chip) is Engine.EMULATED
        assert resolve_engine("call", gpu, "auto", chip) is Engine.EMULATED
        wanted = (
            r"needs .* torch has no such device"
            if chip.capability is None
            else r"needs tensors on .*\d\.\d, .*; got cuda:0; move"
        )
        with pytest.raises(UnsupportedError, match=f"call: engine='hardware' {wanted}"):
            resolve_engine("call", gpu, "hardware", chip)


@pytest.mark.parametrize(("capability", "chip"), [((10, 0), "Blackwell tcgen05"), ((12, 0), "RTX Blackwell")])
def test_doctor_says_which_chip_the_gpu_is(
    capability: tuple[int, int], chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_a_gpu(monkeypatch, capability)
    monkeypatch.setattr(interop, "jax_device", lambda device: SimpleNamespace(platform="gpu"))
    text = doctor_engine("cuda")
    assert text.startswith(
        f"emulated by f8ref.jax on gpu; chip={chip!r} runs on the hardware; "
        "profile: instructions agree with a model validated on silicon, GEMMs around them assumed"
    )


@pytest.mark.parametrize(
    ("config", "capability", "remedy", "wanted"),
    [
        ("tensorwise", (8, 0), "auto", "convert_to_float8_training: engine='hardware' needs"),
        ("blockwise", (10, 0), "emulated", r"needs .* 9\.0, Hopper; got cuda:0; move .*'Blackwell tcgen05'"),
    ],
    ids=["no float8", "other block scales"],
)
def test_a_model_on_another_gpu_is_refused_at_conversion(
    config: RecipeName, capability: tuple[int, int], remedy: Any, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(32, 32, device="meta"))
    with FakeTensorMode():  # without gradient: autograd would look for the device
        model[0].weight = nn.Parameter(torch.empty(32, 32, device="cuda:0"), requires_grad=False)
        pretend_a_gpu(monkeypatch, capability)  # only now: torch 2.11 would initialize it
        with pytest.raises(UnsupportedError, match=wanted):
            f8.convert_to_float8_training(model, config=config, engine="hardware")
        assert type(model[0]) is nn.Linear, "nothing has changed"
        f8.convert_to_float8_training(model, config=config, engine=remedy)
    assert isinstance(model[0], f8.Float8Linear)


def test_autocast_leaves_the_gemm_in_high_precision_alone() -> None:
    """It would cast the operands to its own dtype; a backward pass may run inside of it."""
    a, b = (draw(16, 16, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    gemm = mm_call(Shaped((16, 16), "bfloat16"), Shaped((16, 16), "bfloat16"))
    expected = hardware.mm(a, b, gemm)
    with torch.autocast("cpu", torch.float16):
        observed = hardware.mm(a, b, gemm)
    assert observed.dtype is torch.bfloat16 and torch.equal(observed, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_a_call_on_a_gpu_without_float8(name: RecipeName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where the hardware is asked for, never replaced; emulated where the engine is left open."""
    tensors, layer = drawn(BF16), layer_of(RECIPES[name], N, K, BF16, bias=False)
    expected = passed(layer, tensors)
    gpu = pretend_a_gpu(monkeypatch, (8, 0))
    monkeypatch.setattr(
        gemm_engine, "resolve_engine", lambda call, device, engine, chip: resolve_engine(call, gpu, engine, chip)
    )
    assert_all_same_bits(passed(layer, tensors), expected)
    layer.engine = "hardware"
    with pytest.raises(UnsupportedError, match=r"scaled_mm: engine='hardware' needs .* 9\.0, Hopper; got cuda:0"):
        layer(tensors["input"])

"""Calls that are recorded once and repeated: the same bits as the functions, and the functions where they must run."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from f8emu.spec import TENSORS
from f8emu.torch import (
    convert_to_float8_training,
    delayed_state_dict,
    launch_sequence,
    sync_float8_amax_and_scale_history,
)
from f8emu.torch.launch_sequence import (
    LaunchSequence,
    note_call,
    note_condition,
    note_effect,
    note_empty,
    note_launch,
    note_zeros,
    repeatable,
)
from f8emu.torch.layer.taps import GemmSeen, TensorSeen, observe


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are those of a GPU, whose kernels `launched` stands for."""
    monkeypatch.setattr(launch_sequence, "has_float8_hardware", lambda device: True)


def launched(count: int, x: Tensor, out: Tensor) -> None:
    """A kernel that copies so many bytes."""

    def launch(index: int, pointers: list[int]) -> None:
        ctypes.memmove(pointers[1], pointers[0], count)

    launch(0, [x.data_ptr(), out.data_ptr()])
    note_launch(launch, (x, out))


class Counted:
    """A function as a repeatable one, and how often it ran itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.runs = 0

        def counted(x: Any, *args: Any) -> Any:
            self.runs += 1
            return function(x, *args)

        self.call = repeatable(counted)

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def halves(x: Tensor, scale: float) -> tuple[Tensor, tuple[Tensor, None, float]]:
    """The first half of `x`, twice that transposed, and what is not a tensor."""
    half = note_empty(x.new_empty(x.shape[0] // 2, x.shape[1]))
    launched(half.nbytes, x, half)
    whole = note_zeros(x.new_zeros(x.shape[0] * x.shape[1]))
    launched(half.nbytes, half, whole[half.numel() :])
    twice = doubled(whole)
    note_call(doubled, (whole,), twice)
    assert not twice[: half.numel()].any()
    return half, (twice[half.numel() :].view(half.shape).t(), None, scale)


def test_a_call_is_repeated_from_the_third_on(on_cpu) -> None:
    function, x, runs = Counted(halves), torch.randn(8, 16), 0
    kept: list[Tensor] = []
    for turn in range(5):
        x = torch.randn(8, 16)
        half, (twice, nothing, scale) = function(x, 0.5)
        assert half.equal(x[:4]) and twice.equal(2 * x[:4].t()) and nothing is None and scale == 0.5
        assert twice.stride() == (1, 16)
        assert function.runs == min(turn + 1, 2)
        kept.append(half)
    assert len({half.data_ptr() for half in kept}) == 5
    others = (x.double(), torch.randn(4, 16), torch.randn(8, 32)[:, :16], x.view(16, 8).t())
    for other in others:  # each has another signature
        runs = function.runs
        function(other, 0.5)
        assert function.runs == runs + 1
    function(x, 0.25)
    assert function.runs == runs + 2


def test_what_is_not_known_is_never_repeated(on_cpu) -> None:
    def launched_on_a_copy(x: Tensor) -> Tensor:
        out = note_empty(torch.empty_like(x))
        launched(x.nbytes, x.clone(), out)
        return out

    def returned(x: Tensor) -> Tensor:
        return x.clone()

    def called_on_a_copy(x: Tensor) -> Tensor:
        copy = x.clone()
        out = doubled(copy)
        note_call(doubled, (copy,), out)
        return out

    def in_a_list(x: Tensor) -> list[Tensor]:
        out = note_empty(torch.empty_like(x))
        launched(x.nbytes, x, out)
        return [out]

    def with_an_effect(x: Tensor) -> Tensor:
        note_effect()
        return in_a_list(x)[0]

    def in_freed_memory(x: Tensor) -> Tensor:
        freed = note_empty(torch.empty_like(x))
        place = freed.data_ptr()
        del freed
        others = [x.clone() for _ in range(64)]
        return next((y for y in others if y.data_ptr() == place), others[0])

    functions = launched_on_a_copy, returned, called_on_a_copy, lambda x: in_a_list(x), with_an_effect, in_freed_memory
    for function, factor in zip(functions, (1, 1, 2, 1, 1, 1), strict=True):
        counted = Counted(function)
        for turn in range(4):
            x = torch.randn(8, 16)
            found = counted(x)
            assert (found[0] if isinstance(found, list) else found).equal(factor * x)
            assert counted.runs == turn + 1


def test_a_condition_is_looked_at_in_every_call(on_cpu) -> None:
    is_ready = False

    def conditional(x: Tensor) -> Tensor:
        note_condition(lambda _: is_ready, x, was=is_ready)
        out = note_empty(torch.empty_like(x))
        launched(x.nbytes, x, out)
        return out if is_ready else out.neg()

    function = Counted(conditional)
    x = torch.randn(8, 16)
    for ready, runs in ((False, 4), (True, 1), (False, 4), (True, 0)):
        is_ready, before = ready, function.runs
        for _ in range(4):
            assert function(x).equal(x if ready else -x)
        assert function.runs == before + runs


def test_the_function_runs_where_it_must(on_cpu) -> None:
    function = Counted(halves)
    x, wide = torch.randn(8, 16), torch.randn(8 * 16 + 1)
    for _ in range(3):
        function(x, 0.5)
    assert function.runs == 2

    def with_gradients() -> None:
        function.call(x, 0.5)

    def with_a_flop_counter() -> None:
        with FlopCounterMode(display=False):
            function(x, 0.5)

    calls = {
        "not aligned": lambda: function(wide[1:].view(8, 16), 0.5),
        "empty": lambda: function(torch.empty(0, 16), 0.5),
        "another object": lambda: function(x, torch.tensor(0.5).numpy()[()]),
        "gradients are recorded": with_gradients,
        "a mode watches": with_a_flop_counter,
    }
    for name, call in calls.items():
        runs = function.runs
        for _ in range(3):
            call()
        assert function.runs == runs + 3, name


def test_arguments_that_share_memory(on_cpu) -> None:
    """One tensor twice is another signature than two tensors; two that share memory are not recorded."""

    def second(x: Tensor, y: Tensor) -> Tensor:
        out = note_empty(torch.empty_like(y))
        launched(y.nbytes, y, out)
        return out

    function, x = Counted(second), torch.randn(8, 16)
    for _ in range(3):
        x = x + 1
        assert function(x, x).equal(x)
    assert function.runs == 2
    for _ in range(3):
        assert function(x, x[:]).equal(x)
    assert function.runs == 5
    for _ in range(3):
        y = torch.randn(8, 16)
        assert function(x, y).equal(y)
    assert function.runs == 6


def test_an_error_ends_the_recording(on_cpu) -> None:
    is_broken = False

    def breaks(x: Tensor) -> Tensor:
        out = note_empty(torch.empty_like(x))
        if is_broken:
            raise ValueError
        launched(x.nbytes, x, out)
        return out

    function = Counted(breaks)
    x = torch.randn(8, 16)
    function(x)
    is_broken = True
    with pytest.raises(ValueError):
        function(x)
    is_broken = False
    for _ in range(3):
        assert function(x).equal(x)
    assert function.runs == 3


def test_memory_is_free_after_its_last_use(on_cpu) -> None:
    before: list[Any] = []
    are_alive: list[bool] = []

    def watched(x: Tensor) -> Tensor:
        are_alive.extend(of() is not None for of in before[:-1])
        before.append(weakref.ref(x))
        return x + 1

    def chain(x: Tensor) -> Tensor:
        for _ in range(3):
            y = watched(x)
            note_call(watched, (x,), y)
            x = y
        return x

    function = Counted(chain)
    x = torch.randn(8, 16)
    for turn in range(4):  # called, recorded, repeated twice
        assert function(x).equal(x + 1 + 1 + 1)
        assert are_alive == [True], "the argument when the third was called, and nothing else"
        assert [of() is not None for of in before] == [True, False, False]
        assert function.runs == min(turn + 1, 2)
        before.clear()
        are_alive.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"])
def test_repeated_layers_give_the_bits_of_those_that_are_not(name, monkeypatch, assert_same_bits) -> None:
    """New values in every step; two layers with one input; sizes with and without tails, many tiles and few."""
    calls = 0
    repeat = LaunchSequence.__call__

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return repeat(*args)

    def trained(m: int, k: int, n: int, dtype: torch.dtype, is_autocast: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(k, n) for _ in range(2)]).cuda()
        convert_to_float8_training(model if is_autocast else model.to(dtype), config=name, pad=True)
        found: list[Tensor] = []
        for step in range(6):
            x = (torch.randn(2, m, k, device="cuda") * 2.0 ** (step - 3)).to(dtype).requires_grad_()
            with torch.autocast("cuda", torch.bfloat16, is_autocast):
                shared = x * 1
                outputs = [layer(shared) for layer in model]
            torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
            found += [*outputs, x.grad, *(p.grad for p in model.parameters())]
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
                    p.grad = None
            if name == "delayed":
                sync_float8_amax_and_scale_history(model)
        states = delayed_state_dict(model).values()
        return [*found, *(x.int() if x.dtype is torch.int64 else x for x in states)]

    monkeypatch.setattr(LaunchSequence, "__call__", counted)
    cases = (
        (512, 512, 512, torch.bfloat16, False),
        (33, 100, 72, torch.bfloat16, False),
        (64, 2048, 512, torch.float32, True),
        (1024, 256, 4096, torch.bfloat16 if name == "blockwise" else torch.float32, False),
    )
    for case in cases:
        with monkeypatch.context() as context:
            context.setattr(launch_sequence, "has_float8_hardware", lambda device: False)
            expected = trained(*case)
        assert calls == 0
        for found, wanted in zip(trained(*case), expected, strict=True):
            assert_same_bits(found.detach().cpu(), wanted.detach().cpu())
        assert calls > 4
        calls = 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_an_observer_is_called_in_every_step(name) -> None:
    """Also of a layer that was recorded before, and beside one of the same sizes that nobody watches."""
    names: list[str] = []

    class Seen:
        def tensor(self, seen: TensorSeen) -> None:
            names.append(seen.tensor)

        def gemm(self, seen: GemmSeen) -> None:
            names.append(seen.gemm)

    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda().bfloat16()
    convert_to_float8_training(model, config=name)

    def step() -> list[str]:
        names.clear()
        x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        if name == "delayed":
            sync_float8_amax_and_scale_history(model)
        return [*names]

    for _ in range(5):
        assert not step()
    taken = observe(model, Seen(), {"1": model[1]})
    watched = [step() for _ in range(5)]
    taken.remove()
    gemms = ["output", "grad_input", "grad_weight"]
    assert sorted(watched[0]) == sorted([*TENSORS, *gemms])
    assert all(found == watched[0] for found in watched)
    assert not step()

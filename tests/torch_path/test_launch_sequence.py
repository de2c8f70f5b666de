"""Calls that are recorded once and repeated: the same bits as the functions, and the functions where they must run."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from f8emu.torch import launch_sequence
from f8emu.torch.launch_sequence import note_call, note_condition, note_empty, note_launch, note_zeros, repeatable

ON_GPU = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences on tensors of the CPU."""
    monkeypatch.setattr(launch_sequence, "has_float8_hardware", lambda device: True)


def copy(count: int) -> Callable[[int, list[int]], None]:
    """A kernel: `count` bytes from its first pointer to its second."""
    return lambda index, pointers: ctypes.memmove(pointers[1], pointers[0], count) and None


def launched(count: int, x: Tensor, out: Tensor) -> None:
    copy(count)(0, [x.data_ptr(), out.data_ptr()])
    note_launch(copy(count), (x, out))


class Counted:
    """A function as a repeatable one that counts how often it ran itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.runs = 0

        def counted(x: Any, *args: Any) -> Any:
            self.runs += 1
            return function(x, *args)

        self.call = torch.no_grad()(repeatable(counted))

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def halves(x: Tensor, scale: float) -> tuple[Tensor, tuple[Tensor, None, float]]:
    """The first half of `x`, twice `x` transposed, and what is not a tensor."""
    half = note_empty(x.new_empty(x.shape[0] // 2, x.shape[1]))
    launched(half.nbytes, x, half)
    whole = note_zeros(x.new_zeros(x.shape[0] * x.shape[1]))
    launched(half.nbytes, half, whole[half.numel() :])
    twice = doubled(whole)
    note_call(doubled, (whole,), twice)
    return half, (twice[half.numel() :].view(half.shape).t(), None, scale)


def test_a_call_is_repeated_from_the_third_on(on_cpu) -> None:
    function = Counted(halves)
    for turn in range(5):
        x = torch.randn(8, 16)
        half, (twice, nothing, scale) = function(x, 0.5)
        assert half.equal(x[:4]) and twice.equal(2 * x[:4].t()) and nothing is None and scale == 0.5
        assert twice.stride() == (1, 16)
        assert function.runs == min(turn + 1, 2)
    assert halves(x, 0.5)[0].data_ptr() != half.data_ptr()
    for other in (x.double(), torch.randn(4, 16), torch.randn(8, 32)[:, :16], x.t()):  # each another signature
        runs = function.runs
        function(other, 0.5)
        assert function.runs == runs + 1
    function(x, 0.25)
    assert function.runs == runs + 2


def test_what_is_not_known_is_never_repeated(on_cpu) -> None:
    def copied(x: Tensor) -> Tensor:
        out = note_empty(torch.empty_like(x))
        launched(x.nbytes, x.clone(), out)
        return out

    def returned(x: Tensor) -> Tensor:
        return x.clone()

    def called(x: Tensor) -> Tensor:
        out = doubled(x.clone())
        note_call(doubled, (x.clone(),), out)
        return out

    for function, factor in ((copied, 1), (returned, 1), (called, 2)):
        counted = Counted(function)
        for turn in range(4):
            x = torch.randn(8, 16)
            assert counted(x).equal(factor * x)
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
    runs = function.runs
    for call in (
        lambda: function(wide[1:].view(8, 16), 0.5),  # not aligned
        lambda: function(torch.nn.Buffer(x), 0.5) if False else function.call.__wrapped__(x, 0.5),
        lambda: function(torch.empty(0, 16), 0.5),
    ):
        runs = function.runs
        call()
        assert function.runs == runs + 1
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        runs = function.runs
        function(x, 0.5)
        assert function.runs == runs + 1


def test_arguments_that_share_memory_are_not_recorded(on_cpu) -> None:
    def second(x: Tensor, y: Tensor) -> Tensor:
        out = note_empty(torch.empty_like(y))
        launched(y.nbytes, y, out)
        return out

    function = Counted(second)
    x = torch.randn(8, 16)
    for _ in range(3):
        function(x, x)
    for turn in range(3):
        y = torch.randn(8, 16)
        assert function(x, y).equal(y)
        assert function.runs == 3 + min(turn + 1, 1)


def test_memory_is_free_after_its_last_use(on_cpu) -> None:
    alive: list[Any] = []

    def watched(x: Tensor) -> Tensor:
        import weakref

        alive.append(weakref.ref(x))
        return x * 1

    def chain(x: Tensor) -> Tensor:
        first = note_empty(torch.empty_like(x))
        launched(x.nbytes, x, first)
        second = watched(first)
        note_call(watched, (first,), second)
        third = watched(second)
        note_call(watched, (second,), third)
        del first, second
        assert True
        return third

    function = Counted(chain)
    for _ in range(2):
        function(torch.randn(8, 16))
    alive.clear()
    x = torch.randn(8, 16)
    assert function(x).equal(x)
    assert function.runs == 2
    assert [of() for of in alive] == [None, None]

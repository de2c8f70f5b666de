"""What a function allocates, launches and multiplies on a GPU: recorded once per signature, then repeated.

The host's work for a small layer takes longer than its kernels, and in eager code most of it is the same in every step:
checks, plans, scale rules. Only the pointers differ. A `repeatable` function is recorded while it runs: those who
allocate, launch a plan or call a GEMM note it here. A later call with arguments of the same signature does what was
noted, in that order, and nothing else.

    arguments -> signature -> never seen: call the function
                           -> seen once:  call the function and record it
                           -> recorded:   allocate, launch, multiply, as recorded

A recording knows a tensor by its memory: that of an argument, or of an allocation that was noted. If a kernel, a GEMM
or the result has another tensor (a copy, a padded operand), the recording is dropped, and the function is called every
time. So it is by `note_effect`, for what cannot be repeated: an observer is called, something is looked at that the
signature does not tell. Whatever else a repeatable function does must be noted too.

Exactness: the same kernels on the same operands, so the same bits.
"""

import threading
from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import pairwise
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from f8emu.spec.recipe import Recipe
from f8emu.torch.device import has_float8_hardware
from f8emu.torch.library import is_watched

_ALIGNMENT = 16
"""The alignment in bytes of all arguments of a repeated call: kernels are compiled for it, a GEMM copies the rest."""
_MOST_SIGNATURES = 4096
"""The most signatures that a function keeps; then it begins anew."""
_TENSORS = (Tensor, nn.Parameter)
_VALUES = (type(None), bool, int, float, str, torch.dtype)

Reader = Callable[[list[Any]], Any]
"""Takes the tensors of a call and gives one of them, a view of one, or what the call returns."""
Step = Callable[[list[Any], list[int], int], None]
"""Does one step on the tensors of a call, their pointers, and the index of the device."""
Launch = Callable[[int, list[int]], None]
"""Launches a kernel on a device by its index, on the current stream, with pointers to tensors."""


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: plain eager calls on a GPU are recorded and repeated.

    Arguments are tensors, plain values, recipes, and tuples of them; results are None, tensors, and tuples of them. The
    function itself runs where an argument is of another type, gradients are recorded, something watches, or a tensor is
    empty, not aligned to 16 bytes or not on torch's current device. Its errors depend on the signature alone, in which
    values of equal type stand at equal places.
    """
    known: dict[Any, _Known] = {}

    @wraps(function)
    def call(x: Tensor, *args: Any) -> Any:
        if is_watched(x) or not has_float8_hardware(x.device) or torch.is_grad_enabled():
            return function(x, *args)
        tensors: dict[int, Tensor] = {}
        recipes: list[Recipe] = []
        key: list[Any] = []
        if _current.recording is not None or not _read((x, *args), tensors, recipes, key):
            return function(x, *args)
        arguments = [*tensors.values()]
        index = x.get_device()
        pointers = [tensor.data_ptr() for tensor in arguments]
        low = 0
        for pointer in pointers:
            low |= pointer or 1
        if low % _ALIGNMENT or (index >= 0 and index != torch.cuda.current_device()):
            return function(x, *args)
        signature = tuple(key)
        found = known.get(signature)
        if found is None:
            if len(known) >= _MOST_SIGNATURES:
                known.clear()  # one step, whatever other threads do
            known[signature] = _Known(recipes, None, is_recorded=False)
        elif not found.is_recorded:
            if not _are_apart(arguments):
                return function(x, *args)
            recording = Recording(arguments)
            result = recording.run(function, (x, *args))
            if not recording.is_postponed:
                known[signature] = _Known(recipes, recording.sequence(result), is_recorded=True)
            return result
        elif found.sequence is not None and found.sequence.is_valid(arguments):
            return found.sequence(arguments, pointers, index)
        return function(x, *args)

    return call


class LaunchSequence:
    """A recording, ready to be repeated."""

    __slots__ = ("_conditions", "_result", "_slots", "_steps")

    def __init__(
        self, steps: list[Step], conditions: list[tuple[Callable[[Tensor], bool], int]], result: Reader, slots: int
    ) -> None:
        self._steps = steps
        self._conditions = conditions
        self._result = result
        self._slots: tuple[list[None], list[int]] = [None] * slots, [0] * slots

    def is_valid(self, arguments: list[Tensor]) -> bool:
        """Whether the conditions hold under which the function did what was recorded."""
        return all([holds(arguments[i]) for holds, i in self._conditions])

    def __call__(self, arguments: list[Tensor], pointers: list[int], index: int) -> Any:
        """What the function returns."""
        tensors = arguments + cast("list[Any]", self._slots[0])
        pointers += self._slots[1]
        for step in self._steps:
            step(tensors, pointers, index)
        return self._result(tensors)


class _Known(NamedTuple):
    """The recording of a signature, which has the identity of recipes."""

    recipes: list[Recipe]
    sequence: LaunchSequence | None
    """None if it was not recorded, or the recording was dropped."""
    is_recorded: bool
    """False where the signature was seen once: what comes only once is not worth a recording."""


class _Unknown(Exception):
    """A tensor that is neither an argument nor an allocation that was noted."""


class _Current(threading.local):
    """What this thread records."""

    recording: "Recording | None" = None


_current = _Current()


class _Memory(NamedTuple):
    """Where a known tensor lies, or lay: memory that was freed may be another tensor's by now."""

    storage: StorageWeakRef
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Self:
        return cls(StorageWeakRef(x.untyped_storage()), *_addresses(x), x.dtype, tuple(x.shape), x.stride())


class Recording:
    """A call that is being recorded, with arguments that share no memory."""

    def __init__(self, arguments: list[Tensor]) -> None:
        self.is_postponed = False
        """Whether this call may not stand for others of its signature, but another may."""
        self._is_complete = True
        self._arguments = len(arguments)
        self._places = {id(x): i for i, x in enumerate(arguments)}
        self._known: list[_Memory | None] = [*map(_Memory.of, arguments), None]  # the last: in place of empty tensors
        self._steps: list[tuple[Step, set[int]]] = []
        self._conditions: list[tuple[Callable[[Tensor], bool], int]] = []

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the function."""
        _current.recording = self
        try:
            return function(*args)
        finally:
            _current.recording = None

    def sequence(self, result: Any) -> LaunchSequence | None:
        """The sequence of a call that gave `result`; None if it cannot be repeated."""
        try:
            used, reader = self._result(result)
        except _Unknown:
            return None
        if not self._is_complete:
            return None
        last = {i: at for at, (_, of) in enumerate(self._steps) for i in of}
        steps: list[Step] = []
        for at, (step, of) in enumerate(self._steps):
            steps.append(step)
            steps += [_free(i) for i in of if last[i] == at and i > self._arguments and i not in used]
        return LaunchSequence(steps, self._conditions, reader, len(self._known) - self._arguments)

    def allocate(self, x: Tensor) -> None:
        """`x` was allocated, without values."""
        at, empty = len(self._known), _empty_on(x.device.type)
        shape, strides, dtype = tuple(x.shape), x.stride(), x.dtype
        self._known.append(_Memory.of(x))

        def step(tensors: list[Any], pointers: list[int], _: int) -> None:
            new = tensors[at] = empty(shape, strides, dtype)
            pointers[at] = new.data_ptr()

        self._steps.append((step, {at}))

    def launch(self, launch: Launch, tensors: Iterable[Tensor]) -> None:
        """A kernel was launched."""
        try:
            places = [self._place(x) for x in tensors]
        except _Unknown:
            self.drop()
            return
        at = [i for i, _ in places]
        offsets = [offset for _, offset in places]

        def step(_: list[Any], pointers: list[int], index: int) -> None:
            launch(index, [pointers[i] for i in at])

        def step_with_offsets(_: list[Any], pointers: list[int], index: int) -> None:
            launch(index, [pointers[i] + offset for i, offset in zip(at, offsets, strict=True)])

        self._steps.append((step_with_offsets if any(offsets) else step, set(at)))

    def call(self, function: Callable[..., Tensor | None], tensors: Iterable[Tensor], out: Tensor | None) -> None:
        """A function of tensors was called; `out`, if it gave a new one."""
        try:
            found = [self._view(x) for x in tensors]
        except _Unknown:
            self.drop()
            return
        at = self._arguments if out is None else len(self._known)
        used, readers = {at, *(i for i, _ in found)}, [reader for _, reader in found]
        if out is not None:
            self._known.append(_Memory.of(out))

        def step(tensors: list[Any], pointers: list[int], _: int) -> None:
            new = tensors[at] = function(*[read(tensors) for read in readers])
            if new is not None:
                pointers[at] = new.data_ptr()

        self._steps.append((step, used))

    def require(self, holds: Callable[[Tensor], bool], x: Tensor) -> None:
        """What follows is done only if `holds(x)`, of an argument."""
        at = self._places.get(id(x))
        if at is None:
            self.drop()
        else:
            self._conditions.append((holds, at))

    def drop(self) -> None:
        """The call cannot be repeated."""
        self._is_complete = False

    def _place(self, x: Tensor) -> tuple[int, int]:
        """The number of the known tensor in whose memory `x` lies, and how many bytes after its begin."""
        if x.numel() == 0:
            return self._arguments, 0
        begin, end = _addresses(x)
        for i, known in enumerate(self._known):
            if known is not None and known.begin <= begin and end <= known.end and not known.storage.expired():
                if known.dtype is not x.dtype:
                    break
                return i, begin - known.begin
        raise _Unknown

    def _view(self, x: Tensor) -> tuple[int, Reader]:
        """The number of the known tensor in whose memory `x` lies, and what makes `x` of it."""
        if x.numel() == 0:
            return self._arguments, lambda _: x
        i, offset = self._place(x)
        known = self._known[i]
        assert known is not None, "it has memory"
        shape, strides, offset = tuple(x.shape), x.stride(), offset // x.element_size()
        if offset == 0 and (shape, strides) == (known.shape, known.strides):
            return i, _whole(i)
        if offset == 0 and (shape, strides) == (known.shape[::-1], known.strides[::-1]) and len(shape) == 2:
            return i, lambda tensors: tensors[i].t()

        def view(tensors: list[Any]) -> Tensor:
            base: Tensor = tensors[i]
            return base.as_strided(shape, strides, base.storage_offset() + offset)

        return i, view

    def _result(self, result: Any) -> tuple[set[int], Reader]:
        """The numbers of the tensors in a result, and what makes it of them."""
        if isinstance(result, Tensor):
            i, reader = self._view(result)
            return {i}, reader
        if type(result) in _VALUES:
            return set(), lambda _: result
        if not isinstance(result, tuple):
            raise _Unknown
        parts = [self._result(part) for part in cast("tuple[Any, ...]", result)]
        readers = [reader for _, reader in parts]
        make: Callable[..., Any] = getattr(type(cast("Any", result)), "_make", tuple)
        return {i for of, _ in parts for i in of}, lambda tensors: make([read(tensors) for read in readers])


def is_recording() -> bool:
    """Whether this thread records a call."""
    return _current.recording is not None


def note_empty(x: Tensor) -> Tensor:
    """`x`, which was allocated without values."""
    if (recording := _current.recording) is not None:
        recording.allocate(x)
    return x


def note_zeros(x: Tensor) -> Tensor:
    """`x`, which was allocated and filled with zeros."""
    if (recording := _current.recording) is not None:
        recording.allocate(x)
        recording.call(_fill_with_zeros, (x,), None)
    return x


def note_launch(launch: Launch, tensors: Iterable[Tensor]) -> None:
    """A kernel was launched."""
    if (recording := _current.recording) is not None:
        recording.launch(launch, tensors)


def note_call(function: Callable[..., Tensor | None], tensors: Iterable[Tensor], out: Tensor | None = None) -> None:
    """`function(*tensors)` was called, which returned nothing or a new tensor `out`."""
    if (recording := _current.recording) is not None:
        recording.call(function, tensors, out)


def note_condition(holds: Callable[[Tensor], bool], x: Tensor, *, was: bool) -> None:
    """What the function did next depends on `holds(x)`, which was so; only what it does if true is recorded."""
    if (recording := _current.recording) is not None:
        recording.require(holds, x)
        recording.is_postponed = recording.is_postponed or not was


def note_effect() -> None:
    """Something was done that cannot be repeated."""
    if (recording := _current.recording) is not None:
        recording.drop()


def _read(args: tuple[Any, ...], tensors: dict[int, Tensor], recipes: list[Recipe], key: list[Any]) -> bool:
    """Collect the tensors and recipes of `args`, and their signature; False if there are others than may be.

    A tensor that comes again is told by its place in the signature.
    """
    for arg in args:
        kind = type(arg)
        if kind in _TENSORS:
            place = id(arg)
            if place in tensors:
                key += "again", [*tensors].index(place)
                continue
            tensors[place] = arg
            key += arg.shape, arg.stride(), arg.dtype, arg.get_device()
        elif kind in _VALUES:
            key.append(arg)
        elif kind is Recipe:
            recipes.append(arg)
            key.append(id(arg))
        elif isinstance(arg, tuple):
            key += kind, len(cast("tuple[Any, ...]", arg))
            if not _read(cast("tuple[Any, ...]", arg), tensors, recipes, key):
                return False
        else:
            return False
    return True


def _are_apart(tensors: list[Tensor]) -> bool:
    """Whether no two tensors share memory, so that each is known by its own."""
    places = sorted(_addresses(x) for x in tensors)
    return all(end <= begin for (_, end), (begin, _) in pairwise(places))


def _addresses(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of `x`, which is not empty, and of the one after its last."""
    begin = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


@cache
def _empty_on(device: str) -> Callable[..., Tensor]:
    """Allocates (shape, strides, dtype) on torch's current device of a type.

    By what compiled code allocates with, which takes half the time of `Tensor.new_empty`.
    """
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", None)  # pyright: ignore[reportAttributeAccessIssue]
    return found or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


def _fill_with_zeros(x: Tensor) -> None:
    x.zero_()


@cache
def _whole(at: int) -> Reader:
    """Gives a tensor itself."""
    return lambda tensors: tensors[at]


def _free(at: int) -> Step:
    def step(tensors: list[Any], _: list[int], __: int) -> None:
        tensors[at] = None

    return step

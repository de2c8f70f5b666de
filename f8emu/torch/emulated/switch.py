"""The switch: torch's own operators give the bits of a chip, on devices that are not it.

Every kernel of `f8emu.torch.emulated` is registered for its operator in torch's dispatcher, below autograd, compilers
and subclasses, which therefore need not know. Code that was compiled calls the dispatcher too, but for Inductor's
`cpp_wrapper` and AOTInductor, which call the library's functions.
"""

import threading
import warnings
from collections.abc import Callable
from itertools import product
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from f8emu.spec.chip import Chip
from f8emu.spec.chips import H100, chip_by_name
from f8emu.spec.names import ChipName
from f8emu.torch.chip import is_device_of
from f8emu.torch.emulated import bfloat16, kernels

_FLOAT8: dict[str, Callable[..., Tensor]] = {
    "_scaled_mm": kernels.scaled_mm,
    "_scaled_mm_v2": kernels.scaled_mm_v2,
    "_scaled_grouped_mm": kernels.scaled_grouped_mm,
    "_scaled_grouped_mm_v2": kernels.scaled_grouped_mm_v2,
    "_grouped_mm": bfloat16.grouped_mm,
}
"""Operators that compute nothing useful without a GPU: replaced whole."""
_BFLOAT16: dict[str, Callable[..., Tensor]] = {"mm": bfloat16.mm, "bmm": bfloat16.bmm, "addmm": bfloat16.addmm}
"""Operators of all dtypes: the kernel gets torch's own as well."""
_ACTIVE: list["Emulation"] = []
"""The last that covers an operator computes it."""
_REGISTERED: set[tuple[str, str]] = set()
"""Operators and dispatch keys whose kernel is ours for good: torch frees a kernel under the threads that run it."""
_LIBRARY = Library("aten", "IMPL")
_LOCK = threading.Lock()


class Emulation:
    """torch's operators emulated; `undo`, or leaving it as a context, gives torch its own kernels back."""

    def __init__(self, chip: Chip, keys: tuple[str, ...], bf16: bool) -> None:
        self.chip, self.keys, self.bf16 = chip, keys, bf16

    def __repr__(self) -> str:
        return f"<emulate({self.chip.name!r}, bf16={self.bf16}): {'active' if self.is_active else 'not active'}>"

    @property
    def is_active(self) -> bool:
        """False after `undo`, and on a machine whose GPU is the chip, where nothing is emulated."""
        return self in _ACTIVE

    def undo(self) -> None:
        """Give torch its own kernels back; a second call does nothing."""
        with _LOCK:
            if self in _ACTIVE:
                _ACTIVE.remove(self)

    def __enter__(self) -> "Emulation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()


def emulate(chip: Chip | ChipName = H100, *, bf16: bool = False, force: bool = False) -> Emulation:
    """Give torch's own GEMM operators the bits of a chip, in the whole process, until `undo`.

        f8emu.torch.emulate()                 # from here on, torchao, torchtitan, ... compute as on an H100
        with f8emu.torch.emulate(bf16=True):  # or for a while
            ...

    The operators: `torch._scaled_mm`, `torch.nn.functional.scaled_mm`, `torch._scaled_grouped_mm`,
    `torch.nn.functional.scaled_grouped_mm`, `torch._grouped_mm`. They take and refuse what a Hopper GPU does, with
    torch's classes of errors. With chip "B200" the first four also multiply MXFP8, and refuse of it what torch's source
    does: E8M0 scales must be swizzled. On a machine with a GPU that is the chip, nothing changes; on another GPU its
    tensors are emulated too, by JAX, which is slow.

    Exactness: every bit, and every refusal, of the 228 calls of an H100 in `tests/torch_path/operator_calls-h100.json`.
    What a program computes around them is its own: compiled code may keep float32 where eager code rounds.

    Args:
        chip: the chip, a profile of `f8emu.spec.CHIPS` or its name.
        bf16: also `mm`, `addmm` and `bmm` of bfloat16 matrices whose rows are multiples of 16 bytes, and so
            `torch.nn.Linear` in bfloat16, as `rowwise_with_gw_hp` needs.
        force: emulate also where a GPU of the machine is the chip: CPU tensors alone.

    Raises:
        SpecError: an unknown chip.
    """
    chip = chip_by_name("emulate", chip)
    has_gpu = torch.cuda.is_available()
    is_chip = has_gpu and is_device_of(chip, torch.device("cuda", torch.cuda.current_device()))
    if is_chip and not force:
        return Emulation(chip, (), bf16)
    emulation = Emulation(chip, ("CPU", "CUDA") if has_gpu and not is_chip else ("CPU",), bf16)
    with _LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for key, name in product(emulation.keys, (*_FLOAT8, *(_BFLOAT16 if bf16 else ()))):
            _register(name, key)
        _ACTIVE.append(emulation)
    return emulation


def _register(name: str, key: str) -> None:
    """Make the operator, and where torch has one its variant that writes into `out`, ask who computes it."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or (name, key) in _REGISTERED:
        return
    _REGISTERED.add((name, key))
    original = _original(name, key)

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        emulation = _current(name, key)
        if emulation is None:
            return original(*args, **kwargs)
        if name in _FLOAT8:
            return _FLOAT8[name](emulation.chip, *args, **kwargs)
        return _BFLOAT16[name](emulation.chip, original, *args, **kwargs)

    _LIBRARY.impl(name, compute, key, allow_override=True)
    if "out" not in packet.overloads():
        return
    original_out = _original(f"{name}.out", key)

    def write(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if _current(name, key) is None:
            return original_out(*args, out=out, **kwargs)
        result = compute(*args, **kwargs)
        if result.dtype != out.dtype:
            raise RuntimeError(f"torch.{name}: expected out to have dtype {result.dtype}, but got {out.dtype}")
        return out.resize_(result.shape).copy_(result)

    _LIBRARY.impl(f"{name}.out", write, key, allow_override=True)


def _current(name: str, key: str) -> Emulation | None:
    """Who emulates an operator for a device now."""
    for emulation in _ACTIVE[::-1]:
        if key in emulation.keys and (name in _FLOAT8 or emulation.bf16):
            return emulation
    return None


def _original(name: str, key: str) -> Callable[..., Tensor]:
    """The kernel that torch has; one that says so where it has none."""
    try:
        kernel = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:

        def refuse(*_: Any, **__: Any) -> Tensor:
            raise NotImplementedError(f"torch has no aten::{name} for {key}")

        return refuse
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return lambda *args, **kwargs: kernel.call_boxed(keys, *args, **kwargs)

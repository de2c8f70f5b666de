"""What a kernel does beside its output: writes out of bounds, changes an input, leaves outputs unwritten.

An output that the kernel is given lies between guard zones and is poisoned first. Every input is compared with what was
passed. Each fault is an exception, which the suite reports as the error of that case.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.compare import bits, hexadecimal

_GUARD_ROWS = 128
"""A kernel that forgets a mask writes the rest of its tile, 128 rows or columns of it at the most."""
_GUARD_BYTES = 4096
"""At least, and a multiple of this: the output is aligned as an allocation of its own would be."""
_POISON = {2: 0x7FA5, 4: 0x7FA5A5A5}
"""A NaN in bfloat16, float16 and float32 that no arithmetic gives: a computed NaN is the canonical one, or an input."""


class KernelFault(Exception):
    """A kernel did what no kernel may do, whatever its bits."""


class WroteOutOfBounds(KernelFault):
    """Memory beside the output was changed."""


class ChangedInput(KernelFault):
    """An operand or a scale has other bits after the call."""


class LeftUnwritten(KernelFault):
    """An output was never written."""


class ProcessEnded(KernelFault):
    """The process of an isolated kernel crashed or exited."""


class TimedOut(KernelFault):
    """An isolated kernel gave no output in time."""


class GuardedOutput:
    """An output `[M, N]` inside of a larger allocation, everything poisoned."""

    def __init__(self, framework: Framework, shape: tuple[int, int], dtype: np.dtype, *, column_major: bool) -> None:
        m, n = shape
        self._framework = framework
        self._size = m * n
        wanted = max(_GUARD_ROWS * max(m, n) * dtype.itemsize, _GUARD_BYTES)
        self._guard = math.ceil(wanted / _GUARD_BYTES) * _GUARD_BYTES // dtype.itemsize
        self._poison = _POISON[dtype.itemsize]
        codes = np.full(2 * self._guard + self._size, self._poison, f"u{dtype.itemsize}")
        self._memory = framework.load(codes.view(dtype))
        inside = self._memory[self._guard : self._guard + self._size]
        self.array = inside.reshape(n, m).T if column_major else inside.reshape(m, n)
        """What the kernel is given."""

    def check(self) -> None:
        """Raises where something beside the output was written.

        Raises:
            WroteOutOfBounds: a guard zone was changed.
        """
        codes = bits(self._framework.store(self._memory))
        end = self._guard + self._size
        before = np.flatnonzero(codes[: self._guard] != self._poison)
        behind = np.flatnonzero(codes[end:] != self._poison)
        if before.size or behind.size:
            places = []
            if before.size:
                places.append(f"{before.size} before its begin, the nearest {self._guard - before[-1]} elements away")
            if behind.size:
                places.append(f"{behind.size} behind its end, the nearest {behind[0] + 1} elements away")
            raise WroteOutOfBounds(f"elements beside the output were written: {'; '.join(places)}; check its masks")


def check_written(output: np.ndarray) -> None:
    """Raises where a poisoned output still has its poison.

    Raises:
        LeftUnwritten: at least one output was never written.
    """
    unwritten = np.argwhere(bits(output) == _POISON[output.dtype.itemsize])
    if unwritten.size:
        raise LeftUnwritten(
            f"{len(unwritten)} of {output.size} outputs were never written, the first at {unwritten[0].tolist()}; "
            "check the grid and the masks"
        )


def check_unchanged(framework: Framework, inputs: Iterable[tuple[str, np.ndarray, Any]]) -> None:
    """Raises where an input, of (name, as it was, as the kernel had it), has changed.

    Raises:
        ChangedInput: names the input and the first element.
    """
    for name, before, loaded in inputs:
        after = np.asarray(framework.store(loaded)).reshape(before.shape)
        changed = np.argwhere(bits(after) != bits(before))
        if changed.size:
            index = tuple(changed[0])
            raise ChangedInput(
                f"{len(changed)} elements of the input {name} were changed, the first at {changed[0].tolist()}: "
                f"{hexadecimal(before[index])} became {hexadecimal(after[index])}; inputs are read only"
            )


def placed(framework: Framework, array: np.ndarray, *, column_major: bool) -> Any:
    """The array in the framework, in memory that is not the suite's; the last two dimensions column-major if asked.

    A dimension of one element has no order of its own, and kernels check strides: so the order is made here.
    """
    if not column_major:
        return framework.load(np.array(array, order="C"))
    if framework.name == "torch":
        return framework.load(np.array(array.swapaxes(-1, -2), order="C")).mT
    return framework.load(np.array(array.swapaxes(-1, -2), order="C").swapaxes(-1, -2))

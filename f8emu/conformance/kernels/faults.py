"""The faults of a kernel beside its bits: it writes out of bounds, changes an input, leaves outputs unwritten.

Operands, scales and an output that the kernel is given lie between guard zones of NaN: what is read there spoils the
output, what is written there is found. The output is poisoned first. Each fault is an exception, which the suite
reports as the error of that case.
"""

from typing import Any

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.compare import hexadecimal
from f8emu.conformance.kernels.kernel import Laid
from f8emu.spec import E8M0FNU

# A kernel that forgets a mask reads or writes the rest of its tile behind its arrays, 128 rows of it at the most.
_GUARD_ROWS = 128
# Size of a guard zone, at least.
_GUARD_BYTES = 4096
# Bytes: an array begins at a multiple, as an allocation of its own would on a GPU, or at an offset from one.
_ALIGNMENT = 256
# A NaN in every format that no arithmetic gives, but for float8: a computed NaN is the canonical one, or an input.
_POISON = {1: 0x7F, 2: 0x7FA5, 4: 0x7FA5A5A5}


class KernelFault(Exception):
    """A kernel did what no kernel may do, whatever its bits."""


class WroteOutOfBounds(KernelFault):
    """Memory beside the output or an input was changed."""


class ChangedInput(KernelFault):
    """An operand or a scale has other bits after the call."""


class LeftUnwritten(KernelFault):
    """An output was never written."""


class ProcessEnded(KernelFault):
    """A kernel ended its process, or would have: a crash, an exit."""


class TimedOut(KernelFault):
    """A kernel gave no output in time."""


# Memory


class Guarded:
    """An array between guard zones, for one call of a kernel. Arrays of JAX have none: nothing can write to them."""

    array: Any
    """The kernel's argument, in the framework: C-contiguous, or with the last two dimensions column-major."""

    def __init__(self, framework: Framework, name: str, laid: Laid) -> None:
        contents, column_major, padding, offset = laid
        lying = np.array(contents.swapaxes(-1, -2) if column_major else contents, order="C")
        self._framework, self._name, self._contents, self._memory = framework, name, contents, None
        self._column_major = column_major
        if framework.name == "jax":
            self.array = framework.load(lying.swapaxes(-1, -2) if column_major else lying)
            return
        # 1. Room for the guards and for the way to the boundary.
        columns, itemsize = lying.shape[-1] if lying.ndim > 1 else 1, lying.dtype.itemsize
        pitch, rows = columns + padding, lying.size // columns if columns else 0
        least, boundary = _GUARD_BYTES // itemsize, _ALIGNMENT // itemsize
        before, behind = max(pitch, least), max(_GUARD_ROWS * pitch, least)
        self._poison = 0 if contents.dtype.kind in "iu" else _POISON[itemsize]
        if contents.dtype == dtype_of(E8M0FNU):
            self._poison = E8M0FNU.nan_code
        codes = np.full(before + 2 * boundary + rows * pitch + behind, self._poison, codes_of(lying).dtype)
        self._memory = framework.load(codes.view(contents.dtype))
        # 2. Where it begins is known once the framework has its memory.
        begin = before + (-(framework.address(self._memory) // itemsize + before)) % boundary + offset // itemsize
        # A dimension of one element has no order of its own, and kernels check strides: so the order is made here.
        shape = (*lying.shape[:-1], pitch) if padding else lying.shape
        block = self._memory[begin : begin + rows * pitch].reshape(shape)
        inside = block[..., :columns] if padding else block
        inside[...] = framework.load(lying)
        self._inside = np.zeros(codes.size, bool)
        self._inside[begin : begin + rows * pitch].reshape(rows, pitch)[:, :columns] = True
        self._begin, self._end = begin, begin + rows * pitch - padding
        self.array = inside.swapaxes(-1, -2) if column_major else inside

    def refill(self, contents: np.ndarray, *, in_new_array: bool) -> bool:
        """Other contents in this memory, through this array or a new one, if they fit; raises as the checks."""
        before = self._contents
        if self._memory is None or (before.shape, before.dtype) != (contents.shape, contents.dtype):
            return False
        self.check_guards()
        self.check_unchanged()
        self._contents = contents
        self.array[...] = self._framework.load(np.array(contents, order="C"))
        if in_new_array:
            self.array = self.array[...]
        return True

    def shared(self, laid: Laid) -> Any:
        """This array, or its transpose, where it is also `laid`; None where it is not."""
        contents, lies_alike = self._contents, laid.column_major is self._column_major
        is_vector = 1 in contents.shape or contents.ndim < 2
        if (is_vector or lies_alike) and _are_equal(contents, laid.array):
            return self.array
        if contents.ndim > 1 and (is_vector or not lies_alike) and _are_equal(contents.swapaxes(-1, -2), laid.array):
            return self.array.swapaxes(-1, -2)
        return None

    def check_guards(self) -> None:
        """Raises WroteOutOfBounds where a guard zone was changed."""
        if self._memory is None:
            return
        codes = codes_of(np.asarray(self._framework.store(self._memory)))
        written = np.flatnonzero((codes != self._poison) & ~self._inside)
        before, behind = written[written < self._begin], written[written >= self._end]
        places: list[str] = []
        if before.size:
            places.append(f"{before.size} before its begin, the nearest {self._begin - before[-1]} elements away")
        if between := written.size - before.size - behind.size:
            places.append(f"{between} between its rows")
        if behind.size:
            places.append(f"{behind.size} behind its end, the nearest {behind[0] - self._end + 1} elements away")
        if places:
            raise WroteOutOfBounds(f"elements outside {self._name} were written: {'; '.join(places)}; check the masks")

    def check_unchanged(self) -> None:
        """Raises ChangedInput, which names the first element that has other bits than before."""
        before = self._contents
        after = np.asarray(self._framework.store(self.array)).reshape(before.shape)
        changed = np.argwhere(codes_of(after) != codes_of(before))
        if changed.size:
            index = tuple(changed[0])
            raise ChangedInput(
                f"{len(changed)} elements of {self._name} were changed, the first at {changed[0].tolist()}: "
                f"{hexadecimal(before[index])} became {hexadecimal(after[index])}; inputs are read only"
            )


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and np.array_equal(codes_of(first), codes_of(second))


def unwritten(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An output that is all poison."""
    return np.full(shape, _POISON[dtype.itemsize], f"u{dtype.itemsize}").view(dtype)


def check_written(output: np.ndarray) -> None:
    """Raises LeftUnwritten where an output still has its poison."""
    left = np.argwhere(codes_of(output) == _POISON[output.dtype.itemsize])
    if left.size:
        raise LeftUnwritten(
            f"{len(left)} of {output.size} outputs were never written, the first at {left[0].tolist()}; "
            "check the grid and the masks"
        )

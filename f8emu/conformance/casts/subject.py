"""A cast or a quantizer that can be asked: a function of arrays, found by its name."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from f8emu.conformance.arrays import Framework, framework_of
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import NotOffered
from f8emu.conformance.casts.questions import Question
from f8emu.conformance.compare import shape_fault, text_of
from f8emu.conformance.kernels.child import Ask
from f8emu.conformance.kernels.faults import Guarded
from f8emu.conformance.kernels.imported import INTERPRETED, function_of, is_interpreted
from f8emu.conformance.kernels.kernel import Kernel, Laid
from f8emu.conformance.kernels.loaded import load_kernel
from f8emu.spec import E8M0FNU, Format, Granularity, SpecError

_ARRAYS = """\
Arrays are torch's, on the GPU if there is one; --arrays numpy or jax selects
another framework. x is read only, and so is the memory around it. Every one
must take float32 matrices. NotImplementedError is "not offered": such a case
never counts as equal. So is any exception for bfloat16 and float16, and for
{refused}.
Any other exception is the error of its case. So is a crash or a hang, for it
runs in a process of its own, but not with --here.

Its name is package.module:function or path/to/file.py:function.
"""

CONTRACTS = {
    "cast": f"""\
function(x) -> codes, or function(x, scale) -> codes

x         float32, bfloat16 or float16 of any value, in any memory layout:
          matrices, which may be empty, and arrays of other dimensions
scale     float32, one element without dimensions. A kernel may multiply by it
          or divide by it; the report says which. It computes in float32 and
          rounds once: x / scale is not x * (1 / scale).
codes     x's shape, of a float8 dtype, or uint8 with --format: the nearest
          float8, ties to even; a NaN for NaN; -0 stays -0 where the format
          has one.
          Saturating: what rounds beyond the largest number, and infinity,
          gives the largest number. Non-saturating: infinity, or NaN where the
          format has none. Both are right, and the report says which a kernel
          follows; --overflow saturate or nonfinite asks for one.

{_ARRAYS.format(refused="other than two dimensions")}""",
    "quantize": f"""\
function(x) -> codes, scales

x         [M, K] of float32, bfloat16 or float16, of any value, in any layout
codes     [M, K] of a float8 dtype, or uint8 with --format
scales    the factors that decode, value = code * scale, in any float dtype or
          as the bytes of float8_e8m0fnu: one number; [M, 1]; [M, K / 128];
          [M / 128, K / 128]; or [M, K / 32], rounded up. --granularity names it
          where a shape fits several.

Expected is f8emu's rule, or every byte of one of f8emu.dialects, which the
report names. f8emu's: t = 448 / max(amax, 1e-12) in float64, rounded to
float32, where 448 is the format's largest number; scale = 1 / t, rounded;
codes = saturating cast of float32(x) * t. Zeros keep their sign. For blocks of
32: scale is the smallest power of two with 448 * scale >= amax, t = 1 / scale.

{_ARRAYS.format(refused="partial blocks and for no rows")}""",
}
"""Kind -> what such a function is given and must return: `f8emu verify --contract --kind KIND`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """The facts about a function under test."""

    name: str
    kind: str
    engine: str
    arrays: str
    """The framework of its arrays."""
    takes_scale: bool
    is_command: bool = True
    """False: its user calls Python, and knows arguments for options."""

    @property
    def call(self) -> str:
        """The begin of a message about it."""
        return f"f8emu verify {self.name}" if self.is_command else self.name

    def option(self, name: str, value: str = "") -> str:
        """An option as its user writes it: `--arrays numpy`, or `arrays='numpy'`."""
        if self.is_command:
            return f"--{name} {value}".rstrip()
        return f"{name}={value!r}" if value else f"{name}="


def loaded_function(name: str, kind: str, arrays: str) -> tuple[Function, Ask]:
    """The function of that name, and how it is asked a `Question`."""
    return called_function(name, load_kernel(name), kind, arrays)


def called_function(
    name: str, kernel: Kernel, kind: str, arrays: str, *, is_command: bool = True
) -> tuple[Function, Ask]:
    """The function of a kernel, under a name, and how it is asked a `Question`."""
    framework = framework_of(kernel.arrays or arrays)(f"f8emu verify {name}")
    try:
        parameters = inspect.signature(kernel.function).parameters.values() if callable(kernel.function) else ()
        needed = [x for x in parameters if x.default is x.empty and x.kind <= x.POSITIONAL_OR_KEYWORD]
    except ValueError:  # one of C
        needed = [None]
    most = 2 if kind == "cast" else 1
    if not 1 <= len(needed) <= most:
        raise SpecError(
            f"f8emu verify {name}: a {kind} must take {'x, or x and scale' if most == 2 else 'x'}; it takes "
            f"{len(needed)} arguments without defaults; f8emu verify --contract --kind {kind} says what it is given"
        )
    engine = f"{name} on {framework.name} {framework.version}, {framework.device}"
    call = function_of(kernel, framework)
    engine += f", {INTERPRETED}" if is_interpreted(kernel.function) else ""
    takes_scale = len(needed) == 2
    known = Function(
        name=name, kind=kind, engine=engine, arrays=framework.name, takes_scale=takes_scale, is_command=is_command
    )
    return known, partial(_ask, call, framework, ("codes",) if kind == "cast" else ("codes", "scales"))


def _ask(
    call: Callable[..., Any], framework: Framework, expected: Sequence[str], q: Question, is_first: bool = False
) -> tuple[np.ndarray, ...]:
    # The arrays that it returns, each with memory of its own; codes and scales as they are. What a first call does to
    # memory is left to later ones to tell.
    memory = Guarded(framework, "x", Laid(q.lying, q.column_major, q.padding, q.offset))
    x = memory.array[..., :: q.step] if q.step > 1 else memory.array
    arguments = (x,) if q.scale is None else (x, framework.load(q.scale))
    try:
        with np.errstate(all="ignore"):  # numpy would warn of what it is asked on purpose
            returned = call(*arguments)
    except NotImplementedError as reason:
        raise NotOffered(text_of(reason)) from None
    except Exception as refusal:
        if not q.may_refuse:
            raise
        raise NotOffered(f"{type(refusal).__name__}: {text_of(refusal)}") from None
    if not is_first:
        memory.check_guards()
        memory.check_unchanged()
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    is_array = [isinstance(output, framework.array_type | np.generic) for output in outputs]
    if len(outputs) != len(expected) or not all(is_array):
        types = ", ".join(type(output).__name__ for output in outputs)
        raise TypeError(f"gave {types}, expected {' and '.join(expected)}")
    return tuple(np.array(framework.store(output)) for output in outputs)


def codes_of(returned: np.ndarray, shape: tuple[int, ...], target: Format) -> np.ndarray:
    """Codes in the dtype of their format, bytes too; a TypeError says what they are instead."""
    codes = returned.view(dtype_of(target)) if returned.dtype.name in ("uint8", "int8") else returned
    return _fitted(codes, np.empty(shape, dtype_of(target)))


def scales_of(returned: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Scales as float32 in their grid; bytes are powers of two; a TypeError says what they are instead."""
    scales = returned.view(dtype_of(E8M0FNU)) if returned.dtype.name in ("uint8", "int8") else returned
    with np.errstate(invalid="ignore"):
        numbers = scales.astype(np.float32)
    is_squeezed = [n for n in scales.shape if n != 1] == [n for n in grid if n != 1]
    return _fitted(numbers.reshape(grid) if is_squeezed else numbers, np.empty(grid, np.float32))


def _fitted(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    if fault := shape_fault(array, like):
        raise TypeError(fault)
    return array


def granularity_of(function: Function, scale: np.ndarray, shape: tuple[int, int]) -> Granularity:
    """The granularity of the scales of a matrix of this shape, in which every granularity has another grid."""
    grids = {granularity: granularity.scale_shape(*shape) for granularity in Granularity}
    for granularity, grid in grids.items():
        with suppress(TypeError):
            scales_of(scale, grid)
            return granularity
    known = ", ".join(f"{list(grid)} of {granularity.value}" for granularity, grid in grids.items())
    raise SpecError(
        f"{function.call}: scales of a matrix {list(shape)} must be {known}; got {list(scale.shape)}; "
        f"reshape them, or name one with {function.option('granularity')}"
    )

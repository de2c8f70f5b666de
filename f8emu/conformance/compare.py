"""Strict comparison: bit by bit, NaN as NaN, -0 different from +0; and the words that explain a difference.

Vectorised first; only elements that differ are looked at one by one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Describe = Callable[[tuple[int, ...]], str]
"""Index of an output -> the inputs that lead to it, as hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One output that differs, or one case that failed as a whole."""

    case: str
    part: str = ""
    """The part of the case that differs, if it has parts: `output.a.scale`, ..."""
    index: tuple[int, ...] = ()
    inputs: str = ""
    observed: str = ""
    expected: str = ""
    error: str = ""
    """What happened, if the case failed as a whole."""
    outputs: int = 0
    """The number of outputs of the part; 0 if they were not counted."""
    differing: int = 0
    """How many of these outputs differ."""
    snippet: str = ""
    """A program in plain torch that computes this output alone; empty if there is none."""

    def line(self) -> str:
        """`<case> [index] <inputs> => <observed>  expected: <expected>; <differing> of <outputs> differ`."""
        head = f"{self.case}: {self.part}" if self.part else self.case
        if self.error:
            return f"{head} => {self.error}"
        place = f" [{', '.join(map(str, self.index))}]" if self.index else ""
        share = f"; {self.differing} of {self.outputs} differ" if self.outputs else ""
        inputs = f" {self.inputs}" if self.inputs else ""
        return f"{head}{place}{inputs} => {self.observed}  expected: {self.expected}{share}"


def shape_fault(observed: object, expected: np.ndarray) -> str:
    """Empty where `observed` can be compared with `expected`, else what is wrong with its type, dtype or shape."""
    if not isinstance(observed, np.ndarray | np.generic):
        return f"gave {type(observed).__name__}, expected an array {expected.dtype.name}{list(expected.shape)}"
    if observed.dtype != expected.dtype or observed.shape != expected.shape:
        return f"gave {observed.dtype.name}{list(observed.shape)}, expected {expected.dtype.name}{list(expected.shape)}"
    return ""


def different(observed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Which outputs differ, [same shape] bool: unequal bits, unless both are NaN."""
    unequal = bits(observed) != bits(expected)
    if expected.dtype.kind in "biu" or not unequal.any():
        return unequal
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return unequal & ~(np.isnan(observed) & np.isnan(expected))


def bits(array: np.ndarray) -> np.ndarray:
    """Bit patterns as unsigned integers of the same width."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def mismatches(
    case: str, part: str, observed: np.ndarray, expected: np.ndarray, describe: Describe | None = None
) -> Iterator[Mismatch]:
    """The outputs that differ, in order."""
    observed, expected = np.asarray(observed), np.asarray(expected)
    for where in np.argwhere(different(observed, expected)):
        index = tuple(int(i) for i in where)
        yield Mismatch(
            case=case,
            part=part,
            index=index,
            inputs=describe(index) if describe else "",
            observed=show(observed[index]),
            expected=show(expected[index]),
        )


def show(scalar: np.ndarray | np.generic) -> str:
    """`0x3f80 (1.0)`."""
    scalar = np.asarray(scalar)
    if scalar.dtype.kind in "biu":
        return str(scalar[()])
    value = scalar.astype(np.float32)[()]
    return f"{hexadecimal(scalar)} ({value:.9g})"


def hexadecimal(scalar: np.ndarray | np.generic) -> str:
    """The bit pattern, as wide as the dtype."""
    scalar = np.asarray(scalar)
    return f"0x{int(bits(scalar)[()]):0{2 * scalar.dtype.itemsize}x}"


def abbreviated(array: np.ndarray, name: str, *, shown: int = 8) -> str:
    """The codes of a vector, `a=<38 c0 7e .. 7c>(512)`: the first, the last, how many."""
    codes = bits(np.asarray(array)).ravel()
    width = 2 * codes.dtype.itemsize
    if codes.size == 1:
        return f"{name}={int(codes[0]):#0{width + 2}x}"
    head = " ".join(f"{int(code):0{width}x}" for code in codes[:shown])
    tail = f" .. {int(codes[-1]):0{width}x}" if codes.size > shown else ""
    return f"{name}=<{head}{tail}>({codes.size})"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 case differs`, `2 cases differ`; without `many` the plural is `one` and an s."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def text_of(error: BaseException) -> str:
    """`str(error)`, or nothing: the text of a foreign exception may raise."""
    try:
        return str(error).strip()
    except Exception:  # whatever it raises, the error itself is still told
        return ""


def said_by(error: BaseException, longest: int = 400) -> str:
    """`ValueError: the first line of its text`, or the type alone where it has none."""
    lines = text_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:longest]}" if lines else type(error).__name__

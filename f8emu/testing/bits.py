"""Equal bits, of arrays of any framework."""

from itertools import islice
from typing import Any

import numpy as np

from f8emu import interop
from f8emu.conformance.compare import Mismatch, distances, mismatches, shape_fault, ulp_histogram
from f8emu.interop.frameworks import library_of
from f8emu.spec.errors import OperandError
from f8emu.testing.arguments import count


def assert_bits_equal(actual: Any, expected: Any, *, shown: int = 5) -> None:
    """Assert that two arrays have one dtype, one shape and the same bits.

    Each is an array of torch, JAX or numpy with ml_dtypes, of float8, bfloat16 or any other dtype that the three have,
    on any device. Any NaN equals any NaN, whatever its sign and payload; -0 differs from +0. Empty arrays are equal if
    their dtypes and shapes are.

    Args:
        actual: the array under test.
        expected: the array that it must equal.
        shown: how many of the differing elements the message lists.

    Raises:
        AssertionError: another dtype or shape, or bits that differ. The message says how many differ and how far, and
            shows the first of them: place, codes in hex, values, and the distance in ulps.
        OperandError: not an array, one without memory that can be read, or one of complex numbers.
        SpecError: `shown` is no integer of at least 0.
    """
    __tracebackhide__ = True
    count("assert_bits_equal", "shown", shown)
    observed, right = _as_numpy("actual", actual), _as_numpy("expected", expected)
    if fault := shape_fault(observed, right):
        raise AssertionError(fault)
    histogram = ulp_histogram(observed, right)
    if histogram.total:
        lines = [f"{right.dtype.name}{list(right.shape)}, of {right.size:,} elements: {histogram.words()}"]
        differing = islice(mismatches("", "", observed, right), shown)
        lines += [_line(mismatch, observed, right) for mismatch in differing]
        lines += [f"  and {histogram.total - shown:,} more"] if histogram.total > shown else []
        raise AssertionError("\n".join(lines))


def _as_numpy(name: str, x: Any) -> np.ndarray:
    if library_of(x) is None:
        raise OperandError(
            f"assert_bits_equal: {name} must be an array of torch, JAX or numpy; got {type(x).__name__}; compare the "
            "arrays of a container one by one"
        )
    array = np.asarray(interop.to_numpy(x, copy=None))
    if array.dtype.kind == "c":  # `to_numpy` refuses all others
        raise OperandError(
            f"assert_bits_equal: {name} must have a float, integer or bool dtype; got {array.dtype}; compare the real "
            "and imaginary parts one by one"
        )
    return array


def _line(mismatch: Mismatch, observed: np.ndarray, right: np.ndarray) -> str:
    # `  [0, 17] 0x39 (1.125), expected 0x38 (1), +1 ulp`
    distance, apart = distances(observed[mismatch.index], right[mismatch.index])
    ulps = "" if apart else f", {int(distance):+,} {'ulp' if abs(distance) == 1 else 'ulps'}"
    return f"  {list(mismatch.index)} {mismatch.observed}, expected {mismatch.expected}{ulps}"

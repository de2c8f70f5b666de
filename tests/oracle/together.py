"""f8ref.numpy, whose work the engine does too, at every width that runs here: AssertionError if a bit differs.

Takes the place of `f8ref.numpy` in the tests of the oracle, so that the engine has the same ones.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import f8ref.numpy
from f8emu.native import library
from f8emu.numpy import emulation

OF_ENGINE = ("scaled_mm", "scaled_grouped_mm", "mm", "amax", "quantize")


def __getattr__(name: str) -> Any:
    verb = getattr(f8ref.numpy, name)
    return _together(verb, getattr(emulation, name)) if name in OF_ENGINE else verb


def _together(verb: Callable[..., np.ndarray], of_engine: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def call(*args: Any, **options: Any) -> np.ndarray:
        result = verb(*args, **options)
        for width in library.widths():
            observed = of_engine(*args, **options, width=width)
            assert observed.dtype == result.dtype and observed.shape == result.shape, width
            assert observed.tobytes() == result.tobytes(), f"{width} differs from the oracle"
        return result

    return call


def scale_from_amax(*args: Any, **options: Any) -> Any:
    """The engine has it in one width."""
    result, of_engine = (verb(*args, **options) for verb in (f8ref.numpy.scale_from_amax, emulation.scale_from_amax))
    assert [x.tobytes() for x in of_engine] == [x.tobytes() for x in result]
    return result

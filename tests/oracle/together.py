"""f8ref.numpy, whose GEMMs the engine computes too, at every width that runs here: AssertionError if a bit differs.

Takes the place of `f8ref.numpy` in the tests of the oracle, so that the engine has the same ones.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import f8ref.numpy
from f8emu.native import library
from f8emu.numpy import emulation

GEMMS = ("scaled_mm", "scaled_grouped_mm", "mm")


def __getattr__(name: str) -> Any:
    verb = getattr(f8ref.numpy, name)
    return _together(verb, getattr(emulation, name)) if name in GEMMS else verb


def _together(verb: Callable[..., np.ndarray], of_engine: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def call(*args: Any, **options: Any) -> np.ndarray:
        result = verb(*args, **options)
        for width in library.widths():
            found = of_engine(*args, **options, width=width)
            assert found.dtype == result.dtype and found.shape == result.shape, width
            assert found.tobytes() == result.tobytes(), f"{width} differs from the oracle"
        return result

    return call

"""The matrices that every package and every dialect quantizes, and the dtypes in which they do."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPE = (256, 512)
SWIZZLED = ((1, 1), (128, 4), (129, 5), (300, 3), (31, 9))
"""Shapes of scales, odd ones too, that are brought into the swizzled layout."""
GROUPED, GROUP_ENDS = (300, 12), ((130, 130, 300), (3, 8, 12))
"""A shape, and the ends of groups of its rows, and of its blocks."""


def tables(dtype: str) -> dict[str, NDArray[Any]]:
    """Name -> matrix of `dtype`. The blocks of every kind differ in amax, so that an exchange is seen."""
    random = np.random.default_rng(41)
    rows = random.standard_normal(SHAPE) * np.exp2(random.integers(-20, 12, (SHAPE[0], 1)))
    steps = np.exp2(random.integers(-6, 6, (SHAPE[0] // 128, SHAPE[1] // 32))).repeat(128, 0).repeat(32, 1)
    matrices = {"random": (rows * steps).astype(np.float32), "nasty": _nasty(random), "near": _near(random)}
    if dtype == "float16":
        matrices = {name: x.clip(-65000, 65000) for name, x in matrices.items()}
    with np.errstate(over="ignore"):
        return {name: x.astype(DTYPES[dtype]) for name, x in (matrices | {"special": _special()}).items()}


def scales_to_swizzle(shape: tuple[int, int]) -> NDArray[np.uint8]:
    return np.random.default_rng(43).integers(1, 255, shape, np.uint8)


def _nasty(random: np.random.Generator) -> NDArray[np.float32]:
    """Zeros, tiny, subnormal and huge rows; blocks of zeros; quotients that tie. No NaN, no infinity."""
    x = random.standard_normal(SHAPE)
    x[:, 128:256] = np.linspace(-448, 448, SHAPE[0])[:, None] * np.linspace(1, 1.0625, 128)
    for row, factor in enumerate((0.0, -0.0, 1e-30, 1e-42, 3e37, 1e-5, 1e-7, 1e-8, 1e-10, 1e-12, 1e-20, 6e4, 1e-3)):
        x[row::16] = random.uniform(-1, 1, x[row::16].shape) * factor
    x[128:, 256:384] = 0.0
    x[:128, 384:] *= 1e-9
    x[128:, 384:] = -0.0
    return x.astype(np.float32)


def _near(random: np.random.Generator) -> NDArray[np.float32]:
    """Amaxes of each 32 columns a few units in the last place from 448 * 2^k and from 2^k, for every rule of 2^k."""
    x = random.uniform(-1, 1, SHAPE).astype(np.float32)
    exponents = random.integers(-60, 60, (SHAPE[0], SHAPE[1] // 32))
    ends = np.where(random.random(exponents.shape) < 0.5, 448.0, 1.75) * np.exp2(exponents)
    ends = ends.astype(np.float32).view(np.int32) + random.integers(-2, 3, exponents.shape, dtype=np.int32)
    largest = ends.view(np.float32)
    x *= largest.repeat(32, 1) * np.float32(0.99)
    x[:, ::32] = largest
    return x


def _special() -> NDArray[np.float32]:
    """NaN, both infinities and a number near the largest float32, each in a block of its own."""
    x = np.random.default_rng(42).standard_normal(SHAPE).astype(np.float32)
    for number, (row, column) in enumerate(((3, 5), (3, 133), (130, 261), (140, 400))):
        x[row, column] = (np.nan, np.inf, -np.inf, 3.4e38)[number]
    return x

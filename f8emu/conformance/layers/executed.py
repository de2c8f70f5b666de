"""GEMMs as the engines of a layer that trains got them, and which GEMM of the recipe each one is.

Compiled code calls GEMMs in the order of its compiler, so they are told apart by their sizes (`padded`).
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from f8emu.conformance.layers.layer import LayerCase, Place

Parts = dict[str, np.ndarray]
_MULTIPLES = (4, 16, 16)
"""Rows of a, rows of b and the summed dimension are zero-padded to no more than these."""
_ALONE = threading.Lock()


class Tap(NamedTuple):
    """A function that computes GEMMs: `(a, b, ...)`, or with scales `(a, b, scale_a, scale_b, ...)`."""

    module: str
    attribute: str
    """Dotted, from the module."""
    is_scaled: bool


def engine_taps(package: str) -> tuple[Tap, ...]:
    """Where the engines of `f8emu.torch` or `f8emu.jax` are entered."""
    return tuple(
        Tap(f"{package}.gemm.{engine}", verb, verb == "scaled_mm")
        for engine in ("emulation", "hardware")
        for verb in ("scaled_mm", "mm")
    )


@contextmanager
def alone() -> Iterator[None]:
    """One case at a time, without warnings: taps are on functions that all threads share."""
    with _ALONE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Executed(NamedTuple):
    """One GEMM as its engine got it, its operands seen as `[rows, summed dimension]`, zero-padded."""

    a: np.ndarray
    b: np.ndarray
    scale_a: np.ndarray | None
    scale_b: np.ndarray | None
    product: np.ndarray


class Wanted(NamedTuple):
    """One GEMM of the recipe."""

    place: Place
    name: str
    sizes: tuple[int, int, int]
    """Rows of a, rows of b, summed dimension."""


def gemm_parts(case: LayerCase, found: tuple[Wanted, Executed | None]) -> Parts:
    """Operands and product without their padding; nothing of a GEMM that did not run."""
    (place, name, (rows_a, rows_b, k)), gemm = found
    if gemm is None:
        return {}
    parts: Parts = {}
    granularities = case.recipe.gemms[name].scaled_gemm_granularities
    operands = ((gemm.a, gemm.scale_a, rows_a), (gemm.b, gemm.scale_b, rows_b))
    for side, (codes, scale, rows), granularity in zip("ab", operands, granularities, strict=True):
        if scale is not None:
            scale_rows, scale_columns = granularity.scale_shape(rows, k)
            parts[f"{name}.{side}.scale"] = scale[:scale_rows, :scale_columns]
        parts[f"{name}.{side}.codes"] = codes[:rows, :k]
        beyond = codes.view(f"u{codes.itemsize}").copy()
        beyond[:rows, :k] = 0
        parts[f"{name}.{side}.padding"] = np.array(np.count_nonzero(beyond))
    parts[f"{name}.product"] = gemm.product[:rows_a, :rows_b]
    return {case.part(place, part): array for part, array in parts.items()}


def matched(wanted: list[Wanted], executed: list[Executed]) -> Iterator[tuple[Wanted, Executed | None]]:
    """Which GEMM of the recipe each one is: by its sizes, or where they say nothing by the order of the calls."""
    left = list(executed)
    found: list[Executed | None] = []
    for gemm in wanted:
        size = padded(gemm.sizes)
        match = next((one for one in left if padded((len(one.a), *one.b.shape)) == size), None)
        found.append(match)
        left = [one for one in left if one is not match]
    for gemm, match in zip(wanted, found, strict=True):
        yield gemm, match if match is not None or not left else left.pop(0)


def padded(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes, whatever they were padded to."""
    return tuple(-(-size // multiple) for size, multiple in zip(sizes, _MULTIPLES, strict=True))

"""The swizzled layout of block scales: by the formula of cuBLAS's documentation, in numpy and torch, groups too."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8emu.numpy as f8
from f8emu.conformance.arrays import FRAMEWORKS, travelling
from f8emu.spec import OperandError


def _of(backend: str, name: str) -> Callable[..., Any]:
    if backend == "numpy":
        return getattr(f8, name)
    return travelling(FRAMEWORKS[backend](backend), getattr(pytest.importorskip(f"f8emu.{backend}"), name))


def by_loop(scale: np.ndarray, padding: int) -> np.ndarray:
    """A tile after the other, a byte after the other."""
    (rows, blocks), out = scale.shape, []
    for tile_row in range(0, rows, 128):
        for tile_block in range(0, blocks, 4):
            for outer in range(32):
                for inner in range(4):
                    for column in range(4):
                        r, c = tile_row + inner * 32 + outer, tile_block + column
                        out.append(scale[r, c] if r < rows and c < blocks else padding)
    return np.array(out, np.uint8)


BACKEND = pytest.mark.parametrize("backend", ["numpy", "torch"])
SHAPES = [(1, 1), (128, 4), (129, 5), (300, 3), (31, 9), (0, 4), (4, 0)]


@BACKEND
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_and_back(shape: tuple[int, int], backend: str) -> None:
    scale = np.random.default_rng(1).integers(1, 255, shape, np.uint8)
    for padding in (0, 255):
        swizzled = _of(backend, "swizzle_scales")(scale.view(ml_dtypes.float8_e8m0fnu), padding=padding)
        assert swizzled.dtype == ml_dtypes.float8_e8m0fnu
        np.testing.assert_array_equal(swizzled.view(np.uint8), by_loop(scale, padding))
        back = _of(backend, "unswizzle_scales")(swizzled, *shape)
        np.testing.assert_array_equal(back.view(np.uint8), scale)


@BACKEND
@pytest.mark.parametrize("axis", [0, 1])
def test_groups_begin_a_tile_each(axis: int, backend: str) -> None:
    scale = np.random.default_rng(2).integers(1, 255, (300, 11), np.uint8)
    ends = [[130, 130, 290], [3, 8, 9]][axis]
    parts = np.split(scale, ends, axis)[:-1]
    swizzled = _of(backend, "swizzle_scales")(scale, ends=ends, axis=axis, padding=7)
    np.testing.assert_array_equal(swizzled, np.concatenate([by_loop(part, 7) for part in parts]))
    of_array = _of(backend, "swizzle_scales")(scale, ends=np.array(ends, np.int32), axis=axis, padding=7)
    np.testing.assert_array_equal(of_array, swizzled)
    back = _of(backend, "unswizzle_scales")(swizzled, 300, 11, ends=ends, axis=axis)
    np.moveaxis(scale, axis, 0)[ends[-1] :] = 0
    np.testing.assert_array_equal(back, scale)


@BACKEND
def test_a_batch_and_a_longer_buffer(backend: str) -> None:
    scale = np.random.default_rng(3).integers(1, 255, (2, 5, 6), np.uint8)
    swizzled = _of(backend, "swizzle_scales")(scale)
    np.testing.assert_array_equal(swizzled, np.stack([by_loop(part, 0) for part in scale]))
    longer = np.pad(swizzled, ((0, 0), (0, 9)), constant_values=3)
    np.testing.assert_array_equal(_of(backend, "unswizzle_scales")(longer, 5, 6), scale)


@BACKEND
def test_refusals(backend: str) -> None:
    swizzle, unswizzle = _of(backend, "swizzle_scales"), _of(backend, "unswizzle_scales")
    scale = np.zeros((4, 4), np.uint8)
    with pytest.raises(OperandError, match="must be bytes"):
        swizzle(scale.astype(np.float32))
    with pytest.raises(OperandError, match=r"\[rows, blocks\]"):
        swizzle(scale[0])
    with pytest.raises(OperandError, match="without ends"):
        swizzle(scale[None], ends=[4])
    for ends in ([3, 2], [5]):
        with pytest.raises(OperandError, match="ascend up to 4"):
            swizzle(scale, ends=ends)
    for ends in ((1.0, 4.0), ["4"], 4):
        with pytest.raises(OperandError, match="ends must be integers, one for each group; got"):
            swizzle(scale, ends=ends)
    for padding in (256, -1, 1.5, "0"):
        with pytest.raises(OperandError, match=f"padding must be a byte, .* got {padding!r}"):
            swizzle(scale, padding=padding)
    with pytest.raises(OperandError, match=r"\[rows, blocks\]"):
        unswizzle(scale.ravel(), 4, -1)
    with pytest.raises(OperandError, match="512 bytes or more"):
        unswizzle(scale.ravel(), 4, 4)

"""Casts by the engine against `f8ref.numpy`, every bit, at every width that this machine has."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.native import cast as native
from f8emu.native import library
from f8emu.spec import FLOAT8, E8M0Rule, Format, Granularity, ScaleRule
from f8emu.spec.formats import BFLOAT16, FLOAT16, FLOAT32
from f8ref import numpy as oracle

if library.unavailable():
    pytest.skip(str(library.unavailable()), allow_module_level=True)

SHAPES = ((1, 1), (3, 5), (70, 129), (300, 200), (1, 70), (70, 1))
RULES = (
    ScaleRule(),
    ScaleRule(power_of_two=True),
    ScaleRule(amax_floor=2.0**-40),
    *(ScaleRule(e8m0=rule) for rule in E8M0Rule),
)
ALL = native.FIND + native.SCALE + native.ENCODE


def _dtype(format: Format) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if format is BFLOAT16 else format.name)


def _run(x: Any, granularity: Granularity, format: Format, rule: ScaleRule, order: str, **options: Any) -> list[Any]:
    """Amaxes, inv_scales, scales and codes, made in one call or in a call each."""
    shape = granularity.scale_shape(*x.shape)
    dtypes = (np.float32, np.float32, _dtype(rule.scale_format))
    grids = [np.full(shape[::-1], -1, np.float32).astype(dtype).T for dtype in dtypes]
    codes = np.full(x.shape, 0x55, np.uint8) if order == "C" else np.full(x.shape[::-1], 0x55, np.uint8).T
    strides = [stride // 4 for stride in grids[0].strides]
    grid = native.Grid(*[array.ctypes.data for array in grids], *strides)
    row_stride, k_stride = (stride // x.itemsize for stride in x.strides)
    of_codes = native.Codes(codes.ctypes.data, *codes.strides)
    values = native.Values(x.ctypes.data, x.shape[0], x.shape[1], row_stride, k_stride, x.dtype.name)
    for stages in options.pop("stages"):
        native.run(values, granularity, grid, format, rule, of_codes, stages, **options)
    return [*grids, codes]


def _bits(x: Any) -> Any:
    """All bits; NaN scales are one NaN."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32) if x.dtype == np.float32 else x.view(np.uint8)


def _values(rng: np.random.Generator, shape: tuple[int, int], format: Format, kind: str, order: str) -> Any:
    """Part of a larger matrix, so that strides are not sizes."""
    dtype, whole = _dtype(format), (shape[0] + 3, shape[1] + 5)
    if kind == "every code":
        x = rng.integers(0, 1 << format.bits, whole).astype(f"u{dtype.itemsize}").view(dtype)
    else:
        x = (rng.standard_normal(whole) * 2.0 ** rng.integers(-18, 8, whole)).astype(np.float32).astype(dtype)
    x = x if order == "C" else np.ascontiguousarray(x.T).T
    return x[1 : 1 + shape[0], 2 : 2 + shape[1]]


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_amaxes_scales_and_codes_equal_the_oracle(format: Format, granularity: Granularity) -> None:
    check_casts(format, granularity, library.widths())


def check_casts(format: Format, granularity: Granularity, widths: Sequence[str]) -> None:
    rng = np.random.default_rng(len(format.name) + len(granularity.value))
    cases = [
        (shape, dtype, kind, order, out_order)
        for shape in SHAPES
        for dtype in (FLOAT32, BFLOAT16, FLOAT16)
        for kind in ("every code", "normal")
        for order in "CF"
        for out_order in "CF"
    ]
    for i, (shape, dtype, kind, order, out_order) in enumerate(cases):
        x, rule = _values(rng, shape, dtype, kind, order), RULES[i % len(RULES)]
        stages = (ALL,) if i % 2 else (native.FIND, native.SCALE, native.ENCODE)
        expected = oracle.amax(x, granularity)
        scales = oracle.scale_from_amax(expected, format, rule)
        wanted = oracle.quantize(x, scales.inv_scale, format, granularity).view(np.uint8)
        for width in widths:
            name = f"{width} {cases[i]}"
            amax, inv_scale, scale, codes = _run(
                x, granularity, format, rule, out_order, stages=stages, threads=3, width=width
            )
            for observed, right in ((inv_scale, scales.inv_scale), (scale, scales.scale), (codes, wanted)):
                np.testing.assert_array_equal(_bits(observed), _bits(right), name)
            np.testing.assert_array_equal(amax.view(np.uint32), expected.view(np.uint32), name)


@pytest.mark.parametrize("width", library.widths())
def test_parts_on_threads_equal_the_oracle(width) -> None:
    """Matrices of many parts, whose amaxes join."""
    rng = np.random.default_rng(0)
    x = _values(rng, (700, 900), FLOAT32, "normal", "C")
    for granularity in Granularity:
        for matrix in (x, x.T):
            amax, _, _, codes = _run(
                matrix, granularity, FLOAT8[0], RULES[0], "C", stages=(ALL,), threads=3, width=width
            )
            expected = oracle.amax(matrix, granularity)
            inv_scale = oracle.scale_from_amax(expected, FLOAT8[0], RULES[0]).inv_scale
            np.testing.assert_array_equal(amax, expected)
            wanted = oracle.quantize(matrix, inv_scale, FLOAT8[0], granularity).view(np.uint8)
            np.testing.assert_array_equal(codes, wanted)


@pytest.mark.parametrize("width", library.widths())
@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_every_16_bit_input_is_cast_as_the_oracle_casts_it(format, width) -> None:
    for dtype in (BFLOAT16, FLOAT16):
        x = np.arange(65536, dtype=np.uint16).view(_dtype(dtype)).reshape(256, 256)
        unit = np.ones((1, 1), np.float32)
        codes = np.empty(x.shape, np.uint8)
        native.run(
            native.Values(x.ctypes.data, *x.shape, 256, 1, x.dtype.name),
            Granularity.TENSORWISE,
            native.Grid(0, unit.ctypes.data, 0, 1, 1),
            format,
            None,
            native.Codes(codes.ctypes.data, 256, 1),
            native.ENCODE,
            threads=1,
            width=width,
        )
        np.testing.assert_array_equal(codes, oracle.quantize(x, unit, format).view(np.uint8))

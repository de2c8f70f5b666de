"""The engine against `f8ref.numpy`, every output bit, at every width that this machine has."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.native import gemm as native
from f8emu.native import library
from f8emu.spec import CHIPS, HOPPER, AccumulationModel, Chip, Format, Granularity
from f8emu.spec.formats import BFLOAT16, FLOAT32
from f8emu.spec.gemm_call import GemmCall
from f8ref import numpy as oracle

if library.unavailable():
    pytest.skip(str(library.unavailable()), allow_module_level=True)

SHAPES = ((5, 70, 96), (33, 17, 400), (4, 64, 1), (1, 3, 64), (68, 130, 130))
"""M, N, K with tails of every kind: rows, columns, steps, promotions, panels of K."""
CASES = [
    (chip, formats, fast) for chip in CHIPS.values() for formats in chip.format_pairs for fast in (False, True)
] + [(chip, (BFLOAT16, BFLOAT16), False) for chip in CHIPS.values()]


def _random(rng: np.random.Generator, shape: tuple[int, ...], format: Format, kind: str) -> Any:
    dtype = np.dtype(getattr(ml_dtypes, format.name))
    if kind == "every code":
        return rng.integers(0, 1 << format.bits, shape).astype(f"u{dtype.itemsize}").view(dtype)
    if kind == "one sign":  # the largest significand: sums are as large as they can be
        return np.full(shape, (2 - 2.0**-format.fraction_bits) * 2.0 ** rng.integers(-4, 4)).astype(dtype)
    x = rng.standard_normal(shape)
    if kind == "tiny":  # products and accumulators about the smallest float32, between zeros
        x = x * 2.0 ** rng.integers(-78, -40, shape) * rng.integers(0, 2, (1, shape[1]))
    if kind == "wide range":
        x = x * 30 * 2.0 ** rng.integers(-20, 6, shape)
    return np.clip(x, -240, 240).astype(np.float32).astype(dtype)


def _matrix(x: Any, scales: tuple[Any, ...] = ()) -> native.Matrix:
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return native.matrix(x.ctypes.data, strides, x.dtype.name, *scales)


def _run(a: Any, b: Any, call: GemmCall, out: Any, width: str, bias: Any = None, **options: Any) -> Any:
    scales = [options.pop(name, ()) for name in ("of_a", "of_b")]
    row_stride, column_stride = (stride // out.itemsize for stride in out.strides)
    of_bias: tuple[int, int, str] = (0, 0, "float32") if bias is None else (bias.ctypes.data, 1, bias.dtype.name)
    output = native.Output(out.ctypes.data, row_stride, column_stride, out.dtype.name, *of_bias)
    described = native.described(call, _matrix(a, scales[0]), _matrix(b, scales[1]), output)
    native.run(described, width=width, threads=options.pop("threads", 2))
    return out


def _unscaled(chip: Chip, model: AccumulationModel, *sizes: int) -> GemmCall:
    """A GEMM whose output is the accumulator."""
    chip = replace(chip, bfloat16=model)
    return GemmCall(call="mm", sizes=sizes, formats=(BFLOAT16, BFLOAT16), out=FLOAT32, chip=chip)  # type: ignore[arg-type]


def _bits(x: Any) -> Any:
    return x.view(f"u{x.itemsize}")


@pytest.mark.parametrize("kind", ["normal", "wide range", "every code", "one sign", "tiny"])
def test_accumulators_of_every_chip(kind: str) -> None:
    check_accumulators(kind, library.widths())


def check_accumulators(kind: str, widths: Sequence[str], shapes: Sequence[tuple[int, int, int]] = SHAPES) -> None:
    rng = np.random.default_rng(0)
    for chip, formats, fast in CASES:
        for m, n, k in shapes:
            a, b = _random(rng, (m, k), formats[0], kind), _random(rng, (n, k), formats[1], kind)
            if formats[0] == BFLOAT16:
                expected = oracle.mm(a, b.T, out_dtype="float32", chip=chip)
                model = chip.bfloat16
            else:
                units = np.ones((m, 1), np.float32), np.ones((1, n), np.float32)
                rowwise: dict[str, Any] = {"granularity_a": Granularity.ROWWISE, "granularity_b": Granularity.ROWWISE}
                expected = oracle.scaled_mm(
                    a, b.T, *units, **rowwise, out_dtype="float32", use_fast_accum=fast, chip=chip
                )
                model = chip.float8_fast if fast else chip.float8
            for width in widths:
                out = _run(a, b, _unscaled(chip, model, m, n, k), np.empty((m, n), np.float32), width)
                case = f"{width} {chip} {formats} {fast} {(m, n, k)}"
                np.testing.assert_array_equal(_bits(out), _bits(expected), case)


@pytest.mark.parametrize("pair", HOPPER.granularity_pairs, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_epilogues_slices_and_strides(pair: tuple[Granularity, Granularity]) -> None:
    check_epilogues(pair, library.widths())


def check_epilogues(pair: tuple[Granularity, Granularity], widths: Sequence[str]) -> None:
    rng = np.random.default_rng(1)
    m, n, k = 36, 144, 1300
    chip: Chip = HOPPER
    is_blockwise = pair[0].is_blockwise
    a, b = (_random(rng, (rows, 2 * k), chip.format_pairs[0][0], "wide range")[:, ::2] for rows in (m, n))
    a[0], b[3, 5] = 0, np.nan
    scale_a, scale_b = (
        (rng.standard_normal(g.scale_shape(rows, k)) * 2.0 ** rng.integers(-140, 100)).astype(np.float32)
        for g, rows in zip(pair, (m, n), strict=True)
    )
    scales = [(g, scale.ctypes.data, (scale.shape[1], 1)) for g, scale in zip(pair, (scale_a, scale_b), strict=True)]
    for fast in (False,) if is_blockwise else (False, True):
        for out_dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)):
            for split_k in (1, 2, 3):
                bias = None if is_blockwise else rng.standard_normal(n).astype(out_dtype)
                expected = oracle.scaled_mm(
                    a,
                    b.T,
                    scale_a,
                    scale_b.T,
                    granularity_a=pair[0],
                    granularity_b=pair[1],
                    bias=bias,
                    out_dtype=out_dtype.name,
                    use_fast_accum=fast,
                    split_k=split_k,
                )
                options: dict[str, Any] = {"of_a": scales[0], "of_b": scales[1]}
                call = GemmCall(
                    call="scaled_mm",
                    sizes=(m, n, k),
                    formats=chip.format_pairs[0],
                    granularities=pair,
                    use_fast_accum=fast,
                    split_k=split_k,
                )
                for width in widths:
                    out = np.empty((n, m), out_dtype).T  # columns first
                    _run(a, b, call, out, width, bias, **options)
                    np.testing.assert_array_equal(_bits(out), _bits(expected), f"{width} {fast} {out_dtype} {split_k}")


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_change_nothing(threads: int) -> None:
    rng = np.random.default_rng(2)
    a, b = (_random(rng, (rows, 512), HOPPER.format_pairs[0][0], "normal") for rows in (301, 200))
    outs = [np.empty((301, 200), np.float32) for _ in range(2)]
    call = _unscaled(HOPPER, HOPPER.float8, 301, 200, 512)
    _run(a, b, call, outs[0], library.widths()[0], threads=1)
    _run(a, b, call, outs[1], library.widths()[-1], threads=threads)
    np.testing.assert_array_equal(_bits(outs[0]), _bits(outs[1]))

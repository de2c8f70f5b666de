"""MXFP8 by the engine against `f8ref.numpy`, every output bit, at every width that this machine has."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.native import library
from f8emu.native.gemm import fits
from f8emu.numpy import emulation
from f8emu.spec import BLACKWELL_TCGEN05, E4M3FN, E5M2, RTX_BLACKWELL, Format, Granularity, Rounding
from f8ref import numpy as oracle

if library.unavailable():
    pytest.skip(str(library.unavailable()), allow_module_level=True)

PAIRS = tuple((a, b) for a in (E4M3FN, E5M2) for b in (E4M3FN, E5M2))
CHIPS = [replace(chip, format_pairs=PAIRS) for chip in (BLACKWELL_TCGEN05, RTX_BLACKWELL)]
"""Libraries refuse E5M2 by E5M2, the instruction does not."""
BYTES = {
    "every byte": (0, 256),
    "narrow": (117, 138),  # every result is a normal number
    "tiny": (0, 41),  # of which every product is cut to 0
    "huge": (215, 256),
    "subnormal": (44, 80),  # results about the smallest float32, and terms about the exponent of zero [MX-3]
    "large": (170, 195),  # results about the largest
}
CODES = ("every code", "finite", "sparse")
SHAPES = ((5, 70, 96), (33, 17, 400), (4, 64, 1), (1, 3, 64), (9, 65, 33), (36, 130, 130))
"""M, N, K with tails of every kind."""
MICROSCALED: Any = dict.fromkeys(("granularity_a", "granularity_b"), Granularity.BLOCKWISE_1X32)


def codes(rng: np.random.Generator, shape: tuple[int, int], format: Format, kind: str) -> Any:
    patterns = rng.integers(0, 256, shape, dtype=np.uint8)
    if kind != "every code":  # in which most sums of some length are NaN
        patterns = np.where((patterns & 0x7F) > format.max_code, patterns & 0x83, patterns)
    if kind == "sparse":
        patterns = np.where(rng.integers(0, 40, shape) > 0, patterns & 0x80, patterns)
    return patterns.view(np.dtype(getattr(ml_dtypes, format.name)))


def scales(rng: np.random.Generator, rows: int, k: int, kind: str) -> Any:
    return rng.integers(*BYTES[kind], (rows, -(-k // 32)), dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)


def assert_equal(observed: Any, expected: Any, case: str) -> None:
    np.testing.assert_array_equal(observed.view(f"u{observed.itemsize}"), expected.view(f"u{expected.itemsize}"), case)


def check_products(widths: Sequence[str], shapes: Sequence[tuple[int, int, int]], seed: int = 0) -> int:
    """The number of outputs of which every width gives the oracle's bits."""
    rng, outputs = np.random.default_rng(seed), 0
    for (m, n, k), pair, of_codes, of_scales in product(shapes, PAIRS, CODES, BYTES):
        a, b = (codes(rng, (rows, k), format, of_codes) for rows, format in zip((m, n), pair, strict=True))
        operands = a, b.T, scales(rng, m, k, of_scales), scales(rng, n, k, of_scales).T
        options: dict[str, Any] = {**MICROSCALED, "out_dtype": "float32", "chip": CHIPS[outputs % 2]}
        expected = oracle.scaled_mm(*operands, **options)
        for width in widths:
            observed = emulation.scaled_mm(*operands, width=width, **options)
            assert_equal(observed, expected, f"{width} {(m, n, k)} {pair} {of_codes} {of_scales}")
        outputs += expected.size
    return outputs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int]) -> None:
    check_products(library.widths(), [shape])


def test_every_pair_of_bytes() -> None:
    check_bytes(library.widths())


def check_bytes(widths: Sequence[str]) -> None:
    """[MX-1], [MX-2] Of a block of zeros, and of one that is not, after a block whose sum is about 1."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    scale = np.concatenate([np.full_like(every, 127), every], axis=1).view(ml_dtypes.float8_e8m0fnu)
    for value in (0.0, -1.25):
        x = np.repeat(np.array([[1.125, value]], ml_dtypes.float8_e4m3fn), 32, axis=1).repeat(256, axis=0)
        operands = x, x.T, scale, scale.T
        options: dict[str, Any] = {**MICROSCALED, "out_dtype": "float32", "chip": CHIPS[0]}
        expected = oracle.scaled_mm(*operands, **options)
        for width in widths:
            assert_equal(emulation.scaled_mm(*operands, width=width, **options), expected, f"{width} {value}")


@pytest.mark.parametrize("threads", [1, 3])
def test_slices_biases_outputs_and_strides(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_threads", lambda: threads)
    check_options(library.widths())


def check_options(widths: Sequence[str]) -> None:
    rng = np.random.default_rng(1)
    m, n, k = 133, 144, 1290
    a, b = (codes(rng, (rows, 2 * k), E4M3FN, "finite")[:, ::2] for rows in (m, n))
    scale_a, scale_b = np.asfortranarray(scales(rng, m, k, "narrow")), scales(rng, 2 * n, k, "narrow")[::2]
    for out_dtype, split_k in product(("float32", "bfloat16", "float16"), (1, 2, 3)):
        bias = None if split_k == 2 else (1e6 * rng.standard_normal(n)).astype(np.float32)
        options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype, "split_k": split_k, "chip": CHIPS[0]}
        expected = oracle.scaled_mm(a, b.T, scale_a, scale_b.T, **MICROSCALED, **options)
        for width in widths:
            observed = emulation.scaled_mm(a, b.T, scale_a, scale_b.T, **MICROSCALED, **options, width=width)
            assert_equal(observed, expected, f"{width} {out_dtype} {split_k}")


MODELS: dict[str, dict[str, Any]] = {
    "as Hopper's": {"aligned_fraction_bits": 13, "result_fraction_bits": 13},
    "a promotion inside a block": {"step_k": 16, "promote_k": 48},
    "steps of 8": {"step_k": 8},
    "rounded": {"rounding": Rounding.NEAREST_EVEN},
    "no exponent of zero": {"zero_exponent": None},
    "an order of K": {"order": (*range(31, -1, -1),)},
}


@pytest.mark.parametrize("name", MODELS)
def test_other_models(name: str) -> None:
    """Those of a user's chip, which the engine has too."""
    rng = np.random.default_rng(2)
    assert CHIPS[0].microscaled is not None
    chip = replace(CHIPS[0], microscaled=replace(CHIPS[0].microscaled, **MODELS[name]))
    assert fits(chip.accumulation((Granularity.BLOCKWISE_1X32, Granularity.BLOCKWISE_1X32)))
    for kind in ("narrow", "subnormal"):
        a, b = (codes(rng, (rows, 200), E4M3FN, "finite") for rows in (6, 19))
        operands = a, b.T, scales(rng, 6, 200, kind), scales(rng, 19, 200, kind).T
        options: dict[str, Any] = {**MICROSCALED, "out_dtype": "float32", "chip": chip}
        expected = oracle.scaled_mm(*operands, **options)
        for width in library.widths():
            assert_equal(emulation.scaled_mm(*operands, **options, width=width), expected, f"{width} {kind}")

"""The GEMMs of f8ref.numpy and f8ref.jax, written apart from the same spec: equal bits on drawn cases.

XLA takes long to compile a program, so that all kinds of operands meet in one: of each pair of formats, kind of
accumulation, granularities and S. Casts and scales of JAX are the matter of `tests/jax_path/test_values`.
"""

import itertools
from typing import Any

import numpy as np
import pytest

import f8ref.jax
from f8emu.conformance.cases.distributions import draw as values
from f8emu.conformance.cases.distributions import draw_codes
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, Format, Granularity
from tests.oracle import together
from tests.oracle.exactly import assert_same_bits
from tests.oracle.test_exact_vs_numpy import EXPONENTS, FORMAT_PAIRS, GRANULARITIES, draw_bfloat16, draw_scales

M, K, N = 13, 300, 21
KINDS = ("normal", "bits", "subnormals", "cancellation", "specials")
ONE = np.ones((1, 1), np.float32)
TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
EPILOGUES: list[tuple[Granularity, str | None, str]] = [
    (TENSORWISE, None, "float32"),
    (ROWWISE, "float32", "float16"),
    (ROWWISE, None, "float32"),
    (TENSORWISE, "bfloat16", "bfloat16"),
]
"""Scales, bias, output; half of them beside each kind of accumulation."""


def scales(draw: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One in ten is tiny, signed or no number."""
    unusual = draw_scales(draw, draw.choice(["subnormal", "signed", "special"]), shape)
    return np.where(draw.random(shape) < 0.1, unusual, draw_scales(draw, "ordinary", shape))


def assert_agree(verb: str, *operands: Any, **options: Any) -> None:
    assert_same_bits(getattr(f8ref.jax, verb)(*operands, **options), getattr(together, verb)(*operands, **options))


@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_scaled_mm(formats: tuple[Format, Format], use_fast_accum: bool) -> None:
    draw = np.random.default_rng(80)
    for i, kinds in enumerate(itertools.product(KINDS, KINDS)):
        granularity, bias, out_dtype = EPILOGUES[i // 2 % 2 + 2 * use_fast_accum]
        assert_agree(
            "scaled_mm",
            draw_codes(kinds[0], (M, K), formats[0], "a"),
            draw_codes(kinds[1], (N, K), formats[1], "b").T,
            scales(draw, granularity.scale_shape(M, K)),
            scales(draw, granularity.scale_shape(N, K)).T,
            granularity_a=granularity,
            granularity_b=granularity,
            bias=None if bias is None else draw.standard_normal(N).astype(bias),
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )


BLOCKWISE = list(zip(GRANULARITIES[2:], (2, 3, 9), strict=True))
"""Of JAX another S for each pair; `test_exact_vs_numpy` has all of them."""


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(("pair", "split_k"), BLOCKWISE, ids=[f"{p[0].value}-{p[1].value}" for p, _ in BLOCKWISE])
def test_blockwise(pair: tuple[Granularity, Granularity], split_k: int, is_split: bool) -> None:
    draw = np.random.default_rng(81)
    m, n, k = (5, 150, 1700) if is_split else (140, 150, K)
    for kind in KINDS:
        a, b = draw_codes(kind, (m, k), E4M3FN, "a"), draw_codes(kind, (n, k), E4M3FN, "b")
        scale_a, scale_b = (scales(draw, g.scale_shape(rows, k)) for g, rows in zip(pair, (m, n), strict=True))
        options: dict[str, Any] = {"granularity_a": pair[0], "granularity_b": pair[1], "out_dtype": "float32"}
        assert_agree("scaled_mm", a, b.T, scale_a, scale_b.T, split_k=split_k if is_split else 1, **options)


@pytest.mark.parametrize("split_k", [2, 3, 7])
def test_split_k(split_k: int) -> None:
    a, b = draw_codes("specials", (M, 1000), E5M2, "a"), draw_codes("bits", (N, 1000), E4M3FN, "b")
    assert_agree("scaled_mm", a, b.T, ONE, ONE, out_dtype="float32", use_fast_accum=True, split_k=split_k)


def test_grouped() -> None:
    draw = np.random.default_rng(83)
    a, b = draw_codes("bits", (M, K), E4M3FN, "a"), draw_codes("bits", (3 * N, K), E4M3FN, "b").reshape(3, N, K)
    for ends in ([5, 5, M], [0, 1, M], [M, M, M]):
        factors = scales(draw, (1, M))[0], scales(draw, (3, N))
        offs = np.array(ends, np.int32)
        assert_agree("scaled_grouped_mm", a, b.transpose(0, 2, 1), *factors, offs, out_dtype="float32")


@pytest.mark.parametrize("split_k", [1, 3])
def test_bfloat16_mm(split_k: int) -> None:
    draw = np.random.default_rng(84)
    for exponents in EXPONENTS:
        a, b = (draw_bfloat16(draw, exponents, shape) for shape in ((M, K), (N, K)))
        assert_agree("mm", a, b.T, out_dtype="float32", split_k=split_k)
    a, b = (values("specials", shape, BFLOAT16, split_k) for shape in ((M, K), (N, K)))
    assert_agree("mm", a, b.T, out_dtype="float16", split_k=split_k)

"""A second chip is data: the three implementations agree on chips that nobody built, and each number of one counts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import f8ref.exact as exact
import tests.oracle.together as reference
from f8emu.conformance.cases.distributions import draw_codes
from f8emu.spec import E4M3FN, E5M2, FLOAT32, HOPPER, AccumulationModel, Chip, Evidence, Granularity, UnsupportedError

jax_reference = pytest.importorskip("f8ref.jax")

M, N, K = 5, 7, 390
# Steps of 16 as Ada has them (NUMERICS 11), everything else unlike Hopper too.
CHAIN = AccumulationModel(
    step_k=16, aligned_fraction_bits=14, result_fraction_bits=12, promote_k=None, split_k_multiple=64
)
OTHER = Chip(
    name="Other",
    evidence=Evidence.LITERATURE,
    capability=None,
    format_pairs=((E4M3FN, E4M3FN), (E5M2, E5M2)),
    block_scaled_format_pairs=((E5M2, E5M2),),
    granularity_pairs=HOPPER.granularity_pairs,
    size_multiple=1,
    vector_multiple=1,
    float8=replace(CHAIN, promote_k=32),
    float8_fast=CHAIN,
    block_scaled=replace(CHAIN, step_k=32, split_k_multiple=128),
    square_split_k_multiple=256,
    bfloat16=replace(HOPPER.bfloat16, step_k=8, split_k_multiple=16),
)
T, R = Granularity.TENSORWISE, Granularity.ROWWISE
V, S = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
GEMMS: dict[str, dict[str, Any]] = {
    "promoted": {},
    "fast": {"use_fast_accum": True},
    "promoted in slices": {"split_k": 2},
    "fast in slices": {"use_fast_accum": True, "split_k": 3},
    "rows": {"granularity_a": R, "granularity_b": R},
    "blocks": {"granularity_a": V, "granularity_b": V},
    "squares": {"granularity_a": V, "granularity_b": S},
    "blocks in slices": {"granularity_a": V, "granularity_b": V, "split_k": 2},
    "squares in slices": {"granularity_a": S, "granularity_b": V, "split_k": 4},
}


def operands(options: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Operands of E5M2, [M, K] and [N, K], and their scales as `scaled_mm` takes them."""
    rng = np.random.default_rng(11)
    pair = options.get("granularity_a", T), options.get("granularity_b", T)
    scales = [rng.uniform(0.5, 2, g.scale_shape(r, K)).astype(np.float32) for g, r in zip(pair, (M, N), strict=True)]
    return draw_codes("normal", (M, K), E5M2, "a"), draw_codes("normal", (N, K), E5M2, "b"), scales[0], scales[1].T


def product(backend: Any, chip: Chip, options: dict[str, Any]) -> np.ndarray:
    a, b, scale_a, scale_b = operands(options)
    out = backend.scaled_mm(a, b.T, scale_a, scale_b, out_dtype="float32", chip=chip, **options)
    return np.asarray(out).view(np.uint32)


def exact_product(chip: Chip, options: dict[str, Any]) -> np.ndarray:
    a, b, scale_a, scale_b = operands(options)
    codes_a, codes_b = a.view(np.uint8).tolist(), b.view(np.uint8).tolist()

    def scales_of(scales: np.ndarray, row: int) -> list[int]:
        return scales[min(row, len(scales) - 1)].view(np.uint32).tolist()  # squares and tensorwise have one row here

    return np.array(
        [
            [
                exact.scaled_dot(
                    codes_a[m],
                    codes_b[n],
                    a_format=E5M2,
                    b_format=E5M2,
                    scale_a=scales_of(np.ascontiguousarray(scale_a), m),
                    scale_b=scales_of(np.ascontiguousarray(scale_b.T), n),
                    out_format=FLOAT32,
                    chip=chip,
                    **options,
                )
                for n in range(N)
            ]
            for m in range(M)
        ],
        np.uint32,
    )


@pytest.mark.parametrize("name", GEMMS)
def test_the_three_agree_on_another_chip(name: str) -> None:
    expected = exact_product(OTHER, GEMMS[name])
    assert np.array_equal(product(reference, OTHER, GEMMS[name]), expected)
    assert np.array_equal(product(jax_reference, OTHER, GEMMS[name]), expected)


def test_bfloat16_on_another_chip() -> None:
    rng = np.random.default_rng(12)
    a, b = (rng.standard_normal(s).astype("bfloat16") for s in ((M, K), (K, N)))
    for split_k in (1, 3):
        codes_a, codes_b = a.view(np.uint16).tolist(), b.T.view(np.uint16).tolist()
        expected = [
            [exact.mm_dot(row, column, out_format=FLOAT32, split_k=split_k, chip=OTHER) for column in codes_b]
            for row in codes_a
        ]
        for backend in (reference, jax_reference):
            out = np.asarray(backend.mm(a, b, out_dtype="float32", split_k=split_k, chip=OTHER))
            assert out.view(np.uint32).tolist() == expected


@pytest.mark.parametrize(
    ("name", "model", "change"),
    [
        ("fast", "float8_fast", {"step_k": 32}),
        ("fast", "float8_fast", {"aligned_fraction_bits": 13}),
        ("fast", "float8_fast", {"result_fraction_bits": 13}),
        ("promoted", "float8", {"promote_k": 64}),
        ("fast in slices", "float8_fast", {"split_k_multiple": 128}),
        ("blocks", "block_scaled", {"step_k": 16}),
        ("blocks in slices", "block_scaled", {"split_k_multiple": 384}),
    ],
)
def test_every_number_of_a_chip_counts(name: str, model: str, change: dict[str, int]) -> None:
    altered = replace(OTHER, **{model: replace(getattr(OTHER, model), **change)})
    assert not np.array_equal(product(reference, altered, GEMMS[name]), product(reference, OTHER, GEMMS[name]))


def test_the_length_of_slices_beside_squares_counts() -> None:
    altered = replace(OTHER, square_split_k_multiple=128)
    options = GEMMS["squares in slices"]
    assert not np.array_equal(product(reference, altered, options), product(reference, OTHER, options))


def test_each_chip_has_its_own_pairs() -> None:
    a, b, scale_a, scale_b = operands({})
    for backend in (reference, jax_reference):
        with pytest.raises(UnsupportedError, match="Hopper multiplies"):
            backend.scaled_mm(a, b.T, scale_a, scale_b)
        with pytest.raises(UnsupportedError, match=r"Other \(unverified\) multiplies"):
            backend.scaled_mm(a.view(E4M3FN.name), b.T, scale_a, scale_b, chip=OTHER)

"""A second chip is data: the three implementations agree on chips that nobody built, and each number of one counts."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tests.oracle.together as reference
from f8emu.conformance.cases.distributions import draw_codes
from f8emu.spec import (
    BLACKWELL_MMA,
    CDNA3,
    CHIPS,
    E4M3FN,
    E5M2,
    HOPPER,
    AccumulationModel,
    Chip,
    Evidence,
    Format,
    Granularity,
    Instruction,
    OperandError,
    UnsupportedError,
)
from f8ref import exact
from tests.oracle.exactly import EXACT, assert_same_bits, codes_of, typed

jax_reference = pytest.importorskip("f8ref.jax")

M, N, K = 5, 7, 390
# Steps of 16 as Ada has them (NUMERICS 9), everything else unlike Hopper too.
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
    return codes_of(backend.scaled_mm(a, b.T, scale_a, scale_b, out_dtype="float32", chip=chip, **options))


@pytest.mark.parametrize("name", GEMMS)
def test_the_three_agree_on_another_chip(name: str) -> None:
    expected = product(EXACT, OTHER, GEMMS[name])
    for backend in (reference, jax_reference):
        assert np.array_equal(product(backend, OTHER, GEMMS[name]), expected)


def test_bfloat16_on_another_chip() -> None:
    rng = np.random.default_rng(12)
    a, b = (rng.standard_normal(s).astype("bfloat16") for s in ((M, K), (K, N)))
    for split_k in (1, 3):
        options: Any = {"out_dtype": "float32", "split_k": split_k, "chip": OTHER}
        for backend in (reference, jax_reference):
            assert_same_bits(backend.mm(a, b, **options), EXACT.mm(a, b, **options))


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


# ---- The profiles of chips: instructions, and GEMMs of what their models have and Hopper has not

K_OF_INSTRUCTION = 37
"""Longer than an instruction, and no multiple of a step or of an order."""
INSTRUCTIONS = [
    (chip, instruction)
    for chip in CHIPS.values()
    for instruction in chip.instructions
    if chip.name == "Hopper" or instruction not in CHIPS["Hopper"].instructions  # what it shares is tested there
    if not instruction.is_microscaled  # those are in test_microscaled
]
OF_JAX = {("Hopper", "float16", 8), ("Blackwell tcgen05", "float32", 8), ("CDNA3", "float32", 16)}
"""(chip, output, bits of an operand): what the GEMMs below do not cover, since each is a program to compile."""


def drawn(rng: np.random.Generator, format: Format, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of all kinds: of any exponent, of like exponents so that sums cancel, and a few that are not finite."""
    any_code = rng.integers(0, 1 << format.bits, shape)
    finite = np.where((any_code & format.magnitude_mask) > format.max_code, any_code & format.fraction_mask, any_code)
    exponent_of_one = format.bias << format.fraction_bits
    near_one = (any_code & (format.sign_mask | format.fraction_mask)) | exponent_of_one
    mixed = np.where(rng.random((shape[0],) + (1,) * (len(shape) - 1)) < 0.4, near_one, finite)
    return np.where(rng.random(shape) < 0.002, any_code, mixed)


@pytest.mark.parametrize(
    ("chip", "instruction"),
    INSTRUCTIONS,
    ids=[f"{c.name} {i.name} {i.out} {i.format_pairs[0][0]}" for c, i in INSTRUCTIONS],
)
def test_the_three_agree_on_every_instruction(chip: Chip, instruction: Instruction) -> None:
    rng = np.random.default_rng(13)
    formats = instruction.format_pairs[min(1, len(instruction.format_pairs) - 1)]
    a, b = (drawn(rng, format, (200, K_OF_INSTRUCTION)) for format in formats)
    c = drawn(rng, instruction.out, (200,))
    expected = [
        exact.mma(*row, a_format=formats[0], b_format=formats[1], out_format=instruction.out, chip=chip)
        for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    operands = typed(a, formats[0]), typed(b, formats[1]), typed(c, instruction.out)
    is_new_to_jax = (chip.name, instruction.out.name, formats[0].bits) in OF_JAX
    for backend in (reference, jax_reference) if is_new_to_jax else (reference,):
        observed = np.asarray(backend.mma(*operands, chip=chip, out_dtype=instruction.out))
        assert codes_of(observed).tolist() == expected, backend.__name__


@pytest.mark.parametrize("chip", [BLACKWELL_MMA, CDNA3], ids=str)
def test_the_three_agree_on_a_gemm_in_slices(chip: Chip) -> None:
    """What their models have and Hopper's has not: an order of K whose tail is padded, conversions, floored sums."""
    rng = np.random.default_rng(17)
    formats, (m, n, k) = chip.format_pairs[1], (3, 4, 390)
    a, b = drawn(rng, formats[0], (m, k)), drawn(rng, formats[1], (n, k))
    scale_a, scale_b = (rng.uniform(0.5, 2, (1, 1)).astype(np.float32) for _ in "ab")
    operands = typed(a, formats[0]), typed(b, formats[1]).T, scale_a, scale_b
    options: Any = {"out_dtype": "float32", "split_k": 3, "chip": chip}
    for backend in (reference, jax_reference):
        assert_same_bits(backend.scaled_mm(*operands, **options), EXACT.scaled_mm(*operands, **options))


@pytest.mark.parametrize("backend", [reference, jax_reference], ids=["numpy", "jax"])
def test_what_mma_refuses(backend: Any) -> None:
    codes = np.zeros((2, 32), ml_dtypes.float8_e4m3fn)
    c = np.zeros(2, np.float32)
    with pytest.raises(OperandError, match=r"mma: a and b must be \[cases, K\] and c \[cases\]"):
        backend.mma(codes, codes[:, :16], c)
    with pytest.raises(OperandError, match="mma: c must"):
        backend.mma(codes, codes, c, out_dtype="float16")
    with pytest.raises(UnsupportedError, match=r"mma: the profile of CDNA3 has the instructions"):
        backend.mma(codes, codes, c, chip=CDNA3)

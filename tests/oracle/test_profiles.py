"""The profiles of chips: exact, numpy and JAX, each written on its own, agree on instructions and on GEMMs of all."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8ref.exact as exact
import f8ref.numpy as reference
from f8emu.spec import (
    BLACKWELL_MMA,
    CDNA3,
    CHIPS,
    FLOAT32,
    Chip,
    Format,
    Instruction,
    OperandError,
    UnsupportedError,
)

jax_reference = pytest.importorskip("f8ref.jax")

K = 37
"""Longer than an instruction, and no multiple of a step or of an order."""
INSTRUCTIONS = [
    (chip, instruction)
    for chip in CHIPS.values()
    for instruction in chip.instructions
    if chip.name == "Hopper" or instruction not in CHIPS["Hopper"].instructions  # what it shares is tested there
]
OF_JAX = {
    ("Hopper", "float16", 8),
    ("Blackwell tcgen05", "float32", 8),
    ("CDNA3", "float32", 16),
}
"""(chip, output, bits of an operand): what the GEMMs below do not cover, since each is a program to compile."""
CODES = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def typed(codes: np.ndarray, format: Format) -> np.ndarray:
    dtype = getattr(ml_dtypes, format.name, None) or np.dtype(format.name)
    return codes.astype(CODES[format.bits]).view(dtype)


def drawn(rng: np.random.Generator, format: Format, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of all kinds: of any exponent, of like exponents so that sums cancel, and a few that are not finite."""
    any_code = rng.integers(0, 1 << format.bits, shape)
    finite = np.where((any_code & format.magnitude_mask) > format.max_code, any_code & format.fraction_mask, any_code)
    one = format.bias << format.fraction_bits
    near_one = (any_code & (format.sign_mask | format.fraction_mask)) | one
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
    a, b = (drawn(rng, format, (200, K)) for format in formats)
    c = drawn(rng, instruction.out, (200,))
    expected = [
        exact.mma(*row, a_format=formats[0], b_format=formats[1], out_format=instruction.out, chip=chip)
        for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    operands = typed(a, formats[0]), typed(b, formats[1]), typed(c, instruction.out)
    is_new_to_jax = (chip.name, instruction.out.name, formats[0].bits) in OF_JAX
    for backend in (reference, jax_reference) if is_new_to_jax else (reference,):
        found = np.asarray(backend.mma(*operands, chip=chip, out_dtype=instruction.out))
        assert found.view(CODES[instruction.out.bits]).tolist() == expected, backend.__name__


@pytest.mark.parametrize("chip", [BLACKWELL_MMA, CDNA3], ids=str)
def test_the_three_agree_on_a_gemm_in_slices(chip: Chip) -> None:
    """What their models have and Hopper's has not: an order of K whose tail is padded, conversions, floored sums."""
    rng = np.random.default_rng(17)
    formats, (m, n, k) = chip.format_pairs[1], (3, 4, 390)
    a, b = drawn(rng, formats[0], (m, k)), drawn(rng, formats[1], (n, k))
    scale_a, scale_b = (rng.uniform(0.5, 2, (1, 1)).astype(np.float32) for _ in "ab")
    expected = [
        [
            exact.scaled_dot(
                row,
                column,
                a_format=formats[0],
                b_format=formats[1],
                scale_a=scale_a.view(np.uint32)[0].tolist(),
                scale_b=scale_b.view(np.uint32)[0].tolist(),
                out_format=FLOAT32,
                split_k=3,
                chip=chip,
            )
            for column in b.tolist()
        ]
        for row in a.tolist()
    ]
    for backend in (reference, jax_reference):
        operands = typed(a, formats[0]), typed(b, formats[1]).T
        options = {"out_dtype": "float32", "split_k": 3, "chip": chip}
        found = np.asarray(backend.scaled_mm(*operands, scale_a, scale_b, **options))
        assert found.view(np.uint32).tolist() == expected, backend.__name__


@pytest.mark.parametrize("backend", [reference, jax_reference], ids=["numpy", "jax"])
def test_what_mma_refuses(backend: Any) -> None:
    codes = np.zeros((2, 32), ml_dtypes.float8_e4m3fn)
    c = np.zeros(2, np.float32)
    with pytest.raises(OperandError, match=r"mma: a and b must be \[cases, K\] and c \[cases\]"):
        backend.mma(codes, codes[:, :16], c)
    with pytest.raises(OperandError, match="mma: c must"):
        backend.mma(codes, codes, c, out_dtype="float16")
    with pytest.raises(UnsupportedError, match=r"mma: the profile of CDNA3 \(unverified\) has the instructions"):
        backend.mma(codes, codes, c, chip=CDNA3)

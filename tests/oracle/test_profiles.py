"""The profiles of chips: exact, numpy and JAX agree on all of them, and the public recordings are what they compute."""

import ml_dtypes
import numpy as np
import pytest

import f8ref.exact as exact
import f8ref.numpy as reference
from f8emu.spec import (
    CHIPS,
    Chip,
    Format,
    Instruction,
)

jax_reference = pytest.importorskip("f8ref.jax")

K = 37
"""Longer than an instruction, and no multiple of a step or of an order."""
INSTRUCTIONS = [(chip, instruction) for chip in CHIPS.values() for instruction in chip.instructions]
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
    for backend in (reference, jax_reference):
        found = np.asarray(backend.mma(*operands, chip=chip, out_dtype=instruction.out))
        assert found.view(CODES[instruction.out.bits]).tolist() == expected, backend.__name__

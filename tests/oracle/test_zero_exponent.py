"""The exponent of zero in bfloat16 [BF16-1], [CHIP-5], [CHIP-6]: products around it, and outputs of an H200.

Operands are drawn so that the last place of a result shows which terms are cut to nothing: beside a power of two lie
products about as large as the unit that the exponent of zero leaves.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.oracle.together as reference
from f8emu.spec import ADA, BFLOAT16, BLACKWELL_TCGEN05, CDNA3, CHIPS, FLOAT32, HOPPER, Chip
from f8ref import exact
from tests.oracle.exactly import EXACT, assert_same_bits, codes_of, dtype_of, typed

jax_reference = pytest.importorskip("f8ref.jax")

RECORDED = np.load(Path(__file__).with_name("zero_exponent-h200.npz"))
EXPONENTS = {"Hopper": -133, "Ada": -132, "CDNA3": -126}
UNITS = {"Hopper": -158, "Ada": -156, "CDNA3": -157}
"""The logarithm of the unit to which a zero's exponent cuts; on CDNA3 that of the products' sum."""


def with_zero(chip: Chip, exponent: int | None) -> Chip:
    return replace(chip, bfloat16=replace(chip.bfloat16, zero_exponent=exponent))


def drawn(chip: Chip, rows: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """a and b [rows, k]: in each 8 of K a power of two, 2^-150 (half of a last place), and products of about a unit."""
    r, unit = np.random.default_rng(seed), UNITS[chip.name]
    a = r.choice([-1.0, 1.0], (rows, k)) * r.uniform(1, 2, (rows, k)) * (r.random((rows, k)) < 0.3) * 2.0**-70
    b = r.uniform(1, 2, (rows, k)) * np.exp2(r.integers(unit - 2, unit + 2, (rows, k)) + 70.0)
    first = r.integers(-150, EXPONENTS[chip.name] + 3, b[:, ::8].shape)
    is_boundary = r.random(first.shape) < 0.5
    b[:, ::8] = np.exp2(np.where(is_boundary, EXPONENTS[chip.name] + r.integers(-1, 2, first.shape), first) + 70.0)
    b[:, 1::8] = 2.0**-80
    for column in (0, 1):
        a[:, column::8] = r.choice([-1.0, 1.0, 0.0], first.shape) * 2.0**-70
    return a.astype(dtype_of(BFLOAT16)), b.astype(dtype_of(BFLOAT16))


def test_every_chip_has_one() -> None:
    nvidia = dict.fromkeys(CHIPS, -133)
    assert {name: chip.bfloat16.zero_exponent for name, chip in CHIPS.items()} == nvidia | EXPONENTS
    for chip in CHIPS.values():
        assert chip.instruction("test", (BFLOAT16, BFLOAT16), FLOAT32).model == chip.bfloat16
        assert {chip.float8.zero_exponent, chip.float8_fast.zero_exponent, chip.block_scaled.zero_exponent} == {None}


@pytest.mark.parametrize("chip", [HOPPER, ADA, CDNA3], ids=str)
def test_gemms(chip: Chip) -> None:
    """The definition, the oracle and the engine at every width, and JAX; steps begin from zero and from tiny sums."""
    for k in (8, 16, 40):
        a, b = drawn(chip, 12, k, k)
        options: Any = {"out_dtype": "float32", "chip": chip}
        wanted = EXACT.mm(a, b.T, **options)
        for backend in (reference, jax_reference):
            assert_same_bits(backend.mm(a, b.T, **options), wanted)


@pytest.mark.parametrize("chip", [HOPPER, ADA, CDNA3], ids=str)
def test_every_neighbour_gives_other_bits(chip: Chip) -> None:
    a, b = drawn(chip, 100, 16, 59)
    right = reference.mm(a, b.T, out_dtype="float32", chip=chip)
    for exponent in {None, EXPONENTS[chip.name] - 1, min(EXPONENTS[chip.name] + 1, -126)} - {EXPONENTS[chip.name]}:
        other = reference.mm(a, b.T, out_dtype="float32", chip=with_zero(chip, exponent))
        assert np.count_nonzero(codes_of(other) != codes_of(right)) > 3, exponent


@pytest.mark.parametrize("chip", [HOPPER, ADA, CDNA3], ids=str)
def test_instructions(chip: Chip) -> None:
    """From zero, where the exponent counts, and from any tiny number, where it does not."""
    a, b = drawn(chip, 300, 16, 7)
    r = np.random.default_rng(8)
    c = (r.choice([-1, 0, 0, 1], 300) * np.exp2(r.integers(-149, -120, 300))).astype(np.float32)
    cases = zip(codes_of(a).tolist(), codes_of(b).tolist(), codes_of(c).tolist(), strict=True)
    wanted = typed([exact.mma(*case, a_format=BFLOAT16, b_format=BFLOAT16, chip=chip) for case in cases], FLOAT32)
    for backend in (reference, jax_reference):
        assert_same_bits(backend.mma(a, b, c, chip=chip), wanted)


@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL_TCGEN05], ids=str)
@pytest.mark.parametrize("k", [16, 32])
def test_outputs_of_an_h200(k: int, chip: Chip) -> None:
    """[BF16-1] torch.mm of torch 2.11 and CUDA 13.0, out_dtype float32; the second step begins from a tiny sum."""
    a, b = (typed(RECORDED[f"{side}{k}"], BFLOAT16) for side in "ab")
    for backend in (reference, jax_reference):
        assert_same_bits(backend.mm(a, b.T, out_dtype="float32", chip=chip), typed(RECORDED[f"d{k}"], FLOAT32))
    for exponent in (None, -132, -134):
        other = reference.mm(a, b.T, out_dtype="float32", chip=with_zero(chip, exponent))
        assert np.count_nonzero(codes_of(other) != RECORDED[f"d{k}"]) > 100, exponent

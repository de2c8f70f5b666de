"""The formats against literals typed from their documents, and against numpy and ml_dtypes as witnesses."""

import dataclasses
from collections import Counter
from fractions import Fraction
from itertools import chain

import ml_dtypes
import numpy as np
import pytest

from f8emu.spec.errors import SpecError
from f8emu.spec.formats import (
    BFLOAT16,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0FNU,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    FORMATS,
    HIGH_PRECISION,
    Format,
    Overflow,
    Specials,
    float8_format,
    format_by_name,
    output_format,
)

# OFP8 1.0 tables 1 and 2 (E4M3, E5M2), arXiv 2206.02915 (FNUZ), MX 1.0 section 5.4.1 (E8M0), IEEE 754-2019 table 3.5
# (binary16, binary32).
# bfloat16 is the upper half of binary32. Codes are written as the documents do: sign, exponent, fraction.
DOCUMENTS: dict[str, tuple[tuple[object, ...], ...]] = {
    "float8_e4m3fn": (
        *((8, 4, 3, 7, -6, 8), (448.0, 0.015625, 0.001953125)),
        (0b0_1111_110, 0b0_1111_111, None, 0b1_0000_000, 0b0_1111_111, 0b0_0000_111),
    ),
    "float8_e5m2": (
        *((8, 5, 2, 15, -14, 15), (57344.0, 0.00006103515625, 0.0000152587890625)),
        (0b0_11110_11, 0b0_11111_11, 0b0_11111_00, 0b1_00000_00, 0b0_11111_11, 0b0_00000_11),
    ),
    "float8_e4m3fnuz": (
        *((8, 4, 3, 8, -7, 7), (240.0, 0.0078125, 0.0009765625)),
        (0b0_1111_111, 0b1_0000_000, None, 0b1_0000_000, 0b0_1111_111, 0b0_0000_111),
    ),
    "float8_e5m2fnuz": (
        *((8, 5, 2, 16, -15, 15), (57344.0, 0.000030517578125, 0.00000762939453125)),
        (0b0_11111_11, 0b1_00000_00, None, 0b1_00000_00, 0b0_11111_11, 0b0_00000_11),
    ),
    "float8_e8m0fnu": ((8, 8, 0, 127, -127, 127), (2.0**127, 2.0**-127, 2.0**-127), (0xFE, 0xFF, None, 0, 0xFF, 0)),
    "float16": (
        *((16, 5, 10, 15, -14, 15), (65504.0, 2.0**-14, 2.0**-24)),
        (0x7BFF, 0x7FFF, 0x7C00, 0x8000, 0x7FFF, 0x03FF),
    ),
    "bfloat16": (
        *((16, 8, 7, 127, -126, 127), (float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133)),
        (0x7F7F, 0x7FFF, 0x7F80, 0x8000, 0x7FFF, 0x007F),
    ),
    "float32": (
        *((32, 8, 23, 127, -126, 127), (float.fromhex("0x1.fffffep127"), 2.0**-126, 2.0**-149)),
        (0x7F7FFFFF, 0x7FFFFFFF, 0x7F800000, 0x80000000, 0x7FFFFFFF, 0x007FFFFF),
    ),
}
FIELDS = (
    *("bits", "exponent_bits", "fraction_bits", "bias", "min_exponent", "max_exponent"),
    *("max", "smallest_normal", "smallest_subnormal"),
    *("max_code", "nan_code", "infinity_code", "sign_mask", "magnitude_mask", "fraction_mask"),
)

# Kind of value -> how many of all codes have it.
COUNTS = {
    "float8_e4m3fn": {"nan": 2, "zero": 2, "subnormal": 14, "normal": 238},
    "float8_e5m2": {"nan": 6, "inf": 2, "zero": 2, "subnormal": 6, "normal": 240},
    "float8_e4m3fnuz": {"nan": 1, "zero": 1, "subnormal": 14, "normal": 240},
    "float8_e5m2fnuz": {"nan": 1, "zero": 1, "subnormal": 6, "normal": 248},
    "float8_e8m0fnu": {"nan": 1, "normal": 255},
    "float16": {"nan": 2046, "inf": 2, "zero": 2, "subnormal": 2046, "normal": 61440},
    "bfloat16": {"nan": 254, "inf": 2, "zero": 2, "subnormal": 254, "normal": 65024},
}


def by_definition(format: Format, code: int) -> tuple[str, Fraction | None]:
    """Kind and value of a code, straight from the docstrings of `Format` and `Specials`."""
    magnitude = code & format.magnitude_mask
    field, fraction = magnitude >> format.fraction_bits, magnitude & format.fraction_mask
    match format.specials:
        case Specials.IEEE:
            if field == (1 << format.exponent_bits) - 1:
                return ("nan", None) if fraction else ("inf", None)
        case Specials.NAN_ALL_ONES:
            if magnitude == format.magnitude_mask:
                return "nan", None
        case Specials.NAN_NEGATIVE_ZERO:
            if code == format.sign_mask:
                return "nan", None
    if field == 0 and format.has_subnormals:
        kind, significand, exponent = "subnormal" if fraction else "zero", fraction, 1 - format.bias
    else:
        kind, significand, exponent = "normal", (1 << format.fraction_bits) | fraction, field - format.bias
    sign = -1 if code & format.sign_mask else 1
    return kind, sign * significand * Fraction(2) ** (exponent - format.fraction_bits)


def test_every_format_has_a_document() -> None:
    assert list(FORMATS) == list(DOCUMENTS)
    assert all(FORMATS[name].name == name == str(FORMATS[name]) for name in DOCUMENTS)
    assert all(format_by_name(name) is FORMATS[name] for name in DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_limits_equal_the_document(name: str) -> None:
    assert tuple(getattr(FORMATS[name], field) for field in FIELDS) == tuple(chain(*DOCUMENTS[name]))
    assert FORMATS[name].has_negative_zero == (not name.endswith(("fnuz", "fnu")))


@pytest.mark.parametrize("name", COUNTS)
def test_all_codes_counted_and_equal_to_the_witness(name: str) -> None:
    format = FORMATS[name]
    codes = np.arange(1 << format.bits, dtype=np.dtype(f"uint{format.bits}"))
    with np.errstate(invalid="ignore"):  # signalling NaN
        witness = codes.view(getattr(ml_dtypes, name, name)).astype(np.float64)
    kinds: Counter[str] = Counter()
    for code, value in zip(codes.tolist(), witness.tolist(), strict=True):
        kind, expected = by_definition(format, code)
        kinds[kind] += 1
        if expected is not None:
            assert (value, np.signbit(value)) == (float(expected), bool(code & format.sign_mask)), hex(code)
        elif kind == "inf":
            assert value == (-np.inf if code & format.sign_mask else np.inf), hex(code)
        else:
            assert np.isnan(value), hex(code)
    assert kinds == COUNTS[name]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_codes_have_the_values_they_name(name: str) -> None:
    format = FORMATS[name]
    assert by_definition(format, format.max_code) == ("normal", Fraction(format.max))
    assert by_definition(format, format.nan_code) == ("nan", None)
    if format.infinity_code is not None:
        assert by_definition(format, format.infinity_code) == ("inf", None)
        assert format.max_code == format.infinity_code - 1
    else:
        beyond = (format.max_code + 1) & format.magnitude_mask
        assert beyond == format.nan_code & format.magnitude_mask


def test_families() -> None:
    assert FLOAT8 == (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)
    assert HIGH_PRECISION == (FLOAT32, BFLOAT16, FLOAT16)
    assert not E8M0FNU.signed
    assert {member.value for member in Overflow} == {"saturate", "nonfinite"}


def test_a_format_by_its_name() -> None:
    assert float8_format("cast", "float8_e4m3fnuz") is E4M3FNUZ
    assert float8_format("cast", E5M2) is E5M2
    assert output_format("mm", "float16") is FLOAT16
    with pytest.raises(SpecError, match=f"unknown format 'e4m3'; known formats are: {', '.join(DOCUMENTS)}"):
        format_by_name("e4m3")


def test_formats_are_immutable_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3FN.bias = 8  # type: ignore[misc]
    copy = dataclasses.replace(E4M3FN)
    assert copy is not E4M3FN
    assert {E4M3FN: 1, E5M2: 2}[copy] == 1
    assert dataclasses.replace(E4M3FN, bias=8) != E4M3FN

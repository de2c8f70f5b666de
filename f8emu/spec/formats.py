"""Number formats as data: how a bit pattern (`code`) maps to a real number (`value`); and overflow in a cast.

Sources: OCP 8-bit Floating Point Specification (OFP8) revision 1.0, tables 1 and 2 (E4M3, E5M2); OCP
Microscaling Formats (MX) version 1.0, section 5.4.1 (E8M0); IEEE 754-2019, table 3.5 (binary16, binary32); Noune et
al., "8-bit Numerical Formats for Deep Neural Networks", arXiv 2206.02915 (FNUZ). Names are those of ml_dtypes.
"""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.members import member_by_name


class Specials(Enum):
    """Which codes are not finite numbers."""

    IEEE = "ieee"
    """The largest exponent field holds infinity (fraction 0) and NaN (any other fraction)."""
    NAN_ALL_ONES = "nan_all_ones"
    """No infinity; the only NaN is the code whose exponent and fraction bits are all ones."""
    NAN_NEGATIVE_ZERO = "nan_negative_zero"
    """No infinity and no -0: the code that would be -0 is the only NaN (FNUZ: finite, NaN, unsigned zero)."""


class Overflow(Enum):
    """How a cast treats a magnitude that rounds beyond the largest finite value of the format."""

    SATURATE = "saturate"
    """`+-max`, for infinite inputs too (OFP8 "saturating"); NaN stays NaN."""
    NONFINITE = "nonfinite"
    """Infinity where the format has one, NaN where it has none (OFP8 "non-saturating")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary number format: `value = (-1)^sign * significand * 2^(exponent - fraction_bits)`.

    The exponent of a normal code is `field - bias`, its significand has a hidden leading one. A code whose
    exponent field is 0 is subnormal: no hidden bit, exponent `1 - bias` [OP-1].
    """

    name: str
    """The name of this dtype in ml_dtypes, numpy, jax.numpy and torch."""
    exponent_bits: int
    fraction_bits: int
    bias: int
    signed: bool = True
    specials: Specials = Specials.IEEE
    has_subnormals: bool = True
    """False for E8M0FNU, whose exponent field 0 is the value `2^-bias` and not zero."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """The name of a known format; the fields of another one."""
        return self.name if FORMATS.get(self.name) == self else changed_fields(self)

    def __hash__(self) -> int:
        return hash(self.name)  # equal formats have equal names; caches ask for millions

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return int(self.signed) + self.exponent_bits + self.fraction_bits

    @property
    def has_infinity(self) -> bool:
        return self.specials is Specials.IEEE

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero keeps a sign. Without one, a negative value that rounds to zero becomes +0."""
        return self.signed and self.specials is not Specials.NAN_NEGATIVE_ZERO

    @property
    def sign_mask(self) -> int:
        return (1 << (self.bits - 1)) if self.signed else 0

    @property
    def magnitude_mask(self) -> int:
        """Exponent and fraction bits."""
        return (1 << (self.exponent_bits + self.fraction_bits)) - 1

    @property
    def fraction_mask(self) -> int:
        return (1 << self.fraction_bits) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; subnormals share it [OP-1]."""
        return 1 - self.bias if self.has_subnormals else -self.bias

    @property
    def nan_code(self) -> int:
        """The one NaN code that f8emu emits: sign 0, all other bits one, as the tensor core does [SPEC-1].

        In a format with NAN_NEGATIVE_ZERO it is the only NaN: the sign bit alone.
        """
        return self.sign_mask if self.specials is Specials.NAN_NEGATIVE_ZERO else self.magnitude_mask

    @property
    def infinity_code(self) -> int | None:
        """Code of +infinity, None where the format has none."""
        return self.magnitude_mask ^ self.fraction_mask if self.has_infinity else None

    @property
    def max_code(self) -> int:
        """Code of the largest finite value; every smaller code without a sign is finite too."""
        match self.specials:
            case Specials.IEEE:
                return (self.magnitude_mask ^ self.fraction_mask) - 1
            case Specials.NAN_ALL_ONES:
                return self.magnitude_mask - 1
            case Specials.NAN_NEGATIVE_ZERO:
                return self.magnitude_mask

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return (self.max_code >> self.fraction_bits) - self.bias

    @property
    def max(self) -> float:
        """Largest finite value (exact)."""
        significand = (1 << self.fraction_bits) | (self.max_code & self.fraction_mask)
        return significand * 2.0 ** (self.max_exponent - self.fraction_bits)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value (the smallest normal where the format has no subnormals)."""
        return 2.0 ** (self.min_exponent - self.fraction_bits)


E4M3FN = Format(name="float8_e4m3fn", exponent_bits=4, fraction_bits=3, bias=7, specials=Specials.NAN_ALL_ONES)
"""OCP float8 with 3 fraction bits: up to 448, no infinity."""
E5M2 = Format(name="float8_e5m2", exponent_bits=5, fraction_bits=2, bias=15)
"""OCP float8 with 2 fraction bits: up to 57344, with infinity."""
E4M3FNUZ = Format(name="float8_e4m3fnuz", exponent_bits=4, fraction_bits=3, bias=8, specials=Specials.NAN_NEGATIVE_ZERO)
"""FNUZ float8 with 3 fraction bits, as on CDNA3: up to 240, no infinity and no -0."""
E5M2FNUZ = Format(
    name="float8_e5m2fnuz", exponent_bits=5, fraction_bits=2, bias=16, specials=Specials.NAN_NEGATIVE_ZERO
)
"""FNUZ float8 with 2 fraction bits, as on CDNA3: up to 57344, no infinity and no -0."""
E8M0FNU = Format(
    name="float8_e8m0fnu",
    exponent_bits=8,
    fraction_bits=0,
    bias=127,
    signed=False,
    specials=Specials.NAN_ALL_ONES,
    has_subnormals=False,
)
"""The scales of Microscaling formats: powers of two, without sign and zero."""
FLOAT16 = Format(name="float16", exponent_bits=5, fraction_bits=10, bias=15)
"""IEEE 754 binary16."""
BFLOAT16 = Format(name="bfloat16", exponent_bits=8, fraction_bits=7, bias=127)
"""The upper half of a float32."""
FLOAT32 = Format(name="float32", exponent_bits=8, fraction_bits=23, bias=127)
"""IEEE 754 binary32."""

FLOAT8: tuple[Format, ...] = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)
"""Formats that a cast can give. The profile of a chip says which of them it multiplies. E8M0FNU is for scales of
Microscaling formats: it has no sign and no zero, so a cast to it would need rules of its own."""
HIGH_PRECISION: tuple[Format, ...] = (FLOAT32, BFLOAT16, FLOAT16)
"""Formats that a cast to float8 takes and a scaled GEMM returns; float64 is refused everywhere."""

FORMATS: dict[str, Format] = {f.name: f for f in (*FLOAT8, E8M0FNU, FLOAT16, BFLOAT16, FLOAT32)}
"""Every known format by name."""


def format_by_name(name: str) -> Format:
    """The format called `name` (a dtype name of ml_dtypes).

    Raises:
        SpecError: an unknown format; the message lists the known ones.
    """
    if name not in FORMATS:
        raise SpecError(f"format_by_name: unknown format {name!r}; known formats are: {', '.join(FORMATS)}")
    return FORMATS[name]


def float8_format(call: str, format: Format | str) -> Format:
    """The format that `call` casts to, given itself or by name.

    Raises:
        SpecError: an unknown format, or one that is not in FLOAT8.
    """
    chosen = format_by_name(format) if isinstance(format, str) else format
    if chosen not in FLOAT8:
        why = "; it holds scales: it has no sign and no zero" if chosen == E8M0FNU else ""
        raise SpecError(f"{call}: format must be one of {', '.join(map(str, FLOAT8))}; got {chosen}{why}")
    return chosen


def overflow_by_name(call: str, overflow: Overflow | str) -> Overflow:
    """What `call` makes of values beyond the format, given itself or by name.

    Raises:
        SpecError: an unknown treatment; the message lists the known ones.
    """
    return member_by_name(call, "overflow", Overflow, overflow)


def output_format(call: str, out_dtype: Format | str) -> Format:
    """The format of the output of a GEMM, given itself or by name.

    Raises:
        SpecError: an unknown format.
        UnsupportedError: a format that no GEMM returns.
    """
    chosen = format_by_name(out_dtype) if isinstance(out_dtype, str) else out_dtype
    if chosen not in HIGH_PRECISION:
        known = ", ".join(map(str, HIGH_PRECISION))
        raise UnsupportedError(f"{call}: out_dtype must be one of {known}; got {chosen}; quantize the output instead")
    return chosen


def changed_fields(data: Any) -> str:
    """`Name(field=value)` of a dataclass, the fields that differ from their defaults; enums by name."""
    values = [(field.name, getattr(data, field.name), field.default) for field in fields(data)]
    shown = [f"{name}={x if isinstance(x, Enum) else repr(x)}" for name, x, default in values if x != default]
    return f"{type(data).__name__}({', '.join(shown)})"

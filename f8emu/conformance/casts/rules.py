"""What a cast or a quantizer computes, as rules that can be altered one field at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.diagnosis.arguments import SCALE_VALUES
from f8emu.conformance.diagnosis.rules import ScaleValue
from f8emu.dialects import CodeForm, Dialect, ScaleForm
from f8emu.dialects.arithmetic import Factors, block_amax, encode, factors_from_amax, nan_code
from f8emu.dialects.rules import Arithmetic, Block, CodeRule, Division, PowerOfTwo
from f8emu.spec import BFLOAT16, FLOAT8, FLOAT16, Format, Overflow, ScaleRule


class Scaling(Enum):
    """What a cast does with its scale."""

    PRODUCT = "x * scale"
    QUOTIENT = "x / scale"
    BY_INVERSE = "x * (1 / scale), with a rounded inverse"
    OVER_INVERSE = "x / (1 / scale), with a rounded inverse"


class Rounding(Enum):
    """To which of two neighbours a value goes."""

    EVEN = "to nearest, ties to even"
    AWAY = "to nearest, ties away from zero"
    TOWARD = "to nearest, ties toward zero"
    TIES_UP = "to nearest, ties toward +infinity"
    TWICE = "twice, to one more bit and then to the last place"
    CUT = "toward zero"
    DOWN = "toward -infinity"


class CodeFault(Enum):
    """What becomes of a right code."""

    FLUSHED = "flushes subnormals to zero"
    FLUSHED_FIRST = "flushes values below the smallest normal number to zero, before it rounds"
    CARRY_LOST = "loses the carry into the next binade"
    UNSIGNED = "loses the sign"
    ZERO_UNSIGNED = "loses the sign of negative zero"
    ZERO_IS_NAN = "gives NaN (0x80) for negative values that become zero"


class Region(Enum):
    """Where an alteration holds."""

    ALL = ""
    SUBNORMAL = "does so among subnormals only"
    NORMAL = "does so above subnormals only"


_ROUNDED: dict[Rounding, Callable[[np.ndarray], np.ndarray]] = {
    Rounding.AWAY: lambda n: np.trunc(n + np.copysign(0.5, n)),
    Rounding.TOWARD: lambda n: np.copysign(np.ceil(np.abs(n) - 0.5), n),
    Rounding.TIES_UP: lambda n: np.floor(n + 0.5),
    Rounding.TWICE: lambda n: np.rint(np.rint(2 * n) / 2),
    Rounding.CUT: np.trunc,
    Rounding.DOWN: np.floor,
}
"""Values in units of the last place -> whole numbers of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRule:
    """A cast of float32 values to float8. The defaults are f8emu's cast."""

    format: Format
    overflow: Overflow = Overflow.SATURATE
    scaling: Scaling = Scaling.PRODUCT
    through: Format | None = None
    """Rounded to first."""
    rounding: Rounding = Rounding.EVEN
    largest: float | None = None
    """What magnitudes are clamped to first."""
    fault: CodeFault | None = None
    region: Region = Region.ALL

    def scaled(self, x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
        """The float32 values that are cast."""
        with np.errstate(all="ignore"):
            match self.scaling:
                case Scaling.PRODUCT:
                    return x * scale
                case Scaling.QUOTIENT:
                    return x / scale
                case Scaling.BY_INVERSE:
                    return x * (np.float32(1) / scale)
                case Scaling.OVER_INVERSE:
                    return x / (np.float32(1) / scale)

    def codes(self, values: np.ndarray) -> np.ndarray:
        """The codes of float32 values, uint8."""
        with np.errstate(all="ignore"):
            found = self._altered(values)
        if self.region is Region.ALL:
            return found
        is_small = np.abs(values) < self.format.smallest_normal
        right = CastRule(format=self.format, overflow=self.overflow).codes(values)
        return np.where(is_small == (self.region is Region.SUBNORMAL), found, right)

    def _altered(self, values: np.ndarray) -> np.ndarray:
        import f8ref.numpy as oracle

        fmt, v = self.format, values
        if self.through is not None:
            v = v.astype(dtype_of(self.through)).astype(np.float32)
        if self.largest is not None:
            v = np.clip(v, -np.float32(self.largest), np.float32(self.largest))
        exact = np.abs(v).astype(np.float64)
        exponent = np.maximum(np.frexp(exact)[1] - 1, fmt.min_exponent)
        if self.rounding is not Rounding.EVEN:
            unit = np.ldexp(1.0, exponent - fmt.fraction_bits)
            whole = _ROUNDED[self.rounding](v.astype(np.float64) / unit) * unit
            v = np.where(np.isfinite(v), np.copysign(whole, v), v).astype(np.float32)
        codes = oracle.cast(v, fmt, overflow=self.overflow).view(np.uint8)
        magnitude, sign = codes & np.uint8(fmt.magnitude_mask), np.uint8(fmt.sign_mask)
        match self.fault:
            case CodeFault.FLUSHED | CodeFault.FLUSHED_FIRST:
                is_first = self.fault is CodeFault.FLUSHED_FIRST
                is_small = exact < fmt.smallest_normal if is_first else magnitude <= fmt.fraction_mask
                return np.where(is_small & (magnitude > 0), codes & np.uint8(sign * fmt.has_negative_zero), codes)
            case CodeFault.CARRY_LOST:
                before = np.maximum(np.frexp(np.abs(values).astype(np.float64))[1] - 1, fmt.min_exponent)
                is_carried = (magnitude >> fmt.fraction_bits) > before + fmt.bias
                return np.where(is_carried & np.isfinite(values), codes - np.uint8(1 << fmt.fraction_bits), codes)
            case CodeFault.UNSIGNED:
                return magnitude
            case CodeFault.ZERO_UNSIGNED:
                return np.where(magnitude == 0, magnitude, codes) if fmt.has_negative_zero else codes
            case CodeFault.ZERO_IS_NAN:
                return np.where((codes == 0) & np.signbit(v), sign, codes)
            case None:
                return codes


Change = Callable[[np.ndarray], np.ndarray]


CHANGES: dict[str, Change] = {
    "up to a power of two": SCALE_VALUES[ScaleValue.POWER_UP],
    "down to a power of two": SCALE_VALUES[ScaleValue.POWER_DOWN],
    "to the nearest power of two": SCALE_VALUES[ScaleValue.POWER_NEAREST],
    "to the power of two with the nearest logarithm": SCALE_VALUES[ScaleValue.POWER_LOG],
    "to bfloat16": SCALE_VALUES[ScaleValue.BFLOAT16],
    "to float16": SCALE_VALUES[ScaleValue.FLOAT16],
}
"""What may become of a scale."""
_INVERSE = "as its reciprocal, which is multiplied"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerRule:
    """A quantizer: a dialect, and what is done beside its rules."""

    dialect: Dialect
    scale: ScaleForm
    code: CodeForm
    cast: CastRule
    x: Format | None = None
    """What x is rounded to first."""
    amax: Format | None = None
    """What amaxes are rounded to."""
    added: float = 0.0
    """What is added to amaxes."""
    early: str = ""
    """What becomes of s before x is scaled by it."""
    late: str = ""
    """What becomes of it afterwards."""

    @classmethod
    def of(cls, dialect: Dialect) -> "QuantizerRule":
        """A dialect that has a rule for its scales, as it is."""
        assert dialect.scale is not None, "scales that are given have no rule"
        return cls(dialect=dialect, scale=dialect.scale, code=dialect.code, cast=CastRule(format=dialect.code.format))

    def parts(self, x: np.ndarray, block: Block) -> dict[str, np.ndarray]:
        """The scales that decode, and the codes."""
        factors = self.factors(amaxes_of(x, block), x.dtype)
        return {"scales": factors.stored, "codes": self.codes(x, factors, block)}

    def factors(self, amaxes: tuple[np.ndarray, np.ndarray], dtype: np.dtype) -> Factors:
        """The factors of blocks with these amaxes, with and without NaN; `stored` decodes, as float32."""
        amax = amaxes[self.scale.ignores_nan]
        with np.errstate(all="ignore"):
            for narrow in (self.x, self.amax):
                amax = amax if narrow is None else amax.astype(dtype_of(narrow)).astype(np.float32)
            amax = amax + np.float32(self.added)
            found = factors_from_amax(amax, replace(self.dialect, scale=self.scale), dtype)
            s = found.scale if self.dialect.stored.is_multiplier else found.stored.astype(np.float32)
            if self.early:
                s = CHANGES[self.early](s)
                found = Factors(s, s, (np.float32(1) / s).astype(np.float32))
            kept = np.float32(1) / s if self.late == _INVERSE else CHANGES[self.late](s) if self.late else s
        return found._replace(stored=kept)

    def codes(self, x: np.ndarray, factors: Factors, block: Block) -> np.ndarray:
        """The codes of a matrix, float8."""
        with np.errstate(all="ignore"):
            x = x if self.x is None else x.astype(dtype_of(self.x)).astype(np.float32)
        if self.cast == CastRule(format=self.cast.format):
            return encode(x, factors, self.code, block)
        nan = np.uint8(nan_code(self.cast.format, self.code.nan))
        return encode(x, factors, self.code, block, lambda v: np.where(np.isnan(v), nan, self.cast.codes(v)))


def amaxes_of(x: np.ndarray, block: Block) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitudes of blocks: a NaN makes one NaN, or is ignored."""
    return block_amax(x, block), block_amax(x, block, ignores_nan=True)


def own_dialects(target: Format, block: Block) -> tuple[Dialect, Dialect]:
    """f8emu's rule to a format, and the same with powers of two."""
    rule = ScaleRule()
    form = ScaleForm(
        division=Division.MULTIPLIER,
        arithmetic=Arithmetic.FLOAT64,
        largest=target.max,
        amax_floor=rule.amax_floor,
    )
    code = CodeForm(rule=CodeRule.MULTIPLIER, format=target)
    own = Dialect(name="f8emu", stack="f8emu", source="", version="", scale=form, code=code, blocks=(block,))
    return own, replace(own, name="f8emu, power_of_two", scale=replace(form, power_of_two=PowerOfTwo.DOWN))


class Alteration(NamedTuple):
    """Another value of a field, and what is said of a kernel that has it; two of one place exclude each other."""

    place: str
    """`field`, or `part.field` of a part of the rule."""
    value: Any
    sentence: str

    def of(self, rule: Any) -> Any:
        """The altered rule."""
        part, _, name = self.place.rpartition(".")
        if not part:
            return replace(rule, **{name: self.value})
        return replace(rule, **{part: replace(getattr(rule, part), **{name: self.value})})


def cast_alterations(target: Format, scaling: Scaling | None) -> tuple[Alteration, ...]:
    """Of a cast to a format; `scaling` is that of a cast that takes a scale."""
    limits = sorted({fmt.max for fmt in FLOAT8} - {target.max})
    swapped = {Scaling.PRODUCT: Scaling.OVER_INVERSE, Scaling.QUOTIENT: Scaling.BY_INVERSE}
    other = [swapped[scaling]] if scaling is not None else []
    return (
        *(Alteration("scaling", one, f"computes {one.value}") for one in other),
        *(Alteration("through", one, f"rounds twice, through {one}") for one in (FLOAT16, BFLOAT16)),
        *(Alteration("rounding", one, f"rounds {one.value}") for one in _ROUNDED),
        *(Alteration("fault", one, one.value) for one in CodeFault),
        *(
            Alteration("largest", one, f"clamps to {one:g} instead of {target.max:g}")
            for one in limits
            if one < target.max
        ),
        *(Alteration("region", one, one.value) for one in (Region.SUBNORMAL, Region.NORMAL)),
        *(Alteration("format", one, f"gives codes of {one}") for one in FLOAT8 if one != target),
    )


_FLOORS = (0.0, 2.0**-126, 1e-30, 1e-20, 1e-15, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_NARROW = (BFLOAT16, FLOAT16)


def scale_alterations(target: Format) -> tuple[Alteration, ...]:
    """Of a quantizer: what its scales show."""
    late = {**{name: f"rounds the stored scale {name}, after the codes were made" for name in CHANGES}}
    late[_INVERSE] = "returns the reciprocal of the scale, which is multiplied, instead of the scale that decodes"
    maxima = sorted({fmt.max for fmt in FLOAT8} - {target.max})
    return (
        *(Alteration("scale.largest", one, f"scales amax to {one:g} instead of {target.max:g}") for one in maxima),
        *(
            Alteration("scale.amax_floor", one, f"keeps amax at least {one:g}" if one else "has no floor of amax")
            for one in _FLOORS
        ),
        *(Alteration("added", one, f"adds {one:g} to amax") for one in _FLOORS if one),
        Alteration("scale.small_amax", (0.0, target.max), "gives blocks of zeros the scale 1"),
        *(Alteration("late", name, sentence) for name, sentence in late.items()),
        *(Alteration("early", name, f"rounds the scale {name}") for name in CHANGES),
        *(Alteration("amax", one, f"rounds amax to {one}") for one in _NARROW),
        *(Alteration("x", one, f"rounds x to {one} first") for one in _NARROW),
        *(Alteration("scale.division", one, f"computes {one.value}") for one in Division),
        Alteration("scale.arithmetic", Arithmetic.INPUT, "computes scales in the dtype of x"),
        Alteration("scale.arithmetic", Arithmetic.FLOAT32, "computes scales in float32"),
        Alteration("scale.ignores_nan", True, "ignores NaN in amax"),
        *(Alteration("scale.power_of_two", one, one.value) for one in PowerOfTwo),
    )


def code_alterations(target: Format) -> tuple[Alteration, ...]:
    """Of a quantizer: what its codes show, once its scales are known."""
    casts = [one for one in cast_alterations(target, None) if one.place not in ("format", "region")]
    return (
        *(Alteration("code.rule", one, f"computes codes as {one.value}, rounded to float32") for one in CodeRule),
        Alteration("code.arithmetic", Arithmetic.INPUT, "computes codes in the dtype of x"),
        *(one._replace(place=f"cast.{one.place}") for one in casts),
    )

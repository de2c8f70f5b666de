"""Casts and quantizers as rules that can be altered one field at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.diagnosis.arguments import SCALE_VALUES
from f8emu.conformance.diagnosis.rules import ScaleValue
from f8emu.dialects import CodeForm, Dialect, ScaleForm
from f8emu.dialects.arithmetic import Factors, block_amax, encode, factors_from_amax, nan_code
from f8emu.dialects.rules import MX_GROUP, Arithmetic, Block, CodeRule, Division, PowerOfTwo
from f8emu.spec import E8M0Rule, Format, Overflow, ScaleRule


class Scaling(Enum):
    """How a cast applies its scale."""

    PRODUCT = "x * scale"
    QUOTIENT = "x / scale"
    BY_INVERSE = "x * (1 / scale), with a rounded inverse"


ROUNDINGS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "to nearest, ties away from zero": lambda units: np.trunc(units + np.copysign(0.5, units)),
    "to nearest, ties toward zero": lambda units: np.copysign(np.ceil(np.abs(units) - 0.5), units),
    "to nearest, ties toward +infinity": lambda units: np.floor(units + 0.5),
    "toward zero": np.trunc,
    "toward -infinity": np.floor,
}
"""Values in units of the last place -> whole numbers of them, in other ways than to nearest, ties to even."""


class CodeFault(Enum):
    """How right codes are spoilt."""

    FLUSHED = "flushes subnormals to zero"
    FLUSHED_FIRST = "flushes values below the smallest normal number to zero, before it rounds"
    CARRY_LOST = "loses the carry into the next binade"
    UNSIGNED = "loses the sign"
    ZERO_UNSIGNED = "loses the sign of negative zero"
    ZERO_IS_NAN = "gives NaN (0x80) for negative values that become zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRule:
    """A cast of float32 values to float8. The defaults are f8emu's cast."""

    format: Format
    overflow: Overflow = Overflow.SATURATE
    scaling: Scaling = Scaling.PRODUCT
    through: Format | None = None
    """Rounded to first."""
    largest: float | None = None
    """A limit that magnitudes are clamped to first."""
    rounding: str = ""
    """One of `ROUNDINGS`, if not to nearest even."""
    fault: CodeFault | None = None
    zeros: CodeFault | None = None
    """Another fault, which is one of zeros."""
    of_subnormals: bool | None = None
    """Whether the above holds of subnormals alone; False: of all but them; None: of all values."""

    @np.errstate(all="ignore")
    def scaled(self, x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
        """The float32 values that are cast."""
        x = x.astype(np.float32)
        match self.scaling:
            case Scaling.PRODUCT:
                return x * scale
            case Scaling.QUOTIENT:
                return x / scale
            case Scaling.BY_INVERSE:
                return x * (np.float32(1) / scale)

    @np.errstate(all="ignore")
    def cast(self, x: np.ndarray, scale: np.ndarray | float = 1.0) -> np.ndarray:
        """The codes of an array, float8."""
        values = self.scaled(x, scale)
        codes = self._codes(values)
        if self.of_subnormals is not None:
            is_subnormal = np.abs(values) < self.format.smallest_normal
            right = CastRule(format=self.format, overflow=self.overflow).cast(values)
            codes = np.where(is_subnormal == self.of_subnormals, codes, right.view(np.uint8))
        return codes.view(dtype_of(self.format))

    def _codes(self, values: np.ndarray) -> np.ndarray:
        import f8ref.numpy as oracle

        if self.through is not None:
            values = values.astype(dtype_of(self.through)).astype(np.float32)
        if self.largest is not None:
            values = np.clip(values, -np.float32(self.largest), np.float32(self.largest))
        rounded = values
        if self.rounding:
            unit = np.ldexp(1.0, self._exponents(values) - self.format.fraction_bits)
            whole = ROUNDINGS[self.rounding](values / unit) * unit
            rounded = np.where(np.isfinite(values), np.copysign(whole, values), values).astype(np.float32)
        codes = oracle.cast(rounded, self.format, overflow=self.overflow).view(np.uint8)
        for fault in (self.fault, self.zeros):
            codes = codes if fault is None else self._spoilt(fault, values, codes)
        return codes

    def _exponents(self, values: np.ndarray) -> np.ndarray:
        return np.maximum(np.frexp(values)[1] - 1, self.format.min_exponent)

    def _spoilt(self, fault: CodeFault, values: np.ndarray, codes: np.ndarray) -> np.ndarray:
        target = self.format
        magnitude = codes & target.magnitude_mask
        zeros = codes & target.sign_mask if target.has_negative_zero else np.zeros_like(codes)
        match fault:
            case CodeFault.FLUSHED:
                return np.where((magnitude <= target.fraction_mask) & ~np.isnan(values), zeros, codes)
            case CodeFault.FLUSHED_FIRST:
                return np.where(np.abs(values) < target.smallest_normal, zeros, codes)
            case CodeFault.CARRY_LOST:
                is_carried = (magnitude >> target.fraction_bits) > self._exponents(values) + target.bias
                return np.where(is_carried & np.isfinite(values), codes - (1 << target.fraction_bits), codes)
            case CodeFault.UNSIGNED:
                return magnitude
            case CodeFault.ZERO_UNSIGNED:
                return np.where((magnitude == 0) & ~np.isnan(values), 0, codes)
            case CodeFault.ZERO_IS_NAN:
                return np.where((codes == 0) & np.signbit(values), target.sign_mask, codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerRule:
    """A quantizer: a dialect, and what is done beside its rules."""

    dialect: Dialect
    scale: ScaleForm
    code: CodeForm
    cast: CastRule
    x: Format | None = None
    """A format that x is rounded to first."""
    early: ScaleValue = ScaleValue.OWN
    """The change of s before x is scaled by it."""
    late: ScaleValue = ScaleValue.OWN
    """The change of s afterwards."""

    @classmethod
    def of(cls, dialect: Dialect) -> "QuantizerRule":
        """A dialect that has a rule for its scales, as it is."""
        assert dialect.scale is not None, "scales that are given have no rule"
        return cls(dialect=dialect, scale=dialect.scale, code=dialect.code, cast=CastRule(format=dialect.code.format))

    def parts(self, x: np.ndarray, block: Block) -> dict[str, np.ndarray]:
        """The scales that decode, and the codes."""
        factors = self._factors(*amaxes_of(x, block), x.dtype)
        return {"scales": factors.stored, "codes": self._codes(x, factors, block)}

    def stored(self, amax: np.ndarray, amax_of_numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The scales that decode, float32, of blocks of `dtype` with these amaxes, with and without NaN."""
        return self._factors(amax, amax_of_numbers, dtype).stored

    def codes_of_blocks(self, x: np.ndarray, amax: np.ndarray, amax_of_numbers: np.ndarray) -> np.ndarray:
        """The codes of elements [n] of blocks with these amaxes."""
        factors = self._factors(amax[:, None], amax_of_numbers[:, None], x.dtype)
        return self._codes(x[:, None], factors, (1, 1))[:, 0]

    @np.errstate(all="ignore")
    def _factors(self, amax: np.ndarray, amax_of_numbers: np.ndarray, dtype: np.dtype) -> Factors:
        # `stored` decodes, as float32.
        amax = amax_of_numbers if self.scale.ignores_nan else amax
        if self.x is not None:
            amax = amax.astype(dtype_of(self.x)).astype(np.float32)
        factors = factors_from_amax(amax, replace(self.dialect, scale=self.scale), dtype)
        s = factors.scale if self.dialect.stored.is_multiplier else factors.stored.astype(np.float32)
        if self.early is not ScaleValue.OWN:
            s = SCALE_VALUES[self.early](s)
            factors = Factors(s, s, (np.float32(1) / s).astype(np.float32))
        return factors._replace(stored=SCALE_VALUES[self.late](s))

    @np.errstate(all="ignore")
    def _codes(self, x: np.ndarray, factors: Factors, block: Block) -> np.ndarray:
        def cast(values: np.ndarray) -> np.ndarray:
            return np.where(np.isnan(values), nan, self.cast.cast(values).view(np.uint8))

        nan = np.uint8(nan_code(self.cast.format, self.code.nan))
        is_right = self.cast == CastRule(format=self.cast.format)
        x = x if self.x is None else x.astype(dtype_of(self.x)).astype(np.float32)
        return encode(x, factors, self.code, block, None if is_right else cast)


def amaxes_of(x: np.ndarray, block: Block) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitudes of blocks: a NaN makes one NaN, or is ignored."""
    return block_amax(x, block), block_amax(x, block, ignores_nan=True)


def own_dialects(target: Format, block: Block) -> tuple[Dialect, ...]:
    """f8emu's rule to a format, and the same with powers of two; for blocks of 32 its E8M0 rules, RCEIL first."""
    if block == MX_GROUP:
        return tuple(_e8m0_dialect(target, rule) for rule in reversed(E8M0Rule))
    form = ScaleForm(
        division=Division.MULTIPLIER,
        arithmetic=Arithmetic.FLOAT64,
        largest=target.max,
        amax_floor=ScaleRule().amax_floor,
    )
    code = CodeForm(rule=CodeRule.MULTIPLIER, format=target)
    dialect = Dialect(name="f8emu", stack="f8emu", source="", version="", scale=form, code=code, blocks=(block,))
    return dialect, replace(dialect, name="f8emu, power_of_two", scale=replace(form, power_of_two=PowerOfTwo.DOWN))


def _e8m0_dialect(target: Format, rule: E8M0Rule) -> Dialect:
    form = ScaleForm(division=Division.EXPONENT, largest=target.max, carry=rule.carry(target))
    if rule is E8M0Rule.RCEIL:  # whose infinity has the byte 254
        form = ScaleForm(division=Division.QUOTIENT, largest=target.max, power_of_two=PowerOfTwo.UP)
    code = CodeForm(rule=CodeRule.INVERSE, format=target)
    name = f"f8emu, {rule.value}"
    return Dialect(name=name, stack="f8emu", source="", version="", scale=form, code=code, blocks=(MX_GROUP,))

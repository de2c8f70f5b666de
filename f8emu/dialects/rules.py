"""The vocabulary of dialects: a few rules whose combinations are the quantizers of other stacks. Data, no array code.

Notation: `amax` is the largest magnitude of a block. `s` decodes, `value = code * s`. `t` is multiplied while
quantizing. `fl` rounds to float32. A constant beside an amax or a scale, such as a floor, is rounded to their dtype.
"""

import struct
from dataclasses import dataclass
from enum import Enum

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.formats import E4M3FN, Format
from f8emu.spec.scaling import BLOCK, MIN_AMAX_FLOOR, MX_BLOCK, E8M0Rule, ScaleRule

Block = tuple[int | None, int | None]
"""(rows, K) that share a scale; None is the whole extent."""
TENSOR: Block = (None, None)
ROW: Block = (1, None)
GROUP: Block = (1, BLOCK)
SQUARE: Block = (BLOCK, BLOCK)
COLUMN: Block = (BLOCK, 1)
MX_GROUP: Block = (1, MX_BLOCK)
MX_COLUMN: Block = (MX_BLOCK, 1)


class Division(Enum):
    """How an amax becomes a scale or a multiplier. Each operation rounds once, to the dtype of the arithmetic."""

    QUOTIENT = "s = amax / 448"
    """The IEEE quotient: torch on a CPU, `__fdiv_rn` and CUDA's `/` without fast math."""
    RECIPROCAL = "s = amax * fl(1/448)"
    """torch's `tensor / number` on CUDA; XLA's division by a constant, whose 1/448 is float16 for float16."""
    MULTIPLIER = "t = 448 / amax"
    """The IEEE quotient, as `torch.div(448.0, amax)` gives it. Then `s = 1/t`, rounded."""
    MULTIPLIER_BY_RECIPROCAL = "t = fl(1/amax) * 448"
    """torch's `number / tensor`: two roundings. Then `s = 1/t`, rounded."""
    EXPONENT = "s = 2^(exponent(amax) - 8)"
    """The exponent field of amax as float32, after `carry` is added to its bits: the rules of Microscaling."""


class Arithmetic(Enum):
    """The dtype of a step."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    """Computed in float64, then rounded to float32."""
    INPUT = "x's dtype"
    """Computed in float32, each result rounded to the dtype of the matrix."""

    @property
    def suffix(self) -> str:
        """The words of a formula for this arithmetic; empty for float32."""
        return f" in {self.value}" if self is Arithmetic.INPUT else ""


class PowerOfTwo(Enum):
    """How a scale becomes a power of two."""

    UP = "s up to 2^k"
    """By the bits, exactly."""
    UP_LOG2 = "s = 2^ceil(log2 s)"
    """log2 is rounded to float32, and is k for some s just above 2^k."""
    UP_LN = "s = 2^ceil(ln s / ln 2)"
    """XLA's log2: ln, ln 2 and the quotient are rounded to x's dtype. It misses more, in 16 bits far from 2^k too."""
    DOWN = "t down to 2^k"
    """By the bits, exactly."""
    DOWN_LOG2 = "t = 2^floor(log2 t)"
    """log2 is rounded to float32, and is k for some t just below 2^k."""


class Limit(Enum):
    """A number that depends on the dtype of the arithmetic, from its `finfo`."""

    EPSILON = "eps"
    ROOT_OF_TINY = "sqrt(tiny)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleForm:
    """How an amax becomes a scale, in the order of the fields: up to `amax_floor` before the division, then after it.

    None and 0 leave a step out.
    """

    division: Division
    arithmetic: Arithmetic = Arithmetic.FLOAT32
    largest: float = 448.0
    """What an amax is scaled to, in the place of 448 above."""
    ignores_nan: bool = False
    """A NaN is no magnitude (fmax of C). False: it makes amax NaN."""
    nan_amax: float | None = None
    """What a NaN amax counts as."""
    infinite_amax: float | None = None
    """What an infinite amax counts as."""
    small_amax: tuple[float, float] | None = None
    """(limit, instead): an amax of at most `limit` counts as `instead`."""
    amax_floor: float = 0.0
    """`amax = max(amax, amax_floor)`."""
    carry: int = 0
    """What EXPONENT adds to the float32 bits of amax: 0 rounds the exponent down, 0x7FFFFF up."""
    largest_multiplier: Arithmetic | None = None
    """An infinite t becomes the largest finite number of this dtype."""
    small_scale: tuple[float | Limit, float | Limit] | None = None
    """(limit, instead): an s of at most (with ROOT_OF_TINY: below) `limit` becomes `instead`."""
    scale_floor: float = 0.0
    """`s = max(s, scale_floor)`."""
    power_of_two: PowerOfTwo | None = None
    exponents: tuple[int, int] = (0, 254)
    """The range of the biased exponent of a power of two; `2^(byte - 127)`."""

    @property
    def is_multiplier(self) -> bool:
        """Whether t comes first, and s from it."""
        return self.division in (Division.MULTIPLIER, Division.MULTIPLIER_BY_RECIPROCAL)

    @property
    def is_power_of_two(self) -> bool:
        return self.power_of_two is not None or self.division is Division.EXPONENT

    @property
    def least_amax(self) -> float:
        """The smallest amax, as the dtype of the division has it, that the two floors leave."""
        (rounded,) = struct.unpack("f", struct.pack("f", self.amax_floor))
        of_amax = self.amax_floor if self.arithmetic is Arithmetic.FLOAT64 else rounded
        return max(of_amax, self.scale_floor * self.largest)

    @property
    def formula(self) -> str:
        """The steps in a line."""
        amax = f"max(amax, {self.amax_floor:g})" if self.amax_floor else "amax"
        division = self.division.value.replace("amax", amax).replace("448", f"{self.largest:g}")
        if self.carry:
            division = division.replace("exponent(amax)", f"exponent(amax + {self.carry:#x} in the last place)")
        steps = [division + self.arithmetic.suffix]
        if self.scale_floor:
            steps.append(f"at least {self.scale_floor:g}")
        if self.power_of_two is not None:
            steps.append(self.power_of_two.value)
        if self.small_scale is not None:
            limit, instead = (one.value if isinstance(one, Limit) else f"{one:g}" for one in self.small_scale)
            steps.append(f"{limit} becomes {instead}" if limit == "0" else f"s below {limit} becomes {instead}")
        if self.small_amax is not None:
            limit, instead = self.small_amax
            steps.insert(0, f"amax {f'up to {limit:g}' if limit else '0'} counts as {instead:g}")
        return ", ".join(steps)


class CodeRule(Enum):
    """How a value becomes the number that is cast to float8. Each operation rounds once."""

    QUOTIENT = "x / s"
    INVERSE = "x * (1/s)"
    """The inverse is rounded too."""
    MULTIPLIER = "x * t"


class NanCode(Enum):
    """The code of a NaN of x."""

    NAN = "NaN"
    """0x7F here. Stacks give 0x7F or 0xFF, and nobody promises which."""
    MAX = "+448"
    """The clamp `fmax(-448, fmin(x, 448))`."""
    MIN = "-448"
    """The clamp `fmin(448, fmax(x, -448))`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeForm:
    """How a block's values become codes: the product or quotient, then a saturating cast to float8."""

    rule: CodeRule
    format: Format = E4M3FN
    arithmetic: Arithmetic = Arithmetic.FLOAT32
    """INPUT: the inverse, and the product or quotient, are rounded to x's dtype before the cast rounds again."""
    is_scale_rounded: bool = False
    """Whether s is rounded to x's dtype first; the stored one is not."""
    nan: NanCode = NanCode.NAN
    scale_floor: float = 0.0
    """`max(s, scale_floor)` is divided by; the stored scale is s."""

    @property
    def formula(self) -> str:
        """The number that is cast."""
        s = f"max(s, {self.scale_floor:g})" if self.scale_floor else "s"
        return self.rule.value.replace("s", s) + self.arithmetic.suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The scale that a stack keeps beside the codes."""

    dtype: str = "float32"
    """`float32`, `float8_e8m0fnu` (stacks view these bytes as uint8) or `input`, x's dtype."""
    is_multiplier: bool = False
    """Whether t is kept. False: s, by which the stack multiplies to decode, whatever the tensor is called."""
    names: tuple[str, ...] = ()
    """Names of the tensor in a checkpoint; none of what is not written to one."""
    is_rounded_to_output: bool = False
    """Whether the stack rounds s to the dtype to which it decodes before it multiplies."""
    layout: str = ""
    """How the stack lays the grid [rows / block rows, K / block K] out, if otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One quantizer of another stack, to float8_e4m3fn.

    Exactness: with `is_compared`, the bytes of that package on a CPU, for float32, bfloat16 and float16; with `gpu`,
    those of its kernels there, for finite x. Otherwise the bytes that the source text gives in IEEE arithmetic. Where
    `caveat`, `scale_ulps` or `code_steps` says so, a stack differs.
    """

    name: str
    stack: str
    source: str
    """File and function."""
    version: str
    is_compared: bool = False
    """Whether the tests compare every byte with the package `version`, PACKAGE==VERSION; otherwise it was read."""
    gpu: str = ""
    """The GPU on which its kernels gave these bytes for finite x: benchmarks.proofs.dialects_on_gpu."""
    scale: ScaleForm | None
    """None: the scale is given, from a calibration or a checkpoint."""
    code: CodeForm
    stored: Stored = Stored()
    blocks: tuple[Block, ...]
    """The blocks that it exists with, the usual one first."""
    caveat: str = ""
    """Corners in which the stack's bytes differ from these, and what else it depends on."""
    scale_ulps: int = 0
    """How far the stack's scale may be from this one, in units of its last place: its arithmetic is not IEEE."""
    code_steps: int = 0
    """How far its codes may be from these, in neighbouring codes, given the same scale."""

    def __repr__(self) -> str:
        return f"Dialect({self.name!r})"

    @property
    def standing(self) -> str:
        """`compared with PACKAGE==VERSION`, with `on an H100` if its kernels ran there; or `read in VERSION`."""
        where = ["on a CPU"] if self.is_compared else []
        if self.gpu:
            where.append(f"on an {self.gpu}")
        return f"compared with {self.version} {' and '.join(where)}" if where else f"read in {self.version}"

    @property
    def formula(self) -> str:
        """The rule in a line, as tables and errors show it."""
        return f"{self.scale.formula if self.scale else 's given'}; code = {self.code.formula}"

    @property
    def scale_rule(self) -> ScaleRule:
        """The `ScaleRule` with which f8emu's own casts give the bytes of this dialect, for finite inputs; see `caveat`.

        They multiply by an inverse scale that is correctly rounded from `448 / max(amax, floor)`, so a dialect has one
        if it does the same, or if its scales are powers of two, which leave nothing to round. An E8M0 rule gives the
        scales of any amax, and the codes of blocks whose byte is 1 to 254.

        Raises:
            UnsupportedError: there is none; the message says why.
        """
        form = self.scale
        if form is not None and MX_GROUP in self.blocks and (rule := self._e8m0_rule(form)) is not None:
            return ScaleRule(e8m0=rule)
        if form is None:
            why = "its scales are given"
        elif form.division is Division.EXPONENT or form.power_of_two not in (None, PowerOfTwo.UP, PowerOfTwo.DOWN):
            why = "its powers of two are not always those next to 448 / amax"
        elif self.stored.dtype == "input" or form.arithmetic is Arithmetic.INPUT:
            why = "its scales are rounded to the dtype of x, a ScaleRule's are float32"
        elif form.small_amax or form.small_scale or not MIN_AMAX_FLOOR <= form.least_amax < 1:
            why = "it gives an all-zero block a scale of its own, or none"
        else:
            is_alike = form.division is Division.MULTIPLIER and self.code.rule is CodeRule.MULTIPLIER
            if form.power_of_two or is_alike:
                return ScaleRule(power_of_two=form.is_power_of_two, amax_floor=form.least_amax)
            why = "it divides by the scale and a recipe multiplies by the inverse, so codes would differ"
        raise UnsupportedError(
            f"Dialect.scale_rule: no ScaleRule gives the bytes of {self.name}, {self.formula}: {why}; quantize with "
            "f8emu.dialects.quantize"
        )

    def _e8m0_rule(self, form: ScaleForm) -> E8M0Rule | None:
        if form.power_of_two is PowerOfTwo.UP and not form.is_multiplier:
            return E8M0Rule.RCEIL
        carries = {rule.carry(self.code.format): rule for rule in E8M0Rule}
        return carries.get(form.carry) if form.division is Division.EXPONENT else None

"""The shape of a chip's profile: what it multiplies and how it adds, as data. `f8emu.spec.chips` holds the profiles.

`reference/NUMERICS.md` states the rules by id. No algorithm names a chip: another chip is another instance.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.formats import E8M0FNU, FLOAT32, Format, changed_fields
from f8emu.spec.scaling import Granularity, granularity_by_name


class Evidence(Enum):
    """The evidence behind a profile."""

    RECORDED = "recorded"
    """Whole GEMMs recorded on the chip have these bits."""
    RECORDED_INSTRUCTION = "instructions recorded, GEMMs around them assumed"
    """Public recordings of single instructions have these bits. How the chip's library chains and scales is taken to be
    as on Hopper."""
    AGREES_WITH_MODEL = "instructions agree with a model validated on silicon, GEMMs around them assumed"
    """Single instructions have the bits of MMA-Sim, whose authors compared it with the chip
    (`benchmarks.proofs.mma_sim`). Order over K, split-K, scales and bias of whole GEMMs are taken from other chips."""
    LITERATURE = "unverified"
    """Published descriptions only; nothing recorded was replayed here."""


class Rounding(Enum):
    """How the sum of a step becomes the accumulator."""

    TOWARD_ZERO = "toward zero"
    """[ACC-5]"""
    NEAREST_EVEN = "nearest even"
    """[CHIP-4]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlooredSum:
    """[CHIP-6] A step that adds up its products first, apart from the accumulator, and floors what it aligns."""

    interleaved: int
    """The number of partial sums; products k, k + this, k + 2 * this, ... form one. The sums are then aligned and
    floored."""
    fraction_bits: int
    """The sum of the products is floored to this many bits below the largest exponent, the accumulator's included."""
    accumulator_fraction_bits: int
    """The accumulator is floored to this many bits below that exponent."""
    accumulator_reach: int | None
    """An accumulator whose exponent is further than this below the largest is dropped; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationModel:
    """One tensor-core step and how steps are chained along K."""

    step_k: int
    """[ACC-1] K is consumed in order, this many products at a time; a shorter tail is zero-padded."""
    aligned_fraction_bits: int
    """[ACC-3] Every term of a step is cut toward zero to a multiple of `2^(e_max - this)`."""
    result_fraction_bits: int
    """[ACC-5] The sum of a step is normalised and cut toward zero, or rounded, to this many fraction bits."""
    promote_k: int | None
    """[CHAIN-2] After this much of K the chain restarts from zero, and the partial is added to a total of the
    accumulator's format with round to nearest even; None [CHAIN-1] is one chain over all of K."""
    split_k_multiple: int
    """[CHAIN-3] The length of a split-K slice is `ceil(K / S)` rounded up to a multiple of this."""
    rounding: Rounding = Rounding.TOWARD_ZERO
    """[ACC-5], [CHIP-4] How the sum of a step is rounded."""
    accumulator: Format = FLOAT32
    """The format with the exponent range of the accumulator: float32 or float16."""
    order: tuple[int, ...] = ()
    """[CHIP-2] The order in which K is consumed within every `len(order)` of it; () is the order of K."""
    operand: Format | None = None
    """[CHIP-1] The operands are first converted to this format, which is exact; its raw exponents then count."""
    floored: FlooredSum | None = None
    """[CHIP-6] A floored sum in place of the one sum of [ACC-2] to [ACC-4]; None is one sum."""
    zero_exponent: int | None = None
    """[BF16-1], [MX-3] The exponent that a term of zero has in [ACC-2]; None: it takes no part. Only that of an
    accumulator of zero matters: any other has a larger one."""

    def __repr__(self) -> str:
        return changed_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """`d = dot(a, b) + c` by one matrix instruction, or by several in a row if K is longer than one."""

    name: str
    """The assembler's name, without shapes that make no difference."""
    format_pairs: tuple[tuple[Format, Format], ...]
    """Formats of (a, b)."""
    out: Format
    """The format of c and d."""
    model: AccumulationModel
    is_microscaled: bool = False
    """Whether a and b have an E8M0 scale for every 32 of K [MX-2]."""

    def __repr__(self) -> str:
        """The name and the types; the model has a repr of its own."""
        return f"Instruction({self.name!r}, {_pairs(self.format_pairs)} -> {self.out})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The GEMMs of one chip and its library."""

    name: str
    evidence: Evidence
    capability: tuple[int, int] | None
    """The CUDA compute capability of the devices whose own library has these bits; None: torch and JAX run such a GEMM
    on no device."""

    format_pairs: tuple[tuple[Format, Format], ...]
    """Float8 formats (a, b) that the chip multiplies."""
    block_scaled_format_pairs: tuple[tuple[Format, Format], ...]
    """The pairs of `format_pairs` that may have block scales."""
    granularity_pairs: tuple[tuple[Granularity, Granularity], ...]
    """Granularities (a, b) of the scales that one GEMM takes. A recipe may also pair rowwise with tensorwise: the one
    scale is then repeated for every row, and the GEMM is rowwise."""

    size_multiple: int
    """K and N must be multiples of this."""
    vector_multiple: int
    """The rows of an `a` with 1x128 scales must be a multiple of this."""

    float8: AccumulationModel
    """Float8 operands, `use_fast_accum=False`."""
    float8_fast: AccumulationModel
    """Float8 operands, `use_fast_accum=True`."""
    bfloat16: AccumulationModel
    """bfloat16 operands [BF16-1], [BF16-2]."""
    block_scaled: AccumulationModel
    """Float8 operands with block scales: the chain within each block of K. [EPI-5] adds up the blocks."""
    square_split_k_multiple: int
    """[CHAIN-3] The `split_k_multiple` of `block_scaled` if one operand has 128x128 scales."""
    instructions: tuple[Instruction, ...] = ()
    """Single instructions, for `mma`; if two fit, the first is taken."""
    microscaled: AccumulationModel | None = None
    """Float8 operands with E8M0 scales of 32 along K [MX-4]; None: the chip has no such GEMM."""
    plan: str = ""
    """The GPU of the split-K plan [PLAN-7], as its driver names it; "": there is none, and S is 1."""

    def __repr__(self) -> str:
        """The name alone: the fields of a profile are screens of every signature that has one as a default."""
        return f"Chip({self.name!r}, ...)"

    def __str__(self) -> str:
        """The name; that of a profile from the literature says so."""
        return self.name if self.evidence is not Evidence.LITERATURE else f"{self.name} ({self.evidence.value})"

    @property
    def with_evidence(self) -> str:
        """The name, with the evidence of a profile of which no GEMM was recorded."""
        return self.name if self.evidence is Evidence.RECORDED else f"{self.name} ({self.evidence.value})"

    @property
    def operand_formats(self) -> tuple[Format, ...]:
        """The float8 formats that the chip multiplies, in the order in which `format_pairs` names them."""
        return tuple(dict.fromkeys(format for pair in self.format_pairs for format in pair))

    def accumulation(
        self, granularities: tuple[Granularity, Granularity] | None, *, use_fast_accum: bool = False
    ) -> AccumulationModel:
        """How operands with scales of granularities (a, b) are accumulated; None: bfloat16 operands."""
        if granularities is None:
            return self.bfloat16
        if granularities[0].is_microscaled:
            assert self.microscaled is not None, self
            return self.microscaled
        if not granularities[0].is_blockwise:
            return self.float8_fast if use_fast_accum else self.float8
        # Block scales have one accumulation; with 128x128 scales its slices are longer [CHAIN-3].
        if Granularity.BLOCKWISE_128X128 not in granularities:
            return self.block_scaled
        return replace(self.block_scaled, split_k_multiple=self.square_split_k_multiple)

    def instruction(
        self, call: str, formats: tuple[Format, Format], out: Format, *, is_microscaled: bool = False
    ) -> Instruction:
        """The instruction for operands (a, b), with block scales or not, and an accumulator of format `out`."""
        for instruction in self.instructions:
            kind = (instruction.out, instruction.is_microscaled)
            if formats in instruction.format_pairs and kind == (out, is_microscaled):
                return instruction
        known = "; ".join(
            f"{_pairs(i.format_pairs)}{' with E8M0 scales' if i.is_microscaled else ''} -> {i.out}"
            for i in self.instructions
        )
        scaled = " with E8M0 scales" if is_microscaled else ""
        raise UnsupportedError(
            f"{call}: the profile of {self} has the instructions {known or 'none'}; got {_pairs([formats])}{scaled} -> "
            f"{out}; cast to one of these, or choose another chip"
        )

    def refusal(
        self,
        formats: tuple[Format, Format],
        granularities: tuple[Granularity, Granularity],
        *,
        use_fast_accum: bool = False,
    ) -> str | None:
        """Why the chip has no such scaled GEMM of (a, b), and the remedy; None if it has one."""
        pair, scales = _pairs([formats]), _pairs([granularities])
        if formats not in self.format_pairs:
            return f"{self} multiplies {_pairs(self.format_pairs)}; got {pair}; cast to one of these"
        if granularities not in self.granularity_pairs:
            of_rows = "; to use a tensorwise scale beside rowwise ones, repeat it for every row"
            is_mx = all(granularity.is_microscaled for granularity in granularities)
            remedy = f", which {E8M0FNU} scales are; choose the chip B200" if is_mx else of_rows
            return f"{self} takes scales {_pairs(self.granularity_pairs)}; got {scales}{remedy}"
        if not granularities[0].is_blockwise:
            return None
        if formats not in self.block_scaled_format_pairs and not granularities[0].is_microscaled:
            known = _pairs(self.block_scaled_format_pairs)
            return f"{self} takes block scales of {known}; got {pair}; cast to one of these, or scale by row"
        if use_fast_accum:
            return f"{self} has no fast accumulation beside block scales; pass use_fast_accum=False"
        return None

    def padded_sizes(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """M, N and K of a GEMM whose operands are zero-padded for the library; it takes any M."""
        return m, n + -n % self.size_multiple, k + -k % self.size_multiple

    def granularities_of(
        self,
        call: str,
        sizes: tuple[int, int, int],
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        given: tuple[Granularity | str | None, Granularity | str | None],
        scale_format: Format = FLOAT32,
    ) -> tuple[Granularity, Granularity]:
        """The granularities of a scaled GEMM of M, N, K: the first pair that fits the format and shapes of its scales.

        The scales of b are those of its transpose [N, K], transposed. `given` is what the caller gives; None: any.
        """
        # The pairs in the chip's order: the first whose shapes fit holds, as in `torch._scaled_mm`.
        m, n, k = sizes
        given_a, given_b = (g if g is None else granularity_by_name(call, g) for g in given)
        expected: list[str] = []
        for pair in self.granularity_pairs:
            if given_a not in (None, pair[0]) or given_b not in (None, pair[1]):
                continue
            if pair[0].scale_format != scale_format:
                continue
            rows, columns = pair[1].scale_shape(n, k)
            wanted = pair[0].scale_shape(m, k), (columns, rows)
            is_one = pair[0] is Granularity.TENSORWISE
            if math.prod(shapes[0]) == math.prod(shapes[1]) == 1 if is_one else shapes == wanted:
                return pair
            expected.append(f"{list(wanted[0])} and {list(wanted[1])} for {pair[0].value} x {pair[1].value}")
        if not expected:
            mx = (Granularity.BLOCKWISE_1X32, Granularity.BLOCKWISE_1X32)
            kinds = (given_a or given_b or mx[0], given_b or given_a or mx[1])
            is_of_others = scale_format == E8M0FNU and mx not in self.granularity_pairs
            refusal = self.refusal(self.format_pairs[0], mx if is_of_others else kinds)
            mixed = (
                f"scales of {mx[0].value} are {E8M0FNU}, and no others are; got {scale_format} scales for "
                f"{_pairs([kinds])}; name {mx[0].value} for both, and view bytes as {E8M0FNU}"
            )
            raise UnsupportedError(f"{call}: {refusal or mixed}")
        raise OperandError(
            f"{call}: scale_a and scale_b of a [{m}, {k}] @ [{k}, {n}] must have shapes {'; or '.join(expected)}; got "
            f"{list(shapes[0])} and {list(shapes[1])}; scales of b are those of its transpose [N, K], transposed"
        )


def _pairs(pairs: Iterable[tuple[Format | Granularity, Format | Granularity]]) -> str:
    return ", ".join(" x ".join(x.name if isinstance(x, Format) else x.value for x in pair) for pair in pairs)

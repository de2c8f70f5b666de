"""What a chip multiplies and how it adds, as data.

The numbers of `HOPPER` are measured on an NVIDIA H200; `reference/NUMERICS.md` states the rules by id. The algorithms
are in `f8ref.exact`, `f8ref.numpy` and `f8ref.jax`, each written on its own. None of them names a chip: another chip is
another instance here.
"""

from dataclasses import dataclass, replace

from f8emu.spec.formats import E4M3FN, E5M2, Format
from f8emu.spec.scaling import Granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationModel:
    """One tensor-core step and how steps are chained along K."""

    step_k: int
    """[ACC-1] K is consumed in order, this many products at a time; a shorter tail is zero-padded."""
    aligned_fraction_bits: int
    """[ACC-3] Every term of a step is cut toward zero to a multiple of `2^(e_max - this)`."""
    result_fraction_bits: int
    """[ACC-5] The sum of a step is normalised and cut toward zero to this many fraction bits."""
    promote_k: int | None
    """[CHAIN-2] After this much of K the chain restarts from zero, and the partial is added to a float32 total
    with round to nearest even; None [CHAIN-1] is one chain over all of K."""
    split_k_multiple: int
    """[CHAIN-3] The length of a split-K slice is `ceil(K / S)` rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The GEMMs of one chip and its library."""

    name: str
    capability_major: int
    """CUDA's compute capability before the dot."""

    format_pairs: tuple[tuple[Format, Format], ...]
    """Float8 formats (a, b) that are multiplied."""
    block_scaled_format_pairs: tuple[tuple[Format, Format], ...]
    """Those of them that may have block scales."""
    granularity_pairs: tuple[tuple[Granularity, Granularity], ...]
    """Granularities (a, b) of the scales that one GEMM takes. A recipe may also pair rowwise with tensorwise: the one
    scale is then repeated for every row, and the GEMM is rowwise."""

    size_multiple: int
    """K and N are multiples of this."""
    vector_multiple: int
    """The rows of an `a` with 1x128 scales are a multiple of this."""

    float8: AccumulationModel
    """Float8 operands, `use_fast_accum=False`."""
    float8_fast: AccumulationModel
    """Float8 operands, `use_fast_accum=True`."""
    bfloat16: AccumulationModel
    """bfloat16 operands [BF16-1], [BF16-2]."""
    block_scaled: AccumulationModel
    """Float8 operands with block scales: the chain within each block of K. [EPI-5] adds up the blocks."""
    square_split_k_multiple: int
    """[CHAIN-3] Where one operand has 128x128 scales, in place of the `split_k_multiple` of `block_scaled`."""

    @property
    def operand_formats(self) -> tuple[Format, ...]:
        """The float8 formats that are multiplied, in the order in which `format_pairs` names them."""
        return tuple(dict.fromkeys(format for pair in self.format_pairs for format in pair))

    def float8_model(self, *, use_fast_accum: bool) -> AccumulationModel:
        """How float8 operands without block scales are accumulated."""
        return self.float8_fast if use_fast_accum else self.float8

    def block_scaled_model(self, granularities: tuple[Granularity, Granularity]) -> AccumulationModel:
        """How float8 operands with block scales of (a, b) are accumulated."""
        if Granularity.BLOCKWISE_128X128 not in granularities:
            return self.block_scaled
        return replace(self.block_scaled, split_k_multiple=self.square_split_k_multiple)

    def refusal(
        self,
        formats: tuple[Format, Format],
        granularities: tuple[Granularity, Granularity],
        *,
        use_fast_accum: bool = False,
    ) -> str | None:
        """Why there is no such scaled GEMM of (a, b), and the way out; None if there is.

        A call that asks for one raises UnsupportedError with these words, a recipe SpecError.
        """
        if formats not in self.format_pairs:
            return f"{self.name} multiplies {_pairs(self.format_pairs)}; got {_pair(formats)}; cast to one of these"
        if granularities not in self.granularity_pairs:
            return (
                f"{self.name} takes scales {_pairs(self.granularity_pairs)}; got {_pair(granularities)}; "
                "to use a tensorwise scale beside rowwise ones, repeat it for every row"
            )
        if granularities[0].is_blockwise:
            if formats not in self.block_scaled_format_pairs:
                return (
                    f"{self.name} takes block scales of {_pairs(self.block_scaled_format_pairs)}; got "
                    f"{_pair(formats)}; cast to one of these, or scale by row"
                )
            if use_fast_accum:
                return f"{self.name} has no fast accumulation beside block scales; pass use_fast_accum=False"
        return None


def _pairs(pairs: tuple[tuple[Format, Format] | tuple[Granularity, Granularity], ...]) -> str:
    return ", ".join(map(_pair, pairs))


def _pair(pair: tuple[Format, Format] | tuple[Granularity, Granularity]) -> str:
    return " x ".join(x.name if isinstance(x, Format) else x.value for x in pair)


_HOPPER_CHAIN = AccumulationModel(
    step_k=32, aligned_fraction_bits=13, result_fraction_bits=13, promote_k=None, split_k_multiple=128
)

HOPPER = Chip(
    name="Hopper",
    capability_major=9,
    format_pairs=((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2)),
    block_scaled_format_pairs=((E4M3FN, E4M3FN),),
    granularity_pairs=(
        (Granularity.TENSORWISE, Granularity.TENSORWISE),
        (Granularity.ROWWISE, Granularity.ROWWISE),
        (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128),
        (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128),
        (Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128),
    ),
    size_multiple=16,  # the tensor core's operands are read 16 bytes at a time
    vector_multiple=4,  # and so is a column of float32 scales
    float8=replace(_HOPPER_CHAIN, promote_k=128),
    float8_fast=_HOPPER_CHAIN,
    block_scaled=_HOPPER_CHAIN,
    square_split_k_multiple=512,  # four blocks, to which the library pads the columns of 128x128 scales
    bfloat16=AccumulationModel(
        step_k=16, aligned_fraction_bits=25, result_fraction_bits=23, promote_k=None, split_k_multiple=64
    ),
)
"""H100 and H200, sm_90; the bits were recorded on an H200."""

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (HOPPER,)}
"""Every known chip by name."""

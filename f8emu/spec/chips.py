"""The profiles of chips. `HOPPER` is measured on an NVIDIA H200; each of the others names its `evidence`.

`H100` differs from it in the split-K plan alone.

Sources: recordings of single instructions by north-numerical-computing/MATLAB-tensor-core (BSD-2, arXiv 2512.07004),
replayed by `f8emu verify --recordings`; MMA-Sim 2.1.1 (arXiv 2511.10909), compared by `benchmarks.proofs.mma_sim`
(NUMERICS 9).
"""

from dataclasses import replace
from typing import Any

from f8emu.spec.chip import AccumulationModel, Chip, Evidence, FlooredSum, Instruction, Rounding
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FLOAT16, FLOAT32, Format
from f8emu.spec.names import ChipName
from f8emu.spec.scaling import Granularity

_OCP = ((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2), (E5M2, E5M2))
_FNUZ = ((E4M3FNUZ, E4M3FNUZ), (E5M2FNUZ, E4M3FNUZ), (E4M3FNUZ, E5M2FNUZ), (E5M2FNUZ, E5M2FNUZ))
_BF16 = ((BFLOAT16, BFLOAT16),)


def _float16(model: AccumulationModel) -> AccumulationModel:
    """[CHIP-4] The same with a float16 accumulator."""
    return replace(model, accumulator=FLOAT16, result_fraction_bits=10, rounding=Rounding.NEAREST_EVEN)


def _instructions(
    name: str, float8: AccumulationModel, float16: AccumulationModel, bfloat16_name: str, bfloat16: AccumulationModel
) -> tuple[Instruction, ...]:
    return (
        Instruction(name=name, format_pairs=_OCP, out=FLOAT32, model=float8),
        Instruction(name="mma" if name == "wgmma" else name, format_pairs=_OCP, out=FLOAT16, model=_float16(float16)),
        Instruction(name=bfloat16_name, format_pairs=_BF16, out=FLOAT32, model=bfloat16),
    )


_HOPPER_CHAIN = AccumulationModel(
    step_k=32, aligned_fraction_bits=13, result_fraction_bits=13, promote_k=None, split_k_multiple=128
)
_BFLOAT16_CHAIN = AccumulationModel(
    step_k=16,
    aligned_fraction_bits=25,
    result_fraction_bits=23,
    promote_k=None,
    split_k_multiple=64,
    zero_exponent=-133,  # [BF16-1]
)
_CONVERTED = AccumulationModel(
    step_k=16,
    aligned_fraction_bits=25,
    result_fraction_bits=23,
    promote_k=32,  # [CHIP-3] one instruction, to which c is added
    split_k_multiple=128,
    # [CHIP-2] A thread holds four neighbours of K in a register; its lower half makes the first step.
    order=tuple(k for first in (0, 2) for k in range(32) if k % 4 in (first, first + 1)),
    operand=FLOAT16,  # [CHIP-1]
)
"""Float8 `mma.sync` where the tensor core has no such instruction: two of float16 [CHIP-1..3]."""

HOPPER = Chip(
    name="Hopper",
    evidence=Evidence.RECORDED,
    capability=(9, 0),
    format_pairs=_OCP[:3],
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
    bfloat16=_BFLOAT16_CHAIN,
    instructions=_instructions("wgmma", _HOPPER_CHAIN, _CONVERTED, "mma", _BFLOAT16_CHAIN),
    plan="NVIDIA H200",
)
"""sm_90: the H200, on which the bits were recorded, and any other Hopper GPU if that multiplies by itself."""

H100 = replace(HOPPER, name="H100", plan="NVIDIA H100 80GB HBM3")
"""The H100 with 80 GB of HBM3, whose library splits K otherwise than an H200's [PLAN-7]."""


def _other(name: str, chain: AccumulationModel, **fields: Any) -> Chip:
    """A profile with one chain for all float8; nothing is known of its block scales."""
    known = {"block_scaled_format_pairs": (), "granularity_pairs": HOPPER.granularity_pairs[:2], "plan": ""}
    chains: dict[str, Any] = {"float8": chain, "float8_fast": chain, "block_scaled": chain}
    return replace(HOPPER, name=name, **{**known, **chains, **fields})


_ADA_CHAIN = replace(_HOPPER_CHAIN, step_k=16)
_ADA_BFLOAT16 = replace(_BFLOAT16_CHAIN, step_k=8, aligned_fraction_bits=24, zero_exponent=-132)  # [CHIP-5]

ADA = _other(
    "Ada",
    _ADA_CHAIN,
    evidence=Evidence.RECORDED_INSTRUCTION,
    capability=(8, 9),
    float8=replace(_ADA_CHAIN, promote_k=128),
    bfloat16=_ADA_BFLOAT16,
    instructions=_instructions("mma", _ADA_CHAIN, _ADA_CHAIN, "mma", _ADA_BFLOAT16),
)
"""L40S and other sm_89. Promotion of partial sums every 128 without fast accumulation is assumed, not measured."""

BLACKWELL_MMA = _other(
    "Blackwell mma.sync",
    _CONVERTED,
    evidence=Evidence.RECORDED_INSTRUCTION,
    capability=None,
    instructions=_instructions("mma", _CONVERTED, _CONVERTED, "mma", _BFLOAT16_CHAIN),
)
"""B200, sm_100, for kernels made of `mma.sync`; the library's own kernels use tcgen05."""

_BLACKWELL_CHAIN = replace(_HOPPER_CHAIN, aligned_fraction_bits=25, result_fraction_bits=23)
_MX_CHAIN = replace(_BLACKWELL_CHAIN, zero_exponent=-133)  # [MX-3]


def _blackwell(name: str, instruction: str, capability: tuple[int, int]) -> Chip:
    """[CHIP-7], and MXFP8 [MX-1..5]."""
    chain, scaled = _BLACKWELL_CHAIN, f"{instruction}.block_scale"
    return _other(
        name,
        chain,
        evidence=Evidence.AGREES_WITH_MODEL,
        capability=capability,
        granularity_pairs=(*HOPPER.granularity_pairs[:2], (Granularity.BLOCKWISE_1X32, Granularity.BLOCKWISE_1X32)),
        microscaled=_MX_CHAIN,
        instructions=(
            *_instructions(instruction, chain, chain, instruction, _BFLOAT16_CHAIN),
            Instruction(name=scaled, format_pairs=_OCP, out=FLOAT32, model=_MX_CHAIN, is_microscaled=True),
        ),
    )


BLACKWELL_TCGEN05 = _blackwell("Blackwell tcgen05", "tcgen05.mma", (10, 0))
"""B200, sm_100, as MMA-Sim describes it."""
RTX_BLACKWELL = _blackwell("RTX Blackwell", "mma", (12, 0))
"""RTX 5090, RTX PRO 6000 and other sm_120, as MMA-Sim describes them."""

_CDNA3_CHAIN = AccumulationModel(
    step_k=16,
    aligned_fraction_bits=24,
    result_fraction_bits=23,
    promote_k=None,
    split_k_multiple=128,
    rounding=Rounding.NEAREST_EVEN,
    floored=FlooredSum(interleaved=2, fraction_bits=31, accumulator_fraction_bits=24, accumulator_reach=25),
)
_CDNA3_BFLOAT16 = replace(
    _CDNA3_CHAIN,
    step_k=8,
    split_k_multiple=64,
    floored=FlooredSum(interleaved=1, fraction_bits=31, accumulator_fraction_bits=24, accumulator_reach=None),
    zero_exponent=-126,
)

CDNA3 = _other(
    "CDNA3",
    _CDNA3_CHAIN,
    evidence=Evidence.AGREES_WITH_MODEL,
    capability=None,
    format_pairs=_FNUZ[:3],
    bfloat16=_CDNA3_BFLOAT16,
    instructions=(
        Instruction(name="v_mfma", format_pairs=_FNUZ, out=FLOAT32, model=_CDNA3_CHAIN),
        Instruction(name="v_mfma", format_pairs=_BF16, out=FLOAT32, model=_CDNA3_BFLOAT16),
    ),
)
"""MI300, gfx942, as MMA-Sim describes it [CHIP-6]."""

CHIPS: dict[ChipName, Chip] = {
    "Hopper": HOPPER,
    "H100": H100,
    "Ada": ADA,
    "Blackwell mma.sync": BLACKWELL_MMA,
    "Blackwell tcgen05": BLACKWELL_TCGEN05,
    "RTX Blackwell": RTX_BLACKWELL,
    "CDNA3": CDNA3,
}
"""Every known chip by name."""

GPUS: dict[str, Chip] = {
    **CHIPS,
    **dict.fromkeys(("H200", "sm90"), HOPPER),
    **dict.fromkeys(("L4", "L40", "L40S", "RTX 4090", "sm89"), ADA),
    **dict.fromkeys(("Blackwell", "B100", "B200", "GB200", "sm100"), BLACKWELL_TCGEN05),
    **dict.fromkeys(("RTX 5090", "RTX PRO 6000", "sm120"), RTX_BLACKWELL),
    **dict.fromkeys(("MI300", "MI300A", "MI300X", "gfx942"), CDNA3),
    **{chip.plan: chip for chip in CHIPS.values() if chip.plan},
}
"""Every name of a chip, an architecture or a GPU that is taken for a chip -> its profile."""
RELATED: dict[str, Chip] = {
    **dict.fromkeys(("H20", "H800", "GH200"), HOPPER),
    **dict.fromkeys(("B300", "GB300"), BLACKWELL_TCGEN05),
}
"""GPUs without a profile -> that of their architecture: another number of cores may split K otherwise."""

OPERAND_FORMATS: tuple[Format, ...] = tuple(dict.fromkeys(f for chip in CHIPS.values() for f in chip.operand_formats))
"""Float8 formats that some chip multiplies."""


def chip_by_name(call: str, chip: Chip | str) -> Chip:
    """A chip's profile by a name of `GPUS`, such as `H200` or `hopper`; a profile is returned as it is.

    Raises:
        SpecError: a name that is not in `GPUS`; the message lists them.
    """
    profile = GPUS.get(chip.name if isinstance(chip, Chip) else chip) or named(chip)
    if profile is None or (isinstance(chip, Chip) and profile is not chip and profile != chip):
        if (related := named(chip, related=True)) is not None:
            why = f"of {chip} no split-K plan was recorded; chip={related.name!r} has the bits of its tensor cores"
            raise SpecError(f"{call}: {why}")
        known = ", ".join(map(repr, CHIPS))
        others = ", ".join(name for name, of in GPUS.items() if name not in (of.name, of.plan))
        raise SpecError(f"{call}: chip must be one of {known}, or a name for one of them ({others}); got {chip!r}")
    return profile


def named(name: object, *, related: bool = False) -> Chip | None:
    """The chip of a name of `GPUS` (`related`: or of `RELATED`) in any case, `NVIDIA`, blanks, `-` and `_` left out."""
    if not isinstance(name, str):
        return None
    plain = _plain(name)
    return _GPUS.get(plain) or (_RELATED.get(plain) if related else None)


def _plain(name: str) -> str:
    return name.casefold().removeprefix("nvidia").translate(_SEPARATORS)


# Once: a GEMM asks for its chip at every call.
_SEPARATORS = str.maketrans("", "", " -_")
_GPUS, _RELATED = ({_plain(name): chip for name, chip in chips.items()} for chips in (GPUS, RELATED))

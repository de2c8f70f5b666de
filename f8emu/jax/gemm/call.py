"""One GEMM as verbs and layers describe it to the engines."""

from typing import NamedTuple

from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity


class Gemm(NamedTuple):
    """What is static of a GEMM. Its operands are `a, b` of an `mm`, `a, b, scale_a, scale_b` and a bias if there is one
    of a `scaled_mm`, `a, b, scale_a, scale_b, offs` of a `scaled_grouped_mm`.
    """

    call: str
    """The verb."""
    out_dtype: Format
    chip: Chip = HOPPER
    granularities: tuple[Granularity, Granularity] | None = None
    """The granularities of scale_a and scale_b; None: an `mm`."""
    use_fast_accum: bool = False
    split_k: int | None = None
    """The number of slices of K that the caller gives; None: the library's or the plan's."""
    engine: str = "auto"
    is_transposed: bool = False
    """Whether the product is wanted as [N, M]."""
    layout: str = "nn"
    """How the operands of an `mm` lie in memory, as the plan names it."""
    sharded_k: str = "gather"
    """What is done where XLA divides both operands along K (`gemm.partition`)."""
    powers_of_two: bool = False
    """Whether a product may be rounded before it is scaled (`hardware.form_of`)."""

    @property
    def is_blockwise(self) -> bool:
        return self.granularities is not None and self.granularities[0].is_blockwise

    @property
    def model(self) -> AccumulationModel:
        """How the chip adds."""
        return self.chip.accumulation(self.granularities, use_fast_accum=self.use_fast_accum)

"""One GEMM as verbs and layers describe it to the engines, and S, the number of slices of K, of an emulated one.

S is the caller's; else the library's on a Hopper GPU, else the plan's. A trace does not know where it will run, and is
taken to be for JAX's default device.
"""

from typing import NamedTuple

import jax
from jax.core import Tracer

from f8emu.jax.lowering import is_device_of
from f8emu.spec import recipe
from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity
from f8emu.split_k.ask import known_split_k, split_of
from f8emu.split_k.gemm import Source, Split, planned_gemm

_CALLER = "f8emu.jax"


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


def split_k_of(gemm: Gemm, a: jax.Array, b: jax.Array) -> int:
    """S of a verb's GEMM or of an engine's."""
    if gemm.split_k is not None:
        return gemm.split_k
    sizes = a.shape[0], b.shape[-1], a.shape[1]
    if gemm.call == "scaled_grouped_mm" or 0 in sizes:
        return 1
    options = {"use_fast_accum": gemm.use_fast_accum, "layout": gemm.layout}
    dtypes = gemm.out_dtype.name, a.dtype.name, b.dtype.name
    question = planned_gemm(sizes, gemm.granularities, dtypes, **options)
    return known_split_k(_CALLER, question, gemm.chip, lambda: _is_at_hand(gemm.chip, a))


def layer_split_k(
    spec: recipe.Gemm, sizes: tuple[int, int, int], layout: str, dtypes: tuple[str, str, str], *, chip: Chip
) -> Split:
    """S of a GEMM of a layer; `dtypes` are those of the product, a and b, `layout` counts in high precision."""
    if 0 in sizes:
        return Split(1, Source.RECORDED)
    pair = None if spec.is_high_precision else spec.scaled_gemm_granularities
    gemm = planned_gemm(sizes, pair, dtypes, use_fast_accum=spec.use_fast_accum, layout=layout)
    return split_of(_CALLER, gemm, chip, lambda: _is_at_hand(chip, None))


def _is_at_hand(chip: Chip, a: jax.Array | None) -> bool:
    devices = jax.devices() if a is None or isinstance(a, Tracer) else a.devices()
    return all(is_device_of(chip, device) for device in devices)

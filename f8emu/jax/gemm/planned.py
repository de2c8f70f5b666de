"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the library's on a Hopper GPU, else the
plan's. A trace does not know where it will run, and is taken to be for JAX's default device.
"""

import jax
from jax.core import Tracer

from f8emu.jax.dtypes import CHIP as TARGET
from f8emu.jax.fused.choice import is_device_of
from f8emu.spec.chip import Chip
from f8emu.spec.formats import Format
from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity
from f8emu.split_k.ask import split_k_at_hand
from f8emu.split_k.gemms import bfloat16_gemm, known_split_k, scaled_gemm
from f8emu.split_k.plan import PlannedGemm, Source, Split, is_planned, split_k

_CALLER = "f8emu.jax"


def scaled_mm_split_k(
    a: jax.Array,
    b: jax.Array,
    formats: tuple[Format, Format],
    granularities: tuple[Granularity, Granularity],
    *,
    out_dtype: Format,
    use_fast_accum: bool,
    chip: Chip,
) -> int:
    """S of a `scaled_mm`."""
    sizes = a.shape[0], b.shape[1], a.shape[1]
    if 0 in sizes or not is_planned(_CALLER, chip):
        return 1
    dtypes = out_dtype.name, formats[0].name, formats[1].name
    gemm = scaled_gemm(TARGET.padded_sizes(*sizes), granularities, dtypes, use_fast_accum=use_fast_accum)
    return known_split_k(_CALLER, gemm, _split(gemm, a, chip), chip)


def mm_split_k(a: jax.Array, b: jax.Array, layout: str, *, out_dtype: Format, chip: Chip) -> int:
    """S of a bfloat16 `mm`; `layout` as cuBLAS names it (`f8emu.split_k.plan.LAYOUTS`)."""
    sizes = a.shape[0], b.shape[1], a.shape[1]
    if 0 in sizes or not is_planned(_CALLER, chip):
        return 1
    gemm = bfloat16_gemm(TARGET.padded_sizes(*sizes), layout, out_dtype.name)
    return known_split_k(_CALLER, gemm, _split(gemm, a, chip), chip)


def layer_split_k(
    spec: Gemm, sizes: tuple[int, int, int], layout: str, dtypes: tuple[str, str, str], *, chip: Chip
) -> Split:
    """S of a GEMM of a layer; `dtypes` are those of the product, a and b, `layout` counts in high precision."""
    if 0 in sizes:
        return Split(1, Source.RECORDED)
    if not is_planned(_CALLER, chip):
        return Split(1, Source.UNKNOWN)
    sizes = TARGET.padded_sizes(*sizes)
    if spec.is_high_precision:
        return _split(bfloat16_gemm(sizes, layout, dtypes[0]), None, chip)
    gemm = scaled_gemm(sizes, spec.scaled_gemm_granularities, dtypes, use_fast_accum=spec.use_fast_accum)
    return _split(gemm, None, chip)


def _split(gemm: PlannedGemm, a: jax.Array | None, chip: Chip) -> Split:
    devices = jax.devices() if a is None or isinstance(a, Tracer) else a.devices()
    if all(is_device_of(chip, device) for device in devices):
        return split_k_at_hand(gemm, chip)
    return split_k(gemm, chip=chip.plan)

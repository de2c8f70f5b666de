"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the library's on a Hopper GPU, else the
plan's. A trace does not know where it will run, and is taken to be for JAX's default device.
"""

import jax
from jax.core import Tracer

from f8emu.jax.fused.choice import is_device_of
from f8emu.spec.chip import Chip
from f8emu.spec.formats import Format
from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity
from f8emu.split_k.ask import known_split_k, split_of
from f8emu.split_k.gemm import Source, Split, planned_gemm

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
    if 0 in sizes:
        return 1
    dtypes = out_dtype.name, formats[0].name, formats[1].name
    gemm = planned_gemm(sizes, granularities, dtypes, use_fast_accum=use_fast_accum)
    return known_split_k(_CALLER, gemm, chip, lambda: _is_at_hand(chip, a))


def mm_split_k(a: jax.Array, b: jax.Array, layout: str, *, out_dtype: Format, chip: Chip) -> int:
    """S of a bfloat16 `mm`; `layout` as cuBLAS names it (`f8emu.split_k.gemm.LAYOUTS`)."""
    sizes = a.shape[0], b.shape[1], a.shape[1]
    if 0 in sizes:
        return 1
    gemm = planned_gemm(sizes, None, (out_dtype.name, "bfloat16", "bfloat16"), layout=layout)
    return known_split_k(_CALLER, gemm, chip, lambda: _is_at_hand(chip, a))


def layer_split_k(
    spec: Gemm, sizes: tuple[int, int, int], layout: str, dtypes: tuple[str, str, str], *, chip: Chip
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

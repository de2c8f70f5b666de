"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the library's on a Hopper GPU, else the
plan's. A trace does not know where it will run, and is taken to be for JAX's default device.
"""

import jax
from jax.core import Tracer

from f8emu.jax.fused.choice import is_device_of
from f8emu.jax.gemm.call import Gemm
from f8emu.spec import recipe
from f8emu.spec.chip import Chip
from f8emu.split_k.ask import known_split_k, split_of
from f8emu.split_k.gemm import Source, Split, planned_gemm

_CALLER = "f8emu.jax"


def split_k_of(gemm: Gemm, a: jax.Array, b: jax.Array) -> int:
    """S of a GEMM."""
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

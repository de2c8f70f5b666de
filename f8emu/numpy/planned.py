"""S, the number of slices of K, of a GEMM whose caller gives none: that of the plan [PLAN-1..7]."""

from f8emu.numpy.dtypes import Array
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity
from f8emu.split_k.gemms import bfloat16_gemm, known_split_k, scaled_gemm
from f8emu.split_k.plan import is_planned, split_k

_CALLER = "f8emu.numpy"
_STACKLEVEL = 4
"""From the plan to the line of the user."""


def scaled_mm_split_k(
    sizes: tuple[int, int, int],
    formats: tuple[Format, Format],
    granularities: tuple[Granularity, Granularity],
    *,
    out_dtype: Format,
    use_fast_accum: bool,
    chip: Chip,
) -> int:
    """S of a `scaled_mm` of M, N and K."""
    if 0 in sizes or not is_planned(_CALLER, chip):
        return 1
    dtypes = out_dtype.name, formats[0].name, formats[1].name
    gemm = scaled_gemm(HOPPER.padded_sizes(*sizes), granularities, dtypes, use_fast_accum=use_fast_accum)
    return known_split_k(_CALLER, gemm, split_k(gemm, chip=chip.plan), chip, stacklevel=_STACKLEVEL)


def mm_split_k(sizes: tuple[int, int, int], layout: str, *, out_dtype: Format, chip: Chip) -> int:
    """S of a bfloat16 `mm` of M, N and K; `layout` as cuBLAS names it (`f8emu.split_k.plan.LAYOUTS`)."""
    if 0 in sizes or not is_planned(_CALLER, chip):
        return 1
    gemm = bfloat16_gemm(HOPPER.padded_sizes(*sizes), layout, out_dtype.name)
    return known_split_k(_CALLER, gemm, split_k(gemm, chip=chip.plan), chip, stacklevel=_STACKLEVEL)


def layout_of(a: Array, b: Array) -> str:
    """The layout of a bfloat16 `mm`, as cuBLAS names it: of two matrices in row-major order "nn"."""
    return "".join("t" if x.strides[1] != x.itemsize and x.strides[0] == x.itemsize else "n" for x in (b, a))

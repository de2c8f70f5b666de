"""The GEMMs as torch operators: `f8emu::scaled_mm`, `f8emu::scaled_grouped_mm` and `f8emu::mm`.

Each is one `torch.library` operator with a fake implementation, so that `torch.compile`, `torch.export` and meta
tensors see a single node. It checks its operands by the hardware's rules (`operands`), then runs on the tensor cores
(`hardware`) or in the emulation of Hopper's (`emulation`).
"""

from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.torch.gemm import emulation, hardware
from f8emu.torch.gemm.checks import check_group_ends, check_mm, check_scaled_grouped_mm, check_scaled_mm
from f8emu.torch.gemm.engine import Engine, resolve_engine
from f8emu.torch.library import fake, operator

_TAGS = (torch.Tag.needs_exact_strides,)
"""A compiler must not change the layouts that the hardware asks for."""


@operator(
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, "
    "bool use_fast_accum, str engine, str? granularity_a, str? granularity_b, int? split_k) -> Tensor",
    tags=_TAGS,
)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    engine: str,
    granularity_a: str | None,
    granularity_b: str | None,
    split_k: int | None,
) -> Tensor:
    """`f8emu.torch.gemm.scaled_mm`, its granularities as names."""
    granularities = check_scaled_mm(
        a,
        b,
        scale_a,
        scale_b,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        split_k=split_k,
    )
    options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    if resolve_engine("scaled_mm", a.device, engine) is Engine.HARDWARE:
        _refuse_split_k("scaled_mm", split_k)
        return hardware.scaled_mm(a, b, scale_a, scale_b, granularities, **options)
    return emulation.scaled_mm(a, b, scale_a, scale_b, granularities, **options, split_k=split_k or 1)


@operator(
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, ScalarType out_dtype, "
    "bool use_fast_accum, str engine) -> Tensor",
    tags=_TAGS,
)
def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    engine: str,
) -> Tensor:
    """`f8emu.torch.scaled_grouped_mm`."""
    check_scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=out_dtype)
    options: dict[str, Any] = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    if resolve_engine("scaled_grouped_mm", a.device, engine) is Engine.HARDWARE:
        return hardware.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **options)
    if offs.device.type == "cpu":  # on a GPU the values would have to be waited for
        check_group_ends(offs, a.shape[0])
    return emulation.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **options)


@operator(schema="(Tensor a, Tensor b, ScalarType out_dtype, str engine, int? split_k) -> Tensor", tags=_TAGS)
def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, engine: str, split_k: int | None) -> Tensor:
    """`f8emu.torch.mm`."""
    check_mm(a, b, out_dtype=out_dtype, split_k=split_k)
    if resolve_engine("mm", a.device, engine) is Engine.HARDWARE:
        _refuse_split_k("mm", split_k)
        return hardware.mm(a, b, out_dtype=out_dtype)
    return emulation.mm(a, b, out_dtype=out_dtype, split_k=split_k or 1)


@fake(scaled_mm)
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    engine: str,
    granularity_a: str | None,
    granularity_b: str | None,
    split_k: int | None,
) -> Tensor:
    check_scaled_mm(
        a,
        b,
        scale_a,
        scale_b,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        split_k=split_k,
    )
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@fake(scaled_grouped_mm)
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    engine: str,
) -> Tensor:
    check_scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=out_dtype)
    return a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype)


@fake(mm)
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype, engine: str, split_k: int | None) -> Tensor:
    check_mm(a, b, out_dtype=out_dtype, split_k=split_k)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _refuse_split_k(call: str, split_k: int | None) -> None:
    if split_k is not None:
        raise UnsupportedError(
            f"{call}: on the hardware the library's heuristic decides the split of K; got split_k={split_k}; "
            "pass None, or engine='emulated'"
        )

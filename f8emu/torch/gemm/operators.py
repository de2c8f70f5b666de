"""The GEMMs as torch operators: `f8emu::scaled_mm`, `f8emu::scaled_grouped_mm` and `f8emu::mm`.

An operator checks its operands by the hardware's rules (`checks`) and chooses the engine: tensor cores (`hardware`) or
the emulation of a chip's (`emulation`). In compiled code both happen once, at trace time, and the graph then holds
`aten._scaled_mm` itself, or an opaque operator (`run_scaled_mm`, `run_mm`) where a compiler would change the bits of
the GEMM: emulated, blockwise, in bfloat16, and where Inductor tunes GEMMs. Dispatch modes see `aten.mm`.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from f8emu.spec.chips import CHIPS, HOPPER
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.scaling import Granularity
from f8emu.torch.aten_equivalents import seen_as_mm
from f8emu.torch.gemm import emulation, hardware
from f8emu.torch.gemm.checks import check_group_ends, check_mm, check_scaled_grouped_mm, check_scaled_mm
from f8emu.torch.gemm.engine import Engine, resolve_engine
from f8emu.torch.gemm.planned import mm_split_k, scaled_mm_split_k
from f8emu.torch.library import fake, has_dispatch_mode, operator, signature_of

_TAGS = (torch.Tag.needs_exact_strides,)
"""A compiler must not change the layouts that the hardware requires."""
_DEFAULT = f'"{HOPPER.name}"'
_CHECKED: dict[Any, tuple[ModuleType, dict[str, Any]]] = {}
"""Signature of a `scaled_mm` that was checked -> its engine, a module, and options; emptied when it is full."""
_MOST_CHECKED = 4096


def _plain_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, *settings: Any
) -> Tensor:
    """`scaled_mm` in plain eager code: checked once per signature."""
    signature = signature_of(a), signature_of(b), signature_of(scale_a), signature_of(scale_b), signature_of(bias)
    known = _CHECKED.get((signature, settings))
    if known is None:
        known = _prepared(a, b, scale_a, scale_b, bias, *settings)
        if len(_CHECKED) >= _MOST_CHECKED:
            _CHECKED.clear()  # one step, whatever other threads do
        _CHECKED[signature, settings] = known
    engine, options = known
    return engine.scaled_mm(a, b, scale_a, scale_b, bias=bias, **options)


def _prepared(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, *settings: Any
) -> tuple[ModuleType, dict[str, Any]]:
    """The engine of a `scaled_mm`, and its options, for all operands of the same signature."""
    operands = a, b, scale_a, scale_b
    pair, found = _checked(*operands, bias, *settings)
    out_dtype, use_fast_accum, _, _, _, split_k, *chips = settings
    options: dict[str, Any] = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    if found is Engine.HARDWARE:
        return hardware, {"granularities": pair, **options}
    chip = CHIPS[chips[0]] if chips else HOPPER
    if split_k is None:
        split_k = scaled_mm_split_k(a, b, pair, **options, chip=chip)
    options |= {"granularities": pair, "split_k": split_k, "chip": chip}
    return emulation, {**options, "gemm": emulation.described_scaled_mm(*operands, bias=bias, **options)}


def _checked(
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
    chip: str = HOPPER.name,
) -> tuple[tuple[Granularity, Granularity], Engine]:
    """The granularities and the engine of a `scaled_mm` that the hardware takes."""
    pair = check_scaled_mm(
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
        chip=CHIPS[chip],
    )
    found = resolve_engine("scaled_mm", a.device, engine, CHIPS[chip])
    if found is Engine.HARDWARE:
        _refuse_split_k("scaled_mm", split_k)
    return pair, found


@operator(
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, "
    "bool use_fast_accum, str engine, str? granularity_a, str? granularity_b, int? split_k, "
    f"str chip={_DEFAULT}) -> Tensor",
    opaque=False,
    plain=_plain_scaled_mm,
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
    chip: str = HOPPER.name,
) -> Tensor:
    """`f8emu.torch.scaled_mm`, its granularities as names."""
    operands = a, b, scale_a, scale_b
    settings = out_dtype, use_fast_accum
    pair, found = _checked(*operands, bias, *settings, engine, granularity_a, granularity_b, split_k, chip)
    if found is Engine.HARDWARE and not (pair[0].is_blockwise or (has_dispatch_mode() and _tunes_gemms())):
        options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        return seen_as_mm(a, b, out_dtype, lambda: hardware.scaled_mm(*operands, pair, **options))
    rest = found.value, pair[0].value, pair[1].value, split_k, chip
    return seen_as_mm(a, b, out_dtype, lambda: run_scaled_mm(*operands, bias, *settings, *rest))


@operator(
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, "
    "bool use_fast_accum, str engine, str granularity_a, str granularity_b, int? split_k, "
    f"str chip={_DEFAULT}) -> Tensor",
    tags=_TAGS,
)
def run_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    engine: str,
    granularity_a: str,
    granularity_b: str,
    split_k: int | None,
    chip: str = HOPPER.name,
) -> Tensor:
    """A checked `scaled_mm`, on the chosen engine; `split_k` None is the library's or the plan's."""
    pair = Granularity(granularity_a), Granularity(granularity_b)
    options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    if engine == Engine.HARDWARE.value:
        return hardware.scaled_mm(a, b, scale_a, scale_b, pair, **options)
    if split_k is None:  # here, since sizes may be symbols while a compiler traces
        split_k = scaled_mm_split_k(a, b, pair, out_dtype=out_dtype, use_fast_accum=use_fast_accum, chip=CHIPS[chip])
    return emulation.scaled_mm(a, b, scale_a, scale_b, pair, **options, split_k=split_k, chip=CHIPS[chip])


@operator(
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, ScalarType out_dtype, "
    f"bool use_fast_accum, str engine, str chip={_DEFAULT}) -> Tensor",
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
    chip: str = HOPPER.name,
) -> Tensor:
    """`f8emu.torch.scaled_grouped_mm`."""
    profile = CHIPS[chip]
    check_scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=out_dtype, chip=profile)
    options: dict[str, Any] = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    if resolve_engine("scaled_grouped_mm", a.device, engine, profile) is Engine.HARDWARE:
        return hardware.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **options)
    if offs.device.type == "cpu":  # on a GPU, reading the values would wait for the device
        check_group_ends(offs, a.shape[0])
    return emulation.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **options, chip=profile)


@operator(
    schema=f"(Tensor a, Tensor b, ScalarType out_dtype, str engine, int? split_k, str chip={_DEFAULT}) -> Tensor",
    opaque=False,
)
def mm(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, engine: str, split_k: int | None, chip: str = HOPPER.name
) -> Tensor:
    """`f8emu.torch.mm`."""
    check_mm(a, b, out_dtype=out_dtype, split_k=split_k)
    found = resolve_engine("mm", a.device, engine, CHIPS[chip])
    if found is Engine.HARDWARE:
        _refuse_split_k("mm", split_k)
    return seen_as_mm(a, b, out_dtype, lambda: run_mm(a, b, out_dtype, found.value, split_k, chip))


@operator(
    schema=f"(Tensor a, Tensor b, ScalarType out_dtype, str engine, int? split_k, str chip={_DEFAULT}) -> Tensor",
    tags=_TAGS,
)
def run_mm(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, engine: str, split_k: int | None, chip: str = HOPPER.name
) -> Tensor:
    """A checked `mm`, on the chosen engine; `split_k` None is the library's or the plan's."""
    if engine == Engine.HARDWARE.value:
        return hardware.mm(a, b, out_dtype=out_dtype)
    if split_k is None:
        split_k = mm_split_k(a, b, out_dtype=out_dtype, chip=CHIPS[chip])
    return emulation.mm(a, b, out_dtype=out_dtype, split_k=split_k, chip=CHIPS[chip])


@fake(run_scaled_mm)
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *_: Any
) -> Tensor:
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
    chip: str = HOPPER.name,
) -> Tensor:
    check_scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=out_dtype, chip=CHIPS[chip])
    return a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype)


@fake(run_mm)
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype, *_: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@register_flop_formula([torch.ops.f8emu.run_scaled_mm, torch.ops.f8emu.run_mm])
def _flops(a_shape: list[int], b_shape: list[int], *_: Any, **__: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def _tunes_gemms() -> bool:
    """Whether Inductor may replace the library's GEMMs by its own kernels, which give other bits."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and (config.max_autotune or config.max_autotune_gemm)


def _refuse_split_k(call: str, split_k: int | None) -> None:
    if split_k is not None:
        raise UnsupportedError(
            f"{call}: on the hardware the library's heuristic decides the split of K; got split_k={split_k}; "
            "pass None, or engine='emulated'"
        )

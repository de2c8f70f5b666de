"""The GEMMs as torch operators: `f8emu::scaled_mm`, `f8emu::scaled_grouped_mm` and `f8emu::mm`.

An operator checks its operands by the hardware's rules and chooses what computes it (`engine`): tensor cores
(`hardware`) or the emulation of a chip's (`emulation`). In compiled code both happen once, at trace time, and the graph
then holds `aten._scaled_mm` itself, or an opaque operator (`run_scaled_mm`, `run_mm`) where a compiler would change the
bits of the GEMM: emulated, blockwise, in bfloat16, and where Inductor tunes GEMMs. Dispatch modes see `aten.mm`.

DTensor multiplies shards of rows or columns without communication, with the bits of the whole. It gathers shards of K,
which would be added in another order. S [CHAIN-3] of an emulated GEMM is that of the whole sizes; tensor cores choose S
by those of the rank.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from f8emu.native import gemm as native
from f8emu.spec.chips import CHIPS, HOPPER
from f8emu.spec.gemm_call import GemmCall
from f8emu.spec.scaling import MX_BLOCK, Granularity
from f8emu.torch.cast import dequantize
from f8emu.torch.fused.availability import kernels_for
from f8emu.torch.gemm import emulation, hardware
from f8emu.torch.gemm.engine import (
    Checked,
    Engine,
    checked_mm,
    checked_scaled_grouped_mm,
    checked_scaled_mm,
    resolve_engine,
)
from f8emu.torch.library import fake, has_dispatch_mode, is_known, operator, seen_as_mm
from f8emu.torch.torch_internals import is_dtensor

_MULTIPLE = 16  # of the columns that a rank multiplies: the hardware's rule
_TAGS = (torch.Tag.needs_exact_strides,)  # a compiler must not change the layouts that the hardware requires
_SCALED_MM = (
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, bool use_fast_accum, "
    f'str engine, str? granularity_a, str? granularity_b, int? split_k, str chip="{HOPPER.name}") -> Tensor'
)
_SCALED_GROUPED_MM = (
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? offs, ScalarType out_dtype, bool use_fast_accum, "
    f'str engine, str chip="{HOPPER.name}") -> Tensor'
)
_MULTIPLY_GROUPS = (
    "(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor offs, ScalarType out_dtype, bool use_fast_accum, "
    "str engine, str chip) -> Tensor"
)
_MM = f'(Tensor a, Tensor b, ScalarType out_dtype, str engine, int? split_k, str chip="{HOPPER.name}") -> Tensor'


class _Prepared(NamedTuple):
    """A checked GEMM, for all operands of its signature."""

    gemm: GemmCall
    engine: Engine
    described: native.GemmStruct | None  # the engine's description of an emulated one; None: it is not the engine's


_PREPARED: dict[Any, _Prepared] = {}  # signature of a GEMM -> the GEMM; emptied when it is full
_MOST_PREPARED = 4096


def _prepared(check: Callable[..., Checked], operands: tuple[Any, ...], options: tuple[Any, ...]) -> _Prepared:
    """The GEMM of these operands: checked, and described to the engine, once per signature."""
    # All that a check looks at: of a tensor, everything but its elements and where they lie.
    key = check, options, *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in operands]
    known = _PREPARED.get(key)
    if known is None:
        # 1. The rules of the hardware, and the engine.
        gemm, engine = check(*operands, *options)
        described = None
        if engine is Engine.EMULATED:
            # 2. S [CHAIN-3]: here and not at the call, where sizes may be symbols of a compiler.
            gemm = replace(gemm, split_k=_split_k(gemm, *operands[:2]))
            # 3. The engine's struct, whose addresses alone change from call to call.
            described = None if gemm.groups else emulation.described(gemm, *operands)
        known = _Prepared(gemm, engine, described)
        # Shapes that change with every batch must not fill the memory.
        if len(_PREPARED) >= _MOST_PREPARED:
            _PREPARED.clear()  # one step, whatever other threads do
        _PREPARED[key] = known
    return known


@operator(schema=_SCALED_MM, tags=_TAGS)
def run_scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A `scaled_mm` that a compiler does not look into; `split_k` None is the library's or the plan's."""
    gemm, engine, described = _prepared(checked_scaled_mm, (a, b, scale_a, scale_b, bias), options)
    if engine is Engine.HARDWARE:
        return hardware.scaled_mm(a, b, scale_a, scale_b, bias, gemm)
    return emulation.scaled_mm(a, b, scale_a, scale_b, bias, gemm, described)


@operator(schema=_SCALED_MM, opaque=False, plain=run_scaled_mm.function)
def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """`f8emu.torch.scaled_mm`, its granularities as names; the options are those of `checked_scaled_mm`."""
    operands = a, b, scale_a, scale_b, bias
    gemm, engine = checked_scaled_mm(*operands, *options)
    out_dtype, use_fast_accum, *_ = options
    assert gemm.granularities is not None
    of_a, of_b = gemm.granularities
    read = (
        lambda: dequantize(a, scale_a, of_a, out_dtype=out_dtype),
        lambda: dequantize(b.t(), scale_b.t(), of_b, out_dtype=out_dtype).t(),
    )
    is_opaque = gemm.granularities[0].is_blockwise or is_dtensor(a)
    if engine is Engine.HARDWARE and not (is_opaque or (has_dispatch_mode() and _tunes_gemms())):
        return seen_as_mm(a, b, out_dtype, lambda: hardware.scaled_mm(*operands, gemm), *read)
    split_k = _of_whole(gemm, engine, a, b)
    options = out_dtype, use_fast_accum, engine.value, of_a.value, of_b.value, split_k, gemm.chip.name
    return seen_as_mm(a, b, out_dtype, lambda: run_scaled_mm(*operands, *options), *read)


@operator(schema=_SCALED_GROUPED_MM, tags=_TAGS)
def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, *options: Any
) -> Tensor:
    """`f8emu.torch.scaled_grouped_mm`; the options are those of `checked_scaled_grouped_mm`."""
    operands = a, b, scale_a, scale_b, offs
    gemm, engine, _ = _prepared(checked_scaled_grouped_mm, operands, options)
    if engine is Engine.HARDWARE:
        return hardware.scaled_grouped_mm(*operands, gemm)
    return emulation.scaled_grouped_mm(*operands, gemm)


@operator(schema=_MULTIPLY_GROUPS, tags=_TAGS)
def multiply_groups(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, offs: Tensor, *options: Any
) -> Tensor:
    """The GEMM of every group of a linear layer: of its rows, `a` [M, K] and `b` [G, K, N], or over K, both matrices.

    Two E4M3 operands with a bfloat16 product, and two bfloat16 ones, are multiplied in one launch and never split along
    K. In other formats each group is a GEMM of its own, for which the host waits for `offs`. Scales are [M] and [G, N],
    or [G * M] and [G * N], or one a group, [G, 1]; E8M0 ones are as `scaled_grouped_mm` takes them. Rows behind the
    last group are zeros.
    """
    out_dtype, use_fast_accum, engine, chip = options
    groups, is_of_rows = offs.shape[0], b.ndim == 3
    shape = _of_groups(a, b, offs)
    if 0 in (*shape, a.shape[1]):
        return a.new_zeros(shape, dtype=out_dtype)
    is_one_launch = a.dtype == b.dtype and a.dtype in (torch.float8_e4m3fn, torch.bfloat16)
    if is_one_launch and out_dtype is torch.bfloat16:
        if scale_a is None or scale_b is None:
            if resolve_engine("multiply_groups", a.device, engine, CHIPS[chip]) is Engine.HARDWARE:
                return hardware.grouped_mm(a, b, offs)
        else:
            # [EPI-1] as [EPI-6]: the product of both scales, after that with one.
            if scale_a.shape == (groups, 1) and scale_a.dtype is torch.float32:
                rows = a.shape[0] if is_of_rows else groups * a.shape[0]
                scale_a, scale_b = _as_vectors(scale_a, scale_b, rows, shape[-1])
                scale_b = scale_b if is_of_rows else scale_b.flatten()
            out = scaled_grouped_mm.function(a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum, engine, chip)
            return hardware.zeros_beyond(out, offs) if is_of_rows and a.is_cuda else out
    out, start = a.new_zeros(shape, dtype=out_dtype), 0
    for group, end in enumerate(offs.tolist()):
        run = slice(start, end)
        operands = (a[run], b[group]) if is_of_rows else (a[:, run], b[run])
        if start < end:
            out[run if is_of_rows else group] = _of_one_group(*operands, scale_a, scale_b, run, group, groups, options)
        start = end
    return out


def _as_vectors(scale_a: Tensor, scale_b: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    # Ones [rows], and [G, columns] of the products of both scales of a group.
    groups = scale_a.shape[0]
    if (plans := kernels_for(scale_a)) is not None:
        vectors = scale_a.new_empty(rows), scale_a.new_empty(groups, columns)
        plans.scales_of_groups(rows, columns, groups)(scale_a, scale_b, *vectors)
        return vectors
    return scale_a.new_ones(rows), (scale_a * scale_b).expand(groups, columns).contiguous()


def _of_one_group(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    run: slice,
    group: int,
    groups: int,
    options: Any,
) -> Tensor:
    out_dtype, use_fast_accum, engine, chip = options
    if scale_a is None or scale_b is None:
        pad_k = -a.shape[1] % CHIPS[chip].size_multiple
        a, b = padded(a, 0, pad_k), padded(b, pad_k, 0)
        return run_mm.function(a, b, out_dtype, engine, 1 if out_dtype is torch.bfloat16 else None, chip)
    if scale_a.dtype is torch.float8_e8m0fnu:
        blocks = slice(run.start // MX_BLOCK, run.stop // MX_BLOCK)
        names = (Granularity.BLOCKWISE_1X32.value,) * 2
        scales = (scale_a[run], scale_b[group]) if scale_b.ndim == 3 else (scale_a[:, blocks], scale_b[blocks])
    elif scale_a.shape == (groups, 1):
        names, scales = ("tensorwise",) * 2, (scale_a[group].view(1, 1), scale_b[group].view(1, 1))
    else:
        names = ("rowwise",) * 2
        own_a = scale_a[run] if scale_b.ndim == 2 else scale_a.view(groups, -1)[group]
        scales = own_a.reshape(-1, 1), scale_b.view(groups, -1)[group].view(1, -1)
    return run_scaled_mm.function(a, b, *scales, None, out_dtype, use_fast_accum, engine, *names, None, chip)


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """An operand with so many more rows and columns of zeros, in its own layout, on which S depends [PLAN-3]."""
    if is_known(rows + columns == 0):
        return x
    if x.stride(1) != 1 and x.stride(0) == 1:
        return padded(x.t(), columns, rows).t()
    if x.dtype is torch.bfloat16:
        return pad(x, (0, columns, 0, rows))
    return pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)


@operator()
def padded_scales(scale: Tensor, rows: int) -> Tensor:
    """E8M0 scales with so many more rows; an operator, since Inductor has no such dtype on a CPU."""
    return padded(scale, rows, 0)


@fake(padded_scales)
def _(scale: Tensor, rows: int) -> Tensor:
    return scale.new_empty((scale.shape[0] + rows, scale.shape[1]))


def _of_groups(a: Tensor, b: Tensor, offs: Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[2]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1])


@operator(schema=_MM, tags=_TAGS)
def run_mm(a: Tensor, b: Tensor, *options: Any) -> Tensor:
    """An `mm` that a compiler does not look into; `split_k` None is the library's or the plan's."""
    gemm, engine, described = _prepared(checked_mm, (a, b), options)
    return hardware.mm(a, b, gemm) if engine is Engine.HARDWARE else emulation.mm(a, b, gemm, described)


@operator(schema=_MM, opaque=False, plain=run_mm.function)
def mm(a: Tensor, b: Tensor, *options: Any) -> Tensor:
    """`f8emu.torch.mm`; the options are those of `checked_mm`."""
    gemm, engine = checked_mm(a, b, *options)
    options = options[0], engine.value, _of_whole(gemm, engine, a, b), gemm.chip.name
    return seen_as_mm(
        a, b, options[0], lambda: run_mm(a, b, *options), lambda: a.to(options[0]), lambda: b.to(options[0])
    )


def _of_whole(gemm: GemmCall, engine: Engine, a: Tensor, b: Tensor) -> int | None:
    """The `split_k` of a call; of DTensors that of the whole sizes, which a rank does not see."""
    if not is_dtensor(a) and not is_dtensor(b):
        return gemm.split_k
    _tell_dtensor()
    return gemm.split_k if engine is Engine.HARDWARE else _split_k(gemm, a, b)


def _split_k(gemm: GemmCall, a: Tensor, b: Tensor) -> int:
    return emulation.split_of(gemm, a.device, "tn" if gemm.groups else emulation.layout_of(a, b)).split_k


@fake(run_scaled_mm)
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=options[0])


@fake(scaled_grouped_mm)
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, *options: Any) -> Tensor:
    gemm, _ = checked_scaled_grouped_mm(a, b, scale_a, scale_b, offs, *options)
    return a.new_empty(gemm.out_shape, dtype=options[0])


@fake(multiply_groups)
def _(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, offs: Tensor, *options: Any) -> Tensor:
    return a.new_empty(_of_groups(a, b, offs), dtype=options[0])


@fake(run_mm)
def _(a: Tensor, b: Tensor, *options: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=options[0])


@register_flop_formula([torch.ops.f8emu.run_scaled_mm, torch.ops.f8emu.run_mm, torch.ops.f8emu.multiply_groups])
def _flops(a_shape: list[int], b_shape: list[int], *_: Any, **__: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[-1]  # of groups over K, with their padding


def _tunes_gemms() -> bool:
    # Inductor may replace the library's GEMMs by its own kernels, which give other bits.
    config = sys.modules.get("torch._inductor.config")
    return config is not None and (config.max_autotune or config.max_autotune_gemm)


@cache
def _tell_dtensor() -> None:
    """Register the GEMMs with DTensor, once, when one gets a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole = Replicate()

    def acceptable(a: Any, b: Any, scales: tuple[Any, ...], bias: tuple[Any, ...], options: Any) -> list[Any]:
        def placed(dim: int | None) -> list[Any]:
            """The placements of a, b, scales, bias and options for a product that is sharded along `dim`."""
            placements = [Shard(0) if dim == 0 else whole, Shard(1) if dim == 1 else whole]
            # A scale of its own for each row or column goes with it; one scale for all is on every rank.
            placements += [Shard(dim) if dim == i and not _is_one(scale) else whole for i, scale in enumerate(scales)]
            placements += [None if x is None else Shard(0) if dim == 1 else whole for x in bias]
            return [*placements, *[None] * len(options)]

        sizes, ranks = (a.shape[0], b.shape[1]), a.mesh.size()
        dims = [i for i in (0, 1) if not scales or _is_one(scales[i]) or scales[i].shape[i] == sizes[i]]
        dims = [i for i in dims if i == 0 or sizes[1] % (_MULTIPLE * ranks) == 0]
        return [([whole], placed(None)), *(([Shard(i)], placed(i)) for i in dims)]

    @register_sharding(torch.ops.f8emu.run_scaled_mm.default)
    def _(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, *options: Any) -> list[Any]:
        return acceptable(a, b, (scale_a, scale_b), (bias,), options)

    @register_sharding(torch.ops.f8emu.run_mm.default)
    def _(a: Any, b: Any, *options: Any) -> list[Any]:
        return acceptable(a, b, (), (), options)


def _is_one(scale: Any) -> bool:
    return math.prod(scale.shape) == 1

"""A weight [N, K] as float8 codes: the scales of the whole of it, and the casts of any of its rows.

Of experts [E, N, K] a rank holds whole matrices, each with scales of its own.

Exactness: amaxes, scales and codes are those of the whole weight on one device.
"""

# `output` multiplies the weight, `grad_input` its transpose. The codes of both are rows of the weight, so
# those of a rank are rows of the whole; `transpose_codes` makes the operand of `grad_input` where it is multiplied.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Granularity
from f8emu.torch.casts.operand import Delayed, cast_delayed, weight_to_cast
from f8emu.torch.casts.sharded import Shards, global_delayed
from f8emu.torch.fused import grouped
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.delayed import UNCALLED, UNSET
from f8emu.torch.fused.fused_cast import CODES
from f8emu.torch.torch_internals import foreach_copy, is_dtensor, own_parameters, reduce_amax

if TYPE_CHECKING:
    from f8emu.torch.casts.delayed_state import DelayedBuffers

_ALIGNMENT = 4  # floats: the GEMMs take scales that lie at multiples of 16 bytes


class WeightScales(NamedTuple):
    """The scales of a whole weight, float32: each [1, 1], or a vector [N, 1] for its rows or [K, 1] for its columns.

    Those of experts lie one after the other: [E, 1], or [E * N, 1] and [E * K, 1].
    """

    row_amax: Tensor
    row_inv_scale: Tensor
    row_scale: Tensor  # for the operand of `output`
    col_inv_scale: Tensor
    col_scale: Tensor  # for the operand of `grad_input`
    col_amax: Tensor


class WeightCodes(NamedTuple):
    """The operands of a weight: what a layer needs of it. Those of experts have a dimension more."""

    rows: Tensor  # [N, K], the operand of `output`
    row_scale: Tensor  # [1, 1] or [N, 1]
    col_scale: Tensor  # [1, 1] or [K, 1]
    cols: Tensor | None = None  # [N, K], or experts' [E, K, N]: the operand of `grad_input`; None where it is `rows`
    master_amax: Tensor | None = None  # [1, 1], under delayed scaling of a weight at rest: each call records it

    def map(self, function: Callable[[Tensor], Tensor]) -> "WeightCodes":
        return WeightCodes(*[x if x is None else function(x) for x in self])  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows:
    """Which rows of a weight this rank holds, and who holds the others."""

    n: int  # rows of the whole, or its experts
    ranks: int = 1
    rank: int = 0
    group: Any = None  # the process group of these ranks; None if there is one rank
    others: tuple[tuple[Any, int], ...] = ()  # (process group, dimension) where tensor parallelism cut the whole before

    @classmethod
    def of(cls, mesh: Any, outer_size: torch.Size, module: Any, x: Tensor) -> "OwnRows":
        """The rows `x`, as FSDP2 describes them to its hooks; UnsupportedError if they were sharded along K."""
        if x.shape[1:] != outer_size[1:]:
            rows = "rows" if x.ndim == 2 else "experts"
            raise UnsupportedError(
                f"{type(module).__name__}: with enable_fsdp_float8_all_gather a weight must be sharded along its "
                f"{rows}, dimension 0; got a shard {list(x.shape)} of {list(outer_size)}; leave shard_placement_fn at "
                "its default"
            )
        weight: Any = own_parameters(module).get("weight")
        others: list[tuple[Any, int]] = []
        if is_dtensor(weight):
            names = weight.device_mesh.mesh_dim_names or ()
            for i, placement in enumerate(weight.placements):
                if placement.is_shard() and names[i : i + 1] != mesh.mesh_dim_names and len(names) > 1:
                    others.append((weight.device_mesh.get_group(i), placement.dim))
        place = {"ranks": mesh.size(), "rank": mesh.get_local_rank(), "group": mesh.get_group()}
        return cls(n=outer_size[0], others=tuple(others), **place)

    @property
    def padded(self) -> int:
        """The rows of every rank, padding included."""
        return -(-self.n // self.ranks)

    @property
    def rows(self) -> slice:
        return slice(min(self.n, self.rank * self.padded), min(self.n, (self.rank + 1) * self.padded))

    @property
    def groups(self) -> tuple[Any, ...]:
        return (*(() if self.group is None else (self.group,)), *(group for group, _ in self.others))

    def pad(self, codes: Tensor) -> Tensor:
        """The codes of this rank as bytes, zero-padded to the rows, or experts, that every rank sends."""
        codes = codes.view(torch.uint8)
        missing = self.padded - codes.shape[0]
        return pad(codes, (0, 0) * (codes.ndim - 1) + (0, missing)) if missing else codes


class LocalWeight(NamedTuple):
    """A rank's rows of a weight, or its experts."""

    values: Tensor
    recipe: Recipe
    own: OwnRows


class _Part(NamedTuple):
    """Amaxes of one operand of a weight, [n, 1], of which a rank knows some."""

    own: Tensor
    n: int
    begin: int = 0  # the first of the own


def require_codes(call: str, recipe: Recipe, option: str) -> None:
    """Raise UnsupportedError if float8 codes cannot stand for a weight under this recipe, which `option` asks for."""
    casts = (recipe.output.b, recipe.grad_input.b)
    formats = {None if cast.format is None else cast.format.name for cast in casts}
    if any(cast.granularity.is_blockwise for cast in casts if cast.format is not None):
        reason = "block scales are found where a weight is cast for each GEMM, and may reach over the rows of two ranks"
    elif None in formats:
        reason = "it multiplies the weight in high precision too"
    elif len(formats) > 1:
        reason = "it casts the weight to two formats"
    else:
        return
    raise UnsupportedError(
        f"{call}: with {option}=True float8 codes stand for a weight; under recipe {recipe.label!r} they cannot: "
        f"{reason}; use tensorwise, delayed or a rowwise recipe, or leave the argument out"
    )


def format_of(recipe: Recipe) -> str:
    """The float8 format of the weight."""
    format = recipe.output.b.format
    assert format is not None, "require_codes"
    return format.name


def has_one_scale(recipe: Recipe) -> bool:
    """Whether both operands of a weight have the same codes."""
    return {recipe.output.b.granularity, recipe.grad_input.b.granularity} == {Granularity.TENSORWISE}


@torch.no_grad()
def global_scales(weights: Sequence[LocalWeight]) -> list[WeightScales]:
    """The scales of whole weights: one all-reduce and one kernel for all of the same device, ranks and recipe."""
    alike: dict[Any, list[int]] = {}
    for i, (values, recipe, own) in enumerate(weights):
        alike.setdefault((values.device, recipe, own.group), []).append(i)
    scales_of: dict[int, WeightScales] = {}
    for (_, recipe, group), members in alike.items():
        # 1. The amaxes of this rank's rows, each at its place among those of the whole weights, and zeros elsewhere.
        #    Few launches copy them, for the hundreds of weights of a model.
        parts = [part for i in members for part in _own_amaxes(weights[i])]
        flat = weights[members[0]].values.new_zeros(sum(map(_size, parts)), dtype=torch.float32)
        places = zip(flat.split([*map(_size, parts)]), parts, strict=True)
        own_places = [place.narrow(0, part.begin, part.own.numel()) for place, part in places]
        foreach_copy(own_places, [part.own.flatten() for part in parts])
        # 2. The amaxes of the whole weights.
        flat = reduce_amax(flat, () if group is None else (group,))
        amaxes = _split(flat, parts)
        for i, row, col in zip(members, amaxes[::2], amaxes[1::2], strict=True):
            _reduce_over_others(weights[i].own, row, col)
        # 3. Their scales.
        rule = recipe.cast_plans.weight.both.rule
        both = fused.scales(flat, format_of(recipe), rule.power_of_two, rule.amax_floor, 0)
        inv_scales, scales = (_split(x, parts) for x in both)
        for at, i in enumerate(members):
            row, col = 2 * at, 2 * at + 1
            of_cols = inv_scales[col], scales[col], amaxes[col]
            scales_of[i] = WeightScales(amaxes[row], inv_scales[row], scales[row], *of_cols)
    return [scales_of[i] for i in range(len(weights))]


def _size(part: _Part) -> int:
    return part.n + -part.n % _ALIGNMENT


def _split(flat: Tensor, parts: list[_Part]) -> list[Tensor]:
    pieces = zip(flat.split([*map(_size, parts)]), parts, strict=True)
    return [piece[: part.n].view(part.n, 1) for piece, part in pieces]


def _own_amaxes(weight: LocalWeight) -> tuple[_Part, _Part]:
    # For `output` and for `grad_input`.
    x, recipe, own = weight_to_cast(weight.values, weight.recipe), weight.recipe, weight.own
    if x.ndim == 3:
        return _amaxes_of_experts(x, recipe, own)
    by_row = recipe.output.b.granularity is Granularity.ROWWISE
    by_col = recipe.grad_input.b.granularity is Granularity.ROWWISE
    of_rows = of_cols = None
    if by_col:
        of_rows, of_cols = fused.row_col_amax(x)
    elif by_row:
        of_rows = fused.row_amax(x)
    of_all = None if by_row and by_col else fused.tensor_amax(x if of_rows is None else of_rows)
    rows, cols = of_rows if by_row else of_all, of_cols if by_col else of_all
    assert rows is not None and cols is not None, "each operand has scales of one kind or the other"
    return _Part(rows, own.n, own.rows.start) if by_row else _Part(rows, 1), _Part(cols, cols.numel())


def _amaxes_of_experts(x: Tensor, recipe: Recipe, own: OwnRows) -> tuple[_Part, _Part]:
    count, n, k = x.shape

    def amaxes(by_group: bool) -> Tensor:
        if not count:
            return x.new_empty(0, dtype=torch.float32)
        return grouped.amaxes_of_groups(x.flatten(0, 1), None, count, by_group).flatten()

    kinds, first = (recipe.output.b.granularity, recipe.grad_input.b.granularity), own.rows.start
    lines = amaxes(False).split([count * n, count * k]) if Granularity.ROWWISE in kinds else ()
    whole = amaxes(True) if Granularity.TENSORWISE in kinds else x
    rows, cols = (
        _Part(lines[i], own.n * size, first * size) if kind is Granularity.ROWWISE else _Part(whole, own.n, first)
        for i, (kind, size) in enumerate(zip(kinds, (n, k), strict=True))
    )
    return rows, cols


def _reduce_over_others(own: OwnRows, row_amax: Tensor, col_amax: Tensor) -> None:
    # In place. Tensor parallelism along N, dimension 0, has cut the columns; along K, the rows.
    for group, dim in own.others:
        for amax, cut in ((row_amax, 1), (col_amax, 0)):
            if amax.numel() == 1 or cut == dim:
                amax.copy_(reduce_amax(amax, (group,)))


def cast_rows(x: Tensor, recipe: Recipe, scales: WeightScales, own: slice = slice(None)) -> Tensor:
    """The codes of `x`, the rows or experts `own` of a weight, for `output`."""
    x = weight_to_cast(x, recipe)
    if x.ndim == 3:
        return _cast_experts(x, recipe, scales.row_amax, scales.row_inv_scale, own, cols=False)
    fmt, rule = format_of(recipe), recipe.cast_plans.weight.rows.rule
    if scales.row_amax.numel() == 1:
        return fused.cast_pair_given(x, fmt, scales.row_inv_scale, True, False)[0]
    return fused.cast_pair(x, fmt, scales.row_amax[own], None, rule.power_of_two, rule.amax_floor)[0]


def cast_cols(x: Tensor, recipe: Recipe, scales: WeightScales, own: slice = slice(None)) -> Tensor:
    """The codes of `x`, the rows or experts `own` of a weight, for `grad_input`."""
    x = weight_to_cast(x, recipe)
    if x.ndim == 3:
        return _cast_experts(x, recipe, scales.col_amax, scales.col_inv_scale, own, cols=True)
    if scales.col_inv_scale.numel() == 1:
        return fused.cast_pair_given(x, format_of(recipe), scales.col_inv_scale, True, False)[0]
    return fused.cast_columns(x, format_of(recipe), scales.col_inv_scale)


def _cast_experts(x: Tensor, recipe: Recipe, amax: Tensor, inv_scale: Tensor, own: slice, *, cols: bool) -> Tensor:
    # [E, N, K] under the scales of rows, or [E, K, N] under those of columns, of the experts `own`.
    (count, n, k), fmt, floor = x.shape, format_of(recipe), recipe.scale_rule.amax_floor
    shape = (count, k, n) if cols else (count, n, k)
    if not count:
        return x.new_empty(shape, dtype=CODES[fmt])
    by_group = (recipe.grad_input if cols else recipe.output).b.granularity is Granularity.TENSORWISE
    each, of_all = (1, inv_scale) if by_group else (shape[1], amax)
    source = of_all[own.start * each : own.stop * each]
    sides = (None, source) if cols else (source, None)
    results = grouped.cast_groups(x.flatten(0, 1), None, count, fmt, *sides, by_group, floor, None)
    return results[2 if cols else 0].view(shape)


def cast_rows_delayed(x: Tensor, recipe: Recipe, delayed: Delayed, groups: Shards) -> tuple[Tensor, Tensor]:
    """The codes of `x` for `output` under the state of delayed scaling, and their scale; `groups` have other rows."""
    x, plan = weight_to_cast(x, recipe), recipe.cast_plans.weight.rows
    operand, _, _ = cast_delayed(x, plan, global_delayed(x, plan, delayed, groups))
    assert operand is not None and operand.scale is not None, "it was requested"
    return operand.codes, operand.scale


@torch.no_grad()
def cast_master(
    x: Tensor,
    recipe: Recipe,
    buffers: "DelayedBuffers | None",
    own: OwnRows,
    *,
    by_own_amax: bool = False,
    scales: WeightScales | None = None,
) -> WeightCodes:
    """The codes of `x`, the rows `own` of a weight at rest, under its scales or under the state of delayed scaling."""
    # 1. Dynamic scales. Those of the whole weight may be known.
    x, delayed = weight_to_cast(x.contiguous(), recipe), None
    if buffers is not None:
        buffers.follow(x.device)
        delayed = buffers.of_tensors()[1]
    if buffers is None or delayed is None:
        (scales,) = global_scales([LocalWeight(x, recipe, own)]) if scales is None else (scales,)
        cols = None if has_one_scale(recipe) else cast_cols(x, recipe, scales)
        return WeightCodes(cast_rows(x, recipe, scales, own.rows), scales.row_scale, scales.col_scale, cols)
    # 2. Delayed scaling. The state is not written to: each call of the layer records this amax, as its cast would.
    amax = torch.full_like(delayed.amax, UNCALLED)
    inv_scale = torch.full_like(delayed.inv_scale, UNSET) if by_own_amax else delayed.inv_scale
    delayed = delayed._replace(inv_scale=inv_scale, amax=amax)
    groups = Shards(rows=own.groups, is_set=not by_own_amax and buffers.are_set()[1])
    rows, scale = cast_rows_delayed(x, recipe, delayed, groups)
    return WeightCodes(rows, scale, scale.clone(), master_amax=amax)

"""A weight that FSDP2 gathers as float8: high precision at rest, codes on the way.

`fully_shard` keeps the rows of a weight spread over ranks, and asks a tensor with `fsdp_pre_all_gather` and
`fsdp_post_all_gather` what to gather. Here every rank casts its rows under the scales of the whole weight:

1. The amaxes of the whole weight: those of the rank's rows, then one all-reduce; `precompute_float8_dynamic_scale_for_fsdp`
   does it for all weights of a model at once. Under delayed scaling the scale is that of earlier steps.
2. `fsdp_pre_all_gather`: the codes of the rank's rows for `output`. If `grad_input` needs other codes (rowwise), those
   are gathered beside them where the backward pass will read them.
3. `fsdp_post_all_gather`: codes and scales as a `GatheredWeight`, which `Float8Linear` multiplies without a cast.

Exactness: codes and scales are those of the whole weight on one device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Granularity
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.arguments import CODES, new_zeros
from f8emu.torch.fused.columns import cast_columns
from f8emu.torch.fused.delayed import cast_pair_delayed, chosen_inv_scale, mark_set
from f8emu.torch.training.delayed_update import is_dtensor
from f8emu.torch.training.gathered_weight import GatheredWeight
from f8emu.torch.training.operands import Delayed

_aten = torch.ops.aten
_VIEWS = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
"""What FSDP2 and modules do to a parameter and still want a parameter of: the result has the values of the argument."""
_NEW = {_aten.clone.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.new_empty.default}
"""The same, with values of their own."""


class Amaxes(NamedTuple):
    """Of a whole weight, float32, each [1, 1] or a vector."""

    rows: Tensor
    """Of the weight or of its rows [N, 1], for the operand of `output`."""
    cols: Tensor
    """Of the weight or of its columns [K, 1], for that of `grad_input`."""


@dataclass(slots=True)
class GatherState:
    """What is known of the values of a weight; views of it share it, and a write to any of them forgets it."""

    precomputed: Amaxes | None = None
    """By `precompute_float8_dynamic_scale_for_fsdp`, until the weight changes."""
    of_forward: Amaxes | None = None
    """Those of the last forward pass, for the backward pass."""
    gathered_cols: Tensor | None = None
    """The gathered codes for `grad_input` if they are not those for `output`, flat and padded; FSDP2 frees them."""
    is_gathered_in_backward: bool = False
    """Whether FSDP2 gathers the weight again in the backward pass, as was seen there."""
    shard: "Shard | None" = None
    """As FSDP2 told at the last gather."""

    @property
    def known_shard(self) -> "Shard":
        """After the first gather."""
        assert self.shard is not None, "only gathered weights are asked"
        return self.shard


class ShardedWeight(Tensor):
    """A wrapper around a plain tensor, with the hooks of FSDP2; every operation is that of the tensor inside."""

    plain: Tensor
    recipe: Recipe
    state: GatherState

    @staticmethod
    def __new__(cls, plain: Tensor, recipe: Recipe, state: GatherState | None = None) -> "ShardedWeight":
        return Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            layout=plain.layout,
            device=plain.device,
            pin_memory=plain.is_pinned(),
            requires_grad=plain.requires_grad,
        )

    def __init__(self, plain: Tensor, recipe: Recipe, state: GatherState | None = None) -> None:
        self.plain, self.recipe = plain, recipe
        self.state = GatherState() if state is None else state

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first: list[ShardedWeight] = []
        written = func._schema.is_mutable

        def unwrap(x: Any) -> Any:
            if not isinstance(x, ShardedWeight):
                return x
            first.append(x)
            return x.plain

        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map(unwrap, (args, kwargs))
        if written:
            for x in _written(func, args, kwargs):
                x.state.precomputed = x.state.of_forward = None
        out = func(*plain_args, **plain_kwargs)
        if written:
            return return_and_correct_aliasing(func, args, kwargs, out)
        if func in _VIEWS or func in _NEW:
            recipe, state = first[0].recipe, first[0].state if func in _VIEWS else None
            out = tree_map_only(Tensor, lambda x: ShardedWeight(x, recipe, state), out)
            return return_and_correct_aliasing(func, args, kwargs, out)
        return out

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], (self.recipe, self.state)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "ShardedWeight":
        return cls(inner["plain"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The shard of a checkpoint is a plain tensor, which any program can load, on any number of ranks.
        is_shard = not isinstance(self, nn.Parameter)
        return self.plain.__reduce_ex__(protocol) if is_shard else super().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self.plain!r}, recipe={self.recipe.label})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What to gather, [padded rows of a rank, K] as bytes, and what to pass to `fsdp_post_all_gather`."""
        is_backward = torch._C._current_graph_task_id() != -1
        x, state, recipe = self.plain, self.state, self.recipe
        shard = state.shard = Shard.of(mesh, outer_size, module, x)
        delayed = delayed_state(module, x.device)
        if delayed is not None:
            codes, scale = _cast_delayed(x, delayed, recipe, shard, module.delayed.notes)
            return (shard.padded(codes),), _Gathered(outer_size[0], scale, scale, None)
        amaxes = state.of_forward if is_backward else state.precomputed
        if amaxes is None:
            (amaxes,) = global_amaxes([self])
        state.of_forward = amaxes
        fmt, settings = format_of(recipe), (recipe.scale_rule.power_of_two, recipe.scale_rule.amax_floor)
        codes = fused.cast_pair(x, fmt, shard.own_rows(amaxes.rows), None, *settings)[0]
        _, row_scale = fused.scales(amaxes.rows, fmt, *settings, 0)
        if has_one_scale(recipe):
            return (shard.padded(codes),), _Gathered(outer_size[0], row_scale, row_scale, None)
        col_inv_scale, col_scale = fused.scales(amaxes.cols, fmt, *settings, 0)
        state.is_gathered_in_backward |= is_backward
        if is_backward or not state.is_gathered_in_backward:
            if recipe.grad_input.b.granularity is Granularity.ROWWISE:
                own = cast_columns(x, fmt, col_inv_scale)
            else:
                own = fused.cast_pair(x, fmt, amaxes.cols, None, *settings)[0]
            gather_into(state, shard.padded(own), shard)
        return (shard.padded(codes),), _Gathered(outer_size[0], row_scale, col_scale, state.gathered_cols)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The gathered weight, and the storage that FSDP2 frees with it; with `out`, that has been filled again."""
        n, row_scale, col_scale, gathered = metadata
        if gathered is not None and gathered.is_cuda:
            # Allocated on the stream of FSDP2's copies, read on this one.
            gathered.record_stream(torch.cuda.current_stream())
        if out is not None:
            getattr(out, "_local_tensor", out).refilled(row_scale, col_scale)
            return None
        (codes,) = outputs
        dtype = CODES[format_of(self.recipe)]
        rows = codes[:n].view(dtype)
        cols = None if gathered is None else gathered.view(codes.shape)[:n].view(dtype)
        weight = GatheredWeight(rows, cols, row_scale, col_scale, param_dtype)
        return weight, () if gathered is None else (gathered,)


class _Gathered(NamedTuple):
    """From `fsdp_pre_all_gather` to `fsdp_post_all_gather`."""

    n: int
    """Rows of the whole weight, without padding."""
    row_scale: Tensor
    col_scale: Tensor
    cols: Tensor | None
    """The codes for `grad_input` of all ranks, flat, if they are not those for `output`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rows of a weight that this rank holds, and who holds the others."""

    n: int
    """Rows of the whole."""
    ranks: int
    rank: int
    group: Any
    others: tuple[tuple[Any, int], ...]
    """(process group, dimension) where tensor parallelism has cut the whole before."""

    @classmethod
    def of(cls, mesh: Any, outer_size: torch.Size, module: Any, x: Tensor) -> "Shard":
        """What FSDP2 tells its hooks.

        Raises:
            UnsupportedError: a weight that is sharded along K.
        """
        if x.shape[1] != outer_size[1]:
            raise UnsupportedError(
                f"Float8Linear: with enable_fsdp_float8_all_gather a weight must be sharded along its rows, dimension "
                f"0; got a shard {list(x.shape)} of {list(outer_size)}; leave shard_placement_fn at its default"
            )
        weight = module._parameters.get("weight")
        others: list[tuple[Any, int]] = []
        if is_dtensor(weight):
            names = weight.device_mesh.mesh_dim_names or ()
            for i, placement in enumerate(weight.placements):
                if placement.is_shard() and names[i : i + 1] != mesh.mesh_dim_names and len(names) > 1:
                    others.append((weight.device_mesh.get_group(i), placement.dim))
        return cls(
            n=outer_size[0], ranks=mesh.size(), rank=mesh.get_local_rank(), group=mesh.get_group(), others=tuple(others)
        )

    @property
    def padded_rows(self) -> int:
        """Of every rank."""
        return -(-self.n // self.ranks)

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        return slice(min(self.n, self.rank * self.padded_rows), min(self.n, (self.rank + 1) * self.padded_rows))

    def own_rows(self, amax: Tensor) -> Tensor:
        """The part of a vector of all rows that is this rank's; one amax of all is every rank's."""
        return amax if amax.numel() == 1 else amax[self.own]

    def padded(self, codes: Tensor) -> Tensor:
        """The codes of this rank as bytes, zero-padded to the rows that every rank sends."""
        codes = codes.view(torch.uint8)
        missing = self.padded_rows - codes.shape[0]
        return pad(codes, (0, 0, 0, missing)) if missing else codes


@torch.no_grad()
def global_amaxes(weights: list[ShardedWeight]) -> list[Amaxes]:
    """The amaxes of whole weights from their shards: one all-reduce for all weights of the same ranks.

    A rank fills in its own rows and leaves zeros for the others; the maximum of them as integers keeps NaN.
    """
    parts = [_own_amaxes(weight) for weight in weights]
    found: list[Amaxes | None] = [None] * len(weights)
    together: dict[Any, list[int]] = {}
    for i, weight in enumerate(weights):
        together.setdefault((weight.state.known_shard.group, weight.plain.device), []).append(i)
    for (group, _), members in together.items():
        flat = torch.cat([part.flatten() for i in members for part in parts[i]])
        _reduce_max(flat, group)
        sizes = [part.numel() for i in members for part in parts[i]]
        reduced = iter(flat.split(sizes))
        for i in members:
            found[i] = Amaxes(next(reduced).view(-1, 1), next(reduced).view(-1, 1))
    for i, weight in enumerate(weights):
        _reduce_over_others(weight, found[i])
    return [amaxes for amaxes in found if amaxes is not None]


def _own_amaxes(weight: ShardedWeight) -> Amaxes:
    """Of this rank's rows, in the shapes of the whole."""
    x, shard, recipe = weight.plain.detach(), weight.state.known_shard, weight.recipe
    by_row = recipe.output.b.granularity is Granularity.ROWWISE
    by_col = recipe.grad_input.b.granularity is Granularity.ROWWISE
    of_rows = of_cols = None
    if by_col:
        of_rows, of_cols = fused.row_col_amax(x)
    elif by_row:
        of_rows = fused.row_amax(x)
    of_all = None
    if not (by_row and by_col):
        of_all = fused.tensor_amax(x if of_rows is None else of_rows)
    rows, cols = of_rows if by_row else of_all, of_cols if by_col else of_all
    assert rows is not None and cols is not None, "each operand has a scale of one kind or the other"
    if by_row:
        whole = new_zeros(x, shard.n, 1)
        whole[shard.own] = rows
        rows = whole
    return Amaxes(rows, cols)


def _reduce_over_others(weight: ShardedWeight, amaxes: Amaxes | None) -> None:
    """Tensor parallelism by columns of the layer cuts what an amax of a column spans, by rows that of a row."""
    if amaxes is None:
        return
    for group, dim in weight.state.known_shard.others:
        for amax, spans in ((amaxes.rows, 1), (amaxes.cols, 0)):
            if amax.numel() == 1 or spans == dim:
                _reduce_max(amax, group)


def _reduce_max(amaxes: Tensor, group: Any) -> None:
    dist.all_reduce(amaxes.view(torch.int32), dist.ReduceOp.MAX, group)


def _cast_delayed(x: Tensor, delayed: Delayed, recipe: Recipe, shard: Shard, notes: Any) -> tuple[Tensor, Tensor]:
    """Codes of this rank's rows and their scale: that of earlier steps, before the first update that of the whole."""
    rule, fmt = recipe.scale_rule, format_of(recipe)
    settings = (rule.power_of_two, rule.amax_floor, delayed.margin)
    inv_scale = delayed.inv_scale
    # All ranks must agree on whether to reduce, so no value of the device decides.
    if not notes.has_weight_scale:
        amax = fused.tensor_amax(x)
        for group in (shard.group, *(group for group, _ in shard.others)):
            _reduce_max(amax, group)
        inv_scale = chosen_inv_scale(amax, inv_scale, fmt, *settings)
        mark_set(inv_scale, True)
    notes.is_weight_cast = True
    codes, _, _, scale = cast_pair_delayed(x, fmt, inv_scale, True, False, delayed.amax, *settings)
    return codes, scale


def delayed_state(module: Any, device: torch.device) -> Delayed | None:
    """The state of the weight of a layer under delayed scaling."""
    buffers = module.delayed
    if buffers is None:
        return None
    if buffers.amax_weight.device != device:
        buffers.to(device)
    return buffers.of_tensors()[1]


def gather_into(state: GatherState, own: Tensor, shard: Shard) -> None:
    """Gathers the codes of all ranks for `grad_input`, into storage that is kept and filled again."""
    size = own.numel() * shard.ranks
    if state.gathered_cols is None:
        state.gathered_cols = own.new_empty(size)
    gathered = state.gathered_cols
    if gathered.untyped_storage().size() == 0:  # freed by FSDP2
        gathered.untyped_storage().resize_(size)
    with torch.autograd._unsafe_preserve_version_counter(gathered):
        dist.all_gather_into_tensor(gathered, own.view(-1), shard.group)


def has_one_scale(recipe: Recipe) -> bool:
    """Whether both operands of a weight have the same codes."""
    kinds = {recipe.output.b.granularity, recipe.grad_input.b.granularity}
    return kinds == {Granularity.TENSORWISE}


def format_of(recipe: Recipe) -> str:
    """The float8 format of the weight."""
    format = recipe.output.b.format
    assert format is not None, "require_gatherable"
    return format.name


def gather_as_float8(layers: Iterable[nn.Linear]) -> None:
    """Make the weights of float8 layers such that FSDP2 gathers them as float8; shared parameters stay shared."""
    new: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight, recipe = layer.weight, getattr(layer, "recipe")  # noqa: B009
        if id(weight) not in new:
            new[id(weight)] = nn.Parameter(ShardedWeight(weight.detach(), recipe), weight.requires_grad)
        layer.weight = new[id(weight)]


def require_gatherable(call: str, recipe: Recipe) -> None:
    """Raise UnsupportedError if weights cannot travel as float8 under this recipe."""
    casts = (recipe.output.b, recipe.grad_input.b)
    formats = {None if cast.format is None else cast.format.name for cast in casts}
    if any(cast.granularity.is_blockwise for cast in casts if cast.format is not None):
        reason = "its block scales may reach over the rows of two ranks"
    elif None in formats:
        reason = "it multiplies a weight in high precision, so codes would not be enough"
    elif len(formats) > 1:
        reason = "it casts a weight to two formats"
    else:
        return
    raise UnsupportedError(
        f"{call}: with enable_fsdp_float8_all_gather=True the weights travel as float8; under recipe {recipe.label!r} "
        f"they cannot: {reason}; use tensorwise, rowwise, rowwise_with_gw_hp or delayed, or leave the argument out"
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[ShardedWeight]:
    """The weights that an operator writes to."""
    found: list[ShardedWeight] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, ShardedWeight)]
    return found

"""A weight that FSDP2 gathers as float8: high precision at rest, codes on the way.

`fully_shard` keeps the rows of a weight spread over ranks, and asks a tensor with `fsdp_pre_all_gather` and
`fsdp_post_all_gather` what to gather. Here every rank casts its rows under the scales of the whole weight:

1. The amaxes of the whole weight: those of the rank's rows, then one all-reduce;
   `precompute_float8_dynamic_scale_for_fsdp` does it for all weights of a model at once. Under delayed scaling the
   scale is that of earlier passes.
2. `fsdp_pre_all_gather`: the codes of the rank's rows, for `output`. If `grad_input` needs other codes (rowwise), the
   backward pass gathers those instead, and both where it recomputes `output`.
3. `fsdp_post_all_gather`: codes and scales as a `GatheredWeight`, which `Float8Linear` multiplies without a cast. The
   first time it gathers the codes for `grad_input` itself: whether FSDP2 will gather again is not known before.

Exactness: codes and scales are those of the whole weight on one device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.arguments import CODES
from f8emu.torch.fused.columns import cast_columns
from f8emu.torch.fused.delayed import cast_pair_delayed, chosen_inv_scale, mark_set
from f8emu.torch.layer.operands import Delayed
from f8emu.torch.torch_internals import (
    is_in_backward_pass,
    pickled_as,
    with_aliases,
    with_known_signature,
    wrapper_of,
)
from f8emu.torch.weights.gathered_codes import GatheredCodes
from f8emu.torch.weights.gathered_weight import GatheredWeight
from f8emu.torch.weights.scales import (
    LocalWeight,
    Shard,
    WeightScales,
    format_of,
    global_scales,
    has_one_scale,
    local_tensor,
    reduce_max,
)

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


@dataclass(slots=True)
class GatherState:
    """What is known of the values of a weight; views of it share it, and a write to any of them forgets it."""

    precomputed: WeightScales | None = None
    """The scales from `precompute_float8_dynamic_scale_for_fsdp`, until the weight changes."""
    of_forward: WeightScales | None = None
    """The scales of the last forward pass, for the backward pass."""
    gathered: GatheredCodes | None = None
    """The memory of gathered codes, if those for `grad_input` are not those for `output`."""
    shard: Shard | None = None
    """The shard that FSDP2 described at the first gather."""


class ShardedWeight(Tensor):
    """A wrapper around a plain tensor, with the hooks of FSDP2; every operation is that of the tensor inside."""

    plain: Tensor
    recipe: Recipe
    state: GatherState

    def __new__(cls, plain: Tensor, recipe: Recipe, state: GatherState | None = None) -> "ShardedWeight":
        return wrapper_of(cls, plain)

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
            return with_aliases(func, args, kwargs, out)
        if func in _VIEWS or func in _NEW:
            recipe, state = first[0].recipe, first[0].state if func in _VIEWS else None
            out = tree_map_only(Tensor, lambda x: ShardedWeight(x, recipe, state), out)
            return with_aliases(func, args, kwargs, out)
        return out

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], (self.recipe, self.state)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "ShardedWeight":
        return cls(inner["plain"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The shard of a checkpoint is a plain tensor, which any program can load, on any number of ranks.
        is_shard = not isinstance(self, nn.Parameter)
        return pickled_as(self.plain, protocol) if is_shard else pickled_as(super(), protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self.plain!r}, recipe={self.recipe.label})"

    @with_known_signature
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What to gather, [padded rows of a rank, K] as bytes, and what to pass to `fsdp_post_all_gather`."""
        is_backward = is_in_backward_pass()
        x, state, recipe = self.plain, self.state, self.recipe
        if state.shard is None:
            state.shard = Shard.of(mesh, outer_size, module, x)
        shard = state.shard
        delayed = delayed_state(module, x.device)
        if delayed is not None and module.training:  # an evaluated model has scales of its own amaxes
            codes, scale = _cast_delayed(x, delayed, recipe, shard, is_set=module.delayed.are_set()[1])
            return (shard.padded(codes),), _Gathered(shard.n, scale, scale)
        scales = state.of_forward if is_backward else state.precomputed
        if scales is None:
            (scales,) = global_scales([LocalWeight(x, recipe, shard)])
        state.of_forward = scales
        if has_one_scale(recipe):
            codes = _codes_of_rows(x, recipe, shard, scales)
            return (codes,), _Gathered(shard.n, scales.row_scale, scales.row_scale)
        codes = self._gather_both(shard, scales, is_backward=is_backward)
        return (codes,), _Gathered(shard.n, scales.row_scale, scales.col_scale)

    def _gather_both(self, shard: Shard, scales: WeightScales, *, is_backward: bool) -> Tensor:
        """Returns the codes that FSDP2 is to gather, and gathers the others if the pass reads them."""
        x, state, recipe = self.plain, self.state, self.recipe
        memory = state.gathered
        if memory is None:  # `fsdp_post_all_gather` makes it, and gathers the others
            return _codes_of_rows(x, recipe, shard, scales)
        if is_backward:
            if memory.begin_backward(shard):
                memory.gather(memory.rows, _codes_of_rows(x, recipe, shard, scales), shard)
            return _codes_of_columns(x, recipe, shard, scales)
        if memory.begin_forward():
            memory.gather(memory.cols, _codes_of_columns(x, recipe, shard, scales), shard)
        return _codes_of_rows(x, recipe, shard, scales)

    def _gather_cols(self, memory: GatheredCodes) -> None:
        """Fills the codes for `grad_input` after FSDP2 has gathered for the first time."""
        shard, scales = self.state.shard, self.state.of_forward
        assert shard is not None and scales is not None, "fsdp_pre_all_gather"
        x = self.plain.to(memory.cols.device)  # FSDP2 may keep shards on the host
        memory.gather(memory.cols, _codes_of_columns(x, self.recipe, shard, scales), shard)

    def _gather_rows(self) -> None:
        """Fills the codes for `output` after a pass that did not."""
        shard, memory, scales = self.state.shard, self.state.gathered, self.state.of_forward
        assert shard is not None and memory is not None, "they were gathered before"
        if scales is None:
            raise UnsupportedError(
                "Float8Linear: the weight was written to after FSDP2 had gathered it, and not gathered again; reshard "
                "the module before the optimizer's step (set_reshard_after_backward(True), or reshard())"
            )
        x = self.plain.to(memory.rows.device)  # FSDP2 may keep shards on the host
        memory.gather(memory.rows, _codes_of_rows(x, self.recipe, shard, scales), shard)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The gathered weight, and a list of what FSDP2 frees with it; with `out`, that has been filled again."""
        found: _Gathered = metadata
        memory = self.state.gathered
        if out is not None:
            weight = local_tensor(out)
            assert isinstance(weight, GatheredWeight), "it was returned below"
            weight.row_scale, weight.col_scale = found.row_scale, found.col_scale
            if memory is not weight.memory:
                raise UnsupportedError(
                    "Float8Linear: a weight that FSDP2 has gathered was replaced by another; load weights into it "
                    "(load_state_dict without assign=True), or replace them before the first pass"
                )
            if memory is not None:
                memory.end_gather()
                memory.gather_rows = self._gather_rows
            return None
        (codes,) = outputs
        dtype = CODES[format_of(self.recipe)]
        if found.col_scale is found.row_scale:
            return GatheredWeight(codes[: found.n].view(dtype), None, found.row_scale, found.col_scale, param_dtype), ()
        memory = self.state.gathered = GatheredCodes.adopt(codes)
        self._gather_cols(memory)
        rows, cols = (flat.view(codes.shape)[: found.n].view(dtype) for flat in (memory.rows, memory.cols))
        weight = GatheredWeight(rows, cols, found.row_scale, found.col_scale, param_dtype)
        weight.memory, memory.operand, memory.gather_rows = memory, rows, self._gather_rows
        return weight, memory


class _Gathered(NamedTuple):
    """From `fsdp_pre_all_gather` to `fsdp_post_all_gather`."""

    n: int
    """Rows of the whole weight, without padding."""
    row_scale: Tensor
    col_scale: Tensor
    """The same tensor where both operands have the same codes."""


def _codes_of_rows(x: Tensor, recipe: Recipe, shard: Shard, scales: WeightScales) -> Tensor:
    """The codes of this rank's rows for `output`, padded."""
    fmt, rule = format_of(recipe), recipe.scale_rule
    if scales.row_amax.numel() == 1:
        codes = fused.cast_pair_given(x, fmt, scales.row_inv_scale, True, False)[0]
    else:
        codes = fused.cast_pair(x, fmt, scales.row_amax[shard.own], None, rule.power_of_two, rule.amax_floor)[0]
    return shard.padded(codes)


def _codes_of_columns(x: Tensor, recipe: Recipe, shard: Shard, scales: WeightScales) -> Tensor:
    """The codes of this rank's rows for `grad_input`, padded."""
    if scales.col_inv_scale.numel() == 1:
        codes = fused.cast_pair_given(x, format_of(recipe), scales.col_inv_scale, True, False)[0]
    else:
        codes = cast_columns(x, format_of(recipe), scales.col_inv_scale)
    return shard.padded(codes)


def _cast_delayed(x: Tensor, delayed: Delayed, recipe: Recipe, shard: Shard, *, is_set: bool) -> tuple[Tensor, Tensor]:
    """Codes of this rank's rows and their scale: that of earlier passes, before the first update that of the whole."""
    rule, fmt = recipe.scale_rule, format_of(recipe)
    settings = (rule.power_of_two, rule.amax_floor, delayed.margin)
    inv_scale = delayed.inv_scale
    if not is_set:  # on all ranks, which have the same inv_scale
        amax = fused.tensor_amax(x)
        for group in (shard.group, *(group for group, _ in shard.others)):
            reduce_max(amax, group)
        inv_scale = chosen_inv_scale(amax, inv_scale, fmt, *settings)
        mark_set(inv_scale, True)
    codes, _, _, scale = cast_pair_delayed(x, fmt, inv_scale, True, False, delayed.amax, *settings)
    return codes, scale


def delayed_state(module: Any, device: torch.device) -> Delayed | None:
    """The state of the weight of a layer under delayed scaling."""
    buffers = module.delayed
    if buffers is None:
        return None
    buffers.follow(device)
    return buffers.of_tensors()[1]


def gather_as_float8(layers: Iterable[nn.Linear]) -> None:
    """Make the weights of float8 layers such that FSDP2 gathers them as float8; shared parameters stay shared."""
    new: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight, recipe = layer.weight, getattr(layer, "recipe")  # noqa: B009
        if isinstance(weight, ShardedWeight):
            continue
        if id(weight) not in new:
            new[id(weight)] = nn.Parameter(ShardedWeight(weight.detach(), recipe), weight.requires_grad)
        layer.weight = new[id(weight)]


def require_gatherable_weights(call: str, recipe: Recipe) -> None:
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

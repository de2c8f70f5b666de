"""A layer's call with DTensors: the tensors of this rank, how they are sharded, and where the output lies.

Every dimension of the mesh divides the layer in one way, as the placements of input [..., K] and weight [N, K] say:

| input | weight | output | |
|---|---|---|---|
| replicated | replicated | replicated | |
| by tokens | replicated | by tokens | |
| replicated | by N | by N | column-parallel |
| by tokens | by N | by N | column-parallel with sequence parallelism: the input is gathered as float8 |
| by K | by K | a partial sum | row-parallel; added up here if the layer has a bias or was told where it goes |
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch.casts.sharded import LayerShards, Shards, Tokens
from f8emu.torch.torch_internals import is_dtensor


class Way(NamedTuple):
    """The way in which one dimension of the mesh divides a layer: the dimensions of which its ranks hold a part."""

    name: str
    input_rows: bool = False
    k: bool = False
    n: bool = False
    output_rows: bool = False


_REPLICATED = Way("replicated")
_TOKENS = Way("tokens", input_rows=True, output_rows=True)
_COLUMNS = Way("columns", n=True)
_GATHERED = Way("gathered", input_rows=True, n=True)
# Ranks with a part of K have partial products, which are left, added on every rank, or added where their tokens go.
_PARTIAL = Way("partial", k=True)
_SUMMED = Way("summed", k=True)
_SCATTERED = Way("scattered", k=True, output_rows=True)


class LocalCall(NamedTuple):
    """The tensors with which this rank computes, and where its output lies."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shards: LayerShards
    lead: tuple[int, ...]  # the leading dimensions of this rank's output
    shape: tuple[int, ...]  # of the whole output
    mesh: Any
    placements: tuple[Any, ...]

    def as_dtensor(self, output: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        strides = [1]
        for size in self.shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        shape, stride = torch.Size(self.shape), tuple(strides)
        return DTensor.from_local(output, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


def local_call(
    call: str,
    input: Any,
    weight: Any,
    bias: Any,
    recipe: Recipe,
    reduce_to: Sequence[Any] | None,
    is_set: tuple[bool, bool, bool],
) -> LocalCall:
    """This rank's part of `input @ weight^T + bias`, of which input [..., K], weight [N, K] and bias are DTensors.

    `reduce_to` has the placements of a sum of partial products; None leaves the sum to the caller, unless a bias has to
    be added to it. `is_set`: whether the scales of input, weight and grad_output are set, under delayed scaling.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    _require_one_mesh(call, input, weight)
    mesh, last = weight.device_mesh, input.ndim - 1
    # 1. Local steps, and sums that nothing can replace: partial sums are added; of a replicated input each rank takes
    #    its part of K.
    wanted = [Replicate() if place.is_partial() else place for place in input.placements]
    pairs = zip(wanted, weight.placements, strict=True)
    wanted = [Shard(last) if isinstance(x, Replicate) and w.is_shard(1) else x for x, w in pairs]
    if wanted != list(input.placements):
        input = input.redistribute(placements=wanted)
    # 2. The way in which each dimension of the mesh divides the layer.
    ways = [_way(call, x, w, last) for x, w in zip(input.placements, weight.placements, strict=True)]
    to = [None] * mesh.ndim if reduce_to is None else list(reduce_to)
    if reduce_to is not None or bias is not None:
        sums = [_SCATTERED if place is not None and place.is_shard() else _SUMMED for place in to]
        ways = [total if way == _PARTIAL else way for way, total in zip(ways, sums, strict=True)]
    shards = _shards(call, recipe, input, mesh, ways, to, is_set)
    _require_whole_blocks(call, recipe, input, weight, ways)
    # 3. The tensors of this rank; the placements of their gradients are what this rank will compute.
    x_grads = [Partial() if way == _COLUMNS else place for way, place in zip(ways, input.placements, strict=True)]
    w_grads = [Partial() if way == _TOKENS else place for way, place in zip(ways, weight.placements, strict=True)]
    x, w = input.to_local(grad_placements=x_grads), weight.to_local(grad_placements=w_grads)
    b = None
    if x.shape[-1] != w.shape[1]:
        raise OperandError(
            f"{call}: input must be [..., in_features] with in_features = {weight.shape[1]}, {w.shape[1]} of them on "
            f"this rank; got shape {list(x.shape)} on this rank"
        )
    if bias is not None:
        whole = [Shard(0) if way.n else Replicate() for way in ways]
        b_grads = [Partial() if way.output_rows else place for way, place in zip(ways, whole, strict=True)]
        bias = bias if list(bias.placements) == whole else bias.redistribute(placements=whole)
        b = bias.to_local(grad_placements=b_grads)
    # 4. The output.
    lead = list(x.shape[:-1])
    output: list[Any] = []  # Dynamo cannot trace list[Any]()
    for way, place, target in zip(ways, input.placements, to, strict=True):
        if way == _GATHERED:
            lead[place.dim] = input.shape[place.dim]
        if way == _SCATTERED and shards.scatter is not None:
            lead[target.dim % input.ndim] = shards.scatter.mine
            output.append(Shard(target.dim % input.ndim))
        elif way.n:
            output.append(Shard(last))
        else:
            output.append(place if way == _TOKENS else Partial() if way == _PARTIAL else Replicate())
    shape = (*input.shape[:-1], weight.shape[0])
    return LocalCall(x, w, b, shards, tuple(lead), shape, mesh, tuple(output))


def own_experts(call: str, weight: Any) -> Tensor:
    """The matrices of this rank's experts, of a weight [E, N, K]."""
    if not is_dtensor(weight):
        return weight
    if any(not (place.is_replicate() or place.is_shard(0)) for place in weight.placements):
        raise UnsupportedError(
            f"{call}: ranks may share experts among them, not parts of each expert, which has scales of whole rows "
            f"and columns; got {list(weight.shape)} with placements {weight.placements}; use expert parallelism"
        )
    return weight.to_local()


def own_groups(weight: Any) -> slice:
    """Which experts' matrices `own_experts` gives; ranks have equal numbers of them."""
    first, count = 0, weight.shape[0]
    for i, place in enumerate(weight.placements if is_dtensor(weight) else ()):
        if place.is_shard(0):
            count //= weight.device_mesh.size(i)
            first += count * weight.device_mesh.get_local_rank(i)
    return slice(first, first + count)


def _require_one_mesh(call: str, input: Any, weight: Any) -> None:
    if not (is_dtensor(input) and is_dtensor(weight)) or input.device_mesh != weight.device_mesh:
        got = " and ".join(
            f"a DTensor of {x.device_mesh}" if is_dtensor(x) else "a plain tensor" for x in (input, weight)
        )
        raise OperandError(
            f"{call}: input and weight must be DTensors of the same mesh, or plain tensors; got {got}; give the layer "
            "a parallel style (torch.distributed.tensor.parallel.parallelize_module), or pass it input.to_local()"
        )


def _way(call: str, x: Any, w: Any, last: int) -> Way:
    if x.is_replicate() and w.is_replicate():
        return _REPLICATED
    if x.is_replicate() and w.is_shard(0):
        return _COLUMNS
    if x.is_shard() and x.dim != last and (w.is_replicate() or w.is_shard(0)):
        return _TOKENS if w.is_replicate() else _GATHERED
    if x.is_shard(last) and w.is_shard(1):
        return _PARTIAL
    raise UnsupportedError(
        f"{call}: a weight sharded along N needs an input that is replicated or sharded along tokens, a weight sharded "
        f"along K an input that is replicated or sharded along K, a replicated weight any but the latter; got an input "
        f"with {x} and a weight with {w}; redistribute the input before, which gathers it in high precision"
    )


def _shards(
    call: str,
    recipe: Recipe,
    input: Any,
    mesh: Any,
    ways: Sequence[Way],
    to: Sequence[Any],
    is_set: tuple[bool, bool, bool],
) -> LayerShards:
    groups = [mesh.get_group(i).group_name for i in range(mesh.ndim)]
    gather = scatter = None
    for i, way in enumerate(ways):
        if way not in (_GATHERED, _SCATTERED):
            continue
        if gather is not None or scatter is not None:
            raise UnsupportedError(f"{call}: tokens can be gathered along one dimension of a mesh; got {mesh}")
        require_gatherable(call, recipe)
        place = input.placements[i] if way == _GATHERED else to[i]
        tokens = Tokens.of(input.shape, place.dim % input.ndim, groups[i], mesh.size(i), mesh.get_local_rank(i))
        gather, scatter = (tokens, None) if way == _GATHERED else (None, tokens)

    def over(of: Sequence[bool]) -> tuple[str, ...]:
        return tuple(group for group, is_spread in zip(groups, of, strict=True) if is_spread)

    input_rows, output_rows = over([way.input_rows for way in ways]), over([way.output_rows for way in ways])
    k, n = over([way.k for way in ways]), over([way.n for way in ways])
    return LayerShards(
        Shards(input_rows, k, gather, is_set[0]),
        Shards(n, k, None, is_set[1]),
        Shards(output_rows, n, scatter, is_set[2]),
        over([way == _SUMMED for way in ways]),
        scatter,
    )


def require_gatherable(call: str, recipe: Recipe) -> None:
    """Raise UnsupportedError for a recipe whose activations and gradients cannot be gathered as float8."""
    plans = [recipe.cast_plans.of(tensor).both for tensor in ("input", "grad_output")]
    if any([True in plan.in_bfloat16 for plan in plans]):
        reason = "has operands in high precision, which would be gathered as such"
    elif any([plan.has_blocks for plan in plans]):
        reason = "has scales of blocks of tokens, which may lie on several ranks"
    else:
        return
    raise UnsupportedError(
        f"{call}: recipe {recipe.label} {reason}; gather in bfloat16 with ColwiseParallel, RowwiseParallel and "
        "PrepareModuleInput of torch.distributed.tensor.parallel, or train with tensorwise, rowwise or delayed"
    )


def _require_whole_blocks(call: str, recipe: Recipe, input: Any, weight: Any, ways: Sequence[Way]) -> None:
    """Raise UnsupportedError if a block with one scale lies on several ranks."""
    kinds = [kind for plans in recipe.cast_plans for kind in plans.both.by_blocks if kind is not None]
    if not kinds:
        return
    block = max([kind.block[1] or 0 for kind in kinds])
    for i, way in enumerate(ways):
        ranks = weight.device_mesh.size(i)
        if way == _TOKENS:
            tokens = Tokens.of(input.shape, input.placements[i].dim, "", ranks, 0)
            name, run = "tokens", tokens.per_rank * tokens.after if tokens.before == 1 else 1
        elif way == _COLUMNS:
            name, run = "out_features", -(-weight.shape[0] // ranks)
        elif way in (_PARTIAL, _SUMMED):
            name, run = "in_features", -(-weight.shape[1] // ranks)
        else:
            continue
        if ranks > 1 and run % block:
            raise UnsupportedError(
                f"{call}: under recipe {recipe.label} {block} neighbouring {name} share a scale, so each rank must "
                f"have a multiple of {block}; got {run} of {ranks} ranks; choose such sizes, or another recipe"
            )

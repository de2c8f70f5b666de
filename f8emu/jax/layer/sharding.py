"""A layer whose matrices are divided over devices: what of its scales and amaxes takes all of them.

In a program that XLA partitions an array is the whole one, and so is its amax. In `jax.shard_map` an array is the part
of one device, and only the caller knows of what: `in_specs` of `dot_general` says it, in the words of `jax.shard_map`.
Amaxes are then reduced with a maximum along the axes that divide what shares a scale. A weight that is divided along an
axis of the tokens, as under FSDP, is gathered as codes, and its gradient is a scattered sum. Otherwise products are
those of this device's parts: with K divided, `output` is one addend, and JAX adds gradients of what does not vary along
an axis, as for `lax.dot_general`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.scaling import Float8State, Granularity

Axes = tuple[str, ...]
"""Axes of a mesh along which a dimension is divided."""
Specs = tuple[PartitionSpec, PartitionSpec]


class Divided(NamedTuple):
    """Along which axes the dimensions of a layer's three matrices are divided, in `jax.shard_map`."""

    m: Axes = ()
    n: Axes = ()
    k: Axes = ()
    gathered_n: Axes = ()
    """Along which the weight alone is divided, and its codes are gathered for a GEMM: axes that divide M."""
    gathered_k: Axes = ()

    @property
    def input(self) -> tuple[Axes, Axes]:
        return self.m, self.k

    @property
    def weight(self) -> tuple[Axes, Axes]:
        """[N, K], as it is given."""
        return self.n + self.gathered_n, self.k + self.gathered_k

    @property
    def grad_output(self) -> tuple[Axes, Axes]:
        return self.m, self.n


_UNDIVIDED = Divided()


def check_specs(call: str, in_specs: Any) -> Specs:
    """The specs; raises OperandError for what is no pair of PartitionSpecs."""
    pair = in_specs if isinstance(in_specs, tuple) and not isinstance(in_specs, PartitionSpec) else ()
    if len(pair) != 2 or not all(isinstance(spec, PartitionSpec) for spec in pair):
        raise OperandError(
            f"{call}: in_specs must be the PartitionSpecs of lhs and rhs, as in jax.shard_map; got {in_specs!r}"
        )
    return pair[0], pair[1]


def divided(
    call: str,
    in_specs: Specs | None,
    lhs: tuple[int, Sequence[int], Sequence[int]],
    rhs: tuple[tuple[int, ...], Sequence[int], Sequence[int]],
) -> tuple[Divided, tuple[int, ...]]:
    """Along which axes M, N and K are divided, and the shape of rhs where it is gathered.

    `lhs` is its rank, free and contracting dimensions, `rhs` its shape on this device and the same. A batch dimension
    is of layers, each with its own scales.
    """
    shape = rhs[0]
    if in_specs is None:
        return Divided(), shape
    of_lhs, of_rhs = (
        _by_dimension(call, name, spec, rank)
        for name, spec, rank in zip(("lhs", "rhs"), in_specs, (lhs[0], len(shape)), strict=True)
    )
    m, k = (sum((of_lhs[i] for i in dims), ()) for dims in lhs[1:])
    sizes = _require_manual(call, {axis for axes in (*of_lhs, *of_rhs) for axis in axes})
    # Codes of the weight are gathered along the axes that divide M, as data does under FSDP.
    (n, gathered_n), (k_of_rhs, gathered_k) = (_split(call, [of_rhs[i] for i in dims], m) for dims in rhs[1:])
    if k != k_of_rhs or set(m) & set(k):
        raise OperandError(
            f"{call}: in_specs must divide the contracting dimensions of lhs and rhs along the same axes; rhs may also "
            f"be divided along the axes of lhs's rows; got {in_specs[0]} and {in_specs[1]}; gather the other operand"
        )
    gathered = (*gathered_n, *gathered_k)
    whole = (
        size * math.prod(sizes[axis] for axis in axes if axis in gathered)
        for size, axes in zip(shape, of_rhs, strict=True)
    )
    return Divided(m, n, k, gathered_n, gathered_k), tuple(whole)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays as if all varied along the axes of `jax.shard_map` along which any does; their gradients are added."""
    axes = frozenset[str]().union(*map(varying, arrays))
    return tuple(_cast_to(x, axes) for x in arrays)


def varying(x: jax.Array) -> frozenset[str]:
    """The axes of `jax.shard_map` along which `x` varies, if it checks that."""
    return jax.typeof(x).manual_axis_type.varying


def explicit_mesh(*arrays: Any) -> AbstractMesh | None:
    """The mesh of arrays whose types say how they are sharded; None for others."""
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty and mesh.explicit_axes:
            return mesh.abstract_mesh
    return None


def product_sharding(
    mesh: AbstractMesh, lhs: Any, rhs: Any, dimension_numbers: Any, out_sharding: Any
) -> NamedSharding:
    """How `jax.lax.dot_general` would shard its product; its error where it does not know, and needs `out_sharding`."""
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(mesh, out_sharding)
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        out_sharding=out_sharding,
        preferred_element_type=lhs.dtype,
    )
    return jax.typeof(jax.eval_shape(product, lhs, rhs)).sharding


def global_amax(amax: jax.Array, axes: Axes) -> jax.Array:
    """The largest of the devices' amaxes; exact, on integers, which keep NaN."""
    if not axes:
        return amax
    bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), axes)
    return lax.bitcast_convert_type(bits, jnp.float32)


def gathered(x: jax.Array, axes: tuple[Axes, Axes]) -> jax.Array:
    """The matrix `x` of which this device has a part along `axes` of its rows and columns."""
    for dim, along in enumerate(axes):
        if along:
            gather = functools.partial(lax.all_gather, axis_name=along, axis=dim, tiled=True)
            x = lax.platform_dependent(x, cuda=gather, default=functools.partial(_as_bytes, gather))
    return x


def scattered_sum(x: jax.Array, axes: tuple[Axes, Axes]) -> jax.Array:
    """This device's part of the sum over `axes` of the matrices `x`."""
    for dim, along in enumerate(axes):
        if along:
            x = lax.psum_scatter(x, along, scatter_dimension=dim, tiled=True)
    return x


def as_gradient(amax: jax.Array, axes: frozenset[str], divided: Divided = _UNDIVIDED) -> jax.Array:
    """An amax as the gradient of a state that varies along `axes`: the largest of those it does not vary along."""
    amax = global_amax(amax, tuple(sorted((varying(amax) - axes) & {*divided.m, *divided.n, *divided.k})))
    if not varying(amax) <= axes:
        raise OperandError(
            "delayed scaling: in jax.shard_map an amax must be the whole matrix's; got one that varies along "
            f"{sorted(varying(amax) - axes)}, and JAX would add its parts; pass how the operands of each layer are "
            "divided: delayed_dot_general(recipe, in_specs=(spec_of_lhs, spec_of_rhs)), or give every device its own "
            "state"
        )
    return _cast_to(amax, axes)


def require_checked_axes(call: str, state: Float8State | None) -> None:
    """Raise UnsupportedError for a state in a `jax.shard_map` that does not check along which axes arrays vary."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = () if mesh.empty else mesh.manual_axes
    if state is not None and any(not varying(lax.axis_index(axis)) for axis in manual):
        raise UnsupportedError(
            f"{call}: with check_vma=False jax.shard_map adds the gradients of a state that all devices share, and a "
            "sum of amaxes is not an amax; leave check_vma True"
        )


def require_whole_blocks(
    granularities: Sequence[Granularity | None], shape: Sequence[int], axes: Sequence[Axes]
) -> None:
    """Raise OperandError where elements of a matrix, or of its transpose, would share a scale over two devices."""
    for side, granularity in enumerate(granularities):
        if granularity is None:
            continue
        block = granularity.block if side == 0 else granularity.block[::-1]
        for of_block, extent, along in zip(block, shape, axes, strict=True):
            if along and of_block is not None and extent % of_block:
                raise OperandError(
                    f"dot_general: with {granularity.value} scales a device's part of a dimension must be a multiple "
                    f"of {of_block}; got {extent} along {', '.join(along)}; divide another dimension, or use jax.jit "
                    "without jax.shard_map"
                )


def _cast_to(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _as_bytes(gather: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    # XLA's CPU backend would gather float8 as float16.
    if x.dtype.itemsize > 1:
        return gather(x)
    return lax.bitcast_convert_type(gather(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def _by_dimension(call: str, name: str, spec: PartitionSpec, rank: int) -> list[Axes]:
    if len(spec) > rank:
        raise OperandError(f"{call}: in_specs of {name} must have at most its {rank} dimensions; got {spec}")
    parts = (*spec, *(None,) * (rank - len(spec)))
    return [() if part is None else tuple(part) if isinstance(part, tuple) else (part,) for part in parts]


def _split(call: str, of_dims: list[Axes], m: Axes) -> tuple[Axes, Axes]:
    # N or K of the weight: axes that stay, and those along which it is gathered. Parts must be contiguous.
    axes: Axes = sum(of_dims, ())
    kept = tuple(axis for axis in axes if axis not in m)
    if axes[: len(kept)] != kept or (axes != kept and any(of_dims[1:])):
        raise OperandError(
            f"{call}: rhs is gathered along the axes that divide lhs's rows, {m}; in_specs must name them in the first "
            f"of its free or contracting dimensions, after axes that stay divided; got {of_dims}"
        )
    return kept, axes[len(kept) :]


def _require_manual(call: str, axes: set[str]) -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    manual = {} if mesh.empty else {axis: mesh.shape[axis] for axis in mesh.manual_axes}
    if not axes <= manual.keys():
        raise OperandError(
            f"{call}: in_specs is for jax.shard_map, and must name axes of its mesh; got {sorted(axes)}, and the mesh "
            f"has {sorted(manual)}; under jax.jit alone leave in_specs out: arrays are whole there"
        )
    return manual

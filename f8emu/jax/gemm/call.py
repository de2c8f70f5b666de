"""One GEMM as verbs and layers describe it to the engines: its S, if it is emulated, and its part on each device.

S, the number of slices of K, is the caller's; else the library's on a Hopper GPU, else the plan's. A trace does not
know where it will run, and is taken to be for JAX's default device.

In a program that XLA partitions, every device gathers the codes that it lacks, a byte an element, and runs the GEMM of
its part, emulated or on the tensor cores, scaled and rounded as any other. M and N are divided as the operands and the
product are, which changes no bit.
Where both operands are divided along K, as the tokens of `grad_weight` are under data parallelism, there are two ways:

    "sum"     each device multiplies its part of K, and the products are added (an all-reduce in the product's dtype):
              the bits of the sum of these products, as of any JAX or torch program that is sharded so
    "gather"  the codes are gathered along K, and rows of the product divided in exchange: the bits of one device

XLA alone would cut a dot of codes open: the parts would be added before they are scaled, and a scale that was to be
folded into the GEMM would be rounded to bfloat16. And it would gather what the emulation makes of codes, as float32.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from f8emu.jax.compiling import is_device_of, is_partitioned, lower_jaxpr
from f8emu.spec.chip import Chip
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.formats import Format
from f8emu.spec.gemm_call import GemmCall
from f8emu.spec.names import EngineName
from f8emu.spec.scaling import BLOCK, Granularity
from f8emu.split_k.ask import split_of

_CALLER = "f8emu.jax"
ShardedK = Literal["sum", "gather"]
WAYS: tuple[ShardedK, ...] = ("sum", "gather")
SUM, GATHER = WAYS
"""The ways to multiply two operands that are both divided along K."""

Names = tuple[str | None, ...]
"""The dimensions of an array: "m", "n", "k", or None for one that is never divided."""
Axes = tuple[str, ...]
"""Axes of the mesh along which a dimension is divided."""


class EngineCall(NamedTuple):
    """The static part of a GEMM.

    Operands: `a, b` of an `mm`; `a, b, scale_a, scale_b` of a `scaled_mm`, and a bias if there is one;
    `a, b, scale_a, scale_b, offs` of a `scaled_grouped_mm`.
    """

    gemm: GemmCall
    """Its `split_k` is that of the caller; None: the library's or the plan's."""
    engine: EngineName = "auto"
    is_transposed: bool = False
    """Whether the product is wanted as [N, M]."""
    layout: str = "nn"
    """How the operands of an `mm` lie in memory, as the plan names it."""
    sharded_k: str = GATHER
    """One of `WAYS`."""
    powers_of_two: bool = False
    """Whether a product may be rounded before it is scaled (`hardware.form_of`)."""
    emulated_split_k: int | None = None
    """The number of slices of K in the emulation, of a GEMM for which the hardware's library chooses it."""
    planned: Format | None = None
    """The output for which the library chooses S, where the emulation's is another: float32 before an epilogue."""

    @property
    def is_blockwise(self) -> bool:
        return self.gemm.granularities is not None and self.gemm.granularities[0].is_blockwise

    @property
    def is_microscaled(self) -> bool:
        return self.gemm.granularities is not None and self.gemm.granularities[0].is_microscaled

    @property
    def has_own_split(self) -> bool:
        """Whether the caller gives an S that a library would have to take."""
        return self.gemm.split_k is not None and not self.is_blockwise and not self.gemm.groups

    def split(self, a: jax.Array, b: jax.Array) -> "EngineCall":
        """The call with its S and the sizes of these operands, which may be a device's part of the whole."""
        gemm = replace(self.gemm, sizes=(a.shape[0], b.shape[-1], a.shape[1]))
        if self.emulated_split_k is not None:
            gemm = replace(gemm, split_k=self.emulated_split_k)
        planned = replace(gemm, out=self.planned or gemm.out)
        split = split_of(_CALLER, planned, self.layout, at_hand=is_at_hand(gemm.chip, a))
        return self._replace(gemm=replace(gemm, split_k=split.split_k), emulated_split_k=None)


def is_at_hand(chip: Chip, a: jax.Array | None = None) -> bool:
    """Whether GEMMs of `a` run on a GPU that is the chip; those of a trace run on JAX's default device."""
    devices = jax.devices() if a is None or isinstance(a, Tracer) else a.devices()
    return all(is_device_of(chip, device) for device in devices)


class Dims(NamedTuple):
    """The dimensions of a GEMM's arrays."""

    operands: tuple[Names, ...]
    """The dimensions of `a` and `b`, then of the other operands."""
    result: Names
    sharded_k: str = GATHER


def check_sharded_k(call: str, sharded_k: str) -> None:
    """Raise OperandError for an unknown way."""
    if sharded_k not in WAYS:
        raise OperandError(f"{call}: sharded_k must be one of {', '.join(WAYS)}; got {sharded_k!r}")


def dims_of(call: EngineCall, has_bias: bool = False) -> Dims:
    """The dimensions of a GEMM's arrays."""
    granularities = call.gemm.granularities
    if call.gemm.groups:
        scales: tuple[Names, ...] = ((None,), (None, "n"))
        if call.is_microscaled:
            scales = ((None, None), (None, None, "n"))
        return Dims(((None, None), (None, None, "n"), *scales, (None,)), (None, "n"))
    operands: tuple[Names, ...] = (("m", "k"), ("k", "n"))
    if granularities is not None:
        operands += (_scale(granularities[0], "m"), _scale(granularities[1], "n")[::-1])
    if has_bias:
        operands += (("n",),)
    return Dims(operands, ("n", "m") if call.is_transposed else ("m", "n"), call.sharded_k)


def in_parts(
    product: Callable[..., jax.Array], call: EngineCall, operands: Sequence[Any], *, is_emulated: bool
) -> jax.Array:
    """`product(call, *operands)`, of which each device computes its part where XLA partitions the program.

    `product` takes arrays of any extents. It is traced without the axes of a mesh, so that in `jax.shard_map` loops of
    the emulation need not say along which they vary.
    """
    dims = dims_of(call, len(operands) == 5)
    arrays = [jnp.asarray(x) for x in operands]
    dtypes = [x.dtype for x in arrays]

    def whole(*arrays: Any) -> jax.Array:
        return product(call, *arrays)

    def of_bytes(*arrays: Any) -> jax.Array:
        return whole(*(lax.bitcast_convert_type(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)))

    def from_bytes(*arrays: Any) -> jax.Array:
        # XLA's CPU backend would gather float8 as float16.
        return parted(*(lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x for x in arrays))

    # 1. The product of whole arrays, where XLA partitions nothing.
    bare = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    of_whole = jax.make_jaxpr(whole)(*bare)
    (result,) = of_whole.out_avals

    def like(*arrays: jax.Array) -> jax.Array:
        # It varies along the axes of `jax.shard_map` as the product does, and is never computed.
        total = functools.reduce(jnp.add, (jnp.sum(x.astype(jnp.float32)) for x in arrays))
        return jnp.broadcast_to(total, result.shape).astype(result.dtype)

    # 2. And of a device's part of each.
    product_of_part = of_bytes if is_emulated else whole
    parted = custom_partitioning(product_of_part)
    parted.def_partition(functools.partial(_partition, dims, product_of_part), sharding_rule=_rule(dims))
    of_parts = jax.make_jaxpr(from_bytes if is_emulated else parted)(*bare)
    like_product = jax.make_jaxpr(like)(*arrays)
    programs: dict[str, Any] = {"whole": of_whole, "parted": of_parts, "like": like_product}
    return _gemm.bind(*arrays, **programs, is_emulated=is_emulated, has_blocks=call.is_blockwise)


_gemm = Primitive("f8emu_gemm")
_gemm.def_impl(lambda *args, whole, **_: jaxpr_as_fun(whole)(*args)[0])
_gemm.def_abstract_eval(lambda *_, like, **__: like.out_avals[0])


def _lower(
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    whole: ClosedJaxpr,
    parted: ClosedJaxpr,
    like: ClosedJaxpr,
    is_emulated: bool,
    has_blocks: bool,
) -> Sequence[Any]:
    chosen = whole
    if is_partitioned(ctx):
        # XLA takes no partitioning of ours for the axes that jax.shard_map leaves to it.
        is_left_over = bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))
        if is_left_over and not is_emulated:
            raise UnsupportedError(
                "scaled_mm: in a jax.shard_map over some axes of a mesh XLA would add parts of a float8 GEMM before "
                "they are scaled; got axes that axis_names leaves out; let it have all axes of the mesh, or use jax.jit"
            )
        chosen = whole if is_left_over else parted
    bare = ctx.replace(avals_in=chosen.in_avals, avals_out=chosen.out_avals)
    mesh = getattr(ctx.module_context.axis_context, "abstract_mesh", None)
    if chosen is parted and has_blocks and mesh is not None:
        # Of what divides 64 rows, two blocks may lie on four devices, in pairs: custom_partitioning cannot read that.
        replicated = NamedSharding(mesh, PartitionSpec())
        replicate = functools.partial(lax.with_sharding_constraint, shardings=replicated)

        def with_whole_scales(a: Any, b: Any, scale_a: Any, scale_b: Any, *rest: Any) -> Any:
            return jaxpr_as_fun(chosen)(a, b, replicate(scale_a), replicate(scale_b), *rest)

        return mlir.lower_fun(with_whole_scales, multiple_results=True)(bare, *args)
    return lower_jaxpr(bare, chosen, args)


mlir.register_lowering(_gemm, _lower)


def _partition(
    dims: Dims, product: Callable[..., jax.Array], mesh: Any, args: Sequence[Any], result: Any
) -> tuple[Any, Callable[..., jax.Array], NamedSharding, tuple[NamedSharding, ...]]:
    """The function that each device computes, and the shardings of its operands and of its product."""
    arrays = [*zip(args, dims.operands, strict=True)]
    # 1. Along which axes K is divided in both operands.
    k_axes = _common(_axes(arrays[0], "k"), _axes(arrays[1], "k"))
    k_axes = _divides(mesh, arrays, "k", k_axes)
    summed = k_axes if dims.sharded_k == SUM else ()
    # 2. M and N: as the product is wanted, or else as the operands are; no axis twice.
    taken, chosen = set(summed), {"k": summed}
    for name, operand in (("m", arrays[0]), ("n", arrays[1])):
        axes = _axes((result, dims.result), name) or _axes(operand, name)
        axes = _divides(mesh, arrays, name, tuple(axis for axis in axes if axis not in taken))
        chosen[name] = axes
        taken.update(axes)
    # 3. What is gathered along K could be multiplied by every device: let each have some of the rows instead.
    spare = tuple(axis for axis in k_axes if axis not in taken)
    chosen["m"] = _divides(mesh, arrays, "m", chosen["m"] + spare)

    def part(*operands: jax.Array) -> jax.Array:
        total = product(*operands)
        return lax.psum(total, summed) if summed else total

    def sharding(names: Names) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(chosen.get(name or "") or None for name in names)))

    return mesh, part, sharding(dims.result), tuple(map(sharding, dims.operands))


def _axes(array: tuple[Any, Names], name: str) -> Axes:
    x, names = array
    if name not in names:
        return ()
    spec = (*x.sharding.spec, *(None,) * len(names))
    axes = spec[names.index(name)]
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _common(a: Axes, b: Axes) -> Axes:
    same = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[: next(same, min(len(a), len(b)))]


def _divides(mesh: Any, arrays: Sequence[tuple[Any, Names]], name: str, axes: Axes) -> Axes:
    """The first of `axes` that divide the dimension evenly, and between blocks that share a scale."""
    sizes = {size for x, names in arrays for n, size in zip(names, x.shape, strict=True) if n == name}
    divisors: Axes = ()
    for axis in axes:
        parts = math.prod(mesh.shape[a] for a in (*divisors, axis))
        unit = parts * (BLOCK if len(sizes) > 1 else 1)
        if not sizes or max(sizes) % unit:
            break
        divisors += (axis,)
    return divisors


def _rule(dims: Dims) -> str:
    """The dimensions, as XLA's partitioner takes them."""
    # One that is divided in blocks has another size, and a name of its own.
    names: dict[int, str] = {}

    def words(of_array: Names, is_scale: bool) -> str:
        dims = []
        for name in of_array:
            if name is None or is_scale:
                names[len(names)] = word = f"s{len(names)}"
                dims.append(word)
            else:
                dims.append(name)
        return " ".join(dims)

    operands = [words(of_array, i >= 2) for i, of_array in enumerate(dims.operands)]
    return ", ".join(operands) + " -> " + words(dims.result, False)


def _scale(granularity: Granularity, rows: str) -> Names:
    """The dimensions of the scales of an operand [rows, K]."""
    if granularity is Granularity.TENSORWISE:
        return (None, None)
    return (rows, None) if granularity is Granularity.ROWWISE else (rows, "k")

"""Where a kernel runs and where plain JAX: decided when JAX lowers a program, since only then the backend is known.

The kernel of a cast runs on CUDA devices of compute capability 8.9 and newer, which convert to float8; that of a GEMM
on those whose tensor cores it was written for. XLA cannot partition a kernel: in a program over several devices it
would gather the whole matrix first. There plain JAX runs, of which each device computes its part; in `jax.shard_map`,
which partitions by itself, the kernel does.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from f8emu.jax.lowering import is_partitioned
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER

FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability that converts to float8 and multiplies it."""


def has_float8_conversions() -> bool:
    """Whether all CUDA devices here convert to float8; true where there are none, and another machine will run it."""
    return all(capability_of(device) >= FLOAT8_CAPABILITY for device in cuda_devices())


def are_hopper() -> bool:
    """Whether all CUDA devices here have Hopper's tensor cores, whose bits were measured; true where there are none."""
    return all(capability_of(device)[0] == 9 for device in cuda_devices())


def kernel_or_plain(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    *args: Any,
    runs_here: Callable[[], bool] = has_float8_conversions,
) -> Any:
    """`kernel(*args)` where kernels run, `plain(*args)` elsewhere; both return the same tree of arrays.

    `runs_here`, asked when a program for CUDA is lowered, says whether the devices are those that the kernel is for.

    Only the one that is chosen is lowered, and a kernel is traced only then.
    """
    leaves, tree = jax.tree.flatten(args)

    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves: function(*jax.tree.unflatten(tree, leaves))

    # The results vary along the axes of `jax.shard_map` as those of plain JAX do.
    jaxpr, shapes = jax.make_jaxpr(flat(plain), return_shape=True)(*leaves)
    found = _choice.bind(*leaves, kernel=flat(kernel), plain=jaxpr, runs_here=runs_here)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


_choice = Primitive("f8emu_cast")
_choice.multiple_results = True
_choice.def_impl(lambda *args, kernel, plain, runs_here: jaxpr_as_fun(plain)(*args))
_choice.def_abstract_eval(lambda *_, kernel, plain, runs_here: plain.out_avals)


def _lower(ctx: mlir.LoweringRuleContext, args: Sequence[Any], jaxpr: ClosedJaxpr) -> Sequence[Any]:
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


def _lower_plain(ctx: mlir.LoweringRuleContext, *args: Any, plain: ClosedJaxpr, **_: Any) -> Sequence[Any]:
    return _lower(ctx, args, plain)


def _lower_for_cuda(
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    kernel: Callable[..., Any],
    plain: ClosedJaxpr,
    runs_here: Callable[[], bool],
) -> Sequence[Any]:
    if not runs_here() or is_partitioned(ctx):
        return _lower(ctx, args, plain)
    # Traced for shapes alone: in `jax.shard_map` a kernel need not know along which axes its arguments vary.
    bare = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in plain.in_avals]
    traced = jax.make_jaxpr(kernel)(*bare)
    found, wanted = ([(x.shape, x.dtype) for x in jaxpr.out_avals] for jaxpr in (traced, plain))
    assert found == wanted, f"the kernel gives {found}, plain JAX {wanted}"
    return _lower(ctx, args, traced)


def _batch(
    args: Any, axes: Any, *, kernel: Callable[..., Any], plain: ClosedJaxpr, runs_here: Callable[[], bool]
) -> Any:
    def batched(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.leaves(jax.vmap(function, in_axes=tuple(axes))(*args))

    found = kernel_or_plain(batched(kernel), batched(jaxpr_as_fun(plain)), *args, runs_here=runs_here)
    return found, (0,) * len(found)


mlir.register_lowering(_choice, _lower_plain)
mlir.register_lowering(_choice, _lower_for_cuda, platform="cuda")
batching.primitive_batchers[_choice] = _batch


@cache
def cuda_devices() -> tuple[Any, ...]:
    """The CUDA devices here."""
    try:
        return tuple(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return ()


def capability_of(device: Any) -> tuple[int, int]:
    """CUDA's compute capability; (0, 0) of anything else."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor or 0)) if device.platform == "gpu" and major.isdigit() else (0, 0)


def is_device_of(chip: Chip, device: Any) -> bool:
    """Whether the library of `device` is the one whose bits the profile has; `HOPPER` is any Hopper GPU."""
    if chip.capability is None or capability_of(device) != chip.capability:
        return False
    return chip.plan in ("", HOPPER.plan, device.device_kind)

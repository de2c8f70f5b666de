"""The compiler options that exactness needs on a GPU, and the decisions that wait until a program is lowered.

XLA may replace a float8 GEMM by a Triton fusion, whose bits follow no rule (NUMERICS 7); with
`xla_gpu_enable_triton_gemm=False` it calls cuBLASLt. JAX takes compiler options for an outermost `jax.jit` only, and
tells none of them to what it traces. So `jit` here sets the options and notes them in a context of JAX, which belongs
to the key of JAX's caches: a function that was traced without them is traced again.

JAX knows the backend only when it lowers a function for it. What waits until then:

- Errors, for what one backend refuses and another does not, and for derivatives that do not exist.
- Kernels. A cast's runs on CUDA devices of compute capability 8.9 and newer, which convert to float8; a GEMM's on those
  whose tensor cores it was written for. XLA cannot partition a kernel: in a program over several devices it would
  gather the whole matrix first. There plain JAX runs, of which each device computes its part; in `jax.shard_map`, which
  partitions by itself, the kernel does.
"""

import functools
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import jit as _jit  # chex.fake_jit replaces the name in `jax`
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import SpecError, UnsupportedError

TRITON_GEMM = "xla_gpu_enable_triton_gemm"
EXCESS_PRECISION = "xla_allow_excess_precision"
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability that converts to float8 and multiplies it."""

_excess = jax.make_user_context(default_value=None)


def known_excess_precision() -> bool | None:
    """Whether XLA surely keeps excess precision in the program that is traced; None: it may have Triton GEMMs.

    Excess precision folds a scale into a bfloat16 GEMM (`gemm.hardware`).
    """
    excess: bool | None = _excess.value
    if excess is None and _is_false(_flags().get(TRITON_GEMM)):
        return False  # its own options, which are not known, may say otherwise
    return excess


def compiler_options(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options `given`, with those added that exactness needs.

    Raises:
        SpecError: `given` requests Triton GEMMs.
    """
    options = dict(given or {})
    if TRITON_GEMM in options and not _is_false(options[TRITON_GEMM]):
        raise SpecError(
            f"jit: compiler_options must leave {TRITON_GEMM} False; got {options[TRITON_GEMM]!r}; Triton GEMMs have "
            "other bits than cuBLASLt's: use jax.jit for a program without float8 GEMMs"
        )
    excess = options.get(EXCESS_PRECISION, _flags().get(EXCESS_PRECISION, True))
    return options | {TRITON_GEMM: False, EXCESS_PRECISION: not _is_false(excess)}


def jit(fun: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`jax.jit` with the compiler options that exact float8 GEMMs need on a GPU; on a CPU they change nothing.

    Use it for the outermost function, a training step, and around transformations: `jit(jax.value_and_grad(loss))`.
    Inside another jit or transformation it is plain `jax.jit`, because JAX takes only the outermost program's options.

    Args:
        fun: the function; without it, the result is a decorator.
        options: those of `jax.jit`; `compiler_options` are added to.

    Raises:
        SpecError: compiler options that request Triton GEMMs.
    """
    if fun is None:
        return functools.partial(jit, **options)
    return _Jitted(fun, options)


def _with_options(name: str) -> Callable[..., Any]:
    def method(self: "_Jitted", *args: Any, **kwargs: Any) -> Any:
        with _excess(self._known):
            return getattr(self._outermost, name)(*args, **kwargs)

    return method


class _Jitted:
    """A function of `jit`. Its methods are those of its class: what wraps it must not take them over as its own."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        all_options = compiler_options(options.pop("compiler_options", None))
        self._known: bool = all_options[EXCESS_PRECISION]
        self._outermost: Any = jax.jit(fun, compiler_options=all_options, **options)
        self._inner: Any = jax.jit(fun, **options)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_eager(jax.tree.leaves((args, kwargs))):
            return self._inner(*args, **kwargs)
        with _excess(self._known):
            return self._outermost(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    lower, trace, eval_shape = map(_with_options, ("lower", "trace", "eval_shape"))

    def clear_cache(self) -> None:
        self._outermost.clear_cache()
        self._inner.clear_cache()


def compiled(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of a GEMM, which has its bits compiled only: also where `jax.disable_jit` or `chex.fake_jit` hold."""
    program = _jit(fun, **options)

    def call(*args: Any) -> Any:
        with jax.disable_jit(False):
            return program(*args)

    return call


def is_eager(arrays: Iterable[Any]) -> bool:
    """Whether JAX neither traces nor transforms here, so that a call may compile a program with its own options."""
    # While JAX traces, arrays may still be concrete, closed over; the result of an operation is not.
    return not any(isinstance(x, Tracer) for x in arrays) and not isinstance(jnp.zeros(()), Tracer)


def _is_false(value: Any) -> bool:
    return str(value).lower() in ("false", "0")


def _flags() -> dict[str, str]:
    """`XLA_FLAGS`, as XLA reads them when it starts."""
    words = (word.lstrip("-").partition("=") for word in shlex.split(os.environ.get("XLA_FLAGS", "")))
    return {name: value or "true" for name, _, value in words}


def refuse_lowering(x: jax.Array, refusal: str) -> jax.Array:
    """`x`; raises UnsupportedError with the message `refusal` when it is run or lowered, not when it is traced.

    Meant for one branch of `jax.lax.platform_dependent`, of which JAX lowers the backend's alone.
    """
    return _refused.bind(x, refusal=refusal)


def _refuse(*_: Any, refusal: str) -> Any:
    raise UnsupportedError(refusal)


_refused = Primitive("f8emu_refused")
_refused.def_impl(_refuse)
_refused.def_abstract_eval(lambda x, *, refusal: x)
mlir.register_lowering(_refused, _refuse)
batching.primitive_batchers[_refused] = lambda args, axes, *, refusal: (_refused.bind(*args, refusal=refusal), *axes)


def refuse_mapped_alone(state: jax.Array, *operands: jax.Array, refusal: str) -> jax.Array:
    """`state`; raises UnsupportedError with the message `refusal` where `jax.vmap` maps an operand and not it."""
    return _not_mapped_alone.bind(state, *operands, refusal=refusal)


def _mapped(args: Any, axes: Any, *, refusal: str) -> Any:
    if axes[0] is None:
        raise UnsupportedError(refusal)
    return _not_mapped_alone.bind(*args, refusal=refusal), axes[0]


_not_mapped_alone = Primitive("f8emu_not_mapped_alone")
_not_mapped_alone.def_impl(lambda state, *_, refusal: state)
_not_mapped_alone.def_abstract_eval(lambda state, *_, refusal: state)
mlir.register_lowering(_not_mapped_alone, lambda _, state, *__, refusal: [state])
batching.primitive_batchers[_not_mapped_alone] = _mapped


def reverse_mode(x: jax.Array) -> jax.Array:
    """`x`, whose derivative in forward mode, or transpose, raises UnsupportedError.

    Reverse mode transposes the primitive of a tangent, and neither maps, runs nor lowers it.
    """
    return _reverse_mode.bind(x)


_refuse_forward = functools.partial(
    _refuse,
    refusal="f8emu.jax: a float8 layer is not linear, and differentiable in reverse mode alone; got jvp, linearize, "
    "jacfwd or linear_transpose; use jax.grad, jax.vjp or jax.jacrev, or jax.lax.dot_general for this layer",
)
_reverse_mode = Primitive("f8emu_reverse_mode")
_reverse_mode.def_impl(lambda x: x)
_reverse_mode.def_abstract_eval(lambda x: x)
mlir.register_lowering(_reverse_mode, lambda _, x: [x])
batching.defvectorized(_reverse_mode)
ad.defjvp(_reverse_mode, lambda tangent, _: _tangent.bind(tangent))
ad.primitive_transposes[_reverse_mode] = _refuse_forward
_tangent = Primitive("f8emu_tangent")
_tangent.def_impl(_refuse_forward)
_tangent.def_abstract_eval(lambda x: x)
mlir.register_lowering(_tangent, _refuse_forward)
batching.primitive_batchers[_tangent] = _refuse_forward
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def differentiable_no_more(x: Any, refusal: str) -> Any:
    """`x`, an array or a tree of them; raises UnsupportedError with the message `refusal` if it is differentiated."""
    return x


@differentiable_no_more.defjvp
def _(refusal: str, primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(refusal)


def without_gradient(call: str, operands: Any) -> Any:
    """The operands of a verb, an array or a tree of them; raises UnsupportedError if the verb is differentiated."""
    return differentiable_no_more(
        operands,
        f"{call}: codes have no gradient, so that the verbs have none; differentiate f8emu.jax.dot_general(recipe), or "
        "put jax.lax.stop_gradient around what goes in, of a straight-through estimator too",
    )


def is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA partitions the program over several devices, along one axis of their mesh at least."""
    context: Any = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):  # in jax.shard_map, or in one inside of another
        manual = {*context.manual_axes, *getattr(context.mesh, "manual_axes", ())}
        return any(size > 1 for axis, size in context.mesh.shape.items() if axis not in manual)
    return getattr(context, "num_devices", 1) not in (1, None)


def lower_jaxpr(ctx: mlir.LoweringRuleContext, jaxpr: ClosedJaxpr, args: Sequence[Any]) -> Sequence[Any]:
    """A primitive lowered as the program `jaxpr`."""
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


@functools.cache
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

    JAX asks `runs_here` when it lowers a program for CUDA: whether the kernel is for these devices. Only the chosen one
    is lowered, and a kernel is traced only then.
    """
    # 1. Primitives take arrays alone.
    leaves, tree = jax.tree.flatten(args)

    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves: function(*jax.tree.unflatten(tree, leaves))

    # 2. Plain JAX is traced now: the results vary along the axes of `jax.shard_map` as its own do.
    jaxpr, shapes = jax.make_jaxpr(flat(plain), return_shape=True)(*leaves)
    results = _choice.bind(*leaves, kernel=flat(kernel), plain=jaxpr, runs_here=runs_here)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _lower_for_cuda(
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    kernel: Callable[..., Any],
    plain: ClosedJaxpr,
    runs_here: Callable[[], bool],
) -> Sequence[Any]:
    if not runs_here() or is_partitioned(ctx):
        return lower_jaxpr(ctx, plain, args)
    # Traced for shapes alone: in `jax.shard_map` a kernel need not know along which axes its arguments vary.
    bare = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in plain.in_avals]
    traced = jax.make_jaxpr(kernel)(*bare)
    shapes, wanted = ([(x.shape, x.dtype) for x in jaxpr.out_avals] for jaxpr in (traced, plain))
    assert shapes == wanted, f"the kernel gives {shapes}, plain JAX {wanted}"
    return lower_jaxpr(ctx, traced, args)


def _batch(args: Any, axes: Any, *, kernel: Callable[..., Any], plain: ClosedJaxpr, **options: Any) -> Any:
    def batched(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.leaves(jax.vmap(function, in_axes=tuple(axes))(*args))

    results = kernel_or_plain(batched(kernel), batched(jaxpr_as_fun(plain)), *args, **options)
    return results, (0,) * len(results)


_choice = Primitive("f8emu_cast")
_choice.multiple_results = True
_choice.def_impl(lambda *args, plain, **_: jaxpr_as_fun(plain)(*args))
_choice.def_abstract_eval(lambda *_, plain, **__: plain.out_avals)
mlir.register_lowering(_choice, lambda ctx, *args, plain, **_: lower_jaxpr(ctx, plain, args))
mlir.register_lowering(_choice, _lower_for_cuda, platform="cuda")
batching.primitive_batchers[_choice] = _batch

"""The GEMMs without a tensor core, emulated by the native engine, a custom call of XLA, or by `f8ref.jax`.

No other module of f8emu.jax uses either. They give the bits of the chip (NUMERICS 1 to 5, 9).

A GEMM here is one primitive. What computes it is chosen when JAX lowers it: on a CPU the engine, elsewhere, in
`jax.export` and on a machine without the engine the program of `f8ref.jax`, which is traced only then.

    eager, jit, scan, grad of a custom_vjp   one custom call
    vmap                                     `gemm.engine` makes a loop of it
    sharded programs                         `gemm.call.in_parts` around it gives each device its part
    jax.export                               f8ref.jax: an exported program needs no f8emu where it runs
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

import f8ref.jax
from f8emu.jax.compiling import compiled
from f8emu.jax.gemm.call import EngineCall
from f8emu.native import gemm as engine
from f8emu.native import library
from f8emu.spec.scaling import Granularity

_TARGET = "f8emu_gemm"
_GRANULARITIES = {granularity: number for number, granularity in enumerate(Granularity)}
"""`granularity_a` of xla.c."""


class _Options(ctypes.Structure):
    """`xla_options` of xla.c."""

    _fields_ = (
        *library.fields(
            ctypes.c_int32, "size width threads scaling granularity_a granularity_b is_transposed is_grouped"
        ),
        ("slice_k", ctypes.c_int64),
        ("model", engine.Model),
    )


def multiply(call: EngineCall, *operands: Any) -> jax.Array:
    """A checked GEMM, [N, M] if it is transposed."""
    return _gemm.bind(*operands, call=call.split(*operands[:2]))


def is_available() -> bool:
    """Whether the native engine is there."""
    return library.library() is not None


@functools.lru_cache(maxsize=4096)
def _program(call: EngineCall) -> Any:
    return compiled(functools.partial(_gemm.bind, call=call))


def _run(*operands: Any, call: EngineCall) -> jax.Array:
    """An eager call: one program for each shape, or those of f8ref.jax."""
    if all(device.platform == "cpu" for device in operands[0].devices()) and _is_native(call):
        return _program(call)(*operands)
    return _by_reference(*operands, call=call)


def _by_reference(*operands: Any, call: EngineCall) -> jax.Array:
    gemm = call.gemm
    options: dict[str, Any] = {"out_dtype": gemm.out, "chip": gemm.chip}
    if not gemm.groups:
        options["split_k"] = gemm.split_k
    if gemm.granularities is not None and not gemm.groups:
        operands, bias = operands[:4], operands[4:]
        options |= {"granularity_a": gemm.granularities[0], "granularity_b": gemm.granularities[1]}
        options["bias"] = bias[0] if bias else None
    if gemm.granularities is not None:
        options["use_fast_accum"] = gemm.use_fast_accum
    product = getattr(f8ref.jax, gemm.verb)(*operands, **options)
    return product.T if call.is_transposed else product


def _attribute(call: EngineCall, k: int) -> np.ndarray:
    gemm, numbers = call.gemm, [0, 0]
    if gemm.granularities is not None and not gemm.groups:
        numbers = [_GRANULARITIES[granularity] for granularity in gemm.granularities]
    options = _Options(
        size=ctypes.sizeof(_Options),
        width=-1,
        threads=0,
        scaling=engine.scaling_of(gemm),
        granularity_a=numbers[0],
        granularity_b=numbers[1],
        is_transposed=call.is_transposed,
        is_grouped=bool(gemm.groups),
        slice_k=engine.slice_k(gemm.model, k, gemm.split_k or 1),
        model=engine.model_of(gemm.model),
    )
    return np.frombuffer(bytes(options), np.uint8)


def _shape(a: Any, b: Any, *_: Any, call: EngineCall) -> ShapedArray:
    sizes = (a.shape[0], b.shape[-1])
    return ShapedArray(sizes[::-1] if call.is_transposed else sizes, jnp.dtype(call.gemm.out.name))


@functools.cache
def _is_registered() -> bool:
    """Whether the native engine is there; if so, it is registered with XLA."""
    native = library.library()
    if native is not None:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(native.f8_xla_gemm), platform="cpu")
    return native is not None


def _is_native(call: EngineCall) -> bool:
    """Whether the engine computes it; it lacks some of the models that a user can make."""
    return engine.fits(call.gemm.model) and _is_registered()


def _lower_reference(ctx: mlir.LoweringRuleContext, *operands: Any, call: EngineCall) -> Sequence[Any]:
    return mlir.lower_fun(functools.partial(_by_reference, call=call), multiple_results=False)(ctx, *operands)


def _lower_native(ctx: mlir.LoweringRuleContext, *operands: Any, call: EngineCall) -> Sequence[Any]:
    if ctx.module_context.lowering_parameters.for_export or not _is_native(call):
        return _lower_reference(ctx, *operands, call=call)
    a: Any = ctx.avals_in[0]
    options: Any = _attribute(call, a.shape[-1])
    return jax.ffi.ffi_lowering(_TARGET)(ctx, *operands, options=options)


_gemm = Primitive("f8emu_emulated_gemm")
_gemm.def_impl(_run)
_gemm.def_abstract_eval(_shape)
mlir.register_lowering(_gemm, _lower_reference)
mlir.register_lowering(_gemm, _lower_native, platform="cpu")

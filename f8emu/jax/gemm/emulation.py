"""The GEMMs without a tensor core, emulated by the native engine, a custom call of XLA, or by `f8ref.jax`.

Only this module of f8emu.jax knows either. They give the bits of the chip (NUMERICS 1 to 5, 11).

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
from f8emu.jax.gemm.call import Gemm, split_k_of
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
            ctypes.c_int32, "size width threads scaling granularity_a granularity_b is_transposed reserved"
        ),
        ("slice_k", ctypes.c_int64),
        ("model", engine.Model),
    )


def multiply(gemm: Gemm, *operands: Any) -> jax.Array:
    """A checked GEMM, [N, M] if it is transposed."""
    split_k = gemm.emulated_split_k or split_k_of(gemm, *operands[:2])
    return _gemm.bind(*operands, gemm=gemm._replace(split_k=split_k, emulated_split_k=None))


def is_available() -> bool:
    """Whether there is an engine."""
    return library.library() is not None


@functools.cache
def _program(gemm: Gemm) -> Any:
    return compiled(functools.partial(_gemm.bind, gemm=gemm))


def _run(*operands: Any, gemm: Gemm) -> jax.Array:
    """An eager call: one program for each shape, or those of f8ref.jax."""
    if all(device.platform == "cpu" for device in operands[0].devices()) and _is_registered():
        return _program(gemm)(*operands)
    return _by_reference(*operands, gemm=gemm)


def _by_reference(*operands: Any, gemm: Gemm) -> jax.Array:
    options: dict[str, Any] = {"out_dtype": gemm.out_dtype, "chip": gemm.chip}
    if gemm.call != "scaled_grouped_mm":
        options["split_k"] = gemm.split_k
    if gemm.granularities is not None and gemm.call == "scaled_mm":
        operands, bias = operands[:4], operands[4:]
        options |= {"granularity_a": gemm.granularities[0], "granularity_b": gemm.granularities[1]}
        options["bias"] = bias[0] if bias else None
    if gemm.call != "mm":
        options["use_fast_accum"] = gemm.use_fast_accum
    product = getattr(f8ref.jax, gemm.call)(*operands, **options)
    return product.T if gemm.is_transposed else product


def _attribute(gemm: Gemm, k: int) -> np.ndarray:
    scaling, numbers = engine.UNSCALED if gemm.call == "mm" else engine.GROUPED, [0, 0]
    if gemm.granularities is not None and gemm.call == "scaled_mm":
        scaling = engine.scaling_of(gemm.granularities)
        numbers = [_GRANULARITIES[granularity] for granularity in gemm.granularities]
    found = _Options(
        size=ctypes.sizeof(_Options),
        width=-1,
        threads=0,
        scaling=scaling,
        granularity_a=numbers[0],
        granularity_b=numbers[1],
        is_transposed=gemm.is_transposed,
        slice_k=engine.slice_k(gemm.model, k, gemm.split_k or 1),
        model=engine.model_of(gemm.model),
    )
    return np.frombuffer(bytes(found), np.uint8)


def _shape(a: Any, b: Any, *_: Any, gemm: Gemm) -> ShapedArray:
    sizes = (a.shape[0], b.shape[-1])
    return ShapedArray(sizes[::-1] if gemm.is_transposed else sizes, jnp.dtype(gemm.out_dtype.name))


@functools.cache
def _is_registered() -> bool:
    """Whether there is an engine; XLA then knows it."""
    found = library.library()
    if found is not None:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(found.f8_xla_gemm), platform="cpu")
    return found is not None


def _lower_reference(ctx: mlir.LoweringRuleContext, *operands: Any, gemm: Gemm) -> Sequence[Any]:
    return mlir.lower_fun(functools.partial(_by_reference, gemm=gemm), multiple_results=False)(ctx, *operands)


def _lower_native(ctx: mlir.LoweringRuleContext, *operands: Any, gemm: Gemm) -> Sequence[Any]:
    if ctx.module_context.lowering_parameters.for_export or not _is_registered():
        return _lower_reference(ctx, *operands, gemm=gemm)
    a: Any = ctx.avals_in[0]
    options: Any = _attribute(gemm, a.shape[-1])
    return jax.ffi.ffi_lowering(_TARGET)(ctx, *operands, options=options)


_gemm = Primitive("f8emu_emulated_gemm")
_gemm.def_impl(_run)
_gemm.def_abstract_eval(_shape)
mlir.register_lowering(_gemm, _lower_reference)
mlir.register_lowering(_gemm, _lower_native, platform="cpu")

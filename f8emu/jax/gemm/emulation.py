"""The GEMMs without a tensor core, emulated by the native engine, a custom call of XLA, or by `f8ref.jax`.

Only this module of f8emu.jax knows either. They give the bits of the chip (NUMERICS 1 to 5, 11).

A GEMM here is one primitive. What computes it is chosen when JAX lowers it: on a CPU the engine, elsewhere, in
`jax.export` and on a machine without the engine the program of `f8ref.jax`, which is traced only then.

    eager, jit, scan, grad of a custom_vjp   one custom call
    vmap                                     one custom call of many GEMMs; an operand that all share is not repeated
    sharded programs                         `gemm.partition` around it gives each device its part
    jax.export                               f8ref.jax: an exported program needs no f8emu where it runs
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import f8ref.jax
from f8emu.jax.sharing import transpose
from f8emu.native import gemm as engine
from f8emu.native import library
from f8emu.native.model import Model, model_of, slice_k
from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity
from f8ref.jax import softfloat

_TARGET = "f8emu_gemm"
_GRANULARITIES = {
    Granularity.TENSORWISE: 0,
    Granularity.ROWWISE: 1,
    Granularity.BLOCKWISE_1X128: 2,
    Granularity.BLOCKWISE_128X128: 3,
}
"""`granularity_a` of xla.c."""


class _Options(ctypes.Structure):
    """`xla_options` of xla.c."""

    _fields_ = (
        ("size", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scaling", ctypes.c_int32),
        ("granularity_a", ctypes.c_int32),
        ("granularity_b", ctypes.c_int32),
        ("is_transposed", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("slice_k", ctypes.c_int64),
        ("model", Model),
    )


class _Gemm(NamedTuple):
    """What is static of a GEMM."""

    call: str
    out_dtype: Format
    chip: Chip
    granularities: tuple[Granularity, Granularity] | None = None
    use_fast_accum: bool = False
    split_k: int = 1
    is_transposed: bool = False
    is_many: bool = False
    """Whether the operands have a first dimension of many GEMMs, or of 1 where all share one."""

    @property
    def model(self) -> AccumulationModel:
        pair = (Granularity.ROWWISE, Granularity.ROWWISE) if self.call == "scaled_grouped_mm" else self.granularities
        return self.chip.accumulation(pair, use_fast_accum=self.use_fast_accum)

    def options(self, k: int) -> np.ndarray:
        """The attribute of the custom call."""
        scaling = engine.UNSCALED if self.call == "mm" else engine.GROUPED
        numbers = (0, 0)
        if self.granularities is not None:
            numbers = _GRANULARITIES[self.granularities[0]], _GRANULARITIES[self.granularities[1]]
            scaling = engine.scaling_of(self.granularities)
        found = _Options(
            size=ctypes.sizeof(_Options),
            width=-1,
            threads=0,
            scaling=scaling,
            granularity_a=numbers[0],
            granularity_b=numbers[1],
            is_transposed=self.is_transposed,
            slice_k=slice_k(self.model, k, self.split_k),
            model=model_of(self.model),
        )
        return np.frombuffer(bytes(found), np.uint8)

    def emulated(self, *operands: Any) -> jax.Array:
        """The same GEMM by `f8ref.jax`."""
        if self.is_many:
            one = self._replace(is_many=False)
            many = max(x.shape[0] for x in operands)
            mapped = [jnp.broadcast_to(x, (many, *x.shape[1:])) for x in operands]
            return jax.lax.map(lambda each: one.emulated(*each), mapped)
        shared: dict[str, Any] = {"out_dtype": self.out_dtype, "chip": self.chip}
        if self.call == "scaled_grouped_mm":
            a, b, scale_a, scale_b, offs = operands
            return f8ref.jax.scaled_grouped_mm(
                a, b, scale_a, scale_b, offs, **shared, use_fast_accum=self.use_fast_accum
            )
        shared["split_k"] = self.split_k
        if self.granularities is None:
            product = f8ref.jax.mm(operands[0], operands[1], **shared)
        else:
            bias = operands[4] if len(operands) == 5 else None
            shared |= {"bias": bias, "use_fast_accum": self.use_fast_accum}
            shared |= {"granularity_a": self.granularities[0], "granularity_b": self.granularities[1]}
            a, b, scale_a, scale_b = operands[:4]
            product = f8ref.jax.scaled_mm(a, b, scale_a, scale_b, **shared)
        return transpose(product) if self.is_transposed else product


def scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    granularities: tuple[Granularity, Granularity],
    *,
    bias: jax.Array | None,
    out_dtype: Format,
    use_fast_accum: bool,
    split_k: int,
    chip: Chip,
    transposed: bool = False,
) -> jax.Array:
    """A checked `scaled_mm`, [N, M] with `transposed`."""
    gemm = _Gemm("scaled_mm", out_dtype, chip, granularities, use_fast_accum, split_k, transposed)
    return _call(gemm, a, b, scale_a, scale_b, *(() if bias is None else (bias,)))


def scaled_grouped_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    offs: jax.Array,
    *,
    out_dtype: Format,
    use_fast_accum: bool,
    chip: Chip,
) -> jax.Array:
    """A checked `scaled_grouped_mm`."""
    gemm = _Gemm("scaled_grouped_mm", out_dtype, chip, use_fast_accum=use_fast_accum)
    return _call(gemm, a, b, scale_a, scale_b, offs)


def mm(
    a: jax.Array, b: jax.Array, *, out_dtype: Format, split_k: int, chip: Chip, transposed: bool = False
) -> jax.Array:
    """A checked `mm`, [N, M] with `transposed`."""
    return _call(_Gemm("mm", out_dtype, chip, split_k=split_k, is_transposed=transposed), a, b)


def is_available() -> bool:
    """Whether there is an engine."""
    return library.library() is not None


def _call(gemm: _Gemm, *operands: Any) -> jax.Array:
    return _gemm.bind(*operands, gemm=gemm)


def promote(
    partial: jax.Array, scale_a: jax.Array, scale_b: jax.Array, total: jax.Array, *, scales_first: bool
) -> jax.Array:
    """[EPI-5] `fma(partial * scale_a, scale_b, total)`; with `scales_first` `fma(partial, scale_a * scale_b, total)`.

    All float32, on integers: XLA has no fused multiply-add of its own, and makes some where none was written.
    """
    p, s_a, s_b, tot = map(softfloat.bits, (partial, scale_a, scale_b, total))
    if scales_first:
        found = softfloat.fused_multiply_add(p, softfloat.multiply(s_a, s_b), tot)
    else:
        found = softfloat.fused_multiply_add(softfloat.multiply(p, s_a), s_b, tot)
    return softfloat.from_bits(found)


@functools.cache
def _program(gemm: _Gemm) -> Any:
    return jax.jit(functools.partial(_call, gemm))


def _run(*operands: Any, gemm: _Gemm) -> jax.Array:
    """An eager call: one program for each shape, or those of f8ref.jax."""
    is_on_cpu = all(device.platform == "cpu" for device in operands[0].devices())
    return _program(gemm)(*operands) if is_on_cpu and _is_registered() else gemm.emulated(*operands)


def _shape(*avals: Any, gemm: _Gemm) -> ShapedArray:
    a, b = avals[:2]
    sizes = (a.shape[-2], b.shape[-1])
    many = (max(x.shape[0] for x in avals),) if gemm.is_many else ()
    return ShapedArray(many + (sizes[::-1] if gemm.is_transposed else sizes), jnp.dtype(gemm.out_dtype.name))


@functools.cache
def _is_registered() -> bool:
    """Whether there is an engine; XLA then knows it."""
    found = library.library()
    if found is not None:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(found.f8_xla_gemm), platform="cpu")
    return found is not None


def _lower_reference(ctx: mlir.LoweringRuleContext, *operands: Any, gemm: _Gemm) -> Sequence[Any]:
    return mlir.lower_fun(gemm.emulated, multiple_results=False)(ctx, *operands)


def _lower_native(ctx: mlir.LoweringRuleContext, *operands: Any, gemm: _Gemm) -> Sequence[Any]:
    is_exported = ctx.module_context.lowering_parameters.for_export
    if is_exported or not _is_registered():
        return _lower_reference(ctx, *operands, gemm=gemm)
    a: Any = ctx.avals_in[0]
    options: Any = gemm.options(a.shape[-1])
    return jax.ffi.ffi_lowering(_TARGET)(ctx, *operands, options=options)


def _batched(operands: Sequence[Any], axes: Sequence[Any], *, gemm: _Gemm) -> tuple[Any, int]:
    if gemm.is_many or gemm.call == "scaled_grouped_mm":  # mapped twice, or GEMMs of many sizes: one after another
        mapped = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]

        def one(each: Any) -> jax.Array:
            picked = iter(each)
            return _call(gemm, *(x if axis is None else next(picked) for x, axis in zip(mapped, axes, strict=True)))

        return jax.lax.map(one, [x for x, axis in zip(mapped, axes, strict=True) if axis is not None]), 0
    found = [x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    return _call(gemm._replace(is_many=True), *found), 0


_gemm = Primitive("f8emu_emulated_gemm")
_gemm.def_impl(_run)
_gemm.def_abstract_eval(_shape)
mlir.register_lowering(_gemm, _lower_reference)
mlir.register_lowering(_gemm, _lower_native, platform="cpu")
batching.primitive_batchers[_gemm] = _batched

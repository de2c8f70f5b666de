"""One GEMM by the engine, on memory that the caller owns: the structs of engine.h, and the calls."""

import ctypes
import functools
from typing import NamedTuple

from f8emu.native import library
from f8emu.native.library import fields
from f8emu.spec.chip import AccumulationModel, Rounding
from f8emu.spec.formats import FLOAT16, FLOAT32
from f8emu.spec.gemm_call import GemmCall
from f8emu.spec.scaling import BLOCK, Granularity

_LONGEST_ORDER = 32
_GROUP_K = 16
UNSCALED, TENSORWISE, ROWWISE, GROUPED, MICROSCALED, VECTORS, SQUARES = range(7)
"""How scales enter: `F8_UNSCALED` and those after it in engine.h."""
FORMATS = {
    name: number
    for number, name in enumerate(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "bfloat16", "float16", "float32")
    )
}
"""Format name -> its number in engine.h."""


class Model(ctypes.Structure):
    """`f8_model` of engine.h."""

    _fields_ = (
        *fields(ctypes.c_int32, "step_k aligned_fraction_bits result_fraction_bits promote_k nearest_even converts"),
        ("order_length", ctypes.c_int32),
        ("order", ctypes.c_int32 * _LONGEST_ORDER),
        *fields(ctypes.c_int32, "interleaved fraction_bits accumulator_fraction_bits accumulator_reach zero_exponent"),
    )


class Output(NamedTuple):
    """The result [M, N]: address, strides in elements; and the bias [N] that it takes, or 0."""

    address: int
    row_stride: int
    column_stride: int
    format: str
    bias: int = 0
    bias_stride: int = 0
    bias_format: str = "float32"


class Matrix(ctypes.Structure):
    """`f8_operand` of engine.h: an operand [rows, K], strides in elements, and its scales, float32 or E8M0.

    The scale of (row, k) is at `row // rows_per_scale * scale_row_stride + k // 128 * scale_block_stride`, of E8M0
    scales `k // 32`.
    """

    _fields_ = (
        ("codes", ctypes.c_void_p),
        *fields(ctypes.c_int64, "row_stride k_stride"),
        *fields(ctypes.c_int32, "format rows_per_scale"),
        ("scale", ctypes.c_void_p),
        *fields(ctypes.c_int64, "scale_row_stride scale_block_stride"),
    )


class GemmStruct(ctypes.Structure):
    """`f8_gemm` of engine.h."""

    _fields_ = (
        *fields(ctypes.c_int64, "m n k"),
        *fields(Matrix, "a b"),
        ("out", ctypes.c_void_p),
        *fields(ctypes.c_int64, "out_row_stride out_column_stride"),
        ("bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64),
        *fields(ctypes.c_int32, "out_format bias_format scaling threads"),
        ("slice_k", ctypes.c_int64),
        ("model", ctypes.POINTER(Model)),
    )


def fits(model: AccumulationModel) -> bool:
    """Whether the engine has a model: all of `f8emu.spec.CHIPS`, and most of those that a user makes."""
    # Its panels hold steps of 8, 16 or 32. A slice of K begins with a whole order and a whole block of E8M0 scales, a
    # promotion with a whole step and a group of 16. [MX-3] The exponent of zero is above none of float32's.
    order, promote_k = len(model.order) or 1, model.promote_k or 32
    return (
        model.accumulator == FLOAT32
        and (model.zero_exponent is None or -256 <= model.zero_exponent <= FLOAT32.min_exponent)
        and model.operand in (None, FLOAT16)
        and model.step_k in (8, 16, 32)
        and promote_k % model.step_k == promote_k % _GROUP_K == 0
        and _LONGEST_ORDER % order == model.split_k_multiple % _LONGEST_ORDER == 0
        and (model.floored is None or model.floored.interleaved in (1, 2, 4, 8))
    )


@functools.cache
def model_of(model: AccumulationModel) -> Model:
    """The struct of a model that `fits`."""
    same = ("step_k", "aligned_fraction_bits", "result_fraction_bits")
    # 0 stands for None, but for the reach, of which 0 is a value.
    struct = Model(
        **{name: getattr(model, name) for name in same},
        promote_k=model.promote_k or 0,
        nearest_even=model.rounding is Rounding.NEAREST_EVEN,
        converts=model.operand is not None,
        order_length=len(model.order),
        order=model.order,
        zero_exponent=model.zero_exponent or 0,
    )
    if model.floored is not None:
        for name in ("interleaved", "fraction_bits", "accumulator_fraction_bits"):
            setattr(struct, name, getattr(model.floored, name))
        reach = model.floored.accumulator_reach
        struct.accumulator_reach = -1 if reach is None else reach
    return struct


def slice_k(model: AccumulationModel, k: int, split_k: int) -> int:
    """[CHAIN-3], [BF16-2] K of a slice: `ceil(K / S)` rounded up; all of K for one slice."""
    if split_k == 1:
        return max(k, 1)
    multiple = model.split_k_multiple
    return max(-(-k // (split_k * multiple)), 1) * multiple


def scaling_of(call: GemmCall) -> int:
    """How the scales of a GEMM enter."""
    if call.granularities is None:
        return UNSCALED
    if call.granularities[0].is_microscaled:
        return MICROSCALED
    if call.groups:
        return GROUPED
    if call.granularities[0].is_blockwise:
        return SQUARES if Granularity.BLOCKWISE_128X128 in call.granularities else VECTORS
    return TENSORWISE if call.granularities[0] is Granularity.TENSORWISE else ROWWISE


def matrix(
    address: int,
    strides: tuple[int, ...],
    format: str,
    granularity: Granularity | None = None,
    scale: int = 0,
    scale_strides: tuple[int, ...] = (0, 0),
) -> Matrix:
    """An operand [rows, K] with scales of `granularity.scale_shape(rows, K)`; one that all share has no stride."""
    # A stride of 0 lets one scale serve all rows, or all of K.
    rows_per_scale = BLOCK if granularity is Granularity.BLOCKWISE_128X128 else 1
    per_row = 0 if granularity in (None, Granularity.TENSORWISE) else scale_strides[0]
    per_block = scale_strides[1] if granularity is not None and granularity.is_blockwise else 0
    return Matrix(address, strides[0], strides[1], FORMATS[format], rows_per_scale, scale, per_row, per_block)


def described(call: GemmCall, a: Matrix, b: Matrix, out: Output) -> GemmStruct:
    """A GEMM as the engine takes it: `out[m, n] = round(accumulate(a @ b^T) * scales + bias)`."""
    # The order is that of the struct's fields.
    return GemmStruct(
        *call.sizes,
        a,
        b,
        out.address,
        out.row_stride,
        out.column_stride,
        out.bias,
        out.bias_stride,
        FORMATS[out.format],
        FORMATS[out.bias_format],
        scaling_of(call),
        1,
        slice_k(call.model, call.sizes[2], call.split_k or 1),
        ctypes.pointer(model_of(call.model)),
    )


def run(gemm: GemmStruct, *, threads: int, width: str | None = None) -> None:
    """The described GEMM on at most so many threads, with vectors of one of `library.widths()`, None: the fastest.

    Exactness: `f8ref.numpy`, every bit, at every width.
    """
    gemm.threads = threads
    native = library.library()
    assert native is not None, library.unavailable()
    if native.f8_run(ctypes.byref(gemm), library.width_number(width)):
        sizes = gemm.m, gemm.n, gemm.k
        raise MemoryError(f"there is no memory for the panels of a GEMM of M, N, K = {sizes} on {gemm.threads} threads")


def run_at(gemm: GemmStruct, a: int, b: int, scale_a: int, scale_b: int, out: int, bias: int, *, threads: int) -> None:
    """`run` on other memory: addresses of codes, scales, output and bias (0: none)."""
    call = GemmStruct.from_buffer_copy(gemm)  # other threads may run the same description
    of_a, of_b = call.a, call.b
    of_a.codes, of_a.scale, of_b.codes, of_b.scale = a, scale_a, b, scale_b
    call.out, call.bias = out, bias
    run(call, threads=threads)

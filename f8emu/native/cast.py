"""Amaxes, scales and codes of one matrix by the engine, on memory that the caller owns."""

import ctypes
import functools
import struct
from typing import NamedTuple

from f8emu.native import library
from f8emu.native.gemm import FORMATS
from f8emu.native.library import fields
from f8emu.spec.formats import Format, format_by_name
from f8emu.spec.scaling import Granularity, ScaleRule

FIND, SCALE, ENCODE = 1, 2, 4
"""The stages of a cast: `F8_FIND` and those after it in engine.h."""


class Values(NamedTuple):
    """A matrix [rows, K] in high precision: address, strides in elements, one of which is 1, and format."""

    address: int
    rows: int
    k: int
    row_stride: int
    k_stride: int
    format: str


class Grid(NamedTuple):
    """Amaxes, inv_scales and scales of a matrix, of `Granularity.scale_shape` each, or 0: address, strides in elements.

    Float32; scales of the rule's `scale_format`.
    """

    amax: int = 0
    inv_scale: int = 0
    scale: int = 0
    row_stride: int = 0
    block_stride: int = 0


class Codes(NamedTuple):
    """The place of the codes: address, strides in elements, one of which is 1."""

    address: int = 0
    row_stride: int = 0
    k_stride: int = 1


class _Target(ctypes.Structure):
    """`f8_target` of engine.h."""

    _fields_ = (
        *fields(ctypes.c_uint32, "fraction_bits nan_code zero_sign max_bits min_normal_bits exponent_offset"),
        ("subnormal", ctypes.c_float),
    )


class _Rule(ctypes.Structure):
    """`f8_rule` of engine.h."""

    _fields_ = (
        *fields(ctypes.c_double, "largest amax_floor"),
        *fields(ctypes.c_int32, "power_of_two is_e8m0"),
        ("carry", ctypes.c_uint32),
        *fields(ctypes.c_int32, "max_exponent infinity_byte"),
    )


class _Cast(ctypes.Structure):
    """`f8_cast` of engine.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *fields(ctypes.c_int64, "line_stride lines positions line_block position_block"),
        *fields(ctypes.c_void_p, "amax inv_scale scale"),
        *fields(ctypes.c_int64, "scale_line_stride scale_position_stride"),
        ("codes", ctypes.c_void_p),
        *fields(ctypes.c_int64, "code_line_stride code_position_stride"),
        ("target", _Target),
        ("rule", _Rule),
        *fields(ctypes.c_int32, "format stages threads"),
    )


def run(
    x: Values,
    granularity: Granularity,
    grid: Grid,
    format: Format | None,
    rule: ScaleRule | None,
    codes: Codes,
    stages: int,
    *,
    threads: int,
    width: str | None = None,
) -> None:
    """Some stages of `amax`, `scale_from_amax` and `quantize` of a matrix that is not empty, in one reading.

    `format` is None without SCALE and ENCODE, `rule` without SCALE; `stages` are FIND, SCALE and ENCODE added up. Small
    matrices take one thread. `width` is one of `library.widths()`, None the fastest.

    Shapes: x and codes [rows, K], `grid` `granularity.scale_shape(rows, K)`.
    Exactness: the three functions of `f8ref.numpy`, every bit, at every width.
    """
    engine = library.library()
    assert engine is not None, library.unavailable()
    # The engine reads lines: what lies in one piece. Where K does not, blocks, scales and codes turn with the matrix.
    block_rows, block_k = granularity.block
    order = 1 if x.k_stride == 1 else -1
    # The order is that of the struct's fields.
    call = _Cast(
        x.address,
        x.row_stride if order == 1 else x.k_stride,
        *(x.rows, x.k)[::order],
        *(block_rows or 0, block_k or 0)[::order],
        grid.amax,
        grid.inv_scale,
        grid.scale,
        *(grid.row_stride, grid.block_stride)[::order],
        codes.address,
        *(codes.row_stride, codes.k_stride)[::order],
        _Target() if format is None else _target(format.name),
        _Rule() if format is None or rule is None else _rule(format.name, rule, 0),
        FORMATS[x.format],
        stages,
        threads,
    )
    if engine.f8_run_cast(ctypes.byref(call), library.width_number(width)):
        raise MemoryError(f"there is no memory for the amaxes of a matrix of {x.rows} by {x.k}")


def scales(
    amax: int, inv_scale: int, scale: int, count: int, format: Format, rule: ScaleRule, *, margin: int = 0
) -> None:
    """`f8ref.numpy.scale_from_amax` of `count` amaxes, which lie one after the other as results do; a NaN is any."""
    engine = library.library()
    assert engine is not None, library.unavailable()
    engine.f8_scales(ctypes.byref(_rule(format.name, rule, margin)), count, amax, inv_scale, scale)


@functools.cache
def _target(name: str) -> _Target:
    format = format_by_name(name)
    return _Target(
        format.fraction_bits,
        format.nan_code,
        0x80 if format.has_negative_zero else 0,
        _bits(format.max),
        _bits(format.smallest_normal),
        (127 - format.bias) << format.fraction_bits,
        2.0 ** (format.min_exponent - format.fraction_bits + 23),
    )


@functools.cache
def _rule(name: str, rule: ScaleRule, margin: int) -> _Rule:
    format = format_by_name(name)
    of_e8m0 = ()
    if rule.e8m0 is not None:
        of_e8m0 = True, rule.e8m0.carry(format), format.max_exponent, rule.e8m0.infinity_byte(format)
    return _Rule(format.max * 2.0**-margin, rule.amax_floor, rule.power_of_two, *of_e8m0)


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]

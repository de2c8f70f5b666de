"""The launches of the Triton kernels: grids, tile sizes and warps. Importing this module needs Triton.

Each writes into tensors that its caller has allocated; all are contiguous, as the caller saw to.
"""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.formats import Format, format_by_name
from f8emu.spec.scaling import ScaleRule
from f8emu.torch.fused import block_kernels, cast_kernels, scale_kernels

# The fastest on an H200 in bfloat16 at [8192, 4096] and [8192, 14336].
AMAX_BLOCK = 16384
AMAX_WARPS = 8
ROW_AMAX_TILE = (4, 1024)
ROW_AMAX_WARPS = 8
ROW_COL_AMAX_TILE = (128, 64)
ROW_COL_AMAX_WARPS = 4
SCALES_BLOCK = 256
CAST_TILE = (64, 128)
CAST_WARPS = 4
ROWS_ELEMENTS = 8192
"""Elements that a program of `cast_rows` has in registers, if its rows are not longer."""
ROWS_ELEMENTS_PER_WARP = 1024
ROWS_LONGEST = 16384
"""The longest row that stays in registers."""
LONG_ROWS_BLOCK = 8192
LONG_ROWS_WARPS = 8
BLOCK = 128
VECTORS_STRIP = 64
VECTORS_WARPS = 4
SQUARES_STRIP = 64
SQUARES_WARPS = 8


def tensor_amax(x: Tensor, amax: Tensor) -> None:
    """`amax` raised to that of `x`."""
    _run(
        scale_kernels.tensor_amax_kernel,
        _blocks(x.numel(), AMAX_BLOCK),
        (x, _bits(amax), x.numel()),
        BLOCK=AMAX_BLOCK,
        num_warps=AMAX_WARPS,
    )


def row_amax(x: Tensor, amax: Tensor) -> None:
    """`amax` [M, 1] of the rows."""
    (m, n), (bm, bn) = x.shape, ROW_AMAX_TILE
    constants = {"TILES_N": _blocks(n, bn), "BM": bm, "BN": bn}
    _run(scale_kernels.row_amax_kernel, _blocks(m, bm), (x, _bits(amax), m, n), **constants, num_warps=ROW_AMAX_WARPS)


def row_col_amax(x: Tensor, row_amax: Tensor, col_amax: Tensor) -> None:
    """`row_amax` [M, 1] and `col_amax` [N, 1] raised to those of the rows and columns."""
    (m, n), (bm, bn) = x.shape, ROW_COL_AMAX_TILE
    tiles_n = _blocks(n, bn)
    arguments = (x, _bits(row_amax), _bits(col_amax), m, n, tiles_n)
    _run(
        scale_kernels.row_col_amax_kernel,
        _blocks(m, bm) * tiles_n,
        arguments,
        BM=bm,
        BN=bn,
        num_warps=ROW_COL_AMAX_WARPS,
    )


def scales(vectors: Sequence[tuple[Tensor, Tensor, Tensor]], fmt: Format, rule: ScaleRule, margin: int = 0) -> None:
    """(amax, inv_scale, scale), once or twice: the latter two of every amax, in one launch."""
    sizes = [amax.numel() for amax, _, _ in vectors]
    _run(
        scale_kernels.scales_kernel,
        sum(_blocks(size, SCALES_BLOCK) for size in sizes),
        (*vectors[0], *vectors[-1], sizes[0], sum(sizes[1:])),
        **_rule_constants(fmt, rule, margin),
        BLOCK=SCALES_BLOCK,
    )


def cast_pair(
    x: Tensor,
    fmt: Format,
    rule: ScaleRule,
    rows: tuple[Tensor, Tensor, Tensor] | None,
    cols: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """(amax, codes, scale) of `x` and of its transpose, each where asked for: codes and scales by the amaxes."""
    (m, n), (bm, bn) = x.shape, CAST_TILE
    tiles_n = _blocks(n, bn)
    # Where there is no tensor, x stands in: a pointer that is never followed.
    row_source, row_codes, row_scale = rows or (x, x, x)
    col_source, col_codes, col_scale = cols or (x, x, x)
    is_row_vector, is_col_vector = (side is not None and side[0].numel() > 1 for side in (rows, cols))
    vectors: list[tuple[Tensor, Tensor, Tensor]] = []
    if is_row_vector:
        row_inv_scale = torch.empty_like(row_scale)
        vectors.append((row_source, row_inv_scale, row_scale))
        row_source = row_inv_scale
    if is_col_vector:
        col_inv_scale = torch.empty_like(col_scale)
        vectors.append((col_source, col_inv_scale, col_scale))
        col_source = col_inv_scale
    if vectors:
        scales(vectors, fmt, rule)
    _run(
        cast_kernels.cast_pair_kernel,
        _blocks(m, bm) * tiles_n,
        (x, row_source, row_codes, row_scale, col_source, col_codes, col_scale, m, n, tiles_n),
        **_rule_constants(fmt, rule),
        **_codes_constants(fmt.name),
        ROWS=rows is not None,
        COLS=cols is not None,
        ROW_VECTOR=is_row_vector,
        COL_VECTOR=is_col_vector,
        BM=bm,
        BN=bn,
        num_warps=CAST_WARPS,
    )


def cast_pair_given(
    x: Tensor, fmt: Format, inv_scale: Tensor, rows: Tensor | None, cols: Tensor | None, amax: Tensor | None
) -> None:
    """Codes of `x` and of its transpose, each where asked for; `amax` raised to that of `x` in the same pass."""
    (m, n), (bm, bn) = x.shape, CAST_TILE
    tiles_n = _blocks(n, bn)
    codes = (x if rows is None else rows, x if cols is None else cols)
    _run(
        cast_kernels.cast_pair_given_kernel,
        _blocks(m, bm) * tiles_n,
        (x, inv_scale, *codes, x if amax is None else _bits(amax), m, n, tiles_n),
        **_codes_constants(fmt.name),
        ROWS=rows is not None,
        COLS=cols is not None,
        AMAX=amax is not None,
        BM=bm,
        BN=bn,
        num_warps=CAST_WARPS,
    )


def cast_rows(x: Tensor, fmt: Format, rule: ScaleRule, codes: Tensor, scale: Tensor, amax: Tensor) -> None:
    """Codes, scales [M, 1] and amaxes [M, 1] of the rows, by their own amax."""
    m, n = x.shape
    constants = {
        **_rule_constants(fmt, rule),
        "DTYPE": cast_kernels.DTYPES[fmt.name],
    }
    if n > ROWS_LONGEST:
        _run(
            cast_kernels.cast_long_rows_kernel,
            m,
            (x, codes, scale, _bits(amax), n),
            **constants,
            TILES_N=_blocks(n, LONG_ROWS_BLOCK),
            BN=LONG_ROWS_BLOCK,
            num_warps=LONG_ROWS_WARPS,
        )
        return
    bn = 1 << (n - 1).bit_length()
    bm = max(1, ROWS_ELEMENTS // bn)
    _run(
        cast_kernels.cast_rows_kernel,
        _blocks(m, bm),
        (x, codes, scale, _bits(amax), m, n),
        **constants,
        BM=bm,
        BN=bn,
        num_warps=bm * bn // ROWS_ELEMENTS_PER_WARP,
    )


def cast_blocks(
    x: Tensor,
    fmt: Format,
    rule: ScaleRule,
    rows: tuple[Tensor, Tensor] | None,
    cols: tuple[Tensor, Tensor] | None,
    *,
    is_square: bool,
) -> None:
    """(codes, scale) of `x` and of its transpose, each where asked for; of 1x128 scales the transpose is contiguous."""
    m, n = x.shape
    tiles_m, tiles_n = _blocks(m, BLOCK), _blocks(n, BLOCK)
    constants = {
        **_rule_constants(fmt, rule),
        "DTYPE": cast_kernels.DTYPES[fmt.name],
        "ROWS": rows is not None,
        "COLS": cols is not None,
    }
    if is_square:
        arguments = (x, *(rows or (x, x)), *(cols or (x, x)), m, n, tiles_m, tiles_n)
        constants |= {"STRIP": SQUARES_STRIP, "num_warps": SQUARES_WARPS}
        _run(block_kernels.cast_squares_kernel, tiles_m * tiles_n, arguments, **constants)
        return
    row, col = ((x, x, x) if wanted is None else (*wanted, torch.empty_like(wanted[1])) for wanted in (rows, cols))
    arguments = (x, *row, *col, m, n, tiles_m, tiles_n)
    constants |= {"STRIP": VECTORS_STRIP, "num_warps": VECTORS_WARPS}
    _run(block_kernels.cast_vectors_kernel, tiles_m * tiles_n, arguments, **constants)


def _run(kernel: Any, programs: int, arguments: tuple[Tensor | int, ...], **constants: Any) -> None:
    # Triton launches on torch's current device, which need not be that of the tensors.
    x = arguments[0]
    assert isinstance(x, Tensor), "the matrix comes first"
    index = x.device.index
    if index is None or index == torch.cuda.current_device():
        kernel[(programs,)](*arguments, **constants)
    else:
        with torch.cuda.device(index):
            kernel[(programs,)](*arguments, **constants)


def _rule_constants(fmt: Format, rule: ScaleRule, margin: int = 0) -> dict[str, float | bool]:
    return _cached_rule_constants(fmt.name, rule.power_of_two, rule.amax_floor, margin)


# The next two are asked for in every launch. Their arguments are plain values, which are quickly found in a cache.


@cache
def _cached_rule_constants(fmt: str, power_of_two: bool, amax_floor: float, margin: int) -> dict[str, float | bool]:
    """The scale rule as the kernels' constants: `FLOOR` is the largest float32 not above the rule's floor."""
    below = _float32(amax_floor)
    if below > amax_floor:
        below = _float32(below - below * 2.0**-24)
    limit = format_by_name(fmt).max * 2.0**-margin
    return {
        "QUOTIENT": limit,
        "FLOOR": below,
        "AT_FLOOR": _float32(limit / amax_floor),
        "POWER_OF_TWO": power_of_two,
    }


@cache
def _codes_constants(fmt: str) -> dict[str, Any]:
    return {"LIMIT": format_by_name(fmt).max, "DTYPE": cast_kernels.DTYPES[fmt]}


def _float32(value: float) -> float:
    """The float32 nearest to `value`."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _bits(amax: Tensor) -> Tensor:
    return amax.view(torch.int32)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)

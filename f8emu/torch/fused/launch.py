"""The launches of the Triton kernels: grids, tile sizes and warps. Importing this module needs Triton.

A plan says how a kernel is launched on matrices of one size, whatever the tensors. Plans are made once for each
signature; eager code calls them, and `inductor` writes them into compiled code. A plan takes the tensors in the order of its
kernel's arguments, all contiguous and allocated by the caller. Where a kernel does not use one, any tensor stands in: a
pointer that is never followed.
"""

import struct
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.formats import format_by_name
from f8emu.torch.fused import block_kernels, cast_kernels, scale_kernels

# The fastest on an H200 in bfloat16 at [8192, 4096] and [8192, 14336].
AMAX_BLOCK = 16384
AMAX_WARPS = 8
ROW_AMAX_TILE = (4, 1024)
ROW_AMAX_WARPS = 8
ROW_COL_AMAX_TILE = (128, 64)
ROW_COL_AMAX_WARPS = 4
SCALES_BLOCK = 256
SCALES_WARPS = 4
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


class Plan:
    """One launch of one kernel, but for its tensors."""

    __slots__ = ("_runners", "constants", "kernel", "programs", "sizes", "warps")

    def __init__(
        self, kernel: Any, programs: int, sizes: tuple[int, ...], constants: dict[str, Any], warps: int
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.sizes = sizes
        """The integers behind the tensors."""
        self.constants = constants
        """The `tl.constexpr` arguments, in the order of the kernel's."""
        self.warps = warps
        self._runners: dict[Any, Any] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the device of the tensors, which need not be torch's current one."""
        index = tensors[0].device.index
        if index is None or index == torch.cuda.current_device():
            self._launch(index, tensors)
        else:
            with torch.cuda.device(index):
                self._launch(index, tensors)

    def _launch(self, index: int | None, tensors: tuple[Tensor, ...]) -> None:
        # Triton looks the compiled kernel up by all of its arguments, which takes longer than the launch. All that it
        # looks at and a plan does not fix: dtypes, and whether a pointer is a multiple of 16.
        key = (index, *[(x.dtype, not x.data_ptr() % 16) for x in tensors])
        runner = self._runners.get(key)
        if runner is not None:
            runner(*tensors, *self.sizes, *self.constants.values())
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.sizes, **self.constants, num_warps=self.warps)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._runners[key] = compiled[(self.programs, 1, 1)]


_plan = lru_cache(maxsize=4096)


@_plan
def tensor_amax(count: int) -> Plan:
    """Tensors x, amax: `amax` is raised to that of the `count` elements of `x`."""
    kernel = scale_kernels.tensor_amax_kernel
    return Plan(kernel, _blocks(count, AMAX_BLOCK), (count,), {"BLOCK": AMAX_BLOCK}, AMAX_WARPS)


@_plan
def row_amax(m: int, n: int) -> Plan:
    """Tensors x [m, n], amax: the amaxes of the rows."""
    bm, bn = ROW_AMAX_TILE
    constants = {"TILES_N": _blocks(n, bn), "BM": bm, "BN": bn}
    return Plan(scale_kernels.row_amax_kernel, _blocks(m, bm), (m, n), constants, ROW_AMAX_WARPS)


@_plan
def row_col_amax(m: int, n: int) -> Plan:
    """Tensors x [m, n], amaxes [m + n]: raised to those of the rows, then of the columns."""
    bm, bn = ROW_COL_AMAX_TILE
    tiles_n = _blocks(n, bn)
    kernel = scale_kernels.row_col_amax_kernel
    return Plan(kernel, _blocks(m, bm) * tiles_n, (m, n, tiles_n), {"BM": bm, "BN": bn}, ROW_COL_AMAX_WARPS)


@_plan
def scales(fmt: str, power_of_two: bool, amax_floor: float, margin: int, first: int, second: int = 0) -> Plan:
    """Tensors amax, inv_scale, scale of `first` elements, and the same of `second`."""
    return Plan(
        scale_kernels.scales_kernel,
        _blocks(first, SCALES_BLOCK) + _blocks(second, SCALES_BLOCK),
        (first, second),
        {**_rule_constants(fmt, power_of_two, amax_floor, margin), "BLOCK": SCALES_BLOCK},
        SCALES_WARPS,
    )


@_plan
def cast_pair(
    m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float, rows: bool | None, cols: bool | None
) -> Plan:
    """Tensors x [m, n], row source, codes and scale, column source, codes and scale.

    `rows` and `cols`: whether the source is a vector; None leaves the operand out. A vector is of amaxes where scales
    are powers of two, otherwise of inv_scales.
    """
    bm, bn = CAST_TILE
    tiles_n = _blocks(n, bn)
    constants = {
        **_rule_constants(fmt, power_of_two, amax_floor),
        **_codes_constants(fmt),
        "ROWS": rows is not None,
        "COLS": cols is not None,
        "ROW_VECTOR": bool(rows),
        "COL_VECTOR": bool(cols),
        "BM": bm,
        "BN": bn,
    }
    return Plan(cast_kernels.cast_pair_kernel, _blocks(m, bm) * tiles_n, (m, n, tiles_n), constants, CAST_WARPS)


@_plan
def cast_pair_given(m: int, n: int, fmt: str, rows: bool, cols: bool, amax: bool) -> Plan:
    """Tensors x [m, n], inv_scale, row codes, column codes, amax: with `amax` it is raised to that of `x`."""
    bm, bn = CAST_TILE
    tiles_n = _blocks(n, bn)
    constants = {**_codes_constants(fmt), "ROWS": rows, "COLS": cols, "AMAX": amax, "BM": bm, "BN": bn}
    return Plan(cast_kernels.cast_pair_given_kernel, _blocks(m, bm) * tiles_n, (m, n, tiles_n), constants, CAST_WARPS)


@_plan
def cast_rows(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float) -> Plan:
    """Tensors x [m, n], codes, scale and amax of the rows, each by its own amax."""
    constants = _rule_constants(fmt, power_of_two, amax_floor) | {"DTYPE": _codes_constants(fmt)["DTYPE"]}
    if n > ROWS_LONGEST:
        constants = {"TILES_N": _blocks(n, LONG_ROWS_BLOCK), **constants, "BN": LONG_ROWS_BLOCK}
        return Plan(cast_kernels.cast_long_rows_kernel, m, (n,), constants, LONG_ROWS_WARPS)
    bn = 1 << (n - 1).bit_length()
    bm = max(1, ROWS_ELEMENTS // bn)
    warps = bm * bn // ROWS_ELEMENTS_PER_WARP
    return Plan(cast_kernels.cast_rows_kernel, _blocks(m, bm), (m, n), {**constants, "BM": bm, "BN": bn}, warps)


@_plan
def cast_vectors(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float, rows: bool, cols: bool) -> Plan:
    """Tensors x [m, n], row codes, scale and inv_scale, column codes, scale and inv_scale: in vectors of 128."""
    constants = _block_constants(fmt, power_of_two, amax_floor, rows, cols) | {"STRIP": VECTORS_STRIP}
    tiles_m, tiles_n = _blocks(m, BLOCK), _blocks(n, BLOCK)
    sizes = (m, n, tiles_m, tiles_n)
    return Plan(block_kernels.cast_vectors_kernel, tiles_m * tiles_n, sizes, constants, VECTORS_WARPS)


@_plan
def cast_squares(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float, rows: bool, cols: bool) -> Plan:
    """Tensors x [m, n], row codes and scale, column codes and scale: in squares of 128 by 128."""
    constants = _block_constants(fmt, power_of_two, amax_floor, rows, cols) | {"STRIP": SQUARES_STRIP}
    tiles_m, tiles_n = _blocks(m, BLOCK), _blocks(n, BLOCK)
    sizes = (m, n, tiles_m, tiles_n)
    return Plan(block_kernels.cast_squares_kernel, tiles_m * tiles_n, sizes, constants, SQUARES_WARPS)


@cache
def _rule_constants(fmt: str, power_of_two: bool, amax_floor: float, margin: int = 0) -> dict[str, Any]:
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


def _codes_constants(fmt: str) -> dict[str, Any]:
    return {"LIMIT": format_by_name(fmt).max, "DTYPE": cast_kernels.DTYPES[fmt]}


def _block_constants(fmt: str, power_of_two: bool, amax_floor: float, rows: bool, cols: bool) -> dict[str, Any]:
    rule = _rule_constants(fmt, power_of_two, amax_floor)
    return {**rule, "DTYPE": _codes_constants(fmt)["DTYPE"], "ROWS": rows, "COLS": cols}


def _float32(value: float) -> float:
    """The float32 nearest to `value`."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)

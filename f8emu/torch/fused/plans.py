"""The launch plan of every fused kernel: grids, tile sizes, warps. Importing this module needs Triton.

Plans are made once per signature. Eager code calls them, and `inductor` writes calls of them into compiled code.
"""

import struct
from functools import cache
from typing import Any

import torch

from f8emu.spec.formats import E4M3FN, format_by_name
from f8emu.spec.scaling import BLOCK
from f8emu.torch.chip import compares_pairs
from f8emu.torch.fused import (
    block_kernels,
    cast_kernels,
    grouped_gemm_kernels,
    grouped_kernels,
    scale_kernels,
    silu_kernels,
)
from f8emu.torch.fused.launch import (
    AMAX_TILE,
    GROUP_TILE,
    LaunchPlan,
    amax_tiles,
    blocks,
    padded_rows,
    planned,
    tile_count,
)

# The fastest on an H200 in bfloat16 at [8192, 4096] and [8192, 14336].
AMAX_BLOCK, AMAX_WARPS = 16384, 8
ROW_AMAX_TILE, ROW_AMAX_WARPS = (4, 1024), 8
ROW_COL_AMAX_WARPS = 4
SCALES_BLOCK, SCALES_WARPS = 256, 4
CAST_TILE, CAST_WARPS = (64, 128), 4
TRANSPOSE_TILE, TRANSPOSE_WARPS = (128, 128), 8
# What a program of `cast_rows` keeps in registers, unless one row is longer, and the longest row that stays there.
ROWS_ELEMENTS, ROWS_ELEMENTS_PER_WARP, ROWS_LONGEST = 8192, 1024, 16384
LONG_ROWS_BLOCK, LONG_ROWS_WARPS = 8192, 8
BLOCKS_STRIP = 64
VECTORS_WARPS, SQUARES_WARPS = 4, 8
# Not measured. Chosen so that ptxas spills no registers and at least 16 warps fit on a multiprocessor.
HIDDEN_TILE, HIDDEN_WARPS = (16, 256), 8
GRADIENTS_TILE, GRADIENTS_WARPS = (64, 64), 8
# Of the casts of groups, whose tiles have `GROUP_TILE` rows: columns of a tile.
GROUPS_AMAX_TILE, GROUPS_AMAX_WARPS = 256, 4
GROUPS_CAST_TILE, GROUPS_CAST_WARPS = 128, 4
GROUPS_HIDDEN_TILE, GROUPS_HIDDEN_WARPS = 64, 4
GROUPS_GRADIENTS_TILE, GROUPS_GRADIENTS_WARPS = 64, 4
GROUPS_ROWS, GROUPS_ROWS_ELEMENTS_PER_WARP = 64, 1024  # of weights that are read once: rows of a program
# Of grouped GEMMs (`gemm_of_rows`, `gemm_of_inner`): tile, warps, steps loaded ahead; the fastest of ten on an H200.
GEMM_ROWS_TILE, GEMM_ROWS_WARPS, GEMM_ROWS_STAGES = (128, 128), 4, 3
GEMM_INNER_TILE, GEMM_INNER_WARPS, GEMM_INNER_STAGES, GEMM_INNER_SUPER = (128, 256), 8, 3, 8
MULTIPROCESSORS = 132  # of a Hopper GPU: as many programs, each of which writes many tiles


@planned
def tensor_amax(count: int) -> LaunchPlan:
    """Tensors x, amax: `amax` is updated by the amax of the `count` elements of `x`."""
    kernel = scale_kernels.tensor_amax_kernel
    return LaunchPlan(kernel, blocks(count, AMAX_BLOCK), (count,), {"BLOCK": AMAX_BLOCK}, AMAX_WARPS)


@planned
def row_amax(m: int, n: int) -> LaunchPlan:
    """Tensors x [m, n], amax: the amaxes of the rows."""
    bm, bn = ROW_AMAX_TILE
    constants = {"TILES_N": blocks(n, bn), "BM": bm, "BN": bn}
    return LaunchPlan(scale_kernels.row_amax_kernel, blocks(m, bm), (m, n), constants, ROW_AMAX_WARPS)


@planned
def row_col_amax(m: int, n: int, has_pairs: bool, tiled: bool) -> LaunchPlan:
    """Tensors x [m, n], amaxes [m + n]: updated by those of the rows, then of the columns.

    With `tiled`, amaxes [tiles_n * m + tiles_m * n]: those of every tile.
    """
    tiles_m, tiles_n = amax_tiles(m, n)
    kernel = scale_kernels.row_col_amax_of_pairs_kernel if has_pairs else scale_kernels.row_col_amax_kernel
    constants = {"TILED": tiled, "BM": AMAX_TILE, "BN": AMAX_TILE}
    otherwise = row_col_amax(m, n, False, tiled) if has_pairs else None
    return LaunchPlan(kernel, tiles_m * tiles_n, (m, n, tiles_n), constants, ROW_COL_AMAX_WARPS, otherwise)


def has_pairs(dtype: torch.dtype, n: int, device: torch.device) -> bool:
    """Whether rows of `n` numbers can be read as pairs of 16-bit numbers, and the GPU compares both at once."""
    return dtype.itemsize == 2 and n % 2 == 0 and compares_pairs(device)


@planned
def scales(fmt: str, power_of_two: bool, amax_floor: float, margin: int, count: int) -> LaunchPlan:
    """Tensors amax, inv_scale, scale, of `count` elements each."""
    constants = rule_constants(fmt, power_of_two, amax_floor, margin) | {"BLOCK": SCALES_BLOCK}
    return LaunchPlan(scale_kernels.scales_kernel, blocks(count, SCALES_BLOCK), (count,), constants, SCALES_WARPS)


@planned
def cast_pair(
    m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float, rows: int | None, cols: int | None
) -> LaunchPlan:
    """Tensors x [m, n], row source, codes and scale, column source, codes and scale.

    `rows` and `cols`: how many amaxes of the tensor the source holds, of which the largest counts; 0 is a vector of one
    value a row, an amax where scales are powers of two, otherwise an inv_scale; -t are t vectors of amaxes; None leaves
    the operand out.
    """
    constants = {
        **rule_constants(fmt, power_of_two, amax_floor),
        **codes_constants(fmt),
        "ROWS": rows is not None,
        "COLS": cols is not None,
        "ROW_BLOCK": 1 << (rows - 1).bit_length() if rows is not None and rows > 0 else 0,
        "COL_BLOCK": 1 << (cols - 1).bit_length() if cols is not None and cols > 0 else 0,
        "ROW_TILED": rows is not None and rows < 0,
        "COL_TILED": cols is not None and cols < 0,
    }
    counts = abs(rows or 0), abs(cols or 0)
    return _tiled(cast_kernels.cast_pair_kernel, m, n, CAST_TILE, constants, CAST_WARPS, *counts)


@planned
def cast_pair_given(m: int, n: int, fmt: str, rows: bool, cols: bool, amax: bool, keep: bool) -> LaunchPlan:
    """Tensors x [m, n], inv_scale, row codes, column codes, and the amax, scale and used inv_scale of a state.

    With `amax`, the amax is updated and the scale is written, with `keep` also the used inv_scale.
    """
    constants = {**codes_constants(fmt), "ROWS": rows, "COLS": cols, "AMAX": amax, "KEEP": keep}
    return _tiled(cast_kernels.cast_pair_given_kernel, m, n, CAST_TILE, constants, CAST_WARPS)


@planned
def update_delayed(
    layers: int,
    length: int,
    fmts: str,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
    is_most_recent: bool,
    uncalled: float,
) -> LaunchPlan:
    """Tensors taken [3 * layers], table of addresses, report: one program for each tensor."""
    names = fmts.split(",")
    rules = [rule_constants(fmt or E4M3FN.name, power_of_two, amax_floor, margin) for fmt in names]
    constants = {
        **{f"QUOTIENT_{i}": rule["QUOTIENT"] for i, rule in enumerate(rules)},
        **{f"AT_FLOOR_{i}": rule["AT_FLOOR"] for i, rule in enumerate(rules)},
        **{f"IS_CAST_{i}": bool(fmt) for i, fmt in enumerate(names)},
        "FLOOR": rules[0]["FLOOR"],
        "POWER_OF_TWO": power_of_two,
        "MOST_RECENT": is_most_recent,
        "UNCALLED": uncalled,
        "BLOCK_H": 1 << (length - 1).bit_length(),
    }
    return LaunchPlan(scale_kernels.update_delayed_kernel, 3 * layers, (length,), constants, 1)


@planned
def cast_rows(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float) -> LaunchPlan:
    """Tensors x [m, n], codes, scale and amax of the rows, each by its own amax."""
    constants = rule_constants(fmt, power_of_two, amax_floor) | {"DTYPE": codes_constants(fmt)["DTYPE"]}
    if n > ROWS_LONGEST:
        constants = {"TILES_N": blocks(n, LONG_ROWS_BLOCK), **constants, "BN": LONG_ROWS_BLOCK}
        return LaunchPlan(cast_kernels.cast_long_rows_kernel, m, (n,), constants, LONG_ROWS_WARPS)
    bn = 1 << (n - 1).bit_length()
    bm = max(1, ROWS_ELEMENTS // bn)
    warps = bm * bn // ROWS_ELEMENTS_PER_WARP
    return LaunchPlan(cast_kernels.cast_rows_kernel, blocks(m, bm), (m, n), {**constants, "BM": bm, "BN": bn}, warps)


@planned
def cast_columns(m: int, n: int, fmt: str) -> LaunchPlan:
    """Tensors x [m, n], inv_scale of the columns, codes [m, n]."""
    return _tiled(cast_kernels.cast_columns_kernel, m, n, CAST_TILE, codes_constants(fmt), CAST_WARPS)


@planned
def transpose_codes(m: int, n: int) -> LaunchPlan:
    """Tensors codes [m, n] and out [n, m]."""
    return _tiled(cast_kernels.transpose_codes_kernel, m, n, TRANSPOSE_TILE, {}, TRANSPOSE_WARPS)


@planned
def cast_blocks(
    m: int, n: int, fmt: str, square: bool, power_of_two: bool, amax_floor: float, rows: bool, cols: bool
) -> LaunchPlan:
    """Tensors x [m, n], row codes and scale, column codes and scale; without `square` inv_scales after the scales."""
    kernel = block_kernels.cast_squares_kernel if square else block_kernels.cast_vectors_kernel
    constants = rule_constants(fmt, power_of_two, amax_floor) | {"DTYPE": codes_constants(fmt)["DTYPE"]}
    constants |= {"ROWS": rows, "COLS": cols, "STRIP": BLOCKS_STRIP}
    tiles_m, tiles_n = blocks(m, BLOCK), blocks(n, BLOCK)
    return LaunchPlan(
        kernel, tiles_m * tiles_n, (m, n, tiles_m, tiles_n), constants, SQUARES_WARPS if square else VECTORS_WARPS
    )


@planned
def hidden_delayed(m: int, n: int, fmt: str) -> LaunchPlan:
    """Tensors gate, up [m, n], inv_scale, codes, amax, used inv_scale and scale."""
    return _tiled(silu_kernels.hidden_given_kernel, m, n, HIDDEN_TILE, codes_constants(fmt), HIDDEN_WARPS)


@planned
def gradients_delayed(m: int, n: int, fmt: str, hidden_fmt: str) -> LaunchPlan:
    """Tensors grad_hidden, gate, up [m, n], 3 inv_scales, 2 amaxes, 5 codes, 2 scales."""
    of_hidden = {f"HIDDEN_{name}": value for name, value in codes_constants(hidden_fmt).items()}
    constants = {**codes_constants(fmt), **of_hidden}
    return _tiled(silu_kernels.gradients_given_kernel, m, n, GRADIENTS_TILE, constants, GRADIENTS_WARPS)


@planned
def group_tiles(groups: int, rows: int) -> LaunchPlan:
    """Tensors offs [groups], tiles."""
    constants = {"BLOCK_G": max(2, 1 << (groups - 1).bit_length()), "BM": GROUP_TILE}
    sizes = (groups, rows, tile_count(rows, groups))
    return LaunchPlan(grouped_kernels.tiles_kernel, groups, sizes, constants, 4)


@planned
def zeros_beyond(m: int, n: int, groups: int) -> LaunchPlan:
    """Tensors x [m, n], offs [groups]: the rows of `x` from the last of `offs` on become zeros."""
    constants = {"BM": GROUP_TILE, "BN": 512}
    return LaunchPlan(grouped_kernels.zeros_beyond_kernel, blocks(m, GROUP_TILE), (m, n, groups), constants, 4)


@planned
def groups_amax(m: int, k: int, groups: int, stacked: int, by_group: bool, has_pairs: bool) -> LaunchPlan:
    """Tensors x [m, k], tiles, amaxes of rows (or groups), of columns; `stacked`: the rows of each of equal groups."""
    constants = {"UNIFORM": stacked > 0, "BY_GROUP": by_group, "PAIRS": has_pairs}
    otherwise = groups_amax(m, k, groups, stacked, by_group, False) if has_pairs else None
    plan = _of_groups(
        grouped_kernels.groups_amax_kernel, m, k, groups, stacked, GROUPS_AMAX_TILE, constants, GROUPS_AMAX_WARPS, k
    )
    plan.otherwise = otherwise
    return plan


@planned
def cast_groups(
    m: int,
    k: int,
    groups: int,
    stacked: int,
    fmt: str,
    amax_floor: float,
    rows: bool,
    cols: bool,
    by_group: bool,
    amax: bool,
) -> LaunchPlan:
    """Tensors x [m, k], tiles, row source, codes and scale, column source, codes and scale, amax."""
    constants = {**_codes_of_groups(fmt, amax_floor), "ROWS": rows, "COLS": cols, "BY_GROUP": by_group, "RAISE": amax}
    constants["UNIFORM"] = stacked > 0
    sizes = (k, stacked, stacked * k) if stacked else (k, padded_rows(m, groups), 0)
    kernel = grouped_kernels.cast_groups_kernel
    return _of_groups(kernel, m, k, groups, stacked, GROUPS_CAST_TILE, constants, GROUPS_CAST_WARPS, *sizes)


@planned
def cast_rows_of_groups(m: int, k: int, groups: int, fmt: str, amax_floor: float) -> LaunchPlan:
    """Tensors x [m, k], codes, scale, amaxes of the columns of each group."""
    # A row is held as two blocks, powers of two: few programs idle at its end.
    n, head = m // groups, 1 << (k.bit_length() - 1)
    tail = 1 << (k - head - 1).bit_length() if k > head else 0
    warps = min(16, max(1, (head + tail) // GROUPS_ROWS_ELEMENTS_PER_WARP))
    warps = 1 << (warps.bit_length() - 1)
    constants = {**_codes_of_groups(fmt, amax_floor), "STEPS": GROUPS_ROWS, "HEAD": head, "TAIL": tail}
    return LaunchPlan(
        grouped_kernels.cast_rows_of_groups_kernel, groups * blocks(n, GROUPS_ROWS), (n, k), constants, warps
    )


@planned
def used_scales(groups: int) -> LaunchPlan:
    """Tensors inv_scale, used inv_scale, scale, of `groups` elements each."""
    constants = {"BLOCK": SCALES_BLOCK}
    return LaunchPlan(
        grouped_kernels.used_scales_kernel, blocks(groups, SCALES_BLOCK), (groups,), constants, SCALES_WARPS
    )


@planned
def scales_of_groups(m: int, n: int, groups: int) -> LaunchPlan:
    """Tensors scale_a, scale_b [groups], ones [m], products [groups, n]."""
    programs = blocks(max(m, groups * n), 1024)
    kernel = grouped_kernels.scales_of_groups_kernel
    return LaunchPlan(kernel, programs, (m, n, groups), {"BLOCK": 1024}, SCALES_WARPS)


@planned
def gemm_of_rows(t: int, n: int, k: int, groups: int, lda: int, ldb: int, stack: int) -> LaunchPlan:
    """Tensors a [t, k], b [groups, n, k], scale_a [t], scale_b [groups, n], offs [groups], out [t, n]."""
    bm, bn = GEMM_ROWS_TILE
    programs = (blocks(t, bm) + groups) * blocks(n, bn)
    constants = {"BLOCK_G": max(2, 1 << (groups - 1).bit_length()), "BM": bm, "BN": bn}
    kernel, sizes = grouped_gemm_kernels.gemm_of_rows_kernel, (groups, n, k, lda, ldb, stack)
    return LaunchPlan(kernel, programs, sizes, constants, GEMM_ROWS_WARPS, stages=GEMM_ROWS_STAGES)


@planned
def gemm_of_inner(m: int, n: int, groups: int, lda: int, ldb: int) -> LaunchPlan:
    """Tensors a [m, t], b [n, t], scale_a [groups * m], scale_b [groups * n], offs [groups], out [groups, m, n]."""
    bm, bn = GEMM_INNER_TILE
    constants = {"BM": bm, "BN": bn, "SUPER": GEMM_INNER_SUPER}
    kernel, sizes = grouped_gemm_kernels.gemm_of_inner_kernel, (groups, m, n, lda, ldb)
    return LaunchPlan(kernel, MULTIPROCESSORS, sizes, constants, GEMM_INNER_WARPS, stages=GEMM_INNER_STAGES)


@planned
def groups_hidden(
    m: int, h: int, groups: int, joint: bool, fmt: str, amax_floor: float, cast: bool, by_group: bool, amax: bool
) -> LaunchPlan:
    """Tensors gate, up, tiles, row source or amaxes, codes, scale, amaxes of columns, amax."""
    constants = {**_codes_of_groups(fmt, amax_floor), "CAST": cast, "BY_GROUP": by_group, "RAISE": amax}
    sizes = (h, 2 * h, h) if joint else (h, h, 0)
    kernel = grouped_kernels.groups_hidden_kernel
    return _of_groups(kernel, m, h, groups, None, GROUPS_HIDDEN_TILE, constants, GROUPS_HIDDEN_WARPS, *sizes)


def groups_gradients_amax(m: int, h: int, groups: int, joint: bool, by_group: bool) -> LaunchPlan:
    """The tensors of `groups_gradients`, of which it fills the sources."""
    fmt = E4M3FN.name
    return groups_gradients(m, h, groups, joint, fmt, fmt, 1e-12, False, False, False, by_group, False)


@planned
def groups_gradients(
    m: int,
    h: int,
    groups: int,
    joint: bool,
    fmt: str,
    hidden_fmt: str,
    amax_floor: float,
    rows: bool,
    cols: bool,
    hidden: bool,
    by_group: bool,
    amax: bool,
) -> LaunchPlan:
    """Tensors grad_hidden, gate, up, tiles; source, codes, scale of rows, of columns, and amax, of both; hidden's.

    Without codes, the sources are found.
    """
    of_hidden = {f"HIDDEN_{name}": value for name, value in _codes_of_groups(hidden_fmt, amax_floor).items()}
    del of_hidden["HIDDEN_FLOOR"]
    constants = {**_codes_of_groups(fmt, amax_floor), **of_hidden, "CAST": rows or cols or hidden}
    constants |= {"ROWS": rows, "COLS": cols, "HIDDEN": hidden, "BY_GROUP": by_group, "RAISE": amax, "JOINT": joint}
    sizes = (h, 2 * h, h) if joint else (h, h, 0)
    kernel, tile, warps = grouped_kernels.groups_gradients_kernel, GROUPS_GRADIENTS_TILE, GROUPS_GRADIENTS_WARPS
    return _of_groups(kernel, m, h, groups, None, tile, constants, warps, *sizes, padded_rows(m, groups))


def _codes_of_groups(fmt: str, amax_floor: float) -> dict[str, Any]:
    rule = rule_constants(fmt, True, amax_floor)
    return {name: rule[name] for name in ("QUOTIENT", "FLOOR", "AT_FLOOR")} | codes_constants(fmt)


def _of_groups(
    kernel: Any,
    m: int,
    k: int,
    groups: int,
    stacked: int | None,
    columns: int,
    constants: dict[str, Any],
    warps: int,
    *sizes: int,
) -> LaunchPlan:
    """One program for each tile of a matrix [m, k] of groups; `stacked` None: a kernel that takes no equal groups."""
    count = groups * blocks(stacked, GROUP_TILE) if stacked else tile_count(m, groups)
    tiles_n = blocks(k, columns)
    first = (groups, count) if stacked is None else (groups, count, stacked)
    constants = {**constants, "BM": GROUP_TILE, "BN": columns}
    return LaunchPlan(kernel, count * tiles_n, (*first, *sizes, tiles_n), constants, warps)


@cache
def rule_constants(fmt: str, power_of_two: bool, amax_floor: float, margin: int = 0) -> dict[str, Any]:
    """The scale rule as constants of the kernels: `FLOOR` is the largest float32 not above the rule's floor."""
    below = _float32(amax_floor)
    if below > amax_floor:
        below = _float32(below - below * 2.0**-24)
    limit = format_by_name(fmt).max * 2.0**-margin
    return {"QUOTIENT": limit, "FLOOR": below, "AT_FLOOR": _float32(limit / amax_floor), "POWER_OF_TWO": power_of_two}


def codes_constants(fmt: str) -> dict[str, Any]:
    """The format of codes as the kernels' constants."""
    return {"LIMIT": format_by_name(fmt).max, "DTYPE": cast_kernels.DTYPES[fmt]}


def _tiled(
    kernel: Any, m: int, n: int, tile: tuple[int, int], constants: dict[str, Any], warps: int, *sizes: int
) -> LaunchPlan:
    """One program for each tile of a matrix [m, n]."""
    bm, bn = tile
    tiles_n = blocks(n, bn)
    constants = {**constants, "BM": bm, "BN": bn}
    return LaunchPlan(kernel, blocks(m, bm) * tiles_n, (m, n, tiles_n, *sizes), constants, warps)


def _float32(value: float) -> float:
    """The float32 nearest to `value`."""
    return struct.unpack("f", struct.pack("f", value))[0]

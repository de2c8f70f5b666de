"""The launches of `silu_kernels`, as plans (see `launch`). Importing this module needs Triton."""

from f8emu.torch.fused.kernels import silu as silu_kernels
from f8emu.torch.fused.launch import BLOCK, Plan, blocks, codes_constants, planned, rule_constants

# Not measured yet. Chosen so that ptxas spills no registers and at least 16 warps fit on a multiprocessor.
HIDDEN_TILE = (16, 256)
HIDDEN_WARPS = 8
HIDDEN_VECTORS_ROWS = 32
HIDDEN_VECTORS_WARPS = 4
GRADIENTS_TILE = (64, 64)
GRADIENTS_WARPS = 8
GRADIENTS_VECTORS_STRIPS = (16, 32)
"""Rows per strip when finding amaxes, and columns per strip when writing codes."""
GRADIENTS_VECTORS_WARPS = 8


@planned
def hidden_given(m: int, n: int, fmt: str) -> Plan:
    """Tensors gate, up [m, n], inv_scale, codes, amax, used inv_scale and scale."""
    bm, bn = HIDDEN_TILE
    tiles_n = blocks(n, bn)
    constants = {**codes_constants(fmt), "BM": bm, "BN": bn}
    sizes = (m, n, tiles_n)
    return Plan(silu_kernels.hidden_given_kernel, blocks(m, bm) * tiles_n, sizes, constants, HIDDEN_WARPS)


@planned
def hidden_vectors(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float) -> Plan:
    """Tensors gate, up [m, n], codes, scale."""
    tiles_n = blocks(n, BLOCK)
    constants = {
        **rule_constants(fmt, power_of_two, amax_floor),
        "DTYPE": codes_constants(fmt)["DTYPE"],
        "BM": HIDDEN_VECTORS_ROWS,
    }
    programs, sizes = blocks(m, HIDDEN_VECTORS_ROWS) * tiles_n, (m, n, tiles_n)
    return Plan(silu_kernels.hidden_vectors_kernel, programs, sizes, constants, HIDDEN_VECTORS_WARPS)


@planned
def gradients_given(
    m: int, n: int, fmt: str, hidden_fmt: str, rows: bool, gate_cols: bool, up_cols: bool, hidden_cols: bool
) -> Plan:
    """Tensors grad_hidden, gate, up [m, n], 3 inv_scales, 2 amaxes, 5 codes, 2 scales."""
    bm, bn = GRADIENTS_TILE
    tiles_n = blocks(n, bn)
    of_hidden = codes_constants(hidden_fmt)
    constants = {
        **codes_constants(fmt),
        "HIDDEN_LIMIT": of_hidden["LIMIT"],
        "HIDDEN_DTYPE": of_hidden["DTYPE"],
        **_wanted(rows, gate_cols, up_cols, hidden_cols),
        "BM": bm,
        "BN": bn,
    }
    sizes = (m, n, tiles_n)
    return Plan(silu_kernels.gradients_given_kernel, blocks(m, bm) * tiles_n, sizes, constants, GRADIENTS_WARPS)


@planned
def gradients_vectors(
    m: int,
    n: int,
    fmt: str,
    power_of_two: bool,
    amax_floor: float,
    rows: bool,
    gate_cols: bool,
    up_cols: bool,
    hidden_cols: bool,
) -> Plan:
    """Tensors grad_hidden, gate, up [m, n], and the ten results of `silu.gradients_blocks`."""
    tiles_n = blocks(n, BLOCK)
    constants = {
        **rule_constants(fmt, power_of_two, amax_floor),
        "DTYPE": codes_constants(fmt)["DTYPE"],
        **_wanted(rows, gate_cols, up_cols, hidden_cols),
        "AMAX_STRIP": GRADIENTS_VECTORS_STRIPS[0],
        "CODES_STRIP": GRADIENTS_VECTORS_STRIPS[1],
    }
    programs, sizes = blocks(m, BLOCK) * tiles_n, (m, n, tiles_n)
    return Plan(silu_kernels.gradients_vectors_kernel, programs, sizes, constants, GRADIENTS_VECTORS_WARPS)


def _wanted(rows: bool, gate_cols: bool, up_cols: bool, hidden_cols: bool) -> dict[str, bool]:
    return {"ROWS": rows, "GATE_COLS": gate_cols, "UP_COLS": up_cols, "HIDDEN_COLS": hidden_cols}

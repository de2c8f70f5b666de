"""The launches of `silu_kernels`. Importing this module needs Triton.

Each writes into tensors that its caller has allocated; all are contiguous, as the caller saw to.
"""

from torch import Tensor

from f8emu.spec.formats import Format
from f8emu.spec.scaling import ScaleRule
from f8emu.torch.fused import cast_kernels, silu_kernels
from f8emu.torch.fused.launch import _bits, _blocks, _codes_constants, _rule_constants, _run

# Not measured yet. Chosen so that ptxas spills nothing and leaves at least 16 warps on a multiprocessor.
HIDDEN_TILE = (16, 256)
HIDDEN_WARPS = 8
HIDDEN_VECTORS_ROWS = 32
HIDDEN_VECTORS_WARPS = 4
GRADIENTS_TILE = (64, 64)
GRADIENTS_WARPS = 8
GRADIENTS_VECTORS_STRIPS = (16, 32)
"""Rows of a strip for the amaxes, and columns of one for the codes."""
GRADIENTS_VECTORS_WARPS = 8
BLOCK = 128


def hidden_given(gate: Tensor, up: Tensor, fmt: Format, inv_scale: Tensor, codes: Tensor, amax: Tensor) -> None:
    """`codes` [M, N] of `hidden`, whose amax is raised."""
    (m, n), (bm, bn) = gate.shape, HIDDEN_TILE
    tiles_n = _blocks(n, bn)
    _run(
        silu_kernels.hidden_given_kernel,
        _blocks(m, bm) * tiles_n,
        (gate, up, inv_scale, codes, _bits(amax), m, n, tiles_n),
        **_codes_constants(fmt.name),
        BM=bm,
        BN=bn,
        num_warps=HIDDEN_WARPS,
    )


def hidden_vectors(gate: Tensor, up: Tensor, fmt: Format, rule: ScaleRule, codes: Tensor, scale: Tensor) -> None:
    """`codes` [M, N] of `hidden` and its 1x128 scales."""
    m, n = gate.shape
    tiles_n = _blocks(n, BLOCK)
    _run(
        silu_kernels.hidden_vectors_kernel,
        _blocks(m, HIDDEN_VECTORS_ROWS) * tiles_n,
        (gate, up, codes, scale, m, n, tiles_n),
        **_rule_constants(fmt, rule),
        DTYPE=cast_kernels.DTYPES[fmt.name],
        BM=HIDDEN_VECTORS_ROWS,
        num_warps=HIDDEN_VECTORS_WARPS,
    )


def gradients_given(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    formats: tuple[Format, Format],
    inv_scales: tuple[Tensor, Tensor, Tensor],
    codes: list[Tensor],
    amaxes: tuple[Tensor, Tensor],
    wanted: tuple[bool, bool, bool, bool],
) -> None:
    """The `codes` of `silu.gradients_delayed`, where wanted; the amaxes are raised."""
    (m, n), (bm, bn) = gate.shape, GRADIENTS_TILE
    tiles_n = _blocks(n, bn)
    of_gradients, of_hidden = (_codes_constants(fmt.name) for fmt in formats)
    _run(
        silu_kernels.gradients_given_kernel,
        _blocks(m, bm) * tiles_n,
        (grad_hidden, gate, up, *inv_scales, *(_bits(amax) for amax in amaxes), *codes, m, n, tiles_n),
        **of_gradients,
        HIDDEN_LIMIT=of_hidden["LIMIT"],
        HIDDEN_DTYPE=of_hidden["DTYPE"],
        **_wanted_constants(wanted),
        BM=bm,
        BN=bn,
        num_warps=GRADIENTS_WARPS,
    )


def gradients_vectors(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: Format,
    rule: ScaleRule,
    out: list[Tensor],
    wanted: tuple[bool, bool, bool, bool],
) -> None:
    """The codes and scales of `silu.gradients_blocks`, where wanted."""
    m, n = gate.shape
    tiles_n = _blocks(n, BLOCK)
    _run(
        silu_kernels.gradients_vectors_kernel,
        _blocks(m, BLOCK) * tiles_n,
        (grad_hidden, gate, up, *out, m, n, tiles_n),
        **_rule_constants(fmt, rule),
        DTYPE=cast_kernels.DTYPES[fmt.name],
        **_wanted_constants(wanted),
        AMAX_STRIP=GRADIENTS_VECTORS_STRIPS[0],
        CODES_STRIP=GRADIENTS_VECTORS_STRIPS[1],
        num_warps=GRADIENTS_VECTORS_WARPS,
    )


def _wanted_constants(wanted: tuple[bool, bool, bool, bool]) -> dict[str, bool]:
    return dict(zip(("ROWS", "GATE_COLS", "UP_COLS", "HIDDEN_COLS"), wanted, strict=True))

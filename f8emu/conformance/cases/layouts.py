"""What a golden file stores in the library's own terms: scale layouts, and kernels with their grids."""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.spec import Granularity

_BLOCK = 128
_PADDED_TO = 4
"""The library wants the K axis of 128x128 scales padded to this."""

TensorOf = Callable[..., np.ndarray]
"""(role, dtype, *shapes) -> tensor, as the reader of a golden case has it."""


def load_scales(
    tensor: TensorOf, mode: Mode, m: int, n: int, k: int, *, groups: int
) -> tuple[np.ndarray, np.ndarray, tuple[Granularity, Granularity]]:
    """scale_a, scale_b in the layouts of the verbs, and their granularities.

    Stored: tensorwise [1]; rowwise [M, 1] and [1, N]; 1x128 [rows, K/128]; 128x128 [K/128 padded to 4, rows/128];
    grouped [M] and [G, N]. Only b's block scales have to be turned: the verbs see them through b's transpose.
    """
    match mode:
        case Mode.TENSORWISE:
            pair = (Granularity.TENSORWISE, Granularity.TENSORWISE)
            return tensor("scale_a", np.float32, (1,)), tensor("scale_b", np.float32, (1,)), pair
        case Mode.ROWWISE:
            pair = (Granularity.ROWWISE, Granularity.ROWWISE)
            return tensor("scale_a", np.float32, (m, 1)), tensor("scale_b", np.float32, (1, n)), pair
        case Mode.GROUPED_ROWWISE:
            pair = (Granularity.ROWWISE, Granularity.ROWWISE)
            return tensor("scale_a", np.float32, (m,)), tensor("scale_b", np.float32, (groups, n)), pair
        case Mode.BLOCKWISE:
            scale_a, granularity_a = _load_blocks(tensor, "scale_a", m, k)
            scale_b, granularity_b = _load_blocks(tensor, "scale_b", n, k)
            return scale_a, scale_b.T, (granularity_a, granularity_b)
        case Mode.BF16:
            raise AssertionError("a bfloat16 GEMM has no scales")


def _load_blocks(tensor: TensorOf, role: str, rows: int, k: int) -> tuple[np.ndarray, Granularity]:
    """Scales [rows, K/128] or [rows/128, K/128]. The two stored shapes differ for all sizes that the library takes."""
    k_blocks = math.ceil(k / _BLOCK)
    vectors = (rows, k_blocks)
    squares = (k_blocks + -k_blocks % _PADDED_TO, math.ceil(rows / _BLOCK))
    stored = tensor(role, np.float32, vectors, squares)
    if stored.shape == vectors:
        return stored, Granularity.BLOCKWISE_1X128
    return stored[:k_blocks].T, Granularity.BLOCKWISE_128X128


def store_scales(gemm: GemmCase) -> dict[str, np.ndarray]:
    """The scales of a GEMM by role, as they are stored: what `load_scales` undoes."""
    if gemm.scale_a is None or gemm.scale_b is None:
        return {}
    match gemm.mode:
        case Mode.TENSORWISE:
            return {"scale_a": gemm.scale_a.reshape(1), "scale_b": gemm.scale_b.reshape(1)}
        case Mode.BLOCKWISE:
            return {
                "scale_a": store_blocks(gemm.scale_a, gemm.granularity_a),
                "scale_b": store_blocks(gemm.scale_b.T, gemm.granularity_b),
            }
        case Mode.ROWWISE | Mode.GROUPED_ROWWISE | Mode.BF16:
            return {"scale_a": gemm.scale_a, "scale_b": gemm.scale_b}


def store_blocks(scale: np.ndarray, granularity: Granularity) -> np.ndarray:
    """Block scales [rows, blocks of K] of one operand in the library's shape [EPI-5], which says nothing of strides."""
    if granularity is Granularity.BLOCKWISE_128X128:
        return np.pad(scale.T, ((0, -scale.shape[1] % _PADDED_TO), (0, 0)))
    return scale


def slices_of_k(kernels: Sequence[tuple[str, tuple[int, ...]]], m: int, n: int) -> int:
    """[CHAIN-3] The number of slices into which the kernels that ran cut K; 1 if they use no split-K.

    S = blocks in the grid / output tiles, the tile being the first `AxB` in the name. Which of the two numbers lies
    along N is not written there: the order that divides is taken, A along N first, as in all that was recorded.

    Raises:
        ValueError: neither order divides.
    """
    for name, grid in kernels:
        tile = re.search(r"_(\d+)x(\d+)_", name)
        if "splitK" not in name or "splitKreduce" in name or tile is None:
            continue
        first, second = int(tile[1]), int(tile[2])
        blocks = math.prod(grid)
        for along_n, along_m in ((first, second), (second, first)):
            slices, rest = divmod(blocks, math.ceil(n / along_n) * math.ceil(m / along_m))
            if slices and not rest:
                return slices
        raise ValueError(f"{name} with grid {grid} for an output of {m} x {n}")
    return 1

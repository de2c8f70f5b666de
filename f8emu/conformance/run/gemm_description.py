"""A GEMM in the words of a report: its options, and what leads to one of its outputs."""

import numpy as np

from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.compare import abbreviated, hexadecimal


def options_of(gemm: GemmCase) -> str:
    """`float8_e5m2 x float8_e4m3fn 64x96x512 -> bfloat16 fast`."""
    (m, n), k = gemm.output_shape, gemm.k
    chain = "" if gemm.mode is Mode.BF16 else " fast" if gemm.use_fast_accum else " promoted"
    split = f" split-K {gemm.split_k}" if gemm.split_k > 1 else ""
    return f"{gemm.a.dtype} x {gemm.b.dtype} {m}x{n}x{k} -> {gemm.out_dtype}{chain}{split}"


def describe_gemm(gemm: GemmCase, index: tuple[int, ...]) -> str:
    """Row and column of an output: their codes, abbreviated, their scales and bias."""
    row, column = index
    b = gemm.b if gemm.offs is None else gemm.b[gemm.group_of(row)]
    words = [abbreviated(gemm.a[row], f"a[{row}]"), abbreviated(b[column], f"b[{column}]")]
    for name, scale in (("scale_a", _scale_of_row(gemm, row)), ("scale_b", _scale_of_column(gemm, row, column))):
        if scale is not None:
            words.append(abbreviated(scale, name, shown=4))
    if gemm.bias is not None:
        words.append(f"bias={hexadecimal(gemm.bias[column])}")
    return " ".join(words)


def _scale_of_row(gemm: GemmCase, row: int) -> np.ndarray | None:
    scale = gemm.scale_a
    if scale is None or scale.size == 1:
        return scale
    return scale[row // (gemm.granularity_a.block[0] or 1)]


def _scale_of_column(gemm: GemmCase, row: int, column: int) -> np.ndarray | None:
    scale = gemm.scale_b
    if scale is None or scale.size == 1:
        return scale
    if gemm.offs is not None:
        return scale[gemm.group_of(row), column]
    return scale[:, column // (gemm.granularity_b.block[0] or 1)]

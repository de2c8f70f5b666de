"""A GEMM in a report: its options and traits, what leads to an output, and that output as a program in plain torch."""

from itertools import pairwise

import numpy as np

from f8emu.conformance.cases.distributions import CODES, VALUES
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.compare import Mismatch, abbreviated, hexadecimal
from f8emu.spec import Granularity
from f8emu.spec.gemm_call import GroupKind

_LONGEST_K = 1024
# How many copies of the column to multiply: torch takes N in multiples of 16.
_COPIES = 16
_WIDTH = 80
# Hexadecimal digits in a line.
_DIGITS = 72


def options_of(gemm: GemmCase) -> str:
    """`float8_e5m2 x float8_e4m3fn 64x96x512 -> bfloat16 fast`."""
    is_whole = gemm.sample is not None and gemm.sample.is_run
    (m, n), k = gemm.full_size if is_whole else gemm.output_shape, gemm.k
    has_one = gemm.mode is Mode.BF16 or gemm.mode.is_microscaled
    chain = "" if has_one else " fast" if gemm.use_fast_accum else " promoted"
    split = f" split-K {gemm.split_k}" if gemm.split_k > 1 else ""
    return f"{gemm.a.dtype} x {gemm.b.dtype} {m}x{n}x{k} -> {gemm.out_dtype}{chain}{split}"


def describe_gemm(gemm: GemmCase, index: tuple[int, ...]) -> str:
    """Row and column of an output: their codes, abbreviated, their scales and bias."""
    sample = gemm.sample
    places = index if sample is None else (sample.rows[index[0]], sample.cols[index[1]])
    names = [f"{side}[{place}]" for side, place in zip("ab", places, strict=True)]
    gemm, row, column = gemm.alone(*index)
    words = [abbreviated(gemm.a[row], names[0]), abbreviated(gemm.b[column], names[1])]
    if gemm.mode is not Mode.BF16:
        scales = _scales_of(gemm, row, column)
        words += [abbreviated(x, name, shown=4) for x, name in zip(scales, ("scale_a", "scale_b"), strict=True)]
    if gemm.bias is not None:
        words.append(f"bias={hexadecimal(gemm.bias[column])}")
    return " ".join(words)


def _scales_of(gemm: GemmCase, row: int, column: int) -> tuple[np.ndarray, np.ndarray]:
    # The scales of a row of a and of a column of b, each one or those of its blocks of K.
    a, b = gemm.scale_a, gemm.scale_b
    assert a is not None and b is not None, "only a GEMM of bfloat16 has none"
    of_a, of_b = (granularity.block[0] or 1 for granularity in (gemm.granularity_a, gemm.granularity_b))
    if gemm.sample is not None:  # 128x128 scales are those of the whole GEMM
        row, column = gemm.sample.rows[row] if of_a > 1 else row, gemm.sample.cols[column] if of_b > 1 else column
    return a if a.size == 1 else a[row // of_a], b if b.size == 1 else b[:, column // of_b]


def torch_snippet(gemm: GemmCase, mismatch: Mismatch) -> str:
    """The program; empty of bfloat16 GEMMs, of E8M0 scales, of a long K, and of what raised.

    One output needs one row and one column: M is 1, and the column is repeated 16 times to satisfy torch. K is padded
    with zeros to a multiple of 16, or of 128 beside block scales.
    """
    if gemm.mode is Mode.BF16 or gemm.mode.is_microscaled or len(mismatch.index) != 2:
        return ""
    # 1. The row, the column, and their scales; groups have rowwise ones.
    gemm, row, column = gemm.alone(*mismatch.index)
    if not 0 < gemm.k <= _LONGEST_K:
        return ""
    of_a, of_b = gemm.granularity_a, gemm.granularity_b
    side, out = 128 if of_a.is_blockwise else 16, gemm.out_dtype
    codes_a, codes_b = (np.pad(x.view(np.uint8), (0, -len(x) % side)) for x in (gemm.a[row], gemm.b[column]))
    scale_a, scale_b = _scales_of(gemm, row, column)
    copies = 1 if of_b in (Granularity.TENSORWISE, Granularity.BLOCKWISE_128X128) else _COPIES
    of_rows = "float32)" if of_a is Granularity.TENSORWISE else "float32, 1, -1)"
    of_columns = "float32)" if of_b is Granularity.TENSORWISE else f"float32, {copies}, -1).T"
    # 2. The program, line by line.
    lines = [
        "import torch",
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        "bits = lambda text, dtype, *shape: torch.frombuffer(bytearray.fromhex(text),",
        "    dtype=torch.uint8).view(dtype).reshape(shape).to(device)",
        *_array("a", codes_a, f"{gemm.a.dtype.name}, 1, -1)"),
        *_array("b", codes_b, f"{gemm.b.dtype.name}, {_COPIES}, -1).T", _COPIES),
        *_array("scale_a", scale_a, of_rows),
        *_array("scale_b", scale_b, of_columns, copies),
    ]
    if gemm.bias is None:
        lines += ["bias = None"]
    else:
        lines += _array("bias", gemm.bias[column : column + 1], f"{out.name}, {_COPIES})", _COPIES)
    return "\n".join(
        [
            *lines,
            "out = torch._scaled_mm(a, b, scale_a, scale_b, bias=bias,",
            f"    out_dtype=torch.{out.name}, use_fast_accum={gemm.use_fast_accum})",
            f"# expected {mismatch.expected}, observed {mismatch.observed}",
            "# Only a Hopper GPU prints the expected bits: a CPU may print others.",
            f"print(hex(out.view(torch.int{out.bits})[0, 0].item() % 2**{out.bits}))",
        ]
    )


def _array(name: str, values: np.ndarray, rest: str, copies: int = 1) -> list[str]:
    # `rest` is what follows the bytes in the call: a dtype of torch, a shape, how it is turned.
    text = np.ascontiguousarray(values).tobytes().hex()
    end = f"{f' * {copies}' if copies > 1 else ''}, torch.{rest}"
    if len(line := f'{name} = bits("{text}"{end}') <= _WIDTH:
        return [line]
    parts = [f'    "{text[i : i + _DIGITS]}"' for i in range(0, len(text), _DIGITS)]
    return [f"{name} = bits(", *parts, f"   {end}"]


# Traits of GEMMs, by which differences are counted


# Sizes are counted in ranges: few enough to read.
_K_BOUNDS, _ROW_BOUNDS = (128, 512, 2048), (1, 16, 64, 128, 256)
# [ACC-1] [CHAIN-2] What a K that is no multiple leaves a tail of.
_STEP, _PROMOTION = 32, 128
# Name of a recorded case -> its inputs, where that is no name of a distribution.
_RECORDED = {"special": "specials", "layer": "a layer of Llama-3"}


def gemm_traits(gemm: GemmCase, inputs: str = "") -> dict[str, str]:
    """The traits of a GEMM. `inputs` says how it was recorded, if the case does not know its distribution."""
    (m, n), kind = gemm.full_size, gemm.group_kind
    scales = {
        Mode.BF16: "none",
        Mode.GROUPED_ROWWISE: "grouped rowwise"
        if kind in (None, GroupKind.ROWS)
        else f"grouped rowwise, {kind.description}",
        Mode.BLOCKWISE: f"{gemm.granularity_a.value} x {gemm.granularity_b.value}",
        Mode.GROUPED_MX: "grouped mxfp8" if kind is None else f"grouped mxfp8, {kind.description}",
    }
    chains = {Mode.BF16: "bf16 matmul", Mode.MX: f"of {gemm.chip}", Mode.GROUPED_MX: f"of {gemm.chip}"}
    tail = f"whole steps (a multiple of {_STEP})" if gemm.k % _STEP == 0 else "a part of a step"
    return {
        "accumulation": chains.get(gemm.mode, "fast" if gemm.use_fast_accum else "promoted"),
        "scales": scales.get(gemm.mode, gemm.mode.value),
        "operands": f"{gemm.a.dtype} x {gemm.b.dtype}",
        "output": gemm.out_dtype.name,
        "bias": "without bias" if gemm.bias is None else "with bias",
        "M": _range_of(m, _ROW_BOUNDS),
        "N": _range_of(n, _ROW_BOUNDS),
        "K": _range_of(gemm.k, _K_BOUNDS),
        "tail of K": tail if gemm.k % _PROMOTION else f"none (a multiple of {_PROMOTION})",
        "slices of K": str(gemm.split_k),
        "inputs": inputs or gemm.distribution or "other",
        "family": gemm.family.value,
    }


def _range_of(size: int, bounds: tuple[int, ...]) -> str:
    for before, last in pairwise((0, *bounds)):
        if size <= last:
            return f"{before + 1} to {last}" if before + 1 < last else str(last)
    return f"{bounds[-1] + 1} and more"


def recorded_inputs(name: str, mode: Mode) -> str:
    """The inputs of a recorded case by its name, `tensorwise-outlier` or `layer`; empty where the name is silent."""
    name = name.removeprefix(f"{mode.value}-")
    return name if name in CODES or name in VALUES else _RECORDED.get(name, "")

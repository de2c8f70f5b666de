"""How far a float8 GEMM may be from the exact one: a bound for each output, by the rules of NUMERICS 2 to 4."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from f8emu import interop
from f8emu.numpy.cast import FormatLike, output_format
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER, OPERAND_FORMATS, chip_by_name
from f8emu.spec.formats import FLOAT32, Format
from f8emu.spec.gemm_call import GemmCall, Shaped, scaled_mm_call
from f8emu.spec.names import ChipName, GranularityName
from f8emu.spec.scaling import BLOCK, Granularity, granularity_by_name
from f8emu.split_k.ask import split_of
from f8emu.testing.accumulator import Operand, chain, nothing, promoted, slices
from f8emu.testing.near import Array, Near, exactly, total

if TYPE_CHECKING:
    import torch


def _out(call: str, out_dtype: "FormatLike | torch.dtype") -> Format:
    # By its name where it is torch's, which is not imported here.
    named: Any = str(out_dtype).removeprefix("torch.") if str(out_dtype).startswith("torch.") else out_dtype
    return output_format(call, named)


class _Gemm(NamedTuple):
    """A GEMM in float64: operands, their scales [rows, K] or what broadcasts to it, and a bias, 0 for none."""

    call: GemmCall
    a: Operand
    b: Operand
    scale_a: Array
    scale_b: Array
    bias: Array


def gemm_tolerance(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    *,
    bias: Any = None,
    out_dtype: "FormatLike | torch.dtype" = "bfloat16",
    use_fast_accum: bool = False,
    granularity_a: Granularity | GranularityName | None = None,
    granularity_b: Granularity | GranularityName | None = None,
    split_k: int | None = None,
    chip: Chip | ChipName | None = "H100",
) -> Array:
    """How far each output may be from the exact `sum over k of a * b * scale_a * scale_b + bias`: an error bound.

    For a kernel that cannot have a chip's bits: the bound of every order and rounding that the chip's rules allow, for
    these operands. It is proven, and so wider than what random data show. To compare two implementations take the sum
    of their bounds: both are that far from the same exact value.

        exact = (a.double() * scale_a) @ (b.double() * scale_b)
        allowed = gemm_tolerance(a, b, scale_a, scale_b)  # an H100's
        allowed += gemm_tolerance(a, b, scale_a, scale_b, chip=None)  # of a kernel that adds in float32
        assert (abs(mine - of_an_h100) <= allowed).all()

    Derivation, step by step along K, with the bound `E` of the accumulator and the exact sum `c` so far:

    1. A step of k products cuts each, and the accumulator, to a multiple of `u = 2^(e_max - F)` [ACC-3]:
       `E += min(k u, sum |a b|) + min(u, |c| + E)`. `2^e_max` is at most the product of the largest powers of two of
       the row's and the column's codes in the step, or the power of two of `|c| + E` [ACC-2].
    2. The sum keeps R fraction bits [ACC-5]: `E += 2^-R * 2^floor(log2(|c| + E))`, with the new c.
    3. A promotion, which restarts c and E, and a slice of K are added in float32 [CHAIN-2], [CHAIN-3]: half a unit of
       the last place of the total.
    4. Every product with a scale, the bias and the output type round once more [EPI-1] to [EPI-5].

    `chip=None` is a kernel that adds in float32 in any order, and multiplies by the scales anywhere: no product is
    rounded more than K + 2 times, so that `E = g * sum |a b scale_a scale_b|`, `g = n / (2^24 - n)`, n = K + 2. Nothing
    may underflow there.

    Shapes: as for `f8emu.numpy.scaled_mm`, whose arguments these are; arrays of torch, JAX or numpy -> [M, N] float64.
    A group of a grouped GEMM is a rowwise GEMM of its own.
    Exactness: no output of the emulated chips is farther from the exact value (`tests/testing/test_tolerance.py`). It
    is infinite where an operand is not finite, or the output may be beyond its type.

    Raises:
        OperandError, SpecError, UnsupportedError: as for `f8emu.numpy.scaled_mm`.
    """
    # 1. The call, as the verb checks it.
    arrays = [np.asarray(interop.to_numpy(x, copy=None)) for x in (a, b, scale_a, scale_b)]
    profile = chip_by_name("gemm_tolerance", HOPPER if chip is None else chip)
    call = scaled_mm_call(
        *(Shaped(x.shape, x.dtype.name) for x in arrays),
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        out_dtype=_out("gemm_tolerance", out_dtype),
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=profile,
    )
    # 2. Everything in float64, K last.
    values_a, values_b, scales_a, scales_b = (x.astype(np.float64) for x in arrays)
    granularity_a, granularity_b = call.granularities or (Granularity.TENSORWISE, Granularity.TENSORWISE)
    gemm = _Gemm(
        call,
        Operand.of(values_a, call.formats[0].smallest_normal),
        Operand.of(values_b.T, call.formats[1].smallest_normal),
        _spread(scales_a, granularity_a, values_a.shape),
        _spread(scales_b.T, granularity_b, values_b.T.shape),
        np.asarray(0.0 if bias is None else interop.to_numpy(bias, copy=None)).astype(np.float64),
    )
    with np.errstate(over="ignore", invalid="ignore"):  # of operands that are not finite
        return _in_float32(gemm) if chip is None else _on_chip(gemm, split_of("f8emu.testing", call).split_k)


def gemm_tolerance_from_maxima(
    k: int,
    amax_a: float,
    amax_b: float,
    *,
    scale_a: float = 1.0,
    scale_b: float = 1.0,
    bias: float = 0.0,
    out_dtype: "FormatLike | torch.dtype" = "bfloat16",
    use_fast_accum: bool = False,
    granularity_a: Granularity | GranularityName = Granularity.TENSORWISE,
    granularity_b: Granularity | GranularityName = Granularity.TENSORWISE,
    split_k: int = 1,
    chip: Chip | ChipName | None = "H100",
) -> float:
    """The `gemm_tolerance` of every GEMM with so long a K, and codes, scales and biases of no larger magnitude.

    It costs nothing, and is far wider: it allows that all products are as large as can be, and of one sign. The slices
    of K are not looked up here: S depends on M and N. Where S may differ, take the largest bound of each S.

    Raises:
        SpecError: an unknown chip, granularity or `out_dtype`.
        UnsupportedError: an `out_dtype` that no GEMM gives.
    """
    name = "gemm_tolerance_from_maxima"
    call = GemmCall(
        call=name,
        sizes=(1, 1, k),
        formats=HOPPER.format_pairs[0],
        granularities=(granularity_by_name(name, granularity_a), granularity_by_name(name, granularity_b)),
        out=_out(name, out_dtype),
        use_fast_accum=use_fast_accum,
        chip=chip_by_name(name, HOPPER if chip is None else chip),
    )
    smallest = max(format.smallest_normal for format in OPERAND_FORMATS)
    row, scales = np.ones((1, k)), np.ones((1, max(k, 1)))
    gemm = _Gemm(
        call,
        Operand.of(row * abs(amax_a), smallest),
        Operand.of(row * abs(amax_b), smallest),
        scales * abs(scale_a),
        scales * abs(scale_b),
        np.full(1, abs(bias)),
    )
    return (_in_float32(gemm) if chip is None else _on_chip(gemm, split_k)).item()


def _spread(scale: Array, granularity: Granularity, shape: tuple[int, int]) -> Array:
    # Block scales for every element, [rows, K]; others as columns.
    if not granularity.is_blockwise:
        return scale.reshape(-1, 1)
    for axis, side in enumerate(granularity.block):
        scale = scale.repeat(side or 1, axis)
    return scale[: shape[0], : shape[1]]


def _on_chip(gemm: _Gemm, split_k: int) -> Array:
    call, model = gemm.call, gemm.call.model
    a, b = (x.in_order(model.order) for x in (gemm.a, gemm.b))
    # 1. [CHAIN-3] The slices of K, each a total of its own, from zero.
    k, multiple = a.values.shape[1], model.split_k_multiple
    length = max(-(-k // (split_k * multiple)), 1) * multiple
    is_blockwise = call.granularities is not None and call.granularities[0].is_blockwise
    parts = (
        _blocks(gemm, start, left, right) if is_blockwise else promoted(left, right, model)
        for start, left, right in slices(length, a, b)
    )
    accumulated = total(parts, FLOAT32) if k else nothing(a, b)
    if is_blockwise:
        return _bound(accumulated, gemm)
    # 2. [EPI-1] [EPI-2] The scales.
    row, column = exactly(gemm.scale_a[:, :1]), exactly(gemm.scale_b[:, :1].T)
    if call.granularities == (Granularity.TENSORWISE, Granularity.TENSORWISE):
        scaled = accumulated.times(row.times(column).rounded(FLOAT32)).rounded(FLOAT32)
    else:
        scaled = accumulated.times(column).rounded(FLOAT32).times(row).rounded(FLOAT32)
    return _bound(scaled, gemm)


def _blocks(gemm: _Gemm, start: int, a: Operand, b: Operand) -> Near:
    # [EPI-5] The total of a slice of K that begins at `start`: a fused multiply-add takes up each block.
    both_vectors = gemm.call.granularities == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)
    known = nothing(a, b)
    for offset, left, right in slices(BLOCK, a, b):
        k = slice(start + offset, start + offset + 1)
        row, column = exactly(gemm.scale_a[:, k]), exactly(gemm.scale_b[:, k].T)
        partial = chain(left, right, gemm.call.model)
        if both_vectors:
            scaled = partial.times(row).rounded(FLOAT32).times(column)
        else:
            scaled = partial.times(row.times(column).rounded(FLOAT32))
        known = known.plus(scaled).rounded(FLOAT32)
    return known


def _in_float32(gemm: _Gemm) -> Array:
    a, b = gemm.a.values * gemm.scale_a, gemm.b.values * gemm.scale_b
    roundings = a.shape[1] + 2
    largest = 2.0 ** (FLOAT32.fraction_bits + 1)
    share = roundings / (largest - roundings) if roundings < largest else np.inf
    return _bound(Near(a @ b.T, share * (np.abs(a) @ np.abs(b).T)), gemm)


def _bound(scaled: Near, gemm: _Gemm) -> Array:
    # [EPI-3] [EPI-4] The bias and the output type.
    with_bias = scaled.plus(exactly(gemm.bias)).rounded(FLOAT32) if gemm.bias.any() else scaled
    value, error = with_bias.rounded(gemm.call.out)
    return np.where(np.isfinite(value) & np.isfinite(error), error, np.inf)

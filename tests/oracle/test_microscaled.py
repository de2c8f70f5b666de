"""MXFP8: [MX-1] to [MX-5] by dot products built by hand, then f8ref.exact == f8ref.numpy on drawn operands and scales.

In a reason `[e]` is a product's exponent [MX-2], the unit of a step is 2^(e_max - 25), and E4M3 x E4M3 is meant.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import tests.oracle.together as ref
from f8emu.conformance.cases.distributions import CODES, draw_codes
from f8emu.spec import BFLOAT16, CHIPS, E4M3FN, E5M2, E8M0FNU, FLOAT16, FLOAT32, Format, Granularity, OperandError
from f8ref import exact
from tests.oracle import exactly
from tests.oracle.exactly import assert_same_bits, codes_of, dtype_of, format_of, typed
from tests.oracle.test_chips import drawn

MX = Granularity.BLOCKWISE_1X32
GEMM: dict[str, Any] = {"granularity_a": MX, "granularity_b": MX, "out_dtype": FLOAT32}
MX_CHIPS = [chip for chip in CHIPS.values() if chip.microscaled is not None]
TCGEN05, RTX = MX_CHIPS
INF, NAN, BIG, TINY = float("inf"), float("nan"), (256.0, 256.0), 2.0**-9
Terms = dict[int, tuple[float, float]]
C = 2.0**-23
NEAR = {k: (1.125, 1.125) for k in range(12)} | {12: (1.625, 0.5)}
"""12 * 81 + 52 = 2^10, of which 12 are lost where the last bit of 81 is cut."""


def at(places: Any, term: tuple[float, float]) -> Terms:
    return dict.fromkeys(places, term)


# rule, reason, products at their places in K, exponents of the scales of a and of b by block (128: NaN), sum
ROWS: list[tuple[str, str, Terms, tuple[list[int], list[int]], float, dict[str, Any]]] = [
    ("MX-2", "a block's scale, of both operands", {0: (1, 1), 32: (1, 1)}, ([3, -2], [1, 0]), 16.25, {}),
    ("MX-2", "of a tail of one too", {0: (1, 1), 32: (1, 1)}, ([0, 9], [0, 0]), 513, {}),
    ("MX-2", "[-25]: four of 2^-25 beside 1", {0: (1, 1)} | at(range(32, 36), (1, 1)), ([0, -13], [0, -12]), 1 + C, {}),
    ("MX-2", "[-26]: they are gone", {0: (1, 1)} | at(range(32, 40), (1, 1)), ([0, -13], [0, -13]), 1, {}),
    ("MX-2", "TINY * 2^9 is 1, [3]: 2^-23 is cut", {0: (TINY, 1), 1: (-TINY, 1)}, ([9], [0]), 0, {"c": C}),
    ("MX-2", "1 is [0]: 2^-23 stays", {0: (1, 1), 1: (-1, 1)}, ([0], [0]), C, {"c": C}),
    ("MX-2", "2^127 * 2^-127", {0: (1, 1)}, ([127], [-127]), 1, {}),
    ("MX-2", "2^-254 is exact beside -2^-254", {0: (1, 1), 1: (-1, 1)}, ([-127], [-127]), 0, {}),
    ("MX-2", "and too small for float32", {0: (1, 1)}, ([-127], [-127]), 0, {}),
    ("MX-2", "2^-149 is not", {0: (1, TINY)}, ([-127], [-13]), 2**-149, {}),
    ("MX-2", "448 * 448 * 2^-166 = 49 * 2^-154 is cut", {0: (448, 448)}, ([-127], [-39]), 2**-149, {}),
    ("MX-2", "2^128 is infinite", {0: (-1, 1)}, ([64], [64]), -INF, {}),
    ("MX-2", "2^254 within a step is not", {0: (1, 1), 1: (-1, 1)}, ([127], [127]), 0, {}),
    ("MX-2", "between steps it is", {0: (1, 1), 32: (-1, 1)}, ([127, 127], [127, 127]), INF, {}),
    ("MX-2", "NaN of zeros", {}, ([128], [0]), NAN, {"k": 1}),
    ("MX-2", "on the other side, in a later block", {0: (1, 1)}, ([0, 0], [0, 128]), NAN, {"k": 64}),
    ("MX-2", "0 * 2^127 is 0", {0: (0, 448)}, ([127], [127]), 0, {}),
    ("MX-2", "and [-133]: 1 stays whole", {0: (0, 448), 1: (1, 1)}, ([0], [0]), 1 + C, {"c": C}),
    ("MX-3", "zeros are [-133]: 81 * 2^-159 is cut to 80", NEAR, ([-100], [-53]), 0, {"k": 32}),
    ("MX-3", "81 * 2^-158 is not", NEAR, ([-100], [-52]), 2**-148, {"k": 32}),
    ("MX-3", "a short tail", NEAR, ([-100], [-53]), 0, {}),
    ("MX-3", "an accumulator of zero", NEAR | at(range(13, 32), (TINY, TINY)), ([-100], [-53]), 0, {}),
    ("MX-3", "any other is [-126]", NEAR, ([-100], [-53]), 2**-149, {"c": 2**-149}),
    ("MX-4", "2^-9 is a unit of 2^16: four", {0: BIG} | at(range(1, 5), (TINY, 1)), ([0], [0]), 2**16 + 2**-7, {}),
    ("MX-4", "2^-10 is none", {0: BIG} | at(range(1, 9), (TINY, 0.5)), ([0], [0]), 2**16, {}),
    ("MX-4", "cut to 24 bits", {0: BIG, 1: (2**-7, 1.5)}, ([0], [0]), 2**16 + 2**-7, {}),
    ("MX-4", "toward zero", {0: (-256, 256), 1: (-(2**-7), 1.5)}, ([0], [0]), -(2**16) - 2**-7, {}),
    ("MX-4", "steps of 32: 31", {0: BIG, 31: (TINY, 1), 1: (TINY, 3)}, ([0], [0]), 2**16 + 2**-7, {}),
    ("MX-4", "and 32", {0: BIG, 32: (TINY, 1), 1: (TINY, 3)}, ([0, 0], [0, 0]), 2**16, {}),
    ("MX-4", "no promotion", {0: BIG, 128: (2**-7, 1.5)}, ([0] * 5, [0] * 5), 2**16 + 2**-7, {}),
    ("MX-4", "slices of 128", {0: BIG, 128: (2**-7, 1.5)}, ([0] * 5, [0] * 5), 2**16 + 2**-6, {"split_k": 2}),
    ("MX-4", "K = 0", {}, ([], []), 0, {"k": 0, "backends": ("numpy",)}),
    ("MX-5", "a bias in float32: 2^24 + 3 is a tie", {0: BIG}, ([8], [0]), 2**24 + 4, {"bias": 3}),
    ("MX-5", "one rounding", {0: (1, 1), 1: (2**-6, 0.25)}, ([0], [0]), 1 + 2**-7, {"bias": 2**-20, "out": BFLOAT16}),
    ("MX-5", "to infinity", {0: BIG}, ([0], [0]), INF, {"out": FLOAT16}),
    ("MX-5", "a sum of -0 is +0", {0: (-0.0, 1)}, ([0], [0]), 0, {}),
]


def of_terms(terms: Terms, scales: tuple[list[int], list[int]], k: int) -> tuple[np.ndarray, ...]:
    """a [1, k], b [1, k] and their scales [1, blocks]."""
    operands = [np.zeros((1, k), np.float32) for _ in "ab"]
    for place, term in terms.items():
        operands[0][0, place], operands[1][0, place] = term
    codes = [x.astype(dtype_of(E4M3FN)) for x in operands]
    assert all((c.astype(np.float32) == x).all() for c, x in zip(codes, operands, strict=True)), (
        "written in exact values"
    )
    return *codes, *(typed([np.array(s, int) + 127], E8M0FNU) for s in scales)


@pytest.mark.parametrize("chip", MX_CHIPS, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_rule(row: Any, chip: Any) -> None:
    """By the GEMM, or where there is a c by the instruction."""
    _, _, terms, scales, wanted, extras = row
    k = extras.get("k", max(terms, default=-1) + 1)
    a, b, scale_a, scale_b = of_terms(terms, scales, k)
    out = extras.get("out", FLOAT32)
    expected = typed([0x7FFFFFFF], FLOAT32) if wanted != wanted else np.array([wanted]).astype(dtype_of(out))
    if "c" in extras:
        c = np.array([extras["c"]], np.float32)
        assert_same_bits(ref.mma(a, b, c, scale_a, scale_b, chip=chip), expected)
        assert_same_bits(mma(a, b, c, scale_a, scale_b, chip=chip), expected)
        return
    options = {**GEMM, "out_dtype": out, "split_k": extras.get("split_k", 1), "chip": chip}
    if "bias" in extras:
        options["bias"] = np.array([extras["bias"]], np.float32)
    for name in extras.get("backends", ("exact", "numpy")):
        f8 = exactly.implementation(name)
        assert_same_bits(f8.scaled_mm(a, b.T, scale_a, scale_b.T, **options)[0], expected)


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, *, chip: Any) -> Any:
    """`f8ref.exact.mma` of every case."""
    cases = (codes_of(x).tolist() for x in (a, b, c, scale_a, scale_b))
    formats: Any = {"a_format": format_of(a), "b_format": format_of(b), "chip": chip}
    return typed(
        [exact.mma(*case[:3], scale_a=case[3], scale_b=case[4], **formats) for case in zip(*cases, strict=True)],
        FLOAT32,
    )


@pytest.mark.parametrize("side", [0, 1], ids="ab")
def test_mx_1_a_byte_is_a_power_of_two(side: int) -> None:
    """[MX-1] All 256 bytes, byte 0 too; 255 is NaN."""
    ones, c = np.ones((256, 1), dtype_of(E4M3FN)), np.zeros(256, np.float32)
    scales = [typed(np.full((256, 1), 127), E8M0FNU), typed(np.full((256, 1), 127), E8M0FNU)]
    scales[side] = typed(np.arange(256)[:, None], E8M0FNU)
    expected = np.append(np.exp2(np.arange(-127.0, 128)).astype(np.float32), typed(0x7FFFFFFF, FLOAT32))
    for multiply in (mma, ref.mma):
        assert_same_bits(multiply(ones, ones, c, *scales, chip=TCGEN05), expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("step_k", 16), ("aligned_fraction_bits", 24), ("aligned_fraction_bits", 26), ("result_fraction_bits", 22)),
        *(("result_fraction_bits", 24), ("promote_k", 128), ("split_k_multiple", 256)),
        *(("zero_exponent", None), ("zero_exponent", -134), ("zero_exponent", -132)),
    ],
)
def test_every_number_of_the_chain_counts(field: str, value: int | None) -> None:
    """[MX-3], [MX-4] The rows above refuse every neighbour of a number of the model."""
    assert TCGEN05.microscaled is not None
    altered = replace(TCGEN05, microscaled=replace(TCGEN05.microscaled, **{field: value}))
    failed = 0
    for row in (row for row in ROWS if "c" not in row[5]):
        try:
            test_rule(row, altered)
        except AssertionError:
            failed += 1
    assert failed


# ---- Drawn operands

BYTES: dict[str, tuple[int, int]] = {"ordinary": (119, 136), "any": (0, 255), "tiny": (30, 70), "huge": (180, 255)}
LENGTHS = (1, 31, 32, 33, 48, 64, 100, 129, 160, 300)
KINDS = (*CODES, "outlier", "gradient")


def draw_scales(r: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes; of "special", one in twenty is NaN."""
    codes = r.integers(*BYTES.get(kind, (112, 143)), shape)
    return typed(np.where(r.random(shape) < 0.05, 255, codes) if kind == "special" else codes, E8M0FNU)


def draw_pair(r: np.random.Generator, kind: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of a [m, k] and b [n, k] whose product is near 1 on the whole where both are of any byte."""
    scale_a, scale_b = draw_scales(r, kind, MX.scale_shape(m, k)), draw_scales(r, kind, MX.scale_shape(n, k))
    if kind != "any":
        return scale_a, scale_b
    opposite = 254 - codes_of(scale_a)[:1].astype(int) + r.integers(-8, 9, scale_b.shape)
    return scale_a, typed(np.where(r.random(scale_b.shape) < 0.7, opposite.clip(0, 254), codes_of(scale_b)), E8M0FNU)


@pytest.mark.parametrize("scales", [*BYTES, "special"])
@pytest.mark.parametrize("formats", TCGEN05.format_pairs, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_every_output(formats: tuple[Format, Format], scales: str) -> None:
    """[MX-1] to [MX-5] A GEMM of every kind of codes: lengths, chips, slices, biases and outputs in turn."""
    r, ordinary = np.random.default_rng(59), 0
    for i, kind in enumerate(KINDS * 4):
        m, n, k = 3, 4, int(r.choice(LENGTHS))
        a, b = draw_codes(kind, (m, k), formats[0], i), draw_codes(kind, (n, k), formats[1], -i)
        scale_a, scale_b = draw_pair(r, scales, m, n, k)
        bias = None if i % 3 else r.normal(0, 100, n).astype(dtype_of((FLOAT32, BFLOAT16, FLOAT16)[i // 3 % 3]))
        options: Any = {**GEMM, "out_dtype": (FLOAT32, FLOAT32, BFLOAT16, FLOAT16)[i % 4], "bias": bias}
        options |= {"split_k": (1, 1, 2, 3)[i // 2 % 4], "chip": MX_CHIPS[i % 2]}
        observed = ref.scaled_mm(a, b.T, scale_a, scale_b.T, **options)
        assert_same_bits(observed, exactly.scaled_mm(a, b.T, scale_a, scale_b.T, **options))
        ordinary += np.count_nonzero(np.isfinite(observed.astype(np.float32)) & (observed != 0))
    assert ordinary > (0 if scales == "huge" else 120)


@pytest.mark.parametrize("chip", MX_CHIPS, ids=str)
@pytest.mark.parametrize("formats", [*product((E4M3FN, E5M2), repeat=2)], ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_every_instruction(formats: tuple[Format, Format], chip: Any) -> None:
    """[MX-2] All pairs of formats, K of two steps and a tail, and any c, subnormal and zero too."""
    r, cases, k = np.random.default_rng(60), 500, 67
    a, b = (typed(drawn(r, format, (cases, k)), format) for format in formats)
    exponents = r.integers(-127, 128, (cases, 3))
    near = np.stack([exponents, r.integers(-12, 13, (cases, 3)) - exponents]).clip(-127, 127)
    near[:, ::4] = r.integers(-127, 0, near[:, ::4].shape)
    near[0, 1::40] = 128
    scale_a, scale_b = (typed(x + 127, E8M0FNU) for x in near)
    c = np.where(r.random(cases) < 0.3, 0, r.standard_normal(cases) * np.exp2(r.integers(-149, 20, cases)))
    operands = a, b, c.astype(np.float32), scale_a, scale_b
    observed = ref.mma(*operands, chip=chip)
    assert np.mean(np.isfinite(observed) & (observed != 0)) > 0.6
    assert_same_bits(observed, mma(*operands, chip=chip))


G, OFFS = 5, {"M": [2, 2, 3, 5, 6], "N": [0, 3, 4, 4, 6], "K": [32, 32, 96, 100, 100]}
"""Groups that are empty; beyond those of M and N there is one more row and column; K ends in a tail of 4."""


@pytest.mark.parametrize("divided", ["M", "N", "K", None])
def test_scaled_grouped_mm(divided: str | None) -> None:
    """[MX-5] Each group is a GEMM of its own, with the scales of its rows, columns and blocks."""
    r, (m, n, k) = np.random.default_rng(61), (7, 7, 100)
    batched_a, batched_b = divided in ("N", None), divided in ("M", None)
    shape_a, shape_b = (G,) * batched_a + (m, k), (G,) * batched_b + (n, k)
    a = typed(drawn(r, E4M3FN, (*shape_a[:-1], k)), E4M3FN)
    b = typed(drawn(r, E4M3FN, (*shape_b[:-1], k)), E4M3FN)
    scale_a, scale_b = (draw_scales(r, "ordinary", (*shape[:-1], 4)) for shape in (shape_a, shape_b))
    offs = None if divided is None else np.array(OFFS[divided], np.int32)
    operands = a, b.swapaxes(-1, -2), scale_a, scale_b.swapaxes(-1, -2)
    observed = ref.scaled_grouped_mm(*operands, offs, out_dtype=FLOAT32, chip=RTX)
    expected = np.zeros((m, n) if divided in ("M", "N") else (G, m, n), np.float32)
    for g in range(G):
        start, stop = (0, 0) if divided is None else (OFFS[divided][g - 1] if g else 0, OFFS[divided][g])
        rows, columns, inner = (slice(start, stop) if divided == dim else slice(None) for dim in "MNK")
        blocks = slice(-(-start // 32), -(-stop // 32)) if divided == "K" else slice(None)
        if start == stop and divided is not None:
            continue  # nothing is added
        of_a, of_scale_a = (x[g] if batched_a else x for x in (a, scale_a))
        of_b, of_scale_b = (x[g] if batched_b else x for x in (b, scale_b))
        place = (rows, columns) if divided in ("M", "N") else (g,)
        expected[place] = exactly.scaled_mm(
            of_a[rows, inner],
            of_b[columns, inner].T,
            of_scale_a[rows, blocks],
            of_scale_b[columns, blocks].T,
            chip=RTX,
            **GEMM,
        )
    assert_same_bits(observed, expected)


def test_the_definition_wants_both_scales() -> None:
    codes: Any = ([0x38] * 33, [0x38] * 33, 0)
    formats: Any = {"a_format": E4M3FN, "b_format": E4M3FN, "chip": TCGEN05}
    for scales in ({"scale_a": [127] * 2}, {"scale_b": [127] * 2}, {"scale_a": [127], "scale_b": [127, 127]}):
        with pytest.raises(OperandError, match="mma: scale_a and scale_b must have 2 bytes, or be absent"):
            exact.mma(*codes, **formats, **scales)

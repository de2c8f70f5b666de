"""f8ref.exact == f8ref.numpy on drawn inputs: two implementations by two authors, compared as integers.

Every GEMM below is M x N dot products, each of them done by the definition too. The operands are drawn to be hard:
specials, subnormals, cancellation, outliers, sparse and signed zeros; the scales to underflow, overflow, change signs.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tests.oracle.together as ref
from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    E5M2,
    FLOAT16,
    FLOAT32,
    AmaxHistoryReduction,
    DelayedScaling,
    Format,
    Granularity,
    ScaleRule,
)
from f8ref import exact
from tests.oracle import exactly
from tests.oracle.exactly import CODE_TYPES, assert_same_bits, codes_of, dtype_of, typed

TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
VECTOR, SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
LENGTHS = (1, 5, 16, 31, 32, 33, 48, 100, 127, 128, 129, 160, 200, 256, 257, 300, 390, 512)
M, N = 4, 5


# ---- draws


def draw_finite(draw: np.random.Generator, shape: tuple[int, int], format: Format, low: int, high: int) -> np.ndarray:
    """Finite codes of both signs with magnitude codes in [low, high]."""
    magnitudes = draw.integers(low, min(high, format.max_code) + 1, shape)
    return magnitudes | draw.choice([0, format.sign_mask], shape)


def draw_operand(draw: np.random.Generator, kind: str, rows: int, k: int, format: Format) -> np.ndarray:
    """[rows, k] codes. bfloat16 exponents reach +-75, so that accumulators leave float32's normal range both ways."""
    shape = (rows, k)
    binade = 1 << format.fraction_bits
    one = format.bias * binade
    reach = 75 * binade if format is BFLOAT16 else one
    near = draw_finite(draw, shape, format, one - 3 * binade, one + 3 * binade)
    match kind:
        case "near":
            return near
        case "wide":
            return draw_finite(draw, shape, format, one - reach, one + reach)
        case "small":  # subnormals and the first normal binades; in bfloat16 far below one
            base = one - reach
            return draw_finite(draw, shape, format, base, base + 3 * binade)
        case "large":  # one sign, largest values: sums that grow
            return draw.integers(one + reach // 2, min(one + reach, format.max_code) + 1, shape)
        case "outlier":
            codes = draw_finite(draw, shape, format, one - reach, one)
            return np.where(draw.random(shape) < 0.05, draw_finite(draw, shape, format, one, one + reach), codes)
        case "sparse":
            zeros = draw.choice([0, format.sign_mask], shape)
            return np.where(draw.random(shape) < 0.8, zeros, draw_finite(draw, shape, format, one - reach, one + reach))
        case "special":
            lowest = format.max_code + 1  # infinity and NaN, or NaN
            specials = draw.integers(lowest, format.magnitude_mask + 1, shape) | draw.choice(
                [0, format.sign_mask], shape
            )
            if format.infinity_code is not None:
                specials = np.where(draw.random(shape) < 0.9, specials & ~format.fraction_mask, specials)
            zeros = draw.choice([0, format.sign_mask], shape)
            codes = np.where(draw.random(shape) < 0.1, zeros, near)
            return np.where(draw.random(shape) < 0.6 / k, specials, codes)
        case _:
            raise AssertionError(kind)


def draw_pair(
    draw: np.random.Generator, kind: str, k: int, a_format: Format, b_format: Format, rows: tuple[int, int] = (M, N)
) -> tuple[np.ndarray, np.ndarray]:
    """a and b [rows, k]. In "cancel" nearly every product has its negative somewhere else along K."""
    if kind != "cancel":
        return draw_operand(draw, kind, rows[0], k, a_format), draw_operand(draw, kind, rows[1], k, b_format)
    half = (k + 1) // 2
    a = draw_operand(draw, "wide", M, half, a_format)
    b = draw_operand(draw, "wide", N, half, b_format)
    a = np.concatenate([a, a ^ a_format.sign_mask], axis=1)[:, :k]
    b = np.concatenate([b, b], axis=1)[:, :k]
    order = draw.permutation(k)
    a, b = a[:, order], b[:, order]
    spoiled = draw.random(a.shape) < 1.5 / k
    return np.where(spoiled, draw_operand(draw, "wide", M, k, a_format), a), b


def draw_scales(draw: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Float32 factors; every element differs in magnitude, so that no index error can hide."""
    spread = np.exp2(draw.uniform(-4, 4, shape))
    match kind:
        case "ordinary":
            values = spread
        case "power_of_two":
            values = np.exp2(draw.integers(-8, 9, shape))
        case "tiny":
            values = spread * 2.0 ** float(draw.integers(-100, -60))
        case "subnormal":
            values = spread * 2.0 ** float(draw.integers(-147, -125))
        case "huge":
            values = spread * 2.0 ** float(draw.integers(40, 100))
        case "signed":
            values = spread * draw.choice([-1, 1], shape)
        case "special":
            values = np.where(
                draw.random(shape) < 0.5, draw.choice([0.0, -0.0, np.inf, -np.inf, np.nan], shape), spread
            )
        case _:
            raise AssertionError(kind)
    return values.astype(np.float32)


FP8_KINDS = ("near", "wide", "small", "large", "outlier", "sparse", "special", "cancel")
BF16_KINDS = ("near", "wide", "small", "outlier", "sparse", "special", "cancel")
SCALE_KINDS = ("ordinary",) * 4 + ("power_of_two", "signed", "tiny", "subnormal", "huge")
FORMAT_PAIRS = ((E4M3FN, E4M3FN), (E4M3FN, E5M2), (E5M2, E4M3FN))
GRANULARITIES = ((TENSORWISE, TENSORWISE), (ROWWISE, ROWWISE), (VECTOR, VECTOR), (VECTOR, SQUARE), (SQUARE, VECTOR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One drawn GEMM."""

    seed: int
    kind: str
    k: int
    formats: tuple[Format, Format]
    granularities: tuple[Granularity, Granularity] = (TENSORWISE, TENSORWISE)
    scales: tuple[str, str] = ("ordinary", "ordinary")
    out_format: Format = FLOAT32
    bias: Format | None = None
    use_fast_accum: bool = False
    split_k: int = 1


def draw_cases() -> list[Case]:
    """The plan: all format pairs x granularities x kinds, the other choices drawn; then bfloat16."""
    draw = random.Random(20261121)
    cases: list[Case] = []
    outputs = (FLOAT32, FLOAT32, BFLOAT16, FLOAT16)
    for formats in FORMAT_PAIRS:
        for granularities in GRANULARITIES:
            if granularities[0].is_blockwise and formats != (E4M3FN, E4M3FN):
                continue  # no chip has these
            for kind in FP8_KINDS * 2:
                blockwise = granularities[0].is_blockwise
                cases.append(
                    Case(
                        seed=len(cases),
                        kind=kind,
                        k=draw.choice(LENGTHS),
                        formats=formats,
                        granularities=granularities,
                        scales=(
                            draw.choice(SCALE_KINDS),
                            draw.choice((*SCALE_KINDS, "special") if kind == "near" else SCALE_KINDS),
                        ),
                        out_format=draw.choice(outputs),
                        bias=draw.choice((None, None, FLOAT32, BFLOAT16, FLOAT16)),
                        use_fast_accum=not blockwise and draw.random() < 0.5,
                        split_k=1 if blockwise else draw.choice((1, 1, 2, 3, 5)),
                    )
                )
    for kind in BF16_KINDS * 6:
        cases.append(
            Case(
                seed=len(cases),
                kind=kind,
                k=draw.choice(LENGTHS),
                formats=(BFLOAT16, BFLOAT16),
                out_format=draw.choice((FLOAT32, FLOAT32, FLOAT32, BFLOAT16, FLOAT16)),
                split_k=draw.choice((1, 1, 2, 3, 4)),
            )
        )
    return cases


CASES = draw_cases()


def case_id(case: Case) -> str:
    fast = "fast" if case.use_fast_accum else "slow"
    return f"{case.seed}-{case.formats[0]}-{case.formats[1]}-{case.granularities[0].value}-{case.kind}-{fast}-K{case.k}"


def scaled_operands(
    draw: np.random.Generator, kind: str, k: int, case: Case, rows: tuple[int, int] = (M, N)
) -> tuple[np.ndarray, ...]:
    """a [rows, k], b [k, rows] and their scales, as `scaled_mm` takes them."""
    a, b = draw_pair(draw, kind, k, *case.formats, rows)
    scale_a, scale_b = (
        draw_scales(draw, of, granularity.scale_shape(extent, k))
        for of, granularity, extent in zip(case.scales, case.granularities, rows, strict=True)
    )
    return typed(a, case.formats[0]), typed(b, case.formats[1]).T, scale_a, scale_b.T


def options_of(case: Case) -> dict[str, Any]:
    granularity_a, granularity_b = case.granularities
    return {
        "granularity_a": granularity_a,
        "granularity_b": granularity_b,
        "out_dtype": case.out_format,
        "use_fast_accum": case.use_fast_accum,
        "split_k": case.split_k,
    }


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_output(case: Case) -> None:
    draw = np.random.default_rng(case.seed)
    if case.formats[0] is BFLOAT16:
        a, b = (typed(x, BFLOAT16) for x in draw_pair(draw, case.kind, case.k, *case.formats))
        options: Any = {"out_dtype": case.out_format, "split_k": case.split_k}
        assert_same_bits(ref.mm(a, b.T, **options), exactly.mm(a, b.T, **options))
        return
    operands, options = scaled_operands(draw, case.kind, case.k, case), options_of(case)
    if case.bias is not None:
        options["bias"] = draw.normal(0, 100, N).astype(np.float32).astype(dtype_of(case.bias))
    assert_same_bits(ref.scaled_mm(*operands, **options), exactly.scaled_mm(*operands, **options))


@pytest.mark.parametrize("split_k", [2, 3, 5])
@pytest.mark.parametrize("granularities", GRANULARITIES[2:], ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_split_blockwise(granularities: tuple[Granularity, Granularity], split_k: int) -> None:
    """[CHAIN-3] Slices of whole blocks, beside 128x128 scales of four; a last one that is shorter, one that is empty.

    Totals that are rounded to -0 stay it, whatever the number of slices.
    """
    formats = E4M3FN, E4M3FN
    for k, kind, scales in ((1300, "near", "ordinary"), (1536, "special", "special"), (2300, "near", "tiny")):
        case = Case(
            seed=0,
            kind=kind,
            k=k,
            formats=formats,
            granularities=granularities,
            scales=(scales, scales),
            split_k=split_k,
        )
        operands, options = scaled_operands(np.random.default_rng([k, split_k]), kind, k, case), options_of(case)
        observed, unsplit = (ref.scaled_mm(*operands, **options | {"split_k": slices}) for slices in (split_k, 1))
        assert scales != "ordinary" or (codes_of(observed) != codes_of(unsplit)).any()
        rows = range(0, M, 3)
        assert_same_bits(observed[::3], exactly.scaled_mm(*operands, **options, at=(rows, range(N))))


@pytest.mark.parametrize("granularities", [(VECTOR, SQUARE), (SQUARE, VECTOR)], ids=["vector-square", "square-vector"])
def test_square_blocks_beyond_the_first_128_rows(granularities: tuple[Granularity, Granularity]) -> None:
    """[EPI-5] 2 x 2 scales of 128x128 for 130 rows and K = 200, all of different magnitude."""
    case = Case(seed=5, kind="near", k=200, formats=(E4M3FN, E4M3FN), granularities=granularities)
    operands = scaled_operands(np.random.default_rng(5), "near", 200, case, (130, 130))
    rows, columns = [0, 127, 128, 129], [1, 127, 128, 129]
    observed = ref.scaled_mm(*operands, **options_of(case))[np.ix_(rows, columns)]
    assert_same_bits(observed, exactly.scaled_mm(*operands, **options_of(case), at=(rows, columns)))


@pytest.mark.parametrize("use_fast_accum", [True, False], ids=["fast", "slow"])
def test_scaled_grouped_mm(use_fast_accum: bool) -> None:
    """[EPI-6] Three groups, the second empty."""
    draw = np.random.default_rng(6)
    offs, k = [3, 3, 8], 144
    a = typed(draw_operand(draw, "wide", offs[-1], k, E4M3FN), E4M3FN)
    b = typed(np.stack([draw_operand(draw, "wide", N, k, E4M3FN) for _ in offs]), E4M3FN).transpose(0, 2, 1)
    scale_a, scale_b = draw_scales(draw, "ordinary", (1, offs[-1]))[0], draw_scales(draw, "signed", (len(offs), N))
    scale_a[0], scale_b[0, 0] = 2.0**-140, 2.0**40  # the other product with one scale is no subnormal
    operands = a, b, scale_a, scale_b, np.array(offs, np.int32)
    assert_same_bits(
        ref.scaled_grouped_mm(*operands, use_fast_accum=use_fast_accum),
        exactly.scaled_grouped_mm(*operands, use_fast_accum=use_fast_accum),
    )


# ---- casts and scales


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
@pytest.mark.parametrize("from_format", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_amax_quantize_dequantize(from_format: Format, granularity: Granularity) -> None:
    """Each group of the granularity by its own scalar calls; a group with NaN, one with infinity, one of zeros."""
    draw = np.random.default_rng(2)
    rows, k = 130, 260
    x = draw_finite(draw, (rows, k), from_format, 0, from_format.max_code)
    x[0, 0], x[1, 130], x[129, 0:128] = from_format.nan_code, from_format.magnitude_mask ^ from_format.fraction_mask, 0
    x = x.astype(CODE_TYPES[from_format.bits])
    shape = granularity.scale_shape(rows, k)
    observed_amax = codes_of(ref.amax(typed(x, from_format), granularity))
    assert observed_amax.shape == shape

    block_rows, block_k = granularity.block[0] or rows, granularity.block[1] or k
    factors = draw_scales(draw, "ordinary", shape)
    codes = codes_of(ref.quantize(typed(x, from_format), factors, E4M3FN, granularity))
    values = codes_of(ref.dequantize(typed(codes, E4M3FN), factors, granularity))
    assert codes.shape == values.shape == (rows, k)
    factor_codes = codes_of(factors)
    for group in random.Random(granularity.value).sample(list(np.ndindex(shape)), min(30, shape[0] * shape[1])):
        i, j = group
        part = (slice(i * block_rows, (i + 1) * block_rows), slice(j * block_k, (j + 1) * block_k))
        assert observed_amax[group] == exact.amax(x[part].ravel().tolist(), from_format), group
        factor = int(factor_codes[group])
        for code, observed, value in list(
            zip(x[part].ravel().tolist(), codes[part].ravel().tolist(), values[part].ravel().tolist(), strict=True)
        )[:40]:
            assert observed == exact.quantize(code, from_format, factor, E4M3FN), (group, hex(code), hex(factor))
            assert value == exact.dequantize(observed, E4M3FN, factor), (group, hex(observed), hex(factor))


@pytest.mark.parametrize("rule", [ScaleRule(), ScaleRule(power_of_two=True), ScaleRule(amax_floor=1e-30)], ids=str)
@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
def test_scale_from_amax(format: Format, rule: ScaleRule) -> None:
    draw = np.random.default_rng(3)
    amaxes = draw.integers(0, 0x7F800000, 600, dtype=np.uint32)
    special = np.array([0, 1, 0x007FFFFF, 0x43600000, 0x43600001, 0x435FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    amaxes = np.concatenate([amaxes, special.astype(np.uint32)])
    for margin in (0, 3, 6):
        observed = ref.scale_from_amax(typed(amaxes, FLOAT32), format, rule, margin=margin)
        expected = [exact.scale_from_amax(code, format, rule, margin=margin) for code in amaxes.tolist()]
        assert codes_of(observed.inv_scale).tolist() == [scales.inv_scale for scales in expected]
        assert codes_of(observed.scale).tolist() == [scales.scale for scales in expected]


@pytest.mark.parametrize("reduction", AmaxHistoryReduction, ids=lambda r: r.value)
@pytest.mark.parametrize("rule", [ScaleRule(), ScaleRule(power_of_two=True)], ids=["any", "power_of_two"])
def test_delayed_state(rule: ScaleRule, reduction: AmaxHistoryReduction) -> None:
    """40 steps with zeros, infinities and NaN among them: every state equal."""
    delayed = DelayedScaling(history_length=3, reduction=reduction, margin=2)
    draw = random.Random(4)
    observed, expected = ref.initial_delayed_state(delayed), exact.initial_delayed_state(delayed)
    for _ in range(40):
        amax = draw.choice([0, 0x7F800000, 0x7FC00000, *(draw.randrange(0x2B000000, 0x47000000) for _ in range(6))])
        observed = ref.update_delayed_state(observed, typed(amax, FLOAT32), E5M2, rule, delayed)
        expected = exact.update_delayed_state(expected, amax, E5M2, rule, delayed)
        assert tuple(codes_of(observed.amax_history).tolist()) == expected.amax_history
        assert int(codes_of(observed.inv_scale)) == expected.inv_scale
        assert bool(observed.initialized) == expected.initialized

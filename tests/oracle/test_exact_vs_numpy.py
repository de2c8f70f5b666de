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
from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import verify
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, Granularity
from tests.oracle import exactly
from tests.oracle.exactly import assert_same_bits, codes_of, dtype_of, typed

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


def test_casts_and_scales() -> None:
    """Formats, amaxes, scales, codes and delayed states, as the suite puts them: the definition judges the oracle."""
    (found,) = verify([load_subject("f8ref.numpy")], stages=["formats", "scales"]).subjects
    assert found.is_equal and [stage.cases_total > 30 for stage in found.stages] == [True, True]

"""f8ref.exact == f8ref.numpy on drawn inputs: two implementations by two authors, compared as integers.

Every GEMM below is M x N dot products, each of them done by the definition too. The codes are those of the suite's
distributions: specials, subnormals, cancellation, outliers; the scales underflow, overflow and change signs.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import tests.oracle.together as ref
from f8emu.conformance.cases.distributions import CODES, draw, draw_codes
from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import verify
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, Granularity
from tests.oracle import exactly
from tests.oracle.exactly import assert_same_bits, codes_of, dtype_of, typed

TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
VECTOR, SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
LENGTHS = (1, 5, 16, 31, 32, 33, 48, 100, 127, 128, 129, 160, 200, 256, 257, 300, 390, 512)
M, N = 4, 5
KINDS = (*CODES, "outlier", "gradient")
SCALE_KINDS = ("ordinary",) * 4 + ("power_of_two", "signed", "tiny", "subnormal", "huge")
OUTPUTS = (FLOAT32, FLOAT32, BFLOAT16, FLOAT16)
FORMAT_PAIRS = ((E4M3FN, E4M3FN), (E4M3FN, E5M2), (E5M2, E4M3FN))
GRANULARITIES = ((TENSORWISE, TENSORWISE), (ROWWISE, ROWWISE), (VECTOR, VECTOR), (VECTOR, SQUARE), (SQUARE, VECTOR))
EXPONENTS = ((0, 255), (120, 132), (0, 3), (1, 40), (40, 80), (55, 66), (60, 68), (180, 255), (188, 193))
"""Fields of bfloat16: anything; ordinary; results in and below the subnormal range; overflow."""


def draw_scales(draw: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Float32 factors; every element differs in magnitude, so that no index error can hide."""
    spread, special = np.exp2(draw.uniform(-4, 4, shape)), [0.0, -0.0, np.inf, -np.inf, np.nan]
    factors: dict[str, Any] = {
        "ordinary": 1.0,
        "power_of_two": np.exp2(draw.integers(-8, 9, shape)) / spread,
        "tiny": 2.0 ** float(draw.integers(-100, -60)),
        "subnormal": 2.0 ** float(draw.integers(-147, -125)),
        "huge": 2.0 ** float(draw.integers(40, 100)),
        "signed": draw.choice([-1, 1], shape),
        "special": np.where(draw.random(shape) < 0.5, draw.choice(special, shape), 1.0),
    }
    return (spread * factors[kind]).astype(np.float32)


def draw_bfloat16(draw: np.random.Generator, exponents: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Any signs and fractions, exponent fields in a range."""
    return typed(
        draw.integers(exponents[0] << 7, exponents[1] << 7, shape) | draw.integers(0, 2, shape) << 15, BFLOAT16
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One drawn GEMM of float8."""

    seed: int
    kind: str
    k: int
    formats: tuple[Format, Format] = (E4M3FN, E4M3FN)
    granularities: tuple[Granularity, Granularity] = (TENSORWISE, TENSORWISE)
    scales: tuple[str, str] = ("ordinary", "ordinary")
    bias: Format | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def operands(self, rows: tuple[int, int] = (M, N)) -> tuple[np.ndarray, ...]:
        """a [rows, k], b [k, rows] and their scales, as `scaled_mm` takes them."""
        draw = np.random.default_rng(self.seed)
        a, b = (
            draw_codes(self.kind, (extent, self.k), format, self.seed)
            for extent, format in zip(rows, self.formats, strict=True)
        )
        scale_a, scale_b = (
            draw_scales(draw, of, granularity.scale_shape(extent, self.k))
            for of, granularity, extent in zip(self.scales, self.granularities, rows, strict=True)
        )
        return a, b.T, scale_a, scale_b.T

    def given(self) -> dict[str, Any]:
        options = {"granularity_a": self.granularities[0], "granularity_b": self.granularities[1], **self.options}
        if self.bias is not None:
            bias = np.random.default_rng(self.seed).normal(0, 100, N).astype(np.float32)
            options["bias"] = bias.astype(dtype_of(self.bias))
        return {"out_dtype": FLOAT32, **options}


def draw_cases() -> list[Case]:
    """All format pairs x granularities x kinds, the other choices drawn."""
    draw = random.Random(20261121)
    cases: list[Case] = []
    for formats in FORMAT_PAIRS:
        for pair in GRANULARITIES:
            is_blockwise = pair[0].is_blockwise
            if is_blockwise and formats != (E4M3FN, E4M3FN):
                continue  # no chip has these
            for kind in KINDS * 2:
                scales = SCALE_KINDS, (*SCALE_KINDS, "special") if kind == "normal" else SCALE_KINDS
                options: dict[str, Any] = {"out_dtype": draw.choice(OUTPUTS)}
                if not is_blockwise:
                    options |= {"use_fast_accum": draw.random() < 0.5, "split_k": draw.choice((1, 1, 2, 3, 5))}
                cases.append(
                    Case(
                        seed=len(cases),
                        kind=kind,
                        k=draw.choice(LENGTHS),
                        formats=formats,
                        granularities=pair,
                        scales=(draw.choice(scales[0]), draw.choice(scales[1])),
                        bias=draw.choice((None, None, FLOAT32, BFLOAT16, FLOAT16)),
                        options=options,
                    )
                )
    return cases


def case_id(case: Case) -> str:
    return f"{case.seed}-{case.formats[0]}-{case.formats[1]}-{case.granularities[0].value}-{case.kind}-K{case.k}"


@pytest.mark.parametrize("case", draw_cases(), ids=case_id)
def test_every_output(case: Case) -> None:
    operands, options = case.operands(), case.given()
    assert_same_bits(ref.scaled_mm(*operands, **options), exactly.scaled_mm(*operands, **options))


@pytest.mark.parametrize("split_k", [1, 2, 3])
@pytest.mark.parametrize("kind", ["normal", "outlier", "specials", "cancellation", *EXPONENTS], ids=str)
def test_every_output_of_bfloat16(kind: str | tuple[int, int], split_k: int) -> None:
    rng = np.random.default_rng(split_k)
    for k, out_dtype in ((int(rng.choice(LENGTHS)), FLOAT32), (300, OUTPUTS[split_k])):
        a, b = (
            draw(kind, (rows, k), BFLOAT16, k) if isinstance(kind, str) else draw_bfloat16(rng, kind, (rows, k))
            for rows in (M, N)
        )
        options: Any = {"out_dtype": out_dtype, "split_k": split_k}
        assert_same_bits(ref.mm(a, b.T, **options), exactly.mm(a, b.T, **options))


@pytest.mark.parametrize("split_k", [2, 3, 5])
@pytest.mark.parametrize("pair", GRANULARITIES[2:], ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_split_blockwise(pair: tuple[Granularity, Granularity], split_k: int) -> None:
    """[CHAIN-3] Slices of whole blocks, beside 128x128 scales of four; a last one that is shorter, one that is empty.

    Totals that are rounded to -0 stay it, whatever the number of slices.
    """
    for k, kind, scales in ((1300, "normal", "ordinary"), (1536, "specials", "special"), (2300, "normal", "tiny")):
        case = Case(seed=k, kind=kind, k=k, granularities=pair, scales=(scales, scales))
        operands, options = case.operands(), case.given()
        observed, unsplit = (ref.scaled_mm(*operands, **options, split_k=slices) for slices in (split_k, 1))
        assert scales != "ordinary" or (codes_of(observed) != codes_of(unsplit)).any()
        wanted = exactly.scaled_mm(*operands, **options, split_k=split_k, at=(range(0, M, 3), range(N)))
        assert_same_bits(observed[::3], wanted)


@pytest.mark.parametrize("pair", [(VECTOR, SQUARE), (SQUARE, VECTOR)], ids=["vector-square", "square-vector"])
def test_square_blocks_beyond_the_first_128_rows(pair: tuple[Granularity, Granularity]) -> None:
    """[EPI-5] 2 x 2 scales of 128x128 for 130 rows and K = 200, all of different magnitude."""
    case = Case(seed=5, kind="normal", k=200, granularities=pair)
    operands, at = case.operands((130, 130)), ([0, 127, 128, 129], [1, 127, 128, 129])
    observed = ref.scaled_mm(*operands, **case.given())[np.ix_(*at)]
    assert_same_bits(observed, exactly.scaled_mm(*operands, **case.given(), at=at))


@pytest.mark.parametrize("use_fast_accum", [True, False], ids=["fast", "slow"])
def test_scaled_grouped_mm(use_fast_accum: bool) -> None:
    """[EPI-6] Three groups, the second empty."""
    draw = np.random.default_rng(6)
    offs, k = [3, 3, 8], 144
    a = draw_codes("bits", (offs[-1], k), E4M3FN, "a")
    b = draw_codes("bits", (len(offs) * N, k), E4M3FN, "b").reshape(len(offs), N, k).transpose(0, 2, 1)
    scale_a, scale_b = draw_scales(draw, "ordinary", (1, offs[-1]))[0], draw_scales(draw, "signed", (len(offs), N))
    scale_a[0], scale_b[0, 0] = 2.0**-140, 2.0**40  # the other product with one scale is no subnormal
    operands = a, b, scale_a, scale_b, np.array(offs, np.int32)
    options: dict[str, Any] = {"use_fast_accum": use_fast_accum}
    assert_same_bits(ref.scaled_grouped_mm(*operands, **options), exactly.scaled_grouped_mm(*operands, **options))


def test_casts_and_scales() -> None:
    """Formats, amaxes, scales, codes and delayed states, as the suite puts them: the definition judges the oracle."""
    (subject,) = verify([load_subject("f8ref.numpy")], stages=["formats", "scales"]).subjects
    assert subject.is_equal and [stage.cases_total > 30 for stage in subject.stages] == [True, True]

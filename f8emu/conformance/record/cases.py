"""Which GEMMs `f8emu record` runs, as tables, and the operands that it draws for them.

Every table entry is tried; what the library refuses is listed in the recorded file, never dropped in silence. All draws
come from one seed, and operands are drawn once for all the cases that share them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.distributions import CODES, VALUES, dtype_of
from f8emu.conformance.cases.gemm import GemmCase, Mode, Sample
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, HOPPER, Format, Granularity

PAIRS = HOPPER.format_pairs
REFUSED_PAIR = (E5M2, E5M2)
SHAPES = ((64, 96, 512), (48, 80, 1040), (16, 16, 16), (32, 64, 4096), (32, 16, 144))
"""M, N, K. 1040, 16 and 144 end with half a step of 32; 144 ends so after the restart at 128 [ACC-1], [CHAIN-2]."""
DISTRIBUTIONS = ("normal", "outlier", "gradient", "same", "bits", "cancellation", "subnormals")
"""Each pair of formats meets each shape with the next one; the seed says with which they begin."""
OUTPUTS = (BFLOAT16, FLOAT32, FLOAT16)
SPLITK_SHAPES = ((64, 64, 8192), (16, 64, 16384), (64, 32, 6144), (32, 64, 12288))
SPLITK_SAMPLED_SHAPES = ((256, 256, 16384), (16, 1024, 16384))
LAYER_SHAPES = ((8192, 4096, 4096), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 8192, 28672))
"""Shapes from transformer layers; 24 rows and columns of each are kept."""
LAYER_KINDS = ((E4M3FN, True), (E5M2, False))
"""Format of a, and fast accumulation, as in a forward and in a backward GEMM."""
SAMPLES = 24
BLOCKWISE_SHAPES = ((128, 128, 512), (256, 128, 1024), (144, 256, 640))
"""640 = 5 blocks, which the layout of 128x128 scales pads to 8; 144 rows are one block and an eighth."""
LIBRARY_NAMES = {
    Granularity.BLOCKWISE_1X128: "BlockWise1x128",
    Granularity.BLOCKWISE_128X128: "BlockWise128x128",
}
"""As in `torch.nn.functional.ScalingType`."""
GROUPS = (((32, 96, 112), 64, 512), ((16, 16, 80, 256), 96, 1040))
"""Cumulative row ends [EPI-6], N, K. The second has an empty group."""
BF16_SHAPES = ((64, 96, 512), (48, 80, 1040), (64, 64, 4096), (16, 64, 16384))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """One GEMM to run; of a sampled one `gemm` holds the sample alone."""

    name: str
    gemm: GemmCase


def plan(seed: int) -> tuple[PlannedCase, ...]:
    """Every case of the tables above, numbered in order; the same seed gives the same operands."""
    draw = _Draw(seed)
    sections = (_scaled, _splitk, _layers, _special, _blockwise, _grouped, _bf16, _epilogues)
    cases = (case for section in sections for case in section(draw))
    return tuple(replace(case, gemm=replace(case.gemm, id=f"{number:03d}")) for number, case in enumerate(cases))


class _Draw:
    """Random operands."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = np.random.default_rng(seed)

    def codes(self, distribution: str, shape: tuple[int, int], fmt: Format) -> np.ndarray:
        """Finite codes; a distribution of values is scaled so that its largest magnitude is the format's."""
        if distribution in CODES:
            return CODES[distribution](shape, fmt, self.random).astype(np.uint8).view(dtype_of(fmt))
        values = VALUES[distribution](shape, self.random)
        return (values * (fmt.max / abs(values).max())).astype(np.float32).astype(dtype_of(fmt))

    def scales(self, *shape: int) -> np.ndarray:
        """Different magnitudes, so that one scale in the place of another cannot hide."""
        return np.exp2(self.random.uniform(-10, -4, shape)).astype(np.float32)

    def bias(self, n: int) -> np.ndarray:
        return self.random.standard_normal(n).astype(ml_dtypes.bfloat16)

    def sample(self, m: int, n: int) -> Sample:
        rows, cols = (np.sort(self.random.permutation(size)[:SAMPLES]).tolist() for size in (m, n))
        return Sample(m=m, n=n, rows=tuple(rows), cols=tuple(cols))


def _by_scale(draw: _Draw, a: np.ndarray, b: np.ndarray) -> Iterator[GemmCase]:
    """The tensorwise and the rowwise GEMM of two operands."""
    yield GemmCase(id="", mode=Mode.TENSORWISE, a=a, b=b, scale_a=draw.scales(1), scale_b=draw.scales(1))
    yield GemmCase(
        id="",
        mode=Mode.ROWWISE,
        a=a,
        b=b,
        scale_a=draw.scales(a.shape[0], 1),
        scale_b=draw.scales(1, b.shape[0]),
        granularity_a=Granularity.ROWWISE,
        granularity_b=Granularity.ROWWISE,
    )


def _options(
    name: str, gemm: GemmCase, *, fast: tuple[bool, ...] = (True, False), outputs: tuple[Format, ...] = OUTPUTS
) -> Iterator[PlannedCase]:
    for use_fast_accum in fast:
        for out_dtype in outputs:
            yield PlannedCase(name=name, gemm=replace(gemm, use_fast_accum=use_fast_accum, out_dtype=out_dtype))


def _scaled(draw: _Draw) -> Iterator[PlannedCase]:
    """Tensorwise and rowwise: formats, shapes and distributions, with and without a bias."""
    table = ((pair, shape) for pair in PAIRS for shape in SHAPES)
    for i, ((a_format, b_format), (m, n, k)) in enumerate(table):
        distribution = DISTRIBUTIONS[(i + draw.seed) % len(DISTRIBUTIONS)]
        a, b = draw.codes(distribution, (m, k), a_format), draw.codes(distribution, (n, k), b_format)
        bias = draw.bias(n)
        for gemm in _by_scale(draw, a, b):
            yield from _options(f"{gemm.mode.value}-{distribution}", gemm)
            # the library has been seen to refuse a bias beside a float32 output
            outputs = (BFLOAT16, FLOAT32) if i == 0 else (BFLOAT16,)
            yield from _options(f"{gemm.mode.value}-bias", replace(gemm, bias=bias), outputs=outputs)
    m, n, k = SHAPES[0]
    a, b = draw.codes("normal", (m, k), REFUSED_PAIR[0]), draw.codes("normal", (n, k), REFUSED_PAIR[1])
    for gemm in _by_scale(draw, a, b):
        yield from _options(f"{gemm.mode.value}-normal", gemm, fast=(True,), outputs=(BFLOAT16,))


def _splitk(draw: _Draw) -> Iterator[PlannedCase]:
    """Small outputs with a long K, which the library may cut into slices [CHAIN-3]; rowwise has not been seen to."""
    for m, n, k in SPLITK_SHAPES:
        a, b = draw.codes("normal", (m, k), E4M3FN), draw.codes("normal", (n, k), E4M3FN)
        for gemm in _by_scale(draw, a, b):
            yield from _options("splitk", gemm, outputs=(BFLOAT16, FLOAT32))
    for m, n, k in SPLITK_SAMPLED_SHAPES:
        for gemm in _sampled(draw, m, n, k, "normal", E4M3FN):
            yield from _options("splitk", gemm, outputs=(BFLOAT16, FLOAT32))


def _layers(draw: _Draw) -> Iterator[PlannedCase]:
    for m, n, k in LAYER_SHAPES:
        for a_format, fast in LAYER_KINDS:
            for gemm in _sampled(draw, m, n, k, "outlier" if fast else "gradient", a_format):
                yield from _options("layer", gemm, fast=(fast,), outputs=(BFLOAT16, FLOAT32))


def _sampled(draw: _Draw, m: int, n: int, k: int, distribution: str, a_format: Format) -> Iterator[GemmCase]:
    sample = draw.sample(m, n)
    a = draw.codes(distribution, (len(sample.rows), k), a_format)
    b = draw.codes("normal", (len(sample.cols), k), E4M3FN)
    for gemm in _by_scale(draw, a, b):
        yield replace(gemm, sample=sample)


def _special(draw: _Draw) -> Iterator[PlannedCase]:
    """Specials among the codes, one kind a row, so that every kind meets every kind; then among the scales."""
    for a_format, b_format in PAIRS:
        a, b = _special_rows(a_format), _special_rows(b_format)
        for gemm in _by_scale(draw, a, b):
            yield from _options("special", gemm)
    a, b = draw.codes("normal", (16, 64), E4M3FN), draw.codes("normal", (16, 64), E4M3FN)
    for gemm in _by_scale(draw, a, b):
        if gemm.mode is Mode.ROWWISE:
            scale_a = gemm.scale_a
            assert scale_a is not None
            scale_a = scale_a.copy()
            scale_a[: len(_SPECIAL_SCALES), 0] = _SPECIAL_SCALES
            yield from _options("special-scales", replace(gemm, scale_a=scale_a))


_SPECIAL_SCALES = (np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 2.0**-149, 2.0**-140, 2.0**-126, 2.0**120, 3e38, -3e38)


def _special_rows(fmt: Format) -> np.ndarray:
    """[16, 64] codes."""
    one, negative = fmt.bias << fmt.fraction_bits, fmt.sign_mask
    inf = fmt.max_code if fmt.infinity_code is None else fmt.infinity_code
    rows = np.full((16, 64), one, np.uint8)
    rows[1] = 0
    rows[2] = negative
    rows[3] = fmt.max_code
    rows[4] = fmt.max_code | negative
    rows[5, 5] = fmt.nan_code
    rows[6, 40] = fmt.nan_code | negative
    rows[7] = 1  # the smallest subnormal
    rows[8, ::2] |= negative  # cancels to zero
    rows[9, 7] = inf
    rows[10, 7] = inf | negative
    rows[11, [7, 50]] = inf, inf | negative  # inf - inf, in different steps
    rows[12, :4] = inf, 0, negative, fmt.max_code
    rows[13, 1:] = 0
    rows[14, ::3] = fmt.max_code
    return rows.view(dtype_of(fmt))


def _blockwise(draw: _Draw) -> Iterator[PlannedCase]:
    """[EPI-5] The three kinds; other formats, fast accumulation and a bias are tried on the first shape."""
    for granularity_a, granularity_b in HOPPER.granularity_pairs:
        if not granularity_a.is_blockwise:
            continue
        kinds = f"{LIBRARY_NAMES[granularity_a]} {LIBRARY_NAMES[granularity_b]}"
        for m, n, k in BLOCKWISE_SHAPES:
            first = (m, n, k) == BLOCKWISE_SHAPES[0]
            for a_format, b_format in PAIRS if first else PAIRS[:1]:
                gemm = GemmCase(
                    id="",
                    mode=Mode.BLOCKWISE,
                    a=draw.codes("outlier", (m, k), a_format),
                    b=draw.codes("normal", (n, k), b_format),
                    scale_a=draw.scales(*granularity_a.scale_shape(m, k)),
                    scale_b=draw.scales(*granularity_b.scale_shape(n, k)).T,
                    granularity_a=granularity_a,
                    granularity_b=granularity_b,
                )
                yield from _options(f"blockwise {kinds}", gemm, fast=(False,))
                if first:
                    with_bias = replace(gemm, bias=draw.bias(n))
                    yield from _options(f"blockwise-bias {kinds}", with_bias, fast=(False,), outputs=(BFLOAT16,))
                if first and a_format is b_format:
                    yield from _options(f"blockwise {kinds}", gemm, fast=(True,), outputs=(BFLOAT16,))


def _grouped(draw: _Draw) -> Iterator[PlannedCase]:
    for ends, n, k in GROUPS:
        for formats in PAIRS if n == GROUPS[0][1] else PAIRS[:1]:
            yield from _options("grouped", _grouped_gemm(draw, ends, n, k, formats, "outlier", draw.scales))


def _grouped_gemm(
    draw: _Draw,
    ends: tuple[int, ...],
    n: int,
    k: int,
    formats: tuple[Format, Format],
    distribution: str,
    scales: Callable[..., np.ndarray],
) -> GemmCase:
    return GemmCase(
        id="",
        mode=Mode.GROUPED_ROWWISE,
        a=draw.codes(distribution, (ends[-1], k), formats[0]),
        b=draw.codes("normal", (len(ends) * n, k), formats[1]).reshape(len(ends), n, k),
        scale_a=scales(ends[-1]),
        scale_b=scales(len(ends), n),
        granularity_a=Granularity.ROWWISE,
        granularity_b=Granularity.ROWWISE,
        offs=np.array(ends, np.int32),
    )


def _bf16(draw: _Draw) -> Iterator[PlannedCase]:
    """One chain and split-K [BF16-1], [BF16-2]."""
    for m, n, k in BF16_SHAPES:
        a, b = (VALUES["blocks"]((rows, k), draw.random).astype(ml_dtypes.bfloat16) for rows in (m, n))
        gemm = GemmCase(id="", mode=Mode.BF16, a=a, b=b)
        yield from _options("bf16", gemm, fast=(False,), outputs=(FLOAT32, BFLOAT16))


def _epilogues(draw: _Draw) -> Iterator[PlannedCase]:
    """Scaled sums of -0, by a negative scale of zeros and by underflow, beside no bias and one of -0 [EPI-1]; grouped
    GEMMs in which a product with one scale alone overflows or underflows [EPI-6].
    """
    a, b = draw.codes("normal", (16, 64), E4M3FN), draw.codes("normal", (16, 64), E4M3FN)
    a[::2] = 0
    for gemm in _by_scale(draw, a, b):
        assert gemm.scale_a is not None
        for factor in (-1, 2.0**-144):
            scaled = replace(gemm, scale_a=gemm.scale_a * np.float32(factor))
            yield from _options("zeros", scaled, fast=(True,))
            bias = np.full(16, -0.0, ml_dtypes.bfloat16)
            yield from _options("zeros-bias", replace(scaled, bias=bias), fast=(True,), outputs=(BFLOAT16,))

    def far_apart(*shape: int) -> np.ndarray:
        exponents = draw.random.uniform(1, 2, shape), draw.random.choice([-147, -100, 0, 100, 122], shape)
        return np.ldexp(*exponents).astype(np.float32)

    gemm = _grouped_gemm(draw, (16, 16, 48), 32, 144, (E4M3FN, E4M3FN), "normal", far_apart)
    yield from _options("grouped-scales", gemm, outputs=(BFLOAT16,))

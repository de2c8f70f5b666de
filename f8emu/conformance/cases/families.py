"""Families of generated GEMMs, each for one way in which a kernel is wrong only now and then. No expected values.

Values of scales and of the bias reach everybody's arithmetic. The others are for kernels alone: sizes, memory and order
of calls matter to code that is written for tiles, and to a compiler each size would be a program.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import NamedTuple

import numpy as np

from f8emu.conformance.cases.distributions import SAMPLED, codes_of, dtype_of, rng, scaled_case, tiled_sample
from f8emu.conformance.cases.gemm import Family, GemmCase, Memory, Placement
from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32, HIGH_PRECISION, HOPPER, Format, Granularity

Shape = tuple[int, int, int]  # M, N, K
Pair = tuple[Granularity, Granularity]  # of the scales of a and b


# Type of the output, and whether there is a bias
OUTPUTS = ((FLOAT32, False), (BFLOAT16, False), (BFLOAT16, True), (FLOAT16, False), (FLOAT16, True))


class Combination(NamedTuple):
    """Granularities, formats and accumulation that every family of GEMMs meets in each combination."""

    granularities: Pair
    formats: tuple[Format, Format]
    use_fast_accum: bool

    @property
    def is_blockwise(self) -> bool:
        return self.granularities[0].is_blockwise

    @property
    def words(self) -> str:
        """`promoted float8_e4m3fn x float8_e4m3fn`."""
        return f"{'fast' if self.use_fast_accum else 'promoted'} {self.formats[0]} x {self.formats[1]}"


DENSE = tuple(
    Combination((granularity, granularity), formats, fast)
    for formats, granularity, fast in product(
        HOPPER.format_pairs, (Granularity.TENSORWISE, Granularity.ROWWISE), (True, False)
    )
)
BLOCK_PAIRS = tuple(pair for pair in HOPPER.granularity_pairs if pair[0].is_blockwise)
BLOCKS = tuple(
    Combination(pair, formats, False) for pair, formats in product(BLOCK_PAIRS, HOPPER.block_scaled_format_pairs)
)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _shapes(text: str) -> tuple[Shape, ...]:
    """`16x48x144 ..`: M, N and K of each."""
    return tuple((m, n, k) for m, n, k in (map(int, shape.split("x")) for shape in text.split()))


# Sizes. Tiles of kernels have 64, 128 or 256 rows or columns, and their launches change at larger powers of two.

# Shapes that every combination meets
ALL_MEET: dict[Family, tuple[Shape, ...]] = {
    Family.ROW: ((1, 48, 144),),
    Family.ROWS: ((300, 16, 48), (4112, 16, 16)),
    Family.COLUMNS: ((5, 416, 48), (3, 8208, 16)),
    Family.TILES: ((272, 272, 16),),
    Family.K: ((16, 16, 16), (16, 16, 528), (16, 16, 8240)),
    Family.DECODE: (),
    Family.PREFILL: ((80, 80, 2064),),
}
ROWS = _integers(
    "0 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 24 31 33 40 48 63 64 65 80 96 100 127 128 129 160 192 224 255 256 257"
    " 320 384 448 511 512 513 576 640 700 768 896 1000 1024 1025 1536 2048 2049 3000 4096 4099 8192 8209 16400"
)
COLUMNS = _integers(
    "1 7 17 31 32 33 63 64 65 80 96 112 127 128 129 144 160 192 224 255 256 257 272 320 384 417 512 513 528 640 768"
    " 1024 1040 1536 2048 2064 4096 4112 8192 16400"
)
LENGTHS = _integers(
    "1 7 17 32 33 48 64 80 96 112 128 144 160 192 240 256 272 320 384 400 512 640 768 1024 1040 1536 2048 2064 3072"
    " 4096 4208 6144 8192 12288 16384 16400 32768"
)
# Shapes that tensorwise and rowwise scales, fast and promoted, meet, each with the next pair of formats; large ones are
# met less often
SOME_MEET: dict[Family, tuple[Shape, ...]] = {
    Family.ROW: _shapes("1x1x16 1x16x8240 1x528x80 1x2064x48 1x65x33 3x48x144 5x272x528"),
    Family.ROWS: (*((m, 48 if m % 2 and m < 4096 else 16, 48) for m in ROWS), (65553, 16, 16), (1040, 16, 1040)),
    Family.COLUMNS: (
        *((33 if i % 2 and n < 4096 else 5, n, 48) for i, n in enumerate(COLUMNS)),
        *((3, 65552, 16), (16, 1040, 1040)),
    ),
    Family.TILES: _shapes(
        "64x64x64 65x129x80 129x257x80 192x320x64 256x256x128 130x144x1040 260x272x272 130x144x528 131x160x272"
        " 300x416x48 513x528x32 129x8576x256"
    ),
    Family.K: tuple((16, 16, k) for k in (*LENGTHS, 65552)),
    Family.DECODE: _shapes("1x4096x4096 16x4096x4096 1x528x8208 48x528x1040"),
    Family.PREFILL: _shapes("512x1024x1024 2064x2064x16 2064x16x2064 144x144x4112 528x48x1040"),
}
# Shapes that every pair of block scales meets
BLOCK_SHAPES: dict[Family, tuple[Shape, ...]] = {
    Family.ROW: ((1, 48, 256), (1, 272, 144), (3, 16, 1040)),
    Family.ROWS: tuple((m, 16, 128) for m in (17, 127, 129, 255, 257, 385, 520, 1041, 4112)),
    Family.COLUMNS: tuple((5, n, 128) for n in (1, 17, 129, 255, 257, 417, 1040, 4112)),
    Family.TILES: ((129, 257, 144), (300, 416, 256)),
    Family.K: tuple((16, 16, k) for k in (16, 128, 144, 255, 384, 640, 1040, 2048, 4096, 8320, 16384)),
    Family.DECODE: ((1, 1040, 1040), (16, 2048, 1152)),
    Family.PREFILL: ((144, 144, 2064), (1040, 272, 128), (512, 256, 512), (1152, 16, 1152)),
}
# Products above which outputs are judged on samples, a shape is met with fewer options, and by one GEMM alone
SAMPLED_ABOVE, FEW_ABOVE, ONE_ABOVE = 1 << 23, 1 << 24, 1 << 25
# K that a library may split: such a GEMM is asked twice, and both outputs must be those of one S
ASKED_TWICE = 1024

# Values

SUBNORMAL = 1.3 * 2.0**-130
HUGE = 1.7 * 2.0**120
# Tensorwise scales of a and b. What is very small or large is met by its opposite, so that a result is of any size.
SCALES: tuple[tuple[float, float], ...] = (
    *((0.0, 1.5), (1.5, 0.0), (-0.0, 1.5), (1.5, -0.0), (-1.5, 0.75), (0.75, -1.5), (-1.5, -0.75)),
    *((SUBNORMAL, 2.0**110), (2.0**110, SUBNORMAL), (SUBNORMAL, 1.0), (1.0, SUBNORMAL)),
    *((2.0**-149, 2.0**120), (2.0**120, 2.0**-149), (HUGE, 1 / HUGE), (1 / HUGE, HUGE), (HUGE, 1.0), (1.0, HUGE)),
    *((2.0**80, 2.0**80), (2.0**-80, 2.0**-80)),
    *((np.inf, 1.0), (1.0, np.inf), (-np.inf, 1.0), (1.0, -np.inf), (np.inf, 0.0), (0.0, np.inf)),
    *((np.nan, 1.0), (1.0, np.nan)),
)
_SMALL = (0.0, -0.0, -1.5, 1.0, SUBNORMAL, -SUBNORMAL, 2.0**-149)
_LARGE = (HUGE, -HUGE, 1 / HUGE, 2.0**110, np.inf, -np.inf, np.nan)
# Scales of rows and columns, in another order: each row meets each column, so each value meets each value
VECTOR_SCALES = (*_SMALL, *_LARGE, 0.75, -(2.0**-60))
BIASES = (-0.0, 0.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -0.0)  # and subnormals, and the largest of the type
# The shapes of the distributions: for a compiler another shape would be another program
VALUE_SHAPES: dict[tuple[Format, Format], Shape] = {
    HOPPER.format_pairs[0]: (16, 48, 544),
    HOPPER.format_pairs[1]: (48, 16, 176),
    HOPPER.format_pairs[2]: (16, 32, 80),
}


def value_cases() -> Iterator[GemmCase]:
    """Scales and biases of every kind: every one with every combination."""
    for number, (combination, values) in enumerate(product(DENSE, SCALES)):
        if combination.granularities[0] is Granularity.TENSORWISE:
            yield _scaled_by(values, number, combination, VALUE_SHAPES[combination.formats])
    for combination in DENSE:
        yield from _values_in(combination, VALUE_SHAPES[combination.formats])


def _scaled_by(values: tuple[float, float], number: int | str, combination: Combination, shape: Shape) -> GemmCase:
    case = _drawn(Family.SCALES, number, combination, shape, zeros=True, with_bias=False)
    scale_a, scale_b = (np.full((1, 1), value, np.float32) for value in values)
    return replace(case, id=f"{case.id} {values[0]:.3g} and {values[1]:.3g}", scale_a=scale_a, scale_b=scale_b)


def _values_in(combination: Combination, shape: Shape) -> Iterator[GemmCase]:
    """Scales of rows and columns, and biases, of every kind in one GEMM of each output type."""
    m, n, _ = shape
    for turn, out_dtype in enumerate(HIGH_PRECISION):
        if combination.granularities[0] is Granularity.ROWWISE:
            name = f"{m} {combination.words} {out_dtype}"
            case = _drawn(Family.SCALES, name, combination, shape, out_dtype=out_dtype, zeros=True, with_bias=False)
            values = np.array(VECTOR_SCALES, np.float32)
            scale_a, scale_b = np.resize(values, m), np.resize(np.roll(values, turn), n)
            yield replace(case, scale_a=scale_a[:, None], scale_b=scale_b[None])
    for out_dtype, sign in product((BFLOAT16, FLOAT16), (1, -1)):
        name = f"{m} {combination.words} {out_dtype} {sign}"
        case = _drawn(Family.BIAS, name, combination, shape, out_dtype=out_dtype, zeros=True)
        least = 2.0 ** (out_dtype.min_exponent - out_dtype.fraction_bits)
        values = np.array([*BIASES, 3 * least, -least, out_dtype.max, -out_dtype.max], np.float32)
        # -0 and subnormal biases show where the scaled sum is a zero with the scale's sign, or as small as they are.
        rows = m if combination.granularities[0] is Granularity.ROWWISE else 1
        factors = np.where(np.arange(rows) % 2 == 0, sign, sign * 1e-9)
        bias = np.resize(values, n).astype(dtype_of(out_dtype))
        yield replace(case, bias=bias).scaled(factors[:, None])


# Families for kernels alone


def size_cases(combinations: Iterable[Combination], most: float = math.inf) -> Iterator[GemmCase]:
    """One row; rows and columns that end a tile, cross it or are odd; K from a step to what a library splits.

    `most` is the number of products of the largest GEMM.
    """
    blocks, dense = ([c for c in combinations if c.is_blockwise is kind] for kind in (True, False))
    kinds = dict.fromkeys((c.granularities, c.use_fast_accum) for c in dense)
    groups = [[c for c in dense if (c.granularities, c.use_fast_accum) == kind] for kind in kinds]
    for family in ALL_MEET:
        types = HIGH_PRECISION if family in (Family.ROW, Family.TILES) else (None,)
        plan = [*product(ALL_MEET[family], dense, types), *product(BLOCK_SHAPES[family], blocks, (None,))]
        for turn, shape in enumerate(SOME_MEET[family]):
            if math.prod(shape) > ONE_ABOVE:
                first = turn % max(len(groups), 1)
                plan += [(shape, c, BFLOAT16) for c in (*dense[first:], *dense[:first])]
                continue
            met = [(shape, group[(turn + i) % len(group)], None) for i, group in enumerate(groups)]
            plan += met[turn % 2 :: 2] if math.prod(shape) >= FEW_ABOVE else met
        for number, (shape, combination, out_dtype) in enumerate(plan):
            if (size := math.prod(shape)) > most:
                continue
            case = _drawn(family, number, combination, shape, out_dtype=out_dtype)
            if size > ONE_ABOVE:
                case = replace(case, bias=None, one_of=f"{family.value} {shape}")
            elif size < FEW_ABOVE and shape[2] >= ASKED_TWICE:
                small = _drawn(family, f"{number} between", combination, (32, 16, 128), out_dtype=case.out_dtype)
                case = replace(case, between=(replace(small, bias=None),))
            yield case


def code_cases(combinations: Iterable[Combination]) -> Iterator[GemmCase]:
    """Every code of a times every code of b, at one place along K; and every code in the corners of the operands."""
    for number, combination in enumerate(combinations):
        k = 128 if combination.is_blockwise else (16, 48)[number // 2 % 2]
        case = _drawn(Family.EVERY_CODE, number, combination, (256, 256, k), out_dtype=FLOAT32)
        r = rng("every code", number)
        for operand in (case.a, case.b):
            codes_of(operand)[:] = 0
            codes_of(operand)[:, (0, -1)[number % 2]] = r.permutation(256)
        yield case
        zeros = _drawn(Family.EVERY_CODE, f"{number} zeros", combination, (80, 144, k), out_dtype=BFLOAT16)
        codes_of(zeros.a if number % 2 else zeros.b)[:] = 0x80
        yield zeros.scaled(-1 if number % 3 else 1)
        # 128 of K, and so whole steps, are zeros on one side, with NaN on the other.
        for side in "ab":
            case = _drawn(Family.EVERY_CODE, f"{number} idle {side}", combination, (16, 48, 384), out_dtype=FLOAT32)
            idle, full = (case.a, case.b) if side == "a" else (case.b, case.a)
            codes_of(idle)[:, 128:256] = 0
            full[::3, 200] = np.nan
            yield case
    corners = list(product((0, -1), repeat=2))
    by_formats = {first.formats: [c for c in combinations if c.formats == first.formats] for first in combinations}
    for formats, alike in by_formats.items():
        r = rng("corners", formats[0].name, formats[1].name)
        drawn = [r.permutation(256) for _ in range(2 * len(corners))]
        for number, (combination, codes) in enumerate(zip(cycle(alike), np.array(drawn).T, strict=False)):
            shape = (16, 16, 128 if combination.is_blockwise else 16)
            words = f"corners {formats[0]} x {formats[1]} {number}"
            case = _drawn(Family.EVERY_CODE, words, combination, shape)
            for (operand, corner), code in zip(product((case.a, case.b), corners), codes, strict=True):
                codes_of(operand)[corner] = code
            yield case


PADDED_SHAPES: tuple[Shape, ...] = ((48, 80, 144), (144, 272, 48), (1, 48, 144), (5, 80, 528), (272, 48, 48))
PADDINGS = ({"a": 16}, {"b": 1040}, {"a": 1040, "b": 48})  # the longest is that of a slice of several matrices in one
# Scales and a bias begin at any element.
OFFSETS = (
    *(dict.fromkeys(sides, n) for n in (16, 32, 64, 128) for sides in ("a", "b", "ab")),
    *({"scale_a": 4}, {"scale_b": 4}, {"bias": 2}, {"scale_a": 8, "scale_b": 8, "bias": 8}),
)


def memory_cases(combinations: Iterable[Combination], padded: Collection[str]) -> Iterator[GemmCase]:
    """Rows that are apart, in the operands that may be so; what begins between boundaries; an array in two roles."""
    combinations = tuple(combinations)
    for number, (shape, combination, apart) in enumerate(product(PADDED_SHAPES, combinations, PADDINGS)):
        if paddings := {name: n for name, n in apart.items() if name in padded}:
            case = _drawn(Family.STRIDES, number, combination, shape)
            yield replace(case, placement=Placement(paddings=paddings))
    for number, (offsets, combination) in enumerate(product(OFFSETS, combinations)):
        shape = (144, 272, 48) if number % 5 == 0 else (48, 80, 144)
        with_bias = not combination.is_blockwise if "bias" in offsets else None
        out_dtype = BFLOAT16 if with_bias else None
        case = _drawn(Family.ALIGNMENT, number, combination, shape, out_dtype=out_dtype, with_bias=with_bias)
        yield replace(case, placement=Placement(offsets=offsets))
    for number, (combination, shape) in enumerate(product(combinations, ((48, 48, 144), (144, 144, 272)))):
        turned = _drawn(Family.STRIDES, f"turned {number}", combination, (1, 80, shape[2]))
        yield replace(turned, placement=Placement(is_turned=True))
        if combination.formats[0] == combination.formats[1]:
            case = _drawn(Family.ALIASES, number, combination, shape)
            of_both = case.granularity_a is case.granularity_b
            scale_b = case.scale_a.T.copy() if of_both and case.scale_a is not None else case.scale_b
            yield replace(case, b=case.a.copy(), scale_b=scale_b, placement=Placement(is_shared=True))


def large_value_cases(combinations: Iterable[Combination]) -> Iterator[GemmCase]:
    """Values of scales and of the bias beyond the first tiles."""
    for number, combination in enumerate(combinations):
        if not combination.is_blockwise:
            yield from _values_in(combination, (160, 272, 48))
        if combination.granularities[0] is Granularity.TENSORWISE:
            for turn, values in enumerate(SCALES):
                yield _scaled_by(values, f"of tiles {number}.{turn}", combination, (144, 144, 16))


def turn_cases(combinations: Iterable[Combination]) -> Iterator[GemmCase]:
    """A GEMM, others, and the first again: other codes, other scales and another bias, another size, and many.

    And in the same memory, changed in place: other codes and scales, other scales.
    """
    for number, (combination, kind) in enumerate(product(combinations, range(4))):
        with_bias = not combination.is_blockwise
        out_dtype = (BFLOAT16, FLOAT16)[number % 2]
        case, other, larger = (
            _drawn(Family.TURNS, f"{number}{word}", combination, shape, out_dtype=out_dtype, with_bias=with_bias)
            for word, shape in (("", (16, 48, 144)), (" other", (16, 48, 144)), (" larger", (80, 64, 272)))
        )
        scaled = replace(case, id=f"{case.id} scaled", scale_a=other.scale_a, scale_b=other.scale_b, bias=other.bias)
        yield replace(case, between=((other,), (scaled,), (larger,), 3 * (other, scaled, larger))[kind])
        if kind < 2:
            for memory in (Memory.OBJECTS, Memory.ADDRESSES):
                again, changed = (replace(call, memory=memory) for call in (case, (other, scaled)[kind]))
                yield replace(again, id=f"{case.id} in {memory.value}", between=(changed,))


def _drawn(
    family: Family,
    number: int | str,
    combination: Combination,
    shape: Shape,
    *,
    out_dtype: Format | None = None,
    zeros: bool = False,
    with_bias: bool | None = None,
) -> GemmCase:
    """A GEMM of a family, of any output type and with a bias or without it where neither is asked for.

    Those go in turn with a number, so that each meets each threshold. With `zeros` rows of a are +0 and -0: their
    accumulators are +0. Otherwise dense scales have any sign.
    """
    pair, formats, fast = combination
    name = f"{family.value} {number} {pair[0].value}" + ("" if pair[0] is pair[1] else f" x {pair[1].value}")
    r = rng(name)
    turn = number if isinstance(number, int) else int(r.integers(len(OUTPUTS)))
    next_dtype, next_bias = OUTPUTS[turn % len(OUTPUTS)]
    if out_dtype is None:
        out_dtype = next_dtype
    else:
        next_bias = bool(r.integers(2))
    has_any = out_dtype != FLOAT32 and not pair[0].is_blockwise  # the library has no bias otherwise
    sample = None
    if math.prod(shape) > SAMPLED_ABOVE and max(shape[:2]) > SAMPLED:
        sample = tiled_sample(*shape[:2], r, is_run=True)
        shape = len(sample.rows), len(sample.cols), shape[2]
    case = scaled_case(
        name,
        pair,
        formats,
        shape,
        "bits",
        with_bias=has_any and next_bias if with_bias is None else with_bias,
        out_dtype=out_dtype,
        sample=sample,
        use_fast_accum=fast,
    )
    if zeros:
        codes_of(case.a)[3::8], codes_of(case.a)[4::8] = 0x00, 0x80
    elif not pair[0].is_blockwise:
        shapes = pair[0].scale_shape(*case.a.shape), pair[1].scale_shape(*case.b.shape)[::-1]
        case = case.scaled(*(r.choice(np.array([-1, 1], np.float32), factors) for factors in shapes))
    return replace(case, family=family)

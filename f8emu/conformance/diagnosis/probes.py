"""Small GEMMs that tell rules apart: each shows one concern of a kernel, also through a 16-bit output.

- What an addition loses shows where the second half of K takes back the first: what is left is error alone.
- The order of scales shows in float32; in 16 bits where one order lands on a tie and another beside it.
- An FMA with the bias shows where the bias takes back the scaled accumulator exactly.

Probes of adding have scales of one, probes of scales have accumulators of at most 14 bits, so that two faults of one
kernel part too. Sums of the long ones are exact in float32: an unknown order of adding makes no difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import draw, draw_codes, dtype_of, rng
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.microscaled import as_scales, in_mx_groups, near
from f8emu.conformance.diagnosis.arguments import Part
from f8emu.spec import (
    BFLOAT16,
    BLACKWELL_TCGEN05,
    E4M3FN,
    E5M2,
    FLOAT16,
    FLOAT32,
    HOPPER,
    MX_BLOCK,
    Format,
    Granularity,
)
from f8emu.spec.gemm_call import GroupKind
from f8emu.spec.scaling import BLOCK

SIZE = 16
"""Rows and columns of a probe without block scales."""
MANY = 288
"""Rows or columns of several tiles, of 256 too, the last one not full."""
# One promotion; a tail of promotion and step; many promotions, but too short for a library to split [PLAN-2]. Rounded
# down to a multiple of 32, 64, 128 and 256, 240 is another number each time, and 496 of 512 too. Slices of 2304 in
# multiples of 128 are 1152, 768, 640 and 384 long, none a promotion that the suite knows; those of 3584 in multiples of
# 512, as beside 128x128 scales, are 2048, 1536, 1024 and 512 long [CHAIN-3].
SHORT_K, MIDDLE_K, LONG_K, _TAIL_OF_BLOCKS, _LONG_BLOCKS = 128, 240, 2304, 496, 3584
_COLUMNS = np.array([0, 1, 2, 3, 63, 127, 128, 129, 130, 131, 134, 135])
_NARROW, _ALL_TYPES = (BFLOAT16, FLOAT16), (FLOAT32, BFLOAT16, FLOAT16)
_ONE = np.ones((1, 1), np.float32)

Pair = tuple[np.ndarray, np.ndarray]
"""Something of a and of b; scales are [rows, 1 or blocks of K], also those of b."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeGemm:
    """One GEMM, in the output types that show its point; of several the first that the subject offers, or all."""

    case: GemmCase
    out_dtypes: tuple[Format, ...]
    needs_all: bool = False
    at: Part | None = None  # the outputs that are compared; None: all

    def cases(self) -> Iterator[GemmCase]:
        """The GEMM in each of its output types."""
        for fmt in self.out_dtypes:
            yield in_type(replace(self.case, id=f"{self.case.id} -> {fmt}"), fmt)


def in_type(case: GemmCase, fmt: Format) -> GemmCase:
    """The same GEMM with another output type, which its bias shares."""
    return replace(case, out_dtype=fmt, bias=None if case.bias is None else case.bias.astype(dtype_of(fmt)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmKind:
    """A family of GEMMs that a kernel may treat in its own way."""

    pair: tuple[Granularity, Granularity]
    use_fast_accum: bool
    with_bias: bool
    is_grouped: bool = False  # groups of rows [EPI-6]

    @property
    def is_blockwise(self) -> bool:
        return self.pair[0].is_blockwise

    @property
    def is_microscaled(self) -> bool:
        return self.pair[0].is_microscaled

    @property
    def name(self) -> str:
        chain, bias = "fast" if self.use_fast_accum else "promoted", " with bias" if self.with_bias else ""
        grouped = "grouped " if self.is_grouped else ""
        if self.is_microscaled:
            return f"{grouped}mxfp8{bias}"
        if self.is_blockwise:
            return f"{self.pair[0].value} x {self.pair[1].value}"
        return f"{grouped}{self.pair[0].value} {chain}{bias}"

    def gemm(self, name: str, operands: Pair, scales: Pair = (_ONE, _ONE), bias: np.ndarray | None = None) -> GemmCase:
        """A GEMM of this kind, to float32: scales are repeated to their shape, a bias is zero unless given."""
        (a, b), k = operands, operands[0].shape[1]
        scale_a, scale_b = (
            np.broadcast_to(scale, side.scale_shape(len(x), k)).astype(dtype_of(side.scale_format))
            for scale, side, x in zip(scales, self.pair, operands, strict=True)
        )
        zeros = np.zeros(len(b), np.float32)
        case = GemmCase(
            id=name,
            mode=Mode.MX if self.is_microscaled else Mode.BLOCKWISE if self.is_blockwise else Mode(self.pair[0].value),
            chip=BLACKWELL_TCGEN05 if self.is_microscaled else HOPPER,
            a=a,
            b=b,
            scale_a=scale_a,
            scale_b=scale_b.T,
            granularity_a=self.pair[0],
            granularity_b=self.pair[1],
            bias=(zeros if bias is None else bias) if self.with_bias else None,
            out_dtype=FLOAT32,
            use_fast_accum=self.use_fast_accum,
        )
        return case if not self.is_grouped else in_groups(case, b[None], scale_b[None, :, 0], [len(a)])

    def probe(
        self,
        name: str,
        operands: Pair,
        scales: Pair = (_ONE, _ONE),
        bias: np.ndarray | None = None,
        *,
        types: tuple[Format, ...] = (),
        needs_all: bool = False,
        at: Part | None = None,
    ) -> ProbeGemm:
        """The same as a probe; of long ones and of block scales 8 rows are compared."""
        if at is None and self.is_blockwise:  # 12 columns, from two blocks of columns
            at = np.arange(8), _COLUMNS[_COLUMNS < len(operands[1])]
        elif at is None and operands[0].shape[1] == LONG_K:
            at = np.arange(8), np.arange(8, 16)
        types = types or (_NARROW if self.with_bias else _ALL_TYPES)
        case = self.gemm(name, operands, scales, bias)
        return ProbeGemm(case=case, out_dtypes=types, needs_all=needs_all, at=at)


def kind_of(case: GemmCase) -> GemmKind | None:
    """The kind of a GEMM; None of one in bfloat16, or with groups of another dimension than the rows."""
    if case.mode is Mode.BF16 or case.group_kind not in (None, GroupKind.ROWS):
        return None
    is_grouped = case.group_kind is not None
    return GemmKind(
        pair=_ROWWISE if case.mode is Mode.GROUPED_ROWWISE else (case.granularity_a, case.granularity_b),
        use_fast_accum=case.use_fast_accum and not case.granularity_a.is_blockwise,
        with_bias=case.bias is not None,
        is_grouped=is_grouped,
    )


KINDS: tuple[GemmKind, ...] = tuple(
    GemmKind(pair=pair, use_fast_accum=fast, with_bias=with_bias)
    for pair in HOPPER.granularity_pairs
    for with_bias, fast in product((False, True), (True, False))
    if not (pair[0].is_blockwise and (fast or with_bias))
)
"""The kinds that are diagnosed apart, in this order."""
_ROWWISE = Granularity.ROWWISE, Granularity.ROWWISE
GROUPED = tuple(
    GemmKind(pair=_ROWWISE, use_fast_accum=fast, with_bias=False, is_grouped=True) for fast in (True, False)
)
"""The kinds of grouped kernels, which `fit` does not measure."""
_MX = Granularity.BLOCKWISE_1X32, Granularity.BLOCKWISE_1X32
MX_KINDS = tuple(
    GemmKind(pair=_MX, use_fast_accum=False, with_bias=with_bias, is_grouped=is_grouped)
    for with_bias, is_grouped in ((False, False), (True, False), (False, True))
)
"""The kinds of kernels with E8M0 scales, which `fit` does not measure."""


@cache
def probes(kind: GemmKind, *, takes_any_size: bool, group_multiple: int = 1) -> tuple[ProbeGemm, ...]:
    """The probes of one kind of GEMM. `takes_any_size`: block scales on fewer rows and columns than 128.

    The same arrays each time: `Memory` knows them again. Of a grouped kind those of the dense one, each as one group,
    and what several groups show, whose sizes are raised to `group_multiple`.
    """
    if kind.is_microscaled:
        return tuple(_of_mx_groups(group_multiple) if kind.is_grouped else _of_microscaled(kind))
    if kind.is_blockwise:
        return tuple(_of_blocks(kind, takes_any_size))
    if kind.is_grouped:
        alone = (probe for probe in _dense(kind) if len(probe.case.a) % group_multiple == 0)
        return (*_of_groups(kind, group_multiple), *alone)
    return tuple(_dense(kind))


def _dense(kind: GemmKind) -> Iterator[ProbeGemm]:
    probe, granularity, of_adding = kind.probe, kind.pair[0], _operands_of_adding()
    drawn, middle = _scales(granularity), of_adding["middle"]
    row, column = drawn
    integers = known(rng("known", granularity.value).integers(0, 1 << 14, SIZE))

    # 1. Adding, scales of one.
    for name, operands in of_adding.items():
        yield probe(name, operands)
    for fmt in _NARROW:
        yield probe("one step that ends on a tie", tie_of_a_step(fmt, SIZE), types=(fmt,))

    # 2. Scales of accumulators that are exact under any rule of adding.
    yield probe("scales", integers, drawn, needs_all=True)
    yield probe("scales and sums", middle, drawn, needs_all=True)
    for fmt in _NARROW:
        for number, (accumulators, scales) in enumerate(_straddling(granularity, fmt)):
            yield probe(f"scales beside a tie {number}", known(accumulators), scales, types=(fmt,))
    # Exact in any order: a library may have another for one row.
    powers_of_two = np.exp2(np.floor(np.log2(row[:1]))), np.exp2(np.floor(np.log2(column)))
    yield probe("one row", (integers[0][:1], integers[1]), powers_of_two)
    if granularity is Granularity.ROWWISE:
        yield probe("equal scales", integers, (row[:1], column[:1]), needs_all=True)
        yield probe("equal scales of rows", integers, (row[:1], column))

    # 3. Rows and columns of several tiles.
    many, few, every = known(4099 + 17 * np.arange(MANY)), np.array([0, SIZE - 1]), np.arange(MANY)
    of_rows, of_columns = map(alternating, _scales(granularity, MANY))
    biases = draw("normal", (1, MANY), FLOAT32, "probe many")[0] * np.float32(4096)
    yield probe("many rows", (many[0], many[1][:SIZE]), (of_rows, _ONE), at=(every, few))
    yield probe("many columns", (many[1][:SIZE], many[0]), (_ONE, of_columns), biases, at=(few, every))

    # 4. The output type: ties, zeros, both ends of the range.
    yield probe("ties of the output", known(np.arange(SIZE) * 34 + 4099), types=_NARROW, needs_all=True)
    # Zeros that one scale makes -0; a bias of -0 keeps that sign.
    zeros, minus_zeros = known(np.arange(SIZE) % 2), np.full(SIZE, -0.0, np.float32)
    yield probe("zeros", zeros, (-_ONE, _ONE), minus_zeros)
    if granularity is Granularity.ROWWISE:  # where no two scales are equal
        yield probe("zeros under unequal scales", zeros, (-row, column), minus_zeros)
    for_subnormals = _NARROW if kind.with_bias else (FLOAT32, BFLOAT16)
    yield probe("subnormal results", integers, (_power(-70), _power(-70)), types=for_subnormals)
    yield probe("overflow to infinity", integers, (_power(8), _power(-4)), types=(FLOAT16,))
    largest = known(np.full(SIZE, 16383))
    yield probe("overflow of bfloat16 alone", largest, (_power(57), _power(57)), types=(BFLOAT16,))

    # 5. The bias.
    if kind.with_bias:
        bias = draw("normal", (1, SIZE), FLOAT32, "probe")[0] * np.float32(4096)
        yield probe("bias", middle, drawn, bias, needs_all=True)
        third, powers = np.full((1, 1), 1 / 3, np.float32), np.exp2(np.arange(SIZE) % 8).astype(np.float32)
        for name, scales in (("row", (third, _ONE)), ("column", (_ONE, third))):
            yield probe(f"bias that takes back, {name} scale", known(3 * powers.astype(int)), scales, -powers)


def in_groups(case: GemmCase, b: np.ndarray, scale_b: np.ndarray, ends: Sequence[int]) -> GemmCase:
    """A rowwise GEMM with the `b` [G, N, K] and `scale_b` [G, N] of groups of rows."""
    assert case.scale_a is not None
    offs, scale_a = np.array(ends, np.int32), case.scale_a[:, 0]
    rules = {"mode": Mode.GROUPED_ROWWISE, **dict.fromkeys(("granularity_a", "granularity_b"), Granularity.TENSORWISE)}
    return replace(case, **rules, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs)


def _of_groups(kind: GemmKind, multiple: int) -> Iterator[ProbeGemm]:
    """Groups of many sizes, two of them empty, whose codes and scales differ; their ends are in no tile's place."""
    for name, sizes in (("sizes of groups", (23, 0, 9, 130, 1, 0, 71, 38)), ("equal groups", (45,) * 6)):
        ends = np.cumsum([-(-size // multiple) * multiple for size in sizes])
        m, groups = int(ends[-1]), len(sizes)
        r = rng("probe groups", name)
        a, b = known(r.integers(1 << 12, 1 << 14, m))[0], known(r.integers(1 << 12, 1 << 14, groups * SIZE))[1]
        b = b.copy()
        b[:, 3] = codes_of_values(r.integers(1, 15, len(b)))  # known ones are the same for every column
        (of_a, of_b) = _scales(kind.pair[0], m)[0], _scales(kind.pair[0], groups * SIZE)[1]
        case = replace(kind, is_grouped=False).gemm(name, (a, b), (of_a, of_b))
        case = in_groups(case, b.reshape(groups, SIZE, -1), of_b.reshape(groups, SIZE), ends.tolist())
        yield ProbeGemm(case=case, out_dtypes=_ALL_TYPES)


def _of_blocks(kind: GemmKind, takes_any_size: bool) -> Iterator[ProbeGemm]:
    probe, pair = kind.probe, kind.pair
    m, n = (8, 136) if takes_any_size else (128, 256)

    def codes(distribution: str, k: int) -> Pair:
        return _drawn(distribution, (m, n), k, "probe blocks ")

    def scales(k: int, exponents: tuple[int, int] = (-9, 5), rows: tuple[int, int] = (m, n)) -> Pair:
        r = rng("probe blocks", pair[0].value, pair[1].value, k)
        shapes = [side.scale_shape(count, k) for side, count in zip(pair, rows, strict=True)]
        a, b = ((r.uniform(1, 2, s) * np.exp2(r.integers(*exponents, s))).astype(np.float32) for s in shapes)
        return a, b

    # 1. Adding within a block, scales of one.
    yield probe("one chain", taken_back(*codes("bits", 128)))
    yield probe("one chain of normal codes", taken_back(*codes("normal", 128)))
    yield probe("one step", only(codes("bits", 128), slice(8)))
    for fmt in _NARROW:
        a, b = tie_of_a_step(fmt, n)
        yield probe("one step that ends on a tie", (a[:m], b), types=(fmt,))
    yield probe("specials", codes("specials", 128))
    # A square output, so that operands and outputs can be swapped; a's rows have scales of their own, powers of two.
    powers = np.exp2(np.arange(pair[0].scale_shape(BLOCK, SHORT_K)[0]) % 3)[:, None].astype(np.float32)
    square = known(np.arange(BLOCK) % 64 * 34 + 4099)
    yield probe("ties of the output", square, (powers, _ONE), types=_NARROW, needs_all=True)

    # 2. Scales: each block has one product, and the second block takes back the first but for rounding.
    a, b = only(codes("normal", 512), slice(None, None, 128))
    yield probe("scales", (a, b), scales(512))
    a, b = a.copy(), b.copy()
    a[:, 128], b[:, 128] = a[:, 0], negative(b)[:, 0]
    for number in range(2):
        near_a, near_b = scales(512)
        factor = np.float32(1.0 + 2.0**-number / 3)
        near_a[:, 1], near_b[:, 1] = near_a[:, 0] * factor, near_b[:, 0] / factor
        yield probe(f"scales that take back {number}", only((a, b), slice(256)), (near_a, near_b))

    # 3. All of it, and rows and columns of several tiles.
    yield probe("scales and sums", codes("normal", 512), scales(512), needs_all=True)
    yield probe("tail of K", codes("bits", _TAIL_OF_BLOCKS), scales(_TAIL_OF_BLOCKS))
    many = np.arange(MANY if takes_any_size else 3 * BLOCK)
    few, (long_side, short_side) = np.arange(0, 8, 7), known(4099 + 17 * many)
    of_rows, of_columns = (alternating(s[:, :1].copy()) for s in scales(_TAIL_OF_BLOCKS, rows=(len(many), len(many))))
    of_few = scales(SHORT_K, rows=(m, m))
    yield probe("many rows", (long_side, short_side[:m]), (of_rows, of_few[1]), at=(many, few))
    yield probe("many columns", (short_side[:m], long_side), (of_few[0], of_columns), at=(few, many))

    # 4. The output type.
    yield probe("subnormal results", codes("normal", 128), scales(128, (-73, -71)))
    yield probe("overflow to infinity", codes("normal", 128), scales(128, (2, 3)), needs_all=True)
    a, b = known(np.full(n, 16383))  # times 2^114: finite in float32 alone
    yield probe("overflow of bfloat16 alone", (a[:m], b), (_power(57), _power(57)), types=(BFLOAT16,))
    # Partials of 2^-12 or 0, times scales whose product, -2^-144, is a number of float32: -0.
    a, b = np.zeros((m, 128), np.float32), np.zeros((n, 128), np.float32)
    a[:, 0], b[::2, 0] = 2.0**-6, 2.0**-6
    yield probe("zeros", (codes_of_values(a), codes_of_values(b)), (-_power(-72), _power(-72)))

    # 5. Totals of blocks and slices that take back each other.
    half = _LONG_BLOCKS // 256
    order = rng("blocks").permutation(half)
    blocks = np.concatenate([np.arange(half), order])
    scale_a, scale_b = scales(_LONG_BLOCKS, (-2, 2))
    operands = taken_back(*codes("normal", _LONG_BLOCKS), order=(order[:, None] * BLOCK + np.arange(BLOCK)).ravel())
    yield probe("long", operands, (scale_a[:, blocks], scale_b[:, blocks]))


@cache
def _operands_of_adding() -> dict[str, Pair]:
    """Codes of the probes of adding; the same arrays for every kind, so that accumulators are computed once."""

    def drawn(distribution: str, k: int, formats: tuple[Format, Format] = (E4M3FN, E4M3FN)) -> Pair:
        return _drawn(distribution, (SIZE, SIZE), k, f"probe {k}", formats)

    def integers(lowest: int, binades: int) -> np.ndarray:
        return codes_of_values(r.integers(lowest, 16, (SIZE, LONG_K)) * 2 ** r.integers(0, binades, (SIZE, LONG_K)))

    # 1. One sign; small codes at the end of K, since a later step would cut what the last one kept.
    one_sign = draw_codes("same", (2 * SIZE, SHORT_K), E4M3FN, "probe one sign")
    small = draw_codes("bits", (2 * SIZE, 12), E4M3FN, "probe one sign")
    one_sign.view(np.uint8)[:, -12:] = small.view(np.uint8) & 0x1F
    one_sign.view(np.uint8)[:, :-32] = 0
    # 2. One product every 128 of K, over many binades, then the same in another order with the other sign: the float32
    # sums of promoted partials are not exact, so that their order shows.
    chunks, r = LONG_K // SHORT_K // 2, rng("probe", "many magnitudes")
    a, b = np.zeros((2, SIZE, LONG_K // 2), np.float32)
    for x in (a, b):
        x[:, ::SHORT_K] = r.integers(8, 16, (SIZE, chunks)) * np.exp2(r.integers(-9, 5, (SIZE, chunks)))
    order = np.arange(LONG_K // 2).reshape(chunks, SHORT_K)[r.permutation(chunks)].ravel()
    many_magnitudes = taken_back(codes_of_values(a), codes_of_values(b), order=order)
    r = rng("probe", "long")
    return {
        "one step": only(drawn("bits", SHORT_K), slice(8)),
        "one step of one sign": (one_sign[:SIZE], one_sign[SIZE:]),
        "one chain": taken_back(*drawn("bits", SHORT_K)),
        "middle": drawn("normal", MIDDLE_K),
        "every code": drawn("bits", MIDDLE_K),
        "long": taken_back(integers(1, 3), integers(1, 3)),
        "long, one binade": taken_back(integers(8, 2), integers(8, 2)),
        "specials": drawn("specials", MIDDLE_K),
        "mixed formats": drawn("bits", MIDDLE_K, (E5M2, E4M3FN)),
        "mixed formats, b E5M2": drawn("bits", MIDDLE_K, (E4M3FN, E5M2)),
        "many magnitudes": many_magnitudes,
    }


@cache
def _scales(granularity: Granularity, rows: int = SIZE) -> Pair:
    """Scales with any significand; rows and columns differ in magnitude."""
    size = 1 if granularity is Granularity.TENSORWISE else rows
    r = rng("probe scales", granularity.value)
    a, b = ((r.uniform(1, 2, size) * np.exp2(r.integers(-7, 4, size))).astype(np.float32)[:, None] for _ in "ab")
    return a, b


@cache
def _straddling(granularity: Granularity, fmt: Format) -> tuple[tuple[np.ndarray, Pair], ...]:
    """Accumulators and scales whose product, in one order of the scales, rounds to another code of `fmt` than in the
    two others: for each of the three orders.
    """
    r = rng("straddling", granularity.value, fmt.name)
    count = 1 << 13
    n = r.integers(1 << 13, 1 << 14, count)
    sa = r.uniform(1, 2, count).astype(np.float32)
    ties = (r.integers(1 << fmt.fraction_bits, 2 << fmt.fraction_bits, count) + 0.5) / (1 << fmt.fraction_bits)
    sb = (ties * 64 / (n * sa.astype(np.float64))).astype(np.float32)
    acc = n.astype(np.float32)
    codes = [x.astype(dtype_of(fmt)).view(np.uint16) for x in (acc * (sa * sb), (acc * sb) * sa, (acc * sa) * sb)]
    alone = [np.flatnonzero((codes[i] != codes[i - 1]) & (codes[i - 1] == codes[i - 2])) for i in range(3)]
    if granularity is Granularity.TENSORWISE:  # one pair of scales for all: one accumulator straddles
        return tuple((np.full(SIZE, n[places[0]]), (sa[places[:1], None], sb[places[:1], None])) for places in alone)
    straddle = np.concatenate([places[: 1 + SIZE // 3] for places in alone])[:SIZE]
    return ((n[straddle], (sa[straddle, None], sb[straddle, None])),)


# E8M0 scales


def _of_microscaled(kind: GemmKind) -> Iterator[ProbeGemm]:
    r, few = rng("probe mxfp8"), np.arange(SIZE)

    def probe(name: str, operands: Pair, middles: tuple[int, int] | None = None, **fields: Any) -> ProbeGemm:
        blocks, sizes = -(-operands[0].shape[1] // MX_BLOCK), [len(x) for x in operands]
        scales: Pair = _ONE, _ONE
        if middles is not None:
            scales = near(sizes[0], blocks, middles[0]), near(sizes[1], blocks, middles[1], turn=6)
        return kind.probe(name, operands, scales, **{"at": (few, few), **fields})

    def codes(distribution: str, k: int, shape: tuple[int, int] = (SIZE, SIZE), of: Any = (E4M3FN, E4M3FN)) -> Pair:
        return _drawn(distribution, shape, k, "probe mxfp8 ", of)

    # 1. Adding, scales of one: a step, what a chain loses, special values, other formats.
    yield probe("one step", codes("bits", 32))
    yield probe("one chain", taken_back(*codes("bits", 128)))
    yield probe("one chain of normal codes", taken_back(*codes("normal", 128)))
    yield probe("every code", codes("bits", 256))
    yield probe("specials", codes("specials", 128))
    yield probe("mixed formats", codes("bits", 128, of=(E5M2, E4M3FN)))
    # 2. Scales: of single products, of sums, of bytes at both ends, and what is too small or too large.
    yield probe("scales", only(codes("normal", 256), slice(None, None, MX_BLOCK)), (127, 127), needs_all=True)
    yield probe("scales and sums", codes("normal", 256), (127, 127))
    yield probe("scales of unlike sizes", codes("normal", 128), (150, 100))
    for name, middle in (("tiny results", 46), ("subnormal results", 54), ("product of scales below 2^-127", 62)):
        yield probe(name, codes("normal", 256), (middle, middle))
    yield probe("overflow", codes("bits", 128), (176, 176))
    ends = [np.resize(np.array(values), (SIZE, 1)).repeat(4, 1) for values in ((0, 254, 1, 127), (254, 1, 126, 127))]
    yield kind.probe("bytes 0 and 254", codes("normal", 128), (as_scales(ends[0]), as_scales(ends[1])), at=(few, few))
    nan = near(SIZE, 4)
    nan.view(np.uint8)[r.integers(0, SIZE, 2), (1, 3)] = 255
    yield kind.probe("byte 255", codes("normal", 128), (nan, near(SIZE, 4, turn=6)), at=(few, few))
    # 3. Addresses: whole tiles, parts of tiles, 5 blocks.
    rows = np.array([0, 1, 2, 4, 31, 32, 33, 64, 97, 127, 128, 129, 160, 200, 255])
    yield probe("whole tiles", codes("normal", 256, (256, 256)), (127, 127), at=(rows, rows[::-2]))
    yield probe("parts of tiles", codes("normal", 160, (144, 48)), (127, 127), at=(rows[:12], rows[:7]))
    # 4. The output type, and a bias.
    a, b = known(np.arange(SIZE) * 34 + 4099)
    yield probe("ties of the output", (a, b), types=_NARROW, needs_all=True)
    if kind.with_bias:
        bias = draw("normal", (1, SIZE), FLOAT32, "probe mxfp8")[0] * np.float32(4096)
        yield probe("bias", codes("normal", 256), (118, 118), bias=bias, needs_all=True)


def _of_mx_groups(multiple: int) -> Iterator[ProbeGemm]:
    """Groups that end within a tile of 128, two of them empty: each restarts the tiling."""
    sizes = [-(-size // multiple) * multiple for size in (5, 0, 9, 130, 1, 0, 20)]
    m, groups = sum(sizes), len(sizes)
    a, b = _drawn("normal", (m, groups * SIZE), 160, "probe mxfp8 groups ")
    alone = GemmKind(pair=_ROWWISE, use_fast_accum=False, with_bias=False).gemm("sizes of groups", (a, b))
    stacked = b.reshape(groups, SIZE, -1), np.ones((groups, SIZE), np.float32)
    case = in_mx_groups(in_groups(alone, *stacked, np.cumsum(sizes).tolist()))
    yield ProbeGemm(case=case, out_dtypes=_ALL_TYPES)


# Operands


def _drawn(
    distribution: str, rows: tuple[int, int], k: int, seed: str, formats: tuple[Format, Format] = (E4M3FN, E4M3FN)
) -> Pair:
    a, b = (draw_codes(distribution, (rows[i], k), formats[i], f"{seed}{'ab'[i]}") for i in range(2))
    return a, b


def _power(exponent: int) -> np.ndarray:
    return np.full((1, 1), 2.0**exponent, np.float32)


def codes_of_values(x: np.ndarray) -> np.ndarray:
    """E4M3 codes of numbers that have one."""
    return x.astype(np.float32).astype(dtype_of(E4M3FN))


def known(integers: np.ndarray) -> Pair:
    """Operands whose accumulator is `integers` [M], below 2^14, in every column; exact under any rule of adding.

    Both have as many rows as there are integers.
    """
    a, b = np.zeros((2, len(integers), SHORT_K), np.float32)
    for place, shift in enumerate((12, 8, 4, 0)):
        a[:, place] = (integers >> shift) % 16 * (16 if place == 0 else 1)
    b[:, :4] = (256, 256, 16, 1)  # weights of the four digits: (d3 * 16, d2, d1, d0)
    return codes_of_values(a), codes_of_values(b)


def tie_of_a_step(fmt: Format, rows: int) -> Pair:
    """Operands of one step, at the end of K, whose sum is a tie of a 16-bit type and 2^-7, 2^-8, ... in the rows.

    The tie lies above an even number, so that it goes down unless the sum of the step keeps what is beyond it: what
    a cut to 13 bits loses shows through 16 bits. The largest exponent of a product is 0, of the sum 5: terms are
    multiples of 2^-13, and the last place that is kept is 2^-8.
    """
    a, b = np.zeros((2, rows, SHORT_K), np.float32)
    a[:, -30:], b[:, -30:] = 1, 1
    a[:, -4:] = 1.5
    a[:, -31], b[:, -31] = 1, 2.0 ** (4 - fmt.fraction_bits)
    a[:, -32], b[:, -32] = 2.0 ** -(1 + np.arange(rows) % 8), 2.0**-6
    return codes_of_values(a), codes_of_values(b)


def alternating(x: np.ndarray) -> np.ndarray:
    """Every second number with the other sign, the first one too."""
    return x * np.where(np.arange(x.size) % 2 == 0, -1, 1).astype(x.dtype).reshape(x.shape)


def negative(codes: np.ndarray) -> np.ndarray:
    """The other sign of every code."""
    return (codes.view(np.uint8) ^ 0x80).view(codes.dtype)


def only(operands: Pair, places: slice) -> Pair:
    """Copies with zeros for all codes but those of some places of K."""
    a, b = (np.zeros_like(x) for x in operands)
    a[:, places], b[:, places] = (x[:, places] for x in operands)
    return a, b


def taken_back(a: np.ndarray, b: np.ndarray, *, order: np.ndarray | None = None) -> Pair:
    """The first half of K, and the same products with the other sign in another order: an exact sum of zero."""
    if order is None:
        order = rng("order", a.shape[1] // 2).permutation(a.shape[1] // 2)
    k = len(order)
    return np.concatenate([a[:, :k], a[:, order]], axis=1), np.concatenate([b[:, :k], negative(b[:, order])], axis=1)

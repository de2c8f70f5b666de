"""Small GEMMs whose operands part hypotheses: each lets one concern of a kernel show, also through a 16-bit output.

- What is lost in an addition shows where the second half of K takes back the first: what is left is error alone.
- The order of scales shows in float32; in 16 bits where one order lands on a tie and another beside it.
- An FMA with the bias shows where the bias takes back the scaled accumulator exactly.

Probes of adding have scales of one, probes of scales have accumulators of at most 14 bits, so that two faults of one
kernel part too. Sums of the long ones are exact in float32: an order of adding that nobody knows makes no difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from f8emu.conformance.altered import Part
from f8emu.conformance.distributions import draw, draw_codes, dtype_of, rng
from f8emu.conformance.gemm import GemmCase, Mode
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, HOPPER, Format, Granularity

SIZE = 16
"""Rows and columns of a probe without block scales."""
SHORT_K, MIDDLE_K, LONG_K = 128, 144, 1024
"""One promotion; a tail of promotion and step; many promotions, but too short for a library to split [PLAN-2]."""
_ONE = np.ones((1, 1), np.float32)
_DIGITS = np.array([256, 256, 16, 1], np.float32)
"""Weights of the four digits of a known accumulator: (d3 * 16, d2, d1, d0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A family of GEMMs that a kernel may treat in its own way."""

    pair: tuple[Granularity, Granularity]
    use_fast_accum: bool
    with_bias: bool

    @property
    def name(self) -> str:
        if self.pair[0].is_blockwise:
            return f"{self.pair[0].value} x {self.pair[1].value}"
        chain = "fast" if self.use_fast_accum else "promoted"
        return f"{self.pair[0].value} {chain}" + (" with bias" if self.with_bias else "")


KINDS: tuple[Kind, ...] = (
    *(
        Kind(pair=(granularity, granularity), use_fast_accum=fast, with_bias=with_bias)
        for granularity in (Granularity.TENSORWISE, Granularity.ROWWISE)
        for with_bias in (False, True)
        for fast in (True, False)
    ),
    *(
        Kind(pair=pair, use_fast_accum=False, with_bias=False)
        for pair in HOPPER.granularity_pairs
        if pair[0].is_blockwise
    ),
)
"""What is diagnosed apart, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One GEMM, in the output types that show its point; of several the first that the subject offers, or all."""

    case: GemmCase
    out_dtypes: tuple[Format, ...]
    needs_all: bool = False
    at: Part | None = None
    """The outputs that are looked at."""

    def cases(self) -> Iterator[GemmCase]:
        """The GEMM in each of its output types."""
        for fmt in self.out_dtypes:
            bias = None if self.case.bias is None else self.case.bias.astype(dtype_of(fmt))
            yield replace(self.case, id=f"{self.case.id} -> {fmt}", out_dtype=fmt, bias=bias)


def probes(kind: Kind, *, takes_any_size: bool) -> tuple[Probe, ...]:
    """The probes of one kind of GEMM. `takes_any_size`: block scales on fewer rows and columns than 128."""
    if kind.pair[0].is_blockwise:
        return tuple(_blockwise(kind.pair, takes_any_size))
    return tuple(_dense(kind))


# 1 Without block scales


@cache
def _operands() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Codes of the probes of adding; the same arrays for every kind, so that accumulators are computed once."""

    def drawn(distribution: str, k: int, formats: tuple[Format, Format] = (E4M3FN, E4M3FN)) -> list[np.ndarray]:
        return [
            draw_codes(distribution, (SIZE, k), fmt, f"probe {k}{side}")
            for fmt, side in zip(formats, "ab", strict=True)
        ]

    one_step = drawn("bits", SHORT_K)
    for codes in one_step:
        codes.view(np.uint8)[:, 8:] = 0
    one_sign = draw_codes("same", (2 * SIZE, SHORT_K), E4M3FN, "probe one sign")
    small = draw_codes("bits", (2 * SIZE, 12), E4M3FN, "probe one sign")
    one_sign.view(np.uint8)[:, 20:32] = small.view(np.uint8) & 0x1F
    one_sign.view(np.uint8)[:, 32:] = 0
    r = rng("probe", "long")
    integers = [r.integers(1, 16, (SIZE, LONG_K)) * 2 ** r.integers(0, 3, (SIZE, LONG_K)) for _ in "ab"]
    same = [r.integers(8, 16, (SIZE, LONG_K)) * 2 ** r.integers(0, 2, (SIZE, LONG_K)) for _ in "ab"]
    pairs = {
        "one step": one_step,
        "one step of one sign": [one_sign[:SIZE], one_sign[SIZE:]],
        "one chain": _taken_back(*drawn("bits", SHORT_K)),
        "middle": drawn("normal", MIDDLE_K),
        "every code": drawn("bits", MIDDLE_K),
        "long": _taken_back(*(_codes(x) for x in integers)),
        "long, one binade": _taken_back(*(_codes(x) for x in same)),
        "many magnitudes": _many_magnitudes(),
        "specials": drawn("specials", MIDDLE_K),
        "mixed formats": drawn("bits", MIDDLE_K, (E5M2, E4M3FN)),
    }
    return {name: (a, b) for name, (a, b) in pairs.items()}


def _codes(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(dtype_of(E4M3FN))


def _taken_back(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """The first half of K, and the same products with the other sign in another order: an exact sum of zero."""
    k = a.shape[1] // 2
    order = rng("order", k).permutation(k)
    negative = (b.view(np.uint8)[:, order] ^ 0x80).view(b.dtype)
    return [np.concatenate([a[:, :k], a[:, order]], axis=1), np.concatenate([b[:, :k], negative], axis=1)]


def _many_magnitudes() -> list[np.ndarray]:
    """One product every 128 of K, over many binades, then the same in another order with the other sign: the float32
    sums of promoted partials are not exact, so that their order shows.
    """
    chunks = LONG_K // SHORT_K // 2
    r = rng("probe", "many magnitudes")
    found = []
    for _ in "ab":
        x = np.zeros((SIZE, LONG_K // 2), np.float32)
        x[:, ::SHORT_K] = r.integers(8, 16, (SIZE, chunks)) * np.exp2(r.integers(-9, 5, (SIZE, chunks)))
        found.append(_codes(x))
    order = np.arange(LONG_K // 2).reshape(chunks, SHORT_K)[r.permutation(chunks)].ravel()
    a, b = found
    return [
        np.concatenate([a, a[:, order]], 1),
        np.concatenate([b, (b.view(np.uint8)[:, order] ^ 0x80).view(b.dtype)], 1),
    ]


def _dense(kind: Kind) -> Iterator[Probe]:
    narrow, every = (BFLOAT16, FLOAT16), (FLOAT32, BFLOAT16, FLOAT16)
    types = narrow if kind.with_bias else every

    def probe(
        name: str,
        operands: tuple[np.ndarray, np.ndarray],
        scales: tuple[np.ndarray, np.ndarray] = (_ONE, _ONE),
        bias: np.ndarray | None = None,
        out_dtypes: tuple[Format, ...] = types,
        needs_all: bool = False,
    ) -> Probe:
        a, b = operands
        scale_a, scale_b = scales
        if kind.pair[0] is Granularity.ROWWISE:
            scale_a, scale_b = scale_a.repeat(SIZE // len(scale_a), 0), scale_b.repeat(SIZE // scale_b.shape[1], 1)
        if kind.with_bias and bias is None:
            bias = np.zeros(SIZE, np.float32)
        case = GemmCase(
            id=name,
            mode=Mode(kind.pair[0].value),
            a=a,
            b=b,
            scale_a=scale_a,
            scale_b=scale_b,
            granularity_a=kind.pair[0],
            granularity_b=kind.pair[1],
            bias=bias if kind.with_bias else None,
            use_fast_accum=kind.use_fast_accum,
        )
        return Probe(case=case, out_dtypes=out_dtypes, needs_all=needs_all)

    operands = _operands()
    drawn = _scales(kind.pair[0])
    adding = ["one step", "one step of one sign", "one chain", "middle", "every code", "long", "long, one binade"]
    for name in (*adding, "specials"):
        yield probe(name, operands[name])
    if not kind.use_fast_accum:
        yield probe("many magnitudes", operands["many magnitudes"])
    yield probe("mixed formats", operands["mixed formats"])
    known = _known(rng("known", kind.pair[0].value).integers(0, 1 << 14, SIZE))
    yield probe("scales", known, drawn, needs_all=True)
    yield probe("scales and sums", operands["middle"], drawn, needs_all=True)
    for fmt in narrow:
        for number, (integers, scales) in enumerate(_straddling(kind.pair[0], fmt)):
            yield probe(f"scales beside a tie {number}", _known(integers), scales, out_dtypes=(fmt,))
    yield probe("ties of the output", _known(np.arange(SIZE) * 34 + 4099), out_dtypes=narrow, needs_all=True)
    yield probe("subnormal results", known, (_power(-70), _power(-70)), out_dtypes=types[:2])
    yield probe("overflow to infinity", known, (_power(8), _power(-4)), out_dtypes=(FLOAT16,))
    largest = _known(np.full(SIZE, 16383))
    yield probe("overflow to infinity", largest, (_power(57), _power(57)), out_dtypes=(BFLOAT16,))
    if kind.with_bias:
        bias = draw("normal", (1, SIZE), FLOAT32, "probe")[0] * np.float32(4096)
        yield probe("bias", operands["middle"], drawn, bias, needs_all=True)
        third, powers = np.full((1, 1), 1 / 3, np.float32), np.exp2(np.arange(SIZE) % 8).astype(np.float32)
        for name, scales in (("row", (third, _ONE)), ("column", (_ONE, third))):
            yield probe(f"bias that takes back, {name} scale", _known(3 * powers.astype(int)), scales, -powers)


def _power(exponent: int) -> np.ndarray:
    return np.full((1, 1), 2.0**exponent, np.float32)


def _known(integers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Operands whose accumulator is `integers` [M], below 2^14, in every column; exact under any rule of adding."""
    a, b = np.zeros((SIZE, SHORT_K), np.float32), np.zeros((SIZE, SHORT_K), np.float32)
    for place, shift in enumerate((12, 8, 4, 0)):
        a[:, place] = (integers >> shift) % 16 * (16 if place == 0 else 1)
    b[:, :4] = _DIGITS
    return _codes(a), _codes(b)


@cache
def _scales(granularity: Granularity) -> tuple[np.ndarray, np.ndarray]:
    """Of any significand; rows and columns differ in magnitude."""
    size = 1 if granularity is Granularity.TENSORWISE else SIZE
    r = rng("probe scales", granularity.value)
    found = [r.uniform(1, 2, size) * np.exp2(r.integers(-7, 4, size)) for _ in "ab"]
    return found[0].astype(np.float32)[:, None], found[1].astype(np.float32)[None]


@cache
def _straddling(granularity: Granularity, fmt: Format) -> tuple[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]], ...]:
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
        return tuple((np.full(SIZE, n[found[0]]), (sa[found[:1], None], sb[None, found[:1]])) for found in alone)
    chosen = np.concatenate([found[: 1 + SIZE // 3] for found in alone])[:SIZE]
    return ((n[chosen], (sa[chosen, None], sb[None, chosen])),)


# 2 Block scales


def _blockwise(pair: tuple[Granularity, Granularity], takes_any_size: bool) -> Iterator[Probe]:
    m, n = (8, 136) if takes_any_size else (128, 256)
    columns = np.array([0, 1, 2, 3, 63, 127, 128, 129, 130, 131, 134, 135])
    at = np.arange(8), columns

    def probe(
        name: str, a: np.ndarray, b: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, needs_all: bool = False
    ) -> Probe:
        case = GemmCase(
            id=name,
            mode=Mode.BLOCKWISE,
            a=a,
            b=b,
            scale_a=scale_a,
            scale_b=scale_b.T,
            granularity_a=pair[0],
            granularity_b=pair[1],
        )
        return Probe(case=case, out_dtypes=(FLOAT32, BFLOAT16, FLOAT16), needs_all=needs_all, at=at)

    def codes(distribution: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        return (
            draw_codes(distribution, (m, k), E4M3FN, "probe blocks a"),
            draw_codes(distribution, (n, k), E4M3FN, "probe blocks b"),
        )

    def scales(k: int, exponents: tuple[int, int] = (-9, 5)) -> tuple[np.ndarray, np.ndarray]:
        r = rng("probe blocks", pair[0].value, pair[1].value, k)
        found = []
        for side, rows in zip(pair, (m, n), strict=True):
            shape = side.scale_shape(rows, k)
            found.append((r.uniform(1, 2, shape) * np.exp2(r.integers(*exponents, shape))).astype(np.float32))
        return found[0], found[1]

    def ones(k: int) -> tuple[np.ndarray, np.ndarray]:
        found = [np.ones(side.scale_shape(rows, k), np.float32) for side, rows in zip(pair, (m, n), strict=True)]
        return found[0], found[1]

    # 1. Adding within a block, scales of one.
    for name, distribution in (("one chain", "bits"), ("one chain of normal codes", "normal")):
        yield probe(name, *_taken_back(*codes(distribution, 128)), *ones(128))
    step = codes("bits", 128)
    for x in step:
        x.view(np.uint8)[:, 8:] = 0
    yield probe("one step", *step, *ones(128))

    # 2. Scales: each block has one product, and the second block takes back the first but for rounding.
    a, b = codes("normal", 512)
    for x in (a, b):
        x.view(np.uint8)[:, np.arange(512) % 128 != 0] = 0
    yield probe("scales", a, b, *scales(512))
    a, b = a.copy(), b.copy()
    a[:, 128], b[:, 128] = a[:, 0], (b.view(np.uint8)[:, 0] ^ 0x80).view(b.dtype)
    scale_a, scale_b = scales(512)
    scale_a[:, 1] = scale_a[:, 0]
    scale_b[:, 1] = scale_b[:, 0]
    for number in range(2):
        factor = np.float32(1.0 + 2.0**-number / 3)
        near_a, near_b = scale_a.copy(), scale_b.copy()
        near_a[:, 1], near_b[:, 1] = near_a[:, 0] * factor, near_b[:, 0] / factor
        yield probe(f"scales that take back {number}", _first_blocks(a), _first_blocks(b), near_a, near_b)

    # 3. All of it, and totals of blocks and slices that take back each other.
    yield probe("scales and sums", *codes("normal", 512), *scales(512), needs_all=True)
    yield probe("tail of K", *codes("bits", 336), *scales(336))
    yield probe("subnormal results", *codes("normal", 128), *scales(128, (-73, -71)))
    yield probe("overflow to infinity", *codes("normal", 128), *scales(128, (2, 3)), needs_all=True)
    a, b = codes("normal", LONG_K)
    scale_a, scale_b = scales(LONG_K, (-2, 2))
    half, order = LONG_K // 2, rng("blocks").permutation(LONG_K // 256)
    k_order = (order[:, None] * 128 + np.arange(128)).ravel()
    a = np.concatenate([a[:, :half], a[:, k_order]], axis=1)
    b = np.concatenate([b[:, :half], (b.view(np.uint8)[:, k_order] ^ 0x80).view(b.dtype)], axis=1)
    blocks = np.concatenate([np.arange(LONG_K // 256), order])
    yield probe("long", a, b, scale_a[:, blocks], scale_b[:, blocks])


def _first_blocks(x: np.ndarray) -> np.ndarray:
    """Without the codes of all blocks but two."""
    x = x.copy()
    x.view(np.uint8)[:, 256:] = 0
    return x

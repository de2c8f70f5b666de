"""Small GEMMs whose operands part hypotheses: each lets one concern of a kernel show, also through a 16-bit output.

- What is lost in an addition shows where the second half of K takes back the first: what is left is error alone.
- The order of scales shows in float32; in 16 bits where one order lands on a tie and another beside it.
- An FMA with the bias shows where the bias takes back the scaled accumulator exactly.

Probes of adding have scales of one, probes of scales have accumulators of at most 14 bits, so that two faults of one
kernel part too. Sums of the long ones are exact in float32: an order of adding that nobody knows makes no difference.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np

from f8emu.conformance.cases.distributions import draw, draw_codes, dtype_of, rng
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.diagnosis.block_probes import block_probes
from f8emu.conformance.diagnosis.probe import (
    LONG_K,
    MANY,
    MIDDLE_K,
    SHORT_K,
    Kind,
    Probe,
    alternating,
    codes_of_values,
    known,
    taken_back,
    tie_of_a_step,
)
from f8emu.conformance.diagnosis.reading import Part
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, Granularity

SIZE = 16
"""Rows and columns of a probe without block scales."""
_PART_OF_LONG = np.arange(8), np.arange(8, 16)
"""What is looked at of a long one."""
_FEW = np.array([0, SIZE - 1])
_ONE = np.ones((1, 1), np.float32)


@cache
def probes(kind: Kind, *, takes_any_size: bool) -> tuple[Probe, ...]:
    """The probes of one kind of GEMM. `takes_any_size`: block scales on fewer rows and columns than 128.

    The same arrays each time: `Memory` knows them again.
    """
    if kind.pair[0].is_blockwise:
        return tuple(block_probes(kind.pair, takes_any_size))
    return tuple(_dense(kind))


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
    # At the end of K: a later step would cut what the last one kept.
    one_sign = draw_codes("same", (2 * SIZE, SHORT_K), E4M3FN, "probe one sign")
    small = draw_codes("bits", (2 * SIZE, 12), E4M3FN, "probe one sign")
    one_sign.view(np.uint8)[:, -12:] = small.view(np.uint8) & 0x1F
    one_sign.view(np.uint8)[:, :-32] = 0
    r = rng("probe", "long")
    integers = [r.integers(1, 16, (SIZE, LONG_K)) * 2 ** r.integers(0, 3, (SIZE, LONG_K)) for _ in "ab"]
    same = [r.integers(8, 16, (SIZE, LONG_K)) * 2 ** r.integers(0, 2, (SIZE, LONG_K)) for _ in "ab"]
    pairs = {
        "one step": one_step,
        "one step of one sign": [one_sign[:SIZE], one_sign[SIZE:]],
        "one chain": taken_back(*drawn("bits", SHORT_K)),
        "middle": drawn("normal", MIDDLE_K),
        "every code": drawn("bits", MIDDLE_K),
        "long": taken_back(*(codes_of_values(x) for x in integers)),
        "long, one binade": taken_back(*(codes_of_values(x) for x in same)),
        "many magnitudes": _many_magnitudes(),
        "specials": drawn("specials", MIDDLE_K),
        "mixed formats": drawn("bits", MIDDLE_K, (E5M2, E4M3FN)),
        "mixed formats, b E5M2": drawn("bits", MIDDLE_K, (E4M3FN, E5M2)),
    }
    return {name: (a, b) for name, (a, b) in pairs.items()}


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
        found.append(codes_of_values(x))
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
        at: Part | None = None,
    ) -> Probe:
        a, b = operands
        scale_a, scale_b = scales
        if kind.pair[0] is Granularity.ROWWISE:
            scale_a = scale_a.repeat(len(a) // len(scale_a), 0)
            scale_b = scale_b.repeat(len(b) // scale_b.shape[1], 1)
        if kind.with_bias and bias is None:
            bias = np.zeros(len(b), np.float32)
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
        part = _PART_OF_LONG if a.shape[1] == LONG_K else at
        return Probe(case=case, out_dtypes=out_dtypes, needs_all=needs_all, at=part)

    operands = _operands()
    drawn = _scales(kind.pair[0])
    adding = ["one step", "one step of one sign", "one chain", "middle", "every code", "long", "long, one binade"]
    for name in (*adding, "specials", "mixed formats", "mixed formats, b E5M2"):
        yield probe(name, operands[name])
    for fmt in narrow:
        yield probe("one step that ends on a tie", tie_of_a_step(fmt, SIZE), out_dtypes=(fmt,))
    yield probe("many magnitudes", operands["many magnitudes"])
    known_codes = known(rng("known", kind.pair[0].value).integers(0, 1 << 14, SIZE))
    yield probe("scales", known_codes, drawn, needs_all=True)
    yield probe("scales and sums", operands["middle"], drawn, needs_all=True)
    for fmt in narrow:
        for number, (integers, scales) in enumerate(_straddling(kind.pair[0], fmt)):
            yield probe(f"scales beside a tie {number}", known(integers), scales, out_dtypes=(fmt,))
    # Exact in any order: a library may have another for one row.
    exact = np.exp2(np.floor(np.log2(drawn[0][:1]))), np.exp2(np.floor(np.log2(drawn[1])))
    yield probe("one row", (known_codes[0][:1], known_codes[1]), exact)
    many, of_many = _many(), _scales(kind.pair[0], MANY)
    of_rows, of_columns = (alternating(scale) for scale in of_many)
    biases = draw("normal", (1, MANY), FLOAT32, "probe many")[0] * np.float32(4096)
    yield probe("many rows", (many[0], many[1][:SIZE]), (of_rows, _ONE), at=(np.arange(MANY), _FEW))
    yield probe("many columns", (many[1][:SIZE], many[0]), (_ONE, of_columns), biases, at=(_FEW, np.arange(MANY)))
    yield probe("ties of the output", known(np.arange(SIZE) * 34 + 4099), out_dtypes=narrow, needs_all=True)
    # Zeros that one scale makes -0; a bias of -0 keeps that sign.
    minus_zeros = np.full(SIZE, -0.0, np.float32) if kind.with_bias else None
    yield probe("zeros", known(np.arange(SIZE) % 2), (-_ONE, _ONE), minus_zeros)
    yield probe("subnormal results", known_codes, (_power(-70), _power(-70)), out_dtypes=types[:2])
    yield probe("overflow to infinity", known_codes, (_power(8), _power(-4)), out_dtypes=(FLOAT16,))
    largest = known(np.full(SIZE, 16383))
    yield probe("overflow of bfloat16 alone", largest, (_power(57), _power(57)), out_dtypes=(BFLOAT16,))
    if kind.with_bias:
        bias = draw("normal", (1, SIZE), FLOAT32, "probe")[0] * np.float32(4096)
        yield probe("bias", operands["middle"], drawn, bias, needs_all=True)
        third, powers = np.full((1, 1), 1 / 3, np.float32), np.exp2(np.arange(SIZE) % 8).astype(np.float32)
        for name, scales in (("row", (third, _ONE)), ("column", (_ONE, third))):
            yield probe(f"bias that takes back, {name} scale", known(3 * powers.astype(int)), scales, -powers)


def _power(exponent: int) -> np.ndarray:
    return np.full((1, 1), 2.0**exponent, np.float32)


@cache
def _many() -> tuple[np.ndarray, np.ndarray]:
    """Operands whose accumulators are another number in each row, whatever adds them."""
    return known(4099 + 17 * np.arange(MANY))


@cache
def _scales(granularity: Granularity, rows: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """Scales with any significand; rows and columns differ in magnitude."""
    size = 1 if granularity is Granularity.TENSORWISE else rows
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

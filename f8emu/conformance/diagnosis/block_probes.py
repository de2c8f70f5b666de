"""Probes of GEMMs with block scales: of the chain within a block, of the scales of a block, of the totals."""

from collections.abc import Iterator

import numpy as np

from f8emu.conformance.cases.distributions import draw_codes, rng
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.diagnosis.probe import (
    MANY,
    Probe,
    alternating,
    codes_of_values,
    known,
    taken_back,
    tie_of_a_step,
)
from f8emu.conformance.diagnosis.reading import Part
from f8emu.spec import BFLOAT16, E4M3FN, FLOAT16, FLOAT32, Format, Granularity

_LONG_K = 3584
"""28 blocks. Slices in multiples of 512, as beside 128x128 scales, are 2048, 1536, 1024 and 512 long [CHAIN-3]."""
_TAIL_K = 496
"""Rounded down to a multiple of 32, 64, 128, 256 and 512 it is another number each time."""
_SQUARE = 128


def block_probes(pair: tuple[Granularity, Granularity], takes_any_size: bool) -> Iterator[Probe]:
    """The probes of a pair of granularities; 12 columns of 8 rows are looked at, from two blocks of columns."""
    m, n = (8, 136) if takes_any_size else (128, 256)
    columns = np.array([0, 1, 2, 3, 63, 127, 128, 129, 130, 131, 134, 135])

    def probe(
        name: str,
        a: np.ndarray,
        b: np.ndarray,
        scale_a: np.ndarray,
        scale_b: np.ndarray,
        needs_all: bool = False,
        out_dtypes: tuple[Format, ...] = (FLOAT32, BFLOAT16, FLOAT16),
        at: Part | None = None,
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
        part = at or (np.arange(8), columns[columns < len(b)])
        return Probe(case=case, out_dtypes=out_dtypes, needs_all=needs_all, at=part)

    def codes(distribution: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        return (
            draw_codes(distribution, (m, k), E4M3FN, "probe blocks a"),
            draw_codes(distribution, (n, k), E4M3FN, "probe blocks b"),
        )

    def scales(
        k: int, exponents: tuple[int, int] = (-9, 5), rows: tuple[int, int] = (m, n)
    ) -> tuple[np.ndarray, np.ndarray]:
        r = rng("probe blocks", pair[0].value, pair[1].value, k)
        found = []
        for side, count in zip(pair, rows, strict=True):
            shape = side.scale_shape(count, k)
            found.append((r.uniform(1, 2, shape) * np.exp2(r.integers(*exponents, shape))).astype(np.float32))
        return found[0], found[1]

    def ones_of(side: int, rows: int) -> int:
        return pair[side].scale_shape(rows, 128)[0]

    def ones(k: int) -> tuple[np.ndarray, np.ndarray]:
        found = [np.ones(side.scale_shape(rows, k), np.float32) for side, rows in zip(pair, (m, n), strict=True)]
        return found[0], found[1]

    # 1. Adding within a block, scales of one.
    for name, distribution in (("one chain", "bits"), ("one chain of normal codes", "normal")):
        yield probe(name, *taken_back(*codes(distribution, 128)), *ones(128))
    step = codes("bits", 128)
    for x in step:
        x.view(np.uint8)[:, 8:] = 0
    yield probe("one step", *step, *ones(128))
    for fmt in (BFLOAT16, FLOAT16):
        a, b = tie_of_a_step(fmt, n)
        yield probe("one step that ends on a tie", a[:m], b, *ones(128), out_dtypes=(fmt,))

    yield probe("specials", *codes("specials", 128), *ones(128))
    # A square output, so that operands and outputs can be swapped; a's rows have scales of their own, powers of two.
    a, b = known(np.arange(_SQUARE) % 64 * 34 + 4099)
    powers = np.exp2(np.arange(_SQUARE) % 3)[: ones_of(0, _SQUARE), None].astype(np.float32)
    yield probe(
        "ties of the output", a, b, powers, np.ones((ones_of(1, _SQUARE), 1), np.float32), True, (BFLOAT16, FLOAT16)
    )  # fmt: skip

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
    yield probe("tail of K", *codes("bits", _TAIL_K), *scales(_TAIL_K))
    many = MANY if takes_any_size else 3 * _SQUARE
    long_side, short_side = known(4099 + 17 * np.arange(many))
    few = np.arange(0, 8, 7)
    of_many = [alternating(s[:, :1].copy()) for s in scales(_TAIL_K, rows=(many, many))]
    yield probe(
        "many rows", long_side, short_side[:m], of_many[0], scales(128, rows=(m, m))[1], at=(np.arange(many), few)
    )
    yield probe(
        "many columns", short_side[:m], long_side, scales(128, rows=(m, m))[0], of_many[1], at=(few, np.arange(many))
    )
    yield probe("subnormal results", *codes("normal", 128), *scales(128, (-73, -71)))
    yield probe("overflow to infinity", *codes("normal", 128), *scales(128, (2, 3)), needs_all=True)
    a, b = known(np.full(n, 16383))  # times 2^114: finite in float32 alone
    one_a, one_b = ones(128)
    huge = np.float32(2.0**57)
    yield probe("overflow of bfloat16 alone", a[:m], b, one_a * huge, one_b * huge, out_dtypes=(BFLOAT16,))
    # Partials of 2^-12 or 0, times scales whose product, -2^-144, is a number of float32: -0.
    a, b = np.zeros((m, 128), np.float32), np.zeros((n, 128), np.float32)
    a[:, 0], b[::2, 0] = 2.0**-6, 2.0**-6
    small = np.float32(2.0**-72)
    yield probe("zeros", codes_of_values(a), codes_of_values(b), one_a * -small, one_b * small)
    a, b = codes("normal", _LONG_K)
    scale_a, scale_b = scales(_LONG_K, (-2, 2))
    half, order = _LONG_K // 2, rng("blocks").permutation(_LONG_K // 256)
    k_order = (order[:, None] * 128 + np.arange(128)).ravel()
    a = np.concatenate([a[:, :half], a[:, k_order]], axis=1)
    b = np.concatenate([b[:, :half], (b.view(np.uint8)[:, k_order] ^ 0x80).view(b.dtype)], axis=1)
    blocks = np.concatenate([np.arange(_LONG_K // 256), order])
    yield probe("long", a, b, scale_a[:, blocks], scale_b[:, blocks])


def _first_blocks(x: np.ndarray) -> np.ndarray:
    """Without the codes of all blocks but two."""
    x = x.copy()
    x.view(np.uint8)[:, 256:] = 0
    return x

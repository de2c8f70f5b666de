"""Generated GEMMs for the native engine alone: sizes, every code, values of scales, and how operands lie in memory.

Those of declared kernels, as far as they are cheap to judge, and what a kernel of a GPU would refuse.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from f8emu.conformance.cases.distributions import draw, rng
from f8emu.conformance.cases.drawn_gemm import scaled_case
from f8emu.conformance.cases.families import BLOCKS, DENSE, code_cases, large_value_cases, size_cases
from f8emu.conformance.cases.gemm import Family, GemmCase, Mode
from f8emu.conformance.cases.gemm_cases import BF16_DISTRIBUTIONS
from f8emu.conformance.kernels.cases import grouped_cases
from f8emu.spec import BFLOAT16, HIGH_PRECISION

_MOST = 1 << 23
"""Multiply-adds of a GEMM: more than two threads are worth, and less than a second of the oracle for all GEMMs."""
TAILS = (37, 141, 333)
"""M, N, K that no block of rows, tile of columns, step or promotion divides."""
BFLOAT16_SHAPES = ((1, 1, 1), (4, 64, 256), (5, 65, 257), (3, 17, 31), (67, 130, 520), (256, 513, 48), (2, 3, 4099))


def _apart(x: np.ndarray) -> np.ndarray:
    """The rows three elements apart, the first at an odd address."""
    memory = np.zeros(len(x) * (x.shape[1] + 3) * x.itemsize + 1, np.uint8)
    whole = memory[1:].view(x.dtype) if x.itemsize == 1 else memory[:-1].view(x.dtype)
    rows = whole.reshape(len(x), -1)[:, : x.shape[1]]
    rows[...] = x
    return rows


def _every_other(x: np.ndarray) -> np.ndarray:
    """Along both dimensions, and NaN between."""
    memory = np.full((2 * len(x), 2 * x.shape[1]), np.nan).astype(x.dtype)
    memory[::2, ::2] = x
    return memory[::2, ::2]


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "apart": _apart,
    "K first": np.asfortranarray,
    "every other": _every_other,
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
}
"""Name -> the same matrix, lying otherwise."""


@cache
def engine_cases() -> tuple[GemmCase, ...]:
    """All of them."""
    ones = (*DENSE, *BLOCKS)
    return (
        *size_cases(ones, _MOST),
        *code_cases(ones),
        *large_value_cases(ones),
        *_groups(),
        *_layouts(),
        *_bfloat16(),
    )


def _groups() -> Iterator[GemmCase]:
    """Of every output type: which scale comes first shows in one of 10^5 outputs of 16 bits."""
    for i, case in enumerate(grouped_cases()):
        if case.a.size * case.b.shape[1] <= _MOST:
            yield replace(case, out_dtype=HIGH_PRECISION[i % 3])


def _layouts() -> Iterator[GemmCase]:
    """Every layout of a with another of b and of their scales, with every combination."""
    layouts = list(LAYOUTS)
    for number, (combination, layout) in enumerate(product((*DENSE, *BLOCKS), layouts)):
        names = layout, layouts[(layouts.index(layout) + 1 + number // len(layouts)) % len(layouts)]
        pair = combination.granularities
        case = scaled_case(
            f"{Family.STRIDES.value} {number} {names[0]} and {names[1]}",
            pair,
            combination.formats,
            TAILS,
            "bits",
            with_bias=not pair[0].is_blockwise and number % 2 == 0,
            out_dtype=HIGH_PRECISION[number % 3],
            use_fast_accum=combination.use_fast_accum,
            family=Family.STRIDES,
        )
        of_a, of_b = (LAYOUTS[name] for name in names)
        assert case.scale_a is not None and case.scale_b is not None
        bias = None if case.bias is None else of_a(case.bias[:, None])[:, 0]
        yield replace(
            case, a=of_a(case.a), b=of_b(case.b), scale_a=of_b(case.scale_a), scale_b=of_a(case.scale_b), bias=bias
        )


def _bfloat16() -> Iterator[GemmCase]:
    """Sizes, layouts and slices of K of GEMMs without scales."""
    for number, (shape, distribution) in enumerate(product(BFLOAT16_SHAPES, BF16_DISTRIBUTIONS)):
        (m, n, k), name = shape, f"bf16 {'x'.join(map(str, shape))} {distribution}"
        of_a, of_b = rng(name).permutation(list(LAYOUTS))[:2]
        yield GemmCase(
            id=name,
            mode=Mode.BF16,
            a=LAYOUTS[of_a](draw(distribution, (m, k), BFLOAT16, name + "a")),
            b=LAYOUTS[of_b](draw(distribution, (n, k), BFLOAT16, name + "b")),
            out_dtype=HIGH_PRECISION[number % 3],
            split_k=1 + number % 3,
            distribution=distribution,
            family=Family.STRIDES,
        )

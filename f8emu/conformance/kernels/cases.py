"""Generated GEMMs for declared kernels alone: the table for everybody has few with block scales and with groups.

And the probes of the diagnosis: of random GEMMs with a 16-bit output, one in 10^5 shows in which order a kernel scales.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product

import numpy as np

from f8emu.conformance.cases.distributions import draw_codes, rng
from f8emu.conformance.cases.drawn_gemm import scaled_case
from f8emu.conformance.cases.families import (
    BLOCKS,
    DENSE,
    VECTOR_SCALES,
    code_cases,
    large_value_cases,
    memory_cases,
    size_cases,
    turn_cases,
)
from f8emu.conformance.cases.gemm import Family, GemmCase, Mode
from f8emu.conformance.cases.gemm_cases import CODE_DISTRIBUTIONS
from f8emu.conformance.diagnosis.probe import KINDS, Kind
from f8emu.conformance.diagnosis.probes import probes
from f8emu.conformance.kernels.kernel import Accumulation, Kernel
from f8emu.spec import E4M3FN, HOPPER, Granularity

BLOCK_SHAPES: tuple[tuple[int, int, int], ...] = ((128, 128, 128), (16, 256, 1536), (256, 384, 512))
"""M, N, K: one block, many along K, more than a tile of any kernel; every distribution with the first two."""
GROUPS: tuple[tuple[int, ...], ...] = (
    (16, 48, 48, 128), (0, 0, 160, 160), (32, 64, 96, 128), (1, 2, 3, 4, 5, 6, 7, 8), (7, 8, 31, 94, 95), (0, 5, 5, 69),
    (48,), (130, 387, 700), (63, 128, 193, 193), (1025, 1026, 2304),
    tuple(accumulate(n * 7 % 11 for n in range(40))),
)  # fmt: skip
"""Where groups of rows end: different, all in one, all alike, one row each, odd, empty, one group, several tiles in
each, a tile and a row, large, many."""
GROUPED_SHAPES: tuple[tuple[int, int], ...] = ((48, 512), (272, 48), (16, 4112), (32, 144))
"""N, K."""


def kernel_cases(kernel: Kernel) -> Iterator[GemmCase]:
    """The GEMMs for this kernel alone, beside those for every subject."""
    if kernel.is_grouped:
        is_fast = kernel.accumulation is Accumulation.FAST
        yield from grouped_cases((True, False) if kernel.chooses_accumulation else (is_fast,))
    squares = Granularity.BLOCKWISE_128X128
    asked = {(Granularity.BLOCKWISE_1X128, squares) if pair == (squares, squares) else pair for pair in kernel.scales}
    for pair in HOPPER.granularity_pairs:
        if pair in asked and pair[0].is_blockwise:
            yield from _blockwise(pair)
    for kind in KINDS:
        if (
            kind.pair in asked
            and _has(kernel, kind.pair, kind.use_fast_accum)
            and (kernel.takes_bias or not kind.with_bias)
        ):
            yield from _telling(kernel, kind)
    combinations = [
        one
        for one in (*DENSE, *BLOCKS)
        if one.granularities in asked
        and one.formats in kernel.formats
        and _has(kernel, one.granularities, one.use_fast_accum)
    ]
    yield from size_cases(combinations)
    yield from code_cases(combinations)
    yield from large_value_cases(combinations)
    yield from turn_cases(combinations)
    if kernel.arrays != "jax":  # where an array of JAX lies is JAX's choice
        yield from memory_cases(combinations, padded_a=kernel.a.takes_padding, padded_b=kernel.b.takes_padding)


def _has(kernel: Kernel, pair: tuple[Granularity, Granularity], use_fast_accum: bool) -> bool:
    """Whether the kernel has this accumulation."""
    is_fixed = not kernel.chooses_accumulation and not pair[0].is_blockwise
    return not is_fixed or use_fast_accum is (kernel.accumulation is Accumulation.FAST)


def _telling(kernel: Kernel, kind: Kind) -> Iterator[GemmCase]:
    """Small GEMMs in which each concern of a kernel shows."""
    for probe in probes(kind, takes_any_size=True):
        for case in probe.cases():
            if case.out_dtype in kernel.out_dtypes:
                yield replace(case, id=f"probe {kind.name}: {case.id}", family=Family.PROBES)


def _blockwise(pair: tuple[Granularity, Granularity]) -> Iterator[GemmCase]:
    formats = HOPPER.block_scaled_format_pairs[0]
    for shape in BLOCK_SHAPES:
        for distribution in CODE_DISTRIBUTIONS if shape[0] < BLOCK_SHAPES[-1][0] else ("normal",):
            name = f"{pair[0].value} x {pair[1].value} {distribution} {'x'.join(map(str, shape))}"
            yield scaled_case(name, pair, formats, shape, distribution)
    for number, value in enumerate(dict.fromkeys(VECTOR_SCALES)):
        name = f"{Family.SCALES.value} {number} {pair[0].value} x {pair[1].value} {value:.3g}"
        case = scaled_case(name, pair, formats, (144, 144, 272), "normal", family=Family.SCALES)
        assert case.scale_a is not None and case.scale_b is not None
        scale_a, scale_b = case.scale_a.copy(), case.scale_b.copy()
        scale_a[-1], scale_b[:, -1] = value, value
        yield replace(case, scale_a=scale_a, scale_b=scale_b)


def grouped_cases(use_fast_accum: tuple[bool, ...] = (True, False)) -> Iterator[GemmCase]:
    """Sizes of groups with these accumulations and all distributions, values of scales, and calls in turn."""
    cases = [
        _grouped_case(number, ends, CODE_DISTRIBUTIONS[number % len(CODE_DISTRIBUTIONS)], fast)
        for number, (ends, fast) in enumerate(product(GROUPS, use_fast_accum))
    ]
    yield from cases
    for number, case in enumerate(cases):
        if case.distribution == "bits":
            assert case.scale_a is not None and case.scale_b is not None
            scale_a = np.resize(np.array(VECTOR_SCALES, np.float32), case.scale_a.shape)
            scale_b = np.resize(np.array(VECTOR_SCALES[::-1], np.float32), case.scale_b.shape)
            name = f"{Family.SCALES.value} of groups {number}"
            scaled = replace(case, id=name, scale_a=scale_a, scale_b=scale_b, family=Family.SCALES)
            yield scaled
            turned = replace(case, id=f"{case.id} turned", scale_a=case.scale_a[::-1].copy())
            yield replace(case, id=f"{Family.TURNS.value} of groups {number}", between=(turned,), family=Family.TURNS)


def _grouped_case(number: int, ends: tuple[int, ...], distribution: str, use_fast_accum: bool) -> GemmCase:
    n, k = GROUPED_SHAPES[number // 2 % len(GROUPED_SHAPES)]
    name = f"grouped {number} {distribution}"
    r = rng(name)
    b = draw_codes(distribution, (len(ends) * n, k), E4M3FN, name + "b")
    return GemmCase(
        id=name,
        mode=Mode.GROUPED_ROWWISE,
        a=draw_codes(distribution, (ends[-1], k), E4M3FN, name + "a"),
        b=b.reshape(len(ends), n, k),
        scale_a=r.uniform(0.1, 9, ends[-1]).astype(np.float32),
        scale_b=r.uniform(0.1, 9, (len(ends), n)).astype(np.float32),
        offs=np.array(ends, np.int32),
        use_fast_accum=use_fast_accum,
        distribution=distribution,
        family=Family.GROUPS,
    )

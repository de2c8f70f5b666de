"""Generated GEMMs for one subject alone, a declared kernel or the native engine, beside those for everybody.

Those for kernels are block scales, groups, the families that are written for tiles, and the probes of the diagnosis: of
random GEMMs with a 16-bit output, one in 10^5 shows in which order a kernel scales. The engine gets those of kernels as
far as they are cheap to judge, and what a kernel of a GPU would refuse.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate, cycle, product

import numpy as np

from f8emu.conformance.cases.distributions import bfloat16_case, grouped_case, rng, scaled_case
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
from f8emu.conformance.cases.gemm import Family, GemmCase
from f8emu.conformance.cases.microscaled import mx_cases, mx_grouped_cases
from f8emu.conformance.cases.tables import ALIGNED, BF16_DISTRIBUTIONS, CODE_DISTRIBUTIONS
from f8emu.conformance.diagnosis.probes import KINDS, MX_KINDS, probes
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.spec import HIGH_PRECISION, HOPPER, Granularity
from f8emu.spec.gemm_call import GroupKind

# M, N, K: one block, and many along K
BLOCK_SHAPES: tuple[tuple[int, int, int], ...] = ((128, 128, 128), (16, 256, 1536))
GROUPS: tuple[tuple[int, ...], ...] = (
    *((16, 48, 48, 128), (0, 0, 160, 160), (32, 64, 96, 128), (1, 2, 3, 4, 5, 6, 7, 8), (7, 8, 31, 94, 95)),
    *((0, 5, 5, 69), (48,), (130, 387, 700), (63, 128, 193, 193), (1025, 1026, 2304)),
    tuple(accumulate(n * 7 % 11 for n in range(40))),
)
"""Ends of groups of rows: different, all in one, all alike, one row each, odd, empty, one group, several tiles in
each, a tile and a row, large, many."""
GROUPED_SHAPES: tuple[tuple[int, int], ...] = ((48, 512), (272, 48), (16, 4112), (32, 144))
"""N, K."""
LAYER_GROUPS: tuple[tuple[tuple[int, ...], tuple[int, int]], ...] = (
    *(((5, 21, 21, 70), (528, 528)), ((9, 40), (1040, 144)), ((4096, 4105), (16, 144))),
    (tuple(accumulate(n * 5 % 7 for n in range(64))), (272, 272)),
    (tuple(accumulate(n % 3 for n in range(256))), (48, 144)),
)
"""Groups of rows of mixtures of experts, and N, K: wide, wider, of thousands of rows, 64, 256."""
# Rows behind the last group, where it ends before the last row.
BEHIND = 48
# Multiply-adds of a GEMM: more than two threads are worth, and less than a second of the oracle for all GEMMs.
_MOST = 1 << 23
TAILS = (37, 141, 333)
"""M, N, K that no block of rows, tile of columns, step or promotion divides."""
BFLOAT16_SHAPES = ((1, 1, 1), (4, 64, 256), (5, 65, 257), (3, 17, 31), (67, 130, 520), (256, 513, 48), (2, 3, 4099))


# Declared kernels


def kernel_cases(kernel: Kernel) -> Iterator[GemmCase]:
    """The GEMMs for this kernel alone, beside those for every subject."""
    if kernel.is_microscaled:
        yield from _microscaled(kernel)
        return
    if kernel.is_grouped:
        rowwise = Granularity.ROWWISE, Granularity.ROWWISE
        fasts = tuple(fast for fast in (True, False) if kernel.has_accumulation(rowwise, fast))
        yield from grouped_cases(fasts, kernel.group_multiples)
    vector, square = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
    pairs = {(vector, square) if pair == (square, square) else pair for pair in kernel.scales}
    for pair in HOPPER.granularity_pairs:
        if pair in pairs and pair[0].is_blockwise:
            yield from _blockwise(pair)
    # Small GEMMs in which each concern of a kernel shows.
    for kind in KINDS:
        is_asked = kind.pair in pairs and kernel.has_accumulation(kind.pair, kind.use_fast_accum)
        if is_asked and (kernel.takes_bias or not kind.with_bias):
            for case in (case for probe in probes(kind, takes_any_size=True) for case in probe.cases()):
                if case.out_dtype in kernel.out_dtypes:
                    yield replace(case, id=f"probe {kind.name}: {case.id}", family=Family.PROBES)
    combinations = [c for c in (*DENSE, *BLOCKS) if c.granularities in pairs and c.formats in kernel.formats]
    combinations = [c for c in combinations if kernel.has_accumulation(c.granularities, c.use_fast_accum)]
    for family in (size_cases, code_cases, large_value_cases, turn_cases):
        yield from family(combinations)
    if kernel.arrays != "jax":  # where an array of JAX lies is JAX's choice
        layouts = {"a": kernel.a, "b": kernel.b}
        yield from memory_cases(combinations, [name for name, layout in layouts.items() if layout.takes_padding])


def _microscaled(kernel: Kernel) -> Iterator[GemmCase]:
    kinds = [kind for kind in MX_KINDS if kind.is_grouped == kernel.is_grouped]
    if kernel.is_grouped:
        yield from mx_grouped_cases(kernel.group_multiples)
    else:
        kinds = [kind for kind in kinds if kernel.takes_bias or not kind.with_bias]
        yield from mx_cases(with_bias=kernel.takes_bias)
    multiple = kernel.group_multiples.get(GroupKind.ROWS, 0)
    for kind in kinds:
        for probe in probes(kind, takes_any_size=True, group_multiple=multiple or 1) if multiple else ():
            for case in probe.cases():
                if case.out_dtype in kernel.out_dtypes:
                    yield replace(case, id=f"probe {kind.name}: {case.id}", family=Family.PROBES)


def _blockwise(pair: tuple[Granularity, Granularity]) -> Iterator[GemmCase]:
    formats, words = HOPPER.block_scaled_format_pairs[0], f"{pair[0].value} x {pair[1].value}"
    for shape, distribution in product(BLOCK_SHAPES, CODE_DISTRIBUTIONS):
        name = f"{words} {distribution} {'x'.join(map(str, shape))}"
        yield scaled_case(name, pair, formats, shape, distribution)
    for number, value in enumerate(dict.fromkeys(VECTOR_SCALES)):
        name = f"{Family.SCALES.value} {number} {words} {value:.3g}"
        case = scaled_case(name, pair, formats, (144, 144, 272), "normal", family=Family.SCALES)
        scale_a, scale_b = (scale.copy() for scale in case.scales)
        scale_a[-1], scale_b[:, -1] = value, value
        yield replace(case, scale_a=scale_a, scale_b=scale_b)


def grouped_cases(
    use_fast_accum: tuple[bool, ...] = (True, False), kinds: Mapping[GroupKind, int] = dict.fromkeys(GroupKind, 1)
) -> Iterator[GemmCase]:
    """Sizes of groups with these accumulations and all distributions, values of scales, and calls in turn.

    `kinds` gives the multiples to which the sizes of groups are raised.
    """
    cases: list[GemmCase] = []
    for kind, multiple in kinds.items():
        words, calls, last = "grouped", list(product(GROUPS, use_fast_accum)), 1
        if kind is not GroupKind.ROWS:  # a whole N or K is one that the hardware takes
            words, calls, last = f"grouped {kind.name.lower()}", list(zip(GROUPS, cycle(use_fast_accum))), ALIGNED
        for number, (ends, fast) in enumerate(calls):
            distribution = CODE_DISTRIBUTIONS[number % len(CODE_DISTRIBUTIONS)]
            name, shape = f"{words} {number} {distribution}", GROUPED_SHAPES[number // 2 % len(GROUPED_SHAPES)]
            ends = _raised(ends, multiple)
            ends = (*ends[:-1], -(-ends[-1] // last) * last)
            cases.append(grouped_case(name, ends, shape, distribution, rng(name), kind=kind, use_fast_accum=fast))
    yield from cases
    if GroupKind.ROWS in kinds:
        yield from _layer_groups(use_fast_accum, kinds[GroupKind.ROWS])
        yield from (_with_rows_behind(case) for case in cases[::8] if case.group_kind is GroupKind.ROWS)
    for number, case in enumerate(cases):
        if case.distribution == "bits":
            (scale_a, scale_b), values = case.scales, np.array(VECTOR_SCALES, np.float32)
            scaled = replace(
                case, scale_a=np.resize(values, scale_a.shape), scale_b=np.resize(values[::-1], scale_b.shape)
            )
            yield replace(scaled, id=f"{Family.SCALES.value} of groups {number}", family=Family.SCALES)
            turned = replace(case, id=f"{case.id} turned", scale_a=scale_a[::-1].copy())
            yield replace(case, id=f"{Family.TURNS.value} of groups {number}", between=(turned,), family=Family.TURNS)


def _raised(ends: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """The ends of groups whose sizes are raised to a multiple."""
    return tuple(accumulate(-(-size // multiple) * multiple for size in np.diff(ends, prepend=0).tolist()))


def _layer_groups(use_fast_accum: tuple[bool, ...], multiple: int) -> Iterator[GemmCase]:
    for number, (ends, shape) in enumerate(LAYER_GROUPS):
        name, fast = f"grouped layer {number}", use_fast_accum[number % len(use_fast_accum)]
        yield grouped_case(name, _raised(ends, multiple), shape, "bits", rng(name), use_fast_accum=fast)


def _with_rows_behind(case: GemmCase) -> GemmCase:
    # The same groups among more rows, which are finite numbers and belong to none.
    rows = np.resize(case.a, (len(case.a) + BEHIND, case.k))
    scale_a = np.resize(case.scales[0], len(rows))
    return replace(case, id=f"{case.id} behind", a=rows, scale_a=scale_a, family=Family.BEHIND)


# The native engine


def _apart(x: np.ndarray) -> np.ndarray:
    # The rows three elements apart, the first at an odd address.
    memory = np.zeros(len(x) * (x.shape[1] + 3) * x.itemsize + 1, np.uint8)
    whole = memory[1:].view(x.dtype) if x.itemsize == 1 else memory[:-1].view(x.dtype)
    rows = whole.reshape(len(x), -1)[:, : x.shape[1]]
    rows[...] = x
    return rows


def _every_other(x: np.ndarray) -> np.ndarray:
    # Along both dimensions, and NaN between.
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
    """GEMMs of every family that is cheap, and what a GPU would refuse."""
    combinations = (*DENSE, *BLOCKS)
    cases = [*size_cases(combinations, _MOST), *code_cases(combinations), *large_value_cases(combinations)]
    # Every output type: the order of the scales shows in one of 10^5 outputs of 16 bits.
    for i, case in enumerate(grouped_cases()):
        if case.a.size * case.b.shape[-2] <= _MOST:
            cases.append(replace(case, out_dtype=HIGH_PRECISION[i % 3]))
    return (*cases, *_layouts(), *_bfloat16())


def _layouts() -> Iterator[GemmCase]:
    # Every layout of a with another of b and of their scales, with every combination.
    layouts = list(LAYOUTS)
    for number, (combination, layout) in enumerate(product((*DENSE, *BLOCKS), layouts)):
        other = layouts[(layouts.index(layout) + 1 + number // len(layouts)) % len(layouts)]
        case = scaled_case(
            f"{Family.STRIDES.value} {number} {layout} and {other}",
            combination.granularities,
            combination.formats,
            TAILS,
            "bits",
            with_bias=not combination.granularities[0].is_blockwise and number % 2 == 0,
            out_dtype=HIGH_PRECISION[number % 3],
            use_fast_accum=combination.use_fast_accum,
            family=Family.STRIDES,
        )
        of_a, of_b = LAYOUTS[layout], LAYOUTS[other]
        scale_a, scale_b = case.scales
        bias = None if case.bias is None else of_a(case.bias[:, None])[:, 0]
        yield replace(case, a=of_a(case.a), b=of_b(case.b), scale_a=of_b(scale_a), scale_b=of_a(scale_b), bias=bias)


def _bfloat16() -> Iterator[GemmCase]:
    # Sizes, layouts and slices of K of GEMMs without scales.
    for number, (shape, distribution) in enumerate(product(BFLOAT16_SHAPES, BF16_DISTRIBUTIONS)):
        name = f"bf16 {'x'.join(map(str, shape))} {distribution}"
        of_a, of_b = rng(name).permutation(list(LAYOUTS))[:2]
        case = bfloat16_case(name, shape, distribution, HIGH_PRECISION[number % 3], split_k=1 + number % 3)
        yield replace(case, a=LAYOUTS[of_a](case.a), b=LAYOUTS[of_b](case.b), family=Family.STRIDES)

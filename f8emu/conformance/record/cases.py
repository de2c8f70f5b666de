"""Which GEMMs `f8emu record` runs, as tables.

Every table entry is tried; what the library refuses is listed in the recorded file, never dropped in silence. Operands
depend on the seed, and are drawn once for all the cases that share them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.distributions import (
    CODES,
    SAMPLED,
    bfloat16_case,
    drawn_sample,
    drawn_scales,
    grouped_case,
    rng,
    scaled_case,
)
from f8emu.conformance.cases.families import BLOCK_PAIRS, VECTOR_SCALES
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, HOPPER, Format, Granularity, SpecError
from f8emu.spec.gemm_call import GroupKind

PAIRS = HOPPER.format_pairs
REFUSED_PAIR = (E5M2, E5M2)
# M, N, K. 1040, 16 and 144 end with half a step of 32; 144 ends so after the restart at 128 [ACC-1], [CHAIN-2].
SHAPES = ((64, 96, 512), (48, 80, 1040), (16, 16, 16), (32, 64, 4096), (32, 16, 144))
# Each pair of formats meets each shape with the next one; the seed says with which they begin
DISTRIBUTIONS = ("normal", "outlier", "gradient", "same", "bits", "cancellation", "subnormals")
OUTPUTS = (BFLOAT16, FLOAT32, FLOAT16)
# Small outputs with a long K, which the library may cut into slices [CHAIN-3]; rowwise has not been seen to
SPLITK_SHAPES = ((64, 64, 8192), (16, 64, 16384), (64, 32, 6144), (32, 64, 12288))
SPLITK_SAMPLED_SHAPES = ((256, 256, 16384), (16, 1024, 16384))
# Shapes from transformer layers; 24 rows and columns of each are kept
LAYER_SHAPES = ((8192, 4096, 4096), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 8192, 28672))
# Formats, fast accumulation and distribution, as in a forward and in a backward GEMM
LAYER_KINDS = (((E4M3FN, E4M3FN), True, "outlier"), ((E5M2, E4M3FN), False, "gradient"))
# 640 = 5 blocks, which the layout of 128x128 scales pads to 8; 144 rows are one block and an eighth
BLOCKWISE_SHAPES = ((128, 128, 512), (256, 128, 1024), (144, 256, 640))
# Cumulative row ends [EPI-6], N, K. The second has an empty group.
GROUPS = (((32, 96, 112), 64, 512), ((16, 16, 80, 256), 96, 1040))
# For every kind the ends of groups, in sizes that a GPU takes, and the other two of M, N, K; a batch of 3 has 17 rows
GROUPS_OF_KINDS: dict[GroupKind, tuple[tuple[int, ...], tuple[int, int]]] = {
    GroupKind.ROWS: ((0, 1, 16, 33, 48), (16, 144)),
    GroupKind.COLUMNS: ((8, 8, 24, 48), (17, 144)),
    GroupKind.INNER: ((16, 16, 48, 144, 288), (17, 32)),
    GroupKind.BATCH: ((17, 34, 51), (16, 272)),
}
BF16_SHAPES = ((64, 96, 512), (48, 80, 1040), (64, 64, 4096), (16, 64, 16384))
_TENSOR = (Granularity.TENSORWISE, Granularity.TENSORWISE)
_BY_ROW: dict[str, Any] = {"granularity_a": Granularity.ROWWISE, "granularity_b": Granularity.ROWWISE}
_WITH_BIAS: dict[str, Any] = {"with_bias": True, "out_dtype": BFLOAT16}


class PlannedCase(NamedTuple):
    """One GEMM to run; of a sampled one `gemm` holds the sample alone."""

    name: str
    gemm: GemmCase


def plan(seed: int, only: str | None = None) -> tuple[PlannedCase, ...]:
    """Every case of the tables above, or of one section, numbered in order; the same seed gives the same operands."""
    functions = (_scaled, _long, _special, _blockwise, _grouped, _bf16, _epilogues, _group_kinds)
    sections = {section.__name__.removeprefix("_").replace("_", "-"): section for section in functions}
    if only is not None and only not in sections:
        raise SpecError(f"record: only must be one of {', '.join(sections)}; got {only!r}")
    cases = (case for section in ([sections[only]] if only else functions) for case in section(seed))
    return tuple(case._replace(gemm=replace(case.gemm, id=f"{i:03d}")) for i, case in enumerate(cases))


def _both(
    name: str, formats: tuple[Format, Format], shape: tuple[int, int, int], distribution: str, **fields: Any
) -> tuple[GemmCase, GemmCase]:
    """The tensorwise GEMM and the rowwise one of the same operands; both with a bias."""
    case = scaled_case(name, _TENSOR, formats, shape, distribution, **_WITH_BIAS, **fields)
    (m, n, k), by_row = shape, Granularity.ROWWISE
    scale_a, scale_b = drawn_scales(by_row, m, k, name, "a"), drawn_scales(by_row, n, k, name, "b").T
    return case, replace(case, mode=Mode.ROWWISE, scale_a=scale_a, scale_b=scale_b, **_BY_ROW)


def _options(
    name: str,
    gemm: GemmCase,
    *,
    fast: tuple[bool, ...] = (True, False),
    outputs: tuple[Format, ...] = OUTPUTS,
    with_bias: bool = False,
) -> Iterator[PlannedCase]:
    gemm = gemm if with_bias else replace(gemm, bias=None)
    for use_fast_accum, out_dtype in product(fast, outputs):
        yield PlannedCase(name, replace(gemm, use_fast_accum=use_fast_accum, out_dtype=out_dtype))


def _scaled(seed: int) -> Iterator[PlannedCase]:
    """Tensorwise and rowwise: formats, shapes and distributions, with and without a bias."""
    for i, (pair, shape) in enumerate(product(PAIRS, SHAPES)):
        distribution = DISTRIBUTIONS[(i + seed) % len(DISTRIBUTIONS)]
        for gemm in _both(f"{seed} scaled {i}", pair, shape, distribution):
            yield from _options(f"{gemm.mode.value}-{distribution}", gemm)
            # the library has been seen to refuse a bias beside a float32 output
            outputs = (BFLOAT16, FLOAT32) if i == 0 else (BFLOAT16,)
            yield from _options(f"{gemm.mode.value}-bias", gemm, outputs=outputs, with_bias=True)
    for gemm in _both(f"{seed} refused", REFUSED_PAIR, SHAPES[0], "normal"):
        yield from _options(f"{gemm.mode.value}-normal", gemm, fast=(True,), outputs=(BFLOAT16,))


def _long(seed: int) -> Iterator[PlannedCase]:
    """GEMMs that may be split along K, and layers of models."""
    kinds = [("splitk", shape, PAIRS[0], (True, False), "normal") for shape in (*SPLITK_SHAPES, *SPLITK_SAMPLED_SHAPES)]
    layers = product(LAYER_SHAPES, LAYER_KINDS)
    kinds += [("layer", shape, pair, (fast,), distribution) for shape, (pair, fast, distribution) in layers]
    for name, (m, n, k), formats, fast, distribution in kinds:
        words, fields = f"{seed} {name} {m}x{n}x{k} {distribution}", {}
        if name == "layer" or (m, n, k) in SPLITK_SAMPLED_SHAPES:
            fields["sample"] = drawn_sample(m, n, rng(words))
            m, n = min(m, SAMPLED), min(n, SAMPLED)
        for gemm in _both(words, formats, (m, n, k), distribution, **fields):
            yield from _options(name, gemm, fast=fast, outputs=(BFLOAT16, FLOAT32))


def _special(seed: int) -> Iterator[PlannedCase]:
    """Specials among the codes of a row, each beside each; then among the scales of rows."""
    for i, pair in enumerate(PAIRS):
        for gemm in _both(f"{seed} special {i}", pair, (16, 16, 64), "specials"):
            yield from _options("special", gemm)
    _, by_row = _both(f"{seed} special scales", PAIRS[0], (16, 16, 64), "normal")
    yield from _options("special-scales", replace(by_row, scale_a=np.array(VECTOR_SCALES, np.float32)[:, None]))


def _blockwise(seed: int) -> Iterator[PlannedCase]:
    """[EPI-5] The three kinds; other formats, fast accumulation and a bias are tried on the first shape."""
    for pair, shape in product(BLOCK_PAIRS, BLOCKWISE_SHAPES):
        kinds, is_first = f"{pair[0].value} x {pair[1].value}", shape == BLOCKWISE_SHAPES[0]
        for formats in PAIRS if is_first else PAIRS[:1]:
            gemm = scaled_case(f"{seed} {kinds} {shape} {formats}", pair, formats, shape, "outlier", **_WITH_BIAS)
            yield from _options(f"blockwise {kinds}", gemm, fast=(False,))
            if is_first:
                name = f"blockwise-bias {kinds}"
                yield from _options(name, gemm, fast=(False,), outputs=(BFLOAT16,), with_bias=True)
                yield from _options(f"blockwise {kinds}", gemm, fast=(True,), outputs=(BFLOAT16,))


def _grouped(seed: int) -> Iterator[PlannedCase]:
    for ends, n, k in GROUPS:
        for formats in PAIRS if n == GROUPS[0][1] else PAIRS[:1]:
            name = f"{seed} grouped {n} {formats}"
            yield from _options("grouped", grouped_case(name, ends, (n, k), "outlier", rng(name), formats, **_BY_ROW))


def _group_kinds(seed: int) -> Iterator[PlannedCase]:
    """[EPI-6] Every kind with every distribution: scales of like size, far apart, and special ones in turn."""
    for i, (distribution, kind) in enumerate(product(CODES, GROUPS_OF_KINDS)):
        name = f"{seed} {kind.name.lower()} {distribution}"
        ends, shape = GROUPS_OF_KINDS[kind]
        gemm = grouped_case(name, ends, shape, distribution, r := rng(name), kind=kind, **_BY_ROW)
        assert gemm.scale_a is not None and gemm.scale_b is not None
        if i % 3 == 1:
            shapes = gemm.scale_a.shape, gemm.scale_b.shape
            gemm = gemm.scaled(*(np.exp2(r.choice([-110, -60, 0, 60, 110], shape)) for shape in shapes))
        elif i % 3 == 2:
            gemm = replace(gemm, scale_a=np.resize(np.array(VECTOR_SCALES, np.float32), gemm.scale_a.shape))
        yield from _options(f"{gemm.mode.value}-{distribution}", gemm, outputs=(BFLOAT16,))


def _bf16(seed: int) -> Iterator[PlannedCase]:
    """One chain and split-K [BF16-1], [BF16-2]."""
    for m, n, k in BF16_SHAPES:
        gemm = bfloat16_case(f"{seed} bf16 {m}x{n}x{k}", (m, n, k), "blocks", BFLOAT16)
        yield from _options("bf16", gemm, fast=(False,), outputs=(FLOAT32, BFLOAT16))


def _epilogues(seed: int) -> Iterator[PlannedCase]:
    """Scaled sums of -0, by a negative scale of zeros and by underflow, beside no bias and one of -0 [EPI-1]; grouped
    GEMMs in which a product with one scale alone overflows or underflows [EPI-6].
    """
    for gemm in _both(f"{seed} zeros", PAIRS[0], (16, 16, 64), "normal"):
        gemm.a[::2] = 0
        for factor in (-1, 2.0**-144):
            scaled = replace(gemm, bias=np.full(16, -0.0, ml_dtypes.bfloat16)).scaled(factor)
            yield from _options("zeros", scaled, fast=(True,))
            yield from _options("zeros-bias", scaled, fast=(True,), outputs=(BFLOAT16,), with_bias=True)
    name, r = f"{seed} grouped scales", rng(seed, "far apart")
    gemm = grouped_case(name, (16, 16, 48), (32, 144), "normal", r, **_BY_ROW)
    far_apart = [
        np.ldexp(r.uniform(1, 2, shape), r.choice([-147, -100, 0, 100, 122], shape)).astype(np.float32)
        for shape in ((48,), (3, 32))
    ]
    yield from _options(
        "grouped-scales", replace(gemm, scale_a=far_apart[0], scale_b=far_apart[1]), outputs=(BFLOAT16,)
    )

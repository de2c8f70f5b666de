"""The table of generated GEMMs: tails, distributions, scales, biases, split-K. No expected values."""

from collections.abc import Iterator
from functools import cache
from itertools import product

from f8emu.conformance.cases.distributions import bfloat16_case, grouped_case, rng, scaled_case
from f8emu.conformance.cases.families import VALUE_SHAPES, value_cases
from f8emu.conformance.cases.gemm import Family, GemmCase, Mode
from f8emu.spec import FLOAT32, HIGH_PRECISION, HOPPER, Format, Granularity

CODE_DISTRIBUTIONS = ("bits", "normal", "same", "cancellation", "subnormals", "specials")
BF16_DISTRIBUTIONS = ("normal", "gradient", "blocks", "cancellation", "outlier", "specials")

GEMM_SHAPES: dict[tuple[Format, Format], tuple[tuple[int, int, int], ...]] = {
    formats: (shape, (5, 7, 401)) if formats == HOPPER.format_pairs[0] else (shape,)
    for formats, shape in VALUE_SHAPES.items()
}
"""M, N, K: tails of a step (32), of a promotion (128), of everything. Few: to a compiler each is a program."""
BLOCKWISE_SHAPES: tuple[tuple[int, int, int], ...] = ((128, 128, 384), (131, 37, 330))
SPLITS: tuple[tuple[int, int, bool], ...] = ((2, 512, True), (3, 1024, False), (4, 1040, True), (4, 1040, False))
"""[CHAIN-3] (slices, K, fast): whole and rounded lengths, a last slice that is shorter, one that is empty."""
BLOCKWISE_SPLITS: tuple[tuple[int, int], ...] = ((2, 640), (2, 1152), (3, 1664))
"""The same of (slices, K) for each pair with block scales, in the order of the chip."""
BF16_SHAPES: tuple[tuple[int, int, int, int], ...] = ((16, 32, 208, 1), (5, 7, 77, 1), (16, 16, 528, 3))
"""M, N, K, slices."""
ALIGNED = HOPPER.size_multiple
"""The library takes multiples of this, blockwise of 128."""


def is_aligned(case: GemmCase) -> bool:
    """Whether the hardware's library takes a GEMM of this size."""
    multiple = 128 if case.mode is Mode.BLOCKWISE else ALIGNED
    return all(n > 0 and n % multiple == 0 for n in (*case.output_shape, case.k))


@cache
def gemm_cases() -> tuple[GemmCase, ...]:
    """Generated GEMMs: every distribution with every pair of formats, both chainings, all modes, biases and outputs.

    And those families that are not for kernels alone: values of scales and of the bias.
    """
    return (*_dense(), *_blockwise(), *_split(), *_grouped(), *_bf16(), *value_cases())


def _dense() -> Iterator[GemmCase]:
    granularities = (Granularity.TENSORWISE, Granularity.ROWWISE)
    table = product(CODE_DISTRIBUTIONS, HOPPER.format_pairs, granularities, (True, False))
    for i, (distribution, formats, granularity, fast) in enumerate(table):
        for shape in GEMM_SHAPES[formats]:
            chain = "fast" if fast else "promoted"
            out_dtype = HIGH_PRECISION[i // 2 % 3]
            yield scaled_case(
                f"{granularity.value} {chain} {distribution} {formats[0].name} x {formats[1].name} {shape[0]}",
                (granularity, granularity),
                formats,
                shape,
                distribution,
                with_bias=i % 5 < 3 and out_dtype != FLOAT32,  # the library has no bias beside float32 output
                out_dtype=out_dtype,
                use_fast_accum=fast,
            )


def _blockwise() -> Iterator[GemmCase]:
    pairs = [pair for pair in HOPPER.granularity_pairs if pair[0].is_blockwise]
    for i, (pair, shape) in enumerate(product(pairs, BLOCKWISE_SHAPES)):
        name = f"{pair[0].value} x {pair[1].value} {'x'.join(map(str, shape))}"
        yield scaled_case(name, pair, HOPPER.format_pairs[0], shape, "normal", out_dtype=HIGH_PRECISION[i % 2])


def _split() -> Iterator[GemmCase]:
    tensorwise, formats = (Granularity.TENSORWISE, Granularity.TENSORWISE), HOPPER.format_pairs[0]
    pairs = [pair for pair in HOPPER.granularity_pairs if pair[0].is_blockwise]
    of_blocks = HOPPER.block_scaled_format_pairs[0]
    table = (
        *((tensorwise, formats, "fast" if fast else "promoted", fast, slices, k) for slices, k, fast in SPLITS),
        *(
            (pair, of_blocks, f"{pair[0].value} x {pair[1].value}", False, slices, k)
            for pair, (slices, k) in zip(pairs, BLOCKWISE_SPLITS, strict=True)
        ),
    )
    for pair, formats, words, fast, slices, k in table:
        options = {"use_fast_accum": fast, "split_k": slices, "family": Family.SLICES}
        yield scaled_case(f"split-K {slices} of {k} {words}", pair, formats, (16, 16, k), "normal", **options)


def _grouped() -> Iterator[GemmCase]:
    """[EPI-6] Groups of different sizes, one of them empty."""
    r = rng("grouped")
    for fast in (True, False):
        name = f"grouped {'fast' if fast else 'promoted'}"
        yield grouped_case(name, (16, 16, 48, 64), (32, 208), "normal", r, use_fast_accum=fast)


def _bf16() -> Iterator[GemmCase]:
    """The bfloat16 matmul [BF16-1], with split-K [BF16-2]."""
    for i, distribution in enumerate(BF16_DISTRIBUTIONS):
        m, n, k, slices = BF16_SHAPES[i % len(BF16_SHAPES)]
        name = f"bf16 {distribution}" + (f" split-K {slices}" if slices > 1 else "")
        yield bfloat16_case(name, (m, n, k), distribution, HIGH_PRECISION[i % 2], split_k=slices)

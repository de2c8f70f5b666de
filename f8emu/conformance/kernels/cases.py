"""Generated GEMMs for declared kernels alone: the table for everybody has few with block scales and with groups.

And the probes of the diagnosis: of random GEMMs with a 16-bit output, one in 10^5 shows in which order a kernel scales.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from f8emu.conformance.diagnosis.probe import KINDS, Kind
from f8emu.conformance.diagnosis.probes import probes
from f8emu.conformance.distributions import draw_codes, rng
from f8emu.conformance.gemm import GemmCase, Mode
from f8emu.conformance.gemm_cases import CODE_DISTRIBUTIONS, scaled_case
from f8emu.conformance.kernels.kernel import Accumulation, Kernel
from f8emu.spec import E4M3FN, HOPPER, Granularity

BLOCK_SHAPES: tuple[tuple[int, int, int], ...] = ((128, 128, 128), (16, 256, 1536), (256, 384, 512))
"""M, N, K: one block, many along K, more than a tile of any kernel; every distribution with the first two."""
GROUPS: tuple[tuple[int, ...], ...] = ((16, 48, 48, 128), (0, 0, 160, 160), (32, 64, 96, 128))
"""Where groups of rows end: different, all rows in one, all alike."""
_GROUPED_N, _GROUPED_K = 48, 512


def kernel_cases(kernel: Kernel) -> Iterator[GemmCase]:
    """The GEMMs that this kernel is asked beside those of everybody."""
    if kernel.is_grouped:
        yield from _grouped()
    squares = Granularity.BLOCKWISE_128X128
    asked = {(Granularity.BLOCKWISE_1X128, squares) if pair == (squares, squares) else pair for pair in kernel.scales}
    for pair in HOPPER.granularity_pairs:
        if pair in asked and pair[0].is_blockwise:
            yield from _blockwise(pair)
    for kind in KINDS:
        fixed = not kernel.chooses_accumulation and not kind.pair[0].is_blockwise
        is_other = fixed and kind.use_fast_accum is not (kernel.accumulation is Accumulation.FAST)
        if kind.pair in asked and not is_other and (kernel.takes_bias or not kind.with_bias):
            yield from _telling(kernel, kind)


def _telling(kernel: Kernel, kind: Kind) -> Iterator[GemmCase]:
    """Small GEMMs in which each concern of a kernel shows."""
    for probe in probes(kind, takes_any_size=True):
        for case in probe.cases():
            if case.out_dtype in kernel.out_dtypes:
                yield replace(case, id=f"probe {kind.name}: {case.id}")


def _blockwise(pair: tuple[Granularity, Granularity]) -> Iterator[GemmCase]:
    for shape in BLOCK_SHAPES:
        for distribution in CODE_DISTRIBUTIONS if shape[0] < BLOCK_SHAPES[-1][0] else ("normal",):
            name = f"{pair[0].value} x {pair[1].value} {distribution} {'x'.join(map(str, shape))}"
            yield scaled_case(name, pair, HOPPER.block_scaled_format_pairs[0], shape, distribution)


def _grouped() -> Iterator[GemmCase]:
    for i, distribution in enumerate(CODE_DISTRIBUTIONS):
        ends = GROUPS[i % len(GROUPS)]
        name = f"grouped {distribution} ends {' '.join(map(str, ends))}"
        r = rng(name)
        b = draw_codes(distribution, (len(ends) * _GROUPED_N, _GROUPED_K), E4M3FN, name + "b")
        yield GemmCase(
            id=name,
            mode=Mode.GROUPED_ROWWISE,
            a=draw_codes(distribution, (ends[-1], _GROUPED_K), E4M3FN, name + "a"),
            b=b.reshape(len(ends), _GROUPED_N, _GROUPED_K),
            scale_a=r.uniform(0.1, 9, ends[-1]).astype(np.float32),
            scale_b=r.uniform(0.1, 9, (len(ends), _GROUPED_N)).astype(np.float32),
            offs=np.array(ends, np.int32),
            use_fast_accum=i % 2 == 0,
        )

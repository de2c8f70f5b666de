"""A scaled GEMM with seeded codes, scales and bias."""

import numpy as np

from f8emu.conformance.cases.distributions import draw, draw_codes, rng
from f8emu.conformance.cases.gemm import Family, GemmCase, Mode, Sample
from f8emu.spec import FLOAT32, Format, Granularity


def _scale(granularity: Granularity, rows: int, k: int, *key: object) -> np.ndarray:
    """Scales of any significand, another one in every group."""
    shape = granularity.scale_shape(rows, k)
    r = rng("scale", granularity.value, rows, k, *key)
    return (r.uniform(1, 2, shape) * np.exp2(r.integers(-9, 5, shape).astype(float))).astype(np.float32)


def scaled_case(
    name: str,
    pair: tuple[Granularity, Granularity],
    formats: tuple[Format, Format],
    shape: tuple[int, int, int],
    distribution: str,
    *,
    with_bias: bool = False,
    out_dtype: Format = FLOAT32,
    use_fast_accum: bool = False,
    split_k: int = 1,
    sample: Sample | None = None,
    family: Family = Family.CODES,
) -> GemmCase:
    """A scaled GEMM with drawn codes and scales."""
    m, n, k = shape
    return GemmCase(
        id=name,
        mode=Mode.BLOCKWISE if pair[0].is_blockwise else Mode(pair[0].value),
        a=draw_codes(distribution, (m, k), formats[0], name + "a"),
        b=draw_codes(distribution, (n, k), formats[1], name + "b"),
        scale_a=_scale(pair[0], m, k, name, "a"),
        scale_b=_scale(pair[1], n, k, name, "b").T,
        granularity_a=pair[0],
        granularity_b=pair[1],
        bias=draw("normal", (1, n), out_dtype, name)[0] if with_bias else None,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        sample=sample,
        distribution=distribution,
        family=family,
    )

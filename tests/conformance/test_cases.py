"""The tables of cases: that they hold what the suite claims to try."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from f8emu.conformance import load_subject
from f8emu.conformance.cases import tables as cases
from f8emu.conformance.cases.distributions import (
    CODES,
    VALUES,
    codes_of,
    draw,
    draw_codes,
    dtype_of,
    grouped_case,
    rng,
    scaled_case,
    tiled_sample,
)
from f8emu.conformance.cases.families import BLOCK_PAIRS, BLOCKS, DENSE, Pair, code_cases
from f8emu.conformance.cases.gemm import Family, Mode, Sample
from f8emu.conformance.cases.tables import gemm_cases, is_aligned
from f8emu.conformance.compare import different
from f8emu.conformance.kernels.known import KERNELS
from f8emu.conformance.layers import trace
from f8emu.conformance.layers.layer import LayerMode, Place, describe_layer, place_of
from f8emu.conformance.layers.layer_cases import layer_cases
from f8emu.conformance.layers.trace import layer_parts, planned_slices, trace_parts
from f8emu.conformance.layers.training import padded
from f8emu.conformance.run.extra_gemms import kernel_cases
from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import E4M3FN, E5M2, FLOAT8, FLOAT32, HIGH_PRECISION, Format
from f8emu.spec.recipe import RECIPES, ROWWISE_WITH_GW_HP
from f8emu.spec.scaling import Granularity


@pytest.mark.parametrize("fmt", FLOAT8, ids=str)
def test_float32_boundaries_hold_every_midpoint_and_its_neighbours(fmt: Format) -> None:
    x = cases.float32_boundaries(fmt)
    codes = set(codes_of(x).tolist())
    values = np.arange(fmt.max_code + 1, dtype=np.uint8).view(dtype_of(fmt)).astype(np.float64)
    midpoints = (values[1:] + values[:-1]) / 2
    overflow = Fraction(fmt.max) + Fraction(2) ** (fmt.max_exponent - fmt.fraction_bits - 1)
    for point in (*values, *midpoints, float(overflow)):
        code = int(np.float32(point).view(np.uint32))
        for near in range(max(code - 2, 0), code + 3):
            assert near in codes and near | 0x8000_0000 in codes, (point, near)
    assert np.isnan(x).sum() >= 8 and np.isinf(x).sum() >= 2
    assert {0x0000_0000, 0x8000_0000, 0x0000_0001, 0x007F_FFFF, 0x7F7F_FFFF} <= codes


ANYBODY = {mode for mode in Mode if not mode.is_microscaled}
"""The modes of the GEMMs that every subject is asked; E8M0 scales are for kernels that declare them."""


def test_casts_cover_every_source_format_and_policy() -> None:
    assert len(cases.CASTS) == len(set(cases.CASTS)) == 3 * 4 * 2
    assert all(cases.cast_inputs(s, t).size == 65_536 for s, t, _ in cases.CASTS if s != FLOAT32)


@pytest.mark.parametrize(
    ("name", "fmt"), [*product(VALUES, HIGH_PRECISION), *product(CODES, HOPPER.operand_formats)], ids=str
)
def test_draws_are_seeded_and_finite_but_for_specials(name: str, fmt: Format) -> None:
    drawn = draw if fmt in HIGH_PRECISION else draw_codes
    x, again, other = (drawn(name, (40, 300), fmt, seed) for seed in (1, 1, 2))
    assert x.dtype == dtype_of(fmt) and x.tobytes() == again.tobytes() != other.tobytes()
    assert np.isfinite(x.astype(np.float32)).all() == (name != "specials")


def test_every_block_has_another_magnitude() -> None:
    """Equal scales could hide an index error."""
    x = np.abs(draw("blocks", (256, 512), FLOAT32, 0))
    squares = x.reshape(2, 128, 4, 128).max(axis=(1, 3)).ravel()
    vectors = x.reshape(256, 4, 128).max(axis=2)
    assert np.unique(np.log2(squares).round()).size == squares.size
    assert all(np.unique(row).size == 4 for row in vectors)
    assert np.unique(x.max(axis=1)).size > 200


def test_specials_hold_what_they_say() -> None:
    x = draw("specials", (40, 300), FLOAT32, 0)
    assert np.isnan(x).any() and np.isposinf(x).any() and np.isneginf(x).any()
    assert (codes_of(x) == 0x8000_0000).sum() >= 300
    assert ((x != 0) & (np.abs(x) < 2.0**-126)).any()


def test_quantised_codes_fill_the_format() -> None:
    """Or a wrong factor would give the same zeros and the same saturated codes."""
    x = cases.values("blocks", cases.SQUARE_SHAPE, FLOAT32)
    for granularity in Granularity:
        factors = cases.inv_scales(x, granularity, E4M3FN)
        assert factors.shape == granularity.scale_shape(*x.shape)
        assert np.unique(factors).size == factors.size


def test_generated_gemms_cover_the_options() -> None:
    table = gemm_cases()
    assert len({case.id for case in table}) == len(table)
    assert {case.mode for case in table} == ANYBODY
    assert {case.out_dtype for case in table} == set(HIGH_PRECISION)
    assert {(case.granularity_a, case.granularity_b) for case in table} == set(HOPPER.granularity_pairs)
    pairs = Counter((case.a.dtype.name, case.b.dtype.name) for case in table)
    assert pairs[E5M2.name, E4M3FN.name] and pairs[E4M3FN.name, E5M2.name] and not pairs[E5M2.name, E5M2.name]
    dense = [case for case in table if case.mode in (Mode.TENSORWISE, Mode.ROWWISE)]
    options = {(c.mode, c.use_fast_accum, c.out_dtype, c.bias is not None) for c in dense if c.out_dtype != FLOAT32}
    assert len(options) == 2 * 2 * 2 * 2, "mode, chaining, output, bias: all with all"
    assert {case.split_k for case in table} == {1, 2, 3, 4}
    aligned = Counter(case.mode for case in table if is_aligned(case))
    assert set(aligned) == ANYBODY, "the hardware's library takes some of each mode"
    assert 0 < sum(aligned.values()) < len(table)


def test_each_combination_meets_each_family() -> None:
    """Tensorwise and rowwise, each pair of formats, fast and promoted; and each pair of block scales."""
    for_kernels = tuple(kernel_cases(KERNELS["torch.nn.functional.scaled_mm"]))
    # Answers of the oracle are kept by name: two GEMMs of one name would be judged by one answer.
    assert len({case.id for case in for_kernels}) == len(for_kernels) > 100
    met: dict[Family, set[object]] = {}
    for case in (*gemm_cases(), *for_kernels):
        pair = case.granularity_a, case.granularity_b
        met.setdefault(case.family, set()).add((pair, case.a.dtype.name, case.b.dtype.name, case.use_fast_accum))
    sizes = {Family.ROW, Family.ROWS, Family.COLUMNS, Family.TILES, Family.K, Family.DECODE, Family.PREFILL}
    of_all = {*sizes, Family.EVERY_CODE, Family.SCALES, Family.ALIGNMENT, Family.STRIDES, Family.TURNS}
    dense, blocks = (
        {(c.granularities, c.formats[0].name, c.formats[1].name, c.use_fast_accum) for c in combinations}
        for combinations in (DENSE, BLOCKS)
    )
    assert (len(dense), len(blocks)) == (12, 3)
    assert all(met[family] >= dense | blocks for family in of_all) and met[Family.BIAS] == dense
    codes = [codes_of(case.a)[0, 0] for case in code_cases(DENSE)]
    assert len(set(codes)) == 256


def test_layers_meet_every_recipe_dtype_and_mode() -> None:
    table = layer_cases(full_size=True)
    assert len({case.id for case in table}) == len(table)
    modes = Counter((case.recipe.name, case.mode) for case in layer_cases())
    for name in RECIPES:
        mine = [case for case in table if case.recipe.name == name]
        assert {case.with_bias for case in mine} == {True, False}
        assert any(all(size % 16 == 0 for size in case.shape) for case in mine)
        assert any(all(size % 16 for size in case.shape) for case in mine)
        assert modes[name, LayerMode.COMPILED] >= 2
        for mode in (LayerMode.TRACE, LayerMode.EAGER):
            assert {case.dtype for case in mine if case.mode is mode} == set(HIGH_PRECISION)
    traced = {case.name for case in table if case.mode is LayerMode.TRACE}
    assert traced < {case.name for case in table if case.mode is LayerMode.EAGER}


def test_layers_with_long_sums_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three GEMMs of a layer, by the plan; a judge that cut none would have other bits."""
    table = [case for case in layer_cases(full_size=True) if case.mode is LayerMode.EAGER]
    cut = {(case.recipe.name, gemm) for case in table for gemm in planned_slices(case, 1)}
    by_one_scale = set(product(("tensorwise", "delayed", "blockwise"), ("output", "grad_input", "grad_weight")))
    assert cut == by_one_scale | {("rowwise_with_gw_hp", "grad_weight")}
    case = next(case for case in table if case.recipe == ROWWISE_WITH_GW_HP and planned_slices(case, 1))
    verbs = load_subject("f8ref.numpy").verbs
    parts = layer_parts(case, verbs)
    monkeypatch.setattr(trace, "planned_slices", lambda *_, **__: {})
    uncut = layer_parts(case, verbs)
    part = case.part(Place(), "grad_weight.product")
    assert parts[part].tobytes() != uncut[part].tobytes()


def test_gemms_of_a_layer_are_told_apart_by_their_sizes() -> None:
    """In compiled code the order of the calls is the compiler's."""
    for case in layer_cases(full_size=True):
        places = range(1, case.layers + 1)
        forward = [case.gemm_sizes(layer)["output"] for layer in places]
        backward = [case.gemm_sizes(layer)[gemm] for layer in places for gemm in case.gemms[1:]]
        for sizes in (forward, backward):
            assert len({padded(size) for size in sizes}) == len(sizes), case.id


def test_tensors_of_a_layer() -> None:
    case = next(c for c in layer_cases() if c.layers == 2 and c.passes == 2)
    place = Place(layer=2)
    m, n, k = case.sizes(2)
    shapes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n), "bias": (n,)}
    tensors = case.tensors(place)
    assert {name: x.shape for name, x in tensors.items()} == shapes
    dtypes = {"input": "bfloat16", "weight": "float32", "grad_output": "bfloat16", "bias": "float32"}
    assert {name: x.dtype.name for name, x in tensors.items()} == dtypes
    first, second = case.tensors(Place()), case.tensors(Place(turn=2))
    assert np.array_equal(first["input"], tensors["input"]) and not np.array_equal(first["input"], second["input"])
    assert np.array_equal(first["weight"], second["weight"])
    assert place_of(case.part(Place(1, 2, 2), "output.a.codes")) == (Place(1, 2, 2), "output.a.codes")


def test_a_difference_of_a_layer_is_explained() -> None:
    """Every part has an explanation at every place that can differ, whatever the shape."""
    reference = load_subject("f8ref.numpy")
    for case in layer_cases():
        if max(case.shape) < 100:
            parts = (trace_parts if case.mode is LayerMode.TRACE else layer_parts)(case, reference.verbs)
            for part, array in parts.items():
                last = tuple(size - 1 for size in array.shape)
                text = describe_layer(case, part, last)
                assert text or array.ndim == 0, (case.id, part)
                assert not text.endswith("(0)"), (case.id, part)


def test_layers_are_those_of_llama() -> None:
    whole = list(cases.live_cases())
    assert len({case.id for case in whole}) == len(whole)
    table = whole[: 8 * 3 * 2 * 2]
    for case in table:
        assert case.sample is not None
        assert case.output_shape == (24, 24) == (len(case.sample.rows), len(case.sample.cols))
        assert max(case.sample.rows) < case.sample.m and max(case.sample.cols) < case.sample.n
        assert cases.TOKENS in (case.sample.m, case.k)
    sizes = {tuple(sorted((c.sample.m, c.sample.n, c.k))) for c in table if c.sample}
    assert (4096, 8192, 14336) in sizes and (8192, 8192, 28672) in sizes
    # Then decode steps, block scales and groups: of every tile of 128 a row and a column.
    others = whole[len(table) :]
    assert {case.mode for case in others} == {Mode.TENSORWISE, Mode.ROWWISE, Mode.BLOCKWISE, Mode.GROUPED_ROWWISE}
    assert {pair for c in others if c.mode is Mode.BLOCKWISE for pair in [(c.granularity_a, c.granularity_b)]} == {
        *BLOCK_PAIRS
    }
    for case in others:
        assert case.sample is not None
        ends = case.sample.ends or range(127, case.sample.m, 128)
        assert len(set(np.searchsorted(ends, case.sample.rows))) >= len(set(ends)), case.id
        assert len({column // 128 for column in case.sample.cols}) == -(-case.sample.n // 128)


@pytest.mark.parametrize("pair", [*BLOCK_PAIRS, None])
def test_a_sample_is_judged_as_the_whole(pair: Pair | None) -> None:
    """Block scales, and groups: the outputs of the sample are those of the GEMM in which it is embedded."""
    if pair is None:
        ends, rows = (130, 130, 300), (0, 1, 129, 130, 200, 299)
        case = grouped_case("sampled", (3, 3, 6), (40, 144), "bits", rng("sampled"))
        sample = Sample(m=300, n=272, rows=rows, cols=tuple(range(0, 240, 6)), ends=ends)
    else:
        sample = tiled_sample(300, 272, rng("sampled"))
        sizes = len(sample.rows), len(sample.cols), 272
        case = scaled_case("sampled", pair, (E4M3FN, E4M3FN), sizes, "bits", sample=sample)
    case = replace(case, sample=sample)
    sampled = load_subject("f8ref.numpy").gemm(case)
    whole = replace(load_subject("f8emu.native"), runs_full_size=True).gemm(case)
    assert sampled.shape == (len(sample.rows), len(sample.cols)) and not different(whole, sampled).any()
    assert np.isfinite(sampled.astype(np.float32)).any()

"""f8ref.numpy and JAX, written apart from the same spec: equal bits on drawn cases. GEMMs are f8ref.jax's, the rest is
f8emu.jax's."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

import f8emu.jax
import f8ref.jax
import f8ref.numpy
from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    E5M2,
    FORMATS,
    HOPPER,
    MAX_MARGIN,
    MIN_AMAX_FLOOR,
    AmaxHistoryReduction,
    DelayedScaling,
    Format,
    Granularity,
    Overflow,
    ScaleRule,
)
from tests.oracle import together

Array = npt.NDArray[Any]
M, K, N = 13, 300, 21


def leaves(tree: Any) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """Dtype, shape and codes of every array; None and the order of the tuples are part of the tree."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    arrays = [np.asarray(x) if x is not None else np.zeros(0, np.uint8) for x in found]
    return [(str(x.dtype), x.shape, x.reshape(-1).view(f"u{x.dtype.itemsize}").tolist()) for x in arrays]


def agree(call: Callable[[ModuleType], Any], of_jax: ModuleType = f8ref.jax) -> bool:
    return leaves(call(together)) == leaves(call(of_jax))


def typed(codes: Array, format: Format) -> Array:
    return codes.astype(f"uint{format.bits}").view(format.name)


def drawn_codes(rng: np.random.Generator, shape: tuple[int, ...], format: Format, kind: str) -> Array:
    """Codes of one kind; only `specials` holds NaN and infinities, few enough to leave plain outputs."""
    magnitude = rng.integers(0, format.max_code + 1, shape)
    if kind == "subnormal":
        magnitude = rng.integers(0, 2 * (format.fraction_mask + 1), shape)
    elif kind == "narrow":  # neighbouring exponents, many zeros: cancellation, and sums of zero
        middle = format.bias << format.fraction_bits
        magnitude = rng.integers(middle - format.fraction_mask, middle + 2 * format.fraction_mask, shape)
        magnitude = np.where(rng.random(shape) < 0.3, 0, magnitude)
    elif kind == "specials":
        beyond = rng.integers(format.max_code + 1, format.magnitude_mask + 1, shape)
        magnitude = np.where(rng.random(shape) < 0.002, beyond, magnitude)
        magnitude = np.where(rng.random(shape) < 0.1, 0, magnitude)
    sign = rng.integers(0, 2, shape) * format.sign_mask
    return typed(magnitude | sign, format)


def drawn_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Ordinary, tiny (subnormal products), negative, zero and non-finite scales."""
    scale = rng.uniform(0.5, 2, shape) * 2.0 ** rng.integers(-12, 4, shape)
    unusual = np.array([1e-39, 3e38, -0.7, 0.0, -0.0, np.inf, np.nan])[rng.integers(0, 7, shape)]
    return np.where(rng.random(shape) < 0.1, unusual, scale).astype(np.float32)


KINDS = ("any", "subnormal", "narrow", "specials")
PAIRS = [(E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2)]


@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_scaled_mm(formats: tuple[Format, Format], use_fast_accum: bool) -> None:
    rng = np.random.default_rng(80)
    options = itertools.cycle(itertools.product((False, True), (None, "float32", "bfloat16"), ("float32", "float16")))
    for kind_a, kind_b in itertools.product(KINDS, KINDS):
        a = drawn_codes(rng, (M, K), formats[0], kind_a)
        b = drawn_codes(rng, (K, N), formats[1], kind_b)
        is_rowwise, bias_dtype, out_dtype = next(options)
        granularity = Granularity.ROWWISE if is_rowwise else Granularity.TENSORWISE
        scale_a = drawn_scales(rng, granularity.scale_shape(M, K))
        scale_b = drawn_scales(rng, granularity.scale_shape(N, K)[::-1])
        bias = None if bias_dtype is None else rng.standard_normal(N).astype(bias_dtype)
        assert agree(
            lambda f8, a=a, b=b, s=scale_a, t=scale_b, g=granularity, bias=bias, out=out_dtype: f8.scaled_mm(
                a,
                b,
                s,
                t,
                granularity_a=g,
                granularity_b=g,
                bias=bias,
                out_dtype=out,
                use_fast_accum=use_fast_accum,
            )
        ), (kind_a, kind_b, granularity, bias_dtype, out_dtype)


@pytest.mark.parametrize(
    "pair", [p for p in HOPPER.granularity_pairs if p[0].is_blockwise], ids=lambda p: f"{p[0].value}-{p[1].value}"
)
def test_blockwise(pair: tuple[Granularity, Granularity]) -> None:
    rng = np.random.default_rng(81)
    m, n = 140, 150
    for kind in KINDS:
        a, b = drawn_codes(rng, (m, K), E4M3FN, kind), drawn_codes(rng, (K, n), E4M3FN, kind)
        scale_a = drawn_scales(rng, pair[0].scale_shape(m, K))
        scale_b = drawn_scales(rng, pair[1].scale_shape(n, K)[::-1])
        assert agree(
            lambda f8, a=a, b=b, s=scale_a, t=scale_b: f8.scaled_mm(
                a, b, s, t, granularity_a=pair[0], granularity_b=pair[1], out_dtype="float32"
            )
        ), kind


@pytest.mark.parametrize("split_k", [2, 3, 7])
def test_split_k(split_k: int) -> None:
    rng = np.random.default_rng(82)
    a, b = drawn_codes(rng, (M, 1000), E5M2, "specials"), drawn_codes(rng, (1000, N), E4M3FN, "any")
    one = np.ones((1, 1), np.float32)
    assert agree(lambda f8: f8.scaled_mm(a, b, one, one, out_dtype="float32", use_fast_accum=True, split_k=split_k))


@pytest.mark.parametrize(
    ("pair", "split_k_of_jax"),
    [*zip((p for p in HOPPER.granularity_pairs if p[0].is_blockwise), (2, 3, 9), strict=True)],
    ids=lambda x: "-".join(granularity.value for granularity in x) if isinstance(x, tuple) else str(x),
)
def test_split_blockwise(pair: tuple[Granularity, Granularity], split_k_of_jax: int) -> None:
    """The oracle and the engine have every S of every pair; XLA takes long to compile one, and has one of each."""
    rng = np.random.default_rng(85)
    m, n, k = 5, 150, 1700
    for split_k, kind in itertools.product((2, 3, 9), KINDS):
        a, b = drawn_codes(rng, (m, k), E4M3FN, kind), drawn_codes(rng, (k, n), E4M3FN, kind)
        scales = drawn_scales(rng, pair[0].scale_shape(m, k)), drawn_scales(rng, pair[1].scale_shape(n, k)[::-1])
        options = {"granularity_a": pair[0], "granularity_b": pair[1], "out_dtype": "float32", "split_k": split_k}
        expected = together.scaled_mm(a, b, *scales, **options)
        if split_k == split_k_of_jax:
            observed = f8ref.jax.scaled_mm(a, b, *scales, **options)  # pyright: ignore[reportArgumentType]
            assert leaves(observed) == leaves(expected), kind


def test_grouped() -> None:
    rng = np.random.default_rng(83)
    a, b = drawn_codes(rng, (M, K), E4M3FN, "any"), drawn_codes(rng, (3, K, N), E4M3FN, "any")
    scale_a, scale_b = drawn_scales(rng, (M,)), drawn_scales(rng, (3, N))
    for ends in ([5, 5, M], [0, 1, M], [M, M, M]):
        offs = np.array(ends, np.int32)
        assert agree(lambda f8, offs=offs: f8.scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype="float32")), (
            ends
        )


@pytest.mark.parametrize("split_k", [1, 3])
def test_bfloat16_mm(split_k: int) -> None:
    rng = np.random.default_rng(84)
    # Exponent fields of the operands: anything; ordinary; results in and below the subnormal range; overflow.
    for low, high in ((0, 255), (120, 132), (0, 3), (1, 40), (40, 80), (55, 66), (60, 68), (180, 255), (188, 193)):

        def codes(shape: tuple[int, ...], low: int = low, high: int = high) -> Array:
            field = rng.integers(low, high, shape) << 7
            return typed(field | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15, BFLOAT16)

        a, b = codes((M, K)), codes((K, N))
        assert agree(lambda f8, a=a, b=b: f8.mm(a, b, out_dtype="float32", split_k=split_k)), (low, high)
    a, b = (drawn_codes(rng, shape, BFLOAT16, "specials") for shape in ((M, K), (K, N)))
    assert agree(lambda f8: f8.mm(a, b, out_dtype="float16", split_k=split_k))


def high_precision(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bit patterns in part, ordinary values in part."""
    format = FORMATS[dtype]
    anything = typed(rng.integers(0, 1 << format.bits, shape), format)
    return np.where(rng.random(shape) < 0.1, anything, (rng.standard_normal(shape) * 8).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_elementwise_verbs(dtype: str) -> None:
    rng = np.random.default_rng(85)
    x = high_precision(rng, (150, 140), dtype)
    plain = np.nan_to_num(x.astype(np.float32), nan=1.0, posinf=2.0, neginf=3.0).astype(dtype)
    for format, granularity in itertools.product(HOPPER.operand_formats, Granularity):
        inv_scale = drawn_scales(rng, granularity.scale_shape(150, 140))
        assert agree(lambda f8, v=x, s=inv_scale, g=granularity, f=format: f8.quantize(v, s, f, g), f8emu.jax)
        codes = drawn_codes(rng, (150, 140), format, "specials")
        assert agree(lambda f8, c=codes, s=inv_scale, g=granularity: f8.dequantize(c, s, g), f8emu.jax)
        assert agree(lambda f8, g=granularity: f8.amax(x, g), f8emu.jax)
        assert agree(lambda f8, g=granularity: f8.amax(plain, g), f8emu.jax)
    for format, overflow in itertools.product(HOPPER.operand_formats, Overflow):
        assert agree(lambda f8, f=format, o=overflow: f8.cast(x, f, overflow=o), f8emu.jax)
    if dtype != "float32":
        assert agree(lambda f8: f8.decode(x), f8emu.jax)


def test_scale_from_amax() -> None:
    rng = np.random.default_rng(86)
    amax = rng.integers(0, 0x7F800002, 1 << 16).astype(np.uint32).view(np.float32)
    amax[:4] = 0, np.inf, np.nan, 1e-45
    rules = [ScaleRule(), ScaleRule(power_of_two=True), ScaleRule(amax_floor=0.3), ScaleRule(amax_floor=MIN_AMAX_FLOOR)]
    for format, (rule, margin) in itertools.product(
        HOPPER.operand_formats, zip(rules, (0, 1, 2, MAX_MARGIN), strict=True)
    ):
        assert agree(lambda f8, f=format, r=rule, m=margin: f8.scale_from_amax(amax, f, r, margin=m), f8emu.jax)


@pytest.mark.parametrize("reduction", list(AmaxHistoryReduction))
def test_delayed_scaling(reduction: AmaxHistoryReduction) -> None:
    rng = np.random.default_rng(87)
    delayed = DelayedScaling(history_length=4, reduction=reduction, margin=2)
    rule = ScaleRule(power_of_two=True)
    states = [f8.initial_delayed_state(delayed) for f8 in (f8ref.numpy, f8emu.jax)]
    for step in range(40):
        amax = np.float32([rng.uniform(0, 9), 0.0, np.inf, np.nan, 1e-42, 3e38][rng.integers(0, 6) * (step % 2)])
        for i, f8 in enumerate((f8ref.numpy, f8emu.jax)):
            states[i] = f8.update_delayed_state(states[i], np.reshape(amax, (1, 1)), E5M2, rule, delayed)  # pyright: ignore[reportArgumentType]
        assert leaves(states[0]) == leaves(states[1]), step

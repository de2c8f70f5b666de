"""A whole linear layer against the suite's own, which was written without reading it, and what a state decides."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8emu.numpy as f8_production
import f8ref.numpy as f8
from f8emu.conformance.layers.layer import LayerMode
from f8emu.conformance.layers.layer_cases import layer_cases
from f8emu.spec import (
    BLOCKWISE,
    DELAYED,
    E4M3FN,
    HIGH_PRECISION_CAST,
    RECIPES,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    DelayedScaling,
    DelayedState,
    Gemm,
    Granularity,
    OperandError,
    Recipe,
    RecipeName,
    ScaleRule,
)
from tests.oracle.exactly import assert_same_bits

BF16 = ml_dtypes.bfloat16
M, N, K = 70, 150, 133
G = Granularity

Tensors = tuple[np.ndarray, np.ndarray, np.ndarray]


def tensors(dtype: type, m: int = M, n: int = N, k: int = K) -> Tensors:
    """Input, weight and gradient, each with rows and columns of very different sizes."""
    rng = np.random.default_rng(m + n + k)

    def matrix(rows: int, columns: int, size: float) -> np.ndarray:
        spread = 2.0 ** (rng.integers(-4, 5, (rows, 1)) + rng.integers(-4, 5, (1, columns)))
        return (rng.normal(size=(rows, columns)) * spread * size).astype(dtype)

    return matrix(m, k, 1.0), matrix(n, k, 2.0**-5), matrix(m, n, 2.0**-9)


def test_traces_equal_the_suites_own(assert_layers_equal: Any) -> None:
    """Every recipe and dtype, biases, forward passes alone, and steps of delayed scaling: by the engine's verbs."""
    assert_layers_equal("f8ref.numpy", tuple(case for case in layer_cases() if case.mode is LayerMode.TRACE))


def test_a_forward_pass_alone_and_a_bias() -> None:
    """A bias is rounded to the dtype of the product, and added to it; the witness rounds."""
    x, w, g = tensors(BF16)
    result = f8.linear(ROWWISE, x, w, g)
    bias = (np.random.default_rng(1).normal(size=N) * 30).astype(np.float32)
    alone = f8.linear(ROWWISE, x, w, bias=bias)
    assert alone.grad_input is None and alone.grad_weight is None
    assert_same_bits(alone.output.product, result.output.product)
    rounded = bias.astype(BF16).astype(np.float32)
    assert_same_bits(alone.result, (result.result.astype(np.float32) + rounded).astype(BF16))


def test_high_precision_rounds_float32_first() -> None:
    """All three GEMMs in bfloat16: the operands are the tensors, rounded once."""
    gemm = Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST)
    recipe = replace(TENSORWISE, output=gemm, grad_input=gemm, grad_weight=gemm)
    x, w, g = tensors(np.float32)
    hx, hw, hg = (t.astype(BF16) for t in (x, w, g))
    result = f8.linear(recipe, x, w, g)
    assert result.output.a[:3] == (None, None, None)
    assert_same_bits(result.output.a.codes, hx)
    assert_same_bits(result.output.product, f8.mm(hx, hw.T, out_dtype="float32"))
    assert result.grad_input is not None
    assert_same_bits(result.grad_input.product, f8.mm(hg, hw, out_dtype="float32"))
    assert result.grad_weight is not None
    assert_same_bits(result.grad_weight.product, f8.mm(hg.T, hx, out_dtype="float32"))


def test_power_of_two_is_a_choice_of_the_recipe() -> None:
    x, w, g = tensors(BF16)
    result = f8.linear(replace(BLOCKWISE, scale_rule=ScaleRule(power_of_two=True)), x, w, g)
    for gemm in (result.output, result.grad_input, result.grad_weight):
        assert gemm is not None
        for trace in (gemm.a, gemm.b):
            assert (trace.inv_scale.view(np.uint32) & 0x7FFFFF == 0).all()
            assert (trace.scale * trace.inv_scale == 1).all()


STATES = {
    "input": DelayedState(np.full(16, 7, np.float32), np.float32(64), np.bool_(True)),
    "weight": DelayedState(np.full(16, 3, np.float32), np.float32(448 / 3), np.bool_(True)),
    "grad_output": DelayedState(np.full(16, 7, np.float32), np.float32(8192), np.bool_(True)),
}


class TestDelayed:
    def test_a_fresh_state_uses_the_tensors_own_amax(self) -> None:
        x, w, g = tensors(BF16)
        fresh = dict.fromkeys(STATES, f8.initial_delayed_state(DelayedScaling()))
        first, dynamic = f8.linear(DELAYED, x, w, g, delayed_state=fresh), f8.linear(TENSORWISE, x, w, g)
        assert_same_bits(first.output.product, dynamic.output.product)
        mixed = f8.linear(DELAYED, x, w, g, delayed_state=STATES | {"weight": fresh["weight"]})
        assert mixed.output.a.inv_scale == 64
        assert_same_bits(mixed.output.b.inv_scale, f8.scale_from_amax(f8.amax(w), E4M3FN).inv_scale)

    def test_the_margin_holds_from_the_start(self) -> None:
        """A first cast scales as the update after it does, so that the first two steps agree on equal data."""
        delayed = DelayedScaling(margin=2)
        recipe = replace(DELAYED, delayed=delayed)
        x, w, _ = tensors(BF16)
        fresh = dict.fromkeys(STATES, f8.initial_delayed_state(delayed))
        first = f8.linear(recipe, x, w, delayed_state=fresh)
        states = {
            name: f8.update_delayed_state(fresh[name], trace.amax, E4M3FN, recipe.scale_rule, delayed)
            for name, trace in (("input", first.output.a), ("weight", first.output.b))
        }
        second = f8.linear(recipe, x, w, delayed_state=states)
        assert_same_bits(first.output.a.inv_scale, second.output.a.inv_scale)
        assert_same_bits(first.output.product, second.output.product)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 5, 3), (3, 5, 0), (3, 0, 4)])
def test_small_and_empty(name: RecipeName, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w, g = tensors(np.float16, *shape)
    states = STATES if name == "delayed" else None
    result = f8.linear(RECIPES[name], x, w, g, delayed_state=states)
    assert result.grad_input is not None
    assert result.grad_weight is not None
    products = [gemm.product for gemm in (result.output, result.grad_input, result.grad_weight)]
    assert [p.shape for p in products] == [(m, n), (m, k), (n, k)]
    if 0 in shape:
        assert not any(p.any() for p in products)


def test_nan_and_infinity_spread_as_far_as_their_scale() -> None:
    x, w, _ = tensors(BF16)
    x[3, 5], x[4, 6] = np.nan, np.inf
    for recipe, rows in (
        (TENSORWISE, set(range(M))),
        (ROWWISE, {3, 4}),
        (ROWWISE_WITH_GW_HP, {3, 4}),
        (BLOCKWISE, {3, 4}),
    ):
        product = f8.linear(recipe, x, w).result
        nan = np.isnan(product.astype(np.float32))
        assert set(np.flatnonzero(nan.any(axis=1)).tolist()) == rows
        assert set(product.view(np.uint16)[nan].tolist()) == {0x7FFF}


ENDS = np.array([0, 1, 16, 16, 33, 33], np.int32)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
def test_experts_are_layers_of_their_own(recipe: Recipe) -> None:
    """Groups of 0, 1, 15, 0, 17 and 0 rows, and 5 rows beyond; and the twin of the engine."""
    r = np.random.default_rng(40)
    loud = ((38, 48), (38, 1)), ((6, 32, 48), (6, 1, 1)), ((38, 32), (38, 1))
    x, w, g = ((r.normal(size=shape) * 2.0 ** r.integers(-9, 9, size)).astype(BF16) for shape, size in loud)
    states = [{t: s._replace(inv_scale=s.inv_scale * np.float32(2**e)) for t, s in STATES.items()} for e in range(6)]
    states = states if recipe.delayed else None
    trace = f8.grouped_linear(recipe, x, w, ENDS, g, delayed_state=states)
    of_engine = f8_production.grouped_linear(recipe, x, w, ENDS.tolist(), g, delayed_state=states)
    assert trace.grad_input is not None and trace.grad_weight is not None
    for ours, theirs in zip(of_engine[1:], (trace.result, trace.grad_input, trace.grad_weight), strict=True):
        assert ours is not None
        assert_same_bits(ours, theirs)
    start = 0
    for e, end in enumerate(ENDS):
        alone = f8.linear(recipe, x[start:end], w[e], g[start:end], delayed_state=states[e] if states else None)
        assert alone.grad_input is not None and alone.grad_weight is not None
        assert_same_bits(trace.result[start:end], alone.result)
        assert_same_bits(trace.grad_input[start:end], alone.grad_input.product)
        assert_same_bits(trace.grad_weight[e], alone.grad_weight.product)
        assert_same_bits(trace.experts[e].output.a.codes, alone.output.a.codes)
        start = end
    assert not trace.result[33:].any() and not trace.grad_input[33:].any()
    assert trace.result.dtype == trace.grad_input.dtype == trace.grad_weight.dtype == BF16
    assert_same_bits(f8.grouped_linear(recipe, x, w, ENDS, delayed_state=states).result, trace.result)


def test_groups_that_do_not_fit() -> None:
    x, w = np.zeros((4, 6), BF16), np.zeros((2, 5, 6), BF16)
    for arrays, message in (
        ((x, w, np.array([3, 5], np.int32)), "at most the 4 rows"),
        ((x, w, np.array([3, 1], np.int32)), "rise"),
        ((x, w, np.array([3, 4])), "int64"),
        ((x, w, np.array([4], np.int32)), r"offs \[E\]"),
        ((x, w.swapaxes(1, 2), np.array([3, 4], np.int32)), r"weight \[E, N, K\]"),
        ((x, w, np.array([3, 4], np.int32), x), "output's shape"),
    ):
        with pytest.raises(OperandError, match=message):
            f8.grouped_linear(ROWWISE, *arrays)

"""A linear layer under every recipe against the oracle, stage by stage."""

import dataclasses
from typing import Any

import pytest
import torch

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import (
    DELAYED,
    GEMM_NAMES,
    OPERANDS,
    RECIPES,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    DelayedScaling,
    DelayedState,
    OperandError,
    Recipe,
)

M, N, K = 48, 32, 144


def tensors(dtype: torch.dtype, m: int = M, n: int = N, k: int = K) -> dict[str, Any]:
    """A layer's tensors, each element of another magnitude."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-8, 4, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)

    return {"input": draw(m, k), "weight": draw(n, k), "grad_output": draw(m, n) / 64, "bias": draw(n)}


def delayed_states(recipe: Recipe, initialized: bool) -> dict[str, DelayedState] | None:
    """States of the three tensors with scales of their own."""
    if recipe.delayed is None:
        return None
    states = {name: f8.initial_delayed_state(recipe.delayed) for name in ("input", "weight", "grad_output")}
    if not initialized:
        return states
    return {
        name: state._replace(inv_scale=torch.tensor(10.0 + 7.3 * i), initialized=torch.tensor(True))
        for i, (name, state) in enumerate(states.items())
    }


@pytest.fixture
def assert_equal_to_oracle(to_numpy, assert_same_bits):
    """Run both and compare every amax, scale, code, product and the result."""

    def check(recipe: Recipe, arguments: dict[str, Any], states: dict[str, DelayedState] | None = None) -> None:
        observed = f8.linear(recipe, **arguments, delayed_state=states)
        numpy_states = states and {k: DelayedState(*(to_numpy(x) for x in v)) for k, v in states.items()}
        numpy_arguments: dict[str, Any] = {k: None if v is None else to_numpy(v) for k, v in arguments.items()}
        expected = reference.linear(recipe, **numpy_arguments, delayed_state=numpy_states)
        for gemm in GEMM_NAMES:
            ours, theirs = getattr(observed, gemm), getattr(expected, gemm)
            assert (ours is None) == (theirs is None)
            if ours is None:
                continue
            for side in ("a", "b"):
                for stage in ("amax", "inv_scale", "scale", "codes"):
                    one, other = getattr(getattr(ours, side), stage), getattr(getattr(theirs, side), stage)
                    if other is None:
                        assert one is None
                    else:
                        assert_same_bits(one, other)
            assert_same_bits(ours.product, theirs.product)
        assert_same_bits(observed.result, expected.result)

    return check


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_equals_the_oracle(name, assert_equal_to_oracle) -> None:
    """More than one block of 128 in each dimension, the last one cut short."""
    recipe = RECIPES[name]
    arguments = tensors(torch.bfloat16, m=272, n=144, k=304)
    assert_equal_to_oracle(recipe, arguments, delayed_states(recipe, initialized=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise_with_gw_hp"])
def test_other_dtypes_equal_the_oracle(name, dtype, assert_equal_to_oracle) -> None:
    assert_equal_to_oracle(RECIPES[name], tensors(dtype))


def test_float32_master_weight_keeps_its_own_values(assert_equal_to_oracle) -> None:
    arguments = tensors(torch.bfloat16)
    arguments["weight"] = tensors(torch.float32)["weight"]
    for recipe in (TENSORWISE, ROWWISE_WITH_GW_HP):
        assert_equal_to_oracle(recipe, arguments)


@pytest.mark.parametrize("margin", [0, 3])
def test_a_first_step_of_delayed_scaling_uses_its_own_amax(margin, assert_equal_to_oracle) -> None:
    delayed = DelayedScaling(history_length=3, margin=margin)
    recipe = dataclasses.replace(DELAYED, delayed=delayed)
    assert_equal_to_oracle(recipe, tensors(torch.bfloat16), delayed_states(recipe, initialized=False))


def test_forward_alone_and_without_a_bias(assert_equal_to_oracle) -> None:
    arguments = tensors(torch.bfloat16)
    assert_equal_to_oracle(TENSORWISE, arguments | {"grad_output": None, "bias": None})
    assert f8.linear(TENSORWISE, arguments["input"], arguments["weight"]).grad_weight is None


def test_specials_are_propagated(assert_equal_to_oracle) -> None:
    for value in (float("nan"), float("inf"), 0.0):
        for name in ("input", "weight", "grad_output"):
            arguments = tensors(torch.bfloat16)
            arguments[name][1] = value
            assert_equal_to_oracle(ROWWISE_WITH_GW_HP, arguments)


def test_operands_of_any_layout_and_with_gradients(assert_same_bits) -> None:
    plain = tensors(torch.float32)
    expected = f8.linear(TENSORWISE, **plain)
    odd: dict[str, Any] = {
        name: torch.nn.Parameter(x.t().contiguous().t()) if x.ndim == 2 else x for name, x in plain.items()
    }
    observed = f8.linear(TENSORWISE, **odd)
    assert not observed.result.requires_grad
    for gemm in GEMM_NAMES:
        assert_same_bits(getattr(observed, gemm).product, getattr(expected, gemm).product)
    assert_same_bits(observed.result, expected.result)


def test_bad_input_is_refused() -> None:
    good = tensors(torch.bfloat16)
    bad = [
        ({"input": good["input"].double()}, "linear: input must be float32, bfloat16 or float16; got torch.float64"),
        (
            {"input": good["input"][None]},
            r"linear: input must have 2 dimensions; got shape \[1, 48, 144\].*input.reshape",
        ),
        ({"weight": good["weight"].t()}, r"weight must be \[144, 144\]; got \[144, 32\]"),
        ({"grad_output": good["grad_output"].t()}, r"grad_output must be \[48, 32\]; got \[32, 48\]"),
        ({"bias": good["bias"][:-1]}, r"bias must be \[N\] = \[32\]; got \[31\]"),
        ({"bias": good["bias"].double()}, "bias must be float32, bfloat16 or float16; got torch.float64"),
        ({"delayed_state": {}}, "recipe 'tensorwise' needs the delayed state of no tensor; got that of none"),
    ]
    for changes, message in bad:
        with pytest.raises(OperandError, match=message):
            f8.linear(TENSORWISE, **(good | changes))
    states = delayed_states(DELAYED, initialized=False)
    assert states is not None
    del states["weight"]
    with pytest.raises(OperandError, match=r"'delayed' needs the delayed state of .*'weight'.*initial_delayed_state"):
        f8.linear(DELAYED, **good, delayed_state=states)
    with pytest.raises(OperandError, match=r"K and N must be multiples of 16; got K = 40, N = 144"):
        f8.linear(TENSORWISE, **(good | {"input": good["input"][:40], "grad_output": good["grad_output"][:40]}))


def test_operand_names_are_those_of_the_spec() -> None:
    """A guard of the test itself: all six operands are compared."""
    assert [len(OPERANDS[gemm]) for gemm in GEMM_NAMES] == [2, 2, 2]

"""State dicts and parameter trees, their names and axes, and the state of delayed scaling beside them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

import f8emu.torch as f8
from f8emu import interop
from f8emu.interop import DEFAULT_RULES, ParameterRule
from f8emu.spec import DelayedState, Float8State, OperandError, SpecError

HEADS = 2
ATTENTION_RULES = (
    *(
        ParameterRule(
            torch=f"layers.{{i}}.attention.{ours}.weight",
            flax=f"layers_{{i}}.attention.{theirs}.kernel",
            axes="(heads head_dim) in -> in heads head_dim",
            sizes={"heads": HEADS},
        )
        for ours, theirs in (("wq", "query"), ("wk", "key"), ("wv", "value"))
    ),
    ParameterRule(
        torch="layers.{i}.attention.wo.weight",
        flax="layers_{i}.attention.out.kernel",
        axes="out (heads head_dim) -> heads head_dim out",
        sizes={"heads": HEADS},
    ),
    ParameterRule(torch="layers.{i}.norm.weight", flax="layers_{i}.norm.scale"),
)


def bits(x: object) -> bytes:
    return interop.to_numpy(x).tobytes()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype, name
        assert found[name].is_contiguous()
        assert bits(found[name]) == bits(tensor), name


def test_flax_linen_attention_and_back() -> None:
    """By rules of the user's; `like` compares every name and shape with flax's own initialization."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = linen.RMSNorm(name="norm")(x)
            return linen.MultiHeadAttention(HEADS, use_bias=False, name="attention")(x)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = linen.Embed(16, 8, name="embedding")(x)
            for i in range(2):
                x = Block(name=f"layers_{i}")(x)
            return linen.Dense(16, name="head")(x)

    torch.manual_seed(0)
    state = {"embedding.weight": torch.randn(16, 8)}
    for i in range(2):
        state |= {f"layers.{i}.attention.{w}.weight": torch.randn(8, 8) for w in ("wq", "wk", "wv", "wo")}
        state[f"layers.{i}.norm.weight"] = torch.rand(8)
    state |= {"head.weight": torch.randn(16, 8), "head.bias": torch.randn(16)}

    tokens = jnp.arange(10).reshape(2, 5)
    variables = Model().init(jax.random.key(0), tokens)
    rules = (*ATTENTION_RULES, *DEFAULT_RULES)
    params = interop.params_from_state_dict(state, rules=rules, like=variables["params"])
    assert jax.tree.structure(params) == jax.tree.structure(variables["params"])
    assert_same(interop.state_dict_from_params(params, rules=rules, like=state), state)

    # That the axes mean what the rules say: the same outputs, up to the order of float32 sums.
    x = state["embedding.weight"][torch.from_numpy(np.array(tokens))]
    for i in range(2):
        y = nn.functional.rms_norm(x, (8,), state[f"layers.{i}.norm.weight"], eps=1e-6)
        wq, wk, wv, wo = (state[f"layers.{i}.attention.{w}.weight"] for w in "wq wk wv wo".split())
        q, k, v = ((y @ w.T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (wq, wk, wv))
        x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2) @ wo.T
    logits = x @ state["head.weight"].T + state["head.bias"]
    np.testing.assert_allclose(
        np.asarray(Model().apply({"params": params}, tokens)), logits.numpy(), rtol=1e-3, atol=1e-3
    )


def test_flax_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)])
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.convolution = nnx.Conv(3, 5, (2, 7), rngs=rngs)

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
            self.norm = nn.LayerNorm(4)
            self.convolution = nn.Conv2d(3, 5, (2, 7))

    state = Same().state_dict()
    of_flax = nnx.state(Model(), nnx.Param)
    params = interop.params_from_state_dict(state, like=of_flax)
    assert isinstance(params, nnx.State)
    pure = nnx.to_pure_dict(params)
    assert bits(pure["layers"][1]["kernel"]) == bits(state["layers.1.weight"].T)
    assert bits(pure["convolution"]["kernel"]) == bits(state["convolution.weight"].permute(2, 3, 1, 0))
    for tree in (params, pure):
        assert_same(interop.state_dict_from_params(tree, like=state), state)


def test_equinox_has_the_names_and_axes_of_torch() -> None:
    model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    state = {k: torch.randn(v.shape) for k, v in interop.state_dict_from_params(model, rules=()).items()}
    assert sorted(state) == ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]
    filled = interop.params_from_state_dict(state, rules=(), like=model)
    assert filled.activation is model.activation
    assert_same(interop.state_dict_from_params(filled, rules=()), state)


def test_float8_weights_turn_with_their_scales() -> None:
    """A rowwise weight [out, in] with scale [out, 1] is a kernel [in, out] with scale [1, out]."""
    codes = torch.arange(32, dtype=torch.uint8).reshape(4, 8).view(torch.float8_e4m3fn)
    state = {"up.weight": codes, "up.weight_scale": torch.rand(4, 1), "down.weight_scale": torch.rand(())}
    params = interop.params_from_state_dict(state)
    assert params["up"]["kernel"].dtype == jnp.float8_e4m3fn
    assert params["up"]["kernel_scale"].shape == (1, 4)
    assert params["down"]["kernel_scale"].shape == ()
    assert_same(interop.state_dict_from_params(params), state)


X = torch.zeros(2, 3)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no rule": (
        {"a.weight": X},
        {"rules": (ParameterRule(torch="b{x*}", flax="b{x*}"),)},
        r"params_from_state_dict: parameter 'a.weight' with 2 axes: no rule fits.*end the rules with DEFAULT_RULES",
    ),
    "no way back": (
        {"a.scale": torch.zeros(2)},
        {},
        r"parameter 'a.scale': the rules rename it to 'a.scale', and that to 'a.weight'; put a ParameterRule",
    ),
    "two of one name": (
        {"a.b": X, "a_b": X},
        {"rules": (ParameterRule(torch="a.b", flax="c"), ParameterRule(torch="a_b", flax="c"))},
        r"parameter 'a_b': the rules rename it to 'c', and that to 'a.b'",
    ),
    "a name below a name": ({"a": X, "a.b": X}, {}, r"'a.b' is below or above another parameter"),
    "not an array": ({"a.step": 3}, {}, r"parameter 'a.step' must be an array.*got int; leave the entry out"),
    "another name": (
        {"a.weight": X},
        {"like": {"a": {"weight": X}}},
        r"names must be those of `like`; missing \['a.weight'\], unknown \['a.kernel'\]; give a ParameterRule",
    ),
    "another shape": (
        {"a.weight": X},
        {"like": {"a": {"kernel": jnp.zeros((2, 3))}}},
        r"'a.kernel' must have shape \[2, 3\] as in `like`; got \[3, 2\]",
    ),
    "sizes missing": (
        {"a": X},
        {"rules": (ParameterRule(torch="a", flax="a", axes="(h d) k -> k h d"),)},
        r"axis \(h d\) of size 2 must be split by sizes of all of its axes but one; got \{\}",
    ),
    "sizes wrong": (
        {"a": X},
        {"rules": (ParameterRule(torch="a", flax="a", axes="(h d) k -> k h d", sizes={"h": 4}),)},
        r"axis \(h d\) of size 2 must be split",
    ),
    "64 bits": ({"a.b": torch.zeros(2, dtype=torch.float64)}, {}, r"JAX narrows 64-bit types"),
    "a counter of torch's": (
        nn.BatchNorm1d(2).state_dict(),
        {},
        r"parameter 'num_batches_tracked': to_jax: JAX narrows 64-bit.*int64.*leave the entry out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped(case: str) -> None:
    state, options, message = REFUSED[case]
    with pytest.raises(OperandError, match=message):
        interop.params_from_state_dict(state, **options)
    with pytest.raises(OperandError, match=r"state_dict_from_params: 'a.weight' must have shape .*got \[2, 3\]"):
        interop.state_dict_from_params({"a": {"kernel": jnp.zeros((3, 2))}}, like={"a.weight": torch.zeros(3, 2)})


@pytest.mark.parametrize(
    ("names", "axes", "message"),
    [
        (("a.{x}", "b"), None, r"both names need the same fields"),
        (("a.{x}", "b.{x*}"), None, r"both names need the same fields"),
        (("a", "a"), "a b", r"axes must be 'torch axes -> flax axes'"),
        (("a", "a"), "a b -> b c", r"the same names on both sides"),
        (("a", "a"), "a a -> a a", r"each once"),
    ],
)
def test_rules_that_cannot_read_both_ways(names: tuple[str, str], axes: str | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ParameterRule(torch=names[0], flax=names[1], axes=axes)


def delayed_model(steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])})
    f8.convert_to_float8_training(model, config="delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(32, 32) * 2.0**step
        for layer in model["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        x.square().sum().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("steps", [0, 3])
def test_delayed_state_and_back(steps: int) -> None:
    state = f8.delayed_state_dict(delayed_model(steps))
    rules = (
        ParameterRule(torch="layers.{i}.weight", flax="layers_{i}.kernel", axes="out in -> in out"),
        *DEFAULT_RULES,
    )
    states = interop.float8_states_from_delayed_state_dict(state, rules=rules)
    assert list(states) == ["layers_0", "layers_1"]
    for i, float8_state in enumerate(states.values()):
        assert isinstance(float8_state, Float8State)
        for tensor, of_tensor in enumerate(float8_state):
            assert isinstance(of_tensor, DelayedState)
            assert [x.shape for x in of_tensor] == [(16,), (), ()]
            assert of_tensor.initialized.dtype == jnp.float32 and float(of_tensor.initialized) == (steps > 0)
            for field in ("amax_history", "inv_scale"):
                assert bits(getattr(of_tensor, field)) == bits(state[f"layers.{i}.{field}"][tensor])
    back = interop.delayed_state_dict_from_float8_states(states, rules=rules)
    assert_same(back, state)
    other = delayed_model(0)
    f8.load_delayed_state_dict(other, back)
    assert_same(f8.delayed_state_dict(other), state)


def test_states_that_are_none() -> None:
    model = delayed_model(1)
    state = {f"a.{key.split('.')[-1]}": value for key, value in f8.delayed_state_dict(model).items()}
    model["layers"][0](torch.ones(32, 32))  # type: ignore[index]
    to_jax, to_torch = interop.float8_states_from_delayed_state_dict, interop.delayed_state_dict_from_float8_states
    renames = (ParameterRule(torch="{x*}.weight", flax="{x*}.embedding"),)
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (
            lambda: to_jax(f8.delayed_state_dict(model)),
            r"layer 'layers.0' has seen amaxes since its last update.*finish the b",
        ),
        (
            lambda: to_jax({"a.inv_scale": torch.ones(3)}),
            r"layer 'a' must have amax_history.*got .'inv_scale': .3.*give what f8emu.torch",
        ),
        (lambda: to_torch({"a": {"kernel": jnp.ones(2)}}), r"'a.kernel' must be a Float8State.*the states alone"),
        (lambda: to_jax(state, rules=renames), r"layer 'a': the rules rename its weight to 'a.embedding'"),
    )
    for call, message in calls:
        with pytest.raises(OperandError, match=message):
            call()

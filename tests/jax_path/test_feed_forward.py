"""The feed-forward block: the bits of three layers around SiLU and product, their arithmetic, and the block's kernels.

Most calls are eager, since those share the programs of their GEMMs.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import f8emu.jax as f8
from f8emu.jax.fused import computed, gated
from f8emu.jax.fused import computed_kernels as kernels
from f8emu.jax.fused.computed import Product, Wanted
from f8emu.jax.fused.kernels import Launch
from f8emu.spec import E4M3FN, E5M2, OperandError, SpecError, UnsupportedError
from tests.jax_path.test_fused import TRITON, assert_same_bits, lowered

SMALL = Launch(rows=16, cols=32, warps=4)
FUSED = ("tensorwise", "rowwise", "delayed")
FUNCTIONS = {"hidden": (gated.hidden_of, 2), "gradients": (gated.gradients_of, 3)}


def bfloat16(seed: int, *shape: int, size: float = 1.0) -> jax.Array:
    """Normal numbers; rows of several magnitudes, so that scales differ."""
    rng = np.random.default_rng((seed, *shape))
    rows = np.exp2(rng.integers(-3, 3, (*shape[:-1], 1)))
    return jnp.asarray((rng.standard_normal(shape) * rows * size).astype(ml_dtypes.bfloat16))


def block(dim: int = 40, hidden: int = 72, out: int = 24, rows: tuple[int, ...] = (3, 7)) -> tuple[Any, ...]:
    """x, (w1, w2, w3) and grad_output; w1 is float32, as a master weight."""
    weights = (
        bfloat16(1, dim, hidden, size=0.2).astype(jnp.float32),
        bfloat16(2, hidden, out, size=0.2),
        bfloat16(3, dim, hidden, size=0.2),
    )
    return bfloat16(0, *rows, dim), weights, bfloat16(4, *rows, out, size=0.01)


def states_of(recipe: str) -> Any:
    return tuple(f8.linear_delayed_state(recipe) for _ in range(3)) if recipe == "delayed" else None


def fused(recipe: str, x: Any, weights: Any, states: Any) -> jax.Array:
    if states is None:
        return f8.feed_forward(recipe)(x, *weights)
    return f8.delayed_feed_forward(recipe)(x, *weights, states=states)


def three_layers(recipe: str, x: Any, weights: Any, states: Any) -> jax.Array:
    """What the block must equal, written out."""

    def layer(x: Any, i: int) -> jax.Array:
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        if states is None:
            return f8.dot_general(recipe)(x, weights[i], numbers)
        return f8.delayed_dot_general(recipe)(x, weights[i], states[i], numbers)

    return layer(gated.gated(layer(x, 0), layer(x, 2)), 1)


def step(function: Any, recipe: str, x: Any, weights: Any, states: Any, g: Any) -> Any:
    """output and all gradients."""
    output, backward = jax.vjp(functools.partial(function, recipe), x, weights, states)
    return output, *backward(g)


@pytest.mark.parametrize("recipe", [*FUSED, "rowwise_with_gw_hp"])
def test_equals_three_layers(recipe: str) -> None:
    x, weights, g = block()
    states = states_of(recipe)
    observed, expected = (step(function, recipe, x, weights, states, g) for function in (fused, three_layers))
    assert_same_bits(observed, expected)
    assert float(jnp.abs(expected[1].astype(jnp.float32)).max()) > 0
    if states is None:
        return
    # The second step: scales of earlier ones, and amaxes from the same pass.
    updated = [f8.linear_delayed_update(*both) for both in zip(states, expected[-1], strict=True)]
    settled = tuple(map(f8.linear_delayed_settled, updated))
    assert_same_bits(*(step(function, recipe, 3 * x, weights, settled, g) for function in (fused, three_layers)))


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_what_is_frozen_is_left_out(recipe: str) -> None:
    """Each set of gradients alone: also the amaxes are those of the layers, 0 of what is not cast."""
    x, weights, g = block(rows=(21,))
    states = states_of(recipe)

    def gradients(function: Any, wanted: tuple[int, ...]) -> Any:
        def run(given: list[Any], states: Any) -> jax.Array:
            arrays = [x, *weights]
            for i, value in zip(wanted, given, strict=True):
                arrays[i] = value
            return function(recipe, arrays[0], tuple(arrays[1:]), states)

        return jax.vjp(run, [(x, *weights)[i] for i in wanted], states)[1](g)

    for wanted in ((), (2,), (1, 2), (3,), (0,)):
        assert_same_bits(*(gradients(function, wanted) for function in (fused, three_layers)))


def test_jitted_and_mapped() -> None:
    x, weights, g = block(rows=(2, 7))
    expected = step(three_layers, "rowwise", x, weights, None, g)
    assert_same_bits(jax.jit(functools.partial(step, fused, "rowwise"))(x, weights, None, g), expected)
    run = functools.partial(fused, "rowwise", weights=weights, states=None)
    assert_same_bits(jax.vmap(run)(x), jnp.stack([run(part) for part in x]))  # scales of its own for each


def test_arithmetic_is_that_of_eager_torch() -> None:
    """Every gate of bfloat16, but where a float32 is subnormal, which XLA takes for 0 on a CPU."""
    torch = pytest.importorskip("torch")
    codes = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    arrays = [
        codes.view(ml_dtypes.bfloat16),
        *(rng.standard_normal(codes.size).astype(ml_dtypes.bfloat16) for _ in "ab"),
    ]
    gate, up, g = (torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16).requires_grad_() for a in arrays)
    hidden = torch.nn.functional.silu(gate) * up
    hidden.backward(g.detach())
    output, backward = jax.vjp(gated.gated, *map(jnp.asarray, arrays[:2]))
    with np.errstate(invalid="ignore"):
        sizes = np.abs(arrays[0].astype(np.float32))
        is_normal = ~((sizes < 2.0**-100) | ((arrays[0] < -80) & (sizes < np.inf)))
    assert is_normal.sum() > 38_000
    for found, of_torch in zip((output, *backward(jnp.asarray(arrays[2]))), (hidden, gate.grad, up.grad), strict=True):
        expected = of_torch.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)[is_normal]
        observed = np.asarray(found)[is_normal]
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(observed), nan)
        np.testing.assert_array_equal(observed[~nan].view(np.uint16), expected[~nan].view(np.uint16))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("has_factors", [False, True], ids=["whole", "factors"])
def test_kernels_equal_plain(name: str, has_factors: bool) -> None:
    function, count = FUNCTIONS[name]
    shape = (37, 75)
    rng = np.random.default_rng(5)
    powers = [jnp.asarray(np.exp2(rng.integers(-4, 4, n)), jnp.float32) for n in ((37, 1), (1, 75))]
    xs = [Product(bfloat16(seed, *shape), *(powers if has_factors and seed else ())) for seed in range(count)]
    in_kernel = functools.partial(function, gated.rounded_in_kernel)
    how = {"launch": SMALL, "interpret": True}
    # 1. Amaxes.
    assert_same_bits(kernels.tensor_amaxes(in_kernel, xs, **how), computed.tensor_amaxes(function, *xs))
    assert_same_bits(kernels.row_col_amaxes(in_kernel, xs, **how), computed.row_col_amaxes(function, *xs))
    # 2. Codes, by one scale or by rows and columns, not always both ways.
    one, rows, cols = (jnp.asarray(np.exp2(rng.uniform(0, 6, (n, 1))), jnp.float32) for n in (1, *shape))
    matrices = len(computed.tensor_amaxes(function, *xs))
    for wanted in ([Wanted(one, one), Wanted(None, one)], [Wanted(rows, cols), Wanted(rows, None)]):
        of_plain = computed.cast_pairs(function, E5M2, wanted[:matrices], *xs, amaxes=True)
        of_kernel = kernels.cast_pairs(in_kernel, xs, wanted[:matrices], format=E5M2, amaxes=True, **how)
        assert_same_bits(of_kernel, of_plain)


def test_what_runs_where() -> None:
    """For CUDA one kernel for hidden and one for both gradients, and one more for their amaxes; for a CPU none."""
    x, weights, g = block(64, 128, 64, (32,))
    for recipe, amaxes in (("tensorwise", ["tensor_amaxes"]), ("rowwise", ["row_col_amaxes"]), ("delayed", [])):
        states = states_of(recipe)
        if states is not None:
            states = jax.tree.map(
                lambda s: s._replace(initialized=None), states, is_leaf=lambda s: hasattr(s, "inv_scale")
            )
        run = functools.partial(step, fused, recipe)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
            found = re.findall(r'name = "f8emu_(cast_pairs|\w+_amaxes)"', lowered(run, x, weights, states, g))
        assert found == [*amaxes, "cast_pairs"] * 2, recipe
        assert TRITON not in lowered(run, x, weights, states, g, platforms=("cpu",))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_compute_what_xla_does(name: str) -> None:
    """All gates of bfloat16, subnormal and not finite ones too: magnitudes, as amaxes of single elements, and codes."""
    function, count = FUNCTIONS[name]
    gate = lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.bfloat16)
    gate = jnp.tile(gate.reshape(-1, 1), (8, 1))
    others = [bfloat16(seed, *gate.shape) for seed in (1, 2)]
    xs = [*map(Product, (gate, others[0]) if count == 2 else (others[1], gate, others[0]))]
    in_kernel = functools.partial(function, gated.rounded_in_kernel)
    values = jax.jit(functools.partial(computed.values_of, function))(xs)
    for (observed, _), value in zip(
        jax.jit(functools.partial(kernels.row_col_amaxes, in_kernel))(xs), values, strict=True
    ):
        expected = np.abs(np.asarray(value).astype(np.float32))
        expected[np.isnan(expected)] = np.uint32(0x7FFFFFFF).view(np.float32)
        assert_same_bits(observed, expected)
    one = jnp.ones((1, 1), jnp.float32)
    wanted = [Wanted(one, one)] * len(values)
    how: dict[str, Any] = {"format": E4M3FN, "amaxes": True}
    square = [x._replace(values=x.values.reshape(2048, 256)) for x in xs]
    assert_same_bits(
        jax.jit(functools.partial(kernels.cast_pairs, in_kernel, **how))(square, wanted),
        jax.jit(functools.partial(computed.plain_pairs, function, **how))(square, wanted),
    )


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "weights": (
        lambda x, w, g: f8.feed_forward("rowwise")(x, w[0].T, *w[1:]),
        OperandError,
        r"w1 and w3 \[dim, hidden\]",
    ),
    "dtype": (lambda x, w, g: f8.feed_forward("rowwise")(x.astype(jnp.int8), *w), OperandError, r"feed_forward: x "),
    "delayed": (lambda x, w, g: f8.feed_forward("delayed"), SpecError, r"use delayed_feed_forward"),
    "static": (lambda x, w, g: f8.delayed_feed_forward("rowwise"), SpecError, r"use feed_forward"),
    "engine": (lambda x, w, g: f8.feed_forward("rowwise", engine="gpu"), OperandError, r"engine must be one of"),
    "states": (
        lambda x, w, g: f8.delayed_feed_forward()(x, *w, states=f8.linear_delayed_state()),
        OperandError,
        r"states must be three Float8States",
    ),
    "state": (
        lambda x, w, g: f8.delayed_feed_forward()(x, *w, states=[f8.linear_delayed_state()] * 2 + [None]),
        OperandError,
        r"state must be the Float8State of recipe 'delayed'",
    ),
    "twice": (
        lambda x, w, g: jax.hessian(lambda x: f8.feed_forward("rowwise")(x, *w).sum())(x),
        UnsupportedError,
        r"feed_forward: a float8 layer is differentiable once",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_refused(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call(*block(rows=(2,)))

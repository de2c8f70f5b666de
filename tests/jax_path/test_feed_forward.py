"""The feed-forward block: the bits of three layers around SiLU and product, their arithmetic, and the block's kernels.

Most calls are eager, since those share the programs of their GEMMs.
"""

import functools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import f8emu.jax as f8
from f8emu.jax.fused import computed, gated
from f8emu.jax.fused import computed_kernels as kernels
from f8emu.jax.fused.kernels import Launch
from f8emu.jax.layer import feed_forward_vjp
from f8emu.spec import E4M3FN, E5M2, OperandError, SpecError, UnsupportedError
from f8emu.spec.trace import Float8State
from tests.jax_path.test_fused import TRITON, assert_same_bits, lowered

SMALL = Launch(rows=16, cols=32, warps=4)
FUNCTIONS = {"hidden": (gated.hidden_of, 2), "gradients": (gated.gradients_of, 3)}


def bfloat16(seed: int, *shape: int, size: float = 1.0) -> jax.Array:
    """Normal numbers; rows of several magnitudes, so that scales differ."""
    rng = np.random.default_rng((seed, *shape))
    rows = np.exp2(rng.integers(-3, 3, (*shape[:-1], 1)))
    return jnp.asarray((rng.standard_normal(shape) * rows * size).astype(ml_dtypes.bfloat16))


def block(dim: int = 40, hidden: int = 72, out: int = 40, rows: tuple[int, ...] = (3, 7)) -> tuple[Any, ...]:
    """x, (w1, w2, w3) and grad_output; w1 is float32, as a master weight."""
    weights = (
        bfloat16(1, dim, hidden, size=0.2).astype(jnp.float32),
        bfloat16(2, hidden, out, size=0.2),
        bfloat16(3, dim, hidden, size=0.2),
    )
    return bfloat16(0, *rows, dim), weights, bfloat16(4, *rows, out, size=0.01)


def states_of(recipe: str) -> Any:
    return tuple(f8.linear_delayed_state(recipe) for _ in range(3)) if recipe == "delayed" else None


def fused(recipe: str, x: Any, weights: Any, states: Any, *, recompute_casts: bool = False) -> jax.Array:
    if states is None:
        return f8.feed_forward(recipe, recompute_casts=recompute_casts)(x, *weights)
    return f8.delayed_feed_forward(recipe, recompute_casts=recompute_casts)(x, *weights, states=states)


again = functools.partial(fused, recompute_casts=True)


def three_layers(recipe: str, x: Any, weights: Any, states: Any) -> jax.Array:
    """What the block must equal, written out."""

    def layer(x: Any, i: int) -> jax.Array:
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        if states is None:
            return f8.dot_general(recipe)(x, weights[i], numbers)
        return f8.delayed_dot_general(recipe)(x, weights[i], states[i], numbers)

    return layer(gated.gated(layer(x, 0), layer(x, 2)), 1)


def step(function: Any, recipe: str, x: Any, weights: Any, states: Any, g: Any) -> Any:
    """output and all gradients, with a residual: the order in which gradients are added is part of the bits."""
    output, backward = jax.vjp(lambda x, *args: x + function(recipe, x, *args), x, weights, states)
    return output, *backward(g)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "rowwise_with_gw_hp"])
def test_equals_three_layers(recipe: str) -> None:
    x, weights, g = block()
    states = states_of(recipe)
    blocks = fused, again
    expected = step(three_layers, recipe, x, weights, states, g)
    for function in blocks:
        assert_same_bits(step(function, recipe, x, weights, states, g), expected)
    assert float(jnp.abs(expected[1].astype(jnp.float32)).max()) > 0
    if states is None:
        return
    # The second step: scales of earlier ones, and amaxes from the same pass.
    updated = [f8.linear_delayed_update(*both) for both in zip(states, expected[-1], strict=True)]
    settled = tuple(map(f8.linear_delayed_settled, updated))
    expected = step(three_layers, recipe, 3 * x, weights, settled, g)
    for function in blocks:
        assert_same_bits(step(function, recipe, 3 * x, weights, settled, g), expected)


def test_codes_of_weights_are_kept_or_not() -> None:
    """Two matrices of codes for each weight in the forward pass, or one."""
    x, weights, _ = block(rows=(21,))
    of_weights = {shape for w in weights for shape in (w.shape, w.T.shape)}
    for function, kept in ((fused, 3), (again, 0)):
        run = functools.partial(jax.vjp, functools.partial(function, "tensorwise"))
        _, pull = jax.eval_shape(run, x, weights, None)
        shapes = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.dtype.itemsize == 1]
        assert sum(shape in of_weights for shape in shapes) == kept


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_way_of_a_gpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels, interpreted, in the block; what is written over others does not change a second backward pass."""
    x, weights, g = block(rows=(21,))
    how: dict[str, Any] = {"interpret": True, "launch": SMALL}
    monkeypatch.setattr(computed, "kernel_or_plain", lambda kernel, plain, *args: kernel(*args))
    monkeypatch.setattr(kernels, "with_amaxes", functools.partial(kernels.with_amaxes, **how))
    monkeypatch.setattr(feed_forward_vjp, "is_eager", lambda arrays: False)
    monkeypatch.setattr(
        lax, "platform_dependent", lambda *args, default, cuda: (cuda if len(args) == 4 else default)(*args)
    )
    output, pull = jax.vjp(functools.partial(fused, recipe), x, weights, None)
    observed = [(output, *pull(g)) for _ in range(2)]
    monkeypatch.undo()
    output, pull = jax.vjp(functools.partial(three_layers, recipe), x, weights, None)
    for one in observed:
        assert_same_bits(one, (output, *pull(g)))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
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
    for i in range(3 if states else 0):

        def of_state(function: Any, state: Any, i: int = i) -> Any:
            given = (*states[:i], state, *states[i + 1 :])
            return jax.vjp(lambda state: function(recipe, x, weights, (*given[:i], state, *given[i + 1 :])), state)[1](
                g
            )

        assert_same_bits(*(of_state(function, states[i]) for function in (fused, three_layers)))


def test_jitted_and_mapped() -> None:
    x, weights, g = block()
    expected = step(three_layers, "tensorwise", x, weights, None, g)
    assert_same_bits(jax.jit(lambda x, g: step(fused, "tensorwise", x, weights, None, g))(x, g), expected)
    run = functools.partial(fused, "tensorwise", weights=weights, states=None)
    assert_same_bits(jax.vmap(run)(x), jnp.stack([run(part) for part in x]))  # scales of its own for each


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_arithmetic_is_that_of_eager_torch(name: str) -> None:
    """Every gate, but where a float32 is subnormal, which XLA takes for 0 on a CPU.

    In float16, of more bits, another last bit of `exp` shows in one of ten thousand.
    """
    torch = pytest.importorskip("torch")
    codes, dtype = np.arange(1 << 16, dtype=np.uint16), np.dtype(name)
    rng = np.random.default_rng(0)
    arrays = [codes.view(dtype), *(rng.standard_normal(codes.size).astype(dtype) for _ in "ab")]
    tensors = [torch.from_numpy(a.view(np.int16).copy()).view(getattr(torch, name)) for a in arrays]
    gate, up = (tensor.requires_grad_() for tensor in tensors[:2])
    hidden = torch.nn.functional.silu(gate) * up
    hidden.backward(tensors[2])
    output, backward = jax.vjp(gated.gated, *map(jnp.asarray, arrays[:2]))
    sizes = np.abs(arrays[0].astype(np.float32))
    is_normal = ~((sizes < 2.0**-100) & (sizes > 0) | (arrays[0].astype(np.float32) < -80) & (sizes < np.inf))
    assert is_normal.sum() > 38_000
    for found, of_torch in zip((output, *backward(jnp.asarray(arrays[2]))), (hidden, gate.grad, up.grad), strict=True):
        expected = of_torch.detach().view(torch.int16).numpy().view(dtype)[is_normal]
        observed = np.asarray(found)[is_normal]
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(observed), nan)
        apart = np.abs(observed[~nan].view(np.int16).astype(int) - expected[~nan].view(np.int16))
        assert apart.max() <= (name == "float16") and apart.mean() < 1e-4


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_equal_plain(name: str) -> None:
    function, count = FUNCTIONS[name]
    xs = [bfloat16(seed, 37, 75) for seed in range(count)]
    in_kernel = functools.partial(function, gated.rounded_in_kernel)
    how: dict[str, Any] = {"launch": SMALL, "interpret": True}
    # Of operands with factors and without.
    powers = [jnp.asarray(np.exp2(np.arange(n) % 5 - 2.0).astype(np.float32)) for n in xs[0].shape]
    products = [kernels.Product(xs[0]), *(kernels.Product(x, powers[0][:, None], powers[1][None, :]) for x in xs[1:])]
    # 1. Codes, and amaxes of what was cast.
    count = len(computed.values_of(function, products))
    inv_scales = [jnp.full((1, 1), 12.5 * (i + 1), jnp.float32) for i in range(count)]
    for sides in ([(True, True), (False, True)], [(True, False), (False, False)]):
        settings: dict[str, Any] = {"sides": sides[:count], "format": E5M2}
        of_kernel = kernels.cast_pairs(in_kernel, products, inv_scales, **settings, **how)
        assert_same_bits(of_kernel, computed.plain_pairs(function, products, inv_scales, **settings))
    # 2. The matrices, and their amaxes.
    for of_rows, in_place in ((False, False), (True, True)):
        whole = kernels.with_amaxes(in_kernel, products, of_rows=of_rows, in_place=in_place, **how)
        assert_same_bits(whole, computed.plain_with_amaxes(function, products, of_rows=of_rows))


def test_what_runs_where() -> None:
    """For CUDA one kernel for hidden and one for both gradients; for a CPU none."""
    x, weights, g = block(64, 128, 64, (32,))
    kinds = {"tensorwise": "with_amaxes", "rowwise": "with_amaxes", "delayed": "cast_pairs", "blockwise": None}
    for recipe, kind in kinds.items():
        states = states_of(recipe)
        if states is not None:
            states = tuple(Float8State(*(t._replace(initialized=None) for t in state)) for state in states)
        run = functools.partial(step, fused, recipe)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
            found = re.findall(r'name = "f8emu_(cast_pairs|with_amaxes)"', lowered(run, x, weights, states, g))
        assert found == ([] if kind is None else [kind] * 2), recipe
        assert TRITON not in lowered(run, x, weights, states, g, platforms=("cpu",))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_compute_what_xla_does(name: str) -> None:
    """All gates of bfloat16, subnormal and not finite ones too: what is computed, and its codes."""
    function, count = FUNCTIONS[name]
    gate = lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.bfloat16).reshape(-1, 1)
    others = [bfloat16(seed, *gate.shape) for seed in (1, 2)]
    xs = [gate, others[0]] if count == 2 else [others[1], gate, others[0]]
    in_kernel = functools.partial(function, gated.rounded_in_kernel)
    values = jax.jit(functools.partial(computed.values_of, function))([*map(kernels.Product, xs)])
    # 1. Codes.
    square = [kernels.Product(x.reshape(256, 256)) for x in xs]
    how: dict[str, Any] = {"sides": [(True, True)] * len(values), "format": E4M3FN}
    calls = (
        functools.partial(kernels.cast_pairs, in_kernel, **how),
        functools.partial(computed.plain_pairs, function, **how),
    )
    assert_same_bits(*(jax.jit(call)(square, [jnp.ones((1, 1), jnp.float32)] * len(values)) for call in calls))
    # 2. The matrices, and their magnitudes: each row has one of the gates, and zeros.
    padded = [kernels.Product(jnp.pad(x, ((0, 0), (0, 127)))) for x in xs]
    whole = jax.jit(functools.partial(kernels.with_amaxes, in_kernel, of_rows=True, in_place=False))(padded)
    for (observed, amaxes, _), value in zip(whole, values, strict=True):
        expected = np.asarray(value).reshape(-1)
        is_nan = np.isnan(expected)
        written = np.asarray(observed)[:, 0]
        np.testing.assert_array_equal(np.isnan(written), is_nan)
        assert_same_bits(written[~is_nan], expected[~is_nan])
        magnitudes = np.abs(expected.astype(np.float32))
        magnitudes[is_nan] = np.uint32(0x7FFFFFFF).view(np.float32)
        assert_same_bits(np.asarray(amaxes)[:, 0], magnitudes)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize("sizes", [(33, 48, 80), (3, 176, 512), (1000, 512, 1376)], ids=str)
def test_steps_on_a_gpu(recipe: str, sizes: tuple[int, int, int]) -> None:
    """With cuBLASLt's GEMMs and Triton's kernels; the second step of delayed scaling too."""
    rows, dim, hidden = sizes
    x, weights, g = block(dim, hidden, dim, (rows,))
    states = states_of(recipe)
    steps = [f8.jit(functools.partial(step, function, recipe)) for function in (fused, three_layers)]
    observed, expected = (jitted(x, weights, states, g) for jitted in steps)
    assert_same_bits(observed, expected)
    if states is not None:
        updated = [f8.linear_delayed_update(*both) for both in zip(states, expected[-1], strict=True)]
        settled = tuple(map(f8.linear_delayed_settled, updated))
        assert_same_bits(*(jitted(x, weights, settled, g) for jitted in steps))


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
        lambda x, w, g: f8.delayed_feed_forward()(x, *w, states=cast("Any", f8.linear_delayed_state())),
        OperandError,
        r"states must be three Float8States.*; got Float8State;",
    ),
    "state": (
        lambda x, w, g: f8.delayed_feed_forward()(x, *w, states=cast("Any", [f8.linear_delayed_state()] * 2 + [None])),
        OperandError,
        r"delayed_feed_forward, w3: state must be the Float8State of recipe 'delayed'",
    ),
    "mapped": (
        lambda x, w, g: jax.vmap(
            lambda state: jax.grad(
                lambda states: f8.delayed_feed_forward()(x, *w, states=states).astype(jnp.float32).sum()
            )((state, *[f8.linear_delayed_state()] * 2))
        )(f8.shared_delayed_state(f8.linear_delayed_state(), 3)),
        UnsupportedError,
        r"delayed_feed_forward: a state serves one call per step; got operands that jax.vmap maps",
    ),
    "twice": (
        lambda x, w, g: jax.hessian(lambda x: f8.feed_forward("tensorwise")(x, *w).sum())(x),
        UnsupportedError,
        r"feed_forward: a float8 layer is differentiable once",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_refused(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call(*block(rows=(2,)))

"""dot_general under a recipe: its bits in every manner of JAX, what it keeps and lowers to, and what it refuses.

That every code and product is the oracle's is the matter of `test_layers`.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec

import f8emu.jax as f8
from f8emu.jax import compiling
from f8emu.jax.gemm import emulation
from f8emu.jax.layer import matmul
from f8emu.spec import (
    BLOCKWISE,
    RECIPES,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    Recipe,
    RecipeName,
    SpecError,
    UnsupportedError,
    recipe_from_json,
)
from tests.jax_path.layers import KERNEL, WEIGHT, assert_same_bits, draw, expected, passes

M, N, K = 33, 50, 70
TRANSPOSED = (((0,), (0,)), ((), ()))
"""lhs [K, M], rhs [K, N]."""
DYNAMIC = (TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP, BLOCKWISE)
pytestmark = pytest.mark.filterwarnings("ignore:f8emu.jax. .*has no split-K for this GEMM")


def operands(dtype: str = "bfloat16", *, layers: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input, weight and grad_output of some layers, stacked, each of another magnitude."""
    size = np.exp2(3 * np.arange(layers, dtype=np.float32))[:, None, None]
    shapes = ((layers, M, K), (layers, N, K), (layers, M, N))
    x, w, g = ((draw(*shape, seed=i, dtype="float32") * size).astype(dtype_of(dtype)) for i, shape in enumerate(shapes))
    return x, w, g


def dtype_of(name: str) -> np.dtype:
    return np.dtype(jnp.dtype(name))


def layer(recipe: Recipe | RecipeName = TENSORWISE, numbers: Any = WEIGHT, **options: Any) -> Callable[[Any, Any], Any]:
    multiply = f8.dot_general(recipe, **options)
    return lambda x, w: multiply(x, w, numbers)


@functools.cache
def stack() -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Three tensorwise layers, and the oracle's output, grad_input and grad_weight of each, stacked."""
    x, w, g = operands()
    layers = [expected(TENSORWISE, *of_layer) for of_layer in zip(x, w, g, strict=True)]
    return (x, w, g), tuple(map(np.stack, zip(*layers, strict=True)))


def test_signature_is_that_of_jax() -> None:
    ours = list(inspect.signature(f8.dot_general(TENSORWISE)).parameters.values())
    wanted = list(inspect.signature(jax.lax.dot_general).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in wanted]


def test_function_is_static_data() -> None:
    """Equal recipes give equal functions, so that one program serves them, also after a round trip through JSON."""
    one, other = f8.dot_general("rowwise"), f8.dot_general(recipe_from_json(ROWWISE.to_json()))
    assert one == other and hash(one) == hash(other) and one != f8.dot_general("tensorwise")
    with pytest.raises(AttributeError):
        one.engine = "hardware"  # pyright: ignore[reportAttributeAccessIssue]
    traced = 0

    @functools.partial(jax.jit, static_argnums=0)
    def multiply(function: Any, x: Any) -> Any:
        nonlocal traced
        traced += 1
        return jnp.zeros(())

    for function in (one, other):
        multiply(function, 1.0)
    assert traced == 1


@pytest.mark.parametrize("manner", ["batch dimensions", "jit of scan of checkpoint"])
def test_many_layers_at_once(manner: str) -> None:
    """A batch, which is a vmap, and a scan are of layers, each with its own scales."""
    arrays, wanted = stack()
    if manner == "batch dimensions":
        results = passes(layer(numbers=(((2,), (2,)), ((0,), (0,)))), *arrays)
    else:

        def all_layers(x: Any, w: Any) -> Any:
            checkpointed = jax.checkpoint(layer())
            return jax.lax.scan(lambda carry, of_layer: (carry, checkpointed(*of_layer)), 0, (x, w))[1]

        results = f8.jit(functools.partial(passes, all_layers))(*arrays)
    for observed, right in zip(results, wanted, strict=True):
        assert_same_bits(observed, right)


def test_any_dimensions_mean_the_same_layer() -> None:
    """Contracting dimensions in any place and number, einsum, transposed operands: the bits of the plain layer."""
    (x, w, g), (y, dx, dw) = ([a[0] for a in arrays] for arrays in stack())
    # 1. A kernel [K, N], and an input [K, M]: gradients come in the same layouts.
    results = passes(layer(numbers=(((0,), (0,)), ((), ()))), x.T.copy(), w.T.copy(), g)
    for observed, right in zip(results, (y, dx.T, dw.T), strict=True):
        assert_same_bits(observed, right)
    # 2. Two contracting dimensions, in another order on each side, between free ones.
    x_4 = x.reshape(3, 11, 7, 10).transpose(0, 3, 1, 2)  # [3, 10, 11, 7]
    w_3 = w.T.reshape(7, 10, N)
    numbers = (((3, 1), (0, 1)), ((), ()))
    output, dx_4, dw_3 = passes(layer(numbers=numbers), x_4, w_3, g.reshape(3, 11, N))
    assert_same_bits(output, y.reshape(3, 11, N))
    assert_same_bits(np.asarray(dx_4).transpose(0, 2, 3, 1).reshape(M, K), dx)
    assert_same_bits(np.asarray(dw_3).reshape(K, N), dw.T)
    # 3. einsum with a function of ours.
    multiply = f8.dot_general(TENSORWISE)
    einsum = functools.partial(jnp.einsum, "abk,nk->abn", _dot_general=multiply)
    assert_same_bits(einsum(x.reshape(3, 11, K), w), y.reshape(3, 11, N))


def test_arrays_that_a_program_closes_over() -> None:
    """They are constants, with which XLA computes while it compiles; here also transposed into a program within."""
    multiply = f8.dot_general("rowwise")
    layer = jax.jit(lambda x, w, g: jax.vjp(lambda x, w: multiply(x, w, KERNEL), x, w)[1](g))
    x, w, g = (jnp.asarray(draw(*shape, seed=shape[0])) for shape in ((21, 40), (40, 70), (21, 70)))
    x_t, g_t = jnp.array(x.T), jnp.array(g.T)
    both = jax.jit(lambda w: layer(x_t.T, w, g_t.T))(w)
    (of_x,) = jax.jit(lambda x: jax.vjp(lambda x: multiply(x, w, KERNEL), x)[1](g))(x)
    wanted = layer(x, w, g)
    for observed, right in zip((*both, of_x), (*wanted, wanted[0]), strict=True):
        assert_same_bits(observed, right)
    assert_same_bits(
        jax.jit(lambda: f8.decode(f8.cast(x, "float8_e4m3fn").T))(), f8.decode(f8.cast(x, "float8_e4m3fn")).T
    )


def test_with_64_bit_types() -> None:
    x, w, g = (a[0] for a in operands("float16", layers=1))
    wanted = expected(ROWWISE, x, w, g)
    with jax.enable_x64(True):
        results = passes(layer(ROWWISE), *map(jnp.asarray, (x, w, g)))
    for observed, right in zip(results, wanted, strict=True):
        assert_same_bits(observed, right)


def test_dtype_of_the_output() -> None:
    """Rounded once, from the accumulator; gradients keep the dtypes of the operands."""
    x, w, _ = (a[0] for a in stack()[0])
    output, dx, dw = passes(
        lambda x, w: f8.dot_general(TENSORWISE)(x, w, WEIGHT, None, jnp.float32), x, w, np.ones((M, N), np.float32)
    )
    in_float32 = expected(TENSORWISE, x.astype(np.float32), w, np.ones((M, N), np.float32))
    assert_same_bits(output, in_float32[0])
    assert dx.dtype == dw.dtype == jnp.bfloat16
    empty = passes(layer(), x[:0], w, np.ones((0, N), x.dtype))
    assert [a.shape for a in empty] == [(0, N), (0, K), (N, K)] and not np.asarray(empty[2], np.float32).any()


# What is kept, and what it lowers to


@pytest.mark.parametrize("recipe", DYNAMIC, ids=lambda recipe: recipe.name)
def test_backward_keeps_codes(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """But for scales no more than a bfloat16 layer keeps: of the input codes, where it is cast, and the weight."""
    x, w = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((128, 256), jnp.bfloat16)
    wrapped = lambda x, w: layer(recipe)(x + 1, w + 1)  # neither is an argument, which is there anyway  # noqa: E731
    print_saved_residuals(wrapped, x, w)
    kept = re.findall(r"^(\w+)\[([\d,]*)\]", capsys.readouterr().out, re.MULTILINE)
    sizes = {"bf16": 2, "f32": 0, "f8_e4m3fn": 1}
    total = sum(sizes[dtype] * int(np.prod([int(n) for n in shape.split(",") if n])) for dtype, shape in kept)
    assert total <= 2 * (x.size + w.size)
    codes = [dtype for dtype, _ in kept if dtype.startswith("f8")]
    assert len(codes) == (0 if recipe is ROWWISE_WITH_GW_HP else 1)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_a_widening_layer_keeps_its_input(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of codes, which are then made when the gradient is there; the bits are those of codes that were kept."""
    defers = recipe not in (BLOCKWISE, ROWWISE_WITH_GW_HP)  # casts both operands at once; does not cast that one
    for widening, is_transposed in ((2 * K, False), (2 * K + 1, False), (2 * K + 1, True)):
        x, w, g = (draw(*shape, seed=i) for i, shape in enumerate(((M, K), (widening, K), (M, widening))))
        operands = (x.T, w.T) if is_transposed else (x, w)
        step, state = layer_with_state(recipe, TRANSPOSED if is_transposed else WEIGHT)
        # 1. What is kept, and what waits for the gradient: the weight, and such an input.
        is_kept = defers and widening > 2 * K
        _, pull = jax.eval_shape(functools.partial(jax.vjp, step), *operands, state)
        codes = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.dtype.itemsize == 1]
        assert codes == ([] if is_kept or recipe is ROWWISE_WITH_GW_HP else [(K, M)])
        barriers = equations(jax.make_jaxpr(lambda pull, g: pull(g))(pull, g), "optimization_barrier")
        pairs = [eqn.invars for eqn in barriers if len(eqn.invars) == 2]
        waiting = [x.aval.shape for x, after in pairs if after.aval.shape == g.shape]
        assert sorted(waiting) == sorted(operands[i].shape for i in ((0, 1) if is_kept else (1,)))
        # 2. The bits.
        if not is_kept:
            continue
        output, pull = jax.vjp(step, *operands, state)
        results = (output, *pull(g))
        with monkeypatch.context() as patched:
            patched.setattr(matmul, "keeps_input", lambda *_: False)
            output, pull = jax.vjp(step, *operands, state)
        jax.tree.map(assert_same_bits, results, (output, *pull(g)))
        if recipe.delayed is None:
            d_weight = expected(recipe, x, w, g)[2]
            assert_same_bits(results[2], d_weight.T if is_transposed else d_weight)


def layer_with_state(recipe: Recipe, numbers: Any) -> tuple[Callable[..., Any], Any]:
    """A layer as a function of input, weight and state, and its first state."""
    if recipe.delayed is None:
        return lambda x, w, _: layer(recipe, numbers)(x, w), None
    multiply = f8.delayed_dot_general(recipe)
    return lambda x, w, state: multiply(x, w, state, numbers), f8.linear_delayed_state(recipe)


def equations(jaxpr: Any, primitive: str) -> list[Any]:
    """Those of a primitive, in programs inside of the program too."""
    matching = []
    for eqn in jaxpr.eqns:
        matching += [eqn] if eqn.primitive.name == primitive else []
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            matching += equations(inner, primitive) if hasattr(inner, "eqns") else []
    return matching


def lowered(recipe: Recipe, jit: Any, platform: str, **options: Any) -> str:
    x, w, g = jnp.ones((M, K), jnp.bfloat16), jnp.ones((K, N), jnp.bfloat16), jnp.ones((M, N), jnp.bfloat16)
    if recipe.delayed is None:
        step = lambda x, w, g: passes(layer(recipe, KERNEL, **options), x, w, g)  # noqa: E731
    else:
        state = f8.linear_delayed_settled(f8.linear_delayed_state(recipe)._replace(**of_ones(recipe)))
        multiply = f8.delayed_dot_general(recipe, **options)
        step = lambda x, w, g: passes(lambda x, w: multiply(x, w, state, KERNEL), x, w, g)  # noqa: E731
    return jit(step).trace(x, w, g).lower(lowering_platforms=(platform,)).as_text()


def of_ones(recipe: Recipe) -> dict[str, Any]:
    state = f8.linear_delayed_state(recipe)
    return {name: getattr(state, name)._replace(initialized=jnp.ones(())) for name in state._fields}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_lowered_for_a_gpu(recipe: Recipe) -> None:
    """Every GEMM of the recipe is a dot of codes, with the precision of its accumulation, or a kernel; no loops."""
    text = lowered(recipe, f8.jit, "cuda")
    dots = re.findall(r"dot_general .*?precision = \[(\w+), \w+\] : \(tensor<\w*?x(\w+)>, tensor<\w*?x(\w+)>\)", text)
    kinds = {"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2", "bf16": None}
    gemms = {name: gemm for name, gemm in recipe.gemms.items() if recipe is not BLOCKWISE}
    assert text.count('name = "f8emu_block_mm"') == len(recipe.gemms) - len(gemms)
    for gemm, (precision, *types) in zip(gemms.values(), dots, strict=True):
        # A product of the gradient of a kernel [K, N] has its operands the other way round.
        assert sorted(map(str, (kinds[t[-len(t.lstrip("0123456789x")) :]] for t in types))) == sorted(
            str(cast.format) if cast.format else "None" for cast in (gemm.a, gemm.b)
        )
        is_promoted = not (gemm.use_fast_accum or gemm.is_high_precision)
        assert precision == ("HIGHEST" if is_promoted else "DEFAULT")
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_nothing_that_follows_joins_a_gemm(recipe: Recipe) -> None:
    """XLA takes a bias, a residual or a conversion into cuBLASLt's epilogue, before the rounding to bfloat16: not past
    a barrier, nor where the accumulators are float32 first, scaled by powers of two or rounded explicitly."""
    ends: list[str] = []
    text = lowered(recipe, f8.jit, "cuda")
    for dot in re.finditer(r"(%\w+) = stablehlo\.dot_general .* -> tensor<\w*xbf16>", text):
        name, end = dot[1], dot.end()
        users: list[str] = []
        while not users or users[-1] in ("multiply", "LayoutConstraint", "slice"):
            user = re.compile(rf"(%\w+) = stablehlo\.(?:custom_call @)?(\w+).*{name}\b.*").search(text, end)
            assert user is not None
            assert user[2] != "LayoutConstraint" or "result_layouts = [dense<[1, 0]>" in user[0]
            name, end = user[1], user.end()
            users.append(user[2])
        # A folded factor needs a product that is laid as rows.
        assert (users[0] == "multiply") == (users[1:2] == ["LayoutConstraint"])
        ends.append(users[-1])
    high = sum(gemm.is_high_precision for gemm in recipe.gemms.values())
    scaled = {"tensorwise": 3, "delayed": 3}.get(recipe.name, 0)
    assert ends.count("optimization_barrier") == scaled + high
    assert set(ends) <= {"optimization_barrier", "convert"} and len(ends) == (0 if recipe is BLOCKWISE else 3)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_no_gemm_is_merged_with_another(recipe: Recipe) -> None:
    """XLA makes one dot of small ones that share an operand, as two layers of one input; of operands behind barriers of
    their own it does not."""
    x, w, v = (jnp.ones(shape, jnp.bfloat16) for shape in ((M, K), (K, N), (K, 2 * N)))
    state = None if recipe.delayed is None else f8.linear_delayed_state(recipe)

    def both(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        if state is None:
            return [layer(recipe, KERNEL)(x, w) for w in weights]
        return [f8.delayed_dot_general(recipe)(x, w, state, KERNEL) for w in weights]

    text = f8.jit(both).trace(x, w, v).lower(lowering_platforms=("cuda",)).as_text()
    dots = re.findall(r"stablehlo\.dot_general (%\w+)(?:#\d)?, (%\w+)", text)
    barriers = re.findall(r"(%\w+):2 = stablehlo\.optimization_barrier", text)
    assert [a for a, _ in dots] == [b for _, b in dots] and {a for a, _ in dots} <= set(barriers)
    assert len(dots) == (0 if recipe is BLOCKWISE else 2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_lowered_for_a_cpu(recipe: Recipe) -> None:
    text = lowered(recipe, jax.jit, "cpu")
    assert not re.search(r"dot_general .*f8E", text)
    assert "f8emu_gemm" in text  # the engine's custom call


def test_a_program_without_the_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU alone; inside of our jit, a jitted function that was traced without them is traced again."""
    with pytest.raises(UnsupportedError, match=r"use f8emu\.jax\.jit .* or set XLA_FLAGS"):
        lowered(TENSORWISE, jax.jit, "cuda")
    lowered(TENSORWISE, jax.jit, "cuda", engine="emulated")
    x, w = jnp.ones((M, K), jnp.bfloat16), jnp.ones((N, K), jnp.bfloat16)
    inner = jax.jit(layer())
    inner.trace(x, w)
    assert "f8E4M3FN" in f8.jit(lambda x, w: inner(x, w)).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(UnsupportedError, match="compiled with"):
        jax.jit(lambda x, w: inner(x, w)).trace(x, w).lower(lowering_platforms=("cuda",))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_foo=1 --xla_gpu_enable_triton_gemm=false")
    assert "f8E4M3FN" in lowered(TENSORWISE, jax.jit, "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert compiling.known_excess_precision() is None


def test_excess_precision_off_changes_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale is folded into a bfloat16 dot only where XLA surely takes it into the call."""
    off = functools.partial(f8.jit, compiler_options={"xla_allow_excess_precision": False})
    assert re.search(r"dot_general.*-> tensor<\w+xbf16>", lowered(TENSORWISE, f8.jit, "cuda"))
    assert not re.search(r"dot_general.*-> tensor<\w+xbf16>", lowered(TENSORWISE, off, "cuda"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=false")
    assert compiling.compiler_options()["xla_allow_excess_precision"] is False
    with pytest.raises(SpecError, match=r"must leave xla_gpu_enable_triton_gemm False; got True"):
        f8.jit(layer(), compiler_options={"xla_gpu_enable_triton_gemm": True})


def test_our_jit_is_jit() -> None:
    """A decorator with the options of jax.jit; donated buffers; nested; under transformations."""
    (x, w, _), (y, *_) = ([a[0] for a in arrays] for arrays in stack())

    @f8.jit(static_argnames="numbers", donate_argnums=0)
    def run(x: Any, w: Any, numbers: Any) -> Any:
        return layer(numbers=numbers)(x, w), x + 1

    donated = jnp.asarray(x)
    assert_same_bits(run(donated, w, numbers=WEIGHT)[0], y)
    assert donated.is_deleted()
    assert run.__name__ == "run" and run.eval_shape(x, w, numbers=WEIGHT)[0].shape == (M, N)
    deleted = jnp.asarray(x)
    deleted.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        layer()(deleted, w)
    assert_same_bits(f8.jit(lambda x, w: run(x, w, numbers=WEIGHT)[0])(x, w), y)  # nested: no options of its own


# Refusals


def test_differentiable_once_in_reverse_mode() -> None:
    x, w, _ = (jnp.asarray(a[0]) for a in stack()[0])

    def total(x: Any) -> Any:
        return layer()(x, w).astype(jnp.float32).sum()

    def ragged(x: Any) -> Any:
        return f8.ragged_dot(x, w.T[None], jnp.array([3]))

    with pytest.raises(UnsupportedError, match=r"got a second derivative"):
        jax.grad(lambda x: jax.grad(total)(x).astype(jnp.float32).sum())(x)
    forward: list[Callable[[], Any]] = [
        lambda: jax.jvp(layer(), (x, w), (x, w)),
        lambda: jax.jit(jax.vmap(lambda t: jax.jvp(jax.jit(total), (x,), (t,))))(x[None]),
        lambda: jax.linearize(ragged, x)[1](x),
        lambda: jax.jacfwd(jax.checkpoint(total))(x),
        lambda: jax.hessian(total)(x),
        lambda: jax.linear_transpose(layer(), x, w)(x[:, :1] @ w[:, :1].T),
        lambda: jax.linear_transpose(ragged, x)(x[:, :1] @ w[:, :1].T),
    ]
    for derivative in forward:
        with pytest.raises(UnsupportedError, match=r"in reverse mode alone; got jvp.*use jax\.grad"):
            derivative()


@pytest.mark.parametrize("disabled", [jax.disable_jit, lambda: mock.patch("jax.jit", lambda fun, **_: fun)])
def test_without_jit(disabled: Callable[[], Any]) -> None:
    """`jax.disable_jit`, and what `chex.fake_jit` does: a GEMM is a program nevertheless, made before or now."""
    x, w, _ = (jnp.asarray(a[0]) for a in operands())
    wanted = f8.mm(x, w.T)
    emulation._program.cache_clear()
    with disabled():
        assert_same_bits(f8.jit(f8.mm)(x, w.T), wanted)


def test_out_sharding() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    (x, w, _), (y, *_) = ([a[0] for a in arrays] for arrays in stack())
    with jax.set_mesh(mesh):
        observed = jax.jit(
            lambda x, w: f8.dot_general(TENSORWISE)(x, w, WEIGHT, out_sharding=PartitionSpec("data", None))
        )(x, w)
    assert_same_bits(observed, y)


def test_our_jit_lends_its_methods_to_nobody() -> None:
    """What wraps a function takes over its attributes: ahead of time a gradient is a gradient too."""
    f = f8.jit(lambda w: (w**2).sum())
    w = jnp.ones((4, 2))
    assert jax.eval_shape(jax.grad(f), w).shape == f8.jit(jax.grad(f)).eval_shape(w).shape == (4, 2)
    assert jnp.array_equal(jax.jit(jax.grad(f)).lower(w).compile()(w), 2 * w)
    jax.jit(f8.dot_general("rowwise"), static_argnums=2)  # takes weak references


def test_a_backward_pass_belongs_to_its_own_program() -> None:
    """A forward pass under our jit does not vouch for a backward pass under another, and needs not be asked for it."""
    x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((48, 32), jnp.bfloat16)

    def forward(w: jax.Array) -> Any:
        return jax.vjp(lambda w: layer(engine="hardware")(x, w), w)

    _, pull = jax.eval_shape(f8.jit(forward), w)
    g = jax.ShapeDtypeStruct((16, 48), jnp.bfloat16)
    lower: dict[str, Any] = {"lowering_platforms": ("cuda",)}
    with pytest.raises(UnsupportedError, match=r"f8emu\.jax\.jit"):
        jax.jit(lambda pull, g: pull(g)).trace(pull, g).lower(**lower)
    f8.jit(lambda pull, g: pull(g)).trace(pull, g).lower(**lower)

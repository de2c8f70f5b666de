"""The libraries around `dot_general`: each gives the bits of the layer itself, forward and backward."""

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import linen, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState

import f8emu.jax as f8
from f8emu import interop
from f8emu.jax.hosts import flax_linen, flax_nnx
from f8emu.jax.hosts.einsum import einsum
from f8emu.jax.hosts.equinox import Float8Linear, convert_linears
from f8emu.jax.hosts.qwix import Float8Provider, Float8Rule
from f8emu.spec import Float8State, OperandError, RecipeName, SpecError, UnsupportedError
from tests.jax_path.layers import KERNEL, assert_same_bits


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def same(a: Any, b: Any) -> None:
    """The same leaves, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(assert_same_bits, a, b)


@functools.cache
def wanted(recipe: RecipeName) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The product of x and kernel, and the gradients of its squares' sum: from `dot_general` itself."""
    product = f8.dot_general(recipe)

    def loss(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = product(x, kernel, KERNEL)
        return (y * y).sum(), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(draw(32, 32), draw(32, 32, seed=1))
    return y, grads


def of_host(host: str, recipe: RecipeName) -> Callable[[jax.Array, jax.Array], Any]:
    """A linear layer of the library, as a function of input and kernel."""
    product: Any = f8.dot_general(recipe)
    layer: Any
    match host:
        case "linen":
            layer = linen.Dense(32, use_bias=False, dot_general=product)
        case "linen class":
            cls = functools.partial(flax_linen.Float8DotGeneral, recipe=recipe)
            layer = linen.Dense(32, use_bias=False, dot_general_cls=cls)
        case "qwix":
            rules = [Float8Rule(module_path=".*", recipe=recipe)]
            layer = qwix.quantize_model(linen.Dense(32, use_bias=False), Float8Provider(rules))
        case "nnx":
            layer = nnx.Linear(32, 32, use_bias=False, rngs=nnx.Rngs(0), dot_general=product)
            graph, params = nnx.split(layer)
            merge, of_kernel = cast(Any, nnx.merge), cast(Any, params)["kernel"]
            return lambda x, kernel: merge(graph, {"kernel": of_kernel.replace(kernel)})(x)
        case "einsum":
            return lambda x, kernel: jnp.einsum("md,dh->mh", x, kernel, _dot_general=product)
        case "equinox":
            layer = convert_linears(eqx.nn.Linear(32, 32, use_bias=False, key=jax.random.key(0)), recipe)
            return lambda x, kernel: jax.vmap(eqx.tree_at(lambda layer: layer.weight, layer, kernel.T))(x)
        case _:
            raise AssertionError
    return lambda x, kernel: layer.apply({"params": {"kernel": kernel}}, x)


@pytest.mark.parametrize("host", ["linen", "linen class", "nnx", "einsum", "equinox", "qwix"])
def test_a_layer_has_the_bits_of_dot_general(host: str) -> None:
    """Blockwise, because it treats input and weight differently."""
    call = of_host(host, "blockwise")

    def loss(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = call(x, kernel)
        return (y * y).sum(), y

    x, kernel = draw(32, 32), draw(32, 32, seed=1)
    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, kernel)
    same((y, grads), wanted("blockwise"))


class Mlp(linen.Module):
    """Two layers, whose products are of a class."""

    cls: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(32, use_bias=False, dot_general_cls=self.cls, name="up")(x)
        return linen.Dense(32, use_bias=False, dot_general_cls=self.cls, name="down")(jnp.tanh(x))


def explicit(params: Any, states: Any, x: jax.Array) -> jax.Array:
    """`Mlp` under delayed scaling, without flax; states name -> state."""
    product = f8.delayed_dot_general("delayed")
    x = jnp.tanh(product(x, params["up"]["kernel"], states["up"], KERNEL))
    return product(x, params["down"]["kernel"], states["down"], KERNEL)


DELAYED = functools.partial(flax_linen.Float8DotGeneral, recipe="delayed")


def test_delayed_scaling_in_flax_is_explicit_delayed_scaling() -> None:
    """Two steps of flax's `TrainState`, whose variables overwrite themselves, beside two explicit ones."""
    model: Any = Mlp(DELAYED)
    variables = model.init(jax.random.key(0), draw(32, 32))
    params = variables["params"]
    states = {name: f8.linear_delayed_state("delayed") for name in params}
    tx = optax.sgd(0.05)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    opt_state = tx.init(params)

    def flax_step(state: TrainState, x: jax.Array) -> TrainState:
        return state.apply_gradients(grads=jax.grad(lambda v: (model.apply(v, x) ** 2).sum())(state.params))

    def own_step(params: Any, states: Any, opt_state: Any, x: jax.Array) -> Any:
        grads, amaxes = jax.grad(lambda p, s: (explicit(p, s, x) ** 2).sum(), argnums=(0, 1))(params, states)
        updates, opt_state = tx.update(grads, opt_state, params)
        states = {name: f8.linear_delayed_update(states[name], amaxes[name]) for name in states}
        return optax.apply_updates(params, updates), states, opt_state

    for step in range(2):
        x = draw(32, 32, seed=step) * 2.0**step
        state = flax_step(state, x)
        params, states, opt_state = own_step(params, states, opt_state, x)
        same(state.params["params"], params)
        same(flax_linen.float8_states(state.params), states)
    assert [float(of_tensor.initialized) for of_tensor in states["up"] if of_tensor is not None] == [1, 1, 1]


def test_accumulated_gradients_keep_the_largest_amaxes() -> None:
    """Two batches of a step: the amaxes are the largest of both. The state then goes through torch's layout."""
    model: Any = Mlp(functools.partial(DELAYED, overwrites=False))
    variables = model.init(jax.random.key(0), draw(32, 32))
    batches = draw(32, 32, seed=1), draw(32, 32, seed=2) * 8
    grad = jax.grad(lambda v, x: (model.apply(v, x) ** 2).sum())
    first, second = (flax_linen.float8_states(grad(variables, x)) for x in batches)
    states = flax_linen.float8_states(variables)
    amaxes = {name: f8.linear_delayed_maximum(first[name], second[name]) for name in states}
    updated: Any = {name: f8.linear_delayed_update(states[name], amaxes[name]) for name in states}
    assert float(updated["up"].input.amax_history[0]) == float(jnp.abs(batches[1]).max())
    of_torch = interop.delayed_state_dict_from_float8_states(updated)
    assert of_torch["up.amax_history"].shape == (3, 16)
    back = interop.float8_states_from_delayed_state_dict(of_torch)
    carried = flax_linen.with_float8_states(variables, back)
    same(flax_linen.float8_states(carried), updated)
    same(carried["params"], variables["params"])


def test_states_of_other_layers_are_refused() -> None:
    variables = Mlp(DELAYED).init(jax.random.key(0), draw(32, 32))
    states = flax_linen.float8_states(variables)
    with pytest.raises(OperandError, match=r"with_float8_states: states must be of the layers of these variables"):
        flax_linen.with_float8_states(variables, {"up": states["up"]})


def test_delayed_scaling_below_scan_and_remat() -> None:
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return linen.Dense(32, use_bias=False, dot_general_cls=DELAYED, name="dense")(x), None

    axes: dict[Any, Any] = {"params": 0, OVERWRITE_WITH_GRADIENT: 0}
    scanned = linen.scan(linen.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=3)()
    variables = scanned.init(jax.random.key(0), draw(32, 32), None)
    grads = jax.grad(lambda v: (scanned.apply(v, draw(32, 32), None)[0] ** 2).sum())(variables)
    found = flax_linen.float8_states(grads)["dense"]
    assert isinstance(found, Float8State)

    def loss(states: Any, kernels: Any) -> jax.Array:
        x = draw(32, 32)
        for kernel, state in zip(kernels, states, strict=True):
            x = f8.delayed_dot_general()(x, kernel, f8.overwrite_with_gradient(state), KERNEL)
        return (x**2).sum()

    kernels = list(variables["params"]["dense"]["kernel"])
    states, _ = jax.grad(loss, argnums=(0, 1))([f8.linear_delayed_state()] * 3, kernels)
    same(found, jax.tree.map(lambda *x: jnp.stack(x), *states))


def test_a_shared_layer_with_delayed_scaling_is_refused() -> None:
    class Shared(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            dense = linen.Dense(16, dot_general_cls=DELAYED, name="shared")
            return dense(dense(x))

    with pytest.raises(
        UnsupportedError, match=r"may be called once in a pass; shared/Float8DotGeneral_0 was called twice"
    ):
        Shared().init(jax.random.key(0), draw(16, 16))


def test_states_that_flax_uses_more_than_once_are_refused() -> None:
    """Scanned over time, called twice, or mapped over a batch: JAX would add their amaxes."""

    class Cell(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return linen.Dense(16, use_bias=False, dot_general_cls=DELAYED, name="dense")(x), None

    x, broadcast = draw(16, 16), ["params", OVERWRITE_WITH_GRADIENT]
    scanned = linen.scan(Cell, variable_broadcast=broadcast, split_rngs={"params": False}, length=2)()
    variables = scanned.init(jax.random.key(0), x, None)
    run = jax.jit(lambda v: scanned.apply(v, x, None)[0].sum())
    grads = jax.grad(run)(variables)
    assert jnp.isnan(run({**variables, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}))
    with pytest.raises(UnsupportedError, match=r"operands that jax.vmap maps and a state that it does not"):
        jax.grad(lambda v: jax.vmap(lambda x: Cell().apply(v, x, None)[0])(x[None]).sum())(variables)
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0), dot_general=flax_nnx.Float8DotGeneral())
    wrt = nnx.DiffState(0, flax_nnx.OverwriteWithGradient)
    nnx.update(layer, nnx.grad(lambda layer: layer(layer(x)).sum(), argnums=wrt)(layer))
    with pytest.raises(OperandError, match="was used in two calls of a pass"):
        layer(x)


def test_delayed_scaling_in_nnx() -> None:
    """As in linen; the gradients of variables that overwrite themselves are split from those of parameters."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.up = nnx.Linear(32, 32, use_bias=False, rngs=rngs, dot_general=flax_nnx.Float8DotGeneral())
            self.down = nnx.Linear(32, 32, use_bias=False, rngs=rngs, dot_general=flax_nnx.Float8DotGeneral())

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(jnp.tanh(self.up(x)))

    model = Model()
    with pytest.raises(UnsupportedError, match=r"wrt = nnx.DiffState\(0, nnx.Any\(nnx.Param, OverwriteWithGradient"):
        nnx.jit(nnx.value_and_grad(lambda model: model(draw(32, 32)).sum()))(model)  # of parameters alone
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, flax_nnx.OverwriteWithGradient))

    def pure() -> tuple[Any, Any]:
        params = {name: {"kernel": getattr(model, name).kernel.get_value()} for name in ("up", "down")}
        return params, {name: getattr(model, name).dot_general.state.get_value() for name in params}

    def step(model: Model, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(lambda model: (model(x) ** 2).sum(), argnums=wrt)(model)
        of_params, states = nnx.split_state(grads, nnx.Param, flax_nnx.OverwriteWithGradient)
        optimizer.update(model, of_params)
        nnx.update(model, states)

    for i in range(2):
        params, states = pure()
        x = draw(32, 32, seed=i) * 2.0**i
        amaxes, _ = jax.grad(lambda s, p, x: (explicit(p, s, x) ** 2).sum(), argnums=(0, 1))(states, params, x)
        step(model, optimizer, x)
        same(pure()[1], {name: f8.linear_delayed_update(states[name], amaxes[name]) for name in states})


def test_delayed_scaling_in_equinox() -> None:
    """One state for all tokens of a batch, mapped over twice; its gradient is the next state."""
    linear = eqx.nn.Linear(32, 32, use_bias=False, key=jax.random.key(0))
    layer = convert_linears(linear, "delayed")
    x = draw(4, 8, 32)
    grads = eqx.filter_grad(lambda layer: (jax.vmap(jax.vmap(layer))(x) ** 2).sum())(layer)
    product = f8.delayed_dot_general()

    def loss(state: Float8State, kernel: jax.Array) -> jax.Array:
        return (product(x.reshape(32, 32), kernel, state, KERNEL) ** 2).sum()

    amaxes, of_kernel = jax.grad(loss, argnums=(0, 1))(layer.state, linear.weight.T)
    same(grads.state, f8.linear_delayed_update(layer.state, amaxes))
    same(grads.weight, of_kernel.T)


def test_per_example_gradients_in_equinox() -> None:
    """The gradient of one example, mapped, has the bits of a single call."""
    layer = convert_linears(eqx.nn.Linear(16, 32, key=jax.random.key(0)), "tensorwise")
    grad = jax.grad(lambda layer, x: (layer(x) ** 2).sum())
    x = draw(2, 16) * jnp.float32([[1], [64]])
    mapped = jax.vmap(grad, in_axes=(None, 0))(layer, x)
    for i in range(2):
        same(jax.tree.map(operator.itemgetter(i), mapped), grad(layer, x[i]))


def test_equinox_modules_map_their_layers_themselves() -> None:
    """Attention maps its projections over the tokens: one scale for a tensor, as without the map."""
    attention = eqx.nn.MultiheadAttention(2, 32, key=jax.random.key(0))
    converted = convert_linears(attention, "tensorwise", where=lambda path, linear: "output" not in path)
    assert isinstance(converted.query_proj, Float8Linear)
    assert type(converted.output_proj) is eqx.nn.Linear
    x = draw(16, 32)
    y = jax.vmap(converted.query_proj)(x)
    same(y, f8.dot_general("tensorwise")(x, attention.query_proj.weight.T, KERNEL))
    assert eqx.filter_jit(lambda layer, x: layer(x, x, x))(converted, x).shape == (16, 32)


def test_an_ensemble_has_a_scale_for_each_member() -> None:
    layers = eqx.filter_vmap(lambda key: Float8Linear(eqx.nn.Linear(16, 32, key=key), "tensorwise"))(
        jax.random.split(jax.random.key(0), 2)
    )
    x = draw(8, 16)
    both = eqx.filter_vmap(lambda layer: layer(x))(layers)
    for i, y in enumerate(both):
        same(y, jax.tree.map(operator.itemgetter(i), layers)(x))


@pytest.mark.parametrize("subscripts", ["bsd,dh->bsh", "bsd,dh->hbs", "...d,dh->h...", "bed,edh->beh", "bsd,dhk->bkhs"])
def test_einsum_is_einsum(subscripts: str) -> None:
    shapes = {"...": (), "b": (2,), "s": (3,), "d": (8,), "h": (5,), "k": (4,), "e": (3,)}
    of_x, of_w = (part.replace("...", "") for part in subscripts.split("->")[0].split(","))
    x = draw(*(n for name in of_x for n in shapes[name]))
    x = draw(2, 3, 8) if "..." in subscripts else x
    w = draw(*(n for name in of_w for n in shapes[name]), seed=1)
    y = einsum(subscripts, x, w, dot_general=jax.lax.dot_general)
    np.testing.assert_allclose(y, jnp.einsum(subscripts, x, w), rtol=1e-5, atol=1e-5)


def test_einsum_knows_the_weight() -> None:
    """jnp.einsum exchanges the operands to save a transpose; blockwise, that changes the bits."""
    x, w = draw(32, 128), draw(128, 32, seed=1)
    product = f8.dot_general("blockwise")
    turned = einsum("md,dh->hm", x, w, dot_general=product)
    same(turned, product(x, w, KERNEL).T)
    assert (np.asarray(turned) != np.asarray(jnp.einsum("md,dh->hm", x, w, _dot_general=product))).any()


@pytest.mark.parametrize("subscripts", ["md,dh", "md,dh->mdh,", "mm,mh->h", "md,dh->m", "mdk,dh->mh", "md,dh,h->mh"])
def test_other_sums_are_refused(subscripts: str) -> None:
    with pytest.raises(OperandError, match=r"einsum: subscripts must be 'input,weight->result'.*use jnp.einsum"):
        einsum(subscripts, draw(4, 8), draw(8, 4), dot_general=jax.lax.dot_general)


def test_einsum_has_no_place_for_a_state() -> None:
    with pytest.raises(OperandError, match=r"einsum: .*got a delayed_dot_general, which takes a state; close over it"):
        einsum("md,dh->mh", draw(4, 8), draw(8, 4), dot_general=f8.delayed_dot_general())


def test_qwix_converts_the_modules_of_its_rules() -> None:
    class Model(linen.Module):
        up: Any = None
        down: Any = None

        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = jnp.tanh(linen.Dense(32, dot_general=self.up, name="up")(x))
            return linen.Dense(16, dot_general=self.down, name="down")(x)

    x = draw(32, 32)
    variables = Model().init(jax.random.key(0), x)
    rules = [
        Float8Rule(module_path="down"),
        Float8Rule(module_path=".*", recipe="rowwise"),
        Float8Rule(module_path="x"),
    ]
    provider = Float8Provider(rules)
    model = qwix.quantize_model(Model(), provider)
    by_hand = Model(up=f8.dot_general("rowwise"))

    def run(model: Any) -> Any:
        return jax.value_and_grad(lambda v: (model.apply(v, x) ** 2).sum())(variables)

    same(run(model), run(by_hand))
    assert [rule.module_path for rule in provider.get_unused_rules()] == ["x"]


def test_rules_that_qwix_cannot_keep() -> None:
    with pytest.raises(SpecError, match=r"Float8Provider: rules must be Float8Rule; got QuantizationRule"):
        Float8Provider([qwix.QuantizationRule()])
    with pytest.raises(SpecError, match="delayed"):
        Float8Provider([Float8Rule(recipe="delayed")])
    with pytest.raises(SpecError, match="nosuch"):
        Float8Provider([Float8Rule(recipe="nosuch")])  # pyright: ignore[reportArgumentType]


def test_attention_of_flax_takes_recipes() -> None:
    """Projections [d, heads, head_dim] and, over two contracting axes, back."""
    product = f8.dot_general("tensorwise")
    seen: list[jax.Array] = []

    def kept(*args: Any, **options: Any) -> jax.Array:
        seen.append(product(*args, **options))
        return seen[-1]

    layer = linen.MultiHeadAttention(2, qkv_dot_general=kept, out_dot_general=product, use_bias=False)
    x = draw(2, 16, 32)
    variables: Any = layer.init(jax.random.key(0), x)
    seen.clear()
    y: Any = layer.apply(variables, x)
    assert y.shape == x.shape
    heads = variables["params"]["query"]["kernel"]
    same(seen[0].reshape(32, 32), product(x.reshape(32, 32), heads.reshape(32, 32), KERNEL))


def test_equinox_says_that_nothing_was_converted() -> None:
    mlp = eqx.nn.MLP(16, 16, 16, 2, key=jax.random.key(0))
    with pytest.warns(
        UserWarning, match=r"where selects none of its layers: \.layers\[0\], \.layers\[1\], \.layers\[2\]$"
    ):
        assert convert_linears(mlp, "rowwise", where=lambda path, linear: linear.out_features == 64) == mlp
    with pytest.warns(UserWarning, match="no equinox.nn.Linear in it"):
        convert_linears(eqx.nn.LayerNorm(16), "rowwise")
    wrong = cast(Any, lambda linear: True)
    with pytest.raises(
        SpecError, match=r"where must take \(path, linear\); .* write where=lambda path, linear: \.\.\."
    ):
        convert_linears(mlp, "rowwise", where=wrong)

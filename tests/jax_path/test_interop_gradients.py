"""A JAX function under torch.autograd, and a torch function under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import f8emu.torch as f8
import f8ref.jax
from f8emu import interop
from f8emu.spec import RECIPES, OperandError, UnsupportedError


def bits(x: object) -> bytes:
    return interop.to_numpy(x).tobytes()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_jax_function_under_autograd(is_jitted: bool) -> None:
    def function(params: dict[str, jax.Array], x: jax.Array, power: int) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ params["w"]) ** power
        return y, jnp.argmax(y, axis=1)

    jitted = jax.jit(function, static_argnums=2) if is_jitted else function
    w, x = draw(4, 5).requires_grad_(), draw(3, 4, seed=1).requires_grad_()
    y, index = interop.torch_function(jitted)({"w": w}, x, 2)
    assert y.requires_grad and not index.requires_grad
    assert index.dtype is torch.int32
    (y * draw(3, 5, seed=2)).sum().backward()

    arrays = interop.to_jax({"w": w}), interop.to_jax(x)
    wanted, vjp = jax.vjp(lambda params, x: jitted(params, x, 2)[0], *arrays)
    of_params, of_x = vjp(interop.to_jax(draw(3, 5, seed=2)))
    assert bits(y) == bits(wanted)
    assert bits(w.grad) == bits(of_params["w"])
    assert bits(x.grad) == bits(of_x)


def test_a_jax_function_beside_torchs_own_operators() -> None:
    """As a layer in the middle: the chain rule goes through, an unused result has a zero gradient."""
    split = interop.torch_function(lambda x: (x * 2, x * 3))
    x = draw(4, 4).requires_grad_()
    (split(x.exp())[0].sum() * 5).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 10 * x.detach().exp(), rtol=1e-6, atol=0)
    with torch.no_grad():
        assert not split(x)[0].requires_grad
    assert split(x.detach())[0].requires_grad is False


def test_bfloat16_and_integers_cross() -> None:
    take = interop.torch_function(lambda table, index: table[index])
    table = draw(8, 4).bfloat16().requires_grad_()
    rows = take(table, torch.tensor([1, 1, 3], dtype=torch.int32))
    assert rows.dtype is torch.bfloat16
    rows.sum().backward()
    assert table.grad is not None and table.grad.dtype is torch.bfloat16
    assert table.grad[:, 0].tolist() == [0, 2, 0, 1, 0, 0, 0, 0]


def test_limits_of_a_jax_function() -> None:
    square = interop.torch_function(lambda x: x * x)
    with pytest.raises(OperandError, match=r"torch_function: at least one argument must be a tensor"):
        square(3.0)
    x = draw(3).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"torch_function: .*no gradient in torch.*differentiate twice in JAX"):
        torch.autograd.grad(square(x).sum() + x.exp().sum(), x, create_graph=True)


def test_numbers_of_a_jax_function_become_tensors() -> None:
    y, two = interop.torch_function(lambda x: (x.sum(), 2.0))(torch.ones(3).requires_grad_())
    assert (y.item(), two.item()) == (3.0, 2.0)


def test_a_jax_function_in_a_compiled_model() -> None:
    double = interop.torch_function(lambda x: x * 2)
    compiled = torch.compile(lambda x: double(x + 1) + 1, backend="eager")
    assert compiled(torch.zeros(3)).tolist() == [3.0, 3.0, 3.0]


def linear_result(x: jax.Array, w: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[0]), x.dtype)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_torch_function_under_jax(is_jitted: bool) -> None:
    """The bits of torch and its autograd: value, gradients, vmap."""
    layer = interop.jax_function(nn.functional.linear, linear_result)
    loss = jax.value_and_grad(lambda x, w: (layer(x, w) * 3).sum(), argnums=(0, 1))
    x, w = draw(6, 8), draw(4, 8, seed=1)
    value, grads = (jax.jit(loss) if is_jitted else loss)(*interop.to_jax((x, w)))
    x.requires_grad_()
    w.requires_grad_()
    y = nn.functional.linear(x, w)
    y.backward(torch.full_like(y, 3))
    assert list(map(bits, grads)) == [bits(x.grad), bits(w.grad)]
    np.testing.assert_allclose(float(value), 3 * float(y.detach().sum()), rtol=1e-4)
    batch = jnp.stack([interop.to_jax(x)] * 2)
    both = jax.vmap(layer, (0, None))(batch, interop.to_jax(w))
    assert both.shape == (2, 6, 4)
    assert bits(both[1]) == bits(y)


def test_several_results_and_integers() -> None:
    def function(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x[index.long()] * 2, index + 1

    result = (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32))
    layer = interop.jax_function(function, result)
    x, index = jnp.ones((4, 3), jnp.bfloat16), jnp.array([1, 1])
    for transform in (lambda f: f, jax.jit):
        grad = transform(jax.grad(lambda x: layer(x, index)[0].astype(jnp.float32).sum()))(x)
        assert grad.dtype == jnp.bfloat16
        assert np.asarray(grad)[:, 0].astype(np.float32).tolist() == [0, 4, 0, 0]
    assert layer(x, index)[1].tolist() == [2, 2]


def test_what_a_torch_function_returns_is_compared() -> None:
    layer = interop.jax_function(lambda x: x.half(), lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    with pytest.raises(OperandError, match=r"jax_function: .*must return what `result` says.*float32.*got .*float16"):
        layer(jnp.ones(3))
    twice = interop.jax_function(lambda x: x * 2, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(twice, (jnp.ones(3),), (jnp.ones(3),))


def twice_differentiated(x: jax.Array) -> jax.Array:
    square = interop.jax_function(torch.square, lambda x: x)
    return jax.grad(lambda x: jax.grad(lambda x: square(x).sum())(x).sum())(x)


def test_limits_of_a_torch_function() -> None:
    square = interop.jax_function(torch.square, lambda x: x)
    with pytest.raises(OperandError, match=r"jax_function: .*got the keywords x; .*functools.partial"):
        square(x=jnp.ones(3))
    with pytest.raises(OperandError, match=r"jax_function: arguments must be arrays; got dict; pass the arrays"):
        square({"x": jnp.ones(3)})
    for function in (twice_differentiated, jax.jit(twice_differentiated)):
        with pytest.raises(UnsupportedError, match=r"jax_function: .*got a second derivative; differentiate twice in"):
            function(jnp.ones(3))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_one_layer_in_both_directions(recipe: str) -> None:
    """`Float8Linear` under JAX, and the reference of JAX under autograd: each with the bits of the other."""
    x, w, g = draw(32, 32), draw(32, 32, seed=1), draw(32, 32, seed=2)
    float8 = nn.Sequential(nn.Linear(32, 32, bias=False))
    f8.convert_to_float8_training(float8, config=recipe)
    layer = interop.jax_function(lambda x, w: torch.func.functional_call(float8, {"0.weight": w}, (x,)), linear_result)
    y, vjp = jax.vjp(layer, *interop.to_jax((x, w)))
    of_x, of_w = vjp(interop.to_jax(g))
    trace = f8ref.jax.linear(RECIPES[recipe], *interop.to_jax((x, w, g)))
    assert trace.grad_input is not None and trace.grad_weight is not None
    assert bits(y) == bits(trace.result)
    assert bits(of_x) == bits(trace.grad_input.product)
    assert bits(of_w) == bits(trace.grad_weight.product)

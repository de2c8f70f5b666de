"""The layer of torch under jax.vjp, and the product of JAX under torch.autograd: each with the bits of the other.

python examples/torch_and_jax_gradients.py

This compares two implementations and trains nothing: arrays are copied in both directions, and the host waits for each.
First derivatives only, of pure functions with one result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import f8emu.jax
import f8emu.torch
from f8emu import interop

RECIPE = "rowwise"
DENSE = (((1,), (1,)), ((), ()))
"""`x [M, K] @ weight [N, K]^T`, as torch lays a weight out."""


class JaxFunction(torch.autograd.Function):
    """`function(*tensors)` of a JAX function, with its gradients by `jax.vjp`."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> Tensor:
        result, ctx.vjp = jax.vjp(function, *interop.to_jax(tensors))
        return interop.to_torch(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *interop.to_torch(ctx.vjp(interop.to_jax(grads[0])))


def in_jax(function: Callable[..., Tensor], shape: Callable[..., jax.ShapeDtypeStruct]) -> Callable[..., jax.Array]:
    """A function of tensors as a function of JAX arrays. Its backward pass runs it again: a callback keeps nothing."""

    def forward(*arrays: Any) -> Any:
        with torch.no_grad():
            return interop.to_numpy(function(*interop.to_torch(arrays)))

    def backward(grad: Any, *arrays: Any) -> Any:
        tensors = [x.requires_grad_() for x in interop.to_torch(arrays)]
        with torch.enable_grad():
            result = function(*tensors)
        return interop.to_numpy(torch.autograd.grad(result, tensors, interop.to_torch(grad)))

    @jax.custom_vjp
    def call(*arrays: jax.Array) -> Any:
        return jax.pure_callback(forward, shape(*arrays), *arrays)

    def call_bwd(arrays: Any, grad: jax.Array) -> Any:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        return jax.pure_callback(backward, shapes, grad, *arrays)

    call.defvjp(lambda *arrays: (call(*arrays), arrays), call_bwd)
    return call


def main() -> None:
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(64, 64) for _ in range(3))
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    f8emu.torch.convert_to_float8_training(model, config=RECIPE)
    product = f8emu.jax.dot_general(RECIPE)

    def of_torch(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"0.weight": weight}, (x,))

    def of_jax(x: jax.Array, weight: jax.Array) -> jax.Array:
        return product(x, weight, DENSE)

    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    output = JaxFunction.apply(of_jax, *inputs)
    output.backward(grad)  # pyright: ignore[reportAttributeAccessIssue]
    under_torch = output, *(x.grad for x in inputs)

    layer = in_jax(of_torch, lambda x, w: jax.ShapeDtypeStruct((len(x), len(w)), x.dtype))
    result, vjp = jax.vjp(jax.jit(layer), *interop.to_jax((x, weight)))
    under_jax = result, *vjp(interop.to_jax(grad))

    for name, one, other in zip(("output", "grad_input", "grad_weight"), under_torch, under_jax, strict=True):
        print(f"{name} equal:", bool(jnp.array_equal(interop.to_jax(one), other)))


if __name__ == "__main__":
    main()

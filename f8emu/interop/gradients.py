"""Gradients across the border, for debugging: a JAX function inside of torch.autograd, a torch function inside of JAX.

Arrays are copied in both directions, and the host waits for each: this compares two implementations, it trains nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from f8emu.interop.arrays import library_of, to_jax, to_numpy, to_torch
from f8emu.interop.frameworks import require_jax, require_torch
from f8emu.spec.errors import OperandError, UnsupportedError

if TYPE_CHECKING:
    import torch


def torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a function of tensors, with its gradients by `jax.vjp`.

        layer = torch_function(lambda x, w: f8emu.jax.dot_general("rowwise")(x, w, (((1,), (0,)), ((), ()))))
        layer(x, w).sum().backward()

    Arguments and results are tensors, or dicts, lists and tuples of them; anything else among the arguments reaches
    `function` unchanged. Results are on the device of the first tensor.

    Limits: first derivatives only, by torch.autograd, without the transformations of `torch.func` (grad, vmap). The
    function runs eagerly; torch.compile leaves it out of its graphs. `function` must be pure, since a state that it
    changes is not seen.

    Exactness: the bits of `function` and of `jax.vjp`, under `jax.jit` if `function` is jitted.

    Raises:
        MissingExtraError: jax or torch is not installed.
        OperandError: no tensor among the arguments.
        UnsupportedError: a second derivative.
    """
    torch = require_torch("interop.torch_function")
    jax = require_jax("interop.torch_function")

    class JaxFunction(torch.autograd.Function):
        """`*tensors` are the leaves of the arguments that are tensors; `call` makes a list of leaves of a list."""

        @staticmethod
        def forward(ctx: Any, call: Callable[..., Any], *tensors: Any) -> Any:
            device = tensors[0].device
            if any(ctx.needs_input_grad):
                results, ctx.vjp = jax.vjp(call, *to_jax(tensors))
            else:
                results = call(*to_jax(tensors))
            ctx.results = [(result.shape, result.dtype) for result in results]
            ctx.set_materialize_grads(True)
            found = to_torch(tuple(results), device)
            ctx.mark_non_differentiable(*(x for x in found if not _is_inexact(x)))
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    "torch_function: the gradient of a JAX function has no gradient in torch, which create_graph=True "
                    "asks for; differentiate twice in JAX, and wrap that function"
                )
            cotangents = [
                to_jax(grad.to(_torch_dtype(torch, dtype)))
                if jax.numpy.issubdtype(dtype, jax.numpy.inexact)
                else _float0(jax, shape)
                for grad, (shape, dtype) in zip(grads, ctx.results, strict=True)
            ]
            found = ctx.vjp(cotangents)
            device = next(grad.device for grad in grads)
            needed = ctx.needs_input_grad[1:]
            return None, *(to_torch(x, device) if need else None for x, need in zip(found, needed, strict=True))

    @functools.wraps(function)
    @torch.compiler.disable
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if library_of(leaf) == "torch"]
        if not places:
            raise OperandError("torch_function: at least one argument must be a tensor; got none; pass torch tensors")
        treedefs: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            own_args, own_kwargs = jax.tree.unflatten(structure, filled)
            results, treedef = jax.tree.flatten(function(*own_args, **own_kwargs))
            treedefs.append(treedef)
            return [jax.numpy.asarray(result) for result in results]

        found = JaxFunction.apply(flat, *(leaves[place] for place in places))
        return jax.tree.unflatten(treedefs[-1], found)

    return call


def jax_function(
    function: Callable[..., Any], result: Any, *, device: Any = None, vmap_method: str = "sequential"
) -> Callable[..., Any]:
    """A torch function as a function of JAX arrays, with its gradients by `torch.autograd.grad`.

        layer = jax_function(torch.nn.functional.linear, lambda x, w: jax.ShapeDtypeStruct((len(x), len(w)), x.dtype))
        jax.grad(lambda x, w: layer(x, w).sum())(x, w)

    In a trace (jit, vmap) it is a `jax.pure_callback`, outside it runs at once. Its backward pass runs `function` once
    more, because a callback keeps nothing.

    Limits: positional arguments, all of them arrays. First derivatives, in reverse mode. Parameters that `function`
    holds itself get no gradient: pass them (`torch.func.functional_call`). `function` must be pure, since under jit XLA
    may call it several times or never: keep a layer with delayed scaling outside of jit.

    Args:
        function: tensors -> tensor, or a tuple of tensors.
        result: `jax.ShapeDtypeStruct` of the result, or a tuple of them; or a function of the arguments that gives it.
        device: where `function` gets its tensors; None leaves them where JAX has them.
        vmap_method: as for `jax.pure_callback`.

    Exactness: the bits of `function` and of torch's autograd. Torch runs with its own threads and flags.

    Raises:
        MissingExtraError: jax or torch is not installed.
        OperandError: results that differ from `result` in number, shape or dtype; keywords; an argument that is not an
            array.
        UnsupportedError: a second derivative.
    """
    torch = require_torch("interop.jax_function")
    jax = require_jax("interop.jax_function")

    def structs(args: Sequence[Any]) -> Any:
        return result(*args) if callable(result) else result

    def forward(args: Sequence[Any], expected: Any) -> Any:
        with torch.no_grad():
            found = function(*to_torch(tuple(args), device))
        return _checked(jax, found, expected)

    def backward(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        tensors = to_torch(tuple(args), device)
        wanted = [x.requires_grad_() for x in tensors if _is_inexact(x)]
        with torch.enable_grad():
            found = [x for x in jax.tree.leaves(function(*tensors)) if _is_inexact(x)]
        given = to_torch(list(cotangents), device)
        pairs = [(x, g) for x, g in zip(found, given, strict=True) if x.requires_grad]
        if not pairs or not wanted:
            return tuple(to_numpy(torch.zeros_like(x)) for x in wanted)
        outputs, grads = zip(*pairs, strict=True)
        return to_numpy(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, materialize_grads=True))

    def run(host: Callable[..., Any], shapes: Any, *args: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return jax.pure_callback(host, shapes, *args, vmap_method=vmap_method)
        return jax.tree.map(jax.numpy.asarray, host(*args))

    @jax.custom_jvp
    def once(x: Any) -> Any:
        return x

    @once.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(
            "jax_function: the gradient of a torch function has no gradient in JAX; got a second derivative; "
            "differentiate twice in torch, and wrap that function"
        )

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        expected = structs(args)
        return run(lambda *arrays: forward(arrays, expected), expected, *args)

    def call_bwd(args: Sequence[Any], cotangents: Any) -> Any:
        cotangents = [x for x in jax.tree.leaves(cotangents) if x.dtype != jax.dtypes.float0]
        args, cotangents = once((tuple(args), cotangents))
        is_wanted = [jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) for x in args]
        shapes = tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x, wanted in zip(args, is_wanted, strict=True) if wanted
        )
        found = iter(run(lambda arrays, grads: backward(arrays, grads), shapes, args, cotangents))
        return tuple(
            next(found) if wanted else _float0(jax, x.shape) for x, wanted in zip(args, is_wanted, strict=True)
        )

    call.defvjp(lambda *args: (call(*args), args), call_bwd)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise OperandError(
                f"jax_function: arguments must be positional; got the keywords {', '.join(kwargs)}; bind them before: "
                "jax_function(functools.partial(function, name=value), result)"
            )
        return call(*(_argument(jax, x) for x in args))

    return checked


def _argument(jax: Any, x: Any) -> Any:
    try:
        return jax.numpy.asarray(x)
    except (TypeError, ValueError) as error:
        raise OperandError(
            f"jax_function: arguments must be arrays; got {type(x).__name__}; pass the arrays that it holds one by one"
        ) from error


def _checked(jax: Any, found: Any, expected: Any) -> Any:
    """The results in numpy, compared with what was announced."""
    arrays = to_numpy(tuple(found) if isinstance(found, list | tuple) else found)
    got = jax.tree.map(lambda x: (x.shape, x.dtype.name), arrays, is_leaf=lambda x: hasattr(x, "shape"))
    wanted = jax.tree.map(lambda x: (tuple(x.shape), jax.numpy.dtype(x.dtype).name), expected)
    if got != wanted:
        raise OperandError(
            f"jax_function: the torch function must return what `result` says, {wanted}; got {got}; correct one of the "
            "two"
        )
    return arrays


def _is_inexact(tensor: "torch.Tensor") -> bool:
    """Whether it has a gradient, as `jax.numpy.inexact`."""
    return tensor.is_floating_point() or tensor.is_complex()


def _torch_dtype(torch: Any, dtype: Any) -> Any:
    return getattr(torch, str(dtype))


def _float0(jax: Any, shape: Sequence[int]) -> Any:
    """The gradient of integers, which has no values."""
    import numpy as np

    return np.zeros(shape, jax.dtypes.float0)

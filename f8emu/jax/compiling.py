"""The compiler options that exactness needs on a GPU, and how a trace knows that its program has them.

XLA may replace a float8 GEMM by a Triton fusion, whose bits follow no rule (NUMERICS 7); with
`xla_gpu_enable_triton_gemm=False` it calls cuBLASLt. JAX takes compiler options for an outermost `jax.jit` only, and
tells none of them to what it traces. So `jit` here sets the options and notes them in a context of JAX, which belongs
to the key of JAX's caches: a function that was traced without them is traced again.
"""

import functools
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from f8emu.spec.errors import SpecError

TRITON_GEMM = "xla_gpu_enable_triton_gemm"
EXCESS_PRECISION = "xla_allow_excess_precision"


_excess = jax.make_user_context(default_value=None)


def known_excess_precision() -> bool | None:
    """Whether XLA surely keeps excess precision in the program that is traced; None: it may have Triton GEMMs.

    Excess precision folds a scale into a bfloat16 GEMM (`gemm.hardware`).
    """
    found: bool | None = _excess.value
    if found is None and _is_false(_flags().get(TRITON_GEMM)):
        return False  # its own options, which are not known, may say otherwise
    return found


def compiler_options(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options `given`, with those added that exactness needs.

    Raises:
        SpecError: `given` requests Triton GEMMs.
    """
    found = dict(given or {})
    if TRITON_GEMM in found and not _is_false(found[TRITON_GEMM]):
        raise SpecError(
            f"jit: compiler_options must leave {TRITON_GEMM} False; got {found[TRITON_GEMM]!r}; Triton GEMMs have "
            "other bits than cuBLASLt's: use jax.jit for a program without float8 GEMMs"
        )
    excess = found.get(EXCESS_PRECISION, _flags().get(EXCESS_PRECISION, True))
    return found | {TRITON_GEMM: False, EXCESS_PRECISION: not _is_false(excess)}


def jit(fun: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`jax.jit` with the compiler options that exact float8 GEMMs need on a GPU; on a CPU they change nothing.

    Use it for the outermost function, a training step, and around transformations: `jit(jax.value_and_grad(loss))`.
    Inside another jit or transformation it is plain `jax.jit`, because JAX takes only the outermost program's options.

    Args:
        fun: the function; without it, the result is a decorator.
        options: those of `jax.jit`; `compiler_options` are added to.

    Raises:
        SpecError: compiler options that request Triton GEMMs.
    """
    if fun is None:
        return functools.partial(jit, **options)
    return _Jitted(fun, options)


def _with_options(name: str) -> Callable[..., Any]:
    def method(self: "_Jitted", *args: Any, **kwargs: Any) -> Any:
        with _excess(self._known):
            return getattr(self._outermost, name)(*args, **kwargs)

    return method


class _Jitted:
    """A function of `jit`. Its methods are those of its class: what wraps it must not take them over as its own."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        given = compiler_options(options.pop("compiler_options", None))
        self._known: bool = given[EXCESS_PRECISION]
        self._outermost: Any = jax.jit(fun, compiler_options=given, **options)
        self._inner: Any = jax.jit(fun, **options)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_eager(jax.tree.leaves((args, kwargs))):
            return self._inner(*args, **kwargs)
        with _excess(self._known):
            return self._outermost(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    lower, trace, eval_shape = map(_with_options, ("lower", "trace", "eval_shape"))

    def clear_cache(self) -> None:
        self._outermost.clear_cache()
        self._inner.clear_cache()


def is_eager(arrays: Iterable[Any]) -> bool:
    """Whether JAX neither traces nor transforms here, so that a call may compile a program with its own options."""
    # While JAX traces, arrays may still be concrete, closed over; the result of an operation is not.
    return not any(isinstance(x, Tracer) for x in arrays) and not isinstance(jnp.zeros(()), Tracer)


def _is_false(value: Any) -> bool:
    return str(value).lower() in ("false", "0")


def _flags() -> dict[str, str]:
    """`XLA_FLAGS`, as XLA reads them when it starts."""
    words = (word.lstrip("-").partition("=") for word in shlex.split(os.environ.get("XLA_FLAGS", "")))
    return {name: value or "true" for name, _, value in words}

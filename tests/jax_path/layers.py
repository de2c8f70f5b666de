"""What tests of layers share: arrays, a forward and backward pass, the oracle's, and comparison of bits."""

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

import f8ref.numpy as reference
from f8emu.spec import Recipe

WEIGHT = (((1,), (1,)), ((), ()))
"""lhs [M, K], rhs [N, K]."""
KERNEL = (((1,), (0,)), ((), ()))
"""lhs [M, K], rhs [K, N], as flax has it."""


def draw(*shape: int, seed: int, dtype: str = "bfloat16") -> np.ndarray:
    """Random numbers, each of another magnitude."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape, np.float32) * np.exp2(random.integers(-8, 4, shape)).astype(np.float32)
    return values.astype(getattr(ml_dtypes, dtype, dtype))


def passes(layer: Callable[..., Any], x: Any, w: Any, grad_output: Any) -> tuple[Any, Any, Any]:
    """output, grad_input, grad_weight."""
    output, pull = jax.vjp(layer, x, w)
    return (output, *pull(grad_output))


def expected(
    recipe: Recipe, x: np.ndarray, w: np.ndarray, g: np.ndarray, **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The oracle's output, grad_input and grad_weight, in the dtypes of a layer; x is [..., K]."""
    trace = reference.linear(recipe, x.reshape(-1, x.shape[-1]), w, g.reshape(-1, g.shape[-1]), **options)
    assert trace.grad_input is not None and trace.grad_weight is not None
    output, grad_input = trace.output.product.reshape(g.shape), trace.grad_input.product.reshape(x.shape)
    return output, grad_input, trace.grad_weight.product.astype(w.dtype)


def assert_same_bits(observed: Any, wanted: Any) -> None:
    """Dtype, shape and every bit, a NaN being like any other."""
    array, right = np.asarray(observed), np.asarray(wanted)
    assert array.dtype == right.dtype and array.shape == right.shape
    wrong = np.flatnonzero(_bits(array) != _bits(right))
    assert not wrong.size, f"{wrong.size} of {array.size} differ, first at {wrong[:5]}"


def _bits(x: np.ndarray) -> np.ndarray:
    codes = np.ascontiguousarray(x).reshape(-1).view(f"u{x.itemsize}").copy()
    codes[np.isnan(x.astype(np.float32)).reshape(-1)] = np.iinfo(codes.dtype).max
    return codes

"""SiLU, its product with `up`, and their gradients, on float32 values that each product rounds to a narrower dtype.

    sigmoid   = 1 / (1 + exp(-gate))                                               float32
    silu      = rounded(gate * sigmoid)
    hidden    = rounded(silu * up)
    grad_up   = rounded(grad_hidden * silu)
    grad_gate = rounded(rounded(grad_hidden * up) * sigmoid * (1 + gate * (1 - sigmoid)))

In bfloat16 this is the arithmetic of eager torch, whose SiLU is a tensor of its own. `exp` and the quotient are those
of XLA's backend, so that a CPU and a GPU may differ in the last bit of `sigmoid`, as in torch.

Exactness: on a GPU a Pallas kernel computes the same bits as XLA: both call libdevice's `exp` and divide alike. Seen on
an H200 for all gates of bfloat16 (tests/jax_path/test_feed_forward.py::test_kernels_compute_what_xla_does).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Rounded = Callable[[jax.Array], jax.Array]
"""Rounds float32 values to those of a narrower dtype."""


def hidden_of(rounded: Rounded, gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
    """`hidden`."""
    return (rounded(rounded(gate * _sigmoid(gate)) * up),)


def gradients_of(
    rounded: Rounded, grad_hidden: jax.Array, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`grad_gate` and `grad_up`."""
    sigmoid = _sigmoid(gate)
    slope = 1.0 + gate * (1.0 - sigmoid)
    grad_gate = rounded(rounded(grad_hidden * up) * sigmoid * slope)
    return grad_gate, rounded(grad_hidden * rounded(gate * sigmoid))


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`hidden` of arrays of one dtype, any shape, in that dtype, with these gradients."""
    return _in_dtype(hidden_of, gate, up)[0]


def _gradients(kept: tuple[jax.Array, jax.Array], grad_hidden: jax.Array) -> tuple[jax.Array, ...]:
    return _in_dtype(gradients_of, grad_hidden, *kept)


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gradients)


def rounded_to(dtype: Any) -> Rounded:
    """Rounds where XLA compiles, which may leave out a conversion alone where excess precision is allowed."""
    if dtype == jnp.float16:  # of whose subnormals `reduce_precision` makes zeros
        return lambda values: lax.optimization_barrier(values.astype(dtype)).astype(jnp.float32)
    info = jnp.finfo(dtype)
    return functools.partial(lax.reduce_precision, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def rounded_in_kernel(values: jax.Array) -> jax.Array:
    """Rounds to bfloat16 where Triton compiles, which keeps conversions and has no `reduce_precision`."""
    return values.astype(jnp.bfloat16).astype(jnp.float32)


def _in_dtype(function: Callable[..., tuple[jax.Array, ...]], *xs: jax.Array) -> tuple[jax.Array, ...]:
    dtype = xs[0].dtype
    found = function(rounded_to(dtype), *(x.astype(jnp.float32) for x in xs))
    return tuple(x.astype(dtype) for x in found)


def _sigmoid(gate: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-gate))

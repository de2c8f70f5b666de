"""What f8emu.jax refuses: one table of calls, each with the error and its message.

What a GEMM refuses for its shapes and formats is the matter of `f8emu.spec.gemm_call`, and of its tests.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import f8emu.jax as f8
from f8emu.spec import ROWWISE, TENSORWISE, F8Error, OperandError, SpecError, UnsupportedError
from tests.jax_path.layers import KERNEL, WEIGHT

NOTHING: Any = None
X: Any = jnp.zeros((4, 256))
ONE: Any = jnp.ones((1, 1), jnp.float32)
A: Any = jnp.ones((16, 32), jnp.float8_e4m3fn)
LHS: Any = jnp.ones((16, 32), jnp.bfloat16)
BOTH: Any = jnp.ones((2, 16, 32), jnp.bfloat16)
SIZES: Any = jnp.ones(1, int)
STATE: Any = f8.linear_delayed_state()
FLAGGED: Any = STATE._replace(input=STATE.input._replace(initialized=jnp.ones((), bool)))
BATCH = (((2,), (2,)), ((0,), (0,)))
ZEROS: Any = jax.tree.map(jnp.zeros_like, STATE._replace(input=None, weight=None))


def layer(lhs: Any = LHS, rhs: Any = LHS, numbers: Any = WEIGHT, *more: Any, **options: Any) -> Any:
    return f8.dot_general("tensorwise", **options)(lhs, rhs, numbers, *more)


def delayed(state: Any, lhs: Any = LHS, numbers: Any = WEIGHT) -> Any:
    return f8.delayed_dot_general()(lhs, lhs, state, numbers)


def exported(layer: Callable[[Any], Any], dtype: Any = jnp.bfloat16) -> Any:
    sizes = jax.export.symbolic_shape("b, 32")
    return jax.export.export(jax.jit(layer))(jax.ShapeDtypeStruct(sizes, dtype))


def gradient(scale: Any) -> Any:
    return jax.grad(lambda s: f8.scaled_mm(A, A.T, s, ONE, out_dtype="float32").sum())(scale)


update: Any = f8.linear_delayed_update
WRONG: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (OperandError, "out_dtype must be one of float32", lambda: f8.dequantize(A, ONE, out_dtype="float8_e5m2")),
    # GEMMs
    (OperandError, r"a must be a JAX array; got list", lambda: f8.scaled_mm([1.0], A.T, ONE, ONE)),  # pyright: ignore
    (UnsupportedError, "float8 output", lambda: f8.scaled_mm(A, A.T, ONE, ONE, out_dtype="float8_e4m3fn")),
    (OperandError, r"engine must be one of", lambda: f8.mm(LHS, LHS.T, engine="cuda")),  # pyright: ignore[reportArgumentType]
    (OperandError, "scaled_mm", lambda: f8.scaled_grouped_mm(A, A, ONE, ONE, jnp.ones(1, jnp.int32))),
    (UnsupportedError, r"got .*cpu", lambda: f8.engine_of(None, "hardware")),
    (UnsupportedError, r"codes have no gradient.* differentiate f8emu\.jax\.dot_general", lambda: gradient(ONE)),
    # dot_general
    (OperandError, r"lhs must be one of float32, .*; got float8_e4m3fn; convert", lambda: layer(A, A)),
    (OperandError, r"rhs must be .* got int32", lambda: layer(rhs=LHS.astype(jnp.int32))),
    (OperandError, r"lhs must be .* got float64", lambda: layer(np.ones((16, 32)))),
    (OperandError, r"lhs must be a JAX array; got list", lambda: layer([[1.0]])),
    (OperandError, r"equal sizes .* got \[32\] and \[16\]", lambda: layer(numbers=KERNEL)),
    (OperandError, r"lhs must be different", lambda: layer(numbers=(((2,), (1,)), ((), ())))),
    (OperandError, r"lhs must be different", lambda: layer(numbers=(((1, 1), (1, 1)), ((), ())))),
    (OperandError, r"dimension_numbers must be \(\(lhs", lambda: layer(numbers=((1,), (1,)))),
    (OperandError, r"sums over a dimension", lambda: layer(numbers=(((), ()), ((), ())))),
    (UnsupportedError, r"precision must be None; got HIGHEST", lambda: layer(LHS, LHS, WEIGHT, "HIGHEST")),
    (UnsupportedError, r"element_type .* got float8_e5m2", lambda: layer(LHS, LHS, WEIGHT, None, jnp.float8_e5m2)),
    (SpecError, r"element_type must be one of .*; got float64", lambda: layer(LHS, LHS, WEIGHT, None, np.float64)),
    (SpecError, r"rowise", lambda: f8.dot_general("rowise")),  # pyright: ignore[reportArgumentType]
    (SpecError, r"known when the function is traced", lambda: jax.jit(lambda r: f8.dot_general(r))(1.0)),
    (TypeError, r"Recipe", lambda: jax.jit(lambda r: 1)(ROWWISE)),
    (SpecError, r"with delayed scaling; use delayed_dot_general", lambda: f8.dot_general("delayed")),
    (SpecError, r"without delayed scaling; use dot_general", lambda: f8.delayed_dot_general("rowwise")),
    (OperandError, r"engine must be one of auto, hardware", lambda: f8.dot_general("rowwise", engine="gpu")),  # pyright: ignore[reportArgumentType]
    (UnsupportedError, r"got .*cpu.*; run it on one, or pass [^,;]* on any device", lambda: layer(engine="hardware")),
    (UnsupportedError, r"needs a CUDA device", lambda: f8.jit(lambda x: layer(x, engine="hardware"))(LHS)),
    (UnsupportedError, r"jax.export must know them; got \(b, 32\), .*; export a program for", lambda: exported(layer)),
    (UnsupportedError, "mm: sizes decide", lambda: exported(lambda x: f8.mm(x, LHS.T))),
    (
        UnsupportedError,
        "ragged_dot: sizes",
        lambda: exported(lambda x: f8.ragged_dot(x, LHS.T[None], jnp.ones(1, int))),
    ),
    # States
    (UnsupportedError, "state it leaves out.*nnx.DiffState", lambda: jax.grad(lambda x: delayed(STATE, x).sum())(X)),
    (OperandError, "must be the Float8State", lambda: delayed(NOTHING)),
    (OperandError, "must be the Float8State", lambda: delayed(STATE._replace(weight=None))),
    (OperandError, "histories of 16", lambda: delayed(jax.tree.map(lambda v: v[..., :3] if v.ndim else v, STATE))),
    (OperandError, "all float32", lambda: delayed(FLAGGED)),
    (OperandError, r"bfloat16\(16,\)", lambda: delayed(jax.tree.map(lambda v: v.astype(jnp.bfloat16), STATE))),
    (OperandError, r"got dict; .*restore with linear_delayed_state\(recipe\) as", lambda: delayed({"input": {}})),
    (OperandError, "no batch dimensions; got .0. of lhs; use jax.vmap", lambda: delayed(STATE, BOTH, BATCH)),
    (SpecError, "needs a recipe with delayed scaling", lambda: f8.linear_delayed_state("rowwise")),
    (SpecError, "delayed scaling", lambda: update(STATE, STATE, TENSORWISE)),
    (OperandError, "got DelayedState and NoneType for input", lambda: update(STATE, STATE._replace(input=None))),
    (OperandError, "state must be a Float8State.*got dict", lambda: update({}, {})),
    (OperandError, "must be gradients of one state", lambda: f8.linear_delayed_maximum(STATE, ZEROS)),
    (OperandError, "at least 1; got 0", lambda: f8.shared_delayed_state(STATE, 0)),
    (OperandError, "of grad_output is not.*without a gradient", lambda: f8.linear_delayed_settled(ZEROS)),
    (OperandError, "outside of a trace", lambda: jax.jit(f8.linear_delayed_settled)(STATE)),
]


@pytest.mark.parametrize(("error", "message", "call"), WRONG, ids=[message for _, message, _ in WRONG])
def test_refusals(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error or not issubclass(error, F8Error)

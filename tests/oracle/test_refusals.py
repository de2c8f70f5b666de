"""One broken rule is one error class in every backend that has the verb: the exact, numpy, JAX and torch.

And one table of what the oracle refuses beside the GEMMs, which `tests/spec/test_gemm_call` has.
"""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8ref.exact as exact
import f8ref.numpy as reference
from f8emu.spec import (
    E4M3FN,
    E5M2,
    FORMATS,
    RECIPES,
    DelayedScaling,
    DelayedState,
    F8Error,
    Format,
    Granularity,
    OperandError,
    Recipe,
    ScaleRule,
    SpecError,
    UnsupportedError,
)

T, R = Granularity.TENSORWISE, Granularity.ROWWISE
V, S = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
BACKENDS = ("exact", "numpy", "jax", "torch")


def framework(backend: str) -> tuple[Callable[[np.ndarray], Any], Callable[[Any], np.ndarray], Any]:
    """How arrays get in and out, and the verbs."""
    if backend == "numpy":
        return np.asarray, np.asarray, reference
    pytest.importorskip(backend)
    from f8emu.conformance.arrays import jax_arrays, torch_arrays

    arrays = jax_arrays("test") if backend == "jax" else torch_arrays("test")
    return arrays.load, arrays.store, pytest.importorskip(f"f8emu.{backend}")


DOTS: list[tuple[type[F8Error] | None, dict[str, Any]]] = [
    (UnsupportedError, {"a_format": E5M2, "b_format": E5M2}),
    (UnsupportedError, {"granularity_b": R}),
    (UnsupportedError, {"granularity_a": S, "granularity_b": S}),
    (UnsupportedError, {"granularity_a": V, "granularity_b": V, "a_format": E5M2}),
    (UnsupportedError, {"granularity_a": V, "granularity_b": V, "use_fast_accum": True}),
    (SpecError, {"split_k": 0}),
    (SpecError, {"granularity_a": V, "granularity_b": V, "split_k": -1}),
    (OperandError, {"b_format": FORMATS["bfloat16"]}),
    (OperandError, {"a_format": FORMATS["float8_e4m3fnuz"]}),
    (None, {}),
    (None, {"a_format": E5M2, "use_fast_accum": True}),
    (None, {"granularity_a": V, "granularity_b": V}),
]
"""What the definition refuses of a dot product, and what it takes."""


def test_the_definition_refuses_what_the_verbs_refuse() -> None:
    zeros, good = [0] * 128, {"a_format": E4M3FN, "b_format": E4M3FN, "granularity_a": T, "granularity_b": T}
    for error, change in DOTS:
        options: Any = {"scale_a": [0], "scale_b": [0], **good, **change}
        if error is None:
            exact.scaled_dot(zeros, zeros, **options)
            continue
        with pytest.raises(F8Error) as caught:
            exact.scaled_dot(zeros, zeros, **options)
        assert type(caught.value) is error, (change, caught.value)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_names(backend: str) -> None:
    """Granularities and formats by name; an unknown name is a SpecError."""
    load, store, f8 = framework(backend)
    x = load(np.linspace(-3, 3, 4 * 128, dtype=np.float32).reshape(4, 128))
    verbs: dict[str, Callable[[Any], Any]] = {
        "amax": lambda g: f8.amax(x, g),
        "quantize": lambda g: f8.quantize(x, f8.amax(x, R), "float8_e5m2", g),
        "dequantize": lambda g: f8.dequantize(f8.cast(x, "float8_e5m2"), f8.amax(x, R), g),
    }
    for name, verb in verbs.items():
        by_name, by_member = (store(verb(g)) for g in ("rowwise", R))
        assert by_name.tobytes() == by_member.tobytes()
        with pytest.raises(SpecError, match=f"{name}: granularity must be one of"):
            verb("axiswise")


def to_scales(backend: str, verb: str, format: Format | str) -> Any:
    if backend == "exact":
        return exact.encode(exact.finite(1), FORMATS[str(format)])
    load, _, f8 = framework(backend)
    x = load(np.ones((1, 1), np.float32))
    return {
        "cast": lambda: f8.cast(x, format),
        "quantize": lambda: f8.quantize(x, x, format),
        "scale_from_amax": lambda: f8.scale_from_amax(x, format),
    }[verb]()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("verb", ["cast", "quantize", "scale_from_amax"])
def test_e8m0_is_no_target(verb: str, backend: str) -> None:
    with pytest.raises(SpecError, match=r"float8_e8m0fnu.*holds scales"):
        to_scales(backend, verb, "float8_e8m0fnu")


X, ROW3 = np.zeros((4, 300), np.float32), np.ones(3, np.float32)
BF16, E5 = ml_dtypes.bfloat16, ml_dtypes.float8_e5m2
INPUT, WEIGHT, GRAD = (np.ones(shape, BF16) for shape in ((4, 6), (5, 6), (4, 5)))
DELAYED = RECIPES["delayed"]
SETTLED = DelayedState(np.ones(16, np.float32), np.float32(1), np.bool_(True))
STATE = reference.initial_delayed_state(DelayedScaling(history_length=2))
FORWARD = dict.fromkeys(("input", "weight"), SETTLED)
HIGH = "must have dtype float32, bfloat16, float16; got"


def linear(*arrays: Any, recipe: Recipe = RECIPES["tensorwise"], **options: Any) -> Any:
    return reference.linear(recipe, *arrays, **options)


def update(amax: Any, delayed: DelayedScaling = DelayedScaling(history_length=2)) -> Any:  # noqa: B008
    return reference.update_delayed_state(STATE, amax, E4M3FN, ScaleRule(), delayed)


WRONG: list[tuple[type[F8Error], str, Callable[[], Any]]] = [
    *((OperandError, "decode: x must have dtype float8_e4m3fn", lambda x=x: reference.decode(x))
        for x in (X[0].astype(np.float64), X.astype(np.uint8), X, "code")),
    *((OperandError, f"cast: x {HIGH} {name}; convert", lambda x=x: reference.cast(x, E4M3FN))
        for x, name in ((1.0, "float64"), (np.ones(3, int), "int64"), (GRAD.astype(E5), E5M2))),
    *((SpecError, name, lambda name=name: reference.cast(X, name)) for name in ("bfloat16", "e4m3")),
    (OperandError, "amax: x must be a matrix [rows, K]; got shape (3,)", lambda: reference.amax(ROW3)),
    (OperandError, f"amax: x {HIGH} float64", lambda: reference.amax(np.zeros((2, 2)))),
    (OperandError, f"quantize: x {HIGH} float64", lambda: reference.quantize(np.zeros((2, 2)), ROW3[:1], E4M3FN)),
    (OperandError, "inv_scale must have shape (4, 3) for blockwise_1x128",
        lambda: reference.quantize(X, np.ones((3, 4), np.float32), E4M3FN, V)),
    (OperandError, "must have shape (4, 1) for rowwise", lambda: reference.quantize(X, ROW3, E4M3FN, R)),
    (OperandError, "inv_scale must have dtype float32; got float64",
        lambda: reference.quantize(X, np.ones((1, 1)), E4M3FN)),
    (OperandError, "dequantize: codes must have dtype float8_e4m3fn", lambda: reference.dequantize(X, ROW3[:1])),
    (OperandError, "amax must have dtype float32; got float64", lambda: reference.scale_from_amax(np.ones(1), E4M3FN)),
    (SpecError, "margin must be in 0..6; got 7", lambda: reference.scale_from_amax(ROW3, E4M3FN, margin=7)),
    (OperandError, "amax must have dtype float32; got float64", lambda: update(1.0)),
    (OperandError, "amax must have one element; got shape (3,)", lambda: update(ROW3)),
    (OperandError, "amax_history must have shape (16,); got (2,)", lambda: update(np.float32(1), DelayedScaling())),
    (OperandError, f"linear: input {HIGH} float64", lambda: linear(INPUT.astype(np.float64), WEIGHT, GRAD)),
    (OperandError, f"linear: weight {HIGH} float8_e5m2", lambda: linear(INPUT, WEIGHT.astype(E5))),
    (OperandError, f"linear: grad_output {HIGH} int64", lambda: linear(INPUT, WEIGHT, np.zeros((4, 5), np.int64))),
    (OperandError, "linear: input must be [M, K] and weight [N, K]; got (4, 6) and (6, 5)",
        lambda: linear(INPUT, WEIGHT.T, GRAD)),
    (OperandError, "linear: input must be [M, K] and weight [N, K]; got (2, 2, 6) and (5, 6)",
        lambda: linear(INPUT.reshape(2, 2, 6), WEIGHT, GRAD)),
    (OperandError, "linear: grad_output must have the output's shape (4, 5); got (5, 4)",
        lambda: linear(INPUT, WEIGHT, GRAD.T)),
    (OperandError, "linear: bias must have shape (5,), one value an output; got (4,)",
        lambda: linear(INPUT, WEIGHT, GRAD, GRAD[:, 0])),
    (OperandError, f"linear: bias {HIGH} float64", lambda: linear(INPUT, WEIGHT, GRAD, np.zeros(5))),
    (OperandError, "needs delayed_state for input, weight; got none for input, weight",
        lambda: linear(INPUT, WEIGHT, recipe=DELAYED)),
    (OperandError, "got none for grad_output; start from initial_delayed_state",
        lambda: linear(INPUT, WEIGHT, GRAD, recipe=DELAYED, delayed_state=FORWARD)),
    (OperandError, "delayed_state must be None under recipe 'rowwise', whose scales are dynamic",
        lambda: linear(INPUT, WEIGHT, recipe=RECIPES["rowwise"], delayed_state=FORWARD)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), WRONG, ids=[message[:50] for _, message, _ in WRONG])
def test_the_oracle_refuses(error: type[F8Error], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_states_of_a_forward_pass_suffice_for_it() -> None:
    assert linear(INPUT, WEIGHT, recipe=DELAYED, delayed_state=FORWARD).result.shape == (4, 5)

"""One broken rule is one error class in every backend that has the verb: the exact, numpy, JAX and torch.

`tests/spec/test_gemm_call` has the GEMMs.
"""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8ref.exact as exact
import f8ref.numpy as reference
from f8emu.conformance.arrays import jax_arrays, torch_arrays
from f8emu.spec import (
    E4M3FN,
    E5M2,
    E8M0FNU,
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
    module = pytest.importorskip(f"f8emu.{backend}")
    arrays = jax_arrays("test") if backend == "jax" else torch_arrays("test")
    return arrays.load, arrays.store, module


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


# The verbs: one table for all backends


def of(dtype: str, *shape: int) -> np.ndarray:
    return np.ones(shape, getattr(ml_dtypes, dtype, None) or dtype)


LOADS: dict[str, Callable[[], Callable[[np.ndarray], Any]]] = {
    "f8ref.numpy": lambda: np.asarray,
    "f8emu.numpy": lambda: np.asarray,
    "f8emu.jax": lambda: jax_arrays("test").load,
    "f8emu.torch": lambda: torch_arrays("test").load,
}
TAKEN = {"f8emu.numpy": ("int32", "float64", "list"), "f8emu.jax": ("float64",)}
"""What a backend takes where 32 bits hold it."""
ONE, X, CODES, NARROW = of("float32", 1, 1), of("float32", 4, 32), of("float8_e4m3fn", 4, 32), of("bfloat16", 1, 1)
FOUR, STATE, RULE = DelayedScaling(history_length=4), "the first state of FOUR", ScaleRule()
HIGH = r"{}: x must .*float32, bfloat16.* float16; got .*{}; convert"
KNOWN = "format must be one of float8_e4m3fn, .*got .?"
VERBS: list[tuple[type[F8Error], str, str, tuple[Any, ...]]] = [
    (OperandError, HIGH.format("cast", "float64"), "cast", (of("float64", 4), E4M3FN)),
    (OperandError, HIGH.format("cast", "int32"), "cast", (of("int32", 4), E4M3FN)),
    (OperandError, HIGH.format("cast", "float8_e5m2"), "cast", (of("float8_e5m2", 4), E4M3FN)),
    (OperandError, "cast: x must .*got (list|float64)", "cast", ([1.0], E4M3FN)),
    (SpecError, KNOWN + "float8_e8m0fnu", "cast", (X, E8M0FNU)),
    (SpecError, KNOWN + "bfloat16", "cast", (X, "bfloat16")),
    (SpecError, "(unknown format|got) 'e4m3'", "cast", (X, "e4m3")),
    (OperandError, "decode: x must .*float8_e4m3fn.*got .*float32; ", "decode", (X,)),
    (OperandError, "decode: x must .*float8_e4m3fn.*got .*uint8; ", "decode", (of("uint8", 4),)),
    (OperandError, "amax: x must .*, K]; got shape .32.*reshape", "amax", (X[0],)),
    (OperandError, HIGH.format("amax", "int32"), "amax", (of("int32", 2, 2),)),
    (OperandError, "quantize: x must .*, K]; got shape .32.*reshape", "quantize", (X[0], ONE, E4M3FN)),
    (OperandError, "inv_scale must .*4, 1. for rowwise .*got .*1, 1", "quantize", (X, ONE, E4M3FN, R)),
    (OperandError, "inv_scale must .*4, 1. for blockwise_1x128 .*got .*1, 1", "quantize", (X, ONE, E4M3FN, V)),
    (OperandError, "inv_scale must .*float32.*got .*bfloat16", "quantize", (X, NARROW, E4M3FN)),
    (OperandError, "inv_scale .*(0.1.* float32|got float64)", "quantize", (X, 0.1, E4M3FN)),
    (OperandError, "inv_scale must .*(4, 1. for rowwise|int64)", "quantize", (X, 1, E4M3FN, R)),
    (SpecError, "granularity must be one of .*'columnwise'", "quantize", (X, ONE, E4M3FN, "columnwise")),
    (OperandError, "dequantize: codes must .*float8.*got .*float32", "dequantize", (X, ONE)),
    (OperandError, "dequantize: codes must .*float8.*got .*uint8", "dequantize", (of("uint8", 4, 32), ONE)),
    (OperandError, "dequantize: scale must .*4, 1. for rowwise .*got .*1, 1", "dequantize", (CODES, ONE, R)),
    (OperandError, "amax must .*float32.*got .*bfloat16", "scale_from_amax", (NARROW, E4M3FN)),
    (SpecError, "margin must be in 0..6; got 7", "scale_from_amax", (ONE, E4M3FN, RULE, {"margin": 7})),
    (OperandError, "amax must .*one .*shape .2", "update_delayed_state", (STATE, X[0, :2], E4M3FN, RULE, FOUR)),
    (OperandError, "amax must .*float32.*got .*bfloat16", "update_delayed_state", (STATE, NARROW, E4M3FN, RULE, FOUR)),
    (
        OperandError,
        "amax_history must have shape .16.*got .4",
        "update_delayed_state",
        (STATE, ONE, E4M3FN, RULE, DelayedScaling()),
    ),
]


@pytest.mark.parametrize("backend", LOADS)
@pytest.mark.parametrize(("error", "message", "verb", "arguments"), VERBS, ids=[row[1][:50] for row in VERBS])
def test_the_verbs_refuse(
    error: type[F8Error], message: str, verb: str, arguments: tuple[Any, ...], backend: str
) -> None:
    """The same in every backend, in words of its own arrays."""
    f8 = pytest.importorskip(backend)
    to_array = LOADS[backend]()
    if str(getattr(arguments[0], "dtype", type(arguments[0]).__name__)) in TAKEN.get(backend, ()):
        pytest.skip("it takes this")
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    operands = [to_array(x) if isinstance(x, np.ndarray) else x for x in arguments if x is not options]
    operands = [f8.initial_delayed_state(FOUR) if x is STATE else x for x in operands]
    with pytest.raises(error, match=message):
        getattr(f8, verb)(*operands, **options)


# Layers: what the oracle refuses


BF16, E5 = ml_dtypes.bfloat16, ml_dtypes.float8_e5m2
INPUT, WEIGHT, GRAD = (np.ones(shape, BF16) for shape in ((4, 6), (5, 6), (4, 5)))
DELAYED = RECIPES["delayed"]
SETTLED = DelayedState(np.ones(16, np.float32), np.float32(1), np.bool_(True))
FORWARD = dict.fromkeys(("input", "weight"), SETTLED)
OF_DTYPE = "must have dtype float32, bfloat16, float16; got"


def linear(*arrays: Any, recipe: Recipe = RECIPES["tensorwise"], **options: Any) -> Any:
    return reference.linear(recipe, *arrays, **options)


WRONG: list[tuple[type[F8Error], str, Callable[[], Any]]] = [
    (OperandError, f"linear: input {OF_DTYPE} float64", lambda: linear(INPUT.astype(np.float64), WEIGHT, GRAD)),
    (OperandError, f"linear: weight {OF_DTYPE} float8_e5m2", lambda: linear(INPUT, WEIGHT.astype(E5))),
    (OperandError, f"linear: grad_output {OF_DTYPE} int64", lambda: linear(INPUT, WEIGHT, np.zeros((4, 5), np.int64))),
    (OperandError, "linear: input must be [M, K] and weight [N, K]; got (4, 6) and (6, 5)",
        lambda: linear(INPUT, WEIGHT.T, GRAD)),
    (OperandError, "linear: input must be [M, K] and weight [N, K]; got (2, 2, 6) and (5, 6)",
        lambda: linear(INPUT.reshape(2, 2, 6), WEIGHT, GRAD)),
    (OperandError, "linear: grad_output must have the output's shape (4, 5); got (5, 4)",
        lambda: linear(INPUT, WEIGHT, GRAD.T)),
    (OperandError, "linear: bias must have shape (5,), one value an output; got (4,)",
        lambda: linear(INPUT, WEIGHT, GRAD, GRAD[:, 0])),
    (OperandError, f"linear: bias {OF_DTYPE} float64", lambda: linear(INPUT, WEIGHT, GRAD, np.zeros(5))),
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

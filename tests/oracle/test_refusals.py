"""One broken rule is one error class in every backend that has the verb: the exact, numpy, JAX and torch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import f8ref.exact as exact
import f8ref.numpy as reference
from f8emu.spec import (
    E4M3FN,
    E5M2,
    FORMATS,
    F8Error,
    Format,
    Granularity,
    OperandError,
    SpecError,
    UnsupportedError,
)

M, N, K = 16, 16, 128
T, R = Granularity.TENSORWISE, Granularity.ROWWISE
V, S = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
BACKENDS = ("exact", "numpy", "jax", "torch")


def scaled_mm(
    backend: str, formats: tuple[Any, Any] = (E4M3FN, E4M3FN), granularities: tuple[Any, Any] = (T, T), **options: Any
) -> None:
    """A GEMM of zeros, with scales of the shapes that the granularities ask for (of tensorwise for an unknown one)."""
    known = [Granularity(g) if g in (*Granularity, *(x.value for x in Granularity)) else T for g in granularities]
    if backend == "exact":
        lengths = [1 if g in (T, R) else K // 128 for g in known]
        exact.scaled_dot(
            [0] * K,
            [0] * K,
            a_format=formats[0],
            b_format=formats[1],
            scale_a=[0] * lengths[0],
            scale_b=[0] * lengths[1],
            granularity_a=granularities[0],
            granularity_b=granularities[1],
            **options,
        )
        return
    load, _, f8 = framework(backend)
    a, b = load(np.zeros((M, K), formats[0].name)), load(np.zeros((N, K), formats[1].name))
    scales = [load(np.ones(g.scale_shape(rows, K), np.float32)) for g, rows in zip(known, (M, N), strict=True)]
    f8.scaled_mm(
        a,
        b.T,
        scales[0],
        scales[1].T,
        **{"out_dtype": "bfloat16", "granularity_a": granularities[0], "granularity_b": granularities[1]} | options,
    )


def framework(backend: str) -> tuple[Callable[[np.ndarray], Any], Callable[[Any], np.ndarray], Any]:
    """How arrays get in and out, and the verbs."""
    if backend == "numpy":
        return np.asarray, np.asarray, reference
    pytest.importorskip(backend)
    from f8emu.conformance.arrays import jax_arrays, torch_arrays

    arrays = jax_arrays("test") if backend == "jax" else torch_arrays("test")
    module = pytest.importorskip(f"f8emu.{backend}")
    if backend == "jax":  # GEMMs are the oracle's, which has nothing else
        module = SimpleNamespace(**{**vars(module), "scaled_mm": pytest.importorskip("f8ref.jax").scaled_mm})
    return arrays.load, arrays.store, module


GEMMS: list[tuple[type[F8Error], dict[str, Any]]] = [
    (UnsupportedError, {"formats": (E5M2, E5M2)}),
    (UnsupportedError, {"granularities": (T, R)}),
    (UnsupportedError, {"granularities": (S, S)}),
    (UnsupportedError, {"formats": (E5M2, E4M3FN), "granularities": (V, V)}),
    (UnsupportedError, {"granularities": (V, V), "use_fast_accum": True}),
    (SpecError, {"split_k": 0}),
    (SpecError, {"granularities": (V, V), "split_k": -1}),
    (OperandError, {"formats": (E4M3FN, FORMATS["bfloat16"])}),
    (OperandError, {"formats": (FORMATS["float8_e4m3fnuz"], E4M3FN)}),
]
TAKEN: list[dict[str, Any]] = [
    {}, {"formats": (E5M2, E4M3FN), "use_fast_accum": True}, {"granularities": (V, V)}
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_mm(backend: str) -> None:
    """And what is refused is all that is wrong there."""
    for error, arguments in GEMMS:
        with pytest.raises(F8Error) as caught:
            scaled_mm(backend, **arguments)
        assert type(caught.value) is error, (arguments, caught.value)
    for arguments in TAKEN:
        scaled_mm(backend, **arguments)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_names(backend: str) -> None:
    """Granularities and formats by name; an unknown name is a SpecError, an output that no GEMM gives is not."""
    scaled_mm(backend, granularities=("rowwise", "rowwise"))
    with pytest.raises(SpecError, match=r"granularity must be one of tensorwise, rowwise, .*; got 'columnwise'"):
        scaled_mm(backend, granularities=("columnwise", "columnwise"))
    with pytest.raises(UnsupportedError, match="out_dtype must be"):
        scaled_mm(backend, out_dtype="float8_e5m2")
    with pytest.raises(SpecError, match="unknown format 'float9'"):
        scaled_mm(backend, out_dtype="float9")

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

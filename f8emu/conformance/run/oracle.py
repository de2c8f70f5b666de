"""Who judges whom: f8ref.numpy, or where that is the subject f8ref.exact and the engine. Never a subject itself."""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.compare import bits
from f8emu.conformance.run.subject import NotOffered, Subject, load_subject
from f8emu.native import library
from f8emu.spec import (
    FLOAT32,
    DelayedScaling,
    DelayedState,
    Format,
    Granularity,
    MissingExtraError,
    Overflow,
    ScaleRule,
    Scales,
    format_by_name,
)


@cache
def value_oracle(subject: str) -> Subject:
    """For formats and scales: f8ref.numpy; for f8ref.numpy itself the scalar definition."""
    return exact_subject() if _is_numpy(subject) else load_subject("f8ref.numpy")


@cache
def gemm_oracle(subject: str) -> Subject:
    """For whole GEMMs: f8ref.numpy; for f8ref.numpy itself the engine, or without it f8ref.jax.

    Raises:
        NotOffered: the subject is f8ref.numpy, the engine is not compiled and JAX is not installed.
    """
    if not _is_numpy(subject):
        return load_subject("f8ref.numpy")
    try:
        return load_subject("f8emu.native" if library.library() else "f8ref.jax")
    except MissingExtraError as error:
        raise NotOffered(f"f8ref.numpy is the oracle here, and its own would be f8ref.jax: {error}") from None


@cache
def layer_oracle(subject: str) -> Subject:
    """For layers: f8ref.numpy; for f8ref.numpy itself the engine.

    Raises:
        NotOffered: the subject is f8ref.numpy, and the engine is not compiled.
    """
    if _is_numpy(subject) and library.library() is None:
        raise NotOffered(f"f8ref.numpy is the oracle here, and its own would be the engine: {library.unavailable()}")
    return load_subject("f8emu.native" if _is_numpy(subject) else "f8ref.numpy")


def _is_numpy(subject: str) -> bool:
    """Whether a subject is f8ref.numpy, or a function of it given as a kernel."""
    return subject.partition(":")[0].startswith("f8ref.numpy")


def exact_subject() -> Subject:
    """f8ref.exact, one element at a time, as verbs of numpy arrays."""
    import f8ref.exact as exact

    def decode(x: np.ndarray) -> np.ndarray:
        source = _format(x)
        return _each(lambda code: exact.encode(exact.decode(code, source), FLOAT32), FLOAT32, x)

    def cast(x: np.ndarray, format: Format, *, overflow: Overflow = Overflow.SATURATE) -> np.ndarray:
        source = _format(x)
        return _each(lambda code: exact.cast(code, source, format, overflow), format, x)

    def amax(x: np.ndarray, granularity: Granularity = Granularity.TENSORWISE) -> np.ndarray:
        source, codes = _format(x), bits(x)
        rows, columns = _extents(granularity, x.shape)
        shape = granularity.scale_shape(*x.shape)
        found = [
            exact.amax(codes[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns].ravel().tolist(), source)
            for r, c in product(range(shape[0]), range(shape[1]))
        ]
        return _typed(found, FLOAT32, shape)

    def scale_from_amax(amax: np.ndarray, format: Format, rule: ScaleRule | None = None, *, margin: int = 0) -> Scales:
        pairs = [exact.scale_from_amax(code, format, rule, margin=margin) for code in _codes(amax)]
        return Scales(
            inv_scale=_typed((pair.inv_scale for pair in pairs), FLOAT32, amax.shape),
            scale=_typed((pair.scale for pair in pairs), FLOAT32, amax.shape),
        )

    def quantize(
        x: np.ndarray, inv_scale: np.ndarray, format: Format, granularity: Granularity = Granularity.TENSORWISE
    ) -> np.ndarray:
        source = _format(x)
        factors = _spread(inv_scale, granularity, x.shape)
        return _each(lambda code, factor: exact.quantize(code, source, factor, format), format, x, factors)

    def dequantize(
        codes: np.ndarray, scale: np.ndarray, granularity: Granularity = Granularity.TENSORWISE
    ) -> np.ndarray:
        source = _format(codes)
        factors = _spread(scale, granularity, codes.shape)
        return _each(lambda code, factor: exact.dequantize(code, source, factor), FLOAT32, codes, factors)

    def state_of(state: DelayedState) -> DelayedState:
        return DelayedState(
            amax_history=_typed(state.amax_history, FLOAT32, (len(state.amax_history),)),
            inv_scale=_typed([state.inv_scale], FLOAT32, ()),
            initialized=np.array(state.initialized),
        )

    def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
        return state_of(exact.initial_delayed_state(delayed))

    def update_delayed_state(
        state: DelayedState, amax: np.ndarray, format: Format, rule: ScaleRule, delayed: DelayedScaling
    ) -> DelayedState:
        scalars = DelayedState(
            amax_history=tuple(_codes(state.amax_history)),
            inv_scale=_codes(state.inv_scale)[0],
            initialized=bool(state.initialized),
        )
        return state_of(exact.update_delayed_state(scalars, _codes(amax)[0], format, rule, delayed))

    return Subject(
        name="f8ref.exact",
        engine="f8ref.exact, python integers and fractions",
        verbs={
            "decode": decode,
            "cast": cast,
            "amax": amax,
            "scale_from_amax": scale_from_amax,
            "quantize": quantize,
            "dequantize": dequantize,
            "initial_delayed_state": initial_delayed_state,
            "update_delayed_state": update_delayed_state,
        },
    )


def _format(array: np.ndarray) -> Format:
    return format_by_name(array.dtype.name)


def _codes(array: np.ndarray) -> list[int]:
    return bits(array).ravel().tolist()


def _typed(codes: Iterable[int], fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    return np.array(list(codes), f"u{fmt.bits // 8}").view(dtype_of(fmt)).reshape(shape)


def _each(function: Callable[..., Any], fmt: Format, *arrays: np.ndarray) -> np.ndarray:
    """`function` of the codes of every element."""
    return _typed((function(*codes) for codes in zip(*map(_codes, arrays), strict=True)), fmt, arrays[0].shape)


def _extents(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of one group."""
    rows, columns = granularity.block
    return rows or max(shape[0], 1), columns or max(shape[1], 1)


def _spread(scales: np.ndarray, granularity: Granularity, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of every element."""
    rows, columns = _extents(granularity, shape)
    r, c = np.arange(shape[0]) // rows, np.arange(shape[1]) // columns
    return scales[r[:, None], c[None, :]]

"""Chooses each subject's oracle: f8ref.numpy, or f8ref.exact and the engine for f8ref.numpy. No subject judges itself.

A kernel that is not told S picks it [CHAIN-3]: `OwnSplit` finds which S explains its bits, where another one was
expected. A library takes few slices, of whole promotions. One S must explain a whole output, and every output of a
stage that differs must have its S: otherwise the kernel is wrong, and no S excuses any of it. Slices of one promotion
are what a kernel has that promotes though it was asked for fast accumulation: such an S counts where it has longer
slices too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.compare import different
from f8emu.conformance.run.check import Slicing
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

MOST_SLICES = 32
"""An H100's library takes 25 of a K of 65,552, the longest that is asked."""
_PROMOTION = 128
# Rows and columns of the outputs that differ, on which most S fail.
_LOOKED_AT = 3
_TENSORWISE = Granularity.TENSORWISE


@cache
def value_oracle(subject: str) -> Subject:
    """For formats and scales: f8ref.numpy; for f8ref.numpy itself the scalar definition."""
    return exact_subject() if _is_numpy(subject) else load_subject("f8ref.numpy")


@cache
def gemm_oracle(subject: str) -> Subject:
    """For whole GEMMs: f8ref.numpy; for f8ref.numpy itself the engine, or without it f8ref.jax."""
    if not _is_numpy(subject):
        return load_subject("f8ref.numpy")
    try:
        return load_subject("f8emu.native" if library.library() else "f8ref.jax")
    except MissingExtraError as error:
        raise NotOffered(f"f8ref.numpy is the oracle here, and its own would be f8ref.jax: {error}") from None


@cache
def layer_oracle(subject: str) -> Subject:
    """For layers: f8ref.numpy; for f8ref.numpy itself the engine."""
    if _is_numpy(subject) and library.library() is None:
        raise NotOffered(f"f8ref.numpy is the oracle here, and its own would be the engine: {library.unavailable()}")
    return load_subject("f8emu.native" if _is_numpy(subject) else "f8ref.numpy")


def _is_numpy(subject: str) -> bool:
    # Also a function of f8ref.numpy given as a kernel.
    return subject.partition(":")[0].startswith("f8ref.numpy")


@dataclass(slots=True)
class OwnSplit:
    """Looks for the S of one subject, and gives up for good after an output that no S explains."""

    judge: Callable[[GemmCase], np.ndarray]
    """The right output of a GEMM under its S."""
    _found: list[int] = field(default_factory=list[int])
    """The latest first."""
    _is_refuted: bool = False

    def __call__(self, case: GemmCase, observed: np.ndarray, expected: np.ndarray) -> Slicing | None:
        """The S of which `observed` has every bit, where it differs from `expected`."""
        if self._is_refuted:
            return None
        # 1. S that explained an earlier output first: a library takes few.
        differs = different(observed, expected)
        most = 1 if case.mode is Mode.GROUPED_ROWWISE else min(MOST_SLICES, -(-case.k // _PROMOTION))
        for slices in dict.fromkeys((*self._found, *range(1, most + 1))):
            if slices != case.split_k and self._explains(replace(case, split_k=slices), observed, differs):
                self._found = list(dict.fromkeys((slices, *self._found)))
                return Slicing(slices, slices == 1 or case.k > slices * _PROMOTION)
        # 2. An output that none explains: the kernel is wrong, and no other S is looked for.
        self._is_refuted = True
        return None

    def _explains(self, case: GemmCase, observed: np.ndarray, differs: np.ndarray) -> bool:
        if case.mode in (Mode.TENSORWISE, Mode.ROWWISE):  # most S fail on a few outputs, which are cheap
            rows, cols = (np.unique(places)[:_LOOKED_AT] for places in np.nonzero(differs))
            if different(observed[np.ix_(rows, cols)], self.judge(case.part(rows, cols))).any():
                return False
        return not different(observed, self.judge(case)).any()


# The scalar definition, one element at a time, as verbs of numpy arrays


def exact_subject() -> Subject:
    """f8ref.exact, one element at a time, as verbs of numpy arrays."""
    import f8ref.exact as exact

    def decode(x: np.ndarray) -> np.ndarray:
        source = _format(x)
        return _each(lambda code: exact.encode(exact.decode(code, source), FLOAT32), FLOAT32, x)

    def cast(x: np.ndarray, format: Format, *, overflow: Overflow = Overflow.SATURATE) -> np.ndarray:
        source = _format(x)
        return _each(lambda code: exact.cast(code, source, format, overflow), format, x)

    def amax(x: np.ndarray, granularity: Granularity = _TENSORWISE) -> np.ndarray:
        source, codes = _format(x), codes_of(x)
        rows, columns = _extents(granularity, x.shape)
        shape = granularity.scale_shape(*x.shape)
        corners = [(r * rows, c * columns) for r, c in product(*map(range, shape))]
        blocks = (codes[r : r + rows, c : c + columns].ravel().tolist() for r, c in corners)
        return _typed((exact.amax(block, source) for block in blocks), FLOAT32, shape)

    def scale_from_amax(amax: np.ndarray, format: Format, rule: ScaleRule | None = None, *, margin: int = 0) -> Scales:
        pairs = [exact.scale_from_amax(code, format, rule, margin=margin) for code in _codes(amax)]
        inv_scales, scales = [pair.inv_scale for pair in pairs], [pair.scale for pair in pairs]
        scale_format = FLOAT32 if rule is None else rule.scale_format
        return Scales(_typed(inv_scales, FLOAT32, amax.shape), _typed(scales, scale_format, amax.shape))

    def quantize(
        x: np.ndarray, inv_scale: np.ndarray, format: Format, granularity: Granularity = _TENSORWISE
    ) -> np.ndarray:
        source, factors = _format(x), _spread(inv_scale, granularity, x.shape)
        return _each(lambda code, factor: exact.quantize(code, source, factor, format), format, x, factors)

    def dequantize(codes: np.ndarray, scale: np.ndarray, granularity: Granularity = _TENSORWISE) -> np.ndarray:
        source, of_scale = _format(codes), _format(scale)
        factors = _spread(scale, granularity, codes.shape)
        return _each(lambda code, factor: exact.dequantize(code, source, factor, of_scale), FLOAT32, codes, factors)

    def state_of(state: DelayedState) -> DelayedState:
        history = _typed(state.amax_history, FLOAT32, (len(state.amax_history),))
        inv_scale, initialized = _typed([state.inv_scale], FLOAT32, ()), np.array(state.initialized)
        return DelayedState(amax_history=history, inv_scale=inv_scale, initialized=initialized)

    def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
        return state_of(exact.initial_delayed_state(delayed))

    def update_delayed_state(
        state: DelayedState, amax: np.ndarray, format: Format, rule: ScaleRule, delayed: DelayedScaling
    ) -> DelayedState:
        history, (inv_scale,) = tuple(_codes(state.amax_history)), _codes(state.inv_scale)
        scalars = DelayedState(amax_history=history, inv_scale=inv_scale, initialized=bool(state.initialized))
        return state_of(exact.update_delayed_state(scalars, _codes(amax)[0], format, rule, delayed))

    verbs = (decode, cast, amax, scale_from_amax, quantize, dequantize, initial_delayed_state, update_delayed_state)
    engine = "f8ref.exact, python integers and fractions"
    return Subject(name="f8ref.exact", engine=engine, verbs={verb.__name__: verb for verb in verbs})


def _format(array: np.ndarray) -> Format:
    return format_by_name(array.dtype.name)


def _codes(array: np.ndarray) -> list[int]:
    return codes_of(array).ravel().tolist()


def _typed(codes: Iterable[int], fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    return np.array(list(codes), f"u{fmt.bits // 8}").view(dtype_of(fmt)).reshape(shape)


def _each(function: Callable[..., Any], fmt: Format, *arrays: np.ndarray) -> np.ndarray:
    return _typed((function(*codes) for codes in zip(*map(_codes, arrays), strict=True)), fmt, arrays[0].shape)


def _extents(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, int]:
    # Rows and columns of one group.
    rows, columns = granularity.block
    return rows or max(shape[0], 1), columns or max(shape[1], 1)


def _spread(scales: np.ndarray, granularity: Granularity, shape: tuple[int, ...]) -> np.ndarray:
    # The scale of every element.
    rows, columns = _extents(granularity, shape)
    r, c = np.arange(shape[0]) // rows, np.arange(shape[1]) // columns
    return scales[r[:, None], c[None, :]]

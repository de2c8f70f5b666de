"""Granularities, the scale rule and delayed scaling: shapes, ranges, and the arithmetic behind the ranges."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import E4M3FN, E5M2, E8M0FNU, FLOAT32
from f8emu.spec.scaling import MAX_MARGIN, MIN_AMAX_FLOOR, DelayedScaling, Granularity, ScaleRule, scale_number

T, R, V, S, X = Granularity
FLT_MAX = Fraction(FLOAT32.max)
FLT_MIN = Fraction(FLOAT32.smallest_normal)


def test_granularities() -> None:
    names = ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "blockwise_1x32"]
    assert [g.value for g in (T, R, V, S, X)] == names
    assert [g.block for g in (T, R, V, S, X)] == [(None, None), (1, None), (1, 128), (128, 128), (1, 32)]
    assert [g.is_blockwise for g in (T, R, V, S, X)] == [False, False, True, True, True]
    assert [g.is_transposable for g in (T, R, V, S, X)] == [True, False, False, True, False]
    assert [g.scale_format for g in (T, R, V, S, X)] == [*[FLOAT32] * 4, E8M0FNU]


@pytest.mark.parametrize(
    ("granularity", "rows", "k", "shape"),
    [
        (T, 0, 0, (1, 1)),
        (R, 0, 512, (0, 1)),
        (R, 16, 0, (16, 1)),
        (V, 16, 0, (16, 0)),
        (S, 0, 128, (0, 1)),
    ],
)
def test_scale_shape_of_nothing(granularity: Granularity, rows: int, k: int, shape: tuple[int, int]) -> None:
    assert granularity.scale_shape(rows, k) == shape


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (127, 128), (128, 127), (129, 256), (260, 385)])
def test_scale_shape_counts_the_groups(granularity: Granularity, rows: int, k: int) -> None:
    """One scale for every group that `block` describes, counted element by element."""
    block_rows, block_k = granularity.block
    groups = {(r // (block_rows or rows), c // (block_k or k)) for r in range(rows) for c in range(k)}
    scale_rows, scale_k = granularity.scale_shape(rows, k)
    assert groups == {(r, c) for r in range(scale_rows) for c in range(scale_k)}


def test_smallest_amax_floor_keeps_every_scale_normal() -> None:
    """With an amax of 0, `inv_scale = max / floor` is finite and its reciprocal normal; half the floor breaks it."""
    largest = Fraction(E5M2.max) / Fraction(MIN_AMAX_FLOOR)
    assert largest < FLT_MAX
    assert 1 / largest >= FLT_MIN
    assert 1 / (2 * largest) < FLT_MIN


def test_largest_margin_keeps_every_inv_scale_normal() -> None:
    """The smallest `inv_scale` is E4M3's at amax FLT_MAX; a margin of one more would make it subnormal."""
    smallest = Fraction(E4M3FN.max) / 2**MAX_MARGIN / FLT_MAX
    assert smallest >= FLT_MIN  # cutting it to a power of two leaves it at least at FLT_MIN, itself a power of two
    assert smallest / 2 < FLT_MIN
    assert 1 / FLT_MIN < FLT_MAX


REFUSED: list[tuple[type[ScaleRule] | type[DelayedScaling], dict[str, Any], str]] = [
    *(
        (ScaleRule, {"amax_floor": n}, f"amax_floor must be in [2^-110, 1), so that no scale is subnormal; got {n!r}")
        for n in (0.0, -1e-12, 1.0, float("inf"), float("nan"), 2.0**-111, 1e-40)
    ),
    *((DelayedScaling, {"history_length": n}, f"history_length must be at least 1; got {n}") for n in (0, -1)),
    *(
        (DelayedScaling, {"margin": n}, f"margin must be in 0..6, so that no scale is subnormal; got {n}")
        for n in (-1, 7)
    ),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_what_a_rule_refuses(kind: type[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        kind(**fields)
    assert str(caught.value) == f"{kind.__name__}: {message}"
    assert DelayedScaling(history_length=1, margin=MAX_MARGIN).margin == 6


EDGES = (2.0**-149, 2.0**-150, 3 * 2.0**-150, 2.0**127, 2.0**128, 1 + 2.0**-23, 1 + 2.0**-24)


BIG = pytest.param(2**1024, id="2**1024")
FLOATS = (0.1, 3.4028234663852886e38, 3.4028235e38, float("inf"), float("nan"))


@pytest.mark.parametrize("value", [0, 1, -2, 2**53, 2**53 + 1, BIG, *EDGES, *FLOATS])
def test_a_scale_that_is_a_number_is_a_float32(value: float) -> None:
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
    except OverflowError:  # an integer beyond float64
        rounded = None
    if rounded == value or value != value:
        assert scale_number("call", "scale", value) is not None
    else:
        with pytest.raises(OperandError, match=r"call: scale must be float32; got .*round it first"):
            scale_number("call", "scale", value)

"""The exhaustive check of casts and scales, on a tiny part: its proofs are right, and a planted bug is found."""

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.proofs.exhaustive import INPUTS, RULES, SIGNIFICANDS, Task, main, run_task, tasks
from benchmarks.proofs.exhaustive_checks import (
    BACKENDS,
    DEFAULT_BACKENDS,
    F32,
    U8,
    check_cast,
    check_scales,
    exact_steps,
    is_rounded_quotient,
    numpy_backend,
)
from benchmarks.proofs.exhaustive_e8m0 import check_cvt, check_e8m0, steps
from f8emu.spec import E4M3FN, E5M2, HOPPER, E8M0Rule, Format, Overflow, ScaleRule

STRIDE = 65_537 * 13
"""5,041 inputs; odd, so that all low bits occur."""


def _bits_around_steps(fmt: Format, overflow: Overflow) -> np.ndarray:
    starts = exact_steps(fmt, overflow)[0].astype(np.int64)
    around = (starts[:, None] + np.arange(-2, 3)).ravel()
    return np.unique(around[(around >= 0) & (around < INPUTS)]).astype(np.uint32)


def test_the_tasks_cover_every_input_once() -> None:
    for stride, sizes in ((1, (INPUTS, SIGNIFICANDS)), (1001, (4_290_677, 8_381))):
        for kind, size in zip(("casts", "scales"), sizes, strict=True):
            chosen = [task for task in tasks(stride) if task.kind == kind]
            assert chosen[0].begin == 0
            assert all(a.end == b.begin for a, b in pairwise(chosen))
            assert chosen[-1].end == size
    *casts, last = (task for task in tasks(1) if task.kind == "casts" or task.end == SIGNIFICANDS)
    assert casts[0].bits()[:3].tolist() == [0, 1, 2]
    assert casts[-1].bits()[-1] == INPUTS - 1
    assert last.bits()[-1] == 0x3FFFFFFF, "the last amax below 2"
    (of_bfloat16,) = tasks(1, ["e8m0"])
    assert of_bfloat16.bits()[[0, -1]].tolist() == [0, 0x7FFF0000], "from 0 to the last NaN"


@pytest.mark.parametrize("overflow", Overflow)
@pytest.mark.parametrize("fmt", HOPPER.operand_formats, ids=str)
def test_exact_steps_agree_with_ml_dtypes(fmt: Format, overflow: Overflow) -> None:
    """At every step and beside it; ml_dtypes is no part of the proof."""
    bits = _bits_around_steps(fmt, overflow)
    tally = check_cast("ml_dtypes", BACKENDS["ml_dtypes"](), bits, fmt, overflow)
    assert tally.inputs == bits.size > 1000
    assert (tally.differences, tally.examples) == (0, [])


def test_exact_steps_by_hand() -> None:
    def steps(fmt: Format, overflow: Overflow) -> dict[int, int]:
        starts, codes = exact_steps(fmt, overflow)
        return dict(zip(starts.tolist(), codes.tolist(), strict=True))

    found = steps(E4M3FN, Overflow.SATURATE)
    assert found[0] == 0
    assert found[0x3A800001] == 1, "beyond 2^-10, the tie between 0 and 2^-9, which goes to 0"
    assert found[0x3B400000] == 2, "3 * 2^-10, the tie between 1 and 2, goes to the even 2"
    assert found[0x43E80001] == E4M3FN.max_code, "beyond the tie 464: saturated"
    assert found[0x7F800001] == found[0xFF800001] == E4M3FN.nan_code
    found = steps(E5M2, Overflow.NONFINITE)
    assert found[0x47700000] == 0x7C, "61440, the tie above the odd max_code, is infinity"
    assert found[0x80000000] == 0x80


@pytest.mark.parametrize("name", DEFAULT_BACKENDS)
def test_every_backend_on_a_strided_part(name: str) -> None:
    """Casts of some inputs; of the significands of an amax every 17th, in both formats and under both rules."""
    backends = {name: BACKENDS[name]()}
    for kind, size, stride in (("casts", INPUTS, STRIDE), ("scales", SIGNIFICANDS, 17)):
        count = -(-size // stride)
        tallies = run_task(Task(kind, begin=0, end=count, stride=stride), backends)
        assert len(tallies) == {"casts": 2 * len(backends[name].policies), "scales": 4 * (name != "ml_dtypes")}[kind]
        assert all(tally.inputs == count and tally.differences == 0 for tally in tallies)


NUMPY = numpy_backend()


def half_away(x: F32, fmt: Format, overflow: Overflow) -> U8:
    """Ties away from zero: the next float32 of a tie rounds as if there were none."""
    return NUMPY.cast((x.view(np.uint32) + np.uint32(1)).view(np.float32), fmt, overflow)


def most_nan(x: F32, fmt: Format, overflow: Overflow) -> U8:
    """Another NaN code."""
    return np.where(np.isnan(x), np.uint8(0xFF), NUMPY.cast(x, fmt, overflow))


def reciprocal(amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32]:
    """`max * (1 / amax)`, as eager torch divides a number by a tensor."""
    inv_scale = np.float32(fmt.max) * (np.float32(1) / amax)
    return inv_scale, np.float32(1) / inv_scale


def rounded_up(amax: F32, fmt: Format, rule: ScaleRule) -> tuple[F32, F32]:
    """A power of two by rounding to the nearest, not by cutting."""
    assert NUMPY.scales is not None
    inv_scale, scale = NUMPY.scales(amax, fmt, rule)
    return (inv_scale * np.float32(2), scale / np.float32(2)) if rule.power_of_two else (inv_scale, scale)


@pytest.mark.parametrize("fmt", HOPPER.operand_formats, ids=str)
@pytest.mark.parametrize("planted", [half_away, most_nan])
def test_a_planted_cast_is_found(planted: Any, fmt: Format) -> None:
    bits = _bits_around_steps(fmt, Overflow.SATURATE)
    tally = check_cast("planted", NUMPY._replace(cast=planted), bits, fmt, Overflow.SATURATE)
    assert tally.differences > 0
    assert " expected: 0x" in tally.examples[0]
    if planted is most_nan:
        assert tally.differences == tally.other_nan_codes


@pytest.mark.parametrize("fmt", HOPPER.operand_formats, ids=str)
@pytest.mark.parametrize(("planted", "rule"), [(reciprocal, RULES[0]), (rounded_up, RULES[1])])
def test_a_planted_scale_is_found(planted: Any, rule: ScaleRule, fmt: Format) -> None:
    amax = Task("scales", begin=0, end=4096, stride=2047).bits().view(np.float32)
    tally = check_scales("planted", NUMPY._replace(scales=planted), amax, fmt, rule)
    assert tally is not None and tally.differences > 0 and tally.examples


def test_e8m0_scales_of_a_strided_part_and_a_planted_rule() -> None:
    """Every 7th bfloat16 amax in every backend; float32 amaxes around the steps by NVIDIA's conversion."""
    task = Task("e8m0", 0, -(-(1 << 15) // 7), 7)
    backends = {name: BACKENDS[name]() for name in DEFAULT_BACKENDS}
    tallies = run_task(task, backends)
    assert len(tallies) == 5 * 2 * 4 and {tally.backend for tally in tallies} >= {"f8ref.exact", "f8emu.torch"}
    assert all(tally.inputs == 4682 and tally.differences == 0 for tally in tallies)
    scales = NUMPY.scales
    assert scales is not None
    other = NUMPY._replace(scales=lambda amax, fmt, _: scales(amax, fmt, ScaleRule(e8m0=E8M0Rule.CEIL)))
    for fmt in HOPPER.operand_formats:
        planted = check_e8m0("planted", other, task.bits(), fmt, E8M0Rule.RCEIL)
        assert planted is not None and planted.differences > 1000 and "expected" in planted.examples[0]
        around = steps(fmt, E8M0Rule.RCEIL)[0][1:-1, None].astype(np.int64) + np.arange(-2, 3)
        assert check_cvt(np.unique(around).astype(np.uint32), fmt).differences == 0


def test_is_rounded_quotient_against_fractions() -> None:
    """Every neighbour of a correctly rounded quotient is rejected, the quotient accepted."""
    draw = np.random.default_rng(3)
    denominator = (np.uint32(0x3F800000) + draw.integers(0, SIGNIFICANDS, 300, dtype=np.uint32)).view(np.float32)
    denominator[:3] = 1.0, 1.75, 1.5
    for numerator in (448, 57344, 1, 7):
        near = np.float32(numerator) / denominator
        for step in (-1, 0, 1):
            quotient = (near.view(np.uint32) + np.uint32(step % (1 << 32))).view(np.float32)
            accepted = is_rounded_quotient(numerator, denominator, quotient)
            for d, q, is_accepted in zip(denominator, quotient, accepted, strict=True):
                error = abs(Fraction(numerator) / Fraction(float(d)) - Fraction(float(q)))
                neighbours = (np.nextafter(q, np.float32(0)), np.nextafter(q, np.float32(np.inf)))
                others = [abs(Fraction(numerator) / Fraction(float(d)) - Fraction(float(n))) for n in neighbours]
                assert is_accepted == (error <= min(others)), (numerator, d, q)
    zero_or_nan = np.array([0, np.nan, np.inf, -1, 1e-40], np.float32)
    assert not is_rounded_quotient(448, np.ones(5, np.float32), zero_or_nan).any()


def test_the_script_on_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "part.json"
    arguments = ["--fraction", "1e-6", "--workers", "1", "--backends", "f8ref.numpy", "ml_dtypes"]
    assert main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["exhaustive"], report["stride"], report["differences"]) == (False, 1_000_001, 0)
    assert {row["inputs"] for row in report["casts"]} == {-(-INPUTS // 1_000_001)} and len(report["casts"]) == 8
    assert {row["inputs"] for row in report["scales"]} == {-(-SIGNIFICANDS // 1_000_001)}
    assert "every 1000001th, not all," in capsys.readouterr().out

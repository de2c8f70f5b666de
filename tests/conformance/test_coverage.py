"""An explanation of the probes is put to the GEMMs of the suite that differ; those are reported kind by kind."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from f8emu.conformance.cases.distributions import scaled_case
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.golden import shipped_golden
from f8emu.conformance.diagnosis.coverage import covered, wrong_gemms
from f8emu.conformance.diagnosis.search import Diagnosis, diagnosed
from f8emu.conformance.run.result import Result, StageResult
from f8emu.conformance.run.stages import STAGES
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.conformance.run.verify import stages_with, verify
from f8emu.report.diagnosis import diagnosis_json, diagnosis_section
from f8emu.report.verify import mismatch_lines
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT32, Granularity
from tests.conformance.planted_gemm import subject, subject_of

# 288 rows are the most that a probe has.
ROWS = (1, 5, 17, 64, 100, 129, 200, 256, 288, 301, 320, 390, 450, 512)
PAIR = Granularity.ROWWISE, Granularity.ROWWISE


def multiplying_a_first(wrong_from: int) -> Subject:
    """Scales in the wrong order, and from a row on the scale of the row before."""
    verb = subject(order="(acc*sa)*sb").verbs["scaled_mm"]

    def scaled_mm(a: np.ndarray, b: np.ndarray, scale_a: np.ndarray, *rest: Any, **options: Any) -> np.ndarray:
        if options["granularity_a"] is not Granularity.ROWWISE or not options["use_fast_accum"]:
            raise NotOffered("fast rowwise GEMMs alone")
        if options["bias"] is not None:
            raise NotOffered("no bias")
        rows = np.arange(len(a))
        return verb(a, b, scale_a[np.where(rows < wrong_from, rows, rows - 1)], *rest, **options)

    return replace(subject_of(scaled_mm), more_gemms=larger_gemms)


def larger_gemms() -> Iterator[GemmCase]:
    for i, (m, out_dtype) in enumerate(product(ROWS, (FLOAT32, BFLOAT16))):
        options: dict[str, Any] = {"out_dtype": out_dtype, "use_fast_accum": True}
        yield scaled_case(f"planted {i}", PAIR, (E4M3FN, E5M2), (m, 24, 48), "bits", **options)


def ran(of: Subject, errors: int = 5) -> Result:
    only = stages_with(["planted *"], [STAGES["gemms"]], [of], shipped_golden())
    return verify([of], only=only, errors=errors)


def text_of(diagnosis: Diagnosis) -> list[str]:
    lines, *rest = diagnosis_section("x", (diagnosis,), ["x", "--golden", "g"]).blocks
    return [*getattr(lines, "points", ()), *(line for block in rest for line in getattr(block, "lines", ()))]


@pytest.mark.parametrize("wrong_from", [1 << 20, 300])
def test_an_explanation_is_put_to_what_differs_in_larger_gemms(wrong_from: int) -> None:
    wrong = multiplying_a_first(wrong_from)
    _, diagnoses = diagnosed(ran(wrong), [wrong])
    (diagnosis,) = diagnoses["x"]
    best, coverage = diagnosis.best, diagnosis.coverage
    assert best is not None and best.is_complete and best.alterations == ("scales as (acc * sa) * sb",)
    assert coverage is not None and coverage.cases > 12
    (data,) = diagnosis_json((diagnosis,))
    _, headline, line, *fit = text_of(diagnosis)
    if wrong_from > 300:
        assert diagnosis.is_explained and data["coverage"]["cases_left"] == 0 and not fit
        assert f" outputs equal, and samples of {coverage.cases} differing cases: it multiplies" in line
        return
    # The second fault, of rows that no probe has, is not explained by the first one.
    assert not diagnosis.is_explained and 0 < data["coverage"]["cases_left"] < coverage.cases
    rows = int(coverage.worst.split(" -> ")[0].split()[-1].split("x")[0])
    assert rows > 300 and 0 < coverage.outputs_left <= coverage.outputs
    assert line.startswith("  rowwise fast: EXPLAINS THE SMALL PROBES ONLY: scales as (acc * sa) * sb, ")
    left = f"{coverage.outputs_left} of {coverage.outputs} outputs of case {coverage.worst!r} remain"
    assert f"; of a sample of what differs, {left}, and some in {coverage.cases_left} of {coverage.cases}" in line
    assert headline.endswith("; this explains the small probes, and not all that differs in the suite")
    assert fit[-1] == "f8emu fit x --kind 'rowwise fast'"


def test_larger_gemms_part_what_the_probes_do_not() -> None:
    """Of two explanations of every probe the one that the suite refutes is dropped, whichever was preferred."""
    wrong = multiplying_a_first(1 << 20)
    result = ran(wrong)
    ((right,),) = diagnosed(result, [wrong])[1].values()
    assert right.best is not None
    (gemms,) = wrong_gemms(wrong, result.subjects[0].stages, result.golden).values()
    (step,) = right.best.steps
    rules = replace(right.best.rules, flushes_operands=True)
    other = replace(right.best, steps=(replace(step, name="x"),), rules=rules)
    assert covered(gemms, right.best.rules).cases_left == 0 < covered(gemms, other.rules).cases_left
    preferred = replace(right, best=other, tried=(other, right.best))
    chosen = preferred.beyond_probes(gemms)
    assert chosen.best == right.best and chosen.alternatives == () and chosen.tried == (right.best,)


def test_the_worst_case_of_each_kind_is_shown() -> None:
    """More cases than are shown: each kind once, whatever comes first; and how to list them all."""
    (judged,) = ran(multiplying_a_first(300)).subjects
    (stage,) = judged.stages
    assert isinstance(stage, StageResult) and len(stage.kinds) == 2 and len(stage.mismatches) == 5
    head, *lines = mismatch_lines(judged, 5, "--errors ")
    assert head.endswith(f"; the worst case of each kind (--errors {stage.cases_differing} lists all):")
    assert [line for line in lines if line.startswith("  ")] == [
        f"  rowwise fast, by {manner}, {kind.cases} cases:"
        for manner, kind in zip(("more than 2 ulps", "up to 2 ulps"), stage.kinds.values(), strict=True)
    ]
    assert sum(kind.cases for kind in stage.kinds.values()) == stage.cases_differing
    shares = [kind.worst.share for kind in stage.kinds.values()]
    assert shares == sorted(shares, reverse=True) and all(0 < share <= 1 for share in shares)
    assert "the worst case of 1 of 2 kinds" in mismatch_lines(judged, 1)[0] and len(mismatch_lines(judged, 0)) == 1
    (judged,) = ran(multiplying_a_first(300), 999).subjects
    everything = mismatch_lines(judged, 999)
    assert shares[0] == max(mismatch.share for mismatch in judged.stages[0].mismatches)
    assert len(everything) == 1 + stage.cases_differing and everything[0].endswith("; one of each:")

"""[EPI-1] and [EPI-6] against an H100: scaled sums of -0, and groups whose scales lie far apart.

Recorded by `f8emu record`, its cases of those names; the shipped file has no output that tells these rules.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f8emu.conformance import read_golden
from f8emu.conformance.cases.distributions import codes_of
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.compute import compute
from f8emu.conformance.diagnosis.rules import ScaleOrder, rules_of
from f8emu.conformance.run.subject import load_subject
from f8emu.spec import FLOAT32, HOPPER, Granularity, format_by_name
from f8ref.exact import cast, group_of_row, scaled_dot

GOLDEN = read_golden(Path(__file__).parent / "data" / "epilogues.safetensors")


def exact_code(gemm: GemmCase, m: int, n: int) -> int:
    assert gemm.scale_a is not None and gemm.scale_b is not None
    is_grouped = gemm.mode is Mode.GROUPED_ROWWISE
    b, scale_b = codes_of(gemm.b), gemm.scale_b.reshape(-1)
    if is_grouped:
        assert gemm.offs is not None
        group = group_of_row(m, gemm.offs.tolist())
        b, scale_b = b[group], gemm.scale_b[group]
    places = (0, 0) if gemm.mode is Mode.TENSORWISE else (m, n)
    scales = (codes_of(s)[at] for s, at in zip((gemm.scale_a.reshape(-1), scale_b), places, strict=True))
    scale_a, scale_n = ([int(code)] for code in scales)
    bias: Any = None if gemm.bias is None else cast(int(codes_of(gemm.bias)[n]), gemm.out_dtype, FLOAT32)
    return scaled_dot(
        codes_of(gemm.a)[m].tolist(),
        b[n].tolist(),
        a_format=format_by_name(gemm.a.dtype.name),
        b_format=format_by_name(gemm.b.dtype.name),
        scale_a=scale_a,
        scale_b=scale_n,
        granularity_a=gemm.granularity_a,
        granularity_b=gemm.granularity_b,
        bias=bias,
        out_format=gemm.out_dtype,
        use_fast_accum=gemm.use_fast_accum,
        is_grouped=is_grouped,
    )


def test_what_was_recorded() -> None:
    assert GOLDEN.device == "NVIDIA H100 80GB HBM3"
    assert [case.gemm.mode for case in GOLDEN.cases] == [Mode.TENSORWISE] * 8 + [Mode.ROWWISE] * 8 + [
        Mode.GROUPED_ROWWISE
    ] * 2


@pytest.mark.parametrize("name", ["f8ref.numpy", "f8ref.jax", "f8ref.exact"])
def test_every_bit(name: str) -> None:
    subject = None if name == "f8ref.exact" else load_subject(name)
    for case in GOLDEN.cases:
        if subject is not None:
            assert not different(subject.gemm(case.gemm), case.out).any(), (case.id, case.name)
            continue
        observed = codes_of(case.out)
        for m, n in np.ndindex(*case.out.shape):
            if (m + n) % 5 == 0:
                assert exact_code(case.gemm, m, n) == observed[m, n], (case.id, m, n)


def groups_of(case: GemmCase) -> Iterator[GemmCase]:
    """The GEMMs of a grouped one."""
    assert case.offs is not None and case.scale_a is not None and case.scale_b is not None
    for group, (start, stop) in enumerate(pairwise([0, *case.offs.tolist()])):
        yield replace(
            case,
            mode=Mode.ROWWISE,
            a=case.a[start:stop],
            b=case.b[group],
            scale_a=case.scale_a[start:stop, None],
            scale_b=case.scale_b[group][None],
            granularity_a=Granularity.ROWWISE,
            granularity_b=Granularity.ROWWISE,
            offs=None,
        )


def test_without_these_rules_it_would_differ() -> None:
    """0 is added to tensorwise results alone, before the bias; the scales of a grouped GEMM are those of rows first."""
    for case in GOLDEN.cases:
        is_grouped = case.gemm.mode is Mode.GROUPED_ROWWISE
        gemms = list(groups_of(case.gemm)) if is_grouped else [case.gemm]
        right = rules_of(HOPPER, gemms[0])
        wrong = replace(right, adds_zero=not right.adds_zero)
        if is_grouped:
            right, wrong = replace(right, scales=ScaleOrder.ROW_FIRST), right
        outputs = [np.concatenate([compute(gemm, rules) for gemm in gemms]) for rules in (right, wrong)]
        assert not different(outputs[0], case.out).any()
        assert different(outputs[1], case.out).sum() > 10, (case.id, case.name)

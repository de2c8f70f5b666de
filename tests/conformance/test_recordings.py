"""[EPI-1] and [EPI-6] against GPUs: scaled sums of -0, groups whose scales lie far apart, groups of every kind.

Recorded by `f8emu record OUT`: `epilogues` its cases of those names, `groups_CARD` with `--only group-kinds` and a
seed that no table here uses. The shipped file has no output that tells these rules.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from f8emu.conformance import read_golden
from f8emu.conformance.cases.gemm import Mode
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.compute import compute
from f8emu.conformance.diagnosis.rules import ScaleOrder, rules_of
from f8emu.conformance.run.subject import load_subject
from f8emu.spec import HOPPER
from f8emu.spec.gemm_call import GroupKind
from tests.oracle.exactly import EXACT

DATA = Path(__file__).parent / "data"
EPILOGUES = read_golden(DATA / "epilogues.safetensors")
GROUPS = sorted(DATA.glob("groups_*.safetensors"))
assert GROUPS, "no recording of groups"


def test_epilogues_that_were_recorded() -> None:
    assert EPILOGUES.device == "NVIDIA H100 80GB HBM3"
    kinds = Counter(case.gemm.mode for case in EPILOGUES.cases)
    assert kinds == {Mode.TENSORWISE: 8, Mode.ROWWISE: 8, Mode.GROUPED_ROWWISE: 2}


@pytest.mark.parametrize("name", ["f8ref.numpy", "f8ref.jax", "f8ref.exact"])
def test_every_bit_of_epilogues(name: str) -> None:
    verbs = vars(EXACT) if name == "f8ref.exact" else load_subject(name).verbs
    for case in EPILOGUES.cases:
        assert not different(case.gemm.run(verbs), case.out).any(), (case.id, case.name)


def test_without_these_rules_it_would_differ() -> None:
    """0 is added to tensorwise results alone, before the bias; the scales of a grouped GEMM are those of rows first."""
    for case in EPILOGUES.cases:
        is_grouped = case.gemm.mode is Mode.GROUPED_ROWWISE
        gemms = [gemm for gemm, _ in case.gemm.groups()] if is_grouped else [case.gemm]
        right = rules_of(HOPPER, gemms[0])
        wrong = replace(right, adds_zero=not right.adds_zero)
        if is_grouped:
            right, wrong = replace(right, scales=ScaleOrder.ROW_FIRST), right
        outputs = [np.concatenate([compute(gemm, rules) for gemm in gemms]) for rules in (right, wrong)]
        assert not different(outputs[0], case.out).any()
        assert different(outputs[1], case.out).sum() > 10, (case.id, case.name)


@pytest.mark.parametrize("file", GROUPS, ids=lambda file: file.stem)
def test_every_bit_of_groups(file: Path) -> None:
    golden = read_golden(file)
    assert file.stem.removeprefix("groups_").upper() in golden.device and golden.metadata["refused"] == "[]"
    gemms = [case.gemm for case in golden.cases]
    kinds = Counter((gemm.group_kind, gemm.use_fast_accum) for gemm in gemms)
    assert kinds == {(kind, fast): 6 for kind in GroupKind for fast in (True, False)}
    oracle, engine = load_subject("f8ref.numpy"), load_subject("f8emu.native")
    missed = Counter[tuple[GroupKind | None, str]]()
    for case, gemm in zip(golden.cases, gemms, strict=True):
        for subject in (oracle, engine):
            assert not different(subject.gemm(gemm), case.out).any(), (subject.name, case.id, case.name)
        # What was recorded tells the accumulations, the groups and the order of the scales apart, in every kind.
        others = {"accumulation": replace(gemm, use_fast_accum=not gemm.use_fast_accum)}
        if gemm.offs is not None:
            others["groups"] = replace(gemm, offs=np.r_[gemm.offs[:1] * 0, gemm.offs[:-1]])
        for rule, other in others.items():
            missed[gemm.group_kind, rule] += int(different(engine.gemm(other), case.out).sum())
        of_group = case.out.reshape(*gemm.leading, -1, case.out.shape[1])
        for column_first, place in gemm.groups():
            missed[gemm.group_kind, "scales"] += int(different(engine.gemm(column_first), of_group[place]).sum())
    assert len(missed) == 11 and min(missed.values()) > 10, missed

"""[EPI-6] against GPUs: grouped GEMMs of every kind, of a seed that no table here uses.

`groups_CARD.safetensors` is what `f8emu record OUT --only group-kinds --seed N` wrote on that card.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from f8emu.conformance import read_golden
from f8emu.conformance.compare import different
from f8emu.conformance.run.subject import load_subject
from f8emu.spec.gemm_call import GroupKind

FILES = sorted((Path(__file__).parent / "data").glob("groups_*.safetensors"))
assert FILES, "no recording of groups"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_bit(file: Path) -> None:
    golden = read_golden(file)
    assert file.stem.removeprefix("groups_").upper() in golden.device and golden.metadata["refused"] == "[]"
    gemms = [case.gemm for case in golden.cases]
    asked = Counter((gemm.group_kind, gemm.use_fast_accum) for gemm in gemms)
    assert asked == {(kind, fast): 6 for kind in GroupKind for fast in (True, False)}
    oracle, engine = load_subject("f8ref.numpy"), load_subject("f8emu.native")
    missed = Counter[tuple[GroupKind | None, str]]()
    for case, gemm in zip(golden.cases, gemms, strict=True):
        for subject in (oracle, engine):
            assert not different(subject.gemm(gemm), case.out).any(), (subject.name, case.id, case.name)
        # What was recorded tells the accumulations, the groups and the order of the scales apart, in every kind.
        others = {"accumulation": replace(gemm, use_fast_accum=not gemm.use_fast_accum)}
        if gemm.offs is not None:
            others["groups"] = replace(gemm, offs=np.r_[gemm.offs[:1] * 0, gemm.offs[:-1]])
        for what, other in others.items():
            missed[gemm.group_kind, what] += int(different(engine.gemm(other), case.out).sum())
        of_group = case.out.reshape(*gemm.leading, -1, case.out.shape[1])
        for column_first, place in gemm.groups():
            missed[gemm.group_kind, "scales"] += int(different(engine.gemm(column_first), of_group[place]).sum())
    assert len(missed) == 11 and min(missed.values()) > 10, missed

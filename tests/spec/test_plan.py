"""The plan of split K: the rule on shapes that took no part in fitting it, what was recorded, and the text around it.

The trees were fitted on what cuBLAS's heuristic says. All recorded shapes were set aside, and those of
`split_k_set_aside.json`: here the rule is asked without the record.
"""

import base64
import json
import zlib
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from f8emu.conformance.cases.gemm import Mode
from f8emu.conformance.cases.golden import shipped_golden
from f8emu.spec import FORMATS, H100, HOPPER, Chip, SpecError
from f8emu.spec.gemm_call import GemmCall
from f8emu.split_k import plan
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, LAYOUTS, PlannedGemm, Source, Split, planned, planned_gemm
from f8emu.split_k.plan import (
    CHIP,
    LIBRARY,
    gemms_from_json,
    plan_from_json,
    plan_to_json,
    shipped_plan,
    split_k,
    with_splits,
)

ROOT = Path(__file__).parents[2]
PLAN = shipped_plan()
TENSORWISE: dict[str, Any] = {"gemm": "tensorwise", "accumulation": "fast"}
BLOCKWISE = tuple(BLOCKWISE_GEMMS)
FLOAT8_TABLES = (
    *("tensorwise float32", "tensorwise bfloat16", "tensorwise float16"),
    *("rowwise float32", "rowwise bfloat16"),
)
TABLES = {table: {"accumulation": "promoted"} for table in FLOAT8_TABLES}
TABLES |= {f"bfloat16 {layout}": {"out_dtype": "float32"} for layout in LAYOUTS}
"""Table -> what makes no difference to it."""


def kind_of(table: str) -> dict[str, Any]:
    kind, *words = table.split()
    if kind == "bfloat16":
        return {"gemm": kind, "layout": words[0], "out_dtype": "bfloat16"}
    if kind in BLOCKWISE:
        return {"gemm": kind, "out_dtype": "".join(words) or "float32"}
    types = {"a_dtype": words[0], "b_dtype": words[2]} if "x" in words else {}
    return {"gemm": kind, "accumulation": "fast", **types, "out_dtype": words[-1]}


def gemm(m: int, n: int, k: int, **kind: Any) -> PlannedGemm:
    return planned_gemm(m=m, n=n, k=k, **kind)


@pytest.mark.parametrize("table", TABLES)
def test_the_rule_is_right_on_shapes_that_were_set_aside(table: str) -> None:
    recorded = {(m, n, k): s for (of, m, n, k), s in PLAN.recorded.items() if of == table}
    assert len(recorded) >= 449
    for change in ({}, TABLES[table]):
        right = 0
        for shape, s in recorded.items():
            asked = gemm(*shape, **kind_of(table) | change)
            assert PLAN.split_k(asked) == (s, Source.RECORDED)
            predicted = PLAN.predicted(asked)
            assert predicted.source is Source.PREDICTED
            right += predicted.split_k == s
        assert len(recorded) - right == WRONG_OF_THE_RECORDED.get(table, 0), change


WRONG_OF_THE_RECORDED = {"bfloat16 tn": 1, "bfloat16 nt": 1, "bfloat16 tt": 2}
RIGHT_OF_THOSE_SET_ASIDE: dict[str, tuple[int, int, int]] = {
    "tensorwise float32": (600, 599, 596),
    "tensorwise bfloat16": (600, 597, 595),
    "tensorwise float16": (600, 599, 599),
    "tensorwise float8_e5m2 x float8_e4m3fn float32": (600, 599, 597),
    "tensorwise float8_e5m2 x float8_e4m3fn bfloat16": (600, 598, 597),
    "tensorwise float8_e5m2 x float8_e4m3fn float16": (600, 599, 593),
    "tensorwise float8_e4m3fn x float8_e5m2 float32": (600, 599, 599),
    "tensorwise float8_e4m3fn x float8_e5m2 bfloat16": (600, 598, 594),
    "tensorwise float8_e4m3fn x float8_e5m2 float16": (600, 597, 596),
    "blockwise_1x128_1x128 bfloat16": (600, 596, 598),
    "blockwise_1x128_128x128 bfloat16": (600, 600, 600),
    "blockwise_128x128_1x128 bfloat16": (600, 599, 600),
    "bfloat16 tn": (600, 589, 594),
    "bfloat16 nn": (600, 590, 595),
    "bfloat16 nt": (369, 367, 595),
    "bfloat16 tt": (369, 367, 597),
    "blockwise_1x128_1x128": (600, 597, 598),
    "blockwise_1x128_128x128": (600, 600, 599),
    "blockwise_128x128_1x128": (600, 600, 599),
}
"""Table -> shapes of the H200, right there, and of 600 right on the H100."""


@pytest.mark.parametrize("chip", [HOPPER, H100], ids=str)
def test_the_rule_is_as_right_as_measured_on_labels_that_were_set_aside(chip: Chip) -> None:
    """[PLAN-1], [PLAN-7] What cuBLAS's heuristic says of shapes of every kind, most of them split."""
    name = "split_k_set_aside.json" if chip is HOPPER else "split_k_set_aside_h100.json"
    data = json.loads((Path(__file__).parent / name).read_text())
    assert (data["device"], data["library"]) == (chip.plan, LIBRARY)
    right: dict[str, list[bool]] = defaultdict(list)
    for block in data["labels"]:
        for m, n, k, *labels in block["rows"]:
            for table, s in zip(block["tables"], labels, strict=True):
                if s:
                    asked = gemm(m, n, k, **kind_of(table))
                    assert asked.table == table or m == 1
                    right[table] += [shipped_plan(chip.plan).predicted(asked) == (s, Source.PREDICTED)]
    rows = RIGHT_OF_THOSE_SET_ASIDE.items()
    expected = {table: (of_h200[0], of_h200[1]) if chip is HOPPER else (600, h100) for table, (*of_h200, h100) in rows}
    assert {table: (len(found), sum(found)) for table, found in right.items()} == expected


GRID_N = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Of the sweep of block scales: its other shapes have no M, N or K of its grid."""


def blockwise_rows(kind: str) -> dict[tuple[int, int, int], int]:
    """S of each shape that was recorded with float32 outputs."""
    rows = {(m, n, k): s for (table, m, n, k), s in PLAN.recorded.items() if table == kind}
    for ((m, n, k), s), accumulation in product(rows.items(), ("", "promoted")):
        asked = gemm(m, n, k, gemm=kind, out_dtype="float32", accumulation=accumulation)
        assert PLAN.split_k(asked) == (s, Source.RECORDED)
    return rows


@pytest.mark.parametrize(
    ("kind", "on_grid", "off_grid"), [(BLOCKWISE[0], (397, 397), (480, 476)), (BLOCKWISE[1], (403, 403), (237, 237))]
)
def test_the_trees_of_block_scales_on_recorded_shapes(
    kind: str, on_grid: tuple[int, int], off_grid: tuple[int, int]
) -> None:
    """[PLAN-6] (shapes, right). S is right if it cuts K into slices of the recorded length: only that shows in bits."""
    multiple = 512 if kind.endswith("128x128") else 128
    right: dict[bool, list[bool]] = {True: [], False: []}
    for (m, n, k), s in blockwise_rows(kind).items():
        predicted = PLAN.predicted(gemm(m, n, k, gemm=kind, out_dtype="float32"))
        assert predicted.source is Source.PREDICTED and (s == 1 or s * m * n * 4 < 1 << 20)
        right[n in GRID_N] += [-(-k // (s * multiple)) == -(-k // (predicted.split_k * multiple))]
    assert [(len(x), sum(x)) for x in (right[True], right[False])] == [on_grid, off_grid]


def test_1x128_scales_on_both_sides_are_split_as_tensorwise_gemms_are() -> None:
    """[PLAN-6] Every shape of which both were recorded."""
    tensorwise = {(m, n, k): s for (table, m, n, k), s in PLAN.recorded.items() if table == "tensorwise float32"}
    rows = {shape: s for shape, s in blockwise_rows(BLOCKWISE[0]).items() if shape in tensorwise}
    assert (len(rows), sum(s > 1 for s in rows.values())) == (52, 35)
    assert {shape: -(-shape[2] // (s * 128)) for shape, s in rows.items()} == {
        shape: -(-shape[2] // (tensorwise[shape] * 128)) for shape in rows
    }


def test_limits_beside_block_scales() -> None:
    """[PLAN-4] The float32 results of all slices take less than 1 MiB, as in 64 x 1024 x 14336, where 4 would take it.

    In 32 x 2048 x 20480 four slices would take 1 MiB; tensorwise GEMMs have that limit too.
    """
    for out_dtype in ("float32", "bfloat16", "float16"):
        kinds = [{"gemm": kind, "out_dtype": out_dtype} for kind in BLOCKWISE]
        predicted = [PLAN.predicted(gemm(64, 1024, 14336, **kind)) for kind in kinds]
        predicted += [PLAN.predicted(gemm(8, 2048, 14336, **kind)) for kind in kinds]
        predicted += [PLAN.predicted(gemm(8, 4096, 14336, **kind)) for kind in kinds[1:]]
        assert predicted == [(s, Source.PREDICTED) for s in (3, 3, 3, 4, 5, 5, 4, 4)]
        assert PLAN.predicted(gemm(32, 2048, 20480, **kinds[0])) == (3, Source.PREDICTED)
        assert PLAN.predicted(gemm(64, 2048, 14336, **kinds[0])) == (1, Source.PREDICTED)
        assert PLAN.predicted(gemm(65536, 4096, 14336, **kinds[0])) == (1, Source.PREDICTED)
        assert PLAN.predicted(gemm(65536, 4096, 65536, **kinds[0])) == (1, Source.UNKNOWN)
    assert PLAN.predicted(gemm(32, 2048, 20480, **TENSORWISE, out_dtype="float32")) == (3, Source.PREDICTED)
    assert split_k(gemm(16, 256, 8192, gemm=BLOCKWISE[2], out_dtype="float32")) == (3, Source.PREDICTED)
    with pytest.raises(SpecError, match="accumulation of a blockwise_1x128_1x128 GEMM must be one of promoted"):
        gemm(8, 256, 8192, gemm=BLOCKWISE[0], out_dtype="float32", accumulation="fast")


def test_rows_of_1x128_scales_are_padded() -> None:
    """As torch and JAX pad them before they ask: 5 rows are 8, 132 recorded ones also 129."""
    for kind, rows in ((BLOCKWISE[0], 8), (BLOCKWISE[1], 8), (BLOCKWISE[2], 5)):
        assert gemm(5, 256, 8192, gemm=kind, out_dtype="bfloat16").rows == rows
    of_bfloat16 = {"gemm": BLOCKWISE[0], "out_dtype": "bfloat16"}
    assert [PLAN.split_k(gemm(m, 912, 5504, **of_bfloat16)) for m in (129, 132)] == [(1, Source.RECORDED)] * 2


def test_the_recording_has_splits_worth_predicting() -> None:
    split = defaultdict(int)
    for (table, *_), s in PLAN.recorded.items():
        split[table] += s > 1
    assert split["tensorwise float32"] == 75 and split["tensorwise bfloat16"] == 73
    assert split["bfloat16 tn"] == 168 and split["bfloat16 nt"] > 90


def test_the_plan_is_that_of_the_golden_kernels() -> None:
    """The kernels of the golden file tell S by their grids; promoted GEMMs are split as fast ones."""
    modes = (Mode.TENSORWISE, Mode.ROWWISE, Mode.BF16)
    found = set[tuple[bool, bool, int]]()
    for case in (case.gemm for case in shipped_golden().cases if case.gemm.mode in modes):
        pair = None if case.mode is Mode.BF16 else (case.granularity_a, case.granularity_b)
        call = GemmCall(
            call=case.verb,
            sizes=(*case.full_size, case.k),
            formats=(FORMATS[case.a.dtype.name], FORMATS[case.b.dtype.name]),
            granularities=pair,
            out=case.out_dtype,
            use_fast_accum=case.use_fast_accum,
        )
        assert split_k(planned(call, "tn")).split_k == case.split_k
        found.add((pair is None, call.use_fast_accum, case.split_k))
    assert found >= {(False, False, 3), (False, False, 6), (False, True, 3), (True, False, 3)}


def test_the_plan_is_what_operands_that_show_S_gave_on_the_hardware() -> None:
    """Promoted accumulation and bfloat16 outputs hide S of normal operands; a smaller one explains a sample of them."""
    found = json.loads((ROOT / "benchmarks/results/split_k-h200.json").read_text())
    assert (found["device"], found["library"], len(found["rows"])) == (CHIP, LIBRARY, 75)
    for m, n, k, kind, accumulation, layout, out_dtype, s, smallest in found["rows"]:
        asked = gemm(m, n, k, gemm=kind, accumulation=accumulation, layout=layout, out_dtype=out_dtype)
        assert split_k(asked) == (s, Source.RECORDED) and smallest < s


@pytest.mark.parametrize(
    ("shape", "s"),
    [
        *[((64, 32, 6144), 2), ((32, 64, 12288), 4), ((64, 64, 16384), 6), ((256, 256, 16384), 3)],
        *[((16, 1024, 16384), 6), ((512, 512, 16384), 1), ((512, 512, 32768), 1), ((256, 512, 4096), 1)],
        ((16384, 4096, 14336), 1),
    ],
)
def test_other_measured_shapes(shape: tuple[int, int, int], s: int) -> None:
    """[CHAIN-3] names them; the last is beyond the trees' M, where nothing is split any more."""
    assert PLAN.predicted(gemm(*shape, **TENSORWISE, out_dtype="float32")) == (s, Source.PREDICTED)


def test_limits_of_the_rule() -> None:
    """[PLAN-2], [PLAN-4], [PLAN-5]: no slice of 2,560 bytes or less, and nothing said beyond what was measured."""
    for m, n, k, layout in product((8, 64, 4096), (64, 1024), (2560, 2576, 8192, 30000 // 64 * 64), ("tn", "nn", "nt")):
        s, source = PLAN.predicted(gemm(m, n, k, gemm="bfloat16", layout=layout, out_dtype="bfloat16"))
        assert source is Source.PREDICTED and (s == 1 or k * 2 / s > 2560)
    unknown = Split(1, Source.UNKNOWN)
    bfloat16 = {"gemm": "bfloat16", "out_dtype": "bfloat16"}
    assert split_k(gemm(12, 512, 8192, **bfloat16, layout="nt")) == unknown  # rows of a are 24 bytes long
    assert split_k(gemm(128, 128, 65536, **TENSORWISE, out_dtype="float32")) == unknown
    assert split_k(gemm(16384, 64, 8192, **bfloat16, layout="tn")) == unknown
    asked = gemm(8, 512, 8192, **TENSORWISE, out_dtype="float32")
    assert split_k(asked).split_k == 3
    assert split_k(asked, chip="NVIDIA H100 PCIe") == split_k(asked, library="cuBLAS 12.8") == unknown
    assert split_k(gemm(1, 512, 8192, **bfloat16, layout="nt")) == split_k(gemm(1, 512, 8192, **bfloat16, layout="nn"))


def test_the_trees_of_a_bare_mm_are_read_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    names, read = list[str](), plan._read
    monkeypatch.setattr(plan, "_read", lambda name: names.append(name) or read(name))
    of_h100 = plan.shipped_plan.__wrapped__(H100.plan)
    kinds = [{"gemm": "bfloat16", "layout": "nt"}, TENSORWISE, {"gemm": BLOCKWISE[1]}]
    assert all(of_h100.predicted(gemm(64, 512, 8192, **kind, out_dtype="float16")).split_k > 1 for kind in kinds)
    assert names == ["h100_cublas_13_1_0_3_split_k"]
    for layout in ("tn", "nn", "tt"):
        split = of_h100.predicted(gemm(64, 512, 8192, gemm="bfloat16", layout=layout, out_dtype="float16"))
        assert split.split_k > 1 and split.source is Source.PREDICTED
        assert names[-1] == "h100_cublas_13_1_0_3_split_k_mm"
    with pytest.raises(SpecError, match=r"split_k: chip must be one of 'Hopper', 'H100', .*; got 'A100'"):
        plan.shipped_plan("A100")
    with pytest.raises(SpecError, match="no recorded split-K plan; the chips with one are Hopper, H100"):
        plan.shipped_plan("Ada")
    assert plan.shipped_plan("h200") == plan.shipped_plan()


def test_plan_files_are_read_back(tmp_path: Any) -> None:
    few = dict(list(PLAN.recorded.items())[:7])
    kept = replace(PLAN, recorded=few, rules={}, slice_bytes=None)
    assert plan_from_json(plan_to_json(kept), "few") == kept
    over = plan_from_json(plan_to_json(replace(kept, recorded={("bfloat16 tn", 8, 64, 8192): 9})), "one").over(PLAN)
    asked = gemm(8, 64, 8192, gemm="bfloat16", layout="tn", out_dtype="float32")
    assert over.split_k(asked) == (9, Source.RECORDED) and over.predicted(asked).split_k != 9
    assert (over.library, over.chip, over.recorded.keys() >= PLAN.recorded.keys()) == (LIBRARY, CHIP, True)


GOOD = {"m": 8, "n": 512, "k": 8192, "gemm": "tensorwise", "accumulation": "fast", "out_dtype": "float32"}


def test_objects_come_back_with_their_split() -> None:
    blockwise = {key: value for key, value in GOOD.items() if key != "accumulation"} | {"gemm": BLOCKWISE[0]}
    text = json.dumps(
        [{**GOOD, "layout": ""}, {**GOOD, "gemm": "bfloat16", "accumulation": "", "layout": "nn"}, blockwise]
    )
    items = gemms_from_json(text, "IN")
    found = with_splits(items, [split_k(asked) for _, asked in items])
    assert found[0] == {**GOOD, "layout": "", "split_k": 3, "source": "recorded"}
    assert found[1]["split_k"] == 6 and list(found[1])[-2:] == ["split_k", "source"]
    assert found[2] == {**blockwise, "split_k": 3, "source": "predicted"}


def coded(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


TREE = {"codes": coded(bytes([0, 129, 1, 130, 131])), "limits": coded(bytes([16, 32, 0, 1, 0, 0]))}
"""M up to 16: 1; otherwise N up to 288: 2, above it 3."""
RULED = {
    **{"schema": 2, "library": "a", "chip": "b", "recorded": [], "slice_bytes": 2560, "features": ["m", [64, 8]]},
    "rules": {"bfloat16 tn": {"workspace_bytes": 1 << 25, "tree": TREE}},
}


def test_a_tree_is_read_and_walked() -> None:
    """Features are M and the number of tiles of 64x8, N by M; the limits are 16 and 32 + 256."""
    read = plan_from_json(json.dumps(RULED), "IN")
    bfloat16 = {"gemm": "bfloat16", "layout": "tn", "out_dtype": "bfloat16"}
    shapes = ((16, 64, 8192), (17, 64, 8192), (24, 64 * 96, 8192), (24, 64 * 97, 8192), (24, 64 * 97, 3840))
    assert [read.predicted(gemm(*shape, **bfloat16)).split_k for shape in shapes] == [1, 2, 2, 3, 2]

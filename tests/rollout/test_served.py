"""Captures of a trainer and a server that lack something: what cannot be judged is named, and the rest is judged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from f8emu.capture.record import ForeignRecord, GemmRecord, TensorRecord
from f8emu.rollout import Certificate, certify
from f8emu.spec import NAMED_RECIPES, RecipeName
from f8emu.verdict import Exit
from tests.conformance import captures as captured
from tests.conformance.captures import M, N, Records

FIRST, SECOND = "mlp.gate_up_proj", "mlp.down_proj"


def trained(recipe: RecipeName = "rowwise") -> Records:
    """Two layers of a trainer: the input, the weight and the GEMM of each."""
    return [entry for name in (FIRST, SECOND) for entry in captured.layer(NAMED_RECIPES[recipe], name)[:3]]


def served(records: Records, turn: int = 1) -> Records:
    """The layers of a server that does as the trainer does."""
    shown: Records = []
    for record, arrays in records:
        if isinstance(record, GemmRecord):
            shape = {"layer": record.layer, "gemm": "output", "turn": turn, "m": record.m, "n": record.n, "k": record.k}
            (a_rows, a_columns), (b_rows, b_columns) = record.block("a"), record.block("b")
            blocks = {"a_block_rows": a_rows, "a_block_columns": a_columns}
            blocks |= {"b_block_rows": b_rows, "b_block_columns": b_columns}
            formats = {"a_format": record.a_format, "b_format": record.b_format, "out_dtype": record.out_dtype}
            of = {"a_scale": "float32", "b_scale": "float32", "has_bias": False, "module": "Linear of a server 1"}
            shown.append((ForeignRecord(order=0, **shape, **blocks, **formats, **of), arrays))
        elif record.what == "input":
            shown.append((replace(record, turn=turn), arrays))
    return shown


def certified(folder: Path, ours: Records, theirs: Records, recipe: RecipeName = "rowwise") -> Certificate:
    for side, records in (("trainer", ours), ("server", theirs)):
        ordered = [(replace(record, order=i), arrays) for i, (record, arrays) in enumerate(records)]
        if not (folder / side).exists():
            captured.written(folder / side, ordered, recipe)
    return certify(folder / "trainer", folder / "server")


def whys(result: Certificate) -> list[str]:
    return [lone.what for lone in result.not_seen if lone.part == "served"]


def in_float32(ours: Records, theirs: Records) -> None:
    record, arrays = theirs[1]
    theirs[1] = replace(record, out_dtype="float32"), arrays | {"product": arrays["product"].astype(np.float32)}


def without_an_input(ours: Records, theirs: Records) -> None:
    """The second call of a layer has an input of its own, which is not that of the first."""
    for records, others in ((ours, ours[:3]), (theirs, served(trained())[1:2])):
        for record, arrays in others:
            if isinstance(record, GemmRecord | ForeignRecord):
                arrays = arrays | {name: arrays[name][::-1] for name in ("a.codes", "a.scale", "product")}
            records.append((replace(record, turn=2), arrays))


def without_rows(ours: Records, theirs: Records) -> None:
    for records in (ours, theirs):
        for i, (record, arrays) in enumerate(records):
            if record.layer == FIRST and record.what != "weight":
                empty = {name: array if name.startswith("b.") else array[:0] for name, array in arrays.items()}
                records[i] = (record if isinstance(record, TensorRecord) else replace(record, m=0)), empty


def of_another_recipe(ours: Records, theirs: Records) -> None:
    record, arrays = ours[2]
    ours[2] = replace(record, use_fast_accum=False), arrays


PLANTED: dict[str, tuple[Callable[[Records, Records], None], str, Exit]] = {
    "another dtype": (in_float32, "its product is float32, and the trainer's bfloat16", Exit.DIFFERENT),
    "no input": (without_an_input, "the server's input is not shown", Exit.DIFFERENT),
    "no rows": (without_rows, "it has no rows", Exit.EQUAL),
    "not as its recipe": (of_another_recipe, "expected use_fast_accum True, as its recipe", Exit.INCOMPLETE),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_gemm_that_cannot_be_compared_is_named(case: str, tmp_path: Path) -> None:
    plant, why, status = PLANTED[case]
    ours, theirs = trained(), served(trained())
    plant(ours, theirs)
    result = certified(tmp_path, ours, theirs)
    (text,) = whys(result)
    assert text.startswith(f"{FIRST}: ") and why in text and result.verdict.status is status, result
    layers = result.captures["served"]["layers"]
    assert layers[SECOND]["equal"] == layers[SECOND]["outputs"] > 0
    assert "served" not in {difference.part for difference in result.differences}


def test_a_shard_whose_block_reaches_into_another_is_named(tmp_path: Path) -> None:
    """The trainer's layer is fused and the server's are not; row 80 is within the block of 128 rows."""
    ours, rest = trained("blockwise"), served(trained("blockwise"))
    (value, x), (record, arrays) = rest[:2]
    assert isinstance(record, ForeignRecord)
    theirs = rest[2:]
    for name, rows in (("mlp.gate_proj", slice(0, 80)), ("mlp.up_proj", slice(80, N))):
        part = arrays | {"product": arrays["product"][:, rows], "b.codes": arrays["b.codes"][rows]}
        part["b.scale"] = arrays["b.scale"][: -(-part["b.codes"].shape[0] // 128)]
        theirs += [
            (replace(value, layer=name), x),
            (replace(record, layer=name, n=len(part["b.codes"]), b_block_rows=128), part),
        ]
    expected = "a block of the trainer's weight reaches into another layer"
    assert whys(certified(tmp_path, ours, theirs, "blockwise")) == [
        f"mlp.{name}_proj: {expected}" for name in ("gate", "up")
    ]


@pytest.mark.parametrize("side", ["trainer", "server"])
def test_a_damaged_product_leaves_the_others(side: str, tmp_path: Path) -> None:
    certified(tmp_path, trained(), served(trained()))
    index = json.loads(next((tmp_path / side).rglob("index.json")).read_text())
    name = next(record["file"] for record in index["records"] if record.get("gemm"))
    (file,) = (tmp_path / side).rglob(name)
    file.write_bytes(file.read_bytes()[:-1])
    result = certified(tmp_path, [], [])
    assert result.verdict.status is Exit.DIFFERENT and "cut short" in result.differences[0].place
    assert "cut short" in whys(result)[0]
    assert result.captures["served"]["layers"][SECOND]["equal"] > 0


def test_a_damaged_pass_of_decode_is_not_seen(tmp_path: Path) -> None:
    ours, short = trained(), served(trained(), turn=2)
    for i, (record, arrays) in enumerate(short):
        part = {name: array if name.startswith("b.") else array[:1] for name, array in arrays.items()}
        short[i] = (record if isinstance(record, TensorRecord) else replace(record, m=1)), part
    result = certified(tmp_path, ours, served(ours) + short)
    assert result.verdict.status is Exit.EQUAL and result.decode["rows_equal"] == result.decode["rows"] == 2, result
    file = sorted((tmp_path / "server").rglob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1])
    result = certified(tmp_path, [], [])
    assert result.verdict.status is Exit.INCOMPLETE and "cut short" in result.verdict.line
    assert result.captures["served"]["equal"] == result.captures["served"]["outputs"] > 2 * M


def test_steps_with_one_number_in_two_folders(tmp_path: Path) -> None:
    """What is compared as captures is what is multiplied again: the first of both."""
    ours, wrong = trained(), served(trained())
    wrong[1][1]["product"] = wrong[1][1]["product"][::-1]
    for name, records in (("a", served(ours)), ("b", wrong)):
        ordered = [(replace(record, order=i), arrays) for i, (record, arrays) in enumerate(records)]
        captured.written(tmp_path / "server" / name, ordered)
    result = certified(tmp_path, ours, [])
    assert not result.differences and result.captures["served"]["equal"] == result.captures["served"]["outputs"]
    assert result.verdict.status is Exit.INCOMPLETE and "appears twice" in result.verdict.line

"""Recorded instructions: the public sample is what the profiles compute, a wrong rule is not; bad files are told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f8emu.conformance.cases.container import LARGEST_FILE, decode_container, encode_container
from f8emu.conformance.record import instructions
from f8emu.conformance.record.instructions import instruction_subject, read_recordings, replay
from f8emu.spec import CHIPS, HOPPER, AccumulationModel, Chip, GoldenFileError, Instruction, Rounding, SpecError
from tests.conformance.command import invoke

SAMPLE = Path(__file__).parent / "data" / "instructions.safetensors"
"""Six telling cases of each public recording; `metadata["source"]` and `metadata["license"]` say whose."""


def tensors() -> dict[str, np.ndarray]:
    return decode_container(SAMPLE.read_bytes())[0]


def written(path: Path, changed: dict[str, np.ndarray], **metadata: str) -> Path:
    path.write_bytes(encode_container(changed, {"what": "a test", **metadata}))
    return path


def test_the_public_sample_is_equal_to_the_bit() -> None:
    status, out, _ = invoke("verify", "f8ref.numpy", "f8ref.exact", "--recordings", str(SAMPLE))
    assert status == 0 and "equal: every bit of 216 outputs in 36 cases" in out
    assert "L40S: profile Ada (instructions recorded, GEMMs around them assumed)" in out
    assert "BSD 2-Clause" in read_recordings(SAMPLE).metadata["license"]


def wrong(model: AccumulationModel) -> dict[str, AccumulationModel]:
    """One rule off; those that the model has."""
    models = {
        "steps of twice the length": replace(model, step_k=2 * model.step_k),
        "steps of half the length": replace(model, step_k=model.step_k // 2),
        "one bit less": replace(model, aligned_fraction_bits=model.aligned_fraction_bits - 1),
        "the other rounding": replace(
            model, rounding=Rounding.TOWARD_ZERO if model.rounding is Rounding.NEAREST_EVEN else Rounding.NEAREST_EVEN
        ),
    }
    if model.order:  # of float32 results the recordings do not tell these [CHIP-2]
        models = {"the order of K": replace(model, order=()), "the other rounding": models["the other rounding"]}
    if model.promote_k is not None:
        models["c inside"] = replace(model, promote_k=None)
    return models


def test_every_rule_of_the_profiles_is_seen_by_the_sample() -> None:
    subject, file, seen = instruction_subject("f8ref.numpy"), read_recordings(SAMPLE), set[str]()
    for recording in file.recordings:
        instruction = recording.chip.instruction("test", recording.formats, recording.out)
        is_float16 = recording.out.name == "float16"
        for name, model in wrong(instruction.model).items():
            is_one_step = recording.a.shape[1] == instruction.model.step_k and "twice" in name
            if is_one_step or (instruction.model.order and not is_float16 and name != "c inside"):
                continue
            chip = replace(recording.chip, instructions=(replace(instruction, model=model),))
            result = replay([subject], replace(file, recordings=(replace(recording, chip=chip),)))
            assert result.has_difference, (recording.id, name)
            seen.add(name)
    assert len(seen) == 6


def test_one_flipped_bit_is_named(tmp_path: Path) -> None:
    changed = tensors()
    d = changed["L40S.E5M2.d"].copy()
    d[4] ^= 1
    path = written(tmp_path / "flipped.safetensors", changed | {"L40S.E5M2.d": d})
    status, out, _ = invoke("verify", "f8ref.numpy", "--recordings", str(path), "--json", str(tmp_path / "out.json"))
    assert status == 1 and "NOT EQUAL: f8ref.numpy (instructions)" in out
    assert "L40S float8_e5m2 K=32 -> float32 by the profile of Ada [4] a=<" in out
    assert '"outputs_equal": 107' in (tmp_path / "out.json").read_text()


def test_the_low_half_of_float16_results_is_enough(tmp_path: Path) -> None:
    """As in a public collection of these recordings, whose float16 results lost their upper half."""
    kept = {k: v for k, v in tensors().items() if k.startswith("Ada.E4M3.") and not k.endswith(".d")}
    full = kept["Ada.E4M3.d_float16"].view(np.float16).astype(np.float32).view(np.uint32)
    halves = (full & 0xFFFF).astype(np.uint16)
    for kept_as, d, is_right in (
        ("low halves", halves, True),
        ("low halves", halves ^ 0x2000, False),
        ("codes", halves, False),
    ):
        path = written(tmp_path / "low", kept | {"Ada.E4M3.d_float16": d}, d_float16=kept_as)
        (recording,) = read_recordings(path).recordings
        assert recording.keeps_low_half == ("low half" in recording.id) == (kept_as == "low halves")
        assert replay([instruction_subject("f8ref.numpy")], read_recordings(path)).is_equal == is_right
    path = written(tmp_path / "low", kept, d_float16="upper")
    with pytest.raises(GoldenFileError, match="metadata 'd_float16' to be 'codes' or 'low halves'; found 'upper'"):
        read_recordings(path)


def test_another_chip_is_named_by_the_user(tmp_path: Path) -> None:
    renamed = {k.replace("L40S", "L4"): v for k, v in tensors().items() if k.startswith("L40S")}
    path = written(tmp_path / "l4", renamed)
    with pytest.raises(GoldenFileError, match=r"found 'L4'; say which profile it is with --chip L4=PROFILE"):
        read_recordings(path)
    assert invoke("verify", "f8ref.numpy", "--recordings", str(path), "--chip", "L4=Ada")[0] == 0
    status, out, _ = invoke("verify", "f8ref.numpy", "--recordings", str(path), "--chip", "L4=Blackwell tcgen05")
    assert status == 1 and "L4: profile Blackwell tcgen05 (instructions agree with a model validated on " in out
    with pytest.raises(SpecError, match=r"verify --chip .*: chip must be one of .Hopper., .H100., .Ada."):
        read_recordings(path, {"L4": "Turing"})
    for chip in ("L4", "=Ada", "L4="):
        assert invoke("verify", "--recordings", str(path), "--chip", chip)[0] == 2


BAD: dict[str, tuple[Callable[[dict[str, np.ndarray]], dict[str, Any]], str]] = {
    "no tensors": (lambda t: {}, "at least one recording"),
    "a key of another layout": (lambda t: {"weights": t["Ada.bf16.d"]}, "CHIP.FORMAT.ROLE .* found 'weights'"),
    "another format": (lambda t: {"Ada.fp16.a": t["Ada.bf16.a"]}, "found 'Ada.fp16.a'"),
    "no result": (lambda t: {k: t[k] for k in ("Ada.bf16.a", "Ada.bf16.b", "Ada.bf16.c")}, "found a, b, c alone"),
    "another dtype": (
        lambda t: t | {"Ada.bf16.a": t["Ada.bf16.a"].view(np.uint8)},
        r"Ada.bf16.* expected|expected Ada.bf16",
    ),
    "fewer cases": (lambda t: t | {"Ada.bf16.c": t["Ada.bf16.c"][:5]}, r"Ada.bf16.c uint32\[6\]; found uint32\[5\]"),
    "no cases": (lambda t: {k: t[k][:0] for k in t if k.startswith("Ada.bf16")}, r"\[cases, K\], K from 1 to 4096"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_foreign_file_is_told_what_is_wrong(name: str, tmp_path: Path) -> None:
    change, text = BAD[name]
    path = written(tmp_path / "bad.safetensors", change(tensors()))
    with pytest.raises(GoldenFileError, match=rf"^read_recordings: .*bad.safetensors: expected .*{text}"):
        read_recordings(path)


def test_damaged_and_huge_files(tmp_path: Path) -> None:
    blob, path = SAMPLE.read_bytes(), tmp_path / "bad.safetensors"
    for length in (0, 7, 100, len(blob) // 2, len(blob) - 1):
        path.write_bytes(blob[:length])
        with pytest.raises(GoldenFileError, match=r"^read_recordings: .*; give a file in the layout of"):
            read_recordings(path)
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)  # sparse: no disk is filled
    with pytest.raises(GoldenFileError, match="a file of at most 1073741824 bytes"):
        read_recordings(path)
    for words in (("--recordings", tmp_path / "none"), ("--chip", "L4=Ada"), ("torch", "--recordings", SAMPLE)):
        assert invoke("verify", *words)[0] == 2


def test_an_instruction_that_a_profile_has_not(tmp_path: Path) -> None:
    renamed = {k.replace("Ada.", "CDNA3."): v for k, v in tensors().items() if k.startswith("Ada.E4M3")}
    path = written(tmp_path / "cdna", renamed)
    status, _, error = invoke("verify", "f8ref.numpy", "--recordings", str(path))
    assert status == 2 and "the profile of CDNA3 has the instructions" in error


def test_names_in_files_have_profiles() -> None:
    profiles: dict[str, Chip] = instructions.PROFILES
    assert profiles["H200"] is HOPPER and profiles["L40S"] is CHIPS["Ada"]
    assert all(profiles[name] is chip for name, chip in CHIPS.items())
    assert profiles["B200"] is CHIPS["Blackwell mma.sync"]
    assert all(isinstance(i, Instruction) for chip in CHIPS.values() for i in chip.instructions)

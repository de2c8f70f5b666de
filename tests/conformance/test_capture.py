"""Captured steps: written crash-safe, read strictly, replayed bit by bit, compared; without a framework."""

import errno
import hashlib
import json
import os
import shutil
import tarfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import f8ref.numpy as f8ref
from f8emu.capture import (
    CaptureError,
    GemmRecord,
    Session,
    TensorRecord,
    diff,
    writer,
)
from f8emu.capture.diffing import CaptureDiff
from f8emu.capture.findings import Difference, compared, ulps
from f8emu.capture.read import read_capture
from f8emu.capture.record import Record
from f8emu.capture.replaying import Replay, replay
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    E5M2,
    MXFP8,
    RECIPES,
    Format,
    RecipeName,
    SpecError,
)
from f8emu.split_k.plan import CHIP
from f8emu.verdict import Exit
from tests.conformance.captures import K, M, N, Records, header, layer, stored, unfinished, written
from tests.conformance.command import invoke


def flipped(records: Records, layer: str, gemm: str, part: str, index: tuple[int, int], bit: int = 0) -> Records:
    """One bit of one part the other way."""

    def changed(record: Record, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not (isinstance(record, GemmRecord) and (record.layer, record.gemm) == (layer, gemm)):
            return arrays
        array = arrays[part].copy()
        array.view(f"u{array.itemsize}")[index] ^= 1 << bit
        return {**arrays, part: array}

    return [(record, changed(record, arrays)) for record, arrays in records]


_OF_LAYERS = {**RECIPES, "mxfp8": MXFP8}


@pytest.fixture(scope="module")
def layers() -> dict[str, Records]:
    return {name: layer(recipe) for name, recipe in _OF_LAYERS.items()}


def again(path: Path) -> Replay:
    return replay(read_capture(path), oracle="f8ref.numpy")


def replayed(path: Path) -> tuple[int, str]:
    """Status and output of the command."""
    return invoke("replay", path, "--oracle", "f8ref.numpy")[:2]


def diffed(a: Path, b: Path, *options: object) -> tuple[int, str]:
    return invoke("diff", a, b, *options)[:2]


# Replay


@pytest.mark.parametrize("name", _OF_LAYERS)
def test_replay_is_equal_under_every_recipe(name: RecipeName, layers: dict[str, Records], tmp_path: Path) -> None:
    """Whole, and of a sample; tensors may come after their casts, as the callbacks of JAX do."""
    written(tmp_path / "run", layers[name], name)
    replayed = again(tmp_path / "run")
    assert replayed.is_equal, [one.line() for one in replayed.findings]
    assert not replayed.not_replayed and not replayed.missing and not replayed.damaged
    counts = replayed.counts
    assert counts["product"].elements == counts["product"].elements_equal == replayed.outputs == M * N + M * K + N * K
    high = sum(gemm.is_high_precision for gemm in _OF_LAYERS[name].gemms.values())
    assert (counts["product"].parts, counts["codes"].parts) == (3, 6)
    assert counts["scale"].parts == (0 if name == "delayed" else 6 - 2 * high)  # a delayed one follows from elsewhere
    assert ("scales are used as captured" in repr(replayed)) == (name == "delayed") and "0/0" not in repr(replayed)
    sample = replay(read_capture(tmp_path / "run"), oracle="f8ref.numpy", outputs=400)
    assert sample.is_equal and 0 < sample.counts["product"].elements < sample.outputs / 2
    written(tmp_path / "turned", [(replace(r, order=2 - r.order), arrays) for r, arrays in layers[name][:3]], name)
    replayed = again(tmp_path / "turned")
    assert replayed.is_equal and replayed.counts["codes"].parts == 2 and not replayed.not_replayed


PLACES = [
    ("tensorwise", "output", "a.codes", (3, 5), "input"),
    ("rowwise", "grad_input", "b.scale", (7, 0), "weight"),
    ("blockwise", "grad_weight", "a.codes", (143, 39), "grad_output"),
    ("rowwise_with_gw_hp", "grad_weight", "b.codes", (0, 0), "input"),
    ("delayed", "grad_input", "a.codes", (1, 2), "grad_output"),
    ("blockwise", "output", "product", (39, 143), ""),
    ("mxfp8", "grad_weight", "b.scale", (5, 1), "input"),
]


@pytest.mark.parametrize(("name", "gemm", "part", "index", "tensor"), PLACES)
def test_one_flipped_bit_is_named(
    name: RecipeName,
    gemm: str,
    part: str,
    index: tuple[int, int],
    tensor: str,
    layers: dict[str, Records],
    tmp_path: Path,
) -> None:
    """The first stage, its element, and the tensor that the operand was made of."""
    bit = 20 if part.endswith("scale") and name != "mxfp8" else 0
    written(tmp_path, flipped(layers[name], "layers.0.w1", gemm, part, index, bit), name)
    found = again(tmp_path)
    first = found.findings[0]
    assert (first.step, first.place, first.part, first.tensor) == ("step 7", f"layers.0.w1 {gemm}", part, tensor)
    assert first.elements_different == 1 and first.mismatches[0].index == index and first.ulps_max == 1 << bit
    assert not found.damaged, "it was captured so"


def test_the_scale_of_a_sharded_tensor_is_taken_as_captured(tmp_path: Path) -> None:
    """Under tensor parallelism the amax is that of all ranks: here one that is 1.37 times as large."""
    recipe = RECIPES["tensorwise"]
    tensors, (record, arrays), *_ = layer(recipe)[:2], *layer(recipe)[2:]
    assert isinstance(record, GemmRecord)
    x = tensors[0][1]["value"]
    scales = f8ref.scale_from_amax(np.float32(1.37) * f8ref.amax(x), E4M3FN)
    codes = f8ref.quantize(x, scales.inv_scale, E4M3FN)
    product = f8ref.scaled_mm(codes, arrays["b.codes"].T, scales.scale, arrays["b.scale"], use_fast_accum=True)
    arrays = {**arrays, "a.codes": codes, "a.scale": scales.scale, "product": product}
    for is_sharded in (True, False):
        path = tmp_path / str(is_sharded)
        written(path, [*tensors, (replace(record, is_sharded=is_sharded), arrays)], "tensorwise")
        found = again(path)
        assert found.is_equal == is_sharded
        assert [one.part for one in found.findings] == ([] if is_sharded else ["a.scale"])
        assert found.counts["codes"].parts_equal == 2


def test_wrong_products_all_over_have_no_split_to_blame_under_mxfp8(tmp_path: Path) -> None:
    """Every product is a finding, and no split of K explains it."""
    records = [
        (r, {**arrays, "product": -arrays["product"]} if isinstance(r, GemmRecord) else arrays)
        for r, arrays in layer(MXFP8)
    ]
    written(tmp_path, records, "mxfp8")
    findings = again(tmp_path).findings
    assert [(finding.part, finding.cause) for finding in findings] == [("product", "")] * 3


def test_without_tensors_the_pattern_names_the_operand_or_a_split_that_was_not_planned(tmp_path: Path) -> None:
    gemms = [one for one in layer(RECIPES["rowwise"]) if isinstance(one[0], GemmRecord)]
    written(tmp_path / "flipped", flipped(gemms, "layers.0.w1", "output", "b.codes", (9, 1), bit=6))
    records = layer(RECIPES["tensorwise"], split_k={"output": 3})
    planned = [(replace(r, split_k=1) if isinstance(r, GemmRecord) else r, arrays) for r, arrays in records]
    written(tmp_path / "split", planned, "tensorwise")
    for folder, words in (("flipped", ("column 9", "(weight)")), ("split", ("every bit equals split-K with S = ",))):
        found = again(tmp_path / folder)
        assert [one.part for one in found.findings] == ["product"]
        assert all(word in found.findings[0].cause for word in words)
        assert len(found.not_replayed) == (6 if folder == "flipped" else 0)


# The files


def test_the_safetensors_library_reads_the_files(layers: dict[str, Records], tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    path = written(tmp_path, layers["rowwise"])
    index = json.loads((path / "index.json").read_text())
    for (record, arrays), entry in zip(layers["rowwise"], index["records"], strict=True):
        blob = (path / entry["file"]).read_bytes()
        assert (len(blob), hashlib.sha256(blob).hexdigest()) == (entry["bytes"], entry["sha256"])
        with safe_open(path / entry["file"], "numpy") as file:
            assert json.loads(file.metadata()["record"]) == record.to_json()
            assert set(file.keys()) == set(arrays)
            for name, array in arrays.items():
                if array.dtype.name != "bfloat16":
                    assert file.get_tensor(name).tobytes() == array.tobytes()


@pytest.mark.parametrize(("file", "part"), [("000001", "b.codes"), ("000002", "b.scale")])
def test_a_file_changed_after_the_capture(file: str, part: str, layers: dict[str, Records], tmp_path: Path) -> None:
    """Its name, and what of the step its bits no longer fit to: the weight's codes, a scale."""
    path = written(tmp_path, layers["rowwise"]) / f"{file}.safetensors"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    found = again(tmp_path)
    assert found.damaged == [f"{path}: layers.0.w1 {'weight' if file == '000001' else 'output'}"]
    assert (found.findings[0].place, found.findings[0].part) == ("layers.0.w1 output", part)


@pytest.mark.parametrize("place", ["", "1.feed_forward.w2 output", "1.attention.wq grad_weight"])
def test_a_capture_of_a_gpu_is_computed_again(place: str, tmp_path: Path) -> None:
    """A compiled step of `rowwise` on an H200: `python -m benchmarks.proofs.captures --write FOLDER`.

    With a flipped bit, as if the GPU had computed it so: the checksum is that of the changed file.
    """
    with tarfile.open(Path(__file__).parent / "data" / "capture_h200.tgz") as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        file.extractall(tmp_path)
    (step,) = read_capture(tmp_path / "rowwise-compiled")
    assert step.header.device == CHIP
    part = "product" if place.endswith("output") else "a.codes"
    for captured in (one for one in step.records if one.record.place == place):
        blob = bytearray(captured.path.read_bytes())
        header = 8 + int.from_bytes(blob[:8], "little")
        blob[header + json.loads(blob[8:header])[part]["data_offsets"][0] + 5] ^= 4
        captured.path.write_bytes(blob)
        index = step.path / "index.json"
        index.write_text(index.read_text().replace(captured.sha256, hashlib.sha256(blob).hexdigest()))
    found = again(step.path)
    assert not found.damaged and not found.not_replayed and found.gemms == 24 and found.is_equal == (not place)
    assert [(one.place, one.part) for one in found.findings[:1]] == [(place, part)] * bool(place)
    counts = {kind: count.elements for kind, count in found.counts.items()}
    assert counts == {"scale": 4128, "codes": 339200, "product": 169600}


def test_one_damaged_file_costs_its_record_alone(layers: dict[str, Records], tmp_path: Path) -> None:
    path, same = written(tmp_path / "run", layers["rowwise"]), written(tmp_path / "same", layers["rowwise"])
    os.truncate(path / "000002.safetensors", 1000)
    status, out = replayed(path)
    count = f"{(M + N) * K:,}"
    equal = f"equal: {count} of {count} of {count} outputs of 2 GEMMs"
    assert status == 1 and out.splitlines()[-1].startswith(f"DAMAGED: 1 file; {equal}"), out
    status, out = diffed(path, same)
    assert status == 1 and "equal: 13 of 13 stages" in out and "damaged (1):" in out


def test_a_product_that_is_not_computed_again_is_not_equal(layers: dict[str, Records], tmp_path: Path) -> None:
    (record, arrays), *rest = (one for one in layers["rowwise"] if isinstance(one[0], GemmRecord))
    written(tmp_path, [(replace(record, chip="Rubin", recipe="its own"), arrays), *rest[:1]])
    status, out = replayed(tmp_path)
    assert status == 3 and "product: this version of f8emu does not know the chip 'Rubin'" in out
    assert "INCOMPLETE: no bit differs, but 1 product was not computed again; equal: " in out.splitlines()[-1], out


def test_a_path_without_a_capture(layers: dict[str, Records], tmp_path: Path) -> None:
    for path, message in ((tmp_path, "found no step-"), (tmp_path / "nowhere", "No such file")):
        with pytest.raises(CaptureError, match=message):
            read_capture(path)
    paths = [written(tmp_path, layers["rowwise"][:1], step=step) for step in (7, 8)]
    (paths[1] / "index.json").unlink()
    with pytest.raises(CaptureError, match=r"step-00000008-rank-00000: expected the index[.]json of a"):
        read_capture(tmp_path)


# Crashes and full disks


def test_a_step_that_was_never_finished_is_replayed(layers: dict[str, Records], tmp_path: Path) -> None:
    """A process that dies leaves whole files, and half a one that does not count."""
    made = unfinished(tmp_path, layers["rowwise"][:4])
    (tmp_path / f"{made.name}.partial" / "000004.safetensors.writing").write_bytes(b"half")
    (step,) = read_capture(tmp_path)
    assert not step.is_complete and len(step.records) == 4
    found = replay([step], oracle="f8ref.numpy")
    assert found.verdict.status is Exit.INCOMPLETE
    assert found.missing == [f"step 7 was never finished: {step.path}"]
    assert (found.gemms, found.counts["product"].elements_equal) == (1, M * N)


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A disk with room for so many bytes, below the file objects: every write goes through it."""
    room = [2**60]
    real = writer._write

    def write(path: Path, pieces: Iterator[bytes | memoryview]) -> tuple[int, str]:
        def checked() -> Iterator[bytes | memoryview]:
            for piece in pieces:
                used = sum(file.stat().st_size for file in path.parent.parent.rglob("*") if file.is_file())
                if used + len(piece) > room[0]:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                yield piece

        return real(path, checked())

    monkeypatch.setattr(writer, "_write", write)
    yield lambda size: room.__setitem__(0, size)


@pytest.mark.parametrize("room", [-writer.RESERVED, 70_000, 200_000, 330_000])
def test_a_full_disk_costs_what_does_not_fit(
    room: int, small_disk: Callable[[int], None], layers: dict[str, Records], tmp_path: Path
) -> None:
    small_disk(writer.RESERVED + room)
    made = unfinished(tmp_path, layers["rowwise"])
    path = made.close()
    if room < 0:  # nothing at all
        assert path is None and "No space left" in made.fault
        return
    (step,) = read_capture(path)
    assert step.is_complete
    assert 0 < len(step.records) < 6 and len(step.records) + len(step.left_out) == 6
    assert all("No space left on device" in one.reason for one in step.left_out)
    assert not list(tmp_path.rglob("*.writing"))
    verdict = replay([step], oracle="f8ref.numpy").verdict
    is_empty = not any(isinstance(captured.record, GemmRecord) for captured in step.records)
    assert verdict.status is (Exit.UNVERIFIED if is_empty else Exit.INCOMPLETE)


def small_steps(path: Path, count: int) -> Session:
    """Steps of two small tensors each."""
    options: dict[str, Any] = {"steps": range(1, count + 1), "ring": None, "first_step": 1}
    made = lambda step, reason: header(RECIPES["tensorwise"], step=step, reason=reason)  # noqa: E731
    session = Session("test", path, made, rank=0, **options)
    for _ in range(count):
        for name in "ab" if session.is_wanted else "":
            record = TensorRecord(**session.next(name, "input"), layer=name, tensor="input", dtype="float32")
            session.add(record, 40, lambda: {"value": stored(np.ones((2, 5), np.float32))})
        session.end()
    return session


def test_a_full_disk_is_a_line_where_warnings_are_errors(
    small_disk: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing ends training."""
    small_disk(writer.RESERVED + 60_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = small_steps(tmp_path, 30)
    assert session.is_over and session.number == 31 and 3 < len(session.written) < 30
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 30 - len(session.written) and all("training goes on" in line for line in lines)
    assert all(step.is_complete for step in read_capture(session.written[0]))


def test_names_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new directory is fsynced into the one above it; and a step may have more records than six digits count."""
    synced: list[Path] = []
    monkeypatch.setattr(writer, "_sync_directory", synced.append)
    small_steps(tmp_path / "runs" / "one", 1)
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "one"} <= set(synced)
    record = TensorRecord(order=1_000_000, layer="a", tensor="input", turn=1, dtype="float32")
    path = written(tmp_path / "many", [(record, {"value": np.ones((1, 1), np.float32)})])
    assert read_capture(path)[0].records[0].record == record


# Diff


def test_diff_names_where_two_captures_part(layers: dict[str, Records], tmp_path: Path) -> None:
    a = written(tmp_path / "a", layers["rowwise"])
    same = written(tmp_path / "same", layers["rowwise"], rank=3, step=9, world_size=4, device="NVIDIA H200")
    found = diff(read_capture(a), read_capture(same))
    assert found.is_equal and found.stages == found.stages_equal == 3 + 3 * 5
    assert "device: cpu / NVIDIA H200" in found.context and "rank: 0 of 1 / 3 of 4" in found.context

    changed = flipped(layers["rowwise"], "layers.0.w1", "grad_input", "product", (4, 5), bit=3)
    changed = flipped(changed, "layers.0.w1", "grad_weight", "b.codes", (1, 1))
    b = written(tmp_path / "b", changed)
    found = diff(read_capture(a), read_capture(b))
    first, second = found.divergences
    assert (first.place, first.part, first.elements_different) == ("layers.0.w1 grad_input", "product", 1)
    assert (first.ulps_max, first.ulps_median, first.cause) == (8, 8.0, "of equal operands: the GEMM itself")
    assert first.mismatches[0].index == (4, 5)
    assert (second.place, second.part, second.tensor) == ("layers.0.w1 grad_weight", "b.codes", "input")


def test_diff_of_captures_that_hold_different_things(layers: dict[str, Records], tmp_path: Path) -> None:
    a = written(tmp_path / "a", layers["rowwise"][:4])
    b = written(tmp_path / "b", layers["rowwise"][1:], step=8)
    found = diff(read_capture(a), read_capture(b))
    assert not found.is_equal and not found.divergences
    assert found.only_a == ["step 7: layers.0.w1 input"] and len(found.only_b) == 2
    written(tmp_path / "b", layers["rowwise"], step=9)
    written(tmp_path / "a", layers["rowwise"], step=6)
    with pytest.raises(SpecError, match="no step of one capture is in the other"):
        diff(read_capture(tmp_path / "a"), read_capture(tmp_path / "b"))


def test_diff_of_batches_of_different_sizes(layers: dict[str, Records], tmp_path: Path) -> None:
    """No part has its counterpart's shape: each is a divergence, the input the cause of all."""
    shorter: Records = []
    for record, arrays in layers["rowwise"][:3]:
        rows = {name: x[:8] if len(x) == M else x for name, x in arrays.items()}
        shorter.append((replace(record, m=8) if isinstance(record, GemmRecord) else record, rows))
    a, b = written(tmp_path / "a", layers["rowwise"][:3]), written(tmp_path / "b", shorter)
    found = diff(read_capture(a), read_capture(b))
    assert [one.part for one in found.divergences] == ["value", "a.scale", "a.codes", "product"]
    assert found.divergences[2].line().endswith(f"float8_e4m3fn[{M}, {K}] / float8_e4m3fn[8, {K}]")


def with_copy(root: Path, records: Records) -> None:
    written(root, records)
    shutil.copytree(root / "step-00000007-rank-00000", root / "step-000000007-rank-00000")


def with_empty(root: Path, records: Records) -> None:
    """A step of which not even the index was written."""
    written(root, records)
    (root / "step-00000008-rank-00000.partial").mkdir()


MISSING: dict[str, tuple[Callable[[Path, Records], object], str]] = {
    "left out": (
        lambda root, records: written(root, records, room=4),
        "step 7: layers.0.w1 grad_input was left out: No space left on device",
    ),
    "unfinished": (unfinished, "step 7 was never finished"),
    "finished and unfinished": (
        lambda root, records: (written(root, records), unfinished(root, records)),
        "step 7 appears twice",
    ),
    "two directories": (with_copy, "step 7 appears twice"),
    "no index": (with_empty, "step-00000008-rank-00000.partial was left out: it was begun, and has no index"),
    "one rank": (
        lambda root, records: written(root, records, world_size=2),
        "step 7: 1 rank of 2 did not capture it",
    ),
    "one rank, two steps": (
        lambda root, records: [written(root, records, step=step, world_size=3) for step in (7, 8)],
        "step 8: 2 ranks of 3 did not capture it",
    ),
    "a record twice": (
        lambda root, records: written(root, [*records, (replace(records[-1][0], order=99), records[-1][1])]),
        "layers.0.w1 output appears twice",
    ),
}


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
@pytest.mark.parametrize("kind", MISSING)
def test_what_is_missing_is_counted_and_never_equal(
    kind: str, sides: str, layers: dict[str, Records], tmp_path: Path
) -> None:
    """Records that differ may be among them: nothing says that they do not."""
    make, text = MISSING[kind]
    records = layers["rowwise"] if kind == "left out" else layers["rowwise"][:3]
    for side in "ab":
        is_whole = side not in sides and kind != "one rank, two steps"  # or one side alone has step 8
        (written if is_whole else make)(tmp_path / side, records)
    status, out = diffed(tmp_path / "a", tmp_path / "b")
    assert status == 3 and out.splitlines()[-1].startswith("INCOMPLETE: "), out
    assert text in out.replace("\n", " ") and "alone has" not in out
    if kind != "a record twice":  # a replay looks at all that there is
        status, out = replayed(tmp_path / sides[0])
        assert status == 3 and text in out and out.splitlines()[-1].startswith("INCOMPLETE: "), out


def test_a_step_by_its_own_path_needs_no_other_ranks(layers: dict[str, Records], tmp_path: Path) -> None:
    written(tmp_path, layers["rowwise"][:3], world_size=2)
    step = tmp_path / "step-00000007-rank-00000"
    assert invoke("diff", step, step)[0] == replayed(step)[0] == 0
    assert invoke("diff", step, tmp_path)[0] == 3


def test_the_finished_step_is_compared(layers: dict[str, Records], tmp_path: Path) -> None:
    """Beside an unfinished one of the same number that is equal; and what is missing is named beside."""
    records = layers["rowwise"][:3]
    changed = flipped(records, "layers.0.w1", "output", "product", (1, 1))
    written(tmp_path / "a", records)
    written(tmp_path / "b", changed)
    unfinished(tmp_path / "b", records)
    status, out = diffed(tmp_path / "a", tmp_path / "b")
    assert status == 1 and "NOT EQUAL, first at step 7: layers.0.w1 output product" in out
    assert "step 7 appears twice" in out
    same = tmp_path / "a" / "step-00000007-rank-00000"
    assert "step 7 is the same on both sides" in invoke("diff", same, same)[1]


@pytest.mark.parametrize("fmt", [BFLOAT16, E4M3FN, E5M2])
def test_ulps_are_neighbours(fmt: Format) -> None:
    """All finite codes in the order of their values: each is one from the next."""
    codes = np.arange(2**fmt.bits, dtype=f"u{fmt.bits // 8}").view(dtype_of(fmt))
    values = codes.astype(np.float32)
    finite = codes[np.isfinite(values)]
    order = np.lexsort((~np.signbit(finite.astype(np.float32)), finite.astype(np.float32)))
    ordered = finite[order]
    distance, signs, nonfinite = ulps(ordered[:-1], ordered[1:])
    assert (distance == 1).all() and nonfinite == 0 and distance.size == finite.size - 2
    assert signs == 1, "-0 and +0, between which nothing lies"


def test_a_difference_is_told_in_one_notation() -> None:
    """Opposite signs are counted, and have no distance."""

    def share(x: list[float], y: list[float]) -> str:
        facts = compared(np.array(x, np.float32), np.array(y, np.float32), "", "value", 0)
        place: dict[str, Any] = {"step": "step 1", "place": "w1 weight", "part": "value", "tensor": "weight"}
        return Difference(**place, elements=len(x), **facts).line().removeprefix("step 1: w1 weight value: ")

    assert share([1, 2], [1 + 2**-23, 2]) == "1 of 2 differ (50.00%), by 1 ulp"
    assert share([1, 2], [1 + 2**-23, 3]) == "2 of 2 differ (100.00%), by 2097152.5 ulps (median), 4194304 at most"
    assert share([1, 0, 4], [-1, -0.0, 4]) == "2 of 3 differ (66.67%), 2 in sign"
    assert share([1, 2, np.nan], [-1, 2.5, 3]).endswith(", by 2097152 ulps, 1 in sign, 1 finite on one side only")


@pytest.mark.parametrize(
    ("step", "tensor", "cause", "says"),
    [(10, "weight", "", 1), (1, "weight", "", 0), (2, "weight", "of a copy", 0), (2, "input", "", 0)],
)
def test_other_weights_are_told(step: int, tensor: str, cause: str, says: int) -> None:
    place: dict[str, Any] = {"step": f"step {step}", "place": "w1", "part": "value", "tensor": tensor, "cause": cause}
    parted = CaptureDiff(stages=1, divergences=[Difference(**place, elements=2, elements_different=1)])
    assert repr(parted).count("capture step 1 of both") == says


# The commands


def test_the_commands(layers: dict[str, Records], tmp_path: Path) -> None:
    output = layers["tensorwise"][:3]  # by a GPU, so judged by f8ref.jax
    written(tmp_path / "a", output, "tensorwise")
    flipped_output = flipped(output, "layers.0.w1", "output", "a.codes", (3, 5))
    written(tmp_path / "b", flipped_output, "tensorwise")
    status, out, _ = invoke("replay", tmp_path / "a", "--json", tmp_path / "out.json")
    assert status == 0 and out.splitlines()[-1].startswith(f"equal: every bit of {M * N:,} of {M * N:,} outputs"), out
    assert "f8ref.jax" in out
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["equal"] and data["counts"]["product"]["elements_equal"] == data["outputs"]
    status, out, _ = invoke("replay", tmp_path / "b", "--errors", 1)
    assert status == 1 and "first difference: step 7: layers.0.w1 output a.codes (input): 1 of" in out
    assert out.splitlines()[-1].startswith("NOT EQUAL, first at step 7: layers.0.w1 output a.codes;")
    status, out = diffed(tmp_path / "a", tmp_path / "b", "--json", tmp_path / "out.json")
    assert status == 1 and "first divergence: step 7: layers.0.w1 output a.codes (input): 1 of 10880 differ" in out
    assert "by 1 ulp; A: torchao_tensor" in out and "block" not in out, "a tensor under one scale is one block"
    assert json.loads((tmp_path / "out.json").read_text())["divergences"][0]["part"] == "a.codes"
    assert invoke("diff", tmp_path / "a", tmp_path / "a")[0] == 0
    hostile = [(replace(record, layer="\x1b]0;w1\x07\n"), arrays) for record, arrays in flipped_output]
    written(tmp_path / "c", hostile, "tensorwise")
    for arguments in (("replay", tmp_path / "c", "--oracle", "f8ref.numpy"), ("diff", tmp_path / "a", tmp_path / "c")):
        status, out, _ = invoke(*arguments)
        assert status == 1 and "\x1b" not in out and "\\x1b]0;w1\\x07\\n output" in out


def test_ctrl_c_keeps_what_was_found(layers: dict[str, Records], tmp_path: Path) -> None:
    written(tmp_path, flipped(layers["tensorwise"], "layers.0.w1", "output", "a.codes", (3, 5)), "tensorwise")
    steps = read_capture(tmp_path)

    class Interrupted:
        def __init__(self, left: int) -> None:
            self.left = left

        def begin(self, subject: str = "", stage: str = "", cases: int = 0) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

        def advance(self) -> None:
            self.begin()

    found = replay(steps, oracle="f8ref.numpy", progress=Interrupted(5))
    assert found.is_interrupted and not found.is_equal
    assert found.findings[0].part == "a.codes" and found.gemms == 1
    assert replay(steps, progress=Interrupted(1)).verdict.line == "INTERRUPTED, nothing was computed again"
    assert diff(steps, steps, progress=Interrupted(1)).verdict.line == "INTERRUPTED, nothing was compared"

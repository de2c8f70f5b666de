"""Malformed files of every reader: one error that names the place and the remedy, and a command ends with status 2."""

import base64
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from f8emu.audit import audit
from f8emu.capture import CaptureError, replay
from f8emu.capture.read import read_capture
from f8emu.conformance import read_golden, shipped_golden
from f8emu.report.inspection_log import read_run
from f8emu.spec import RECIPES, F8Error, GoldenFileError, SpecError
from f8emu.spec.recipe import DELAYED
from f8emu.spec.serialize import recipe_from_json, recipe_from_toml
from f8emu.split_k.plan import gemms_from_json, plan_from_json, planned_gemm, weights_from_json
from tests.audit.checkpoints import checkpoint, codes, f32, fp8, write
from tests.conformance.captures import layer, written
from tests.conformance.command import invoke

Spoil = Callable[[Path], object]
Change = Callable[[Any], object]
Faults = list[tuple[Spoil, str]]
"""What is done to a sound file, and a part of the error."""


# 1 Ways to spoil a file


def put(text: str | bytes, name: str = "") -> Spoil:
    """Another file in its place, or in its directory."""
    return lambda path: (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def swap(old: str, new: str) -> Spoil:
    """Another text in the place of the first one."""

    def spoil(path: Path) -> None:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return spoil


def edit(change: Change, name: str = "") -> Spoil:
    """A JSON text, whose content is changed."""

    def spoil(path: Path) -> None:
        data = json.loads((path / name).read_text())
        change(data)
        (path / name).write_text(json.dumps(data))

    return spoil


def header(change: Change) -> Spoil:
    """A safetensors file with its header changed, the data as it was."""

    def spoil(path: Path) -> None:
        blob = path.read_bytes()
        (length,) = struct.unpack_from("<Q", blob)
        table = json.loads(blob[8 : 8 + length])
        change(table)
        text = json.dumps(table).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + blob[8 + length :])

    return spoil


def cases(change: Change) -> Spoil:
    """A golden file with its list of cases changed."""

    def spoil(table: dict[str, Any]) -> None:
        entries = json.loads(table["__metadata__"]["cases"])
        change(entries)
        table["__metadata__"]["cases"] = json.dumps(entries)

    return header(spoil)


def case(number: int, **changes: Any) -> Spoil:
    return cases(lambda entries: entries[number].update(changes))


def role(number: int, **changes: Any) -> Spoil:
    return cases(lambda entries: entries[number]["tensors"].update(changes))


def without(number: int, key: str) -> Spoil:
    return cases(lambda entries: entries[number].pop(key))


def gemm(**changes: Any) -> Spoil:
    return edit(lambda gemms: gemms[0].update(changes))


def record(**changes: Any) -> Spoil:
    return edit(lambda index: index["records"][2].update(changes), "index.json")


def index(**changes: Any) -> Spoil:
    return edit(lambda table: table.update(changes), "index.json")


def listed(weights: object) -> Spoil:
    return put(json.dumps({"weight_map": weights}), "model.safetensors.index.json")


def config(**quantization: object) -> Spoil:
    return put(json.dumps({"quantization_config": fp8(**quantization)}), "config.json")


def data(**changes: Any) -> Spoil:
    return edit(lambda table: table.update(changes))


def at(name: str, spoil: Spoil) -> Spoil:
    """A file of a directory."""
    return lambda path: spoil(path / name)


def twice(path: Path) -> None:
    """A tensor in two shards."""
    write(path / "b.safetensors", SOUND)
    listed({"l.weight": SHARD, "l.weight_scale_inv": "b.safetensors"})(path)


def directory(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").mkdir()


def framed(text: bytes, content: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + content


def entry(*shape: int, dtype: str = "U8", begin: int = 0, end: int = 0) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def same_length(old: bytes, new: bytes) -> Spoil:
    """Other text of the same length in the header of a record."""

    def spoil(path: Path) -> None:
        blob = (path / RECORD).read_bytes()
        assert blob.count(old) == 1 and len(old) == len(new)
        (path / RECORD).write_bytes(blob.replace(old, new))

    return spoil


def link(name: str, target: Path | None = None) -> Spoil:
    """A link in the place of a file: to where the file is now, or to itself."""

    def spoil(path: Path) -> None:
        elsewhere = path / name if target is None else path.parent / target
        (path / name).rename(path.parent / "elsewhere")
        (path / name).symlink_to(elsewhere)

    return spoil


def pipe(path: Path) -> None:
    (path / RECORD).unlink()
    os.mkfifo(path / RECORD)
    record(bytes=0)(path)


def coded(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


RECORD = "000002.safetensors"
SHARD = "model.safetensors"
NESTED = "[" * 100_000
SOUND = {"l.weight": codes(), "l.weight_scale_inv": f32([1e-4])}
GEMM = {"m": 8, "n": 512, "k": 8192, "gemm": "tensorwise", "accumulation": "fast", "out_dtype": "float32"}
TREE = {"codes": coded(bytes([0, 129, 1, 130, 131])), "limits": coded(bytes([16, 32, 0, 1, 0, 0]))}
PLAN = {
    **{"schema": 2, "library": "a", "chip": "b", "recorded": [], "slice_bytes": 2560, "features": ["m", [64, 8]]},
    "rules": {"bfloat16 tn": {"workspace_bytes": 1 << 25, "tree": TREE}},
}
PLACE = '{"layer": "l", "gemm": "output", "operand": "a", "tensor": "input", "step": 1}'
HEAD = '{"schema": 1}\n'


def tree(**changes: str) -> Spoil:
    return edit(lambda plan: plan["rules"]["bfloat16 tn"].update(tree={**TREE, **changes}))


# 2 The readers


class Reader(NamedTuple):
    """A reader: what makes a sound file, what reads it, and what its errors say."""

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    error: type[Exception]
    says: str
    """A part of every error: the remedy, or the call."""
    command: tuple[str, ...] = ()


def text(content: str) -> Callable[[Path], Path]:
    def write_text(folder: Path) -> Path:
        (folder / "file").write_text(content)
        return folder / "file"

    return write_text


def golden(folder: Path) -> Path:
    (folder / "golden").write_bytes(shipped_golden().path.read_bytes())
    return folder / "golden"


def planned(path: Path) -> object:
    """Trees are read when they are asked."""
    plan = plan_from_json(path.read_text(), "IN")
    return plan.predicted(planned_gemm(m=16, n=64, k=8192, gemm="bfloat16", out_dtype="bfloat16"))


READERS = {
    "golden": Reader(golden, read_golden, GoldenFileError, "f8emu record OUT"),
    "capture": Reader(
        lambda folder: written(folder, layer(RECIPES["rowwise"])[:3]),
        lambda path: replay(read_capture(path)),
        CaptureError,
        "f8emu.torch.capture",
        ("replay",),
    ),
    "checkpoint": Reader(
        lambda folder: checkpoint(folder / "model", SOUND, fp8()), audit, F8Error, "audit: ", ("audit",)
    ),
    "recipe": Reader(
        text(DELAYED.to_toml()), lambda path: recipe_from_toml(path.read_text()), SpecError, "recipe_from_toml: "
    ),
    "recipe in JSON": Reader(
        text(DELAYED.to_json()), lambda path: recipe_from_json(path.read_text()), SpecError, "recipe_from_json: "
    ),
    "shapes": Reader(
        text(json.dumps([GEMM, GEMM])), lambda path: gemms_from_json(path.read_text(), "IN"), SpecError, "IN: "
    ),
    "weights": Reader(
        text('[{"n": 8, "k": 8}]'), lambda path: weights_from_json(path.read_text(), "IN"), SpecError, "IN: "
    ),
    "plan": Reader(text(json.dumps(PLAN)), planned, SpecError, "record OUT --plans IN.json"),
    "log": Reader(text(HEAD), read_run, SpecError, "that f8emu.torch.inspect wrote", ("inspect",)),
}


# 3 The faults

CONTAINER: Faults = [
    (put(b""), "0 bytes"),
    (lambda path: os.truncate(path, 7), "7 bytes"),
    (lambda path: os.truncate(path, 1000), "cut short"),
    (lambda path: os.truncate(path, path.stat().st_size - 1), "cut short"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "something appended"),
    (put(b"PK\x03\x04 a zip file, say, and no safetensors at all"), "foreign"),
    (put(struct.pack("<Q", 1 << 62) + b"{}"), "a header of"),
    (put(framed(b"nope")), "a JSON header"),
    (put(framed(NESTED.encode())), "a JSON header"),
    (put(framed(b"[]")), "a JSON object"),
    (header(lambda h: h.update(__metadata__={"x": 1})), "metadata of strings"),
    (put(framed(b'{"a": {}, "a": {}}')), "it twice"),
    (header(lambda h: h.update({"l" * 5000: entry(0)})), "at most 4096 characters; found one of 50"),
    (header(lambda h: h.update(x={"dtype": "U8", "shape": [0]})), "data_offsets of tensor 'x'"),
    (header(lambda h: h.update(x=entry(0, end=True))), "data_offsets of tensor 'x'"),
    (header(lambda h: h.update(x=entry(10**9, end=10**9))), "cut short"),
    (header(lambda h: h.update(x=entry(95, end=96))), "95 bytes for tensor 'x'"),
    (header(lambda h: h.update(x=entry(0, dtype="F9"))), "of a dtype among"),
    (header(lambda h: h.update(x=entry(1, end=1))), "behind another"),
    (put(framed(json.dumps({"a": entry(1, begin=1, end=2)}).encode(), b"ab")), "behind another"),
    (header(lambda h: h.update(x=entry(-1, 0))), "with a shape that an array can have"),
    (header(lambda h: h.update(x=entry(True, 0))), "with a shape that an array can have"),
    (header(lambda h: h.update(x=entry(0, 10**30))), "with a shape that an array can have"),
    (header(lambda h: h.update(x=entry(0, 2**62, 2**62))), "with a shape that an array"),
    (header(lambda h: h.update(x=entry(*[0] * 65))), "with a shape that an array can have"),
]
FAULTS: dict[str, Faults] = {
    "golden": [
        *CONTAINER,
        (header(lambda h: h["__metadata__"].pop("cases")), "a golden file, whose"),
        (header(lambda h: h.pop("__metadata__")), "a golden file, whose"),
        (header(lambda h: h["__metadata__"].update(cases="[{")), "found no JSON"),
        (cases(lambda entries: entries.clear()), "a case or more"),
        (header(lambda h: h["__metadata__"].update(cases="{}")), "to be a list"),
        (cases(lambda entries: entries.insert(0, 3)), "case 0: expected the whole of type"),
        (case(4, mode="diagonal"), "case 4: expected mode to be one of tensor"),
        (case(0, a_dtype="float8_e3m4"), "a_dtype to be one of float8_e4m3fn"),
        (case(0, a_dtype="bfloat16"), "a_dtype to be one of"),
        (case(0, out_dtype="float8_e4m3fn"), "out_dtype to be one of"),
        (without(7, "use_fast_accum"), "case 7: expected use_fast_accum"),
        (case(0, M="64"), "M of type int"),
        (case(0, M=True), "M of type int"),
        (case(0, M=65), "'a' of shape (65, 512); found (64, 512)"),
        (cases(lambda entries: entries[0]["tensors"].pop("scale_b")), "'scale_b'; found no such role"),
        (role(0, out="nowhere"), "no tensor 'nowhere'"),
        (role(0, out="002.out"), "'out' of dtype bfloat16; found float32"),
        (role(0, scale_a="008.scale_a"), "'scale_a' of shape (1,)"),
        (role(8, scale_b="008.scale_a"), "'scale_b' of shape (1, 96); found (64, 1)"),
        (role(0, a={}), "tensors.a of type str; found {}"),
        (case(0, kernels=[["name"]]), "kernels[0] with 2 elements"),
        (case(0, kernels=[["name", [1, 0]]]), "grids of positive sizes"),
        (case(120, kernels=[["nvjet_64x32_x_splitK_TNT", [5, 1, 1]]]), "whole output tiles"),
        (case(128, sampled_rows=[8192]), "indices below 8192"),
        (case(128, sampled_rows=[548, 548]), "different indices"),
        (without(128, "sampled_cols"), "sampled_cols to be different"),
        (header(lambda h: h["000.out"].update(dtype="I8", shape=[12288])), "among U8"),
    ],
    "capture": [
        (lambda path: os.truncate(path / RECORD, 1000), "cut short"),
        (lambda path: (path / RECORD).unlink(), "No such file"),
        (lambda path: os.truncate(path / RECORD, 2**40), "cut short, or changed"),
        (lambda path: os.truncate(path / "index.json", 100), "a JSON index"),
        (lambda path: os.truncate(path / "index.json", 2**36), "an index of at most"),
        (put(NESTED, "index.json"), "a JSON index"),
        (index(schema=2), "found 2; read it with the version that wrote it, f8emu 1"),
        (record(file="../../etc/passwd"), "a name like"),
        (link(RECORD, Path("elsewhere")), "Too many levels of symbolic links"),
        (pipe, "regular file"),
        (record(m=10**30), "below 2^31"),
        (record(m=41), "expected product bfloat16[41, 144]"),
        (record(a_format="int4"), "'a_format' must be one of"),
        (record(kind="code"), "kind to be one of gemm"),
        (record(run="rm"), "found 'run'"),
        (record(n=True), "n to be an integer"),
        (record(layer=1), "layer of type str"),
        (index(recipes={"x": {"name": 1}}), "recipes.x: recipe_from_dict: "),
        (index(recipes={"0" * 64: RECIPES["rowwise"].to_dict()}), "as the key of a recipe"),
        (record(a_format="float8_e5m2"), "expected a_format 'float8_e"),
        (record(order=0), "an 'order' of its own"),
        (same_length(b"[40,272]", b"[9e9,27]"), "with a shape that an array"),
        (same_length(b'"a.codes":{"dtype":"U8"', b'"a.codes":{"dtype":"I8"'), "of a dtype among"),
        (edit(lambda table: table.pop("records"), "index.json"), "the key records; found none"),
        (record(split_k=0), "'split_k' must be at least 1"),
    ],
    "checkpoint": [
        (at(SHARD, put(b"")), "0 bytes"),
        (at(SHARD, put(struct.pack("<Q", 1 << 62) + b"{}")), "a header of"),
        (at(SHARD, lambda path: os.truncate(path, path.stat().st_size - 1)), "cut short"),
        (listed({"l.weight": "../model.safetensors"}), "of this directory"),
        (listed({"l.weight": "/dev/zero.safetensors"}), "of this directory"),
        (listed({"l.weight": "a\0.safetensors"}), "of this directory"),
        (listed({"l.weight": "absent.safetensors"}), "No such file"),
        (listed({"x": SHARD}), "as the index says"),
        (listed([]), "weight_map"),
        (twice, "once"),
        (put("[1]", "config.json"), "a JSON object"),
        (directory, "config.json"),
        (put('{"quantization_config": [1]}', "config.json"), "a JSON object"),
        (config(weight_block_size="big"), "weight_block_size"),
        (link(SHARD), "Too many levels of symbolic links"),
    ],
    "recipe": [
        (swap("schema = 1", "schema 1"), "found no TOML: Expected '=' after a key"),
        (swap("schema = 1", "schema = 1\nschema = 1"), "found no TOML: Cannot overwrite a value"),
        (swap("schema = 1", f"schema = {'1' * 5000}"), "found no TOML: Exceeds the limit"),
        (swap("schema = 1", f"schema = {'[' * 5000}"), "found no TOML: maximum recursion"),
        (put(DELAYED.to_json()), "found no TOML: "),
        (swap("schema = 1", "schema = 2"), "schema 1, which this version of f8emu reads; found 2"),
        (swap("schema = 1", "schema = true"), "schema of type int; found True"),
        (swap('name = "delayed"', ""), "the key name; found none"),
        (swap("name =", 'nam = "x"\nname ='), "with no keys but name, output, "),
        (swap('"delayed"', "3"), "name of type str; found 3"),
        (swap("power_of_two", "power_of_2"), "scale_rule with no keys but"),
        (swap("1e-12", "true"), "scale_rule.amax_floor of type float; found True"),
        (swap("1e-12", "1"), "scale_rule: ScaleRule: amax_floor must be in [2^-110, 1)"),
        (
            swap('[delayed]\nhistory_length = 16\nreduction = "max"\nmargin = 0', "[[delayed]]\nmargin = 0"),
            "delayed of type object; found [{'margin': 0}]",
        ),
        (swap("16", "16.0"), "delayed.history_length of type int; found 16.0"),
        (swap("16", "0"), "delayed: DelayedScaling: history_length must be at least 1; got 0"),
        (swap('"max"', '"mean"'), "delayed.reduction to be one of max, most_recent; found 'm"),
        (swap('format = "float8_e4m3fn", ', ""), "the key output.a.format; found none"),
        (swap("float8_e4m3fn", "float8_e4m3"), "output.a.format: format_by_name: unknown format"),
        (swap("float8_e4m3fn", "float16"), "output.a: Cast: format must be the"),
        (swap('"tensorwise"', '"axiswise"'), "output.a.granularity to be one of"),
        (swap("float8_e4m3fn", "bfloat16"), "output.a to be bfloat16, without granularity and"),
        (swap("float8_e4m3fn", "float8_e5m2"), "Recipe 'delayed': input is cast to"),
    ],
    "recipe in JSON": [
        (put(""), "found no JSON: Expecting value"),
        (put("[]"), "a recipe of type object; found []"),
        (put('{"a": 1, "name": "x", "name": "y"}'), "expected the name 'name' once; found it twice"),
        (put("1" * 5000), "found no JSON: Exceeds the limit"),
        (put(DELAYED.to_toml()), "found no JSON: "),
        (swap("1e-12", "NaN"), "scale_rule: ScaleRule: amax_floor must be in"),
        (edit(lambda recipe: recipe.pop("grad_input")), "the key grad_input; found none"),
        (
            edit(lambda recipe: recipe["grad_input"]["b"].update(format="float8_e5m2")),
            "grad_input: Gemm: Hopper multiplies float8_e4m3fn x float8_e4m3fn, ",
        ),
    ],
    "shapes": [
        (put(NESTED), "found no JSON"),
        (put("{}"), "a list of objects; found dict"),
        (edit(lambda gemms: gemms.append(3)), "object 2 of type object; found 3"),
        (edit(lambda gemms: gemms[1].pop("n")), "the key object 1.n; found none"),
        (edit(lambda gemms: gemms[0].update(size=1)), "object 0 with no keys but m, n, "),
        (gemm(gemm="int8"), "object 0: gemm must be one of tensorwise, "),
        (gemm(gemm=["tensorwise"]), "object 0.gemm of type str"),
        (gemm(gemm="bfloat16"), "the key object 0.layout of a bfloat16 GEMM"),
        (gemm(accumulation=""), "object 0: accumulation of a tensorwise GEMM must be one of fast, promoted; got "),
        (gemm(layout="nt"), "object 0: layout of a tensorwise GEMM must be one of tn; got 'nt'"),
        (gemm(out_dtype="float64"), "object 0: out_dtype must be one of float32, bfloat16, float16"),
        (gemm(m=0), "object 0: m must be an integer of at least 1; got 0"),
        (gemm(k=8192.0), "object 0.k of type int; found 8192.0"),
        (gemm(k=True), "object 0.k of type int; found True"),
    ],
    "weights": [
        (put("[1]"), "object 0 of type object; found 1"),
        (put('[{"n": 8}]'), "the key object 0.k; found none"),
        (put('[{"n": 0, "k": 8}]'), "object 0.n to be an integer of at least 1"),
        (put('[{"n": true, "k": 8}]'), "object 0.n to be an integer of at least 1"),
    ],
    "plan": [
        (put(NESTED), "found no JSON"),
        (data(schema=1), "a plan file of schema 2; found 1"),
        (data(library=None), "library of type str; found None"),
        (data(recorded=[{"tables": ["a"], "rows": [[1, 2, 3]]}]), "a row with m, n, k"),
        (data(recorded=[{"tables": ["a"], "rows": [[1, 2, 3, -1]]}]), "a row with m, n, k"),
        *((data(features=["m", x]), "a feature") for x in ("M", [64], [64, "8"], [0, 8], [64, 8, "at best", 88], 7)),
        (data(features=["m"] * 129), "at most 128 features; found 129"),
        (data(rules={"a": {"tree": TREE}}), "the key rules.a.workspace_bytes; found none"),
        (data(rules={"a": {"workspace_bytes": 1}}), "the key rules.a.tree; found none"),
        (data(rules={"a": {"workspace_bytes": "1", "tree": TREE}}), "rules.a.workspace_bytes to"),
        *((data(slice_bytes=size), "slice_bytes to be an integer of at least 1") for size in (0, -1, "2560")),
        (tree(codes=coded(bytes([0, 129, 1, 130]))), "nodes that do not fit"),
        (tree(codes=coded(bytes([129, 0, 129, 1, 130]))), "nodes that do not fit"),
        (tree(codes=coded(bytes([0, 129, 2, 130, 131]))), "nodes that do not fit"),
        (tree(codes=coded(bytes([0, 129, 1, 130, 128]))), "nodes that do not fit"),
        (tree(codes=coded(b""), limits=coded(b"")), "nodes that do not fit"),
        (tree(limits=coded(bytes(5))), "nodes that do not fit"),
        (tree(codes=TREE["codes"][:-4]), "a tree"),
        (tree(codes=coded(bytes([0, 129]) * (1 << 22))), "or has more than"),
        (tree(codes=base64.b64encode(base64.b64decode(TREE["codes"]) + b"more").decode()), "one that does not end"),
        (tree(codes=f"{TREE['codes'][:6]}A{TREE['codes'][7:]}"), "a tree"),
        (tree(codes=f"?{TREE['codes']}"), "in base64 of zlib"),
        (data(rules={"a": {"workspace_bytes": 1, "tree": {"codes": ""}}}), "the key rules.a.tree.limits"),
    ],
    "log": [
        (put(""), "an empty file"),
        (put("hello\n"), "line 1: expected a JSON object; found no JSON"),
        (put('["x"]\n'), "a JSON object; found list"),
        (put('{"schema": 99}\n'), "a newer f8emu wrote it"),
        (put('{"step": 1}\n'), "a first line with the schema"),
        (put(HEAD + '{"step": 1}\n'), "line 2: expected a record with layer"),
        *(
            (put(f"{HEAD}{PLACE[:-2]}{x}}}\n"), "line 2: expected step to be an")
            for x in ("Infinity", "1e400", "9" * 30)
        ),
    ],
}
ROWS = [(reader, *fault) for reader, faults in FAULTS.items() for fault in faults]
IDS = [f"{i} {reader}: {message[:40]}" for i, (reader, _, message) in enumerate(ROWS)]


@pytest.mark.parametrize(("reader", "spoil", "message"), ROWS, ids=IDS)
def test_a_malformed_file_is_one_error(reader: str, spoil: Spoil, message: str, tmp_path: Path) -> None:
    make, read, error, says, command = READERS[reader]
    path = make(tmp_path)
    spoil(path)
    with pytest.raises(error) as caught:
        read(path)
    assert message in str(caught.value)
    assert says in str(caught.value) or "read it with the version that wrote it" in str(caught.value)
    if command:
        status, out, err = invoke(*command, path)
        assert status == 2 and not out and "Traceback" not in err


@pytest.mark.parametrize("reader", READERS)
def test_a_sound_file_is_read(reader: str, tmp_path: Path) -> None:
    make, read, *_ = READERS[reader]
    read(make(tmp_path))

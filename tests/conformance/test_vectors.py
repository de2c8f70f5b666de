"""Test vectors as files: a C program agrees with them and finds planted bugs, f8ref.exact gives sampled lines."""

import hashlib
import json
import re
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import f8ref.exact as exact
from f8emu.conformance.cases.container import read_container
from f8emu.conformance.vectors import folder
from f8emu.spec.chip import Chip
from f8emu.spec.chips import CHIPS
from f8emu.spec.formats import FLOAT32, Format, Overflow, format_by_name
from f8emu.spec.names import ChipName
from f8emu.spec.scaling import ScaleRule
from f8emu.split_k.gemm import GEMMS
from tests.conformance.command import ROOT, invoke, raising

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
READER = ROOT / "examples" / "check_vectors.c"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with more than a million casts, of no version of f8emu: its bytes outlive releases."""
    out = tmp_path_factory.mktemp("vectors") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "__version__", "0")
        status, text, errors = invoke("vectors", out, "--casts-per-pair", 110_000)
    assert status == 0, errors
    assert "casts-float32-float8_e4m3fn.txt: 123,312 cases, 246,624 outputs\n" in text
    return out


class File(NamedTuple):
    """A text file of vectors, as a reader has it."""

    header: dict[str, str]
    lines: list[dict[str, str]]
    """Each by its columns."""


def read(path: Path, every: int = 1) -> File:
    texts = path.read_text().splitlines()
    header = dict(text.removeprefix("# ").split(": ", 1) for text in texts if text.startswith("#"))
    columns = header["columns"].split()
    cases = texts[len(header) :][::every]
    return File(header, [dict(zip(columns, text.split(" "), strict=True)) for text in cases])


def compiled(source: str, folder: Path, *flags: str) -> Path:
    (folder / "reader.c").write_text(source)
    command = [str(COMPILER), "-std=c11", *flags, str(folder / "reader.c"), "-o", str(folder / "reader"), "-lm"]
    subprocess.run(command, check=True)
    return folder / "reader"


def checked(reader: Path, text: bytes) -> tuple[int, str]:
    process = subprocess.run([reader], input=text, capture_output=True, timeout=60)
    return process.returncode, process.stdout.decode()


# The reader in C


def test_the_reader_is_short() -> None:
    lines = READER.read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120


@needs_compiler
def test_the_reader_agrees_with_a_million_casts_and_thousands_of_outputs(written: Path, tmp_path: Path) -> None:
    reader = compiled(READER.read_text(), tmp_path, "-O2", "-Wall", "-Wextra", "-Werror")
    files = json.loads((written / "manifest.json").read_text())["files"]
    casts = sum(file["outputs"] for name, file in files.items() if file["kind"] == "cast" and "fnuz" not in name)
    gemms = [line for name in files if name.startswith("gemms-") for line in read(written / name).lines]
    known = [line for line in gemms if not ("CHIP" in line["rules"] or "EPI-5" in line["rules"])]
    outputs = sum(int(line["M"]) * int(line["N"]) for line in known)
    skipped = sum(file["cases"] for file in files.values()) - casts // 2 - len(known)
    assert casts >= 1_000_000 and outputs >= 1_000
    text = b"".join((written / name).read_bytes() for name in files)
    equal = f"equal: {casts} casts, {outputs} outputs of GEMMs; {skipped} lines need other rules\n"
    assert checked(reader, text) == (0, equal)
    for changed in ("casts-bfloat16-float8_e5m2", "gemms-rowwise"):  # a bit of the last result
        *lines, last = (written / f"{changed}.txt").read_text().splitlines()
        *words, result, rules = last.split(" ")
        words += [f"{int(result, 16) ^ 1:0{len(result)}x}", rules]
        text = "\n".join([*lines, " ".join(words), ""]).encode()
        assert checked(reader, text) == (1, f"line {len(lines) + 1}: another result\n")


@needs_compiler
def test_the_reader_fails_where_it_checked_nothing_or_a_line_is_malformed(written: Path, tmp_path: Path) -> None:
    reader = compiled(READER.read_text(), tmp_path, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover")
    texts = (written / "gemms-rowwise.txt").read_text().splitlines(keepends=True)
    comments = "".join(text for text in texts if text.startswith("#"))
    number = comments.count("\n") + 1
    line = texts[number - 1]
    columns = line.split(" ")
    assert checked(reader, (comments + line).encode())[0] == 0
    assert checked(reader, b"") == (1, "nothing was checked; 0 lines need other rules\n")
    status, text = checked(reader, (written / "decode.txt").read_bytes())
    assert status == 1 and text.startswith("nothing was checked; ")
    assert checked(reader, b"no vectors\n") == (1, "line 1: malformed\n")
    changes = {0: "0", 2: "99999", 3: "65", 7: "x", 12: columns[12][:-2], 13: "zz" + columns[13][2:], 18: "-"}
    changed = [" ".join([*columns[:i], word, *columns[i + 1 :]]) for i, word in changes.items()]
    for malformed in [line[:-1], line[:-9], line.partition(" ")[2], "\n", *changed]:
        assert checked(reader, (comments + malformed).encode()) == (1, f"line {number}: malformed\n"), malformed


# Rule and bug -> the file that shows it, and what stands in the place of a piece of the reader
BUGS = {
    "CAST-1 half rounds up": (
        "casts-float16-float8_e4m3fn",
        "twice_the_rest == unit && count % 2",
        "twice_the_rest == unit",
    ),
    "CAST-2 wraps": ("casts-float16-float8_e4m3fn", "saturates ? f->largest :", "saturates > 1 ? f->largest :"),
    "CAST-4 NaN has a sign": (
        "casts-float16-float8_e5m2",
        "return f->sign - 1;",
        "return f->sign - 1 + (x.code >> 31) * f->sign;",
    ),
    "OP-1 subnormals have a hidden bit": ("gemms-tensorwise", "(raw ? (raw - 1) <<", "(raw + 1 ? (raw - 1) <<"),
    "ACC-1 steps of 64": (
        "gemms-whole",
        "end = first + size[STEP] < size[K] ? first +",
        "end = first + 2 * size[STEP] < size[K] ? first + 2 *",
    ),
    "ACC-2 the accumulator takes no part": (
        "gemms-instructions",
        "largest = accumulator == 0 ?",
        "largest = accumulator < 9e9 ?",
    ),
    "ACC-3 one bit more": ("gemms-tensorwise", "int aligned = size[ALIGNED]", "int aligned = size[ALIGNED] + 1"),
    "ACC-3 toward minus infinity": ("gemms-rowwise", "sum += trunc(", "sum += floor("),
    "ACC-5 15 bits for 14": ("gemms-tensorwise", "-126) - size[RESULT]", "-126) - size[RESULT] - 1"),
    "CHAIN-2 never promoted": ("gemms-tensorwise", "if (promotes || ends_slice)", "if ((promotes && 0) || ends_slice)"),
    "CHAIN-3 not split": ("gemms-whole", "end == size[K] || end % size[SLICE] == 0", "end == size[K]"),
    "EPI-1 -0": ("gemms-tensorwise", ", total += 0;", ";"),
    "EPI-2 the row first": ("gemms-rowwise", "total = total * b * a", "total = total * a * b"),
    "EPI-3 the bias of the first column": ("gemms-whole", "(field[BIAS], float32, n)", "(field[BIAS], float32, 0)"),
    "EPI-6 the column first": ("gemms-grouped", "total = total * a * b", "total = total * b * a"),
    "SPEC-1 infinities are numbers": ("gemms-rowwise", "? NAN : INFINITY", "? NAN : 1e9"),
}


@needs_compiler
def test_the_reader_finds_planted_bugs(written: Path, tmp_path: Path) -> None:
    source = READER.read_text()

    def status_with(bug: str) -> int:
        file, before, after = BUGS[bug]
        assert source.count(before) == 1, bug
        place = tmp_path / bug.replace(" ", "-")
        place.mkdir()
        return checked(compiled(source.replace(before, after), place, "-O1"), (written / f"{file}.txt").read_bytes())[0]

    with ThreadPoolExecutor(2) as pool:
        missed = [bug for bug, status in zip(BUGS, pool.map(status_with, BUGS), strict=True) if status != 1]
    assert missed == []


# The definition


def results_of(file: File, line: dict[str, str]) -> tuple[dict[str, int], str]:
    """The results of a line of casts or scales by f8ref.exact, and the rules that it needs."""
    if file.header["kind"] == "decode":
        number = exact.decode(int(line["code"], 16), format_by_name(line["format"]))
        is_special = number.is_nan or number.is_infinite
        return {"value": exact.encode(number, FLOAT32)}, "SPEC-1" if is_special else "OP-1"
    if file.header["kind"] == "cast":
        (source, target), code = map(format_by_name, file.header["cast"].split(" to ")), int(line["input"], 16)
        codes = {policy.value: exact.cast(code, source, target, policy) for policy in Overflow}
        rules = "CAST-1,CAST-2,CAST-3" if codes["saturate"] != codes["nonfinite"] else "CAST-1"
        return codes, "CAST-4" if exact.decode(code, source).is_nan else rules
    (floor,) = struct.unpack(">d", bytes.fromhex(line["amax_floor"]))
    rule, target = ScaleRule(power_of_two=line["power_of_two"] == "1", amax_floor=floor), format_by_name(line["format"])
    assert int(line["max"], 16) == exact.encode(exact.decode(target.max_code, target), FLOAT32)
    code = int(line["amax"], 16)
    amax, rules = exact.decode(code, FLOAT32), ["SCALE-1", *(["SCALE-2"] if rule.power_of_two else [])]
    rules += ["SCALE-3"] if amax.is_nan or amax.is_infinite or amax.magnitude < floor else []
    return exact.scale_from_amax(code, target, rule, margin=int(line["margin"]))._asdict(), ",".join(rules)


def output_of(line: dict[str, str], m: int, n: int, chip: Chip) -> int:
    """An output of a GEMM by f8ref.exact."""
    k, (fa, fb, out) = int(line["K"]), (format_by_name(line[f"{name}_format"]) for name in ("a", "b", "out"))
    a, b = words(line["a"], fa)[m * k :][:k], words(line["b"], fb)[n * k :][:k]
    slices = -(-k // int(line["slice_k"]))
    if line["c"] != "-":
        return exact.mma(a, b, int(line["c"], 16), a_format=fa, b_format=fb, out_format=out, chip=chip)
    if line["scaling"] == "none":
        return exact.mm_dot(a, b, out_format=out, split_k=slices, chip=chip)
    is_grouped = line["scaling"] == "grouped"
    pair = GEMMS["rowwise" if is_grouped else line["scaling"]]
    assert pair is not None
    scales: list[list[int]] = []
    for granularity, row, side in zip(pair, (m, n), "ab", strict=True):
        first, (_, length) = row // (granularity.block[0] or row + 1), granularity.scale_shape(1, k)
        scales.append(words(line[f"scale_{side}"], FLOAT32)[first * length :][:length])
    is_fast = not pair[0].is_blockwise and int(line["promote_k"]) == (chip.float8_fast.promote_k or 0)
    return exact.scaled_dot(
        a,
        b,
        a_format=fa,
        b_format=fb,
        scale_a=scales[0],
        scale_b=scales[1],
        granularity_a=pair[0],
        granularity_b=pair[1],
        bias=None if line["bias"] == "-" else words(line["bias"], FLOAT32)[n],
        out_format=out,
        use_fast_accum=is_fast,
        split_k=slices,
        is_grouped=is_grouped,
        chip=chip,
    )


def words(text: str, format: Format) -> list[int]:
    digits = format.bits // 4
    return [int(text[i : i + digits], 16) for i in range(0, len(text), digits)]


def test_the_definition_gives_sampled_casts_and_scales(written: Path) -> None:
    for path in sorted(written.glob("*.txt")):
        if not path.name.startswith("gemms-"):
            file = read(path, every=1 if path.name == "decode.txt" else -331)  # the last is NaN
            for line in file.lines:
                results, rules = results_of(file, line)
                assert {name: int(line[name], 16) for name in results} == results and line["rules"] == rules, line


# Chip -> the rules of its own for float8 GEMMs, for bfloat16 ones, and for instructions with a float16 accumulator
OWN_RULES = {
    "Hopper": ("", "BF16-1", "CHIP-1 CHIP-2 CHIP-3 CHIP-4"),
    "H100": ("", "BF16-1", "CHIP-1 CHIP-2 CHIP-3 CHIP-4"),
    "Ada": ("", "CHIP-5", "CHIP-4"),
    "Blackwell mma.sync": ("CHIP-1 CHIP-2 CHIP-3", "BF16-1", "CHIP-1 CHIP-2 CHIP-3 CHIP-4"),
    **dict.fromkeys(("Blackwell tcgen05", "RTX Blackwell"), ("CHIP-7", "BF16-1", "CHIP-4 CHIP-7")),
    "CDNA3": ("CHIP-6", "CHIP-6", "CHIP-6"),
}
STEP = {"OP-1", "OP-2", "ACC-1", "ACC-2", "ACC-3", "ACC-4", "ACC-5"}
EPILOGUES = {"tensorwise": "EPI-1", "rowwise": "EPI-2", "grouped": "EPI-6", "blockwise": "EPI-5"}


def rules_of(line: dict[str, str], chip: str) -> set[str]:
    """The rules of a GEMM, from its other columns."""
    a, b = (format_by_name(line[f"{side}_format"]) for side in "ab")
    is_half = line["c"] != "-" and line["out_format"] == "float16"
    rules = set(OWN_RULES[chip][1 if a.bits == 16 else 2 if is_half else 0].split())
    replaced = {"CHIP-4": {"ACC-5"}, "CHIP-6": STEP - {"OP-1", "OP-2", "ACC-1"}}
    rules |= STEP - set[str]().union(*(replaced.get(rule, set()) for rule in rules))
    rules |= {"CHAIN-1"} if line["promote_k"] == "0" else set() if "CHIP-3" in rules else {"CHAIN-2"}
    if int(line["slice_k"]) < int(line["K"]):
        rules |= {"BF16-2" if a.bits == 16 else "CHAIN-3"}
    if line["c"] == "-":
        rules |= {"EPI-4"} | ({"EPI-3"} if line["bias"] != "-" else set())
        rules |= {EPILOGUES[kind] for kind in EPILOGUES if line["scaling"].startswith(kind)}
    operands = [
        exact.decode(code, format)
        for side, format in zip("ab", (a, b), strict=True)
        for code in words(line[side], format)
    ]
    return rules | ({"SPEC-1"} if any(x.is_nan or x.is_infinite for x in operands) else set())


@pytest.mark.parametrize("name", CHIPS)
def test_the_definition_gives_the_gemms_of_every_chip(name: ChipName, tmp_path: Path) -> None:
    status, _, errors = invoke("vectors", tmp_path / "out", "--gemms", "--gemms-per-kind", 6, "--chip", name)
    assert status == 0, errors
    for path in (tmp_path / "out").glob("*.txt"):
        for number, line in enumerate(read(path, every=9).lines):
            m, n = (number * 7 % int(line[size]) for size in "MN")
            expected = words(line["expected"], format_by_name(line["out_format"]))
            assert expected[m * int(line["N"]) + n] == output_of(line, m, n, CHIPS[name]), line
            assert set(line["rules"].split(",")) == rules_of(line, name), line


# Files


def test_tensors_hold_the_same_cases(written: Path) -> None:
    for name in ("decode", "gemms-whole", "gemms-blockwise"):
        tensors, metadata, _ = read_container(written / f"{name}.safetensors", "test")
        file, rules = read(written / f"{name}.txt"), json.loads(metadata["rules by index"])
        assert file.header.items() <= metadata.items()
        lines: list[dict[str, str]] = []
        for number, parameters in enumerate(json.loads(metadata["parameters of batches"])):
            for case, rule in enumerate(tensors[f"{number}.rules"].tolist()):
                line = {column: str(parameters.get(column, "-")) for column in file.lines[0]} | {"rules": rules[rule]}
                of_batch = (key for key in tensors if key.startswith(f"{number}.") and not key.endswith(".rules"))
                for key in of_batch:
                    array = tensors[key][case : case + 1]
                    line[key.partition(".")[2]] = array.astype(array.dtype.newbyteorder(">")).tobytes().hex()
                lines.append(line)
        assert lines == file.lines


def test_the_manifest_and_the_headers_say_what_there_is(written: Path) -> None:
    manifest = json.loads((written / "manifest.json").read_text())
    ids = set(re.findall(r"^\[([A-Z0-9]+-\d+)\]", (ROOT / "reference" / "NUMERICS.md").read_text(), re.MULTILINE))
    assert manifest["command"][:5] == ["f8emu", "vectors", "OUT", "--chip", "H100"]
    assert {path.name for path in written.glob("*.txt")} == manifest["files"].keys()
    for name, described in manifest["files"].items():
        header, text = read(written / name, every=1 << 20).header, (written / name).read_text()
        assert described["cases"] == text.count("\n") - len(header) == int(header["cases"])
        assert header["columns"].split() == described["columns"] and header["rules"].split() == described["rules"]
        assert header["outputs"] == str(described["outputs"]) and set(described["rules"]) <= ids
        assert {"chip": "H100", "seed": "0", "f8emu": "0", "evidence": "recorded"}.items() <= header.items()
        if not name.startswith("casts-"):
            used = set(re.findall(r" (\S+)$", "\n".join(text.splitlines()[len(header) :]), re.MULTILINE))
            assert {rule for rules in used for rule in rules.split(",")} == set(described["rules"])


def test_the_sums_are_those_that_sha256sum_takes(written: Path) -> None:
    sums = dict(line.split("  ")[::-1] for line in (written / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path.read_bytes() for path in written.iterdir() if path.name != "SHA256SUMS"}
    assert sums == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    if program := shutil.which("sha256sum"):
        subprocess.run([program, "-c", "--quiet", "SHA256SUMS"], cwd=written, check=True)


def test_the_bytes_are_the_same_on_every_machine(written: Path) -> None:
    digest = hashlib.sha256((written / "SHA256SUMS").read_bytes()).hexdigest()
    assert digest == "9a857624ee28042b64b680a4452c74f2665dfdee15fc52ab923166fd16340a8d"


def test_another_seed_draws_other_inputs(written: Path, tmp_path: Path) -> None:
    status, _, errors = invoke("vectors", tmp_path / "out", "--seed", 1, "--gemm-set", "rowwise")
    assert status == 0, errors
    first, other = (read(path / "gemms-rowwise.txt").lines for path in (written, tmp_path / "out"))
    shared = {line["a"] for line in first} & {line["a"] for line in other}
    assert len(first) == len(other) and all(set(a) <= {"0", "8"} for a in shared)  # rows of zeros


# The command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chip", "H300"), "vectors: chip must be one of 'Hopper', 'H100'"),
        (("--chip", "Ada", "--gemm-set", "blockwise"), "vectors: Ada has no rules for blockwise; leave it out, or"),
        (("--gemm-set", "rows"), "vectors: --gemm-set must be one of tensorwise, rowwise, grouped, blockwise,"),
    ],
)
def test_what_is_refused_is_named(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    status, _, errors = invoke("vectors", tmp_path / "out", *options)
    assert status == 2 and errors.startswith(message), errors
    assert not (tmp_path / "out").exists()


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    status, _, errors = invoke("vectors", tmp_path / "there", "--scales")
    assert status == 2 and errors.startswith("vectors: OUT must not exist; got ")
    (tmp_path / "file").touch()
    status, _, errors = invoke("vectors", tmp_path / "file" / "out", "--scales")
    assert status == 2 and "give a path in a directory that exists" in errors
    monkeypatch.setattr(folder.GemmVectors, "table", raising(KeyboardInterrupt()))
    for out in (tmp_path / "out", tmp_path / "no" / "out"):
        status, _, _ = invoke("vectors", out, "--scales", "--gemms")
        assert status == 130
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file"}


def test_one_kind_is_written_alone(tmp_path: Path) -> None:
    status, text, errors = invoke("vectors", tmp_path / "out", "--gemm-set", "bfloat16")
    assert status == 0, errors
    assert {path.name for path in (tmp_path / "out").glob("*.txt")} == {"gemms-bfloat16.txt"}
    assert "gemms-bfloat16.txt: 96 cases, 96 outputs\n" in text

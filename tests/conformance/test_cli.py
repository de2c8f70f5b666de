"""The command line: exit codes, messages, JSON, and what it loads."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import f8emu
from f8emu.conformance import read_golden
from f8emu.conformance.run import stages, subject
from f8emu.conformance.run.subject import load_subject
from f8emu.report import page as page_model
from f8emu.report import terminal, verify
from f8emu.spec import NAMED_RECIPES, RECIPES, recipe_by_name, recipe_from_json, recipe_from_toml
from tests.conformance.command import few_recorded, invoke, python, raising

MAIN = "\nfrom f8emu.cli import main; main()"
ORACLE = load_subject("f8ref.numpy")


def plant(monkeypatch: pytest.MonkeyPatch, scaled_mm: Any) -> None:
    """The oracle with another GEMM, as the subject `planted`."""
    planted = replace(ORACLE, name="planted", verbs={**ORACLE.verbs, "scaled_mm": scaled_mm})
    monkeypatch.setitem(subject.SUBJECTS, "planted", lambda: planted)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "few.safetensors"
    few_recorded(path, 0, 8, 40, 140)
    return path


def test_verify_with_json(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/f8emu", "verify", "f8ref.numpy"])
    out_path = tmp_path / "report.json"
    status, out, _ = invoke("verify", "f8ref.numpy", "--golden", str(few), "--stage", "golden", "--json", str(out_path))
    assert status == 0, out
    assert "f8ref.numpy, numpy" in out and "4/4" in out and "recorded on NVIDIA H200" in out
    assert out.splitlines()[0].startswith("equal: every bit of ") and "To run one case" not in out

    report = json.loads(out_path.read_text())
    outputs = sum(case.out.size for case in read_golden(few).cases)
    assert set(report) == (
        {"schema", "equal", "interrupted", "not_run", "command", "seconds", "versions", "devices", "golden", "subjects"}
    )
    assert report["equal"] is True and report["interrupted"] is False and report["not_run"] == {}
    assert report["command"] == ["f8emu", "verify", "f8ref.numpy"]
    assert set(report["versions"]) == {"f8emu", "python", "numpy", "ml_dtypes", "jax", "jaxlib", "torch", "driver"}
    assert report["versions"]["numpy"] == np.__version__
    assert report["golden"]["file"] == "few.safetensors"
    assert report["golden"]["sha256"] == read_golden(few).sha256
    assert report["golden"]["metadata"]["device"] == "NVIDIA H200"
    (judged,) = report["subjects"]
    assert (judged["name"], judged["equal"]) == ("f8ref.numpy", True)
    (stage,) = judged["stages"]
    assert stage["stage"] == "golden" and stage["status"] == "equal" and stage["mismatches"] == []
    totals = ("cases_total", "cases_equal", "cases_not_offered", "outputs_total", "outputs_equal")
    assert [stage[key] for key in totals] == [4, 4, 0, outputs, outputs]
    assert stage["seconds"] > 0


def test_mismatches_in_lines_and_json(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one_bit(*args: Any, **options: Any) -> np.ndarray:
        out = ORACLE.verbs["scaled_mm"](*args, **options).copy()
        out.view(f"u{out.dtype.itemsize}")[3, 5:9] ^= 1
        return out

    plant(monkeypatch, off_by_one_bit)
    report = tmp_path / "report.json"
    arguments = ("verify", "planted", "--golden", str(few), "--stage", "golden", "--no-diagnose", "--json", str(report))
    status, out, _ = invoke(*arguments)
    lines = [line for line in out.splitlines() if "  expected: " in line]
    assert status == 1
    assert len(lines) == 4, "one of each case"
    assert all(line.endswith("; 4 of 6,144 differ") for line in lines[:3])
    assert lines[0].startswith(
        "000 tensorwise-normal float8_e4m3fn x float8_e4m3fn 64x96x512 -> bfloat16 fast [3, 5] a[3]=<"
    )
    assert " b[5]=<" in lines[0] and "scale_a=0x" in lines[0] and " => 0x" in lines[0]
    assert out.splitlines()[0].startswith("NOT EQUAL: planted (golden)")
    stage = json.loads(report.read_text())["subjects"][0]["stages"][0]
    assert (stage["status"], stage["cases_equal"]) == ("different", 0)
    assert stage["outputs_total"] - stage["outputs_equal"] == 16
    assert stage["mismatches"][0]["index"] == [3, 5]

    status, out, _ = invoke(*arguments, "--errors", "2")
    assert status == 1 and sum("  expected: " in line for line in out.splitlines()) == 2
    status, out, _ = invoke(*arguments, "--errors", "0")
    assert status == 1 and "expected:" not in out and "0/4" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "f8ref.nump"), "unknown subject 'f8ref.nump'; known subjects are f8ref.numpy, f8ref.jax, f8emu"),
        (("verify", "--stage", "goldn"), "unknown stage 'goldn'; known stages are formats"),
        (("verify", "--golden", __file__), "cut short, or foreign"),
        (("verify", "f8ref.numpy", "--html", "/no/such/place/out.html"), "cannot write /no/such/place/out.html"),
        (("verify", "no.such.module:f"), "No module named 'no'"),
        (("verify", "--arrays", "cupy"), "cupy"),
        (("verify", "--errors", "-1"), "--errors"),
        (("verify", "f8ref.numpy", "--timeout", "5"), "'f8ref.numpy' is not one; leave out --timeout"),
        (("fit", "f8ref.numpy", "--timeout", "5"), "'f8ref.numpy' is not one; leave out --timeout"),
        (("recipes", "nosuch"), "unknown recipe 'nosuch'; known recipes: tensorwise, rowwise"),
        (("recipes", "--toml", "--json"), "exclude each other"),
        (("nosuch",), "nosuch"),
    ],
)
def test_bad_usage_is_a_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    status, out, err = invoke(*arguments)
    assert status == 2
    assert message in err and "Traceback" not in err
    assert out == ""


def test_version_and_recipes() -> None:
    assert invoke("--version") == (0, f"f8emu {f8emu.__version__}\n", "")
    status, out, _ = invoke("recipes")
    assert status == 0
    assert all(recipe.name in out for recipe in RECIPES.values()) and "all_axiswise" in out
    assert [recipe["name"] for recipe in json.loads(invoke("recipes", "--json")[1])] == [*NAMED_RECIPES]
    assert invoke("recipes", "rowwise") == (0, recipe_by_name("rowwise").explain() + "\n", "")
    with pytest.warns(DeprecationWarning, match="write 'rowwise'"):
        assert invoke("recipes", "all_axiswise")[1] == invoke("recipes", "rowwise")[1]
    for name, recipe in NAMED_RECIPES.items():  # the text is what f8emu reads
        assert recipe_from_toml(invoke("recipes", name, "--toml")[1]) == recipe
        assert recipe_from_json(invoke("recipes", name, "--json")[1]) == recipe


@pytest.mark.parametrize(
    ("module", "packages"),
    [("f8emu.cli", "torch jax numpy typer rich"), ("f8emu.conformance", "torch jax typer rich")],
)
def test_importing_loads_nothing_heavy(module: str, packages: str) -> None:
    code = f"\nimport {module}; print([p for p in {packages.split()!r} if p in sys.modules])"
    assert python(code).stdout == "[]\n"


def test_what_the_base_installation_holds_is_enough(few: Path) -> None:
    """Without torch, JAX and safetensors: commands that need one say so in a line, the others run.

    The recorded GEMMs need no second implementation; a layer's is the engine.
    """
    blocked = ("torch", "jax", "safetensors")
    stages = ("--golden", str(few), "--stage", "scales", "--stage", "golden", "--stage", "layers")
    for words in (("--version",), ("--help",), ("recipes",), ("verify", "f8ref.numpy", *stages)):
        result = python(MAIN, *words, blocked=blocked)
        assert result.returncode == 0, words
    assert "4/4" in result.stdout and "46/46" in result.stdout and "not offered" not in result.stdout
    needing = {
        ("record", "/tmp/never.st"): "torch",
        ("fit", "torch"): "torch",
        ("verify", "f8emu.jax"): "jax",
    }
    for words, extra in needing.items():
        result = python(MAIN, *words, blocked=blocked)
        assert result.returncode == 2 and result.stderr.strip().endswith(f"pip install 'f8emu[{extra}]'")
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("package", ["jax", "torch"])
def test_without_a_framework_what_can_run_does(package: str, few: Path, tmp_path: Path) -> None:
    """Without torch the others run; without JAX f8ref.numpy and torch, on the engine."""
    report = tmp_path / "report.json"
    arguments = ("verify", "--golden", str(few), "--stage", "golden", "--json", str(report))
    result = python(MAIN, *arguments, blocked=(package,))
    missing = {"jax": "f8ref.jax", "torch": "torch"}[package]
    # f8ref.jax emulates on GPUs.
    all_missing = {"jax": ["f8ref.jax", "f8emu.jax"], "torch": ["f8ref.jax", "torch"]}[package]
    reason = f"f8emu verify {missing} needs the package '{package}', which is not installed"
    assert f"not run: {reason}" in result.stdout and f"pip install 'f8emu[{package}]'" in result.stdout
    assert "Traceback" not in result.stderr
    data = json.loads(report.read_text())
    statuses = {subject["name"]: subject["stages"][0]["status"] for subject in data["subjects"]}
    assert sorted(data["not_run"]) == sorted(all_missing) and data["not_run"][missing].startswith(reason)
    assert result.returncode == 0 and statuses == dict.fromkeys(set(subject.SUBJECTS) - set(all_missing), "equal")
    named = python(MAIN, "verify", missing, blocked=(package,))
    assert named.returncode == 2 and reason in named.stderr, "one that was asked for must be there"


def test_the_report_is_opened_before_any_work(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it held stays until there is something to write."""
    loaded: list[str] = []
    monkeypatch.setattr(subject, "load_subject", lambda name, **options: loaded.append(name))
    for path in (tmp_path / "no" / "out.json", tmp_path):
        assert invoke("verify", "f8ref.numpy", "--json", str(path))[0] == 2
    assert loaded == []
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    assert invoke("verify", "--golden", "/no/such/file", "--json", str(kept))[0] == 2
    assert kept.read_text() == "before"


def test_interrupted_runs_keep_their_finished_stages(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = raising(KeyboardInterrupt())
    plant(monkeypatch, interrupted)
    monkeypatch.setattr(stages, "CASTS", stages.CASTS[:1])
    report = tmp_path / "report.json"
    arguments = ("verify", "planted", "f8ref.numpy", "--golden", str(few), "--stage", "formats", "--stage", "golden")
    status, out, _ = invoke(*arguments, "--json", str(report))
    assert status == 130
    assert "formats and casts" in out and "recorded GEMMs" not in out
    assert out.splitlines()[0].startswith("INTERRUPTED: equal so far")
    data = json.loads(report.read_text())
    assert data["interrupted"] and not data["equal"]
    assert [(s["name"], [(t["stage"], t["status"]) for t in s["stages"]]) for s in data["subjects"]] == [
        ("planted", [("formats", "equal")])
    ]
    with monkeypatch.context() as patched:
        patched.setitem(subject.SUBJECTS, "planted", interrupted)
        assert invoke("verify", "planted") == (130, "", "interrupted\n")
    status, out, _ = invoke("verify", "planted", "--golden", str(few), "--stage", "golden")
    assert status == 130 and out.startswith("INTERRUPTED, nothing was compared; ") and "equal so far" not in out


def test_a_failure_of_f8emu_is_no_difference(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = raising(AssertionError("an invariant"))
    monkeypatch.setitem(subject.SUBJECTS, "planted", fails)
    status, _, err = invoke("verify", "planted")
    assert status == 2 and "AssertionError: an invariant" in err
    # of tables, JSON and page one that fails loses no other
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    monkeypatch.setattr(page_model, "render", lambda command, page: "the page")
    words = ("verify", "f8ref.numpy", "--golden", str(few), "--stage", "golden")
    for module, name in ((page_model, "render"), (terminal, "parts"), (verify, "to_json")):
        report.write_text("before")
        page.write_text("before")
        with monkeypatch.context() as patched:
            patched.setattr(module, name, fails)
            status, out, err = invoke(*words, "--json", str(report), "--html", str(page))
        assert status == 2 and "AssertionError: an invariant" in err
        assert "equal: every bit" in out
        assert report.read_text().startswith("before" if name == "to_json" else "{")
        assert page.read_text() == ("before" if name == "render" else "the page")
    for command in ((), ("verify",)):
        words = " ".join(invoke(*command, "--help")[1].split())
        assert "0 all equal" in words and "1 a " in words and "130 interrupted" in words


SHAPES = [
    {"m": 8, "n": 512, "k": 8192, "gemm": "tensorwise", "accumulation": "fast", "layout": "", "out_dtype": "float32"},
    {"m": 8, "n": 512, "k": 8256, "gemm": "bfloat16", "accumulation": "", "layout": "nn", "out_dtype": "bfloat16"},
    {"m": 12, "n": 512, "k": 8192, "gemm": "bfloat16", "layout": "nt", "out_dtype": "bfloat16"},
]


def test_plan_writes_the_objects_with_their_splits(tmp_path: Path) -> None:
    shapes, out, own = tmp_path / "in.json", tmp_path / "out.json", tmp_path / "own.json"
    shapes.write_text(json.dumps(SHAPES))
    status, text, error = invoke("plan", "--shapes", str(shapes), "--json", str(out))
    assert (status, error) == (0, "") and text.startswith("split-K of cuBLAS 13.1.0.3 on NVIDIA H200\n")
    splits = json.loads(out.read_text())
    assert [(x["split_k"], x["source"]) for x in splits] == [(3, "recorded"), (6, "predicted"), (1, "unknown")]
    assert [{key: x[key] for key in shape} for x, shape in zip(splits, SHAPES, strict=True)] == SHAPES
    alone = python(MAIN, "plan", "--shapes", str(shapes), blocked=("jax", "torch", "numpy", "ml_dtypes"))
    assert alone.returncode == 0 and "predicted" in alone.stdout, alone.stderr
    of_ada = invoke("plan", "--shapes", shapes, "--chip", "ada")
    assert of_ada == (2, "", "plan: no split-K plan of Ada was recorded; pass --chip Hopper or --chip H100\n")
    status, table, _ = invoke("plan", "--shapes", str(shapes))
    assert status == 0 and all(word in table for word in ("recorded", "predicted", "unknown", "NVIDIA H200", "8256"))
    head = {"schema": 2, "library": "cuBLAS 13.1.0.3", "chip": "NVIDIA H200"}
    own.write_text(json.dumps({**head, "recorded": [{"tables": ["bfloat16 nn"], "rows": [[8, 512, 8256, 5]]}]}))
    assert invoke("plan", "--shapes", str(shapes), "--plan", str(own), "--json", str(out))[0] == 0
    splits = json.loads(out.read_text())
    assert [(x["split_k"], x["source"]) for x in splits] == [(3, "recorded"), (5, "recorded"), (1, "unknown")]


def test_plan_and_record_plans_tell_bad_input(tmp_path: Path) -> None:
    shapes, out = tmp_path / "in.json", tmp_path / "out.json"
    out.write_text("kept")
    for text, message in (
        (json.dumps([*SHAPES, {**SHAPES[0], "out_dtype": "int8"}]), "object 3: out_dtype must be one of float32"),
        ("[" * 100_000, "found no JSON"),
    ):
        shapes.write_text(text)
        for command in (("plan", "--shapes", shapes, "--json", out), ("record", "x", "--plans", shapes)):
            status, printed, error = invoke(*command)
            assert (status, printed) == (2, "") and message in error and str(shapes) in error
    assert out.read_text() == "kept"
    # the output is opened first: its error comes before that of the input, which is not there
    status, _, error = invoke("plan", "--shapes", "missing.json", "--json", str(tmp_path / "no" / "out.json"))
    assert status == 2 and "cannot write" in error
    assert "cannot read missing.json" in invoke("plan", "--shapes", "missing.json")[2]
    message = "--seed, --only and --check go with a golden file"
    assert message in invoke("record", "x", "--plans", "y", "--check")[2]
    message = f"f8emu record: --verify is called --check\nrecord: {message}"
    assert message in invoke("record", "x", "--plans", "y", "--verify")[2]


@pytest.mark.parametrize("place", ["pipe", "/dev/zero", "folder", "huge"])
def test_what_is_no_file_is_refused_at_once(place: str, tmp_path: Path) -> None:
    """Nobody waits for a pipe, and no memory is filled."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)  # sparse: no disk is filled
    path = tmp_path / place
    commands = [("verify", "--golden"), ("verify", "--recordings"), ("plan", "--shapes"), ("inspect",)]
    commands += [("record", "x", "--plans"), ("diff", str(path)), ("replay",)]
    for command in commands:
        status, out, error = invoke(*command, str(path))
        assert (status, out) == (2, "") and str(path) in error and "Traceback" not in error, command

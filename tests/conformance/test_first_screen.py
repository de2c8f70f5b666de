"""What a kernel's author sees: names of files, the order and width of a report, one case again, a program of it."""

import contextlib
import io
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import f8ref.numpy as f8
from f8emu.conformance import load_subject, shipped_golden, write_golden
from f8emu.conformance.arrays import torch_arrays
from f8emu.conformance.cases.gemm import Mode
from f8emu.conformance.cases.tables import gemm_cases
from f8emu.conformance.run.check import run_case
from f8emu.conformance.run.stages import STAGES
from f8emu.spec import Granularity
from tests.conformance.command import ENVIRONMENT, few_recorded, invoke, stages_in

KERNELS = """
import numpy as np
from f8emu.conformance import Accumulation, Arg, K_BY_ROWS, Kernel, TENSORWISE_SCALARS

def float32(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    out = (a.astype(np.float32) @ b.astype(np.float32)) * scale_b * scale_a
    return (out if bias is None else out + bias.astype(np.float32)).astype(out_dtype)

class OddError(ValueError):
    def __str__(self):
        raise RuntimeError

CALLS = []

def raises_oddly(*args, **options):
    raise OddError

def raises_oddly_later(*args, **options):
    CALLS.append(0)
    if len(CALLS) > 1:
        raise OddError
    return float32(*args, **options)

DECLARED = Kernel(name="another name", function=float32, scales=TENSORWISE_SCALARS, b=K_BY_ROWS, arrays="numpy",
                  accumulation=Accumulation.FAST,
                  arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B),
                  keywords={"bias": None, "out_dtype": Arg.OUT_DTYPE, "use_fast_accum": False})

class Group:
    @staticmethod
    def inner(*args, **options):
        return float32(*args, **options)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file of kernels that is called as a module that is there already, and a few recorded GEMMs."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "numpy.py").write_text(KERNELS)
    (tmp_path / "deep" / "leaves_on_import.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "deep" / "broken.py").write_text("import helper\nraise KeyError('x')\n")
    (tmp_path / "deep" / "helper.py").write_text("")
    (tmp_path / "my_kernel.py").write_text(KERNELS)
    few_recorded(tmp_path / "few", 0, 8, 40, 68)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return tmp_path


FEW = ("--arrays", "numpy", "--stage", "golden", "--golden", "few", "--no-diagnose")


# Names


@pytest.mark.parametrize(
    "name",
    ["deep/numpy.py:float32", "./deep/numpy.py:Group.inner", "{folder}/deep/numpy.py:float32", "my_kernel:float32"],
)
def test_a_kernel_in_a_file(name: str, folder: Path) -> None:
    """By its path, or as a module of the current directory."""
    name = name.format(folder=folder)
    for here in ((), ("--here",)) if name.startswith("deep") else ((),):
        status, out, error = invoke("verify", name, *FEW, *here)
        assert status == 1 and out.startswith(f"NOT EQUAL: {name} (golden)"), error
    assert np.__file__ != str(folder / "deep" / "numpy.py")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep/numpi.py:float32", "there is no file deep/numpi.py (did you mean deep/numpy.py?); there: deep/"),
        ("deep/numpy.py:float23", "no attribute 'float23' (did you mean float32?); there: "),
        ("deep/zzzzzz.py:f", "there is no file deep/zzzzzz.py; there: deep/broken.py, "),
        ("deep/numpy.py:", "no attribute ''"),
        ("deep/numpy.py", "which function of deep/numpy.py? Name it: deep/numpy.py:FUNCTION"),
        ("deep:float32", "deep has no attribute 'float32'"),
        ("deep/numpy.py:CALLS", "deep/numpy.py:CALLS is not callable"),
        (":f", "expected package.module:function"),
        ("my_kernal:f", "No module named 'my_kernal' (did you mean my_kernel?)"),
        (
            "deep/leaves_on_import.py:f",
            "the import of deep/leaves_on_import.py raised SystemExit(0), which ends a process; put what a script",
        ),
        ("deep/broken.py:f", "its import raised KeyError: 'x' ("),
    ],
)
@pytest.mark.parametrize("command", ["verify", "fit"])
def test_names_that_lead_nowhere(command: str, name: str, text: str, folder: Path) -> None:
    status, out, error = invoke(command, name, "--arrays", "numpy")
    assert (status, out) == (2, "") and text in error and len(error.splitlines()) == 1, error


def test_an_error_without_a_text_is_told_by_its_type(folder: Path) -> None:
    status, out, error = invoke("verify", "deep/numpy.py:raises_oddly", *FEW)
    assert status == 2 and "failed, the first: OddError" in error, out + error
    status, out, error = invoke("verify", "deep/numpy.py:raises_oddly_later", *FEW)
    assert status == 1 and "4 cases differ" in out and out.count("raised OddError") == 4, out + error


@pytest.mark.parametrize("command", ["verify", "recipes"])
def test_a_reader_that_is_gone_changes_no_status(command: str, folder: Path) -> None:
    arguments = ("deep/numpy.py:float32", *FEW) if command == "verify" else ()
    words = [sys.executable, "-m", "f8emu", command, *arguments]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=folder, env=ENVIRONMENT)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == (command == "verify")


# The report


def test_the_order_and_the_width_of_a_report(folder: Path) -> None:
    """The verdict first, what can be pasted last; nothing is wider than asked, but what is pasted."""
    for columns in (50, 80, 120):
        status, out, _ = invoke("verify", "deep/numpy.py:float32", *FEW, COLUMNS=str(columns))
        report, _, pasted = out.partition("To run one case again:\n")
        assert status == 1 and report.startswith("NOT EQUAL: deep/numpy.py:float32")
        assert columns - 20 < max(map(len, report.splitlines())) <= columns
        words = " ".join(report.split())
        assert words.count("expected: 0x") == 4, "one of each case"
        places = [
            words.index(text) for text in ("4 cases differ", "expected: 0x", "engine:", "judge of recorded GEMMs")
        ]
        assert places == sorted(places)
        command, *program = pasted.splitlines()
        assert command.startswith("f8emu verify deep/numpy.py:float32 --arrays numpy --golden few --case '")
        assert all(len(line) <= 80 for line in program)


def test_one_case_again(folder: Path) -> None:
    """The line that is printed runs that case alone; a name that is wrong is told with the nearest."""
    _, out, _ = invoke("verify", "deep/numpy.py:float32", *FEW)
    line = next(line for line in out.splitlines() if line.startswith("f8emu verify "))
    status, again, error = invoke(*shlex.split(line)[1:], "--json", "out.json")
    assert status == 1, error
    ((name, stage),) = stages_in(Path("out.json")).items()
    assert (name, stage["cases_total"]) == ("golden", 1)
    assert stage["mismatches"][0]["case"] == shlex.split(line)[-1] and line in again
    assert ": 1 case differs, 1 output:\n" in again and "Only a Hopper GPU prints" in again
    status, out, _ = invoke("verify", "deep/numpy.py:DECLARED", "f8ref.numpy", *FEW)
    assert status == 1 and "f8emu verify deep/numpy.py:DECLARED --arrays numpy --golden few --case '0" in out, out
    stages = ("verify", "f8ref.numpy", "--golden", "few", "--stage", "golden", "--stage", "formats")
    status, out, _ = invoke(*stages, "--case", "04*", "--case", "decode float8_*")
    assert status == 0 and "recorded GEMMs 1/1 cases" in out and "formats and casts 5/5 cases" in out, out
    assert invoke(*stages, "--case", "0[04]*")[0] == 2  # no text but * has a meaning
    for right in ((), ("--case", "04*")):  # a name that is wrong is told beside one that is right too
        status, out, error = invoke(*stages, *right, "--case", "000 tensorwise-norm")
        assert (status, out) == (2, "") and "no case is called '000 tensorwise-norm'; the nearest is" in error
        assert "is '000 tensorwise-normal float8_e4m3fn x" in error


def test_the_program_computes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain torch, from a row and a column, for every kind of GEMM; on the hardware it would print the same."""
    torch = pytest.importorskip("torch")
    right, store = load_subject("f8ref.numpy"), torch_arrays("test").store

    def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, **options: Any) -> Any:
        granularities = [
            kinds[tuple(tensor.shape)] if tensor.ndim else Granularity.TENSORWISE for tensor in (scale_a, scale_b)
        ]
        options["out_dtype"] = str(options["out_dtype"]).removeprefix("torch.")
        options["bias"] = None if options["bias"] is None else store(options["bias"])
        pair = dict(zip(("granularity_a", "granularity_b"), granularities, strict=True))
        out = f8.scaled_mm(*map(store, (a, b, scale_a, scale_b)), **pair, **options)
        return torch.from_numpy(out.view(f"i{out.itemsize}"))

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    seen: set[object] = set()
    cases = {case.id: case for case in STAGES["gemms"].cases(right, shipped_golden())}
    for gemm in gemm_cases():
        kind = gemm.mode, gemm.granularity_a, gemm.granularity_b, gemm.out_dtype, gemm.bias is None
        if kind in seen or gemm.distribution not in ("", "normal") or gemm.split_k > 1:
            continue
        seen.add(kind)
        wrong = replace(right, verbs={name: off_by_one(verb) for name, verb in right.verbs.items()})
        (case,) = (case for name, case in cases.items() if name.startswith(f"{gemm.id} {gemm.a.dtype}"))
        (mismatch,) = run_case(case, wrong, case.run(right)).result.mismatches
        if gemm.mode is Mode.BF16:
            assert not mismatch.snippet
            continue
        k = -(-gemm.k // 128)
        kinds = {(1, 1): Granularity.ROWWISE, (1, 16): Granularity.ROWWISE}
        if gemm.mode is Mode.BLOCKWISE:
            kinds = {(1, k): gemm.granularity_a, (k, 16): gemm.granularity_b, (k, 1): gemm.granularity_b}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(mismatch.snippet, {})
        assert printed.getvalue().strip() == hex(int(mismatch.expected.split()[0], 16)), mismatch.case
    assert len(seen) > 10


def off_by_one(verb: Any) -> Any:
    """One bit of one output the other way."""

    def call(*args: Any, **options: Any) -> Any:
        out = verb(*args, **options).copy()
        out.view(f"u{out.itemsize}")[-1, -2] ^= 1
        return out

    return call


def test_names_in_a_file_do_nothing_to_a_terminal(folder: Path) -> None:
    golden, hostile = shipped_golden(), "\x1b]0;title\x07"
    case = golden.cases[0]
    named = replace(case, name=hostile, gemm=replace(case.gemm, id=hostile + "'; reboot '"))
    write_golden(folder / "hostile", [named], {**golden.metadata, "device": hostile})
    for name in ("deep/numpy.py:float32", "f8ref.numpy"):
        status, out, error = invoke("verify", name, *FEW[:-2], "hostile", "--no-diagnose")
        assert status == (name != "f8ref.numpy") and "\x1b" not in out + error and "\x07" not in out + error
        assert "\\x1b]0;title\\x07" in out
        pasted = [line for line in out.splitlines() if line.startswith("f8emu verify ")]
        assert len(pasted) == status
        for line in pasted:
            assert invoke(*shlex.split(line)[1:])[0] == 1, "the line that is pasted runs no other command"

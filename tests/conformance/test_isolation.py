"""Code of others in its own process: what kills the process is the error of one case, and the next one runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from f8emu.conformance import load_subject, shipped_golden, write_golden
from f8emu.conformance.cases.gemm import GemmCase, NotOffered
from f8emu.conformance.cases.tables import gemm_cases
from f8emu.conformance.casts.verify import verify_function
from f8emu.conformance.kernels.faults import ChangedInput, ProcessEnded, TimedOut, WroteOutOfBounds
from f8emu.conformance.run.subject import Subject
from f8emu.spec import BFLOAT16, SpecError
from tests.conformance.command import ENVIRONMENT, few_recorded, invoke, stages_in


class Attack(NamedTuple):
    """What a kernel does before it computes, the error of its case, and whether the next one has a new process."""

    line: str
    error: type[Exception] | None = None
    text: str = ""
    is_new: bool = True


HARMLESS = [
    "os.fork()",
    "ctypes.CDLL(None).fork()",
    "assert subprocess.run([sys.executable, '-c', '']).returncode == 0",
    "print('noise' * 10_000); os.write(1, b'noise')",
    "warnings.warn('noise'); np.float32(1) / np.float32(0)",
    "sys.stdout = sys.stderr = None",
    "os.chdir('/'); sys.path.clear()",
    "np.seterr(invalid='raise')",
]
ENDED = r"its process was ended by "
ATTACKS: dict[int, Attack] = {
    32: Attack("print('x', flush=True); os.abort()", ProcessEnded, ENDED + r"SIGABRT; File .*faulty_kernels.py.*in at"),
    48: Attack("time.sleep(600)", TimedOut, r"no output within 2 s; its process was stopped"),
    64: Attack("sys.exit(3)", ProcessEnded, r"faulty_kernels:KERNEL raised SystemExit\(3\), which ends a process; ret"),
    80: Attack(
        "print('out of shared memory', file=sys.stderr); os._exit(77)",
        *(ProcessEnded, r"its process exited with status 77; out of shared memory"),
    ),
    96: Attack("ctypes.string_at(1)", ProcessEnded, ENDED + r"SIGSEGV; File .*"),
    112: Attack("raise NotImplementedError('not this one')", NotOffered, r"not this one", is_new=False),
    128: Attack("raise LibraryError('cannot initialize')", Exception, r"cannot initialize", is_new=False),
    144: Attack(
        "ctypes.memset(out.ctypes.data + out.nbytes, 0, 64)",
        *(WroteOutOfBounds, r"32 behind its end, the nearest 1 elements away"),
    ),
    160: Attack(
        "a[2, 3] = 448",
        *(ChangedInput, r"1 elements of the input a were changed, the first at \[2, 3\]: 0x.. became 0x7e"),
    ),
    176: Attack("raise KeyboardInterrupt", ProcessEnded, r"raised KeyboardInterrupt\(\), which ends a process"),
    192: Attack("raise Odd", ProcessEnded, r"raised Odd\(\), which ends a process"),
    208: Attack("os.closerange(3, 200)", ProcessEnded, r"its process exited with status 0"),
    224: Attack("os.kill(0, signal.SIGTERM)", ProcessEnded, ENDED + "SIGTERM"),
    **{240 + 16 * i: Attack(line, is_new=False) for i, line in enumerate(HARMLESS)},
}
"""By the number of rows."""
KERNELS = '''
import ctypes, os, signal, subprocess, sys, threading, time, warnings
import numpy as np
import f8ref.numpy as f8
from f8emu.conformance import Arg, Kernel, TENSORWISE_SCALARS

def gemm(a, b, scale_a, scale_b, fast, out):
    """The oracle, with an attack for each number of rows."""
    if len(a) in ATTACKS:
        ATTACKS[len(a)](a, out)
    out[:] = f8.scaled_mm(a, b.T, scale_a.reshape(1, 1), scale_b.reshape(1, 1), use_fast_accum=fast)

def by_rows(a, *rest, **options):
    if len(a) in ATTACKS:
        ATTACKS[len(a)](a, None)
    return right(a, *rest, **options)

def right(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    return f8.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=str(out_dtype), use_fast_accum=use_fast_accum)

class LibraryError(Exception):
    pass

class Odd(BaseException):
    def __str__(self):
        raise RuntimeError

ATTACKS, CALLS = {}, []
KERNEL = Kernel(
    name="faulty",
    function=gemm,
    arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, Arg.USE_FAST_ACCUM, Arg.OUT),
    scales=TENSORWISE_SCALARS,
    arrays="numpy",
)

def dies_between(*args, **options):
    """A thread ends the process when the third call is over."""
    CALLS.append(0)
    if len(CALLS) == 3:
        threading.Timer(0.2, os._exit, (5,)).start()
    elif len(CALLS) == 4:
        time.sleep(600)
    return right(*args, **options)

def hangs_later(a, b, *rest, **options):
    """In the stage after the four recorded GEMMs and the first call."""
    CALLS.append(0)
    if len(CALLS) > 5:
        open("process", "w").write(f"{os.getpid()}.")
        time.sleep(600)
    return np.zeros((len(a), b.shape[1]), options["out_dtype"])

def cast_dies(x):
    if x.shape == (1, 7):
        os._exit(9)
    return np.clip(x.astype(np.float32), -448, 448).astype("float8_e4m3fn")
''' + "".join(
    f"\ndef attack_{rows}(a, out):\n    {attack.line}\n\nATTACKS[{rows}] = attack_{rows}\n"
    for rows, attack in ATTACKS.items()
)
NUMPY = load_subject("f8ref.numpy")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty_kernels.py").write_text(KERNELS)
    (tmp_path / "dies_on_import.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "raises_on_import.py").write_text("raise BaseException('x')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("faulty_kernels", None)
    return tmp_path


def with_rows(rows: int) -> GemmCase:
    case = next(c for c in gemm_cases() if c.mode.value == "tensorwise" and c.a.shape == (16, 544) and "norm" in c.id)
    return replace(case, a=np.resize(case.a, (rows, case.k)), out_dtype=BFLOAT16, bias=None)


def process_id(subject: Subject) -> int | None:
    worker = subject.calls.__self__.worker  # type: ignore[union-attr]
    return worker and worker.process.pid


def equals_the_oracle(subject: Subject, rows: int = 16) -> bool:
    case = with_rows(rows)
    return np.array_equal(subject.gemm(case).view(np.uint16), case.run(NUMPY.verbs).view(np.uint16))


def test_every_attack_is_the_error_of_its_case(module: Path) -> None:
    subject = load_subject("faulty_kernels:KERNEL", timeout=2)
    assert subject.name == "faulty" and "faulty on numpy" in subject.engine
    first = process_id(subject)
    for rows, (line, error, text, is_new) in ATTACKS.items():
        if error is None:
            assert equals_the_oracle(subject, rows), line
        else:
            with pytest.raises(error, match=text) as caught:
                subject.gemm(with_rows(rows))
            assert rows != 128 or type(caught.value).__name__ == "LibraryError"
        assert equals_the_oracle(subject), line
        assert (process_id(subject) != first) == is_new, line
        first = process_id(subject)


def test_a_process_that_ends_between_cases_is_the_error_of_one(module: Path) -> None:
    few_recorded(module / "few", 0, 1, 2, 3, 4)
    report = module / "report.json"
    words = "verify faulty_kernels:dies_between --arrays numpy --stage golden --no-diagnose --golden".split()
    status, out, _ = invoke(*words, module / "few", "--json", report)
    stage = stages_in(report)["golden"]
    (mismatch,) = stage["mismatches"]
    assert (status, stage["cases_equal"]) == (1, 4), out
    assert mismatch["error"] == "raised ProcessEnded: its process exited with status 5"


def test_a_cast_has_its_own_process_too(module: Path) -> None:
    verified = verify_function("faulty_kernels:cast_dies", "cast", arrays="numpy", diagnose=False)
    (stage,) = verified.result.subjects[0].stages
    assert [(mismatch.case, mismatch.error) for mismatch in stage.mismatches] == [
        ("shape [1, 7]", "raised ProcessEnded: its process exited with status 9")
    ]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_ends_both_processes_and_keeps_what_was_found(number: int, status: int, module: Path) -> None:
    """Ctrl-C of a terminal is a signal to the whole group."""
    few_recorded(module / "few", 0, 8, 40, 68)
    words = "-m f8emu verify faulty_kernels:hangs_later --arrays numpy --stage golden --stage gemms --golden few"
    of_process = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    command = subprocess.Popen(
        [sys.executable, *words.split()],
        **{"stdout": subprocess.PIPE, "text": True, "cwd": module, "env": ENVIRONMENT, "start_new_session": True},
    )
    signal.signal(signal.SIGINT, of_process)
    written = module / "process"
    assert waited_for(lambda: written.exists() and written.read_text().endswith("."))
    os.killpg(command.pid, number)
    out, _ = command.communicate(timeout=30)
    assert command.returncode == status
    assert status < 0 or ("INTERRUPTED" in out and "recorded GEMMs" in out and "expected: 0x" in out), out
    child = int(written.read_text()[:-1])
    assert waited_for(lambda: not is_running(child))


def waited_for(condition: Any) -> bool:
    """Whether it holds within half a minute."""
    return any(condition() or time.sleep(0.1) for _ in range(300))


def is_running(process: int) -> bool:
    """A zombie that nobody collects has ended."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_from_the_command_line(module: Path, tmp_path: Path) -> None:
    """Cases before and after a crash are reported as ever."""
    golden, report, few = shipped_golden(), tmp_path / "report.json", tmp_path / "few.safetensors"
    rows = (64, 128)  # of recorded tensorwise GEMMs: one fault, one that is equal
    chosen = [case for case in golden.cases if case.gemm.mode.value == "tensorwise" and case.gemm.bias is None]
    chosen = [case for case in chosen if case.gemm.split_k == 1 and case.gemm.a.shape[0] in rows][:6]
    write_golden(few, chosen, golden.metadata)
    crashing = sum(case.gemm.a.shape[0] == 64 for case in chosen)
    words = "verify faulty_kernels:by_rows f8ref.numpy --arrays numpy --stage golden --golden".split()
    status, out, _ = invoke(*words, str(few), "--json", str(report))
    stage, right = (subject["stages"][0] for subject in json.loads(report.read_text())["subjects"])
    assert status == 1, out
    assert right["status"] == "equal", "what is no kernel runs beside it as ever"
    assert stage["cases_total"] == len(chosen) == 6 == crashing
    errors = [mismatch["error"] for mismatch in stage["mismatches"]]
    assert all("ProcessEnded: faulty_kernels:by_rows raised SystemExit(3)" in error for error in errors[:3])
    assert all(error.startswith("raised ProcessEnded: not run: 3 calls in a row ended") for error in errors[3:])
    assert "equal so far" not in out and "not diagnosed" in out
    # In this process nothing is promised, but that no status is a pass.
    status, out, error = invoke(*words, str(few), "--here")
    assert (status, out) == (2, "") and "SystemExit: 3" in error


@pytest.mark.parametrize(
    ("name", "timeout", "text"),
    [
        ("faulty_kernels:KERNEL", 0, "--timeout must be more than 0"),
        ("dies_on_import:gemm", 5, "while it was imported: its process exited with status 9"),
        ("raises_on_import:gemm", 5, r"while it was imported: raises_on_import:gemm raised BaseException\(x\), which"),
    ],
)
def test_what_cannot_be_loaded(name: str, timeout: float, text: str, module: Path) -> None:
    with pytest.raises(SpecError, match=text):
        load_subject(name, timeout=timeout)


def test_a_known_kernel_that_cannot_be_imported_stops_nobody(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package that was built for another torch and crashes."""
    (module / "sitecustomize.py").write_text(
        "import f8emu.conformance.kernels.known as kernels, dataclasses, os\n"
        "found = kernels.KERNELS['fbgemm.rowwise']\n"
        "kernels.KERNELS['fbgemm.rowwise'] = dataclasses.replace("
        "found, needs_gpu=False, imports=('dies_on_import',))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(module), ENVIRONMENT["PYTHONPATH"]]))
    rowwise = next(case for case in gemm_cases() if case.mode.value == "rowwise")
    with pytest.raises(NotOffered, match=r"while it was imported: its process exited with status 9"):
        load_subject("fbgemm.rowwise", timeout=5).gemm(rowwise)


def test_list_of_kernels() -> None:
    status, out, _ = invoke("verify", "--kernels")
    assert status == 0
    assert re.search(r"^fbgemm\.rowwise\n  seen: on an H200 different, every bit explained: \(acc", out, re.MULTILINE)
    assert "pip install torchao" in out

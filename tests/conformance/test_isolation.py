"""Kernels in a process of their own: what kills the process is the error of one case, and the next one runs."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f8emu.conformance import load_subject, shipped_golden, write_golden
from f8emu.conformance.cases.gemm import GemmCase, NotOffered
from f8emu.conformance.cases.tables import gemm_cases
from f8emu.conformance.kernels.faults import ChangedInput, KernelFault, ProcessEnded, TimedOut, WroteOutOfBounds
from f8emu.conformance.kernels.loaded import IsolatedKernel
from f8emu.conformance.run import stages
from f8emu.conformance.run.subject import Subject
from f8emu.spec import BFLOAT16, SpecError
from tests.conformance.command import ROOT, invoke, stages_in

FAULTS: dict[int, tuple[str, type[Exception], str, bool]] = {
    32: (
        "print('about to abort', flush=True); os.abort()",
        *(ProcessEnded, r"was ended by SIGABRT; File .*faulty_kernels.py.*in fault_32", True),
    ),
    48: ("time.sleep(600)", TimedOut, r"no output within 2 s; its process was stopped", True),
    64: ("sys.exit(3)", ProcessEnded, r"faulty raised SystemExit\(3\), which ends a process", True),
    80: (
        "print('out of shared memory', file=sys.stderr); os._exit(77)",
        *(ProcessEnded, r"its process exited with status 77; out of shared memory", True),
    ),
    96: ("ctypes.string_at(1)", ProcessEnded, r"its process was ended by SIGSEGV; File .*", True),
    112: ("raise NotImplementedError('not this one')", NotOffered, r"not this one", False),
    128: ("raise LibraryError('cutlass cannot initialize')", KernelFault, r"cutlass cannot initialize", False),
    144: (
        "ctypes.memset(out.ctypes.data + out.nbytes, 0, 64)",
        *(WroteOutOfBounds, r"32 behind its end, the nearest 1 elements away", True),
    ),
    160: (
        "a[2, 3] = 448",
        *(ChangedInput, r"1 elements of the input a were changed, the first at \[2, 3\]: 0x.. became 0x7e", True),
    ),
}
"""Rows -> what the kernel does, the error of its case, its text, and whether the process is another one then."""
KERNELS = '''
import ctypes, os, sys, time
import numpy as np
import f8ref.numpy as f8
from f8emu.conformance import Arg, Kernel, TENSORWISE_SCALARS
from f8emu.spec import BFLOAT16

def gemm(a, b, scale_a, scale_b, fast, out):
    """The oracle, with a fault for each number of rows."""
    fault = FAULTS.get(len(a))
    if fault:
        fault(a, out)
    out[:] = f8.scaled_mm(a, b.T, scale_a.reshape(1, 1), scale_b.reshape(1, 1), use_fast_accum=fast)

def by_rows(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    fault = FAULTS.get(len(a))
    if fault:
        fault(a, None)
    return f8.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=str(out_dtype), use_fast_accum=use_fast_accum)

class LibraryError(Exception):
    pass

FAULTS = {}
KERNEL = Kernel(
    name="faulty",
    function=gemm,
    arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, Arg.USE_FAST_ACCUM, Arg.OUT),
    scales=TENSORWISE_SCALARS,
    arrays="numpy",
)

def hangs(a, b, scale_a, scale_b, out):
    time.sleep(600)

HANGS = Kernel(
    name="hangs",
    function=hangs,
    arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, Arg.OUT),
    scales=TENSORWISE_SCALARS,
    granularity_word=lambda granularity: granularity,
    arrays="numpy",
)
''' + "".join(
    f"\ndef fault_{rows}(a, out):\n    {line}\n\nFAULTS[{rows}] = fault_{rows}\n" for rows, (line, *_) in FAULTS.items()
)
NUMPY = load_subject("f8ref.numpy")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def subject(module: Path) -> Any:
    found = load_subject("faulty_kernels:KERNEL", timeout=2)
    yield found
    isolated(found).close()


def isolated(subject: Subject) -> Any:
    """The parent's side of an isolated subject."""
    return subject.calls.__self__  # type: ignore[union-attr]


def with_rows(rows: int) -> GemmCase:
    case = next(c for c in gemm_cases() if c.mode.value == "tensorwise" and c.a.shape == (16, 544) and "norm" in c.id)
    return replace(case, a=np.resize(case.a, (rows, case.k)), out_dtype=BFLOAT16, bias=None)


def process_id(subject: Subject) -> int:
    return isolated(subject)._worker.process.pid


def equals_the_oracle(subject: Subject) -> bool:
    case = with_rows(16)
    return np.array_equal(subject.gemm(case).view(np.uint16), case.run(NUMPY.verbs).view(np.uint16))


def test_every_fault_is_the_error_of_its_case(subject: Subject) -> None:
    assert subject.name == "faulty" and "faulty on numpy" in subject.engine
    first = process_id(subject)
    for rows, (_, error, text, ends_the_process) in FAULTS.items():
        with pytest.raises(error, match=text) as caught:
            subject.gemm(with_rows(rows))
        if rows == 128:
            assert type(caught.value).__name__ == "LibraryError"
        assert equals_the_oracle(subject)
        assert (process_id(subject) != first) == ends_the_process
        first = process_id(subject)


def test_after_three_hangs_in_a_row_nothing_is_waited_for(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that always hangs fails its cases, and which cases these are is not its to say."""
    monkeypatch.setattr(stages, "gemm_cases", lambda: [replace(with_rows(16), id=name) for name in "abcd"])
    monkeypatch.setattr("f8emu.conformance.run.subject.kernel_cases", lambda kernel: ())
    report = module / "report.json"
    words = ["verify", "faulty_kernels:HANGS", "--stage", "gemms", "--timeout", "0.3", "--json"]
    status, out, _ = invoke(*words, str(report))
    hanging = stages_in(report)["gemms"]
    assert status == 1, out
    errors = [mismatch["error"] for mismatch in hanging["mismatches"]]
    # the first of the three is the first call, which was made before the run
    assert all("raised TimedOut: no output within 0.3 s" in error for error in errors[:3])
    assert len(errors) > 3 and all("not run: 3 GEMMs in a row ended or broke" in error for error in errors[3:])
    assert "not diagnosed" in out


def test_ctrl_c_ends_the_process(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    child = isolated(subject)._worker.process
    ask = IsolatedKernel._reply

    def asked_and_interrupted(*request: Any) -> Any:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return ask(*request)

    monkeypatch.setattr(IsolatedKernel, "_reply", asked_and_interrupted)
    of_process = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with pytest.raises(KeyboardInterrupt):
        subject.gemm(with_rows(48))
    signal.signal(signal.SIGINT, of_process)
    assert child.poll() == -signal.SIGKILL
    monkeypatch.setattr(IsolatedKernel, "_reply", ask)
    assert equals_the_oracle(subject)


def test_the_process_ends_with_its_parent(module: Path) -> None:
    """Even while the kernel hangs, and the parent is killed."""
    program = (
        "from tests.conformance.test_isolation import isolated, load_subject, with_rows\n"
        "subject = load_subject('faulty_kernels:KERNEL', timeout=600)\n"
        "print(isolated(subject)._worker.process.pid, flush=True)\n"
        "subject.gemm(with_rows(48))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*(place for place in sys.path if place), str(ROOT)])}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        time.sleep(0.5)  # the question is on its way, or asked: either will do
        parent.kill()
        parent.wait()
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


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
    words = "verify faulty_kernels:by_rows f8ref.numpy --arrays numpy --stage golden --isolate --golden".split()
    status, out, _ = invoke(*words, str(few), "--json", str(report))
    stage, right = (subject["stages"][0] for subject in json.loads(report.read_text())["subjects"])
    assert status == 1, out
    assert right["status"] == "equal", "what is no kernel runs beside it as ever"
    assert stage["cases_total"] == len(chosen) == 6 == crashing
    errors = [mismatch["error"] for mismatch in stage["mismatches"]]
    assert all("ProcessEnded: faulty_kernels:by_rows raised SystemExit(3)" in error for error in errors[:3])
    assert all(error.startswith("raised ProcessEnded: not run: 3 GEMMs in a row ended") for error in errors[3:])
    assert "equal so far" not in out


@pytest.mark.parametrize(
    ("name", "timeout", "text"),
    [
        ("no_such_module:gemm", 5, "No module named 'no_such_module'.*PYTHONPATH"),
        ("faulty_kernels:KERNEL", 0, "--timeout must be more than 0"),
        ("dies_on_import:gemm", 5, "while it was imported: its process exited with status 9"),
    ],
)
def test_what_cannot_be_loaded(name: str, timeout: float, text: str, module: Path) -> None:
    (module / "dies_on_import.py").write_text("import os\nos._exit(9)\n")
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
    (module / "dies_on_import.py").write_text("import os\nos.abort()\n")
    rowwise = next(case for case in gemm_cases() if case.mode.value == "rowwise")
    with pytest.raises(NotOffered, match=r"while it was imported: its process was ended by SIGABRT; File .*dies_on_"):
        load_subject("fbgemm.rowwise", timeout=5).gemm(rowwise)


def test_list_of_kernels() -> None:
    status, out, _ = invoke("verify", "--kernels")
    assert status == 0
    assert re.search(r"^fbgemm\.rowwise\n  predicted: equal: \(acc \* scale_b\)", out, re.MULTILINE)
    assert "pip install torchao" in out

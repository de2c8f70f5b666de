"""The engine in its process: threads, fork, the rounding mode of the caller, and Python's lock."""

import ctypes
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.native import library
from f8emu.numpy import emulation
from f8emu.spec import Granularity

if library.unavailable():
    pytest.skip(str(library.unavailable()), allow_module_level=True)

ROWWISE: Any = {"granularity_a": Granularity.ROWWISE, "granularity_b": Granularity.ROWWISE}
FORK = """
import os, signal, sys
import numpy as np
from f8emu.numpy import emulation
emulation._threads = lambda: 2
x = np.random.default_rng(0).standard_normal((256, 256)).astype("bfloat16")
product = lambda: emulation.mm(x, x).tobytes()
before = product()
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that waits for threads which it does not have
    os._exit(before != product())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or before != product())
"""


RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal((rows, 300)).astype(ml_dtypes.float8_e4m3fn) for rows in (130, 140))
SCALES = np.full((130, 1), 3.1e-39, np.float32), np.full((1, 140), 0.7, np.float32)
BIAS = np.full(140, 1.3e-40, np.float32)
TINY, ONES = (np.full((4, 40), x).astype(ml_dtypes.bfloat16) for x in (1e-39, 1.0))


def product(width: str) -> tuple[bytes, bytes]:
    """GEMMs of which roundings and subnormals show, the first on threads."""
    scaled = emulation.scaled_mm(A, B.T, *SCALES, **ROWWISE, bias=BIAS, out_dtype="float32", width=width)
    return scaled.tobytes(), emulation.mm(TINY, ONES.T, out_dtype="float32", width=width).tobytes()


@contextmanager
def rounding(mode: int) -> Iterator[Callable[[], int]]:
    libm = ctypes.CDLL(None)
    before = libm.fegetround()
    assert libm.fesetround(mode) == 0
    try:
        yield libm.fegetround
    finally:
        libm.fesetround(before)


@pytest.mark.parametrize("width", library.widths())
def test_the_callers_rounding_is_neither_used_nor_changed(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_threads", lambda: 3)
    expected = product(width)
    up, down, zero = (
        (0x400000, 0x800000, 0xC00000) if platform.machine() in ("aarch64", "arm64") else (0x800, 0x400, 0xC00)
    )
    for mode in (up, down, zero):
        with rounding(mode) as current:
            observed, left = product(width), current()
        assert observed == expected and left == mode


@pytest.mark.parametrize("width", library.widths())
def test_subnormals_are_kept_where_the_caller_flushes_them(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(emulation, "_threads", lambda: 3)
    expected = product(width)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        observed, flushed = product(width), float(torch.tensor(2e-40) * torch.tensor(1.0))
    finally:
        torch.set_flush_denormal(False)
    assert observed == expected and flushed == 0


@pytest.mark.parametrize("first", ["", "import torch; torch.set_num_threads(2); torch.ones(9999999).sum()"])
def test_a_child_of_fork_multiplies(first: str) -> None:
    """After the parent has used threads: its own, or torch's team."""
    if first:
        pytest.importorskip("torch")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", first + FORK], env=environment, check=False).returncode == 0


def test_other_threads_run_meanwhile() -> None:
    """The lock of Python's interpreter is released."""
    x = np.ones((512, 512), ml_dtypes.float8_e4m3fn)
    unit = np.ones((1, 1), np.float32)
    worker = threading.Thread(
        target=emulation.scaled_mm, args=(x, x, unit, unit), kwargs={"width": library.widths()[-1]}
    )
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    assert turns > 1000


def test_torchs_number_of_threads_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    f8 = pytest.importorskip("f8emu.torch")
    from f8emu.torch.gemm import emulation as of_torch

    used: list[int] = []
    run = of_torch.native.run
    monkeypatch.setattr(
        of_torch.native, "run", lambda *a, threads, **o: (used.append(threads), run(*a, threads=threads, **o))
    )
    x, before = torch.ones(32, 32, dtype=torch.bfloat16), torch.get_num_threads()
    try:
        for threads in (3, 1):
            torch.set_num_threads(threads)
            f8.mm(x, x)
    finally:
        torch.set_num_threads(before)
    assert used == [3, 1]

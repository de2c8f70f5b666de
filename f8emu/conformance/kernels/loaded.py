"""A kernel that can be run: found by its name, and called in this process or in its own.

In its own process a crash, an exit or a hang is the error of one case, and the next one runs. The child is asked GEMM
by GEMM, and lives until it fails; then a fresh one is started.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from f8emu.conformance.arrays import FRAMEWORKS
from f8emu.conformance.cases.gemm import GemmCase, NotOffered
from f8emu.conformance.compare import text_of
from f8emu.conformance.kernels import faults
from f8emu.conformance.kernels.call import Calls, absent, calls_of
from f8emu.conformance.kernels.faults import KernelFault, ProcessEnded, TimedOut
from f8emu.conformance.kernels.imported import INTERPRETED, attribute, is_interpreted
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.conformance.kernels.known import KERNELS, scaled_mm_kernel
from f8emu.conformance.workers import Worker
from f8emu.spec import F8Error, SpecError

# For imports, of which some build what they import.
_START_SECONDS = 300.0
# After so many GEMMs in a row that hung, or ended or broke their process, the others are not run.
_LOST = 3

CONTRACT = """\
function(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum) -> output

a         [M, K] of float8_e4m3fn or float8_e5m2, row-major
b         [K, N] of either, column-major: a transposed [N, K]. One of a and b at
          least is float8_e4m3fn. M is any number; N and K are multiples of 16.
          There may be gaps between rows: the strides tell. One row may have any
          stride. Where M is 0 the output is empty, [0, N]. a and b may be one
          array, and so may scale_a and scale_b.
scale_a, scale_b
          float32 of any value, and they decode: value = code * scale
          tensorwise: one element each, without dimensions
          rowwise: [M, 1] and [1, N]
bias      [N] of out_dtype, or None; None if out_dtype is float32
out_dtype float32, bfloat16 or float16: a dtype of the arrays' framework
use_fast_accum
          True: the tensor core adds all of K in its own accumulator.
          False: it promotes to float32 every 128 of K.
output    [M, N] of out_dtype: a new array, which no later call changes

Each call computes from what its arrays hold then: they may be those of an
earlier call, or lie where those lay, with other contents. Asked the same again
a kernel gives the same bits. a and b begin at multiples of 16 bytes, scales at
any of their elements, and so does a bias that is not on a GPU.

Arrays are torch's, on the GPU if there is one; --arrays numpy or jax selects
another framework. Inputs are read only, and so is the memory around them.
NotImplementedError is "not offered". So are a RuntimeError that names
CUBLAS_STATUS_NOT_SUPPORTED and, if rows lie apart or an array does not begin at
a multiple of 256 bytes, a ValueError and a RuntimeError that names strides,
contiguity, alignment, or CUBLAS_STATUS_INVALID_VALUE. A refusal is no pass. Any
other exception is the error of its case, also where M is 0.
sys.exit, os._exit and fork are faults.
--isolate runs the kernel in its own process, for one that crashes or hangs.

Its name is package.module:function or path/to/file.py:function.

A kernel that is called in another way, has block scales or multiplies groups is
declared as data, an f8emu.conformance.Kernel, and named in the same way. Both
are in examples/own_kernel.py. The expected bits: reference/NUMERICS.md.
Rows behind the last group are zeros, unless a Kernel declares that it leaves
them as they are.

No finite suite finds everything. This one calls a kernel some thousand times,
in one thread, with K up to 65,552: it does not see what is wrong for a longer
K, from a later call on, or in a second thread.
"""
"""What a kernel that is called as `torch._scaled_mm` is given, returns, and may do: `f8emu verify --contract`."""


class LoadedKernel(NamedTuple):
    """A kernel and its engine."""

    kernel: Kernel
    """Its declaration; of a kernel in its own process the outline, which decides here, where nothing hangs, what is
    run."""
    engine: str
    calls: Calls
    runs_full_size: bool


def load_kernel(path: str) -> Kernel:
    """A known kernel, or what a user names: a `Kernel`, or a function that is called as `torch._scaled_mm` is."""
    if path in KERNELS:
        return KERNELS[path]
    try:
        found = attribute(path)
        if callable(found) or isinstance(found, Kernel):
            return found if isinstance(found, Kernel) else scaled_mm_kernel(path, found)
        fault = f"{path} is not callable, and not a Kernel"
    except F8Error:
        raise  # says what to install, or to declare
    except KernelFault as error:
        raise SpecError(f"f8emu verify {path}: {error}") from None
    except (ImportError, AttributeError, ValueError) as error:
        fault = str(error)
    except Exception as error:  # the module's own
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        raise SpecError(f"f8emu verify {path}: its import raised {type(error).__name__}: {error} ({where})") from None
    raise SpecError(
        f"f8emu verify {path}: expected package.module:function or path/to/file.py:function, or a Kernel there; "
        f"{fault}. Run it where the module can be imported, or set PYTHONPATH"
    )


def loaded(kernel: Kernel, arrays: str = "torch") -> LoadedKernel:
    """A declared kernel in this process."""
    framework = FRAMEWORKS[kernel.arrays or arrays](f"f8emu verify {kernel.name}, unless it has --arrays numpy,")
    engine = f"{kernel.name} on {framework.name} {framework.version}, {framework.device}"
    told = {"predicted": kernel.predicted, "seen": kernel.seen}
    calls = calls_of(kernel, framework)
    engine += f", {INTERPRETED}" if is_interpreted(kernel.function) else ""  # known once its module is imported
    engine = "; ".join([engine, *(f"{name}: {text}" for name, text in told.items() if text)])
    return LoadedKernel(kernel, engine, calls, framework.on_gpu)


# In its own process


class IsolatedKernel:
    """The parent's side of a kernel in its own process, started; `timeout` is in seconds for each GEMM."""

    def __init__(self, name: str, arrays: str, timeout: float) -> None:
        self._name, self._arrays, self._timeout = name, arrays, timeout
        self._worker: Worker | None = None
        self._lost = 0
        try:
            found: LoadedKernel = self._start()
        except KernelFault as fault:
            raise SpecError(f"f8emu verify {name}: while it was imported: {fault}") from None
        self.loaded = found._replace(calls=self.calls)

    def calls(self, cases: Sequence[GemmCase]) -> tuple[np.ndarray, ...]:
        # 1. A kernel that never answers costs no more time.
        if self._lost == _LOST:
            raise ProcessEnded(
                f"not run: {_LOST} GEMMs in a row ended or broke their process, or took more than {self._timeout:g} s"
            )
        # 2. The question, to a child that is started where there is none.
        try:
            if self._worker is None:
                self._start()
            kind, *found = self._reply((cases,), self._timeout)
        except BaseException:  # also Ctrl-C: what the child would answer later belongs to no question
            self._lost += 1
            self.close()
            raise
        # 3. What the child found out; a spoilt one is not asked again: a fault may have spoilt its memory too.
        fault = getattr(faults, found[0], None) if kind == "raised" else None
        is_spoilt = kind == "raised" and (fault is not None or found[2])
        self._lost = self._lost + 1 if is_spoilt else 0
        if is_spoilt:
            self.close()
        if kind == "raised":
            raise (fault or type(found[0], (KernelFault,), {}))(found[1])
        if kind == "not offered":
            raise NotOffered(found[0])
        return found[0]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _start(self) -> Any:
        self._worker = Worker(
            f"{__name__}:answers", self._name, self._arrays, flags=("-X", "faulthandler"), keeps_prints=True
        )
        try:
            kind, *found = self._reply((), _START_SECONDS)
            if kind != "done":
                raise SpecError(found[1] if kind == "raised" else found[0])
        except BaseException:
            self.close()
            raise
        return found[0]

    def _reply(self, request: tuple[Any, ...], seconds: float) -> tuple[Any, ...]:
        assert self._worker is not None, "a child that was started is asked"
        try:
            self._worker.connection.send(request)
            if not self._worker.connection.poll(seconds):
                raise TimedOut(f"no output within {seconds:g} s; its process was stopped")
            return self._worker.connection.recv()
        except (EOFError, OSError):
            raise ProcessEnded(self._worker.fate()) from None


def answers(name: str, arrays: str) -> Callable[..., tuple[Any, ...]]:
    """The child's side: the first request, which is empty, loads the kernel."""
    here: LoadedKernel | None = None

    def answer(cases: Sequence[GemmCase] = ()) -> tuple[Any, ...]:
        nonlocal here
        try:
            if here is None:
                here = loaded(load_kernel(name), arrays)
                return "done", LoadedKernel(here.kernel.outline(), here.engine, absent(""), here.runs_full_size)
            return "done", here.calls(cases)
        except NotOffered as reason:
            return "not offered", str(reason)
        except Exception as error:  # of the kernel: the parent reports it
            is_spoilt = here is not None and here.runs_full_size and not _gpu_computes()
            return "raised", type(error).__name__, text_of(error), is_spoilt

    return answer


def _gpu_computes() -> bool:
    # Whether this process can still use its GPU: after an access out of bounds it cannot. Only torch is asked.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    try:
        return int(torch.arange(4, device="cuda").sum()) == 6
    except RuntimeError:
        return False

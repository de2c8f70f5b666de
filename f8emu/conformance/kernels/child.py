"""Code of others in a process of its own: a crash, an exit or a hang is the error of one call, and the next one runs.

The child is asked call by call, and lives until it fails; then a fresh one is started. What it prints is kept for the
line that says how it ended. A process that it forks ends where the call returns.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from f8emu.conformance.cases.gemm import NotOffered
from f8emu.conformance.compare import text_of
from f8emu.conformance.kernels.faults import KernelFault, ProcessEnded, TimedOut
from f8emu.conformance.workers import Worker
from f8emu.spec import MissingExtraError, SpecError

TIMEOUT = 120.0
"""Seconds for one call, which may compile first."""
# For imports, of which some build what they import.
_START_SECONDS = 300.0
# After so many calls in a row that hung, or ended or broke their process, the others are not run.
_LOST = 3
# JAX otherwise takes three quarters of a GPU's memory, which the suite's process uses too.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Exceptions that are raised again as what they are; of any other one its name and text travel.
_OURS = (NotOffered, SpecError, *KernelFault.__subclasses__())

Ask = Callable[..., Any]
"""Calls code of others: a question -> what it gives."""
Load = Callable[..., tuple[Any, Ask]]
"""Imports code of others, by its name and other arguments: what is known of it, which can be pickled, and `Ask`."""


def begin(load: Load, *arguments: str, timeout: float | None, here: bool) -> Callable[[], tuple[Any, Ask]]:
    """Starts to load code of others in a child, and gives the function that waits for what `load` returns.

    `timeout` is in seconds for each call. `here` loads and calls in this process, for a debugger: what ends the process
    then ends the run.
    """
    if timeout is not None and not timeout > 0:
        raise SpecError(f"verify: --timeout must be more than 0 seconds; got {timeout:g}; the default is {TIMEOUT:g}")
    if here:
        return partial(load, *arguments)
    return Child(load, arguments, TIMEOUT if timeout is None else timeout).loaded


class Child:
    """The parent's side of one piece of code, which its child begins to load at once."""

    def __init__(self, load: Load, arguments: tuple[str, ...], timeout: float) -> None:
        self._load, self._arguments, self._timeout = load, arguments, timeout
        self._lost = 0
        self.worker: Worker | None = self._started()

    def loaded(self) -> tuple[Any, Ask]:
        """The facts that `load` returns, and how the code is asked."""
        try:
            return self._answer((), _START_SECONDS), self.ask
        except (NotOffered, SpecError) as error:  # says what to install, or to declare
            raise SpecError(str(error)) from None
        except Exception as error:  # of the code, or a fault of its process
            raise SpecError(f"f8emu verify {self._arguments[0]}: while it was imported: {error}") from None

    def ask(self, *question: Any) -> Any:
        """The code's answer; raises its exception, or a `KernelFault`."""
        # 1. Code that never answers costs no more time.
        if self._lost == _LOST:
            raise ProcessEnded(
                f"not run: {_LOST} calls in a row ended or broke their process, or took more than {self._timeout:g} s"
            )
        # 2. The question, to a child that is started where there is none.
        self._lost += 1
        if self.worker is None:
            self.worker = self._started()
            self._answer((), _START_SECONDS)
        try:
            return self._answer(question, self._timeout)
        finally:
            if self.worker is not None:
                self._lost = 0

    def _started(self) -> Worker:
        load = f"{self._load.__module__}:{self._load.__qualname__}"
        return Worker(
            f"{__name__}:answers",
            *(load, *self._arguments),
            flags=("-X", "faulthandler"),
            environment={**_ENVIRONMENT, **os.environ},
            keeps_prints=True,
        )

    def _answer(self, question: tuple[Any, ...], seconds: float) -> Any:
        # A late answer, as after Ctrl-C, belongs to no question: a child is kept only once it has answered.
        worker = self.worker
        self.worker = None
        assert worker is not None, "a child that was started is asked"
        try:
            worker.connection.send(question)
            if not worker.connection.poll(seconds):
                raise TimedOut(f"no output within {seconds:g} s; its process was stopped")
            answer = worker.connection.recv()
            if not (isinstance(answer, _Failure) and answer.is_spoilt):
                self.worker = worker
        except (EOFError, OSError):
            raise ProcessEnded(worker.fate()) from None
        finally:
            if self.worker is None:
                worker.end()
        if isinstance(answer, _Failure):
            kind = type(answer.kind, (Exception,), {}) if isinstance(answer.kind, str) else answer.kind
            raise kind(answer.text)
        return answer


# The child's side


class _Failure(NamedTuple):
    """An exception of the code, as it travels."""

    kind: type[Exception] | str
    """One of `_OURS`, or the name of another one."""
    text: str
    is_spoilt: bool
    """True: the process may be no more what it was, as after a write out of bounds, and is not asked again."""


def answers(load: str, *arguments: str) -> Callable[..., Any]:
    """The child's side: loads the code by a `Load`, a `module:name`. The empty question gets what is known of it."""
    module, _, name = load.partition(":")
    loaded = _attempted(arguments[0], getattr(importlib.import_module(module), name), *arguments)
    if isinstance(loaded, _Failure):
        return lambda: loaded._replace(is_spoilt=True)
    known, ask = loaded
    return lambda *question: _attempted(arguments[0], ask, *question) if question else known


def _attempted(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        with np.errstate():  # what the code sets is its own
            return function(*arguments)
    except Exception as error:  # of the code: the parent raises it
        kind = NotOffered if isinstance(error, MissingExtraError) else type(error)
        is_spoilt = isinstance(error, KernelFault) or _is_gpu_spoilt()
        return _Failure(kind if kind in _OURS else kind.__name__, text_of(error), is_spoilt)
    except BaseException as error:
        ended = f"{name} raised {type(error).__name__}({text_of(error)}), which ends a process"
        return _Failure(ProcessEnded, f"{ended}; return an output, or raise an Exception", is_spoilt=True)


def _is_gpu_spoilt() -> bool:
    # After an access out of bounds a process cannot use its GPU any more. Of JAX that is not known.
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is None or not torch.cuda.is_initialized():
        return jax is not None and jax.default_backend() == "gpu"
    try:
        return int(torch.arange(4, device="cuda").sum()) != 6
    except RuntimeError:
        return True

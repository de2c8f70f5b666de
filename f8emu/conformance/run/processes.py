"""The suite in several processes: parts of a run that share no oracle's answers.

Most of a run is a compiler's and the interpreter's own time, which threads of one process spend one after another. What
JAX compiles for several subjects is compiled once: the processes share a cache of its programs, new with every run. A
worker is told names, so it serves subjects of `SUBJECTS` and stages of the suite alone.
"""

import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from f8emu.conformance.cases.golden import GoldenFile, read_golden
from f8emu.conformance.run.result import Progress, Silent, StageResult
from f8emu.conformance.run.runner import Runner
from f8emu.conformance.run.stages import STAGES, share_of
from f8emu.conformance.run.subject import SUBJECTS, Subject, load_subject
from f8emu.conformance.workers import Worker
from f8emu.spec import F8Error

# Variables of a worker, unless a user has set them.
_ENVIRONMENT = {
    # Inductor starts processes to compile in, though every core has work, and after an installation tries the compiler
    # on all vector instructions that the CPU reports. Without both it makes the same kernels.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    # JAX otherwise takes three quarters of a GPU's memory for the first of several processes.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# Limits libraries to one thread in each of many workers.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# JAX's cache holds what took a second to compile, if it is not told otherwise.
_KEEPS_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
# Thresholds of Python's collector, which else keeps looking through the graphs of torch's compiler for garbage.
_COLLECTED = (200_000, 20, 100)
# Bytes of a GPU's memory: the contexts of torch and JAX, and the tensors of a case.
_OF_A_WORKER = 4 << 30
_MOST_PROCESSES = 16

Shares = list[tuple[str, StageResult]]
"""Name of a subject -> a share of one of its stages."""


class WorkerEnded(F8Error, RuntimeError):
    """A process of the suite is gone before its answer."""


class Part(NamedTuple):
    """A share of the cases of a stage, which one worker runs for every subject."""

    stage: str
    subjects: tuple[str, ...]
    share: int
    shares: int


def processes_for(subjects: Sequence[Subject], is_whole: bool) -> int:
    """How many processes run the suite for these subjects sooner than one, without filling the memory of a GPU.

    On a GPU the suite has layers of full size, on which compilers and the oracle, on the host, spend minutes. On a CPU
    a whole run (`is_whole`) takes two.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if any(subject.name not in SUBJECTS for subject in subjects) or cores == 1:
        return 1
    if all(subject.is_thread_safe or subject.name == "f8ref.numpy" for subject in subjects):
        return 2 if is_whole else 1
    torch: Any = sys.modules.get("torch")
    free = torch.cuda.mem_get_info()[0] if torch is not None and torch.cuda.is_available() else _OF_A_WORKER
    count = min(cores, _MOST_PROCESSES, free // _OF_A_WORKER)
    return count if count > 2 else 1


def shares_of(stage: str, processes: int) -> int:
    """The number of parts in which the cases of a stage run."""
    # A case of layers takes seconds: more shares than processes, so that none waits for long; and an odd number,
    # because cases alternate between eager and compiled.
    return {"layers": 4 * processes + 1, "formats": 1, "scales": 1}.get(stage, processes)


def parts_of(stages: Sequence[str], subjects: Sequence[str], processes: int) -> list[Part]:
    """A run in parts, the long ones first; together they ask everything once."""
    shares = {
        stage: shares_of(stage, processes) for stage in sorted(stages, key=lambda stage: -shares_of(stage, processes))
    }
    return [Part(stage, tuple(subjects), i, count) for stage, count in shares.items() for i in range(count)]


class Workers(ExitStack):
    """Processes that run parts, ended with the context. Until then they import the modules of the subjects `early`."""

    def __init__(self, processes: int, early: Sequence[str] = ()) -> None:
        super().__init__()
        programs = self.enter_context(tempfile.TemporaryDirectory(prefix="f8emu-programs-"))
        environment = _ENVIRONMENT | (_ONE_THREAD if processes > 2 else {}) | dict(os.environ)
        environment |= {"JAX_COMPILATION_CACHE_DIR": programs, **_KEEPS_ALL}
        self._connections: list[Connection] = []
        for _ in range(processes):
            worker = Worker(f"{__name__}:answers", tuple(early), environment=environment)
            self.callback(worker.end)
            self._connections.append(worker.connection)

    def run(
        self, parts: Sequence[Part], golden: GoldenFile, errors: int, progress: Progress
    ) -> Iterator[tuple[str, StageResult]]:
        """Runs the parts, and gives the name of a subject and a share of a stage as they finish."""
        waiting = list(parts)
        running: dict[Connection, Part] = {}

        def give(connection: Connection) -> None:
            if waiting:
                running[connection] = waiting.pop(0)
                with suppress(OSError):  # a worker that is gone is met when it is listened to
                    connection.send((running[connection], str(golden.path), errors))

        # 1. A part for every worker. 2. The next one for whoever is done, until none is left and all are back.
        progress.begin(f"{len(parts[0].subjects)} subjects", f"in {len(self._connections)} processes", len(parts))
        for connection in self._connections:
            give(connection)
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection), "nothing else is waited for"
                part = running.pop(ready)
                try:
                    answer: Shares | Exception = ready.recv()
                except (EOFError, OSError):
                    raise WorkerEnded(
                        f"verify: a worker process ended while it ran {part.stage} of {', '.join(part.subjects)}; "
                        "expected its results. Was it out of memory? Use --jobs 1"
                    ) from None
                if isinstance(answer, Exception):
                    raise answer
                give(ready)
                yield from answer
                progress.advance()


def answers(early: Sequence[str]) -> Callable[[Part, str, int], Shares | Exception]:
    """The worker's side: imports the modules of the subjects `early`; then it runs parts."""
    for name in early:
        with suppress(ImportError):  # the parent tells what is missing
            importlib.import_module("f8emu.torch" if name == "torch" else name.partition(":")[0])
    read = cache(read_golden)

    def run(part: Part, golden: str, errors: int) -> Shares | Exception:
        # torch first: JAX then knows that it must leave the GPU's memory to others
        subjects = {name: load_subject(name) for name in sorted(part.subjects, key=lambda name: name != "torch")}
        gc.freeze()
        gc.set_threshold(*_COLLECTED)
        runner, stage = Runner(read(golden), errors, Silent()), share_of(STAGES[part.stage], part.share, part.shares)
        try:
            return [(name, runner.stage(stage, subjects[name])) for name in part.subjects]
        except Exception as error:  # the parent raises it
            return error

    return run

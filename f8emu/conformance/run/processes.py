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
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from itertools import product
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from f8emu.conformance.cases.golden import GoldenFile, read_golden
from f8emu.conformance.layers.layer import LayerMode
from f8emu.conformance.run.result import Progress, StageResult, joined
from f8emu.conformance.run.runner import Runner
from f8emu.conformance.run.stages import STAGES, layers_of, share_of
from f8emu.conformance.run.subject import SUBJECTS, Subject, load_subject
from f8emu.conformance.workers import Worker
from f8emu.spec import F8Error

_ENVIRONMENT = {
    # Inductor starts processes to compile in, though every core has work, and after an installation tries the compiler
    # on all vector instructions that the CPU reports. Without both it makes the same kernels.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    # JAX otherwise takes three quarters of a GPU's memory for the first of several processes.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
"""Variables of a worker, unless a user has set them."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Limits libraries to one thread in each of many workers."""
_KEEPS_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
"""JAX's cache holds what took a second to compile, if it is not told otherwise."""
_COLLECTED = (200_000, 20, 100)
"""Thresholds of Python's collector, which else keeps looking through the graphs of torch's compiler for garbage."""
_OF_A_WORKER = 4 << 30
"""Bytes of a GPU's memory: the contexts of torch and JAX, and the tensors of a case."""
_MOST_PROCESSES = 16
_LONG = ("golden", "gemms", "live")
"""Stages of which every process has a share; of layers, a case of which takes seconds, they have several."""

Keep = Callable[[str, StageResult], None]
"""Called with the name of a subject and a finished stage, or a share of one."""


class WorkerEnded(F8Error, RuntimeError):
    """A process of the suite is gone before its answer."""


class Part(NamedTuple):
    """What one worker runs in one go, stage by stage, every subject."""

    stages: tuple[str, ...]
    subjects: tuple[str, ...]
    mode: LayerMode | None = None
    """The mode whose layers run, where the stage is those alone; None is every case."""
    share: tuple[int, int] | None = None
    """Which of how many shares of the cases; None is every case."""


def processes_for(subjects: Sequence[Subject], is_whole: bool) -> int:
    """How many processes run the suite for these subjects sooner than one, without filling the memory of a GPU.

    On a GPU the suite has layers of full size, on which compilers and the oracle, on the host, spend minutes. On a CPU
    a whole run (`is_whole`) takes two: its parts are cut for that.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if any(subject.name not in SUBJECTS for subject in subjects) or cores == 1:
        return 1
    if all(subject.is_thread_safe or subject.name == "f8ref.numpy" for subject in subjects):
        return 2 if is_whole else 1
    torch: Any = sys.modules.get("torch")
    free = torch.cuda.mem_get_info()[0] if torch is not None and torch.cuda.is_available() else _OF_A_WORKER
    found = min(cores, _MOST_PROCESSES, free // _OF_A_WORKER)
    return found if found > 2 else 1


def parts_of(stages: Sequence[str], subjects: Sequence[str], processes: int = 2) -> list[Part]:
    """A run in parts, short ones last; together they ask everything once."""
    # 1. More than two processes: shares of the cases of a stage. Those of layers, which take longest, come first, and
    # are more than there are processes, so that none waits for long.
    if processes > 2:
        counts = dict.fromkeys(stages, 1) | {stage: processes for stage in _LONG if stage in stages}
        if "layers" in stages:
            counts["layers"] = 4 * processes + 1  # odd: cases alternate between eager and compiled
        order = sorted(stages, key=lambda stage: -counts[stage])
        return [Part((s,), tuple(subjects), share=(i, counts[s])) for s in order for i in range(counts[s])]
    # 2. Two processes: whole stages, because answers of oracles belong to a stage. Layers are most of a run, so those
    # that train are a part each, of f8emu.jax two: its jitted layers share no program with others, while eager ones
    # find the GEMMs of other stages compiled. Those of torch wait for compilers in turn, and are the longest part.
    # Formats and scales are so short that every subject is a part.
    layers = ("layers",) if "layers" in stages else ()
    multiplied = tuple(stage for stage in stages if stage in ("golden", "gemms"))
    values = tuple(stage for stage in stages if stage not in (*layers, *multiplied))
    jax, torch = (tuple(name for name in subjects if name == one) for one in ("f8emu.jax", "torch"))
    rest = tuple(name for name in subjects if name not in (*jax, *torch))
    found = [Part(layers, torch), Part(layers, jax, LayerMode.COMPILED)]
    found += [Part(multiplied, tuple(subjects)), Part(layers, jax, LayerMode.EAGER)]
    found += [Part(layers, rest), *(Part(values, (name,)) for name in subjects)]
    return [part for part in found if part.stages and part.subjects]


def whole_stages(parts: Sequence[Part], errors: int, keep: Keep) -> Keep:
    """Gathers the shares of a stage, and keeps it once they are complete."""
    shares: dict[tuple[str, str], list[StageResult]] = {}

    def gather(subject: str, result: StageResult) -> None:
        found = shares.setdefault((subject, result.stage), [])
        found.append(result)
        if len(found) == sum(subject in part.subjects and result.stage in part.stages for part in parts):
            keep(subject, joined(found, errors) if len(found) > 1 else result)

    return gather


class Workers:
    """Processes that run parts, ended with the context. They may be started before the parts are known.

    `first` are the parts that they are probably given first: meanwhile they import the modules of those subjects.
    """

    def __init__(self, processes: int, first: Sequence[Part] = ()) -> None:
        early = [part.subjects for part in first[:processes]] + [()] * (processes - len(first))
        with ExitStack() as stack:
            programs = stack.enter_context(tempfile.TemporaryDirectory(prefix="f8emu-programs-"))
            environment = _ENVIRONMENT | (_ONE_THREAD if processes > 2 else {}) | dict(os.environ)
            environment |= {"JAX_COMPILATION_CACHE_DIR": programs, **_KEEPS_ALL}
            self._connections: list[Connection] = []
            for names in early:
                worker = Worker("f8emu.conformance.run.processes:serve", names, environment=environment)
                stack.callback(worker.end)
                self._connections.append(worker.connection)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._stack.close()

    def run(self, parts: Sequence[Part], golden: GoldenFile, errors: int, progress: Progress, keep: Keep) -> None:
        """Runs the parts; `keep` gets the stages, or their shares, as they finish.

        Progress shows the stage that began last.

        Raises:
            WorkerEnded: a worker crashed, or was killed.
        """
        waiting = list(parts)
        running: dict[Connection, Part] = {}

        def give(connection: Connection) -> None:
            running.pop(connection, None)
            if waiting:
                running[connection] = waiting.pop(0)
                with suppress(OSError):  # a worker that is gone is met when it is listened to
                    connection.send((running[connection], str(golden.path), errors))

        # 1. A part for every worker. 2. The next one for whoever is done, until none is left and all are back.
        for connection in self._connections:
            give(connection)
        shown: Any = None
        while running:
            for one in wait(list(running)):
                assert isinstance(one, Connection), "nothing else is waited for"
                try:
                    kind, *rest = one.recv()
                except (EOFError, OSError):
                    raise WorkerEnded(
                        f"verify: a worker process ended while it ran {', '.join(running[one].stages)} of "
                        f"{', '.join(running[one].subjects)}; expected its results. Was it out of memory? Use --jobs 1"
                    ) from None
                match kind:
                    case "begin":
                        shown = one
                        progress.begin(*rest)
                    case "advance" if one is shown:
                        progress.advance()
                    case "stage":
                        keep(*rest)
                    case "done":
                        give(one)
                    case "raised":
                        raise rest[0]


class _Told:
    """Progress that is sent to the parent."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()

    def send(self, *words: Any) -> None:
        with self.lock:  # cases run in threads
            self.connection.send(words)

    def begin(self, subject: str, stage: str, cases: int) -> None:
        self.send("begin", subject, stage, cases)

    def advance(self) -> None:
        self.send("advance")


def serve(connection: Connection, early: tuple[str, ...] = ()) -> None:
    """The worker's side: imports the modules of the subjects `early`, then runs parts until the parent is gone."""
    told = _Told(connection)
    for name in early:
        with suppress(ImportError):  # the parent tells what is missing
            importlib.import_module("f8emu.torch" if name == "torch" else name)
    read = cache(read_golden)
    try:
        while True:
            (stages, names, mode, share), golden, errors = connection.recv()
            chosen = [STAGES[stage] if mode is None else layers_of(mode) for stage in stages]
            subjects = {name: load_subject(name) for name in sorted(names, key=lambda name: name != "torch")}
            gc.freeze()
            gc.set_threshold(*_COLLECTED)
            runner = Runner(read(golden), errors, told)
            try:
                for name, stage in product(names, chosen):
                    shared = stage if share is None else share_of(stage, *share)
                    told.send("stage", name, runner.stage(shared, subjects[name]))
            except Exception as error:  # the parent raises it
                told.send("raised", error)
            told.send("done")
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone

"""Cases over several ranks (gloo): one process group runs all of a file that need as many ranks.

A file has CASES and `test_ranks = ranks_test(__name__, CASES)`.

Ranks are forked from servers that have imported what ranks and their first compilation import, and have run nothing:
alone, a rank spends five seconds on that. Servers start when a process of pytest first needs ranks, and end with it.
"""

import contextlib
import contextvars
import datetime
import functools
import gc
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import f8emu.torch as f8

RESTS = contextvars.ContextVar("rests", default=False)
"""Whether weights rest as float8, sharded and on one device."""
Cases = dict[int, dict[str, Callable[[], None]]]
"""Number of ranks -> name -> a case, which every rank runs."""
shared: list[Path] = []
"""On a rank: the directory that was given to `run_cases`."""


@functools.cache
def _servers() -> tuple[forkserver.ForkServer, ...]:
    """Two, since Python hashes strings differently in each: an order that depends on hashes differs between ranks."""
    names = ["pytest", "torch._inductor.compile_fx", "torch.distributed.fsdp", "f8emu.torch", __name__]
    servers = forkserver.ForkServer(), forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        for server in servers:
            server.set_forkserver_preload(names)
            server.ensure_running()
    return servers


@contextlib.contextmanager
def forked() -> Iterator[Any]:
    """multiprocessing's context, of which each process starts from the other server than the one before."""
    turns = itertools.cycle(_servers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", lambda fds: next(turns).connect_to_new_process(fds))
        yield mp.get_context("forkserver")


def join(rank: int, ranks: int, directory: Path, *, seconds: int = 60) -> None:
    """Make this process a rank, with one thread; no collective waits longer than `seconds`."""
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is never garbage
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    limit = datetime.timedelta(seconds=seconds)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)


def started(run_rank: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run `run_rank(rank, *arguments)` on all ranks, to their end."""
    with forked():
        mp.start_processes(run_rank, arguments, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def at_rest(case: Callable[[], None]) -> None:
    """The case with weights that rest as float8."""
    token = RESTS.set(True)
    try:
        case()
    finally:
        RESTS.reset(token)


def add_at_rest(cases: Cases, names: set[str]) -> None:
    """The cases of these names once more, at rest."""
    for named in cases.values():
        named |= {f"{name}, at rest": functools.partial(at_rest, named[name]) for name in sorted(names & named.keys())}


def optimizer_of(kind: Callable[..., Any], parameters: Iterable[Any], **settings: Any) -> Any:
    """Any optimizer; over the masters, where weights rest as float8."""
    masters = functools.partial(f8.MasterWeights, optimizer_class=kind)
    return (masters if RESTS.get() else kind)(list(parameters), **settings)


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def ranks_test(module: str, cases: Cases) -> Callable[..., None]:
    """A test of the cases of a module, one process group for each number of ranks."""

    @pytest.mark.parametrize("ranks", cases)
    def test_ranks(ranks: int, tmp_path: Path) -> None:
        run_cases(module, ranks, tmp_path)

    return test_ranks


def run_cases(module: str, ranks: int, directory: Path) -> None:
    """Run the cases of a module for this number of ranks; fail with what any of them raised on any rank."""
    started(_run_rank, ranks, module, ranks, directory)
    raised = [torch.load(directory / f"raised_{rank}") for rank in range(ranks)]
    failed = [f"{name}, rank {rank}: {why}" for rank, one in enumerate(raised) for name, why in one.items()]
    assert not failed, "\n".join(failed)


def _run_rank(rank: int, module: str, ranks: int, directory: Path) -> None:
    """All cases on this rank; what each of them raised goes to the parent, by a file."""
    join(rank, ranks, directory)
    shared.append(directory)
    cases: Mapping[str, Callable[[], None]] = import_module(module).CASES[ranks]
    raised: dict[str, str] = {}
    for name, case in cases.items():
        try:
            case()
        except BaseException:  # pytest.raises raises no Exception
            raised[name] = traceback.format_exc()
        torch._dynamo.reset()
        dist.barrier()
    torch.save(raised, directory / f"raised_{rank}")
    dist.destroy_process_group()

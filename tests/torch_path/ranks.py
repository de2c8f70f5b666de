"""Cases over several ranks (gloo): one process group runs all of a file, since processes are expensive."""

import datetime
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Raised = list[dict[str, str]]
"""Of each rank: case -> what it raised; empty if nothing."""


def join(rank: int, ranks: int, directory: Path, *, seconds: int = 60) -> None:
    """Make this process a rank, with one thread; no collective waits longer than `seconds`."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=seconds)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)


def run_cases(rank: int, ranks: int, directory: Path, cases: Mapping[str, Callable[[], None]]) -> None:
    """Run all cases on this rank; what each of them raised goes to the parent, by a file."""
    join(rank, ranks, directory)
    raised: dict[str, str] = {}
    for name, case in cases.items():
        try:
            case()
            raised[name] = ""
        except BaseException:  # pytest.raises raises no Exception
            raised[name] = traceback.format_exc()
        torch._dynamo.reset()
        dist.barrier()
    torch.save(raised, directory / f"raised_{rank}")
    dist.destroy_process_group()


def spawned(run_rank: Callable[[int, int, Path], None], ranks: int, directory: Path) -> Raised:
    """What every case raised, on all ranks; `run_rank` calls `run_cases`."""
    mp.spawn(run_rank, (ranks, directory), nprocs=ranks)  # type: ignore[no-untyped-call]
    return [torch.load(directory / f"raised_{rank}") for rank in range(ranks)]


def assert_nothing(raised: Raised) -> None:
    """Fail with what any rank raised."""
    failed = [f"{name}, rank {rank}: {why}" for rank, one in enumerate(raised) for name, why in one.items() if why]
    assert not failed, "\n".join(failed)

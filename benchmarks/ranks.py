"""Benchmarks that torchrun starts, one process a GPU: how ranks meet, agree on failures, and part."""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.runner import AbsentError, say

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""NVLink multicast can put GPUs that others share out of service."""
LIMIT = timedelta(seconds=120)
"""For which a collective waits for a rank."""


class Ranks(NamedTuple):
    """All ranks of the run, and this one's device."""

    mesh: DeviceMesh
    device: torch.device
    control: Any
    """A gloo group, which works when the collectives of a model do not."""

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and records."""
        return self.mesh.get_rank() == 0

    def command(self, report: dict[str, Any]) -> None:
        """Writes into the facts of a report that they are those of several ranks."""
        report["command"] = report["command"].replace("python", f"torchrun --nproc-per-node {self.mesh.size()}", 1)
        report["device"] += f" x {self.mesh.size()}"


class DividedError(Exception):
    """Something failed on some ranks only, or otherwise on one than on another: their collectives no longer match."""


def join(kind: str) -> Ranks:
    """Meets the other ranks; `kind` is cuda or cpu."""
    os.environ |= MULTICAST_OFF
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch._dynamo.config.recompile_limit = 256  # models share the code of their blocks
    torch._dynamo.config.accumulated_recompile_limit = 1024
    dist.init_process_group(timeout=LIMIT, device_id=device if kind == "cuda" else None)
    # Beyond the limit of the others, so that a rank that waits for the model can still tell.
    control = dist.new_group(backend="gloo", timeout=2 * LIMIT)
    return Ranks(init_device_mesh(kind, (dist.get_world_size(),)), device, control)


def together(call: Callable[[], Any], ranks: Ranks) -> Any:
    """What `call` gives; all ranks then agree whether it failed on one of them.

    Raises:
        AbsentError, RuntimeError: it failed on all ranks with an error of one type; the reason is that of rank 0.
        DividedError: it did not fail on all ranks, or with errors of different types; all reasons.
    """
    result, error = None, None
    try:
        result = call()
    except Exception as raised:  # any: it must not leave the other ranks waiting
        error = raised
        if ranks.is_first and not isinstance(error, AbsentError):
            say(traceback.format_exc())
    own = None if error is None else (type(error).__name__, str(error).strip().partition("\n")[0])
    reasons: list[tuple[str, str] | None] = [None] * ranks.mesh.size()
    dist.all_gather_object(reasons, own, group=ranks.control)
    if not any(reasons):
        return result
    if len({reason and reason[0] for reason in reasons}) > 1:
        told = (f"rank {rank}: {': '.join(reason)}" for rank, reason in enumerate(reasons) if reason)
        raise DividedError("; ".join(told))
    if isinstance(error, AbsentError):
        raise error
    raise RuntimeError(": ".join(reasons[0] or ()))


def leave(ranks: Ranks, *, is_divided: bool) -> None:
    """Ends this rank when rank 0 has written.

    A collective that some ranks never joined is still under way if they are divided, and an orderly end would wait for
    it: the process exits, with status 1.
    """
    dist.barrier(group=ranks.control)
    if is_divided:
        sys.stdout.flush()
        os._exit(1)
    dist.destroy_process_group()

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

from benchmarks.runner import AbsentError, compile_without_limits, say

# NVLink multicast can put GPUs that others share out of service.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
LIMIT = timedelta(seconds=120)  # for which a collective waits for a rank


class DividedError(BaseException):
    """Something failed on some ranks only, or otherwise on one than on another: their collectives no longer match.

    The run ends, so no `except Exception` takes it for the failure of one subject.
    """


class Ranks(NamedTuple):
    """All ranks of the run, and this one's device."""

    mesh: DeviceMesh
    device: torch.device
    control: Any  # A gloo group, which works when the collectives of a model do not

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and records."""
        return self.mesh.get_rank() == 0

    def together(self, call: Callable[[], Any]) -> Any:
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
            if self.is_first and not isinstance(error, AbsentError):
                say(traceback.format_exc())
        reason = None if error is None else (type(error).__name__, str(error).strip().partition("\n")[0])
        reasons: list[tuple[str, str] | None] = [None] * self.mesh.size()
        dist.all_gather_object(reasons, reason, group=self.control)
        if not any(reasons):
            return result
        if len({reason and reason[0] for reason in reasons}) > 1:
            texts = (f"rank {rank}: {': '.join(reason)}" for rank, reason in enumerate(reasons) if reason)
            raise DividedError("; ".join(texts))
        if isinstance(error, AbsentError):
            raise error
        raise RuntimeError(": ".join(reasons[0] or ()))

    def leave(self, *, is_divided: bool) -> None:
        """Ends this rank when rank 0 has written.

        A collective that some ranks never joined is still under way if they are divided, and an orderly end would wait
        for it: the process exits, with status 1.
        """
        dist.barrier(group=self.control)
        if is_divided:
            sys.stdout.flush()
            os._exit(1)
        dist.destroy_process_group()


def join(kind: str, report: dict[str, Any]) -> Ranks:
    """Meets the other ranks; `kind` is cuda or cpu. The facts of the report become those of several ranks."""
    os.environ |= MULTICAST_OFF
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    compile_without_limits()  # models share the code of their blocks
    dist.init_process_group(timeout=LIMIT, device_id=device if kind == "cuda" else None)
    # Beyond the limit of the others, so that a rank that waits for the model can still tell.
    control = dist.new_group(backend="gloo", timeout=2 * LIMIT)
    ranks = Ranks(init_device_mesh(kind, (dist.get_world_size(),)), device, control)
    report["command"] = report["command"].replace("python", f"torchrun --nproc-per-node {ranks.mesh.size()}", 1)
    report["device"] += f" x {ranks.mesh.size()}"
    return ranks

"""vLLM's workers under `F8EMU_CAPTURE`: docs/guides/captures.md has the command.

Read in vLLM 0.33.0. Every process calls `register`, by the entry point of `f8emu.server_plugins`.
"""

import functools
import os
from typing import Any

from f8emu.spec.exports import public
from f8emu.torch.integrations.served import ServedCalls


def register() -> None:
    """Have the workers of this process capture their first calls; without `F8EMU_CAPTURE`, do nothing.

    What executors call is wrapped, `WorkerWrapperBase.execute_model`: a worker's warm-up does not come that way, nor do
    the calls of Ray's compiled graph. Calling it twice wraps it once.

    Raises:
        SpecError: `F8EMU_CAPTURE_CALLS` is no number from 1 on.
    """
    if not os.environ.get("F8EMU_CAPTURE"):
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # pyright: ignore[reportMissingImports]

    execute: Any = WorkerWrapperBase.execute_model
    if hasattr(execute, "captured_by_f8emu"):
        return
    served = ServedCalls()

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        call = functools.partial(execute, self, scheduler_output, *args, **options)
        # 1. A call without tokens moves cache blocks, or waits for other ranks.
        tokens = scheduler_output.num_scheduled_tokens
        if not tokens:
            return call()
        # 2. Engines that share no process group have ranks of their own.
        parallel = self.vllm_config.parallel_config
        folder = f"dp{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
        return served.run("decode" if max(tokens.values()) == 1 else "prefill", self.worker.get_model, call, folder)

    setattr(execute_model, "captured_by_f8emu", True)  # noqa: B010
    WorkerWrapperBase.execute_model = execute_model


__all__, __dir__ = public(__name__)

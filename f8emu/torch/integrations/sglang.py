"""SGLang's schedulers under `F8EMU_CAPTURE`: docs/guides/captures.md has the command.

Read in SGLang 0.5.23, and not run in a server. Every process calls `register`, by the entry point of
`f8emu.server_plugins`.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from f8emu.spec.exports import public
from f8emu.torch.integrations.served import ServedCalls

_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


def register() -> None:
    """Have the model runner of this process capture its first calls; without `F8EMU_CAPTURE`, do nothing.

    The calls are those of the target model; idle ones, and those of a draft, are not captured.

    Raises:
        SpecError: `F8EMU_CAPTURE_CALLS` is no number from 1 on.
    """
    if not os.environ.get("F8EMU_CAPTURE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    served = ServedCalls()

    def forward(original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **options: Any) -> Any:
        call = functools.partial(original, runner, batch, *args, **options)
        if runner.is_draft_worker or batch.forward_mode.is_idle():
            return call()
        return served.run("decode" if batch.forward_mode.is_decode() else "prefill", lambda: runner.model, call)

    HookRegistry.register(_TARGET, forward, HookType.AROUND)


__all__, __dir__ = public(__name__)

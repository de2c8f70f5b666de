"""Captures of a server's first calls, prefill and decode apart, for the plugins of vLLM and SGLang.

The environment variable `F8EMU_CAPTURE` names a folder, and `F8EMU_CAPTURE_CALLS` how many calls of each kind are
captured (1). Each call becomes a capture, `prefill-1`, `decode-1` and so on, with a directory for each rank, which
`f8emu diff` and `f8emu replay` read; its step is the number of the call. `f8emu certify` reads the folder of all.
Nothing that goes wrong here stops the server: it is logged.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn

from f8emu.spec.errors import F8Error, SpecError, UnsupportedError
from f8emu.torch.capture import capture
from f8emu.torch.foreign_layers import foreign_layers

_log = logging.getLogger("f8emu")
Kind = Literal["prefill", "decode"]
"""`decode`: a call in which every request has one token."""


class ServedCalls:
    """The calls that are still to be captured, of one process.

    Raises:
        SpecError: `F8EMU_CAPTURE_CALLS` is no number from 1 on.
    """

    def __init__(self) -> None:
        self.folder, calls = Path(os.environ["F8EMU_CAPTURE"]), os.environ.get("F8EMU_CAPTURE_CALLS", "1")
        if not calls.isdecimal() or not int(calls):
            raise SpecError(f"F8EMU_CAPTURE_CALLS must be a number of calls from 1 on; got {calls!r}")
        self.calls = int(calls)
        self.seen: dict[Kind, int] = {"prefill": 0, "decode": 0}

    def run(self, kind: Kind, model: Callable[[], nn.Module], call: Callable[[], Any], folder: str = "") -> Any:
        """What `call` gives, captured if it is one of the first; `folder` lies in that of the environment."""
        if self.seen[kind] >= self.calls:
            return call()
        self.seen[kind] += 1
        try:
            if not foreign_layers(served := model()):
                raise UnsupportedError("no float8 linear layer that a capture reads; serve float8 weights")
            place = self.folder / folder / f"{kind}-{self.seen[kind]}"
            running = capture(served, place, first_step=sum(self.seen.values()))
        except F8Error as error:
            self.stop(str(error))
            return call()
        with running:
            output = call()
        if not running.written:
            self.stop(
                "no layer showed itself: CUDA graphs and compiled code run no hooks; start the server without them"
            )
        return output

    def stop(self, why: str) -> None:
        """Capture nothing more, and say why."""
        self.seen = {"prefill": self.calls, "decode": self.calls}
        _log.error("F8EMU_CAPTURE: nothing more is captured: %s", why)

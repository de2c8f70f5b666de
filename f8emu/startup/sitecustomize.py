"""Runs as Python starts in a program of `f8emu run`: once that imports torch, torch's GEMMs are a chip's.

`f8emu.startup.environment` puts the folder of this file on PYTHONPATH, so that child processes are emulated too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


class _Loader(importlib.abc.Loader):
    """The loader of torch, and the emulation after it."""

    def __init__(self, loader: Any, options: str) -> None:
        self.loader = loader
        self.options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        try:
            from f8emu.spec.chips import chip_by_name
        except ModuleNotFoundError:
            message = f"f8emu run: {sys.executable} has no f8emu; run a Python that has it, or install it there"
            raise ModuleNotFoundError(message) from None
        from f8emu.torch.emulated.switch import emulate

        chip, _, bf16 = self.options.partition(",")
        emulate(chip_by_name("f8emu run", chip), bf16=bf16 == "bf16")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as the other finders do, however often a program asks before it imports torch."""

    def __init__(self, options: str) -> None:
        self.options = options

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader, self.options)
                return spec
        return None


def _start() -> None:
    options = os.environ.get("F8EMU_RUN")
    if options:
        sys.meta_path.insert(0, _Finder(options))
    # Another sitecustomize of this Python, which this one hides.
    here = os.path.dirname(os.path.abspath(__file__))
    hidden = importlib.machinery.PathFinder.find_spec(
        "sitecustomize", [path for path in sys.path if os.path.abspath(path) != here]
    )
    if hidden is not None and hidden.loader is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


_start()

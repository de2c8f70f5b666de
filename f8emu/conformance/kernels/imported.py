"""Imports a kernel's function from a module or a file, which may be missing, broken, or end the process.

And whether Triton interprets it, which may be known before it is called.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from f8emu.conformance.arrays import Framework
from f8emu.conformance.cases.gemm import NotOffered
from f8emu.conformance.compare import text_of
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.spec import SpecError
from f8emu.spec.errors import did_you_mean

INTERPRETED = "in Triton's interpreter: nothing follows for the GPU"
"""Part of the engine of such a kernel."""
# The values of TRITON_INTERPRET that Triton reads as true.
_TRUE = ("1", "true", "yes", "on", "y")
REMEDY = "what a kernel is given and returns: f8emu verify --contract"
"""Ends an error about a kernel that cannot be called."""
# Names that a message lists.
_NAMED = 8


def function_of(kernel: Kernel, framework: Framework) -> Callable[..., Any]:
    """The kernel's function, imported if the declaration names it."""
    if kernel.needs_gpu and not framework.on_gpu:
        install = f"; on a machine with one: {kernel.install}" if kernel.install else ""
        raise NotOffered(f"{kernel.name} needs a GPU, and {framework.name} has none here{install}")
    # A package that is missing or broken is not offered where the declaration says how to install it: a run goes on.
    function = kernel.function
    if isinstance(function, str):
        try:
            for name in kernel.imports:
                if ":" in name:
                    attribute(name)
                else:
                    importlib.import_module(name)
            return attribute(function)
        except Exception as error:  # of the package, as if built for another torch
            message = f"{type(error).__name__}: {text_of(error)}"
            if kernel.install:
                raise NotOffered(f"{kernel.name} is not installed ({message}); {kernel.install}") from None
            raise SpecError(
                f"Kernel {kernel.name!r}: expected {kernel.function} to be importable; {message}. Run it where the "
                "module can be imported, or set PYTHONPATH"
            ) from None
    return function


def attribute(path: str) -> Any:
    """The object that `package.module:attribute.of.it` or `path/to/file.py:attribute.of.it` names.

    The directory of a file is the first of `sys.path` while the file runs, as for `python path/to/file.py`, and then
    the last.
    """
    place, _, names = path.rpartition(":")
    try:
        value: Any = _module_of_file(place) if place.endswith(".py") or os.sep in place else _module(place)
    except SystemExit as end:
        raise SpecError(
            f"f8emu verify {path}: the import of {place} raised SystemExit({text_of(end)}), which ends a process; put "
            'what a script does under if __name__ == "__main__"'
        ) from None
    for name in names.split("."):
        if not hasattr(value, name):
            raise AttributeError(f"{place} has no attribute {name!r}{_near(name, _offered(value))}")
        value = getattr(value, name)
    return value


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # one that this one imports
            raise
        files = [path.stem for path in Path.cwd().glob("*.py")]
        raise ImportError(f"{error}{_near(name, files)}") from None


def _module_of_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        files = [file.name for file in sorted(path.parent.glob("*.py"))]
        name = os.path.basename(place)
        raise ImportError(f"there is no file {place}{_near(name, files, place.removesuffix(name))}")
    # 1. A file that is imported already is not run again: its kernels may keep state.
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None:  # another module of that name, as of a file called numpy.py
        name = f"{name} of {path.parent}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    # 2. It runs with its own directory first, as under `python FILE`.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:  # last: what the suite imports later is not what has the same name there
            sys.path.append(folder)
    return module


def _offered(namespace: Any) -> list[str]:
    # Kernels, and functions that were written there.
    home = getattr(namespace, "__name__", None)
    return [
        name
        for name, value in vars(namespace).items()
        if isinstance(value, Kernel) or (callable(value) and getattr(value, "__module__", home) == home)
    ]


def _near(name: str, known: Iterable[str], folder: str = "") -> str:
    # The end of a message that names what is there.
    public = [other for other in known if not other.startswith("_")]
    there = ", ".join(folder + other for other in public[:_NAMED])
    return did_you_mean(name, public, folder) + (f"; there: {there}" if there else "")


def is_interpreted(function: Callable[..., Any] | str) -> bool:
    """Whether Triton is told to interpret, and the function, or one that its module names, may use Triton.

    `function` may be `package.module:function`, of a module that was imported: nothing is imported to find out.
    """
    triton = sys.modules.get("triton")
    is_told = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
    if not (is_told if triton is None else triton.knobs.runtime.interpret):
        return False
    target: Any = function
    if isinstance(function, str):
        place, _, names = function.rpartition(":")
        target = sys.modules.get(place)
        for name in names.split("."):
            target = getattr(target, name, None)
    beside = [target, *getattr(target, "__globals__", {}).values()]
    return any(type(value).__module__.startswith("triton") or "triton" in _names_in(value) for value in beside)


def _names_in(function: Any) -> set[str]:
    names = getattr(function, "__globals__", None)
    return {*getattr(getattr(function, "__code__", None), "co_names", ()), *(names if isinstance(names, dict) else ())}

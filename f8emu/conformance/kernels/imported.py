"""Where a kernel's function comes from: an import path, of a package that may be missing or broken."""

import importlib
from collections.abc import Callable
from typing import Any

from f8emu.conformance.arrays import Framework
from f8emu.conformance.gemm import NotOffered
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.spec import SpecError


def function_of(kernel: Kernel, framework: Framework) -> Callable[..., Any]:
    """What is called.

    Raises:
        NotOffered: it is not here: no GPU, or its package is not installed.
        SpecError: it cannot be imported, and nothing says how to install it.
    """
    if kernel.needs_gpu and not framework.on_gpu:
        install = f"; on a machine with one: {kernel.install}" if kernel.install else ""
        raise NotOffered(f"{kernel.name} needs a GPU, and {framework.name} has none here{install}")
    if not isinstance(kernel.function, str):
        return kernel.function
    try:
        for name in kernel.imports:
            importlib.import_module(name)
        return attribute(kernel.function)
    except Exception as error:  # the package's code runs: built for another torch, it may raise anything
        said = f"{type(error).__name__}: {error}"
        if kernel.install:
            raise NotOffered(f"{kernel.name} is not installed ({said}); {kernel.install}") from None
        if not isinstance(error, ImportError | AttributeError | OSError):
            raise
        raise SpecError(
            f"Kernel {kernel.name!r}: expected {kernel.function} to be importable; {error}. Run it where the module "
            "can be imported, or set PYTHONPATH"
        ) from None


def attribute(path: str) -> Any:
    """What `package.module:attribute.of.it` names.

    Raises:
        ImportError: no such module.
        AttributeError: no such attribute.
    """
    module_name, _, names = path.partition(":")
    found = importlib.import_module(module_name)
    for name in names.split("."):
        found = getattr(found, name)
    return found

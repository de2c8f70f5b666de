"""The engine's shared library: where it is, and why it is not there."""

import ctypes
import functools
import os
import platform
import warnings
from importlib import resources
from typing import Any

NAME = "_engine.abi3.so"
"""The file beside this module. It is no extension module: `ctypes` loads it, for every version of Python."""
VARIABLE = "F8EMU_NATIVE_LIBRARY"
"""Names a library to load in place of the packaged one: one built with a sanitizer."""
ABI = 5
"""`F8_ABI` of engine.h: an engine of another number has other structs."""
_REINSTALL = "run pip install --force-reinstall --no-deps --no-cache-dir f8emu"


def path() -> str:
    """The file that is loaded; it need not exist."""
    return os.environ.get(VARIABLE) or str(resources.files("f8emu.native") / NAME)


@functools.cache
def _load() -> ctypes.CDLL | str:
    # 1. No file: named by the variable, not built in a checkout, or left out of an installation.
    file = path()
    if not os.path.isfile(file):
        if os.environ.get(VARIABLE):
            return f"{VARIABLE} names {file}, which is not there; unset it, or build the engine there"
        if (resources.files("f8emu.native") / "src").is_dir():
            return "this checkout's engine is not compiled; run make engine, which needs gcc or clang"
        why = "f8emu was installed without its engine, which no C compiler was found for"
        return f"{why}; install gcc or clang, then {_REINSTALL}"
    # 2. A file of another machine does not load, and a damaged one lacks a function. An older one has other structs.
    try:
        library = ctypes.CDLL(file)
        library.f8_width_name.restype = ctypes.c_char_p
        abi = library.f8_abi() if hasattr(library, "f8_abi") else 1
        if abi != ABI:
            why = f"{file} is the engine of another version of f8emu: its interface is number {abi}, not {ABI}"
            return f"{why}; in a checkout run make engine, otherwise {_REINSTALL}"
        for function in (library.f8_width_name, library.f8_width_runs_here):
            function.argtypes = [ctypes.c_int]
        for function in (library.f8_run, library.f8_run_cast):
            function.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.f8_run_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.f8_scales.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 3]
        library.f8_hash.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int]
        library.f8_hash.restype = ctypes.c_uint64
        library.f8_products.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 2]
    except (OSError, AttributeError) as problem:
        machine = f"{platform.system()} on {platform.machine()}"
        why = f"the engine does not load on {machine}, its file is damaged or of another machine: {problem}"
        return f"{why}; install gcc or clang, then {_REINSTALL}"
    return library


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type in a struct of engine.h."""
    return tuple((name, kind) for name in names.split())


def library() -> ctypes.CDLL | None:
    """The loaded library; None if it is `unavailable`."""
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def unavailable() -> str | None:
    """Why there is no engine, and the remedy, in one sentence; None: there is one."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def is_there(caller: str, until_then: str) -> bool:
    """Whether there is an engine; where it is missing, a warning says once what `caller` does `until_then`."""
    if library() is None:
        _warn_once(f"{caller}: {unavailable()}; until then {until_then}. This warning appears once")
        return False
    return True


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


@functools.cache
def width_numbers() -> dict[str, int]:
    """The widths that run on this machine, fastest first: name -> number in the library."""
    # The library lists its widths, fastest first, and ends with a null; not all run on this processor.
    engine, names = library(), list[str]()
    while engine is not None and (name := engine.f8_width_name(len(names))) is not None:
        names.append(name.decode())
    return {name: i for i, name in enumerate(names) if engine is not None and engine.f8_width_runs_here(i)}


def widths() -> tuple[str, ...]:
    """The names of the widths that run on this machine, fastest first."""
    return tuple(width_numbers())


def width_number(width: str | None) -> int:
    """The number of a width in the library; None is the fastest."""
    numbers = width_numbers()
    if width is None:
        return next(iter(numbers.values()))
    if width not in numbers:
        raise ValueError(f"no width {width!r}; this machine has {', '.join(numbers)}")
    return numbers[width]

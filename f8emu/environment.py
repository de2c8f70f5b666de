"""Versions and devices that a result belongs to, files that appear whole, and text that a terminal may print."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from f8emu import __version__
from f8emu.spec.errors import OperandError

TESTED = {"torch": ("2.11", "2.13", "2.14", "2.15"), "jax": ("0.10",)}
"""The releases that the tests ran with, from the oldest that f8emu takes; torch 2.11 on a GPU, the others on a CPU."""


def versions() -> dict[str, str | None]:
    """Versions of f8emu, Python, the array packages and the NVIDIA driver; None for what is not installed."""
    releases: dict[str, str | None] = {"f8emu": __version__, "python": platform.python_version()}
    releases |= {package: version_of(package) for package in ("numpy", "ml_dtypes", "jax", "jaxlib", "torch")}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        answer = []
    releases["driver"] = answer[0] if answer else None
    return releases


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tested() -> str:
    """The releases of torch and JAX that f8emu was tested with, in words."""
    return "; ".join(f"{package} {', '.join(releases)}" for package, releases in TESTED.items())


def devices() -> dict[str, list[str]]:
    """Devices that the loaded frameworks see. A framework that is not loaded yet is not loaded for it."""
    names = {"cpu": [platform.processor() or platform.machine()]}
    if torch := sys.modules.get("torch"):
        names["torch"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"]
    if jax := sys.modules.get("jax"):
        names["jax"] = [device.device_kind for device in jax.devices()]
    return names


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A TimeoutError after that much time of the processor, within `re` too; no limit outside the main thread."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def write_beside(path: Path, content: bytes) -> None:
    """A whole file or none: written under another name, then renamed over what is there."""
    beside = path.with_name(f".f8emu-{os.getpid()}-{time.time_ns()}")
    try:
        beside.write_bytes(content)
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def require_new(call: str, path: Path, argument: str = "path") -> None:
    """Refuse a path at which something is."""
    if os.path.lexists(path):
        raise OperandError(f"{call}: {argument} must not exist; got {path}; remove it, or choose another")


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A whole directory or none: made under another name, with the parents that it lacks, and renamed at the end."""
    beside = path.with_name(f".f8emu-{os.getpid()}-{path.name}")
    parents = [parent for parent in path.parents if not parent.exists()]
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.rename(path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        for parent in parents:
            parent.rmdir()
        raise


def printable(text: str) -> str:
    """The text with what a terminal would obey escaped, as in a string of Python."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def spanned(noun: str, first: int, last: int) -> str:
    """`row 4`, or `rows 4 to 7`."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def percent(share: float) -> str:
    """`0 %` and `100 %` are exact; what is close to them says so."""
    value = 100 * share
    if 0 < value < 0.1:
        return "< 0.1 %"
    if 99.9 < value < 100:
        return "> 99.9 %"
    return f"{value:.1f} %" if value % 100 else f"{value:.0f} %"

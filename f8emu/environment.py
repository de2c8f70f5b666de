"""The environment that a result belongs to: versions of the packages and the driver, and the devices."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from f8emu import __version__


def versions() -> dict[str, str | None]:
    """Versions of f8emu, Python, the array packages and the NVIDIA driver; None for what is not installed."""
    found: dict[str, str | None] = {"f8emu": __version__, "python": platform.python_version()}
    for package in ("numpy", "ml_dtypes", "jax", "jaxlib", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        answer = []
    found["driver"] = answer[0] if answer else None
    return found


def devices() -> dict[str, list[str]]:
    """Devices that the loaded frameworks see. A framework that is not loaded yet is not loaded for it."""
    found = {"cpu": [platform.processor() or platform.machine()]}
    if torch := sys.modules.get("torch"):
        found["torch"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"]
    if jax := sys.modules.get("jax"):
        found["jax"] = [device.device_kind for device in jax.devices()]
    return found

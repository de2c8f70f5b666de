"""The plugin of pytest: `--f8emu-chip=H100` runs a suite whose torch GEMMs in float8 have the bits of that chip.

It loads nothing until the option is given.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Add the options."""
    group = parser.getgroup("f8emu", "float8 with the bits of a chip")
    group.addoption("--f8emu-chip", metavar="NAME", help="run the tests with torch's GEMMs of this chip, such as H100")
    group.addoption("--f8emu-bf16", action="store_true", help="also torch's bfloat16 mm, addmm and bmm")


def pytest_configure(config: "pytest.Config") -> None:
    """Start the emulation, here and in the processes that tests start."""
    chip, bf16 = config.getoption("f8emu_chip"), bool(config.getoption("f8emu_bf16"))
    if not chip:
        return
    import pytest

    from f8emu.spec.errors import F8Error
    from f8emu.startup import environment

    try:
        from f8emu.torch import emulate

        emulation = emulate(chip, bf16=bf16)
    except F8Error as error:
        raise pytest.UsageError(str(error)) from error
    config.add_cleanup(emulation.undo)
    os.environ.update(environment(chip, bf16))


def pytest_report_header(config: "pytest.Config") -> str | None:
    """Say which chip computes."""
    chip = config.getoption("f8emu_chip")
    return f"f8emu: torch's float8 GEMMs have the bits of {chip}" if chip else None

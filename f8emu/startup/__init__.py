"""Programs and test suites that f8emu starts: the environment in which their Pythons emulate a chip."""

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "F8EMU_RUN"
"""The chip and the options of `emulate`, for `sitecustomize`."""


def environment(chip: str, bf16: bool, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` with what makes every Python that starts in it emulate `chip`."""
    paths = [str(Path(__file__).parent), *filter(None, [environ.get("PYTHONPATH")])]
    options = f"{chip},bf16" if bf16 else chip
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: options}

"""Whether a kernel runs in Triton's interpreter: numpy multiplies there, and no GPU has a part in it."""

import os
import sys
from collections.abc import Callable
from typing import Any

INTERPRETED = "in Triton's interpreter: nothing follows for the GPU"
"""Part of the engine of such a kernel."""
_TRUE = ("1", "true", "yes", "on", "y")
"""The values of TRITON_INTERPRET that Triton reads as true."""


def is_interpreted(function: Callable[..., Any] | str) -> bool:
    """Whether Triton's part of a function is interpreted. Nothing is imported to find out.

    It is where the function, one that its module names, or one beside such a one was made by `triton.jit` to be
    interpreted; and where the function names Triton, which may load it when it is called, while Triton is told to
    interpret. `function` may be `package.module:function`, of a module that was imported.
    """
    found: Any = function
    if isinstance(function, str):
        place, _, names = function.rpartition(":")
        found = sys.modules.get(place)
        for name in names.split("."):
            found = getattr(found, name, None)
    beside = [found, *_namespace(found).values()]
    modules = {id(names): names for names in map(_namespace, beside)}
    if any(_is_made_so(value) for value in (found, *(x for names in modules.values() for x in list(names.values())))):
        return True
    triton = sys.modules.get("triton")
    is_told = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
    is_told = is_told if triton is None else bool(triton.knobs.runtime.interpret)
    return is_told and any("triton" in name for name in getattr(getattr(found, "__code__", None), "co_names", ()))


def _namespace(value: Any) -> dict[str, Any]:
    """The names that a function sees."""
    found = getattr(value, "__globals__", None)
    return found if isinstance(found, dict) else {}


def _is_made_so(value: Any) -> bool:
    """Autotuners and heuristics have the function that they wrap as `fn`."""
    while type(value).__module__.startswith("triton.runtime"):
        if type(value).__name__ == "InterpretedFunction":
            return True
        value = getattr(value, "fn", None)
    return False

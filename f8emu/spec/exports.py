"""`__all__` and `dir` of a public package or module, from what it imports or defines: no list beside the code.

`__all__, __dir__ = public(__name__)` is the last line of each.
"""

import sys
from collections.abc import Callable, Collection
from types import ModuleType


def public(module: str, *late: str, rooms: Collection[str] = ()) -> tuple[list[str], Callable[[], list[str]]]:
    """`__all__` and `__dir__` of `module`: what a package imports and what a plain module defines, sorted.

    Args:
        module: its `__name__`, whose names are all there.
        late: names that are loaded on first use.
        rooms: public packages inside it, which `dir` has once they are loaded.
    """
    names = vars(sys.modules[module])
    is_package = "__path__" in names
    here = [
        name
        for name, value in names.items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and (is_package or getattr(value, "__module__", None) == module)
    ]
    exported = sorted({*here, *late})
    return exported, lambda: sorted([*exported, *(room for room in rooms if room in names)])

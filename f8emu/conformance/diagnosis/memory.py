"""What is computed once: `Memory` of arrays by their bits."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")


class Memory:
    """What was computed before: hypotheses about an epilogue share accumulators, and many have the same output.

    Arrays of the same bits are one, whichever probe or rule they come from; other objects are themselves alone.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._numbers: dict[int, tuple[object, int]] = {}
        self._contents: dict[Hashable, int] = {}

    def get(self, of: tuple[object, ...], key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` gives for these objects. They are kept, and so is what it gives: nobody may write to either."""
        full = (*map(self._number, of), key)
        if full not in self._known:
            self._known[full] = make()
        return self._known[full]

    def _number(self, x: object) -> int:
        found = self._numbers.get(id(x))
        if found is None:
            content = (x.dtype, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else id(x)
            found = x, self._contents.setdefault(content, len(self._contents))
            self._numbers[id(x)] = found
        return found[1]

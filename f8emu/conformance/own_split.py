"""A kernel that is not told S picks it [CHAIN-3]: which S explains its bits, where another one was expected.

A library takes few slices, of whole promotions. One S must explain a whole output, and every output of a run that
differs must have its S: otherwise the kernel is wrong, and no S excuses any of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from f8emu.conformance.compare import different
from f8emu.conformance.gemm import GemmCase, Mode

MOST_SLICES = 16
"""An H200's library takes 12 at most."""
_SHORTEST = 128
_LOOKED_AT = 3
"""Rows and columns of the outputs that differ, on which most S fail."""


@dataclass(slots=True)
class OwnSplit:
    """Looks for the S of one subject, and gives up for good after an output that no S explains."""

    judge: Callable[[GemmCase], np.ndarray]
    """The right output of a GEMM under its S."""
    _found: list[int] = field(default_factory=list[int])
    """The latest first."""
    _is_refuted: bool = False

    def __call__(self, case: GemmCase, observed: np.ndarray, expected: np.ndarray) -> int:
        """The S of which `observed` has every bit, where it differs from `expected`; 0 where there is none."""
        if self._is_refuted:
            return 0
        differs = different(observed, expected)
        most = 1 if case.mode is Mode.GROUPED_ROWWISE else min(MOST_SLICES, -(-case.k // _SHORTEST))
        for slices in dict.fromkeys((*self._found, *range(1, most + 1))):
            if slices != case.split_k and self._explains(replace(case, split_k=slices), observed, differs):
                self._found = list(dict.fromkeys((slices, *self._found)))
                return slices
        self._is_refuted = True
        return 0

    def _explains(self, case: GemmCase, observed: np.ndarray, differs: np.ndarray) -> bool:
        if case.mode in (Mode.TENSORWISE, Mode.ROWWISE):
            rows, cols = (np.unique(places)[:_LOOKED_AT] for places in np.nonzero(differs))
            if different(observed[np.ix_(rows, cols)], self.judge(case.part(rows, cols))).any():
                return False
        return not different(observed, self.judge(case)).any()

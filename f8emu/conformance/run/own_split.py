"""A kernel that is not told S picks it [CHAIN-3]: which S explains its bits, where another one was expected.

A library takes few slices, of whole promotions. One S must explain a whole output, and every output of a stage that
differs must have its S: otherwise the kernel is wrong, and no S excuses any of it. Slices of one promotion are what a
kernel has that promotes though it was asked for fast accumulation: such an S counts where it has longer slices too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.compare import different

MOST_SLICES = 32
"""An H100's library takes 25 of a K of 65,552, the longest that is asked."""
_PROMOTION = 128
_LOOKED_AT = 3
"""Rows and columns of the outputs that differ, on which most S fail."""


class Split(NamedTuple):
    """The S that explains an output."""

    slices: int
    is_long: bool
    """Whether its slices are longer than a promotion."""


def are_excused(splits: Iterable[Split]) -> bool:
    """Whether the S of a stage, in which nothing else differs, are those of a library."""
    splits = set(splits)
    return {split.slices for split in splits} == {split.slices for split in splits if split.is_long}


@dataclass(slots=True)
class OwnSplit:
    """Looks for the S of one subject, and gives up for good after an output that no S explains."""

    judge: Callable[[GemmCase], np.ndarray]
    """The right output of a GEMM under its S."""
    _found: list[int] = field(default_factory=list[int])
    """The latest first."""
    _is_refuted: bool = False

    def __call__(self, case: GemmCase, observed: np.ndarray, expected: np.ndarray) -> Split | None:
        """The S of which `observed` has every bit, where it differs from `expected`."""
        if self._is_refuted:
            return None
        differs = different(observed, expected)
        most = 1 if case.mode is Mode.GROUPED_ROWWISE else min(MOST_SLICES, -(-case.k // _PROMOTION))
        for slices in dict.fromkeys((*self._found, *range(1, most + 1))):
            if slices != case.split_k and self._explains(replace(case, split_k=slices), observed, differs):
                self._found = list(dict.fromkeys((slices, *self._found)))
                return Split(slices, slices == 1 or case.k > slices * _PROMOTION)
        self._is_refuted = True
        return None

    def _explains(self, case: GemmCase, observed: np.ndarray, differs: np.ndarray) -> bool:
        if case.mode in (Mode.TENSORWISE, Mode.ROWWISE):
            rows, cols = (np.unique(places)[:_LOOKED_AT] for places in np.nonzero(differs))
            if different(observed[np.ix_(rows, cols)], self.judge(case.part(rows, cols))).any():
                return False
        return not different(observed, self.judge(case)).any()

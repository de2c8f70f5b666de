"""Where in an output the bits differ: rows x columns, small enough to keep for the worst cases."""

from dataclasses import dataclass

import numpy as np

from f8emu.conformance.breakdown.ulps import distances
from f8emu.conformance.compare import different

MAX_CELLS = 128
"""Rows and columns of a map; a larger output has cells of several outputs."""
_FOLD = 256
"""Outputs in a row of the map of a vector: with every code of 16 bits in order, a row is a high byte."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DifferenceMap:
    """One output, cell by cell."""

    case: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the output."""
    cell: tuple[int, int]
    """Rows and columns of the output in one cell."""
    differing: np.ndarray
    """[R, C] integers: outputs of the cell that differ."""
    farthest: np.ndarray
    """[R, C] int64: their largest distance in ulps, signed as `distances` signs it."""
    apart: np.ndarray
    """[R, C] bool: a NaN or an infinity is on one side alone."""

    @property
    def outputs(self) -> int:
        return int(np.prod(self.shape))

    @property
    def outputs_differing(self) -> int:
        return int(self.differing.sum())

    @property
    def share(self) -> float:
        return self.outputs_differing / self.outputs

    def summary(self) -> str:
        """What the picture shows, in words."""
        rows, columns = ((self.differing.sum(axis=axis) > 0) for axis in (1, 0))
        words = [
            f"{self.outputs_differing:,} of {self.outputs:,} outputs differ",
            f"in {rows.sum()} of {rows.size} rows{self._of_cells(0)} and "
            f"{columns.sum()} of {columns.size} columns{self._of_cells(1)}",
        ]
        finite = self.farthest[(self.differing > 0) & ~self.apart]
        if finite.size:
            words.append(f"by {finite.min():+,} to {finite.max():+,} ulps")
        if self.apart.any():
            words.append(f"{int(self.apart.sum())} cells with a NaN or an infinity on one side only")
        return ", ".join(words)

    def _of_cells(self, axis: int) -> str:
        return f" of cells ({self.cell[axis]} each)" if self.cell[axis] > 1 else ""


def difference_map(case: str, part: str, observed: np.ndarray, expected: np.ndarray) -> DifferenceMap:
    """The map of two arrays of one dtype and shape, not empty."""
    wrong = _rows(different(observed, expected))
    distance, apart = (_rows(array) for array in distances(observed, expected))
    cell = (-(-wrong.shape[0] // MAX_CELLS), -(-wrong.shape[1] // MAX_CELLS))
    farthest = _cells(np.where(wrong, distance, 0), cell)
    lowest, highest = farthest.min(axis=-1), farthest.max(axis=-1)
    return DifferenceMap(
        case=case,
        part=part,
        dtype=np.asarray(expected).dtype.name,
        shape=np.shape(expected),
        cell=cell,
        differing=np.asarray(np.count_nonzero(_cells(wrong, cell), axis=-1)),
        farthest=np.where(-lowest > highest, lowest, highest),
        apart=np.asarray(_cells(wrong & apart, cell).any(axis=-1)),
    )


def _rows(array: np.ndarray) -> np.ndarray:
    """A matrix as it is; anything else in rows of 256, the last one padded with zeros."""
    if is_matrix(array.shape):
        return array
    flat = array.ravel()
    width = min(_FOLD, flat.size)
    return np.pad(flat, (0, -flat.size % width)).reshape(-1, width)


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether rows and columns of a map are those of the output."""
    return len(shape) == 2 and min(shape) > 1


def _cells(array: np.ndarray, cell: tuple[int, int]) -> np.ndarray:
    """[R, C, outputs of a cell], padded with zeros."""
    array = np.pad(array, ((0, -array.shape[0] % cell[0]), (0, -array.shape[1] % cell[1])))
    split = array.reshape(array.shape[0] // cell[0], cell[0], array.shape[1] // cell[1], cell[1])
    return split.transpose(0, 2, 1, 3).reshape(split.shape[0], split.shape[2], -1)

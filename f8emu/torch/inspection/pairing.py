"""Which matrix an operand was cast from: a backward pass may come after other forward passes than its own.

Pipelines run several forward passes before the first backward pass; a teacher or an evaluation runs some without any.
So what is known of a matrix waits, with values of it from a grid of places, until a GEMM comes whose operand has the
codes of these values under the operand's own scale.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from f8emu.torch.cast import cast, decode
from f8emu.torch.inspection.gemm_error import Sample
from f8emu.torch.inspection.matrix import launches_for
from f8emu.torch.inspection.statistics import Statistics
from f8emu.torch.layer.operands import Operand
from f8emu.torch.torch_internals import to_list

_SIDE = 32
"""Rows and columns of a grid."""
_MOST_WAITING = 32
"""Matrices of one operand; of more passes between a forward pass and its backward pass the oldest are given up."""
ALIKE = 0.9
"""Share of equal codes: a compiler may fuse a cast with the code before it, and skip the rounding in between."""
_SLACK = 2.0**-22
"""Relative: inv_scale, with which values are cast, and the reciprocal of scale, which is at hand, are this close."""
_BLOCK = 128


class Grid(NamedTuple):
    """Values of a matrix at evenly spaced rows and columns, copied: compiled code uses its memory again."""

    shape: tuple[int, int]
    """The shape of the matrix."""
    values: Tensor
    """[rows, columns], in the dtype of the matrix."""

    def t(self) -> "Grid":
        """The grid of the transpose."""
        return Grid((self.shape[1], self.shape[0]), self.values.t())


class Prepared(NamedTuple):
    """What is known of an operand before its GEMM."""

    grid: Grid
    statistics: Statistics
    what_if: dict[str, Statistics]
    """Statistics by recipe."""
    sample: Sample | None
    before: Tensor | None


class Taken(NamedTuple):
    """What is known of an operand."""

    prepared: Prepared
    likeness: Tensor | None
    """[] float64: only if it is at least ALIKE was the operand cast from that matrix; None: it was."""


class Waiting:
    """The operands whose GEMM has not come yet.

    Where one matrix waits for each operand, as in most models, nobody waits for the device: who reads the statistics
    decides by the likeness. Before another GEMM of the same layer, all that were left open are decided at once.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._found: dict[tuple[str, str, str], deque[_Candidate]] = {}
        self._open: list[tuple[deque[_Candidate], _Candidate]] = []

    def add(self, layer: str, gemm: str, side: str, prepared: Prepared) -> None:
        """Another one of a layer, GEMM and side (a or b)."""
        self._found.setdefault((layer, gemm, side), deque(maxlen=_MOST_WAITING)).append(_Candidate(prepared))

    def take(self, layer: str, gemm: str, operands: Sequence[Operand]) -> list[Taken | None]:
        """The waiting matrices from which these operands, a and b, were cast; the oldest of equals; None: not known."""
        queues = [self._found.get((layer, gemm, side), deque[_Candidate]()) for side in "ab"]
        if any(one.likeness is not None for queue in queues for one in queue):
            self._decide()
        for operand, queue in zip(operands, queues, strict=True):
            for one in queue:
                one.likeness = likeness(operand, one.prepared.grid, self._ranks)
        if all(len(queue) <= 1 for queue in queues):
            self._open += [(queue, one) for queue in queues for one in queue]
            return [Taken(queue[0].prepared, queue[0].likeness) if queue else None for queue in queues]
        numbers: Iterator[float] = iter(_read(one for queue in queues for one in queue))
        taken: list[Taken | None] = []
        for queue in queues:
            found = [next(numbers) for _ in queue]
            best = max(found, default=0.0)
            if best < ALIKE:
                taken.append(None)
                continue
            place = found.index(best)
            taken.append(Taken(queue[place].prepared, None))
            del queue[place]
        return taken

    def clear(self) -> None:
        """Forget all: the step is over."""
        self._found.clear()
        self._open.clear()

    def _decide(self) -> None:
        """Drop those that were taken, of which that was left open."""
        shares = _read(one for _, one in self._open)
        for (queue, one), share in zip(self._open, shares, strict=True):
            if share >= ALIKE and one in queue:
                queue.remove(one)
        self._open.clear()


class _Candidate:
    """A matrix that waits, and its likeness to an operand if it may have been taken."""

    __slots__ = ("likeness", "prepared")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.likeness: Tensor | None = None


def _read(candidates: Iterable[_Candidate]) -> list[float]:
    """Their likenesses, which are set to None. Waits for the device."""
    shares: list[Tensor] = []
    for one in candidates:
        if one.likeness is not None:
            shares.append(one.likeness)
            one.likeness = None
    # Layers may lie on several devices.
    return to_list(torch.stack([share.to(shares[0].device) for share in shares])) if shares else []


def grid_of(x: Tensor) -> Grid:
    """The grid of `x` [rows, columns]."""
    rows, columns = (_places(n, x.device) for n in x.shape)
    return Grid((x.shape[0], x.shape[1]), x.detach().index_select(0, rows).index_select(1, columns))


@lru_cache(maxsize=1024)
def _places(count: int, device: torch.device) -> Tensor:
    """The rows or columns of a grid, of `count`."""
    side = min(_SIDE, count)
    with torch.inference_mode(False):
        return torch.arange(side, device=device) * count // max(1, side)


def likeness(operand: Operand, grid: Grid, ranks: int = 1) -> Tensor:
    """The share of the grid's places where the operand has the codes of the values; [] float64.

    Places where both are zero do not count, since unlike matrices may have many. Under tensor parallelism an operand
    may have been gathered from as many matrices as there are `ranks`, one below or beside the other; the one that is
    the most alike counts. Tokens of several sequences are gathered in another order: 0.
    """
    (rows, columns), (own_rows, own_columns) = operand.codes.shape, grid.shape
    device = grid.values.device
    if grid.values.numel() == 0 or operand.codes.numel() == 0:
        return torch.tensor(float((rows, columns) == grid.shape), dtype=torch.float64, device=device)
    codes, scale = operand
    if codes.shape == grid.shape and (launch := launches_for(grid.values)) is not None and launch.likens(codes):
        return launch.likeness(codes, scale, grid.values, _SLACK)
    parts = (rows // own_rows) * (columns // own_columns)
    if rows % own_rows or columns % own_columns or parts > ranks:
        return torch.zeros((), dtype=torch.float64, device=device)
    found = [
        _likeness(operand, _places(own_rows, device) + i, _places(own_columns, device) + j, grid.values)
        for i in range(0, rows, own_rows)
        for j in range(0, columns, own_columns)
    ]
    return torch.stack(found).max()


def _likeness(operand: Operand, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    codes, scale = operand
    if scale is None:
        found = codes.index_select(0, rows).index_select(1, columns).float()
        expected = (values.to(codes.dtype).float(),)
    else:
        raw = codes.view(torch.uint8).index_select(0, rows).index_select(1, columns)
        found = decode(raw.view(codes.dtype))
        scale_rows, scale_columns = (
            place if many == whole else place // _BLOCK if many > 1 else torch.zeros_like(place)
            for place, many, whole in zip((rows, columns), scale.shape, codes.shape, strict=True)
        )
        factor = values.float() / scale[scale_rows[:, None], scale_columns]
        expected = tuple(decode(cast(factor * (1 + slack), codes.dtype)) for slack in (-_SLACK, _SLACK))
    is_equal = torch.zeros_like(found, dtype=torch.bool)
    is_zero = found == 0
    for one in expected:
        is_equal |= (one == found) | (one.isnan() & found.isnan())
        is_zero &= one == 0
    counted = (~is_zero).sum()
    return torch.where(counted > 0, (is_equal & ~is_zero).sum() / counted, 1.0).double()

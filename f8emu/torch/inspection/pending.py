"""Records whose statistics are still on their device, and reading them, all at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.torch.inspection.pairing import ALIKE
from f8emu.torch.inspection.statistics import Statistics
from f8emu.torch.torch_internals import to_list


class Pending(NamedTuple):
    """A record whose statistics are on their way."""

    record: dict[str, Any]
    statistics: Statistics
    """The statistics; of equal names the last one counts."""
    values: dict[str, Tensor]
    """First values of tensors."""
    likenesses: tuple[Tensor, ...] = ()
    """If one of them is less than ALIKE, the record was made of another matrix."""
    otherwise: "Pending | None" = None
    """The record in that case, if there is one."""


class Read(NamedTuple):
    """A record, its statistics and first values."""

    record: dict[str, Any]
    statistics: dict[str, float]
    values: dict[str, Tensor]


def read(pending: Sequence[Pending]) -> list[Read]:
    """The records with their statistics, which are read with one wait for each device and dtype."""
    every = [*pending, *(item.otherwise for item in pending if item.otherwise is not None)]
    numbers = _numbers(
        [
            *(found.numbers for item in every for found in item.statistics),
            *(likeness for item in pending for likeness in item.likenesses),
        ]
    )
    records: list[Read] = []
    for item in pending:
        one: Pending | None = item
        if any(numbers[id(likeness)][0] < ALIKE for likeness in item.likenesses):
            one = item.otherwise
        if one is None:
            continue
        statistics: dict[str, float] = {}
        for found in one.statistics:
            statistics |= found.meaning(numbers[id(found.numbers)])
        records.append(Read(one.record, statistics, one.values))
    return records


def _numbers(tensors: Sequence[Tensor]) -> dict[int, list[float]]:
    """The elements of each tensor, by its `id`. Tensors of one dtype are read together: torch copies others singly."""
    unique = {id(x): x for x in tensors}
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in unique.values():
        groups.setdefault((x.device, x.dtype), []).append(x)
    found: dict[int, list[float]] = {}
    for group in groups.values():
        flat = [float(number) for number in to_list(torch.cat([x.reshape(-1) for x in group]))]
        start = 0
        for x in group:
            found[id(x)] = flat[start : start + x.numel()]
            start += x.numel()
    return found


def listed(values: Tensor) -> list[Any]:
    """Numbers; codes as hexadecimal digits."""
    found = to_list(values)
    return [f"{code:02x}" for code in found] if values.dtype is torch.uint8 else found

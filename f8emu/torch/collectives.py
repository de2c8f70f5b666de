"""Collectives over the ranks of process groups: functional ones, which a compiler traces, and one into given memory."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF
"""All bits of a float32 but its sign: as integers these have the order of the magnitudes, NaN above infinity."""


def collective(name: str, x: Tensor, *arguments: Any) -> Tensor:
    """The result of a functional collective, which has arrived."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(getattr(functional, name)(x.contiguous(), *arguments))


def reduce_max(x: Tensor, groups: Sequence[Any]) -> Tensor:
    """The maximum over the ranks of all groups, element by element. A group is a process group, or its name."""
    for group in groups:
        x = collective("all_reduce", x, "max", group if isinstance(group, str) else group.group_name)
    return x


def reduce_amax(amax: Tensor, groups: Sequence[Any]) -> Tensor:
    """`reduce_max` of amaxes: as integers, so that infinity and NaN count as the largest."""
    if not groups:
        return amax
    return reduce_max(amax.float().view(torch.int32) & _MAGNITUDE, groups).view(torch.float32)


def all_gather(out: Tensor, own: Tensor, group: Any) -> None:
    """`own` of all ranks of a group, in their order, into `out`."""
    dist.all_gather_into_tensor(out, own, group)  # pyright: ignore[reportUnknownMemberType, reportDeprecated]

"""A matrix whose statistics are taken: by kernels where there are some, otherwise in plain torch.

On a GPU the values are read once for their own statistics and once for each cast. Statistics that no kernel takes are
plain torch there too.
"""

from collections.abc import Collection
from types import ModuleType

import torch
from torch import Tensor

from f8emu.spec.formats import Format
from f8emu.spec.recipe import Cast
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.casts.operand import Delayed, Operand
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.availability import kernels_for
from f8emu.torch.fused.delayed import is_known_set
from f8emu.torch.inspection.statistics import (
    CAST,
    COUNTED,
    SUMMED,
    Reading,
    Statistics,
    block_range,
    cast_numbers,
    code_numbers,
    needed,
    stacked,
    value_numbers,
)
from f8emu.torch.scale import amax, scale_from_amax


class Matrix:
    """A matrix [rows, columns] in high precision; its amaxes are found once."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()
        self._amaxes: dict[tuple[Granularity, bool], Tensor] = {}

    def values(self, wanted: Collection[str]) -> Statistics:
        """The requested statistics of `VALUE_STATISTICS`."""
        x, numbers = self.x, needed(wanted)
        statistics = list[Reading]()
        if x.numel() == 0:
            return []
        launch = launches_for(x)
        if launch is not None:
            has_sums = not numbers.isdisjoint(SUMMED)
            read = launch.values(x, has_sums)
            self._amaxes[Granularity.TENSORWISE, False] = read[:1]
            statistics = [Reading(read, COUNTED + SUMMED * has_sums, wanted, x.numel())]
            numbers -= {*COUNTED, *SUMMED}
        return statistics + stacked(value_numbers(x, numbers), wanted, x.numel())

    def cast(
        self, cast: Cast, is_transposed: bool, rule: ScaleRule, wanted: Collection[str], delayed: Delayed | None
    ) -> Statistics:
        """The requested statistics of `CAST_STATISTICS`, for the matrix or its transpose; nothing in high precision.

        With `delayed` by its scale, as far as that is set.

        Exactness: codes and scales are those of the verbs, which a layer on one device uses. Of a matrix that is
        sharded by tensor parallelism the amax is that of this rank.
        """
        # 1. What needs no codes.
        x = self.x.t() if is_transposed else self.x
        if cast.format is None or x.numel() == 0:
            return []
        statistics = stacked({"dynamic_range_block": block_range(x)}, wanted) if "dynamic_range_block" in wanted else []
        numbers = needed(wanted)
        if numbers.isdisjoint(CAST):
            return statistics
        # 2. The scale: by the amaxes of this matrix, or by the state of delayed scaling.
        source, is_amax = self._amax(cast.granularity, is_transposed), True
        if delayed is not None:
            source, is_amax = self._delayed(delayed, cast.format, rule), False
        # 3. The codes, and what they lose.
        launch = launches_for(x, cast.format) if rule.e8m0 is None else None
        if launch is not None:
            read = launch.cast(x, source, is_amax, cast.granularity, cast.format, rule)
            return [*statistics, Reading(read, CAST, wanted, x.numel())]
        inv_scale = scale_from_amax(source, cast.format, rule).inv_scale if is_amax else source
        return statistics + stacked(
            cast_numbers(x, inv_scale, cast.format, cast.granularity, numbers), wanted, x.numel()
        )

    def _delayed(self, delayed: Delayed, format: Format, rule: ScaleRule) -> Tensor:
        # The inv_scale of a cast under delayed scaling [1, 1]: it takes its own amax while none is set.
        if is_known_set(delayed.inv_scale):
            return delayed.inv_scale
        largest = self._amax(Granularity.TENSORWISE, False).float().reshape(1, 1)
        dynamic = scale_from_amax(largest, format, rule, margin=delayed.margin).inv_scale
        return torch.where(delayed.inv_scale > 0, delayed.inv_scale, dynamic)

    def _amax(self, granularity: Granularity, is_transposed: bool) -> Tensor:
        # The amaxes, of shape `granularity.scale_shape`; for the whole matrix perhaps float64 [1].
        key = (granularity, is_transposed and granularity is not Granularity.TENSORWISE)
        if key not in self._amaxes:
            if granularity is Granularity.ROWWISE and launches_for(self.x) is not None:
                amaxes, rows = fused.row_col_amaxes(self.x), self.x.shape[0]
                self._amaxes[granularity, False] = amaxes[:rows].unsqueeze(1)
                self._amaxes[granularity, True] = amaxes[rows:].unsqueeze(1)
            else:
                self._amaxes[key] = amax(self.x.t() if key[1] else self.x, granularity)
        return self._amaxes[key]


def operand_statistics(operand: Operand, cast: Cast, wanted: Collection[str]) -> Statistics:
    """The requested statistics of `OPERAND_STATISTICS` for an operand as its GEMM got it; nothing in high precision."""
    codes, scale = operand
    if cast.format is None or scale is None or codes.numel() == 0:
        return []
    statistics: Statistics = []
    if "scale_min" in wanted or "scale_max" in wanted:
        smallest, largest = torch.aminmax(scale.float())
        statistics = [Reading(smallest, ("scale_min",), wanted), Reading(largest, ("scale_max",), wanted)]
    return statistics + stacked(code_numbers(codes, cast.format, wanted), wanted)


def launches_for(x: Tensor, *formats: Format) -> ModuleType | None:
    """The module that launches kernels on `x`; None where there are none."""
    if kernels_for(x) is None:
        return None
    from f8emu.torch.inspection import kernels  # needs Triton

    return kernels if kernels.takes(x, *formats) else None

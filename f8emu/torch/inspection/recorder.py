"""The observer of an inspection: takes the statistics of what layers cast and multiply, as records."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.recipe import OPERANDS, TENSORS, TRANSPOSED, Cast, Recipe, recipe_by_name
from f8emu.spec.scaling import Granularity
from f8emu.torch.inspection.config import InspectConfig
from f8emu.torch.inspection.events import CODE_EVENT_STATISTICS, EVENT_STATISTICS
from f8emu.torch.inspection.gemm_error import gemm_error, sample_of
from f8emu.torch.inspection.pairing import Prepared, Waiting, grid_of
from f8emu.torch.inspection.pending import Pending
from f8emu.torch.inspection.statistics import (
    Statistics,
    cast_statistics,
    exact_values,
    operand_statistics,
    value_statistics,
)
from f8emu.torch.scale import amax, scale_from_amax
from f8emu.torch.training.float8_linear import Float8Linear
from f8emu.torch.training.observation import GemmSeen, TensorSeen
from f8emu.torch.training.operands import Delayed, Operand

MOST_PENDING = 4096
"""Records that wait for the end of the step; then they are read before it."""
_SIDES = ("a", "b")


class Recorder:
    """Takes statistics; `pending` has the records of the step so far."""

    def __init__(
        self,
        config: InspectConfig,
        layers: Mapping[str, Float8Linear],
        step: int,
        rank: tuple[int, int],
        on_full: Callable[[], None],
    ) -> None:
        self.number, self.pending = step, list[Pending]()
        self._config, self._layers, self._on_full = config, layers, on_full
        self._rank = rank[0]
        self._what_if = {name: recipe_by_name(name) for name in config.what_if}
        self._waiting = Waiting(rank[1])
        self._passes: Counter[tuple[str, str]] = Counter()

    def next_step(self) -> None:
        """The step is over; what it left unpaired is forgotten."""
        self.number += 1
        self._waiting.clear()
        self._passes.clear()

    def tensor(self, seen: TensorSeen) -> None:
        """An observer's part: a matrix before its casts."""
        config = self._config
        if seen.tensor not in config.tensors:
            return
        own = value_statistics(seen.value, {*EVENT_STATISTICS, *config.statistics})
        grid = grid_of(seen.value)
        casts: dict[tuple[str, object], Statistics] = {}  # equal casts of a matrix, read once
        for gemm in config.gemms:
            for side, source, transposed in zip(_SIDES, OPERANDS[gemm], TRANSPOSED[gemm], strict=True):
                if source != seen.tensor:
                    continue
                x = seen.value.t() if transposed else seen.value
                what_if: dict[str, Statistics] = {}
                of_recipe: Statistics = {}
                for recipe in (seen.recipe, *self._what_if.values()):
                    cast = getattr(recipe.gemms[gemm], side)
                    is_own = recipe is seen.recipe
                    is_whole = cast.granularity is Granularity.TENSORWISE
                    key = ("" if is_own else recipe.name, cast if is_whole else (cast, transposed))
                    if key not in casts:
                        casts[key] = self._cast(seen, x, cast, recipe, is_own)
                    if is_own:
                        of_recipe = casts[key]
                    else:
                        what_if[recipe.name] = casts[key]
                sample = before = None
                cast = getattr(seen.recipe.gemms[gemm], side)
                if "error" in config.statistics:
                    sample = sample_of(x, cast, config.sample, self.number)
                if config.first_values:
                    before = x.flatten()[: config.first_values].clone()
                known = Prepared(grid.t() if transposed else grid, {**own, **of_recipe}, what_if, sample, before)
                self._waiting.add(seen.layer, gemm, side, known)

    def gemm(self, seen: GemmSeen) -> None:
        """An observer's part: a GEMM that was computed."""
        config, name = self._config, seen.gemm
        if name not in config.gemms:
            return
        self._passes[seen.layer, name] += 1
        operands = (seen.a, seen.b)
        prepared = self._waiting.take(seen.layer, name, operands)
        for side, operand, tensor, known in zip(_SIDES, operands, OPERANDS[name], prepared, strict=True):
            if tensor not in config.tensors:
                continue
            cast: Cast = getattr(seen.spec, side)
            values: dict[str, Tensor] = {}
            if config.first_values:
                values = _first_values(operand, cast, None if known is None else known.before, config.first_values)
            self._add(seen, side, tensor, self._operand(operand, cast, known), cast=str(cast), values=values)
            if known is not None:
                for recipe, found in known.what_if.items():
                    what_if = getattr(self._what_if[recipe].gemms[name], side)
                    self._add(seen, side, tensor, found, cast=str(what_if), recipe=recipe)
        if "product" in config.tensors:
            statistics = value_statistics(seen.product, {*EVENT_STATISTICS, *config.statistics})
            # Under tensor parallelism an operand may have been gathered, and the sample be of this rank's part.
            a, b = (
                known.sample if known is not None and known.grid.shape == operand.codes.shape else None
                for known, operand in zip(prepared, operands, strict=True)
            )
            if a is not None and b is not None:
                statistics |= gemm_error(seen, a, b)
            self._add(seen, "product", "product", statistics, split_k=seen.split_k, engine=seen.engine)

    def _operand(self, operand: Operand, cast: Cast, known: Prepared | None) -> Statistics:
        wanted = self._config.statistics
        if known is not None:
            return {**known.statistics, **operand_statistics(operand, cast, wanted)}
        if operand.scale is None:  # the values themselves
            return value_statistics(operand.codes, {*EVENT_STATISTICS, *wanted})
        return operand_statistics(operand, cast, {*CODE_EVENT_STATISTICS, *wanted})

    def _cast(self, seen: TensorSeen, x: Tensor, cast: Cast, recipe: Recipe, is_own: bool) -> Statistics:
        delayed = self._delayed(seen) if is_own else None
        if delayed is None or cast.format is None:
            return cast_statistics(x, cast, recipe.scale_rule, self._config.statistics, None)
        own, _ = scale_from_amax(amax(x), cast.format, recipe.scale_rule, margin=delayed.margin)
        inv_scale = torch.where(delayed.inv_scale > 0, delayed.inv_scale, own)  # UNSET: a cast takes its own amax
        return cast_statistics(x, cast, recipe.scale_rule, self._config.statistics, inv_scale)

    def _delayed(self, seen: TensorSeen) -> Delayed | None:
        buffers = self._layers[seen.layer].delayed
        return None if buffers is None else buffers.of_tensors()[TENSORS.index(seen.tensor)]

    def _add(
        self,
        seen: GemmSeen,
        operand: str,
        tensor: str,
        statistics: Statistics,
        values: dict[str, Tensor] | None = None,
        **more: Any,
    ) -> None:
        record: dict[str, Any] = {
            "step": self.number,
            "rank": self._rank,
            "layer": seen.layer,
            "gemm": seen.gemm,
            "operand": operand,
            "tensor": tensor,
            "pass": self._passes[seen.layer, seen.gemm],
            **more,
        }
        self.pending.append(Pending(record, statistics, values or {}))
        if len(self.pending) >= MOST_PENDING:
            self._on_full()


def _first_values(operand: Operand, cast: Cast, before: Tensor | None, count: int) -> dict[str, Tensor]:
    """The first values of an operand: before its cast, its codes, and what they mean."""
    rows = -(-count // max(1, operand.codes.shape[1]))
    codes, scale = operand.codes[:rows], operand.scale
    if scale is not None and cast.granularity is not Granularity.TENSORWISE:
        scale = scale[: cast.granularity.scale_shape(rows, codes.shape[1])[0]]
    found = {"after": exact_values(codes, scale, cast.granularity).flatten()[:count]}
    if cast.format is not None:
        found["codes"] = codes.view(torch.uint8).flatten()[:count].clone()
    return found if before is None else {"before": before, **found}

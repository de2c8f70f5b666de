"""The observer of an inspection: takes the statistics of what layers cast and multiply, as records."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.recipe import OPERANDS, TENSORS, TRANSPOSED, Cast, recipe_by_name
from f8emu.spec.scaling import Granularity
from f8emu.torch.inspection.config import InspectConfig
from f8emu.torch.inspection.events import CODE_EVENT_STATISTICS, EVENT_STATISTICS
from f8emu.torch.inspection.gemm_error import gemm_error, sample_of
from f8emu.torch.inspection.matrix import Matrix, operand_statistics
from f8emu.torch.inspection.pairing import Prepared, Taken, Waiting, grid_of
from f8emu.torch.inspection.pending import Pending
from f8emu.torch.inspection.statistics import Statistics, exact_values, only
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.operands import Delayed, Operand
from f8emu.torch.layer.taps import GemmSeen, TensorSeen

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
        matrix, delayed = Matrix(seen.value), self._delayed(seen)
        own = matrix.values({*EVENT_STATISTICS, *config.statistics})
        grid = grid_of(seen.value)
        casts: dict[tuple[str, object], Statistics] = {}  # equal casts of a matrix, read once
        for gemm in config.gemms:
            for side, source, transposed in zip(_SIDES, OPERANDS[gemm], TRANSPOSED[gemm], strict=True):
                if source != seen.tensor:
                    continue
                what_if: dict[str, Statistics] = {}
                of_recipe: Statistics = []
                for recipe in (seen.recipe, *self._what_if.values()):
                    cast = getattr(recipe.gemms[gemm], side)
                    is_own = recipe is seen.recipe
                    is_whole = cast.granularity is Granularity.TENSORWISE
                    key = ("" if is_own else recipe.name, cast if is_whole else (cast, transposed))
                    if key not in casts:
                        state = delayed if is_own else None
                        casts[key] = matrix.cast(cast, transposed, recipe.scale_rule, config.statistics, state)
                    if is_own:
                        of_recipe = casts[key]
                    else:
                        what_if[recipe.name] = casts[key]
                sample = before = None
                x = seen.value.t() if transposed else seen.value
                cast = getattr(seen.recipe.gemms[gemm], side)
                if "error" in config.statistics:
                    sample = sample_of(x, cast, config.sample, self.number)
                if config.first_values:
                    before = x.flatten()[: config.first_values].clone()
                known = Prepared(grid.t() if transposed else grid, [*own, *of_recipe], what_if, sample, before)
                self._waiting.add(seen.layer, gemm, side, known)

    def gemm(self, seen: GemmSeen) -> None:
        """An observer's part: a GEMM that was computed."""
        config, name = self._config, seen.gemm
        if name not in config.gemms:
            return
        self._passes[seen.layer, name] += 1
        operands = (seen.a, seen.b)
        taken = self._waiting.take(seen.layer, name, operands)
        for side, operand, tensor, one in zip(_SIDES, operands, OPERANDS[name], taken, strict=True):
            if tensor in config.tensors:
                self._operand(seen, side, operand, tensor, one)
        if "product" in config.tensors:
            record = self._record(seen, "product", "product", split_k=seen.split_k, engine=seen.engine)
            item = Pending(record, Matrix(seen.product).values({*EVENT_STATISTICS, *config.statistics}), {})
            # Under tensor parallelism an operand may have been gathered, and the sample be of this rank's part.
            a, b = (
                one if one is not None and one.prepared.grid.shape == operand.codes.shape else None
                for one, operand in zip(taken, operands, strict=True)
            )
            if a is not None and b is not None and a.prepared.sample is not None and b.prepared.sample is not None:
                error = gemm_error(seen, a.prepared.sample, b.prepared.sample)
                open_ = tuple(one.likeness for one in (a, b) if one.likeness is not None)
                item = Pending(record, [*item.statistics, *error], {}, open_, item)
            self._add(item)

    def _operand(self, seen: GemmSeen, side: str, operand: Operand, tensor: str, taken: Taken | None) -> None:
        """The records of an operand; if it is open whether it was cast of what is known, both that may be."""
        count, wanted = self._config.first_values, self._config.statistics
        cast: Cast = getattr(seen.spec, side)
        record = self._record(seen, side, tensor, cast=str(cast))
        values = _first_values(operand, cast, count) if count else {}
        is_decided = taken is not None and taken.likeness is None
        own = operand_statistics(operand, cast, wanted) if is_decided else self._alone(operand, cast)
        if taken is None:
            self._add(Pending(record, own, values))
            return
        known = taken.prepared
        statistics = known.statistics if operand.scale is None else [*known.statistics, *only(wanted, own)]
        alone = None if is_decided else Pending(record, own, values)
        before = {} if known.before is None else {"before": known.before}
        open_ = () if taken.likeness is None else (taken.likeness,)
        self._add(Pending(record, statistics, {**before, **values}, open_, alone))
        for recipe, found in known.what_if.items():
            what_if = getattr(self._what_if[recipe].gemms[seen.gemm], side)
            self._add(Pending(self._record(seen, side, tensor, cast=str(what_if), recipe=recipe), found, {}, open_))

    def _alone(self, operand: Operand, cast: Cast) -> Statistics:
        """What an operand tells of itself."""
        wanted = self._config.statistics
        if operand.scale is None:  # the values themselves
            return Matrix(operand.codes).values({*EVENT_STATISTICS, *wanted})
        return operand_statistics(operand, cast, {*CODE_EVENT_STATISTICS, *wanted})

    def _delayed(self, seen: TensorSeen) -> Delayed | None:
        buffers = self._layers[seen.layer].delayed
        if buffers is None or not seen.is_delayed or seen.recipe.delayed_scaling_of(seen.tensor) is None:
            return None
        return buffers.of_tensors()[TENSORS.index(seen.tensor)]

    def _record(self, seen: GemmSeen, operand: str, tensor: str, **more: Any) -> dict[str, Any]:
        return {
            "step": self.number,
            "rank": self._rank,
            "layer": seen.layer,
            "gemm": seen.gemm,
            "operand": operand,
            "tensor": tensor,
            "pass": self._passes[seen.layer, seen.gemm],
            **more,
        }

    def _add(self, item: Pending) -> None:
        self.pending.append(item)
        if len(self.pending) >= MOST_PENDING:
            self._on_full()


def _first_values(operand: Operand, cast: Cast, count: int) -> dict[str, Tensor]:
    """The first values of an operand: its codes, and what they mean."""
    rows = -(-count // max(1, operand.codes.shape[1]))
    codes, scale = operand.codes[:rows], operand.scale
    if scale is not None and cast.granularity is not Granularity.TENSORWISE:
        scale = scale[: cast.granularity.scale_shape(rows, codes.shape[1])[0]]
    found = {"after": exact_values(codes, scale, cast.granularity).flatten()[:count]}
    if cast.format is not None:
        found["codes"] = codes.view(torch.uint8).flatten()[:count].clone()
    return found

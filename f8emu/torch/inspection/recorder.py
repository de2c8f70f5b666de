"""The observer of an inspection: takes the statistics of what layers cast and multiply, as records."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.spec.recipe import OPERANDS, TENSORS, TRANSPOSED, Cast, Recipe, recipe_by_name
from f8emu.spec.scaling import Granularity
from f8emu.torch.casts.operand import Delayed, Operand
from f8emu.torch.inspection.config import InspectConfig
from f8emu.torch.inspection.matrix import Matrix, operand_statistics
from f8emu.torch.inspection.statistics import Sample, Statistics, gemm_error, sample_of
from f8emu.torch.layer.float8_layer import Float8Layer
from f8emu.torch.layer.observers import UNKNOWN_CALL, GemmSeen, TensorSeen
from f8emu.torch.torch_internals import to_list

MOST_PENDING = 4096
"""Records that wait for the end of the step; then they are read before it."""
_MOST_WAITING = 32
"""Matrices of one operand; of more passes between a forward pass and its backward pass the oldest are given up."""
_EVENT_STATISTICS = ("nan", "inf")
"""Statistics of values that are always taken, for events."""
_CODE_EVENT_STATISTICS = ("nan_codes",)
"""Statistics of codes that are always taken where the values were not seen."""
_SIDES = ("a", "b")


class Pending(NamedTuple):
    """A record whose statistics are on their way."""

    record: dict[str, Any]
    statistics: Statistics
    """Of equal names the last one counts."""


class _Prepared(NamedTuple):
    shape: tuple[int, ...]
    statistics: Statistics
    what_if: dict[str, Statistics]
    """Statistics by recipe."""
    sample: Sample | None


class Recorder:
    """Takes statistics; `pending` has the records of the step so far."""

    def __init__(
        self,
        config: InspectConfig,
        layers: Mapping[str, Float8Layer],
        step: int,
        rank: int,
        on_full: Callable[[], None],
    ) -> None:
        self.number, self.pending = step, list[Pending]()
        self._config, self._layers, self._rank, self._on_full = config, layers, rank, on_full
        self._what_if = {name: recipe_by_name(name) for name in config.what_if}
        self._waiting: dict[tuple[str, str, str], dict[int, _Prepared]] = {}
        """Layer, GEMM and side (a or b) -> call -> an operand whose GEMM has not come."""
        self._passes: Counter[tuple[str, str]] = Counter()

    def next_step(self) -> None:
        """The step is over; what it left unpaired is forgotten."""
        self.number += 1
        self._waiting.clear()
        self._passes.clear()

    def tensor(self, seen: TensorSeen) -> None:
        config = self._config
        if seen.tensor not in config.tensors:
            return
        # 1. The values, read once.
        matrix, delayed = Matrix(seen.value), self._delayed(seen)
        of_values = matrix.values({*_EVENT_STATISTICS, *config.statistics})
        casts: dict[tuple[str, object], Statistics] = {}

        # 2. Casts: GEMMs and recipes that cast the matrix alike share one reading.

        def cast_of(recipe: Recipe, cast: Cast, transposed: bool, state: Delayed | None = None) -> Statistics:
            is_whole = cast.granularity is Granularity.TENSORWISE
            key = ("" if recipe is seen.recipe else recipe.name, cast if is_whole else (cast, transposed))
            if key not in casts:
                casts[key] = matrix.cast(cast, transposed, recipe.rule_of(cast), config.statistics, state)
            return casts[key]

        # 3. What each GEMM that has the matrix as an operand will need, until the GEMM is shown.
        for gemm in config.gemms:
            for side, source, transposed in zip(_SIDES, OPERANDS[gemm], TRANSPOSED[gemm], strict=True):
                if source != seen.tensor:
                    continue
                cast: Cast = getattr(seen.recipe.gemms[gemm], side)
                statistics = [*of_values, *cast_of(seen.recipe, cast, transposed, delayed)]
                what_if = {
                    name: cast_of(recipe, getattr(recipe.gemms[gemm], side), transposed)
                    for name, recipe in self._what_if.items()
                    if recipe is not seen.recipe
                }
                x = seen.value.t() if transposed else seen.value
                sample = sample_of(x, cast, config.sample, self.number) if "error" in config.statistics else None
                waiting = self._waiting.setdefault((seen.layer, gemm, side), {})
                waiting[seen.call] = _Prepared(tuple(x.shape), statistics, what_if, sample)
                if len(waiting) > _MOST_WAITING:
                    del waiting[next(iter(waiting))]

    def gemm(self, seen: GemmSeen) -> None:
        config, name = self._config, seen.gemm
        if name not in config.gemms:
            return
        self._passes[seen.layer, name] += 1
        # 1. The operands, by what is known of their values.
        samples: list[Sample] = []
        for side, operand, tensor in zip(_SIDES, (seen.a, seen.b), OPERANDS[name], strict=True):
            known = self._known(seen, side)
            if tensor in config.tensors:
                self._operand(seen, side, operand, tensor, known)
            # Under tensor parallelism an operand may have been gathered, and the sample be of this rank's part.
            if known is not None and known.sample is not None and known.shape == operand.codes.shape:
                samples.append(known.sample)
        # 2. The product; its error where the values of both operands were seen.
        if "product" in config.tensors:
            statistics = Matrix(seen.product).values({*_EVENT_STATISTICS, *config.statistics})
            statistics += gemm_error(seen, *samples) if len(samples) == len(_SIDES) else []
            self._add(seen, "product", "product", statistics, split_k=seen.split_k, engine=seen.engine)

    def _known(self, seen: GemmSeen, side: str) -> _Prepared | None:
        # What is known of an operand; None if nothing is, as in a step that began after its forward pass.
        # A backward pass may come after other forward passes than its own: pipelines run several first, a teacher or
        # an evaluation has none. So the id of the forward pass finds it; where that is unknown, its order.
        waiting = self._waiting.get((seen.layer, seen.gemm, side), {})
        call = seen.call
        if call == UNKNOWN_CALL and call not in waiting:
            call = next(iter(waiting), call)
        return waiting.pop(call, None)

    def _operand(self, seen: GemmSeen, side: str, operand: Operand, tensor: str, known: _Prepared | None) -> None:
        wanted = self._config.statistics
        cast: Cast = getattr(seen.spec, side)
        if known is not None:
            statistics = [*known.statistics, *operand_statistics(operand, cast, wanted)]
        elif operand.scale is None:  # the values themselves
            statistics = Matrix(operand.codes).values({*_EVENT_STATISTICS, *wanted})
        else:
            statistics = operand_statistics(operand, cast, {*_CODE_EVENT_STATISTICS, *wanted})
        more = {"rows": operand.codes.shape[0]} if seen.gemm == "output" and tensor == "input" else {}
        self._add(seen, side, tensor, statistics, cast=str(cast), **more)
        for recipe, tried in ({} if known is None else known.what_if).items():
            what_if = getattr(self._what_if[recipe].gemms[seen.gemm], side)
            self._add(seen, side, tensor, tried, cast=str(what_if), recipe=recipe)

    def _delayed(self, seen: TensorSeen) -> Delayed | None:
        buffers = self._layers[seen.layer].delayed
        if buffers is None or not seen.is_delayed or seen.recipe.delayed_scaling_of(seen.tensor) is None:
            return None
        return buffers.of_tensors()[TENSORS.index(seen.tensor)]

    def _add(self, seen: GemmSeen, operand: str, tensor: str, statistics: Statistics, **more: Any) -> None:
        record = {"step": self.number, "rank": self._rank, "layer": seen.layer, "gemm": seen.gemm, "operand": operand}
        record |= {"tensor": tensor, "pass": self._passes[seen.layer, seen.gemm], **more}
        self.pending.append(Pending(record, statistics))
        if len(self.pending) >= MOST_PENDING:
            self._on_full()


def read(pending: Sequence[Pending]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """The records with their statistics, which are read with one wait for each device and dtype."""
    unique = {id(reading.numbers): reading.numbers for item in pending for reading in item.statistics}
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in unique.values():  # torch copies tensors of different dtypes one by one
        groups.setdefault((x.device, x.dtype), []).append(x)
    numbers: dict[int, list[float]] = {}
    for group in groups.values():
        flat = iter(to_list(torch.cat([x.reshape(-1) for x in group])))
        numbers |= {id(x): [float(next(flat)) for _ in range(x.numel())] for x in group}
    records: list[tuple[dict[str, Any], dict[str, float]]] = []
    for item in pending:
        statistics: dict[str, float] = {}
        for reading in item.statistics:
            statistics |= reading.meaning(numbers[id(reading.numbers)])
        records.append((item.record, statistics))
    return records

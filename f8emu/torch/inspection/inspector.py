"""`f8emu.torch.inspect`: statistics of a model while it trains, and where a NaN or an overflow came from.

Layers have taps (`training.observation`) during the steps that are looked at, and none during the others: those run the
code, and compiled graphs, that run without an inspector. Statistics are computed where the tensors are and read once a
step, when it ends.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import f8emu
from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import OPERANDS, TENSORS, TRANSPOSED, Cast, Recipe, recipe_by_name
from f8emu.spec.scaling import Granularity
from f8emu.torch.gemm.emulation import emulator_name
from f8emu.torch.inspection.config import InspectConfig, config_of
from f8emu.torch.inspection.gemm_error import Sample, gemm_error, sample_of
from f8emu.torch.inspection.log import JsonLog, Log, Record, TensorBoardLog
from f8emu.torch.inspection.statistics import (
    Statistics,
    cast_statistics,
    exact_values,
    operand_statistics,
    value_statistics,
)
from f8emu.torch.scale import amax, scale_from_amax
from f8emu.torch.training.float8_linear import Float8Linear
from f8emu.torch.training.observation import GemmSeen, Observation, TensorSeen, observe
from f8emu.torch.training.operands import Delayed, Operand
from f8emu.torch.training.torch_internals import named_modules, not_compiled, to_list

_log = logging.getLogger("f8emu")
SCHEMA = 1
"""Of the records; it rises when a key changes its meaning."""
_SIDES = ("a", "b")
_Key = tuple[str, str, str]
"""Layer, GEMM, a or b."""


class Event(NamedTuple):
    """A NaN, an infinity, or values that a format could not hold."""

    step: int
    kind: str
    """nan, inf or overflow."""
    layer: str
    gemm: str
    operand: str
    """a, b or product."""
    tensor: str
    """input, weight, grad_output or product."""
    amount: float
    """How many, or of an overflow which share."""

    def __str__(self) -> str:
        amount = f"{self.amount:.3%} of the values" if self.kind == "overflow" else f"{self.amount:.0f} values"
        place = f"layer {self.layer or '(the model)'}, GEMM {self.gemm}, operand {self.operand} ({self.tensor})"
        return f"step {self.step}: {self.kind} in {place}: {amount}"


class _Pending(NamedTuple):
    """A record whose statistics are on their way."""

    record: dict[str, Any]
    statistics: Statistics
    values: dict[str, Tensor]
    """First values of tensors."""


class _Prepared(NamedTuple):
    """What is known of an operand before its GEMM."""

    statistics: Statistics
    what_if: dict[str, Statistics]
    """By recipe."""
    sample: Sample | None
    before: Tensor | None


def inspect(
    model: nn.Module,
    config: InspectConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    optimizer: Optimizer | None = None,
    step: int = 0,
    on_event: Callable[[Event], None] | None = None,
) -> "Inspector":
    """Look at the layers of a converted model while it trains.

        with f8emu.torch.inspect(model, {"every": 10, "path": "run.jsonl"}, optimizer=optimizer) as inspector:
            ...  # train as before
        print(inspector.events)

    Exactness: the bits of training do not change, eager or compiled; a compiled model is compiled once more, with taps.

    Args:
        model: with layers of `convert_to_float8_training`; whose names match `config.layers`.
        config: an `InspectConfig`, its keys, or the path of a TOML file.
        optimizer: ends a step whenever it steps; None: call `Inspector.step` after every step.
        step: the number of the step that comes first, for a run that goes on.
        on_event: is called at the end of a step with each event; one that it raises ends the training.

    Raises:
        SpecError: a configuration or a path that cannot be used.
        OperandError: no layer to look at.
        MissingExtraError: the statistic "error" without jax.
        UnsupportedError: TensorBoard, which is not installed.
    """
    found = config_of(config)
    layers = {
        name: layer
        for name, layer in named_modules(model)
        if isinstance(layer, Float8Linear) and found.is_watched(name)
    }
    if not layers:
        have = [name for name, layer in named_modules(model) if isinstance(layer, Float8Linear)]
        raise OperandError(
            f"inspect: layers={found.layers!r} must match the names of layers of the model; it matches none of "
            f"{len(have)} Float8Linear{f', such as {have[0]!r}' if have else ''}; convert the model first, or change "
            "the pattern, which matches the whole name"
        )
    if "error" in found.statistics:
        emulator_name(next(iter(layers.values())).weight.device)
    return Inspector(model, found, layers, optimizer, step, on_event)


class Inspector:
    """A running inspection; made by `inspect`, a context manager."""

    def __init__(
        self,
        model: nn.Module,
        config: InspectConfig,
        layers: Mapping[str, Float8Linear],
        optimizer: Optimizer | None,
        step: int,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.config, self.number, self.events = config, step, list[Event]()
        self._model, self._layers, self._on_event = model, layers, on_event
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._what_if = {name: recipe_by_name(name) for name in config.what_if}
        self._prepared: dict[_Key, _Prepared] = {}
        self._pending: list[_Pending] = []
        self._passes: Counter[tuple[str, str]] = Counter()
        self._logs: list[Log] = []
        if config.path is not None:
            self._logs.append(JsonLog(config.path + (f".rank{self._rank}" if self._rank else "")))
        if config.tensorboard is not None:
            self._logs.append(TensorBoardLog(f"{config.tensorboard}/rank{self._rank}"))
        self._write([self._header()])
        self._hook: Any = None
        if optimizer is not None:
            self._hook = optimizer.register_step_post_hook(not_compiled(lambda *_: self.step()))
        self._observation: Observation | None = None
        self._arm()

    def step(self) -> None:
        """End a step: its statistics are read and written, its events found; the next one begins."""
        self._flush()
        self.number += 1
        self._arm()

    def close(self) -> None:
        """End the inspection; what was seen of an unfinished step is written."""
        self._flush()
        if self._observation is not None:
            self._observation.remove()
            self._observation = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for log in self._logs:
            log.close()
        self._logs = []

    def __enter__(self) -> "Inspector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensor(self, seen: TensorSeen) -> None:
        """An observer's part: a matrix before its casts."""
        config = self.config
        if seen.tensor not in config.tensors:
            return
        # Events need these always.
        own = value_statistics(seen.value, {"nan", "inf", *config.statistics})
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
                self._prepared[seen.layer, gemm, side] = _Prepared({**own, **of_recipe}, what_if, sample, before)

    def gemm(self, seen: GemmSeen) -> None:
        """An observer's part: a GEMM that was computed."""
        config, name = self.config, seen.gemm
        if name not in config.gemms:
            return
        self._passes[seen.layer, name] += 1
        prepared = [self._prepared.pop((seen.layer, name, side), None) for side in _SIDES]
        for side, operand, tensor, known in zip(_SIDES, (seen.a, seen.b), OPERANDS[name], prepared, strict=True):
            if tensor not in config.tensors:
                continue
            cast: Cast = getattr(seen.spec, side)
            statistics = operand_statistics(operand, cast, config.statistics)
            values: dict[str, Tensor] = {}
            if known is not None:
                statistics = {**known.statistics, **statistics}
            if config.first_values:
                values = _first_values(operand, cast, None if known is None else known.before, config.first_values)
            self._add(seen, side, tensor, statistics, cast=str(cast), values=values)
            if known is not None:
                for recipe, found in known.what_if.items():
                    what_if = getattr(self._what_if[recipe].gemms[name], side)
                    self._add(seen, side, tensor, found, cast=str(what_if), recipe=recipe)
        if "product" in config.tensors:
            statistics = value_statistics(seen.product, {"nan", "inf", *config.statistics})
            a, b = (None if known is None else known.sample for known in prepared)
            # Under tensor parallelism an operand may have been gathered, and the sample be of this rank's part.
            if a is not None and b is not None and a.values.shape[1] == b.values.shape[1] == seen.a.codes.shape[1]:
                statistics |= gemm_error(seen, a, b)
            self._add(seen, "product", "product", statistics, split_k=seen.split_k, engine=seen.engine)

    def _cast(self, seen: TensorSeen, x: Tensor, cast: Cast, recipe: Recipe, is_own: bool) -> Statistics:
        delayed = self._delayed(seen) if is_own else None
        if delayed is None or cast.format is None:
            return cast_statistics(x, cast, recipe.scale_rule, self.config.statistics, None)
        own, _ = scale_from_amax(amax(x), cast.format, recipe.scale_rule, margin=delayed.margin)
        inv_scale = torch.where(delayed.inv_scale > 0, delayed.inv_scale, own)  # UNSET: a cast takes its own amax
        return cast_statistics(x, cast, recipe.scale_rule, self.config.statistics, inv_scale)

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
        self._pending.append(_Pending(record, statistics, values or {}))

    def _arm(self) -> None:
        """Have taps in the coming step, or none."""
        is_wanted = self.config.is_step(self.number)
        if is_wanted and self._observation is None:
            self._observation = observe(self._model, self, self._layers)
        elif not is_wanted and self._observation is not None:
            self._observation.remove()
            self._observation = None

    def _flush(self) -> None:
        """Read the statistics of the step, all at once, and write them."""
        pending, self._pending = self._pending, []
        self._prepared.clear()
        self._passes.clear()
        if not pending:
            return
        flat = [value for item in pending for value in item.statistics.values()]
        by_device: dict[torch.device, list[int]] = {}
        for i, value in enumerate(flat):
            by_device.setdefault(value.device, []).append(i)
        numbers = [0.0] * len(flat)
        for places in by_device.values():
            for i, number in zip(places, torch.stack([flat[i] for i in places]).cpu().tolist(), strict=True):
                numbers[i] = number
        records: list[dict[str, Any]] = []
        events: list[Event] = []
        unread = iter(numbers)
        for item in pending:
            found = {name: next(unread) for name in item.statistics}
            if "recipe" not in item.record and (event := self._event(item.record, found)) is not None:
                events.append(event)
            wanted = {name: value for name, value in found.items() if self._is_wanted(name)}
            first = {name: _listed(values) for name, values in item.values.items()}
            records.append({**item.record, **wanted, **first})
        self._write([*({**event._asdict(), "event": event.kind, "rank": self._rank} for event in events), *records])
        self.events += events
        if events:
            more = f"; {len(events) - 1} more places in this step" if len(events) > 1 else ""
            _log.warning("inspect: %s%s", events[0], more)
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def _is_wanted(self, name: str) -> bool:
        return name in self.config.statistics or name.startswith("error_")

    def _event(self, record: Record, found: Mapping[str, float]) -> Event | None:
        """NaN before infinity before overflow, of one operand or product."""
        place = (record["layer"], record["gemm"], record["operand"], record["tensor"])
        for kind in ("nan", "inf"):
            if found.get(kind, 0) > 0:
                return Event(self.number, kind, *place, found[kind])
        if found.get("saturation", 0) > self.config.saturation_event:
            return Event(self.number, "overflow", *place, found["saturation"])
        return None

    def _write(self, records: list[dict[str, Any]]) -> None:
        for log in self._logs:
            log.write(records)

    def _header(self) -> dict[str, Any]:
        first = next(iter(self._layers.values()))
        return {
            "f8emu": f8emu.__version__,
            "schema": SCHEMA,
            "torch": torch.__version__,
            "device": str(first.weight.device),
            "rank": self._rank,
            "layers": len(self._layers),
            "recipe": first.recipe.label,
            "every": self.config.every,
            "start": self.number,
        }


def _listed(values: Tensor) -> list[Any]:
    """Numbers; codes as hexadecimal digits."""
    found = to_list(values)
    return [f"{code:02x}" for code in found] if values.dtype is torch.uint8 else found


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

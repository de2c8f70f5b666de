"""`f8emu.torch.inspect`: statistics of a model while it trains, and where a NaN or an overflow came from.

Layers have taps during the steps that are looked at, and none during the others: those run the code, and compiled
graphs, that run without an inspector. Statistics are computed where the tensors are and read once a step, when
it ends, or earlier when many are waiting. An evaluation in a step that is looked at counts as passes of that step.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer

import f8emu
from f8emu.shown import screen
from f8emu.torch.gemm.emulation import emulator_name
from f8emu.torch.inspection.config import InspectConfig, InspectOptions, JsonLog, TensorBoardLog, config_of
from f8emu.torch.inspection.recorder import Recorder, read
from f8emu.torch.layer.float8_layer import Float8Layer, float8_layers
from f8emu.torch.layer.observers import Observation
from f8emu.torch.torch_internals import not_compiled, rank_of_process

_log = logging.getLogger("f8emu")
SCHEMA = 1
"""The version of the records; it rises when a key changes its meaning."""


class Event(NamedTuple):
    """A NaN, an infinity, or values that a format could not hold, reported in the step that has them."""

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
    """How many values; for an overflow, their share."""

    def __str__(self) -> str:
        amount = f"{self.amount:.0f} value{'s' if self.amount != 1 else ''}"
        amount = f"{self.amount:.3%} of the values" if self.kind == "overflow" else amount
        operand = "product" if self.operand == "product" else f"operand {self.operand} ({self.tensor})"
        place = f"layer {self.layer or '(the model)'}, GEMM {self.gemm}, {operand}"
        return f"step {self.step}: {self.kind} in {place}: {amount}"


def inspect(
    model: nn.Module,
    config: InspectConfig | InspectOptions | None = None,
    *,
    optimizer: Optimizer | None = None,
    first_step: int = 1,
    on_event: Callable[[Event], None] | None = None,
) -> "Inspector":
    """Inspect the layers of a converted model while it trains.

        with f8emu.torch.inspect(model, {"every": 10, "path": "run.jsonl"}, optimizer=optimizer) as inspector:
            ...  # train as usual
        print(inspector.events)

    Exactness: the bits of training do not change, eager or compiled. A compiled model is compiled once more, with taps.

    Args:
        model: a model converted by `convert_to_float8_training`. `config.layers` is searched in the names of its
            layers, as they were before the model was compiled or wrapped.
        config: an `InspectConfig`, or its keys.
        optimizer: every step of this optimizer ends a step; None: call `Inspector.step` after every step.
        first_step: the number of the next step.
        on_event: called with each event, at the end of its step or earlier. An exception that it raises ends the
            training.

    Raises:
        SpecError: an invalid configuration, or a path that cannot be written.
        OperandError: no layer to inspect.
        MissingExtraError: TensorBoard is not installed; or the statistic "error" on a GPU, or without the compiled
            engine, but jax is not installed.
    """
    chosen = config_of(config)
    layers = float8_layers(model, chosen.layers, call="f8emu.torch.inspect")
    if "error" in chosen.statistics:
        emulator_name(next(iter(layers.values())).weight.device)
    return Inspector(model, chosen, layers, optimizer, first_step, on_event)


class Inspector:
    """A running inspection, returned by `inspect`; a context manager. Unless closed, it ends with the model.

    In a notebook it shows what it has written to `path` so far, as `f8emu inspect` does.
    """

    def __init__(
        self,
        model: nn.Module,
        config: InspectConfig,
        layers: Mapping[str, Float8Layer],
        optimizer: Optimizer | None,
        first_step: int,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.config, self.events = config, list[Event]()
        self._on_event = on_event
        self._rank, _ = rank_of_process()
        self._is_closed, self._layers = False, len(layers)
        known = weakref.WeakValueDictionary(layers)  # while a layer has a tap, what watches it is kept
        self._recorder = Recorder(config, known, first_step, self._rank, self._flush)
        self._logs: list[JsonLog | TensorBoardLog] = []
        self._log: Path | None = None
        if config.path is not None:
            log = JsonLog(config.path + (f".rank{self._rank}" if self._rank else ""))
            self._logs.append(log)
            self._log = Path(log.path).absolute()  # the process may go to another folder
        if config.tensorboard is not None:
            self._logs.append(TensorBoardLog(f"{config.tensorboard}/rank{self._rank}"))
        first = next(iter(layers.values()))
        header = {"f8emu": f8emu.__version__, "schema": SCHEMA, "torch": torch.__version__}
        header |= {"device": str(first.weight.device), "rank": self._rank, "layers": len(layers)}
        self._write([header | {"recipe": first.recipe.label, "every": config.every, "start": first_step}])
        hook: Any = None
        if optimizer is not None:
            hook = optimizer.register_step_post_hook(not_compiled(lambda *_: self._end_step()))
        self._observation = Observation(model, layers, self._recorder, hook)
        self._observation.turn(config.is_step(self.number))

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"step {self.number}"
        events = [f"  {event}" for event in self.events]
        log = f", {self.config.path}" if self.config.path else ""
        return screen([f"Inspector: {state}, {self._layers} layers, {len(events)} events{log}", *events])

    def _repr_html_(self) -> str:
        if self._log is None or not self._log.exists():
            return f"<pre>{escape(repr(self))}</pre>"
        return import_module("f8emu.report").inspect(self._log)._repr_html_()

    @property
    def number(self) -> int:
        return self._recorder.number

    def step(self) -> None:
        """End a step: read and write its statistics, find its events, begin the next.

        With an optimizer each of its steps does this; then this call does nothing.
        """
        if self._observation.hook is None and not self._is_closed:
            self._end_step()

    def close(self) -> None:
        """End the inspection and write the statistics of an unfinished step. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as last:  # whatever is raised in between
            for log in self._logs:
                last.callback(log.close)
            last.callback(self._observation.remove)
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_step(self) -> None:
        try:
            self._flush()
        finally:
            self._recorder.next_step()
            self._observation.turn(self.config.is_step(self.number))

    def _flush(self) -> None:
        # Read the statistics that are waiting, all at once, and write them.
        pending, self._recorder.pending = self._recorder.pending, []
        if not pending:
            return
        # 1. Records, and the events among them: a recipe that was only tried has none.
        records: list[dict[str, Any]] = []
        events: list[Event] = []
        for record, statistics in read(pending):
            event = None if "recipe" in record else _event_of(record, statistics, self.config.saturation_event)
            events += [] if event is None else [event]
            is_wanted = {name: name in self.config.statistics or name.startswith("error_") for name in statistics}
            wanted = {name: value for name, value in statistics.items() if is_wanted[name]}
            records.append({**record, **wanted})
        # 2. Written before anybody is told: an observer may end the training.
        self._write([*({**event._asdict(), "event": event.kind, "rank": self._rank} for event in events), *records])
        self.events += events
        if events:
            more = len(events) - 1
            more = f"; {more} more place{'s' if more > 1 else ''} in this step" if more else ""
            _log.warning("inspect: %s%s", events[0], more)
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def _write(self, records: list[dict[str, Any]]) -> None:
        for log in self._logs:
            log.write(records)


def _event_of(record: Mapping[str, Any], statistics: Mapping[str, float], most_saturated: float) -> Event | None:
    # The event of one operand or product: NaN before infinity before overflow; None without any of them.
    kinds = ("nan", "nan"), ("nan_codes", "nan"), ("inf", "inf"), ("saturation", "overflow")
    for statistic, kind in kinds:
        if (amount := statistics.get(statistic, 0)) > (most_saturated if kind == "overflow" else 0):
            place = (record["layer"], record["gemm"], record["operand"], record["tensor"])
            return Event(record["step"], kind, *place, amount)
    return None

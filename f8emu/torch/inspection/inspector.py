"""`f8emu.torch.inspect`: statistics of a model while it trains, and where a NaN or an overflow came from.

Layers have taps (`training.observation`) during the steps that are looked at, and none during the others: those run the
code, and compiled graphs, that run without an inspector. Statistics are computed where the tensors are and read once a
step, when it ends, or earlier when many are waiting; with several forward passes in a step there are more waits, for
the answer which matrix an operand was cast from (`pairing`). An evaluation in a step that is looked at counts as passes
of that step.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import f8emu
from f8emu.torch.gemm.emulation import emulator_name
from f8emu.torch.inspection.config import InspectConfig, config_of
from f8emu.torch.inspection.events import Event, event_of
from f8emu.torch.inspection.log import JsonLog, Log, TensorBoardLog
from f8emu.torch.inspection.pending import listed, read
from f8emu.torch.inspection.recorder import Recorder
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.names import float8_layers
from f8emu.torch.layer.taps import Observation, observe
from f8emu.torch.torch_internals import not_compiled

_log = logging.getLogger("f8emu")
SCHEMA = 1
"""The version of the records; it rises when a key changes its meaning."""


def inspect(
    model: nn.Module,
    config: InspectConfig | Mapping[str, Any] | str | Path | None = None,
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
        config: an `InspectConfig`, its keys, or the path of a TOML file.
        optimizer: every step of this optimizer ends a step; None: call `Inspector.step` after every step.
        first_step: the number of the next step.
        on_event: called with each event, at the end of its step or earlier. An exception that it raises ends the
            training.

    Raises:
        SpecError: an invalid configuration, or a path that cannot be written.
        OperandError: no layer to inspect.
        MissingExtraError: the statistic "error", but jax is not installed.
        UnsupportedError: TensorBoard is not installed.
    """
    found = config_of(config)
    layers = float8_layers(model, found.layers, call="f8emu.torch.inspect")
    if "error" in found.statistics:
        emulator_name(next(iter(layers.values())).weight.device)
    return Inspector(model, found, layers, optimizer, first_step, on_event)


class Inspector:
    """A running inspection, returned by `inspect`; a context manager. Unless closed, it ends with the model."""

    def __init__(
        self,
        model: nn.Module,
        config: InspectConfig,
        layers: Mapping[str, Float8Linear],
        optimizer: Optimizer | None,
        first_step: int,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.config, self.events = config, list[Event]()
        # Weakly: while a layer has a tap, what watches it is kept.
        self._model, self._layers = weakref.ref(model), weakref.WeakValueDictionary(layers)
        self._on_event = on_event
        rank, ranks = _rank()
        self._rank, self._is_closed = rank, False
        self._recorder = Recorder(config, self._layers, first_step, (rank, ranks), self._flush)
        self._logs: list[Log] = []
        if config.path is not None:
            self._logs.append(JsonLog(config.path + (f".rank{rank}" if rank else "")))
        if config.tensorboard is not None:
            self._logs.append(TensorBoardLog(f"{config.tensorboard}/rank{rank}"))
        self._write([self._header(layers)])
        self._hook: Any = None
        if optimizer is not None:
            self._hook = optimizer.register_step_post_hook(not_compiled(lambda *_: self._end_step()))
        self._observation: Observation | None = None
        self._arm()

    @property
    def number(self) -> int:
        """The number of the step in progress."""
        return self._recorder.number

    def step(self) -> None:
        """End a step: read and write its statistics, find its events, begin the next.

        With an optimizer each of its steps does this; then this call does nothing.
        """
        if self._hook is None and not self._is_closed:
            self._end_step()

    def close(self) -> None:
        """End the inspection and write the statistics of an unfinished step. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as last:  # whatever is raised in between
            for log in self._logs:
                last.callback(log.close)
            if self._hook is not None:
                last.callback(self._hook.remove)
            last.callback(self._disarm)
            self._flush()

    def __enter__(self) -> "Inspector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_step(self) -> None:
        try:
            self._flush()
        finally:
            self._recorder.next_step()
            self._arm()

    def _arm(self) -> None:
        """Have taps in the coming step, or none."""
        if not self.config.is_step(self.number):
            self._disarm()
            return
        model = self._model()
        if self._observation is None and model is not None:
            self._observation = observe(model, self._recorder, dict(self._layers))

    def _disarm(self) -> None:
        if self._observation is not None:
            self._observation.remove()
            self._observation = None

    def _flush(self) -> None:
        """Read the statistics that are waiting, all at once, and write them."""
        pending, self._recorder.pending = self._recorder.pending, []
        if not pending:
            return
        records: list[dict[str, Any]] = []
        events: list[Event] = []
        for record, found, values in read(pending):
            if "recipe" not in record:
                event = event_of(record, found, self.config.saturation_event)
                events += [] if event is None else [event]
            wanted = {name: value for name, value in found.items() if self._is_wanted(name)}
            records.append({**record, **wanted, **{name: listed(first) for name, first in values.items()}})
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

    def _write(self, records: list[dict[str, Any]]) -> None:
        for log in self._logs:
            log.write(records)

    def _header(self, layers: Mapping[str, Float8Linear]) -> dict[str, Any]:
        first = next(iter(layers.values()))
        return {
            "f8emu": f8emu.__version__,
            "schema": SCHEMA,
            "torch": torch.__version__,
            "device": str(first.weight.device),
            "rank": self._rank,
            "layers": len(layers),
            "recipe": first.recipe.label,
            "every": self.config.every,
            "start": self.number,
        }


def _rank() -> tuple[int, int]:
    """(rank, number of ranks)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

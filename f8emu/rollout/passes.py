"""The passes of a capture: what the layers of a step show in one call of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from f8emu.capture.read import CapturedRecord, CapturedStep
from f8emu.capture.record import TensorRecord

_BEFORE = {
    "attention or the KV cache, not a GEMM": ("o_proj", "wo", "out_proj", "dense"),
    "the activation function, not a GEMM": ("down_proj", "w2", "fc2", "dense_4h_to_h"),
}
"""What is in front of a linear layer -> the names of such layers."""
_OTHERS = "a norm, a residual, an embedding or other weights, not a GEMM"
_FORWARD = ("input", "weight", "output")


@dataclass(slots=True)
class Pass:
    """Records by layer and what they are of, in the order of execution."""

    step: CapturedStep
    turn: int
    records: dict[tuple[str, str], CapturedRecord] = field(default_factory=dict[tuple[str, str], CapturedRecord])

    @property
    def outputs(self) -> dict[str, CapturedRecord]:
        return {layer: captured for (layer, what), captured in self.records.items() if what == "output"}

    @property
    def rows(self) -> int:
        return max(map(self.rows_of, self.outputs), default=0)

    def rows_of(self, layer: str) -> int:
        """Those of a layer's product."""
        return getattr(self.records[layer, "output"].record, "m", 0)

    def operand(self, layer: str) -> list[bytes]:
        """The bytes of each row that enter a GEMM: codes and scales or, where none are shown, the input; else none."""
        gemm, shown = self.records[layer, "output"], self.records.get((layer, "input"))
        arrays, record = gemm.load(), gemm.record
        codes, scale = arrays.get("a.codes"), arrays.get("a.scale")
        if codes is not None and scale is not None and not isinstance(record, TensorRecord):
            rows, _ = record.block("a")
            return [codes[i].tobytes() + scale[i // rows].tobytes() for i in range(len(codes))]
        value = shown.load()["value"] if shown is not None else np.empty((0, 0), np.uint8)
        return [row.tobytes() for row in value]


def passes_of(steps: Sequence[CapturedStep]) -> list[Pass]:
    """Every pass of every rank, in the order of ranks and steps."""
    passes: dict[tuple[int, int, Path, int], Pass] = {}
    for step in steps:
        for captured in step.records:
            if captured.record.what in _FORWARD:
                key = step.header.rank, step.header.step, step.path, captured.record.turn
                of = passes.setdefault(key, Pass(step, captured.record.turn))
                of.records[captured.record.layer, captured.record.what] = captured
    return [passes[key] for key in sorted(passes)]


def ranks_of(passes: Sequence[Pass]) -> list[int]:
    """The ranks that have passes."""
    return sorted({shown.step.header.rank for shown in passes})


def forward_of(steps: Sequence[CapturedStep]) -> list[CapturedStep]:
    """The steps without gradients, which a rollout has not."""
    return [
        replace(s, records=tuple(captured for captured in s.records if captured.record.what in _FORWARD)) for s in steps
    ]


def longest_of(passes: Sequence[Pass]) -> list[CapturedStep]:
    """The first of the longest passes of each rank, as a step of its own."""
    steps: list[CapturedStep] = []
    for rank in ranks_of(passes):
        best = max((shown for shown in passes if shown.step.header.rank == rank), key=lambda shown: shown.rows)
        records = [replace(captured, record=replace(captured.record, turn=1)) for captured in best.records.values()]
        # Those that are shown in the first call alone.
        lacking = [captured for captured in best.step.records if captured.record.key[1:] == ("weight", 1)]
        records += [captured for captured in lacking if captured.record.key[:2] not in best.records]
        steps.append(replace(best.step, header=replace(best.step.header, step=1), records=tuple(records)))
    return steps


def before(layer: str) -> str:
    """What makes the input of a layer, by the layer's name."""
    last = layer.rpartition(".")[2]
    return next((what for what, names in _BEFORE.items() if last in names), _OTHERS)

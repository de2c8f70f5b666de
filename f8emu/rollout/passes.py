"""The passes of a capture: what the layers of a step show in one call of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

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


class Gemm(NamedTuple):
    """What entered a GEMM, as bytes, and what it gave."""

    operands: list[bytes]
    """Of each row that enters it codes and scales or, where none are shown, the input; else none."""
    weight: dict[str, bytes]
    products: np.ndarray


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

    def gemm(self, layer: str) -> Gemm:
        """A layer's GEMM, read from its files."""
        output, shown = self.records[layer, "output"], self.records.get((layer, "input"))
        arrays, record = output.load(), output.record
        weight = {name: arrays[name].tobytes() for name in ("b.codes", "b.scale") if name in arrays}
        codes, scale = arrays.get("a.codes"), arrays.get("a.scale")
        if codes is not None and scale is not None and not isinstance(record, TensorRecord):
            rows, _ = record.block("a")
            operands = [codes[i].tobytes() + scale[i // rows].tobytes() for i in range(len(codes))]
        else:
            operands = [row.tobytes() for row in shown.load()["value"]] if shown is not None else []
        return Gemm(operands, weight, arrays["product"])


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


def by_rank(passes: Sequence[Pass]) -> list[list[Pass]]:
    """The passes of each rank that has some."""
    ranks = sorted({shown.step.header.rank for shown in passes})
    return [[shown for shown in passes if shown.step.header.rank == rank] for rank in ranks]


def forward_of(steps: Sequence[CapturedStep]) -> list[CapturedStep]:
    """The steps without gradients, which a rollout has not."""
    return [
        replace(s, records=tuple(captured for captured in s.records if captured.record.what in _FORWARD)) for s in steps
    ]


def longest_of(passes: Sequence[Pass]) -> list[CapturedStep]:
    """The first of the longest passes of each rank, as a step of its own."""
    steps: list[CapturedStep] = []
    for of_rank in by_rank(passes):
        best = max(of_rank, key=lambda shown: shown.rows)
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

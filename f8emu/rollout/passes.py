"""Captures of a trainer and a server: one pass of both, a replayed sample, and decode beside prefill.

A pass is what the layers of a step show in one call of each. Decode is compared with prefill inside the server's
capture: shorter passes are found in the longest one by the rows that enter its first GEMM. What enters a GEMM may
differ although every product before it is equal: then it is no GEMM that parts them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from f8emu.capture.diffing import FORWARD_ALONE, diff
from f8emu.capture.findings import paired
from f8emu.capture.read import CapturedRecord, CapturedStep
from f8emu.capture.record import CaptureError, TensorRecord
from f8emu.capture.replaying import replay
from f8emu.conformance.compare import counted
from f8emu.rollout.certificate import Difference, Unseen
from f8emu.rollout.served import served_layers

SPLIT, DECODE = "a split that depends on the batch", "decode other than prefill"
KERNEL = "a split or a kernel that depends on the batch"
_BEFORE = {
    "attention or the KV cache, not a GEMM": ("o_proj", "wo", "out_proj", "dense"),
    "the activation function, not a GEMM": ("down_proj", "w2", "fc2", "dense_4h_to_h"),
}
"""What is in front of a linear layer -> the names of such layers."""
_OTHERS = "a norm, a residual, an embedding or other weights, not a GEMM"
_FORWARD = ("input", "weight", "output")
_OUTPUTS = 4096
"""Outputs of each product that are replayed."""


class Measured(NamedTuple):
    """Rows of a layer with equal operands in two passes."""

    rows: int = 0
    equal: int = 0
    """How many of them have equal products."""
    cause: str = KERNEL
    """Why others have other products: SPLIT where the captures show S, as those of f8emu's layers do."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What captures show, as the parts of a certificate."""

    captures: dict[str, Any] = field(default_factory=dict[str, Any])
    decode: dict[str, Any] = field(default_factory=dict[str, Any])
    measured: dict[str, "Measured"] = field(default_factory=dict[str, "Measured"])
    differences: list[Difference] = field(default_factory=list[Difference])
    not_seen: list[Unseen] = field(default_factory=list[Unseen])

    def lacks(self, part: str, what: str, *, was_asked: bool = True) -> None:
        """Note what was not seen."""
        self.not_seen.append(Unseen(part=part, what=what, was_asked=was_asked))


@dataclass(slots=True)
class _Pass:
    # Records by layer and what they are of, in the order of execution.
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


def seen(trainer: Sequence[CapturedStep], server: Sequence[CapturedStep], names: Sequence[str], result: Seen) -> None:
    """Compare two captures, replay a sample of the trainer's, compare the server's passes; add to `result`."""
    passes, of_server = _passes(trainer), _passes(server)
    # 1. One pass of both; of several lengths the longest, which is the prefill.
    ranks = [[shown for shown in of_server if shown.step.header.rank == rank] for rank in _ranks(of_server)]
    has_lengths = any(len({shown.rows for shown in of_rank if shown.outputs}) > 1 for of_rank in ranks)
    pair = [_longest(passes), _longest(of_server)] if has_lengths else [_forward(trainer), _forward(server)]
    compared = diff(*pair, errors=4, names=names)
    layers: dict[str, dict[str, int]] = defaultdict(lambda: {"stages": 0, "equal": 0, "elements_different": 0})
    for place, _, is_equal in compared.course:
        layer = layers[place.partition(": ")[2].partition(" ")[0]]
        layer["stages"], layer["equal"] = layer["stages"] + 1, layer["equal"] + is_equal
    for difference in compared.divergences:
        layer = layers[difference.place.partition(" ")[0]]
        layer["elements_different"] += difference.elements_different
        layer["ulps_max"] = max(layer.get("ulps_max", 0), difference.ulps_max)
    result.captures = {"stages": compared.stages, "stages_equal": compared.stages_equal, "context": compared.context}
    result.captures |= {"layers": dict(layers), "first": compared.divergences[0].line() if compared.divergences else ""}
    if compared.divergences:
        first = compared.divergences[0]
        is_input = (first.part, first.tensor) == ("value", "input")
        cause = first.cause or (_before(first.place.partition(" ")[0]) if is_input else "")
        result.differences.append(Difference(part="captures", place=first.where, cause=cause, seen=first.share))
    for text in (*compared.damaged, *compared.only_a, *compared.only_b):
        result.differences.append(
            Difference(part="captures", place=text, cause="on one side only", seen="damaged or lone")
        )
    if not compared.stages:
        result.lacks("captures", "no stage of one is in the other")
    for text in compared.missing:
        result.lacks("captures", text, was_asked=FORWARD_ALONE not in text)
    # 2. A sample of the trainer's products, computed again.
    again = replay(pair[0], outputs=_OUTPUTS, errors=4)
    products = again.counts["product"]
    result.captures["replayed"] = {"outputs": products.elements, "equal": products.elements_equal}
    result.captures["replayed"] |= {"of": again.outputs, "oracles": again.oracles}
    for difference in again.findings[:4]:
        result.differences.append(
            Difference(part="replay", place=difference.where, cause=difference.cause, seen=difference.share)
        )
    for text in again.not_replayed:
        result.lacks("replay", text, was_asked=False)
    for text in again.damaged:
        if text not in compared.damaged:  # a record that is not as its recipe has it
            result.lacks("replay", text)
    if not products.elements:
        result.lacks("replay", "no GEMM of the trainer's capture can be computed again")
    # 3. The server's products, beside what the trainer's GEMMs give of the server's inputs.
    _served(pair[0], pair[1], names, result)
    # 4. Decode beside prefill.
    if has_lengths:
        for of_rank in ranks:
            try:
                _decoded(of_rank, result)
            except CaptureError as error:
                result.lacks("decode", str(error))
    else:
        result.lacks("decode", "the server's capture has passes of one length only", was_asked=False)


def _served(
    trainer: Sequence[CapturedStep], server: Sequence[CapturedStep], names: Sequence[str], result: Seen
) -> None:
    of_trainer, of_server, _ = paired(trainer, server)
    layers: dict[str, dict[str, Any]] = {}
    for key in (key for key in of_trainer if key in of_server):
        for layer in served_layers(of_trainer[key], of_server[key], outputs=_OUTPUTS, names=names):
            if layer.why_not:
                result.lacks("served", f"{layer.layer}: {layer.why_not}", was_asked=False)
                continue
            entry = {"outputs": layer.outputs, "equal": layer.equal, "dialects": list(layer.dialects)}
            before = layers.setdefault(layer.layer, entry)
            if before is not entry:
                before["outputs"], before["equal"] = before["outputs"] + layer.outputs, before["equal"] + layer.equal
    outputs, equal = (sum(layer[name] for layer in layers.values()) for name in ("outputs", "equal"))
    result.captures["served"] = {"outputs": outputs, "equal": equal, "layers": layers}
    wrong = [name for name, layer in layers.items() if layer["equal"] < layer["outputs"]]
    if wrong:
        dialects = ", ".join(layers[wrong[0]]["dialects"][:3]) or "no known dialect, or not shown"
        seen = f"of {counted(outputs, 'output')} of the server's inputs {outputs - equal} differ, in "
        seen += f"{len(wrong)} of {counted(len(layers), 'layer')}; the server's activations are of {dialects}"
        cause = "the trainer's GEMM gives other bits of the same input"
        result.differences.append(Difference(part="served", place=wrong[0], cause=cause, seen=seen))


def _passes(steps: Sequence[CapturedStep]) -> list[_Pass]:
    passes: dict[tuple[int, int, Path, int], _Pass] = {}
    for step in steps:
        for captured in step.records:
            if captured.record.what in _FORWARD:
                key = step.header.rank, step.header.step, step.path, captured.record.turn
                of = passes.setdefault(key, _Pass(step, captured.record.turn))
                of.records[captured.record.layer, captured.record.what] = captured
    return [passes[key] for key in sorted(passes)]


def _ranks(passes: Sequence[_Pass]) -> list[int]:
    return sorted({shown.step.header.rank for shown in passes})


def _forward(steps: Sequence[CapturedStep]) -> list[CapturedStep]:
    # What a rollout has: no gradients.
    return [
        replace(s, records=tuple(captured for captured in s.records if captured.record.what in _FORWARD)) for s in steps
    ]


def _longest(passes: Sequence[_Pass]) -> list[CapturedStep]:
    # The first of the longest passes of each rank, as a step of its own.
    steps: list[CapturedStep] = []
    for rank in _ranks(passes):
        best = max((shown for shown in passes if shown.step.header.rank == rank), key=lambda shown: shown.rows)
        records = [replace(captured, record=replace(captured.record, turn=1)) for captured in best.records.values()]
        # Those that are shown in the first call alone.
        lacking = [captured for captured in best.step.records if captured.record.key[1:] == ("weight", 1)]
        records += [captured for captured in lacking if captured.record.key[:2] not in best.records]
        steps.append(replace(best.step, header=replace(best.step.header, step=1), records=tuple(records)))
    return steps


def _decoded(passes: Sequence[_Pass], result: Seen) -> None:
    # 1. Where the rows of each shorter pass are in the longest one.
    whole = max(passes, key=lambda shown: shown.rows)
    shorter = [shown for shown in passes if 0 < shown.rows < whole.rows]
    if not shorter:
        return result.lacks("decode", f"passes of several lengths of rank {whole.step.header.rank}")
    first = next(iter(whole.outputs))
    rows, end = whole.operand(first), 0
    placed: list[tuple[_Pass, int]] = []
    for short in shorter:
        part = short.operand(first) if first in short.outputs else []
        starts = [i for i in range(len(rows) - len(part) + 1) if part and rows[i : i + len(part)] == part]
        if end in starts or len(starts) == 1:
            placed.append((short, end if end in starts else starts[0]))
            end = placed[-1][1] + len(part)
        else:
            why = "several rows of the longest pass are its own" if starts else "its rows are not in the longest pass"
            result.lacks("decode", f"a pass of {counted(short.rows, 'row')} of {short.step.name}: {why}")
    # 2. Layer by layer, in the order of execution: what is first is the cause of what follows.
    total = equal = 0
    is_parted = False
    for layer in dict.fromkeys((*whole.outputs, *(layer for short, _ in placed for layer in short.outputs))):
        same, right, cause = result.measured.get(layer, Measured())
        for short, at in placed:
            if lacking := [shown for shown in (whole, short) if layer not in shown.outputs]:
                result.lacks("decode", f"{layer} in a pass of {counted(lacking[0].rows, 'row')}")
                continue
            if any(shown.rows_of(layer) != shown.rows_of(first) for shown in (whole, short)):
                # A head of the last tokens, or experts: which of the rows it has is not shown.
                result.lacks("decode", f"{layer}, which has other rows than {first}")
                continue
            operands, products = _rows_equal(whole, short, layer, at)
            total, equal = total + len(products), equal + sum(products)
            both = [product for operand, product in zip(operands, products, strict=False) if operand]
            same, right = same + len(both), right + sum(both)
            if not all(both) and _has_other_split(whole, short, layer):
                cause = SPLIT
            if not is_parted and not (all(operands) and all(products)):
                is_parted = True
                result.differences.append(_parting(layer, operands, products, at, (short.rows, whole.rows), cause))
        if same:
            result.measured[layer] = Measured(same, right, cause)
    counts = {"prefill_rows": whole.rows, "passes": len(placed), "rows": total, "rows_equal": equal}
    result.decode = {name: count + result.decode.get(name, 0) for name, count in counts.items()}


def _rows_equal(whole: _Pass, short: _Pass, layer: str, at: int) -> tuple[list[bool], list[bool]]:
    # Of each row of a shorter pass whether its operands, weight included, and its product are those of the longest.
    arrays, others = (shown.outputs[layer].load() for shown in (whole, short))
    count = len(others["product"])
    products = [arrays["product"][at + i].tobytes() == others["product"][i].tobytes() for i in range(count)]
    weights = [name for name in ("b.codes", "b.scale") if name in arrays]
    is_weight = all(name in others and arrays[name].tobytes() == others[name].tobytes() for name in weights)
    pairs = zip(whole.operand(layer)[at:], short.operand(layer), strict=False)
    return [is_weight and mine == theirs for mine, theirs in pairs], products


def _has_other_split(whole: _Pass, short: _Pass, layer: str) -> bool:
    splits = [getattr(shown.outputs[layer].record, "split_k", None) for shown in (whole, short)]
    return splits[0] != splits[1]


def _parting(
    layer: str, operands: Sequence[bool], products: Sequence[bool], at: int, sizes: tuple[int, int], cause: str
) -> Difference:
    # The first GEMM whose operands or products differ, all GEMMs before it being equal; `cause` is of its products.
    if not operands:
        cause, place, seen = "", layer, "products differ; the operands are not shown"
    elif not all(operands):
        cause, place = _before(layer), f"before {layer}"
        seen = (
            f"the input of {layer} differs first in row {at + operands.index(False)}; every product before it is equal"
        )
    else:
        place, row = layer, at + products.index(False)
        seen = f"of equal operands row {row} has other products with {sizes[0]} rows than with {sizes[1]}"
    return Difference(part="decode", place=place, cause=": ".join(filter(None, (DECODE, cause))), seen=seen)


def _before(layer: str) -> str:
    # What makes the input of a layer, by the layer's name.
    last = layer.rpartition(".")[2]
    return next((what for what, names in _BEFORE.items() if last in names), _OTHERS)

"""Which records of a trainer's and a server's capture are of the same thing: names, fused layers, what is not shown.

A server fuses layers that have one input: `qkv_proj` has the rows of `q_proj`, `k_proj` and `v_proj`, `gate_up_proj`
those of `gate_proj` and `up_proj`. Where one capture has the fused layer and the other its shards, the rows of the
weight and the columns of the product are compared shard by shard.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from f8emu.capture.explain import Side
from f8emu.capture.read import Arrays, CapturedRecord, CapturedStep
from f8emu.capture.record import CaptureError, ForeignRecord, Record, TensorRecord
from f8emu.dialects.stacks import FUSED
from f8emu.spec import OPERANDS, TRANSPOSED, SpecError

_SHOWN = ("input", "output")
"""What layers of other stacks show of a forward pass."""
Key = tuple[str, str, int]
"""Layer, GEMM or tensor, and call."""


def renamed(step: CapturedStep, names: Sequence[str]) -> CapturedStep:
    """The step with other names of layers: each of `names` is `REGEX=REPLACEMENT`, as `re.sub` takes them."""
    layers, fault = [captured.record.layer for captured in step.records], ""
    for name in names:
        pattern, equals, replacement = name.rpartition("=")
        try:
            layers = [re.sub(pattern, replacement, layer) for layer in layers]
        except (re.error, IndexError) as error:
            fault = f": {error}"
        if fault or not equals:
            raise SpecError(
                f"diff: map must be REGEX=REPLACEMENT, as re.sub takes them; got {name}{fault}; escape dots as \\."
            )
    pairs = zip(step.records, layers, strict=True)
    return replace(
        step,
        records=tuple(replace(captured, record=replace(captured.record, layer=layer)) for captured, layer in pairs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(CapturedRecord):
    """The rows `start` to `stop` of a fused weight, and the columns of its product."""

    whole: CapturedRecord
    start: int
    stop: int
    siblings: tuple[str, ...]
    """The layers that are fused, this one among them."""

    def load(self) -> Arrays:
        """The arrays of the shard alone, without scales whose blocks reach into another shard."""
        arrays, record = self.whole.load(), self.whole.record
        rows = slice(self.start, self.stop)
        if isinstance(record, TensorRecord):
            return {"value": arrays["value"][rows] if record.tensor == "weight" else arrays["value"]}
        arrays["product"] = arrays["product"][:, rows]
        if (codes := arrays.get("b.codes")) is not None:
            arrays["b.codes"] = codes[rows]
        if (scale := arrays.pop("b.scale", None)) is not None:
            block = record.block("b")[0]
            if len(scale) == 1:
                arrays["b.scale"] = scale
            elif self.start % block == 0 and (self.stop % block == 0 or self.stop == record.n):
                arrays["b.scale"] = scale[self.start // block : -(-self.stop // block)]
        return arrays


@dataclass(frozen=True, slots=True)
class Half:
    """A step of one of the two captures."""

    name: str
    """A or B."""
    step: CapturedStep
    records: dict[Key, CapturedRecord]

    def without_fusion(self, other: "Half") -> "Half":
        """With the shards of `other` in the place of each fused layer that `other` does not have."""
        records: dict[Key, CapturedRecord] = {}
        for (layer, what, turn), captured in self.records.items():
            stem, _, name = layer.rpartition(".")
            shards = tuple(f"{stem}.{shard}".lstrip(".") for shard in FUSED.get(name, ()))
            sizes = [other.rows(shard) for shard in shards]
            is_fused = shards and all(sizes) and sum(sizes) == self.rows(layer)
            if not is_fused or what not in (*_SHOWN, "weight") or (layer, what, turn) in other.records:
                records[layer, what, turn] = captured
                continue
            for shard, (start, stop) in zip(shards, pairwise(accumulate(sizes, initial=0)), strict=True):
                own = {} if isinstance(captured.record, TensorRecord) else {"n": stop - start}
                record = replace(captured.record, layer=shard, **own)
                file = {"path": captured.path, "size": captured.size, "sha256": captured.sha256}
                records[shard, what, turn] = Shard(
                    record=record, whole=captured, siblings=shards, start=start, stop=stop, **file
                )
        return replace(self, records=records)

    def rows(self, layer: str) -> int:
        """The rows of a layer's weight; 0 of a layer that is not there."""
        captured = self.records.get((layer, "output", 1))
        return getattr(captured.record, "n", 0) if captured else 0

    def lacks(self, captured: CapturedRecord) -> bool:
        """Whether the step says itself that it left this out, or was never finished."""
        # A list of what was left out may end with "N more", which stands for any record.
        places = [left.place for left in self.step.left_out]
        is_told = any(captured.record.place.startswith(place) or place.endswith(" more") for place in places)
        return is_told or not self.step.is_complete

    def never_shows(self, record: Record) -> bool:
        """Whether a capture of another stack's layers alone cannot have this: only forward passes are shown."""
        gemms = {
            type(captured.record) for captured in self.step.records if not isinstance(captured.record, TensorRecord)
        }
        return gemms == {ForeignRecord} and record.what not in _SHOWN

    def operand(self, key: Key, side: str, other: "Half") -> Side | None:
        """`a` or `b` of a GEMM with its codes and scales, or None."""
        captured = self.records[key]
        record, arrays = captured.record, captured.load()
        codes, scale = arrays.get(f"{side}.codes"), arrays.get(f"{side}.scale")
        if isinstance(record, TensorRecord) or codes is None or scale is None:
            return None
        rows, columns = record.block(side)
        stack = record.module.partition(" ")[0] if isinstance(record, ForeignRecord) else "torchao"
        shards: dict[str, np.ndarray] = {}
        if side == "b" and isinstance(captured, Shard):
            # one of them may not be there, or be broken, which is said in its turn
            with suppress(KeyError, CaptureError):
                shards = {name: other.records[name, *key[1:]].load()["b.scale"] for name in captured.siblings}
        return Side(codes=codes, scale=scale, block=(min(rows, len(codes)), columns), stack=stack, shards=shards)

    def value(self, key: Key, side: str) -> np.ndarray | None:
        """The tensor that `a` or `b` of a GEMM was cast from, as its operand lies; None if it was not captured."""
        layer, gemm, turn = key
        tensor, is_transposed = OPERANDS[gemm]["ab".index(side)], TRANSPOSED[gemm]["ab".index(side)]
        # A server shows its weights once, but every call has an input of its own.
        weight = self.records.get((layer, tensor, 1)) if tensor == "weight" else None
        captured = self.records.get((layer, tensor, turn)) or weight
        try:
            value = None if captured is None else captured.load()["value"]
        except CaptureError:  # whoever reads the records in turn says so
            return None
        return value.T if value is not None and is_transposed else value


def unseen(record: Record, other: Record) -> Iterator[tuple[tuple[str, ...], str]]:
    """(parts, why) of what a layer of another stack does not show, or shows with something added."""
    if isinstance(record, ForeignRecord):
        if record.not_shown:
            yield record.not_shown, f"not shown by {record.module}"
        if record.has_bias and not getattr(other, "has_bias", False):
            yield ("product",), f"of {record.module} has a bias added to it"

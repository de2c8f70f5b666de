"""One record in two captures: the parts whose bits differ, where they begin to, and what gives the bits of either."""

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from f8emu.capture.explain import Side, explained, first_block, fused
from f8emu.capture.findings import Finding, Found
from f8emu.capture.pairing import Key, Records, Shard, side_of, unseen, value_of
from f8emu.capture.read import Arrays
from f8emu.capture.record import CaptureError, Record, TensorRecord
from f8emu.conformance.compare import different, distances, mismatches
from f8emu.spec import OPERANDS

_ORDER = ("value", "a.scale", "a.codes", "b.scale", "b.codes", "product")
_OPTIONS = ("a_format", "b_format", "granularity_a", "granularity_b", "out_dtype", "use_fast_accum", "chip", "split_k")
"""Options of a GEMM; if they differ, the bits may differ too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(Finding):
    """One stage whose bits differ between the two captures."""

    ulps_median: float = 0.0
    """The median difference of the elements that differ, in ulps of their format, NaN and infinities left out."""
    ulps_max: int = 0
    nonfinite: int = 0
    """The number of elements that are NaN or infinite in one capture only."""
    fault: str = ""
    """Why they cannot be compared: another dtype or shape."""
    options: str = ""
    """Options of the GEMM that differ."""
    block: str = ""
    """The first block of codes that share a scale in which something differs, and how many there are."""

    @property
    def share(self) -> str:
        """How many elements differ, and how far; or why they cannot be compared."""
        if self.fault:
            return self.fault
        share = f"{self.elements_different} of {self.elements} differ ({self.elements_different / self.elements:.2%})"
        ulps = f", by {self.ulps_median:g} ulps (median), {self.ulps_max} at most" if self.ulps_max else ""
        special = f", {self.nonfinite} finite on one side only" if self.nonfinite else ""
        return "; ".join(text for text in (share + ulps + special, self.block, self.options) if text)


@dataclass(slots=True, kw_only=True)
class CaptureDiff(Found):
    """What two captures have in common, and where they part. What is missing was not compared."""

    context: list[str] = field(default_factory=list)
    """Differences in how the two were made: device, versions, recipe, ..."""
    steps: int = 0
    stages: int = 0
    stages_equal: int = 0
    elements: int = 0
    elements_equal: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    """All divergences in the order of execution: the first is where the captures part."""
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    """Steps and records that the other does not have, and does not say that it left out or never finished."""

    @property
    def has_difference(self) -> bool:
        return bool(self.divergences or self.only_a or self.only_b or self.damaged)

    @property
    def is_equal(self) -> bool:
        """Something was compared, nothing is missing on either side, and nothing differed."""
        return not self.has_difference and not self.missing and not self.is_interrupted and self.stages > 0


@dataclass(frozen=True, slots=True)
class Pair:
    """One step of both captures: key -> record."""

    step: str
    a: Records
    b: Records
    found: CaptureDiff
    errors: int

    def compare(self, key: Key) -> None:
        """Count and compare every part of one record, and note in `found` what differs, is missing or was changed."""
        a, b, found = self.a[key], self.b[key], self.found
        arrays, place = (a.load(), b.load()), f"{self.step}: {a.record.place}"
        found.damaged += [one.named for one in (a, b) if not one.is_intact()]
        # 1. What one side does not show was not compared.
        hidden: set[str] = set()
        for name, one, other in (("A", a, b), ("B", b, a)):
            for unseen_parts, why in unseen(one, other):
                hidden.update(unseen_parts)
                found.missing.append(f"{name}: {place}: {', '.join(unseen_parts)} {why}")
        parts = [part for part in _ORDER if (part in arrays[0] or part in arrays[1]) and part not in hidden]
        # 2. In the order of computation: a product is judged by whether its operands were equal.
        divergences: list[Divergence] = []
        for part in parts:
            x, y = (of.get(part) for of in arrays)
            if part.endswith("scale") and x is not None and y is not None and x.dtype != y.dtype:
                x, y = x.astype(np.float32), y.astype(np.float32)
            facts = _compared(x, y, place, part, self.errors)
            size = max(array.size for array in (x, y) if array is not None)
            found.stages += 1
            found.stages_equal += not facts
            found.elements += size
            found.elements_equal += size - facts.get("elements_different", 0)
            if not facts:
                continue
            if part == "product" and "fault" not in facts:
                pairs = [(name, getattr(a.record, name, ""), getattr(b.record, name, "")) for name in _OPTIONS]
                facts["options"] = ", ".join(f"{name} {i} / {j}" for name, i, j in pairs if "" not in (i, j) and i != j)
                is_judged = not divergences and {"a.codes", "b.codes"} <= set(parts)
                facts["cause"] = "of equal operands: the GEMM itself" if is_judged else ""
            where = {"step": self.step, "place": a.record.place, "part": part, "tensor": _tensor(a.record, part)}
            divergences.append(Divergence(**where, elements=size, **facts))
        # 3. Why the operands differ: said of the first part of each, in as many lines as are shown.
        if len(found.divergences) <= self.errors:
            firsts = {one.part[0]: i for i, one in reversed(tuple(enumerate(divergences))) if one.part[1:2] == "."}
            for i in firsts.values():
                divergences[i] = self._explained(divergences[i], key, arrays)
        found.divergences += divergences

    def _explained(self, one: Divergence, key: Key, arrays: tuple[Arrays, Arrays]) -> Divergence:
        side, records = one.part[0], (self.a, self.b)
        a, b = (side_of(of[key].record, own, side) for of, own in zip(records, arrays, strict=True))
        if a is None or b is None:
            return one
        if not one.fault:
            parts = (a.factors, b.factors) if one.part.endswith("scale") else (a.codes, b.codes)
            one = replace(one, block=first_block(different(*parts), a.block, a.codes.shape))
        # from the tensor before its cast; a tensor that differs itself is cause enough
        values = [value for of in records if (value := value_of(of, key, side)) is not None]
        if len(values) == 2 and (values[0].dtype != values[1].dtype or different(*values).any()):
            return one
        return replace(one, cause=self._fused(key, side, a, b) or explained(values[0] if values else None, a, b))

    def _fused(self, key: Key, side: str, a: Side, b: Side) -> str:
        # Of the side that has the fused weight, by the scales of the other's shards.
        for name, of, own, unfused, whole in (("B", self.b, a, self.a, b), ("A", self.a, b, self.b, a)):
            shard = of[key]
            if side == "b" and isinstance(shard, Shard):
                try:
                    scales = [unfused[sibling, *key[1:]].load()["b.scale"] for sibling in shard.siblings]
                except (KeyError, CaptureError):  # one of them is not there, or broken, which is said in its turn
                    return ""
                text = fused(scales, own, whole, shard.siblings)
                return f"{name}: {text}" if text else ""
        return ""


def _compared(x: np.ndarray | None, y: np.ndarray | None, case: str, part: str, errors: int) -> dict[str, Any]:
    # 1. Parts that cannot be compared: all of their elements count as different.
    if x is None or y is None:
        size = max(one.size for one in (x, y) if one is not None)
        return {"elements_different": size, "fault": f"only {'B' if x is None else 'A'} has it"}
    if x.dtype != y.dtype or x.shape != y.shape:
        fault = f"{x.dtype.name}{list(x.shape)} / {y.dtype.name}{list(y.shape)}"
        return {"elements_different": max(x.size, y.size), "fault": fault}
    # 2. Bits, and how far apart those are that differ.
    wrong = different(x, y)
    if not wrong.any():
        return {}
    distance, nonfinite = ulps(x[wrong], y[wrong])
    return {
        "elements_different": int(np.count_nonzero(wrong)),
        "ulps_median": float(np.median(distance)) if distance.size else 0.0,
        "ulps_max": int(distance.max(initial=0)),
        "nonfinite": nonfinite,
        "mismatches": tuple(islice(mismatches(case, part, x, y), errors)),
    }


def _tensor(record: Record, part: str) -> str:
    if isinstance(record, TensorRecord):
        return record.tensor
    return "" if part == "product" else OPERANDS[record.gemm]["ab".index(part[0])]


def ulps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, int]:
    """How many numbers of the format lie between, of elements that are finite on both sides; and how many are not.

    Codes of one sign are ordered as their values; +0 and -0 are one apart.
    """
    distance, apart = distances(x, y)
    with np.errstate(invalid="ignore"):
        crosses_zero = np.signbit(x) != np.signbit(y)
    return (np.abs(distance) + crosses_zero)[~apart], int(np.count_nonzero(apart))

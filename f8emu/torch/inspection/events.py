"""Events: a NaN, an infinity, or values that a format could not hold, reported in the step that has them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

EVENT_STATISTICS = ("nan", "inf")
"""Statistics of values that are always taken, for events."""
CODE_EVENT_STATISTICS = ("nan_codes",)
"""Statistics of codes that are always taken where the values were not seen."""


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
    """How many values; for an overflow, their share."""

    def __str__(self) -> str:
        amount = f"{self.amount:.3%} of the values" if self.kind == "overflow" else f"{self.amount:.0f} values"
        place = f"layer {self.layer or '(the model)'}, GEMM {self.gemm}, operand {self.operand} ({self.tensor})"
        return f"step {self.step}: {self.kind} in {place}: {amount}"


def event_of(record: Mapping[str, Any], found: Mapping[str, float], most_saturated: float) -> Event | None:
    """The event of one operand or product: NaN before infinity before overflow; None without any of them."""
    place = (record["layer"], record["gemm"], record["operand"], record["tensor"])
    for statistic, kind in (("nan", "nan"), ("nan_codes", "nan"), ("inf", "inf")):
        if found.get(statistic, 0) > 0:
            return Event(record["step"], kind, *place, found[statistic])
    if found.get("saturation", 0) > most_saturated:
        return Event(record["step"], "overflow", *place, found["saturation"])
    return None

"""Alterations of casts and quantizers: other values of single fields of its rule, and words for them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from f8emu.conformance.casts.rules import ROUNDINGS, CodeFault, Scaling
from f8emu.conformance.diagnosis.rules import ScaleValue
from f8emu.dialects.rules import Arithmetic, CodeRule, Division
from f8emu.spec import BFLOAT16, FLOAT8, FLOAT16, Format, Overflow


class Alteration(NamedTuple):
    """Another value of a field of a rule; two of one field exclude each other."""

    field: str
    """`field`, or `part.field` of a part of the rule."""
    value: Any
    sentence: str
    """A kernel that has it, in words that follow "it"."""

    def of(self, rule: Any) -> Any:
        """The altered rule."""
        part, _, field = self.field.rpartition(".")
        if not part:
            return replace(rule, **{field: self.value})
        return replace(rule, **{part: replace(getattr(rule, part), **{field: self.value})})


def cast_alterations(target: Format, overflow: Overflow, *, with_scale: bool = False) -> Iterator[Alteration]:
    """Alterations of a cast to a format with this overflow policy; `with_scale`: it divides by a scale."""
    if with_scale:
        yield Alteration("scaling", Scaling.BY_INVERSE, f"computes {Scaling.BY_INVERSE.value}")
    if overflow is Overflow.SATURATE:
        yield Alteration("overflow", Overflow.NONFINITE, "does not saturate")
    else:
        yield Alteration("overflow", Overflow.SATURATE, "saturates")
    for narrow in (FLOAT16, BFLOAT16):
        yield Alteration("through", narrow, f"rounds twice, through {narrow}")
    for rounding in ROUNDINGS:
        yield Alteration("rounding", rounding, f"rounds {rounding}")
    for fault in CodeFault:
        field = "zeros" if fault in (CodeFault.ZERO_UNSIGNED, CodeFault.ZERO_IS_NAN) else "fault"
        yield Alteration(field, fault, fault.value)
    for largest in sorted({other.max for other in FLOAT8 if other.max < target.max}):
        yield Alteration("largest", largest, f"clamps to {largest:g} instead of {target.max:g}")
    yield Alteration("of_subnormals", True, "does so among subnormals only")
    yield Alteration("of_subnormals", False, "does so above subnormals only")
    for other in FLOAT8:
        if other != target:
            yield Alteration("format", other, f"gives codes of {other}")


_CHANGES = [change for change in ScaleValue if change.value.startswith("rounds")]


def scale_alterations(target: Format, *, largest: float, least: float) -> Iterator[Alteration]:
    """Alterations of a quantizer that its scales show; `largest` is about what amax is scaled to."""
    yield Alteration("scale.amax_floor", 0.0, "has no floor of amax")
    if np.isfinite(largest) and 0 < least < 1:
        largest = float(f"{largest:.5g}")
        yield Alteration("scale.largest", largest, f"scales amax to {largest:g} instead of {target.max:g}")
        for number in (target.max, largest):
            floor = float(f"{least * number:.3g}")
            yield Alteration("scale.amax_floor", floor, f"keeps amax at least {floor:g}")
        floor = float(f"{least:.3g}")
        yield Alteration("scale.scale_floor", floor, f"keeps the scale at least {floor:g}")
    for change in _CHANGES:
        late = f"{change.value.format('the stored scale')}, after the codes were made"
        yield Alteration("late", change, late)
    reciprocal = "returns the reciprocal of the scale, which is multiplied, instead of the scale that decodes"
    yield Alteration("late", ScaleValue.INVERTED, reciprocal)
    for change in _CHANGES:
        yield Alteration("early", change, change.value.format("the scale"))
    for narrow in (BFLOAT16, FLOAT16):
        yield Alteration("x", narrow, f"rounds x to {narrow} first")
    for division in Division:
        yield Alteration("scale.division", division, f"computes {division.value}")
    yield Alteration("scale.arithmetic", Arithmetic.INPUT, "computes scales in the dtype of x")
    yield Alteration("scale.arithmetic", Arithmetic.FLOAT32, "computes scales in float32")
    yield Alteration("scale.ignores_nan", True, "ignores NaN in amax")


def code_alterations(target: Format) -> Iterator[Alteration]:
    """Alterations of a quantizer that its codes show, once its scales are known."""
    for rule in CodeRule:
        yield Alteration("code.rule", rule, f"computes codes as {rule.value}, rounded to float32")
    yield Alteration("code.arithmetic", Arithmetic.INPUT, "computes codes in the dtype of x")
    for alteration in cast_alterations(target, Overflow.SATURATE):
        if alteration.field not in ("format", "of_subnormals"):
            yield alteration._replace(field=f"cast.{alteration.field}")

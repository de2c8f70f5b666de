"""Where the outputs are that rules do not give: from which row or column on, and by contrast of the probes' traits."""

from collections.abc import Sequence

import numpy as np

from f8emu.conformance.breakdown.contrast import Contrast, contrasts
from f8emu.conformance.diagnosis.asked import Asked
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.rules import Places, Rules

_COVERAGE = 0.99
"""The share of the remaining outputs that must have a trait, for the trait to describe them."""


def first_wrong(asked: Sequence[tuple[Asked, Rules]], memory: Memory) -> dict[Places, int]:
    """Rows and columns from which on most outputs differ while none before do, in probes that show all of them."""
    found: dict[Places, int] = {}
    for one, rules in asked:
        for axis, places in ((0, Places.ROWS), (1, Places.COLUMNS)):
            size = one.case.output_shape[axis]
            if one.at is None or len(one.at[axis]) < size or len(one.at[1 - axis]) >= size:
                continue
            share = one.differing(rules, memory).mean(axis=1 - axis)
            start = int(np.argmax(share > 0))
            if 0 < start < size - 1 and share[start:].mean() > 0.5:
                found[places] = start
    return found


def what_is_left(asked: Sequence[tuple[Asked, Rules]], memory: Memory, high: float = 0.0) -> Contrast | None:
    """The sharpest trait that nearly all outputs have which the rules do not give, if a share of `high` with it differ;
    None where no trait parts them.
    """
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for one, rules in asked:
        wrong = one.differing(rules, memory)
        for trait, value in _traits(one).items():
            _add(counts, trait, value, int(wrong.sum()), wrong.size)
        for axis, name in ((0, "row"), (1, "column")):
            places = np.arange(wrong.shape[axis]) if one.at is None else one.at[axis]
            for place, differ in zip(places.tolist(), wrong.sum(axis=1 - axis).tolist(), strict=True):
                _add(counts, name, str(place), differ, wrong.shape[1 - axis])
    names = counts.pop("probe")
    for traits in (counts, {"probe": names}):  # a size tells more than the name of a probe
        found = contrasts(traits, high=high, coverage=_COVERAGE)
        if found:
            return found[0]
    return None


def _traits(one: Asked) -> dict[str, str]:
    case = one.case
    return {
        "K": str(case.k),
        "M": str(case.output_shape[0]),
        "N": str(case.output_shape[1]),
        "operands": f"{case.a.dtype} x {case.b.dtype}",
        "output": case.out_dtype.name,
        "probe": case.id.split(" -> ")[0],
    }


def _add(counts: dict[str, dict[str, tuple[int, int]]], trait: str, value: str, differ: int, total: int) -> None:
    values = counts.setdefault(trait, {})
    known = values.get(value, (0, 0))
    values[value] = known[0] + differ, known[1] + total

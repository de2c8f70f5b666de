"""What those that differ have in common, by contrast: a trait with which most differ and without which few do.

A trait with a difference of shares tells something; that all who differ have it may be a coincidence.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

HIGH, LOW = 0.5, 0.05
"""Shares that differ with a trait, at least, and without it, at most."""
_FEWEST = 3
"""On either side."""
_NEAR = 0.1
"""Contrasts that are so near to the sharpest are told beside it."""
_VALUES = 3
"""The most values that are taken together, for a trait whose values have no order."""

_RANGE = re.compile(r"\d+( to \d+| and more)?")

Counts = Mapping[str, Mapping[str, tuple[int, int]]]
"""Trait -> value -> (how many differ, how many there are)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A trait, and how many differ with it and without it."""

    names: tuple[str, ...]
    """`K above 512`; of several the counts are the same, and do not part them."""
    inside: tuple[int, int]
    outside: tuple[int, int]
    """(how many differ, how many there are)."""

    @property
    def name(self) -> str:
        return ", or likewise ".join(self.names)

    @property
    def difference(self) -> float:
        """The difference of the shares."""
        return _share(self.inside) - _share(self.outside)

    @property
    def coverage(self) -> float:
        """The share of all that differ that has the trait."""
        return self.inside[0] / max(self.inside[0] + self.outside[0], 1)


def contrasts(counts: Counts, *, high: float = HIGH, low: float = LOW, coverage: float = 0.5) -> list[Contrast]:
    """The sharpest contrast and those near to it, at most three; none where the shares are not `high` and `low`."""
    same: dict[tuple[tuple[int, int], tuple[int, int]], tuple[str, ...]] = {}
    for trait, values in counts.items():
        telling = [
            one
            for one in _splits(trait, values)
            if min(one.inside[1], one.outside[1]) >= _FEWEST
            and one.inside[0] > 0
            and (_share(one.inside) >= high and _share(one.outside) <= low and one.coverage >= coverage)
        ]
        if telling:
            sharpest = max(telling, key=lambda one: one.difference)
            key = sharpest.inside, sharpest.outside
            same[key] = (*same.get(key, ()), *sharpest.names)
    merged = [Contrast(names=names, inside=inside, outside=outside) for (inside, outside), names in same.items()]
    merged.sort(key=lambda one: -one.difference)
    return [one for one in merged if one.difference >= merged[0].difference - _NEAR][:_VALUES]


def _splits(trait: str, values: Mapping[str, tuple[int, int]]) -> Iterator[Contrast]:
    """Ranges cut in two at each end; anything else with the values of the highest shares together."""
    whole = _sum(values.values())
    if len(values) < 2:
        return
    if all(_RANGE.fullmatch(value) for value in values):
        ends = sorted(values, key=lambda value: int(value.split()[0]))
        for i in range(1, len(ends)):
            last = ends[i - 1].split()[-1]
            below, above = (_sum(values[value] for value in part) for part in (ends[:i], ends[i:]))
            yield Contrast(names=(f"{trait} above {last}",), inside=above, outside=below)
            yield Contrast(names=(f"{trait} up to {last}",), inside=below, outside=above)
        return
    ranked = sorted(values, key=lambda value: -_share(values[value]))
    for count in range(1, min(_VALUES, len(ranked) - 1) + 1):
        inside = _sum(values[value] for value in ranked[:count])
        outside = whole[0] - inside[0], whole[1] - inside[1]
        yield Contrast(names=(f"{trait}: {' or '.join(ranked[:count])}",), inside=inside, outside=outside)


def _share(counted: tuple[int, int]) -> float:
    return counted[0] / counted[1] if counted[1] else 0.0


def _sum(counted: Iterable[tuple[int, int]]) -> tuple[int, int]:
    pairs = list(counted)
    return sum(differ for differ, _ in pairs), sum(total for _, total in pairs)

"""Where a subject differs: shares of differing cases and outputs by what the cases have in common, and how far off.

Every case has traits (accumulation, formats, K, ...). A tally counts, for each value of each trait, how many cases and
outputs have it and how many of those differ.

What those that differ have in common is told by contrast, a trait with which most differ and without which few do: that
all who differ have a trait may be a coincidence.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from f8emu.conformance.compare import UlpHistogram
from f8emu.conformance.run.result import StageResult, Tallies, joined
from f8emu.conformance.run.result import Tally as Tally


def percent(share: float) -> str:
    """`0 %` and `100 %` are exact; what is close to them says so."""
    value = 100 * share
    if 0 < value < 0.1:
        return "< 0.1 %"
    if 99.9 < value < 100:
        return "> 99.9 %"
    return f"{value:.1f} %" if value % 100 else f"{value:.0f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Stages whose cases have the same traits, counted together."""

    stages: tuple[str, ...]
    """Their titles."""
    whole: Tally
    tallies: Tallies
    ulps: Mapping[str, UlpHistogram] = field(default_factory=dict)
    """dtype of the output -> how far off the outputs are that differ."""

    @property
    def title(self) -> str:
        return ", ".join(self.stages)

    def telling(self) -> dict[str, dict[str, Tally]]:
        """The traits that have more than one value, unless every output of every value differs."""
        if self.whole.outputs_differing == self.whole.outputs:
            return {}
        return {trait: _ordered(values) for trait, values in self.tallies.items() if len(values) > 1}

    def sentences(self) -> Iterator[str]:
        """What those that differ have in common by contrast, the sharpest first; nothing where no trait tells it."""
        if self.whole.outputs_differing == self.whole.outputs:
            yield "Every output of every case differs."
            return
        for what in ("cases", "outputs"):
            found = contrasts(
                {
                    trait: {v: (getattr(x, f"{what}_differing"), getattr(x, what)) for v, x in values.items()}
                    for trait, values in self.telling().items()
                }
            )
            for one in found:
                shares = f"{_counted(one.inside)} differ; of all others {_counted(one.outside)}"
                yield f"Of the {what} with {one.name}, {shares}"
            if found:
                return


def _counted(counted: tuple[int, int]) -> str:
    """`93.0 % (412 of 443)`."""
    return f"{percent(counted[0] / counted[1])} ({counted[0]:,} of {counted[1]:,})"


def breakdowns(stages: Sequence[StageResult]) -> list[Breakdown]:
    """The breakdowns of the stages that differ, each together with those whose cases have the same traits."""
    groups: dict[tuple[str, ...], list[StageResult]] = {}
    for stage in stages:
        if stage.cases_total:
            groups.setdefault(tuple(stage.tallies), []).append(stage)
    found: list[Breakdown] = []
    for group in groups.values():
        whole, titles = joined(group, errors=0), tuple(stage.title for stage in group)
        if whole.cases_differing:
            tally = Tally(
                cases=whole.cases_total,
                cases_differing=whole.cases_differing,
                outputs=whole.outputs_total,
                outputs_differing=whole.outputs_differing,
            )
            found.append(Breakdown(stages=titles, whole=tally, tallies=whole.tallies, ulps=whole.ulps))
    return found


def _ordered(values: Mapping[str, Tally]) -> dict[str, Tally]:
    """Ranges by number, anything else as it came."""
    if all(value[:1].isdigit() for value in values):
        return dict(sorted(values.items(), key=lambda item: int(item[0].split()[0].split("x")[0])))
    return dict(values)


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
    # 1. Of each trait the sharpest contrast; traits that part the cases alike are told together.
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
    # 2. The sharpest of all, and what is as good.
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

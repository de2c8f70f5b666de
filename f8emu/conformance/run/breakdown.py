"""Shares of differing cases and outputs by what the cases have in common, and how far off.

Every case has traits (accumulation, formats, K, ...). A tally counts, for each value of each trait, how many cases and
outputs have it and how many of those differ.

A trait is reported if most cases with it differ and few without it do: that all who differ have a trait may be a
coincidence.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from f8emu.conformance.compare import UlpHistogram
from f8emu.conformance.run.result import StageResult, Tallies, joined
from f8emu.conformance.run.result import Tally as Tally
from f8emu.environment import percent

HIGH, LOW = 0.5, 0.05
"""Shares that differ with a trait, at least, and without it, at most."""
# How many there are on either side of a contrast, at least.
_FEWEST = 3
# Contrasts that are so near to the sharpest are told beside it.
_NEAR = 0.1
# The most values that are taken together, for a trait whose values have no order.
_VALUES = 3
_RANGE = re.compile(r"\d+( to \d+| and more)?")
# How many differ, how many there are.
_Count = tuple[int, int]
Counts = Mapping[str, Mapping[str, _Count]]
"""Trait -> value -> count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Stages whose cases have the same traits, counted together."""

    stages: tuple[str, ...]
    """Their titles."""
    whole: Tally
    tallies: Tallies
    ulps: Mapping[str, UlpHistogram]
    """dtype of the output -> how far off the outputs are that differ."""
    ulps_by_kind: Mapping[str, UlpHistogram]
    """Kind of GEMM and dtype of the output -> the same."""

    @property
    def title(self) -> str:
        return ", ".join(self.stages)

    def telling(self) -> dict[str, dict[str, Tally]]:
        """The traits that have more than one value, unless every output of every value differs."""
        if self.whole.outputs_differing == self.whole.outputs:
            return {}
        return {trait: _ordered(values) for trait, values in self.tallies.items() if len(values) > 1}

    def sentences(self) -> Iterator[str]:
        """The traits by which cases that differ part from the others, the sharpest first."""
        if self.whole.outputs_differing == self.whole.outputs:
            yield "Every output of every case differs."
            return
        traits = self.telling().items()
        cases = {t: {v: (x.cases_differing, x.cases) for v, x in values.items()} for t, values in traits}
        outputs = {t: {v: (x.outputs_differing, x.outputs) for v, x in values.items()} for t, values in traits}
        by_cases = contrasts(cases)
        for contrast in by_cases or contrasts(outputs):
            counts = contrast.inside, contrast.outside
            inside, outside = (f"{percent(_share(n))} ({n[0]:,} of {n[1]:,})" for n in counts)
            noun = "cases" if by_cases else "outputs"
            yield f"Of the {noun} with {contrast.name}, {inside} differ; of all others {outside}"


def breakdowns(stages: Sequence[StageResult]) -> list[Breakdown]:
    """The breakdowns of the stages that differ, each together with those whose cases have the same traits."""
    groups: dict[tuple[str, ...], list[StageResult]] = {}
    for stage in stages:
        if stage.cases_total:
            groups.setdefault(tuple(stage.tallies), []).append(stage)
    differing: list[Breakdown] = []
    for group in groups.values():
        total, titles = joined(group, errors=0), tuple(stage.title for stage in group)
        if total.cases_differing:
            whole = Tally(
                cases=total.cases_total,
                cases_differing=total.cases_differing,
                outputs=total.outputs_total,
                outputs_differing=total.outputs_differing,
            )
            ulps = {"ulps": total.ulps, "ulps_by_kind": total.ulps_by_kind}
            differing.append(Breakdown(stages=titles, whole=whole, tallies=total.tallies, **ulps))
    return differing


def _ordered(values: Mapping[str, Tally]) -> dict[str, Tally]:
    # Ranges by number, anything else as it came.
    if all(value[:1].isdigit() for value in values):
        return dict(sorted(values.items(), key=lambda item: int(item[0].split()[0].split("x")[0])))
    return dict(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A trait, and how many differ with it and without it."""

    names: tuple[str, ...]
    """`K above 512`; of several the counts are the same, and do not part them."""
    inside: _Count
    outside: _Count

    @property
    def name(self) -> str:
        return ", or likewise ".join(self.names)

    @property
    def difference(self) -> float:
        return _share(self.inside) - _share(self.outside)

    @property
    def coverage(self) -> float:
        """The share of all that differ that has the trait."""
        return self.inside[0] / max(self.inside[0] + self.outside[0], 1)


def contrasts(counts: Counts, *, high: float = HIGH, low: float = LOW, coverage: float = 0.5) -> list[Contrast]:
    """The sharpest contrast and those near to it, at most three; none where the shares are not `high` and `low`."""
    # 1. Of each trait the sharpest contrast; traits that part the cases alike are told together.
    same: dict[tuple[_Count, _Count], Contrast] = {}
    for trait, values in counts.items():
        telling = [
            contrast
            for contrast in _splits(trait, values)
            if min(contrast.inside[1], contrast.outside[1]) >= _FEWEST
            and contrast.inside[0] > 0
            and (_share(contrast.inside) >= high and _share(contrast.outside) <= low and contrast.coverage >= coverage)
        ]
        if telling:
            sharpest = max(telling, key=lambda contrast: contrast.difference)
            known = same.setdefault((sharpest.inside, sharpest.outside), replace(sharpest, names=()))
            same[known.inside, known.outside] = replace(known, names=(*known.names, *sharpest.names))
    # 2. The sharpest of all, and what is as good.
    ranked = sorted(same.values(), key=lambda contrast: -contrast.difference)
    return [contrast for contrast in ranked if contrast.difference >= ranked[0].difference - _NEAR][:_VALUES]


def _splits(trait: str, values: Mapping[str, _Count]) -> Iterator[Contrast]:
    # Ranges cut in two at each end; anything else with the values of the highest shares together.
    def split(name: str, part: Sequence[str]) -> Contrast:
        inside, outside = [values[value] for value in part], [values[value] for value in values if value not in part]
        return Contrast(names=(name,), inside=_sum(inside), outside=_sum(outside))

    if len(values) < 2:
        return
    if all(_RANGE.fullmatch(value) for value in values):
        ends = sorted(values, key=lambda value: int(value.split()[0]))
        for i in range(1, len(ends)):
            last = ends[i - 1].split()[-1]
            yield split(f"{trait} above {last}", ends[i:])
            yield split(f"{trait} up to {last}", ends[:i])
        return
    ranked = sorted(values, key=lambda value: -_share(values[value]))
    for count in range(1, min(_VALUES, len(ranked) - 1) + 1):
        yield split(f"{trait}: {' or '.join(ranked[:count])}", ranked[:count])


def _share(count: _Count) -> float:
    return count[0] / count[1] if count[1] else 0.0


def _sum(counts: Sequence[_Count]) -> _Count:
    return sum(differ for differ, _ in counts), sum(total for _, total in counts)

"""Where a subject differs: shares of differing cases and outputs by what the cases have in common, and how far off.

Every case has traits (accumulation, formats, K, ...). A tally counts, for each value of each trait, how many cases and
outputs have it and how many of those differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from f8emu.conformance.breakdown.contrast import contrasts
from f8emu.conformance.breakdown.ulps import UlpHistogram
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
    found = [_breakdown(group) for group in groups.values()]
    return [breakdown for breakdown in found if breakdown.whole.cases_differing]


def _breakdown(stages: Sequence[StageResult]) -> Breakdown:
    whole = joined(stages, errors=0)
    return Breakdown(
        stages=tuple(stage.title for stage in stages),
        whole=Tally(
            cases=whole.cases_total,
            cases_differing=whole.cases_differing,
            outputs=whole.outputs_total,
            outputs_differing=whole.outputs_differing,
        ),
        tallies=whole.tallies,
        ulps=whole.ulps,
    )


def _ordered(values: Mapping[str, Tally]) -> dict[str, Tally]:
    """Ranges by number, anything else as it came."""
    if all(value[:1].isdigit() for value in values):
        return dict(sorted(values.items(), key=lambda item: int(item[0].split()[0].split("x")[0])))
    return dict(values)

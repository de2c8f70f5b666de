"""The breakdown of a subject that differs, for a terminal and for JSON."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from f8emu.conformance.breakdown.breakdown import Breakdown, Tally, breakdowns, percent
from f8emu.conformance.breakdown.ulps import UlpHistogram
from f8emu.conformance.verify import SubjectResult

if TYPE_CHECKING:
    from rich.table import Table

_NEAR = 3
"""Bins of their own on a terminal: 1, 2, 3 to 4; farther ones are one column."""


def breakdown_tables(subject: SubjectResult) -> "Iterator[Table | str]":
    """Of the stages that differ: by traits, what that rules out, and by distance. Nothing if all are equal."""
    for breakdown in breakdowns(subject.stages):
        if breakdown.telling():
            yield _by_trait(breakdown, subject.name)
        yield from breakdown.sentences()
        yield _by_distance(breakdown, subject.name)


def _by_trait(breakdown: Breakdown, name: str) -> "Table":
    drawn = _table(
        f"{name}: what differs in {breakdown.title}",
        ("by", "", "cases differ", "share", "outputs differ", "share"),
        numeric=4,
    )
    for trait, values in breakdown.telling().items():
        drawn.add_section()
        for i, (value, tally) in enumerate(values.items()):
            drawn.add_row(trait if i == 0 else "", value, *_cells(tally))
    return drawn


def _cells(tally: Tally) -> tuple[str, ...]:
    return (
        f"{tally.cases_differing}/{tally.cases}",
        percent(tally.share_of_cases),
        f"{tally.outputs_differing}/{tally.outputs}",
        percent(tally.share_of_outputs),
    )


def _by_distance(breakdown: Breakdown, name: str) -> "Table":
    """One row a dtype, few columns: the whole histogram is in the JSON and in the page."""
    heads = ("below -4", "-4 to -3", "-2", "-1", "zero's sign", "+1", "+2", "+3 to +4", "above +4")
    heads += ("NaN, infinity", "not compared")
    rows = {dtype: _counts(histogram) for dtype, histogram in breakdown.ulps.items()}
    used = [i for i in range(len(heads)) if any(counts[i] for counts in rows.values())]
    columns = ("output", "differ", *(heads[i] for i in used), "lowest", "highest")
    title = f"{name}: distance in ulps; + is farther from zero than expected, - is nearer"
    drawn = _table(title, columns, numeric=len(columns) - 1)
    for dtype, histogram in breakdown.ulps.items():
        counts = (str(rows[dtype][i] or "-") for i in used)
        extremes = (f"{x:+d}" if histogram.finite else "-" for x in (histogram.lowest, histogram.highest))
        drawn.add_row(dtype, str(histogram.total), *counts, *extremes)
    return drawn


def _counts(histogram: UlpHistogram) -> list[int]:
    inner = [histogram.finite.get(index, 0) for index in range(-_NEAR, _NEAR + 1)]
    below = sum(count for index, count in histogram.finite.items() if index < -_NEAR)
    above = sum(count for index, count in histogram.finite.items() if index > _NEAR)
    return [below, *inner, above, histogram.without_distance, histogram.not_compared]


def _table(title: str, heads: tuple[str, ...], *, numeric: int) -> "Table":
    """A table whose last columns are flush right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title, style="bold"), title_justify="left")
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="right" if i >= len(heads) - numeric else "left")
    return drawn


def breakdown_json(subject: SubjectResult) -> list[dict[str, Any]]:
    """The same as plain data, with the whole histograms."""
    return [
        {
            "stages": list(breakdown.stages),
            "whole": _tally_json(breakdown.whole),
            "by": {
                trait: {value: _tally_json(tally) for value, tally in values.items()}
                for trait, values in breakdown.tallies.items()
            },
            "sentences": list(breakdown.sentences()),
            "ulps": {dtype: _ulps_json(histogram) for dtype, histogram in breakdown.ulps.items()},
        }
        for breakdown in breakdowns(subject.stages)
    ]


def _tally_json(tally: Tally) -> dict[str, int]:
    return {
        "cases": tally.cases,
        "cases_differing": tally.cases_differing,
        "outputs": tally.outputs,
        "outputs_differing": tally.outputs_differing,
    }


def _ulps_json(histogram: UlpHistogram) -> dict[str, Any]:
    return {
        "total": histogram.total,
        "lowest": histogram.lowest,
        "highest": histogram.highest,
        "histogram": histogram.labelled(),
    }

"""The breakdown of a subject that differs, for a terminal and for JSON."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from f8emu.conformance.breakdown.breakdown import Breakdown, Tally, breakdowns, percent
from f8emu.conformance.breakdown.ulps import UlpHistogram
from f8emu.conformance.run.result import SubjectResult
from f8emu.untrusted import printable

if TYPE_CHECKING:
    from rich.table import Table


def breakdown_tables(subject: SubjectResult) -> "Iterator[Table | str]":
    """Tables for the stages that differ: by traits, what that rules out, and by distance. Nothing if all are equal."""
    for breakdown in breakdowns(subject.stages):
        if breakdown.telling():
            yield _by_trait(breakdown, subject.name)
        yield from breakdown.sentences()
        for dtype, histogram in breakdown.ulps.items():  # + is farther from zero than expected
            yield f"{subject.name}: {breakdown.title}, {dtype}: {histogram.words()}"


def _by_trait(breakdown: Breakdown, name: str) -> "Table":
    drawn = _table(
        f"{name}: what differs in {breakdown.title}",
        ("by", "", "cases differ", "share", "outputs differ", "share"),
        numeric=4,
    )
    from rich.text import Text

    for trait, values in breakdown.telling().items():
        drawn.add_section()
        for i, (value, tally) in enumerate(values.items()):
            drawn.add_row(*map(Text, (trait if i == 0 else "", printable(value), *_cells(tally))))
    return drawn


def _cells(tally: Tally) -> tuple[str, ...]:
    return (
        f"{tally.cases_differing}/{tally.cases}",
        percent(tally.share_of_cases),
        f"{tally.outputs_differing}/{tally.outputs}",
        percent(tally.share_of_outputs),
    )


def _table(title: str, heads: tuple[str, ...], *, numeric: int) -> "Table":
    """A table whose last columns are flush right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(printable(title), style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0))
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

"""The report of `f8emu verify` as a page: verdict, why, one output of each case, what ran, how far, where."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from f8emu.conformance.breakdown.breakdown import Breakdown, Tally, breakdowns
from f8emu.conformance.run.report import own_splits, paste_lines, verdict
from f8emu.conformance.run.verify import Result, StageResult, Status, SubjectResult
from f8emu.environment import devices, versions
from f8emu.report.figures import map_plot, ulp_plot
from f8emu.report.html import render
from f8emu.report.page import (
    Block,
    Cell,
    Code,
    Details,
    Facts,
    Page,
    Plots,
    Section,
    Share,
    Table,
    Text,
    Tone,
)

if TYPE_CHECKING:
    from f8emu.conformance.diagnosis.search import Diagnosis

COMMAND = "f8emu verify"
_MAPS = 6
_TONES: dict[Status, Tone] = {
    Status.EQUAL: "good",
    Status.DIFFERENT: "bad",
    Status.EMPTY: "bad",
    Status.NOT_OFFERED: "quiet",
}


def to_html(
    result: Result,
    *,
    command: Sequence[str],
    seconds: float,
    errors: int = 8,
    not_run: Mapping[str, str] = {},
    diagnoses: "Mapping[str, Sequence[Diagnosis]] | None" = None,
    asked: Mapping[str, Sequence[str]] = {},
) -> str:
    """The whole run as one file; `diagnoses` are those of a subject, by its name, `asked` is that of `paste_lines`."""
    sections = [_diagnosis(name, found) for name, found in (diagnoses or {}).items() if found]
    sections += [_overview(result)] if len(result.subjects) > 1 else []
    sections += [_subject(subject, errors) for subject in result.subjects]
    if pasted := list(paste_lines(result, asked)):
        sections.append(Section(title="One case again", blocks=[Code(lines=pasted)]))
    sections.append(_machine(result, command, seconds, not_run))
    tone: Tone = "good" if result.is_equal else "bad" if result.has_difference else "warn"
    names = [subject.name for subject in result.subjects]
    page = Page(
        title=f"Do the bits agree? {names[0] if len(names) == 1 else f'{len(names)} subjects'}",
        lead=_lead(result),
        verdict=Cell(text=verdict(result), tone=tone),
        sections=sections,
    )
    return render(COMMAND, page)


def _lead(result: Result) -> str:
    stages = [stage for subject in result.subjects for stage in subject.stages]
    cases, outputs = (sum(getattr(stage, name) for stage in stages) for name in ("cases_total", "outputs_total"))
    differing_cases, differing = (
        sum(getattr(stage, name) for stage in stages) for name in ("cases_differing", "outputs_differing")
    )
    words = f"{outputs:,} outputs of {cases:,} cases were compared bit by bit, without tolerance"
    if not differing and not differing_cases:
        return f"{words}: all are equal." if outputs else f"{words}."
    differ = f"{differing:,} output{'s' * (differing != 1)} in {differing_cases:,} case{'s' * (differing_cases != 1)}"
    return f"{words}: {differ} {'differs' if differing == 1 else 'differ'}."


def _overview(result: Result) -> Section:
    titles = list(dict.fromkeys(stage.title for subject in result.subjects for stage in subject.stages))
    rows: list[list[str | Cell | Share]] = []
    for subject in result.subjects:
        status = {stage.title: _status(stage) for stage in subject.stages}
        rows.append([subject.name, *(status.get(title, "") for title in titles)])
    return Section(
        title="Overview",
        blocks=[Table(caption="Who agrees, stage by stage", columns=("subject", *titles), rows=rows)],
    )


def _status(stage: StageResult) -> Cell:
    return Cell(text=stage.status.value, tone=_TONES[stage.status])


def _subject(subject: SubjectResult, errors: int) -> Section:
    parts = [*_mismatches(subject, errors), Section(title="What ran", blocks=[_stages(subject)])]
    parts += [_breakdown(breakdown) for breakdown in breakdowns(subject.stages)]
    parts += _where(subject)
    return Section(title=subject.name, lead=f"Engine: {subject.engine}", sections=parts)


# 1 What ran


def _stages(subject: SubjectResult) -> Table:
    rows: list[list[str | Cell | Share]] = []
    for stage in subject.stages:
        status = _status(stage)
        if stage.status is Status.NOT_OFFERED:
            rows.append([stage.title, status, "", "", "", "", stage.reason])
            continue
        rows.append(
            [
                stage.title,
                status,
                _of(stage.cases_equal, stage.cases_total),
                _of(stage.outputs_equal, stage.outputs_total),
                stage.oracle,
                f"{stage.seconds:.1f}",
                _remark(stage),
            ]
        )
    return Table(
        caption="What ran, and what of it was equal",
        columns=("stage", "status", "cases equal", "outputs equal", "judged by", "seconds", "remarks"),
        rows=rows,
        numeric=frozenset((2, 3, 5)),
    )


def _remark(stage: StageResult) -> str:
    words = [own_splits(stage).removeprefix("; ")] if stage.own_splits else []
    if stage.cases_not_offered:
        words.append(f"{stage.cases_not_offered} not offered: {stage.reason}")
    parts = [f"{part} ({count})" for part, count in stage.first_differences.items() if part]
    if parts:
        words.append(f"first in {', '.join(parts[:6])}{f' and {len(parts) - 6} more' if len(parts) > 6 else ''}")
    return "; ".join(words)


def _of(equal: int, total: int) -> str:
    return f"{equal:,} of {total:,}"


# 2 Why


def _diagnosis(name: str, diagnoses: "Sequence[Diagnosis]") -> Section:
    alike: dict[tuple[str, Tone], list[Diagnosis]] = {}
    for one in diagnoses:
        alike.setdefault(_conclusion(one), []).append(one)
    rows: list[list[str | Cell | Share]] = []
    for (text, tone), kinds in alike.items():
        shares = [] if kinds[0].error else [_share(kinds, False), _share(kinds, True)]
        rows.append([", ".join(one.kind for one in kinds), Cell(text=text, tone=tone), *(shares or ["", ""])])
    rows += [[d.kind, Cell(text=f"left out: {d.left_out}", tone="warn"), "", ""] for d in diagnoses if d.left_out]
    tried: list[Block] = []
    for diagnosis in diagnoses:
        others: list[list[str | Cell | Share]] = [
            [" and ".join(e.alterations), e.sentence, Share(value=e.share)] for e in diagnosis.tried
        ]
        if len(others) > 1:
            columns = ("alteration", "in words", "outputs explained")
            table = Table(caption=f"{diagnosis.kind}: what was tried, best first", columns=columns, rows=others)
            tried.append(Details(summary=f"{diagnosis.kind}: {len(others)} explanations tried", blocks=[table]))
    table = Table(
        caption="Share of probe outputs whose every bit is explained",
        columns=("kind of GEMM", "what it does instead", "by the chip's rules", "by this explanation"),
        rows=rows,
    )
    blocks: list[Block] = [table]
    if tried:
        blocks.append(Details(summary="What else was tried", blocks=tried))
    return Section(
        title=f"Diagnosis of {name}",
        lead="The suite computed probe GEMMs under altered rules, and compared bits: 100 % is every output.",
        blocks=blocks,
    )


def _conclusion(diagnosis: "Diagnosis") -> tuple[str, Tone]:
    if diagnosis.error:
        return diagnosis.error, "bad"
    if diagnosis.best is None:
        return "it follows the chip's rules", "good"
    return diagnosis.best.sentence, "" if diagnosis.best.is_complete else "warn"


def _share(kinds: "Sequence[Diagnosis]", is_explained: bool) -> Share:
    """The share of the probe outputs of all kinds that the chip's rules or the explanation give."""
    total = max(sum(one.outputs_total for one in kinds), 1)
    if not is_explained or kinds[0].best is None:
        return Share(value=sum(one.outputs_equal for one in kinds) / total)
    return Share(value=sum(one.best.share * one.outputs_total for one in kinds if one.best) / total)


def _breakdown(breakdown: Breakdown) -> Section:
    rows: list[list[str | Cell | Share]] = []
    starts: set[int] = set()
    for trait, values in breakdown.telling().items():
        starts.add(len(rows))
        for value, tally in values.items():
            rows.append([trait if len(rows) in starts else "", value, *_counted(tally)])
    table = Table(
        caption="Cases and outputs that differ, by what the cases have in common",
        columns=("trait", "value", "cases differ", "share of cases", "outputs differ", "share of outputs"),
        rows=rows,
        numeric=frozenset((2, 4)),
        starts=frozenset(starts),
    )
    points = list(breakdown.sentences())
    blocks: list[Block] = [Text(points=points)] if points else []
    blocks += [Details(summary="What the cases that differ have in common", blocks=[table])] if rows else []
    if any(histogram.total > histogram.not_compared for histogram in breakdown.ulps.values()):
        blocks.append(ulp_plot(breakdown))
    else:
        blocks.append(Text(points=("No output could be compared: the cases raised, or gave another dtype or shape.",)))
    whole = breakdown.whole
    return Section(
        title=f"What differs: {breakdown.title}",
        lead=f"{whole.cases_differing:,} of {whole.cases:,} cases and {whole.outputs_differing:,} of "
        f"{whole.outputs:,} outputs differ.",
        blocks=blocks,
    )


def _counted(tally: Tally) -> list[str | Cell | Share]:
    return [
        f"{tally.cases_differing:,} of {tally.cases:,}",
        Share(value=tally.share_of_cases),
        f"{tally.outputs_differing:,} of {tally.outputs:,}",
        Share(value=tally.share_of_outputs),
    ]


# 3 Where


def _where(subject: SubjectResult) -> Iterator[Section]:
    # the worst of every stage before the second worst of one
    ranked = [(rank, place) for stage in subject.stages for rank, place in enumerate(stage.places)]
    worst = [place for _, place in sorted(ranked, key=lambda item: item[0])[:_MAPS]]
    if worst:
        yield Section(
            title="Where the bits differ",
            lead="The outputs of the worst cases, row by column: grey is equal, blue is nearer to zero than expected, "
            "orange is farther, purple is a NaN, an infinity or a zero of the other sign on one side only. "
            "The deeper the colour, the more ulps.",
            blocks=[Plots(plots=[map_plot(place) for place in worst])],
        )


def _mismatches(subject: SubjectResult, errors: int) -> Iterator[Section]:
    found = [mismatch for stage in subject.stages for mismatch in stage.mismatches][:errors]
    if found:
        rows: list[list[str | Cell | Share]] = [
            [
                " ".join((mismatch.case, mismatch.part)).strip(),
                Cell(text=", ".join(map(str, mismatch.index)), is_code=True),
                Cell(text=mismatch.observed or mismatch.error, is_code=True),
                Cell(text=mismatch.expected, is_code=True),
                Cell(text=mismatch.inputs, is_code=True),
            ]
            for mismatch in found
        ]
        columns = ("case", "index", "observed", "expected", "inputs (codes in hex)")
        table = Table(caption="In the order in which the suite runs", columns=columns, rows=rows)
        which = f"each of the first {len(found)} cases that differ" if len(found) > 1 else "a case that differs"
        yield Section(title=f"One output of {which}", blocks=[table])


# 4 On which machine


def _machine(result: Result, command: Sequence[str], seconds: float, not_run: Mapping[str, str]) -> Section:
    golden = result.golden
    items = [(f"device of {name}" if name != "cpu" else "processor", ", ".join(d)) for name, d in devices().items()]
    items += [(name, version or "not installed") for name, version in versions().items()]
    items += [
        ("recorded GEMMs", f"{golden.path.name}, {len(golden.cases)} cases recorded on {golden.device}"),
        ("its SHA-256", golden.sha256),
        ("command", " ".join(command)),
        ("written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("took", f"{seconds:.1f} s"),
    ]
    items += [(f"not run: {name}", reason) for name, reason in not_run.items()]
    return Section(title="Machine and versions", blocks=[Facts(items=items)])

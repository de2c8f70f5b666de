"""What `f8emu verify` found: the verdict, and a page: why, an output of each case, what ran, how far, where."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from f8emu.conformance.compare import counted
from f8emu.conformance.diagnosis.report import Diagnoses, diagnosis_lines
from f8emu.conformance.run.breakdown import Breakdown, Tally, breakdowns
from f8emu.conformance.run.result import Result, StageResult, Status, SubjectResult
from f8emu.conformance.run.subject import SUBJECTS
from f8emu.environment import devices, versions
from f8emu.report.figures import map_plot, ulp_plot
from f8emu.report.page import Block, Cell, Code, Facts, Page, Plots, Row, Section, Share, Table, Text, Tone
from f8emu.untrusted import printable

COMMAND = "f8emu verify"
_MAPS = 6
_TONES: dict[Status, Tone] = {
    Status.EQUAL: "good",
    Status.DIFFERENT: "bad",
    Status.EMPTY: "bad",
    Status.NOT_OFFERED: "quiet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run of the command, beside its result."""

    command: Sequence[str]
    seconds: float
    errors: int = 8
    """The most cases of each subject of which an output is shown."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Subjects that could not be loaded, and why."""
    diagnoses: Diagnoses = field(default_factory=dict)
    asked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Subject -> the words of the command that name it, and the options that its cases depend on."""


def verdict(result: Result) -> str:
    """The first line."""
    stages = [stage for subject in result.subjects for stage in subject.stages]
    cases = sum(stage.cases_total for stage in stages)
    outputs = sum(stage.outputs_equal for stage in stages)
    if not result.has_difference and result.is_interrupted:
        if not outputs:
            return "INTERRUPTED, nothing was compared"
        return f"INTERRUPTED: equal so far, every bit of {outputs} outputs in {cases} cases"
    # Cases under an S of their own are equal, but are not the chip's: they are counted apart.
    if result.is_equal:
        splits = [tally for stage in stages for tally in stage.own_splits.values()]
        own = f"{sum(t.outputs for t in splits)} in {sum(t.cases for t in splits)} under an S of its own"
        cases -= sum(tally.cases for tally in splits)
        equal = [f"every bit of {outputs} outputs in {cases} cases"] if cases else []
        skipped = sum(s.cases_not_offered for one in result.subjects if one.name not in SUBJECTS for s in one.stages)
        return f"equal: {', and '.join(equal + [own] * bool(splits))}" + (
            f"; {skipped} cases not offered" if skipped else ""
        )
    failed = []
    for subject in result.subjects:
        wrong = [s.stage for s in subject.stages if s.status in (Status.DIFFERENT, Status.EMPTY)]
        if not subject.is_equal:
            failed.append(f"{subject.name} ({', '.join(wrong) or 'nothing ran'})")
    found = "NOT EQUAL" if result.has_difference else "NOT VERIFIED"
    return f"{'INTERRUPTED, ' if result.is_interrupted else ''}{found}: {'; '.join(failed)}"


def page(result: Result, run: Run) -> Page:
    """The whole run."""
    sections = [
        Section(title=f"Diagnosis of {name}", blocks=[Text(points=list(diagnosis_lines({name: found})))])
        for name, found in run.diagnoses.items()
    ]
    sections += [_overview(result)] if len(result.subjects) > 1 else []
    sections += [_subject(subject, run.errors) for subject in result.subjects]
    if run.not_run:
        reasons = [f"not run: {reason}" for reason in run.not_run.values()]
        sections.append(Section(title="What did not run", blocks=[Text(points=reasons)]))
    if pasted := list(_paste_lines(result, run.asked)):
        sections.append(Section(title="One case again", blocks=[Code(lines=pasted)]))
    sections.append(_machine(result, run))
    tone: Tone = "good" if result.is_equal else "bad" if result.has_difference else "warn"
    names = [subject.name for subject in result.subjects]
    title = f"Do the bits agree? {names[0] if len(names) == 1 else f'{len(names)} subjects'}"
    return Page(title=title, verdict=Cell(text=verdict(result), tone=tone), sections=sections)


def _overview(result: Result) -> Section:
    titles = list(dict.fromkeys(stage.title for subject in result.subjects for stage in subject.stages))
    rows: list[Row] = []
    for subject in result.subjects:
        status = {stage.title: _status(stage) for stage in subject.stages}
        rows.append([subject.name, *(status.get(title, "") for title in titles)])
    table = Table(caption="Who agrees, stage by stage", columns=("subject", *titles), rows=rows, only="html")
    return Section(title="Overview", blocks=[table])


def _status(stage: StageResult) -> Cell:
    return Cell(text=stage.status.value, tone=_TONES[stage.status])


def _subject(subject: SubjectResult, errors: int) -> Section:
    parts: list[Section] = []
    head, *lines = _mismatch_lines(subject, errors) or [""]
    if head:
        parts.append(Section(title="One output of each case that differs", lead=head, blocks=[Text(points=lines)]))
    ran: list[Block] = [Text(points=list(_stage_lines(subject)), only="terminal"), _stages(subject)]
    parts.append(Section(title="What ran", lead=f"{subject.name}   engine: {subject.engine}", blocks=ran))
    parts += [_breakdown(breakdown, subject.name) for breakdown in breakdowns(subject.stages)]
    # the worst of every stage before the second worst of one
    ranked = sorted(
        ((rank, place) for stage in subject.stages for rank, place in enumerate(stage.places)), key=lambda one: one[0]
    )
    if ranked:
        explained = Text(
            points=[
                "The outputs of the worst cases, row by column: grey is equal, blue is nearer to zero than expected, "
                "orange is farther, purple is a NaN, an infinity or a zero of the other sign on one side only. "
                "The deeper the colour, the more ulps."
            ],
            only="html",
        )
        maps = Plots(plots=[map_plot(place) for _, place in ranked[:_MAPS]])
        parts.append(Section(title="Where the bits differ", blocks=[explained, maps]))
    return Section(title=subject.name, sections=parts)


# 1 One output of each case


def mismatch_lines(result: Result, errors: int) -> Iterator[str]:
    """One output of each case that differs, `errors` cases of each subject at the most, and how many there are."""
    for subject in result.subjects:
        yield from _mismatch_lines(subject, errors)


def _mismatch_lines(subject: SubjectResult, errors: int) -> list[str]:
    found = [mismatch for stage in subject.stages for mismatch in stage.mismatches]
    if not found:
        return []
    wrong = sum(stage.outputs_differing for stage in subject.stages)
    cases = sum(stage.cases_differing for stage in subject.stages)
    shown = min(errors, len(found))
    of = "" if cases == 1 else " of each" if shown == cases else f" of each of the first {shown}" * (shown > 1)
    head = f"{subject.name}: {counted(cases, 'case differs', 'cases differ')}, {counted(wrong, 'output')}"
    head += "" if not shown else ":" if wrong == 1 else f"; one{of}:"
    return [head, *(mismatch.line() for mismatch in found[:errors])]


# 2 What ran


def _stage_lines(subject: SubjectResult) -> Iterator[str]:
    """The stages that differ one by one, those that are equal in one sentence, and who judged."""
    equal = [_counts(stage) for stage in subject.stages if stage.status is Status.EQUAL]
    if equal:
        yield f"  equal: {'; '.join(equal)}"
    for stage in subject.stages:
        if stage.status in (Status.DIFFERENT, Status.EMPTY):
            yield f"  {stage.status.value}: {'; '.join([_counts(stage), *_first_parts(stage)])}"
    reasons: dict[str, list[str]] = {}
    judges: dict[str, list[str]] = {}
    for stage in subject.stages:
        if stage.reason:
            cases = f" ({stage.cases_not_offered} cases)" if stage.cases_total else ""
            reasons.setdefault(stage.reason.removeprefix(subject.name).strip(), []).append(stage.title + cases)
        if stage.oracle:
            judges.setdefault(stage.oracle, []).append(stage.title)
    if reasons:
        found = (f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items())
        yield f"  not offered: {'; '.join(found)}"
    yield from (f"  judge of {', '.join(titles)}: {judge}" for judge, titles in judges.items())


def _counts(stage: StageResult) -> str:
    is_whole = stage.cases_equal == stage.cases_total
    cases = f"{stage.cases_equal}/{stage.cases_total} cases" + ("" if is_whole else " equal")
    outputs = f"{stage.outputs_equal}/{stage.outputs_total} outputs"
    return ", ".join([f"{stage.title} {cases}", outputs, f"{stage.seconds:.1f} s", *_own_splits(stage)])


def _own_splits(stage: StageResult) -> list[str]:
    """`1 equal under an S of its own [CHAIN-3] (S = 5: 1)`, or nothing."""
    if not stage.own_splits:
        return []
    cases = sum(tally.cases for tally in stage.own_splits.values())
    counts = ", ".join(f"S = {slices}: {tally.cases}" for slices, tally in stage.own_splits.items())
    return [f"{cases} equal under an S of its own [CHAIN-3] ({counts})"]


def _first_parts(stage: StageResult) -> list[str]:
    parts = [f"{part} ({count})" for part, count in stage.first_differences.items() if part]
    return [f"first in {', '.join(parts)}"] if parts else []


def _stages(subject: SubjectResult) -> Table:
    rows: list[Row] = []
    for stage in subject.stages:
        offered = [f"{stage.cases_not_offered} not offered: {stage.reason}"] if stage.cases_not_offered else []
        remarks = "; ".join([*_own_splits(stage), *offered, *_first_parts(stage)])
        figures: Row = [
            f"{stage.cases_equal:,} of {stage.cases_total:,}",
            f"{stage.outputs_equal:,} of {stage.outputs_total:,}",
            stage.oracle,
            f"{stage.seconds:.1f}",
            remarks,
        ]
        if stage.status is Status.NOT_OFFERED:
            figures = ["", "", "", "", stage.reason]
        rows.append([stage.title, _status(stage), *figures])
    columns = ("stage", "status", "cases equal", "outputs equal", "judged by", "seconds", "remarks")
    caption = "What ran, and what of it was equal"
    return Table(caption=caption, columns=columns, rows=rows, numeric=frozenset((2, 3, 5)), only="html")


# 3 How far


def _breakdown(breakdown: Breakdown, name: str) -> Section:
    rows: list[Row] = []
    starts: set[int] = set()
    for trait, values in breakdown.telling().items():
        starts.add(len(rows))
        for value, tally in values.items():
            rows.append([trait if len(rows) in starts else "", value, *_counted(tally)])
    table = Table(
        caption=f"{name}: what differs in {breakdown.title}",
        columns=("by", "", "cases differ", "share", "outputs differ", "share"),
        rows=rows,
        numeric=frozenset((2, 3, 4, 5)),
        starts=frozenset(starts),
    )
    blocks: list[Block] = [table] if rows else []
    blocks.append(Text(points=[*breakdown.sentences(), *_distances(breakdown, name)]))
    if any(histogram.total > histogram.not_compared for histogram in breakdown.ulps.values()):
        blocks.append(ulp_plot(breakdown))
    return Section(title=f"What differs: {breakdown.title}", blocks=blocks)


def _distances(breakdown: Breakdown, name: str) -> Iterator[str]:
    for dtype, histogram in breakdown.ulps.items():  # + is farther from zero than expected
        yield f"{name}: {breakdown.title}, {dtype}: {histogram.words()}"


def _counted(tally: Tally) -> Row:
    return [
        f"{tally.cases_differing}/{tally.cases}",
        Share(value=tally.share_of_cases),
        f"{tally.outputs_differing}/{tally.outputs}",
        Share(value=tally.share_of_outputs),
    ]


# 4 One case again, and on which machine


def _paste_lines(result: Result, asked: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """For each subject that differs the command that runs one case again, and its program."""
    for subject in result.subjects:
        examples = [stage.example for stage in subject.stages if stage.example is not None]
        found = [mismatch for stage in subject.stages for mismatch in stage.mismatches]
        one = min(examples, key=lambda example: len(example.snippet), default=found[0] if found else None)
        if one is None or subject.name not in asked:
            continue
        yield "To run one case again:"
        yield f"f8emu verify {shlex.join([*asked[subject.name], '--case', printable(one.case)])}"
        if one.snippet:
            yield f"Its output {list(one.index)} in plain torch, from a row of a and a column of b, 16 times."
            yield "A kernel whose bits depend on the place of an output may be right here."
            yield from one.snippet.splitlines()


def _machine(result: Result, run: Run) -> Section:
    golden = result.golden
    items = [(f"device of {name}" if name != "cpu" else "processor", ", ".join(d)) for name, d in devices().items()]
    items += [(name, version or "not installed") for name, version in versions().items()]
    items += [
        ("recorded GEMMs", f"{golden.path.name}, {len(golden.cases)} cases recorded on {golden.device}"),
        ("its SHA-256", golden.sha256),
        ("command", " ".join(run.command)),
        ("written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("took", f"{run.seconds:.1f} s"),
    ]
    return Section(title="Machine and versions", blocks=[Facts(items=items)])

"""The result of `f8emu verify` in one line, as plain data, and as a page.

The page says why, shows an output of each case, and tells what ran, how far and where.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from f8emu.conformance.casts.verify import Verified
from f8emu.conformance.compare import Mismatch, counted
from f8emu.conformance.diagnosis.search import Diagnoses
from f8emu.conformance.run.breakdown import Breakdown, breakdowns
from f8emu.conformance.run.result import Result, StageResult, Status, SubjectResult, merged_kinds
from f8emu.conformance.run.subject import SUBJECTS
from f8emu.environment import devices, printable, versions
from f8emu.report.casts import function_json, function_section
from f8emu.report.diagnosis import diagnosis_json, diagnosis_section
from f8emu.report.figures import map_plot, ulp_plot
from f8emu.report.page import (
    Cell,
    Code,
    Element,
    Facts,
    Page,
    Plots,
    Row,
    Section,
    Share,
    Table,
    Text,
    Tone,
    verdict_cell,
)
from f8emu.verdict import Exit, Verdict

COMMAND = "f8emu verify"
_MAPS = 6
_IN_PYTHON = 3
"""Cases of a subject of which `repr` shows an output."""
_TONES: dict[Status, Tone] = {
    Status.EQUAL: "good",
    Status.DIFFERENT: "bad",
    Status.EMPTY: "bad",
    Status.NOT_OFFERED: "quiet",
}
_STAGE = ("cases_total cases_equal cases_not_offered outputs_total outputs_equal reason first_differences").split()
"""Fields of a stage that its JSON has as they are."""


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
    functions: Mapping[str, Verified] = field(default_factory=dict)
    """Casts and quantizers."""
    asked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Subject -> the words of the command that name it, and the options that its cases depend on."""


def verdict(result: Result) -> Verdict:
    """The first line, and the exit status."""
    stages = [stage for subject in result.subjects for stage in subject.stages]
    outputs = sum(stage.outputs_equal for stage in stages)
    # 1. A difference: the subjects and stages to blame; a subject of which nothing ran proves nothing.
    blamed = [_blamed(subject) for subject in result.subjects if not subject.is_equal]
    if result.has_difference:
        return Verdict(Exit.DIFFERENT, f"NOT EQUAL: {'; '.join(blamed)}").after(ctrl_c=result.is_interrupted)
    # 2. None so far.
    cases = sum(stage.cases_total for stage in stages)
    if result.is_interrupted:
        so_far = f": equal so far, every bit of {outputs:,} outputs in {cases:,} cases"
        return Verdict(Exit.INTERRUPTED, f"INTERRUPTED{so_far if outputs else ', nothing was compared'}")
    if not result.is_equal:
        return Verdict(Exit.UNVERIFIED, f"NOT VERIFIED: {'; '.join(blamed)}")
    # 3. Cases under an S of their own are equal, but are not the chip's: they are counted apart.
    splits = [tally for stage in stages for tally in stage.own_splits.values()]
    cases -= sum(tally.cases for tally in splits)
    equal = [f"every bit of {outputs:,} outputs in {cases:,} cases"] if cases else []
    if splits:
        counts = f"{sum(tally.outputs for tally in splits):,} in {sum(tally.cases for tally in splits):,}"
        equal.append(f"{counts} under an S of its own")
    kernels = [subject for subject in result.subjects if subject.name not in SUBJECTS]
    skipped = sum(stage.cases_not_offered for kernel in kernels for stage in kernel.stages)
    line = f"equal: {', and '.join(equal)}"
    return Verdict(Exit.EQUAL, f"{line}; {skipped:,} cases not offered" if skipped else line)


def _blamed(subject: SubjectResult) -> str:
    wrong = [stage.stage for stage in subject.stages if stage.status in (Status.DIFFERENT, Status.EMPTY)]
    return f"{subject.name} ({', '.join(wrong) or 'nothing ran'})"


def to_json(result: Result, run: Run) -> dict[str, Any]:
    """The whole run as plain data."""
    golden = result.golden
    source = {"file": golden.path.name, "sha256": golden.sha256, "cases": len(golden.cases)}
    return {
        **verdict(result).to_json(command=run.command, seconds=run.seconds),
        "not_run": dict(run.not_run),
        "versions": versions(),
        "devices": devices(),
        "golden": {**source, "metadata": golden.metadata},
        "subjects": [
            {
                "name": subject.name,
                "engine": subject.engine,
                "equal": subject.is_equal,
                "stages": [_stage_json(stage, run.errors) for stage in subject.stages],
                "breakdowns": [_breakdown_json(breakdown) for breakdown in breakdowns(subject.stages)],
                "diagnosis": diagnosis_json(run.diagnoses.get(subject.name, ())),
                **function_json(run.functions.get(subject.name)),
            }
            for subject in result.subjects
        ],
    }


def _stage_json(stage: StageResult, errors: int) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "status": stage.status.value,
        "oracle": stage.oracle,
        **{name: getattr(stage, name) for name in _STAGE},
        "kinds": [
            {"kind": name, "cases": kind.cases, "worst": _mismatch_json(kind.worst)}
            for name, kind in stage.kinds.items()
        ],
        "own_splits": {str(slices): tally.cases for slices, tally in stage.own_splits.items()},
        "seconds": round(stage.seconds, 3),
        "mismatches": [_mismatch_json(mismatch) for mismatch in stage.mismatches[:errors]],
        "example": None if stage.example is None else _mismatch_json(stage.example),
    }


def _mismatch_json(mismatch: Mismatch) -> dict[str, Any]:
    fields = asdict(mismatch)
    program = fields.pop("snippet")
    return {**fields, "index": list(mismatch.index), "torch": program}


def _breakdown_json(breakdown: Breakdown) -> dict[str, Any]:
    by = {trait: {value: asdict(t) for value, t in values.items()} for trait, values in breakdown.tallies.items()}
    ulps = {
        dtype: {
            "total": histogram.total,
            "lowest": histogram.lowest,
            "highest": histogram.highest,
            "histogram": histogram.labelled(),
        }
        for dtype, histogram in breakdown.ulps.items()
    }
    whole, sentences = asdict(breakdown.whole), list(breakdown.sentences())
    return {"stages": list(breakdown.stages), "whole": whole, "by": by, "sentences": sentences, "ulps": ulps}


def page(result: Result, run: Run) -> Page:
    """The whole run."""
    asked = run.asked
    sections = [diagnosis_section(name, kinds, asked.get(name, ())) for name, kinds in run.diagnoses.items()]
    sections += [function_section(name, function) for name, function in run.functions.items() if function.diagnosis]
    sections += [_overview(result), *(_subject(subject, run.errors, "--errors ") for subject in result.subjects)]
    if run.not_run:
        reasons = [f"not run: {reason}" for reason in run.not_run.values()]
        sections.append(Section(title="What did not run", blocks=[Text(points=reasons)]))
    if pasted := list(_paste_lines(result, run.asked)):
        sections.append(Section(title="One case again", blocks=[Code(lines=pasted)]))
    sections.append(_machine(result, run))
    names = [subject.name for subject in result.subjects]
    title = f"Do the bits agree? {names[0] if len(names) == 1 else f'{len(names)} subjects'}"
    return Page(title=title, verdict=verdict_cell(verdict(result)), sections=sections)


def result_page(result: Result) -> Page:
    """What Python shows of a result: no diagnosis, no machine."""
    sections = [_subject(subject, _IN_PYTHON) for subject in result.subjects]
    return Page(title="Do the bits agree?", verdict=verdict_cell(verdict(result)), sections=sections)


def _overview(result: Result) -> Section:
    titles = list(dict.fromkeys(stage.title for subject in result.subjects for stage in subject.stages))
    rows: list[Row] = []
    for subject in result.subjects:
        status = {s.title: Cell(text=s.status.value, tone=_TONES[s.status]) for s in subject.stages}
        rows.append([subject.name, *(status.get(title, "") for title in titles)])
    table = Table(caption="Who agrees, stage by stage", columns=("subject", *titles), rows=rows, only="html")
    return Section(title="Overview", blocks=[table])


def _subject(subject: SubjectResult, errors: int, option: str = "") -> Section:
    parts: list[Section] = []
    head, *lines = mismatch_lines(subject, errors, option) or [""]
    if head:
        shown: list[Element] = [Text(points=lines, only="terminal"), *_mismatches(subject, errors)]
        parts.append(Section(title="One output of each case that differs", lead=head, blocks=shown))
    ran = [Text(points=list(stage_lines(subject)))]
    parts.append(Section(title="What ran", lead=f"{subject.name}   engine: {subject.engine}", blocks=ran))
    parts += [_breakdown(breakdown, subject.name) for breakdown in breakdowns(subject.stages)]
    # the worst of every stage before the second worst of one
    ranked = [(rank, place) for stage in subject.stages for rank, place in enumerate(stage.places)]
    ranked.sort(key=lambda pair: pair[0])
    if ranked:
        maps = Plots(plots=[map_plot(place) for _, place in ranked[:_MAPS]])
        parts.append(Section(title="Where the bits differ", blocks=[Text(points=[_EXPLAINED], only="html"), maps]))
    return Section(title=subject.name, sections=parts)


_EXPLAINED = (
    "The outputs of the worst cases, row by column: grey is equal, blue is nearer to zero than expected, orange is "
    "farther, purple is another sign, or a NaN or an infinity on one side only. The deeper the colour, the more ulps."
)


# 1 Why, and one output of each case


def mismatch_lines(subject: SubjectResult, errors: int, option: str = "") -> list[str]:
    """How many cases differ, and one output of each; of more than `errors` cases, of the worst of each kind.

    `option`, with a number, lists them all.
    """
    cases, outputs = (sum(getattr(x, f"{name}_differing") for x in subject.stages) for name in ("cases", "outputs"))
    if not cases:
        return []
    head = f"{subject.name}: {counted(cases, 'case differs', 'cases differ')}, {counted(outputs, 'output')}"
    shown = _shown(subject, errors)
    if errors >= cases:
        head += "" if outputs == 1 else "; one of each" if cases > 1 else "; one"
    elif shown:
        kinds = len(merged_kinds(stage.kinds for stage in subject.stages))
        of = "each kind" if kinds == len(shown) else f"{len(shown)} of {kinds} kinds"
        head += f"; the worst case of {of}{f' ({option}{cases} lists all)' if option else ''}"
    lines = [line for kind, mismatch in shown for line in (*([f"  {kind}:"] if kind else []), mismatch.line())]
    return [f"{head}:" if shown else head, *lines]


def _shown(subject: SubjectResult, errors: int) -> list[tuple[str, Mismatch]]:
    # Every case; or where there are more than `errors` of them, each kind, and its worst case.
    if errors >= sum(stage.cases_differing for stage in subject.stages):
        return [("", mismatch) for stage in subject.stages for mismatch in stage.mismatches]
    kinds = merged_kinds(stage.kinds for stage in subject.stages)
    return [(f"{name}, {counted(kind.cases, 'case')}", kind.worst) for name, kind in kinds.items()][:errors]


def _mismatches(subject: SubjectResult, errors: int) -> Iterator[Table]:
    # The same as a table, which a page has room for.
    rows: list[Row] = []
    for kind, mismatch in _shown(subject, errors):
        codes = (
            ", ".join(map(str, mismatch.index)),
            mismatch.expected,
            mismatch.observed or mismatch.error,
            mismatch.inputs,
        )
        share = Share(value=mismatch.share) if mismatch.outputs else ""
        name = f"{mismatch.case} {mismatch.part}".strip()
        rows.append([f"{kind}: {name}" if kind else name, *(Cell(text=text, is_code=True) for text in codes), share])
    if rows:
        columns = ("case", "output", "expected", "found", "inputs (codes in hex)", "outputs of the case that differ")
        yield Table(caption="Of many cases, the worst of each kind", columns=columns, rows=rows, only="html")


# 2 What ran


def stage_lines(subject: SubjectResult) -> Iterator[str]:
    """The stages that are equal, each other one, what was not offered and why, and who judged."""
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
            cases = f" ({stage.cases_not_offered:,} cases)" if stage.cases_total else ""
            reasons.setdefault(stage.reason.removeprefix(subject.name).strip(), []).append(stage.title + cases)
        if stage.oracle:
            judges.setdefault(stage.oracle, []).append(stage.title)
    if reasons:
        skipped = (f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items())
        yield f"  not offered: {'; '.join(skipped)}"
    yield from (f"  judge of {', '.join(titles)}: {judge}" for judge, titles in judges.items())


def _counts(stage: StageResult) -> str:
    # `recorded GEMMs 3/4 cases equal, 90/96 outputs, 0.1 s, 1 equal under an S of its own [CHAIN-3] (S = 5: 1)`.
    cases = f"{stage.cases_equal:,}/{stage.cases_total:,} cases"
    if stage.cases_equal != stage.cases_total:
        cases += " equal"
    line = f"{stage.title} {cases}, {stage.outputs_equal:,}/{stage.outputs_total:,} outputs, {stage.seconds:.1f} s"
    if not stage.own_splits:
        return line
    counts = ", ".join(f"S = {slices}: {tally.cases}" for slices, tally in stage.own_splits.items())
    cases_of_splits = sum(tally.cases for tally in stage.own_splits.values())
    return f"{line}, {cases_of_splits} equal under an S of its own [CHAIN-3] ({counts})"


def _first_parts(stage: StageResult) -> list[str]:
    parts = [f"{part} ({count})" for part, count in stage.first_differences.items() if part]
    return [f"first in {', '.join(parts)}"] if parts else []


# 3 How far


def _breakdown(breakdown: Breakdown, name: str) -> Section:
    rows: list[Row] = []
    for trait, values in breakdown.telling().items():
        for i, (value, tally) in enumerate(values.items()):
            cases = f"{tally.cases_differing:,}/{tally.cases:,}", Share(value=tally.share_of_cases)
            outputs = f"{tally.outputs_differing:,}/{tally.outputs:,}", Share(value=tally.share_of_outputs)
            rows.append(["" if i else trait, value, *cases, *outputs])
    columns = ("by", "", "cases differ", "share", "outputs differ", "share")
    caption = f"{name}: what differs in {breakdown.title}"
    table = Table(caption=caption, columns=columns, rows=rows, numeric=frozenset((2, 3, 4, 5)))
    blocks: list[Element] = [table] if rows else []
    # + is farther from zero than expected
    distances = [f"{name}: {breakdown.title}, {dtype}: {ulps.words()}" for dtype, ulps in breakdown.ulps.items()]
    blocks.append(Text(points=[*breakdown.sentences(), *distances]))
    if any(histogram.total > histogram.not_compared for histogram in breakdown.ulps.values()):
        blocks.append(Plots(plots=[ulp_plot(breakdown)]))
    return Section(title=f"What differs: {breakdown.title}", blocks=blocks)


# 4 One case again, and on which machine


def _paste_lines(result: Result, asked: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for subject in result.subjects:
        examples = [stage.example for stage in subject.stages if stage.example is not None]
        mismatches = [mismatch for stage in subject.stages for mismatch in stage.mismatches]
        shortest = min(
            examples, key=lambda example: len(example.snippet), default=mismatches[0] if mismatches else None
        )
        if shortest is None or subject.name not in asked:
            continue
        yield "To run one case again:"
        yield f"f8emu verify {shlex.join([*asked[subject.name], '--case', printable(shortest.case)])}"
        if shortest.snippet:
            yield f"Its output {list(shortest.index)} in plain torch, from a row of a and a column of b, 16 times."
            yield "A kernel whose bits depend on the place of an output may be right here."
            yield from shortest.snippet.splitlines()


def _machine(result: Result, run: Run) -> Section:
    golden = result.golden
    items = [(f"device of {name}" if name != "cpu" else "processor", ", ".join(d)) for name, d in devices().items()]
    items += [(name, version or "not installed") for name, version in versions().items()]
    if golden.cases:
        recorded = f"{golden.path.name}, {len(golden.cases)} cases recorded on {golden.device}"
        items += [("recorded GEMMs", recorded), ("its SHA-256", golden.sha256)]
    items += [
        ("command", " ".join(run.command)),
        ("written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("took", f"{run.seconds:.1f} s"),
    ]
    return Section(title="Machine and versions", blocks=[Facts(items=items)])

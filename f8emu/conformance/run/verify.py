"""Runs the suite: subjects x stages -> a result. `f8emu verify` calls it; so can Python code and tests."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import product

from f8emu.conformance.cases.golden import GoldenFile, shipped_golden
from f8emu.conformance.run.check import Case
from f8emu.conformance.run.processes import Workers, parts_of, shares_of
from f8emu.conformance.run.result import Progress, Result, Silent, StageResult, SubjectResult, joined
from f8emu.conformance.run.result import Status as Status
from f8emu.conformance.run.runner import Runner
from f8emu.conformance.run.stages import STAGES, Stage, StageName
from f8emu.conformance.run.subject import SUBJECTS, NotOffered, Subject
from f8emu.environment import printable
from f8emu.spec import SpecError


def stages_by_name(names: Sequence[str] = ()) -> list[Stage]:
    """The stages of those names, in the order in which they run; all of them for no name."""
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise SpecError(f"verify: unknown stage {unknown[0]!r}; known stages are {', '.join(STAGES)}")
    return [stage for name, stage in STAGES.items() if not names or name in names]


def stages_with(
    patterns: Sequence[str], stages: Sequence[Stage], subjects: Sequence[Subject], golden: GoldenFile
) -> list[Stage]:
    """The stages of which a subject has cases of those names, with these cases alone.

    A pattern is a name, or has `*` for any text.
    """
    expressions = {pattern: re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in patterns}

    def matched(name: str) -> set[str]:
        return {pattern for pattern, expression in expressions.items() if name == pattern or expression.fullmatch(name)}

    def only(stage: Stage) -> Stage:
        def cases(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
            chosen = [case for case in stage.cases(subject, golden) if matched(printable(case.id))]
            if not chosen:
                raise NotOffered(f"{subject.name} has no case {', '.join(patterns)} of {stage.title}")
            return iter(chosen)

        return replace(stage, cases=cases, is_whole=False)

    # 1. Stages that have such a case, drawn no further than needed: the last ones take longest.
    names: list[str] = []
    matching: list[Stage] = []
    unmatched = set(patterns)
    for stage in stages:
        drawn = [printable(case.id) for subject in subjects for case in _cases(stage, subject, golden)]
        names += drawn
        if matches := set[str]().union(*map(matched, drawn)):
            unmatched -= matches
            matching.append(only(stage))
        if set(patterns) <= set(names):  # what follows need not be drawn
            break
    # 2. A pattern without a case is a mistake of the caller, never an empty run that passes.
    for pattern in unmatched:
        near = [name for name in names if pattern in name] or get_close_matches(pattern, names, 1, 0.3)
        nearest = f"; the nearest is {near[0]!r}" if near else ""
        raise SpecError(
            f"verify: no case is called {pattern!r}{nearest}; take the name from a report, with * for any text"
        )
    return matching


def _cases(stage: Stage, subject: Subject, golden: GoldenFile) -> list[Case]:
    try:
        return list(stage.cases(subject, golden))
    except NotOffered:
        return []


def verify(
    subjects: Sequence[Subject],
    *,
    stages: Sequence[StageName] = (),
    only: Sequence[Stage] | None = None,
    golden: GoldenFile | None = None,
    errors: int = 20,
    progress: Progress | None = None,
    processes: int = 1,
    workers: Workers | None = None,
) -> Result:
    """Run the stages for every subject. Answers of an oracle are computed once and serve all subjects.

    `only` gives stages themselves, in place of the suite's. `errors` is how many mismatches each stage keeps; all are
    counted. KeyboardInterrupt ends the run, and the result has the stages that were finished. With several `processes`
    the subjects must be among `SUBJECTS`, which each process loads for itself; the cases and the order of the results
    stay the same. `workers` are such processes that run already; they are ended.

    Raises:
        SpecError: an unknown stage, or your own subject or stage in several processes.
        GoldenFileError: the shipped file cannot be read.
        WorkerEnded: one of several processes crashed.
    """
    # 1. What runs, and whether several processes can load it by its names.
    chosen = stages_by_name(stages) if only is None else only
    golden = shipped_golden() if golden is None else golden
    names = [subject.name for subject in subjects]
    foreign = [name for name in names if name not in SUBJECTS]
    if processes > 1 and (foreign or only is not None):
        raise SpecError(
            f"verify: several processes run the suite's stages for {', '.join(SUBJECTS)}; got "
            f"{', '.join(foreign) or 'stages of your own'}; use 1 process (--jobs 1)"
        )
    progress = progress or Silent()
    shares: dict[tuple[str, str], list[StageResult]] = {}

    def ran() -> Iterator[tuple[str, StageResult]]:
        if processes > 1:
            parts = parts_of([stage.name for stage in chosen], names, processes)
            with workers or Workers(min(processes, len(parts))) as ready:
                yield from ready.run(parts, golden, errors, progress)
        else:
            runner = Runner(golden, errors, progress)
            for subject, stage in product(subjects, chosen):
                yield subject.name, runner.stage(stage, subject)

    # 2. Stages, or their shares, as they finish, in whatever order.
    is_interrupted = False
    try:
        for name, result in ran():
            shares.setdefault((name, result.stage), []).append(result)
    except KeyboardInterrupt:
        is_interrupted = True
    # 3. In the order of the subjects and stages; after Ctrl-C those that were finished.
    results: list[SubjectResult] = []
    for subject in subjects:
        stages_ran: list[StageResult] = []
        for stage in chosen:
            finished = shares.get((subject.name, stage.name), [])
            if len(finished) == (shares_of(stage.name, processes) if processes > 1 else 1):
                stages_ran.append(joined(finished, errors))
        if stages_ran or not is_interrupted:
            results.append(SubjectResult(name=subject.name, engine=subject.engine, stages=stages_ran))
    return Result(golden=golden, subjects=results, is_interrupted=is_interrupted)

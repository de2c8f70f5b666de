"""Some cases of the suite, by their names: what `f8emu verify --case` runs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches

from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.run.check import Case
from f8emu.conformance.run.stages import Stage
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import SpecError
from f8emu.untrusted import printable


def stages_with(
    patterns: Sequence[str], stages: Sequence[Stage], subjects: Sequence[Subject], golden: GoldenFile
) -> list[Stage]:
    """The stages of which a subject has cases of those names, with these cases alone.

    A pattern is a name, or has `*` for any text.

    Raises:
        SpecError: no case matches one of the patterns; the message names it, and the nearest case.
    """
    expressions = {pattern: re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in patterns}

    def matched(case: Case) -> set[str]:
        name = printable(case.id)
        return {pattern for pattern, one in expressions.items() if name == pattern or one.fullmatch(name)}

    def only(stage: Stage) -> Stage:
        def cases(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
            found = [case for case in stage.cases(subject, golden) if matched(case)]
            if not found:
                raise NotOffered(f"{subject.name} has no case {', '.join(patterns)} of {stage.title}")
            return iter(found)

        return replace(stage, cases=cases, is_whole=False)

    names: list[str] = []
    chosen: list[Stage] = []
    unmatched = set(patterns)
    for stage in stages:
        cases = [case for subject in subjects for case in _cases(stage, subject, golden)]
        names += [printable(case.id) for case in cases]
        if found := set[str]().union(*map(matched, cases)):
            unmatched -= found
            chosen.append(only(stage))
        if set(patterns) <= set(names):  # what follows need not be drawn
            break
    for pattern in patterns:
        if pattern not in unmatched:
            continue
        near = [name for name in names if pattern in name] or get_close_matches(pattern, names, 1, 0.3)
        raise SpecError(
            f"verify --case: no case is called {pattern!r}"
            + (f"; the nearest is {near[0]!r}" if near else "")
            + "; take the name from a report, with * for any text"
        )
    return chosen


def _cases(stage: Stage, subject: Subject, golden: GoldenFile) -> list[Case]:
    try:
        return list(stage.cases(subject, golden))
    except NotOffered:
        return []

"""Diagnoses and fits, for people and for programs."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from f8emu.conformance.compare import counted
from f8emu.conformance.diagnosis.checks import RandomGemms
from f8emu.conformance.diagnosis.coverage import Coverage
from f8emu.conformance.diagnosis.fit import Fit, Fitted
from f8emu.conformance.diagnosis.probes import KINDS
from f8emu.conformance.diagnosis.search import Diagnosis, Explanation, in_words
from f8emu.conformance.kernels.imported import INTERPRETED
from f8emu.conformance.run.breakdown import Contrast
from f8emu.environment import devices, percent, versions
from f8emu.report.page import Cell, Code, Element, Page, Row, Section, Share, Table, Text, Tone, verdict_cell
from f8emu.verdict import Exit, Verdict

FIT_SCHEMA = 2
"""Version of the JSON layout of a fit."""
_HEADLINE = 25
"""The most words of the line `in short`."""
_MORE = "; this explains the small probes, and not all that differs in the suite"
OTHER_BITS = "it gives other bits when the same GEMM is asked again: nothing else follows from them"


# A diagnosis


def diagnosis_section(name: str, kinds: tuple[Diagnosis, ...], words: Sequence[str]) -> Section:
    """Lines, a table of the share of probe outputs that the chip's rules and the best explanation give, and the next
    step; `words` name the subject in a command.
    """
    rows: list[Row] = []
    for kind in kinds:
        if kind.outputs_total:
            best, total = kind.best, kind.outputs_total
            tone: Tone = "good" if best is None else "" if kind.is_explained else "warn"
            sentence = Cell(text="follows the chip's rules" if best is None else best.sentence, tone=tone)
            equal = kind.outputs_equal if best is None else best.outputs_equal
            rows.append([kind.kind, sentence, Share(value=kind.outputs_equal / total), Share(value=equal / total)])
    columns = ("kind of GEMM", "what it does", "by the chip's rules", "by this explanation")
    caption = "Share of the outputs of small GEMMs whose every bit is explained"
    table = Table(caption=caption, columns=columns, rows=rows, only="html")
    lines = Text(points=list(diagnosis_lines(name, kinds)))
    blocks: list[Element] = [lines, table] if rows else [lines]
    names = {kind.name for kind in KINDS}
    if left := [x.kind for x in kinds if x.best and not x.is_explained and x.kind in names]:
        subject = takewhile(lambda word: word != "--golden", words or (name,))
        command = f"f8emu fit {shlex.join([*subject, '--kind', left[0]])}"
        blocks.append(Code(lines=["To measure what it computes, without a hypothesis:", command]))
    return Section(title=f"Diagnosis of {name}", blocks=blocks)


def diagnosis_lines(name: str, kinds: tuple[Diagnosis, ...]) -> Iterator[str]:
    """One line for each behaviour, with the kinds of GEMM that share it."""
    is_interpreted = any(INTERPRETED in kind.engine for kind in kinds)
    yield f"{name}, diagnosed on small GEMMs{f' {INTERPRETED}' if is_interpreted else ''}:"
    if headline := _headline(kinds):
        yield f"  in short: {headline}"
    alike: dict[object, list[Diagnosis]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.best is not None and not kind.best.is_complete):
        best = kind.best
        left = None if best is None or best.left is None else best.left.names
        names = best and (frozenset(best.alterations), best.right_scales)
        beyond = "" if kind.coverage is None else kind.coverage.worst
        key = kind.error, kind.is_random, names, best and best.is_complete, kind.is_nearly_explained, left, beyond
        alike.setdefault(key, []).append(kind)
    for same in alike.values():
        every = len(same) == len(kinds) > 1
        kinds_text = f"all {len(same)} kinds of GEMM" if every else ", ".join(kind.kind for kind in same)
        yield f"  {kinds_text}: {_words(same)}"
        # What explains all of these kinds.
        others = [{explanation.alterations: explanation for explanation in kind.alternatives} for kind in same]
        if equal := [explanation for names, explanation in others[0].items() if all(names in more for more in others)]:
            yield f"    the same bits on every probe: {', or '.join(map(_names, equal))}"
    yield from (f"  {kind.kind}: left out: {kind.left_out}" for kind in kinds if kind.left_out)
    if not kinds:
        yield "  no GEMM that is probed is offered: what differs cannot be diagnosed"
    elif all(kind.is_right for kind in kinds):
        yield "  a stage differs, but the probes do not show it: no kind of GEMM differs on them"


def _headline(kinds: Sequence[Diagnosis]) -> str:
    """The faults of the explained kinds of GEMM, those of most kinds first, as many as 25 words hold."""
    if any(kind.is_random for kind in kinds):
        return OTHER_BITS
    # 1. Which kinds have each fault.
    having: dict[str, list[str]] = {}
    for kind in kinds:
        if kind.best and (kind.best.is_complete or kind.is_nearly_explained):
            for sentence in dict.fromkeys(step.sentence for step in kind.best.steps):
                having.setdefault(sentence, []).append(kind.kind)
    faults = sorted(having.items(), key=lambda fault: len(fault[1]), reverse=True)
    # 2. The faults of the same kinds together.
    text, names = "", [kind.kind for kind in kinds]
    for count in range(len(faults), 0, -1):
        clauses: dict[str, list[str]] = {}
        for sentence, of in faults[:count]:
            clauses.setdefault(_in_kinds(of, names), []).append(sentence)
        text = "; ".join(f"{where}{in_words(sentences)}" for where, sentences in clauses.items())
        text += f"; and {counted(len(faults) - count, 'more fault')}" if count < len(faults) else ""
        if len(text.split()) <= _HEADLINE:
            break
    is_partial = any(kind.best and kind.best.is_complete and not kind.is_explained for kind in kinds)
    return f"{text}{_MORE if text and is_partial else ''}"


def _in_kinds(having: Sequence[str], names: Sequence[str]) -> str:
    """The kinds that have a fault, before "it": by a word that they alone have in their names, else their number."""
    if len(having) == len(names):
        return ""
    words = ("tensorwise", "rowwise", "fast", "promoted")
    word = next((word for word in words if [*having] == [name for name in names if word in name]), "")
    return f"in {word or f'{len(having)} of {len(names)}'} kinds "


def _words(alike: Sequence[Diagnosis]) -> str:
    """Kinds of which the same is known."""
    first, best = alike[0], alike[0].best
    if first.error:
        return f"not diagnosed: {first.error}"
    if first.is_random:
        return f"not diagnosed: {OTHER_BITS}"
    total = sum(kind.outputs_total for kind in alike)
    if best is None:
        return f"{'follow' if len(alike) > 1 else 'follows'} the chip's rules, {_shares(total, total)}"
    equal = sum(kind.best.outputs_equal for kind in alike if kind.best is not None)
    names, shares = _names(best), _shares(equal, total)
    if best.is_complete:
        coverages = [kind.coverage for kind in alike if kind.coverage is not None]
        cases = sum(coverage.cases for coverage in coverages)
        if not first.is_explained:
            return f"EXPLAINS THE SMALL PROBES ONLY: {names}, {shares}: {best.sentence}; {_left_words(coverages[0])}"
        larger = f", and samples of {counted(cases, 'differing case')}" if cases else ""
        return f"explained: {names}, {shares}{larger}: {best.sentence}"
    left = _contrast_words(*(kind.best.left for kind in alike if kind.best is not None and kind.best.left is not None))
    if not best.alterations:
        left = left and f"; what differs {left}"
        return f"NOT EXPLAINED, {shares} under the chip's rules{left}; {best.sentence}, {total - equal:,} outputs"
    left = left and f"; what is left {left}"
    if first.is_nearly_explained:
        return f"nearly explained, {percent(equal / total)}: {names}{left}; {shares}: {best.sentence}"
    return f"NOT EXPLAINED, best: {names}, {shares}: {best.sentence}{left}"


def _left_words(coverage: Coverage) -> str:
    """What an explanation of the small probes does not give of the suite's GEMMs."""
    most = f"{coverage.outputs_left} of {coverage.outputs} outputs of case {coverage.worst!r}"
    cases = f"{coverage.cases_left} of {counted(coverage.cases, 'case')}"
    return f"of a sample of what differs, {most} remain, and some in {cases}"


def _contrast_words(*alike: Contrast) -> str:
    """`has K above 240 (8.9 % of the outputs there differ, 0 % of all others)`, of several of one name together."""
    if not alike:
        return ""
    inside, outside = (
        percent(sum(differ for differ, _ in side) / sum(total for _, total in side))
        for side in ([contrast.inside for contrast in alike], [contrast.outside for contrast in alike])
    )
    name = re.sub(r"\b(row|column) (above|up to) ", r"\1s \2 ", alike[0].name)
    verb = "is in" if name.startswith(("rows", "columns")) else "has"
    return f"{verb} {name} ({inside} of the outputs there differ, {outside} of all others)"


def _names(explanation: Explanation) -> str:
    return " + ".join(explanation.alterations)


def _shares(equal: int, total: int) -> str:
    return f"{equal:,}/{total:,} outputs equal"


def diagnosis_json(kinds: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """The diagnoses of one subject as plain data."""
    names = ("kind", "cases", "outputs_equal", "outputs_total", "left_out", "error", "is_random")
    return [
        {name: getattr(kind, name) for name in names}
        | {"best": kind.best and _explanation_json(kind.best), "tried": list(map(_explanation_json, kind.tried))}
        | {"coverage": kind.coverage and asdict(kind.coverage)}
        for kind in kinds
    ]


def _explanation_json(explanation: Explanation) -> dict[str, Any]:
    names = ("alterations", "sentence", "outputs_equal", "outputs_total")
    left = explanation.left and {
        "has": explanation.left.name,
        "there": explanation.left.inside,
        "elsewhere": explanation.left.outside,
    }
    return {name: getattr(explanation, name) for name in names} | {"left": left}


# A fit


def fit_page(fit: Fit, words: Sequence[str] = ()) -> Page:
    """A table of parameters for each kind of GEMM, whether its rules hold, and what to do where they do not.

    `words` name the subject in a command.
    """
    sections: list[Section] = []
    for kind in fit.kinds:
        columns = ("parameter", "value", "measured by")
        blocks: list[Element] = []
        if kind.measured:
            blocks.append(Table(caption=kind.kind, columns=columns, rows=kind.measured))
        sections.append(Section(title=kind.kind, blocks=[*blocks, Text(points=list(fit_lines(kind)))]))
    lead = f"{fit.subject}   engine: {fit.engine}"
    sections.insert(0, Section(title=fit.subject, lead=lead))
    if remedies := list(_remedies(fit, words or (fit.subject,))):
        sections.append(Section(title="Next", blocks=[Text(points=["next:", *remedies])]))
    return Page(title="f8emu fit", verdict=verdict_cell(fit_verdict(fit)), sections=sections)


def _remedies(fit: Fit, words: Sequence[str]) -> Iterator[str]:
    """What to do about what failed."""
    if any(kind.is_random for kind in fit.kinds):
        yield "  random bits: look for atomic additions, and for memory that is read before it is written"
    if any(kind.is_batch_invariant is False for kind in fit.kinds):
        yield "  bits depend on M: choose the tile and the slices of K without M, then fit again with --m of two sizes"
    if any(not (kind.is_confirmed or kind.is_random) for kind in fit.kinds):
        command = f"f8emu verify {shlex.join(words)} --errors 1"
        yield f"  unconfirmed rules: `{command}` gives a program in plain torch for one output that differs"


def fit_lines(kind: Fitted) -> Iterator[str]:
    """Whether the rules were confirmed, whether they hold at other sizes, and whether M changes bits."""
    if kind.error:
        yield f"{kind.kind}: failed: {kind.error}"
        return
    if kind.left_out:
        yield f"{kind.kind}: left out: {kind.left_out}"
    # 1. Random GEMMs.
    random = kind.random
    if random is not None:
        shares = _shares(random.outputs_equal, random.outputs_total)
        is_confirmed = kind.holds_on_random and not random.unsteady
        whose = f", the rules of {kind.follows}" if kind.follows and is_confirmed else ""
        claim = "confirmed on random GEMMs" if is_confirmed else "NOT CONFIRMED; random GEMMs"
        if not random.outputs_total:
            claim, shares = "NOT CONFIRMED", "no random GEMM is offered"
        left = f"; what differs {_contrast_words(random.left)}" if random.left is not None else ""
        left += f"; NOT at {', '.join(size.name for size in kind.missed)}" if kind.missed else ""
        yield f"{kind.kind}: {claim}, {shares}{whose}{left}"
        if random.unsteady:
            yield f"  CONTRADICTS ITSELF: {random.unsteady}"
    if kind.is_random:
        sizes = [size.name for size in kind.sizes if size.is_random]
        where = f" ({', '.join(sizes)})" if sizes else ""
        yield f"{kind.kind}: bits are RANDOM: the same GEMM, asked again, gave other bits{where}"
    # 2. Other sizes.
    if kind.is_batch_invariant is not None:
        claim = "do not depend" if kind.is_batch_invariant else "DEPEND"
        rows = [size for size in kind.sizes if size.dimension == "M" and (not size.reason or size.has_failed)]
        told = rows if kind.is_batch_invariant else [row for row in rows if not row.is_same or row.has_failed]
        which = "" if kind.is_batch_invariant else "other bits at "
        listed = ", ".join(map(str, sorted(row.size for row in told)))
        yield f"{kind.kind}: bits of a row {claim} on M ({which}{listed})"
    for size in kind.sizes:
        if size.reason:
            yield f"  {size.name}: {'FAILED' if size.has_failed else 'not run'}: {size.reason}"
        elif kind.is_random:
            continue
        elif not size.is_same or (kind.holds_on_random and size.outputs_equal != size.outputs_total):
            same = "" if size.dimension != "M" else "the bits of the largest M; "
            same = same if size.is_same else "other bits than with the largest M; "
            slices = "MISSES THE RULES, no split explains it" if size.misses else f"explained by split-K {size.split_k}"
            yield f"  {size.name}: {same}{_shares(size.outputs_equal, size.outputs_total)} under the rules; {slices}"


def fit_verdict(fit: Fit) -> Verdict:
    """The line over all kinds that were run, and the exit status."""
    if not fit.kinds:
        line = f"{fit.subject}: nothing to fit: no GEMM is offered" + (f": {fit.reason}" if fit.reason else "")
        return Verdict(Exit.UNVERIFIED, line).after(ctrl_c=fit.is_interrupted)
    # 1. What is wrong, each with the kinds of GEMM that have it.
    where = f" {INTERPRETED}" if INTERPRETED in fit.engine else ""
    confirmed = sum(kind.is_confirmed for kind in fit.kinds)
    parts = [f"{fit.subject}: {confirmed} of {len(fit.kinds)} kinds of GEMM confirmed at every size tried{where}"]
    missed = [f"{kind.kind} ({', '.join(size.name for size in kind.missed)})" for kind in fit.kinds if kind.missed]
    random = [kind.kind for kind in fit.kinds if kind.is_random]
    unconfirmed = [kind.kind for kind in fit.kinds if not (kind.is_confirmed or kind.missed or kind.kind in random)]
    varying = [kind.kind for kind in fit.kinds if kind.is_batch_invariant is False]
    for fault, kinds in (
        ("bits are random", random),
        ("not confirmed", unconfirmed),
        ("MISS THE RULES at another size", missed),
        ("bits depend on M", varying),
    ):
        if kinds:
            parts.append(f"{fault}: {', '.join(kinds)}")
    # 2. The largest sizes that ran, of the kind where they are smallest.
    sizes = {
        dimension: min((max(ran) for kind in fit.kinds if (ran := kind.ran(dimension))), default=0)
        for dimension in "MNK"
    }
    if ran := ", ".join(f"{dimension} = {size}" for dimension, size in sizes.items() if size):
        parts.append(f"looked up to {ran}, one dimension at a time")
    # 3. Confirmed rules that miss another size have a status of their own.
    status = Exit.INCOMPLETE if missed else Exit.EQUAL if fit.is_confirmed and not varying else Exit.DIFFERENT
    return Verdict(status, "; ".join(parts)).after(ctrl_c=fit.is_interrupted)


def fit_json(fit: Fit, *, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """The whole fit as plain data."""
    return {
        **fit_verdict(fit).to_json(command=command, seconds=seconds, schema=FIT_SCHEMA),
        "subject": fit.subject,
        "engine": fit.engine,
        "confirmed": fit.is_confirmed,
        "reason": fit.reason,
        "versions": versions(),
        "devices": devices(),
        "kinds": list(map(_fitted_json, fit.kinds)),
    }


def _fitted_json(kind: Fitted) -> dict[str, Any]:
    random = kind.random or RandomGemms()
    renamed = {"is_same": "same_bits", "has_failed": "failed"}
    return {
        **{name: getattr(kind, name) for name in ("kind", "left_out", "error", "follows")},
        "rules": None if kind.rules is None else kind.rules.to_dict(),
        "in_words": [f"{parameter.name}: {parameter.value}" for parameter in kind.measured],
        "measured": [parameter._asdict() for parameter in kind.measured],
        **{name: getattr(random, name) for name in ("outputs_equal", "outputs_total", "unsteady")},
        "confirmed": kind.is_confirmed,
        "batch_invariant": kind.is_batch_invariant,
        "sizes": [
            {renamed.get(name, name): value for name, value in asdict(size).items()} | {"misses": size.misses}
            for size in kind.sizes
        ],
    }

"""What a diagnosis and a fit say, for people and for programs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from f8emu.conformance.diagnosis.checks import RandomGemms
from f8emu.conformance.diagnosis.fit import Fit, Fitted
from f8emu.conformance.diagnosis.search import Diagnosis, Explanation
from f8emu.conformance.kernels.imported import INTERPRETED
from f8emu.conformance.run.breakdown import Contrast, percent
from f8emu.environment import devices, versions
from f8emu.report.page import Block, Cell, Page, Row, Section, Share, Table, Text, Tone
from f8emu.verdict import Exit, Verdict

FIT_SCHEMA = 2
"""Version of the JSON layout of a fit."""
OTHER_BITS = "it gives other bits when the same GEMM is asked again: nothing else follows from them"


# A diagnosis


def diagnosis_section(name: str, kinds: tuple[Diagnosis, ...]) -> Section:
    """In words, and as a table: the share of the probe outputs that the chip's rules and the best explanation give."""
    rows: list[Row] = []
    for kind in kinds:
        if kind.outputs_total:
            best, total = kind.best, kind.outputs_total
            tone: Tone = "good" if best is None else "" if best.is_complete else "warn"
            said = Cell(text="follows the chip's rules" if best is None else best.sentence, tone=tone)
            equal = kind.outputs_equal if best is None else best.outputs_equal
            rows.append([kind.kind, said, Share(value=kind.outputs_equal / total), Share(value=equal / total)])
    columns = ("kind of GEMM", "what it does", "by the chip's rules", "by this explanation")
    caption = "Share of the outputs of small GEMMs whose every bit is explained"
    table = Table(caption=caption, columns=columns, rows=rows, only="html")
    lines = Text(points=list(diagnosis_lines(name, kinds)))
    return Section(title=f"Diagnosis of {name}", blocks=[lines, table] if rows else [lines])


def diagnosis_lines(name: str, kinds: tuple[Diagnosis, ...]) -> Iterator[str]:
    """What the kinds of GEMM of a subject do instead; kinds that do the same are one line."""
    is_interpreted = any(INTERPRETED in kind.engine for kind in kinds)
    yield f"{name}, diagnosed on small GEMMs{f' {INTERPRETED}' if is_interpreted else ''}:"
    if headline := _headline(kinds):
        yield f"  in short: {headline}"
    alike: dict[object, list[Diagnosis]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.best is not None and not kind.best.is_complete):
        found = kind.best
        left = None if found is None or found.left is None else found.left.names
        names = found and frozenset(found.alterations)
        key = kind.error, kind.is_random, names, found and found.is_complete, kind.is_nearly_explained, left
        alike.setdefault(key, []).append(kind)
    for same in alike.values():
        every = len(same) == len(kinds) > 1
        said = f"all {len(same)} kinds of GEMM" if every else ", ".join(kind.kind for kind in same)
        yield f"  {said}: {_words(same)}"
        # What explains all of these kinds.
        others = [{one.alterations: one for one in kind.alternatives} for kind in same]
        if told := [one for names, one in others[0].items() if all(names in more for more in others)]:
            yield f"    the same bits on every probe: {', or '.join(map(_names, told))}"
    yield from (f"  {kind.kind}: left out: {kind.left_out}" for kind in kinds if kind.left_out)
    if not kinds:
        yield "  no GEMM that is probed is offered: what differs cannot be diagnosed"
    elif all(kind.is_right for kind in kinds):
        yield "  a stage differs, but the probes do not show it: no kind of GEMM differs on them"


def _headline(kinds: Sequence[Diagnosis]) -> str:
    """What most kinds of GEMM that are explained have in common: the explanation that holds with some of its steps."""
    if any(kind.is_random for kind in kinds):
        return OTHER_BITS
    found = [kind.best for kind in kinds if kind.best and (kind.best.is_complete or kind.is_nearly_explained)]
    held = [sum(set(one.alterations) <= set(most.alterations) for one in found) for most in found]
    most = max(zip(held, found, strict=True), key=lambda pair: pair[0], default=None)
    return most[1].headline if most else ""


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
        return f"explained: {names}, {shares}: {best.sentence}"
    left = _contrast_words(*(kind.best.left for kind in alike if kind.best is not None and kind.best.left is not None))
    if not best.alterations:
        left = left and f"; what differs {left}"
        return f"NOT EXPLAINED, {shares} under the chip's rules{left}; {best.sentence}, {total - equal} outputs"
    left = left and f"; what is left {left}"
    if first.is_nearly_explained:
        return f"nearly explained, {percent(equal / total)}: {names}{left}; {shares}: {best.sentence}"
    return f"NOT EXPLAINED, best: {names}, {shares}: {best.sentence}{left}"


def _contrast_words(*alike: Contrast) -> str:
    """`has K above 240 (8.9 % of the outputs there differ, 0 % of all others)`, of several of one name together."""
    if not alike:
        return ""
    inside, outside = (
        percent(sum(differ for differ, _ in side) / sum(total for _, total in side))
        for side in ([one.inside for one in alike], [one.outside for one in alike])
    )
    name = re.sub(r"\b(row|column) (above|up to) ", r"\1s \2 ", alike[0].name)
    verb = "is in" if name.startswith(("rows", "columns")) else "has"
    return f"{verb} {name} ({inside} of the outputs there differ, {outside} of all others)"


def _names(one: Explanation) -> str:
    return " + ".join(one.alterations)


def _shares(equal: int, total: int) -> str:
    return f"{equal}/{total} outputs equal"


def diagnosis_json(kinds: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """The diagnoses of one subject as plain data."""
    names = ("kind", "cases", "outputs_equal", "outputs_total", "left_out", "error", "is_random")
    return [
        {name: getattr(kind, name) for name in names}
        | {"best": kind.best and _explanation_json(kind.best), "tried": list(map(_explanation_json, kind.tried))}
        for kind in kinds
    ]


def _explanation_json(one: Explanation) -> dict[str, Any]:
    names = ("alterations", "sentence", "outputs_equal", "outputs_total")
    left = one.left and {"has": one.left.name, "there": one.left.inside, "elsewhere": one.left.outside}
    return {name: getattr(one, name) for name in names} | {"left": left}


# A fit


def fit_page(fit: Fit) -> Page:
    """Of each kind of GEMM one row a parameter, and whether its rules hold."""
    sections: list[Section] = []
    for kind in fit.kinds:
        columns = ("parameter", "value", "told by")
        blocks: list[Block] = []
        if kind.measured:
            blocks.append(Table(caption=kind.kind, columns=columns, rows=kind.measured))
        sections.append(Section(title=kind.kind, blocks=[*blocks, Text(points=list(fit_lines(kind)))]))
    lead = f"{fit.subject}   engine: {fit.engine}"
    return Page(title="f8emu fit", sections=[Section(title=fit.subject, lead=lead), *sections])


def fit_lines(kind: Fitted) -> Iterator[str]:
    """Whether the rules were confirmed, whether they hold at other sizes, and whether M changes bits."""
    if kind.error:
        yield f"{kind.kind}: failed: {kind.error}"
        return
    if kind.left_out:
        yield f"{kind.kind}: left out: {kind.left_out}"
    # 1. Random GEMMs.
    found = kind.random
    if found is not None:
        shares = _shares(found.outputs_equal, found.outputs_total)
        whose = f", the rules of {kind.follows}" if kind.follows and kind.is_confirmed else ""
        said = "confirmed on random GEMMs" if kind.is_confirmed else "NOT CONFIRMED; random GEMMs"
        if not found.outputs_total:
            said, shares = "NOT CONFIRMED", "no random GEMM is offered"
        left = f"; what differs {_contrast_words(found.left)}" if found.left is not None else ""
        yield f"{kind.kind}: {said}, {shares}{whose}{left}"
        if found.unsteady:
            yield f"  CONTRADICTS ITSELF: {found.unsteady}"
    if kind.is_random:
        sizes = [one.name for one in kind.sizes if one.is_random]
        where = f" ({', '.join(sizes)})" if sizes else ""
        yield f"{kind.kind}: bits are RANDOM: the same GEMM, asked again, gave other bits{where}"
    # 2. Other sizes.
    if kind.is_batch_invariant is not None:
        said = "do not depend" if kind.is_batch_invariant else "DEPEND"
        ran = (one for one in kind.sizes if one.dimension == "M" and (not one.reason or one.has_failed))
        yield f"{kind.kind}: bits of a row {said} on M ({', '.join(str(one.size) for one in ran)})"
    for one in kind.sizes:
        if one.reason:
            yield f"  {one.name}: {'FAILED' if one.has_failed else 'not run'}: {one.reason}"
        elif kind.is_random:
            continue
        elif not one.is_same or (kind.holds_on_random and one.outputs_equal != one.outputs_total):
            same = "" if one.dimension != "M" else "the bits of the largest M; "
            same = same if one.is_same else "other bits than with the largest M; "
            slices = "MISSES THE RULES, no split explains it" if one.misses else f"explained by split-K {one.split_k}"
            yield f"  {one.name}: {same}{_shares(one.outputs_equal, one.outputs_total)} under the rules; {slices}"


def fit_verdict(fit: Fit) -> Verdict:
    """What holds for everything that was run, and the exit status."""
    if not fit.kinds:
        line = f"{fit.subject}: nothing to fit: no GEMM is offered" + (f": {fit.reason}" if fit.reason else "")
        return Verdict(Exit.UNVERIFIED, line).after(ctrl_c=fit.is_interrupted)
    # 1. What is wrong, each with the kinds of GEMM that have it.
    where = f" {INTERPRETED}" if INTERPRETED in fit.engine else ""
    confirmed = sum(kind.is_confirmed for kind in fit.kinds)
    parts = [f"{fit.subject}: {confirmed} of {len(fit.kinds)} kinds of GEMM confirmed{where}"]
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
        "in_words": [f"{one.name}: {one.value}" for one in kind.measured],
        "measured": [one._asdict() for one in kind.measured],
        **{name: getattr(random, name) for name in ("outputs_equal", "outputs_total", "unsteady")},
        "confirmed": kind.is_confirmed,
        "batch_invariant": kind.is_batch_invariant,
        "sizes": [
            {renamed.get(name, name): value for name, value in asdict(one).items()} | {"misses": one.misses}
            for one in kind.sizes
        ],
    }

"""What a diagnosis and a fit say, for people and for programs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from f8emu.conformance.compare import said_by
from f8emu.conformance.diagnosis.checks import RandomGemms
from f8emu.conformance.diagnosis.fit import Fit, Fitted
from f8emu.conformance.diagnosis.search import Diagnosis, Explanation, diagnose
from f8emu.conformance.kernels.imported import INTERPRETED
from f8emu.conformance.run.breakdown import Contrast, percent
from f8emu.conformance.run.result import Progress, Result, Status
from f8emu.conformance.run.subject import Subject
from f8emu.environment import devices, versions

if TYPE_CHECKING:
    from rich.table import Table

FIT_SCHEMA = 2
"""Version of the JSON layout of a fit."""
_SIZE_KEYS = {"is_same": "same_bits", "has_failed": "failed"}
_GEMM_STAGES = ("golden", "gemms", "live")

Diagnoses = Mapping[str, tuple[Diagnosis, ...]]
"""Name of a subject -> what was found."""


def diagnosed(
    result: Result, subjects: Sequence[Subject], progress: Progress | None = None
) -> tuple[Result, Diagnoses]:
    """Diagnoses of those of `subjects` whose GEMMs differ; after KeyboardInterrupt those that were finished."""
    found: dict[str, tuple[Diagnosis, ...]] = {}
    by_name = {subject.name: subject for subject in subjects}
    try:
        for one in () if result.is_interrupted else result.subjects:
            differs = any(s.stage in _GEMM_STAGES and s.status is Status.DIFFERENT for s in one.stages)
            if differs and one.name in by_name:
                try:
                    found[one.name] = diagnose(by_name[one.name], progress=progress)
                except Exception as error:  # the verification is finished, and must not be lost
                    found[one.name] = (Diagnosis(kind="all kinds", error=said_by(error, 200)),)
    except KeyboardInterrupt:
        result = replace(result, is_interrupted=True)
    return result, found


def diagnosis_lines(diagnoses: Diagnoses) -> Iterator[str]:
    """What the kinds of GEMM do instead, one paragraph a subject; kinds that do the same are one line."""
    for name, kinds in diagnoses.items():
        is_interpreted = any(INTERPRETED in kind.engine for kind in kinds)
        yield f"{name}, diagnosed on small GEMMs{f' {INTERPRETED}' if is_interpreted else ''}:"
        alike: dict[object, list[Diagnosis]] = {}
        for kind in sorted(kinds, key=lambda kind: kind.best is not None and not kind.best.is_complete):
            found = kind.best
            others = tuple(one.alterations for one in kind.alternatives)
            left = None if found is None or found.left is None else found.left.names
            key = kind.error, found and (found.alterations, found.is_complete, kind.is_nearly_explained, others, left)
            alike.setdefault(key, []).append(kind)
        for same in alike.values():
            every = len(same) == len(kinds) > 1
            yield from _lines_of(same, f"all {len(same)} kinds of GEMM" if every else ", ".join(k.kind for k in same))
        yield from (f"  {kind.kind}: left out: {kind.left_out}" for kind in kinds if kind.left_out)
        if not kinds:
            yield "  no GEMM that is probed is offered: what differs cannot be diagnosed"
        elif all(kind.is_right for kind in kinds):
            yield "  a stage differs, but the probes do not show it: no kind of GEMM differs on them"


def _lines_of(alike: Sequence[Diagnosis], kinds: str) -> Iterator[str]:
    """Kinds of which the same is known, in three lines at most."""
    first = alike[0]
    if first.error:
        yield f"  {kinds}: not diagnosed: {first.error}"
        return
    total = sum(kind.outputs_total for kind in alike)
    best = first.best
    if best is None:
        yield f"  {kinds}: {'follow' if len(alike) > 1 else 'follows'} the chip's rules, {_shares(total, total)}"
        return
    equal = sum(kind.best.outputs_equal for kind in alike if kind.best is not None)
    names, shares = _names(best), _shares(equal, total)
    if best.is_complete:
        yield f"  {kinds}: explained: {names}, {shares}: {best.sentence}"
        if first.alternatives:
            yield f"    the same bits on every probe: {', or '.join(map(_names, first.alternatives))}"
        return
    if not best.alterations:
        said = f"NOT EXPLAINED, {shares} under the chip's rules{_left(alike, 'differs')}; {best.sentence}"
    elif first.is_nearly_explained:
        near = f"nearly explained, {percent(equal / total)}: {names}{_left(alike, 'is left')}"
        said = f"{near}; {shares}: {best.sentence}"
    else:
        said = f"NOT EXPLAINED, best: {names}, {shares}: {best.sentence}{_left(alike, 'is left')}"
    yield f"  {kinds}: {said}"
    differ = first.outputs_total - first.outputs_equal
    for other in first.tried[:3]:
        if other.alterations != best.alterations and 10 * (other.outputs_equal - first.outputs_equal) >= differ:
            whose = f" ({first.kind})" if len(alike) > 1 else ""
            yield f"    also tried: {_names(other)}, {_shares(other.outputs_equal, other.outputs_total)}{whose}"


def _left(alike: Sequence[Diagnosis], verb: str) -> str:
    """What the outputs have in common that are not explained; the same trait in all of these kinds."""
    left = [kind.best.left for kind in alike if kind.best is not None and kind.best.left is not None]
    return f"; what {verb} {_contrast_words(*left)}" if left else ""


def _contrast_words(*alike: Contrast) -> str:
    """`has K above 240 (8.9 % of the outputs there differ, 0 % of all others)`, of several of one name together."""
    inside, outside = (
        percent(sum(differ for differ, _ in side) / sum(total for _, total in side))
        for side in ([one.inside for one in alike], [one.outside for one in alike])
    )
    name = re.sub(r"\b(row|column) (above|up to) ", r"\1s \2 ", alike[0].name)
    verb = "is in" if name.startswith(("rows", "columns")) else "has"
    return f"{verb} {name} ({inside} of the outputs there differ, {outside} of all others)"


def _names(one: Explanation) -> str:
    return " + ".join(one.alterations) or "unknown"


def _shares(equal: int, total: int) -> str:
    return f"{equal}/{total} outputs equal" if total else "no outputs"


def diagnosis_json(kinds: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """The diagnoses of one subject as plain data."""
    found = []
    for kind in kinds:
        plain = {name: value for name, value in asdict(kind).items() if name != "engine"}
        for one in (plain["best"] or {}, *plain["tried"]):
            if left := one.get("left"):
                name = ", or likewise ".join(left["names"])
                one["left"] = {"has": name, "there": left["inside"], "elsewhere": left["outside"]}
        found.append(plain)
    return found


def fit_table(kind: Fitted) -> "Table":
    """One row a parameter."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table("parameter", "value", "told by", title=Text(kind.kind, style="bold"), title_justify="left")
    for one in kind.measured:
        drawn.add_row(*map(Text, one))
    return drawn


def fit_lines(kind: Fitted) -> Iterator[str]:
    """Whether the rules were confirmed, whether they hold at other sizes, and whether M changes bits."""
    if kind.error:
        yield f"{kind.kind}: failed: {kind.error}"
        return
    if kind.left_out:
        yield f"{kind.kind}: left out: {kind.left_out}"
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
    ran = [one for one in kind.sizes if not one.reason or one.has_failed]
    if kind.is_batch_invariant is not None:
        said = "do not depend" if kind.is_batch_invariant else "DEPEND"
        sizes = ", ".join(str(one.size) for one in ran if one.dimension == "M")
        yield f"{kind.kind}: bits of a row {said} on M ({sizes})"
    for one in ran:
        if one.has_failed:
            yield f"  {one.name}: FAILED: {one.reason}"
        elif not one.is_same or (kind.holds_on_random and one.outputs_equal != one.outputs_total):
            same = "" if one.dimension != "M" else "the bits of the largest M; "
            same = same if one.is_same else "other bits than with the largest M; "
            slices = "MISSES THE RULES, no split explains it" if one.misses else f"explained by split-K {one.split_k}"
            yield f"  {one.name}: {same}{_shares(one.outputs_equal, one.outputs_total)} under the rules; {slices}"
    yield from (f"  {one.name}: not run: {one.reason}" for one in kind.sizes if one.reason and not one.has_failed)


def fit_verdict(fit: Fit) -> str:
    """The last line: what holds for everything that was run."""
    where = f" {INTERPRETED}" if INTERPRETED in fit.engine else ""
    if not fit.kinds:
        why = f": {fit.reason}" if fit.reason else ""
        return f"{fit.subject}: {'INTERRUPTED, ' if fit.is_interrupted else ''}nothing to fit: no GEMM is offered{why}"
    said = [f"{sum(kind.is_confirmed for kind in fit.kinds)} of {len(fit.kinds)} kinds of GEMM confirmed{where}"]
    missed = [f"{kind.kind} ({', '.join(one.name for one in kind.missed)})" for kind in fit.kinds if kind.missed]
    for what, kinds in (
        ("not confirmed", [kind.kind for kind in fit.kinds if not kind.is_confirmed and not kind.missed]),
        ("MISS THE RULES at another size", missed),
        ("bits depend on M", [kind.kind for kind in fit.kinds if kind.is_batch_invariant is False]),
    ):
        said += [f"{what}: {', '.join(kinds)}"] * bool(kinds)
    if sizes := _largest_sizes(fit):
        said.append(f"looked up to {sizes}, one dimension at a time")
    return f"{'INTERRUPTED, ' if fit.is_interrupted else ''}{fit.subject}: {'; '.join(said)}"


def _largest_sizes(fit: Fit) -> str:
    """`M = 4112, N = 2064, K = 8320`: the largest sizes that ran, of the kind where they are smallest."""
    largest: dict[str, int] = {}
    for kind in fit.kinds:
        for dimension in dict.fromkeys(one.dimension for one in kind.sizes if not one.reason):
            most = max(one.size for one in kind.sizes if one.dimension == dimension and not one.reason)
            largest[dimension] = min(most, largest.get(dimension, most))
    return ", ".join(f"{dimension} = {size}" for dimension, size in largest.items())


def fit_json(fit: Fit, *, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """The whole fit as plain data."""
    return {
        "schema": FIT_SCHEMA,
        "subject": fit.subject,
        "engine": fit.engine,
        "interrupted": fit.is_interrupted,
        "confirmed": fit.is_confirmed,
        "reason": fit.reason,
        "command": list(command),
        "seconds": round(seconds, 3),
        "versions": versions(),
        "devices": devices(),
        "kinds": list(map(_fitted_json, fit.kinds)),
    }


def _fitted_json(kind: Fitted) -> dict[str, Any]:
    random = kind.random or RandomGemms()
    return {
        **{name: getattr(kind, name) for name in ("kind", "left_out", "error", "follows")},
        "rules": None if kind.rules is None else kind.rules.to_dict(),
        "in_words": [] if kind.rules is None else list(kind.rules.lines()),
        "measured": [one._asdict() for one in kind.measured],
        **{name: getattr(random, name) for name in ("outputs_equal", "outputs_total", "unsteady")},
        "confirmed": kind.is_confirmed,
        "batch_invariant": kind.is_batch_invariant,
        "sizes": [
            {_SIZE_KEYS.get(name, name): value for name, value in asdict(one).items()} | {"misses": one.misses}
            for one in kind.sizes
        ],
    }

"""What a replay or a diff found, for people and for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from f8emu.capture.diff import CaptureDiff
from f8emu.capture.replay import Replay
from f8emu.conformance.compare import Mismatch
from f8emu.conformance.words import counted

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1
"""Version of the JSON layout."""


def replay_table(found: Replay) -> "Table":
    """One row a kind of stage."""
    from rich.table import Table

    drawn = Table(title=f"replay of {', '.join(found.steps) or 'nothing'}", title_justify="left")
    for name in ("stage", "equal", "bits of", "elements equal"):
        drawn.add_column(name, justify="left" if name == "stage" else "right")
    for kind, count in found.counts.items():
        share = f"{count.elements}" + (f" (of {found.outputs})" if kind == "product" != count.elements else "")
        style = "green" if count.parts == count.parts_equal > 0 else "bold red" if count.parts else "dim"
        drawn.add_row(kind, f"{count.parts_equal}/{count.parts}", share, str(count.elements_equal), style=style)
    return drawn


def replay_lines(found: Replay, errors: int) -> Iterator[str]:
    """Findings, first to last, with mismatches of the first; then what was not judged."""
    yield from (f"captured because of {reason}" for reason in found.reasons)
    if found.findings:
        yield f"first difference: {found.findings[0].line()}"
        yield from _mismatches(found.findings[0].mismatches, errors)
        yield from _listed("also differ", [one.line() for one in found.findings[1:]], errors)
    yield from _listed("damaged", found.damaged, errors)
    yield from _listed("not replayed", found.not_replayed, errors)
    yield from _listed("missing", found.missing, errors)


def replay_verdict(found: Replay) -> str:
    """The last line."""
    count = found.counts["product"]
    gemms, judges = counted(found.gemms, "GEMM"), ", ".join(found.oracles)
    what = f"{count.elements} of {counted(found.outputs, 'output')} of {gemms}; judge: {judges}"
    head = "INTERRUPTED, " if found.is_interrupted else ""
    if found.findings:
        first = found.findings[0]
        return f"{head}NOT EQUAL, first at {first.step}: {first.place} {first.part}; {what}"
    if found.damaged:
        return f"{head}DAMAGED: {counted(len(found.damaged), 'file')}; equal: {count.elements_equal} of {what}"
    if not count.elements:
        return f"{head or 'NOT VERIFIED: '}nothing was computed again"
    if found.is_interrupted:
        return f"INTERRUPTED: equal so far; {what}"
    if found.is_equal:
        return f"equal: every bit of {what}"
    undone = found.gemms - count.parts
    why = [counted(undone, "product was not computed again", "products were not computed again")] * bool(undone)
    why += [_missing(found)] * bool(found.missing)
    return f"NOT VERIFIED: {', '.join(why)}; equal: {what}"


def diff_lines(found: CaptureDiff, errors: int) -> Iterator[str]:
    """Differences in how the captures were made, then where they part."""
    yield from (f"A / B: {text}" for text in found.context)
    if found.divergences:
        yield f"first divergence: {found.divergences[0].line()}"
        for one in found.divergences[0].mismatches[:errors]:
            yield f"  {one.part} [{', '.join(map(str, one.index))}]: A {one.observed}  B {one.expected}"
        yield from _listed("also differ", [one.line() for one in found.divergences[1:]], errors)
    yield from _listed("A alone has", found.only_a, errors)
    yield from _listed("B alone has", found.only_b, errors)
    yield from _listed("missing", found.missing, errors)
    yield from _listed("damaged", found.damaged, errors)


def diff_verdict(found: CaptureDiff) -> str:
    """The last line."""
    what = f"{found.stages_equal} of {found.stages} stages, {found.elements_equal} of {found.elements} elements"
    head = "INTERRUPTED, " if found.is_interrupted else ""
    if found.divergences:
        first = found.divergences[0]
        return f"{head}NOT EQUAL, first at {first.step}: {first.place} {first.part}; equal: {what}"
    if found.has_difference:
        return f"{head}NOT EQUAL: the captures do not hold the same; equal: {what}"
    if not found.stages:
        return f"{head or 'NOT VERIFIED: '}nothing was compared"
    if found.is_interrupted:
        return f"INTERRUPTED: equal so far: {what}"
    if found.missing:
        return f"NOT VERIFIED: {_missing(found)}; equal: {what}"
    return f"equal: every bit of {what}"


def to_json(found: Replay | CaptureDiff, *, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """The whole result as plain data."""
    return {
        "schema": SCHEMA,
        "equal": found.is_equal,
        "command": list(command),
        "seconds": round(seconds, 3),
        **asdict(found),
    }


def _missing(found: Replay | CaptureDiff) -> str:
    return counted(len(found.missing), "thing is missing", "things are missing")


def _mismatches(found: Sequence[Mismatch], errors: int) -> Iterator[str]:
    yield from (f"  {one.line()}" for one in found[:errors])


def _listed(title: str, lines: Sequence[str], errors: int) -> Iterator[str]:
    if lines:
        yield f"{title} ({len(lines)}):"
        yield from (f"  {line}" for line in lines[:errors])
        if len(lines) > errors:
            yield f"  ... and {len(lines) - errors} more"

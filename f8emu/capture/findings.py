"""What a replay or a diff found: a page, and its verdict in one line."""

from collections.abc import Iterator, Sequence

from f8emu.capture.diff import CaptureDiff
from f8emu.capture.replay import Replay
from f8emu.conformance.compare import counted
from f8emu.report.page import Cell, Page, Row, Section, Table, Text, Tone


def replay_page(found: Replay, errors: int) -> tuple[Page, str]:
    """One row a kind of stage; findings, first to last, with mismatches of the first; then what was not judged."""
    rows: list[Row] = []
    for kind, count in found.counts.items():
        share = f"{count.elements}" + (f" (of {found.outputs})" if kind == "product" != count.elements else "")
        tone: Tone = "good" if count.parts == count.parts_equal > 0 else "bad" if count.parts else "quiet"
        equal = Cell(text=f"{count.parts_equal}/{count.parts}", tone=tone)
        rows.append([kind, equal, share, str(count.elements_equal)])
    table = Table(
        caption=f"replay of {', '.join(found.steps) or 'nothing'}",
        columns=("stage", "equal", "bits of", "elements equal"),
        rows=rows,
        numeric=frozenset((1, 2, 3)),
    )
    lines = [f"captured because of {reason}" for reason in found.reasons]
    if found.findings:
        first, *others = found.findings
        lines.append(f"first difference: {first.line()}")
        lines += [f"  {one.line()}" for one in first.mismatches[:errors]]
        lines += _listed("also differ", [one.line() for one in others], errors)
    for title, of in (("damaged", found.damaged), ("not replayed", found.not_replayed), ("missing", found.missing)):
        lines += _listed(title, of, errors)
    return _page("replay", Section(title="replay", blocks=[table, Text(points=lines)])), replay_verdict(found)


def replay_verdict(found: Replay) -> str:
    """The last line."""
    # The worst that was found names the verdict; "equal" needs every product computed and nothing missing.
    count = found.counts["product"]
    gemms, judges = counted(found.gemms, "GEMM"), ", ".join(found.oracles)
    what = f"{count.elements} of {counted(found.outputs, 'output')} of {gemms}; judge: {judges}"
    undone = found.gemms - count.parts
    if found.findings:
        first = found.findings[0]
        said = f"NOT EQUAL, first at {first.step}: {first.place} {first.part}; {what}"
    elif found.damaged:
        said = f"DAMAGED: {counted(len(found.damaged), 'file')}; equal: {count.elements_equal} of {what}"
    elif not count.elements:
        return _nothing(found, "computed again")
    elif found.is_interrupted:
        return f"INTERRUPTED: equal so far; {what}"
    elif found.is_equal:
        return f"equal: every bit of {what}"
    else:
        why = [counted(undone, "product was not computed again", "products were not computed again")] * bool(undone)
        return f"NOT VERIFIED: {', '.join(why + _missing(found))}; equal: {what}"
    return _interrupted(found) + said


def diff_page(found: CaptureDiff, errors: int) -> tuple[Page, str]:
    """Differences in how the captures were made, then where they part."""
    lines = [f"A / B: {text}" for text in found.context]
    if found.divergences:
        first, *others = found.divergences
        lines.append(f"first divergence: {first.line()}")
        for one in first.mismatches[:errors]:
            lines.append(f"  {one.part} [{', '.join(map(str, one.index))}]: A {one.observed}  B {one.expected}")
        lines += _listed("also differ", [one.line() for one in others], errors)
    for title, of in (
        ("A alone has", found.only_a),
        ("B alone has", found.only_b),
        ("missing", found.missing),
        ("damaged", found.damaged),
    ):
        lines += _listed(title, of, errors)
    return _page("diff", Section(title="diff", blocks=[Text(points=lines)])), diff_verdict(found)


def diff_verdict(found: CaptureDiff) -> str:
    """The last line."""
    what = f"{found.stages_equal} of {found.stages} stages, {found.elements_equal} of {found.elements} elements"
    if found.divergences:
        first = found.divergences[0]
        said = f"NOT EQUAL, first at {first.step}: {first.place} {first.part}; equal: {what}"
    elif found.has_difference:
        said = f"NOT EQUAL: the captures do not hold the same; equal: {what}"
    elif not found.stages:
        return _nothing(found, "compared")
    elif found.is_interrupted:
        return f"INTERRUPTED: equal so far: {what}"
    elif found.missing:
        return f"NOT VERIFIED: {', '.join(_missing(found))}; equal: {what}"
    else:
        return f"equal: every bit of {what}"
    return _interrupted(found) + said


def _page(command: str, section: Section) -> Page:
    return Page(title=f"f8emu {command}", sections=[section])


def _nothing(found: Replay | CaptureDiff, what: str) -> str:
    return f"{_interrupted(found) or 'NOT VERIFIED: '}nothing was {what}"


def _interrupted(found: Replay | CaptureDiff) -> str:
    return "INTERRUPTED, " if found.is_interrupted else ""


def _missing(found: Replay | CaptureDiff) -> list[str]:
    return [counted(len(found.missing), "thing is missing", "things are missing")] * bool(found.missing)


def _listed(title: str, lines: Sequence[str], errors: int) -> Iterator[str]:
    if lines:
        yield f"{title} ({len(lines)}):"
        yield from (f"  {line}" for line in lines[:errors])
        if len(lines) > errors:
            yield f"  ... and {len(lines) - errors} more"

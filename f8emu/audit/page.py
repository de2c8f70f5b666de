"""The page of an audit, and its verdict in a line."""

from collections import Counter

from f8emu.audit.faults import CHECKS, Severity
from f8emu.audit.findings import Audit
from f8emu.conformance.compare import counted
from f8emu.report.page import Block, Cell, Facts, Page, Section, Table, Text, Tone

_TONES: dict[Severity, Tone] = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "quiet"}


def audit_page(found: Audit, errors: int) -> tuple[Page, str]:
    """Facts, a table of the first findings, then what each kind of fault means; and the verdict."""
    # 1. What was audited.
    facts = [("format", found.format), ("scales", found.scales), ("consumer", found.consumer)]
    size = f"{found.tensors} of {found.tensors_total}, {found.blocks} blocks, {found.elements} weights"
    facts += [
        ("float8 weights", size),
        ("source", found.source and f"{found.source}, {counted(found.compared, 'weight')} compared"),
        ("dialect", _dialects(found)),
    ]
    facts += [("zero blocks", f"{count}: {what}") for what, count in found.zero_blocks.items()]
    facts = [(name, text) for name, text in facts if text]
    blocks: list[Block] = [
        Facts(items=facts),
        Text(points=[f"{name}: {text}" for name, text in facts], only="terminal"),
    ]
    # 2. The first findings.
    if shown := found.findings[:errors]:
        rows = [
            [Cell(text=one.severity, tone=_TONES[one.severity]), one.check, one.place, one.expected, one.found]
            for one in shown
        ]
        caption = f"{len(shown)} of {counted(len(found.findings), 'finding')}"
        blocks.append(Table(caption=caption, columns=("severity", "check", "where", "expected", "found"), rows=rows))
    # 3. Meaning and remedy, once for each kind.
    totals = Counter(one.check for one in found.findings)
    for one in {(one.check, one.effect): one for one in found.findings}.values():
        title = CHECKS[one.check].title
        lines = [f"{one.check} ({counted(totals[one.check], 'tensor')}): {title}"]
        more = (("served", one.effect), ("remedy", one.remedy), ("see", one.thread))
        blocks.append(Text(points=lines + [f"    {name}: {text}" for name, text in more if text]))
    verdict = audit_verdict(found)
    tone: Tone = "bad" if found.has_difference else "good" if found.is_equal else "warn"
    section = Section(title=found.path, blocks=blocks)
    return Page(title=f"f8emu audit {found.path}", verdict=Cell(text=verdict, tone=tone), sections=[section]), verdict


def audit_verdict(found: Audit) -> str:
    """The last line."""
    counts = Counter(one.severity for one in found.findings)
    said = ", ".join(counted(counts[severity], severity) for severity in Severity if counts[severity])
    of = f"{found.tensors} of {counted(found.tensors_total, 'float8 weight')}"
    if found.has_difference:
        first = found.findings[0]
        return f"{'INTERRUPTED, ' * found.is_interrupted}FAULTY: {said}; the first: {first.place}: {first.check}; {of}"
    if found.is_interrupted:
        return f"INTERRUPTED: no fault so far in {of}"
    if not found.tensors_total:
        return "NOT VERIFIED: the checkpoint has no float8 weight"
    return f"no fault in {of}" + (f"; {said}" if said else "")


def _dialects(found: Audit) -> str:
    if not found.compared:
        return ""
    parts = [f"{name} ({of} of {found.compared})" for name, of in found.dialects.items() if of < found.compared]
    return found.dialect or ", ".join(parts) or "none"

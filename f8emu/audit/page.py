"""The page of an audit."""

from collections import Counter

from f8emu.audit.findings import Audit, Severity
from f8emu.conformance.compare import counted
from f8emu.report.page import Cell, Facts, Page, Section, Table, Text, Tone, verdict_cell

_TONES: dict[Severity, Tone] = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "quiet"}


def audit_page(audit: Audit, errors: int = 20) -> Page:
    """Facts, a table of the first findings, then what each kind of fault means."""
    # 1. What was audited.
    parts = [f"{name} ({of} of {audit.compared})" for name, of in audit.dialects.items() if of < audit.compared]
    known = [
        ("format", audit.format),
        ("scales", audit.scales),
        ("consumer", audit.consumer),
        (
            "float8 weights",
            f"{audit.tensors} of {audit.tensors_total}, {audit.blocks} blocks, {audit.elements} weights",
        ),
        ("source", audit.source and f"{audit.source}, {counted(audit.compared, 'weight')} compared"),
        ("dialect", (audit.dialect or ", ".join(parts) or "none") if audit.compared else ""),
        ("not compared", _uncompared(audit)),
        *(("zero blocks", f"{count}: {what}") for what, count in audit.zero_blocks.items()),
    ]
    facts = [(name, text) for name, text in known if text]
    # 2. The first findings.
    shown = audit.findings[:errors]
    table = Table(
        caption=f"{len(shown)} of {counted(len(audit.findings), 'finding')}",
        columns=("severity", "check", "where", "expected", "found"),
        rows=[(Cell(text=f.severity, tone=_TONES[f.severity]), f.check, f.place, f.expected, f.found) for f in shown],
        names=frozenset((2,)),
    )
    # 3. Meaning and remedy, once for each kind.
    totals, meanings = Counter(finding.check for finding in audit.findings), list[Text]()
    for finding in {(finding.check, finding.effect): finding for finding in audit.findings}.values():
        texts = (("served", finding.effect), ("remedy", finding.remedy), ("see", finding.thread))
        lines = [f"    {name}: {text}" for name, text in texts if text]
        tensors = counted(totals[finding.check], "tensor")
        meanings.append(Text(points=[f"{finding.check} ({tensors}): {finding.title}", *lines]))
    terminal = Text(points=[f"{name}: {text}" for name, text in facts], only="terminal")
    tables = [table] if shown else []
    section = Section(title=audit.path, blocks=[Facts(items=facts), terminal, *tables, *meanings])
    return Page(title=f"f8emu audit {audit.path}", verdict=verdict_cell(audit.verdict), sections=[section])


def _uncompared(audit: Audit) -> str:
    first = [f"{name} ({why})" for name, why in [*audit.uncompared.items()][:4]]
    return ", ".join([*first, f"and {len(audit.uncompared) - 4} more"] if len(audit.uncompared) > 4 else first)

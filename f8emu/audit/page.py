"""The page of an audit."""

from collections import Counter

from f8emu.audit.findings import Audit, Severity
from f8emu.conformance.compare import counted
from f8emu.report.page import Cell, Facts, Page, Section, Table, Text, Tone, verdict_cell

_TONES: dict[Severity, Tone] = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "quiet"}


def audit_page(found: Audit, errors: int) -> Page:
    """Facts, a table of the first findings, then what each kind of fault means."""
    # 1. What was audited.
    parts = [f"{name} ({of} of {found.compared})" for name, of in found.dialects.items() if of < found.compared]
    known = [
        ("format", found.format),
        ("scales", found.scales),
        ("consumer", found.consumer),
        (
            "float8 weights",
            f"{found.tensors} of {found.tensors_total}, {found.blocks} blocks, {found.elements} weights",
        ),
        ("source", found.source and f"{found.source}, {counted(found.compared, 'weight')} compared"),
        ("dialect", (found.dialect or ", ".join(parts) or "none") if found.compared else ""),
        ("not compared", _uncompared(found)),
        *(("zero blocks", f"{count}: {what}") for what, count in found.zero_blocks.items()),
    ]
    facts = [(name, text) for name, text in known if text]
    # 2. The first findings.
    shown = found.findings[:errors]
    table = Table(
        caption=f"{len(shown)} of {counted(len(found.findings), 'finding')}",
        columns=("severity", "check", "where", "expected", "found"),
        rows=[(Cell(text=f.severity, tone=_TONES[f.severity]), f.check, f.place, f.expected, f.found) for f in shown],
    )
    # 3. Meaning and remedy, once for each kind.
    totals, meanings = Counter(one.check for one in found.findings), list[Text]()
    for one in {(one.check, one.effect): one for one in found.findings}.values():
        texts = (("served", one.effect), ("remedy", one.remedy), ("see", one.thread))
        lines = [f"    {name}: {text}" for name, text in texts if text]
        meanings.append(Text(points=[f"{one.check} ({counted(totals[one.check], 'tensor')}): {one.title}", *lines]))
    terminal = Text(points=[f"{name}: {text}" for name, text in facts], only="terminal")
    tables = [table] if shown else []
    section = Section(title=found.path, blocks=[Facts(items=facts), terminal, *tables, *meanings])
    return Page(title=f"f8emu audit {found.path}", verdict=verdict_cell(found.verdict), sections=[section])


def _uncompared(found: Audit) -> str:
    first = [f"{name} ({why})" for name, why in [*found.uncompared.items()][:4]]
    return ", ".join([*first, f"and {len(found.uncompared) - 4} more"] if len(found.uncompared) > 4 else first)

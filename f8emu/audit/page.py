"""The page of an audit."""

from collections.abc import Sequence

from f8emu.audit.findings import Audit, Finding, Severity
from f8emu.conformance.compare import counted
from f8emu.report.page import Cell, Facts, Page, Section, Table, Text, Tone, verdict_cell

_SOME = 4
_TONES: dict[Severity, Tone] = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "quiet"}


def audit_page(audit: Audit, errors: int = 20) -> Page:
    """Facts, a table of the first findings, then what each kind of fault means."""
    # 1. What was audited.
    parts = [f"{name} ({of} of {audit.compared})" for name, of in audit.dialects.items() if of < audit.compared]
    checked = f"{audit.tensors - len(audit.unscaled):,} of {audit.tensors_total:,}"
    known = [
        ("format", audit.format),
        ("scales", audit.scales),
        ("consumer", audit.consumer),
        ("float8 weights", f"{checked}, {audit.blocks:,} blocks, {audit.elements:,} weights"),
        ("without a scale to check", _some(audit.unscaled)),
        ("source", audit.source and f"{audit.source}, {counted(audit.compared, 'weight')} compared"),
        ("unquantized weights", audit.source and f"{audit.unquantized_compared:,} compared with the source"),
        ("dialect", (audit.dialect or ", ".join(parts) or "none") if audit.compared else ""),
        ("not compared", _some([f"{name} ({why})" for name, why in audit.uncompared.items()])),
        *(("zero blocks", f"{count:,}: {what}") for what, count in audit.zero_blocks.items()),
    ]
    facts = [(name, text) for name, text in known if text]
    # 2. The first findings, those that say the same of several tensors in one row.
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in audit.findings:
        key = finding.severity, finding.check, finding.effect, finding.expected, finding.found
        alike.setdefault(key, []).append(finding)
    shown = [*alike.values()][:errors]
    noun = "finding" if any(finding.is_fault for finding in audit.findings) else "note"
    table = Table(
        caption=f"{sum(map(len, shown)):,} of {counted(len(audit.findings), noun)}",
        columns=("severity", "check", "where", "expected", "found"),
        rows=[
            (Cell(text=f.severity, tone=_TONES[f.severity]), f.check, _where(f, len(others)), f.expected, f.found)
            for f, *others in shown
        ],
        names=frozenset((2,)),
    )
    # 3. Meaning and remedy, once for each kind.
    meanings: list[Text] = []
    for finding in {(finding.check, finding.effect): finding for finding in audit.findings}.values():
        tensors = [other.tensor for other in audit.findings if other.check == finding.check]
        names = _some(tensors) if len(tensors) > 1 else ""
        texts = ("tensors", names), ("served", finding.effect), ("remedy", finding.remedy), ("see", finding.thread)
        lines = [f"    {name}: {text}" for name, text in texts if text]
        meanings.append(Text(points=[f"{finding.check} ({counted(len(tensors), 'tensor')}): {finding.title}", *lines]))
    terminal = Text(points=[f"{name}: {text}" for name, text in facts], only="terminal")
    tables = [table] if shown else []
    section = Section(title=audit.path, blocks=[Facts(items=facts), terminal, *tables, *meanings])
    return Page(title=f"f8emu audit {audit.path}", verdict=verdict_cell(audit.verdict), sections=[section])


def _where(first: Finding, others: int) -> str:
    return f"{first.tensor} and {counted(others, 'more tensor')}" if others else first.place


def _some(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _SOME:,} more"] if len(texts) > _SOME else []
    return ", ".join([*texts[:_SOME], *more])

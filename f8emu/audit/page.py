"""The page of an audit, and its verdict in a line."""

from collections import Counter

from f8emu.audit.findings import Audit, Severity
from f8emu.conformance.compare import counted
from f8emu.report.page import Cell, Facts, Page, Section, Table, Text, Tone

_TONES: dict[Severity, Tone] = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "quiet"}


def audit_page(found: Audit, errors: int) -> tuple[Page, str]:
    """Facts, a table of the first findings, then what each kind of fault means; and the verdict."""
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
    verdict, tone = _verdict(found)
    terminal = Text(points=[f"{name}: {text}" for name, text in facts], only="terminal")
    tables = [table] if shown else []
    section = Section(title=found.path, blocks=[Facts(items=facts), terminal, *tables, *meanings])
    return Page(title=f"f8emu audit {found.path}", verdict=Cell(text=verdict, tone=tone), sections=[section]), verdict


def _uncompared(found: Audit) -> str:
    first = [f"{name} ({why})" for name, why in [*found.uncompared.items()][:4]]
    return ", ".join([*first, f"and {len(found.uncompared) - 4} more"] if len(found.uncompared) > 4 else first)


def _verdict(found: Audit) -> tuple[str, Tone]:
    # The last line.
    counts = Counter(one.severity for one in found.findings)
    said = ", ".join(counted(counts[severity], severity) for severity in Severity if counts[severity])
    of = f"{found.tensors} of {counted(found.tensors_total, 'float8 weight')}"
    if found.has_difference:
        first = f"{found.findings[0].place}: {found.findings[0].check}"
        return f"{'INTERRUPTED, ' * found.is_interrupted}FAULTY: {said}; the first: {first}; {of}", "bad"
    if found.is_interrupted:
        return f"INTERRUPTED: no fault so far in {of}", "warn"
    if not found.tensors_total:
        return "NOT VERIFIED: the checkpoint has no float8 weight", "warn"
    if found.uncompared:
        return f"INCOMPLETE: no fault, but {len(found.uncompared)} of {of} not compared with the source", "warn"
    return f"no fault in {of}" + (f"; {said}" if said else ""), "good"

"""What a cast or a quantizer does instead, for people and for programs."""

from dataclasses import asdict
from typing import Any

from f8emu.conformance.casts.verify import Verified
from f8emu.report.page import Section, Text


def function_section(name: str, found: Verified) -> Section:
    """In one sentence."""
    assert found.diagnosis is not None, "what differs is diagnosed"
    return Section(title=f"Diagnosis of {name}", blocks=[Text(points=[f"{name}: {found.diagnosis.headline}"])])


def function_json(found: Verified | None) -> dict[str, Any]:
    """As plain data; empty of a subject that is neither."""
    if found is None:
        return {}
    one = found.diagnosis
    facts = {} if one is None else asdict(one) | {"complete": one.is_complete, "headline": one.headline}
    return {"follows": found.follows, "function": facts}

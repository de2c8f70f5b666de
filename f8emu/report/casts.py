"""The diagnosis of a cast or a quantizer, for people and for programs."""

from dataclasses import asdict
from typing import Any

from f8emu.conformance.casts.verify import Verified
from f8emu.report.page import Section, Text


def function_section(name: str, verified: Verified) -> Section:
    """The diagnosis in one sentence."""
    assert verified.diagnosis is not None, "what differs is diagnosed"
    return Section(title=f"Diagnosis of {name}", blocks=[Text(points=[f"{name}: {verified.diagnosis.headline}"])])


def function_json(verified: Verified | None) -> dict[str, Any]:
    """The diagnosis as plain data; empty for other subjects."""
    if verified is None:
        return {}
    diagnosis, facts = verified.diagnosis, {}
    if diagnosis is not None:
        facts = asdict(diagnosis) | {"complete": diagnosis.is_complete, "headline": diagnosis.headline}
    return {"follows": verified.follows, "function": facts}

"""The pages of `f8emu certify`."""

from collections.abc import Mapping
from typing import Any

from f8emu.conformance.compare import counted
from f8emu.report.page import Cell, Element, Facts, Page, Row, Section, Table, Text, Tone, verdict_cell
from f8emu.rollout.certificate import Certificate, Checked

_MOST = 20
_TONES: dict[str, Tone] = {"depends on the batch": "bad", "not known": "warn"}


def certificate_page(certificate: Certificate, errors: int = _MOST) -> Page:
    """What was compared under which setting, differences first to last, invariance, and what was not seen."""
    # 1. The setting.
    setting = certificate.setting
    recipe: Mapping[str, Any] = setting["recipe"] or {}
    items = [(file.role, f"{file.path} ({file.kind})") for file in certificate.files]
    items += [
        ("recipe", f"{recipe.get('name', 'not known')} {(setting['recipe_hash'] or '')[:12]}".strip()),
        ("dtype of the source", setting["source_dtype"]),
        ("batch sizes", ", ".join(map(str, setting["batch"]))),
        ("tensor parallelism", str(setting["layout"]["tensor_parallel"])),
    ]
    items += [("weights", _weights(weights)) for weights in certificate.weights]
    if captures := certificate.captures:
        again = captures["replayed"]
        items.append(("captures", f"{captures['stages_equal']} of {captures['stages']} stages equal"))
        items.append(
            (
                "replayed",
                f"{again['equal']:,} of {counted(again['outputs'], 'output')} equal, by {', '.join(again['oracles'])}",
            )
        )
        if (served := captures["served"])["layers"]:
            text = f"{served['equal']:,} of {counted(served['outputs'], 'output')} equal"
            items.append(("the trainer's GEMMs of the server's inputs", text))
    if decode := certificate.decode:
        short = counted(decode["passes"], "shorter pass", "shorter passes")
        text = f"{decode['rows_equal']:,} of {decode['rows']:,} rows equal, of {short}"
        items.append(("decode and prefill", text))
    shown = [(name, str(text)) for name, text in items if text]
    blocks: list[Element] = [Facts(items=shown)]
    blocks.append(Text(points=[f"{name}: {text}" for name, text in shown], only="terminal"))
    # 2. Differences, and what was not seen.
    if certificate.differences:
        first, *others = [difference.line() for difference in certificate.differences[:errors]]
        more = len(certificate.differences) - 1 - len(others)
        lines = [f"first difference: {first}", *others, *([f"... and {more} more"] if more else [])]
        blocks.append(Text(points=lines))
    # 3. Layers of one answer in one row.
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer in certificate.invariance:
        measured = layer.get("measured", layer["because"])
        because = layer["because"] if measured == layer["because"] else f"{layer['because']}; measured: {measured}"
        key = str(layer["verdict"]), str(layer["evidence"]), str(because)
        alike.setdefault(key, []).append(str(layer["layer"]))
    rows: list[Row] = [
        [_some(layers), Cell(text=verdict, tone=_TONES.get(verdict, "good")), evidence, because]
        for (verdict, evidence, because), layers in alike.items()
    ]
    columns = ("layers", "verdict", "evidence", "because")
    if rows:
        caption = "Does a row depend on the batch? By rule or plan: the recipe's GEMM; measured: the server's"
        blocks.append(Table(caption=caption, columns=columns, rows=rows, names=frozenset((0,))))
    unseen = [
        f"not seen: {part.part}: {part.what}{'' if part.was_asked else ' (not asked for)'}"
        for part in certificate.not_seen
    ]
    if unseen:
        blocks.append(
            Text(points=[*unseen[:errors], *([f"... and {len(unseen) - errors} more"] if unseen[errors:] else [])])
        )
    section = Section(title="Trainer and server", blocks=blocks)
    return Page(title="f8emu certify", verdict=verdict_cell(certificate.verdict), sections=[section])


def checked_page(checked: Checked) -> Page:
    """The parts and files that were changed, and those that are not here."""
    points = [f"{checked.path} says: {checked.says}", *(f"changed: {name}" for name in checked.changed)]
    points += [f"not at hand: {name}" for name in checked.not_at_hand]
    section = Section(title=checked.path, blocks=[Text(points=points)])
    return Page(title="f8emu certify --check", verdict=verdict_cell(checked.verdict), sections=[section])


def _weights(weights: Mapping[str, Any]) -> str:
    others = [
        f"{weights[name]} {name.replace('_', ' ')}"
        for name in ("different", "missing", "extra", "not_predicted")
        if weights[name]
    ]
    return (
        ", ".join([f"{weights['equal']} of {counted(weights['compared'], 'tensor')} equal", *others])
        + f", by {weights['by']}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""Puts the table of evidence into concepts/chips.md, from CHIPS and from what was recorded, replayed and compared.

The page has a line `<!-- chips: evidence -->` where the table belongs. mkdocs-gen-files runs this file, which gives the
site the page with that line replaced.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results_records import NO_FIGURE, ROOT, count, record, table

from f8emu.spec import CHIPS, Chip, Evidence

PAGE = ROOT / "docs" / "concepts" / "chips.md"
MARKER = "<!-- chips: evidence -->"
_TIERS = {
    Evidence.RECORDED: "recorded",
    Evidence.RECORDED_INSTRUCTION: "instructions recorded",
    Evidence.AGREES_WITH_MODEL: "instructions agree with a model",
    Evidence.LITERATURE: "unverified",
}
_VERIFIED = {"Hopper": "verify-h200", "H100": "verify-h100"}
_REPLAYED = {"Ada": ("Ada", "L40S"), "Blackwell mma.sync": ("B200",)}
"""The GPUs of replayed recordings."""


def page() -> str:
    """The page with its table."""
    return PAGE.read_text().replace(MARKER, evidence())


def evidence() -> str:
    """A row for every chip, and what was left out."""
    held = record("mma_sim-cpu")
    model, rows = f"MMA-Sim {held['versions']['mmasim']}", list[list[str]]()
    for chip in CHIPS.values():
        stands_on, outputs = _stands_on(chip, model)
        rows.append([chip.name, _TIERS[chip.evidence], stands_on, count(outputs), *_beside(chip.name)])
    columns = ["chip", "tier", "stands on", "outputs equal", f"equal to {model}", "differ", "left out"]
    return table(columns, rows)


def _stands_on(chip: Chip, model: str) -> tuple[str, int]:
    if chip.name in _VERIFIED:
        held = record(_VERIFIED[chip.name])["subjects"][0]["stages"]
        return "`f8emu verify torch` on the GPU", sum(stage["outputs_equal"] for stage in held)
    if chip.name in _REPLAYED:
        return f"recordings of {' and '.join(_REPLAYED[chip.name])}", replayed(_REPLAYED[chip.name])
    return f"{model}, instruction by instruction", _sum(chip.name, "outputs")


def replayed(gpus: tuple[str, ...]) -> int:
    """The dot products of these GPUs that were equal, by the table of EVIDENCE.md; a row may have two formats."""
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([\d,]+) of \2(, both formats)? \|$",
        (ROOT / "reference" / "EVIDENCE.md").read_text(),
        re.MULTILINE,
    )
    named = ((sum(gpu in re.split(r"[, ]+", of) for gpu in gpus), equal, both) for of, equal, both in rows)
    return sum(recordings * int(equal.replace(",", "")) * (2 if both else 1) for recordings, equal, both in named)


def _sum(chip: str, key: str) -> int:
    return sum(entry[key] for entry in record("mma_sim-cpu")["instructions"] if entry["chip"] == chip)


def _beside(chip: str) -> list[str]:
    """H100 multiplies as Hopper."""
    is_compared = _sum(chip, "outputs") > 0
    return [count(_sum(chip, key)) if is_compared else NO_FIGURE for key in ("outputs", "differ", "left_out")]


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    with mkdocs_gen_files.open("concepts/chips.md", "w") as file:
        file.write(page())
    mkdocs_gen_files.set_edit_path("concepts/chips.md", "concepts/chips.md")

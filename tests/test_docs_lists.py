"""Lists of a page that the code holds too: the names in a table, as a set beside those that the code has or writes."""

import inspect
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from f8emu.audit import CHECKS
from f8emu.cli import build_app
from f8emu.conformance import shipped_golden, write_golden
from f8emu.conformance.cases.container import read_container
from f8emu.rollout import Certificate
from f8emu.spec import NAMED_RECIPES, F8Error, Recipe
from f8emu.split_k.gemm import planned_gemm
from f8emu.split_k.plan import plan_to_json, shipped_plan
from f8emu.torch import InspectConfig, capture, convert_to_float8_training, export_float8
from f8emu.torch import inspect as inspect_training
from f8emu.torch.inspection.config import STATISTICS
from f8emu.verdict import Exit

ROOT = Path(__file__).parents[1]


def rows(page: str, heading: str) -> list[list[str]]:
    """The rows of the tables below a heading, up to the next one, without heads."""
    text = (ROOT / page).read_text()
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    heads = {i for i, line in enumerate(lines) for i in (i - 1, i) if re.fullmatch(r"[|: -]+", line)}
    return [re.split(r"(?<!\\)\|", line)[1:-1] for i, line in enumerate(lines) if i not in heads]


def names(page: str, heading: str, column: int = 0, line: str = "") -> set[str]:
    """What stands in backticks in a column; of rows that begin with `line` alone."""
    cells = (row[column] for row in rows(page, heading) if row[0].strip().startswith(line))
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def model() -> torch.nn.Module:
    return convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False)), config="rowwise")


def errors(_: Path) -> set[str]:
    """Every class of error in the modules that raise them, at any depth."""
    for module in ("audit", "capture", "conformance", "jax", "rollout", "torch"):
        import_module(f"f8emu.{module}")

    def below(kind: type[F8Error]) -> Iterable[str]:
        for subclass in kind.__subclasses__():
            if subclass.__module__.startswith("f8emu."):
                yield from (subclass.__name__, *below(subclass))

    return set(below(F8Error))


def golden_keys(folder: Path) -> set[str]:
    write_golden(folder / "golden", shipped_golden().cases, {"device": "a"})
    entries: list[dict[str, Any]] = json.loads(read_container(folder / "golden", "test")[1]["cases"])
    return {key for entry in entries for key in entry}


def plan_keys(_: Path) -> set[str]:
    shipped = next((ROOT / "f8emu" / "split_k" / "data").glob("h200*_split_k.json"))
    return {*json.loads(shipped.read_text()), *json.loads(plan_to_json(shipped_plan()))}


def capture_keys(folder: Path) -> set[str]:
    trained = model()
    with capture(trained, folder, steps=[1]) as handle:
        trained(torch.randn(16, 16)).sum().backward()
        handle.step()
    (index,) = folder.rglob("index.json")
    return set(json.loads(index.read_text()))


def manifest_keys(folder: Path) -> set[str]:
    layers = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False)).bfloat16()
    export_float8(convert_to_float8_training(layers, config="blockwise"), folder / "out", format="block")
    return set(json.loads((folder / "out" / "f8emu_manifest.json").read_text()))


def log_keys(folder: Path, kind: str) -> set[str]:
    trained, x = model(), torch.randn(16, 16)
    x[0, 0] = torch.inf
    path = folder / "run.jsonl"
    config = InspectConfig(statistics=STATISTICS, what_if=("tensorwise",), path=str(path))
    with inspect_training(trained, config) as inspector:
        trained(x).sum().backward()
        inspector.step()
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = ("header" if "schema" in line else "event" if "event" in line else "record" for line in lines)
    return {key for line, of in zip(lines, kinds, strict=True) if of == kind for key in line}


def report_keys(folder: Path, part: str) -> set[str]:
    (folder / "wrong.py").write_text("def kernel(a, b, *_, out_dtype, **__):\n    return a @ b\n")
    words = ["verify", str(folder / "wrong.py:kernel"), "--arrays", "numpy", "--here", "--stage", "golden", "--case"]
    out = folder / "out.json"
    CliRunner().invoke(build_app(), [*words, "000 *", "--no-diagnose", "--json", str(out)])
    report: dict[str, Any] = json.loads(out.read_text())
    subject = report["subjects"][0]
    stage = subject["stages"][0]
    parts = {"report": report, "subject": subject, "stage": stage, "mismatch": stage["mismatches"][0]}
    return set((parts | {"`golden`": report["golden"]})[part])


FORMATS = "docs/reference/file-formats.md"
LISTS: dict[tuple[Any, ...], Callable[[Path], set[str]]] = {
    ("README.md", "Recipes"): lambda _: {*NAMED_RECIPES},
    ("docs/guides/audit.md", "What is checked"): lambda _: set(CHECKS),
    ("docs/reference/errors.md", "Error classes"): errors,
    (FORMATS, "Recipes"): lambda _: {"schema", "a", "b", *inspect.signature(Recipe).parameters},
    (FORMATS, "Golden files"): golden_keys,
    (FORMATS, "Lists of shapes"): lambda _: set(inspect.signature(planned_gemm).parameters),
    (FORMATS, "Split-K plans"): plan_keys,
    (FORMATS, "Captures"): capture_keys,
    (FORMATS, "Manifests of exports"): manifest_keys,
    (FORMATS, "Certificates"): lambda _: set(Certificate(files=(), setting={}).to_json()),
    **{(FORMATS, "Inspection logs", 1, kind): partial(log_keys, kind=kind) for kind in ("header", "event", "record")},
    **{
        (FORMATS, "Reports", 1, part): partial(report_keys, part=part)
        for part in ("report", "`golden`", "subject", "stage", "mismatch")
    },
}
"""Page, heading, column and begin of rows -> the names that the code has."""


@pytest.mark.parametrize("place", LISTS, ids=lambda place: " ".join(map(str, place)))
def test_a_list_of_a_page_is_that_of_the_code(place: tuple[Any, ...], tmp_path: Path) -> None:
    assert names(*place) == LISTS[place](tmp_path)


def test_exit_statuses_are_those_of_commands() -> None:
    """In the reference and in the help of a command."""
    listed = {row[0].strip() for row in rows("docs/reference/errors.md", "Exit statuses") if row[0].strip().isdigit()}
    assert listed == {str(int(status)) for status in Exit}
    commands = {words.split()[0] for words in names("docs/reference/errors.md", "Exit statuses")}
    assert commands <= {command.callback.__name__ for command in build_app().registered_commands if command.callback}
    meanings = {
        row[0].split()[0].strip("` ,"): {
            status for status, meaning in zip("13", row[1:], strict=True) if meaning.strip()
        }
        for row in rows("docs/reference/errors.md", "Exit statuses")
        if "`" in row[0]
        for row in ([name, *row[1:]] for name in row[0].split(","))
    }
    for name in sorted(command.callback.__name__ for command in build_app().registered_commands if command.callback):
        help_text = " ".join(CliRunner().invoke(build_app(), [name, "--help"]).output.split())
        statuses = set(re.findall(r"(?:^ |; )(\d+) ", help_text.split("Exit status:")[1]))
        assert statuses == ({"2"} if name == "run" else meanings.get(name, set()) | {"0", "2", "130"}), name


def test_variables_are_those_that_the_package_reads() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "f8emu").rglob("*.py"))
    ours = {name for name in names("docs/reference/environment.md", "Variables that f8emu reads") if "F8EMU" in name}
    assert ours == set(re.findall(r'"(F8EMU_\w+)"', sources))


def test_warnings_are_those_of_the_code() -> None:
    """The begin or the end of each, in the sources; a text may go over several lines there."""
    sources = "".join(path.read_text() for path in (ROOT / "f8emu").rglob("*.py"))
    texts = re.sub(r'"\s*\n\s*f?"', "", sources)
    warnings = names("docs/reference/errors.md", "Warnings")
    assert warnings and not {warning for warning in warnings if warning.strip(". ") not in texts}


@pytest.mark.parametrize("words", ["pytest", "wandb", "error analysis", "split k", "H100 CPU"])
def test_what_is_searched_for_stands_in_a_heading(words: str) -> None:
    """The site's search ranks headings first; it splits words at blanks and hyphens."""
    pages = [path.read_text() for room in ("guides", "concepts") for path in (ROOT / "docs" / room).glob("*.md")]
    headings = [re.split(r"[\s:-]+", line.lower()) for page in pages for line in re.findall(r"^#+ (.*)", page, re.M)]
    assert any({*words.lower().split()} <= {*heading} for heading in headings)

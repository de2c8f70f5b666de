"""What is drawn and written from code: the Results pages, the README's table and plot, the figures of the concepts."""

import ast
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from benchmarks.proofs.evidence import recordings
from f8emu.conformance import shipped_golden
from f8emu.spec import CHIPS, NAMED_RECIPES, RecipeName, UnsupportedError

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
OWN_PARSER = {
    f"benchmarks.proofs.{name}"
    for name in ("evidence", "exhaustive", "mutants", "outliers", "split_k_fit", "split_k_labels")
}
"""They run without torch, or need scikit-learn."""


def generator(name: str) -> ModuleType:
    """A module of `docs/generate`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "generate" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return generator("results")


@pytest.fixture(scope="module")
def records(results: ModuleType) -> ModuleType:
    return generator("results_records")


def test_the_readme_shows_the_recorded_speeds(results: ModuleType) -> None:
    shown = results.readme_block((ROOT / "README.md").read_text())
    assert shown == results.results_torch.readme(), "run: python docs/generate/results.py readme --write"
    assert results.command_line(["svg", "--check"]) == 0, "run: python docs/generate/results.py svg"
    text = "before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n"
    written = results.readme_with_block(text)
    assert results.readme_block(text) == "old" and results.readme_block(written) == shown
    assert results.readme_with_block(written) == written and written.endswith("\n\n<!-- /speed -->\nafter\n")


def test_the_readme_claims_what_was_recorded() -> None:
    """Each number of its table of proofs, from the recording or the tests that it names."""
    read = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        for name in ("verify-h100", "recorded_layers-h200", "evidence", "exhaustive-cast")
    }
    (torch,) = read["verify-h100"]["subjects"]
    counts = ("cases_equal", "cases_total", "outputs_equal")
    cases, total, outputs = (sum(stage[of] for stage in torch["stages"]) for of in counts)
    split = sum(sum(stage["own_splits"].values()) for stage in torch["stages"])
    layers, alterations = len(read["recorded_layers-h200"]["layers"]), read["evidence"]["alterations"][1:]
    refused, rules = sum(row["outputs"] > 0 for row in alterations), {row["rules"] for row in alterations}
    tests = ROOT / "tests" / "conformance" / "test_planted_kernels.py"
    planted = [
        len(node.value.keys)
        for node in ast.parse(tests.read_text()).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Dict)
        and "PLANTED" in ast.unparse(node.target)
    ]
    readme = (ROOT / "README.md").read_text()
    for claim in (
        f"{cases:,} of {total:,} cases, {outputs // 10**6} million outputs; in {split} cuBLAS splits K otherwise",
        f"{layers} of {layers} layers, every bit",
        f"each of {len(set(', '.join(rules).split(', ')))} rules",
        f"{refused} of {len(alterations)} changes to them change recorded outputs",
        f"2^32 inputs, {read['exhaustive-cast']['differences']} differences",
        f"{sum(planted)} of {sum(planted)} planted kernels",
        f"{len(shipped_golden().cases)} of {len(shipped_golden().cases)} GEMMs",
    ):
        assert claim in readme, claim
    home = (ROOT / "docs" / "index.md").read_text()
    assert f"**{outputs // 10**6} million outputs**" in home and f"[{total:,} cases]" in home
    assert torch["equal"] and cases + split == total


def test_the_evidence_is_what_was_recorded() -> None:
    """The tables of EVIDENCE.md: alterations as `evidence.json` has them, and the recordings that were replayed."""
    text = (ROOT / "reference" / "EVIDENCE.md").read_text()
    rows = re.findall(r"^\| ([A-Z0-9, -]+) \| (.+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    recorded = json.loads((ROOT / "benchmarks" / "results" / "evidence.json").read_text())["alterations"][1:]
    assert rows == [(r["rules"], r["alteration"], f"{r['cases']:,}", f"{r['outputs']:,}") for r in recorded]
    files = [(g.path.name, g.device, len(g.cases), sum(case.out.size for case in g.cases)) for g in recordings()]
    rows = re.findall(r"^\| `[\w./]+/([\w.]+)` \| (.+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert rows == [(name, device, f"{cases:,}", f"{outputs:,}") for name, device, cases, outputs in files]
    cases, outputs = (sum(counts) for counts in list(zip(*files, strict=True))[2:])
    numerics = (ROOT / "reference" / "NUMERICS.md").read_text()
    assert f"{cases} of {cases} recorded GEMMs, {outputs:,} of {outputs:,} outputs" in numerics


def test_every_figure_of_a_page_is_generated_and_every_recording_is_shown(
    results: ModuleType, records: ModuleType
) -> None:
    """No table is typed; every block has its place; every file is described and linked, and names its device."""
    assert {path.stem for path in PAGES} == set(results.PAGES)
    for path in PAGES:
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(r"\d+\.\d+", prose) + re.findall(r"\|[ \d,%]*\d[ \d,%]*(?=\|)", prose), path
    assert {name for path in PAGES for name in results.MARKER.findall(path.read_text())} == results.BLOCKS.keys()
    rendered = {name: results.page(name) for name in results.PAGES}
    assert not [name for name, text in rendered.items() if "<!-- result" in text]
    assert re.findall(r"^\| \[([\w.-]+)\.json\]", rendered["index"], re.MULTILINE) == records.names()
    assert all(records.device(name) for name in records.names())
    # What has no table of its own is compared by a test, or is a list of lines.
    shown = {name for page, text in rendered.items() if page != "index" for name in re.findall(r"data/([\w-]+)", text)}
    assert set(records.names()) - shown == {"evidence", "mutants", "split_k-h200"}


def test_every_recorded_command_is_one_that_its_script_takes(
    records: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts on the shared runner take its options; the others, which have parsers of their own, exist."""
    # docs/generate has an examples.py, which hides the folder of that name
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.endswith("generate")])
    monkeypatch.delitem(sys.modules, "examples", raising=False)
    commands = {name: shlex.split(records.command(name)) for name in records.names()}
    assert [name for name, words in commands.items() if not words] == ["blockwise_split_k-h200"]
    for name, words in commands.items():
        assert not [word for word in words if word.startswith(("/root", "/tmp"))], name
        if "-m" not in words:
            continue
        module, options = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        script = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
        assert (ROOT / f"{script.replace('.', '/')}.py").exists(), name
        if module.startswith("benchmarks.") and module not in OWN_PARSER:
            pytest.importorskip(script).BENCH.parse(options, device="cpu")


@pytest.mark.parametrize("values, shown", [((9.9, 10.1), "9.90 to 10.10"), ((1.0, None, 1.001), "1.00"), ((), "-")])
def test_a_range_goes_from_the_least_to_the_greatest(
    records: ModuleType, values: tuple[float | None, ...], shown: str
) -> None:
    assert records.span(values) == shown


def test_figures_are_as_the_code_draws_them(tmp_path: Path) -> None:
    """In the colour and the width of a page, each on one; a file that is gone or changed is noticed."""
    figures = generator("figures")
    assert not figures.stale()
    for name, draw in figures.DRAWN.items():
        text = draw().svg()
        (tmp_path / f"{name}.svg").write_text(text, encoding="utf-8")
        assert set(re.findall(r'(?:fill|stroke|color)="([^"]+)"', text)) <= {"currentColor", "none", figures.ACCENT}
        assert min(map(float, re.findall(r'font-size="([\d.]+)"', text))) >= 9.5
        assert "\n\n" not in text, "a blank line ends an HTML block of markdown"
        assert all(0 <= float(x) <= figures.WIDTH for x in re.findall(r' x="([\d.]+)"', text))
    assert not figures.stale(tmp_path)
    (tmp_path / "chips.svg").unlink()
    (tmp_path / "formats.svg").write_text("<svg/>", encoding="utf-8")
    assert figures.stale(tmp_path) == ["chips.svg", "formats.svg"]
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert figures.DRAWN.keys() <= set(re.findall(r'--8<-- "docs/figures/([\w-]+)\.svg"', pages))


@pytest.mark.parametrize("name", NAMED_RECIPES)
def test_the_tables_of_recipes_say_what_torch_takes(name: RecipeName) -> None:
    """Weights as codes and how many, activations gathered as codes, experts: each asked of the code that refuses."""
    torch = pytest.importorskip("torch")
    from f8emu.torch import Float8Experts, convert_to_float8_training
    from f8emu.torch.casts.placements import require_gatherable

    def codes() -> int:
        layer, model = torch.nn.Linear(16, 16), torch.nn.Sequential()
        model.append(layer)
        convert_to_float8_training(model, config=name, float8_primary_weights=True)
        return 1 if model.get_parameter("0.weight").cols is None else 2

    recipe, table = NAMED_RECIPES[name], generator("recipes")
    assert table.bytes_of_weights(recipe) == (unless_refused(codes) or 0)
    assert table.gathers_activations(recipe) == (unless_refused(lambda: not require_gatherable("", recipe)) or False)
    assert table.has_experts(recipe) == (unless_refused(lambda: bool(Float8Experts(1, 16, 16, recipe=recipe))) or False)


def unless_refused(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except UnsupportedError:
        return None


def test_the_page_of_recipes_has_its_tables() -> None:
    recipes = generator("recipes")
    assert "<!-- recipes" not in recipes.page()
    assert all(f"| `{name}` |" in table() for table in recipes.TABLES.values() for name in NAMED_RECIPES)


def test_the_page_of_chips_has_its_table(records: ModuleType) -> None:
    """A row for every chip; the recordings that it counts are all that EVIDENCE.md has."""
    chips, text = generator("chips"), (ROOT / "reference" / "EVIDENCE.md").read_text()
    assert chips.MARKER in chips.PAGE.read_text() and chips.MARKER not in chips.page()
    assert all(f"| {name} | {chips._TIERS[chip.evidence]} |" in chips.evidence() for name, chip in CHIPS.items())
    assert (
        chips.replayed(("H100", "H200", "B200", "Ada", "L40S")) == 23 * 2500 and "(2,500 each, 23 recordings)" in text
    )
    held = records.record("mma_sim-cpu")
    assert f"{held['outputs']:,} outputs" in text and f"{held['left_out']:,} outputs more are left out" in text


def test_issues_of_other_projects_are_links() -> None:
    html = '<p>See a/b-c#12 and <a href="x/y#3">x/y#3</a>.</p><code>d/e#4</code>'
    link = '<a href="https://github.com/a/b-c/issues/12">a/b-c#12</a>'
    assert generator("issues").on_page_content(html) == html.replace("a/b-c#12", link)

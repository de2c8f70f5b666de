"""What is drawn and written from code: the Results pages, the README's table and plot, the figures of the concepts."""

import ast
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from f8emu.conformance import shipped_golden

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "generate" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return _module("results")


@pytest.fixture(scope="module")
def records(results: ModuleType) -> ModuleType:
    return _module("results_records")


@pytest.fixture(scope="module")
def rendered(results: ModuleType) -> dict[str, str]:
    return {name: results.page(name) for name in results.PAGES}


def test_the_readme_shows_the_recorded_speeds(results: ModuleType) -> None:
    shown = results.readme_block((ROOT / "README.md").read_text())
    assert shown is not None, "README.md has no <!-- speed --> and <!-- /speed --> markers"
    assert shown == results.results_torch.readme(), "run: python docs/generate/results.py readme --write"
    assert results.command_line(["svg", "--check"]) == 0, "run: python docs/generate/results.py svg"
    lines = shown.splitlines()
    assert sum(line.startswith("| `") for line in lines) <= 8
    assert max(map(len, lines)) <= 120
    assert len(re.findall(r"\d+\.\d+", shown)) <= 20


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
    layers, least = (
        len(read["recorded_layers-h200"]["layers"]),
        min(row["outputs"] for row in read["evidence"]["alterations"][1:]),
    )
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
        f"{cases:,} of {total:,} cases, {outputs // 10**6} million outputs; {split} has its own split-K",
        f"{layers} of {layers} layers, every bit",
        f"at least {least:,} outputs",
        f"2^32 inputs, {read['exhaustive-cast']['differences']} differences",
        f"{sum(planted)} of {sum(planted)} planted kernels",
        f"{len(shipped_golden().cases)} of {len(shipped_golden().cases)} GEMMs",
    ):
        assert claim in readme, claim
    assert torch["equal"] and cases + split == total


def test_the_readmes_table_is_put_between_its_markers(results: ModuleType) -> None:
    text = "before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n"
    assert results.readme_block(text) == "old"
    written = results.readme_with_block(text)
    assert results.readme_block(written) == results.results_torch.readme()
    assert written.startswith("before\n<!-- speed -->\n\n|") and written.endswith("\n\n<!-- /speed -->\nafter\n")
    assert results.readme_with_block(written) == written
    assert results.readme_with_block("<!-- speed -->\n<!-- speed -->").startswith("<!-- speed -->\n\n|")
    assert results.readme_block("no markers") is None


def test_every_page_is_listed_and_no_table_of_figures_is_typed(results: ModuleType) -> None:
    assert {path.stem for path in PAGES} == set(results.PAGES)
    for path in PAGES:
        assert max(map(len, path.read_text().splitlines())) <= 120, path
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(r"\d+\.\d+", prose), path
        assert not re.findall(r"\|[ \d,%]*\d[ \d,%]*(?=\|)", prose), path


def test_every_table_and_plot_has_a_place_and_no_marker_stays(results: ModuleType, rendered: dict[str, str]) -> None:
    used = {name for path in PAGES for name in results.MARKER.findall(path.read_text())}
    assert used == results.BLOCKS.keys()
    assert not [name for name, text in rendered.items() if "<!-- result" in text]


def test_every_recorded_file_is_described_linked_and_has_a_device(
    results: ModuleType, records: ModuleType, rendered: dict[str, str]
) -> None:
    from_index = re.findall(r"^\| \[([\w.-]+)\.json\]", rendered["index"], re.MULTILINE)
    assert from_index == records.names()
    assert sorted(_module("results_index").HELD) == records.names()
    for name in records.names():
        assert records.device(name)
    # What has no table of its own is compared by a test, or holds earlier runs of the same benchmark.
    shown = {name for page, text in rendered.items() if page != "index" for name in re.findall(r"data/([\w-]+)", text)}
    assert set(records.names()) - shown == {"split_k-h200"}


def test_every_command_names_a_program_that_exists(records: ModuleType) -> None:
    without = []
    for name in records.names():
        words = shlex.split(records.command(name))
        if not words:
            without.append(name)
        elif words[0] != "f8emu":
            module = words[words.index("-m") + 1].replace(".", "/")
            found = [ROOT / f"{module}.py", ROOT / module / "__main__.py"]
            assert any(path.exists() for path in found), name
        assert not [word for word in words if word.startswith(("/root", "/tmp"))], name
    assert without == ["blockwise_split_k-h200"]


OWN_PARSER = {f"benchmarks.proofs.{name}" for name in ("evidence", "exhaustive", "split_k_fit", "split_k_labels")}
"""They run without torch, or need scikit-learn."""


def test_every_recorded_command_is_one_that_its_script_takes(
    records: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts on the shared runner; the others have a parser of their own."""
    # docs/generate has an examples.py, which hides the folder of that name
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.endswith("generate")])
    monkeypatch.delitem(sys.modules, "examples", raising=False)
    taken = set()
    for name in records.names():
        words = shlex.split(records.command(name))
        module = words[words.index("-m") + 1] if "-m" in words else ""
        script = module if module != "benchmarks.torchtitan" else f"{module}.__main__"
        if module.startswith("benchmarks.") and module not in OWN_PARSER:
            bench = pytest.importorskip(script).BENCH
            bench.parse(words[words.index("-m") + 2 :], device="cpu")
            taken.add(module)
    assert len(taken) >= 16


@pytest.mark.parametrize("values, shown", [((9.9, 10.1), "9.90 to 10.10"), ((1.0, None, 1.001), "1.00"), ((), "-")])
def test_a_range_goes_from_the_least_to_the_greatest(
    records: ModuleType, values: tuple[float | None, ...], shown: str
) -> None:
    assert records.span(values) == shown


def test_a_table_puts_figures_to_the_right(records: ModuleType) -> None:
    assert records.table(["a", "b", "c"], [["x1", "2 of 3", "yes"]]).splitlines()[1] == "|---|---:|---|"


# Figures: as the code draws them, in the colour and the width of a page


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return _module("figures")


def test_no_figure_is_stale(figures: ModuleType) -> None:
    assert not figures.stale()


def test_a_change_is_noticed(figures: ModuleType, tmp_path: Path) -> None:
    for name, draw in figures.DRAWN.items():
        (tmp_path / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    assert not figures.stale(tmp_path)
    (tmp_path / "chips.svg").unlink()
    (tmp_path / "formats.svg").write_text("<svg/>", encoding="utf-8")
    assert figures.stale(tmp_path) == ["chips.svg", "formats.svg"]


def test_figures_read_at_420_pixels_in_light_and_dark(figures: ModuleType) -> None:
    for name in figures.DRAWN:
        text = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert set(re.findall(r'(?:fill|stroke|color)="([^"]+)"', text)) <= {"currentColor", "none", figures.ACCENT}
        assert min(map(float, re.findall(r'font-size="([\d.]+)"', text))) >= 9.5
        assert "\n\n" not in text, "a blank line ends an HTML block of markdown"
        for x in re.findall(r' x="([\d.]+)"', text):
            assert 0 <= float(x) <= figures.WIDTH


def test_every_figure_is_on_a_page(figures: ModuleType) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    shown = re.findall(r'--8<-- "docs/figures/([\w-]+)\.svg"', pages)
    assert figures.DRAWN.keys() <= set(shown)

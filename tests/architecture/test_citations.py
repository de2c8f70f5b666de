"""What the repository cites is there: files, sections and rule ids of NUMERICS, extras, its own version."""

import re
import tomllib
from pathlib import Path

import pytest

import f8emu

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NUMERICS = (ROOT / "reference" / "NUMERICS.md").read_text()
FOLDERS = ("f8emu", "reference", "tests", "benchmarks", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = (ROOT / "docs" / "contributing").glob("*.md")
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *PAGES, *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))}
)
IDS = set(re.findall(r"^\[([A-Z0-9]+-\d+)\]", NUMERICS, re.MULTILINE))


def cited_files(text: str) -> set[str]:
    """Paths in backticks that begin with a folder of the repository, and the targets of relative links."""
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    return {*paths, *re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_document_cites_are_there(path: Path) -> None:
    missing = {f for f in cited_files(path.read_text()) if not ((ROOT / f).exists() or (path.parent / f).exists())}
    assert not missing


def test_tables_that_a_document_names_are_there() -> None:
    """Names in capitals, as `CASTS`: some module assigns each."""
    sources = "\n".join(path.read_text() for path in SOURCES)
    documents = [path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which names what is gone
    named = {name for text in documents for name in re.findall(r"`([A-Z][A-Z0-9_]{3,})`", text)}
    assigned = set(re.findall(r"^ *([A-Z][A-Z0-9_]{3,})\b(?:, [A-Z_0-9]+)* *(?::[^=\n]*)?=", sources, re.MULTILINE))
    assert {"CASTS", "HASHES", "DIALECTS"} <= named
    assert named <= assigned


def test_sources_cite_what_is_there() -> None:
    sections = set(re.findall(r"^## (\d+) ", NUMERICS, re.MULTILINE))
    assert sections == {str(i) for i in range(1, 11)}
    for path in SOURCES:
        text = path.read_text()
        # "NUMERICS 3, and", "NUMERICS 2 and 5": the numbers directly after the word.
        for first, second in re.findall(r"NUMERICS (\d+)(?: and (\d+))?", text):
            assert {first, second} - {""} <= sections, path
        rules = set(re.findall(r"\[((?:OP|ACC|CHAIN|CHIP|EPI|SPEC|BF16|PLAN|XLA|CAST|SCALE|MX)-\d+)\]", text))
        assert rules <= IDS, path
        cited = re.findall(r"(?<!docs/)((?:reference|benchmarks)/[\w/-]+\.(?:md|json))", text)
        missing = {file for file in cited if not (ROOT / file).exists()}
        assert not missing, path


def test_the_search_finds_something() -> None:
    assert len(IDS) > 50 and {"ACC-2", "MX-5"} <= IDS
    assert cited_files("see `f8emu/spec/none.py`, [x](nowhere.md) and [y](https://a.b)") == {
        "f8emu/spec/none.py",
        "nowhere.md",
    }


def test_the_base_installation_has_the_command_line_and_no_framework() -> None:
    names = {re.split(r"[<>=!~ ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"numpy", "ml_dtypes", "typer", "rich"}


def test_every_extra_that_an_error_names_exists() -> None:
    """In `MissingExtraError(call, package, extra)`, `required_by(call, extra)` and `pip install 'f8emu[...]'`."""
    texts = [path.read_text() for room in ("f8emu", "reference") for path in (ROOT / room).rglob("*.py")]
    named = {
        extra for text in texts for extra in re.findall(r'(?:MissingExtraError|required_by)\([^()]*, "(\w+)"\)', text)
    }
    named |= {e for text in texts for extras in re.findall(r"f8emu\[([\w,]+)\]", text) for e in extras.split(",")}
    assert {"torch", "jax"} <= named <= set(PROJECT["optional-dependencies"])


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {f8emu.__version__}\n" in text
    assert f"\nlicense: {PROJECT['license']}\n" in text
    assert PROJECT["description"] in text

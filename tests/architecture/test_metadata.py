"""What an installer and a reader of the distribution see: dependencies, version, citation."""

import re
import tomllib
from pathlib import Path

import f8emu

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_base_installation_has_the_command_line_and_no_framework() -> None:
    names = {re.split(r"[<>=!~ ]", one)[0] for one in PROJECT["dependencies"]}
    assert names == {"numpy", "ml_dtypes", "typer", "rich"}


def test_every_extra_that_an_error_names_exists() -> None:
    """`MissingExtraError(call, package, extra)` and `pip install 'f8emu[...]'` in messages and documents."""
    texts = [path.read_text() for room in ("f8emu", "reference") for path in (ROOT / room).rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r'MissingExtraError\([^()]*, "(\w+)"\)', text)}
    named |= {e for text in texts for found in re.findall(r"f8emu\[([\w,]+)\]", text) for e in found.split(",")}
    assert {"torch", "jax"} <= named <= set(PROJECT["optional-dependencies"])


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {f8emu.__version__}\n" in text
    assert f"\nlicense: {PROJECT['license']}\n" in text
    assert PROJECT["description"] in text

"""The documents keep their word: code blocks run as they stand, links lead somewhere, public names have a place.

A page is one test. Its ```python blocks run in order, in one namespace. What a print shows stands below it in lines
that begin with `#> `; `F8EMU_UPDATE_DOCS=1 pytest tests/test_docs.py` writes these lines. Of ```console blocks the
lines `$ f8emu ...` run, and what stands below is their output; `...` is any text. A block with a title, of any
language, is written to a file of that name instead. All of it happens in a directory of its own.
"""

import ast
import builtins
import doctest
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from difflib import unified_diff
from importlib import import_module
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from f8emu.cli import build_app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?[^\n]*\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ f8emu (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
UPDATES = "F8EMU_UPDATE_DOCS" in os.environ
API = ROOT / "docs" / "generate" / "api.py"


class Block(NamedTuple):
    """What stands between fences."""

    line: int
    """Of the first line of the code, from 1."""
    margin: str
    language: str
    title: str | None
    code: str


def blocks(page: Path) -> list[Block]:
    """Those that run or are written to a file."""
    text = page.read_text()
    found = [
        Block(text[: fence.start(4)].count("\n") + 1, fence[1], fence[2], fence[3], dedent(fence[4]))
        for fence in FENCE.finditer(text)
    ]
    return [block for block in found if block.title or block.language in ("python", "console")]


PROGRESS = re.compile(r"^f8emu \w+: .*; \d+ s\n", re.MULTILINE)
"""A line of a command that runs for long: on a busy machine."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.filterwarnings("default")  # a warning does not stop a reader's program
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_code_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.code)
            if block.title.endswith(".py"):
                sys.modules.pop(Path(block.title).stem, None)
        elif block.language == "python":
            run_python(block, page, vars(module), monkeypatch)
        else:
            run_commands(block, page)


def run_python(block: Block, page: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the block; its lines `#> ` must be what it printed."""
    printed: dict[int, list[str]] = {}
    """Line of a call of print -> what it showed."""

    def keep(*values: object, sep: str = " ", **options: Any) -> None:
        caller = sys._getframe(1)
        if caller.f_code.co_filename == str(page) and not options:
            printed.setdefault(caller.f_lineno, []).extend(sep.join(map(str, values)).split("\n"))

    padded = "\n" * (block.line - 1) + block.code  # lines are those of the page: in tracebacks, and for inspect
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "print", keep)
        exec(compile(padded, str(page), "exec"), names)
    ends = {line: block_line - block.line for line, block_line in last_lines(ast.parse(padded), printed)}
    below = {ends[line]: lines for line, lines in printed.items()}
    wanted: list[str] = []
    margin = ""
    for number, line in enumerate(block.code.splitlines()):
        if not line.lstrip().startswith("#>"):
            wanted.append(line)
            margin = line[: len(line) - len(line.lstrip())]
        wanted += [f"{margin}#> {shown}".rstrip() for shown in below.get(number, [])]
    given = block.code.splitlines()
    if UPDATES and wanted != given:
        text = page.read_text()
        old, new = (indent("\n".join(lines) + "\n", block.margin) for lines in (given, wanted))
        page.write_text(text.replace(old, new, 1))
    elif wanted != given:
        place = f"{name_of(page)}:{block.line}"
        pytest.fail("\n".join(unified_diff(given, wanted, place, "what it prints", lineterm="")), pytrace=False)


def last_lines(tree: ast.AST, lines: dict[int, Any]) -> Iterator[tuple[int, int]]:
    """Each line with the last line of the innermost statement that it is in."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for line in lines:
        around = [node for node in statements if node.lineno <= line <= (node.end_lineno or 0)]
        yield line, max(around, key=lambda node: node.lineno).end_lineno or 0


def run_commands(block: Block, page: Path) -> None:
    """Run what is ours; without output below, only that it ran counts."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for arguments, shown in COMMAND.findall(block.code):
        result = CliRunner().invoke(build_app(), shlex.split(arguments, comments=True))
        output = PROGRESS.sub("", result.output)
        place = f"{name_of(page)}:{block.line}: f8emu {arguments}\n"
        checker = doctest.OutputChecker()
        if not shown:
            assert result.exit_code in (0, 1), place + output
        elif not checker.check_output(shown, output, flags):
            example = doctest.Example(arguments, shown)
            pytest.fail(place + checker.output_difference(example, output, flags), pytrace=False)


def test_links_of_the_readme() -> None:
    """`make docs` checks those of the site."""
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text()):
        path, _, _ = target.partition("#")
        assert target.startswith(("http", "#")) or (ROOT / path).exists(), target


def test_every_public_name_has_a_place() -> None:
    """What Python imports against what griffe read: see api.py. `dir` shows these names, and public rooms, alone."""
    pytest.importorskip("griffe")
    api = runpy.run_path(str(API), run_name="api")
    pages: dict[str, str] = api["pages"]()
    modules: dict[str, ModuleType] = {}
    for room in (room for rooms in api["PAGES"].values() for room in rooms):
        with suppress(ImportError):  # of torchtitan
            modules[room] = import_module(room)
    for page, rooms in api["PAGES"].items():
        anchors = set(re.findall(r"(?:^::: |\]\(\)\{#)([\w.]+)", pages[f"reference/api/{page}.md"], re.MULTILINE))
        for room in modules.keys() & {*rooms}:
            module = modules[room]
            names = {f"{room}.{name}" for name, value in vars(module).items() if is_public(module, name, value)}
            exported, shown = ({f"{room}.{name}" for name in names} for names in (module.__all__, dir(module)))
            assert names <= exported <= anchors, room
            assert shown - exported == {other for other in modules if other.rpartition(".")[0] == room}, room
            assert all(hasattr(module, name) for name in dir(module)), room


def is_public(room: ModuleType, name: str, value: object) -> bool:
    """A package has what its `__init__.py` imports of ours; a plain module what it defines."""
    home = getattr(value, "__module__", None) or (room.__name__ if hasattr(room, "__path__") else "")
    ours = home.startswith(("f8emu", "f8ref")) if hasattr(room, "__path__") else home == room.__name__
    return ours and not (name.startswith("_") or isinstance(value, ModuleType))

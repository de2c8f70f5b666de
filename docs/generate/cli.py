"""Writes the reference of the command line from the commands themselves, with typer's own generator."""

import re
from collections.abc import Iterator

import typer
from typer.cli import get_docs_for_click

from f8emu.cli import build_app

_EXAMPLES = re.compile(r"^f8emu [^\n]*(\n\nf8emu [^\n]*)*$", re.MULTILINE)
"""Lines that can be pasted, each a paragraph of a command's epilog."""
_HEAD = """# Command line

`f8emu COMMAND`, or `python -m f8emu COMMAND`.

| command | what it does |
|---|---|"""


def page() -> str:
    """The page in markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    group = typer.main.get_group(build_app())
    yield _HEAD
    for name, command in group.commands.items():
        yield f"| [`{name}`](#f8emu-{name}) | {(command.help or '').partition(chr(10))[0]} |"
    yield from ("", group.epilog or "", "")
    context = typer.Context(group)
    for command in group.commands.values():
        text = get_docs_for_click(obj=command, ctx=context, indent=1, call_prefix="f8emu")
        yield _EXAMPLES.sub(_pasted, text)


def _pasted(examples: re.Match[str]) -> str:
    lines = "\n".join(examples[0].split("\n\n"))
    return f"```text\n{lines}\n```"


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    with mkdocs_gen_files.open("reference/cli.md", "w") as file:
        file.write(page())

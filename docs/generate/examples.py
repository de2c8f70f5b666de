"""Writes examples.md: the programs and notebooks of `examples/`, a table of them and what is in each."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"


def page() -> str:
    """The page. An anchor is the name of the file without its ending."""
    table, programs = ["| program | what it shows |", "|---|---|"], []
    for path in sorted(FOLDER.glob("*.py")):
        code, name = path.read_text(), path.stem
        described = ast.get_docstring(ast.parse(code)) or ""
        table.append(f"| [`{name}`](#{name}) | {described.partition(chr(10))[0]} |")
        programs.append(f'## {name} {{#{name}}}\n\n```python title="examples/{path.name}"\n{code}```')
    for path in sorted(FOLDER.glob("*.ipynb")):
        title, *blocks = notebook(path)
        table.append(f"| [`{path.name}`](#{path.stem}) | {title} |")
        programs += [f"## Notebook {path.stem} {{#{path.stem}}}", f"The notebook `examples/{path.name}`.", *blocks]
    head = ["# Examples", "Complete programs and notebooks. The tests run them."]
    return "\n\n".join([*head, "\n".join(table), *programs]) + "\n"


def notebook(path: Path) -> Iterator[str]:
    """The title, then each cell as a block of the page."""
    for i, cell in enumerate(json.loads(path.read_text())["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            yield f"```python\n{text}\n```"
        elif i == 0:
            title, _, rest = text.partition("\n\n")
            yield title.removeprefix("# ")
            yield rest
        else:
            yield text


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    with mkdocs_gen_files.open("examples.md", "w") as file:
        file.write(page())

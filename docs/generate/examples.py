"""Writes examples.md: the programs of `examples/`, a table of them and the code of each."""

import ast
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
    return "\n\n".join(["# Examples", "Complete programs. The tests run them.", "\n".join(table), *programs]) + "\n"


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    with mkdocs_gen_files.open("examples.md", "w") as file:
        file.write(page())

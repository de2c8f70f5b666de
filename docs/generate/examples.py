"""Writes examples.md: the programs of `examples/`, each with its docstring and its code."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"


def page() -> str:
    """The page. An anchor is the name of the file without its ending."""
    parts = ["# Examples\n\nComplete programs. The tests run each of them.\n"]
    for path in sorted(FOLDER.glob("*.py")):
        code = path.read_text()
        described = ast.get_docstring(ast.parse(code)) or ""
        title = described.partition("\n")[0].rstrip(".")
        parts.append(f'## {title} {{#{path.stem}}}\n\n```python title="examples/{path.name}"\n{code}```\n')
    return "\n".join(parts)


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    with mkdocs_gen_files.open("examples.md", "w") as file:
        file.write(page())

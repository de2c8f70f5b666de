"""No circle of imports between the modules of f8emu and f8ref: imports inside functions count, those of types do not.

An import of a package's own `__init__` is no edge: it re-exports what lies below.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(*roots: Path) -> dict[str, Path]:
    """Name -> file of every module but the packages' `__init__`."""
    found: dict[str, Path] = {}
    for root in roots:
        for path in root.rglob("*.py"):
            if path.name != "__init__.py":
                found[".".join(path.relative_to(root.parent).with_suffix("").parts)] = path
    return found


def imported(node: ast.AST) -> Iterator[str]:
    """The names that a module imports, anywhere in it, unless only for type checking."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imported(child)


def graph_of(found: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules that it imports."""
    return {name: set(imported(ast.parse(path.read_text()))) & found.keys() - {name} for name, path in found.items()}


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """One circle after another, each without its first edge in the search for the next."""
    rest, found = {name: set(edges) for name, edges in graph.items()}, set[frozenset[str]]()
    while True:
        try:
            TopologicalSorter(rest).prepare()
            return found
        except CycleError as error:
            circle: list[str] = error.args[1]
            found.add(frozenset(circle))
            for first, second in pairwise(circle):
                rest[second].discard(first)  # the sorter lists what must come before: edges run backwards
                rest[first].discard(second)


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = circles(graph_of(modules(ROOT / "f8emu", ROOT / "reference" / "f8ref")))
    assert not found, "\n".join(", ".join(sorted(circle)) for circle in found)


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    """Inside functions too; not where types are checked, and not through `__init__`."""
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    for file, text in {
        "__init__.py": "from package import a",
        "a.py": "import package\nfrom package.room import b",
        "room/__init__.py": "",
        "room/b.py": "def call():\n    from package.room.c import one",
        "room/c.py": "from package import a",
        "typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import user",
        "user.py": "from package.typed import x",
    }.items():
        (package / file).write_text(text)
    graph = graph_of(modules(package))
    assert circles(graph) == {frozenset(("package.a", "package.room.b", "package.room.c"))}
    assert graph["package.user"] == {"package.typed"} and graph["package.typed"] == set()

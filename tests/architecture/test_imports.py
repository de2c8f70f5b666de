"""What importing each package loads, seen in `sys.modules` of a fresh interpreter; no module imports itself.

Imports inside functions count, those of types do not. An import of a package's own `__init__` is no edge: it re-exports
what lies below.
"""

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Imports a package and all its modules (of `f8emu` its __init__ alone), then prints what is loaded.
PROBE = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
sys.path[:0] = sys.argv[2:]
package = importlib.import_module(sys.argv[1])
paths = [] if sys.argv[1] == "f8emu" else getattr(package, "__path__", [])
for module in pkgutil.walk_packages(paths, package.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if error.name not in ("triton", "transformers", "torchtitan", "flax", "equinox", "qwix"):  # optional
            raise
print(json.dumps(sorted(set(sys.modules) - before)))
"""

FRAMEWORKS = {"torch", "jax", "jaxlib"}
ARRAYS = FRAMEWORKS | {"numpy", "ml_dtypes"}

# Package -> what must not be loaded by it or by any of its modules.
NEVER = {
    "f8emu": ARRAYS | {"f8ref"},
    "f8emu.spec": ARRAYS | {"f8ref"},
    "f8ref.exact": ARRAYS | {"f8ref.numpy", "f8ref.jax"},
    "f8ref.numpy": FRAMEWORKS | {"f8ref.exact", "f8ref.jax"},
    "f8ref.jax": {"torch", "f8ref.exact", "f8ref.numpy"},
    "f8emu.environment": ARRAYS | {"f8ref"},
    "f8emu.interop": ARRAYS | {"f8ref"},
    "f8emu.dialects": FRAMEWORKS | {"f8ref"},
    "f8emu.torch": {"jax", "jaxlib", "f8ref"},
    "f8emu.jax": {"torch", "f8emu.torch", "f8emu.interop", "f8ref.exact", "f8ref.numpy"},
    "f8emu.numpy": FRAMEWORKS | {"f8emu.interop", "f8ref.exact", "f8ref.jax"},
    "f8emu.conformance": FRAMEWORKS,
    "f8emu.doctor": FRAMEWORKS,
    "f8emu.audit": FRAMEWORKS,
    "f8emu.rollout": FRAMEWORKS,
    "f8emu.testing": FRAMEWORKS,
    "f8emu.cli": FRAMEWORKS,
}
# Packages whose modules need nothing but the standard library.
STANDARD_LIBRARY_ONLY = ("f8emu", "f8emu.spec", "f8emu.environment", "f8ref.exact")
# Packages that cannot be imported without an extra.
NEEDS = {"f8ref.jax": "jax", "f8emu.jax": "jax", "f8emu.torch": "torch"}


def loaded_by(package: str, *roots: Path) -> list[str]:
    """The modules that a fresh interpreter loads for `package`, looked for in `roots` first."""
    command = [sys.executable, "-I", "-c", PROBE, package, *map(str, roots)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def violations(loaded: list[str], never: Set[str]) -> set[str]:
    """Those of `never` that were loaded, themselves or a module below them."""
    return {name for name in never if any(module == name or module.startswith(f"{name}.") for module in loaded)}


def outside_the_standard_library(loaded: list[str]) -> set[str]:
    return {module.split(".")[0] for module in loaded} - sys.stdlib_module_names - {"f8emu", "f8ref"}


@pytest.mark.parametrize("package", NEVER)
def test_package_loads_only_what_it_may(package: str) -> None:
    if package in NEEDS and importlib.util.find_spec(NEEDS[package]) is None:
        pytest.skip(f"{NEEDS[package]} is not installed")
    loaded = loaded_by(package, ROOT, ROOT / "reference")
    assert package in loaded
    assert violations(loaded, NEVER[package]) == set()
    if package in STANDARD_LIBRARY_ONLY:
        assert outside_the_standard_library(loaded) == set()


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("numpy", "f8emu/__init__.py"),
        ("torch", "f8emu/spec/__init__.py"),
        ("jax.numpy", "f8emu/spec/deep/deeper.py"),
    ],
)
def test_the_check_can_fail(tmp_path: Path, module: str, place: str) -> None:
    """A planted import is seen, in the package itself, in what it imports and in what only a walk finds."""
    for file in ("f8emu/__init__.py", "f8emu/spec/__init__.py", "f8emu/spec/deep/__init__.py", place):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "f8emu/__init__.py").write_text("import f8emu.spec\n")
    for stand_in in ("numpy.py", "torch.py", "jax/__init__.py", "jax/numpy.py"):
        (tmp_path / stand_in).parent.mkdir(exist_ok=True)
        (tmp_path / stand_in).touch()
    assert violations(loaded_by("f8emu.spec", tmp_path), NEVER["f8emu.spec"]) == set()

    with (tmp_path / place).open("a") as file:
        file.write(f"import {module}\n")
    loaded = loaded_by("f8emu.spec", tmp_path)
    assert violations(loaded, NEVER["f8emu.spec"]) == {module.split(".")[0]}
    assert outside_the_standard_library(loaded) == {module.split(".")[0]}


def test_violations_match_whole_names() -> None:
    assert violations(["jaxtyping", "f8ref", "f8ref.numpy"], {"jax", "f8ref.jax"}) == set()
    assert violations(["f8ref.jax.scale", "jax"], {"jax", "f8ref.jax", "torch"}) == {"jax", "f8ref.jax"}


# Circles


def modules(*roots: Path) -> dict[str, Path]:
    """Name -> file of every module but the packages' `__init__`."""
    files: dict[str, Path] = {}
    for root in roots:
        for path in root.rglob("*.py"):
            if path.name != "__init__.py":
                files[".".join(path.relative_to(root.parent).with_suffix("").parts)] = path
    return files


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


def graph_of(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules that it imports."""
    return {name: set(imported(ast.parse(path.read_text()))) & files.keys() - {name} for name, path in files.items()}


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """One circle after another, each without its first edge in the search for the next."""
    rest, circles_of_modules = {name: set(edges) for name, edges in graph.items()}, set[frozenset[str]]()
    while True:
        try:
            TopologicalSorter(rest).prepare()
            return circles_of_modules
        except CycleError as error:
            circle: list[str] = error.args[1]
            circles_of_modules.add(frozenset(circle))
            for first, second in pairwise(circle):
                rest[second].discard(first)  # the sorter lists what must come before: edges run backwards
                rest[first].discard(second)


def test_no_module_imports_itself_by_way_of_others() -> None:
    circular = circles(graph_of(modules(ROOT / "f8emu", ROOT / "reference" / "f8ref")))
    assert not circular, "\n".join(", ".join(sorted(circle)) for circle in circular)


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

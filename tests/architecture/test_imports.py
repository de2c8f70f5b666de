"""What importing each package loads, seen in `sys.modules` of a fresh interpreter."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Set
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
    except ModuleNotFoundError as error:
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
    "f8emu.torch": {"jax", "jaxlib", "f8ref"},
    "f8emu.jax": {"torch", "f8emu.torch", "f8emu.interop", "f8ref.exact", "f8ref.numpy"},
    "f8emu.numpy": FRAMEWORKS | {"f8emu.interop", "f8ref.exact", "f8ref.jax"},
    "f8emu.conformance": FRAMEWORKS,
    "f8emu.doctor": FRAMEWORKS,
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


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("place", ["f8emu/__init__.py", "f8emu/spec/__init__.py", "f8emu/spec/deep/deeper.py"])
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

"""The import contracts and the import rules of ruff, each shown to break on a planted violation."""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

# Contract -> (file, line that breaks it).
PLANTS: dict[str, list[tuple[str, str]]] = {
    "floors": [
        ("f8emu/spec/formats.py", "import f8emu.interop"),
        ("f8emu/interop/arrays.py", "import f8emu.torch"),
        ("f8emu/torch/cast.py", "import f8emu.conformance"),
        ("f8emu/jax/cast.py", "import f8emu.torch"),
        ("f8emu/numpy/cast.py", "import f8emu.jax"),
        ("f8emu/doctor/diagnosis.py", "import f8emu.conformance.run.verify"),
        ("f8emu/homeless.py", ""),
    ],
    "captures-are-written": [("f8emu/capture/writer.py", "import numpy")],
    "captures-are-read": [("f8emu/torch/capture.py", "from f8emu.capture import read")],
    "root": [
        ("f8emu/__init__.py", "import torch"),
        ("f8emu/spec/errors.py", "import numpy"),
        ("reference/f8ref/__init__.py", "import jax.numpy"),
    ],
    "spec": [
        ("f8emu/spec/formats.py", "def later():\n    import ml_dtypes"),
        ("f8emu/spec/trace.py", "import f8ref"),
    ],
    "native": [
        ("f8emu/native/library.py", "import numpy"),
        ("f8emu/native/library.py", "def later():\n    import f8ref.numpy"),
    ],
    "the-engine-is-known-once": [
        ("f8emu/jax/gemm/engine.py", "from f8emu.native import library"),
        ("f8emu/numpy/scaled_mm.py", "from f8emu.native import gemm"),
    ],
    "reference-knows-only-the-spec": [("reference/f8ref/numpy/cast.py", "from f8emu import interop")],
    "reference-told-three-times": [
        ("reference/f8ref/numpy/cast.py", "from f8ref import exact"),
        ("reference/f8ref/jax/gemm.py", "from f8ref.numpy.cast import cast"),
        ("reference/f8ref/exact/number.py", "import f8ref.jax"),
    ],
    "exact": [("reference/f8ref/exact/number.py", "import numpy as np")],
    "numpy": [("reference/f8ref/numpy/codec.py", "import torch")],
    "jax": [("reference/f8ref/jax/codec.py", "import torch")],
    "torch": [
        ("f8emu/torch/cast.py", "import jax.numpy as jnp"),
        ("f8emu/torch/scale.py", "from f8emu import interop"),
        ("f8emu/torch/gemm/emulation.py", "import jax"),
        ("f8emu/torch/gemm/scaled_mm.py", "import f8ref.jax"),
    ],
    "jax-path": [
        ("f8emu/jax/cast.py", "import torch"),
        ("f8emu/jax/scale.py", "import f8ref.jax"),
        ("f8emu/jax/gemm/emulation.py", "import f8ref.numpy"),
        ("f8emu/jax/gemm/hardware.py", "from f8emu import interop"),
    ],
    "numpy-path": [
        ("f8emu/numpy/cast.py", "import jax.numpy as jnp"),
        ("f8emu/numpy/cast.py", "from f8ref.jax import amax"),
        ("f8emu/numpy/dtypes.py", "from f8emu import interop"),
    ],
    "interop": [("f8emu/interop/arrays.py", "import f8ref.jax")],
    "reference-is-for-the-suite": [
        ("f8emu/torch/gemm/scaled_mm.py", "import f8ref.numpy"),
        ("f8emu/cli/verify.py", "from f8ref.jax import cast"),
    ],
    "cli": [("f8emu/cli/verify.py", "import torch")],
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and their configuration, to plant violations in."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for package in ("f8emu", "reference"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@contextmanager
def planted(folder: Path, file: str, line: str) -> Iterator[None]:
    """With the line at the end of the file."""
    path = folder / file
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        yield
    finally:
        path.unlink() if before is None else path.write_text(before)


def lint_imports(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """import-linter over the copy, which must not find the installed packages."""
    pytest.importorskip("importlinter")
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from importlinter.cli import lint_imports;"
        "sys.exit(lint_imports(limit_to_contracts=tuple(sys.argv[3:]), cache_dir=None, no_cache=True))"
    )
    command = [sys.executable, "-c", code, str(folder), str(folder / "reference"), *contracts]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_every_contract_has_a_planted_violation() -> None:
    assert [contract["id"] for contract in CONTRACTS] == list(PLANTS)


def test_every_contract_is_kept(copy: Path) -> None:
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("contract", "file", "line"),
    [(contract, file, line) for contract, plants in PLANTS.items() for file, line in plants],
)
def test_planted_violation_breaks_its_contract(copy: Path, contract: str, file: str, line: str) -> None:
    with planted(copy, file, line):
        result = lint_imports(copy, contract)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "0 kept, 1 broken" in result.stdout


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        ("f8emu/conformance/compare.py", "import torch", "TID253"),
        ("f8emu/conformance/run/subject.py", "import f8ref.jax", "TID253"),
        ("f8emu/interop/arrays.py", "from jax import numpy", "TID253"),
        ("f8emu/cli/verify.py", "from f8emu.torch import cast", "TID253"),
        ("f8emu/conformance/layers/trained.py", "import f8emu.jax", "TID253"),
        ("reference/f8ref/numpy/cast.py", "import jax", "TID253"),
        ("f8emu/torch/cast.py", "from . import scale", "TID252"),
    ],
)
def test_planted_import_breaks_the_rule(copy: Path, file: str, line: str, rule: str) -> None:
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID", "--output-format=concise", file]
    clean = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    with planted(copy, file, line):
        found = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert f" {rule} " in found.stdout

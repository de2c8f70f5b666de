"""The import contracts and the import rules of ruff, each shown to break on a planted violation."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
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
        ("f8emu/doctor.py", "import f8emu.conformance.run.verify"),
        ("f8emu/report/page.py", "import f8emu.audit"),
        ("f8emu/report/verify.py", "from f8emu.testing import bits"),
        ("f8emu/homeless.py", ""),
    ],
    "torch-floors": [
        ("f8emu/torch/weights/codes.py", "from f8emu.torch.layer import matmul"),
        ("f8emu/torch/layer/casts.py", "import f8emu.torch.conversion.filters"),
        ("f8emu/torch/homeless.py", ""),
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
        ("f8emu/spec/gemm.py", "import f8ref"),
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
    "dialects": [("f8emu/dialects/arithmetic.py", "import torch")],
    "dialects-are-data": [("f8emu/dialects/stacks.py", "import numpy")],
    "reference-is-for-the-suite": [
        ("f8emu/torch/gemm/scaled_mm.py", "import f8ref.numpy"),
        ("f8emu/cli/verify.py", "from f8ref.jax import cast"),
    ],
    "assertions": [
        ("f8emu/testing/bits.py", "import torch"),
        ("f8emu/testing/tolerance.py", "from f8ref.numpy import scaled_mm"),
    ],
    "cli": [("f8emu/cli/verify.py", "import torch")],
}


# (file, line that breaks it, rule of ruff).
BANNED = [
    ("f8emu/conformance/compare.py", "import torch", "TID253"),
    ("f8emu/conformance/run/subject.py", "import f8ref.jax", "TID253"),
    ("f8emu/interop/arrays.py", "from jax import numpy", "TID253"),
    ("f8emu/cli/verify.py", "from f8emu.torch import cast", "TID253"),
    ("f8emu/conformance/layers/trained.py", "import f8emu.jax", "TID253"),
    ("reference/f8ref/numpy/cast.py", "import jax", "TID253"),
    ("f8emu/torch/cast.py", "from . import scale", "TID252"),
]

# Plants each line at the end of its file, alone, and tells how import-linter ends; first of all without any.
PROBE = """
import contextlib, io, json, pathlib, sys
sys.path[:0] = [".", "reference"]  # not the installed packages
from importlinter.cli import lint_imports
found = []
for contracts, file, line in [((), None, ""), *json.load(sys.stdin)]:
    path = pathlib.Path(file or "pyproject.toml")
    before = path.read_text() if path.exists() else None
    if file:
        path.write_text((before or "") + chr(10) + line + chr(10))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = lint_imports(limit_to_contracts=tuple(contracts), cache_dir=None, no_cache=True)
    path.unlink() if before is None else path.write_text(before)
    found.append((status, said.getvalue()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and their configuration, to plant violations in."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for package in ("f8emu", "reference"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_every_contract_is_kept_and_breaks_on_its_violations(copy: Path) -> None:
    pytest.importorskip("importlinter")
    assert [contract["id"] for contract in CONTRACTS] == list(PLANTS)
    plants = [((contract,), *plant) for contract, of in PLANTS.items() for plant in of]
    planted = json.dumps(plants)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=copy, input=planted, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (status, printed), *results = json.loads(done.stdout)
    assert status == 0 and f"{len(CONTRACTS)} kept, 0 broken" in printed, printed
    for plant, (status, printed) in zip(plants, results, strict=True):
        assert status == 1 and "0 kept, 1 broken" in printed, f"{plant}: {printed}"


def test_planted_imports_break_the_rules_of_ruff(copy: Path) -> None:
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID", "--output-format=concise"]
    command += [file for file, _, _ in BANNED]
    clean = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    for file, line, _ in BANNED:
        with (copy / file).open("a") as end:
            end.write(f"\n{line}\n")
    process = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
    broken = {
        (complaint.split(":")[0], rule)
        for complaint in process.stdout.splitlines()
        for rule in complaint.split()
        if "TID" in rule
    }
    assert process.returncode == 1 and broken == {(file, rule) for file, _, rule in BANNED}


def test_the_map_draws_the_floors_of_the_contracts() -> None:
    """Every room stands in the drawing, in the order of its contract."""
    page = (ROOT / "docs/contributing/architecture.md").read_text()
    drawings = [block.split("```")[0] for block in page.split("```text\n")[1:3]]
    for drawing, contract in zip(drawings, ("floors", "torch-floors"), strict=True):
        layers = next(
            contract_of_floors["layers"] for contract_of_floors in CONTRACTS if contract_of_floors["id"] == contract
        )
        rooms = [room for layer in layers for room in layer.split(" | ") if room != "__main__"]
        drawn = [word for line in drawing.splitlines() for word in re.split(" {3,}", line) if word in rooms]
        assert sorted(drawn) == sorted(rooms)
        floor = {room: i for i, layer in enumerate(layers) for room in layer.split(" | ")}
        assert [floor[room] for room in drawn] == sorted(floor[room] for room in drawn)

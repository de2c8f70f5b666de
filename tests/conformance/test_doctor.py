"""`f8emu doctor`: it survives what is missing, and tells what is broken and what to do next."""

import json
import re
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from f8emu import doctor, environment
from f8emu.doctor import next_steps
from f8emu.report.doctor import heading
from tests.conformance.command import invoke, raising


@pytest.fixture(scope="module")
def diagnosis() -> doctor.Diagnosis:
    return doctor.diagnose()


def told(*options: str) -> tuple[int, str]:
    """Exit status and text of the command."""
    return invoke("doctor", *options)[:2]


def test_engine_and_devices(diagnosis: doctor.Diagnosis) -> None:
    assert {"torch cpu", "jax cpu"} <= {f"{one.library} {one.kind}" for one in diagnosis.devices}
    assert not diagnosis.problems
    assert diagnosis.engines["cpu"].startswith("emulated by f8emu.native on cpu; vectors: ")
    # PyPI's wheel is called 2.11.0 and says 2.11.0+cu130 of itself; the wheel for CPUs says 2.13.0+cpu twice.
    installed = diagnosis.versions["torch"]
    assert installed == version("torch")
    assert str(torch.__version__) in (installed, f"{installed}+{torch.__version__.partition('+')[2]}")
    for device in diagnosis.devices:
        if device.has_float8:
            assert diagnosis.engines["cuda"].startswith("hardware")


def test_the_tested_versions_are_those_of_the_project(diagnosis: doctor.Diagnosis) -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = [(root / "constraints" / name).read_text() for name in ("cpu.txt", "newest.txt")]
    for package, releases in environment.TESTED.items():
        assert extras[package][0] == f"{package}>={releases[0]}", "the oldest"
        pinned = [re.search(rf"^{package}==(\d+\.\d+)", text, re.MULTILINE) for text in pins]
        assert all(pin and pin[1] in releases for pin in pinned)
    newest = max(environment.TESTED["torch"], key=lambda release: [int(part) for part in release.split(".")])
    assert newest == environment.TESTED["torch"][-1] and f"\ntorch=={newest}." in pins[1]
    page = (root / "docs" / "start" / "install.md").read_text()
    assert f"| torch | {', '.join(environment.TESTED['torch'])} |" in page
    assert all(re.search(rf"\| JAX \|.* {re.escape(release)}\.", page) for release in environment.TESTED["jax"])
    assert f"tested with {environment.tested()}" in list(heading(diagnosis))


@pytest.mark.parametrize(("absent", "present"), [("torch", "jax"), ("jax", "torch")])
def test_a_library_that_cannot_be_imported_is_reported(
    absent: str, present: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)  # as an import of what is not installed
    status, text = told()
    assert status == 1 and f"pip install 'f8emu[{absent}]'" in text and f"{present} cpu: " in text


def test_a_library_that_breaks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_torch_devices", raising(RuntimeError("driver too old\nmore")))
    status, text = told()
    assert status == 1 and "torch: RuntimeError: driver too old\n" in text


def test_json_and_text(diagnosis: doctor.Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
    status, text = told("--json", "-")
    assert status == 0
    assert {"schema", "system", "versions", "devices", "engines", "problems"} == set(json.loads(text))
    assert "scaled_mm of torch tensors on cpu: emulated" in told()[1]


@pytest.mark.parametrize(
    ("missing", "engines", "lines"),
    [
        (("torch", "jax"), {}, ["f8emu.numpy works without more", "pip install 'f8emu[torch,jax]'"]),
        (("torch",), {}, ["GEMMs are emulated here", "pip install 'f8emu[torch]'"]),
        (("jax",), {"cpu": "none"}, ["no JAX, with which torch would emulate GEMMs", "pip install 'f8emu[jax]'"]),
        ((), {"cpu": "emulated by f8ref.jax on cpu"}, ["GEMMs are emulated here"]),
        ((), {"cpu": "emulated", "cuda": "hardware, torch._scaled_mm"}, ["convert_to_float8_training(model)"]),
    ],
)
def test_it_ends_with_what_to_do_next(
    missing: tuple[str, ...], engines: dict[str, str], lines: list[str], diagnosis: doctor.Diagnosis
) -> None:
    versions = diagnosis.versions | dict.fromkeys(missing, "not installed")
    found = list(next_steps(replace(diagnosis, versions=versions, engines=engines)))
    assert len(found) == len(lines)
    assert all(part in line for part, line in zip(lines, found, strict=True))

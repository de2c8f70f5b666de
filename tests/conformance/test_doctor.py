"""`f8emu doctor`: it measures, it survives what is missing, and it tells a fault from a trap that f8emu avoids."""

import io
import json
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from f8emu import doctor
from f8emu.doctor import diagnosis as measured
from f8emu.doctor.diagnosis import next_steps
from f8emu.doctor.probes import Probe, probe_torch


@pytest.fixture(scope="module")
def diagnosis() -> doctor.Diagnosis:
    return measured.diagnose()


def _probe(probes: list[Probe], start: str) -> Probe:
    found = [probe for probe in probes if probe.name.startswith(start)]
    assert len(found) == 1, start
    return found[0]


def test_both_libraries_are_probed_and_nothing_is_wrong_here(diagnosis: doctor.Diagnosis) -> None:
    assert {"torch cpu", "jax cpu"} <= {probe.subject for probe in diagnosis.probes}
    assert diagnosis.problems == []
    assert diagnosis.faults == []
    assert all(probe.name and probe.observed and probe.expected and probe.f8emu for probe in diagnosis.probes)
    assert len({(probe.subject, probe.name) for probe in diagnosis.probes}) == len(diagnosis.probes)


def test_agreement_is_what_the_columns_say(diagnosis: doctor.Diagnosis) -> None:
    for probe in diagnosis.probes:
        if probe.expected == "0 wrong":
            assert probe.agrees == probe.observed.startswith("0 of "), probe
        else:
            assert probe.agrees == (probe.observed == probe.expected), probe


def test_engine_and_devices(diagnosis: doctor.Diagnosis) -> None:
    assert diagnosis.engines["cpu"].startswith("emulated by f8emu.native on cpu; vectors: ")
    # PyPI's wheel is called 2.11.0 and says 2.11.0+cu130 of itself; the wheel for CPUs says 2.13.0+cpu twice.
    installed = diagnosis.versions["torch"]
    assert installed == version("torch")
    assert str(torch.__version__) in (installed, f"{installed}+{torch.__version__.partition('+')[2]}")
    for device in diagnosis.devices:
        if device.has_float8:
            assert diagnosis.engines["cuda"].startswith("hardware")


def test_a_probe_measures_and_a_fault_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _probe(probe_torch("cpu"), "subnormal")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        flushed = probe_torch("cpu")
    finally:
        torch.set_flush_denormal(False)
    after = _probe(flushed, "subnormal")
    assert before.agrees and not after.agrees
    monkeypatch.setattr(measured, "probe_torch", lambda device: flushed)
    monkeypatch.setattr(measured, "probe_jax", lambda platform: [])
    out = io.StringIO()
    assert doctor.run(stream=out) == 1
    assert "FAULT torch cpu: subnormal" in out.getvalue()


@pytest.mark.parametrize(("absent", "present"), [("torch", "jax"), ("jax", "torch")])
def test_a_missing_library_is_reported(absent: str, present: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, f"probe_{present}", lambda device: [])
    monkeypatch.setitem(sys.modules, absent, None)  # as an import of what is not installed
    out = io.StringIO()
    assert doctor.run(stream=out) == 0
    assert f"pip install 'f8emu[{absent}]'" in out.getvalue()
    assert f"{present} cpu: " in out.getvalue()


def test_a_probe_that_breaks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> list[Probe]:
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(measured, "probe_torch", broken)
    monkeypatch.setattr(measured, "probe_jax", lambda platform: [])
    found = measured.diagnose()
    assert "torch cpu: RuntimeError: driver too old" in found.problems


@pytest.fixture
def quick(diagnosis: doctor.Diagnosis, monkeypatch: pytest.MonkeyPatch) -> doctor.Diagnosis:
    """The module's diagnosis, not made again."""
    monkeypatch.setattr(measured, "diagnose", lambda: diagnosis)
    return diagnosis


def test_json(quick: doctor.Diagnosis) -> None:
    out = io.StringIO()
    assert doctor.run(as_json=True, stream=out) == 0
    data = json.loads(out.getvalue())
    assert {"system", "versions", "devices", "engines", "probes", "problems", "seconds"} == set(data)
    assert len(data["probes"]) == len(quick.probes)
    assert {"subject", "name", "observed", "expected", "agrees", "f8emu", "relied_on"} == set(data["probes"][0])


def test_text_names_every_probe(quick: doctor.Diagnosis) -> None:
    out = io.StringIO()
    doctor.run(stream=out)
    text = out.getvalue()
    for probe in quick.probes:
        assert probe.name in text
        assert probe.agrees or probe.f8emu in text
    assert "scaled_mm of torch tensors on cpu: emulated" in text


@pytest.mark.parametrize(
    ("missing", "engines", "lines"),
    [
        (("torch", "jax"), {}, ["f8emu.numpy works without more", "pip install 'f8emu[torch,jax]'"]),
        (("torch",), {}, ["GEMMs are emulated here", "pip install 'f8emu[torch]'"]),
        (("jax",), {"cpu": "none"}, ["torch emulates GEMMs with JAX, which is missing", "pip install 'f8emu[jax]'"]),
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


def test_a_fault_comes_first(diagnosis: doctor.Diagnosis) -> None:
    probes = [replace(diagnosis.probes[0], agrees=False, relied_on=True)]
    assert next(next_steps(replace(diagnosis, probes=probes))).startswith("A FAULT above changes bits")

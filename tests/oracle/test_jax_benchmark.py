"""benchmarks.emulator: runs, and records what its figures belong to."""

import json
from pathlib import Path

import pytest

from benchmarks import emulator


def test_a_small_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "emulator.json"
    assert emulator.main(["--sizes", "64", "--rounds", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["command"].endswith(f"-m benchmarks.emulator --sizes 64 --rounds 1 --json {out}")
    assert report["device"] and report["versions"]["jax"] and report["cores"]
    runs = [(figure["subject"], figure["use_fast_accum"]) for figure in report["figures"]]
    assert runs == [("f8ref.jax", True), ("f8emu.torch", True), ("f8ref.jax", False), ("f8emu.torch", False)]
    for figure in report["figures"]:
        assert figure["ratio"] == pytest.approx(figure["seconds"] / figure["baseline_seconds"])
        assert figure["giga_multiply_adds_per_second"] == pytest.approx(64**3 / figure["seconds"] / 1e9)
        assert figure["decoded_operand_bytes"] == 2 * 64 * 64 * 4
    assert "f8emu.torch" in capsys.readouterr().out


def test_the_recorded_cpu_run_keeps_its_promises() -> None:
    """At 2048: at most 12 times torch.mm, and no more memory than the operands decoded to float32."""
    report = json.loads((Path(emulator.__file__).parent / "results" / "emulator-cpu.json").read_text())
    figures = [figure for figure in report["figures"] if figure["size"] == 2048]
    assert len(figures) == 4
    for figure in figures:
        assert figure["ratio"] <= 12
        assert figure["xla_temporary_bytes"] <= figure["decoded_operand_bytes"]
        assert figure["peak_growth_bytes"] <= figure["decoded_operand_bytes"]

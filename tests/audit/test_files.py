"""Hostile and broken files, the command, its reports, and its ends."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from f8emu.audit import CHECKS, CheckpointError, audit, run
from f8emu.spec import SpecError
from tests.audit.checkpoints import checkpoint, codes, f32, fp8, normal, write
from tests.conformance.command import invoke

SOUND = {"l.weight": codes(), "l.weight_scale_inv": f32([1e-4])}


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = checkpoint(
        tmp_path / "model",
        {"l.weight": codes(512, 512), "l.weight_scale_inv": np.full((4, 4), 1e-4, np.float32)},
        fp8(),
    )
    stored = run.read_checkpoint(path).tensors["l.weight"]
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        stored.read()


def test_the_command_and_its_reports(tmp_path: Path) -> None:
    tensors = {
        f"l.{i}{name}": array
        for i in range(30)
        for name, array in ((".weight", codes()), (".weight_scale_inv", f32([-1.0 - i // 2])))
    }
    path, out_json, page = checkpoint(tmp_path / "model", tensors, fp8()), tmp_path / "a.json", tmp_path / "a.html"
    status, out, _ = invoke("audit", str(path), "--json", str(out_json), "--html", str(page), "--errors", "3")
    assert status == 1 and "FAULTY: 30 errors; the first: l.0.weight block [0, 0]: scale-invalid; 30 of 30" in " ".join(
        out.split()
    )
    # Findings that say the same stand in one row, and each kind names its first tensors.
    assert "6 of 30 findings" in out and CHECKS["scale-invalid"].thread in out and "l.4.weight" not in out
    assert "l.0.weight and 1 more tensor" in out and "l.10.weight, l.11.weight, and 26 more" in " ".join(out.split())
    report = json.loads(out_json.read_text())
    assert report["schema"] == 1 and report["equal"] is False and len(report["findings"]) == 30
    assert report["findings"][0]["check"] == "scale-invalid" and report["findings"][0]["block"] == [0, 0]
    assert "scale-invalid" in page.read_text() and "<script" not in page.read_text()
    stacks, chips = (invoke("audit", str(path), "--consumer", name)[2] for name in ("nobody:h100", "vllm:l40s"))
    assert "unknown stack 'nobody'; known stacks are deep_gemm, vllm, sglang, transformers" in " ".join(stacks.split())
    assert "vllm on 'l40s' is not known; name a GPU (Hopper: H100, H200" in " ".join(chips.split())
    assert "sglang" not in chips
    # no float8 weight: nothing was verified
    status, out, _ = invoke("audit", str(write(tmp_path / "b.safetensors", {"l.weight": normal(8, 8)})))
    assert status == 2 and "format: not float8\n" in out
    assert invoke("audit", str(write(tmp_path / "c.safetensors", SOUND)))[0] == 0


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_report_does_not_replace_what_is_audited(option: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", SOUND, fp8())
    source = checkpoint(tmp_path / "source", {"l.weight": normal(128, 128)}, fp8())
    (tmp_path / "link").symlink_to(path / "config.json")
    for out in (path / "model.safetensors", tmp_path / "link", source / "model.safetensors"):
        before = out.read_bytes()
        status, _, error = invoke("audit", str(path), "--source", str(source), option, str(out))
        assert status == 2 and "a report may not replace what is audited" in " ".join(error.split())
        assert out.read_bytes() == before
    assert invoke("audit", str(path), option, str(path / "report"))[0] == 0


def test_two_configurations(tmp_path: Path) -> None:
    """As Model-Optimizer writes both; a warning where another format or other exceptions are in one of them."""
    tensors = {"l.weight": codes(), "l.weight_scale": f32(1e-3), "l.input_scale": f32(1.0)}
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    for change, expected in (
        ({}, []),
        ({"quant_algo": "FP8_PB_WO"}, ["config-twice"]),
        ({"exclude_modules": []}, ["config-twice"]),
    ):
        path = checkpoint(tmp_path / "model", tensors, said)
        second = {"quant_algo": "FP8", "exclude_modules": ["lm_head"], **change}
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": second}))
        assert [one.check for one in audit(path).findings] == expected, change


def test_the_manifest_of_an_export(tmp_path: Path) -> None:
    """Every tensor has its hash, also one that is no weight; a byte, a tensor and an entry too few are named."""
    tensors = {**SOUND, "l.bias": f32(*range(7)), "l.steps": np.arange(3, dtype=np.int32)}
    path = checkpoint(tmp_path / "model", tensors, fp8())
    hashes = {name: {"sha256": hashlib.sha256(x.tobytes()).hexdigest()} for name, x in tensors.items()}
    (path / "f8emu_manifest.json").write_text(json.dumps({"schema": 1, "tensors": hashes}))
    assert not audit(path).findings
    checkpoint(path, {**tensors, "l.bias": f32(*range(6), 7.5)})
    hashes["l.lost"] = hashes.pop("l.steps")
    (path / "f8emu_manifest.json").write_text(json.dumps({"schema": 1, "tensors": hashes}))
    found = audit(path).findings
    assert {one.check for one in found} == {"manifest"}
    assert [one.tensor for one in found] == ["l.bias", "l.lost", "l.steps"]


def test_patterns_of_a_configuration(tmp_path: Path) -> None:
    """In every way in which stacks write them; one that would take forever is not tried."""
    name = f"model.layers.10.{'a' * 40}.q_proj"
    tensors = {f"{name}.weight": codes(), f"{name}.weight_scale_inv": f32([1e-4])}
    fits = ["q_proj", "model.layers.10", name, "re:.*q_proj$", "model.layers.1*"]
    for pattern in (*fits, "layers.1", "re:q_proj", "proj", "re:(", "re:.*(a+)+$"):
        found = audit(checkpoint(tmp_path / "model", tensors, fp8(modules_to_not_convert=[pattern])))
        assert [one.check for one in found.findings] == ["ignored"] * (pattern in fits), pattern
    with pytest.raises(SpecError, match="takes too long; mend the configuration"):
        audit(checkpoint(tmp_path / "model", tensors, fp8(modules_to_not_convert=["re:" + ".*a" * 12 + "Z"])))


def test_a_plain_cast_is_read_to_its_end(tmp_path: Path) -> None:
    """A file of codes without scales has none to lose, unless its codes reach 448; NaN is found wherever it is."""
    plain = codes(4096, 1100, 0x38)
    assert not audit(write(tmp_path / "a.safetensors", {"l.weight": plain})).findings
    plain.view(np.uint8)[-1, -1] = 0xFF
    (one,) = audit(write(tmp_path / "a.safetensors", {"l.weight": plain})).findings
    assert one.check == "nan-code"


def test_an_interrupt_keeps_what_was_found(tmp_path: Path) -> None:
    tensors = {
        f"l.{i}{name}": array
        for i in range(9)
        for name, array in ((".weight", codes()), (".weight_scale_inv", f32([-1.0])))
    }

    class Impatient:
        seen = 0

        def begin(self, subject: str, stage: str, cases: int) -> None:
            pass

        def advance(self) -> None:
            self.seen += 1
            if self.seen == 2:
                raise KeyboardInterrupt

    found = audit(checkpoint(tmp_path / "model", tensors, fp8()), progress=Impatient())
    assert found.is_interrupted and found.tensors == 2 and len(found.findings) == 2 and not found.is_equal

"""`f8emu checksums`: its statuses, and the two forms of its JSON."""

import json
from pathlib import Path

import pytest

from f8emu.rollout import Checksums, expected_checksums
from tests.conformance.command import invoke
from tests.rollout.models import BLOCKS, LAYER, in_float8, weights, write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", in_float8(weights(), "deep_gemm_block", "_scale_inv"), BLOCKS)


def test_an_answer_with_these_bytes_is_equal_and_another_is_not(model: Path, tmp_path: Path) -> None:
    answer, command = tmp_path / "answer.json", ("checksums", str(model), "--engine", "vllm", "--tp", "2")
    status, out, _ = invoke(*command, "--form", "engine", "--json", str(answer))
    assert status == 0 and "vllm 0.33.0" in out
    status, out, _ = invoke(*command, "--compare", str(answer))
    assert status == 0 and "0 differ, 0 not predicted" in " ".join(out.split())
    digests = json.loads(answer.read_text())["checksums"]
    key = f"dp0:pp0:pcp0:tp1:{LAYER}.mlp.down_proj.weight"
    answer.write_text(json.dumps({"checksums": digests | {key: "0" * 64}}))
    status, out, _ = invoke(*command, "--compare", str(answer))
    assert status == 1 and f"{key}: differs" in out


def test_what_is_not_shown_or_predicted_is_no_equality(model: Path, tmp_path: Path) -> None:
    answer, command = tmp_path / "answer.json", ("checksums", str(model), "--engine", "sglang")
    assert invoke(*command, "--json", str(tmp_path / "ours.json"))[0] == 0
    stored = Checksums.from_json(json.loads((tmp_path / "ours.json").read_text()))
    assert stored == expected_checksums(model, engine="sglang")
    assert invoke(*command, "--form", "engine", "--json", str(answer))[0] == 0
    status, out, _ = invoke(*command, "--compare", str(answer))
    assert status == 3 and "not shown" in out and "one unit in the last place" in " ".join(out.split())
    status, out, _ = invoke("checksums", str(model), "--engine", "vllm", "--kernel", "marlin")
    assert status == 3 and "Marlin packs" in out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--engine", "vllm", "--form", "theirs"), "--form must be"),
        (("--engine", "trt"), "engine must be one of vllm, sglang"),
        (("--engine", "vllm", "--dialect", "vllm_weight_block"), "float8 already"),
        (("--engine", "vllm", "--compare", "model/model.safetensors"), "expected JSON"),
        (("--engine", "vllm", "--compare", "model/config.json"), "Checksums.compare"),
    ],
)
def test_what_cannot_be_asked_is_said(
    model: Path, options: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    status, _, error = invoke("checksums", "model", *options, COLUMNS="1000")
    assert status == 2 and why in error and "Traceback" not in error

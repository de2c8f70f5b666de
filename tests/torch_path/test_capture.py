"""Capture of training: what is written replays bit by bit, training is unchanged, and nothing ends it."""

import errno
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import f8emu.torch
from f8emu.capture import CaptureError, GemmRecord, diff, replay, writer
from f8emu.capture.read import read_capture
from f8emu.spec import GEMM_NAMES, OperandError, SpecError, recipe_by_name
from f8emu.torch import capture, convert_to_float8_training
from f8emu.torch.layer.observers import TensorSeen
from f8emu.verdict import Exit

LAYERS = ("0.w1", "0.w2", "1.w1", "1.w2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(48, 48)
        self.w2 = nn.Linear(48, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(torch.relu(self.w1(x)))


class Run:
    """A small model that trains; `spoil` says at which step its input is not finite."""

    def __init__(self, recipe: str = "blockwise", *, compiled: bool = False, spoil: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block()).to(torch.bfloat16)
        convert_to_float8_training(self.model, config=recipe_by_name(recipe))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        # Inductor's code is none of ours here: what is traced and partitioned shows the same.
        if compiled:
            self.model[0].compile(backend="aot_eager", dynamic=False)
        self.spoil, self.number = spoil, 0

    def train(self, steps: int, passes: int = 1) -> "Run":
        for _ in range(steps):
            self.number += 1
            self.optimizer.zero_grad()
            for turn in range(passes):
                x = torch.randn(24, 48, generator=torch.Generator().manual_seed(10 * self.number + turn))
                if self.number == self.spoil:
                    x[3, 4] = torch.inf
                self.model(x.bfloat16()).square().mean().backward()
            self.optimizer.step()
        return self

    def weights(self) -> bytes:
        return b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in self.model.parameters())


@pytest.mark.parametrize("name", ["rowwise_with_gw_hp", "blockwise"])
def test_captured_steps_replay_bit_by_bit(name: str, tmp_path: Path) -> None:
    """A tensor is written as hooks of torch see it, and training is not changed."""
    run, inputs = Run(name), list[Tensor]()
    capturing = capture(run.model, tmp_path, steps=(2, 3), layers=r"w[12]$")
    last = run.model[1].get_submodule("w2")
    last.register_forward_hook(lambda module, x, output: inputs.append(x[0].detach().clone()))
    weight = run.train(1).model[1].get_parameter("w2.weight").detach().clone()
    run.train(4, passes=2)
    assert capturing.is_done and not capturing.left_out
    assert run.weights() == Run(name).train(1).train(4, passes=2).weights()
    steps = read_capture(tmp_path)
    assert [step.header.step for step in steps] == [2, 3]
    assert tuple(step.path for step in steps) == capturing.written
    gemms = [one.record for one in steps[0].records if isinstance(one.record, GemmRecord)]
    first = {(LAYERS[0], "grad_input")}  # of an input without a gradient
    assert {one.key[:2] for one in gemms} == {(layer, gemm) for layer in LAYERS for gemm in GEMM_NAMES} - first
    assert {one.turn for one in gemms} == {1, 2}
    records = {record.record.key: record for record in steps[0].records}
    for tensor, turn, expected in (("input", 1, inputs[1]), ("input", 2, inputs[2]), ("weight", 1, weight)):
        value = records["1.w2", tensor, turn].load()["value"]
        assert value.tobytes() == expected.view(torch.int16).numpy().tobytes()
    again = replay(steps)
    assert again.is_equal and not again.not_replayed, [one.line() for one in again.findings]
    assert again.gemms == 2 * len(gemms) == 44 and again.oracles == [f"f8ref.numpy, numpy {np.__version__}"]


@pytest.mark.parametrize("ends", ["AC", "CA", "ABC", "C"])
def test_steps_that_are_not_wanted_are_counted_without_taps(ends: str, tmp_path: Path) -> None:
    """Once each, whoever ends them, and however often: optimizers A and B, and a call C."""
    run = Run()
    layers = [run.model.get_submodule(name) for name in LAYERS]
    capturing = capture(run.model, tmp_path, steps=(3,))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    calls: dict[str, Any] = {"A": run.optimizer.step, "B": other.step, "C": capturing.step}
    for number in (1, 2, 3):
        assert capturing.number == number
        assert {layer.tap is not None for layer in layers} == {number == 3}
        if number == 3:
            x = torch.ones(1, 48, dtype=torch.bfloat16)
            capturing.tensor(TensorSeen("0.w1", "input", x, recipe_by_name("blockwise")))
        for end in ends:
            calls[end]()
    assert capturing.is_done and {layer.tap for layer in layers} == {None}
    assert [step.header.step for step in read_capture(tmp_path)] == [3]


def test_a_capture_ends_with_its_model(tmp_path: Path) -> None:
    """Also one that waits for its step, and that nobody closes."""
    run, before = Run(), len(_global_optimizer_post_hooks)
    capture(run.model, tmp_path, steps=(9,))
    assert len(_global_optimizer_post_hooks) == before + 1
    del run
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before


@pytest.mark.filterwarnings("ignore:f8emu.torch. there is no split-K plan")
def test_layers_under_mxfp8_are_captured_in_inductors_code_too(tmp_path: Path) -> None:
    """Inductor has no operator that writes to a token and reads E8M0 scales: these go as bytes."""
    for compiled in (False, True):
        torch.manual_seed(0)
        layer: Any = convert_to_float8_training(nn.Sequential(nn.Linear(48, 80, dtype=torch.bfloat16)), config="mxfp8")
        run = torch.compile(layer, fullgraph=True) if compiled else layer
        with capture(layer, tmp_path / str(compiled)):
            run(torch.randn(40, 48, generator=torch.Generator().manual_seed(1)).bfloat16()).square().mean().backward()
    again = replay(tmp_path / "True")
    assert again.is_equal and not again.not_replayed and again.gemms == 2
    difference = diff(read_capture(tmp_path / "False"), read_capture(tmp_path / "True"))
    assert difference.is_equal and difference.stages == 13, repr(difference)


def test_compiled_and_eager_training_are_captured_the_same(tmp_path: Path) -> None:
    for compiled in (False, True):
        run = Run("blockwise", compiled=compiled)
        with capture(run.model, tmp_path / str(compiled), first_step=9) as capturing:
            run.train(1)
        assert capturing.is_done
    found = diff(read_capture(tmp_path / "False"), read_capture(tmp_path / "True"))
    assert found.is_equal and found.stages == 67, [one.line() for one in found.divergences]


def test_a_ring_is_written_when_something_is_not_finite(tmp_path: Path) -> None:
    run = Run(spoil=4)
    capturing = capture(run.model, tmp_path, ring=2)
    run.train(3)
    assert not capturing.written and not list(tmp_path.iterdir())
    run.train(2)
    assert capturing.is_done
    steps = read_capture(tmp_path)
    assert [step.header.step for step in steps] == [2, 3, 4]
    assert [len(step.records) for step in steps] == [len(steps[0].records)] * 3, "whole steps, also the last"
    found = replay(steps)
    assert found.is_equal, [one.line() for one in found.findings]
    assert found.reasons == ["infinity in the input of 0.w1 at step 4"]


def test_an_exception_has_the_ring_written_and_no_half_step_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    with pytest.raises(ZeroDivisionError), capture(run.model, tmp_path / "ring", ring=1, layers="^0") as capturing:
        run.train(2)
        run.model(torch.ones(24, 48, dtype=torch.bfloat16))
        raise ZeroDivisionError("in the loss")
    steps = read_capture(tmp_path / "ring")
    assert [(step.header.step, step.is_complete) for step in steps] == [(2, True), (3, False)]
    assert {step.header.reason for step in steps} == {"ZeroDivisionError: in the loss"}
    assert capturing.is_done and len(capturing.written) == 1
    found = replay(steps)
    assert found.verdict.status is Exit.INCOMPLETE and found.gemms == 5 + 2 and len(found.missing) == 1
    with pytest.raises(ZeroDivisionError), capture(run.model, tmp_path / "step", layers="^0"):
        run.model(torch.ones(24, 48, dtype=torch.bfloat16))
        raise ZeroDivisionError
    (step,) = read_capture(tmp_path / "step")
    assert not step.is_complete and step.header.reason == "ZeroDivisionError: "
    # What looks for NaN makes no mask of the size of the tensor.
    monkeypatch.delattr(torch, "isfinite")
    with capture(run.model, tmp_path / "nan", ring=1) as capturing:
        x = torch.tensor([[1.0, torch.nan, torch.inf]], dtype=torch.bfloat16)
        capturing.tensor(TensorSeen("0.w1", "input", x, recipe_by_name("blockwise")))
        capturing.step()
    assert read_capture(tmp_path / "nan")[0].header.reason == "NaN in the input of 0.w1 at step 1"


def test_a_ring_is_written_on_request(tmp_path: Path) -> None:
    run = Run()
    capturing = capture(run.model, tmp_path, ring=3, tensors=False)
    run.train(4)
    capturing.write("the loss jumped")
    capturing.close()
    steps = read_capture(tmp_path)
    assert [step.header.step for step in steps] == [2, 3, 4]
    assert {step.header.reason for step in steps} == {"the loss jumped"}
    assert all(isinstance(one.record, GemmRecord) for step in steps for one in step.records)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the sixth record on."""
    real = writer._write

    def write(path: Path, pieces: Iterator[bytes | memoryview]) -> tuple[int, str]:
        if re.fullmatch("00000[5-9].safetensors|0000[1-9].*", path.name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, pieces)

    monkeypatch.setattr(writer, "_write", write)


def test_training_goes_on_when_the_disk_is_full(full_disk: None, tmp_path: Path) -> None:
    run = Run()
    capturing = capture(run.model, tmp_path)
    with pytest.warns(UserWarning, match=r"step-00000001-rank-00000 lacks \d+ records: No space left on device"):
        run.train(3)
    assert run.weights() == Run().train(3).weights()
    (step,) = read_capture(tmp_path)
    assert len(step.records) == 5 and len(step.left_out) == len(capturing.left_out) > 10
    assert replay([step]).verdict.status is not Exit.DIFFERENT


def test_a_directory_that_is_taken_away(tmp_path: Path) -> None:
    run = Run()
    capturing = capture(run.model, tmp_path / "run", steps=(1,))
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("not a directory")
    with pytest.warns(UserWarning, match="is not finished: Not a directory"):
        run.train(2)
    assert capturing.is_done and run.weights() == Run().train(2).weights()


def test_one_capture_a_path_and_faults_of_the_call(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(OperandError, match=r"matches 'attention'; the model has 4: 0[.]w1, 0[.]w2"):
        capture(run.model, tmp_path, layers="attention")
    with pytest.raises(OperandError, match="the model has no Float8Linear"):
        capture(nn.Linear(4, 4), tmp_path)
    for options in ({"steps": (1,), "ring": 2}, {"ring": 0}, {"steps": ()}, {"steps": (0,)}):
        with pytest.raises(SpecError, match="capture: "):
            capture(run.model, tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="regular expression"):
        capture(run.model, tmp_path, layers="(")
    capture(run.model, tmp_path)
    run.train(1)
    with pytest.raises(CaptureError, match="has captured steps of rank 0 already"):
        capture(run.model, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot make the directory"):
        capture(run.model, tmp_path / "file" / "run")
    assert f8emu.torch.Capture is type(capture(run.model, tmp_path / "other"))

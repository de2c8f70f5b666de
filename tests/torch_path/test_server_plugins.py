"""Plugins of servers. vLLM and SGLang are not imported: their worker, model runner and registry are stand-ins."""

import os
import subprocess
import sys
import tomllib
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import f8emu.torch as f8
from f8emu.capture.read import read_capture
from f8emu.dialects import quantize
from f8emu.rollout import certify
from f8emu.spec import SpecError

ROOT = Path(__file__).parents[2]


class Served(nn.Module):
    """A linear layer with float8 weights, as a server has it."""

    def __init__(self) -> None:
        super().__init__()
        codes, scale = quantize(
            torch.randn(128, 128, generator=torch.Generator().manual_seed(0)), "vllm_weight_channel"
        )
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        a = quantize(x, "vllm_token")
        return f8.scaled_mm(a.codes, self.weight.t(), a.scale, self.weight_scale.t(), out_dtype=x.dtype)


class Worker:
    """What vLLM's wrapper does with a call: the worker runs its model."""

    def __init__(self, model: nn.Module, replicas: int = 1) -> None:
        self.worker = SimpleNamespace(get_model=lambda: model)
        parallel = SimpleNamespace(data_parallel_size=replicas, data_parallel_rank=replicas - 1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.calls = 0

    def execute_model(self, scheduler_output: Any) -> int:
        self.calls += 1
        if rows := sum(scheduler_output.num_scheduled_tokens.values()):
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
            self.worker.get_model()(x[-rows:])
        return rows


def rows_of(folder: Path) -> dict[str, int]:
    """The rows of the input in each capture below a folder."""
    captures = sorted({path.parent for path in folder.glob("**/step-*")})
    return {str(path.relative_to(folder)): len(read_capture(path)[0].records[0].load()["value"]) for path in captures}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of this name for one test."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[0]))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))  # type: ignore[arg-type]


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Worker]:
    """A class of its own, to be wrapped."""
    kind = type("WorkerWrapperBase", (Worker,), {"execute_model": Worker.execute_model})
    stand_in(monkeypatch, "vllm.v1.worker.worker_base", WorkerWrapperBase=kind)
    monkeypatch.setenv("F8EMU_CAPTURE", str(tmp_path))
    return kind


def tokens(*counts: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict(enumerate(counts)))


def test_the_first_calls_of_a_worker(
    worker_class: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prefill and decode apart, two of each; calls without tokens are none, and other engines have other folders."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = entry_points["vllm.general_plugins"]["f8emu"].partition(":")
    monkeypatch.setenv("F8EMU_CAPTURE_CALLS", "2")
    for _ in range(2):  # the second has no effect
        getattr(import_module(module), name)()
    worker = worker_class(Served())
    calls = [(), (5,), (1, 1, 1), (2, 1), (1,), (7,), (1,)]
    assert [worker.execute_model(tokens(*counts)) for counts in calls] == [sum(counts) for counts in calls]
    assert worker.calls == len(calls) and not caplog.records
    assert rows_of(tmp_path) == {"decode-1": 3, "decode-2": 1, "prefill-1": 5, "prefill-2": 3}
    certified = certify(tmp_path / "prefill-1", tmp_path)
    assert certified.decode == {"prefill_rows": 5, "passes": 3, "rows": 7, "rows_equal": 7}
    hooks = worker.worker.get_model()
    assert not hooks._forward_hooks and not hooks._forward_pre_hooks


def test_what_goes_wrong_is_logged_and_served(
    worker_class: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from f8emu.torch.integrations.vllm import register

    monkeypatch.setenv("F8EMU_CAPTURE_CALLS", "0")
    with pytest.raises(SpecError, match="a number of calls from 1 on; got '0'"):
        register()
    monkeypatch.delenv("F8EMU_CAPTURE_CALLS")

    class Silent(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:  # as a CUDA graph
            return input

    original = worker_class.execute_model
    for model, why, replicas in (
        (Silent(Served()), "no layer showed itself", 1),
        (nn.Linear(128, 8, dtype=torch.bfloat16), "no float8 linear layer", 1),
        (Served(), "captured steps of rank 0 already", 2),
    ):
        worker_class.execute_model = original  # type: ignore[method-assign]
        (tmp_path / "dp1/prefill-1/step-00000001-rank-00000").mkdir(parents=True, exist_ok=True)
        register()
        worker = worker_class(model, replicas)
        assert [worker.execute_model(tokens(n)) for n in (4, 4, 1)] == [4, 4, 1]
        assert [why in record.getMessage() for record in caplog.records] == [True], caplog.text
        caplog.clear()


def test_the_first_calls_of_a_model_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang's registry is given a hook around `ModelRunner.forward`."""
    kinds, hooks = Enum("HookType", "AROUND"), dict[str, Any]()
    registry = SimpleNamespace(register=lambda target, hook, kind: hooks.__setitem__(target, (hook, kind)))
    stand_in(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=kinds)
    monkeypatch.setenv("F8EMU_CAPTURE", str(tmp_path))
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = entry_points["sglang.srt.plugins"]["f8emu"].partition(":")
    getattr(import_module(module), name)()
    ((target, (hook, kind)),) = hooks.items()
    assert target == "sglang.srt.model_executor.model_runner.ModelRunner.forward" and kind is kinds.AROUND
    runner = SimpleNamespace(model=Served(), is_draft_worker=False)
    draft = SimpleNamespace(model=Served(), is_draft_worker=True)

    def forward(runner: Any, batch: Any) -> Tensor:
        return runner.model(torch.ones(batch.rows, 128, dtype=torch.bfloat16))

    for who, mode, rows in ((draft, "extend", 2), (runner, "idle", 2), (runner, "extend", 3), (runner, "decode", 4)):
        modes = SimpleNamespace(is_idle=lambda: mode == "idle", is_decode=lambda: mode == "decode")  # noqa: B023
        assert len(hook(forward, who, SimpleNamespace(forward_mode=modes, rows=rows))) == rows
    assert rows_of(tmp_path) == {"decode-1": 4, "prefill-1": 3}


def test_a_server_that_captures_nothing_loads_nothing() -> None:
    code = (
        "import sys, f8emu.server_plugins as p; p.vllm(); p.sglang(); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "F8EMU_CAPTURE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)

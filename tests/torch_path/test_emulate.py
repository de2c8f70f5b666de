"""torch's own operators under `f8emu.torch.emulate`: a GPU's bits and refusals, and torch's own after it."""

import contextlib
import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec import RecipeName
from f8emu.spec.errors import SpecError
from f8emu.torch.emulated import switch
from tests.torch_path import operator_calls
from tests.torch_path.operator_calls import columns, draw

RECORDS = [
    json.loads(Path(__file__).with_name(f"operator_calls-{gpu}.json").read_text())["calls"] for gpu in ("h100", "h200")
]
RECORDED = RECORDS[1] | RECORDS[0]
CALLS = operator_calls.calls()
BEYOND = "blocks 128x128 1x128 132x48x640"
"""The one call that reads memory beyond its scales on a GPU, whose bits are therefore anyone's."""


@pytest.fixture
def emulated() -> Iterator[None]:
    with f8.emulate(bf16=True, force=True):
        yield


def scaled(a: Tensor, b: Tensor) -> Tensor:
    unit = torch.ones(())
    return torch._scaled_mm(a, b, unit, unit, out_dtype=torch.bfloat16)  # pyright: ignore[reportPrivateImportUsage]


def of_chip(a: Tensor, b: Tensor) -> Tensor:
    return f8.scaled_mm(a, b, torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16, chip="H100")


def test_the_records_have_every_call_and_agree() -> None:
    assert set(RECORDED) == set(CALLS)
    for name in set(RECORDS[0]) & set(RECORDS[1]):
        assert RECORDS[0][name] in (RECORDS[1][name], *RECORDS[1][name].split()), name


@pytest.mark.parametrize("name", sorted(set(RECORDED) - {BEYOND}))
@pytest.mark.usefixtures("emulated")
def test_an_operator_gives_and_refuses_what_a_gpu_does(name: str) -> None:
    observed = operator_calls.observed(CALLS[name], "cpu")
    assert RECORDED[name] in (observed, *observed.split())


@pytest.mark.usefixtures("emulated")
def test_scales_that_a_gpu_reads_beyond_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="which takes padded ones"):
        CALLS[BEYOND]("cpu")


def test_the_operators_are_torch_s_own_again_in_any_order() -> None:
    a, b = draw(64, 4096), columns(draw(4096, 48))
    x, y = draw(64, 4096, dtype=torch.bfloat16), draw(4096, 48, dtype=torch.bfloat16)
    before = scaled(a, b), x @ y
    hopper = of_chip(a, b)
    first = f8.emulate("H100", bf16=True, force=True)
    second = f8.emulate("Hopper", force=True)
    assert first.is_active and torch.equal(scaled(a, b), hopper)
    first.undo()
    first.undo()
    assert not first.is_active and torch.equal(scaled(a, b), hopper)
    second.undo()
    assert torch.equal(scaled(a, b), before[0]) and torch.equal(x @ y, before[1])
    assert not torch.equal(before[0], hopper)  # otherwise nothing above was seen


def test_every_call_is_torch_s_own_after_it() -> None:
    before = {name: operator_calls.observed(call, "cpu") for name, call in CALLS.items()}
    with f8.emulate(bf16=True, force=True):
        pass
    assert {name: operator_calls.observed(call, "cpu") for name, call in CALLS.items()} == before


def test_threads_enter_and_leave_while_others_compute() -> None:
    a, b = draw(32, 64), columns(draw(64, 48))
    allowed = [scaled(a, b), of_chip(a, b)]

    def work(turns: int) -> bool:
        outputs: list[Tensor] = []
        for turn in range(turns):
            with f8.emulate(bf16=turn % 2 == 0, force=True) if turn % 3 else contextlib.nullcontext():
                outputs.append(scaled(a, b))
        return all(any(torch.equal(output, y) for y in allowed) for output in outputs)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, [60] * 6))


@pytest.mark.usefixtures("emulated")
def test_what_torch_refuses_of_bfloat16_is_refused_by_torch() -> None:
    x, y = draw(32, 64, dtype=torch.bfloat16), draw(64, 48, dtype=torch.bfloat16)
    for call in (
        lambda: torch.addmm(x.new_ones(2, 48), x[:1], y),
        lambda: torch.addmm(x.new_ones(1, 32, 48), x, y),
        lambda: torch.bmm(x, y),
        lambda: x @ y[:32],
        lambda: torch.mm(x, y, out=torch.empty(32, 48)),
        lambda: torch.mm(x.float(), y.float(), out=torch.empty(32, 48, dtype=torch.float64)),
    ):
        with pytest.raises(RuntimeError):
            call()


def test_a_plain_call_lasts_until_it_is_undone() -> None:
    a, b = draw(32, 24), columns(draw(24, 48))  # K is no multiple of 16: a GPU refuses it
    f8.emulate(force=True)
    gc.collect()
    with pytest.raises(RuntimeError, match="to be divisible by 16"):
        scaled(a, b)
    for emulation in list(switch._ACTIVE):  # pyright: ignore[reportPrivateUsage]
        emulation.undo()
    assert scaled(a, b).shape == (32, 48)


def test_code_that_is_compiled_inside_gives_torch_s_own_bits_after_it() -> None:
    a, b = draw(64, 4096), columns(draw(4096, 48))
    before = scaled(a, b)
    with f8.emulate(force=True):
        compiled = torch.compile(scaled)
        assert torch.equal(compiled(a, b), of_chip(a, b))
    assert torch.equal(compiled(a, b), before)


def test_an_exported_program_has_the_bits_of_whoever_computes() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return scaled(a, b)

    a, b = draw(64, 4096), columns(draw(4096, 48))
    before = scaled(a, b)
    with f8.emulate(force=True):
        inside = torch.export.export(Product(), (a, b)).module()
        assert torch.equal(inside(a, b), of_chip(a, b))
    outside = torch.export.export(Product(), (a, b)).module()
    assert torch.equal(inside(a, b), before)
    with f8.emulate(force=True):
        assert torch.equal(outside(a, b), of_chip(a, b))


@pytest.mark.usefixtures("emulated", "one_rank")
def test_distributed_tensors_are_multiplied_in_their_parts() -> None:
    mesh = init_device_mesh("cpu", (1,))
    a, b = draw(64, 4096), columns(draw(4096, 48))
    x, y = draw(64, 4096, dtype=torch.bfloat16), draw(4096, 48, dtype=torch.bfloat16)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    product: Any = rows @ distribute_tensor(y, mesh, [Replicate()])
    assert torch.equal(product.to_local(), f8.mm(x, y, chip="H100"))
    codes = [DTensor.from_local(t, mesh, [Replicate()]) for t in (a, b, torch.ones(()), torch.ones(()))]
    product = torch._scaled_mm(*codes, out_dtype=torch.bfloat16)  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(product.to_local(), of_chip(a, b))


@pytest.mark.usefixtures("emulated")
def test_outputs_are_written_where_the_caller_says() -> None:
    a, b, unit = draw(32, 64), columns(draw(64, 48)), torch.ones(())
    expected = scaled(a, b)
    out = torch.empty(0, dtype=torch.bfloat16)
    assert torch._scaled_mm(a, b, unit, unit, out_dtype=torch.bfloat16, out=out) is out  # pyright: ignore
    assert torch.equal(out, expected)
    x, y = draw(32, 64, dtype=torch.bfloat16), draw(64, 48, dtype=torch.bfloat16)
    assert torch.equal(torch.mm(x, y, out=torch.empty(32, 48, dtype=torch.bfloat16)), f8.mm(x, y, chip="H100"))


@pytest.mark.usefixtures("emulated")
def test_a_bfloat16_linear_layer_is_that_of_the_chip_and_others_are_torch_s() -> None:
    layer, x = nn.Linear(4096, 48, dtype=torch.bfloat16), draw(64, 4096, dtype=torch.bfloat16).requires_grad_()
    with torch.no_grad():
        layer.bias.copy_(draw(48, dtype=torch.bfloat16))
    product = f8.mm(x.detach(), layer.weight.detach().t(), out_dtype=torch.float32, chip="H100")
    output = layer(x)
    assert torch.equal(output, (product + layer.bias.float()).bfloat16())
    grad = draw(64, 48, dtype=torch.bfloat16)
    output.backward(grad)
    assert x.grad is not None and torch.equal(x.grad, f8.mm(grad, layer.weight.detach(), chip="H100"))
    narrow, wide = draw(5, 7, dtype=torch.bfloat16), draw(7, 9, dtype=torch.float32)
    assert torch.equal(narrow.float() @ wide, torch.linalg.multi_dot([narrow.float(), wide]))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_trains_with_the_bits_of_the_chip(torchao: Any, recipe: RecipeName) -> None:
    """torchao's layers, unchanged, beside ours, which have a GPU's bits: two steps of AdamW, one layer checkpointed."""
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(64, 96, bias=True), nn.Linear(96, 64, bias=False)]).bfloat16()
    ours: Any = f8.convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    theirs: Any = nn.ModuleList(torchao.float8_linear.Float8Linear.from_float(layer, config) for layer in plain)
    results: list[list[Tensor]] = []
    with f8.emulate("Hopper", bf16=True, force=True):
        for model in (ours, theirs):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            results.append([])
            for step in range(2):
                x = draw(32, 64, dtype=torch.bfloat16, seed=step).requires_grad_()
                y = model[1](torch.relu(checkpoint(model[0], x, use_reentrant=False)))
                y.backward(draw(32, 64, dtype=torch.bfloat16, seed=step + 2))
                results[-1] += [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # pyright: ignore
                optimizer.step()
                optimizer.zero_grad()
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.usefixtures("emulated")
def test_fake_and_meta_tensors_have_shapes() -> None:
    with FakeTensorMode():
        a, b = torch.empty(32, 64, dtype=torch.float8_e4m3fn), torch.empty(48, 64, dtype=torch.float8_e4m3fn).t()
        assert scaled(a, b).shape == (32, 48)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*split")
def test_a_gpu_gives_the_bits_of_another_chip_and_then_its_own() -> None:
    a, b = draw(64, 512).cuda(), columns(draw(512, 48)).cuda()
    unit = torch.ones((), device="cuda")

    def product() -> Tensor:
        return torch._scaled_mm(a, b, unit, unit, out_dtype=torch.bfloat16)  # pyright: ignore[reportPrivateImportUsage]

    before = product()
    with f8.emulate("Ada"):
        ada = product()
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "engine": "emulated", "chip": "Ada"}
    assert ada.is_cuda and torch.equal(ada, f8.scaled_mm(a, b, unit, unit, **options))
    assert not torch.equal(ada, before) and torch.equal(product(), before)
    with f8.emulate("H100", force=True):
        assert torch.equal(scaled(a.cpu(), b.cpu()), of_chip(a.cpu(), b.cpu()))


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(SpecError, match="chip must be one of"):
        f8.emulate("H1000")  # pyright: ignore[reportArgumentType]


# Programs and suites that do not know f8emu

PROGRAM = """
import importlib.util, subprocess, sys
assert importlib.util.find_spec("torch")  # as transformers does
import torch
def scaled_mm(k):
    a = torch.ones(16, k).to(torch.float8_e4m3fn)
    return torch._scaled_mm(a, a.t(), torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16)
def test_sizes():
    try:
        scaled_mm(24)
    except RuntimeError as error:
        assert "to be divisible by 16" in str(error)
    else:
        raise AssertionError("torch's own operator takes K = 24")
    if "pytest" in sys.modules:
        subprocess.run([sys.executable, __file__], check=True)
if __name__ == "__main__":
    test_sizes()
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ([sys.executable, "-m", "f8emu", "run", "--chip", "H100", sys.executable], 7),
        ([sys.executable, "-m", "f8emu", "run", "--chip", "H1000", "--", sys.executable], 2),
        ([sys.executable, "-m", "f8emu", "run", "--", "no_such_program"], 2),
    ],
    ids=["run", "run on an unknown chip", "run of nothing"],
)
def test_a_program_is_run(command: list[str], status: int, tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [*command, "test_program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == status, ran.stdout + ran.stderr


def test_a_suite_is_run_under_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM.replace("sys.exit(7)", "sys.exit(0)"))
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "f8emu.pytest_plugin", "-p", "no:cacheprovider"]
    command += ["--f8emu-chip=H100", "test_program.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "f8emu: torch's float8 GEMMs have the bits of H100" in ran.stdout

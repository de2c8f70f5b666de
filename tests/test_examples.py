"""The examples run, print what their docstrings promise, and use public names alone."""

import ast
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import f8emu.jax
import f8ref.numpy as f8
from f8emu import E4M3FN, RECIPES
from tests.conformance.command import few_recorded, invoke

EXAMPLES = Path(__file__).parents[1] / "examples"
HOSTS = ("einsum", "equinox", "flax_linen", "flax_nnx", "qwix")
PUBLIC = {
    "f8emu",
    "f8emu.conformance",
    "f8emu.spec",
    "f8emu.jax",
    "f8emu.torch",
    "f8emu.torch.parallel.checkpoints",
    "f8emu.torch.integrations.huggingface",
    *(f"f8emu.jax.hosts.{host}" for host in HOSTS),
}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def run(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that the program prints."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_examples_import_public_names_alone() -> None:
    for library in ("transformers", "flax", "equinox", "qwix"):
        pytest.importorskip(library)
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("f8"):
                assert node.module in PUBLIC, f"{path.name}: {node.module}"
                public = vars(import_module(node.module))
                assert {alias.name for alias in node.names} <= public.keys(), path.name


def test_gemm_bits(capsys: pytest.CaptureFixture[str]) -> None:
    _, *lines = run("gemm_bits", capsys)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 1024, generator=generator).numpy() for rows in (64, 96))
    scales = [f8.scale_from_amax(f8.amax(array), E4M3FN) for array in (x, weight)]
    a, b = (f8.quantize(array, s.inv_scale, E4M3FN) for array, s in zip((x, weight), scales, strict=True))
    for line, fast in zip(lines, (True, False), strict=True):
        y = f8.scaled_mm(a, b.T, scales[0].scale, scales[1].scale, out_dtype="float32", use_fast_accum=fast)
        assert f"use_fast_accum={fast}" in line
        assert " ".join(f"{bits:08x}" for bits in y.view("uint32")[0, :4]) in line


def test_train_tiny(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("train_tiny", capsys)
    losses = {words[0]: (float(words[2]), float(words[4])) for words in map(str.split, lines) if words[1] == "loss"}
    assert list(losses) == ["float32", "rowwise", "delayed"]
    for recipe, (first, last) in losses.items():
        assert last < first, recipe


def test_compare_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    title, *rows = run("compare_recipes", capsys)
    assert title.split() == ["recipe", "output", "grad_input", "grad_weight"]
    assert [row.split()[0] for row in rows] == ["bfloat16", *RECIPES]
    assert all(len(row.split()) == 7 for row in rows)


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    ("name", "libraries"),
    [
        ("huggingface_trainer", "transformers accelerate"),
        ("accelerate_checkpoint", "accelerate"),
        ("lightning_resume", "lightning"),
        ("jax_einsum", ""),
        ("torch_and_jax_gradients", ""),
        ("torch_to_jax", ""),
    ],
)
def test_what_must_be_equal_is(name: str, libraries: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run, the same in two frameworks, a layer written in two ways."""
    for library in libraries.split():
        pytest.importorskip(library)
    lines = [line for line in run(name, capsys) if " equal: " in f" {line}"]
    assert lines and all(line.endswith("equal: True") for line in lines)
    assert len(lines) == {"torch_and_jax_gradients": 3, "torch_to_jax": 2}.get(name, 1)


@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_peft_lora(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    *model, losses = run("peft_lora", capsys)
    assert sum("base_layer): Float8Linear" in line for line in model) == 2
    assert sum("default): Linear" in line for line in model) == 4
    _, first, _, last = losses.split()
    assert float(last) < float(first)


@pytest.mark.parametrize(
    ("name", "libraries"),
    [("flax_linen", "flax optax"), ("flax_nnx", "flax optax"), ("equinox_swap", "equinox optax")],
)
def test_hosts_of_jax(
    name: str, libraries: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run, and their steps have programs for GPUs."""
    for library in libraries.split():
        pytest.importorskip(library)
    jit = f8emu.jax.jit
    programs: list[str] = []

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        step = jit(function)

        def call(*args: Any) -> Any:
            if not programs:
                programs.append(step.trace(*args).lower(lowering_platforms=("cuda",)).as_text())
            return step(*args)

        return call

    monkeypatch.setattr(f8emu.jax, "jit", kept)
    *layers, losses = run(name, capsys)
    _, first, _, last = losses.split()
    assert float(last) < float(first)
    assert "f8E4M3FN" in programs[0]
    assert layers == (["Linear Float8Linear Float8Linear"] if name == "equinox_swap" else [])


def test_qwix_provider(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("qwix")
    differences = [float(line.split()[-1].removesuffix("%")) for line in run("qwix_provider", capsys)]
    assert all(0 < difference < 15 for difference in differences)


@pytest.mark.filterwarnings("ignore")  # of torch.distributed
def test_train_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """More ranks: tests/torch_path/test_checkpoints_ranks.py."""
    sizes = ["--training.batch_size", "1", "--training.seq_len", "32", "--checkpoint.folder", str(tmp_path)]
    float8 = ["--float8.recipe_name", "delayed", "--float8.enable_fsdp_float8_all_gather"]
    for steps in ("1", "2"):
        monkeypatch.setattr(sys, "argv", ["train_llama", *sizes, *float8, "--training.steps", steps])
        first, line = run("train_llama", capsys)
        assert first.endswith(f"from step {int(steps) - 1}")
        assert line.startswith(f"step {steps}/{steps}  loss 5.") and "tokens/s/device" in line


@pytest.mark.parametrize(("function", "status"), [("scaled_mm", 0), ("float32_mm", 1)])
def test_own_kernel(function: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, rowwise scales, E5M2 of every bit pattern, 16 x 16 x 16; an example that is wrong must be found."""
    few = tmp_path / "few.safetensors"
    few_recorded(few, 1, 8, 52, 68)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("own_kernel", None)
    result = invoke(
        "verify", f"own_kernel:{function}", "--arrays", "numpy", "--stage", "golden", "--golden", few, "--no-diagnose"
    )
    assert result[0] == status, result

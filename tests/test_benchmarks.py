"""The benchmarks run, on a CPU and tiny, and record what they measured; what they compute of it is checked by hand."""

import functools
import gc
import json
import math
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import linear, runner, sizes, train, workloads
from benchmarks.kernel_kinds import KINDS, kinds
from benchmarks.measure import equal_to_torchao
from benchmarks.models import read_corpus
from benchmarks.timing import Run, exposure
from benchmarks.torchtitan import worker
from benchmarks.walk import stays_of_layer
from benchmarks.workloads import HIGH_PRECISION_GEMM, Shape
from f8emu.spec import BLOCKWISE, DELAYED, ROWWISE, ROWWISE_WITH_GW_HP, TENSORWISE, RecipeName

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports it
ONCE = "--device cpu --tokens 128 --rounds 1 --steps 1"
TINY = f"{ONCE} --dim 128 --hidden 128 --mode eager"
PAIR = "--subjects bf16 f8emu/tensorwise"

SCRIPTS = (
    f"linear {TINY} --workloads linear",
    f"linear {TINY} --workloads feed_forward block {PAIR} --kernels f8emu/tensorwise",
    f"linear {TINY} --workloads feed_forward --microbatches 2 --subjects bf16 f8emu/rowwise+at-rest",
    f"linear {TINY} --workloads feed_forward {PAIR} --checkpointing full selective",
    "host --device cpu --tiny --modes eager graph --subjects bf16 torchao/tensorwise f8emu/tensorwise f8emu/delayed",
    "casts --device cpu --rows 40 --cols 136 --dtypes bfloat16",
    "emulator --sizes 64 --rounds 1",
    "audit --mebibytes 32 --shards 2 --rounds 1",
    "matmul --device cpu --tokens 128 --dim 128 --rounds 1",
    "experts --device cpu --tiny --rounds 1 --steps 1 --mode eager",
    f"sizes {ONCE} --sizes 64 {PAIR}",
    "train --device cpu --tiny --steps 2 --seeds 2 --recipes tensorwise delayed",
    "moe_train --device cpu --tiny --train-steps 2 --models Qwen3Moe --subjects bf16 f8emu/rowwise",
    "huggingface --device cpu --tiny --mode eager --subjects bf16 f8emu/tensorwise",
)
WITHOUT_TABLE = ("moe_train", "sizes")
NEEDED = {"moe_train": ("transformers",), "huggingface": ("transformers",)}


@pytest.fixture(autouse=True)
def frozen_objects_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn would unfreeze what conftest.py froze: every search for garbage would take seconds from then on."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


def entries_of(node: Any) -> Iterator[dict[str, Any]]:
    """Every dict of a record, at any depth."""
    if isinstance(node, dict):
        yield node
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from entries_of(inner)


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_runs_and_records(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *options = command.split()
    for package in NEEDED.get(script, ()):
        pytest.importorskip(package)
    if script == "casts":  # Inductor's code is only timed: code that is traced stands for it
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    out = tmp_path / f"{script}.json"
    status = import_module(f"benchmarks.{script}").main([*options, "--json", str(out)])
    assert status == 0 or "train" in script  # two steps are no training
    report = json.loads(out.read_text())
    assert report["command"].startswith(f"python -m benchmarks.{script}") and report["device"].startswith("cpu")
    assert report["versions"]["torch"] == version("torch")
    for entry in entries_of(report):
        if str(entry.get("subject")).startswith("torchao/"):
            assert "ms" in entry or "failed" in entry or "torchao is not installed" in entry["absent"]
            continue
        assert "failed" not in entry and entry.get("ms", 1) > 0 and entry.get("speed", 1) > 0, entry
        assert entry.get("is_finite", True) and not entry.get("differing"), entry
        if "floor_ms" in entry:
            parts = entry["gemms_ms"], entry.get("attention_ms", 0), entry["bytes_ms"]
            assert entry["floor_ms"] == pytest.approx(sum(parts))
        if "losses" in entry and isinstance(entry["losses"], list):
            assert all(map(math.isfinite, entry["losses"]))
    assert "\N{BOX DRAWINGS HEAVY VERTICAL}" in capsys.readouterr().out or script in WITHOUT_TABLE, "a table"


def test_training_in_flax_is_traced() -> None:
    """XLA takes half a minute to compile a step: the weights of torch fit flax's model, and recipes are in it."""
    for package in ("flax", "optax"):
        pytest.importorskip(package)
    import jax

    from benchmarks import jax_train

    tokens = jax.ShapeDtypeStruct((1, jax_train.SIZE["length"] + 1), "int32")
    params = jax_train.params_of(jax_train.SameTransformer(**jax_train.SIZE))
    states_of: dict[RecipeName, int] = {"rowwise": 0, "delayed": 6 * 3 * 3}  # tensors, fields
    for recipe, states_of_layers in states_of.items():
        model = jax_train.Transformer(**jax_train.SIZE, recipe=recipe)
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        assert jax.tree.map(jax.numpy.shape, params) == jax.tree.map(jax.numpy.shape, variables["params"])
        assert str(jax.make_jaxpr(model.apply)(variables, tokens)).count("f8_e4m3fn") > 0, recipe
        states = jax.tree.leaves(variables.get("_overwrite_with_gradient", {}))
        assert len(states) == states_of_layers
        assert {x.shape[0] for x in states} <= {jax_train.SIZE["layers"]}


def test_a_subject_that_fails_costs_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.subjects.convert_to_float8_training", Mock(side_effect=RuntimeError("planted")))
    out = tmp_path / "linear.json"
    assert linear.main(f"{TINY} --workloads linear {PAIR} --json {out}".split()) == 1
    bf16, ours = json.loads(out.read_text())["workloads"][0]["subjects"]
    assert bf16["ms"] > 0 and ours["failed"] == "RuntimeError: planted"


@pytest.mark.parametrize("name", ["emulator-cpu", "emulator-cpu-intel"])
def test_the_recorded_runs_keep_their_promises(name: str) -> None:
    """At 2048 at most 5 times torch.mm with AVX-512, and 11 with AVX2: on the shared Intel host 9.4 to 10.6."""
    report = json.loads((Path(runner.__file__).parent / "results" / f"{name}.json").read_text())
    figures = [figure for figure in report["figures"] if figure["size"] == 2048]
    limits = {"f8emu.torch": 5, "f8emu.native AVX-512": 5, "f8emu.native AVX2": 11}
    assert report["cores"] == 2
    assert {figure["subject"] for figure in figures} >= limits.keys()
    for figure in figures:
        assert figure["ratio"] <= limits.get(figure["subject"], float("inf"))


# What is computed of figures


def test_kinds_of_kernels() -> None:
    total = dict.fromkeys([*KINDS, "other"], 0.0) | {"attention": 2.0, "casts and amaxes": 8.0, "other": 4.0}
    names = ["fmha_reduce_head<true>(void", "triton_red_fused_abs_amax_mul_silu_view_8", "triton_poi_fused_add_view_9"]
    names += ["groups_hidden_kernel"]
    assert kinds([{"name": name, "us": 2.0 + i} for i, name in enumerate(names)]) == total


def test_time_that_nothing_hides() -> None:
    gather, scatter = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)"
    runs = [
        Run("gemm", 7, 0.0, 40.0),
        Run(gather, 20, 10.0, 60.0),  # 20 after the GEMM, 5 of them beside a reduce-scatter
        Run(scatter, 24, 55.0, 70.0),  # 10 more by itself
        Run("cast_pair_kernel", 7, 80.0, 100.0),  # 40 after the GEMM, 10 of them idle
        Run("copy", 16, 90.0, 110.0),  # 10 beside the cast
        Run("cast_pair_kernel", 7, 112.0, 120.0),
    ]
    assert exposure(runs[::-1], step_us=70.0, steps=2) == {
        "step_us": 70.0,
        "computing_us": (40 + 30 + 8) / 2,
        "beside_us": 10 / 2,
        "collectives_us": 60 / 2,
        "exposed_us": 30 / 2,
        "idle_us": 70 - (40 + 30 + 8 + 30) / 2,
        "exposed": {gather: 20 / 2, scatter: 15 / 2},
        "waits": {"cast_pair_kernel": (40 + 2) / 2},
    }


def test_memory_by_stream_of_torchtitan() -> None:
    segments = [{"stream": s, "total_size": n << 30, "active_size": 1 << 30} for s, n in ((0, 2), (9, 4), (0, 3))]
    streams = worker.memory_by_stream(segments)
    assert [(stream["reserved_gib"], stream["active_gib"]) for stream in streams] == [(5.0, 2.0), (4.0, 1.0)]


def test_the_smallest_size_that_is_faster() -> None:
    grid = {(k, n): 1.5 if min(k, n) > 1 and k * n >= 6 else 0.5 for k in (1, 2, 3, 9) for n in (1, 2, 3, 9)}
    assert sizes.smallest(grid) == (2, 6)
    assert sizes.smallest(grid | {(9, 9): 0.9}) is None
    assert sizes.smallest({(1, 1): 1.0}) == (1, 1)


def test_the_verdict_of_training() -> None:
    def run(name: str, seed: int, loss: float) -> dict[str, Any]:
        return {"name": name, "seed": seed, "losses": [loss], "training": loss, "held_out": loss}

    seeds = [run("bf16", 0, 2.0), run("bf16", 1, 2.1), run("bf16", 2, 2.05)]
    losses = {"inside": (1.99, 2.09, 2.06), "above": (2.1, 2.2, 2.05), "broken": (2.0, math.nan, 2.05)}
    runs = [run(name, seed, loss) for name, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)]
    verdicts = {verdict["name"]: verdict for verdict in train.judge([*seeds, *runs])}
    assert [verdicts[name]["passes"] for name in losses] == [True, False, False]
    assert verdicts["above"]["training"]["loss"] == pytest.approx(2.35 / 3 + 4 / 3)
    assert verdicts["above"]["training"]["shifts"] == pytest.approx([0.1, 0.1, 0.0])
    assert verdicts["inside"]["training"]["shift"] == pytest.approx(-0.01 / 3)


def test_the_corpus_is_split_by_files_and_the_same_each_time() -> None:
    corpus, again = read_corpus(), read_corpus()
    assert corpus.description == again.description
    assert corpus.training.numel() > 8 * corpus.held_out.numel() / 2 > 0
    first, second = (c.batch(torch.Generator().manual_seed(0), 2, 16) for c in (corpus, again))
    assert torch.equal(first, second) and first.shape == (2, 17)


def test_the_floor_counts_the_gemms_and_the_bytes() -> None:
    m, k, n = 256, 512, 1024
    layer = workloads.linear(m, k, n)
    assert layer.gemms(None) == [
        (HIGH_PRECISION_GEMM, shape) for shape in (Shape(m, n, k), Shape(m, k, n), Shape(n, k, m))
    ]
    assert [gemm for gemm, _ in layer.gemms(TENSORWISE)] == list(TENSORWISE.gemms.values())
    assert layer.bytes_moved(None) == 0
    size = m * k + m * n + n * k
    assert layer.bytes_moved(TENSORWISE) == size * (2 + 2 + 1 + 1), "amax, then the cast to both layouts"
    assert layer.bytes_moved(DELAYED) == layer.bytes_moved(BLOCKWISE) == size * (2 + 1 + 1)
    with_gw_hp = (m * k + m * n) * (2 + 2 + 1) + n * k * (2 + 2 + 1 + 1)
    assert layer.bytes_moved(ROWWISE_WITH_GW_HP) == with_gw_hp
    block = workloads.feed_forward(m, k, n)
    moved = 2 * m * (10 * k + 8 * n)
    assert block.bytes_moved(None) == moved
    activations = m * (k + n) + m * (2 * n + k)  # a shared input is cast once
    assert block.bytes_moved(TENSORWISE) == moved + 4 * activations + 6 * 3 * k * n


def test_the_bytes_of_experts() -> None:
    groups, dim, hidden, tokens = 3, 64, 32, 256
    shape = workloads.Experts(groups, dim, hidden, tokens)
    silu, added, weights = 2 * 8 * tokens * hidden, 2 * 3 * tokens * dim, 3 * groups * dim * hidden
    assert shape.bytes_moved(None, is_pair=False) == silu
    assert shape.bytes_moved(None, is_pair=True) == silu + added
    once = tokens * (dim * 2 * (2 + 2) + hidden * (4 + 1 + 6 + 5)) + weights * (2 + 2)
    twice = tokens * (dim * 2 * (2 + 2 + 2) + hidden * (4 + 4 + 1 + 6 + 6 + 5)) + weights * (2 + 2 + 2)
    assert shape.bytes_moved(DELAYED, is_pair=False) == once
    assert shape.bytes_moved(ROWWISE, is_pair=True) == twice + added
    assert shape.bytes_moved(ROWWISE, is_pair=False, weight_casts=0.25) == twice - weights * 6 * 3 // 4


@pytest.mark.parametrize("builder", [workloads.feed_forward, workloads.transformer_block])
def test_a_workload_describes_its_model(builder: Any) -> None:
    workload = builder(64, 128, 448)
    layers = (m for m in workload.build().modules() if isinstance(m, torch.nn.Linear))
    described = sorted((layer.k, layer.n) for layer in workload.layers)
    assert described == sorted((layer.in_features, layer.out_features) for layer in layers)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao")
def test_tensorwise_equals_torchao() -> None:
    pytest.importorskip("torchao")
    for entry in equal_to_torchao([(256, 512, 384), (48, 64, 80)], torch.device("cuda")):
        assert not any(entry["numbers_differing"].values()), entry


def test_a_forward_pass_is_a_short_walk() -> None:
    """The files of an eager layer on a CPU, and how often it returns to one: both may shrink."""
    stays = stays_of_layer("rowwise")
    assert len(set(stays)) <= 19 and len(stays) - len(set(stays)) <= 102

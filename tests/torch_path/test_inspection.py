"""Observers see the tensors that were computed, and change no bit; the inspection against numpy, and its log."""

import copy
import functools
import gc
import json
import logging
import math
import pickle
import sys
import tomllib
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import f8emu.numpy as f8np
import f8emu.torch as f8
import f8ref.numpy as reference
from benchmarks.models import Corpus, Llama
from f8emu import cli
from f8emu.report.inspection_log import read_run
from f8emu.spec import (
    BLOCKWISE,
    CHIPS,
    DELAYED,
    MXFP8,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    MissingExtraError,
    OperandError,
    Recipe,
    SpecError,
)
from f8emu.torch.casts.operand import Operand
from f8emu.torch.inspection import recorder
from f8emu.torch.inspection.config import STATISTICS, JsonLog, config_of
from f8emu.torch.layer import matmul, observers
from f8emu.torch.layer.float8_layer import all_float8_layers, float8_layers
from f8emu.torch.layer.observers import GemmSeen, Observation, TensorSeen
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits, to_numpy
from tests.torch_path.layers import both_passes, draw

BF16 = torch.bfloat16


class Seen:
    """An observer that keeps copies."""

    def __init__(self) -> None:
        self.tensors: Counter[tuple[str, str]] = Counter()
        self.gemms: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    def tensor(self, seen: TensorSeen) -> None:
        self.tensors[seen.layer, seen.tensor] += 1

    def gemm(self, seen: GemmSeen) -> None:
        """Count the GEMM, and repeat it with what is shown of it."""
        self.gemms[seen.layer, seen.gemm] += 1
        again = matmul.gemm(seen.a, seen.b, seen.spec, seen.product.dtype, "auto", split_k=seen.split_k)
        if not torch.equal(again, seen.product):
            self.wrong.append(f"{seen.layer} {seen.gemm}")


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def inspected(path: Path, *options: str) -> Any:
    """The result of `f8emu inspect` for a log."""
    return CliRunner().invoke(cli.build_app(), ["inspect", str(path), *options], env={"COLUMNS": "200"})


class Block(nn.Module):
    """A residual block whose activation checkpoint recomputes a SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def model_of(recipe: Recipe, make: Callable[[], nn.Module] = Block, layers: int = 2, only: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for _ in range(layers))).to(BF16)
    f8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name.endswith(only))
    return model


def observe(model: nn.Module, observer: Seen) -> Observation:
    """`observer` watches every layer."""
    found = Observation(model, all_float8_layers(model), observer)
    found.turn(True)
    return found


def passed(model: nn.Sequential, seen: Seen | None, step: int) -> list[Tensor]:
    """Output and gradients of one pass, watched or not."""
    taken = None if seen is None else observe(model, seen)
    inputs = draw(32, 32, seed=step), draw(32, 32, seed=step + 100)
    results = both_passes(model, inputs[0], grad=inputs[1], parameters=model.parameters())
    if taken is not None:
        taken.remove()
    return results


def check_counts(seen: Seen, layers: int, times: int) -> None:
    """Every matrix and GEMM once a pass, though checkpointing computes those of the forward twice."""
    assert set(seen.tensors.values()) == {times} and len(seen.tensors) == layers * 3
    assert set(seen.gemms.values()) == {times} and len(seen.gemms) == layers * 3
    assert not seen.wrong


@pytest.mark.parametrize("recipe", (DELAYED, ROWWISE_WITH_GW_HP), ids=lambda recipe: recipe.name)
def test_an_observer_sees_each_gemm_once_and_changes_no_bit(recipe: Recipe) -> None:
    seen, watched, plain = Seen(), model_of(recipe), model_of(recipe)
    for step in range(3):
        assert_all_same_bits(passed(watched, seen if step else None, step), passed(plain, None, step))
        for model in (watched, plain) if recipe.delayed is not None else ():
            f8.sync_float8_amax_and_scale_history(model)
    check_counts(seen, layers=6, times=2)


def test_the_fused_block_shows_what_it_never_writes() -> None:
    """hidden and both gradients exist as codes alone; shown are those that the codes were made of."""
    block = f8.Float8FeedForward(32, 32, dtype=BF16, recipe=DELAYED)
    values: dict[tuple[str, str], Tensor] = {}
    codes: dict[tuple[str, str], Any] = {}

    class Keep(Seen):
        def tensor(self, seen: TensorSeen) -> None:
            values[seen.layer, seen.tensor] = seen.value.clone()

        def gemm(self, seen: GemmSeen) -> None:
            super().gemm(seen)
            codes[seen.layer, seen.gemm] = to_numpy(seen.a.codes)

    keep = Keep()
    taken = observe(block, keep)
    block(draw(32, 32, seed=1).requires_grad_()).float().square().sum().backward()
    taken.remove()
    assert len(values) == len(codes) == 9 and not keep.wrong
    for layer, gemm, tensor in (
        ("w2", "output", "input"),
        ("w1", "grad_input", "grad_output"),
        ("w3", "grad_input", "grad_output"),
    ):
        cast = DELAYED.gemms[gemm].a
        assert cast.format is not None
        x = to_numpy(values[layer, tensor])
        scales = reference.scale_from_amax(reference.amax(x, cast.granularity), cast.format)
        expected = reference.quantize(x, scales.inv_scale, cast.format, cast.granularity)
        assert_same_bits(codes[layer, gemm], expected, nan_codes=True)


def test_compiled_code_has_taps_only_while_somebody_watches() -> None:
    """A checkpointed graph, whose fused SwiGLU feeds an operand that stays in bfloat16."""
    graphs, seen = list[str](), Seen()

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx  # imports what is deprecated

        graphs.append(graph.print_readable(print_output=False))
        return compile_fx(graph, inputs)

    model = model_of(ROWWISE_WITH_GW_HP, layers=1, only="w2")
    model.compile(backend=backend, fullgraph=True)
    expected = passed(model, None, 0)
    for is_watched in (True, False, True):
        assert_all_same_bits(passed(model, seen if is_watched else None, 0), expected)
    # Each runs again: no third graph.
    without, with_taps = graphs
    assert "observe" not in without and with_taps.count("= torch.ops.f8emu.observe_gemm") == 3
    check_counts(seen, layers=1, times=2)


def test_copies_and_pickles_of_an_observed_layer_are_not_observed_and_observers_go_with_the_layers() -> None:
    model = model_of(ROWWISE, layers=1)
    watched, inspector, seen = len(observers._watched), f8.inspect(model), Seen()
    taken = observe(model, seen)
    layer: Any = model[0].w1
    assert layer.tap is not None
    assert copy.deepcopy(layer).tap is None and pickle.loads(pickle.dumps(layer)).tap is None
    for _ in range(2):
        taken.remove()
    inspector.close()
    assert "tap" not in layer.__dict__
    inspector = f8.inspect(model)
    observe(model, seen)
    alive = [weakref.ref(x) for x in (model, layer, inspector, seen)]
    assert len(observers._watched) == watched + 3
    del model, layer, inspector, seen, taken
    gc.collect()
    assert [x() for x in alive] == [None] * 4 and len(observers._watched) == watched


def test_the_tap_has_the_plan_of_the_gemm() -> None:
    """S = 3 shows in the bits of a GEMM."""
    splits: list[int] = []
    model = model_of(TENSORWISE, lambda: nn.Linear(8192, 16, bias=False), layers=1)

    class Keep(Seen):
        def gemm(self, seen: GemmSeen) -> None:
            super().gemm(seen)
            splits.append(seen.split_k)

    seen = Keep()
    taken = observe(model, seen)
    model(draw(16, 8192, seed=1))
    taken.remove()
    assert splits == [3] and not seen.wrong


def of_elements(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Every scale repeated for the rows and columns of its block."""
    for axis, size in enumerate(shape):
        scales = np.repeat(scales, -(-size // scales.shape[axis]), axis=axis).take(range(size), axis=axis)
    return scales


@pytest.mark.filterwarnings("ignore:f8emu.torch. there is no split-K plan")
@pytest.mark.parametrize("recipe", (ROWWISE, BLOCKWISE, MXFP8), ids=lambda recipe: recipe.name)
def test_statistics_are_those_of_numpy(recipe: Recipe, tmp_path: Path) -> None:
    """The forward GEMM: its casts by ml_dtypes, the parts of its error by the oracle on all of it."""
    m, n, k = 40, 48, 256
    model = model_of(recipe, lambda: nn.Linear(k, n, bias=False), layers=1)
    x = draw(m, k, seed=1) * torch.logspace(-5, 1, k).to(BF16)
    path = tmp_path / "run.jsonl"
    wanted = ["underflow", "saturation", "sqnr", "amax", "error", "scale_max", "zero_codes", "nan"]
    config: Any = {"path": str(path), "statistics": wanted, "sample": 64, "gemms": ["output"]}
    with f8.inspect(model, config) as inspector:
        output = model(x)
        inspector.step()
    records = {r["operand"]: r for r in records_of(path) if "operand" in r}
    gemm, values = recipe.output, {"a": to_numpy(x), "b": to_numpy(next(model.parameters()))}
    codes, scales, decoded = {}, {}, {}
    for side, value in values.items():
        cast = getattr(gemm, side)
        inv_scale, scales[side] = reference.scale_from_amax(
            reference.amax(value, cast.granularity), cast.format, recipe.scale_rule
        )
        with np.errstate(all="ignore"):
            scaled = value.astype(np.float32) * of_elements(inv_scale, value.shape)
        codes[side] = scaled.clip(-cast.format.max, cast.format.max).astype(getattr(ml_dtypes, cast.format.name))
        decoded[side] = codes[side].astype(np.float64) * of_elements(scales[side], value.shape)
        record, exact = records[side], value.astype(np.float64)
        is_zero = codes[side].astype(np.float32) == 0
        assert record["zero_codes"] == np.count_nonzero(is_zero)
        assert record["underflow"] == pytest.approx(np.mean(is_zero & (exact != 0)), rel=1e-6)
        assert record["saturation"] == 0 and record["nan"] == 0
        assert record["amax"] == np.abs(exact).max()
        assert record["scale_max"] == scales[side].max()
        noise = decoded[side].astype(np.float32).astype(np.float64) - exact
        assert record["sqnr"] == pytest.approx(10 * math.log10((exact**2).sum() / (noise**2).sum()), rel=1e-5)
    # The sample is all of the GEMM, beside 128x128 scales too: n is less than a block.
    pair = gemm.scaled_gemm_granularities
    options = {"granularity_a": pair[0], "granularity_b": pair[1], "use_fast_accum": gemm.use_fast_accum}
    options["chip"] = CHIPS[recipe.chip]
    split = records["product"]["split_k"]
    float32 = reference.scaled_mm(
        codes["a"], codes["b"].T, scales["a"], scales["b"].T, out_dtype="float32", split_k=split, **options
    ).astype(np.float64)
    exact, dequantized = (x["a"].astype(np.float64) @ x["b"].astype(np.float64).T for x in (values, decoded))
    product = to_numpy(output).astype(np.float64)
    parts = {
        "quantization": dequantized - exact,
        "accumulation": float32 - dequantized,
        "rounding": product - float32,
        "total": product - exact,
    }
    of_numpy = f8np.linear_error(recipe, values["a"], values["b"], split_k={"output": split})["output"]
    for name, part in parts.items():
        share = np.linalg.norm(part) / np.linalg.norm(exact)
        assert share > 0, name
        assert of_numpy[f"error_{name}"] == pytest.approx(share, rel=1e-12), name
        assert records["product"][f"error_{name}"] == pytest.approx(share, rel=1e-6), name
    assert records["product"]["error_bits"] == 1


def test_a_layer_that_overflows_at_step_40_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The byte-level Llama of benchmarks.train under delayed scaling, from step 36 on."""
    data = torch.frombuffer(bytearray(Path(tomllib.__file__).read_bytes() * 8), dtype=torch.uint8)
    corpus = Corpus(data, data, {})
    torch.manual_seed(0)
    model = Llama(layers=2, dim=128, hidden=128, heads=2, kv_heads=2, length=64)
    f8.convert_to_float8_training(model, config=DELAYED, module_filter_fn=lambda _, fqn: fqn != "head")
    culprit = "layers.1.feed_forward.w3"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    path, told = tmp_path / "run.jsonl", list[Any]()
    config: f8.InspectOptions = {"path": str(path), "start": 36, "every": 2, "statistics": ["saturation", "amax"]}
    with caplog.at_level(logging.WARNING, "f8emu"):
        with f8.inspect(model, config, optimizer=optimizer, first_step=36, on_event=told.append) as inspector:
            for step in range(36, 42):
                if step == 40:
                    with torch.no_grad():
                        model.get_parameter(f"{culprit}.weight").mul_(64)
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=BF16):
                    loss = model(corpus.batch(generator, 2, 64))
                loss.backward()
                optimizer.step()
                inspector.step()  # the optimizer has said so
    first = next(event for event in inspector.events if event.amount > 0.01)  # scales of earlier steps clip one or two
    assert (first.step, first.kind, first.layer) == (40, "overflow", culprit), inspector.events[:3]
    assert (first.gemm, first.operand, first.tensor) == ("output", "b", "weight") and first.amount > 0.5
    assert (
        told == inspector.events
        and f"step 40: overflow in layer {culprit}, GEMM output, operand b (weight)" in caplog.text
    )
    # The command line says it too.
    result = inspected(path, "--by", "saturation", "--top", "3")
    assert result.exit_code == 0
    assert f"step 40: overflow in {culprit} output b (weight)" in result.stdout.replace("\n", " ")
    out = tmp_path / "worst.json"
    assert inspected(path, "--by", "saturation", "--json", str(out)).exit_code == 0
    worst = json.loads(out.read_text())["worst"][0]
    assert worst["layer"] == culprit and worst["tensor"] == "weight" and worst["steps"] == 3  # 36, 38, 40


def test_a_nan_is_named_where_it_began() -> None:
    model = model_of(ROWWISE, lambda: nn.Linear(32, 32), layers=3)
    with torch.no_grad():
        model.get_parameter("1.weight")[3, 5] = torch.nan
    with f8.inspect(model, {"layers": "[12]"}) as inspector:
        model(draw(16, 32, seed=1))
    event = inspector.events[0]
    assert (event.step, event.kind, event.amount) == (1, "nan", 1)
    assert (event.layer, event.gemm, event.tensor) == ("1", "output", "weight")
    assert [e.layer for e in inspector.events][-1] == "2"


@pytest.mark.parametrize("way", ["eager", "compiled", "checkpoint", "reentrant checkpoint", "compiled checkpoint"])
def test_statistics_are_of_the_pass_that_the_operand_is_of(way: str, tmp_path: Path) -> None:
    """Two forward passes before the first backward, as in pipelines; a teacher's pass in between."""
    path, model = tmp_path / "run.jsonl", model_of(ROWWISE, lambda: nn.Linear(32, 32), layers=1)
    inputs = [(draw(32, 32, seed=i) * 10**i).requires_grad_() for i in range(3)]
    run: Any = model
    if "checkpoint" in way:
        run = functools.partial(checkpoint, model, use_reentrant="reentrant" in way)
    if "compiled" in way:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    knows_calls = way in ("eager", "compiled", "checkpoint")  # elsewhere the order of the passes counts
    with f8.inspect(model, {"path": str(path), "statistics": ["amax", "error"], "gemms": ["grad_weight"]}):
        first, second = (run(x).sum() for x in inputs[:2])
        if knows_calls:
            with torch.no_grad():
                run(inputs[2])
            second.backward()
            first.backward()
        else:
            first.backward()
            second.backward()
    found = [r for r in records_of(path) if r.get("operand") in ("b", "product")]
    amaxes = [x.abs().max().item() for x in inputs[:2]]
    assert [r["amax"] for r in found if r["operand"] == "b"] == (amaxes[::-1] if knows_calls else amaxes)
    assert all(r["error_total"] < 0.1 for r in found if r["operand"] == "product")


def test_nothing_is_known_of_a_forward_pass_in_another_step(tmp_path: Path) -> None:
    """Its backward pass has no statistics of the values, and not those of another pass."""
    path, model = tmp_path / "run.jsonl", model_of(ROWWISE, lambda: nn.Linear(32, 32), layers=1)
    with f8.inspect(model, {"path": str(path), "gemms": ["grad_weight"]}) as inspector:
        loss = model(draw(32, 32, seed=0)).sum()
        inspector.step()
        model(draw(32, 32, seed=1))
        loss.backward()
    found = [r for r in records_of(path) if r.get("operand") == "b"]
    assert len(found) == 1 and found[0]["scale_min"] > 0 and "amax" not in found[0]


def test_an_operand_that_is_known_by_its_codes_only_has_its_nan_named() -> None:
    """FSDP2 gathers weights in float8: the tap shows no values of them."""
    model = model_of(TENSORWISE, lambda: nn.Linear(32, 32), layers=1)
    with f8.inspect(model) as inspector:
        codes = torch.full((32, 32), 0x38, dtype=torch.uint8)
        codes[3, 5:7] = 0x7F
        one, gemm = torch.ones(1, 1), TENSORWISE.output
        a, b = (Operand(x.view(torch.float8_e4m3fn), one) for x in (codes.clone().fill_(0x38), codes))
        product = torch.zeros(32, 32)
        inspector._recorder.gemm(GemmSeen("0", "output", a, b, product, gemm, "emulated", 1, "recorded", TENSORWISE))
    (event,) = inspector.events
    assert (event.kind, event.operand, event.tensor, event.amount) == ("nan", "b", "weight", 2)


def test_an_inspection_ends_whatever_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "run.jsonl", model_of(ROWWISE, lambda: nn.Linear(32, 32), layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(event: Any) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        with f8.inspect(model, {"path": str(path)}, optimizer=optimizer, on_event=fail):
            model(draw(16, 32, seed=1) * torch.inf)
    assert "tap" not in model[0].__dict__ and not optimizer._optimizer_step_post_hooks
    # Many records are read before the end of their step.
    monkeypatch.setattr(recorder, "MOST_PENDING", 7)
    with f8.inspect(model, {"path": str(path)}) as inspector:
        for _ in range(5):
            model(draw(16, 32, seed=1))
        assert len(path.read_text().splitlines()) > 14 and len(inspector._recorder.pending) == 1


def test_what_if_tells_what_other_recipes_would_lose(tmp_path: Path) -> None:
    """An outlier in every row: under one scale nearly all other values underflow, in blocks only its neighbours."""
    x = torch.full((32, 512), 1e-4, dtype=BF16)
    x[:, 0] = 1000
    path = tmp_path / "run.jsonl"
    model = model_of(DELAYED, lambda: nn.Linear(512, 32), layers=1)
    with f8.inspect(
        model, {"path": str(path), "what_if": ["blockwise", "rowwise"], "tensors": ["input"], "gemms": ["output"]}
    ):
        model(x)
    found = {r.get("recipe", "own"): r["underflow"] for r in records_of(path) if "underflow" in r}
    assert found == pytest.approx({"own": 511 / 512, "rowwise": 511 / 512, "blockwise": 127 / 512})
    # The screen and the JSON have what the page has.
    result, out = inspected(path, "--json", str(tmp_path / "out.json")), tmp_path / "out.json"
    tried = json.loads(out.read_text())["what_if"]
    assert tried["casts"] == 1 and list(tried["sqnr"]) == ["delayed (in use)", "blockwise", "rowwise"]
    rows = [line.split()[-1] for line in result.stdout.splitlines() if line.startswith(("delayed", "blockw", "roww"))]
    assert rows == [f"{series[-1]['mean']:.1f}" for series in tried["sqnr"].values()]


def test_the_log_survives_a_crash_and_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    model = model_of(ROWWISE, lambda: nn.Linear(32, 32), layers=1)
    with f8.inspect(model, {"path": str(path)}):
        model(draw(256, 32, seed=1))
    lines = path.read_text().splitlines()
    path.write_text(path.read_text()[:-20])  # a crash
    result = inspected(path)
    assert result.exit_code == 0 and "the last line is incomplete" in result.stdout
    with f8.inspect(model, {"path": str(path)}):
        pass
    assert len(path.read_text().splitlines()) == len(lines) + 1
    # What a hostile file may have: numbers that are none, names that a terminal would obey.
    place = {"layer": "\x1b[2J[red]", "gemm": "output", "operand": "b", "tensor": "weight"}
    hostile = {**place, "step": 7, "sqnr": 10**400, "underflow": math.nan, "saturation": "inf", "nan": []}
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in (hostile, {**place, "step": 3, "event": "nan"})))
    result, out = inspected(path), tmp_path / "out"
    assert result.exit_code == 0 and "lines skipped because they are not JSON: 1" in result.stdout
    assert "\x1b" not in result.stdout and "step 3: nan in \\x1b[2J[red] output b" in result.stdout
    assert inspected(path, "--json", str(out)).exit_code == 0
    assert json.loads(out.read_text())["lines_skipped"] == 1
    result = inspected(path, "--by", "saturation", "--html", str(out))
    assert result.exit_code == 0, result.stderr
    assert "lines skipped because they are not JSON: 1" in out.read_text()
    log = JsonLog(str(tmp_path / "values"))
    log.write([{"nan": math.nan, "zero": 1.0, "mean": -math.inf, "amax": math.inf}])
    log.close()
    assert json.loads((tmp_path / "values").read_text(), parse_constant=pytest.fail) == {
        "nan": "nan",
        "zero": 1,
        "mean": "-inf",
        "amax": "inf",
    }
    if Path("/dev/full").exists():
        with caplog.at_level(logging.WARNING, "f8emu"):
            log = JsonLog("/dev/full")
            log.write([{"step": 1, "mean": 0.5}])
            log.write([{"step": 2}])
            log.close()
        assert caplog.text.count("No space left on device") == 1


def test_the_configuration_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    config = config_of({"every": 10, "start": 5, "end": 30, "statistics": ["underflow", "mse", "mse"]})
    assert config.statistics == ("underflow", "mse")
    assert [step for step in range(50) if config.is_step(step)] == [5, 15, 25]
    for keys, message in (
        ({"statistic": []}, "unknown keys"),
        ({"statistics": ["underflow", "kurtosis"]}, "'kurtosis'"),
        ({"gemms": "output"}, "list of names"),
        ({"layers": "("}, "regular expression"),
        ({"every": 0}, "at least 1"),
        ({"what_if": ["nvfp4"]}, "nvfp4"),
        ({"end": -1}, "not before start"),
    ):
        with pytest.raises(SpecError, match=message):
            config_of(cast(Any, keys))
    model = model_of(ROWWISE, layers=1)
    with pytest.raises(OperandError, match=r"'w1[$].'; the model has 3: 0[.]w1, "):
        f8.inspect(model, {"layers": "w1$."})
    # Searched, in the names that layers have without wrappers.
    compiled: Any = torch.compile(model)
    wrapped: Any = torch.compile(nn.Sequential(compiled, nn.Linear(2, 2)))
    assert list(float8_layers(wrapped, r"^0[.]0[.]w[12]$")) == ["0.0.w1", "0.0.w2"]
    assert list(float8_layers(wrapped, "3")) == ["0.0.w3"]
    with pytest.raises(SpecError, match="cannot write"):
        f8.inspect(model, {"path": str(tmp_path / "none" / "run.jsonl")})


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reader finds every number of the JSONL file; without the package the message says what to install."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, lines = model_of(ROWWISE, layers=1), tmp_path / "run.jsonl"
    options: f8.InspectOptions = {
        "layers": "w1",
        "what_if": ["tensorwise"],
        "path": str(lines),
        "tensorboard": str(tmp_path),
    }
    with f8.inspect(model, options) as inspector:
        for _ in range(2):
            model(draw(32, 32, seed=1)).sum().backward()
            inspector.step()
    reader = EventAccumulator(str(tmp_path / "rank0"), size_guidance={"scalars": 0}).Reload()
    observed = {(tag, event.step, event.value) for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)}
    records = [one for one in records_of(lines) if "gemm" in one and "event" not in one]
    assert {record["step"] for record in records} == {1, 2}
    expected = {
        ("/".join((record["layer"], record["gemm"], record["operand"], *recipe, name)), record["step"], float32(value))
        for record in records
        for recipe in [[record["recipe"]] if "recipe" in record else []]
        for name, value in record.items()
        if name in STATISTICS and isinstance(value, int | float)
    }
    assert len(expected) > 50 and observed >= expected
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match="pip install tensorboard"):
        f8.inspect(model, {"tensorboard": str(tmp_path)})


def float32(value: float) -> float:
    return float(np.float32(value))


def test_a_key_of_an_older_file_is_read(tmp_path: Path) -> None:
    place = {"layer": "0", "gemm": "output", "operand": "product", "tensor": "product"}
    lines: list[dict[str, Any]] = [{"schema": 1, "layers": 1}, {"step": 1, **place, "error_quantisation": 0.5}]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.warns(
        DeprecationWarning, match="'error_quantisation' of an inspected run is an older name; write 'error_"
    ):
        run = read_run(path)
    assert run.places[0].worst == {"error_quantization": (0.5, 1)}


def test_equal_events_are_one_line_and_one_cast_is_one_row(tmp_path: Path) -> None:
    """An operand of two GEMMs is one cast; two casts, and two products, stay apart. `--top` bounds both lists."""
    x = {"layer": "0", "tensor": "input", "cast": "float8_e4m3fn tensorwise", "sqnr": 31.5, "nan": 0}
    w = {**x, "gemm": "output", "operand": "b", "tensor": "weight"}
    places = [{**x, "gemm": "output", "operand": "a"}, {**x, "gemm": "grad_weight", "operand": "b"}]
    places += [w, {**w, "gemm": "grad_input", "sqnr": 31.25}]
    product = {"layer": "0", "operand": "product", "tensor": "product", "nan": 0}
    places += [{**product, "gemm": "output"}, {**product, "gemm": "grad_input"}]
    event = {"event": "overflow", "layer": "", "gemm": "output", "operand": "a", "tensor": "input"}
    lines: list[dict[str, Any]] = [{"schema": 1}, *({"step": step, **place} for step in (3, 4) for place in places)]
    lines += [{**event, "step": step, "amount": step / 100} for step in (3, 4, 5)]
    lines += [{**event, "event": "nan", "operand": "product", "tensor": "product", "step": 5}]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events, _, table = inspected(path).stdout.partition("\n\n")
    assert events.splitlines() == [
        "steps 3 to 5: overflow in (the model) output a (input), 5.000% at most, 3 times",
        "step 5: nan in (the model) output product",
    ]
    rows = [row.split("float8")[0].split() for row in table.splitlines()[2:]]
    assert [row[:6] for row in rows if row[0] == "0"] == [
        ["0", "grad_input", "b", "(weight)"],
        ["0", "output,", "grad_weight", "a,", "b", "(input)"],
        ["0", "output", "b", "(weight)"],
    ]
    assert rows[-1] == ["4", "events"]
    out = tmp_path / "all.json"
    short = inspected(path, "--by", "nan", "--top", "1", "--json", str(out)).stdout
    assert len(json.loads(out.read_text())["worst"]) == len(places), "--top is of the screen"
    assert "nan in (the model)" not in short and "1 more kind" in short
    assert inspected(path, "--by", "nan").stdout.count("  product  ") == 2

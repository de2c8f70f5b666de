"""Conversion of models: what is converted, what is not and why, and what stays shared."""

import copy
import dataclasses
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import f8emu.torch as f8
from f8emu.spec import (
    RECIPES,
    ROWWISE,
    ROWWISE_FAST,
    TENSORWISE,
    OperandError,
    RecipeName,
    ScaleRule,
    SpecError,
)
from f8emu.torch import Outcome
from f8emu.torch.conversion import convert, filters
from f8emu.torch.layer import first_step

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Model(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(2))
        self.attention = nn.MultiheadAttention(32, 4)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def outcomes(report: f8.ConversionReport) -> dict[str, str]:
    return {entry.fqn: entry.outcome.value for entry in report.entries}


@pytest.mark.parametrize("name", RECIPES)
def test_conversion_in_place(name: RecipeName) -> None:
    model = Model()
    before = dict(model.named_parameters(remove_duplicate=False))
    converted = f8.convert_to_float8_training(model, config=name, engine="emulated")
    assert converted is model
    assert dict(model.named_parameters(remove_duplicate=False)).keys() == before.keys()
    assert all(p is before[n] for n, p in model.named_parameters(remove_duplicate=False))
    layer = model.head
    assert isinstance(layer, f8.Float8Linear) and layer.recipe is RECIPES[name] and layer.engine == "emulated"
    assert layer.weight is model.embed.weight
    assert type(model.attention.out_proj) is not f8.Float8Linear
    model(torch.arange(32)).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("attention"))


def test_the_report_is_what_happens(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 20), nn.Linear(20, 32), nn.MultiheadAttention(32, 4))

    def is_chosen(layer: nn.Module, fqn: str) -> bool:
        return fqn in ("0", "1")

    report = f8.plan_conversion(model, config=ROWWISE, module_filter_fn=is_chosen)
    expected = {"0": "converted", "1": "size", "2": "filter", "3.out_proj": "type"}
    assert outcomes(report) == expected
    assert report.entries[1].shape == (20, 32)
    assert type(model[0]) is nn.Linear, "a dry run"
    assert str(report).splitlines() == [
        "recipe rowwise: 1 converted, 1 filter, 1 size, 1 type",
        "float8 GEMMs multiply 15.5% of 6612 parameters",
        "  0           [32, 32]        converted",
        "  1           [20, 32]        size: not multiples of 16",
        "  2           [32, 20]        filter",
        "  3.out_proj  [32, 32]        type: nn.MultiheadAttention reads its weight and does not call it",
        "not looked at:",
        "  3.in_proj_weight  [96, 32]        MultiheadAttention computes with it directly",
    ]
    with pytest.raises(OperandError, match=r"multiples of 16; got \[out, in\] of 1 \[20, 32\]; leave.*pad=True"):
        f8.convert_to_float8_training(model, config=ROWWISE, module_filter_fn=is_chosen)
    assert type(model[0]) is nn.Linear, "nothing changes where something is wrong"
    assert f8.plan_conversion(model, module_filter_fn=is_chosen, pad=True).names(Outcome.CONVERTED) == ("0", "1")
    with caplog.at_level(logging.INFO, logger="f8emu"):
        f8.convert_to_float8_training(model, config=ROWWISE, module_filter_fn=is_chosen, pad=True)
    assert "2 converted, 1 filter, 1 type" in caplog.text
    assert [type(m) for m in list(model)[:3]] == [f8.Float8Linear, f8.Float8Linear, nn.Linear]
    caplog.clear()
    f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert "recipe tensorwise: 1 converted; float8 GEMMs multiply 97.0% of the parameters. This" in caplog.text


def test_the_log_is_one_table_on_one_rank_and_fits_on_a_screen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of a kind are one row; heads are left out where nobody says otherwise, and that is said."""

    def model() -> nn.Module:
        blocks = [nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(20)]
        odd = {f"odd{i}": nn.Linear(32, 20 + i) for i in range(10)}
        return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(blocks), **odd}), "lm_head": MINE})

    MINE = nn.Linear(32, 64)
    with caplog.at_level(logging.INFO, logger="f8emu"):
        f8.convert_to_float8_training(model(), config="rowwise", pad=True)
        told, head = caplog.messages
        monkeypatch.setattr(convert, "rank_of_process", lambda: (1, 2))
        f8.convert_to_float8_training(model(), config="rowwise", pad=True)
    assert len(caplog.messages) == 2, "the other rank says nothing"
    assert told.splitlines()[:4] == [
        "convert_to_float8_training: recipe rowwise: 50 converted, 1 filter",
        "float8 GEMMs multiply 95.5% of 94037 parameters",
        "  model.layers.*.up x20    [64, 32]        converted",
        "  model.layers.*.down x20  [32, 64]        converted",
    ]
    assert told.splitlines()[-1] == "  lm_head                  [64, 32]        filter: a head, left out by default"
    assert "lm_head stays in high precision, as servers keep it and `f8emu export` leaves it" in head
    report = f8.plan_conversion(model(), pad=True, module_filter_fn=lambda module, name: True)
    assert "lm_head" in report.names(Outcome.CONVERTED), "a filter decides for heads too"
    many = nn.ModuleDict({f"a{i}": nn.Linear(16, 16 * i) for i in range(1, 60)})
    lines = f8.plan_conversion(many).screen.splitlines()
    assert len(lines) == 25 and max(map(len, lines)) <= 80 and lines[-1].startswith("... 37 more lines: print(plan_")
    name, unequal = "_".join("name" for _ in range(14)), nn.ModuleDict({"odd": nn.Linear(32, 20)})
    lines = f8.plan_conversion(nn.ModuleDict({name: unequal})).screen.splitlines()
    assert any(f"  {name}.odd" == line.rstrip() for line in lines), "no name is cut"


# After the first step


class Readers(nn.Module):
    """Layers that a conversion takes and that compute nothing in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.read, self.dtype, self.idle, self.head = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.dtype.weight, torch.Tensor)
        x = self.dtype(self.blocks[0](x).to(self.dtype.weight.dtype))  # other blocks are idle, as experts may be
        return self.head(x @ self.read.weight)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_not_in_float8_is_told_after_the_first_step(
    is_compiled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_step, "_is_traced", False)
    monkeypatch.setattr(first_step, "_waiting", [])
    reasons = {entry.fqn: entry.reason for entry in f8.plan_conversion(Readers()).entries if entry.reason}
    assert reasons == {"read": "Readers reads its weight, and may multiply it in high precision"}
    model = f8.convert_to_float8_training(Readers(), config="rowwise")
    assert isinstance(model, Readers)
    attributes = vars(model.blocks[0]).keys()
    model.head = nn.Linear(32, 32)  # as resize_token_embeddings does
    call = torch.compile(model, backend="eager") if is_compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def told() -> list[str]:
        return [line for record in caplog.records if record.name == "f8emu" for line in record.message.splitlines()]

    def step(microbatches: int = 1, of: torch.optim.Optimizer = optimizer) -> None:
        for _ in range(microbatches):
            call(torch.randn(16, 32)).sum().backward()
        assert not told()
        of.step()
        of.zero_grad()

    step(0, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))  # of another model, before a call of this one
    copied = copy.deepcopy(model)
    step(2)
    assert told() == [
        "convert_to_float8_training: not in float8 in the first step:",
        *["  read: never called; another module multiplies it, in high precision"] * (not is_compiled),
        "  idle: never called",
        "  head: plain nn.Linear again; convert the model after what replaces layers (resizing, fusing, merging)",
    ]
    caplog.clear()
    step()
    copied(torch.randn(16, 32))
    assert not told() and not first_step._waiting and not first_step._called
    assert vars(model.blocks[0]).keys() == attributes


def test_layers_that_compute_something_of_their_own_stay() -> None:
    """Their weight is made anew in every call, or not there yet, or in float64; or they are of a subclass."""
    made = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old way and lazy layers warn in some versions of torch
        hooked, lazy = nn.utils.weight_norm(nn.Linear(32, 32)), nn.LazyLinear(32)
    layers = [made, hooked, lazy, nn.Linear(32, 32).double(), type("Mine", (nn.Linear,), {})(32, 32)]
    model = nn.Sequential(*layers)
    assert set(outcomes(f8.plan_conversion(model)).values()) == {"type"}
    with pytest.warns(UserWarning, match="nothing to convert; recipe tensorwise: 5 type"):
        f8.convert_to_float8_training(model)
    assert all(after is before for after, before in zip(model, layers, strict=True))


def test_a_layer_whose_forward_was_replaced_stays() -> None:
    """It would go on computing in high precision. One that was compiled is converted: nothing runs its old code."""
    replaced, compiled = (nn.Linear(32, 32) for _ in range(2))
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    compiled.compile(backend="eager")
    model = f8.convert_to_float8_training(nn.Sequential(replaced, compiled))
    assert outcomes(f8.plan_conversion(model)) == {"0": "type", "1": "already"}
    x = torch.randn(16, 32)
    assert not torch.equal(model.get_submodule("1")(x), nn.functional.linear(x, compiled.weight, compiled.bias))


def test_a_module_that_is_there_twice_stays_one() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(32, 32)})
    model["c"].weight = shared.weight
    report = f8.plan_conversion(model)
    assert [entry.fqn for entry in report.entries] == ["a", "b.0", "c"]
    by_name = f8.plan_conversion(model, module_filter_fn=lambda layer, fqn: fqn != "a")
    assert outcomes(by_name) == {"a": "filter", "b.0": "filter", "c": "converted"}, "it is its first name that counts"
    f8.convert_to_float8_training(model, config="delayed")
    assert model["a"] is model["b"][0] and isinstance(model["a"], f8.Float8Linear)  # type: ignore[index]
    assert model["c"] is not model["a"] and model["c"].weight is shared.weight


def test_a_second_conversion() -> None:
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    layer = model[0]  # type: ignore[index]
    with pytest.warns(UserWarning, match="nothing to convert; recipe tensorwise: 1 already"):
        assert f8.convert_to_float8_training(model) is model
    assert model[0] is layer  # type: ignore[index]
    with pytest.raises(OperandError, match=r"0 is in float8 under recipe 'tensorwise'.*requested are 'rowwise'"):
        f8.convert_to_float8_training(model, config="rowwise")
    model.append(nn.Linear(32, 32))  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f8.convert_to_float8_training(model)
    assert model[0] is layer and isinstance(model[1], f8.Float8Linear)  # type: ignore[index]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.ReLU(), "no linear layer"),
        (
            nn.Sequential(nn.Linear(32, 32).double(), nn.Linear(32, 32)),
            r"1 filter, 1 type; 0: its .*model.float\(\)[^;]*",
        ),
    ],
)
def test_nothing_to_convert_is_said(model: nn.Module, said: str) -> None:
    with pytest.warns(UserWarning) as caught:
        f8.convert_to_float8_training(model, module_filter_fn=lambda layer, fqn: fqn != "1")
    (one,) = caught
    expected = f"convert_to_float8_training: nothing to convert; recipe tensorwise: {said}; plan_conversion.*"
    assert re.fullmatch(expected, str(one.message))


def test_a_filter_that_takes_other_arguments_is_refused() -> None:
    model, wrong = nn.Sequential(nn.Linear(32, 32)), cast(Any, lambda layer: True)
    with pytest.raises(SpecError, match=r"module_filter_fn must take \(module, name\)"):
        f8.convert_to_float8_training(model, config="rowwise", module_filter_fn=wrong)


def test_hooks_mode_and_attributes_stay() -> None:
    layer = nn.Linear(32, 16).eval()
    calls: list[str] = []
    layer.register_forward_hook(lambda *args: calls.append("hook"))
    layer.weight.requires_grad_(False)
    layer.tag = "mine"  # type: ignore[assignment]
    converted = f8.convert_to_float8_training(layer)
    assert isinstance(converted, f8.Float8Linear) and converted.weight is layer.weight and type(layer) is nn.Linear
    converted(torch.zeros(16, 32))
    assert calls == ["hook"] and not converted.training and converted.tag == "mine"
    converted.register_forward_hook(lambda *args: calls.append("new"))
    layer(torch.zeros(16, 32))
    assert calls == ["hook", "hook"], "the layer before has none of the hooks after"


def test_configurations() -> None:
    with pytest.warns(DeprecationWarning, match="recipe 'all_axiswise' is an older name; write 'rowwise'"):
        old = f8.plan_conversion(nn.Linear(32, 32), config="all_axiswise")  # pyright: ignore[reportArgumentType]
    assert old.recipe is ROWWISE
    with pytest.raises(SpecError, match="unknown recipe 'nvfp4'"):
        f8.convert_to_float8_training(nn.Linear(32, 32), config="nvfp4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match="must be a Recipe or the name of one; got dict"):
        f8.convert_to_float8_training(nn.Linear(32, 32), config={})  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="engine must be one of"):
        f8.convert_to_float8_training(nn.Linear(32, 32), engine="fast")  # pyright: ignore[reportArgumentType]
    with pytest.warns(DeprecationWarning, match="an older name; call convert_to_float8_training"):
        layer = f8.swap_linear_with_float8_linear(nn.Linear(32, 32), config=ROWWISE)
    assert isinstance(layer, f8.Float8Linear) and layer.recipe is ROWWISE


@pytest.mark.parametrize("in_cuda_graph", [False, True])
def test_the_filter_of_small_layers(in_cuda_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers above both thresholds, of sizes that raise no error, without the names that were given."""
    name = "SMALLEST_LAYERS_IN_CUDA_GRAPHS" if in_cuda_graph else "SMALLEST_LAYERS"
    smallest = filters.SmallestLayer(features=64, parameters=64 * 256)
    monkeypatch.setitem(getattr(filters, name), TENSORWISE, smallest)
    sizes = [(32, 512), (512, 64), (64, 128), (128, 128), (128, 250)]
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes))

    def converted(recipe: Any = "tensorwise", pad: bool = False, **options: Any) -> str:
        is_large = f8.filter_small_layers(recipe, in_cuda_graph=in_cuda_graph, pad=pad, **options)
        report = f8.plan_conversion(model, config=recipe, module_filter_fn=is_large, pad=pad)
        assert not report.names(Outcome.SIZE)
        return "".join(report.names(Outcome.CONVERTED))

    assert (converted(), converted(pad=True), converted(filter_fqns=["1", "x"])) == ("13", "134", "3")
    unmeasured = dataclasses.replace(TENSORWISE, name="mine", scale_rule=ScaleRule(power_of_two=True))
    assert (converted(unmeasured), converted(unmeasured, filter_fqns="13")) == ("0123", "0123")
    assert not f8.filter_small_layers(filter_fqns="out")(model[3], "block.out")


def test_the_thresholds_are_those_that_were_measured() -> None:
    """Every recipe in the record has its thresholds, and `rowwise_fast` those of `rowwise`, whose GEMMs are slower."""
    recorded = json.loads((RESULTS / "sizes-h200.json").read_text())["smallest"]
    for timing, table in (
        ("back to back", filters.SMALLEST_LAYERS),
        ("CUDA graph", filters.SMALLEST_LAYERS_IN_CUDA_GRAPHS),
    ):
        assert table[ROWWISE_FAST] == table[ROWWISE]
        assert {recipe.name: list(smallest) for recipe, smallest in table.items() if recipe != ROWWISE_FAST} == {
            subject.partition("/")[2]: smallest
            for subject, smallest in recorded[timing].items()
            if subject.startswith("f8emu/")
        }

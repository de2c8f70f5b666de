"""The adapter for torchtitan, on stand-ins of what it imports from torchtitan 0.2 and 0.3.

With torchtitan itself, on a GPU: `python -m benchmarks.torchtitan --layers 1 --wheels DIR`.
"""

import importlib
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import f8emu.torch as f8
from f8emu.spec import CastFrom

NAME = "f8emu.torch.integrations.torchtitan"
OF_0_2 = {
    "model_converter": """
registered = {}
def register_model_converter(cls, name):
    registered[name] = cls
"""
}
OF_0_3 = {
    "module": "class Module: pass",
    "model": """
from dataclasses import dataclass
class BaseModel: pass
class ModelConfigConverter:
    @dataclass(kw_only=True, slots=True)
    class Config: pass
""",
}


def adapter(files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The adapter as it is where a torchtitan with these modules of `protocols` is installed."""
    protocols = folder / "torchtitan" / "protocols"
    protocols.mkdir(parents=True)
    for file, text in {"__init__": "", **files}.items():
        (protocols / f"{file}.py").write_text(text)
    (folder / "torchtitan" / "__init__.py").write_text("")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan" or name.startswith(NAME)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(NAME)


class Linear(nn.Linear):
    """The linear layer of torchtitan 0.3."""


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(32, 48)
        self.odd = nn.Linear(48, 10)
        self.own = OwnForward(48, 48)
        self.output = nn.Linear(48, 32)
        self.last = nn.Linear(48, 32)


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, f8.Float8Linear)}


def test_model_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = adapter(OF_0_2, tmp_path, monkeypatch)
    registered = importlib.import_module("torchtitan.protocols.model_converter").registered
    assert registered == {"f8emu": found.Float8Converter}
    section = found.JobConfig().f8emu
    assert [field.name for field in fields(section)] == [
        "recipe_name",
        "enable_fsdp_float8_all_gather",
        "float8_primary_weights",
        "cast_weight_from",
        "precompute_float8_dynamic_scale_for_fsdp",
        "filter_fqns",
        "fqns",
    ]
    precomputed: list[nn.Module] = []
    monkeypatch.setattr(f"{NAME}.precompute_float8_dynamic_scale_for_fsdp", precomputed.append)
    options: dict[str, Any] = {"recipe_name": "delayed", "filter_fqns": ["output"], "cast_weight_from": "bfloat16"}
    gather = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
    at_rest = {"float8_primary_weights": True, "precompute_float8_dynamic_scale_for_fsdp": True}
    kinds = ({}, True), (gather, False), (gather, True), (at_rest, False), (at_rest, True)
    for keys, is_sharded in kinds:
        config = found.JobConfig(f8emu=replace(section, **options, **keys))
        converter = found.Float8Converter(config, SimpleNamespace(fsdp_enabled=is_sharded))
        model: Any = Model()
        precomputed.clear()
        converter.convert(model)
        assert converted(model) == {"last"} and model.last.recipe.cast_weight_from is CastFrom.BFLOAT16
        gathers = bool(keys) and is_sharded
        assert (type(model.last.weight.data) is not torch.Tensor) == gathers
        converter.post_optimizer_hook([model, model])
        assert precomputed == [model, model] * gathers
        checkpoints = SimpleNamespace(states={})
        found.checkpoint_delayed_scaling(SimpleNamespace(model_parts=[model, Model()], checkpointer=checkpoints))
        assert {name: state.model for name, state in checkpoints.states.items()} == {"float8": model}
    small = replace(section, filter_fqns=["output", "auto_filter_small_kn"])
    with pytest.warns(UserWarning, match="nothing to convert"):
        found.Float8Converter(found.JobConfig(f8emu=small), SimpleNamespace(fsdp_enabled=True)).convert(Model())


def test_config_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(kw_only=True, slots=True)
    class Config:
        layers: int

        def build(self, **kwargs: Any) -> nn.Module:
            return nn.Sequential(*(Model() for _ in range(self.layers)))

    found = adapter(OF_0_3, tmp_path, monkeypatch)
    options = found.Float8Converter.Config(recipe_name="rowwise", filter_fqns=["output"])
    options.enable_fsdp_float8_all_gather = options.precompute_float8_dynamic_scale_for_fsdp = True
    converter = found.Float8Converter(options)
    config = converter.convert(Config(layers=2))
    assert isinstance(config, Config) and config.layers == 2
    model = config.build()
    assert converted(model) == {"0.first", "0.last", "1.first", "1.last"}, "not the one with a forward of its own"
    first = model.get_submodule("0.first")
    assert isinstance(first, Linear) and isinstance(first, f8.Float8Linear)
    assert first.recipe.name == "rowwise" and type(first.weight.data) is not torch.Tensor
    precomputed: list[nn.Module] = []
    monkeypatch.setattr(f"{NAME}.precompute_float8_dynamic_scale_for_fsdp", precomputed.append)
    hooks: list[Any] = []
    optimizers = SimpleNamespace(register_step_post_hook=hooks.append)
    converter.post_optimizer_build(optimizers, [model], None)
    hooks[0](optimizers)
    assert precomputed == [model]

"""Conversion of models that people have: subclasses, adapters, shards, other libraries' layers, and the way back."""

import copy
import dataclasses
import importlib
import pickle
import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, distribute_tensor

import f8emu.torch as f8
from f8emu.spec import RECIPES, ROWWISE, TENSORWISE, OperandError, RecipeName, ScaleRule, SpecError, UnsupportedError
from f8emu.torch import Outcome
from f8emu.torch.weights.sharded_weight import ShardedWeight
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.states import through_file

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def entries(report: f8.ConversionReport) -> dict[str, f8.ConversionEntry]:
    return {entry.fqn: entry for entry in report.entries}


# What the report says


class Conv1D(nn.Module):
    """The Conv1D of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))


class Experts(nn.Module):
    """Mixtral's: all of one kind in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 64))


class Scaled(nn.Linear):
    """Surrounds the forward of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input * 2) + 1


class Direct(nn.Linear):
    """Never calls it."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


def test_the_report_counts_parameters_and_names_what_it_did_not_look_at() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(64, 32),
            "c_attn": Conv1D(96, 32),
            "experts": Experts(),
            "patches": nn.Conv2d(3, 32, 4),
            "norm": nn.LayerNorm(32),
            "mine": Scaled(32, 32),
            "up": nn.Linear(32, 64, bias=False),
            "head": nn.Linear(32, 64, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight
    report = f8.plan_conversion(model)
    assert entries(report)["mine"].outcome is Outcome.TYPE
    assert entries(report)["mine"].reason.startswith("Scaled may compute something else; if it only surrounds super()")
    assert {other.fqn: other.shape for other in report.others} == {
        "c_attn.weight": (32, 96),
        "experts.gate_up_proj": (4, 32, 64),
        "patches.weight": (32, 3, 4, 4),
    }, "the embedding is the head's weight, and vectors are no GEMM's"
    reasons = [other.reason for other in report.others]
    assert "transformers' Conv1D" in reasons[0] and "experts" in reasons[1] and reasons[2] == "a convolution"
    assert report.parameters == sum(p.numel() for p in model.parameters()) and report.covered == 2 * 32 * 64
    assert f"{2 * 32 * 64 / report.parameters:.1%} of {report.parameters} parameters" in str(report)
    assert "not looked at:\n  c_attn.weight" in str(report)
    f8.convert_to_float8_training(model)
    assert f8.plan_conversion(model).share == report.share, "what is converted already counts"
    embeddings = f8.plan_conversion(nn.Embedding(4, 4))
    assert embeddings.others[0].reason == "an embedding: no GEMM" and embeddings.share == 0


# Subclasses of nn.Linear


def test_a_subclass_that_surrounds_forward_is_converted_on_request() -> None:
    name = "delayed"
    torch.manual_seed(0)
    model: Any = nn.Sequential(Scaled(32, 32), Direct(32, 32))
    plain = nn.Linear(32, 32)
    plain.load_state_dict(model[0].state_dict())
    f8.convert_to_float8_training(plain_model := nn.Sequential(plain), config=name)
    report = f8.plan_conversion(model, config=name, subclasses=(Scaled, Direct))
    assert [entry.outcome for entry in report.entries] == [Outcome.CONVERTED, Outcome.TYPE]
    assert report.entries[1].reason == "the forward of Direct does not call super().forward()"
    f8.convert_to_float8_training(model, config=name, subclasses=(Scaled, Direct))
    layer = model[0]
    assert isinstance(layer, Scaled) and isinstance(layer, f8.Float8Linear) and type(model[1]) is Direct
    text = re.sub(r"\s{2,}", "", repr(layer))
    assert text.startswith(f"Float8Scaled(in_features=32, out_features=32, bias=True, recipe={name}, engine=auto")

    x = torch.randn(16, 32)
    expected = plain_model(x * 2) + 1
    assert_same_bits(layer(x), expected)
    assert_same_bits(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)
    saved = through_file(layer, weights_only=False)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved):
        assert type(twin) is type(layer) and twin.recipe == layer.recipe
        assert_same_bits(twin(x), expected)

    back = f8.dequantize_float8_training(model)
    assert back is model and type(model[0]) is Scaled and model[0].weight is layer.weight


# torchao's configurations


def config_of(torchao: Any, name: str = "tensorwise", **changes: Any) -> Any:
    return dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(name), **changes)


def test_torchaos_configurations_are_accepted(torchao: Any) -> None:
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        for config in (torchao.config.Float8LinearRecipeName(name), config_of(torchao, name)):
            assert f8.plan_conversion(nn.Linear(32, 32), config=config).recipe is RECIPES[name]
    layer = f8.convert_to_float8_training(nn.Linear(32, 32), config=config_of(torchao, "rowwise"))
    assert isinstance(layer, f8.Float8Linear) and layer.recipe is ROWWISE
    others: Any = Enum("Float8LinearRecipeName", {"OTHER": "nvfp4"})
    with pytest.raises(SpecError, match="unknown recipe 'nvfp4'"):
        f8.plan_conversion(layer, config=others.OTHER)
    # Options beside a recipe count as the arguments do.
    config = config_of(torchao, enable_fsdp_float8_all_gather=True, pad_inner_dim=True, emulate=True)
    odd: Any = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 32))
    assert f8.plan_conversion(odd, config=config).names(Outcome.CONVERTED) == ("0", "1")
    assert f8.filter_small_layers(config)(nn.Linear(20000, 8200), "0"), "padded"
    f8.convert_to_float8_training(odd, config=config)
    assert [layer.engine for layer in odd] == ["emulated"] * 2
    assert all(isinstance(layer.weight, ShardedWeight) for layer in odd)
    with pytest.raises(OperandError, match='engine must be "emulated" or left out with emulate=True; got "hardware"'):
        f8.convert_to_float8_training(nn.Linear(32, 32), config=config, engine="hardware")


def test_a_torchao_configuration_without_a_name_is_the_recipe_that_does_the_same(torchao: Any) -> None:
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        base = RECIPES[name]
        rule = ScaleRule(power_of_two=not base.scale_rule.power_of_two)
        fast = torchao.config.Float8GemmConfig(use_fast_accum=True)
        changes = {"round_scales_to_power_of_2": rule.power_of_two, "gemm_config_grad_input": fast}
        layer = f8.convert_to_float8_training(nn.Linear(32, 32), config=config_of(torchao, name, **changes))
        grad_input = dataclasses.replace(base.grad_input, use_fast_accum=True)
        assert isinstance(layer, f8.Float8Linear)
        assert layer.recipe == dataclasses.replace(base, grad_input=grad_input, scale_rule=rule)
        assert layer.recipe.label.startswith("torchao (")


def test_torchao_quantizes_what_was_converted_back(torchao: Any) -> None:
    model = f8.dequantize_float8_training(f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 48))))
    quantization = importlib.import_module("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert model(torch.randn(16, 32)).shape == (16, 48)


# The way back


@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_the_way_back_to_nn_linear(name: RecipeName) -> None:
    shared = nn.Linear(32, 32)
    last = nn.Linear(32, 48, bias=False).eval()
    model: Any = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU()), "c": last})
    calls: list[str] = []
    model["c"].register_forward_hook(lambda *args: calls.append("hook"))
    x, before = torch.randn(16, 32), dict(model.named_parameters(remove_duplicate=False))
    expected = model["c"](x), model["a"](x)
    f8.convert_to_float8_training(model, config=name)
    model["c"](x)
    assert f8.dequantize_float8_training(model) is model
    assert type(model["a"]) is nn.Linear and model["a"] is model["b"][0] and type(model["c"]) is nn.Linear
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys() and all(after[n] is before[n] for n in after)
    assert vars(model["c"]).keys() == vars(nn.Linear(1, 1)).keys() and not model["c"].training and model["a"].training
    assert_same_bits(model["c"](x), expected[0])
    assert_same_bits(model["a"](x), expected[1])
    assert len(calls) == 3
    assert list(model.state_dict()) == ["a.weight", "a.bias", "b.0.weight", "b.0.bias", "c.weight"]
    layer = f8.dequantize_float8_training(f8.convert_to_float8_training(nn.Linear(32, 32)))
    assert type(layer) is nn.Linear
    own = type("Own", (f8.Float8Linear,), {})(32, 32)
    with pytest.raises(OperandError, match="must be a Float8Linear that a conversion made; got Own"):
        f8.dequantize_float8_training(nn.Sequential(nn.ReLU(), own))


def test_a_changed_recipe_is_told_apart() -> None:
    changed = dataclasses.replace(TENSORWISE, scale_rule=ScaleRule(power_of_two=True))
    layer = f8.Float8Linear(32, 32, recipe=changed)
    assert "recipe=tensorwise, engine" in repr(f8.Float8Linear(32, 32))
    assert f"recipe=tensorwise ({changed.content_hash[:12]}), engine" in repr(pickle.loads(pickle.dumps(layer)))
    assert str(f8.plan_conversion(nn.Linear(32, 32), config=changed)).startswith(f"recipe {changed.label}: ")
    with pytest.raises(OperandError, match=rf"'tensorwise \({changed.content_hash[:12]}\)'.*are 'tensorwise',"):
        f8.convert_to_float8_training(nn.Sequential(layer))


# Other libraries


def test_a_sharded_model_is_refused(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    sharded: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fully_shard(sharded[1], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    parallel: Any = nn.Sequential(nn.Linear(32, 32))
    parallel[0].weight = nn.Parameter(distribute_tensor(parallel[0].weight.detach(), mesh, [Replicate()]))
    flat: Any = nn.Sequential(nn.Linear(32, 32))
    flat[0].weight = nn.Parameter(torch.zeros(1024))
    called: Any = fully_shard(nn.Sequential(nn.Linear(32, 32)), mesh=mesh)
    called(torch.randn(16, 32))  # its weight stays gathered
    for model in (sharded, parallel, flat, called):
        assert set(f8.plan_conversion(model).names(Outcome.SHARDED)) == {str(i) for i in range(len(model))}
        kinds = [type(layer) for layer in model]
        with pytest.raises(UnsupportedError, match=r"got sharded ones in 0.*; convert the model first, then"):
            f8.convert_to_float8_training(model)
        assert [type(layer) for layer in model] == kinds
    with pytest.raises(UnsupportedError, match="must be a plain tensor; got a DTensor; convert the model first"):
        f8.Float8Linear.from_float(parallel[0])
    with pytest.warns(UserWarning, match="nothing to convert"):
        f8.convert_to_float8_training(sharded, module_filter_fn=lambda layer, fqn: False)
    converted: Any = fully_shard(f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32))), mesh=mesh)
    converted(torch.randn(16, 32))
    with pytest.raises(UnsupportedError, match="got sharded ones in 0; load the state dict into"):
        f8.dequantize_float8_training(converted)


def test_transforms_of_torch_func_and_forward_mode_are_refused_in_one_sentence() -> None:
    model, x = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32))), torch.randn(16, 32)
    block, parameters = f8.Float8FeedForward(32, 32, recipe="delayed"), dict(model.named_parameters())
    weights = {name: p.detach() for name, p in parameters.items()}

    def loss(parameters: dict[str, Any], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    def forward_mode(module: nn.Module, tangent_of: str) -> None:
        with forward_ad.dual_level():
            own = {k: forward_ad.make_dual(w, w) if k == tangent_of else w for k, w in weights.items()}
            given = forward_ad.make_dual(x, x) if tangent_of == "input" else x
            torch.func.functional_call(module, own if module is model else {}, (given,))

    assert torch.autograd.grad(loss(parameters, x), list(parameters.values())), "ordinary gradients are not"
    forward_mode(model, "nothing")  # no tangent, no derivative
    of_func = "torch.func's transforms .* are not supported"
    of_tangents = "forward-mode AD .* is not supported .*; got an input or a parameter with a tangent; .*dequant"
    strategy = {"vectorize": True, "strategy": "forward-mode"}
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.func.grad(loss)(parameters, x), of_func),
        (lambda: torch.func.vjp(model, x), of_func),
        (lambda: torch.func.jvp(model, (x,), (x,)), of_func),
        (lambda: torch.func.jacrev(model)(x), of_func),
        (lambda: torch.func.vmap(model)(x.view(2, 8, 32)), of_func),
        (lambda: torch.compile(torch.func.grad(loss), backend="eager")(parameters, x), of_func),
        *((lambda name=name: forward_mode(model, name), of_tangents) for name in ("input", *weights)),
        (lambda: torch.autograd.functional.jacobian(model, x, **strategy), of_tangents),
        (lambda: torch.func.vmap(block)(x.view(2, 8, 32)), of_func),
        (lambda: forward_mode(block, "input"), of_tangents),
    ]
    for number, (call, message) in enumerate(calls):
        kind = "Float8FeedForward" if number >= len(calls) - 2 else "Float8Linear"
        with pytest.raises(UnsupportedError, match=f"{kind}: {message}"):
            call()


def test_batched_gradients_and_other_layouts() -> None:
    """Jagged tensors are computed by their values; the rest is one sentence."""
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)))
    x = torch.randn(16, 32, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"batched gradients \(is_grads_batched=True, .*dequantize"):
        torch.autograd.grad(model(x), x, torch.randn(3, 16, 16), is_grads_batched=True)
    expected = model(x)
    expected.sum().backward()
    parts = torch.nested.nested_tensor_from_jagged(x.detach().requires_grad_(), torch.tensor([0, 3, 3, 16]))
    observed = model(parts)
    grads = torch.autograd.grad(observed.values().sum(), [*model.parameters()])
    assert torch.equal(observed.values(), expected) and (observed + observed).shape == observed.shape
    assert all(p.grad is not None and torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))
    with pytest.raises(OperandError, match=r"must be a dense tensor, or a nested one of layout torch\.jagged"):
        model(x.detach().to_sparse())


def test_torchscript_is_refused_in_one_sentence() -> None:
    layer, x = f8.convert_to_float8_training(nn.Linear(32, 32), config="delayed"), torch.randn(16, 32)
    message = r"^Float8\w+: torch.jit.trace and torch.jit.script are not supported .* torch.export.export, .*dequantize"
    for model in (layer, nn.Sequential(nn.ReLU(), layer), f8.Float8FeedForward(32, 32)):
        for call in (lambda model: torch.jit.trace(model, x), torch.jit.script):
            with pytest.raises(UnsupportedError, match=message):
                call(model)
    with pytest.raises(UnsupportedError, match=r"^quantize: torch.jit.trace is not supported, .* torch.export.export"):
        torch.jit.trace(lambda x: f8.quantize(x, torch.ones(1, 1), "float8_e4m3fn"), x)
    back = f8.dequantize_float8_training(nn.Sequential(layer))
    assert torch.equal(torch.jit.script(back)(x), back(x)), "the way out"

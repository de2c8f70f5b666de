"""Mixtures of experts: those of transformers and torchtitan, and others that call grouped GEMMs, there and back."""

import copy
import json
import pickle
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import f8emu.torch as f8
from f8emu.spec import BLOCKWISE, DELAYED, ROWWISE, ROWWISE_FAST, OperandError, RecipeName
from f8emu.torch import Outcome
from f8emu.torch.conversion.mixtures import speed_of_experts
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits
from tests.torch_path.layers import both_passes, draw
from tests.torch_path.test_torchtitan import OF_0_2, OF_0_3, adapter

transformers: Any = pytest.importorskip("transformers")

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

# The smallest sizes of one GEMM each, so that few kernels are compiled; one expert has most tokens, one few.
DIM, HIDDEN, EXPERTS, TOKENS = 32, 48, 4, 40
COMMON = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "vocab_size": 64}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": HIDDEN, "head_dim": 16},
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 16},
}


def model_of(kind: str, **config: Any) -> Any:
    torch.manual_seed(0)
    found = getattr(transformers, f"{kind}Config")(**COMMON, **KINDS[kind], **config)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(found, dtype=torch.bfloat16)


def wider_than(least: int) -> Any:
    return lambda layer, fqn: max(layer.in_features, layer.out_features) >= least


def experts_in(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def routing(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the two experts of each (no token is the third's) and their weights."""
    index = torch.stack([torch.tensor([0, 1] if i % 8 == 0 else [3, i % 2]) for i in range(TOKENS)])
    return draw(TOKENS, DIM, seed=seed), index, draw(TOKENS, 2, seed=seed + 1)


def results(experts: Any, index: Tensor, x: Tensor, weights: Tensor, call: Any = None) -> list[Any]:
    """The output, and all gradients."""
    call = experts if call is None else call
    grad = draw(TOKENS, DIM, seed=7)
    return both_passes(lambda x, w: call(x, index, w), x, weights, grad=grad, parameters=experts.parameters())


class Loop(nn.Module):
    """The experts of transformers, each by Float8Linear layers of its own."""

    def __init__(self, experts: Any, recipe: RecipeName) -> None:
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            setattr(self, name, nn.ModuleList())
            for matrix in getattr(experts, name).detach():
                layer = f8.Float8Linear(*reversed(matrix.shape), bias=False, dtype=matrix.dtype, recipe=recipe)
                layer.weight = nn.Parameter(matrix.clone())
                getattr(self, name).append(layer)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        order = index.flatten().argsort(stable=True)
        parts = x[order // 2].split(torch.bincount(index.flatten(), minlength=EXPERTS).tolist())
        outputs: list[Tensor] = []
        for part, gate_up, down in zip(parts, self.gate_up_proj, self.down_proj, strict=True):  # pyright: ignore[reportArgumentType]
            gate, up = gate_up(part).chunk(2, dim=1)
            outputs.append(down(silu(gate) * up))
        output = torch.cat(outputs) * weights.flatten()[order].unsqueeze(1)
        return output[order.argsort()].view(-1, 2, DIM).sum(1)

    def stacked(self, found: list[Tensor]) -> list[Tensor]:
        """With the gradients of all experts as one."""
        return [*found[:3], torch.stack(found[3 : 3 + EXPERTS]), torch.stack(found[3 + EXPERTS :])]


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise", "delayed"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_have_the_bits_of_a_loop_of_layers(kind: str, recipe: RecipeName) -> None:
    is_mixed = kind == "Mixtral"  # float32 weights, tokens in bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        compare_with_loop(model_of(kind).float() if is_mixed else model_of(kind), recipe)


def compare_with_loop(model: Any, recipe: RecipeName) -> None:
    experts = experts_in(f8.convert_to_float8_training(model, config=recipe))
    loop = Loop(experts, recipe)
    for seed in range(3 if recipe == "delayed" else 1):
        x, index, weights = routing(seed)
        found = results(experts, index, x, weights)
        assert_all_same_bits(found, loop.stacked(results(loop, index, x, weights)))
        assert not found[3][2].any(), "no token is the third's"
    x, index, weights = routing()
    # Indices beyond the last expert are those of other ranks: zeros, here and in the gradients.
    beyond = experts(x, index + EXPERTS * (index == 3), weights)
    rest = experts(x, index, weights * (index != 3))
    assert_same_bits(beyond, rest)


@pytest.mark.parametrize("kind", KINDS)
def test_models_train_are_saved_and_come_back(kind: str) -> None:
    model = model_of(kind, output_router_logits=True)
    before, state = type(experts_in(model)), copy.deepcopy(model.state_dict())
    report = f8.plan_conversion(model, config="rowwise")
    assert {entry.fqn for entry in report.entries if entry.outcome is not Outcome.CONVERTED} == {"lm_head"}
    assert all("embedding" in w.reason or "chooses among" in w.reason or "bias" in w.fqn for w in report.others)
    assert sum("chooses among experts" in weight.reason for weight in report.others) == 2
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=tokens, labels=tokens).loss
    f8.convert_to_float8_training(model, config="rowwise")
    experts = experts_in(model)
    assert isinstance(experts, before) and type(experts) is not before and "recipe=rowwise" in repr(experts)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    # 1. Training, and a copy that is the same.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    for _ in range(3):
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(float((losses[0] - expected).detach())) < 0.1 and torch.isfinite(torch.stack(losses)).all()
    assert losses[-1] < losses[0]
    x, index, weights = routing()
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert type(other) is type(experts)
        assert_all_same_bits(*(results(e, index, x, weights) for e in (experts, other)))
    # 2. Back, with the old bits.
    model.load_state_dict(state)
    f8.dequantize_float8_training(model)
    assert (
        type(experts_in(model)) is before and vars(experts_in(model)).keys() == vars(experts_in(model_of(kind))).keys()
    )
    assert_same_bits(model(input_ids=tokens, labels=tokens).loss, expected)


def test_compiled_and_checkpointed_experts_have_the_bits_of_eager_ones() -> None:
    x, index, weights = routing()
    for kind, is_compiled in (("Mixtral", True), ("GptOss", False)):
        experts = experts_in(f8.convert_to_float8_training(model_of(kind), config="rowwise"))
        expected = results(experts, index, x, weights)
        kept: dict[str, Any] = {
            "context_fn": partial(create_selective_checkpoint_contexts, f8.float8_checkpoint_policy())
        }
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        calls = [compiled] * is_compiled
        calls += [partial(checkpoint, experts, use_reentrant=False, **own) for own in ({}, kept)]
        for call in calls:
            observed = results(experts, index, x, weights, call)
            assert_all_same_bits(observed, expected)
    with FlopCounterMode(display=False) as counter:
        results(experts, index, x, weights)
    padded = 2 * TOKENS + 16 * EXPERTS  # the tokens of the GEMMs over them
    assert counter.get_total_flops() == 2 * (2 * 2 * TOKENS + padded) * 3 * HIDDEN * DIM


# Routers

SIZES = {"hidden_size": 64, "d_model": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 128}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "num_layers": 2}
SIZES |= {"num_heads": 4, "num_experts": 16, "pad_token_id": 0}
WITH_LINEAR_ROUTERS: dict[str, dict[str, Any]] = {
    "SwitchTransformers": {"d_kv": 16, "d_ff": 128, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "NllbMoe": {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "Zaya": {},  # a router of three layers, whose last has an output for no expert
    "LongcatFlash": {},  # outputs for experts that compute nothing; the weight is read
    "Phimoe": {"num_local_experts": 16},  # a subclass of nn.Linear
    "Qwen3Next": {"num_experts": 64, "shared_expert_intermediate_size": 64},  # a gate of as many outputs is no router
    "HunYuanMoEV1": {},
    "JetMoe": {"num_local_experts": 16},
}
ROUTER = re.compile(r"(^|[._])(router|gate|wg)(\.|$)")  # in a layer's name


@pytest.mark.parametrize("kind", WITH_LINEAR_ROUTERS)
def test_routers_of_linear_layers(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES | WITH_LINEAR_ROUTERS[kind])
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}Model")(config)
    outcomes = {e.fqn: e.outcome for e in f8.plan_conversion(model, config="rowwise", pad=True).entries}
    assert {name for name, one in outcomes.items() if one is Outcome.ROUTER} == set(filter(ROUTER.search, outcomes))
    assert any(map(ROUTER.search, outcomes))


@pytest.mark.exhaustive
def test_routers_of_every_mixture_of_transformers() -> None:
    """Every mixture whose default configuration makes a model: six layers of each, without data."""
    done = list[str]()
    for config_class in transformers.CONFIG_MAPPING.values():
        try:
            config = config_class()
            parts = [
                config,
                *(part for part in vars(config).values() if isinstance(part, transformers.PreTrainedConfig)),
            ]
            fields = [(part, name) for part in parts for name, value in vars(part).items() if type(value) is int]
            if not any("expert" in name for _, name in fields):
                continue
            for part, name in fields:
                if name in ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"):
                    setattr(part, name, min(6, getattr(part, name)))
            model_class: Any = transformers.MODEL_MAPPING[config_class]
            with torch.device("meta"):
                model = (model_class if isinstance(model_class, type) else model_class[0])(config)
        except Exception:  # a configuration that needs sizes
            continue
        plan = f8.plan_conversion(model, config="rowwise", pad=True)
        done.append(config_class.__name__)
        blocks = {e.fqn.rpartition(".")[0] for e in plan.entries if e.fqn.endswith("experts")}
        for e in plan.entries:
            if any(e.fqn.startswith(f"{block}.") for block in blocks) and ROUTER.search(e.fqn):
                assert e.outcome is Outcome.ROUTER, (config_class, e)
    assert len(done) > 70, done


# Others than transformers' experts

SOURCE = """
import torch
from torch import nn
from torch.nn.functional import silu

def run(w1, w2, w3, x, sizes):
    offs = torch.cumsum(sizes, dim=0, dtype=torch.int32)
    h = silu(torch._grouped_mm(x, w1.transpose(-2, -1), offs=offs))
    h = h * torch._grouped_mm(x, w3.transpose(-2, -1), offs=offs)
    return torch._grouped_mm(h, w2.transpose(-2, -1), offs=offs)

class GroupedExperts(nn.Module):
    def __init__(self, experts, dim, hidden, ends):
        super().__init__()
        for name, shape in zip(ends, ((hidden, dim), (dim, hidden), (hidden, dim))):
            setattr(self, name, nn.Parameter(torch.randn(experts, *shape).bfloat16() / 8))
        self.names = ends

    def forward(self, x, num_tokens_per_expert):
        return run(*(getattr(self, name) for name in self.names), x.bfloat16(), num_tokens_per_expert).type_as(x)
"""


def class_in(file: str) -> Any:
    """The class, as if that file defined it."""
    module = ModuleType(file)
    exec(SOURCE, module.__dict__)
    return module.__dict__["GroupedExperts"]


class MoE(nn.Module):
    """A block as torchtitan has it."""

    def __init__(self, experts: nn.Module, shared: bool = False) -> None:
        super().__init__()
        self.routed_experts = nn.ModuleDict({"inner_experts": experts})
        self.router = nn.ModuleDict({"gate": nn.Linear(DIM, 16)})
        self.gate_proj = nn.Linear(DIM, HIDDEN)
        self.shared_expert_gate = nn.Linear(DIM, 1) if shared else None


def test_torchtitan_and_others_that_call_grouped_gemms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("w1", "w2", "w3"), ("w1_EFD", "w2_EDF", "w3_EFD"), ("a", "b", "c")
    files = ("torchtitan.models.moe.moe", "torchtitan.models.common.moe", "somewhere")
    x, sizes = draw(TOKENS, DIM, seed=1), torch.tensor([7, 0, 25, 1, *[0] * 12])  # and 7 behind the last
    offs, grad = sizes.cumsum(0).int(), draw(TOKENS, DIM, seed=2)
    for own, file in zip(names, files, strict=True):
        torch.manual_seed(1)
        experts = class_in(file)(16, DIM, HIDDEN, own)
        w1, w2, w3 = (p.detach().clone().requires_grad_() for p in experts.parameters())
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        model = MoE(experts, shared=True)
        report = f8.plan_conversion(model, config="rowwise")
        outcomes = {entry.fqn: entry.outcome for entry in report.entries}
        assert outcomes == {
            "routed_experts.inner_experts": Outcome.CONVERTED,
            "router.gate": Outcome.ROUTER,
            "gate_proj": Outcome.CONVERTED,
            "shared_expert_gate": Outcome.ROUTER,
        }
        assert ("one by one" in str(report)) == (file == "somewhere")
        f8.convert_to_float8_training(model, config="rowwise")
        output = experts(inputs[0], sizes)
        output.backward(grad)
        with pytest.raises(OperandError, match="the module is in float8 under recipe 'rowwise'"):
            f8.convert_to_float8_training(experts, config="tensorwise")
        scope = experts.converted_from.forward.__globals__
        monkeypatch.setitem(sys.modules, file, ModuleType(file))  # Dynamo 2.11 imports what it inlines
        vars(sys.modules[file]).update(scope)
        scope["run"] = torch.compile(scope["run"], backend="eager")  # Dynamo does not see what watches the call
        assert_same_bits(experts(x, sizes), output)
        gate, up = (f8.grouped_linear(inputs[1], w, offs, recipe="rowwise") for w in (w1, w3))
        expected = f8.grouped_linear(silu(gate) * up, w2, offs, recipe="rowwise")
        expected.backward(grad)
        of_layers = [expected, w1.grad, w2.grad, w3.grad, inputs[1].grad]
        assert_all_same_bits([output, *(p.grad for p in experts.parameters()), inputs[0].grad], of_layers)
    # What no grouped GEMM multiplies stays, and so does what a recipe or a size excludes.
    for recipe, i, reason in ((BLOCKWISE, 0, "blockwise"), (DELAYED, 2, "way of their own")):
        model = MoE(class_in(files[i])(16, DIM, HIDDEN, names[i]))
        entry = f8.plan_conversion(model, config=recipe, tokens_per_expert=512).entries[0]
        assert entry.outcome is Outcome.TYPE and reason in entry.reason and entry.speed is None
        caplog.clear()
        f8.convert_to_float8_training(model, config=recipe)
        assert f"experts stay in high precision: {entry.fqn}: {entry.reason}" in caplog.text
    odd = f8.plan_conversion(class_in(files[0])(4, DIM, 40, names[0]), config="rowwise").entries[0]
    assert odd.outcome is Outcome.TYPE and odd.reason == "not multiples of 16"
    replaced: Any = class_in(files[0])(4, DIM, HIDDEN, names[0])
    replaced.forward = lambda *_: None
    assert "replaced" in f8.plan_conversion(replaced).entries[0].reason


@dataclass(kw_only=True, slots=True)
class Config:
    """The configuration of a model, as in torchtitan 0.3."""

    def build(self) -> nn.Module:
        return MoE(class_in("torchtitan.models.common.moe")(4, DIM, HIDDEN, ("w1_EFD", "w2_EDF", "w3_EFD")))


def test_torchtitans_converters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = adapter(OF_0_3, tmp_path / "0.3", monkeypatch)
    model = found.Float8Converter(found.Float8Converter.Config(recipe_name="delayed")).convert(Config()).build()
    assert "settings.states.2.inv_scale" in " ".join(f8.delayed_state_dict(model))
    assert all(isinstance(module, found.Module) for module in model.modules()), "it raises an error for others"
    found = adapter(OF_0_2, tmp_path / "0.2", monkeypatch)
    for fqns in ([], [""], ["experts"]):
        options = found.Options(recipe_name="rowwise", fqns=fqns, filter_fqns=[""])  # as the command line has no names
        converter = found.Float8Converter(found.JobConfig(f8emu=options), SimpleNamespace(fsdp_enabled=False))
        model = MoE(class_in("torchtitan.models.moe.moe")(4, DIM, HIDDEN, ("w1", "w2", "w3")))
        converter.convert(model)
        assert isinstance(model.gate_proj, f8.Float8Linear)
        assert ("recipe=rowwise" in repr(model.routed_experts)) == (fqns == ["experts"])


def test_the_model_of_bytes_says_where_bfloat16_is_faster() -> None:
    # Measured on an H100: prototypes/moe.md. Llama 4 Scout, DeepSeek-V3 (8 of its experts), Qwen3-30B, Mixtral.
    shapes = {(16, 8192, 5120): 1024, (8, 2048, 7168): 4096, (128, 768, 2048): 512, (8, 14336, 4096): 2048}
    gradients = {name: replace(DELAYED.gemms[name], use_fast_accum=True) for name in ("grad_input", "grad_weight")}
    measured = {ROWWISE_FAST: (1.11, 1.39, 0.89, 1.28), replace(DELAYED, **gradients): (1.24, 1.51, 1.03, 1.41)}
    for recipe, speeds in measured.items():
        for (shape, tokens), speed in zip(shapes.items(), speeds, strict=True):
            assert abs(speed_of_experts(shape, tokens, recipe) / speed - 1) < 0.04
    # Measured on an H200: what promoted sums cost.
    for entry in json.loads((RESULTS / "experts-h200.json").read_text())["shapes"]:
        ms = {subject["subject"]: subject["ms"] for subject in entry["subjects"] if subject["mode"] == "compiled"}
        shape, tokens = (entry["experts"], entry["hidden"], entry["dim"]), entry["tokens"] / entry["experts"]
        fast, promoted = (speed_of_experts(shape, tokens, recipe) for recipe in (ROWWISE_FAST, ROWWISE))
        assert abs(promoted / fast / (ms["f8emu/rowwise_fast"] / ms["f8emu/rowwise"]) - 1) < 0.04
    with torch.device("meta"):
        models = [class_in("torchtitan.models.moe.moe")(e, d, h, ("w1", "w2", "w3")) for e, h, d in shapes]
    plans = [
        f8.plan_conversion(model, config="rowwise", tokens_per_expert=tokens)
        for model, tokens in zip(models, shapes.values(), strict=True)
    ]
    assert [(plan.entries[0].speed or 0) > 1 for plan in plans] == [True, True, False, True]
    assert "0.83 times the speed of bfloat16" in str(plans[2])
    for tokens, expected in ((512, [False] * 4), (None, [True, True, False, True])):
        is_large = f8.filter_small_layers("rowwise", tokens_per_expert=tokens)
        assert [is_large(model, "experts") for model in models] == expected
    assert not f8.filter_small_layers("rowwise", filter_fqns=["experts"])(models[3], "experts")
    # A filter of linear layers is asked for each matrix.
    for least, expected in ((48, Outcome.CONVERTED), (64, Outcome.FILTER)):
        plan = f8.plan_conversion(model_of("Mixtral"), config="rowwise", module_filter_fn=wider_than(least))
        assert {e.outcome for e in plan.entries if e.fqn.endswith("experts")} == {expected}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_observers_see_every_expert(recipe: RecipeName, tmp_path: Path) -> None:
    model = f8.convert_to_float8_training(model_of("Qwen3Moe"), config=recipe)
    other, (x, index, weights) = copy.deepcopy(model), routing()
    experts = experts_in(model)
    for _ in range(2):
        results(experts, index, x, weights)
        results(experts_in(other), index, x, weights)
    expected = results(experts_in(other), index, x, weights)
    path = tmp_path / "run.jsonl"
    config: f8.InspectOptions = {
        "layers": "layers[.]0[.]mlp[.]experts",
        "statistics": ["underflow", "amax"],
        "path": str(path),
    }
    with f8.inspect(model, config) as inspector, f8.capture(model, tmp_path / "capture", layers="experts"):
        observed = results(experts, index, x, weights)
        inspector.step()
    states = ([x.float() for x in f8.delayed_state_dict(one).values()] for one in (model, other))
    assert_all_same_bits(observed, expected)
    assert_all_same_bits(*states)
    records = [json.loads(line) for line in path.read_text().splitlines()][1:]
    place = ("layer", "gemm", "operand")
    inputs = {r["layer"]: r for r in records if tuple(r[key] for key in place[1:]) == ("output", "a")}
    prefix = "model.layers.0.mlp.experts"
    assert list(inputs) == [f"{prefix}.{name}.{i}" for i in range(EXPERTS) for name in ("gate_up_proj", "down_proj")]
    sizes = torch.bincount(index.flatten(), minlength=EXPERTS).tolist()
    assert [inputs[f"{prefix}.down_proj.{i}"]["rows"] for i in range(EXPERTS)] == sizes, "the third is idle"
    assert all(("underflow" in record) == (record["rows"] > 0) for record in inputs.values())
    assert not experts.is_watched and "layers_of_experts" not in vars(copy.deepcopy(experts))

"""One rule of casting: with `cast_weight_from="bfloat16"` every cast of a weight reads what its bfloat16 copy holds.

The right bits are those of the same module without the option whose float32 weights have the copy's values.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8emu.torch as f8
import f8ref.numpy as oracle
from f8emu.capture import diff, replay
from f8emu.capture.read import read_capture
from f8emu.conformance.layers.trace import engine_linear
from f8emu.conformance.run.subject import load_subject
from f8emu.dialects import quantize
from f8emu.spec import CastFrom, CastFromName, Recipe, RecipeName, SpecError, recipe_by_name, recipe_from_json
from f8emu.torch.serving.export import export_checkpoint
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits
from tests.torch_path.layers import draw

N, K, T = 32, 48, 32
OFFS = torch.tensor([16, 16, 32], dtype=torch.int32)


def recipe_of(name: str) -> Recipe:
    return replace(recipe_by_name(name), cast_weight_from=CastFrom.BFLOAT16)


def linear(recipe: Recipe) -> nn.Module:
    return f8.Float8Linear(K, N, recipe=recipe)


def feed_forward(recipe: Recipe) -> nn.Module:
    block = nn.Module()
    for name, sizes in (("w1", (K, N)), ("w2", (N, K)), ("w3", (K, N))):
        block.add_module(name, nn.Linear(*sizes, bias=False))
    return f8.Float8FeedForward.from_float(block, recipe=recipe)


def experts(recipe: Recipe) -> nn.Module:
    return f8.Float8Experts(3, K, N, recipe=recipe)


def at_rest(recipe: Recipe) -> Any:
    model = nn.Sequential(nn.Linear(K, N))
    return f8.convert_to_float8_training(model, config=recipe, float8_primary_weights=True)


def copied(model: nn.Module) -> Any:
    """The module, its weights rounded to bfloat16, under the rule that casts parameters."""
    other = copy.deepcopy(model)
    part: Any
    for part in other.modules():
        if hasattr(part, "recipe"):
            part.recipe = replace(part.recipe, cast_weight_from=CastFrom.PARAMETER)
        weight: Any = getattr(part, "weight", None)
        if getattr(weight, "origin", None) is not None:
            weight.origin.recipe = part.recipe
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "bias" not in name:
                value = getattr(parameter, "master", parameter)
                parameter.copy_(value.bfloat16().float())
    return other


def trained(model: nn.Module, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
    """Outputs and gradients of two passes, the second without gradients."""
    x = draw(T, K, seed=5, dtype=dtype).requires_grad_()
    rest = (OFFS,) if isinstance(model, f8.Float8Experts) else ()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x, *rest)
        output.backward(draw(*output.shape, seed=6, dtype=output.dtype))
        with torch.no_grad():
            later = model(x, *rest)
    grads = [parameter.grad for parameter in model.parameters()]
    assert x.grad is not None and all(grad is not None and grad.dtype is torch.float32 for grad in grads)
    return [output.detach(), later, x.grad, *[grad for grad in grads if grad is not None]]


MODULES: list[tuple[Callable[[Recipe], nn.Module], str]] = [
    *((linear, name) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")),
    *((experts, name) for name in ("rowwise", "rowwise_with_gw_hp", "delayed")),
    *((at_rest, name) for name in ("tensorwise", "rowwise", "delayed")),
    (feed_forward, "delayed"),
]


def test_every_module_casts_what_a_bfloat16_copy_holds() -> None:
    """Outputs and float32 gradients; under autocast and without; precomputed; without the rule others."""
    for make, name in MODULES:
        torch.manual_seed(0)
        model: Any = make(recipe_of(name))
        right = copied(model)
        for dtype, autocast in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
            if make is experts and name == "delayed" and dtype is torch.float32:
                continue  # refused
            wanted = trained(copy.deepcopy(right), dtype, autocast)
            assert_all_same_bits(trained(copy.deepcopy(model), dtype, autocast), wanted)
        if make is linear:
            other = copy.deepcopy(model)
            other.recipe = recipe_by_name(name)
            assert not torch.equal(trained(other, dtype, autocast)[0], wanted[0]), name
        if make is experts and name != "delayed":
            model.precompute_weights()
            assert_same_bits(trained(model, dtype, autocast)[0], wanted[0])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "name, options",
    [
        ("tensorwise", {"enable_fsdp_float8_all_gather": True}),
        ("rowwise", {"enable_fsdp_float8_all_gather": True}),
        ("rowwise", {"float8_primary_weights": True}),
        ("delayed", {"float8_primary_weights": True}),
    ],
)
def test_what_fsdp_gathers_as_float8_is_what_it_gathers_in_bfloat16(name: RecipeName, options: Any) -> None:
    """Under `param_dtype=bfloat16`: outputs and gradients of float8 all-gather are those without; not by default."""

    def run(**given: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(K, N, bias=False), nn.ReLU(), nn.Linear(N, K, bias=False))
        f8.convert_to_float8_training(model, config=name, **given)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results: list[Tensor] = []
        for step in range(3):
            output = model(draw(T, K, seed=step, dtype=torch.float32))
            output.float().square().mean().backward()
            results += [output.detach(), *(p.grad.full_tensor() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
        return results

    wanted = run()
    assert_all_same_bits(run(cast_weight_from="bfloat16", **options), wanted)
    assert not torch.equal(run(**options)[0], wanted[0])


def test_the_rule_as_text_and_in_a_trace_of_verbs() -> None:
    recipe = recipe_of("rowwise")
    x, w, g = (draw(*s, seed=i, dtype=torch.float32).numpy() for i, s in enumerate(((T, K), (N, K), (T, N))))
    wanted = oracle.linear(recipe, x, w, g)
    observed = engine_linear(load_subject("f8ref.numpy").verbs, recipe, x, w, g)
    for gemm in ("output", "grad_input", "grad_weight"):
        assert_same_bits(getattr(observed, gemm).product, getattr(wanted, gemm).product)
    assert recipe_from_json(recipe.to_json()) == recipe != recipe_by_name("rowwise")
    assert recipe.content_hash != recipe_by_name("rowwise").content_hash
    assert recipe.label.endswith(" of bfloat16 weights") and "rounded to bfloat16" in recipe.explain()
    with pytest.raises(SpecError, match="cast_weight_from must be one of parameter, bfloat16; got 'float16'"):
        f8.convert_to_float8_training(nn.Linear(K, N), cast_weight_from="float16")  # pyright: ignore[reportArgumentType]


def test_an_export_and_two_captures(tmp_path: Path) -> None:
    """The codes of the copy; a capture replays; a diff of trainer and server names the rule, whoever shows a weight."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(256, 128, bias=False))
    x = draw(16, 256, seed=3)
    models: dict[str, Any] = {}
    rules: dict[str, CastFromName | None] = {"bfloat16": "bfloat16", "parameter": None, "server": None}
    for name, rule in rules.items():
        models[name] = copy.deepcopy(plain)
        f8.convert_to_float8_training(models[name], config="blockwise", cast_weight_from=rule)
    models["server"].bfloat16()
    for name, model in models.items():
        with f8.capture(model, tmp_path / name), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(x)
    steps = {name: read_capture(tmp_path / name) for name in models}
    # 1. The export, of the model and of its checkpoint.
    f8.export_float8(models["bfloat16"], tmp_path / "served", format="block")
    save_file({"0.weight": plain[0].weight.detach()}, _directory(tmp_path / "source") / "model.safetensors")
    options: dict[str, Any] = {"format": "block", "config": "blockwise", "cast_weight_from": "bfloat16"}
    export_checkpoint(tmp_path / "source", tmp_path / "again", **options)
    wanted = quantize(plain[0].weight.detach().bfloat16(), "torchao_blockwise", block=(128, 128))
    for name in ("served", "again"):
        stored = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(stored["0.weight"].view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(stored["0.weight_scale_inv"], wanted.scale)
    # 2. Captures. The capture of the rule shows what is cast, so that it is the server's.
    assert replay(steps["bfloat16"]).is_equal
    assert diff(steps["bfloat16"], steps["server"]).is_equal
    for names in (("parameter", "server"), ("server", "parameter")):
        first, *others = diff(*(steps[name] for name in names)).divergences
        assert (first.part, first.tensor) == ("value", "weight") and "cast_weight_from='bfloat16'" in first.cause
        assert others
    # 3. One side shows no weight.
    for lacking, showing in (("parameter", "server"), ("server", "parameter")):
        (a,), (b,) = steps[lacking], steps[showing]
        a = replace(a, records=[one for one in a.records if one.record.what != "weight"])
        causes = [one.cause for one in diff([a], [b]).divergences if one.tensor == "weight"]
        assert any("cast_weight_from='bfloat16'" in cause for cause in causes), causes


def _directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path

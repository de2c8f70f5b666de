"""Trained, exported and served: codes, scales and products of the server are those of the training."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import f8emu.jax
import f8emu.torch as f8
import f8ref.numpy as oracle
from f8emu.cli import build_app
from f8emu.dialects import dequantize, dialect_by_name, quantize, serving_recipe
from f8emu.spec import (
    BLOCKWISE_UE8M0,
    ROWWISE,
    TENSORS,
    TENSORWISE,
    CastFrom,
    F8Error,
    Granularity,
    Recipe,
    RecipeName,
    ScaleRule,
)
from f8emu.torch.casts.operand import Operand
from f8emu.torch.layer.matmul import gemm
from f8emu.torch.serving.export import export_checkpoint
from tests.torch_path.bits import assert_same_bits, to_numpy
from tests.torch_path.layers import draw, layer_of, passes

M, N, K = 80, 144, 272
NT = (((1,), (1,)), ((), ()))  # of JAX: input [M, K] by weight [N, K]
LLAMA: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 64}


def llama(recipe: RecipeName | Recipe, **options: Any) -> Any:
    """A tiny Llama in float32 whose layers are float8, but for its head: the default."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **SIZES))
    return f8.convert_to_float8_training(model, config=recipe, **options)


def float8_layers(model: nn.Module) -> dict[str, Any]:
    return {fqn: layer for fqn, layer in model.named_modules() if isinstance(layer, f8.Float8Linear)}


def invoke(*words: object) -> int:
    """The status of a command."""
    with pytest.raises(SystemExit) as end:
        build_app()([str(word) for word in words])
    return int(end.value.code or 0)


# The rules of a server in a recipe.


def rowwise_of_own_rules() -> Recipe:
    """Rowwise of bfloat16 copies, whose three tensors have three floors."""
    x, w, g = (replace(ROWWISE.output.a, scale_rule=ScaleRule(amax_floor=10.0**-n)) for n in (3, 2, 1))
    gemms = {"output": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}
    of_gemms: Any = {name: replace(ROWWISE.gemms[name], a=a, b=b) for name, (a, b) in gemms.items()}
    return replace(ROWWISE, cast_weight_from=CastFrom.BFLOAT16, **of_gemms)


SERVED = replace(BLOCKWISE_UE8M0, cast_weight_from=CastFrom.BFLOAT16)


@pytest.mark.parametrize("recipe", [SERVED, rowwise_of_own_rules()], ids=["blockwise", "rowwise"])
def test_every_tensor_has_its_own_rule(recipe: Recipe) -> None:
    """Products of numpy, torch, JAX (block scales) and compiled code (rowwise), of tensors whose floors decide.

    The weight is float32, and its bfloat16 copy is cast.
    """
    # 1. Blocks of usual size, below every floor, and of zeros. In the oracle each tensor meets its own floor.
    given = [draw(*shape, seed=seed) for seed, shape in enumerate(((M, K), (N, K), (M, N)))]
    for x in given:
        x[:, :128] *= 2.0**-44
        x[:64] *= 2.0**-13
        x[64:72] = 0
    arrays = [to_numpy(x) for x in given]
    trace = oracle.linear(replace(recipe, cast_weight_from=CastFrom.PARAMETER), *arrays)
    master = given[1].float()
    master += draw(N, K, seed=4, dtype=torch.float32).sign() * 2.0**-10 * master.abs()  # less than half a step
    assert torch.equal(master.bfloat16(), given[1]) and not torch.equal(master, given[1].float())
    arrays[1] = to_numpy(master)
    assert trace.grad_input is not None and trace.grad_weight is not None
    floors = {name: recipe.rule_of(*(cast for _, _, cast in recipe.casts(name))).amax_floor for name in TENSORS}
    assert len(set(floors.values())) == 3
    for operand, name in ((trace.output.a, "input"), (trace.output.b, "weight"), (trace.grad_input.a, "grad_output")):
        largest = np.float64(448) / floors[name]
        assert (operand.inv_scale <= largest * (1 + 1e-7)).all() and (operand.inv_scale > largest / 2).any()
    own = oracle.linear(recipe, *arrays)
    assert own.grad_input is not None and own.grad_weight is not None
    wanted = [part.product for part in (trace.output, trace.grad_input, trace.grad_weight)]
    products: list[Any] = [[part.product for part in (own.output, own.grad_input, own.grad_weight)]]
    # 2. The layers.
    layer = layer_of(recipe, N, K, torch.float32, bias=False)
    with torch.no_grad():
        layer.weight.copy_(master)
    products.append(passes(layer, given[0], given[2]))
    if recipe.output.a.granularity.is_blockwise:
        multiply = f8emu.jax.dot_general(recipe)
        output, pull = jax.vjp(jax.jit(lambda x, w: multiply(x, w, NT)), *arrays[:2])
        products.append((output, *pull(arrays[2])))
    else:
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        products.append(passes(compiled, given[0], given[2]))
    for three in products:
        for observed, right in zip(three, wanted, strict=True):
            own = to_numpy(observed) if isinstance(observed, Tensor) else np.asarray(observed)
            assert_same_bits(own.astype(right.dtype), right)  # the gradient of the weight is float32


def test_a_recipe_of_dialects() -> None:
    """Its codes and scales are the dialects'; what no multiplication by an inverse scale gives is refused."""
    ue8m0 = {"input": "vllm_group_ue8m0", "weight": "deep_gemm_block_ue8m0"}
    assert serving_recipe(**ue8m0) == BLOCKWISE_UE8M0
    x = draw(256, 256, seed=3, dtype=torch.float32)
    x[:, :128] *= torch.logspace(-12, 3, 256).unsqueeze(1)
    x[3:9] = 0
    for names in (ue8m0, {"input": "torchao_rowwise_float", "weight": "torchao_rowwise_float"}):
        trace = oracle.linear(serving_recipe(**names), x.numpy(), x.numpy()).output
        for operand, name in zip((trace.a, trace.b), names.values(), strict=True):
            block = next(one for one in dialect_by_name(name).blocks if _grid(one) == operand.scale.shape)
            granularity = next(one for one in Granularity if one.block == block)
            dialect = dialect_by_name(name)
            theirs = quantize(x.numpy(), dialect, block=block)
            assert (operand.codes.view(np.uint8) == theirs.codes.view(np.uint8)).all()
            value = oracle.dequantize(operand.codes, operand.scale, granularity)
            assert (value == dequantize(*theirs, dialect, block=block, out_dtype=np.float32)).all()
    for names, why in (
        (
            {"input": "vllm_token", "weight": "vllm_weight_channel"},
            "it divides by the scale and a recipe multiplies",
        ),
        ({"input": "torchao_tensorwise", "weight": "torchao_rowwise_float"}, "or both one scale; got torchao_tensor"),
    ):
        with pytest.raises(F8Error, match=why):
            serving_recipe(**names)


def _grid(block: Any) -> tuple[int, int]:
    return 256 // (block[0] or 256), 256 // (block[1] or 256)


# The proof: trained, exported, loaded and served.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model after two steps under the serving recipe, with autocast, and its export in shards."""
    model = llama("blockwise_ue8m0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # a block of zeros, one below the floor, and one whose largest code a server will double
        weight = model.model.layers[0].mlp.up_proj.weight
        weight[:128, :128], weight[128:256, :128] = 0, weight[128:256, :128] * 1e-6
        weight[:128, 128:].clamp_(-0.02, 0.02)[5, 7] = 228 * 2.0**-13
    path = tmp_path_factory.mktemp("served") / "model"
    return model, f8.export_float8(model, path, format="block", max_shard_bytes=200_000)


def test_the_server_multiplies_what_was_trained(trained: tuple[Any, Path]) -> None:
    """Every layer's product, by vLLM's rules: activations by its kernel's, weights requantized as it loads them. JAX
    too.
    """
    model, path = trained
    # 1. What the trainer's layers were given, and gave.
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(fqn: str) -> Any:
        return lambda layer, given, output: seen.__setitem__(fqn, (given[0].bfloat16(), output))

    for fqn, layer in float8_layers(model).items():
        layer.register_forward_hook(note(fqn))
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    # 2. The server, from the files. Without the plan of a library: DeepGEMM never splits K.
    stored = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    doubled = products = 0
    multiply = f8emu.jax.dot_general(BLOCKWISE_UE8M0)
    for fqn, (x, output) in seen.items():
        x = to_numpy(x.reshape(-1, x.shape[-1]))
        codes, scale = (to_numpy(stored[f"{fqn}.{name}"]) for name in ("weight", "weight_scale_inv"))
        values = dequantize(codes, scale, "vllm_weight_block_ue8m0", out_dtype=np.float32)
        weight = quantize(values, "vllm_weight_block_ue8m0")
        doubled += int((weight.scale != scale).sum())
        assert (dequantize(*weight, "vllm_weight_block_ue8m0", out_dtype=np.float32) == values).all()
        a = quantize(x, "vllm_group_ue8m0")
        kinds: dict[str, Any] = {"granularity_a": "blockwise_1x128", "granularity_b": "blockwise_128x128"}
        product = oracle.scaled_mm(
            a.codes, weight.codes.T, a.scale, weight.scale.T, out_dtype="bfloat16", split_k=1, **kinds
        )
        found_by = [to_numpy(output.reshape(product.shape))]
        if fqn.endswith(("q_proj", "down_proj")):  # a shape takes XLA half a second
            found_by.append(np.asarray(multiply(x, float8_layers(model)[fqn].weight.detach().numpy(), NT)))
        for found in found_by:
            products += int((found.view(np.uint16) != product.view(np.uint16)).sum())
    assert len(seen) == 7 and doubled > 0 and products == 0


def loaded_weights_are_ours(model: Any, path: Path, config: Any) -> None:
    """transformers loads the export, without a GPU to values: those of the operand of `output`, bit for bit."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=config
    )
    layers = float8_layers(model)
    assert len(layers) == 7
    for fqn, layer in layers.items():
        recipe, weight = layer.recipe, layer.weight
        value = (weight.master if isinstance(weight, f8.Float8Weight) else weight).detach()
        trace = oracle.linear(recipe, np.zeros((1, weight.shape[1]), np.float32), value.numpy()).output.b
        granularity = recipe.output.b.granularity
        ours = oracle.dequantize(trace.codes, trace.scale, granularity)
        found = loaded.get_submodule(fqn).weight.detach().numpy()
        assert (found.view(np.uint32) == ours.view(np.uint32)).all()


def test_transformers_loads_what_was_trained(trained: tuple[Any, Path]) -> None:
    """The block format; and its configuration, in which servers find the model and the layers that are left."""
    model, path = trained
    loaded_weights_are_ours(model, path, transformers.FineGrainedFP8Config(dequantize=True))
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.fixture
def compressed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package alone, of those that `make install` lays aside, and for one test: they change transformers."""
    packages = [one for name in ("compressed_tensors*", "loguru*") for one in Path(sys.prefix, "stacks").glob(name)]
    assert packages, "`make install` brings the packages of other stacks"
    (tmp_path / "packages").mkdir()
    for one in packages:
        (tmp_path / "packages" / one.name).symlink_to(one)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    is_available = transformers.utils.import_utils.is_compressed_tensors_available
    is_available.cache_clear()
    yield
    is_available.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("compressed_tensors", "loguru")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_compressed_tensors_decompresses_to_what_was_trained(compressed_tensors: None, tmp_path: Path) -> None:
    """Their own package does it; the codes of float8 primary weights are those that the layers hold."""
    for recipe, is_primary in ((ROWWISE, True), (TENSORWISE, False)):
        model, path = llama(recipe, float8_primary_weights=is_primary), tmp_path / recipe.name
        f8.export_float8(model, path, format="compressed-tensors")
        loaded_weights_are_ours(model, path, transformers.CompressedTensorsConfig(dequantize=True))
        if is_primary:
            stored, (fqn, layer) = load_file(path / "model.safetensors"), next(iter(float8_layers(model).items()))
            assert torch.equal(stored[f"{fqn}.weight"].view(torch.uint8), layer.weight.rows.view(torch.uint8))
            assert torch.equal(stored[f"{fqn}.weight_scale"], layer.weight.row_scale)


# The command, the manifest, shards of ranks, and what is refused.


def tensors_of(path: Path) -> dict[str, Any]:
    manifest = json.loads((path / "f8emu_manifest.json").read_text())
    return {name: {k: v for k, v in known.items() if k != "file"} for name, known in manifest["tensors"].items()}


def test_the_command_writes_the_same_and_verifies_it(
    trained: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, path = trained
    # 1. The checkpoint of the same model: its layers as linear ones, in float32.
    source, out = tmp_path / "source", tmp_path / "out"
    plain = transformers.LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(source, max_shard_size="500KB")
    (source / "tokenizer.json").write_text("{}")
    assert invoke("export", source, out, "--format", "block", "--recipe", "blockwise_ue8m0") == 0
    assert [one.message for one in caplog.records if one.name == "f8emu"] == [
        f"{out}: in high precision: model.embed_tokens, lm_head"
    ]
    ours, its = tensors_of(path), tensors_of(out)
    of_codes = {name for name, known in ours.items() if known["dtype"] == "float8_e4m3fn" or "_inv" in name}
    assert len(of_codes) == 14 and ours.keys() == its.keys()
    assert {name: ours[name] for name in of_codes} == {name: its[name] for name in of_codes}
    assert (out / "tokenizer.json").exists() and not list(tmp_path.glob(".f8emu-*"))
    # 2. Bytes that change later, a tensor too many and one too few.
    assert invoke("export", out, "--verify") == 0
    (file,) = out.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert invoke("export", out, "--verify") == 1
    differences = f8.verify_export(out)
    assert len(differences) == 1 and ": sha256 is " in differences[0]
    manifest = json.loads((out / "f8emu_manifest.json").read_text())
    manifest["tensors"]["another"] = manifest["tensors"].pop("lm_head.weight")
    (out / "f8emu_manifest.json").write_text(json.dumps(manifest))
    assert any("another: in the manifest, and in no file" in line for line in f8.verify_export(out))
    assert any("lm_head.weight: in model.safetensors, and not in" in line for line in f8.verify_export(out))


def test_a_sharded_model_is_exported_whole(one_rank: None, tmp_path: Path) -> None:
    """FSDP2 of ordinary weights, of weights gathered as float8, and of float8 primary weights."""
    f8.export_float8(llama("rowwise"), tmp_path / "whole", format="per-channel")
    for option in ("", "enable_fsdp_float8_all_gather", "float8_primary_weights"):
        model = llama("rowwise", **({option: True} if option else {}))
        fully_shard(model)
        f8.export_float8(model, tmp_path / f"shards_{option}", format="per-channel")
        assert tensors_of(tmp_path / f"shards_{option}") == tensors_of(tmp_path / "whole")


def test_what_is_refused(trained: tuple[Any, Path], tmp_path: Path) -> None:
    """Each with what to do; nothing is left behind."""

    def layer(recipe: RecipeName = "tensorwise", n: int = 64) -> Any:
        return f8.convert_to_float8_training(nn.Sequential(nn.Linear(128, n)), config=recipe)

    tied = layer()
    tied.append(tied[0])
    mixed = layer().append(layer("rowwise")[0])
    for model, format, why in (
        (layer(), "gguf", "format must be one of block, compressed-tensors, per-channel; got 'gguf'"),
        (layer(), "block", "its weights are scaled tensorwise; choose format compressed-tensors"),
        (layer("mxfp8"), "block", "its weights are scaled blockwise_1x32; save the model in bfloat16"),
        (layer("delayed"), "compressed-tensors", "input_scale.*train under tensorwise"),
        (layer("blockwise"), "block", r"multiples of 128.*0.weight \[64, 128\]"),
        (tied, "compressed-tensors", "one name; got 0.weight, 1.weight"),
        (mixed, "compressed-tensors", "under one recipe; got tensorwise, rowwise"),
        (nn.Linear(16, 16), "block", "got no float8 layer"),
        (nn.ModuleList([layer(), f8.Float8Experts(2, 16, 16)]), "compressed-tensors", "no format here .* experts"),
    ):
        with pytest.raises(F8Error, match=why):
            f8.export_float8(model, tmp_path / "out", format=cast(Any, format))
    _, path = trained
    shutil.copytree(path, tmp_path / "copy")
    with pytest.raises(F8Error, match="must not exist"):
        f8.export_float8(layer(), path, format="compressed-tensors")
    source = tmp_path / "source"
    for at, why in ((path, "in high precision"), (tmp_path, "must have a config.json"), (source, "check the path")):
        with pytest.raises(F8Error, match=why):
            export_checkpoint(at, tmp_path / "out", format="block", config="blockwise")
    # All that one --skip has to name, and what fails later, below directories that are made for it; links in a circle.
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({f"l.{i}.weight": torch.ones(144, 144) for i in range(2)}, source / "model.safetensors")
    uneven = r"got l.0.weight \[144, 144\], l.1.weight \[144, 144\]; .* --skip MODULE for each"
    with pytest.raises(F8Error, match=uneven):
        export_checkpoint(source, tmp_path / "out", format="block", config="blockwise")

    def fails(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(source, tmp_path / "a/b/out", format="per-channel", config="rowwise", progress=fails)
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(F8Error, match="must not exist"):
        export_checkpoint(source, tmp_path / "out", format="per-channel", config="rowwise")
    (tmp_path / "out").unlink()
    shutil.rmtree(source)
    (tmp_path / "copy" / "model-00001-of-00002.safetensors").write_bytes(b"not")
    for name in ("config.json", "f8emu_manifest.json"):
        (tmp_path / "copy" / name).write_text("[]")
    with pytest.raises(F8Error, match="must be an object; got list"):
        f8.verify_export(tmp_path / "copy")
    assert {one.name for one in tmp_path.iterdir()} == {"copy"}


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]


def test_the_server_never_splits_k() -> None:
    """Few rows and a long K, which cuBLAS splits: not under the serving recipe, in torch and JAX; on a GPU by rows of
    zeros, which are added.
    """
    x, w = (draw(rows, 8192, seed=rows, dtype=torch.float32) for rows in (8, 128))
    whole = oracle.linear(BLOCKWISE_UE8M0, x.numpy(), w.numpy())  # S is 1 where none is given
    layer = layer_of(BLOCKWISE_UE8M0, 128, 8192, torch.float32, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
        assert_same_bits(layer(x), whole.result)
    assert_same_bits(f8emu.jax.dot_general(BLOCKWISE_UE8M0)(x.numpy(), w.numpy(), NT), whole.result)
    operands: list[Any] = []
    for one in whole.output[:2]:
        codes = torch.from_numpy(one.codes.view(np.uint8)).view(torch.float8_e4m3fn)
        operands.append(Operand(codes.as_subclass(OnGpu), torch.from_numpy(one.scale)))
    a, b = operands
    product = gemm(a, b, BLOCKWISE_UE8M0.output, torch.float32, "emulated")
    assert_same_bits(product.as_subclass(Tensor), whole.result)
    split = gemm(a, b, replace(BLOCKWISE_UE8M0.output, split_k=True), torch.float32, "emulated")
    assert split.shape == product.shape and split.ne(product).any()

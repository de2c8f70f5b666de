"""Hugging Face's models under every recipe: trained, saved, loaded and asked to generate. Tiny, and no network."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import f8emu.torch as f8
from f8emu.spec import RECIPES, RecipeName
from f8emu.torch import Outcome
from f8emu.torch.layer import first_step
from tests.torch_path.bits import assert_all_same_bits
from tests.torch_path.states import assert_same_state

transformers: Any = pytest.importorskip("transformers")
safetensors_torch: Any = pytest.importorskip("safetensors.torch")

# The emulated GEMMs below a Hugging Face model run in tests/test_examples.py.
SIZE, HEADS, ROWS = 32, 2, 16
ALL: dict[str, Any] = {"pad": True, "module_filter_fn": lambda module, name: True}  # heads too
LLAMA = {
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": SIZE,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def model_of(kind: str, config: Any) -> Any:
    return getattr(transformers, kind)._from_config(config, dtype=torch.bfloat16)


def llama() -> Any:
    return model_of("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA))


def qwen3_moe() -> Any:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": SIZE, "head_dim": SIZE // HEADS}
    return model_of("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**LLAMA, **experts))


def gpt2() -> Any:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"n_embd": SIZE, "n_layer": 1, "n_head": HEADS, "vocab_size": SIZE, "n_positions": ROWS}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return model_of("GPT2LMHeadModel", transformers.GPT2Config(**size, **dropout, **ends))


# Builder -> how many layers are converted, and why other weights than embeddings are not looked at.
MODELS: dict[Any, tuple[int, str]] = {
    llama: (8, ""),
    qwen3_moe: (6, "chooses among experts"),
    gpt2: (1, "transformers' Conv1D"),
}


def batch_of(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, SIZE, (1, ROWS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def answer(model: Any) -> list[torch.Tensor]:
    """Logits, and four tokens."""
    batch = batch_of(model.eval())
    with torch.no_grad():
        tokens = model.generate(batch["input_ids"][:, :8], max_new_tokens=4, do_sample=False)
        return [model(**batch).logits, tokens.int()]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_models_train_and_come_back(build: Any, name: RecipeName, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    keys, (converted, other) = list(model.state_dict()), MODELS[build]
    report = f8.plan_conversion(model, config=name, **ALL)
    left = int(build is qwen3_moe and name == "blockwise")  # its experts
    assert len(report.names(Outcome.CONVERTED)) + left == converted == len(report.entries)
    reasons = [weight.reason for weight in report.others if weight.reason != "an embedding: no GEMM"]
    assert any(other in reason for reason in reasons) if other else not reasons
    f8.convert_to_float8_training(model, config=name, **ALL)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model.train()(**batch_of(model)).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.numel())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert list(loaded.state_dict()) == list(model.state_dict()) == keys
    f8.convert_to_float8_training(loaded, config=name, **ALL)
    if name == "delayed":
        f8.load_delayed_state_dict(loaded, f8.delayed_state_dict(model))
    assert_all_same_bits(answer(loaded), answer(model))
    assert not any(isinstance(layer, f8.Float8Linear) for layer in f8.dequantize_float8_training(model).modules())


def mamba() -> Any:
    size = {"hidden_size": SIZE, "vocab_size": SIZE, "num_hidden_layers": 1, "state_size": ROWS, "time_step_rank": ROWS}
    return model_of("FalconMambaForCausalLM", transformers.FalconMambaConfig(**size, pad_token_id=0))


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (llama, "  lm_head: plain nn.Linear again; convert the model after what replaces layers"),
        (mamba, "  backbone.layers.0.mixer.dt_proj: never called; another module multiplies it, in high precision"),
    ],
)
def test_layers_that_a_model_replaces_or_reads_are_told(
    build: Any, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_step, "_is_traced", False)
    model: Any = f8.convert_to_float8_training(build(), config="rowwise", **ALL)
    if build is llama:
        model.resize_token_embeddings(SIZE + 16, mean_resizing=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(**batch_of(model)).loss.backward()
        optimizer.step()
    (told,) = [record.message for record in caplog.records if record.name == "f8emu"]
    assert told.splitlines()[1].startswith(what) and len(told.splitlines()) == 2
    reads = {entry.fqn for entry in f8.plan_conversion(build(), pad=True).entries if "reads its weight" in entry.reason}
    assert (build is mamba) == ("backbone.layers.0.mixer.dt_proj" in reads)


@pytest.mark.parametrize("option", ["enable_fsdp_float8_all_gather", "float8_primary_weights"])
def test_weights_that_are_no_plain_tensors_are_saved(option: str, tmp_path: Path) -> None:
    """`save_pretrained` and safetensors' `save_model` write the same tensors, and share the same."""
    expected = model_of("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True))
    model = copy.deepcopy(expected)
    chosen: dict[str, Any] = {option: True}
    f8.convert_to_float8_training(model.model, config="rowwise", **chosen)
    for name, one in (("plain", expected), ("float8", model)):
        one.save_pretrained(tmp_path / name)
        safetensors_torch.save_model(one, str(tmp_path / name / "all.safetensors"))
    for file in ("model.safetensors", "all.safetensors"):
        ours, theirs = (safetensors_torch.load_file(tmp_path / name / file) for name in ("float8", "plain"))
        assert_same_state(dict(sorted(ours.items())), dict(sorted(theirs.items())))

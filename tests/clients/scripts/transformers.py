"""transformers: the Trainer, resumed, and models of other kinds than a decoder."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from f8emu.torch.integrations.huggingface import DelayedScalingCallback
from tests.clients.models import llama
from tests.clients.watch import Watch

NEEDS = ("accelerate",)
REMARK = "Mamba's `dt_proj` multiplies by its weight itself: leave it out."
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def trainer(watch: Watch, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": True}
    options |= {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "learning_rate": 1e-2}
    args = TrainingArguments(str(folder), per_device_train_batch_size=2, disable_tqdm=True, **options)
    data = [{"input_ids": row, "labels": row} for row in TOKENS] * 8
    runs = []
    for checkpoint, its_watch in ((None, watch), (str(folder / "checkpoint-2"), Watch(watch.recipe))):
        model = its_watch.convert(llama())
        its_trainer = Trainer(model, args, train_dataset=data, callbacks=[DelayedScalingCallback()])
        its_trainer.train(resume_from_checkpoint=checkpoint)
        its_watch.losses = [entry["loss"] for entry in its_trainer.state.log_history if "loss" in entry]
        runs.append(model)
    watch.resumed(*runs)


def model_of(kind: str) -> tuple[Any, dict[str, Any]]:
    import transformers as hf

    torch.manual_seed(0)
    text = {"input_ids": TOKENS, "labels": TOKENS}
    if kind == "BertForMaskedLM":
        return hf.BertForMaskedLM(hf.BertConfig(**SMALL, hidden_dropout_prob=0.0)), text
    if kind == "T5ForConditionalGeneration":
        size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=64, **size, decoder_start_token_id=0)), text
    if kind == "MambaForCausalLM":
        return hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=16)
        ), text
    size = {key: SMALL[key] for key in SMALL if key != "vocab_size"} | {"image_size": 16, "patch_size": 4}
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return hf.ViTForImageClassification(hf.ViTConfig(**size, num_labels=16)), images


def fit(watch: Watch, folder: Path, *, kind: str) -> None:
    model, batch = model_of(kind)
    watch.convert(model, module_filter_fn=lambda layer, name: "dt_proj" not in name)
    watch.fit(torch.optim.AdamW(model.parameters(), lr=1e-2), lambda: model(**batch).loss)


KINDS = ("BertForMaskedLM", "T5ForConditionalGeneration", "MambaForCausalLM", "ViTForImageClassification")
RUNS = {"`Trainer` (bf16, checkpointing, accumulation), resumed": trainer}
RUNS |= {f"`{kind}`": partial(fit, kind=kind) for kind in KINDS}

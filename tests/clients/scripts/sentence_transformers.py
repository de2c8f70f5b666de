"""sentence-transformers: a bi-encoder and a cross-encoder by its trainers, saved and loaded."""

from pathlib import Path
from typing import Any

import torch

import f8emu.torch as f8
from tests.clients.models import VOCABULARY, tokenizer
from tests.clients.watch import Watch

NEEDS = ("transformers", "datasets")
REMARK = "Mean pooling never calls BERT's pooler: `add_pooling_layer=False`, or leave it out."
ARGS = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "logging_steps": 1}
ARGS |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "bf16": False}


def bert(folder: Path, **options: Any) -> str:
    from transformers import AutoModel, BertConfig

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    AutoModel.from_config(BertConfig(vocab_size=VOCABULARY, **size, **options)).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")
    return str(folder / "bert")


def bi_encoder(watch: Watch, folder: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    words = ("the", "a", "model", "good")
    data = Dataset.from_dict(
        {"anchor": [f"question {w}" for w in words] * 4, "positive": [f"answer {w}" for w in words] * 4}
    )
    model = watch.convert(SentenceTransformer(bert(folder), model_kwargs={"add_pooling_layer": False}))
    args = SentenceTransformerTrainingArguments(str(folder), **ARGS)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=MultipleNegativesRankingLoss(model))
    trainer.train()
    watch.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model.save(str(folder / "saved"))
    loaded = f8.convert_to_float8_training(SentenceTransformer(str(folder / "saved")), config=watch.recipe)
    if watch.recipe != "delayed":
        assert (loaded.encode(words) == model.encode(words)).all()


RUNS = {"`SentenceTransformerTrainer`, saved and loaded": bi_encoder}

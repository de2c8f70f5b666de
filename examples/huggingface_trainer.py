"""Hugging Face's Trainer: delayed scaling needs nothing; a callback keeps its state in the checkpoints.

    python examples/huggingface_trainer.py

Needs transformers and accelerate. Trains six steps, then resumes from the third: the same weights, bit for bit.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from f8emu.torch import convert_to_float8_training
from f8emu.torch.integrations.huggingface import DelayedScalingCallback

DATA = [{"input_ids": (row := torch.arange(i, i + 16) % 64), "labels": row} for i in range(24)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder)
        resumed = train(folder, resume=f"{folder}/checkpoint-3")
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    print(f"resumed run equal: {same}")


def train(folder: str, resume: str | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    convert_to_float8_training(model, config="delayed")
    args = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=6, save_steps=3, report_to=[])
    trainer = Trainer(model, args, train_dataset=DATA, callbacks=[DelayedScalingCallback()])  # the one line to add
    trainer.train(resume_from_checkpoint=resume)
    return model


if __name__ == "__main__":
    main()

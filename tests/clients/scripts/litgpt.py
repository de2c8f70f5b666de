"""LitGPT: its GPT under Fabric, in full and with its LoRA."""

from pathlib import Path
from typing import Any

import torch

from tests.clients.watch import Watch

NEEDS = ("lightning",)
SIZE = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 32, "padded_vocab_size": 64, "intermediate_size": 64}
SIZE |= {"mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "bias": False, "parallel_residual": False}


def fit(watch: Watch, model: Any, parameters: Any) -> None:
    from lightning import Fabric
    from litgpt.utils import chunked_cross_entropy

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(parameters, lr=1e-2))
    tokens = torch.randint(0, 64, (4, 17))
    for _ in range(4):
        logits = model(tokens[:, :-1])
        loss = chunked_cross_entropy(logits, tokens[:, 1:], chunk_size=0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.losses.append(loss.item())


def full(watch: Watch, folder: Path) -> None:
    from litgpt import GPT, Config

    torch.manual_seed(0)
    model = watch.convert(GPT(Config(**SIZE)))
    fit(watch, model, model.parameters())


def lora(watch: Watch, folder: Path) -> None:
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    torch.manual_seed(0)
    model = GPT(Config(**SIZE, lora_r=4, lora_alpha=8, lora_query=True, lora_value=True, lora_mlp=True))
    mark_only_lora_as_trainable(model)
    watch.convert(model)
    fit(watch, model, [p for p in model.parameters() if p.requires_grad])


RUNS = {"`GPT` under Fabric": full, "LoRA": lora}

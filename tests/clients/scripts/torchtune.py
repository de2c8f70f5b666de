"""torchtune: a Llama 3 in full, with activation checkpointing, and with LoRA."""

from pathlib import Path
from typing import Any

import torch

from tests.clients.watch import Watch

NEEDS = ("torchao",)
SIZE: dict[str, Any] = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 32}
SIZE |= {"max_seq_len": 32, "intermediate_dim": 64}


def fit(watch: Watch, model: Any) -> None:
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    loss, tokens = CEWithChunkedOutputLoss(num_output_chunks=2), torch.randint(0, 64, (4, 17))
    model.set_num_output_chunks(2)
    trained = [p for p in model.parameters() if p.requires_grad]
    watch.fit(torch.optim.AdamW(trained, lr=1e-2), lambda: loss(model(tokens[:, :-1]), tokens[:, 1:]))


def full(watch: Watch, folder: Path) -> None:
    from torchtune.models.llama3 import llama3
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.training import set_activation_checkpointing

    torch.manual_seed(0)
    model = watch.convert(llama3(**SIZE))
    set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    fit(watch, model)


def lora(watch: Watch, folder: Path) -> None:
    from torchtune.models.llama3 import lora_llama3
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    torch.manual_seed(0)
    model = lora_llama3(["q_proj", "v_proj"], **SIZE, lora_rank=8, lora_alpha=16)
    set_trainable_params(model, get_adapter_params(model))
    watch.convert(model)
    fit(watch, model)


RUNS = {"Llama 3, activation checkpointing": full, "LoRA": lora}

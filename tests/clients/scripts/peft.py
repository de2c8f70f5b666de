"""PEFT: adapters of several kinds on a converted Llama, merged at the end."""

from functools import partial
from pathlib import Path

import torch

import f8emu.torch as f8
from tests.clients.models import llama
from tests.clients.watch import Watch

NEEDS = ("transformers",)
KINDS = {
    "LoraConfig": {"r": 8, "target_modules": "all-linear"},
    "LoHaConfig": {"r": 8, "target_modules": ["q_proj", "down_proj"]},
    "OFTConfig": {"r": 0, "oft_block_size": 8, "target_modules": ["q_proj", "down_proj"]},
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "VeraConfig": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
}


def adapted(watch: Watch, folder: Path, *, kind: str) -> None:
    import peft

    model = llama()
    f8.convert_to_float8_training(model, config=watch.recipe)
    model = watch.follow(peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **KINDS[kind])))
    tokens = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    watch.fit(torch.optim.AdamW(trained, lr=1e-2), lambda: model(input_ids=tokens, labels=tokens).loss)
    model.save_pretrained(folder)
    merged = model.merge_and_unload()
    assert merged(input_ids=tokens).logits.isfinite().all()


RUNS = {f"`{kind}`, merged": partial(adapted, kind=kind) for kind in KINDS}

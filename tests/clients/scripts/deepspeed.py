"""DeepSpeed: ZeRO 0 to 3 on one rank, saved and resumed."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch

RECIPES = ("rowwise", "delayed")
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def run(watch: Watch, stage: int, steps: int, folder: Path, *, resumes: bool = False) -> Any:
    import deepspeed

    model = watch.convert(mlp())
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if resumes:
        engine.load_checkpoint(str(folder))
    x, labels = rows()
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(engine(x), labels)
        engine.backward(loss)
        engine.step()
        watch.losses.append(loss.item())
    return engine


def zero(watch: Watch, folder: Path, *, stage: int) -> None:
    os.environ.update(ALONE)
    run(Watch(watch.recipe), stage, 3, folder).save_checkpoint(str(folder))
    whole = run(watch, stage, 6, folder)
    resumed = run(Watch(watch.recipe), stage, 3, folder, resumes=True)
    watch.resumed(whole.module, resumed.module)


RUNS = {f"ZeRO {stage}, resumed": partial(zero, stage=stage) for stage in range(4)}

"""accelerate: gradient accumulation, clipping, and its checkpoint with the state of delayed scaling; resumed."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from f8emu.torch import DelayedScalingState
from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def trained(watch: Watch, folder: Path, epochs: range, *, resumes: bool = False) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = watch.convert(mlp())
    data = DataLoader(TensorDataset(*rows()), batch_size=16)
    model, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), data)
    accelerator.register_for_checkpointing(DelayedScalingState(net))
    if resumes:
        accelerator.load_state(str(folder))
    for _ in epochs:
        for x, labels in data:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                watch.losses.append(loss.item())
    if not resumes:
        accelerator.save_state(str(folder))
    return net


def loop(watch: Watch, folder: Path) -> None:
    trained(Watch(watch.recipe), folder, range(3))
    resumed = trained(Watch(watch.recipe), folder, range(3, 6), resumes=True)
    watch.resumed(trained(watch, folder / "whole", range(6)), resumed)


RUNS = {"gradient accumulation, clipping, `save_state`, resumed": loop}

"""PyTorch-Ignite: its trainer with a scheduler, an evaluator and a checkpoint, resumed."""

from pathlib import Path
from typing import Any

import torch

from f8emu.torch import DelayedScalingState
from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def run(watch: Watch, folder: Path, epochs: int, saved: str = "") -> Any:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.metrics import Accuracy

    model, loss = watch.convert(mlp()), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = create_supervised_trainer(model, optimizer, loss)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer, "float8": DelayedScalingState(model)}
    if saved:
        Checkpoint.load_objects(objects, torch.load(saved))
    saver = Checkpoint(objects, DiskSaver(str(folder), require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(every=2), saver)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: watch.losses.append(engine.state.output))
    trainer.run([rows()], max_epochs=epochs)
    evaluator.run([rows()])
    return model


def trainer(watch: Watch, folder: Path) -> None:
    run(Watch(watch.recipe), folder, 2)
    (saved,) = folder.glob("*.pt")
    whole = run(watch, folder / "whole", 4)
    watch.resumed(whole, run(Watch(watch.recipe), folder / "resumed", 4, str(saved)))


RUNS = {"`create_supervised_trainer`, `Checkpoint`, resumed": trainer}

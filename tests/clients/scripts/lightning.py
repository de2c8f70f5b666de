"""Lightning: its Trainer with gradient accumulation and a checkpoint, and Fabric; resumed."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def trained(watch: Watch, folder: Path, epochs: int, checkpoint: str | None = None) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = watch.convert(mlp())

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            watch.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module, data = Module(), DataLoader(TensorDataset(*rows()), batch_size=16)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=epochs, accumulate_grad_batches=2, default_root_dir=folder, **quiet)
    trainer.fit(module, data, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "checkpoint")
    return module.net


def trainer(watch: Watch, folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        trained(Watch(watch.recipe), folder, 3)
        resumed = trained(Watch(watch.recipe), folder / "resumed", 6, str(folder / "checkpoint"))
        watch.resumed(trained(watch, folder / "whole", 6), resumed)


RUNS = {"`Trainer` with gradient accumulation, resumed": trainer}

"""Lightning: delayed scaling needs nothing, and its checkpoints keep the state.

    python examples/lightning_resume.py

Needs lightning. Trains two epochs, then resumes from the first: the same weights, bit for bit.
"""

import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from f8emu.torch import convert_to_float8_training

BATCHES = list(torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0)))


class Module(lightning.LightningModule):
    """Two layers, converted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        convert_to_float8_training(self.net, config="delayed")

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    whole, first, resumed = Module(), Module(), Module()
    fit(whole, epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        fit(first, epochs=1).save_checkpoint(f"{folder}/first.ckpt")
        fit(resumed, epochs=2, resume=f"{folder}/first.ckpt")
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    print(f"resumed run equal: {same}")


def fit(model: Module, epochs: int, resume: str | None = None) -> lightning.Trainer:
    trainer = lightning.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(BATCHES, batch_size=None), ckpt_path=resume)  # type: ignore[arg-type]
    return trainer


if __name__ == "__main__":
    main()

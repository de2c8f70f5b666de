"""torchao: its 8-bit and 4-bit optimizers on a converted model."""

from functools import partial
from pathlib import Path

import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def fit(watch: Watch, folder: Path, *, name: str) -> None:
    import torchao.optim

    model = watch.convert(mlp(width=64, classes=64))
    x, labels = rows(width=64)
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(x), labels))


RUNS = {f"`{name}`": partial(fit, name=name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")}

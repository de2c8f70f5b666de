"""pytorch-optimizer: optimizers of different kinds, each on a converted model."""

from functools import partial
from pathlib import Path

import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch

OPTIMIZERS = ("Lion", "AdaFactor", "SOAP", "ScheduleFreeAdamW", "SAM")


def fit(watch: Watch, folder: Path, *, name: str) -> None:
    import pytorch_optimizer

    model = watch.convert(mlp())
    x, labels = rows()
    if name == "SAM":  # two passes a step
        optimizer = pytorch_optimizer.SAM(model.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-2)
        for _ in range(4):
            for step in (optimizer.first_step, optimizer.second_step):
                loss = torch.nn.functional.cross_entropy(model(x), labels)
                loss.backward()
                step(zero_grad=True)
            watch.losses.append(loss.item())
        return
    optimizer = getattr(pytorch_optimizer, name)(model.parameters(), lr=1e-2)
    watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(x), labels), 6)


RUNS = {f"`{name}`": partial(fit, name=name) for name in OPTIMIZERS}

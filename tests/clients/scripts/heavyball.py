"""HeavyBall: its compiled optimizers on a converted model."""

from functools import partial
from pathlib import Path

import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def fit(watch: Watch, folder: Path, *, name: str) -> None:
    import heavyball

    heavyball.utils.compile_mode = None
    model = watch.convert(mlp())
    x, labels = rows()
    optimizer = getattr(heavyball, name)(model.parameters(), lr=1e-2)
    watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(x), labels), 6)


RUNS = {f"`{name}`": partial(fit, name=name) for name in ("Muon", "SOAP", "SFAdamW")}

"""pytorch-metric-learning: an embedder with mined pairs and a loss that has weights of its own."""

from itertools import chain
from pathlib import Path

import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def arcface(watch: Watch, folder: Path) -> None:
    from pytorch_metric_learning.losses import ArcFaceLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    model, loss, miner = watch.convert(mlp()), ArcFaceLoss(16, 16), MultiSimilarityMiner()
    x, labels = rows()
    optimizer = torch.optim.AdamW(chain(model.parameters(), loss.parameters()), lr=1e-2)
    watch.fit(optimizer, lambda: loss(embedded := model(x), labels, miner(embedded, labels)), 8)


RUNS = {"`ArcFaceLoss`, `MultiSimilarityMiner`": arcface}

"""vit-pytorch: its plain vision transformer."""

from pathlib import Path

import torch

from tests.clients.watch import Watch


def vit(watch: Watch, folder: Path) -> None:
    from vit_pytorch import ViT

    torch.manual_seed(0)
    size = {"image_size": 16, "patch_size": 4, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "dim_head": 16}
    model = watch.convert(ViT(num_classes=16, **size))
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(images), labels))


RUNS = {"`ViT`": vit}

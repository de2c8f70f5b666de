"""timm: its vision transformer, optimizer, schedule and average of weights."""

from pathlib import Path

import torch

from tests.clients.watch import Watch


def vit(watch: Watch, folder: Path) -> None:
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 16}
    model = watch.convert(timm.create_model("vit_tiny_patch16_224", **size))
    average = ModelEmaV3(model, decay=0.5)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(images), labels))
    average.update(model)
    assert not torch.equal(average.module(images), model(images))


RUNS = {"a ViT, `create_optimizer_v2`, `ModelEmaV3`": vit}

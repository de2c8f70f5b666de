"""segmentation-models-pytorch: SegFormer, whose encoder is a transformer."""

from pathlib import Path

import torch

from tests.clients.watch import Watch

NEEDS = ("timm",)


def segformer(watch: Watch, folder: Path) -> None:
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    model = watch.convert(smp.Segformer("mit_b0", encoder_weights=None, classes=4))
    images, masks = torch.randn(2, 3, 64, 64), torch.randint(0, 4, (2, 64, 64))
    loss = smp.losses.DiceLoss("multiclass")
    watch.fit(torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: loss(model(images), masks), 3)


RUNS = {"`Segformer`, `DiceLoss`": segformer}

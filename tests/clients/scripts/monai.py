"""MONAI: its vision transformer with padded sizes, and its Dice loss for a UNETR."""

from pathlib import Path

import torch

from tests.clients.watch import Watch


def unetr(watch: Watch, folder: Path) -> None:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNETR

    torch.manual_seed(0)
    size = {"img_size": (16, 16), "feature_size": 8, "hidden_size": 48, "mlp_dim": 64, "num_heads": 3}
    model = UNETR(in_channels=1, out_channels=4, spatial_dims=2, **size)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("cross_attn" not in name)  # no cross attention here: these norms are not called
    watch.convert(model)
    images, labels = torch.randn(2, 1, 16, 16), torch.randint(0, 4, (2, 1, 16, 16))
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    watch.fit(torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: loss(model(images), labels), 3)


RUNS = {"`UNETR`, `DiceCELoss`": unetr}

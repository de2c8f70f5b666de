"""diffusers: a diffusion transformer and a UNet, noise of its scheduler, and a pipeline's sampling."""

from pathlib import Path
from typing import Any

import torch

from tests.clients.watch import Watch

REMARK = "Convert after `fuse_qkv_projections`, which makes new plain layers."


def fit(watch: Watch, model: Any, condition: dict[str, Any], channels: int) -> None:
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    watch.convert(model)
    average, scheduler = EMAModel(model.parameters()), DDPMScheduler(num_train_timesteps=100)
    clean, noise, at = torch.randn(4, channels, 8, 8), torch.randn(4, channels, 8, 8), torch.tensor([3, 30, 60, 90])
    noisy = scheduler.add_noise(clean, noise, at)

    def loss() -> torch.Tensor:
        return (model(noisy, at, **condition).sample - noise).square().mean()

    watch.fit(torch.optim.AdamW(model.parameters(), lr=1e-3), loss)
    average.step(model.parameters())
    with torch.no_grad():
        assert scheduler.step(model(noisy, at, **condition).sample, 3, noisy).prev_sample.isfinite().all()


def transformer(watch: Watch, folder: Path) -> None:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    model = DiTTransformer2DModel(**size, out_channels=4, patch_size=2, num_embeds_ada_norm=16)
    fit(watch, model, {"class_labels": torch.arange(4)}, 4)


def unet(watch: Watch, folder: Path) -> None:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    size = {"block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 2}
    model = UNet2DConditionModel(sample_size=8, in_channels=4, out_channels=4, norm_num_groups=8, **size, **blocks)
    fit(watch, model, {"encoder_hidden_states": torch.randn(4, 16, 32)}, 4)


RUNS = {"`DiTTransformer2DModel`, `EMAModel`": transformer, "`UNet2DConditionModel`": unet}

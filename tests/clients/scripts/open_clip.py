"""open_clip: both towers of a CLIP, its loss, and its gradient checkpointing."""

from pathlib import Path

import torch

from tests.clients.watch import Watch

NEEDS = ("timm",)
REMARK = "`in_proj_weight` of its attention is a parameter that no `nn.Linear` holds: it stays in high precision."


def clip(watch: Watch, folder: Path) -> None:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=4, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=2, layers=2)
    model = watch.convert(CLIP(32, vision, text))
    model.set_grad_checkpointing()
    images, tokens, loss = torch.randn(8, 3, 16, 16), torch.randint(0, 64, (8, 8)), ClipLoss()
    watch.fit(torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: loss(*model(images, tokens)))


RUNS = {"`CLIP` with `ClipLoss` and gradient checkpointing": clip}

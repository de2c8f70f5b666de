"""PEFT: LoRA over a float8 model. The frozen layers compute in float8, adapters of rank 8 in high precision.

    python examples/peft_lora.py

Needs peft. Convert before `get_peft_model` or after it: the bits are the same.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from f8emu.torch import convert_to_float8_training

DIM = 64


def main() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
    convert_to_float8_training(model, config="delayed")
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["0", "2"]))  # type: ignore[arg-type]
    x, target = torch.randn(DIM, DIM), torch.randn(DIM, DIM)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses: list[float] = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(model)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

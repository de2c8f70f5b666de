"""Train a small model in float8: convert it, and train as before.

    python examples/train_tiny.py

Runs on a CPU, emulated, and on a Hopper GPU, where `device = "cuda"` is the one change.
"""

import torch
from torch import nn

from f8emu.spec import RecipeName
from f8emu.torch import convert_to_float8_training, plan_conversion

STEPS = 20
DIM = 64
"""Of all layers, and the number of samples: the emulation compiles once for each size."""


def main() -> None:
    for recipe in (None, "rowwise", "delayed"):
        losses = train(recipe)
        print(f"{recipe or 'float32':8} loss {losses[0]:.4f} -> {losses[-1]:.4f}")


def train(recipe: RecipeName | None, device: str = "cpu") -> list[float]:
    """The losses of `STEPS` steps; the same data and weights for every recipe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, 10))
    x, labels = torch.randn(DIM, DIM), torch.randint(10, (DIM,))
    if recipe is not None:
        # The last layer has 10 outputs, which is no multiple of 16; heads usually stay in high precision anyway.
        print(plan_conversion(model, config=recipe, module_filter_fn=is_hidden))
        convert_to_float8_training(model, config=recipe, module_filter_fn=is_hidden)
    model, x, labels = model.to(device), x.to(device), labels.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def is_hidden(layer: nn.Module, name: str) -> bool:
    return name != "4"


if __name__ == "__main__":
    main()

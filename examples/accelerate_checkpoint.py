"""Resume a training run with accelerate: one line registers the state of delayed scaling.

    python examples/accelerate_checkpoint.py

Needs accelerate. Trains six steps, then resumes from the third: the same weights, bit for bit.
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn

from f8emu.torch import DelayedScalingState, convert_to_float8_training

BATCHES = torch.randn(6, 16, 32, generator=torch.Generator().manual_seed(0))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder, range(6))
        resumed = train(folder, range(3, 6))
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    print(f"resumed run equal: {same}")


def train(folder: str, steps: range) -> nn.Module:
    torch.manual_seed(0)
    net = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)), config="delayed")
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(DelayedScalingState(net))  # the one line to add
    if steps.start:
        accelerator.load_state(folder)
    for step in steps:
        if step == 3 and not steps.start:
            accelerator.save_state(folder)
        accelerator.backward(model(BATCHES[step].to(accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return net


if __name__ == "__main__":
    main()

"""A checkpoint of torch, weights and scales of delayed scaling, goes on in JAX with the same bits.

python examples/torch_to_jax.py
"""

import tempfile
from pathlib import Path

import jax
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import f8emu.jax
import f8emu.torch
from f8emu import interop

DENSE = (((1,), (0,)), ((), ()))
"""`x [M, K] @ kernel [K, N]`."""


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    f8emu.torch.convert_to_float8_training(model, config="delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "weights.safetensors", Path(folder) / "scales.safetensors"
        save_file(model.state_dict(), files[0])
        save_file(f8emu.torch.delayed_state_dict(model), files[1])
        params = interop.params_from_state_dict(load_file(files[0]))
        states = interop.float8_states_from_delayed_state_dict(load_file(files[1]))

    x, grad = torch.randn(64, 64), torch.randn(64, 64)
    y = model(x)
    y.backward(grad)
    (of_weight,) = (parameter.grad for parameter in model.parameters())
    dense = f8emu.jax.delayed_dot_general("delayed")
    state = f8emu.jax.linear_delayed_settled(states["0"])  # its scales stay as they are
    y_jax, vjp = jax.vjp(lambda kernel: dense(interop.to_jax(x), kernel, state, DENSE), params["0"]["kernel"])
    (of_kernel,) = vjp(interop.to_jax(grad))
    print(f"output equal: {torch.equal(interop.to_torch(y_jax), y.detach())}")
    assert of_weight is not None
    print(f"gradient equal: {torch.equal(interop.to_torch(of_kernel).t(), of_weight)}")


if __name__ == "__main__":
    main()

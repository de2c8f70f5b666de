"""A torch without the private parts that f8emu can do without: the same bits."""

import hashlib
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec import RECIPES
from tests.torch_path.layers import draw

ROOT = Path(__file__).parents[2]
INTERNALS = "f8emu.torch.torch_internals"
FOUND = "return operator.attrgetter(path)(importlib.import_module(module))"
PROGRAM = f"""
import sys, types
import torch

source = open("f8emu/torch/torch_internals.py").read()
assert {FOUND!r} in source
sys.modules[{INTERNALS!r}] = module = types.ModuleType({INTERNALS!r})
exec(compile(source.replace({FOUND!r}, "return otherwise"), "torch_internals.py", "exec"), module.__dict__)
assert module.dispatch_modes() == 1 and module.launch_kernel is None
assert module.trace_number() != module.trace_number(), "nothing is shared in a trace"
from tests.torch_path.test_other_torch import trained
print(trained())
"""


def trained() -> str:
    """The digest of models after three steps under each recipe, three of four layers in a checkpoint."""
    digest = hashlib.sha256()
    for recipe in RECIPES.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 32), nn.Linear(32, 32)).bfloat16()
        f8.convert_to_float8_training(model, config=recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = draw(32, 64, seed=step).requires_grad_()
            hidden = checkpoint(model[:3], x, use_reentrant=False)
            model[3](hidden).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for one in (x.grad, *model.state_dict().values()):
                assert one is not None
                digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_without_private_parts_the_bits_are_the_same() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split() == [trained()]

"""Layers on a GPU, recorded as digests, and the same layers emulated on a CPU: every bit of them.

    python -m benchmarks.proofs.recorded_layers --record FILE      on a GPU
    python -m benchmarks.proofs.recorded_layers FILE               anywhere

`Float8Linear` under every recipe, forward and backward, a second step under delayed scaling; few rows, as in decoding
and in small batches, and K up to 14,336: there cuBLAS cuts K, as the plan of `f8emu.spec` says. A digest is the SHA-256
of a tensor's bytes. Inputs are drawn by numpy, so that they do not depend on a version of torch.

Exit status 1 if a digest differs.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

import f8emu.torch as f8
from benchmarks.runner import DEVICE, Bench, option, say, write_json
from f8emu.spec import RECIPES, RecipeName

RECORDED = Path(__file__).parents[1] / "results" / "recorded_layers-h200.json"
ROWS = (1, 2, 7, 16, 33, 64, 100, 128)
# (K, N): long sums over K in `output` or over N in `grad_input`.
SIZES = ((512, 1536), (4096, 1024), (14336, 256), (256, 14336))
_DIGITS = 16


class Layer(NamedTuple):
    """One layer to run."""

    recipe: RecipeName
    m: int
    k: int
    n: int

    @property
    def name(self) -> str:
        """Its key in the recording."""
        return f"{self.recipe} {self.m}x{self.k}x{self.n}"


def layers(rows: Sequence[int] = ROWS, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Layer]:
    """All layers of these numbers of rows and sizes."""
    return [Layer(recipe, m, k, n) for recipe, (k, n), m in product(RECIPES, sizes, rows)]


def digests(layer: Layer, device: torch.device) -> list[str]:
    """Of output, grad_input and grad_weight of every step."""
    draw = np.random.default_rng([layer.m, layer.k, layer.n])

    def drawn(*shape: int) -> Tensor:
        return torch.from_numpy(draw.standard_normal(shape, np.float32)).to(device, torch.bfloat16)

    module = f8.Float8Linear(layer.k, layer.n, False, device, torch.bfloat16, recipe=layer.recipe)
    hashes: list[str] = []
    for _ in range(1 if RECIPES[layer.recipe].delayed is None else 2):
        with torch.no_grad():
            module.weight.copy_(drawn(layer.n, layer.k) / layer.k**0.5)
        module.zero_grad()
        x = drawn(layer.m, layer.k).requires_grad_()
        output = module(x)
        output.backward(drawn(layer.m, layer.n) / layer.m)
        for y in (output.detach(), x.grad, module.weight.grad):
            assert y is not None, "it was asked for"
            data = y.contiguous().view(torch.int16).cpu().numpy().tobytes()
            hashes.append(hashlib.sha256(data).hexdigest()[:_DIGITS])
    return hashes


def differences(recorded: dict[str, list[str]], of: Iterable[Layer], device: torch.device) -> Iterator[str]:
    """The names of the layers whose digests are not the recorded ones, with the tensors."""
    parts = ("output", "grad_input", "grad_weight")
    for layer in of:
        observed, wanted = digests(layer, device), recorded[layer.name]
        wrong = [parts[i % 3] for i, (a, b) in enumerate(zip(observed, wanted, strict=True)) if a != b]
        if wrong:
            yield f"{layer.name}: {', '.join(wrong)}"


BENCH = Bench(
    "benchmarks.proofs.recorded_layers",
    __doc__,
    ("file", {"type": Path, "nargs": "?", "default": RECORDED}),
    option("record", False, "write the file; otherwise compare with it"),
    option("rows", ROWS),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    file, wanted = run.arguments.file, layers(run.arguments.rows)
    if run.arguments.record:
        digests_by_name = {layer.name: digests(layer, run.device) for layer in track(wanted, "layers")}
        write_json(file, {**run.report, "layers": digests_by_name})
        say(f"{len(wanted)} layers recorded on {run.report['device']}")
        return 0
    recorded = json.loads(file.read_text())
    wrong = list(differences(recorded["layers"], track(wanted, "layers"), run.device))
    for line in wrong:
        say(f"DIFFERENT {line}")
    say(f"{len(wanted) - len(wrong)} of {len(wanted)} layers equal to those of {recorded['device']}, every bit")
    run.record(layers=len(wanted), different=wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

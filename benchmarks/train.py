"""A small byte-level Llama, trained on Python's standard library under every recipe, beside three seeds of bfloat16.

    python -m benchmarks.train --json OUT    300 steps of each on a GPU
    python -m benchmarks.train --device cpu --steps 20 --tiny    the same code, emulated, under a minute

Parameters are float32, matrix multiplications run under autocast to bfloat16, and every linear layer but the head is
converted. A recipe runs with the same seeds: the same initial weights and the same batches. Its two figures, the mean
training loss of the last steps and the loss on held-out files, each the mean over its seeds, must lie between the least
and the greatest of the bfloat16 seeds; otherwise, or if a loss is not finite, the exit status is 1. Shown beside: the
mean shift from bfloat16 of the same seed, and the shift of every seed in the record.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models import Corpus, Llama, read_corpus
from benchmarks.runner import BASELINE, DEVICE, Bench, draw, option, say
from benchmarks.subjects import converted
from f8emu.spec import NAMED_RECIPES, RECIPES

LAST = 20  # steps whose mean is the final training loss
FIGURES = ("training", "held_out")
WARMUP = 20  # steps over which the learning rate rises
HEAD = "head"  # the one linear layer that stays in bfloat16, as in torchtitan
FULL = {"layers": 6, "dim": 256, "hidden": 768, "heads": 4, "kv_heads": 2, "length": 256}
# All GEMMs of one size, 128^3 with two rows: the emulation compiles few kernels.
TINY = {"layers": 2, "dim": 128, "hidden": 128, "heads": 2, "kv_heads": 2, "length": 64}


class Batches(NamedTuple):
    """How the text is cut."""

    rows: int
    length: int
    held_out: int  # batches of the held-out text


class Model(NamedTuple):
    """A model of either library in training."""

    # Takes a step on tokens at a learning rate, and gives the loss before it.
    step: Callable[[Tensor, float], Any]
    evaluate: Callable[[Tensor], Any]  # the loss on tokens


def followed(
    label: str, seed: int, corpus: Corpus, arguments: argparse.Namespace, batches: Batches, model: Model
) -> dict[str, Any]:
    """Losses of every step and on the held-out text; batches and learning rates are those of all runs of the seed."""
    rows, length, count = batches
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    losses = [
        model.step(corpus.batch(generator, rows, length), arguments.lr * rate(step, arguments.steps))
        for step in range(arguments.steps)
    ]
    curve = [float(loss) for loss in losses]
    seconds = time.perf_counter() - start
    training = fmean(curve[-LAST:])
    held_out = fmean(float(model.evaluate(tokens)) for tokens in corpus.held_out_batches(count, rows, length))
    say(f"{label} seed {seed}: {training:.4f} training, {held_out:.4f} held out, {seconds:.1f} s")
    return {"seconds": round(seconds, 2), "losses": curve, "training": training, "held_out": held_out}


def of_torch(name: str, model: nn.Module, device: torch.device) -> Model:
    """Converts a model of torch for a run."""
    converted(name if name == BASELINE else f"f8emu/{name}", model, left_out=(HEAD,))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def step(tokens: Tensor, learning_rate: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(tokens.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return model.eval()(tokens.to(device))

    return Model(step, evaluate)


def train(name: str, seed: int, corpus: Corpus, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    size, batches = (TINY, Batches(2, 64, 2)) if arguments.tiny else (FULL, Batches(16, 256, 32))
    torch.manual_seed(seed)
    model = Llama(**size)
    run = followed(name, seed, corpus, arguments, batches, of_torch(name, model, torch.device(arguments.device)))
    return {"name": name, "seed": seed, **run, "parameters": sum(p.numel() for p in model.parameters())}


def judge(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every recipe against the bfloat16 seeds."""
    # Shifts are between runs of one seed: the same first weights, the same batches.
    bf16 = {run["seed"]: run for run in runs if run["name"] == BASELINE}
    verdicts: list[dict[str, Any]] = []
    for name in dict.fromkeys(run["name"] for run in runs if run["name"] != BASELINE):
        of_recipe = [run for run in runs if run["name"] == name]
        verdict: dict[str, Any] = {"name": name, "seeds": [run["seed"] for run in of_recipe]}
        for figure in FIGURES:
            of = [run[figure] for run in bf16.values()]
            shifts = [run[figure] - bf16[run["seed"]][figure] for run in of_recipe]
            loss = fmean(run[figure] for run in of_recipe)
            verdict[figure] = {
                "loss": loss,
                "bf16_least": min(of),
                "bf16_greatest": max(of),
                "bf16_mean": fmean(of),
                "shift": fmean(shifts),
                "shifts": shifts,
                "in_range": min(of) <= loss <= max(of),
            }
        finite = all(math.isfinite(loss) for run in of_recipe for loss in run["losses"])
        verdict["passes"] = finite and all(verdict[f]["in_range"] for f in FIGURES)
        verdicts.append(verdict)
    return verdicts


def rows_of(verdict: dict[str, Any]) -> dict[str, list[str]]:
    """Of a table, a row for each figure: its loss, the range of the bfloat16 seeds, and whether it lies in it."""
    return {
        figure: [
            f"{verdict['name']}, {figure.replace('_', ' ')}",
            f"{verdict[figure]['loss']:.4f}",
            f"{verdict[figure]['bf16_least']:.4f} - {verdict[figure]['bf16_greatest']:.4f}",
            "yes" if verdict[figure]["in_range"] else "NO",
        ]
        for figure in FIGURES
    }


BENCH = Bench(
    "benchmarks.train",
    __doc__,
    option("recipes", tuple(RECIPES), choices=tuple(NAMED_RECIPES)),
    option("steps", 300),
    option("seeds", 3, "of bfloat16 and of every recipe"),
    option("lr", 1e-3),
    option("tiny", False, "two layers of 128, for a CPU"),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments = run.arguments
    if arguments.tiny:
        torch.set_num_threads(1)  # matrices too small for more
    corpus = read_corpus()
    model = TINY if arguments.tiny else FULL
    run.report |= {"corpus": corpus.description, "model": model, "steps": arguments.steps}
    run.announce(f", corpus {corpus.description['training_bytes']} bytes")
    runs: list[dict[str, Any]] = []
    for name in (BASELINE, *arguments.recipes):
        for seed in range(arguments.seeds):
            runs.append(train(name, seed, corpus, arguments))
            run.record(runs=runs, verdicts=judge(runs))
    verdicts = run.report["verdicts"]
    rows = [(*row, f"{v[figure]['shift']:+.4f}") for v in verdicts for figure, row in rows_of(v).items()]
    figures = f"mean of {arguments.seeds} seeds; training: the last {min(LAST, arguments.steps)}"
    columns = ("recipe", "loss", "bf16 seeds", "in range", "shift from bf16")
    draw(f"loss after {arguments.steps} steps, {figures}", columns, rows)
    return int(not all(verdict["passes"] for verdict in verdicts))


def rate(step: int, steps: int) -> float:
    """Linear rise, then a cosine down to a tenth."""
    rise = min(WARMUP, max(1, steps // 4))
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


if __name__ == "__main__":
    sys.exit(main())

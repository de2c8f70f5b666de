"""What inspection costs: Llama blocks that train, not inspected, between inspected steps, every 10 steps, every step.

    python -m benchmarks.inspection --json OUT                    on a GPU: 4 Llama-3 8B blocks, 8192 tokens
    python -m benchmarks.inspection --device cpu --tiny           the same code, emulated, under a minute

A round times each subject over `--steps` steps, one after the other, so that a drift of the machine meets all alike;
the figure is the median over rounds. `off` is an inspection that waits for a step that does not come. Asked: off at
most 1 %, every 10 steps at most 10 %. On a CPU the emulation takes most of the time, so the figures say little there.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.models import TransformerBlock
from benchmarks.runner import Bench, Columns, draw_entries, option, say, spread, turns_of
from benchmarks.timing import back_to_back
from f8emu.torch import InspectConfig, convert_to_float8_training, inspect

FULL = {"dim": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8, "length": 8192}
TINY = {"dim": 128, "hidden": 128, "heads": 2, "kv_heads": 2, "length": 128}
NEVER = 1 << 40
SUBJECTS = {
    "not inspected": None,
    "off": InspectConfig(start=NEVER),
    "every 10 steps": InspectConfig(every=10),
    "every step": InspectConfig(),
}
"""Those that look write a file, as users do: fsynced after each inspected step."""


BENCH = Bench(
    "benchmarks.inspection",
    "What inspection costs a step.",
    option("device", "cuda"),
    option("tiny", False, "small blocks: for tests"),
    option("recipe", "tensorwise"),
    option("compile", False),
    option("layers", 4),
    *turns_of(5, 20),
)
_COLUMNS: Columns = {"ms": "ms:.3f", "overhead": "overhead:+.2%"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints a table, records; `--steps` is a multiple of 10."""
    run = BENCH.parse(argv)
    arguments, device = run.arguments, run.device
    step, model = _training(arguments, device)
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for turn in range(arguments.rounds + 1):
        for name, config in SUBJECTS.items():
            with ExitStack() as stack:
                if config is not None:
                    folder = stack.enter_context(TemporaryDirectory())
                    config = replace(config, path=f"{folder}/run.jsonl")
                inspector = None if config is None else stack.enter_context(inspect(model, config))

                def timed(inspector: Any = inspector) -> None:
                    step()
                    if inspector is not None:
                        inspector.step()

                # The step before the timed ones, and the first round, compile; step 1 is inspected then.
                ms = back_to_back(timed, arguments.steps, device).ms
            say(f"round {turn} of {arguments.rounds}: {name} {ms:.1f} ms")
            if turn:
                times[name].append(ms)
    rows = [{"subject": name, "ms": spread(of)["ms"], "rounds": of} for name, of in times.items()]
    for row in rows:
        row["overhead"] = row["ms"] / rows[0]["ms"] - 1
    title = f"{arguments.recipe}{', compiled' if arguments.compile else ''}: a step, forward and backward"
    draw_entries(title, rows, _COLUMNS)
    run.record(subjects=rows)
    return 0


def _training(arguments: argparse.Namespace, device: torch.device) -> tuple[Callable[[], None], nn.Module]:
    """A step, forward and backward, and the model."""
    size = TINY if arguments.tiny else FULL
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(TransformerBlock(**size) for _ in range(arguments.layers))).to(torch.bfloat16)
        x = torch.randn(1, size["length"], size["dim"], dtype=torch.bfloat16).requires_grad_()
    convert_to_float8_training(model, config=arguments.recipe)
    if arguments.compile:
        for block in model:
            block.compile(fullgraph=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step, model


if __name__ == "__main__":
    sys.exit(main())

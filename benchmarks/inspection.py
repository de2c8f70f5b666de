"""What inspection costs: Llama blocks that train, not inspected, between inspected steps, every 10 steps, every step.

    python -m benchmarks.inspection --json OUT                    on a GPU: 4 Llama-3 8B blocks, 8192 tokens
    python -m benchmarks.inspection --device cpu --tiny           the same code, emulated, under a minute

A round times each subject over `--steps` steps, one after the other, so that a drift of the machine meets all alike;
the figure is the median over rounds. `off` is an inspection that waits for a step that does not come. Asked: off at
most 1 %, every 10 steps at most 10 %. On a CPU the emulation takes most of the time, so the figures say little there.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.models import TransformerBlock
from benchmarks.report import draw, facts, write_json
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="of a subject in a round; a multiple of 10")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
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
            print(f"round {turn} of {arguments.rounds}: {name} {ms:.1f} ms", file=sys.stderr, flush=True)
            if turn:
                times[name].append(ms)
    median = {name: statistics.median(found) for name, found in times.items()}
    base = median["not inspected"]
    rows = [
        {"subject": name, "ms": ms, "overhead": ms / base - 1, "rounds": times[name]} for name, ms in median.items()
    ]
    title = f"{arguments.recipe}{', compiled' if arguments.compile else ''}: a step, forward and backward"
    draw(
        title, ("subject", "ms", "overhead"), [(r["subject"], f"{r['ms']:.3f}", f"{r['overhead']:+.2%}") for r in rows]
    )
    if arguments.json is not None:
        write_json(arguments.json, {**facts("benchmarks.inspection", given, device), "subjects": rows})
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
    raise SystemExit(main())

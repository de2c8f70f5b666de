"""What inspection costs: Llama blocks that train, not inspected, between inspected steps, every 10 steps, every step.

    python -m benchmarks.inspection --json OUT                    on a GPU: 4 Llama-3 8B blocks, 8192 tokens
    python -m benchmarks.inspection --device cpu --tiny           the same code, emulated, under a minute

A round times each subject over `--steps` steps, one after the other, so that a drift of the machine meets all alike;
the figure is the median over rounds. `off` is an inspection that waits for a step that does not come. Asked: off at
most 1 %, every 10 steps at most 10 %. On a CPU the emulation takes most of the time, so the figures say little there.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
from torch import nn

from benchmarks.models import TransformerBlock
from benchmarks.runner import Bench, Entry, draw_entries, option, spread, turns_of
from benchmarks.timing import back_to_back
from f8emu.torch import InspectConfig, convert_to_float8_training, inspect

FULL = {"dim": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8, "length": 8192}
TINY = {"dim": 128, "hidden": 128, "heads": 2, "kv_heads": 2, "length": 128}
# Those that look write a file, as users do: fsynced after each inspected step.
SUBJECTS = {
    "not inspected": None,
    "off": InspectConfig(start=1 << 40),
    "every 10 steps": InspectConfig(every=10),
    "every step": InspectConfig(),
}
BENCH = Bench(
    "benchmarks.inspection",
    __doc__,
    option("device", "cuda"),
    option("tiny", False, "small blocks: for tests"),
    option("recipe", "tensorwise"),
    option("compile", False),
    option("layers", 4),
    *turns_of(5, 20),
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, size = run.arguments, TINY if run.arguments.tiny else FULL
    with run.device:
        model = nn.Sequential(*(TransformerBlock(**size) for _ in range(arguments.layers))).to(torch.bfloat16)
        x = torch.randn(1, size["length"], size["dim"], dtype=torch.bfloat16).requires_grad_()
    convert_to_float8_training(model, config=arguments.recipe)
    if arguments.compile:
        for block in model:
            block.compile(fullgraph=True)

    def turn(config: InspectConfig | None) -> float:
        with ExitStack() as stack:
            inspector = None
            if config is not None:
                config = replace(config, path=f"{stack.enter_context(TemporaryDirectory())}/run.jsonl")
                inspector = stack.enter_context(inspect(model, config))

            def step() -> None:
                model(x).sum().backward()
                model.zero_grad()
                if inspector is not None:
                    inspector.step()

            return back_to_back(step, arguments.steps, run.device).ms

    # The step before the timed ones, and the first round, compile; step 1 is inspected then.
    times = [[turn(config) for config in SUBJECTS.values()] for _ in range(arguments.rounds + 1)]
    entries: list[Entry] = [
        {"subject": name, "ms": spread(of)["ms"], "rounds": list(of)}
        for name, of in zip(SUBJECTS, zip(*times[1:], strict=True), strict=True)
    ]
    for entry in entries:
        entry["overhead"] = entry["ms"] / entries[0]["ms"] - 1
    title = f"{arguments.recipe}{', compiled' if arguments.compile else ''}: a step, forward and backward"
    draw_entries(title, entries, "ms:.3f overhead:+.2%")
    run.record(subjects=entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())

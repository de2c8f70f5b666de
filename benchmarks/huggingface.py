"""A Hugging Face Llama in training: tokens a second and peak memory of bfloat16, torchao and f8emu.

    python -m benchmarks.huggingface --json OUT

Eight layers of 2048 with 8192 hidden features, 4 x 4096 random tokens, fused AdamW, every layer compiled by itself, the
output layer in bfloat16. All models live at once and take turns, a few steps each; figures are medians over rounds.
"+recompute" is f8emu with `recompute_casts`. Peak memory is a model's own: weights, optimizer, and the most that a
step holds. Exit status 1 if f8emu fails or a loss is not finite.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.measure import forget
from benchmarks.runner import Entry, is_wrong
from benchmarks.subjects import MODES, RECOMPUTE, SUBJECTS, compile_options, converted
from benchmarks.timing import back_to_back, draw_kernels, held_bytes, kernels, peak_bytes

WARMUP = 4  # steps before the first figure; their losses are recorded
_SHAPE, _TINY_SHAPE = (4, 4096), (1, 64)
_CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
_TINY_CONFIG = _CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
_SUBJECTS = (*SUBJECTS, *(f"{name}{RECOMPUTE}" for name in SUBJECTS if name.startswith("f8emu/")))
BENCH = runner.Bench(
    "benchmarks.huggingface",
    __doc__,
    runner.option("subjects", SUBJECTS, choices=_SUBJECTS),
    runner.option("mode", "compiled", choices=MODES),
    runner.option("kernels", (), "list the kernels of a step", choices=_SUBJECTS, metavar="SUBJECT"),
    *runner.turns_of(5, 3),
    runner.option("tiny", False, "two tiny layers, 64 tokens, one step: for tests"),
    runner.DEVICE,
)
_COLUMNS = "tokens_per_second:.0f speed:.3f ms:.2f bounds peak_bytes:GiB losses"


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, device = run.arguments, run.device
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(f"benchmarks.huggingface: needs the package transformers: {error}") from None
    runner.compile_without_limits()
    config, shape, rounds, steps = _CONFIG, _SHAPE, arguments.rounds, arguments.steps
    if arguments.tiny:
        config, shape, rounds, steps = _TINY_CONFIG, _TINY_SHAPE, 1, 1
    run.report["versions"]["transformers"] = runner.package_version("transformers")
    run.report |= {"config": config, "batch": list(shape), "mode": arguments.mode, "rounds": rounds, "steps": steps}
    run.announce(f", transformers {run.report['versions']['transformers']}")
    ids = torch.randint(config["vocab_size"], shape, device=device)

    def built(subject: str) -> Any:
        torch.manual_seed(0)  # the same weights for every subject
        with device:
            model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16)
        return converted(subject, model, left_out=("lm_head",))

    def prepare(entry: Entry) -> Callable[[], Tensor]:
        return warmed_up(entry, built, ids, is_compiled=arguments.mode == "compiled")

    entries: list[Entry] = [{"subject": name} for name in arguments.subjects]
    for entry, step in runner.race(entries, prepare, lambda step: back_to_back(step, steps, device).ms, rounds):
        entry["tokens_per_second"] = 1e3 * ids.numel() / entry["ms"]
        entry["losses"].append(step().item())
        if entry["subject"] in arguments.kernels:
            entry["kernels"] = kernels(step, device)
            draw_kernels(f"{entry['subject']}: a step of {entry['ms']:.2f} ms", entry["kernels"])
    runner.add_ratios(entries, {})
    runner.draw_entries("Hugging Face Llama, a training step", entries, _COLUMNS)
    run.record(subjects=entries)
    forget()
    return int(any(map(is_wrong, entries)))


def warmed_up(entry: Entry, built: Callable[[str], Any], ids: Tensor, *, is_compiled: bool) -> Callable[[], Tensor]:
    """The subject's step after its warm-up; its peak memory is measured beside what others hold."""
    device, others = ids.device, held_bytes(ids.device)
    model = built(entry["subject"])
    for layer in model.model.layers if is_compiled else ():
        layer.compile(**compile_options(entry["subject"]))
    step = training(model, ids)
    entry["losses"] = [step().item() for _ in range(WARMUP)]
    held, above = held_bytes(device) - others, peak_bytes(step, device)
    entry["peak_bytes"] = None if above is None else held + above
    return step


def training(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """A step on one batch, which gives the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    sys.exit(main())

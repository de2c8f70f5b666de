"""A Hugging Face Llama in training: tokens a second and peak memory of bfloat16, torchao and f8emu.

    python -m benchmarks.huggingface --json OUT

Eight layers of 2048 with 8192 hidden features, 4 x 4096 random tokens, fused AdamW, every layer compiled by itself, the
output layer in bfloat16. All models live at once and take turns, a few steps each; figures are medians over rounds.
Peak memory is a model's own: weights, optimizer, and the most that a step holds. Exit status 1 if f8emu fails or a loss
is not finite.
"""

import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.kernels import draw_kernels, kernels
from benchmarks.measure import forget
from benchmarks.subjects import MODES, SUBJECTS, compile_options, converted
from benchmarks.timing import back_to_back, peak_bytes

WARMUP = 4
"""Steps before the first figure; their losses are recorded."""
_SHAPE = (4, 4096)
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
_TINY_SHAPE = (1, 64)
_TINY_CONFIG = _CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def _losses(entry: runner.Entry) -> str:
    losses = entry["losses"]
    return " ".join(f"{loss:.4f}" for loss in (losses[0], losses[WARMUP - 1], losses[-1]))


BENCH = runner.Bench(
    "benchmarks.huggingface",
    "A Hugging Face Llama in training.",
    runner.option("subjects", SUBJECTS, choices=SUBJECTS),
    runner.option("mode", "compiled", choices=MODES),
    runner.option("kernels", (), "list the kernels of a step", choices=SUBJECTS, metavar="SUBJECT"),
    *runner.turns_of(5, 3),
    runner.option("recompute-casts", False, "f8emu's option, for less memory"),
    runner.option("tiny", False, "two tiny layers, 64 tokens, one step: for tests"),
    runner.DEVICE,
)
_COLUMNS: runner.Columns = {
    "tokens/s": "tokens_per_second:.0f",
    "times bf16": "speed:.3f",
    "ms": "ms:.2f",
    "min - max": runner.bounds,
    "peak GiB": runner.scaled("peak_bytes", 2**30, ".2f"),
    f"loss 1, {WARMUP}, last": _losses,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints a table, records, and gives the exit status."""
    run = BENCH.parse(argv)
    arguments, device, report = run.arguments, run.device, run.report
    _transformers()
    runner.compile_without_limits()
    config, shape = (_TINY_CONFIG, _TINY_SHAPE) if arguments.tiny else (_CONFIG, _SHAPE)
    rounds, steps = (1, 1) if arguments.tiny else (arguments.rounds, arguments.steps)
    report["versions"]["transformers"] = runner.package_version("transformers")
    report |= {"config": config, "batch": list(shape), "mode": arguments.mode, "rounds": rounds, "steps": steps}
    run.announce(f", transformers {report['versions']['transformers']}")
    torch.manual_seed(0)
    ids = torch.randint(config["vocab_size"], shape, device=device)
    entries: list[runner.Entry] = [{"subject": name} for name in arguments.subjects]
    ready: dict[str, Callable[[], Tensor]] = {}
    for entry in entries:
        name = entry["subject"]
        with runner.attempt(entry):
            ready[name] = _ready(name, config, ids, arguments.mode, entry, arguments.recompute_casts)
        runner.say(f"{name}: {entry.get('absent') or entry.get('failed') or 'ready'}")
    times = runner.take_turns(
        {name: lambda s=step: back_to_back(s, steps, device).ms for name, step in ready.items()}, rounds
    )
    for entry in (e for e in entries if e["subject"] in ready):
        step = ready[entry["subject"]]
        entry |= runner.spread(times[entry["subject"]])
        entry["tokens_per_second"] = 1e3 * ids.numel() / entry["ms"]
        entry["losses"].append(step().item())
        if entry["subject"] in arguments.kernels:
            entry["kernels"] = kernels(step, device)
    runner.add_ratios(entries, {})
    runner.draw_entries("Hugging Face Llama, a training step", entries, _COLUMNS)
    for e in entries:
        if "kernels" in e:
            draw_kernels(f"{e['subject']}: a step of {e['ms']:.2f} ms", e["kernels"])
    run.record(subjects=entries)
    ready.clear()
    forget()
    own = [e for e in entries if not e["subject"].startswith("torchao/")]
    return int(any("failed" in e or not all(map(math.isfinite, e["losses"])) for e in own))


def _ready(
    name: str, config: dict[str, Any], ids: Tensor, mode: str, entry: runner.Entry, recompute_casts: bool
) -> Callable[[], Tensor]:
    """The subject's step after its warm-up; its peak memory is measured beside what others hold."""
    device, start = ids.device, time.perf_counter()
    held = torch.cuda.memory_allocated if device.type == "cuda" else lambda _: 0
    others = held(device)
    step = _training(name, config, ids, mode, recompute_casts)
    entry["losses"] = [step().item() for _ in range(WARMUP)]
    entry["warmup_s"] = round(time.perf_counter() - start, 2)
    own = held(device) - others
    above = peak_bytes(step, device)
    entry["peak_bytes"] = None if above is None else own + above
    return step


def _training(name: str, config: dict[str, Any], ids: Tensor, mode: str, recompute_casts: bool) -> Callable[[], Tensor]:
    """A step of training on one batch, which gives the loss before it; the same weights for every subject.

    Raises:
        AbsentError: the subject's library is not installed.
    """
    transformers = _transformers()
    torch.manual_seed(0)
    with ids.device:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16)
    converted(name, model, left_out=("lm_head",), recompute_casts=recompute_casts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for layer in model.model.layers if mode == "compiled" else ():
        layer.compile(**compile_options(name))

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(f"benchmarks.huggingface: needs the package transformers: {error}") from None


if __name__ == "__main__":
    sys.exit(main())

"""Mixtures of experts of transformers in training: losses of small ones, and the speed of one of 1.2 B parameters.

    python -m benchmarks.moe_train --json OUT

1. Losses: a Qwen3-MoE and a Mixtral, bytes of Python's standard library, 50 steps: three seeds in bfloat16, and every
recipe with the first. The figure is the mean loss of the last ten steps, beside the least and greatest of bfloat16.
2. Speed: a Qwen3-MoE of 16 experts, two for a token, 2 x 8192 random tokens, fused AdamW in bfloat16, every layer
compiled by itself, the output layer in bfloat16. All subjects live at once and take turns. Exit status 1 if a recipe
fails, a loss is not finite, or a mean lies outside of bfloat16's by more than their spread.
"""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.huggingface import warmed_up
from benchmarks.measure import forget
from benchmarks.models import read_corpus
from benchmarks.runner import BASELINE, Entry, is_wrong, say
from benchmarks.subjects import MODES, converted
from benchmarks.timing import back_to_back, draw_kernels, kernels

RECIPES = ("rowwise", "rowwise_fast", "rowwise_with_gw_hp", "tensorwise", "delayed")
SUBJECTS = (BASELINE, *(f"f8emu/{name}" for name in RECIPES))
SEEDS, LAST = (0, 1, 2), 10
_SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
_SMALL |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512, "use_cache": False}
_LARGE = _SMALL | {"hidden_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 4}
_LARGE |= {"vocab_size": 32000, "max_position_embeddings": 8192}
_TINY = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
}
_LARGE |= {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 2048, "head_dim": 128}
BENCH = runner.Bench(
    "benchmarks.moe_train",
    __doc__,
    runner.option("subjects", SUBJECTS, choices=SUBJECTS),
    runner.option("models", tuple(MODELS), "whose losses are compared", choices=(*MODELS, "none")),
    runner.option("mode", "compiled", "of the speed", choices=MODES),
    runner.option("kernels", (), "list the kernels of a step", choices=SUBJECTS, metavar="SUBJECT"),
    *runner.turns_of(5, 3),
    runner.option("train-steps", 50, "steps of the losses"),
    runner.option("tiny", False, "one tiny layer, no speed: for tests"),
    runner.DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, device = run.arguments, run.device
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(f"benchmarks.moe_train: needs the package transformers: {error}") from None
    run.report["versions"]["transformers"] = runner.package_version("transformers")
    run.announce(f", transformers {run.report['versions']['transformers']}")

    def built(kind: str, config: dict[str, Any], subject: str, dtype: torch.dtype, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        config_class, model_class = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
        with device:
            model = model_class._from_config(config_class(**config), dtype=dtype, experts_implementation="grouped_mm")
        return converted(subject, model, left_out=("lm_head",))

    # 1. Losses.
    corpus, losses = read_corpus().training, dict[str, Any]()
    for kind in arguments.models if "none" not in arguments.models else ():
        config = _SMALL | MODELS[kind] | (_TINY if arguments.tiny else {})
        runs = [(BASELINE, seed) for seed in SEEDS] + [(name, SEEDS[0]) for name in arguments.subjects[1:]]
        found = losses[kind] = [{"subject": name, "seed": seed} for name, seed in runs]
        for entry, (name, seed) in zip(found, runs, strict=True):
            with runner.attempt(entry):
                model = built(kind, config, name, torch.bfloat16, seed)
                batch = (1, 32) if arguments.tiny else (8, 256)
                entry["losses"] = trained(model, corpus.to(device), arguments.train_steps, seed, batch)
                entry["final"] = fmean(entry["losses"][-LAST:])
        plain = [entry["final"] for entry in found[: len(SEEDS)]]
        least, most = min(plain), max(plain)
        for entry in found:
            entry["is_wrong"] = not 2 * least - most <= entry.get("final", math.nan) <= 2 * most - least
            say(f"{kind} {entry['subject']} seed {entry['seed']}: {entry.get('final', math.nan):.4f}")
        say(f"{kind} bfloat16: {least:.4f} to {most:.4f}")
        run.record(losses=losses)
    status = any(entry["is_wrong"] for found in losses.values() for entry in found)
    if arguments.tiny:
        return int(status)

    # 2. Speed.
    runner.compile_without_limits()
    ids = torch.randint(_LARGE["vocab_size"], (2, 8192), device=device)

    def prepare(entry: Entry) -> Callable[[], Tensor]:
        def large(subject: str) -> Any:
            model = built("Qwen3Moe", _LARGE, subject, torch.bfloat16)
            entry["parameters"] = sum(p.numel() for p in model.parameters())
            return model

        return warmed_up(entry, large, ids, is_compiled=arguments.mode == "compiled")

    entries: list[Entry] = [{"subject": name} for name in arguments.subjects]
    turns = runner.race(entries, prepare, lambda step: back_to_back(step, arguments.steps, device).ms, arguments.rounds)
    for entry, step in turns:
        entry["tokens_per_second"] = 1e3 * ids.numel() / entry["ms"]
        if entry["subject"] in arguments.kernels:
            entry["kernels"] = kernels(step, device)
            draw_kernels(f"{entry['subject']}: a step of {entry['ms']:.2f} ms", entry["kernels"])
    runner.add_ratios(entries, {"memory": "peak_bytes"})
    columns = "tokens_per_second:.0f speed:.3f ms:.2f bounds peak_bytes:GiB memory:.2f losses"
    runner.draw_entries("a Qwen3-MoE of 16 experts, a training step", entries, columns)
    run.record(subjects=entries)
    forget()
    return int(status or any(map(is_wrong, entries)))


def trained(model: Any, corpus: Tensor, steps: int, seed: int, batch: tuple[int, int]) -> list[float]:
    """The loss of every step, on batches of rows of bytes that the seed chooses."""
    rows, length = batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(seed), list[Tensor]()
    for _ in range(steps):
        starts = torch.randint(corpus.numel() - length, (rows, 1), generator=generator).to(corpus.device)
        ids = corpus[starts + torch.arange(length, device=corpus.device)].long()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


if __name__ == "__main__":
    sys.exit(main())

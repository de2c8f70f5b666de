"""A Hugging Face Llama in training: tokens a second and peak memory of bfloat16, torchao and f8emu.

    python -m benchmarks.huggingface --json OUT

Eight layers of 2048 with 8192 hidden features, 4 x 4096 random tokens, fused AdamW, every layer compiled by itself, the
output layer in bfloat16. All models live at once and take turns, a few steps each; figures are medians over rounds.
Peak memory is a model's own: weights, optimizer, and the most that a step holds. Exit status 1 if f8emu fails or a loss
is not finite.
"""

import argparse
import importlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels import draw_kernels, kernels
from benchmarks.measure import forget
from benchmarks.report import draw, facts, figure, package_version, say, write_json
from benchmarks.subjects import BASELINE, MODES, SUBJECTS, AbsentError, compile_options, converted
from benchmarks.timing import back_to_back, median, synchronize

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model in training on one batch."""

    subject: str
    model: Any
    optimizer: torch.optim.Optimizer
    ids: Tensor
    """int64 [batch, length], input and labels."""

    def step(self) -> Tensor:
        """Forward, backward, the optimizer; the loss before it."""
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints a table, records, and gives the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(given)
    device = torch.device(arguments.device)
    _transformers()
    torch._dynamo.config.recompile_limit = 256  # as in benchmarks.linear
    torch._dynamo.config.accumulated_recompile_limit = 1024
    config = _TINY_CONFIG if arguments.tiny else _CONFIG
    rounds, steps = (1, 1) if arguments.tiny else (arguments.rounds, arguments.steps)
    shape = _TINY_SHAPE if arguments.tiny else _SHAPE
    report = facts("benchmarks.huggingface", given, device)
    report["versions"]["transformers"] = package_version("transformers")
    report |= {"config": config, "batch": list(shape), "mode": arguments.mode, "rounds": rounds, "steps": steps}
    say(f"{report['device']}, torch {report['versions']['torch']}, transformers {report['versions']['transformers']}")
    torch.manual_seed(0)
    ids = torch.randint(config["vocab_size"], shape, device=device)
    entries: list[dict[str, Any]] = []
    report["subjects"] = entries
    ready: list[tuple[Training, dict[str, Any]]] = []
    for name in arguments.subjects:
        entry: dict[str, Any] = {"subject": name}
        entries.append(entry)
        try:
            ready.append((_ready(name, config, ids, arguments.mode, entry, arguments.recompute_casts), entry))
        except AbsentError as error:
            entry["absent"] = str(error)
        except Exception as error:  # as in `measure`
            entry["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            say(f"{name} failed: {error}")
        say(f"{name}: {entry.get('absent') or entry.get('failed') or 'ready'}")
    times: dict[str, list[float]] = {training.subject: [] for training, _ in ready}
    for _ in range(rounds):
        for training, _ in ready:
            times[training.subject].append(back_to_back(training.step, steps, device).ms)
    plain: float | None = None
    for training, entry in ready:
        of = times[training.subject]
        entry |= {"ms": median(of), "ms_min": min(of), "ms_max": max(of)}
        entry["tokens_per_second"] = 1e3 * ids.numel() / entry["ms"]
        entry["losses"].append(training.step().item())
        if training.subject == BASELINE:
            plain = entry["ms"]
        if plain is not None:
            entry["speed"] = plain / entry["ms"]
        if training.subject in arguments.kernels:
            entry["kernels"] = kernels(training.step, device)
    _draw(entries)
    if arguments.json:
        write_json(arguments.json, report)
    ready.clear()
    forget()
    own = [e for e in entries if not e["subject"].startswith("torchao/")]
    return int(any("failed" in e or not all(map(math.isfinite, e["losses"])) for e in own))


def _ready(
    name: str, config: dict[str, Any], ids: Tensor, mode: str, entry: dict[str, Any], recompute_casts: bool
) -> Training:
    """The subject after its warm-up; its peak memory is measured beside what others hold."""
    device = ids.device
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    start = time.perf_counter()
    training = _training(name, config, ids, mode, recompute_casts)
    entry["losses"] = [training.step().item() for _ in range(WARMUP)]
    entry["warmup_s"] = round(time.perf_counter() - start, 2)
    entry["peak_bytes"] = None
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        training.step()
        synchronize(device)
        entry["peak_bytes"] = torch.cuda.max_memory_allocated(device) - others
    return training


def _training(name: str, config: dict[str, Any], ids: Tensor, mode: str, recompute_casts: bool) -> Training:
    """The same weights for every subject.

    Raises:
        AbsentError: the subject's library is not installed.
    """
    transformers = _transformers()
    torch.manual_seed(0)
    with ids.device:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16)
    converted(name, model, left_out=("lm_head",), recompute_casts=recompute_casts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if mode == "compiled":
        for layer in model.model.layers:
            assert isinstance(layer, nn.Module)
            layer.compile(**compile_options(name))
    return Training(subject=name, model=model, optimizer=optimizer, ids=ids)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(f"benchmarks.huggingface: needs the package transformers: {error}") from None


def _draw(entries: Sequence[dict[str, Any]]) -> None:
    rows = []
    for e in entries:
        if "ms" not in e:
            rows.append([e["subject"], "absent" if "absent" in e else "FAILED"])
            continue
        losses = e["losses"]
        rows.append(
            [
                e["subject"],
                f"{e['tokens_per_second']:.0f}",
                figure(e, "speed", ".3f"),
                f"{e['ms']:.2f}",
                f"{e['ms_min']:.2f} - {e['ms_max']:.2f}",
                f"{e['peak_bytes'] / 2**30:.2f}" if e["peak_bytes"] else "-",
                " ".join(f"{loss:.4f}" for loss in (losses[0], losses[WARMUP - 1], losses[-1])),
            ]
        )
    columns = ("subject", "tokens/s", "times bf16", "ms", "min - max", "peak GiB", f"loss 1, {WARMUP}, last")
    draw("Hugging Face Llama, a training step", columns, rows)
    for e in entries:
        if "kernels" in e:
            draw_kernels(f"{e['subject']}: a step of {e['ms']:.2f} ms", e["kernels"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.huggingface", description="A Hugging Face Llama in training."
    )
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--mode", choices=MODES, default="compiled", help="default compiled")
    parser.add_argument(
        "--kernels", nargs="+", choices=SUBJECTS, default=[], metavar="SUBJECT", help="list the kernels of a step"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every subject (default 5)")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn (default 3)")
    parser.add_argument("--recompute-casts", action="store_true", help="f8emu's option, for less memory")
    parser.add_argument("--tiny", action="store_true", help="two tiny layers, 64 tokens, one step: for tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to record")
    return parser


if __name__ == "__main__":
    sys.exit(main())

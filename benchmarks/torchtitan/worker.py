"""One variant, on every rank: torchtitan's own Trainer; rank 0 writes the result.

torchrun --nproc-per-node 4 -m benchmarks.torchtitan.worker --layers 32 --result FILE -- TORCHTITAN'S OPTIONS
"""

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.runner import package_version, say, write_json
from benchmarks.timing import exposure, profiled


def main(argv: Sequence[str]) -> None:
    cut = list(argv).index("--")
    parser = argparse.ArgumentParser(prog="benchmarks.torchtitan.worker")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--last", type=int, required=True, help="figures are medians of that many steps, the last")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step of rank 0")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args(argv[:cut])
    # 1. Stand-ins, before torchtitan is imported.
    datasets_if_broken()
    tensorboard_if_missing()
    # 2. torchtitan's Trainer, on random tokens, with a logger that keeps its metrics.
    recorder = importlib.import_module("benchmarks.torchtitan.synthetic").register(arguments.layers)
    importlib.import_module("torchtitan.tools.logging").init_logger()
    config = importlib.import_module("torchtitan.config").ConfigManager().parse_args(list(argv[cut + 1 :]))
    trainer = importlib.import_module("torchtitan.train").Trainer(config)
    try:
        trainer.train()
        result = summary(recorder.steps, arguments.last)
        if arguments.kernels:  # every rank takes the steps
            batches = trainer.batch_generator(trainer.dataloader)
            seen = profiled(lambda: trainer.train_step(batches), torch.device("cuda"))
            result["kernels"] = seen.kernels
            result["exposure"] = exposure(seen.runs, seen.step_us)
        # 3. The record of rank 0.
        trainer.optimizers.zero_grad()
        if os.environ["RANK"] == "0":
            (model,) = trainer.model_parts
            kinds = Counter(type(module).__name__ for module in model.modules())
            result["linear_modules"] = {kind: count for kind, count in kinds.items() if "Linear" in kind}
            result["parameters"] = sum(p.numel() for p in model.parameters())
            result["rest_gib"] = torch.cuda.memory_allocated() / 2**30  # weights, optimizer, codes; no gradients
            result["memory_by_stream"] = memory_by_stream(torch.cuda.memory_snapshot())
            result["device"] = torch.cuda.get_device_name()
            result["versions"] = {name: package_version(name) for name in ("torchtitan", "torchao", "triton")}
            write_json(arguments.result, result)
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


def summary(steps: Sequence[dict[str, float]], last: int) -> dict[str, Any]:
    """Medians over the last steps of what torchtitan measured, most memory over all, and the losses."""
    counted = steps[-last:]

    def median(name: str) -> float:
        return statistics.median(step[name] for step in counted)

    tokens = [step["throughput(tps)"] for step in counted]
    return {
        "tokens_per_second_per_gpu": statistics.median(tokens),
        "tokens_per_second_per_gpu_min": min(tokens),
        "tokens_per_second_per_gpu_max": max(tokens),
        "step_ms": 1e3 * median("time_metrics/end_to_end(s)"),
        "steps_counted": len(counted),
        "mfu_percent": median("mfu(%)"),
        "peak_active_gib": max(step["memory/max_active(GiB)"] for step in steps),
        "peak_reserved_gib": max(step["memory/max_reserved(GiB)"] for step in steps),
        "active_gib": [round(step["memory/max_active(GiB)"], 3) for step in steps],
        "reserved_gib": [round(step["memory/max_reserved(GiB)"], 3) for step in steps],
        "alloc_retries": max(step["memory/num_alloc_retries"] for step in steps),
        "losses": [round(step["loss_metrics/global_avg_loss"], 4) for step in steps],
        "grad_norms": [round(step["grad_norm"], 4) for step in steps],
    }


def memory_by_stream(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """GiB that torch's allocator has reserved for each stream, the most first, and what is in use of it.

    What is reserved for one stream serves no other.
    """
    streams: dict[int, dict[str, Any]] = {}
    for segment in segments:
        entry = streams.setdefault(segment["stream"], {"reserved_gib": 0.0, "active_gib": 0.0})
        entry["reserved_gib"] += segment["total_size"] / 2**30
        entry["active_gib"] += segment["active_size"] / 2**30
    rounded = [{key: round(value, 3) for key, value in entry.items()} for entry in streams.values()]
    return sorted(rounded, key=lambda entry: -entry["reserved_gib"])


# Stand-ins for what torchtitan asks for and a run of random tokens does not need, before it is imported


def datasets_if_broken() -> None:
    """torchtitan imports `datasets` for its own data loader; an empty module will do where that fails."""
    try:
        importlib.import_module("datasets")
    except Exception as error:  # whatever a package does that does not fit the machine
        say(f"a stand-in for datasets: {type(error).__name__}: {error}")
        for name in [name for name in sys.modules if name.split(".")[0] == "datasets"]:
            del sys.modules[name]
        datasets: Any = ModuleType("datasets")
        distributed: Any = ModuleType("datasets.distributed")
        datasets.Dataset, datasets.load_dataset, datasets.distributed = object, None, distributed
        distributed.split_dataset_by_node = None
        sys.modules |= {"datasets": datasets, "datasets.distributed": distributed}


def tensorboard_if_missing() -> None:
    """torchtitan imports its writer, which nothing here uses."""
    if importlib.util.find_spec("tensorboard") is None:
        writer: Any = ModuleType("torch.utils.tensorboard")
        writer.SummaryWriter = None
        sys.modules["torch.utils.tensorboard"] = writer


if __name__ == "__main__":
    main(sys.argv[1:])

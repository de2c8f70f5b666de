"""torchtitan 0.2.2's own Trainer: Llama-3 8B on 1, 2 or 4 GPUs in bfloat16, torchao's float8 and f8emu's.

    python -m benchmarks.torchtitan --wheels DIR --json OUT               all of the machine's GPUs, 32 layers
    python -m benchmarks.torchtitan --gpus 2 --layers 16 --json OUT       half the model
    python -m benchmarks.torchtitan --steps 50 --json OUT                 the losses of 50 steps, same data

Every variant is a run of torchrun: FSDP2, every block compiled, fused AdamW, random tokens, per-op selective
checkpointing as torchtitan has it (`--checkpointing`). What follows `--` is passed on to torchtitan. `--wheels` is a
folder of wheels to install first, for a machine without network:

    pip download --no-deps torchtitan==0.2.2 torchao==0.17.0 torchdata==0.11.0 datasets==4.7.0 dill==0.4.0 \
        multiprocess==0.70.18 tyro==1.0.17 docstring_parser typeguard

Exit status 1 if a variant fails; the end of its log is shown.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import MULTICAST_OFF
from benchmarks.runner import BASELINE, DEVICE, Bench, Columns, Entry, add_ratios, draw_entries, option, say
from benchmarks.timing import draw_exposure, draw_kernels

_ADAPTER = "f8emu.torch.integrations.torchtitan"
_TORCHAO = ["--model.converters", "quantize.linear.float8"]
_RECIPES = ("tensorwise", "rowwise", "delayed")


def _all_gather(section: str) -> list[str]:
    """Float8 all-gather, its scales computed after the optimizer step; torchao and f8emu have the same keys."""
    return [f"--{section}.enable_fsdp_float8_all_gather", f"--{section}.precompute_float8_dynamic_scale_for_fsdp"]


def _f8emu(recipe: str) -> list[str]:
    imports = ["--job.custom_config_module", _ADAPTER, "--experimental.custom_import", _ADAPTER]
    return ["--model.converters", "f8emu", *imports, "--f8emu.recipe_name", recipe, "--f8emu.filter_fqns", "output"]


VARIANTS: dict[str, list[str]] = {
    BASELINE: [],
    "torchao/tensorwise": _TORCHAO,
    "torchao/tensorwise+all-gather": [*_TORCHAO, *_all_gather("quantize.linear.float8")],
    "torchao/rowwise": [*_TORCHAO, "--quantize.linear.float8.recipe_name", "rowwise"],
    **{f"f8emu/{recipe}": _f8emu(recipe) for recipe in _RECIPES},
    **{f"f8emu/{recipe}+all-gather": [*_f8emu(recipe), *_all_gather("f8emu")] for recipe in _RECIPES},
}
"""Options of torchtitan."""
_ENVIRONMENT = {
    **MULTICAST_OFF,
    # As torchtitan's run_train.sh: less fragmentation.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "8",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}
_TO_STOP = 45
"""Seconds that torchrun has to end its workers."""
_LOG_LINES = 25
"""Of the log of a variant that failed."""


BENCH = Bench(
    "benchmarks.torchtitan",
    "torchtitan's Trainer with f8emu.",
    option("variants", tuple(VARIANTS), choices=VARIANTS, metavar="VARIANT"),
    option("kernels", (), "list a step's kernels and waits", choices=VARIANTS, metavar="VARIANT"),
    option("gpus", max(1, torch.cuda.device_count())),
    option("layers", 32, "of Llama-3 8B"),
    option("steps", 15),
    option("last", 8, "figures are medians of the last"),
    option("checkpointing", "selective", choices=("selective", "none", "full")),
    option("wheels", Path, "a folder of wheels to install first"),
    option("limit", 150.0, "seconds that a variant may take"),
    option("seconds", 3600.0, "seconds that all may take"),
    option("least", 50.0, "begin none with fewer left"),
    option("tiny", False, "one layer of torchtitan's debug model: for tests"),
    option("log", Path, "append the logs here"),
    DEVICE,
)
_COLUMNS: Columns = {
    "tokens/s/GPU": "tokens_per_second_per_gpu:.0f",
    "speed": "speed:.3f",
    "step ms": "step_ms:.1f",
    "MFU %": "mfu_percent:.1f",
    "active GiB": "peak_active_gib:.2f",
    "reserved GiB": "peak_reserved_gib:.2f",
    "memory": "memory:.3f",
    "loss 1, last": lambda e: f"{e['losses'][0]:.4f} {e['losses'][-1]:.4f}",
    "less bf16's": "last_loss_less_bf16:+.4f",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the variants, prints one JSON line each and a table, records, and gives the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    # Asking for the GPU's name here would hold memory on it; rank 0 will tell.
    bench = BENCH.parse(given, device="cpu")
    arguments, report = bench.arguments, bench.report
    begin = time.perf_counter()
    config = Path(__file__).with_name("tiny.toml" if arguments.tiny else "llama3_8b.toml")
    layers, steps, last = (1, 3, 2) if arguments.tiny else (arguments.layers, arguments.steps, arguments.last)
    report["device"] = "unknown, no variant ran"
    report |= {"gpus": arguments.gpus, "layers": layers, "steps": steps, "checkpointing": arguments.checkpointing}
    entries: list[Entry] = []
    report["variants"] = entries
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        if arguments.wheels is not None:
            install(arguments.wheels, site)
        for name in arguments.variants:
            left = arguments.seconds - (time.perf_counter() - begin)
            entry: Entry = {"variant": name}
            entries.append(entry)
            if left < arguments.least:
                entry["failed"] = f"not begun: {left:.0f} of {arguments.seconds} seconds were left"
                say(json.dumps(entry))
                continue
            result = Path(folder) / "result.json"
            result.unlink(missing_ok=True)
            own = ["--layers", str(layers), "--last", str(last), "--device", arguments.device, "--result", str(result)]
            own += ["--kernels"] if name in arguments.kernels else []
            options = ["--job.config_file", str(config), "--job.dump_folder", folder, "--training.steps", str(steps)]
            options += ["--activation_checkpoint.mode", arguments.checkpointing, *VARIANTS[name], *given[cut + 1 :]]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(arguments.gpus), "--local-ranks-filter", "0"]
            command += ["-m", "benchmarks.torchtitan.worker", *own, "--", *options]
            log = Path(folder) / "log.txt"
            start = time.perf_counter()
            failed = run(command, log, site, min(arguments.limit, left))
            if failed is None:
                found = json.loads(result.read_text())
                report["versions"] |= found.pop("versions")
                report["device"] = f"{found.pop('device')} x {arguments.gpus}"
                entry |= found
            else:
                entry["failed"] = failed
                say("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]))
            entry["seconds"] = round(time.perf_counter() - start, 1)
            _add_ratios(entries)
            say(json.dumps(entry))
            if arguments.log:
                with arguments.log.open("a") as file:
                    file.write(f"=== {name}\n{log.read_text(errors='replace')}\n")
            bench.record()
    _draw(report)
    return int(any("failed" in entry or not all(map(math.isfinite, entry["losses"])) for entry in entries))


def install(wheels: Path, site: Path) -> None:
    """The wheels of a folder, into `site`; nothing is fetched.

    Raises:
        SystemExit: no wheel there, or pip failed.
    """
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SystemExit(f"benchmarks.torchtitan: --wheels must be a folder of wheels; {wheels} has none")
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--target", str(site)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *found])
    if done.returncode:
        raise SystemExit(f"benchmarks.torchtitan: pip could not install the wheels of {wheels}")


def run(command: Sequence[str], log: Path, site: Path, limit: float) -> str | None:
    """Runs torchrun; None, or why it failed."""
    paths = [str(site), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            # Not killed at once: torchrun ends its workers, which would hold the GPUs.
            process.terminate()
            try:
                process.wait(_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"stopped after {limit:.0f} seconds"
    return f"exit status {status}" if status else None


def _add_ratios(entries: Sequence[Entry]) -> None:
    """Of the variants' tokens per second and reserved memory."""
    done = [
        {**e, "subject": e["variant"], "ms": 1e3 / e["tokens_per_second_per_gpu"]} for e in entries if "losses" in e
    ]
    add_ratios(done, {"memory": "peak_reserved_gib"})
    for entry, found in zip((e for e in entries if "losses" in e), done, strict=True):
        entry |= {key: found[key] for key in ("speed", "memory", "last_loss_less_bf16") if key in found}


def _draw(report: dict[str, Any]) -> None:
    title = f"torchtitan, {report['layers']} layers, checkpointing {report['checkpointing']}, {report['device']}"
    draw_entries(f"{title}; speed and memory: times bf16's", report["variants"], _COLUMNS, of="variant")
    for e in report["variants"]:
        if "kernels" in e:
            draw_kernels(f"{e['variant']}: the kernels of a step of rank 0", e["kernels"])
        if "exposure" in e:
            draw_exposure(f"{e['variant']}: where the time of a step goes", e["exposure"])


if __name__ == "__main__":
    sys.exit(main())

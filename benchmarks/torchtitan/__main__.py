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

import argparse
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

from benchmarks.kernels import draw_exposure, draw_kernels
from benchmarks.ranks import MULTICAST_OFF
from benchmarks.report import draw, facts, figure, say, write_json

_ADAPTER = "f8emu.torch.integrations.torchtitan"
_TORCHAO = ["--model.converters", "quantize.linear.float8"]
_RECIPES = ("tensorwise", "rowwise", "delayed")


def _all_gather(section: str) -> list[str]:
    """Float8 all-gather, its scales computed after the optimizer step; torchao and f8emu have the same keys."""
    return [f"--{section}.enable_fsdp_float8_all_gather", f"--{section}.precompute_float8_dynamic_scale_for_fsdp"]


def _f8emu(recipe: str) -> list[str]:
    imports = ["--job.custom_config_module", _ADAPTER, "--experimental.custom_import", _ADAPTER]
    return ["--model.converters", "f8emu", *imports, "--f8emu.recipe_name", recipe, "--f8emu.filter_fqns", "output"]


BASELINE = "bf16"
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the variants, prints one JSON line each and a table, records, and gives the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    arguments = _parser().parse_args(given[:cut])
    begin = time.perf_counter()
    config = Path(__file__).with_name("tiny.toml" if arguments.tiny else "llama3_8b.toml")
    layers, steps, last = (1, 3, 2) if arguments.tiny else (arguments.layers, arguments.steps, arguments.last)
    # Asking for the GPU's name here would hold memory on it; rank 0 will tell.
    report = facts("benchmarks.torchtitan", given, torch.device("cpu"))
    report["device"] = "unknown, no variant ran"
    report |= {"gpus": arguments.gpus, "layers": layers, "steps": steps, "checkpointing": arguments.checkpointing}
    entries: list[dict[str, Any]] = []
    report["variants"] = entries
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        if arguments.wheels is not None:
            install(arguments.wheels, site)
        for name in arguments.variants:
            left = arguments.seconds - (time.perf_counter() - begin)
            entry: dict[str, Any] = {"variant": name}
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
            add_ratios(entries)
            say(json.dumps(entry))
            if arguments.log:
                with arguments.log.open("a") as file:
                    file.write(f"=== {name}\n{log.read_text(errors='replace')}\n")
            if arguments.json:
                write_json(arguments.json, report)
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


def add_ratios(entries: Sequence[dict[str, Any]]) -> None:
    """Adds speed and reserved memory, times bfloat16's, and the last loss less bfloat16's."""
    plain = next((e for e in entries if e["variant"] == BASELINE and "failed" not in e), None)
    if plain is None:
        return
    for entry in (e for e in entries if "failed" not in e):
        entry["speed"] = entry["tokens_per_second_per_gpu"] / plain["tokens_per_second_per_gpu"]
        if plain["peak_reserved_gib"] > 0:
            entry["memory"] = entry["peak_reserved_gib"] / plain["peak_reserved_gib"]
        if len(entry["losses"]) == len(plain["losses"]):
            entry["last_loss_less_bf16"] = entry["losses"][-1] - plain["losses"][-1]


def _draw(report: dict[str, Any]) -> None:
    rows = []
    for e in report["variants"]:
        if "failed" in e:
            rows.append([e["variant"], "FAILED"])
            continue
        rows.append(
            [
                e["variant"],
                f"{e['tokens_per_second_per_gpu']:.0f}",
                figure(e, "speed", ".3f"),
                f"{e['step_ms']:.1f}",
                f"{e['mfu_percent']:.1f}",
                f"{e['peak_active_gib']:.2f}",
                f"{e['peak_reserved_gib']:.2f}",
                figure(e, "memory", ".3f"),
                f"{e['losses'][0]:.4f} {e['losses'][-1]:.4f}",
                figure(e, "last_loss_less_bf16", "+.4f"),
            ]
        )
    columns = (
        "variant",
        "tokens/s/GPU",
        "times bf16",
        "step ms",
        "MFU %",
        "active GiB",
        "reserved GiB",
        "times bf16",
        "loss 1, last",
        "less bf16's",
    )
    title = f"torchtitan, {report['layers']} layers, checkpointing {report['checkpointing']}, {report['device']}"
    draw(title, columns, rows)
    for e in report["variants"]:
        if "failed" in e:
            say(f"{e['variant']}: {e['failed']}")
        if "kernels" in e:
            draw_kernels(f"{e['variant']}: the kernels of a step of rank 0", e["kernels"])
        if "exposure" in e:
            draw_exposure(f"{e['variant']}: where the time of a step goes", e["exposure"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torchtitan", description="torchtitan's Trainer with f8emu."
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS), metavar="VARIANT")
    parser.add_argument(
        "--kernels", nargs="+", choices=VARIANTS, default=(), metavar="VARIANT", help="list a step's kernels and waits"
    )
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="default all")
    parser.add_argument("--layers", type=int, default=32, help="of Llama-3 8B (default 32)")
    parser.add_argument("--steps", type=int, default=15, help="default 15")
    parser.add_argument("--last", type=int, default=8, help="figures are medians of the last (default 8)")
    parser.add_argument("--checkpointing", choices=("selective", "none", "full"), default="selective")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a variant may take (default 150)")
    parser.add_argument("--seconds", type=float, default=3600, help="seconds that all may take (default 3600)")
    parser.add_argument("--least", type=float, default=50, help="begin none with fewer left (default 50)")
    parser.add_argument("--tiny", action="store_true", help="one layer of torchtitan's debug model: for tests")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log", type=Path, help="append the logs here")
    parser.add_argument("--json", type=Path, help="where to record, after every variant")
    return parser


if __name__ == "__main__":
    sys.exit(main())

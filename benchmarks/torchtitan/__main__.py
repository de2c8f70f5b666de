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

from benchmarks.ranks import MULTICAST_OFF
from benchmarks.runner import BASELINE, Bench, Entry, draw_entries, option, say
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


_AT_REST = ["--f8emu.float8_primary_weights", "--f8emu.precompute_float8_dynamic_scale_for_fsdp"]
# Options of torchtitan.
VARIANTS: dict[str, list[str]] = {
    BASELINE: [],
    "torchao/tensorwise": _TORCHAO,
    "torchao/tensorwise+all-gather": [*_TORCHAO, *_all_gather("quantize.linear.float8")],
    "torchao/rowwise": [*_TORCHAO, "--quantize.linear.float8.recipe_name", "rowwise"],
    **{f"f8emu/{recipe}": _f8emu(recipe) for recipe in _RECIPES},
    **{f"f8emu/{recipe}+all-gather": [*_f8emu(recipe), *_all_gather("f8emu")] for recipe in _RECIPES},
    **{f"f8emu/{recipe}+at-rest": [*_f8emu(recipe), *_AT_REST] for recipe in _RECIPES},
}
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
_TO_STOP = 45  # seconds that torchrun has to end its workers
_LOG_LINES = 25  # of the log of a variant that failed


BENCH = Bench(
    "benchmarks.torchtitan",
    __doc__,
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
    option("log", Path, "append the logs here"),
)
_COLUMNS = (
    "tokens_per_second_per_gpu:.0f speed:.3f step_ms:.1f mfu_percent:.1f peak_active_gib:.2f peak_reserved_gib:.2f "
    "rest_gib:.2f memory:.3f"
)


def main(argv: Sequence[str] | None = None) -> int:
    # Asking for the GPU's name here would hold memory on it; rank 0 will tell.
    run = BENCH.parse(argv, device="cpu")
    arguments, entries, begin = run.arguments, list[Entry](), time.perf_counter()
    run.report |= {key: getattr(arguments, key) for key in ("gpus", "layers", "steps", "checkpointing")}
    run.report |= {"device": "unknown, no variant ran", "variants": entries}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.wheels is not None:
            install(arguments.wheels, Path(folder, "site"))
        for name in arguments.variants:
            # A lent machine goes back at a fixed time: what would not end until then is not begun.
            left, start = arguments.seconds - (time.perf_counter() - begin), time.perf_counter()
            entry: Entry = {"variant": name}
            entries.append(entry)
            if left < arguments.least:
                entry["failed"] = f"not begun: {left:.0f} of {arguments.seconds} seconds were left"
            else:
                entry |= variant(name, arguments, Path(folder), min(arguments.limit, left))
            run.report["versions"] |= entry.pop("versions", {})
            if "device" in entry:
                run.report["device"] = f"{entry.pop('device')} x {arguments.gpus}"
            entry["seconds"] = round(time.perf_counter() - start, 1)
            _add_ratios(entries)
            say(json.dumps(entry))
            run.record()
    title = f"torchtitan, {arguments.layers} layers, checkpointing {arguments.checkpointing}, {run.report['device']}"
    draw_entries(
        f"{title}; speed and memory: times bf16's",
        entries,
        _COLUMNS,
        of="variant",
    )
    for e in entries:
        if "kernels" in e:
            draw_kernels(f"{e['variant']}: the kernels of a step of rank 0", e["kernels"])
        if "exposure" in e:
            draw_exposure(f"{e['variant']}: where the time of a step goes", e["exposure"])
    return int(any("failed" in entry or not all(map(math.isfinite, entry["losses"])) for entry in entries))


def variant(name: str, arguments: argparse.Namespace, folder: Path, limit: float) -> dict[str, Any]:
    """What rank 0 of a run of torchrun tells, or why the run failed; the end of its log is then shown."""
    config = Path(__file__).with_name("llama3_8b.toml")
    result, log = folder / "result.json", folder / "log.txt"
    result.unlink(missing_ok=True)
    of_worker = {"layers": arguments.layers, "last": arguments.last, "result": result}
    of_torchtitan = {
        "job.config_file": config,
        "job.dump_folder": folder,
        "training.steps": arguments.steps,
        "activation_checkpoint.mode": arguments.checkpointing,
    }
    options_of_worker, options = (
        [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        for settings in (of_worker, of_torchtitan)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.gpus), "--local-ranks-filter", "0"]
    command += [
        "-m",
        "benchmarks.torchtitan.worker",
        *options_of_worker,
        *(["--kernels"] if name in arguments.kernels else []),
    ]
    failed = run([*command, "--", *options, *VARIANTS[name], *arguments.passed_on], log, folder / "site", limit)
    printed = log.read_text(errors="replace")
    if arguments.log:
        with arguments.log.open("a") as file:
            file.write(f"=== {name}\n{printed}\n")
    if failed:
        say("\n".join(printed.splitlines()[-_LOG_LINES:]))
        return {"failed": failed}
    return json.loads(result.read_text())


def install(wheels: Path, site: Path) -> None:
    """The wheels of a folder, into `site`; nothing is fetched.

    Raises:
        SystemExit: no wheel there, or pip failed.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(f"benchmarks.torchtitan: --wheels must be a folder of wheels; {wheels} has none")
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--target", str(site)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *files])
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
    """Of tokens per second, reserved memory and the last loss."""
    done = [e for e in entries if "losses" in e]
    for base in (e for e in done if e["variant"] == BASELINE):
        for e in done:
            e["speed"] = e["tokens_per_second_per_gpu"] / base["tokens_per_second_per_gpu"]
            e["last_loss_less_bf16"] = e["losses"][-1] - base["losses"][-1]
            if base["peak_reserved_gib"]:
                e["memory"] = e["peak_reserved_gib"] / base["peak_reserved_gib"]


if __name__ == "__main__":
    sys.exit(main())

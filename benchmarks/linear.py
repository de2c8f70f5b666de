"""Forward and backward of linear layers and Llama blocks: bfloat16, torchao and f8emu, timed side by side.

    python -m benchmarks.linear --json OUT                  a linear layer, a feed-forward and a transformer block
    python -m benchmarks.linear --workloads feed_forward    one of them
    python -m benchmarks.linear --checkpointing full        the same, computed again in the backward pass
    python -m benchmarks.linear --kernels f8emu/delayed     and the kernels of a step

Subjects take turns, a few steps each, for several rounds, so that all see the same clocks and temperature; the figure
is the median over rounds. Steps run back to back as training runs them. Exit status 1 if f8emu fails somewhere, or
differs from torchao or from itself without checkpointing where it must not.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.checkpointing import CHECKPOINTING
from benchmarks.equality import equal_to_no_checkpointing, equal_to_torchao
from benchmarks.kernels import draw_kernels
from benchmarks.measure import forget, is_wrong, measure
from benchmarks.runner import (
    DEVICE,
    AbsentError,
    Bench,
    Columns,
    Entry,
    attempt,
    bounds,
    compile_without_limits,
    draw_entries,
    figure,
    option,
    say,
    scaled,
    turns_of,
)
from benchmarks.subjects import MODES, SUBJECTS
from benchmarks.timing import copy_bandwidth
from benchmarks.workloads import Floor, Workload

KINDS = ("linear", "feed_forward", "block")
BENCH = Bench(
    "benchmarks.linear",
    "Forward and backward of linear layers and Llama blocks: bfloat16, torchao and f8emu.",
    option("workloads", KINDS, choices=KINDS),
    option("subjects", SUBJECTS, choices=SUBJECTS),
    option("kernels", (), "list the kernels of a step", choices=SUBJECTS, metavar="SUBJECT"),
    option("checkpointing", ("none",), choices=CHECKPOINTING),
    option("mode", "both", choices=(*MODES, "both")),
    option("tokens", 8192),
    option("dim", 4096),
    option("hidden", int, "default 3.5 * dim, as in Llama-3 8B"),
    *turns_of(7, 10),
    DEVICE,
)
_COLUMNS: Columns = {
    "ms": "ms:.3f",
    "min - max": bounds,
    "speed": "speed:.3f",
    "floor ms": "floor_ms:.3f",
    "of floor": "fraction_of_floor:.1%",
    "peak MB": scaled("peak_bytes", 1e6, ".0f"),
    "memory": "memory:.3f",
    "host ms": "enqueue_ms:.3f",
}
_KEPT: Columns = {"kept MB": scaled("kept_bytes", 1e6, ".0f"), "kept": "kept:.3f"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints tables, records, and gives the exit status."""
    run = BENCH.parse(argv)
    arguments, device, report = run.arguments, run.device, run.report
    torch.manual_seed(0)
    compile_without_limits()
    dim, tokens = arguments.dim, arguments.tokens
    hidden = arguments.hidden or dim * 7 // 2
    bandwidth = copy_bandwidth(device)
    run.announce(f", copy {bandwidth / 1e12:.3f} TB/s")
    report |= {"tokens": tokens, "rounds": arguments.rounds, "steps": arguments.steps}
    report |= {"copy_bytes_per_second": round(bandwidth)}
    floor = Floor(device, bandwidth)
    report["equal_to_torchao"] = _equality([(256, 512, 384), (tokens, dim, hidden)], device)
    report["workloads"] = []
    builders: dict[str, Callable[[], Workload]] = {
        "linear": lambda: workloads.linear(tokens, dim, hidden),
        "feed_forward": lambda: workloads.feed_forward(tokens, dim, hidden),
        "block": lambda: workloads.transformer_block(tokens, dim, hidden),
    }
    modes = MODES if arguments.mode == "both" else (arguments.mode,)
    wanted = [(subject, mode) for mode in modes for subject in arguments.subjects]
    for name, checkpointing in ((name, c) for name in arguments.workloads for c in arguments.checkpointing):
        workload = builders[name]()
        is_plain = checkpointing == "none"
        entry: Entry = {"name": name, "title": workload.title, "checkpointing": checkpointing}
        if not is_plain:
            entry["equal_to_no_checkpointing"] = _checkpointing_equality(
                workload, checkpointing, arguments.subjects, device
            )
        entry["subjects"] = measure(
            workload,
            wanted,
            device,
            rounds=arguments.rounds,
            steps=arguments.steps,
            floor=floor if is_plain else None,  # it is the floor of computing everything once
            checkpointing=checkpointing,
            profiled=arguments.kernels,
        )
        report["workloads"].append(entry)
        title = workload.title if is_plain else f"{workload.title}, checkpointing {checkpointing}"
        title += f"; {workload.tokens} tokens, forward + backward; speed and memory: times bf16's"
        draw_entries(title, entry["subjects"], _COLUMNS if is_plain else {**_COLUMNS, **_KEPT})
        for timed in (e for e in entry["subjects"] if "kernels" in e):
            _draw_kernels(timed)
        run.record(gemms=_gemm_entries(floor))
        forget()
    return _status(report)


def _equality(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> list[dict[str, Any]] | str:
    try:
        found = equal_to_torchao(shapes, device)
    except AbsentError as error:
        say(f"tensorwise against torchao's Float8Linear: not compared, {error}")
        return f"not compared: {error}"
    for entry in found:
        kind = f"{', bias' if entry['bias'] else ''}, {entry['parameters']} parameters"
        shape = f"{entry['tokens']} x {entry['k']} -> {entry['n']}{kind}"
        say(f"tensorwise against torchao's Float8Linear, eager, {shape}: {_verdict(entry['numbers_differing'])}")
    return found


def _checkpointing_equality(
    workload: Workload, checkpointing: str, subjects: Sequence[str], device: torch.device
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for subject in (name for name in subjects if name.startswith("f8emu/")):
        entry: dict[str, Any] = {"subject": subject}
        found.append(entry)
        with attempt(entry):
            entry["numbers_differing"] = equal_to_no_checkpointing(subject, workload, checkpointing, device)
        verdict = f"FAILED, {entry['failed']}" if "failed" in entry else _verdict(entry["numbers_differing"])
        say(f"{subject}, {workload.name}, checkpointing {checkpointing} against none, eager: {verdict}")
        forget()
    return found


def _verdict(differing: dict[str, int]) -> str:
    parts = ", ".join(f"{count} of {part}" for part, count in differing.items() if count)
    return f"DIFFERS in {parts}" if parts else f"equal, every bit of {', '.join(differing)}"


def _gemm_entries(floor: Floor) -> list[dict[str, Any]]:
    found = []
    for (gemm, shape), ms in floor.gemms_ms.items():
        kind = f"{gemm.a} x {gemm.b}{', fast' if gemm.use_fast_accum else ''}"
        found.append({"gemm": kind, **asdict(shape), "ms": ms, "tflops": shape.flops / ms / 1e9})
    return found


def _draw_kernels(timed: dict[str, Any]) -> None:
    """The kernels of a step, under the step's time and the parts of its floor."""
    floor = "".join(f", {part} {figure(timed, f'{part}_ms', '.3f')} ms" for part in ("gemms", "attention", "bytes"))
    title = f"{timed['subject']} {timed['mode']}: a step of {timed['ms']:.3f} ms"
    draw_kernels(f"{title}; floor: {figure(timed, 'floor_ms', '.3f')} ms{floor}", timed["kernels"])


def _status(report: dict[str, Any]) -> int:
    equality = report["equal_to_torchao"]
    differs = not isinstance(equality, str) and any(any(e["numbers_differing"].values()) for e in equality)
    failed = any(is_wrong(e) for w in report["workloads"] for e in w["subjects"])
    compared = [e for w in report["workloads"] for e in w.get("equal_to_no_checkpointing", [])]
    is_altered = any("failed" in e or any(e["numbers_differing"].values()) for e in compared)
    return int(differs or failed or is_altered)


if __name__ == "__main__":
    sys.exit(main())

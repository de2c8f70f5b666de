"""Forward and backward of linear layers and Llama blocks: bfloat16, torchao and f8emu, timed side by side.

    python -m benchmarks.linear --json OUT                  a linear layer, a feed-forward and a transformer block
    python -m benchmarks.linear --workloads feed_forward    one of them
    python -m benchmarks.linear --checkpointing full        the same, computed again in the backward pass
    python -m benchmarks.linear --kernels f8emu/delayed     and the kernels of a step

Subjects take turns, a few steps each, for several rounds, so that all see the same clocks and temperature; the figure
is the median over rounds. Steps run back to back as training runs them. Exit status 1 if f8emu fails somewhere, or
differs from torchao or from itself without checkpointing where it must not.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.checkpointing import CHECKPOINTING
from benchmarks.equality import equal_to_no_checkpointing, equal_to_torchao
from benchmarks.kernels import draw_kernels
from benchmarks.measure import forget, measure
from benchmarks.report import draw, facts, figure, say, write_json
from benchmarks.subjects import MODES, SUBJECTS, AbsentError
from benchmarks.timing import copy_bandwidth
from benchmarks.workloads import Floor, Workload

_SUMMARY = "Forward and backward of linear layers and Llama blocks: bfloat16, torchao and f8emu."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints tables, records, and gives the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(given)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    # One model under many subjects is many compilations of one forward(), each of them wanted.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    dim, tokens = arguments.dim, arguments.tokens
    hidden = arguments.hidden or dim * 7 // 2
    report = facts("benchmarks.linear", given, device)
    bandwidth = copy_bandwidth(device)
    report |= {"tokens": tokens, "rounds": arguments.rounds, "steps": arguments.steps}
    report |= {"copy_bytes_per_second": round(bandwidth)}
    say(f"{report['device']}, copy {bandwidth / 1e12:.3f} TB/s, torch {report['versions']['torch']}")
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
        entry: dict[str, Any] = {"name": name, "title": workload.title, "checkpointing": checkpointing}
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
        report["gemms"] = _gemm_entries(floor)
        _draw(workload, entry["subjects"], checkpointing)
        for timed in (e for e in entry["subjects"] if "kernels" in e):
            _draw_kernels(timed)
        if arguments.json:
            write_json(arguments.json, report)
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
        try:
            entry["numbers_differing"] = equal_to_no_checkpointing(subject, workload, checkpointing, device)
        except Exception as error:  # as in `measure`
            entry["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
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


def _draw(workload: Workload, results: Sequence[dict[str, Any]], checkpointing: str) -> None:
    is_plain = checkpointing == "none"
    columns = [
        "subject",
        "ms",
        "min - max",
        "speed",
        "floor ms",
        "of floor",
        "peak MB",
        "memory",
        "host ms",
        *(() if is_plain else ("kept MB", "kept")),
    ]
    rows = []
    for e in results:
        label = f"{e['subject']} {e['mode']}"
        if "ms" not in e:
            rows.append([label, "absent" if "absent" in e else "FAILED"])
            continue
        peak, kept = (f"{e[key] / 1e6:.0f}" if e.get(key) else "-" for key in ("peak_bytes", "kept_bytes"))
        span = f"{e['ms_min']:.3f} - {e['ms_max']:.3f}"
        rows.append(
            [
                label,
                f"{e['ms']:.3f}",
                span,
                figure(e, "speed", ".3f"),
                figure(e, "floor_ms", ".3f"),
                figure(e, "fraction_of_floor", ".1%"),
                peak,
                figure(e, "memory", ".3f"),
                f"{e['enqueue_ms']:.3f}",
                *(() if is_plain else (kept, figure(e, "kept", ".3f"))),
            ]
        )
    title = workload.title if is_plain else f"{workload.title}, checkpointing {checkpointing}"
    draw(f"{title}; {workload.tokens} tokens, forward + backward; speed and memory: times bf16's", columns, rows)
    for e in results:
        if "absent" in e or "failed" in e:
            say(f"{e['subject']} {e['mode']}: {e.get('absent') or e.get('failed')}")
        if e.get("compiled_while_timed"):
            say(f"{e['subject']} {e['mode']}: something was compiled while it was timed: do not use its figures")


def _draw_kernels(timed: dict[str, Any]) -> None:
    """The kernels of a step, under the step's time and the parts of its floor."""
    floor = "".join(f", {part} {figure(timed, f'{part}_ms', '.3f')} ms" for part in ("gemms", "attention", "bytes"))
    title = f"{timed['subject']} {timed['mode']}: a step of {timed['ms']:.3f} ms"
    draw_kernels(f"{title}; floor: {figure(timed, 'floor_ms', '.3f')} ms{floor}", timed["kernels"])


def _status(report: dict[str, Any]) -> int:
    equality = report["equal_to_torchao"]
    differs = not isinstance(equality, str) and any(any(e["numbers_differing"].values()) for e in equality)
    failed = any(
        "failed" in e or not e["is_finite"]
        for w in report["workloads"]
        for e in w["subjects"]
        if not e["subject"].startswith("torchao/")
    )
    compared = [e for w in report["workloads"] for e in w.get("equal_to_no_checkpointing", [])]
    is_altered = any("failed" in e or any(e["numbers_differing"].values()) for e in compared)
    return int(differs or failed or is_altered)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=_SUMMARY)
    kinds = ("linear", "feed_forward", "block")
    parser.add_argument("--workloads", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument(
        "--kernels", nargs="+", choices=SUBJECTS, default=[], metavar="SUBJECT", help="list the kernels of a step"
    )
    parser.add_argument("--checkpointing", nargs="+", choices=CHECKPOINTING, default=["none"], help="default none")
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both", help="default both")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--hidden", type=int, help="default 3.5 * dim, as in Llama-3 8B")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every subject (default 7)")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn (default 10)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to record")
    return parser


if __name__ == "__main__":
    sys.exit(main())

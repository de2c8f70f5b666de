"""Forward and backward of linear layers and Llama blocks: bfloat16, torchao and f8emu, timed side by side.

    python -m benchmarks.linear --json OUT                  a linear layer, a feed-forward and a transformer block
    python -m benchmarks.linear --workloads feed_forward    one of them
    python -m benchmarks.linear --checkpointing full        the same, computed again in the backward pass
    python -m benchmarks.linear --microbatches 4 --subjects bf16 f8emu/tensorwise f8emu/tensorwise+at-rest
    python -m benchmarks.linear --kernels f8emu/delayed     and the kernels of a step

Subjects take turns, a few steps each, for several rounds, so that all see the same clocks and temperature; the figure
is the median over rounds. Steps run back to back as training runs them. Exit status 1 if f8emu fails somewhere, or
differs from torchao where it must not.
"""

import sys
from collections.abc import Sequence

import torch

from benchmarks import runner, workloads
from benchmarks.measure import equal_to_torchao, forget, is_altered, measure, verdict
from benchmarks.runner import Entry, figure, is_wrong
from benchmarks.subjects import CHECKPOINTING, MODES, RESTING, SUBJECTS
from benchmarks.timing import copy_bandwidth, draw_kernels
from benchmarks.workloads import Floor

WORKLOADS = {"linear": workloads.linear, "feed_forward": workloads.feed_forward, "block": workloads.transformer_block}
BENCH = runner.Bench(
    "benchmarks.linear",
    __doc__,
    runner.option("workloads", tuple(WORKLOADS), choices=WORKLOADS),
    runner.option("subjects", SUBJECTS, choices=(*SUBJECTS, *RESTING)),
    runner.option("kernels", (), "list the kernels of a step", choices=(*SUBJECTS, *RESTING), metavar="SUBJECT"),
    runner.option("checkpointing", ("none",), choices=CHECKPOINTING),
    runner.option("microbatches", 1, "passes of a step, whose gradients accumulate"),
    runner.option("mode", "both", choices=(*MODES, "both")),
    runner.option("tokens", 8192),
    runner.option("dim", 4096),
    runner.option("hidden", int, "3.5 * dim, as in Llama-3 8B, unless given"),
    *runner.turns_of(7, 10),
    runner.DEVICE,
)
_COLUMNS = "ms:.3f bounds speed:.3f floor_ms:.3f fraction_of_floor:.1% peak_bytes:GiB memory:.3f "
_COLUMNS += "kept_bytes:GiB kept:.3f enqueue_ms:.3f"


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, device = run.arguments, run.device
    runner.compile_without_limits()
    # 1. The machine: the speed of a copy for the floors, and tensorwise against torchao's own layers.
    tokens, dim, hidden = arguments.tokens, arguments.dim, arguments.hidden or arguments.dim * 7 // 2
    bandwidth = copy_bandwidth(device)
    run.announce(f", copy {bandwidth / 1e12:.3f} TB/s")
    floor, timed_workloads = Floor(device, bandwidth), list[Entry]()
    equality = _equality([(256, 512, 384), (tokens, dim, hidden)], device)
    run.report |= {"tokens": tokens, "rounds": arguments.rounds, "steps": arguments.steps}
    run.report |= {
        "copy_bytes_per_second": round(bandwidth),
        "equal_to_torchao": equality,
        "workloads": timed_workloads,
    }
    # 2. Every workload, computed again in the backward pass or not.
    modes = MODES if arguments.mode == "both" else (arguments.mode,)
    for name, checkpointing in ((name, c) for name in arguments.workloads for c in arguments.checkpointing):
        workload = WORKLOADS[name](tokens, dim, hidden)
        entry: Entry = {"name": name, "title": workload.title, "checkpointing": checkpointing}
        entry["subjects"] = measure(
            workload,
            [(subject, mode) for mode in modes for subject in arguments.subjects],
            device,
            rounds=arguments.rounds,
            steps=arguments.steps,
            # It is the floor of computing everything once.
            floor=floor if checkpointing == "none" and arguments.microbatches == 1 else None,
            checkpointing=checkpointing,
            microbatches=arguments.microbatches,
            profiled=arguments.kernels,
        )
        timed_workloads.append(entry)
        title = f"{workload.title}, checkpointing {checkpointing}; {tokens} tokens, forward + backward"
        runner.draw_entries(f"{title}; speed and memory: times bf16's", entry["subjects"], _COLUMNS)
        for timed in (e for e in entry["subjects"] if "kernels" in e):
            parts = "".join(
                f", {p} {figure(timed, f'{p}_ms:.3f')} ms" for p in ("floor", "gemms", "attention", "bytes")
            )
            draw_kernels(f"{timed['subject']} {timed['mode']}: a step of {timed['ms']:.3f} ms{parts}", timed["kernels"])
        run.record(gemms=_gemm_entries(floor))
        forget()
    # 3. The verdict: bits first, then failures.
    altered = not isinstance(equality, str) and is_altered(equality)
    return int(altered or any(is_wrong(e) for workload in timed_workloads for e in workload["subjects"]))


def _equality(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> list[Entry] | str:
    try:
        entries = equal_to_torchao(shapes, device)
    except runner.AbsentError as error:
        runner.say(f"tensorwise against torchao's Float8Linear: not compared, {error}")
        return f"not compared: {error}"
    for entry in entries:
        kind = f"{', bias' if entry['bias'] else ''}, {entry['parameters']} parameters"
        shape = f"{entry['tokens']} x {entry['k']} -> {entry['n']}{kind}"
        runner.say(f"tensorwise against torchao's Float8Linear, eager, {shape}: {verdict(entry['numbers_differing'])}")
    return entries


def _gemm_entries(floor: Floor) -> list[Entry]:
    return [
        {
            "gemm": f"{gemm.a} x {gemm.b}{', fast' if gemm.use_fast_accum else ''}",
            **shape._asdict(),
            "ms": ms,
            "tflops": shape.flops / ms / 1e9,
        }
        for (gemm, shape), ms in floor.gemms_ms.items()
    ]


if __name__ == "__main__":
    sys.exit(main())

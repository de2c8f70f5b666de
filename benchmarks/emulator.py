"""The emulated float8 GEMM against float32 `torch.mm` of the same shape, in the same run.

    python -m benchmarks.emulator                                  the engine at every width of this CPU, both chainings
    python -m benchmarks.emulator --device cuda --json OUT         f8ref.jax on a GPU, TF32 off

A time is the shortest of several, the subjects taking turns, so that what else the machine does weighs on all alike.
`f8emu.torch` is the public call; `f8emu.native` and a width are the engine alone, out of the same threads.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import f8emu.torch
from benchmarks.runner import Bench, Columns, Entry, draw_entries, option, scaled, turns_of
from benchmarks.timing import synchronize
from f8emu.native import gemm, library
from f8emu.spec import E4M3FN, Granularity
from f8emu.spec.gemm_call import GemmCall
from f8emu.torch.gemm import emulation

SIZES = (64, 128, 512, 2048)
BASELINE = "torch.mm float32"
TENSORWISE = (Granularity.TENSORWISE, Granularity.TENSORWISE)
_MOST_SECONDS = 5

Call = Callable[[], object]


def subjects(size: int, use_fast_accum: bool, device: torch.device) -> dict[str, Call]:
    """Name -> a call that waits for its result."""
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    scale = torch.ones((), device=device)
    a_8, b_8 = (x.to(torch.float8_e4m3fn).to(device) for x in (a, b))
    b_8 = b_8.t().contiguous().t()  # column-major, as torch._scaled_mm wants it
    a, b = a.to(device), b.to(device)

    def product() -> None:
        torch.mm(a, b)
        synchronize(device)

    def of_torch() -> None:
        f8emu.torch.scaled_mm(
            a_8, b_8, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum, engine="emulated"
        )
        synchronize(device)

    calls: dict[str, Call] = {BASELINE: product, "f8emu.torch": of_torch}
    if device.type == "cpu":
        for width in library.widths():
            calls[f"f8emu.native {width}"] = _engine(a_8, b_8, scale, use_fast_accum, width)
    return calls


def _engine(a: Tensor, b: Tensor, scale: Tensor, use_fast_accum: bool, width: str) -> Call:
    """The same GEMM by the engine alone, on the operands as the emulation describes them."""
    (m, k), n = a.shape, b.shape[1]
    options = {"granularities": TENSORWISE, "use_fast_accum": use_fast_accum}
    called = GemmCall(call="scaled_mm", sizes=(m, n, k), formats=(E4M3FN, E4M3FN), **options)
    one = emulation.described(called, a, b, scale, scale)
    assert one is not None, library.unavailable()

    def call() -> None:
        out = a.new_empty((m, n), dtype=torch.bfloat16)
        one.out = out.data_ptr()
        gemm.run(one, threads=torch.get_num_threads(), width=width)

    return call


def shortest(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Seconds of each call at its fastest; the first of all is not timed. A slow one takes fewer turns."""
    times, spent = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(3):
                if spent[name] < _MOST_SECONDS:
                    start = time.perf_counter()
                    call()
                    taken = time.perf_counter() - start
                    times[name], spent[name] = min(times[name], taken), spent[name] + taken
    return times


def measure(size: int, use_fast_accum: bool, device: torch.device, rounds: int) -> list[Entry]:
    """An emulated GEMM of `size` x `size` x `size` for each way to the emulator, beside `torch.mm`."""
    times = shortest(subjects(size, use_fast_accum, device), rounds)
    baseline = times.pop(BASELINE)
    return [
        {
            "subject": name,
            "size": size,
            "use_fast_accum": use_fast_accum,
            "seconds": seconds,
            "baseline_seconds": baseline,
            "ratio": seconds / baseline,
            "giga_multiply_adds_per_second": size**3 / seconds / 1e9,
        }
        for name, seconds in times.items()
    ]


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.exists() else []
    return next((row.partition(": ")[2] for row in rows if row.startswith("model name")), platform.processor())


BENCH = Bench(
    "benchmarks.emulator",
    "Emulated GEMMs against mm.",
    option("device", "cpu", choices=("cpu", "cuda")),
    option("sizes", SIZES, "M = N = K, a multiple of 16"),
    *turns_of(20),
)
_COLUMNS: Columns = {
    "fast": "use_fast_accum:",
    "ms": scaled("seconds", 1e-3, ".3f"),
    "mm ms": scaled("baseline_seconds", 1e-3, ".3f"),
    "ratio": "ratio:.2f",
    "G ma/s": "giga_multiply_adds_per_second:.2f",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and records it where asked."""
    run = BENCH.parse(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    run.report |= {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_before": round(os.getloadavg()[0], 1),
    }
    figures: list[Entry] = []
    for size in run.arguments.sizes:
        found = [e for fast in (True, False) for e in measure(size, fast, run.device, run.arguments.rounds)]
        draw_entries(f"emulated GEMMs, M = N = K = {size}", found, _COLUMNS)
        figures += found
    run.record(figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

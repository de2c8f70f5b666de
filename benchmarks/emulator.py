"""The emulated float8 GEMM against float32 `torch.mm` of the same shape, in the same run.

    python -m benchmarks.emulator                                  the engine at every width of this CPU, both chainings
    python -m benchmarks.emulator --device cuda --json OUT         f8ref.jax on a GPU, TF32 off

A time is the shortest of several, the subjects taking turns, so that what else the machine does weighs on all alike.
`f8emu.torch` is the public call, `emulate` is `torch._scaled_mm` under `f8emu.torch.emulate`, `torch` is torch's own
operator, which has other bits. `f8emu.native` and a width are the engine alone, out of the same threads. `mxfp8` are
codes with E8M0 scales, as a B200 multiplies them; the others are tensorwise, as a Hopper GPU does.
"""

import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import f8emu.torch
from benchmarks.runner import Bench, Entry, draw_entries, option, turns_of
from benchmarks.timing import Step, synchronize
from f8emu.native import gemm, library
from f8emu.spec import BLACKWELL_TCGEN05, E4M3FN, MX_BLOCK, Granularity
from f8emu.spec.gemm_call import GemmCall
from f8emu.torch.gemm import emulation

BASELINE = "torch.mm float32"
_MOST_SECONDS = 5


def subjects(size: int, use_fast_accum: bool, device: torch.device) -> dict[str, Step]:
    """Name -> a call; the engine's are of the operands as the emulation describes them."""
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    scale = torch.ones((), device=device)
    a_8, b_8 = (x.to(torch.float8_e4m3fn).to(device) for x in (a, b))
    b_8 = b_8.t().contiguous().t()  # column-major, as torch._scaled_mm wants it
    a, b = a.to(device), b.to(device)
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": use_fast_accum, "engine": "emulated"}
    calls: dict[str, Step] = {
        BASELINE: lambda: torch.mm(a, b),
        "f8emu.torch": lambda: f8emu.torch.scaled_mm(a_8, b_8, scale, scale, **options),
    }
    if device.type == "cpu":
        calls["emulate"] = scaled_mm_of_torch(a_8, b_8, use_fast_accum)
        of_engine = functools.partial(engine_alone, a_8, b_8, use_fast_accum=use_fast_accum)
        calls |= of_engine(scale, scale, Granularity.TENSORWISE)
        if not use_fast_accum:  # MXFP8 has one chain, and the library no name for it
            scale_a, scale_b = (
                torch.randint(120, 135, (size, -(-size // MX_BLOCK)), generator=generator) for _ in "ab"
            )
            scale_a, scale_b = (x.to(torch.uint8).view(torch.float8_e8m0fnu) for x in (scale_a, scale_b))
            scaled = functools.partial(
                f8emu.torch.scaled_mm, a_8, b_8, scale_a, scale_b.t(), **options, split_k=1, chip="B200"
            )
            calls["f8emu.torch mxfp8"] = scaled
            calls |= of_engine(scale_a, scale_b.t(), Granularity.BLOCKWISE_1X32, chip=BLACKWELL_TCGEN05)
    return calls


def engine_alone(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kind: Granularity, **of: Any
) -> dict[str, Step]:
    """The engine at each of its widths, called with a description that is made once."""
    sizes = a.shape[0], b.shape[1], a.shape[1]
    called = GemmCall(call="scaled_mm", sizes=sizes, formats=(E4M3FN, E4M3FN), granularities=(kind, kind), **of)
    one = emulation.described(called, a, b, scale_a, scale_b)
    assert one is not None, library.unavailable()

    def run(width: str) -> None:
        out = torch.empty(sizes[:2], dtype=torch.bfloat16)
        one.out = out.data_ptr()
        gemm.run(one, threads=torch.get_num_threads(), width=width)

    suffix = " mxfp8" if kind.is_microscaled else ""
    return {f"f8emu.native {width}{suffix}": lambda width=width: run(width) for width in library.widths()}


def scaled_mm_of_torch(a: Tensor, b: Tensor, use_fast_accum: bool) -> Step:
    """torch's operator, whoever computes it."""
    unit = torch.ones(())
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": use_fast_accum}
    return lambda: torch._scaled_mm(a, b, unit, unit, **options)  # pyright: ignore[reportPrivateImportUsage]


def shortest(calls: dict[str, Step], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """Seconds of each call at its fastest; the first of all is not timed. A slow one takes fewer turns."""
    times, spent = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
        wait()
    for name in [name for _ in range(rounds) for name in calls for _ in range(3)]:
        if spent[name] < _MOST_SECONDS:
            start = time.perf_counter()
            calls[name]()
            wait()
            taken = time.perf_counter() - start
            times[name], spent[name] = min(times[name], taken), spent[name] + taken
    return times


def measure(size: int, use_fast_accum: bool, device: torch.device, rounds: int) -> list[Entry]:
    """An emulated GEMM of `size` x `size` x `size` for each way to the emulator, beside `torch.mm`."""
    calls = subjects(size, use_fast_accum, device)
    of_torch = {"torch": calls["emulate"]} if "emulate" in calls else {}
    times = shortest(of_torch, 1, lambda: None)
    with f8emu.torch.emulate(force=True):
        times |= shortest(calls, rounds, lambda: synchronize(device))
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
    __doc__,
    option("device", "cpu", choices=("cpu", "cuda")),
    option("sizes", (64, 128, 512, 2048), "M = N = K, a multiple of 16"),
    *turns_of(20),
)
_COLUMNS = "use_fast_accum: seconds:.6f baseline_seconds:.6f ratio:.2f giga_multiply_adds_per_second:.2f"


def main(argv: Sequence[str] | None = None) -> int:
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

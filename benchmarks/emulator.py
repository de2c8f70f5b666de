"""The emulated float8 GEMM against float32 `torch.mm` of the same shape, in the same run: time and peak memory.

    python -m benchmarks.emulator                                  sizes 512 to 4096 on the CPU, both chainings
    python -m benchmarks.emulator --device cuda --json OUT         the same on a GPU, TF32 off

A time is the shortest of several, the subjects taking turns, so that what else the machine does weighs on all alike.
Memory is what a call takes beyond its operands and its bfloat16 output; the operands decoded to float32 are its
yardstick.
"""

import argparse
import ctypes
import ctypes.util
import functools
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import torch

import f8emu.torch
import f8ref.jax
from f8emu import interop
from f8emu.environment import versions

SIZES = (512, 1024, 2048, 4096)
BASELINE = "torch.mm float32"
_SUMMARY = "The emulated float8 GEMM against float32 torch.mm of the same shape, in the same run."

_M_MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One emulated GEMM of `size` x `size` x `size`, and what it is compared with."""

    subject: str
    size: int
    use_fast_accum: bool
    seconds: float
    baseline_seconds: float
    ratio: float
    """Of the two times."""
    giga_multiply_adds_per_second: float
    xla_temporary_bytes: int
    """What XLA allocates for the whole call compiled as one program, beside operands and output."""
    peak_growth_bytes: int | None
    """Growth of the process's resident memory during a call, at its peak, without the output; CPU only."""
    decoded_operand_bytes: int


def subjects(size: int, use_fast_accum: bool, device: torch.device) -> tuple[dict[str, Call], int]:
    """Name -> a call that waits for its result, and the bytes of XLA's temporaries."""
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    scale = torch.ones((), device=device)
    a_8, b_8 = (x.to(torch.float8_e4m3fn).to(device) for x in (a, b))
    b_8 = b_8.t().contiguous().t()  # column-major, as torch._scaled_mm wants it
    a, b = a.to(device), b.to(device)
    operands = [interop.to_jax(x.contiguous()) for x in (a_8, b_8, scale, scale)]
    emulated = functools.partial(f8ref.jax.scaled_mm, use_fast_accum=use_fast_accum)
    memory = jax.jit(emulated).lower(*operands).compile().memory_analysis()
    assert memory is not None

    def product() -> None:
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def of_torch() -> None:
        f8emu.torch.scaled_mm(
            a_8, b_8, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum, engine="emulated"
        )
        if device.type == "cuda":
            torch.cuda.synchronize()

    calls: dict[str, Call] = {
        BASELINE: product,
        "f8ref.jax": lambda: emulated(*operands).block_until_ready(),
        "f8emu.torch": of_torch,
    }
    return calls, memory.temp_size_in_bytes


def shortest(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Seconds of each call at its fastest; the first of all, which compiles, is not timed."""
    times = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(3 if name == BASELINE else 1):
                start = time.perf_counter()
                call()
                times[name] = min(times[name], time.perf_counter() - start)
    return times


def peak_growth(call: Call) -> int | None:
    """Bytes by which the peak of resident memory during a call exceeds what was resident before; None if not glibc."""
    clear, libc = Path("/proc/self/clear_refs"), ctypes.util.find_library("c")
    if not clear.exists() or libc is None:
        return None
    gc.collect()
    # What was freed would otherwise stay resident and be reused unseen, and large blocks would come to be kept.
    ctypes.CDLL(libc).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    ctypes.CDLL(libc).malloc_trim(0)
    before = _resident("VmRSS")
    clear.write_text("5")  # sets VmHWM, the peak, to VmRSS
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def measure(size: int, use_fast_accum: bool, device: torch.device, rounds: int) -> list[Figure]:
    """A figure for each way to the emulator."""
    calls, temporary = subjects(size, use_fast_accum, device)
    times = shortest(calls, rounds)
    output_bytes = 2 * size * size
    figures: list[Figure] = []
    for name, call in calls.items():
        if name == BASELINE:
            continue
        growths = [peak_growth(call) if device.type == "cpu" else None for _ in range(3)]
        growth = max((x for x in growths if x is not None), default=None)
        figures.append(
            Figure(
                subject=name,
                size=size,
                use_fast_accum=use_fast_accum,
                seconds=times[name],
                baseline_seconds=times[BASELINE],
                ratio=times[name] / times[BASELINE],
                giga_multiply_adds_per_second=size**3 / times[name] / 1e9,
                xla_temporary_bytes=temporary,
                peak_growth_bytes=None if growth is None else max(0, growth - output_bytes),
                decoded_operand_bytes=2 * 4 * size * size,
            )
        )
    return figures


def line(figure: Figure) -> str:
    """A figure as a row of the table."""
    peak = "-" if figure.peak_growth_bytes is None else f"{figure.peak_growth_bytes / 2**20:.1f}"
    return (
        f"{figure.subject:<12} {figure.size:>6} {figure.use_fast_accum!s:>6} {1e3 * figure.seconds:>10.2f} "
        f"{1e3 * figure.baseline_seconds:>9.3f} {figure.ratio:>7.2f} {figure.giga_multiply_adds_per_second:>9.2f} "
        f"{figure.xla_temporary_bytes / 2**20:>9.1f} {peak:>9} {figure.decoded_operand_bytes / 2**20:>9.1f}"
    )


HEADER = (
    f"{'emulator':<12} {'size':>6} {'fast':>6} {'ms':>10} {'mm ms':>9} {'ratio':>7} {'G ma/s':>9} "
    f"{'XLA MiB':>9} {'peak MiB':>9} {'f32 MiB':>9}"
)


def machine(device: torch.device) -> dict[str, object]:
    """What the figures belong to."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [row.partition(": ")[2] for row in info.read_text().splitlines() if row.startswith("model name")]
        cpu = names[0] if names else cpu
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return {
        "device": name,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "jax_device": interop.jax_device(device).device_kind,
        "versions": versions(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and records it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulator", description=_SUMMARY)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="M = N = K, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5, help="times each subject takes its turn (default 5)")
    parser.add_argument("--json", type=Path, help="where to record")
    given = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    load = os.getloadavg()[0]
    print(HEADER)
    figures: list[Figure] = []
    for size in arguments.sizes:
        for use_fast_accum in (True, False):
            for figure in measure(size, use_fast_accum, device, arguments.rounds):
                figures.append(figure)
                print(line(figure), flush=True)
    if arguments.json is not None:
        report = {
            "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks.emulator", *given]),
            **machine(device),
            "load_before": round(load, 1),
            "figures": [asdict(figure) for figure in figures],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"recorded in {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

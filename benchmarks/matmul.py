"""GEMMs alone over the shapes of Llama-2 70B: bfloat16 and every scaling of a float8 GEMM.

    python -m benchmarks.matmul --json OUT

The (K, N) are those of float8_experimental's `bench_matmul`, which sized Llama-2 70B (dim 8192, hidden 28672, 64 heads
on 8) for 8 GPUs of one node, q, k, v and w1, w3 fused: wqkv 8192 -> (8192 + 2 * 1024) / 8, w0 8192 / 8 -> 8192,
w13 8192 -> 2 * 28672 / 8, w2 28672 / 8 -> 8192. M is 4 sequences of 4096 tokens, as there. Operands are random, not the
zeros of the original, on which a GPU draws less power and runs faster. Peaks are the data sheet's, without sparsity.
"""

import sys
from collections.abc import Sequence

import torch

from benchmarks.gemms import Shape, launcher
from benchmarks.runner import DEVICE, Bench, Columns, Entry, draw_entries, option, spread, take_turns, turns_of
from benchmarks.timing import alone
from benchmarks.workloads import HIGH_PRECISION_GEMM
from f8emu.spec import E4M3FN, Cast, Gemm, Granularity

SHAPES = {
    "attn.wqkv": (8192, 1280),
    "attn.w0": (1024, 8192),
    "ffn.w13": (8192, 7168),
    "ffn.w2": (3584, 8192),
}
"""Name -> (K, N)."""
TOKENS = 4 * 4096
PEAK_TFLOPS = {"bf16": 989, "float8": 1979}
"""H200 SXM, dense."""


def _float8(a: Granularity, b: Granularity, *, fast: bool = False) -> Gemm:
    return Gemm(a=Cast(format=E4M3FN, granularity=a), b=Cast(format=E4M3FN, granularity=b), use_fast_accum=fast)


KINDS = {
    "bf16": HIGH_PRECISION_GEMM,
    "tensorwise, fast": _float8(Granularity.TENSORWISE, Granularity.TENSORWISE, fast=True),
    "tensorwise": _float8(Granularity.TENSORWISE, Granularity.TENSORWISE),
    "rowwise, fast": _float8(Granularity.ROWWISE, Granularity.ROWWISE, fast=True),
    "rowwise": _float8(Granularity.ROWWISE, Granularity.ROWWISE),
    "blockwise 1x128 x 128x128": _float8(Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128),
    "blockwise 1x128 x 1x128": _float8(Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128),
}


BENCH = Bench(
    "benchmarks.matmul",
    "GEMMs over Llama-2 70B's shapes.",
    option("tokens", TOKENS, "M"),
    option("dim", 8192, "of the model; the shapes shrink with it"),
    *turns_of(3),
    DEVICE,
)
_COLUMNS: Columns = {
    "kind": "kind:",
    "ms": "ms:.4f",
    "TFLOP/s": "tflops:.0f",
    "x bf16": "speed:.2f",
    "of peak": "fraction_of_peak:.1%",
}


def measure(name: str, shape: Shape, rounds: int, device: torch.device) -> list[Entry]:
    """One entry for each kind: the median over rounds in which the kinds take turns."""
    calls = {kind: launcher(gemm, shape, device) for kind, gemm in KINDS.items()}
    times = take_turns({kind: lambda call=call: alone(call, device) for kind, call in calls.items()}, rounds)
    found: list[Entry] = []
    for kind, of in times.items():
        entry = {"name": name, "m": shape.m, "k": shape.k, "n": shape.n, "kind": kind, **spread(of)}
        entry["tflops"] = shape.flops / entry["ms"] / 1e9
        entry["speed"] = spread(times["bf16"])["ms"] / entry["ms"]
        entry["fraction_of_peak"] = entry["tflops"] / PEAK_TFLOPS["bf16" if kind == "bf16" else "float8"]
        found.append(entry)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints a table and records."""
    run = BENCH.parse(argv)
    arguments = run.arguments
    run.announce()
    gemms: list[Entry] = []
    for name, (k, n) in SHAPES.items():
        shrunk = [max(128, size * arguments.dim // 8192 // 128 * 128) for size in (k, n)]
        gemms += measure(name, Shape(arguments.tokens, shrunk[1], shrunk[0]), arguments.rounds, run.device)
    shown = [{**e, "layer": f"{e['name']} {e['m']} x {e['k']} x {e['n']}"} for e in gemms]
    draw_entries("GEMMs alone, M x K x N", shown, _COLUMNS, of="layer")
    run.record(peak_tflops=PEAK_TFLOPS, rounds=arguments.rounds, gemms=gemms)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""GEMMs alone over the shapes of Llama-2 70B: bfloat16 and every scaling of a float8 GEMM.

    python -m benchmarks.matmul --json OUT

The (K, N) are those of float8_experimental's `bench_matmul`, which sized Llama-2 70B (dim 8192, hidden 28672, 64 heads
on 8) for 8 GPUs of one node, q, k, v and w1, w3 fused: wqkv 8192 -> (8192 + 2 * 1024) / 8, w0 8192 / 8 -> 8192,
w13 8192 -> 2 * 28672 / 8, w2 28672 / 8 -> 8192. M is 4 sequences of 4096 tokens, as there. Operands are random, not the
zeros of the original, on which a GPU draws less power and runs faster. Peaks are the data sheet's, without sparsity.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemms import Shape, launcher
from benchmarks.report import draw, facts, say, write_json
from benchmarks.timing import alone, median
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


def measure(name: str, shape: Shape, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """One entry for each kind: the median over rounds in which the kinds take turns."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    calls = {kind: launcher(gemm, shape, device) for kind, gemm in KINDS.items()}
    for _ in range(rounds):
        for kind, call in calls.items():
            times[kind].append(alone(call, device))
    bf16 = median(times["bf16"])
    found = []
    for kind, of in times.items():
        ms = median(of)
        tflops = shape.flops / ms / 1e9
        peak = PEAK_TFLOPS["bf16" if kind == "bf16" else "float8"]
        found.append(
            {
                "name": name,
                "m": shape.m,
                "k": shape.k,
                "n": shape.n,
                "kind": kind,
                "ms": ms,
                "ms_min": min(of),
                "ms_max": max(of),
                "tflops": tflops,
                "speed": bf16 / ms,
                "fraction_of_peak": tflops / peak,
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints a table and records."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matmul", description="GEMMs over Llama-2 70B's shapes.")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"M (default {TOKENS})")
    parser.add_argument("--dim", type=int, default=8192, help="of the model; the shapes shrink with it (default 8192)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to record")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    report = facts("benchmarks.matmul", given, device)
    report |= {"peak_tflops": PEAK_TFLOPS, "rounds": arguments.rounds, "gemms": []}
    say(f"{report['device']}, torch {report['versions']['torch']}")
    for name, (k, n) in SHAPES.items():
        shrunk = [max(128, size * arguments.dim // 8192 // 128 * 128) for size in (k, n)]
        report["gemms"] += measure(name, Shape(arguments.tokens, shrunk[1], shrunk[0]), arguments.rounds, device)
    rows = [
        [
            f"{e['name']} {e['m']} x {e['k']} x {e['n']}",
            e["kind"],
            f"{e['ms']:.4f}",
            f"{e['tflops']:.0f}",
            f"{e['speed']:.2f}",
            f"{e['fraction_of_peak']:.1%}",
        ]
        for e in report["gemms"]
    ]
    draw("GEMMs alone, M x K x N", ("layer", "kind", "ms", "TFLOP/s", "x bf16", "of peak"), rows)
    if arguments.json:
        write_json(arguments.json, report)
        say(f"recorded in {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

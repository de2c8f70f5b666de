"""GEMMs alone over the shapes of Llama-2 70B: bfloat16 and every scaling of a float8 GEMM.

    python -m benchmarks.matmul --json OUT

The (K, N) are those of float8_experimental's `bench_matmul`, which sized Llama-2 70B (dim 8192, hidden 28672, 64 heads
on 8) for 8 GPUs of one node, q, k, v and w1, w3 fused: wqkv 8192 -> (8192 + 2 * 1024) / 8, w0 8192 / 8 -> 8192,
w13 8192 -> 2 * 28672 / 8, w2 28672 / 8 -> 8192. M is 4 sequences of 4096 tokens, as there. Operands are random, not the
zeros of the original, on which a GPU draws less power and runs faster. Peaks are the data sheet's, without sparsity.
"""

import sys
from collections.abc import Sequence

from benchmarks.runner import (
    BASELINE,
    DEVICE,
    Bench,
    Entry,
    add_ratios,
    draw_entries,
    is_wrong,
    option,
    race,
    turns_of,
)
from benchmarks.timing import alone
from benchmarks.workloads import HIGH_PRECISION_GEMM, Shape, launcher
from f8emu.spec import E4M3FN, Cast, Gemm, Granularity

# Name -> (K, N).
SHAPES = {"attn.wqkv": (8192, 1280), "attn.w0": (1024, 8192), "ffn.w13": (8192, 7168), "ffn.w2": (3584, 8192)}
PEAK_TFLOPS = {BASELINE: 989, "float8": 1979}  # H200 SXM, dense


def _float8(a: Granularity, b: Granularity, *, fast: bool = False) -> Gemm:
    return Gemm(a=Cast(format=E4M3FN, granularity=a), b=Cast(format=E4M3FN, granularity=b), use_fast_accum=fast)


KINDS = {
    BASELINE: HIGH_PRECISION_GEMM,
    "tensorwise, fast": _float8(Granularity.TENSORWISE, Granularity.TENSORWISE, fast=True),
    "tensorwise": _float8(Granularity.TENSORWISE, Granularity.TENSORWISE),
    "rowwise, fast": _float8(Granularity.ROWWISE, Granularity.ROWWISE, fast=True),
    "rowwise": _float8(Granularity.ROWWISE, Granularity.ROWWISE),
    "blockwise 1x128 x 128x128": _float8(Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128),
    "blockwise 1x128 x 1x128": _float8(Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128),
}
BENCH = Bench(
    "benchmarks.matmul",
    __doc__,
    option("tokens", 4 * 4096, "M"),
    option("dim", 8192, "of the model; the shapes shrink with it"),
    *turns_of(3),
    DEVICE,
)
_COLUMNS = "kind: ms:.4f tflops:.0f speed:.2f fraction_of_peak:.1%"


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    run.announce()
    gemms: list[Entry] = []
    for name, sizes in SHAPES.items():
        k, n = (max(128, size * run.arguments.dim // 8192 // 128 * 128) for size in sizes)
        shape = Shape(run.arguments.tokens, n, k)
        entries: list[Entry] = [{"name": name, **shape._asdict(), "kind": kind, "subject": kind} for kind in KINDS]
        race(
            entries,
            lambda entry, shape=shape: launcher(KINDS[entry["kind"]], shape, run.device),
            lambda call: alone(call, run.device),
            run.arguments.rounds,
        )
        add_ratios(entries, {})
        for entry in (e for e in entries if "ms" in e):
            entry["tflops"] = shape.flops / entry["ms"] / 1e9
            entry["fraction_of_peak"] = entry["tflops"] / PEAK_TFLOPS.get(entry["kind"], PEAK_TFLOPS["float8"])
        gemms += entries
    shown = [{**e, "layer": f"{e['name']} {e['m']} x {e['k']} x {e['n']}"} for e in gemms]
    draw_entries("GEMMs alone, M x K x N", shown, _COLUMNS, of="layer")
    run.record(peak_tflops=PEAK_TFLOPS, rounds=run.arguments.rounds, gemms=gemms)
    return int(any(map(is_wrong, gemms)))


if __name__ == "__main__":
    sys.exit(main())

"""The fused casts beside what the compiler makes of the same in plain torch: bytes a second, and the same bits.

    python -m benchmarks.casts --json OUT

Bytes are counted once each: the matrix read, codes, scales and amaxes written. Both are timed alone with a cold cache;
`of copy` is the part of a large copy's speed.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.runner import DEVICE, Bench, Entry, draw_entries, option
from benchmarks.timing import alone, copy_bandwidth
from f8emu.spec import E4M3FN, Granularity, ScaleRule
from f8emu.torch.fused import delayed, eager
from f8emu.torch.fused import operators as fused

COLS = (4096, 14336)  # activations of Llama-3 8B's feed-forward block, 8,192 tokens
DTYPES = ("bfloat16", "float32")
_RULE = ScaleRule()
_SETTINGS = (_RULE.power_of_two, _RULE.amax_floor)
_NAME = E4M3FN.name
Results = tuple[Tensor, ...]


class Pair(NamedTuple):
    """One cast, as f8emu's operator and in plain torch."""

    operator: Callable[[], Results]
    plain: Callable[[Tensor], Results]  # of the matrix; this one is compiled


def casts(x: Tensor) -> dict[str, Pair]:
    """What the recipes do with a matrix."""
    m, n = x.shape
    unit, rows, cols = (100 * torch.rand(size, 1, device=x.device) + 400 for size in (1, m, n))
    inv_scale, state = torch.full((1, 1), 0.9, device=x.device), torch.zeros(1, 1, device=x.device)

    def both(x: Tensor, of_rows: Tensor, of_cols: Tensor) -> Results:
        return *eager.cast_rows_by(x, E4M3FN, of_rows, _RULE), *eager.cast_rows_by(x.t(), E4M3FN, of_cols, _RULE)

    def given(x: Tensor) -> Results:
        return eager.cast_by(x, E4M3FN, inv_scale), eager.cast_by(x.t(), E4M3FN, inv_scale)

    def blocks(x: Tensor, granularity: Granularity) -> Results:
        return eager.cast_by_own(x, E4M3FN, granularity, _RULE)[:2]

    vectors, squares = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
    return {
        "amax": Pair(lambda: (fused.tensor_amax(x),), lambda x: (eager.tensor_amax(x),)),
        "row amaxes": Pair(lambda: (fused.row_amax(x),), lambda x: (eager.row_amax(x),)),
        "row and column amaxes": Pair(lambda: fused.row_col_amax(x), eager.row_col_amax),
        "row and column amaxes of tiles": Pair(
            lambda: (fused.amaxes_of_tiles(x),), lambda x: (eager.amaxes_of_tiles(x),)
        ),
        "tensorwise, both ways": Pair(
            lambda: fused.cast_pair(x, _NAME, unit, unit, *_SETTINGS), lambda x: both(x, unit, unit)
        ),
        "delayed, both ways and amax": Pair(
            lambda: (*delayed.cast_pair_delayed(x, _NAME, inv_scale, True, True, state, *_SETTINGS, 0)[:2], state),
            lambda x: (*given(x), eager.tensor_amax(x)),
        ),
        "rowwise, both ways": Pair(
            lambda: fused.cast_pair(x, _NAME, rows, cols, *_SETTINGS), lambda x: both(x, rows, cols)
        ),
        "rowwise, amax and cast of rows": Pair(
            lambda: fused.cast_rows(x, _NAME, *_SETTINGS),
            lambda x: eager.cast_by_own(x, E4M3FN, Granularity.ROWWISE, _RULE),
        ),
        "1x128, both ways": Pair(
            lambda: fused.cast_blocks(x, _NAME, False, True, True, *_SETTINGS),
            lambda x: (*blocks(x, vectors), *blocks(x.t(), vectors)),
        ),
        "128x128": Pair(
            lambda: fused.cast_blocks(x, _NAME, True, True, False, *_SETTINGS)[:2], lambda x: blocks(x, squares)
        ),
        "128x128, transposed": Pair(
            lambda: fused.cast_blocks(x, _NAME, True, False, True, *_SETTINGS)[2:], lambda x: blocks(x.t(), squares)
        ),
    }


def measure(name: str, pair: Pair, x: Tensor, bandwidth: float) -> Entry:
    """Time and bytes a second of both; how many results of the compiled one differ is a figure, not a failure."""
    torch._dynamo.reset()
    compiled = torch.compile(pair.plain, fullgraph=True, dynamic=False)
    ours, plain, wanted = pair.operator(), compiled(x), pair.plain(x)
    moved = x.nbytes + sum(result.nbytes for result in ours)
    times = {"f8emu": alone(pair.operator, x.device), "compiler": alone(lambda: compiled(x), x.device)}
    dtype = str(x.dtype).removeprefix("torch.")
    return {
        "cast": name,
        "shape": list(x.shape),
        "dtype": dtype,
        "bytes": moved,
        "differing": _differing(ours, wanted),
        "compiler_differing": _differing(plain, wanted),
        **{f"{who}_ms": ms for who, ms in times.items()},
        **{f"{who}_of_copy": 1e3 * moved / ms / bandwidth for who, ms in times.items()},
        "speed": times["compiler"] / times["f8emu"],
    }


def _differing(ours: Results, wanted: Results) -> int:
    pairs = ([x.flatten().view(torch.uint8) for x in pair] for pair in zip(ours, wanted, strict=True))
    return sum(int((a != b).sum()) for a, b in pairs)


BENCH = Bench(
    "benchmarks.casts",
    __doc__,
    option("rows", 8192, "of the matrices"),
    option("cols", COLS, "of the matrices"),
    option("dtypes", DTYPES, choices=DTYPES),
    DEVICE,
)
_COLUMNS = "f8emu_ms:us f8emu_of_copy:.0% compiler_ms:us compiler_of_copy:.0% speed:.2f differing: compiler_differing:"


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    bandwidth = copy_bandwidth(run.device)
    run.announce(f", copy {bandwidth / 1e12:.3f} TB/s")
    entries: list[Entry] = []
    for dtype in run.arguments.dtypes:
        for n in run.arguments.cols:
            x = torch.randn(run.arguments.rows, n, device=run.device).to(getattr(torch, dtype))
            entries += [measure(name, pair, x, bandwidth) for name, pair in casts(x).items()]
    shown = [{**e, "name": f"{e['cast']}, {e['dtype']} {e['shape'][0]} x {e['shape'][1]}"} for e in entries]
    draw_entries("fused casts, and torch.compile of the same in plain torch", shown, _COLUMNS, of="name")
    run.record(copy_bytes_per_second=round(bandwidth), casts=entries)
    return int(any(e["differing"] for e in entries))


if __name__ == "__main__":
    sys.exit(main())

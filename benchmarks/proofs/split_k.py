"""S as cuBLAS's own heuristic gives it, beside the shipped plan [PLAN-1..5].

    python -m benchmarks.proofs.split_k --json OUT        on a GPU, a minute; no GEMM runs
    python -m benchmarks.proofs.split_k --describe        anywhere: the questions as they would be asked

cublasLtMatmulAlgoGetHeuristic is asked through ctypes with the descriptors, and the workspace, of torch 2.11: 1 MiB for
`torch._scaled_mm`, 32 MiB for `torch.mm`. Asked are all recorded rows, and random shapes of each table; counted is how
often the plan says the same, its rule alone for the recorded rows. Tables of tensorwise and bfloat16 GEMMs only.
"""

import argparse
import ctypes
import json
import random
import sys
from collections.abc import Callable, Iterator
from ctypes import addressof, byref, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import facts, write_json
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.spec.plan import LAYOUTS, PlannedGemm, shipped_plan

SEED = 20261123
OUTPUTS = ("float32", "bfloat16", "float16")
PAIRS = ((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2))
WORKSPACE_BYTES = {"tensorwise": 1 << 20, "bfloat16": 32 << 20}
"""Torch's: [PLAN-4]."""
SHORTEST_K = {"tensorwise": 5136, "bfloat16": 2576}
CUDA = {"float32": 0, "float16": 2, "bfloat16": 14, E4M3FN.name: 28, E5M2.name: 29}
"""cudaDataType_t."""
COMPUTE_32F, SPLIT_K = 68, 2
TRANS_A, TRANS_B, SCALE_A, SCALE_B, FAST, MODE_A, MODE_B = 3, 4, 17, 18, 25, 31, 32
"""cublasLtMatmulDescAttributes_t."""
WORKSPACE = 1
_KINDS: list[dict[str, Any]] = [
    {"gemm": "tensorwise", "accumulation": "fast", "out_dtype": out, "a_dtype": a.name, "b_dtype": b.name}
    for a, b in PAIRS
    for out in OUTPUTS
]
_KINDS += [{"gemm": "bfloat16", "layout": layout, "out_dtype": "bfloat16"} for layout in LAYOUTS]
KINDS = {PlannedGemm(m=8, n=16, k=16, **kind).table: kind for kind in _KINDS}
"""Table -> what its GEMMs share."""


class Question(NamedTuple):
    """One GEMM as cuBLAS sees it: its first operand is `b`, its matrices are columns."""

    types: tuple[int, int, int]
    """Of b, a and the output."""
    layouts: tuple[tuple[int, int, int], ...]
    """Rows, columns and leading dimension of b, a and the output."""
    attributes: tuple[tuple[int, Any], ...]
    workspace_bytes: int


def question(gemm: PlannedGemm) -> Question:
    """What torch asks for a GEMM."""
    m, n, k = gemm.m, gemm.n, gemm.k
    first, second = (letter == "t" for letter in gemm.layout)
    layouts = ((k, n, k) if first else (n, k, n), (m, k, m) if second else (k, m, k), (n, m, n))
    attributes: list[tuple[int, Any]] = [(TRANS_A, c_int32(first)), (TRANS_B, c_int32(second))]
    if gemm.gemm == "bfloat16":
        types = (CUDA["bfloat16"], CUDA["bfloat16"], CUDA[gemm.out_dtype])
        return Question(types, layouts, tuple(attributes), WORKSPACE_BYTES[gemm.gemm])
    # the scales' addresses are never read, but must be there
    attributes += [(SCALE_A, c_uint64(1 << 40)), (SCALE_B, c_uint64(1 << 41))]
    attributes += [(FAST, c_int8(gemm.accumulation == "fast")), (MODE_A, c_int32(0)), (MODE_B, c_int32(0))]
    types = CUDA[gemm.b_dtype], CUDA[gemm.a_dtype], CUDA[gemm.out_dtype]
    return Question(types, layouts, tuple(attributes), WORKSPACE_BYTES[gemm.gemm])


class Library:
    """cublasLt, as loaded by torch or found by its name."""

    def __init__(self) -> None:
        self.lt = ctypes.CDLL(_path_of_cublaslt())
        self.lt.cublasLtGetVersion.restype = c_size_t
        self.lt.cublasLtMatrixLayoutInit_internal.argtypes = [c_void_p, c_size_t, c_int, c_uint64, c_uint64, c_int64]
        self.handle = c_void_p()
        _checked("cublasLtCreate", self.lt.cublasLtCreate(byref(self.handle)))
        self.version: int = self.lt.cublasLtGetVersion()

    def split_k(self, asked: Question) -> int:
        """S of the one algorithm that the heuristic returns."""
        lt, of = self.lt, [ctypes.create_string_buffer(size) for size in (256, 64, 64, 64, 64, 256)]
        desc, preference, b, a, out, result = (c_void_p(addressof(buffer)) for buffer in of)
        _checked("desc", lt.cublasLtMatmulDescInit_internal(desc, c_size_t(256), COMPUTE_32F, CUDA["float32"]))
        for name, value in asked.attributes:
            size = c_size_t(ctypes.sizeof(value))
            _checked(f"attribute {name}", lt.cublasLtMatmulDescSetAttribute(desc, name, byref(value), size))
        _checked("preference", lt.cublasLtMatmulPreferenceInit_internal(preference, c_size_t(64)))
        limit, size = c_size_t(asked.workspace_bytes), c_size_t(ctypes.sizeof(c_size_t))
        _checked("limit", lt.cublasLtMatmulPreferenceSetAttribute(preference, WORKSPACE, byref(limit), size))
        for place, kind, sizes in zip((b, a, out), asked.types, asked.layouts, strict=True):
            _checked("layout", lt.cublasLtMatrixLayoutInit_internal(place, 64, kind, *sizes))
        count, slices = c_int(), c_int32()
        found = lt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, desc, b, a, out, out, preference, 1, result, byref(count)
        )
        _checked("heuristic", found or count.value != 1)
        size = c_size_t(4)
        _checked("S", lt.cublasLtMatmulAlgoConfigGetAttribute(result, SPLIT_K, byref(slices), size, byref(c_size_t())))
        return slices.value


def _path_of_cublaslt() -> str:
    import torch

    one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    _ = one @ one
    loaded = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return next((path for path in loaded if "libcublasLt.so" in path), "libcublasLt.so.13")


def _checked(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call}: cublasLt returned {status}")


def random_gemms(kind: dict[str, Any], count: int) -> Iterator[PlannedGemm]:
    """Log-uniform sizes off every grid, where [PLAN-2] and [PLAN-4] leave a choice."""
    rng, gemm = random.Random(SEED), kind["gemm"]
    step = 8 if kind.get("layout") in ("nt", "tt") else 1
    while count:
        m = max(step, round(8192 ** rng.random() / step) * step)
        n, k = (16 * round(least * (2048 / least) ** rng.random()) for least in (1, SHORTEST_K[gemm] / 16))
        if 8 * m * n < WORKSPACE_BYTES[gemm]:
            count -= 1
            yield PlannedGemm(m=m, n=n, k=k, **kind)


def compare(split_k: Callable[[PlannedGemm], int], count: int) -> dict[str, dict[str, int]]:
    """How often the plan's rule says what the library says, all shapes and those that are split."""
    plan, rows = shipped_plan(), {}
    for table, kind in KINDS.items():
        recorded = [shape for of, *shape in plan.recorded if of == table]
        sets = {
            "recorded": [PlannedGemm(m=m, n=n, k=k, **kind) for m, n, k in recorded],
            "random": list(random_gemms(kind, count)),
        }
        rows[table] = {}
        for name, gemms in sets.items():
            pairs = [(split_k(gemm), plan.predicted(gemm).split_k) for gemm in gemms]
            split = [pair for pair in pairs if pair[0] > 1]
            rows[table] |= {name: len(pairs), f"{name} right": sum(a == b for a, b in pairs)}
            rows[table] |= {f"{name} split": len(split), f"{name} split right": sum(a == b for a, b in split)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=4000, help="random shapes of each table")
    parser.add_argument("--describe", action="store_true", help="print one question of each table")
    arguments = parser.parse_args()
    if arguments.describe:
        for table, kind in KINDS.items():
            print(table, question(next(random_gemms(kind, 1))))
        return
    library = Library()
    rows = compare(lambda gemm: library.split_k(question(gemm)), arguments.count)
    print(json.dumps(rows, indent=1))
    if arguments.json:
        import torch

        told = facts("benchmarks.proofs.split_k", sys.argv[1:], torch.device("cuda"))
        write_json(arguments.json, {**told, "cublasLt": library.version, "seed": SEED, "tables": rows})


if __name__ == "__main__":
    main()

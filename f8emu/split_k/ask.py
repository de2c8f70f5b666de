"""S as the library of the GPU at hand chooses it [PLAN-7]: cuBLAS's own heuristic, called as torch calls it.

torch and JAX ask it for GEMMs that they emulate, show or record on a Hopper GPU. Both have loaded it by then.

`cublasLtMatmulAlgoGetHeuristic` gets the descriptors and the workspace of torch 2.11 on a Hopper GPU; no GEMM runs. On
an NVIDIA H200 it agrees with every recorded row of tensorwise and bfloat16 GEMMs
(`benchmarks/results/split_k_asked-h200.json`).
"""

import ctypes
import warnings
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from f8emu.spec.chip import Chip
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.spec.scaling import Granularity
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, UNKNOWN, PlannedGemm, Source, Split
from f8emu.split_k.plan import LIBRARY, is_planned, split_k

_FLOAT8 = ("tensorwise", *BLOCKWISE_GEMMS)
WORKSPACE_BYTES = {**dict.fromkeys(_FLOAT8, 1 << 20), "bfloat16": 32 << 20}  # torch's: [PLAN-4]
# cublasLtMatmulMatrixScale_t
_SCALE_MODES = {Granularity.BLOCKWISE_128X128: 5, Granularity.BLOCKWISE_1X128: 4, Granularity.TENSORWISE: 0}
_CUDA = {"float32": 0, "float16": 2, "bfloat16": 14, E4M3FN.name: 28, E5M2.name: 29}  # cudaDataType_t
_COMPUTE_32F, _SPLIT_K, _WORKSPACE = 68, 2, 1
# cublasLtMatmulDescAttributes_t
_TRANS_A, _TRANS_B, _SCALE_A, _SCALE_B, _FAST, _MODE_A, _MODE_B = 3, 4, 17, 18, 25, 31, 32
# Of each attribute, whose bytes are those of a little-endian integer
_BYTES = {**dict.fromkeys((_TRANS_A, _TRANS_B, _MODE_A, _MODE_B), 4), _SCALE_A: 8, _SCALE_B: 8, _FAST: 1}


class Question(NamedTuple):
    """One GEMM as cuBLAS sees it: its first operand is `b`, its matrices are columns."""

    types: tuple[int, int, int]  # the types of b, a and the output
    layouts: tuple[tuple[int, int, int], ...]  # rows, columns and leading dimension of b, a and the output
    attributes: tuple[tuple[int, int], ...]
    workspace_bytes: int


def question(gemm: PlannedGemm) -> Question:
    """The question that torch asks cuBLAS for a GEMM."""
    m, n, k = gemm.rows, gemm.n, gemm.k
    first, second = (letter == "t" for letter in gemm.layout_asked)
    layouts = ((k, n, k) if first else (n, k, n), (m, k, m) if second else (k, m, k), (n, m, n))
    attributes = [(_TRANS_A, int(first)), (_TRANS_B, int(second))]
    a, b, out = gemm.a_dtype, gemm.b_dtype, gemm.out_dtype
    if gemm.granularities is None:
        a = b = "bfloat16"
        out = "float32" if out == "float16" else out  # which is rounded afterwards
    else:
        of_a, of_b = gemm.granularities
        # the scales' addresses are never read, but must be there
        attributes += [(_SCALE_A, 1 << 40), (_SCALE_B, 1 << 41), (_FAST, int(gemm.accumulation == "fast"))]
        attributes += [(_MODE_A, _SCALE_MODES[of_b]), (_MODE_B, _SCALE_MODES[of_a])]
    return Question((_CUDA[b], _CUDA[a], _CUDA[out]), layouts, tuple(attributes), WORKSPACE_BYTES[gemm.gemm])


class CublasLt:
    """The cublasLt at a path, asked about the process's current GPU."""

    def __init__(self, path: str) -> None:
        self.lt = ctypes.CDLL(path)
        self.lt.cublasLtGetVersion.restype = c_size_t
        self.lt.cublasLtMatrixLayoutInit_internal.argtypes = [c_void_p, c_size_t, c_int, c_uint64, c_uint64, c_int64]
        self.handle = c_void_p()
        _checked("cublasLtCreate", self.lt.cublasLtCreate(byref(self.handle)))
        self.version: int = self.lt.cublasLtGetVersion()
        self._described = cache(self._described)

    def split_k(self, asked: Question) -> int:
        """S of the one algorithm that the heuristic returns."""
        # 1. The layouts of the three matrices.
        lt = self.lt
        desc, preference = self._described(asked.attributes, asked.workspace_bytes)
        b, a, out, result = (ctypes.create_string_buffer(size) for size in (64, 64, 64, 256))
        for place, kind, sizes in zip((b, a, out), asked.types, asked.layouts, strict=True):
            _checked("layout", lt.cublasLtMatrixLayoutInit_internal(place, 64, kind, *sizes))
        # 2. The heuristic's one algorithm, as torch asks for it. 3. Its split of K.
        count, slices = c_int(), c_int32()
        found = lt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, desc, b, a, out, out, preference, 1, result, byref(count)
        )
        _checked("heuristic", found or count.value != 1)
        size = c_size_t(4)
        _checked("S", lt.cublasLtMatmulAlgoConfigGetAttribute(result, _SPLIT_K, byref(slices), size, byref(c_size_t())))
        return slices.value

    def _described(self, attributes: tuple[tuple[int, int], ...], workspace_bytes: int) -> tuple[Any, Any]:
        """The descriptor and the preference, which are read only, once for each kind of GEMM."""
        lt = self.lt
        desc, preference = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
        _checked("desc", lt.cublasLtMatmulDescInit_internal(desc, c_size_t(256), _COMPUTE_32F, _CUDA["float32"]))
        for name, value in attributes:
            given = value.to_bytes(_BYTES[name], "little")
            _checked(f"attribute {name}", lt.cublasLtMatmulDescSetAttribute(desc, name, given, c_size_t(len(given))))
        _checked("preference", lt.cublasLtMatmulPreferenceInit_internal(preference, c_size_t(64)))
        limit = workspace_bytes.to_bytes(8, "little")
        _checked("limit", lt.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE, limit, c_size_t(8)))
        return desc, preference


@lru_cache(maxsize=4096)
def split_k_at_hand(gemm: PlannedGemm, chip: Chip) -> Split:
    """S of a GEMM on the GPU at hand, which is that chip: what the library says, else what the plan says.

    Not asked are rowwise GEMMs, which are never split, and those of [PLAN-5].
    """
    path = loaded_path()
    if path is not None and gemm.gemm != "rowwise" and gemm.is_aligned:
        with suppress(UnsupportedError):
            return Split(_library(path).split_k(question(gemm)), Source.ASKED)
    return split_k(gemm, chip=chip.plan)


_SAID: set[tuple[str, str]] = set()  # backends and tables whose missing plan was reported already


def split_of(caller: str, gemm: PlannedGemm, chip: Chip, is_at_hand: Callable[[], bool]) -> Split:
    """S of a GEMM that `caller` emulates; a warning says once that a chip has no plan."""
    if not is_planned(caller, chip):
        return UNKNOWN
    # The library at hand is the better source: the plan is a fit of its answers.
    return split_k_at_hand(gemm, chip) if is_at_hand() else split_k(gemm, chip=chip.plan)


def known_split_k(
    caller: str, gemm: PlannedGemm, chip: Chip, is_at_hand: Callable[[], bool] = lambda: False, *, stacklevel: int = 3
) -> int:
    """S of `split_of`; a warning says once for a kind of GEMM that it is not known."""
    split = split_of(caller, gemm, chip, is_at_hand)
    if split.source is Source.UNKNOWN and chip.plan and (caller, gemm.table) not in _SAID:
        _SAID.add((caller, gemm.table))
        warnings.warn(
            f"{caller}: the plan of {LIBRARY} on {chip.plan} has no split-K for this GEMM: {gemm}. It is emulated "
            "without split-K, and has the hardware's bits if the hardware does not split K either. Pass split_k if you "
            "know it; `f8emu record OUT --plans IN.json` finds it on a GPU. This warning appears once per kind of GEMM",
            stacklevel=stacklevel,
        )
    return split.split_k


@cache
def _library(path: str) -> CublasLt:
    return CublasLt(path)


@cache
def loaded_path() -> str | None:
    """Where the cublasLt is that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if "libcublasLt.so" in line), None)


def _checked(call: str, status: int) -> None:
    if status:
        raise UnsupportedError(f"split_k: {call} of cublasLt returned {status}, so its split-K is unknown")

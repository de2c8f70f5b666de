"""S of a GEMM, from its plan or from cuBLAS's own heuristic on the GPU at hand [PLAN-7], called as torch calls it.

torch and JAX ask it for GEMMs that they emulate, show or record on a Hopper GPU. Both have loaded it by then.

`cublasLtMatmulAlgoGetHeuristic` gets the descriptors and the workspace of torch 2.11 on a Hopper GPU; no GEMM runs. On
an NVIDIA H200 it agrees with every recorded row of tensorwise and bfloat16 GEMMs
(`benchmarks/results/split_k_asked-h200.json`).
"""

import ctypes
import warnings
from contextlib import suppress
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.spec.gemm_call import GemmCall
from f8emu.spec.scaling import Granularity
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, UNKNOWN, PlannedGemm, Source, Split, planned
from f8emu.split_k.plan import LIBRARY, split_k

_FLOAT8 = ("tensorwise", *BLOCKWISE_GEMMS)
WORKSPACE_BYTES = {**dict.fromkeys(_FLOAT8, 1 << 20), "bfloat16": 32 << 20}  # torch's: [PLAN-4]
# cublasLtMatmulMatrixScale_t
_SCALE_MODES = {Granularity.BLOCKWISE_128X128: 5, Granularity.BLOCKWISE_1X128: 4, Granularity.TENSORWISE: 0}
_CUDA = {"float32": 0, "float16": 2, "bfloat16": 14, E4M3FN.name: 28, E5M2.name: 29}  # cudaDataType_t
_COMPUTE_32F, _SPLIT_K, _WORKSPACE = 68, 2, 1
# cublasLtMatmulDescAttributes_t
_TRANS_A, _TRANS_B, _SCALE_A, _SCALE_B, _FAST, _MODE_A, _MODE_B = 3, 4, 17, 18, 25, 31, 32
# Attribute -> the number of bytes of its value, a little-endian integer
_BYTES = {**dict.fromkeys((_TRANS_A, _TRANS_B, _MODE_A, _MODE_B), 4), _SCALE_A: 8, _SCALE_B: 8, _FAST: 1}


class Query(NamedTuple):
    """One GEMM as cuBLAS sees it: its first operand is `b`, its matrices are columns."""

    types: tuple[int, int, int]  # the types of b, a and the output
    layouts: tuple[tuple[int, int, int], ...]  # rows, columns and leading dimension of b, a and the output
    attributes: tuple[tuple[int, int], ...]
    workspace_bytes: int


def query_of(gemm: PlannedGemm) -> Query:
    """The question that torch asks cuBLAS for a GEMM."""
    m, n, k = gemm.rows, gemm.n, gemm.k
    first, second = (letter == "t" for letter in gemm.layout_seen)
    layouts = ((k, n, k) if first else (n, k, n), (m, k, m) if second else (k, m, k), (n, m, n))
    attributes = [(_TRANS_A, int(first)), (_TRANS_B, int(second))]
    (a, b), out = gemm.call.formats, gemm.call.out.name
    if gemm.granularities is None:
        out = "float32" if out == "float16" else out  # which is rounded afterwards
    else:
        granularity_a, granularity_b = gemm.granularities
        # the scales' addresses are never read, but must be there
        attributes += [(_SCALE_A, 1 << 40), (_SCALE_B, 1 << 41), (_FAST, int(gemm.call.use_fast_accum))]
        attributes += [(_MODE_A, _SCALE_MODES[granularity_b]), (_MODE_B, _SCALE_MODES[granularity_a])]
    types = _CUDA[b.name], _CUDA[a.name], _CUDA[out]
    return Query(types, layouts, tuple(attributes), WORKSPACE_BYTES[gemm.gemm])


class CublasLt:
    """The cublasLt at a path, which answers for the process's current GPU."""

    def __init__(self, path: str) -> None:
        self.lt = ctypes.CDLL(path)
        self.lt.cublasLtGetVersion.restype = c_size_t
        self.lt.cublasLtMatrixLayoutInit_internal.argtypes = [c_void_p, c_size_t, c_int, c_uint64, c_uint64, c_int64]
        self.handle = c_void_p()
        _checked("cublasLtCreate", self.lt.cublasLtCreate(byref(self.handle)))
        self.version: int = self.lt.cublasLtGetVersion()
        self._described = cache(self._described)

    def split_k(self, question: Query) -> int:
        """S of the one algorithm that the heuristic returns."""
        # 1. The layouts of the three matrices.
        lt = self.lt
        desc, preference = self._described(question.attributes, question.workspace_bytes)
        b, a, out, result = (ctypes.create_string_buffer(size) for size in (64, 64, 64, 256))
        for place, kind, sizes in zip((b, a, out), question.types, question.layouts, strict=True):
            _checked("layout", lt.cublasLtMatrixLayoutInit_internal(place, 64, kind, *sizes))
        # 2. The heuristic's one algorithm, as torch asks for it. 3. Its split of K.
        count, slices = c_int(), c_int32()
        operands = self.handle, desc, b, a, out, out
        status = lt.cublasLtMatmulAlgoGetHeuristic(*operands, preference, 1, result, byref(count))
        _checked("heuristic", status or count.value != 1)
        size = c_size_t(4)
        _checked("S", lt.cublasLtMatmulAlgoConfigGetAttribute(result, _SPLIT_K, byref(slices), size, byref(c_size_t())))
        return slices.value

    def _described(self, attributes: tuple[tuple[int, int], ...], workspace_bytes: int) -> tuple[Any, Any]:
        """The descriptor and the preference, which are read only, once for each kind of GEMM."""
        lt = self.lt
        desc, preference = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
        _checked("desc", lt.cublasLtMatmulDescInit_internal(desc, c_size_t(256), _COMPUTE_32F, _CUDA["float32"]))
        for name, value in attributes:
            data = value.to_bytes(_BYTES[name], "little")
            _checked(f"attribute {name}", lt.cublasLtMatmulDescSetAttribute(desc, name, data, c_size_t(len(data))))
        _checked("preference", lt.cublasLtMatmulPreferenceInit_internal(preference, c_size_t(64)))
        limit = workspace_bytes.to_bytes(8, "little")
        _checked("limit", lt.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE, limit, c_size_t(8)))
        return desc, preference


@lru_cache(maxsize=4096)
def split_k_at_hand(gemm: PlannedGemm) -> Split:
    """S of a GEMM on the GPU at hand, which is its chip: what the library says, else what the plan says.

    The library is not asked for rowwise GEMMs, which are never split, nor for unaligned ones [PLAN-5].
    """
    path = loaded_path()
    if path is not None and gemm.gemm != "rowwise" and gemm.is_aligned:
        with suppress(UnsupportedError):
            return Split(_library(path).split_k(query_of(gemm)), Source.ASKED)
    return split_k(gemm, chip=gemm.call.chip.plan)


def split_of(caller: str | None, call: GemmCall, layout: str = "tn", *, at_hand: bool = False) -> Split:
    """S of a GEMM [CHAIN-3]: the call's own; else the library's, if the GPU at hand is its chip; else the plan's.

    A warning of `caller` says once for a kind of GEMM that S is unknown; None warns of nothing. `layout` is that of the
    operands in the letters of cuBLAS, which counts in bfloat16.
    """
    if call.split_k is not None or 0 in call.sizes:
        return Split(call.split_k or 1, Source.RECORDED)
    gemm, chip = planned(call, layout), call.chip
    split = UNKNOWN
    if chip.plan:
        # The library at hand is the better source: the plan is a fit of its answers.
        split = split_k_at_hand(gemm) if at_hand else split_k(gemm, chip=chip.plan)
    if caller is not None and split.source is Source.UNKNOWN:
        _warn(caller, gemm)
    return split


_WARNED: set[tuple[str, str]] = set()  # (caller, chip) without a plan, and (caller, table) without an answer
_REMEDY = "If you know S, pass it to scaled_mm or mm as split_k; layers have no such argument"


def _warn(caller: str, gemm: PlannedGemm) -> None:
    plan = gemm.call.chip.plan
    key = caller, gemm.table if plan else str(gemm.call.chip)
    if key in _WARNED:
        return
    _WARNED.add(key)
    message = (
        f"{caller}: there is no split-K plan for {gemm.call.chip.with_evidence}; its GEMMs are emulated without "
        f"split-K. {_REMEDY}. This warning appears once"
    )
    if plan:
        message = (
            f"{caller}: the plan of {LIBRARY} on {plan} has no split-K for this GEMM: {gemm}. It is emulated without "
            "split-K, and has the hardware's bits if the hardware does not split K either. `f8emu record OUT --plans "
            f"IN.json` finds S on a GPU. {_REMEDY}. This warning appears once per kind of GEMM"
        )
    warnings.warn(message, stacklevel=5)


@cache
def _library(path: str) -> CublasLt:
    return CublasLt(path)


@cache
def loaded_path() -> str | None:
    """The path of the cublasLt that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if "libcublasLt.so" in line), None)


def _checked(call: str, status: int) -> None:
    if status:
        raise UnsupportedError(f"split_k: {call} of cublasLt returned {status}, so its split-K is unknown")

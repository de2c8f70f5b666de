"""S as the library of the GPU at hand chooses it [PLAN-7]: cuBLAS's own heuristic, called as torch calls it.

`cublasLtMatmulAlgoGetHeuristic` gets the descriptors and the workspace of torch 2.11 on a Hopper GPU; no GEMM runs. On
an NVIDIA H200 it agrees with every recorded row of tensorwise and bfloat16 GEMMs
(`benchmarks/results/split_k_asked-h200.json`).
"""

import ctypes
from ctypes import addressof, byref, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.spec.plan import BLOCKWISE_GEMMS, CHIP, LIBRARY, PlannedGemm, split_k
from f8emu.spec.scaling import Granularity

_FLOAT8 = ("tensorwise", *BLOCKWISE_GEMMS)
WORKSPACE_BYTES = {**dict.fromkeys(_FLOAT8, 1 << 20), "bfloat16": 32 << 20}
"""Torch's: [PLAN-4]."""
_TENSORWISE = (Granularity.TENSORWISE, Granularity.TENSORWISE)
_SCALE_MODES = {Granularity.BLOCKWISE_128X128: 5, Granularity.BLOCKWISE_1X128: 4, Granularity.TENSORWISE: 0}
"""cublasLtMatmulMatrixScale_t."""
_CUDA = {"float32": 0, "float16": 2, "bfloat16": 14, E4M3FN.name: 28, E5M2.name: 29}
"""cudaDataType_t."""
_COMPUTE_32F, _SPLIT_K = 68, 2
_TRANS_A, _TRANS_B, _SCALE_A, _SCALE_B, _FAST, _MODE_A, _MODE_B = 3, 4, 17, 18, 25, 31, 32
"""cublasLtMatmulDescAttributes_t."""
_WORKSPACE = 1


class Question(NamedTuple):
    """One GEMM as cuBLAS sees it: its first operand is `b`, its matrices are columns."""

    types: tuple[int, int, int]
    """The types of b, a and the output."""
    layouts: tuple[tuple[int, int, int], ...]
    """Rows, columns and leading dimension of b, a and the output."""
    attributes: tuple[tuple[int, Any], ...]
    workspace_bytes: int


def question(gemm: PlannedGemm) -> Question:
    """The question that torch asks cuBLAS for a GEMM."""
    m, n, k = gemm.rows, gemm.n, gemm.k
    first, second = (letter == "t" for letter in gemm.layout_asked)
    layouts = ((k, n, k) if first else (n, k, n), (m, k, m) if second else (k, m, k), (n, m, n))
    attributes: list[tuple[int, Any]] = [(_TRANS_A, c_int32(first)), (_TRANS_B, c_int32(second))]
    if gemm.gemm == "bfloat16":
        a = b = "float16" if gemm.out_dtype == "float16" else "bfloat16"  # torch.mm writes no other float16
    else:
        a, b = gemm.a_dtype, gemm.b_dtype
        # the scales' addresses are never read, but must be there
        attributes += [(_SCALE_A, c_uint64(1 << 40)), (_SCALE_B, c_uint64(1 << 41))]
        of_a, of_b = BLOCKWISE_GEMMS.get(gemm.gemm, _TENSORWISE)
        attributes += [(_FAST, c_int8(gemm.accumulation == "fast"))]
        attributes += [(_MODE_A, c_int32(_SCALE_MODES[of_b])), (_MODE_B, c_int32(_SCALE_MODES[of_a]))]
    types = _CUDA[b], _CUDA[a], _CUDA[gemm.out_dtype]
    return Question(types, layouts, tuple(attributes), WORKSPACE_BYTES[gemm.gemm])


class CublasLt:
    """The cublasLt that torch has loaded.

    Raises:
        UnsupportedError: torch has loaded none.
    """

    def __init__(self) -> None:
        self.lt = ctypes.CDLL(_path())
        self.lt.cublasLtGetVersion.restype = c_size_t
        self.lt.cublasLtMatrixLayoutInit_internal.argtypes = [c_void_p, c_size_t, c_int, c_uint64, c_uint64, c_int64]
        self.handle = c_void_p()
        _checked("cublasLtCreate", self.lt.cublasLtCreate(byref(self.handle)))
        self.version: int = self.lt.cublasLtGetVersion()

    def split_k(self, asked: Question) -> int:
        """S of the one algorithm that the heuristic returns."""
        lt, of = self.lt, [ctypes.create_string_buffer(size) for size in (256, 64, 64, 64, 64, 256)]
        desc, preference, b, a, out, result = (c_void_p(addressof(buffer)) for buffer in of)
        _checked("desc", lt.cublasLtMatmulDescInit_internal(desc, c_size_t(256), _COMPUTE_32F, _CUDA["float32"]))
        for name, value in asked.attributes:
            size = c_size_t(ctypes.sizeof(value))
            _checked(f"attribute {name}", lt.cublasLtMatmulDescSetAttribute(desc, name, byref(value), size))
        _checked("preference", lt.cublasLtMatmulPreferenceInit_internal(preference, c_size_t(64)))
        limit, size = c_size_t(asked.workspace_bytes), c_size_t(ctypes.sizeof(c_size_t))
        _checked("limit", lt.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE, byref(limit), size))
        for place, kind, sizes in zip((b, a, out), asked.types, asked.layouts, strict=True):
            _checked("layout", lt.cublasLtMatrixLayoutInit_internal(place, 64, kind, *sizes))
        count, slices = c_int(), c_int32()
        found = lt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, desc, b, a, out, out, preference, 1, result, byref(count)
        )
        _checked("heuristic", found or count.value != 1)
        size = c_size_t(4)
        _checked("S", lt.cublasLtMatmulAlgoConfigGetAttribute(result, _SPLIT_K, byref(slices), size, byref(c_size_t())))
        return slices.value


def asked_split_k(gemm: PlannedGemm) -> int:
    """S of a GEMM, as the library says; 1 of a rowwise one, which is never split.

    Raises:
        UnsupportedError: torch has loaded no cublasLt, or the library has no answer.
    """
    return 1 if gemm.gemm == "rowwise" else _library().split_k(question(gemm))


def split_k_on_this_gpu(gemm: PlannedGemm) -> int:
    """S of a GEMM: the shipped plan's if that is for this GPU and library, else the library's.

    Raises:
        UnsupportedError: torch has loaded no cublasLt, or the library has no answer.
    """
    return split_k(gemm).split_k if _is_gpu_of_the_plan() else asked_split_k(gemm)


@cache
def _is_gpu_of_the_plan() -> bool:
    major, minor, patch = (int(part) for part in LIBRARY.split()[-1].split(".")[:3])
    return torch.cuda.get_device_name() == CHIP and _library().version == 10000 * major + 100 * minor + patch


@cache
def _library() -> CublasLt:
    return CublasLt()


def _path() -> str:
    one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    _ = one @ one  # torch loads the library when it needs it
    loaded = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    path = next((path for path in loaded if "libcublasLt.so" in path), None)
    if path is None:
        raise UnsupportedError("split_k: torch has not loaded libcublasLt, which chooses the split-K")
    return path


def _checked(call: str, status: int) -> None:
    if status:
        raise UnsupportedError(f"split_k: {call} of cublasLt returned {status}, so its split-K is unknown")

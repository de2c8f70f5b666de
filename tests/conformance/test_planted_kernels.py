"""The families of GEMMs test themselves: planted kernels, each right but for one condition, and none may pass.

A planted kernel gets what the suite gave to a kernel, and the right output, which is computed once for all of them: it
returns that output, altered where its condition holds. The engine computes it, where there is one: tests/native holds
its bits to the oracle's.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from f8emu.conformance.cases.distributions import codes_of
from f8emu.conformance.cases.gemm import Family, Memory, NotOffered, Sample
from f8emu.conformance.cases.tables import gemm_cases
from f8emu.conformance.compare import different
from f8emu.conformance.kernels.kernel import BLOCKWISE_1X128_128X128, K_BY_ROWS, Arg, Kernel
from f8emu.conformance.run.subject import kernel_subject, scaled_mm_kernel
from f8emu.numpy import emulation as f8
from f8emu.spec import Granularity

ROWWISE = Granularity.ROWWISE
DENSE, BLOCKS, GROUPED = "dense", "block scales", "grouped"
EVERYWHERE = (Family.SCALES, Family.TURNS)
SIZES = (Family.ROW, Family.ROWS, Family.COLUMNS, Family.TILES, Family.K, Family.DECODE, Family.PREFILL)
MEMORY = (Family.ALIGNMENT, Family.ALIASES)
FAMILIES: dict[str, tuple[Family, ...]] = {
    DENSE: (*EVERYWHERE, *SIZES, *MEMORY, Family.EVERY_CODE, Family.BIAS, Family.STRIDES),
    BLOCKS: (*EVERYWHERE, *SIZES, *MEMORY, Family.EVERY_CODE),
    GROUPED: (*EVERYWHERE, Family.GROUPS, Family.BEHIND),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call as the kernel gets it."""

    kind: str
    a: np.ndarray  # [M, K]
    b: np.ndarray  # [K, N]; grouped [groups, K, N]
    scale_a: np.ndarray  # one, [M, 1] or [M, K/128]; grouped [M]
    scale_b: np.ndarray  # one, [1, N] or [K/128, N/128]; grouped [groups, N]
    bias: np.ndarray | None = None
    offs: np.ndarray | None = None
    out_dtype: str
    fast: bool = False
    right: np.ndarray

    @property
    def m(self) -> int:
        return self.right.shape[0]

    @property
    def n(self) -> int:
        return self.right.shape[1]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def is_rowwise(self) -> bool:
        return self.scale_a.ndim > 0

    def redone(self, **changes: Any) -> np.ndarray:
        """The output of other arguments; the right one where they are the same."""
        changed = {
            name: x for name, x in changes.items() if name == "fast" or x.tobytes() != getattr(self, name).tobytes()
        }
        return gemm(replace(self, **changed)) if changed else self.right


def gemm(call: Call) -> np.ndarray:
    arrays = np.ascontiguousarray(call.a), np.array(call.b.swapaxes(-1, -2), order="C").swapaxes(-1, -2)
    scales, out = (call.scale_a, call.scale_b), call.out_dtype
    if call.offs is not None:
        return f8.scaled_grouped_mm(*arrays, *scales, call.offs, out_dtype=out, use_fast_accum=call.fast)
    pair = Granularity.TENSORWISE, Granularity.TENSORWISE
    if call.is_rowwise:
        pair = (ROWWISE, ROWWISE) if call.kind == DENSE else next(iter(BLOCKWISE_1X128_128X128))
    options = {"granularity_a": pair[0], "granularity_b": pair[1], "bias": call.bias}
    return f8.scaled_mm(*arrays, *scales, **options, out_dtype=out, use_fast_accum=call.fast)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The calls of one case, one or several in turn."""

    family: Family
    calls: tuple[Call, ...]
    samples: tuple[Sample | None, ...]
    """The outputs of each call that are judged."""


def recorder(kind: str, run: Callable[..., np.ndarray]) -> Kernel:
    """A kernel of any size that calls `run` with names."""
    operands = {"a": Arg.A, "b": Arg.B, "scale_a": Arg.SCALE_A, "scale_b": Arg.SCALE_B, "out_dtype": Arg.OUT_DTYPE}
    declared: dict[str, Any] = {"name": kind, "function": run, "arguments": (), "arrays": "numpy"}
    if kind == DENSE:
        keywords = {**operands, "bias": Arg.BIAS, "fast": Arg.USE_FAST_ACCUM}
        return replace(scaled_mm_kernel(kind, run), **declared, keywords=keywords, multiples=(1, 1, 1))
    if kind == GROUPED:
        keywords = {**operands, "offs": Arg.OFFS, "fast": Arg.USE_FAST_ACCUM}
        return Kernel(**declared, keywords=keywords, b=K_BY_ROWS, multiples=(1, 1, 1))
    scales = {pair: (a, replace(b, k_first=True)) for pair, (a, b) in BLOCKWISE_1X128_128X128.items()}
    return Kernel(**declared, keywords=operands, b=K_BY_ROWS, scales=scales, block_multiples=(1, 1, 1))


@cache
def asked(kind: str) -> tuple[Asked, ...]:
    """All cases of a kernel that takes any size."""
    seen: list[Call] = []

    def run(out_dtype: np.dtype, **arguments: Any) -> np.ndarray:
        call = Call(kind=kind, **arguments, out_dtype=out_dtype.name, right=np.empty((0, 0)))
        seen.append(replace(call, right=gemm(call)))
        return seen[-1].right

    subject = kernel_subject(recorder(kind, run))
    cases: list[Asked] = []
    met = {""}
    for case in (*gemm_cases(), *subject.more_gemms()):
        question = subject.question(case)
        seen.clear()
        # What is changed in place cannot be kept; that, and no rows, are asked below.
        is_kept = question.memory is Memory.NEW and question.output_shape[0]
        if not is_kept or (question.one_of and question.one_of in met):
            continue
        with suppress(NotOffered):
            subject.outputs(question)
            met.add(question.one_of)
            samples = tuple(turn.sample for turn in question.in_turn.values())
            cases.append(Asked(family=question.family, calls=tuple(seen), samples=samples))
    return tuple(cases)


Planted = Callable[[Call], np.ndarray]
New = Callable[[], Planted]
"""A kernel that has not been called."""


def altered(condition: Callable[[Call], bool], rows: Any = slice(None), cols: Any = slice(None)) -> New:
    """Where the condition holds, some rows and columns are zero, or one where they were."""

    def kernel(call: Call) -> np.ndarray:
        if not condition(call) or not call.right[rows, cols].size:
            return call.right
        out = call.right.copy()
        out[rows, cols] = np.where(out[rows, cols] == 0, np.ones_like(out[rows, cols]), np.zeros_like(out[rows, cols]))
        return out

    return lambda: kernel


def redone(change: Callable[[Call], dict[str, Any]]) -> New:
    """The right GEMM of other arguments."""
    return lambda: lambda call: call.redone(**change(call))


def each_scale(function: Callable[[np.ndarray], np.ndarray], *sides: str) -> New:
    """Both scales, or one, changed before they are used."""

    def change(call: Call) -> dict[str, Any]:
        names = [f"scale_{side}" for side in sides or "ab"]
        return {name: np.asarray(function(getattr(call, name)), np.float32) for name in names}

    return redone(change)


def each_bias(function: Callable[[np.ndarray], np.ndarray]) -> New:
    def change(call: Call) -> dict[str, Any]:
        bias = call.bias
        return {} if bias is None else {"bias": function(bias.astype(np.float32)).astype(bias.dtype)}

    return redone(change)


def each_output(function: Callable[[np.ndarray], np.ndarray]) -> New:
    return lambda: lambda call: function(call.right.copy())


def always(call: Call) -> bool:
    return True


def tile_scales_swapped(call: Call) -> dict[str, Any]:
    """The last tile of 128 rows has the scales of the first."""
    if not call.is_rowwise or call.m < 256:
        return {}
    scale = call.scale_a.copy()
    scale[call.m // 128 * 128 :] = scale[: call.m % 128]
    return {"scale_a": scale}


def without_tail(call: Call) -> dict[str, Any]:
    if call.k < 4096 or call.k % 128 == 0:
        return {}
    return {"a": call.a[:, : call.k // 128 * 128], "b": call.b[: call.k // 128 * 128]}


def as_if_packed(operand: np.ndarray) -> np.ndarray:
    """Rows read with a stride of K, though they are apart."""
    return strided(operand, operand.shape[1], operand.shape[1])


def strided(operand: np.ndarray, columns: int, pitch: int) -> np.ndarray:
    shape = len(operand), columns
    return np.lib.stride_tricks.as_strided(codes_of(operand), shape, (pitch, 1)).view(operand.dtype)


def beyond_k(call: Call) -> dict[str, Any]:
    """Reads the whole stride of a, with what is between the rows."""
    pitch = call.a.strides[0]
    if pitch == call.k or call.m < 2:
        return {}
    a = strided(call.a, pitch, pitch)
    b = np.concatenate([call.b.T, np.ones((call.n, pitch - call.k), call.b.dtype)], axis=1).T
    return {"a": a, "b": b}


def boundary(array: np.ndarray, bytes_: int) -> bool:
    return array.ctypes.data % bytes_ == 0


def buffers(buffer_of: Callable[[np.ndarray], Any], least: int = 0) -> New:
    """Outputs for which `buffer_of` is equal are in the same memory."""

    def new() -> Planted:
        known: dict[Any, np.ndarray] = {}

        def kernel(call: Call) -> np.ndarray:
            right, name = call.right, buffer_of(call.right)
            if name not in known:
                known[name] = np.zeros(max(right.nbytes, least), np.uint8)
            out = known[name][: right.nbytes].view(right.dtype).reshape(right.shape)
            out[:] = right
            return out

        return kernel

    return new


buffer_of_a_shape = buffers(lambda right: (right.shape, right.dtype))


def adds_to_what_is_there() -> Planted:
    """Asked the same again it doubles."""
    known: set[bytes] = set()

    def kernel(call: Call) -> np.ndarray:
        key = call.right.tobytes()[:256] + bytes(str(call.right.shape), "ascii")
        if key in known:
            with np.errstate(over="ignore"):
                return call.right + call.right
        known.add(key)
        return call.right

    return kernel


def scale_of_an_earlier_call() -> Planted:
    """The scale of b is looked up by the codes of b."""
    scales: dict[bytes, np.ndarray] = {}

    def kernel(call: Call) -> np.ndarray:
        key = call.b.tobytes() if call.b.size < 10_000 else b""
        return call.redone(scale_b=scales.setdefault(key, call.scale_b)) if key else call.right

    return kernel


def nan_codes_as_numbers(call: Call) -> dict[str, Any]:
    """All codes of NaN but the canonical one are the largest number."""
    changed = {}
    every = np.arange(256, dtype=np.uint8)
    for name in "ab":
        x = getattr(call, name)
        canonical = 0x7F if x.dtype.name == "float8_e4m3fn" else 0x7E
        is_special = np.isnan(every.view(x.dtype).astype(np.float32)) & (every != canonical)
        special = is_special[codes_of(x)]
        if special.any():
            changed[name] = np.where(special, 0x7B, codes_of(x)).astype(np.uint8).view(x.dtype)
    return changed


def subnormal(x: np.ndarray) -> np.ndarray:
    return (x != 0) & (np.abs(x) < 2.0**-126)


def pair_of(call: Call) -> tuple[str, str]:
    return call.a.dtype.name[7:], call.b.dtype.name[7:]


PLANTED: dict[str, New] = {
    # what passed before there were families
    "rows from 64 on": altered(always, rows=slice(64, None)),
    "columns from 128 on": altered(always, cols=slice(128, None)),
    "scales of rows from 128 on": each_scale(
        lambda s: np.where(np.arange(s.size) < 128, s.T, 1).T if s.ndim else s, "a"
    ),
    "one row": altered(lambda c: c.m == 1),
    "M of 2,000": altered(lambda c: c.m >= 2000),
    "N of 2,000": altered(lambda c: c.n >= 2000),
    "K of 8,000": altered(lambda c: c.k >= 8000),
    "rows of a apart": redone(lambda c: {"a": as_if_packed(c.a)}),
    "a buffer that the next call overwrites": buffers(lambda right: 0, least=1 << 25),
    "subnormal scales flushed": each_scale(lambda s: np.where(subnormal(s), 0, s)),
    "subnormal bias flushed": each_bias(lambda x: np.where(np.abs(x) < 6.2e-5, x * 0, x)),
    "-0 of the bias": each_bias(lambda x: x + np.float32(0)),
    "sign of scales": each_scale(np.abs),
    "NaN scales are finite": each_scale(np.nan_to_num),
    # sizes
    "M of 3": altered(lambda c: c.m == 3),
    "odd M, the last row": altered(lambda c: c.m % 2 == 1 and c.m > 16, rows=slice(-1, None)),
    "M of 65 to 128": altered(lambda c: 64 < c.m <= 128),
    "M a multiple of 256": altered(lambda c: c.m % 256 == 0, rows=slice(-1, None)),
    "rows from 4096 on": altered(always, rows=slice(4096, None)),
    "rows from 65536 on": altered(always, rows=slice(65536, None)),
    "odd N, the last column": altered(lambda c: c.n % 2 == 1, cols=slice(-1, None)),
    "one column": altered(lambda c: c.n == 1),
    "N of 257 to 512": altered(lambda c: 256 < c.n <= 512, cols=slice(-1, None)),
    "columns from 4096 on": altered(always, cols=slice(4096, None)),
    "columns from 65536 on": altered(always, cols=slice(65536, None)),
    "the tile at row 256 and column 256": altered(always, rows=slice(256, 384), cols=slice(256, 384)),
    "tiles of many steps": altered(lambda c: c.m > 128 and c.n > 128 and c.k > 512, rows=slice(128, None)),
    "many rows of many steps": altered(lambda c: c.m > 512 and c.k > 512),
    "one row of a long K": altered(lambda c: c.m == 1 and c.k > 4096),
    "a tail of a long K": redone(without_tail),
    "K of one step": altered(lambda c: c.k <= 32 and c.fast, rows=slice(1)),
    "K a multiple of 4096": altered(lambda c: c.k % 4096 == 0),
    "fast, and promoted beyond 8192": redone(lambda c: {"fast": False} if c.fast and c.k > 8192 else {}),
    "promoted, and fast beyond 16384": redone(lambda c: {"fast": True} if not c.fast and c.k > 16384 else {}),
    "e5m2 in b beyond row 128": altered(lambda c: pair_of(c)[1] == "e5m2", rows=slice(128, None)),
    "e5m2 in a beyond column 300": altered(lambda c: pair_of(c)[0] == "e5m2" and not c.fast, cols=slice(300, None)),
    "float16 beyond row 256": altered(lambda c: c.out_dtype == "float16", rows=slice(256, None)),
    "scales of the last tile": redone(tile_scales_swapped),
    "scales of columns from 256 on": each_scale(
        lambda s: np.where(np.arange(s.size) < 256, s, 2) if s.ndim else s, "b"
    ),
    "bias beyond column 256": altered(lambda c: c.bias is not None, cols=slice(256, None)),
    "one row and an odd N": altered(lambda c: c.m == 1 and c.n % 2 == 1),
    "odd M of several tiles": altered(lambda c: c.m % 2 == 1 and c.m > 128 and c.n > 128, rows=slice(128, None)),
    "bias beside one row": altered(lambda c: c.bias is not None and c.m == 1),
    "many rows of a long K": altered(lambda c: c.m > 64 and c.k >= 2048, rows=slice(-1, None)),
    "many columns of a long K": altered(lambda c: c.n > 48 and c.k >= 2048, cols=slice(-1, None)),
    "2,048 rows of a long K": altered(lambda c: c.m >= 2048 and c.k >= 2048),
    "2,048 columns of a long K": altered(lambda c: c.n >= 2048 and c.k >= 2048 and c.m > 1),
    "2,048 rows and columns": altered(lambda c: c.m >= 2048 and c.n >= 2048),
    "a second wave of tiles": altered(
        lambda c: min(c.m, c.n) > 128 and -(-c.m // 128) * -(-c.n // 128) > 132, rows=slice(-1, None)
    ),
    "several tiles of a long K": altered(lambda c: c.m > 128 and c.n > 128 and c.k >= 4096),
    "one row of many columns and a long K": altered(lambda c: c.m == 1 and c.n >= 4096 and c.k >= 2048),
    "K of 65,536": altered(lambda c: c.k >= 65536),
    # what real layers meet
    "decode": altered(lambda c: c.m <= 64 and c.n >= 4096 and c.k >= 4096 and c.m > 1),
    "decode, one row": altered(lambda c: c.m == 1 and c.n >= 4096 and c.k >= 4096, cols=slice(-128, None)),
    "prefill": altered(lambda c: c.m >= 512 and c.n >= 1024 and c.k >= 1024),
    "prefill, the last tile": altered(
        lambda c: c.m >= 512 and c.n >= 1024 and c.k >= 1024, rows=slice(-128, None), cols=slice(-128, None)
    ),
    "stream-K": altered(lambda c: tiles_of(c) > 132 and c.k >= 256 and c.m > 128),
    "stream-K, the tile after the first wave": altered(
        lambda c: tiles_of(c) > 132 and c.k >= 256 and c.m > 128, rows=slice(128, None), cols=slice(8448, 8576)
    ),
    **{f"M of {m}": altered(lambda c, m=m: c.m == m) for m in (96, 320, 448, 576, 640, 896)},
    "steps of zeros skipped": redone(lambda c: without_idle_steps(c, "a", "b")),
    "steps of zeros in b skipped": redone(lambda c: without_idle_steps(c, "b", "a")),
    # values, strides and sizes
    "tensorwise subnormal scale of many rows": altered(
        lambda c: not c.is_rowwise and c.m >= 64 and bool(subnormal(c.scale_a))
    ),
    "tensorwise infinite scale of many rows": altered(
        lambda c: not c.is_rowwise and c.m >= 64 and bool(np.isinf(c.scale_b)), rows=slice(64, None)
    ),
    "negative tensorwise scale of one row": altered(lambda c: not c.is_rowwise and c.m == 1 and bool(c.scale_a < 0)),
    "negative scales of a long K": altered(lambda c: c.is_rowwise and c.k >= 1024 and bool((c.scale_a < 0).any())),
    "negative scales of columns beyond 272": each_scale(
        lambda s: np.where(np.arange(s.size) < 272, s, np.abs(s)) if s.ndim else s, "b"
    ),
    "padded, one row": altered(lambda c: c.m == 1 and c.b.strides[1] > c.k),
    "padded, few rows of a long K": altered(lambda c: 1 < c.m < 48 and c.k >= 512 and c.a.strides[0] > c.k),
    "padded, 256 rows": altered(lambda c: c.m >= 256 and c.a.strides[0] > c.k, rows=slice(256, None)),
    # memory
    "columns of b apart": redone(lambda c: {"b": as_if_packed(c.b.T).T}),
    "reads between the rows": redone(beyond_k),
    "a 16 bytes from a boundary": altered(lambda c: not boundary(c.a, 32), rows=slice(1)),
    "b 64 bytes from a boundary": altered(lambda c: boundary(c.b, 64) and not boundary(c.b, 128)),
    "both between boundaries": altered(lambda c: not boundary(c.a, 256) and not boundary(c.b, 256)),
    "scale_a between 16 bytes": altered(lambda c: not boundary(c.scale_a, 16)),
    "scale_b between 16 bytes": altered(lambda c: not boundary(c.scale_b, 16) and c.is_rowwise),
    "bias between 16 bytes": altered(lambda c: c.bias is not None and not boundary(c.bias, 16)),
    "rows of a far apart": altered(lambda c: c.m > 1 and c.a.strides[0] - c.k > 512),
    "a row whose stride is not K": altered(lambda c: c.m == 1 and c.a.strides[0] < c.k),
    "a and b in one memory": altered(lambda c: np.shares_memory(c.a, c.b)),
    "one tensor as both scales": altered(lambda c: np.shares_memory(c.scale_a, c.scale_b), rows=slice(1)),
    # values
    "NaN codes": redone(nan_codes_as_numbers),
    "a begins with 0x53": altered(lambda c: codes_of(c.a)[0, 0] == 0x53, rows=slice(1)),
    "b ends with 0x80": altered(lambda c: codes_of(c.b)[-1, -1] == 0x80, cols=slice(-1, None)),
    "b ends with NaN": altered(lambda c: codes_of(c.b)[-1, -1] == 0xFF, cols=slice(1)),
    "scale of zero": each_scale(lambda s: np.where(s == 0, 1, s), "a"),
    "-0 as scale": each_scale(lambda s: s + np.float32(0), "b"),
    "infinite scales are the largest number": each_scale(lambda s: np.clip(s, -3.4028235e38, 3.4028235e38), "b"),
    "huge scales": each_scale(lambda s: np.where(np.abs(s) > 1e36, np.inf, s), "b"),
    "negative scales of one side": each_scale(np.abs, "b"),
    "NaN as scale of b": each_scale(lambda s: np.where(np.isnan(s), 0, s), "b"),
    "NaN as scale beyond row 128": each_scale(
        lambda s: np.where(np.isnan(s) & (np.arange(s.size)[:, None] >= 128), 1, s) if s.ndim else s, "a"
    ),
    "tensorwise scales one after the other": lambda: one_after_the_other,
    "infinity times zero": each_output(lambda x: np.where(np.isnan(x), np.zeros_like(x), x)),
    "subnormal results": each_output(lambda x: np.where(subnormal(x.astype(np.float32)), np.zeros_like(x), x)),
    "-0 as result": each_output(lambda x: np.where(x == 0, np.zeros_like(x), x)),
    "-0 under a negative tensorwise scale": lambda: minus_zero_kept,
    "infinite bias": each_bias(lambda x: np.where(np.isinf(x), 0, x)),
    "NaN as bias": each_bias(lambda x: np.where(np.isnan(x), 0, x)),
    "large bias": each_bias(lambda x: np.where(np.abs(x) > 1e4, 1e4, x)),
    "NaN as bias beyond column 128": each_bias(lambda x: np.where(np.isnan(x) & (np.arange(x.size) > 128), 0, x)),
    # order of calls
    "a buffer for each shape": buffer_of_a_shape,
    "asked again it adds": adds_to_what_is_there,
    "scale of an earlier call": scale_of_an_earlier_call,
}
"""Name: where it is wrong -> the kernel, anew."""


def tiles_of(call: Call) -> int:
    return -(-call.m // 128) * -(-call.n // 128)


def without_idle_steps(call: Call, idle: str, other: str) -> dict[str, Any]:
    """A step of K is skipped if all codes of one operand are zeros in it, whatever the other has."""
    operands = {"a": call.a, "b": call.b.T}
    is_zero = (codes_of(np.ascontiguousarray(operands[idle])) & 0x7F == 0).all(axis=0)
    steps = [step for step in range(0, call.k, 32) if is_zero[step : step + 32].all()]
    if not steps:
        return {}
    full = np.array(operands[other])
    for step in steps:
        full[:, step : step + 32] = 0
    return {other: full if other == "a" else full.T}


def one_after_the_other(call: Call) -> np.ndarray:
    """acc * scale_a * scale_b in place of acc * (scale_a * scale_b) [EPI-1], where the product is beyond float32."""
    if call.is_rowwise or call.out_dtype != "float32":
        return call.right
    with np.errstate(all="ignore"):
        product = call.scale_a * call.scale_b
        if np.isfinite(product) and product != 0:
            return call.right
        return (call.redone(scale_a=np.float32(1), scale_b=np.float32(1)) * call.scale_a) * call.scale_b


def minus_zero_kept(call: Call) -> np.ndarray:
    """acc * (scale_a * scale_b) without + 0 [EPI-1]."""
    if call.is_rowwise or call.bias is not None or not call.scale_a * call.scale_b < 0:
        return call.right
    return np.where(call.right == 0, -np.zeros_like(call.right), call.right)


BLOCK_PLANTED: dict[str, New] = {
    "one row": altered(lambda c: c.m == 1),
    "one row of few columns": altered(lambda c: c.m == 1 and c.n < 64),
    "rows from 2048 on": altered(always, rows=slice(2048, None)),
    "columns from 2048 on": altered(always, cols=slice(2048, None)),
    "the tile at row 256 and column 384": altered(always, rows=slice(256, None), cols=slice(384, None)),
    "K of 8,000": altered(lambda c: c.k >= 8000),
    "several tiles of a long K": altered(lambda c: c.m > 64 and c.n > 64 and c.k >= 2048),
    "a tail of K": altered(lambda c: c.k % 128 != 0 and c.k > 512, rows=slice(-1, None)),
    "the scale of the last block of rows": redone(
        lambda c: {"scale_b": np.where(np.arange(c.scale_b.shape[1]) > 2, 1, c.scale_b).astype(np.float32)}
    ),
    "scales turned": redone(lambda c: {"scale_b": np.ravel(c.scale_b).reshape(c.scale_b.shape, order="F")}),
    "negative scales": each_scale(np.abs),
    "NaN as scale": each_scale(lambda s: np.where(np.isnan(s), 0, s), "b"),
    "subnormal scales": each_scale(lambda s: np.where(subnormal(s), 0, s), "a"),
    "NaN codes": altered(lambda c: codes_of(c.b)[-1, -1] == 0xFF, cols=slice(1)),
    "b between boundaries": altered(lambda c: not boundary(c.b, 64)),
    "prefill": altered(lambda c: c.m >= 512 and c.k >= 512 and c.n >= 128),
    "decode": altered(lambda c: c.m <= 64 and c.n >= 2048 and c.k >= 1024),
    "a large grid of scales": altered(lambda c: c.m > 1 and min(c.scale_b.shape) > 8, cols=slice(-1, None)),
    "a and b in one memory": altered(lambda c: np.shares_memory(c.a, c.b)),
    "steps of zeros skipped": redone(lambda c: without_idle_steps(c, "a", "b")),
    "a buffer for each shape": buffer_of_a_shape,
}
GROUP_PLANTED: dict[str, New] = {
    "the last group": altered(lambda c: sizes(c)[-1] > 0, rows=slice(-1, None)),
    "odd ends": redone(lambda c: {"offs": (ends(c) + ends(c) % 2).clip(max=c.m).astype(np.int32)}),
    "one row in a group": altered(lambda c: 1 in sizes(c)),
    "behind an empty group": altered(lambda c: 0 in sizes(c)[:-1], rows=slice(-1, None)),
    "an empty group at the end": altered(lambda c: sizes(c)[-1] == 0, rows=slice(1)),
    "one group": altered(lambda c: len(sizes(c)) == 1),
    "many groups": altered(lambda c: len(sizes(c)) > 16),
    "several tiles of a group": altered(lambda c: max(sizes(c)) > 256, rows=slice(256, None)),
    "columns from 256 on": altered(always, cols=slice(256, None)),
    "K of 4,000": altered(lambda c: c.k >= 4000),
    "512 columns": altered(lambda c: c.n >= 512),
    "512 columns of a long K": altered(lambda c: c.n >= 512 and c.k >= 512),
    "64 groups": altered(lambda c: len(sizes(c)) >= 64, rows=slice(-1, None)),
    "256 groups": altered(lambda c: len(sizes(c)) >= 256, rows=slice(-1, None)),
    "4,096 rows": altered(lambda c: c.m >= 4096, rows=slice(4000, 4001)),
    "rows behind the last group": lambda: rows_behind_left,
    "rows behind, and the last group": altered(lambda c: ends(c)[-1] < c.m, rows=slice(1)),
    "NaN as scale": each_scale(lambda s: np.where(np.isnan(s), 1, s), "a"),
    "negative scales": each_scale(np.abs, "b"),
    "a buffer for each shape": buffer_of_a_shape,
}


def rows_behind_left(call: Call) -> np.ndarray:
    out = call.right.copy()
    out[ends(call)[-1] :] = 1
    return out


KINDS = {DENSE: PLANTED, BLOCKS: BLOCK_PLANTED, GROUPED: GROUP_PLANTED}


def ends(call: Call) -> np.ndarray:
    assert call.offs is not None
    return call.offs


def sizes(call: Call) -> list[int]:
    return np.diff(ends(call), prepend=0).tolist()


def caught_by(kind: str, kernel: Planted) -> set[Family]:
    """Up to two families with a case that is not equal; outputs are looked at after the last call of each case."""
    families: set[Family] = set()
    for case in asked(kind):
        if len(families) < 2 and (case.family not in families or case.family is Family.TURNS):
            with np.errstate(all="ignore"):
                outputs = [kernel(call) for call in case.calls]
            for output, call, at in zip(outputs, case.calls, case.samples, strict=True):
                judged = slice(None) if at is None else np.ix_(at.rows, at.cols)
                if output is not call.right and different(output[judged], call.right[judged]).any():
                    families.add(case.family)
    return families


@pytest.mark.parametrize("kind", KINDS)
def test_no_planted_kernel_passes(kind: str) -> None:
    """And each family is needed: without it one would. One test a kind, for the cases are asked once."""
    caught = {name: caught_by(kind, kernel()) for name, kernel in KINDS[kind].items()}
    assert [name for name, families in caught.items() if not families] == []
    needed = {family for families in caught.values() if len(families) == 1 for family in families}
    assert [family for family in FAMILIES[kind] if family not in needed] == []

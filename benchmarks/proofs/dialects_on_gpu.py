"""The rules of f8emu.dialects against the kernels of their stacks, on a GPU: every byte of codes and scales.

    python -m benchmarks.proofs.dialects_on_gpu --sources FOLDER --libraries FOLDER --json OUT

`--libraries`: the stacks' CUDA kernels, compiled. `*.so` registers operators of torch, or exports functions.
`--sources`: files of the stacks, from which functions of torch and Triton are taken by their names. Packages are
imported. A case whose kernel is not there is not run, and says why. Every stack runs in a process of its own.

Tables: amaxes at every mantissa and next to floors and powers of two, with values at the ties of float8 codes; normal
numbers; and blocks with NaN and infinity. Where bytes differ, the rules nearest to them are searched for. Exit status 1
if a kernel differs from its dialect by more than the dialect says.
"""

import ast
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from benchmarks.runner import DEVICE, Bench, Entry, compile_without_limits, draw, option, say
from f8emu.dialects import DIALECTS, Dialect, dialect_by_name, quantize
from f8emu.dialects.rules import (
    COLUMN,
    GROUP,
    MX_GROUP,
    ROW,
    SQUARE,
    TENSOR,
    Arithmetic,
    Block,
    CodeRule,
    Division,
    NanCode,
    PowerOfTwo,
    ScaleForm,
)
from f8emu.interop.arrays import to_numpy, to_torch

Array = np.ndarray[Any, Any]
Result = tuple[torch.Tensor | None, torch.Tensor | None]
"""Codes and scales, of which a kernel may give one alone."""
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
E4M3, HALVES = torch.float8_e4m3fn, ("bfloat16", "float16")
MAX = 448.0
BENCH = Bench(
    "benchmarks.proofs.dialects_on_gpu",
    __doc__,
    option("sources", Path("sources")),
    option("libraries", Path("libraries")),
    option("stacks", ("all",)),
    option("seconds", 300, "how long the stacks may take together"),
    option("keep", Path, "folder for the first bytes of the cases that differ"),
    DEVICE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel, and the dialect whose bytes it should give."""

    name: str
    dialect: Dialect
    block: Block
    run: Callable[[torch.Tensor], Result]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    rows: int = 1
    """How often the table is repeated."""
    range: tuple[float, float] = (0.0, math.inf)
    """Finite values of other magnitudes are 0 in the table."""
    kinds: tuple[str, ...] = ("finite", "special")


# 1 Tables


def tables(dtype: np.dtype[Any], block: Block, *, special: bool, repeat: int = 1) -> list[Array]:
    """Matrices of blocks: amaxes of `_amaxes` and values at ties, then normal numbers; or blocks with NaN and inf."""
    rng = np.random.default_rng(20261126)
    if block == TENSOR:
        count, height, width = 192, 16, 256
    else:
        height, width = block[0] or 1, block[1] or 512
        count = {SQUARE: 256, ROW: 1536}.get(block, 3072)
    across = 1 if block in (TENSOR, ROW) else max(1, 512 // width)
    amax = _amaxes(dtype, count, rng)
    size = height * width
    values = _shares(rng, count, size) * amax.astype(np.float64)[:, None]
    with np.errstate(all="ignore"):
        values = values.astype(dtype)
    values[np.arange(count), rng.integers(0, size, count)] = amax * rng.choice(np.array([-1, 1], dtype), count)
    if special:
        values = values[: max(across, count // 8) // across * across]
        what = np.array([np.nan, np.inf, -np.inf, -np.nan, np.nan], dtype)
        for i, row in enumerate(values):
            row[rng.integers(0, size, 1 + i % 2)] = what[i % len(what)]
    else:
        normal = rng.standard_normal((count // 2 // across * across, size)) * np.exp2(
            rng.uniform(-12, 6, (count // 2 // across * across, 1))
        )
        values = np.concatenate([values, normal.astype(dtype)])
    if block == TENSOR:
        return [matrix.reshape(height, width) for matrix in values]
    down = len(values) // across
    matrix = values.reshape(down, across, height, width).swapaxes(1, 2).reshape(down * height, across * width)
    return [np.ascontiguousarray(np.tile(matrix, (repeat, 1)))]


def _amaxes(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Next to the floors and powers of two of the rules, at the ends of the dtype, and at every mantissa."""
    limits = ml_dtypes.finfo(dtype)
    edges = [1e-12, 1e-10, 1e-4, 448e-10, 448e-12, 1 / 512, 2.0**-24, 1e-42, 1e-38, 1e-30, 1.3e-36, 1e30, 3e38, 464.0]
    edges += [MAX * 2.0**k for k in range(-40, 12)] + [2.0**k for k in range(-30, 12, 3)]
    edges += [float(limits.smallest_subnormal), float(limits.tiny), float(limits.max)]
    with np.errstate(all="ignore"):
        near = np.array(edges).astype(dtype)
    near = near[np.isfinite(near.astype(np.float32)) & (near != 0)]
    bits = near.view(f"u{dtype.itemsize}")
    near = np.concatenate([bits, bits - 1, bits + 1]).view(dtype)
    near = np.concatenate([near[np.isfinite(near.astype(np.float32))], np.zeros(2, dtype)])
    near = near[rng.permutation(len(near))] if len(near) > count else near
    low, high = (-14, 8) if dtype == np.float16 else (-30, 12)
    rest = count - min(len(near), count)
    mantissas = 1 + (np.arange(rest) % 128) / 128 + (rng.random(rest) / 128 if dtype == np.float32 else 0)
    return np.concatenate([near[:count], (mantissas * np.exp2(rng.integers(low, high, rest))).astype(dtype)])


def _shares(rng: np.random.Generator, count: int, size: int) -> Array:
    """Parts of amax: codes and ties between codes over 448, and any numbers down to the subnormals of float8."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ties = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2]) / MAX
    found = rng.random((count, size)) ** 4
    is_tie = rng.random((count, size)) < 0.5
    found[is_tie] = rng.choice(ties, is_tie.sum())
    return found * rng.choice([-1.0, 1.0], (count, size))


@functools.cache
def _cached(dtype: str, block: Block, special: bool, repeat: int) -> list[Array]:
    return tables(DTYPES[dtype], block, special=special, repeat=repeat)


def _bounded(x: Array, least: float, most: float) -> Array:
    wide = np.abs(x.astype(np.float32))
    return np.where(np.isfinite(wide) & ((wide < least) | (wide > most)), x.dtype.type(0), x)


# 2 Comparison


def compare(case: Case, xs: Sequence[Array], results: Sequence[tuple[Array | None, Array | None]]) -> Entry:
    """How many bytes of codes and scales differ, how far, and the first that does."""
    found: Entry = dict.fromkeys(("scales", "scales_differ", "scale_ulps", "codes", "codes_differ", "code_steps"), 0)
    for x, (codes, scale) in zip(xs, results, strict=True):
        expected = quantize(x, case.dialect, block=case.block)
        same = np.ones(expected.scale.shape, bool)
        if scale is not None:
            scale = scale.reshape(expected.scale.shape)
            if scale.dtype != expected.scale.dtype:
                scale = scale.view(expected.scale.dtype) if scale.dtype == np.uint8 else scale
            if scale.dtype != expected.scale.dtype:
                raise TypeError(f"scales are {scale.dtype}, those of {case.dialect.name} {expected.scale.dtype}")
            ulps = _ulps(scale, expected.scale)
            same = ulps == 0
            found["scales"] += ulps.size
            found["scales_differ"] += int((~same).sum())
            found["scale_ulps"] = max(found["scale_ulps"], int(ulps.max()))
        if codes is not None:
            reference = expected.codes
            if scale is not None and not same.all():
                # Codes are judged by the scale that the kernel has.
                by_scale = quantize(x, case.dialect, block=case.block, scale=scale).codes
                reference = np.where(_spread(same, x.shape, case.block), reference, by_scale)
            steps = _steps(codes.view(np.uint8), reference.view(np.uint8))
            found["codes"] += steps.size
            found["codes_differ"] += int((steps != 0).sum())
            found["code_steps"] = max(found["code_steps"], int(steps.max()))
            if "first" not in found and (at := np.argwhere(steps)).size:
                found["first"] = _first(case, x, tuple(at[0]), expected, codes, scale)
        if "first" not in found and not same.all():
            i, j = np.argwhere(~same)[0]
            height, width = (n or extent for n, extent in zip(case.block, x.shape, strict=True))
            found["first"] = _first(case, x, (int(i) * height, int(j) * width), expected, codes, scale)
    return found


def _first(case: Case, x: Array, at: tuple[int, ...], expected: Any, codes: Array | None, scale: Array | None) -> Entry:
    height, width = (n or extent for n, extent in zip(case.block, x.shape, strict=True))
    i, j = at[0] // height, at[1] // width
    part = x[i * height : (i + 1) * height, j * width : (j + 1) * width].astype(np.float32)
    entry: Entry = {"block": [int(i), int(j)], "amax": _hex(np.abs(part).max()), "x": _hex(x[at])}
    entry["scale"] = [_hex(expected.scale[i, j]), None if scale is None else _hex(scale[i, j])]
    entry["code"] = [int(array[at].view(np.uint8)) for array in (expected.codes, codes) if array is not None]
    return entry


def _hex(value: Any) -> str:
    return f"{float(value):.9g} ({float(value).hex() if math.isfinite(value) else 'not finite'})"


def _spread(of_block: Array, shape: tuple[int, ...], block: Block) -> Array:
    for axis, (size, extent) in enumerate(zip(block, shape, strict=True)):
        of_block = np.repeat(of_block, size or extent, axis)
    return of_block[: shape[0], : shape[1]]


def _ulps(got: Array, expected: Array) -> Array:
    """Distance in the order of the bits; NaN and a number are as far as can be, two NaN are equal."""
    signed = np.dtype(f"i{got.dtype.itemsize}")
    a, b = (array.view(signed if array.dtype.itemsize > 1 else np.uint8).astype(np.int64) for array in (got, expected))
    of_nan = [np.isnan(array.astype(np.float32)) for array in (got, expected)]
    return np.where(of_nan[0] & of_nan[1], 0, np.where(of_nan[0] | of_nan[1], 1 << 31, np.abs(a - b)))


def _steps(got: Array, expected: Array) -> Array:
    """Distance in codes; 0x7F and 0xFF are one code, and 255 away from numbers."""
    a, b = got.astype(np.int16), expected.astype(np.int16)
    of_nan = [code & 0x7F == 0x7F for code in (a, b)]
    order = [np.where(code & 0x80, -(code & 0x7F), code) for code in (a, b)]
    # -0 and 0 are different bytes.
    distance = np.maximum(np.abs(order[0] - order[1]), (a != b).astype(np.int16))
    return np.where(of_nan[0] & of_nan[1], 0, np.where(of_nan[0] | of_nan[1], 255, distance))


def verdict(dialect: Dialect, *counts: Entry) -> str:
    """`equal`, `within` what the dialect says of its kernel, or `differs`."""
    if not any(count["scales_differ"] or count["codes_differ"] for count in counts):
        return "equal"
    is_within = all(
        count["scale_ulps"] <= dialect.scale_ulps and count["code_steps"] <= dialect.code_steps for count in counts
    )
    return "within" if is_within else "differs"


def nearest(case: Case, xs: Sequence[Array], results: Any, *, special: bool) -> list[Entry]:
    """The rules that miss the fewest bytes: the dialect's with another division, code, rounding or use of NaN."""
    form, code = case.dialect.scale, case.dialect.code
    scales: list[ScaleForm | None] = [form]
    codes = [replace(code, nan=nan) for nan in NanCode] if special else []
    if form is not None and special:
        numbers = (None, MAX)
        scales = [
            replace(form, ignores_nan=ignores, infinite_amax=a, nan_amax=b)
            for ignores, a, b in itertools.product((True, False), numbers, numbers)
        ]
    elif form is not None and form.division is not Division.EXPONENT:
        powers = (form.power_of_two,)
        powers = (
            (PowerOfTwo.UP, PowerOfTwo.UP_LOG2) if form.power_of_two in (PowerOfTwo.UP, PowerOfTwo.UP_LOG2) else powers
        )
        divisions = [division for division in Division if division is not Division.EXPONENT]
        scales = [
            replace(form, division=division, arithmetic=arithmetic, power_of_two=power)
            for division, arithmetic, power in itertools.product(divisions, Arithmetic, powers)
        ]
    if not special:
        arithmetics = (Arithmetic.FLOAT32, Arithmetic.INPUT)
        codes = [replace(code, rule=rule, arithmetic=one) for rule, one in itertools.product(CodeRule, arithmetics)]
    pairs = list(zip(xs, results, strict=True))[:48]
    some = pairs
    if case.block != TENSOR:  # its first rows
        x, got = pairs[0]
        scales_of = len(got[1].reshape(-1)) * min(1024, len(x)) // len(x) if got[1] is not None else 0
        some = [
            (
                x[:1024],
                (None if got[0] is None else got[0][:1024], None if got[1] is None else got[1].reshape(-1)[:scales_of]),
            )
        ]
    scored: list[tuple[int, Entry]] = []
    for scale_form, code_form in itertools.product(scales, codes):
        try:
            dialect = replace(case.dialect, scale=scale_form, code=code_form)
            misses = [0, 0]
            for x, (got, scale) in some:
                expected = quantize(x, dialect, block=case.block)
                if scale is not None:
                    grid = scale.reshape(expected.scale.shape)
                    grid = grid.view(expected.scale.dtype) if grid.dtype == np.uint8 else grid
                    misses[0] += int((_ulps(grid, expected.scale) != 0).sum())
                if got is not None:
                    misses[1] += int((_steps(got.view(np.uint8), expected.codes.view(np.uint8)) != 0).sum())
        except Exception:  # a combination that means nothing
            continue
        scored.append(
            (
                sum(misses),
                {
                    "scales_differ": misses[0],
                    "codes_differ": misses[1],
                    "scale": repr(scale_form),
                    "code": repr(code_form),
                },
            )
        )
    return [entry for _, entry in sorted(scored, key=lambda one: one[0])[:3]]


def judge(case: Case, keep: Path | None, device: torch.device) -> Iterator[Entry]:
    """An entry for each dtype of x."""
    for dtype in case.dtypes:
        entry: Entry = {"case": case.name, "dialect": case.dialect.name, "block": list(case.block), "x": dtype}
        try:
            kept: dict[str, Array] = {}
            for kind in case.kinds:
                xs = [_bounded(x, *case.range) for x in _cached(dtype, case.block, kind == "special", case.rows)]
                results = [_on_host(case.run(to_torch(x, device))) for x in xs]
                entry[kind] = compare(case, xs, results)
                if entry[kind]["codes_differ"] or entry[kind]["scales_differ"]:
                    with contextlib.suppress(Exception):  # a hint, no result
                        entry[kind]["nearest"] = nearest(case, xs, results, special=kind == "special")
                    of = zip(("codes", "scale"), zip(*results, strict=True), strict=True)
                    kept |= {f"{kind}_{name}": _joined(some) for name, some in of if some[0] is not None}
            entry["verdict"] = verdict(case.dialect, *(entry[kind] for kind in case.kinds))
            if entry["verdict"] == "differs" and verdict(case.dialect, entry["finite"]) != "differs":
                entry["verdict"] = "differs at NaN or inf"
            if keep and kept:
                keep.mkdir(parents=True, exist_ok=True)
                np.savez_compressed(keep / f"{case.name}-{dtype}.npz".replace(" ", "_"), allow_pickle=False, **kept)
        except Exception as error:  # the others go on
            entry |= {"verdict": "not run", "why": f"{type(error).__name__}: {str(error)[-1500:]}"}
            entry["where"] = traceback.format_exc(limit=-3)[-1500:]
        yield entry


def _on_host(result: Result) -> tuple[Array | None, Array | None]:
    return tuple(None if one is None else to_numpy(one.detach().contiguous().cpu()) for one in result)  # pyright: ignore


def _joined(arrays: Sequence[Any]) -> Array:
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])[: 1 << 20]


# 3 Where kernels come from


class Kernels:
    """Compiled libraries, and functions out of source files."""

    def __init__(self, sources: Path, libraries: Path) -> None:
        self.sources, self.libraries = sources.resolve(), libraries.resolve()
        self._made = Path(tempfile.mkdtemp())
        self._found: dict[Any, SimpleNamespace] = {}

    def operators(self, library: str) -> Any:
        """`torch.ops._C`, once the library has registered its operators."""
        torch.ops.load_library(str(self.libraries / f"{library}.so"))
        return torch.ops._C

    def ffi(self, library: str) -> Any:
        """A module of tvm_ffi."""
        return importlib.import_module("tvm_ffi").load_module(str(self.libraries / f"{library}.so"))

    def exported(self, library: str) -> Any:
        """A library of functions that take pointers and numbers."""
        return ctypes.CDLL(str(self.libraries / f"{library}.so"))

    def functions(self, file: str, *names: str, bare: bool = False, **needed: Any) -> SimpleNamespace:
        """Functions of a source file, or methods (`Class.method`), by name; `needed` are their globals.

        They are as the file has them; `bare`, without their decorators.
        """
        key = (file, names)
        if key in self._found:  # Triton compiles what is new
            return self._found[key]
        text = (self.sources / file).read_text()
        parts = [_header(needed), *(_source_of(text, name, bare) for name in names)]
        path = self._made / f"{Path(file).stem}_{names[0].rpartition('.')[2]}_{len(list(self._made.iterdir()))}.py"
        path.write_text("\n\n".join(parts))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__dict__.update(needed)
        sys.modules[path.stem] = module  # where the compiler looks for its names
        spec.loader.exec_module(module)
        last = [name.rpartition(".")[2] for name in names]
        self._found[key] = SimpleNamespace(**{name: getattr(module, name) for name in last})
        return self._found[key]


def _header(needed: dict[str, Any]) -> str:
    lines = ["import functools, math", "from typing import *", "import torch", "import torch.nn.functional as F"]
    lines += ["import triton", "import triton.language as tl"] if importlib.util.find_spec("triton") else []
    return "\n".join(line for line in lines if line.rpartition(" ")[2] not in needed)


def _source_of(text: str, name: str, bare: bool) -> str:
    outer, _, inner = name.rpartition(".")
    found: list[ast.stmt] = ast.parse(text).body
    if outer:
        found = next(node.body for node in found if isinstance(node, ast.ClassDef) and node.name == outer)
    node = next(node for node in found if isinstance(node, ast.FunctionDef) and node.name == inner)
    lines = text.splitlines()
    start = min([node.lineno, *(one.lineno for one in node.decorator_list if not bare)]) - 1
    part, indent = lines[start : node.end_lineno], node.col_offset
    return "\n".join(line[indent:] for line in part)


def _empty(x: torch.Tensor, *scale: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=E4M3, device=x.device), torch.empty(scale, dtype=dtype, device=x.device)


def _bytes_of(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """Bytes [rows, groups] of int32 [rows, ceil(groups / 4)]."""
    return packed.contiguous().view(torch.uint8)[:, :groups]


# 4 Stacks


class _Names:
    """An object with these attributes, such as a layer of a stack."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)

    def fp8_dtype(self) -> torch.dtype:
        return E4M3


def _min_max() -> tuple[float, float]:
    return -MAX, MAX


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def _vllm(kernels: Kernels) -> Iterator[Case]:
    def static(x: torch.Tensor) -> Result:
        codes, scale = torch.empty_like(x, dtype=E4M3), torch.full((1,), 0.00372, device=x.device)
        kernels.operators("vllm_common").static_scaled_fp8_quant(codes, x, scale, None)
        return codes, None

    def tensor(x: torch.Tensor) -> Result:
        codes, scale = _empty(x, 1)
        kernels.operators("vllm_common").dynamic_scaled_fp8_quant(codes, x, scale)
        return codes, scale

    def token(x: torch.Tensor) -> Result:
        codes, scale = _empty(x, len(x), 1)
        kernels.operators("vllm_common").dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)
        return codes, scale

    def group(x: torch.Tensor, *, up: bool, by_columns: bool = False) -> Result:
        codes, scale = _empty(x, len(x), x.shape[1] // 128)
        scale = scale.t().contiguous().t() if by_columns else scale
        operator = kernels.operators("vllm_group").per_token_group_fp8_quant
        operator(x, codes, scale, 128, 1e-10, -MAX, MAX, up, by_columns, False)
        return codes, scale

    def packed(x: torch.Tensor) -> Result:
        groups, rows = x.shape[1] // 128, -(-len(x) // 4) * 4
        codes, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(-(-groups // 4), rows, dtype=torch.int32)
        scale = scale.t()[: len(x)]
        kernels.operators("vllm_group").per_token_group_fp8_quant_packed(x, codes, scale, 128, 1e-10, -MAX, MAX)
        return codes, _bytes_of(scale, groups)

    def norm(x: torch.Tensor, *, by_group: bool) -> Result:
        # With so large an epsilon the norm is x * 2^-20, exactly, and the weight takes it back.
        codes, scale = _empty(x, len(x), x.shape[1] // 128 if by_group else 1)
        of, weight = kernels.operators("vllm_norm"), torch.full_like(x[0], 2.0**20)
        if by_group:
            of.rms_norm_per_block_quant(codes, x, weight, scale, 2.0**40, None, None, 128, False)
        else:
            of.rms_norm_dynamic_per_token_quant(codes, x, weight, scale, 2.0**40, None, None)
        return codes, scale

    yield Case(name="vLLM per tensor", dialect=DIALECTS["vllm_tensor"], block=TENSOR, run=tensor)
    yield Case(name="vLLM per token", dialect=DIALECTS["vllm_token"], block=ROW, run=token)
    of_group = {"block": GROUP, "dialect": DIALECTS["vllm_group"]}
    yield Case(name="vLLM group", run=functools.partial(group, up=False), **of_group)
    yield Case(name="vLLM group, columns", run=functools.partial(group, up=False, by_columns=True), **of_group)
    up = functools.partial(group, up=True)
    yield Case(name="vLLM group UE8M0", dialect=DIALECTS["vllm_group_ue8m0"], block=GROUP, run=up)
    by_bytes = DIALECTS["vllm_group_ue8m0_packed"]
    yield Case(name="vLLM group UE8M0 packed", dialect=by_bytes, block=GROUP, run=packed, dtypes=HALVES)
    yield Case(name="vLLM static", dialect=_given(0.00372), block=TENSOR, run=static)
    yield from _vllm_fused(kernels)
    normed = {"dtypes": ("float32", "bfloat16"), "range": (0.0, 128.0), "kinds": ("finite",)}
    of_norm = DIALECTS["vllm_layernorm_group"]
    yield Case(
        name="vLLM norm group", dialect=of_norm, block=GROUP, run=functools.partial(norm, by_group=True), **normed
    )
    token_of_norm, run = DIALECTS["vllm_token"], functools.partial(norm, by_group=False)
    yield Case(name="vLLM norm per token", dialect=token_of_norm, block=ROW, run=run, **normed)


def _given(scale: float) -> Dialect:
    """vllm_static with one scale: a rule whose scale no amax moves."""
    floor = float(np.float32(scale))
    form = ScaleForm(division=Division.QUOTIENT, infinite_amax=0.0, nan_amax=0.0, small_scale=(math.inf, floor))
    return replace(DIALECTS["vllm_static"], scale=form)


def _vllm_fused(kernels: Kernels) -> Iterator[Case]:
    """silu(gate) * up with a gate of so large a number that sigmoid is 1: what is quantized is 256 * up, exact."""

    def silu(x: torch.Tensor) -> Result:
        codes, scale = _empty(x, len(x), x.shape[1] // 128)
        both = torch.cat([torch.full_like(x, 256.0), x], 1)
        kernels.operators("vllm_silu").silu_and_mul_per_block_quant(codes, both, scale, 128, None, False)
        return codes, scale / 256

    dialect = DIALECTS["vllm_silu_group"]
    form = dialect.scale
    assert form is not None
    dialect = replace(dialect, scale=replace(form, scale_floor=form.scale_floor / 256))
    yield Case(name="vLLM silu group", dialect=dialect, block=GROUP, run=silu, dtypes=HALVES, range=(0.0, 128.0))


_VLLM_UTILS = "vllm/model_executor/layers/quantization/utils/fp8_utils.py"


def _vllm_torch(kernels: Kernels) -> Iterator[Case]:
    def triton(x: torch.Tensor, *, up: bool) -> Result:
        of = kernels.functions(_VLLM_UTILS, "_per_token_group_quant_fp8")
        codes, scale = _empty(x, len(x), x.shape[1] // 128)
        of._per_token_group_quant_fp8[(scale.numel(),)](
            *(x, codes, scale, 128, x.shape[1], x.stride(0), 1e-10),
            **{"fp8_min": -MAX, "fp8_max": MAX, "use_ue8m0": up, "BLOCK": 128, "num_warps": 1, "num_stages": 1},
        )
        return codes, scale

    platform = _Names()
    broadcast = kernels.functions("vllm/model_executor/layers/quantization/utils/quant_utils.py", "group_broadcast")
    constants = {"_FP8_DTYPE": E4M3, "_FP8_MIN": -MAX, "_FP8_MAX": MAX, "_FP8_MIN_SCALING_FACTOR": 1 / (MAX * 512)}
    shape = _Names(PER_TOKEN="token", PER_TENSOR="tensor")
    native = kernels.functions(
        "vllm/model_executor/layers/quantization/input_quant_fp8.py",
        "QuantFP8.forward_native",
        "QuantFP8._quantize_group_native",
        group_broadcast=broadcast.group_broadcast,
        GroupShape=shape,
        **constants,
    )

    def forward(x: torch.Tensor, kind: str) -> Result:
        layer = _Names(is_group_quant=False, static=False, group_shape=kind, num_token_padding=None)
        return native.forward_native(layer, x)

    def forward_group(x: torch.Tensor) -> Result:
        codes, scale = native._quantize_group_native(_group_layer(), x)
        return codes, scale

    def compiled(function: Callable[..., Result], *rest: Any) -> Callable[[torch.Tensor], Result]:
        one = torch.compile(functools.partial(_apply, function, rest), dynamic=False, fullgraph=True)
        return one

    def blocks(x: torch.Tensor, *, up: bool, compiled: bool) -> Result:
        of = kernels.functions(
            "vllm/utils/deep_gemm.py",
            *("_align", "_ceil_to_ue8m0", "per_block_cast_to_fp8"),
            bare=True,
            current_platform=platform,
            get_fp8_min_max=_min_max,
            cdiv=_ceil_div,
            DEFAULT_BLOCK_SIZE=[128, 128],
        )
        cast = torch.compile(of.per_block_cast_to_fp8, dynamic=True) if compiled else of.per_block_cast_to_fp8
        return cast(x, [128, 128], up)

    yield Case(
        name="vLLM Triton group",
        dialect=DIALECTS["vllm_group_triton"],
        block=GROUP,
        run=functools.partial(triton, up=False),
    )
    yield Case(
        name="vLLM Triton group UE8M0",
        dialect=DIALECTS["vllm_group_triton_ue8m0"],
        block=GROUP,
        run=functools.partial(triton, up=True),
    )
    for kind, block in (("token", ROW), ("tensor", TENSOR)):
        cuda = DIALECTS["vllm_native_cuda"]
        yield Case(name=f"QuantFP8 {kind}", dialect=cuda, block=block, run=functools.partial(forward, kind=kind))
        yield Case(name=f"QuantFP8 {kind} compiled", dialect=cuda, block=block, run=compiled(forward, kind))
    cuda = DIALECTS["vllm_native_group_cuda"]
    yield Case(name="QuantFP8 group", dialect=cuda, block=GROUP, run=forward_group)
    yield Case(name="QuantFP8 group compiled", dialect=cuda, block=GROUP, run=compiled(forward_group))
    for is_compiled in (False, True):
        how = " compiled" if is_compiled else ""
        plain = functools.partial(blocks, up=False, compiled=is_compiled)
        up = functools.partial(blocks, up=True, compiled=is_compiled)
        dialect = DIALECTS["vllm_weight_block_cuda"]
        yield Case(name=f"vLLM per_block_cast_to_fp8{how}", dialect=dialect, block=SQUARE, run=plain)
        dialect = DIALECTS["vllm_weight_block_ue8m0"]
        yield Case(name=f"vLLM per_block_cast_to_fp8 UE8M0{how}", dialect=dialect, block=SQUARE, run=up)


def _apply(function: Callable[..., Result], rest: tuple[Any, ...], x: torch.Tensor) -> Result:
    return function(x, *rest)


def _group_layer() -> _Names:
    return _Names(group_size=128, use_ue8m0=False, column_major_scales=False, tma_aligned_scales=False)


def _sglang(kernels: Kernels) -> Iterator[Case]:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

    def group(x: torch.Tensor) -> Result:
        codes, scale = _empty(x, len(x), x.shape[1] // 128)
        getattr(kernels.ffi("sglang_group"), f"group_{short[x.dtype]}")(x, codes, scale)
        return codes, scale

    def up(x: torch.Tensor) -> Result:
        groups = x.shape[1] // 128
        codes, scale = _empty(x, len(x), -(-groups // 4), dtype=torch.int32)
        getattr(kernels.ffi("sglang_group"), f"ue8m0_{short[x.dtype]}")(x, codes, scale)
        return codes, _bytes_of(scale, groups)

    def token(x: torch.Tensor) -> Result:
        codes, scale = _empty(x, len(x), 1)
        getattr(kernels.ffi("sglang_token"), f"token_{short[x.dtype]}")(x, codes, scale)
        return codes, scale

    def tensor(x: torch.Tensor) -> Result:
        codes, scale = torch.empty(x.shape, dtype=E4M3, device=x.device), torch.zeros(1, device=x.device)
        function = getattr(kernels.ffi("sglang_tensor"), f"tensor_{short[x.dtype]}")
        function(x.view(-1), codes.view(-1), scale)
        return codes, scale

    def triton(x: torch.Tensor) -> Result:
        of = kernels.functions("sglang/kernels/ops/quantization/fp8_kernel.py", "_per_token_group_quant_8bit")
        codes, scale = _empty(x, len(x), x.shape[1] // 128)
        of._per_token_group_quant_8bit[(scale.numel(),)](
            *(x, codes, scale, 128, 128, 1e-10), bit8_min=-MAX, bit8_max=MAX, BLOCK=128, num_warps=1, num_stages=1
        )
        return codes, scale

    file = "sglang/srt/layers/quantization/fp8_utils.py"
    constants = {"fp8_dtype": E4M3, "fp8_max": MAX, "_is_fp8_fnuz": False}
    utils = kernels.functions(file, "input_to_float8", **constants)
    casts = kernels.functions(
        file, "ceil_to_ue8m0", "per_block_cast_to_fp8", ceil_align=lambda x, y: -(-x // y) * y, **constants
    )
    yield Case(name="SGLang group", dialect=DIALECTS["sglang_group"], block=GROUP, run=group)
    yield Case(name="SGLang group UE8M0", dialect=DIALECTS["sglang_group_ue8m0"], block=GROUP, run=up)
    yield Case(name="SGLang per token", dialect=DIALECTS["sglang_token"], block=ROW, run=token, dtypes=("bfloat16",))
    yield Case(name="SGLang per token, many rows", dialect=DIALECTS["sglang_token"], block=ROW, run=token, rows=2)
    yield Case(name="SGLang per tensor", dialect=DIALECTS["sglang_tensor"], block=TENSOR, run=tensor)
    approximate = DIALECTS["deepseek_group"]
    dialect = replace(
        DIALECTS["vllm_group"],
        name="sglang Triton",
        scale_ulps=2,
        code_steps=1,
        code=replace(approximate.code, rule=CodeRule.INVERSE),
    )
    yield Case(name="SGLang Triton group", dialect=dialect, block=GROUP, run=triton)
    weight = DIALECTS["sglang_weight_tensor"]
    yield Case(name="SGLang input_to_float8", dialect=weight, block=TENSOR, run=utils.input_to_float8)
    weight = DIALECTS["sglang_weight_block_ue8m0"]
    yield Case(name="SGLang per_block_cast_to_fp8", dialect=weight, block=SQUARE, run=casts.per_block_cast_to_fp8)


def _deepseek(kernels: Kernels) -> Iterator[Case]:
    math_of = "deep_gemm/utils/math.py"
    names = ("ceil_div", "align", "ceil_to_ue8m0", "per_token_cast_to_fp8", "per_channel_cast_to_fp8")
    casts = kernels.functions(math_of, *names, "per_block_cast_to_fp8")
    for kind, block in (("token", GROUP), ("channel", COLUMN), ("block", SQUARE)):
        cast = getattr(casts, f"per_{kind}_cast_to_fp8")
        for up in (False, True):
            name = "deep_gemm_block_ue8m0" if up else "deep_gemm_block_cuda"
            run = functools.partial(cast, use_ue8m0=up)
            yield Case(name=f"DeepGEMM {cast.__name__}{' UE8M0' * up}", dialect=DIALECTS[name], block=block, run=run)
    for name, form in (("deepseek_group", None), ("deepseek_group_ue8m0", "ue8m0")):
        act_quant = kernels.functions("deepseek/kernel.py", "act_quant_kernel", "act_quant").act_quant
        run = functools.partial(act_quant, scale_fmt=form)
        yield Case(name=f"DeepSeek-V3 act_quant {form or ''}", dialect=DIALECTS[name], block=GROUP, run=run)


def _transformers(kernels: Kernels) -> Iterator[Case]:
    def activation(x: torch.Tensor) -> Result:
        kernel = kernels.functions("finegrained_fp8/utils.py", "_fp8_act_quant_kernel")._fp8_act_quant_kernel
        codes, scale = _empty(x, len(x), x.shape[1] // 128)
        kernel[(scale.numel(),)](x, codes, scale, BLOCK_SIZE=128, PADDED_BLOCK=128)
        return codes, scale

    def weight(x: torch.Tensor, size: list[int] | None, form: str) -> Result:
        config = SimpleNamespace(weight_block_size=size, scale_fmt=form)
        quantizer = SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=config))
        quantizer._resolve_block_size = functools.partial(of._resolve_block_size, quantizer)
        found = of._quantize_one(quantizer, "w.weight", x)
        return found["w.weight"], found["w.weight_scale_inv"]

    constants = {"_FP8_MAX": MAX, "_FP8_MIN": -MAX, "_FP8_DTYPE": E4M3}
    of = kernels.functions(
        "transformers/integrations/finegrained_fp8.py",
        "Fp8Quantize._resolve_block_size",
        "Fp8Quantize._quantize_one",
        _get_ue8m0_dtype=lambda: torch.float8_e8m0fnu,
        **constants,
    )
    dialect = DIALECTS["transformers_activation"]
    yield Case(name="finegrained-fp8 act_quant", dialect=dialect, block=GROUP, run=activation)
    for form, name in (("float", "transformers_block"), ("ue8m0", "transformers_block_ue8m0")):
        for size, block in (([128, 128], SQUARE), (None, TENSOR)):
            run = functools.partial(weight, size=size, form=form)
            what = "blocks" if size else "tensor"
            yield Case(name=f"Fp8Quantize {what} {form}", dialect=DIALECTS[name], block=block, run=run)


def _fbgemm(kernels: Kernels) -> Iterator[Case]:
    def row(x: torch.Tensor, use_triton: bool) -> Result:
        return _fp8_gemm().quantize_fp8_row(x, use_triton=use_triton)

    def square(x: torch.Tensor, use_triton: bool) -> Result:
        return _fp8_gemm().quantize_fp8_block(x, 128, 128, use_triton=use_triton)

    def cuda(x: torch.Tensor) -> Result:
        codes, scale = _empty(x, len(x))
        pointers = (ctypes.c_void_p(one.data_ptr()) for one in (x, codes, scale))
        torch.cuda.synchronize()
        kernels.exported("small").fbgemm_row(*pointers, ctypes.c_int(len(x)), ctypes.c_int(x.shape[1]))
        return codes, scale

    for use_triton, name in ((True, "fbgemm_triton"), (False, "fbgemm_torch")):
        of_row = functools.partial(row, use_triton=use_triton)
        of_square = functools.partial(square, use_triton=use_triton)
        yield Case(name=f"{name} quantize_fp8_row", dialect=DIALECTS[name], block=ROW, run=of_row)
        yield Case(name=f"{name} quantize_fp8_block", dialect=DIALECTS[name], block=SQUARE, run=of_square)
    dialect = DIALECTS["fbgemm_cuda"]
    yield Case(name="FBGEMM quantize_fp8_per_row", dialect=dialect, block=ROW, run=cuda, dtypes=("bfloat16",))


def _fp8_gemm() -> Any:
    return importlib.import_module("fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm")


def _transformer_engine(kernels: Kernels) -> Iterator[Case]:
    """Its function from amax to t, and 1/t as its kernels have it; the casts themselves were not compiled."""

    def scales(x: torch.Tensor, block: Block, down: int, largest: float | None) -> Result:
        amax = _amax(x, block)
        t, s = torch.empty_like(amax), torch.empty_like(amax)
        limit = torch.finfo(torch.float32 if largest is None else x.dtype).max
        pointers = [ctypes.c_void_p(one.data_ptr()) for one in (amax, t, s)]
        rest = (ctypes.c_int(amax.numel()), ctypes.c_int(down), ctypes.c_float(0.0), ctypes.c_float(limit))
        torch.cuda.synchronize()
        kernels.exported("small").te_scales(*pointers, *rest)
        return None, s

    def bytes_of(x: torch.Tensor, block: Block) -> Result:
        amax = _amax(x, block)
        found = torch.empty(amax.shape, dtype=torch.uint8, device=x.device)
        torch.cuda.synchronize()
        pointers = [ctypes.c_void_p(one.data_ptr()) for one in (amax, found)]
        kernels.exported("small").te_bytes(*pointers, ctypes.c_int(amax.numel()))
        return None, found

    for name, block, down, largest in (
        ("transformer_engine_current", TENSOR, 0, None),
        ("transformer_engine_current_pow2", TENSOR, 1, None),
        ("transformer_engine_block_float", GROUP, 0, MAX),
        ("transformer_engine_block", GROUP, 1, MAX),
        ("transformer_engine_block", SQUARE, 1, MAX),
    ):
        run = functools.partial(scales, block=block, down=down, largest=largest)
        yield Case(name=f"scales of {name} {block}", dialect=DIALECTS[name], block=block, run=run)
    mx = DIALECTS["transformer_engine_mxfp8"]
    yield Case(name="scales of MXFP8", dialect=mx, block=MX_GROUP, run=functools.partial(bytes_of, block=MX_GROUP))


def _amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """float32, contiguous; NaN stays."""
    rows, width = (size or extent for size, extent in zip(block, x.shape, strict=True))
    return x.float().abs().view(-1, rows, x.shape[1] // width, width).amax((1, 3)).contiguous()


def _on_cuda(name: str, **more: Any) -> Dialect:
    """The dialect of a package whose text has `amax / 448.0`: on CUDA torch multiplies by fl(1/448)."""
    dialect = dialect_by_name(name)
    assert dialect.scale is not None
    return replace(dialect, scale=replace(dialect.scale, division=Division.RECIPROCAL), **more)


def _torchao(kernels: Kernels) -> Iterator[Case]:
    del kernels

    def training(x: torch.Tensor, kind: str, down: bool) -> Result:
        utils = importlib.import_module("torchao.float8.float8_utils")
        granularity = getattr(importlib.import_module("torchao.float8.config").ScalingGranularity, kind)
        scale = utils.tensor_to_scale(
            x,
            E4M3,
            scaling_granularity=granularity,
            axiswise_dim=-1 if kind == "AXISWISE" else None,
            round_scales_to_power_of_2=down,
        )
        return utils.to_fp8_saturated(x.to(torch.float32) * scale, E4M3), scale

    def blockwise(x: torch.Tensor, name: str) -> Result:
        of = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
        codes, scale = getattr(of, f"triton_fp8_blockwise_{name}")(x)
        return (codes.t(), scale.t()) if "transposed" in name else (codes, scale)

    def inference(x: torch.Tensor, block: Block) -> Result:
        of = importlib.import_module("torchao.quantization.quant_primitives")
        size = [size or extent for size, extent in zip(block, x.shape, strict=True)]
        scale = of._choose_scale_float8(x, size, E4M3)
        return of._quantize_affine_float8(x, scale, E4M3), scale

    def mx(x: torch.Tensor, mode: str) -> Result:
        of = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        kinds = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
        scale, codes = of.to_mx(x, E4M3, 32, kinds[mode])
        return codes.view(x.shape), scale

    for name, kind, down, block in (
        ("torchao_tensorwise", "TENSORWISE", False, TENSOR),
        ("torchao_rowwise", "AXISWISE", True, ROW),
        ("torchao_rowwise_float", "AXISWISE", False, ROW),
    ):
        run = functools.partial(training, kind=kind, down=down)
        yield Case(name=f"{name} training", dialect=DIALECTS[name], block=block, run=run)
    for name, block in (
        ("act_quant_lhs", GROUP),
        ("act_quant_rhs", COLUMN),
        ("act_quant_transposed_lhs", COLUMN),
        ("weight_quant_rhs", SQUARE),
        ("weight_quant_transposed_rhs", SQUARE),
    ):
        dialect, run = DIALECTS["torchao_blockwise"], functools.partial(blockwise, name=name)
        yield Case(name=f"torchao Triton {name}", dialect=dialect, block=block, run=run)
    for block in (ROW, TENSOR, SQUARE):
        run = functools.partial(inference, block=block)
        yield Case(name=f"torchao inference {block}", dialect=_on_cuda("torchao_inference"), block=block, run=run)
    for mode in ("FLOOR", "CEIL", "EVEN", "RCEIL"):
        dialect = DIALECTS[f"torchao_mx_{mode.lower()}"]
        run = functools.partial(mx, mode=mode)
        # As the caveats say: a byte of 255, for a NaN, and RCEIL's byte of 0 have codes of their own.
        rest: dict[str, Any] = {"kinds": ("finite",), "range": (2.0**-100 if mode == "RCEIL" else 0.0, math.inf)}
        narrow = ("float32", "bfloat16")
        yield Case(name=f"to_mx {mode}", dialect=dialect, block=MX_GROUP, run=run, dtypes=narrow, **rest)


def _compressed_tensors(kernels: Kernels) -> Iterator[Case]:
    del kernels

    def run(x: torch.Tensor, strategy: str, block: Block) -> Result:
        quantization = importlib.import_module("compressed_tensors.quantization")
        helpers = importlib.import_module("compressed_tensors.quantization.utils")
        forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
        more = {"block_structure": [128, 128]} if strategy == "block" else {}
        arguments = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **more)
        rows, width = (size or extent for size, extent in zip(block, x.shape, strict=True))
        view = x.view(-1, rows, x.shape[1] // width, width)
        scale, _ = helpers.calculate_qparams(view.amin((1, 3)), view.amax((1, 3)), arguments)
        scale = scale.view(-1) if strategy == "tensor" else scale
        return forward.quantize(x, scale, None, arguments, dtype=E4M3), scale

    for strategy, block in (("tensor", TENSOR), ("channel", ROW), ("block", SQUARE)):
        dialect = _on_cuda("compressed_tensors_cuda")
        with_block = functools.partial(run, strategy=strategy, block=block)
        yield Case(name=f"compressed-tensors {strategy}", dialect=dialect, block=block, run=with_block)


def _modelopt(kernels: Kernels) -> Iterator[Case]:
    def run(x: torch.Tensor, block: Block) -> Result:
        # A 0-dimensional scale is a number to torch: CPU or CUDA, the quotient is rounded to x's dtype.
        amax = _amax(x, block).view(()) if block == TENSOR else _amax(x, block)
        amax = torch.where((amax == 0) | amax.isnan(), torch.full_like(amax, MAX), amax)
        scale = amax.float() / MAX
        return (x / scale).to(E4M3), scale

    del kernels
    yield Case(
        name="amax / 448 per row, by hand",
        dialect=_on_cuda("modelopt_channel"),
        block=ROW,
        run=functools.partial(run, block=ROW),
    )
    yield Case(
        name="amax / 448 per tensor, by hand",
        dialect=_on_cuda("modelopt_tensor"),
        block=TENSOR,
        run=functools.partial(run, block=TENSOR),
    )


STACKS: dict[str, Callable[[Kernels], Iterator[Case]]] = {
    "vllm": _vllm,
    "vllm_torch": _vllm_torch,
    "sglang": _sglang,
    "deepseek": _deepseek,
    "transformers": _transformers,
    "fbgemm": _fbgemm,
    "transformer_engine": _transformer_engine,
    "torchao": _torchao,
    "compressed_tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


# 5 The command


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    compile_without_limits()
    chosen = list(STACKS) if run.arguments.stacks == ("all",) or "all" in run.arguments.stacks else run.arguments.stacks
    entries: list[Entry] = []
    if len(chosen) == 1:
        keep = run.arguments.keep
        kernels = Kernels(run.arguments.sources, run.arguments.libraries)
        try:
            for case in STACKS[chosen[0]](kernels):
                entries += judge(case, keep if isinstance(keep, Path) else None, run.device)
                run.record(cases=entries)
        except Exception:  # before its cases, such as a source that is not there
            entries.append({"case": chosen[0], "verdict": "not run", "why": traceback.format_exc()[-1500:]})
    else:
        entries = _apart(run.arguments, chosen)
    run.record(cases=entries)
    _show(entries)
    counts = {
        verdict: sum(e["verdict"] == verdict for e in entries) for verdict in sorted({e["verdict"] for e in entries})
    }
    say(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(any(entry["verdict"].startswith("differs") for entry in entries))


def _apart(arguments: Any, stacks: Sequence[str]) -> list[Entry]:
    """The entries of every stack, each in a process of its own: an error on the device ends no other."""
    entries: list[Entry] = []
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for stack in stacks:
            command = [sys.executable, "-m", BENCH.module, "--stacks", stack, "--json", f"{folder}/{stack}.json"]
            command += [
                "--device",
                arguments.device,
                "--sources",
                str(arguments.sources),
                "--libraries",
                str(arguments.libraries),
            ]
            command += ["--keep", str(arguments.keep)] if isinstance(arguments.keep, Path) else []
            # A pipe that nobody reads yet would stop it.
            with Path(folder, f"{stack}.err").open("w") as errors:
                running[stack] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        end = time.monotonic() + arguments.seconds
        for stack, process in running.items():
            try:
                process.wait(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            error = Path(folder, f"{stack}.err").read_text()
            path = Path(folder) / f"{stack}.json"
            found = json.loads(path.read_text())["cases"] if path.exists() else []
            if process.returncode not in (0, 1) or not found:
                found.append(
                    {"case": stack, "verdict": "not run", "why": f"exit {process.returncode}: {error[-1500:]}"}
                )
            entries += found
    return entries


def _show(entries: Sequence[Entry]) -> None:
    rows = []
    for entry in entries:
        row = [f"{entry['case']} {entry.get('x', '')}", entry["verdict"]]
        for kind in ("finite", "special"):
            of = entry.get(kind)
            row += [
                f"{of[f'{what}_differ']:,} of {of[what]:,} by {of[far]:,}" if of and of[what] else ""
                for what, far in (("scales", "scale_ulps"), ("codes", "code_steps"))
            ]
        rows.append(row)
    draw("Kernels against dialects", ("kernel", "verdict", "scales", "codes", "scales, NaN", "codes, NaN"), rows)
    for entry in entries:
        if "why" in entry:
            say(f"not run: {entry['case']} {entry.get('x', '')}: {entry['why'].splitlines()[-1][:300]}")
        for kind in ("finite", "special"):
            if first := entry.get(kind, {}).get("first"):
                say(f"{entry['case']} {entry['x']} {kind}: first {first}")
                for near in entry[kind].get("nearest", [])[:2]:
                    say(f"    {near['scales_differ']}, {near['codes_differ']} by {near['scale']} {near['code']}")


if __name__ == "__main__":
    sys.exit(main())

"""The rules of f8emu.dialects against the kernels of their stacks, on a GPU: every byte of codes and scales.

    python -m benchmarks.proofs.dialects_on_gpu --sources FOLDER --libraries FOLDER --json OUT

`--libraries`: the stacks' CUDA kernels, compiled. `*.so` registers operators of torch, or exports functions.
`--sources`: files of the stacks, from which functions of torch and Triton are taken by their names. Packages are
imported. A case whose kernel is not there is not run, and says why. Every stack runs in a process of its own.

Tables: amaxes at every mantissa and next to floors and powers of two, with values at the ties of float8 codes; and
normal numbers. Blocks with NaN and infinity are counted apart, and decide nothing. Exit status 1 if a kernel differs
from its dialect by more than the dialect says.
"""

import ast
import ctypes
import functools
import importlib
import importlib.util
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
from f8emu.dialects import DIALECTS, Dialect, quantize, rules
from f8emu.dialects.arithmetic import block_amax, grid_shape
from f8emu.dialects.rules import COLUMN, GROUP, MX_GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.interop.arrays import to_numpy, to_torch

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
Result = tuple[Tensor | None, Tensor | None]
"""Codes and scales, of which a kernel may give one alone."""
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
E4M3, HALVES, MAX = torch.float8_e4m3fn, ("bfloat16", "float16"), 448.0
BENCH = Bench(
    "benchmarks.proofs.dialects_on_gpu",
    __doc__,
    option("sources", Path("sources")),
    option("libraries", Path("libraries")),
    option("stacks", ("all",)),
    option("seconds", 300, "how long the stacks may take together"),
    DEVICE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel, and the dialect whose bytes it should give."""

    name: str
    dialect: Dialect
    block: Block
    run: Callable[[Tensor], Result]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    given: float | None = None
    """The scale, where it is given."""
    range: tuple[float, float] = (0.0, math.inf)
    """Finite values of other magnitudes are 0 in the table."""
    has_special: bool = True
    """Whether NaN and infinity are tried too."""


def case(name: str, of: str | Dialect, block: Block, run: Callable[..., Any], *with_: Any, **more: Any) -> Case:
    """`run` gets the matrix and then `with_`."""
    dialect = DIALECTS[of] if isinstance(of, str) else of
    return Case(name=name, dialect=dialect, block=block, run=lambda x: run(x, *with_), **more)


def variant(name: str, *, scale: dict[str, Any] | None = None, code: dict[str, Any] | None = None, **more: Any) -> Any:
    """A dialect with other fields: what its caveat says of a corner."""
    one = DIALECTS[name]
    form = None if one.scale is None else replace(one.scale, **(scale or {}))
    return replace(one, scale=form, code=replace(one.code, **(code or {})), **more)


# 1 Tables


@functools.cache
def tables(dtype: str, block: Block, *, special: bool) -> list[Array]:
    """Matrices of blocks: amaxes of `_amaxes` and values at ties, then normal numbers; or blocks with NaN and inf."""
    rng, of = np.random.default_rng(20261126), DTYPES[dtype]
    height, width = (16, 256) if block == TENSOR else (block[0] or 1, block[1] or 512)
    count = {TENSOR: 192, SQUARE: 256, ROW: 1536}.get(block, 3072)
    across = 1 if block in (TENSOR, ROW) else max(1, 512 // width)
    amax, size = _amaxes(of, count, rng), height * width
    values = _shares(rng, count, size) * amax.astype(np.float64)[:, None]
    with np.errstate(all="ignore"):
        values = values.astype(of)
    values[np.arange(count), rng.integers(0, size, count)] = amax * rng.choice(np.array([-1, 1], of), count)
    if special:
        values = values[: max(across, count // 8) // across * across]
        what = np.array([np.nan, np.inf, -np.inf, -np.nan, np.nan], of)
        for i, row in enumerate(values):
            row[rng.integers(0, size, 1 + i % 2)] = what[i % len(what)]
    else:
        more = count // 2 // across * across
        normal = rng.standard_normal((more, size)) * np.exp2(rng.uniform(-12, 6, (more, 1)))
        values = np.concatenate([values, normal.astype(of)])
    if block == TENSOR:
        return [matrix.reshape(height, width) for matrix in values]
    down = len(values) // across
    matrix = values.reshape(down, across, height, width).swapaxes(1, 2)
    return [np.ascontiguousarray(matrix.reshape(down * height, across * width))]


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


def _bounded(x: Array, least: float, most: float) -> Array:
    wide = np.abs(x.astype(np.float32))
    return np.where(np.isfinite(wide) & ((wide < least) | (wide > most)), x.dtype.type(0), x)


# 2 Comparison


def compare(of: Case, xs: Sequence[Array], results: Sequence[Sequence[Any]]) -> Entry:
    """How many codes and scales differ, how far, and the first that does."""
    found: Entry = dict.fromkeys(("scales", "scales_differ", "scale_ulps", "codes", "codes_differ", "code_steps"), 0)
    for x, (codes, scale) in zip(xs, results, strict=True):
        given = None if of.given is None else np.full(grid_shape(x.shape, of.block), of.given, np.float32)
        expected = quantize(x, of.dialect, block=of.block, scale=given)
        reference = expected.codes
        if scale is not None:
            scale = scale.reshape(expected.scale.shape)
            scale = scale.view(expected.scale.dtype) if scale.dtype == np.uint8 else scale
            if scale.dtype != expected.scale.dtype:
                raise TypeError(f"scales are {scale.dtype}, those of {of.dialect.name} {expected.scale.dtype}")
            ulps = _ulps(scale, expected.scale)
            _count(found, ("scales", "scales_differ", "scale_ulps"), ulps)
            if ulps.any():
                # Codes are judged by the scale that the kernel has.
                by_scale = quantize(x, of.dialect, block=of.block, scale=scale).codes
                reference = np.where(_spread(ulps == 0, x.shape, of.block), reference, by_scale)
                found.setdefault("first_scale", _first(ulps, block_amax(x, of.block), scale, expected.scale))
        if codes is not None:
            got, wanted = (one.view(np.uint8) for one in (codes, reference))
            steps = _steps(got, wanted)
            _count(found, ("codes", "codes_differ", "code_steps"), steps)
            if steps.any():
                s = _spread(expected.scale, x.shape, of.block)
                found.setdefault("first_code", {"s": float(s[steps != 0][0]), **_first(steps, x, got, wanted)})
    return found


def _count(found: Entry, names: tuple[str, str, str], distance: Array) -> None:
    numbers = distance.size, int((distance != 0).sum())
    found |= {name: found[name] + number for name, number in zip(names, numbers, strict=False)}
    found[names[2]] = max(found[names[2]], int(distance.max()))


def _first(distance: Array, of: Array, got: Array, expected: Array) -> dict[str, Any]:
    at = tuple(np.argwhere(distance)[0])
    return {"of": float(of[at]).hex(), "got": float(got[at]).hex(), "expected": float(expected[at]).hex()}


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


def judge(of: Case, device: torch.device) -> Iterator[Entry]:
    """An entry for each dtype of x. Its verdict, of finite x: `equal`, `within` the dialect's bounds, or `differs`."""
    for dtype in of.dtypes:
        entry: Entry = {"kernel": of.name, "dialect": of.dialect.name, "x": dtype}
        try:
            for special in (False, True)[: 1 + of.has_special]:
                xs = [_bounded(x, *of.range) for x in tables(dtype, of.block, special=special)]
                results = [
                    [one if one is None else to_numpy(one.cpu()) for one in of.run(to_torch(x, device))] for x in xs
                ]
                found = compare(of, xs, results)
                if special:
                    entry["special"] = {
                        kind: found[kind] for kind in ("scales", "scales_differ", "codes", "codes_differ")
                    }
                    continue
                is_equal = not found["scales_differ"] and not found["codes_differ"]
                is_within = (
                    found["scale_ulps"] <= of.dialect.scale_ulps and found["code_steps"] <= of.dialect.code_steps
                )
                entry |= {"verdict": "equal" if is_equal else "within" if is_within else "differs", **found}
        except Exception as error:  # the others go on
            entry |= {"verdict": "not run", "why": f"{type(error).__name__}: {str(error)[-1500:]}"}
            entry["where"] = traceback.format_exc(limit=-3)[-1500:]
        yield entry


# 3 Where kernels come from


_HEADER = """
import functools, math, torch, triton
import torch.nn.functional as F
import triton.language as tl
from typing import *
"""


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

    def call(self, function: str, *arguments: Any) -> None:
        """A function of small.so: tensors as pointers, then numbers."""
        torch.cuda.synchronize()
        kinds = {int: ctypes.c_int, float: ctypes.c_float}
        passed = (ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else kinds[type(a)](a) for a in arguments)
        getattr(ctypes.CDLL(str(self.libraries / "small.so")), function)(*passed)

    def functions(self, file: str, *names: str, bare: bool = False, **needed: Any) -> SimpleNamespace:
        """Functions of a source file, or methods (`Class.method`), by name; `needed` are their globals.

        They are as the file has them; `bare`, without their decorators.
        """
        key = (file, names)
        if key in self._found:  # Triton compiles what is new
            return self._found[key]
        text = (self.sources / file).read_text()
        parts = [_HEADER, *(_source_of(text, name, bare) for name in names)]
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


def _source_of(text: str, name: str, bare: bool) -> str:
    outer, _, inner = name.rpartition(".")
    found: list[ast.stmt] = ast.parse(text).body
    if outer:
        found = next(node.body for node in found if isinstance(node, ast.ClassDef) and node.name == outer)
    node = next(node for node in found if isinstance(node, ast.FunctionDef) and node.name == inner)
    start = min([node.lineno, *(one.lineno for one in node.decorator_list if not bare)]) - 1
    return "\n".join(line[node.col_offset :] for line in text.splitlines()[start : node.end_lineno])


class _Names:
    """An object with these attributes, such as a layer of a stack."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)

    def fp8_dtype(self) -> torch.dtype:
        return E4M3


def _empty(x: Tensor, *scale: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=E4M3, device=x.device), torch.empty(scale, dtype=dtype, device=x.device)


def _groups(x: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(x, len(x), x.shape[1] // 128)


def _bytes_of(packed: Tensor, groups: int) -> Tensor:
    """Bytes [rows, groups] of int32 [rows, ceil(groups / 4)]."""
    return packed.reshape(-1).view(torch.uint8).view(len(packed), -1)[:, :groups]


def _amax(x: Tensor, block: Block) -> Tensor:
    """float32, contiguous; NaN stays."""
    rows, width = (size or extent for size, extent in zip(block, x.shape, strict=True))
    return x.float().abs().view(-1, rows, x.shape[1] // width, width).amax((1, 3)).contiguous()


# 4 Stacks


def _vllm(kernels: Kernels) -> Iterator[Case]:
    def operator(x: Tensor, library: str, name: str, scales: int | None, *rest: Any) -> Result:
        """Called with codes, x, scales and the rest; None: one scale."""
        codes, scale = _empty(x, *((1,) if scales is None else (len(x), scales or x.shape[1] // 128)))
        getattr(kernels.operators(library), name)(codes, x, scale, *rest)
        return codes, scale

    def static(x: Tensor) -> Result:
        codes, scale = torch.empty_like(x, dtype=E4M3), torch.full((1,), 0.00372, device=x.device)
        kernels.operators("vllm_common").static_scaled_fp8_quant(codes, x, scale, None)
        return codes, None

    def group(x: Tensor, up: bool, by_columns: bool) -> Result:
        codes, scale = _groups(x)
        scale = scale.t().contiguous().t() if by_columns else scale
        function = kernels.operators("vllm_group").per_token_group_fp8_quant
        function(x, codes, scale, 128, 1e-10, -MAX, MAX, up, by_columns, False)
        return codes, scale

    def packed(x: Tensor) -> Result:
        groups, rows = x.shape[1] // 128, -(-len(x) // 4) * 4
        codes, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(-(-groups // 4), rows, dtype=torch.int32)
        scale = scale.t()[: len(x)]
        kernels.operators("vllm_group").per_token_group_fp8_quant_packed(x, codes, scale, 128, 1e-10, -MAX, MAX)
        return codes, _bytes_of(scale, groups)

    def silu(x: Tensor) -> Result:
        # silu(gate) * up with so large a gate that sigmoid is 1: what is quantized is 256 * up, exactly.
        codes, scale = _groups(x)
        both = torch.cat([torch.full_like(x, 256.0), x], 1)
        kernels.operators("vllm_silu").silu_and_mul_per_block_quant(codes, both, scale, 128, None, False)
        return codes, scale / 256

    def norm(x: Tensor, name: str, scales: int, *rest: Any) -> Result:
        # With so large an epsilon the norm is x * 2^-20, exactly, and the weight takes it back.
        codes, scale = _empty(x, len(x), scales or x.shape[1] // 128)
        function = getattr(kernels.operators("vllm_norm"), name)
        function(codes, x, torch.full_like(x[0], 2.0**20), scale, 2.0**40, None, None, *rest)
        return codes, scale

    normed: dict[str, Any] = {"dtypes": ("float32", "bfloat16"), "range": (0.0, 128.0), "has_special": False}
    by_log2 = variant("vllm_group_ue8m0", scale={"power_of_two": rules.PowerOfTwo.UP_LOG2})
    of_256 = variant("vllm_silu_group", scale={"scale_floor": 1 / (MAX * 512) / 256})
    library, token = "vllm_common", "dynamic_per_token_scaled_fp8_quant"
    yield case("vLLM per tensor", "vllm_tensor", TENSOR, operator, library, "dynamic_scaled_fp8_quant", None)
    yield case("vLLM per token", "vllm_token", ROW, operator, library, token, 1, None)
    yield case("vLLM static", "vllm_static", TENSOR, static, given=0.00372)
    yield case("vLLM group", "vllm_group", GROUP, group, False, False)
    yield case("vLLM group, columns", "vllm_group", GROUP, group, False, True)
    yield case("vLLM group UE8M0", "vllm_group_ue8m0", GROUP, group, True, False, dtypes=HALVES)
    yield case("vLLM group UE8M0, by log2", by_log2, GROUP, group, True, False, dtypes=("float32",))
    yield case("vLLM group UE8M0 packed", "vllm_group_ue8m0_packed", GROUP, packed, dtypes=HALVES)
    yield case("vLLM silu group", of_256, GROUP, silu, dtypes=HALVES, range=(0.0, 128.0))
    yield case(
        "vLLM norm group", "vllm_layernorm_group", GROUP, norm, "rms_norm_per_block_quant", 0, 128, False, **normed
    )
    yield case("vLLM norm per token", "vllm_token", ROW, norm, "rms_norm_dynamic_per_token_quant", 1, **normed)


def _vllm_torch(kernels: Kernels) -> Iterator[Case]:
    layers = "vllm/model_executor/layers/quantization"

    def triton(x: Tensor, up: bool) -> Result:
        of = kernels.functions(f"{layers}/utils/fp8_utils.py", "_per_token_group_quant_fp8")
        codes, scale = _groups(x)
        of._per_token_group_quant_fp8[(scale.numel(),)](
            *(x, codes, scale, 128, x.shape[1], x.stride(0), 1e-10),
            **{"fp8_min": -MAX, "fp8_max": MAX, "use_ue8m0": up, "BLOCK": 128, "num_warps": 1, "num_stages": 1},
        )
        return codes, scale

    broadcast = kernels.functions(f"{layers}/utils/quant_utils.py", "group_broadcast").group_broadcast
    constants = {"_FP8_DTYPE": E4M3, "_FP8_MIN": -MAX, "_FP8_MAX": MAX, "_FP8_MIN_SCALING_FACTOR": 1 / (MAX * 512)}
    names = {"group_broadcast": broadcast, "GroupShape": _Names(PER_TOKEN="token", PER_TENSOR="tensor")}
    methods = ("QuantFP8.forward_native", "QuantFP8._quantize_group_native")
    native = kernels.functions(f"{layers}/input_quant_fp8.py", *methods, **names, **constants)
    casts = kernels.functions(
        "vllm/utils/deep_gemm.py",
        *("_align", "_ceil_to_ue8m0", "per_block_cast_to_fp8"),
        bare=True,
        current_platform=_Names(),
        get_fp8_min_max=lambda: (-MAX, MAX),
        cdiv=lambda x, y: -(-x // y),
        DEFAULT_BLOCK_SIZE=[128, 128],
    )
    compiled_cast = torch.compile(casts.per_block_cast_to_fp8, dynamic=True)
    yield case("vLLM Triton group", "vllm_group_triton", GROUP, triton, False)
    yield case("vLLM Triton group UE8M0", "vllm_group_triton_ue8m0", GROUP, triton, True)
    grouped = {"group_size": 128, "use_ue8m0": False, "column_major_scales": False, "tma_aligned_scales": False}
    one = {"is_group_quant": False, "static": False, "num_token_padding": None}
    for kind, block in (("token", ROW), ("tensor", TENSOR), ("group", GROUP)):
        name = "vllm_native_group_cuda" if kind == "group" else "vllm_native_cuda"
        method = native._quantize_group_native if kind == "group" else native.forward_native
        layer = _Names(group_shape=kind, **(grouped if kind == "group" else one))
        run = functools.partial(method, layer)
        yield case(f"QuantFP8 {kind}", name, block, run)
        compiled = torch.compile(lambda x, method=method, layer=layer: method(layer, x), dynamic=False)
        yield case(f"QuantFP8 {kind}, compiled", variant(name, code_steps=1), block, compiled)
    for up, name in ((False, "vllm_weight_block_cuda"), (True, "vllm_weight_block_ue8m0")):
        for how, cast in (("", casts.per_block_cast_to_fp8), (", compiled", compiled_cast)):
            yield case(f"vLLM per_block_cast_to_fp8{' UE8M0' * up}{how}", name, SQUARE, cast, [128, 128], up)


def _sglang(kernels: Kernels) -> Iterator[Case]:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

    def group(x: Tensor) -> Result:
        codes, scale = _groups(x)
        getattr(kernels.ffi("sglang_group"), f"group_{short[x.dtype]}")(x, codes, scale)
        return codes, scale

    def up(x: Tensor) -> Result:
        groups = x.shape[1] // 128
        codes, scale = _empty(x, len(x), -(-groups // 4), dtype=torch.int32)
        getattr(kernels.ffi("sglang_group"), f"ue8m0_{short[x.dtype]}")(x, codes, scale)
        return codes, _bytes_of(scale, groups)

    def token(x: Tensor, rows: int) -> Result:
        codes, scale = _empty(x, len(x), 1)
        function = getattr(kernels.ffi("sglang_token"), f"token_{short[x.dtype]}")
        for part in zip(x.split(rows), codes.split(rows), scale.split(rows), strict=True):
            function(*part)
        return codes, scale

    def tensor(x: Tensor) -> Result:
        codes, scale = torch.empty(x.shape, dtype=E4M3, device=x.device), torch.zeros(1, device=x.device)
        function = getattr(kernels.ffi("sglang_tensor"), f"tensor_{short[x.dtype]}")
        function(x.view(-1), codes.view(-1), scale)
        return codes, scale

    def triton(x: Tensor) -> Result:
        of = kernels.functions("sglang/kernels/ops/quantization/fp8_kernel.py", "_per_token_group_quant_8bit")
        codes, scale = _groups(x)
        of._per_token_group_quant_8bit[(scale.numel(),)](
            *(x, codes, scale, 128, 128, 1e-10), bit8_min=-MAX, bit8_max=MAX, BLOCK=128, num_warps=1, num_stages=1
        )
        return codes, scale

    file, needed = "sglang/srt/layers/quantization/fp8_utils.py", {"fp8_dtype": E4M3, "fp8_max": MAX}
    needed |= {"_is_fp8_fnuz": False, "ceil_align": lambda x, y: -(-x // y) * y}
    of = kernels.functions(file, "input_to_float8", "ceil_to_ue8m0", "per_block_cast_to_fp8", **needed)
    zeros = variant("sglang_token", code={"scale_floor": 2.0**-126})
    # Fast math has no subnormal s.
    normal: dict[str, Any] = {"range": (2.0**-100, math.inf)}
    approximate = variant("vllm_group_triton", code={"rule": rules.CodeRule.INVERSE})
    # The approximate division by an amax above 2^126 gives 0.
    yield case("SGLang group", "sglang_group", GROUP, group, range=(0.0, 2.0**126))
    yield case("SGLang group UE8M0", "sglang_group_ue8m0", GROUP, up)
    yield case("SGLang per token, 1,024 rows", "sglang_token", ROW, token, 1024, **normal)
    yield case("SGLang per token, 2,304 rows", zeros, ROW, token, 2304, **normal)
    yield case("SGLang per tensor", "sglang_tensor", TENSOR, tensor)
    yield case("SGLang Triton group", approximate, GROUP, triton)
    yield case("SGLang input_to_float8", "sglang_weight_tensor", TENSOR, of.input_to_float8)
    yield case("SGLang per_block_cast_to_fp8", "sglang_weight_block_ue8m0", SQUARE, of.per_block_cast_to_fp8)


def _deepseek(kernels: Kernels) -> Iterator[Case]:
    names = ("ceil_div", "align", "ceil_to_ue8m0", "per_token_cast_to_fp8", "per_channel_cast_to_fp8")
    casts = kernels.functions("deep_gemm/utils/math.py", *names, "per_block_cast_to_fp8")
    for kind, block in (("token", GROUP), ("channel", COLUMN), ("block", SQUARE)):
        cast = getattr(casts, f"per_{kind}_cast_to_fp8")
        for up, name in ((False, "deep_gemm_block_cuda"), (True, "deep_gemm_block_ue8m0")):
            yield case(f"DeepGEMM {cast.__name__}{' UE8M0' * up}", name, block, cast, up)
    act_quant = kernels.functions("deepseek/kernel.py", "act_quant_kernel", "act_quant").act_quant
    yield case("DeepSeek-V3 act_quant", "deepseek_group", GROUP, act_quant, 128, None)
    yield case("DeepSeek-V3 act_quant UE8M0", "deepseek_group_ue8m0", GROUP, act_quant, 128, "ue8m0")


def _transformers(kernels: Kernels) -> Iterator[Case]:
    def activation(x: Tensor) -> Result:
        kernel = kernels.functions("finegrained_fp8/utils.py", "_fp8_act_quant_kernel")._fp8_act_quant_kernel
        codes, scale = _groups(x)
        kernel[(scale.numel(),)](x, codes, scale, BLOCK_SIZE=128, PADDED_BLOCK=128)
        return codes, scale

    def weight(x: Tensor, size: list[int] | None, form: str) -> Result:
        config = SimpleNamespace(weight_block_size=size, scale_fmt=form)
        quantizer = SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=config))
        quantizer._resolve_block_size = functools.partial(of._resolve_block_size, quantizer)
        found = of._quantize_one(quantizer, "w.weight", x)
        return found["w.weight"], found["w.weight_scale_inv"]

    needed = {"_FP8_MAX": MAX, "_FP8_MIN": -MAX, "_FP8_DTYPE": E4M3}
    needed["_get_ue8m0_dtype"] = lambda: torch.float8_e8m0fnu
    methods = ("Fp8Quantize._resolve_block_size", "Fp8Quantize._quantize_one")
    of = kernels.functions("transformers/integrations/finegrained_fp8.py", *methods, **needed)
    yield case("finegrained-fp8 act_quant", "transformers_activation", GROUP, activation)
    for form, name in (("float", "transformers_block"), ("ue8m0", "transformers_block_ue8m0")):
        yield case(f"Fp8Quantize blocks {form}", name, SQUARE, weight, [128, 128], form)
        yield case(f"Fp8Quantize tensor {form}", name, TENSOR, weight, None, form)


def _fbgemm(kernels: Kernels) -> Iterator[Case]:
    def of_triton(x: Tensor, function: str, use_triton: bool) -> Result:
        of = importlib.import_module("fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm")
        return getattr(of, function)(x, *(128, 128)[: 2 * (function == "quantize_fp8_block")], use_triton=use_triton)

    def cuda(x: Tensor) -> Result:
        codes, scale = _empty(x, len(x))
        kernels.call("fbgemm_row", x, codes, scale, len(x), x.shape[1])
        return codes, scale

    zero_is_one = {"amax_floor": 0.0, "small_amax": (0.0, MAX)}
    floors = {"bfloat16": {"amax_floor": float(ml_dtypes.bfloat16(1e-12))}, "float16": zero_is_one, "float32": {}}
    for function, block in (("quantize_fp8_row", ROW), ("quantize_fp8_block", SQUARE)):
        yield case(f"FBGEMM Triton {function}", "fbgemm_triton", block, of_triton, function, True)
        for dtype, scale in floors.items():
            dialect = variant("fbgemm_torch", scale=scale)
            yield case(f"FBGEMM torch {function}", dialect, block, of_triton, function, False, dtypes=(dtype,))
    yield case("FBGEMM quantize_fp8_per_row", "fbgemm_cuda", ROW, cuda, dtypes=("bfloat16",))


def _transformer_engine(kernels: Kernels) -> Iterator[Case]:
    """Its function from amax to t, and 1/t as its kernels have it; the casts themselves were not compiled."""

    def scales(x: Tensor, block: Block, down: int, is_wide: bool) -> Result:
        amax = _amax(x, block)
        t, s = torch.empty_like(amax), torch.empty_like(amax)
        limit = torch.finfo(torch.float32 if is_wide else x.dtype).max
        kernels.call("te_scales", amax, t, s, amax.numel(), down, 0.0, float(limit))
        return None, s

    def bytes_of(x: Tensor) -> Result:
        amax = _amax(x, MX_GROUP)
        found = torch.empty(amax.shape, dtype=torch.uint8, device=x.device)
        kernels.call("te_bytes", amax, found, amax.numel())
        return None, found

    for what, block, down in (
        ("current", TENSOR, 0),
        ("current_pow2", TENSOR, 1),
        ("block_float", GROUP, 0),
        ("block", GROUP, 1),
        ("block", SQUARE, 1),
    ):
        name, rest = f"transformer_engine_{what}", (block, down, "current" in what)
        yield case(f"compute_scale_from_amax, {what} {block}", name, block, scales, *rest)
    yield case("float_to_e8m0", "transformer_engine_mxfp8", MX_GROUP, bytes_of)


def _torchao(kernels: Kernels) -> Iterator[Case]:
    del kernels
    of = importlib.import_module

    def training(x: Tensor, kind: str, down: bool) -> Result:
        utils, kinds = of("torchao.float8.float8_utils"), of("torchao.float8.config").ScalingGranularity
        keywords = {"axiswise_dim": -1 if kind == "AXISWISE" else None, "round_scales_to_power_of_2": down}
        scale = utils.tensor_to_scale(x, E4M3, scaling_granularity=getattr(kinds, kind), **keywords)
        return utils.to_fp8_saturated(x.to(torch.float32) * scale, E4M3), scale

    def blockwise(x: Tensor, name: str) -> Result:
        kernels = of("torchao.prototype.blockwise_fp8_training.kernels")
        codes, scale = getattr(kernels, f"triton_fp8_blockwise_{name}")(x)
        return (codes.t(), scale.t()) if "transposed" in name else (codes, scale)

    def inference(x: Tensor, block: Block) -> Result:
        primitives = of("torchao.quantization.quant_primitives")
        size = [size or extent for size, extent in zip(block, x.shape, strict=True)]
        scale = primitives._choose_scale_float8(x, size, E4M3)
        narrow = scale.to(x.dtype)
        if not torch.equal(narrow.float().nan_to_num(-1.0), scale.nan_to_num(-1.0)):
            raise AssertionError(f"scales of {x.dtype} have more bits than it")
        return primitives._quantize_affine_float8(x, scale, E4M3), narrow

    def mx(x: Tensor, mode: str) -> Result:
        modes = of("torchao.prototype.mx_formats.config").ScaleCalculationMode
        scale, codes = of("torchao.prototype.mx_formats.mx_tensor").to_mx(x, E4M3, 32, modes[mode])
        return codes.view(x.shape), scale

    yield case("torchao tensorwise", "torchao_tensorwise", TENSOR, training, "TENSORWISE", False)
    yield case("torchao rowwise", "torchao_rowwise", ROW, training, "AXISWISE", True)
    yield case("torchao rowwise, float scales", "torchao_rowwise_float", ROW, training, "AXISWISE", False)
    for name, block in (
        ("act_quant_lhs", GROUP),
        ("act_quant_rhs", COLUMN),
        ("act_quant_transposed_lhs", COLUMN),
        ("weight_quant_rhs", SQUARE),
        ("weight_quant_transposed_rhs", SQUARE),
    ):
        yield case(f"torchao Triton {name}", "torchao_blockwise", block, blockwise, name)
    # s is fl(amax * fl(1/448)), rounded to the dtype of x.
    on_cuda = variant(
        "torchao_inference",
        scale={"division": rules.Division.RECIPROCAL, "arithmetic": rules.Arithmetic.FLOAT32},
        code={"is_scale_rounded": True},
        stored=rules.Stored(dtype="input"),
    )
    for what, block in (("row", ROW), ("tensor", TENSOR), ("block", SQUARE)):
        yield case(f"torchao inference {what}", on_cuda, block, inference, block)
    for mode in ("FLOOR", "CEIL", "EVEN", "RCEIL"):
        # As the caveats say: a byte of 255, for a NaN, and RCEIL's byte of 0 have codes of their own.
        rest: dict[str, Any] = {"range": (2.0**-100 if mode == "RCEIL" else 0.0, math.inf), "has_special": False}
        name, narrow = f"torchao_mx_{mode.lower()}", ("float32", "bfloat16")
        yield case(f"to_mx {mode}", name, MX_GROUP, mx, mode, dtypes=narrow, **rest)


def _compressed_tensors(kernels: Kernels) -> Iterator[Case]:
    del kernels

    def run(x: Tensor, strategy: str, block: Block) -> Result:
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
        yield case(f"compressed-tensors {strategy}", "compressed_tensors_cuda", block, run, strategy, block)


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
}


# 5 The command


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    compile_without_limits()
    chosen = list(STACKS) if "all" in run.arguments.stacks else list(run.arguments.stacks)
    entries: list[Entry] = []
    if len(chosen) == 1:
        kernels = Kernels(run.arguments.sources, run.arguments.libraries)
        try:
            for one in STACKS[chosen[0]](kernels):
                entries += judge(one, run.device)
                run.record(cases=entries)
        except Exception:  # before its cases, such as a source that is not there
            entries.append({"kernel": chosen[0], "verdict": "not run", "why": traceback.format_exc()[-1500:]})
    else:
        entries = _apart(run.arguments, chosen)
    run.record(cases=entries)
    _show(entries)
    verdicts = [entry["verdict"] for entry in entries]
    say(", ".join(f"{verdicts.count(one)} {one}" for one in sorted(set(verdicts))))
    return int("differs" in verdicts)


def _apart(arguments: Any, stacks: Sequence[str]) -> list[Entry]:
    """The entries of every stack, each in a process of its own: an error on the device ends no other."""
    entries: list[Entry] = []
    given = {name: str(getattr(arguments, name)) for name in ("device", "sources", "libraries")}
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for stack in stacks:
            command = [sys.executable, "-m", BENCH.module, "--stacks", stack, "--json", f"{folder}/{stack}.json"]
            # A pipe that nobody reads yet would stop it.
            with Path(folder, f"{stack}.err").open("w") as errors:
                running[stack] = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=errors)
        end = time.monotonic() + arguments.seconds
        for stack, process in running.items():
            try:
                process.wait(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            error, path = Path(folder, f"{stack}.err").read_text(), Path(folder, f"{stack}.json")
            found = json.loads(path.read_text())["cases"] if path.exists() else []
            if process.returncode not in (0, 1) or not found:
                why = f"exit {process.returncode}: {error[-1500:]}"
                found.append({"kernel": stack, "verdict": "not run", "why": why})
            entries += found
    return entries


def _show(entries: Sequence[Entry]) -> None:
    rows = []
    for e in entries:
        pairs = [("scales", "scale_ulps"), ("codes", "code_steps")]
        counts = [f"{e[f'{n}_differ']:,} of {e[n]:,} by {e[far]}" if e.get(n) else "" for n, far in pairs]
        special = e.get("special", {"scales_differ": 0, "codes_differ": 0})
        of_special = f"{special['scales_differ']:,}, {special['codes_differ']:,}"
        rows.append([f"{e['kernel']} {e.get('x', '')}", e["verdict"], *counts, of_special])
    draw("Kernels against dialects", ("kernel", "verdict", "scales", "codes", "with NaN or inf"), rows)
    for e in entries:
        if "why" in e:
            say(f"not run: {e['kernel']} {e.get('x', '')}: {e['why'].splitlines()[-1][:300]}")
        if e["verdict"] == "differs":
            say(f"{e['kernel']} {e['x']}: {e.get('first_scale')} {e.get('first_code')}")


if __name__ == "__main__":
    sys.exit(main())

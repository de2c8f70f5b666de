"""The rules of f8emu.dialects against the kernels of their stacks, on a GPU: every byte of codes and scales.

    python -m benchmarks.proofs.dialects_on_gpu --sources FOLDER --libraries FOLDER --json OUT

`--libraries`: the stacks' CUDA kernels, compiled. `*.so` registers operators of torch, or exports functions.
`--sources`: files of the stacks, from which functions of torch and Triton are taken by their names. Packages are
imported. A case whose kernel is not there, or a stack without its sources, is not run, and says why. Every stack runs
in a process of its own.

Tables: amaxes at every mantissa and next to floors and powers of two, with values at the ties of float8 codes; and
normal numbers. Blocks with NaN and infinity are counted apart, and decide nothing. Exit status 1 if a kernel differs
from its dialect by more than the dialect says.
"""

import ast
import ctypes
import functools
import importlib
import json
import math
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from benchmarks.runner import DEVICE, Bench, Entry, compile_without_limits, draw_entries, option, say, write_json
from f8emu.conformance.compare import different, distances
from f8emu.dialects import Dialect, dialect_by_name, quantize, rules
from f8emu.dialects.arithmetic import block_amax, grid_shape
from f8emu.dialects.rules import COLUMN, GROUP, MX_GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.interop.arrays import to_numpy, to_torch

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
Result = tuple[Tensor | None, Tensor | None]
"""Codes and scales, of which a kernel may give one alone."""
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
E4M3, HALVES, MAX = torch.float8_e4m3fn, ("bfloat16", "float16"), 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel, and the dialect whose bytes it should give; the scale of one whose scales are given is the kernel's."""

    name: str
    dialect: Dialect
    block: Block
    run: Callable[[Tensor], Result]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    range: tuple[float, float] = (0.0, math.inf)
    """Finite values of other magnitudes are 0 in the table."""
    has_special: bool = True
    """Whether NaN and infinity are tried too."""


def case(name: str, of: str | Dialect, block: Block, run: Callable[..., Any], *with_: Any, **more: Any) -> Case:
    """`run` gets the matrix and then `with_`."""
    return Case(name=name, dialect=dialect_by_name(of), block=block, run=lambda x: run(x, *with_), **more)


def filling(name: str, of: str | Dialect, block: Block, fill: Callable[..., Any], *with_: Any, **more: Any) -> Case:
    """`fill` gets the matrix, memory for codes, float32 zeros for the scales of the grid, and then `with_`."""

    def run(x: Tensor) -> Result:
        grid = (1,) if block == TENSOR else grid_shape(x.shape, block)
        codes, scale = torch.empty_like(x, dtype=E4M3), torch.zeros(grid, device=x.device)
        fill(x, codes, scale, *with_)
        return codes, scale

    return case(name, of, block, run, **more)


def launching(name: str, of: str | Dialect, kernel: Any, *with_: Any, **options: Any) -> Case:
    """A kernel of Triton, one program for each group."""

    def fill(x: Tensor, codes: Tensor, scale: Tensor) -> None:
        kernel[(scale.numel(),)](x, codes, scale, *with_, **options)

    return filling(name, of, GROUP, fill)


def variant(name: str, *, scale: dict[str, Any] | None = None, code: dict[str, Any] | None = None, **more: Any) -> Any:
    """A dialect with other fields: what its caveat says of a corner."""
    dialect: Any = dialect_by_name(name)
    return replace(
        dialect, scale=replace(dialect.scale, **(scale or {})), code=replace(dialect.code, **(code or {})), **more
    )


# 1 Tables


@functools.cache
def tables(dtype: str, block: Block, *, special: bool) -> list[Array]:
    """Matrices of blocks: amaxes of `_amaxes` and values at ties, then normal numbers; or blocks with NaN and inf."""
    rng, of = np.random.default_rng(20261126), DTYPES[dtype]
    height, width = (16, 256) if block == TENSOR else (block[0] or 1, block[1] or 512)
    count = {TENSOR: 192, SQUARE: 256, ROW: 1536}.get(block, 3072)
    across = 1 if block in (TENSOR, ROW) else max(1, 512 // width)
    amax, size = _amaxes(of, count, rng), height * width
    with np.errstate(all="ignore"):
        values = (_shares(rng, count, size) * amax.astype(np.float64)[:, None]).astype(of)
    values[np.arange(count), rng.integers(0, size, count)] = amax * rng.choice(np.array([-1, 1], of), count)
    if special:
        values = values[: max(across, count // 8) // across * across]
        specials = np.array([np.nan, np.inf, -np.inf, -np.nan, np.nan], of)
        for i, row in enumerate(values):
            row[rng.integers(0, size, 1 + i % 2)] = specials[i % len(specials)]
    else:
        more = count // 2 // across * across
        normal = rng.standard_normal((more, size)) * np.exp2(rng.uniform(-12, 6, (more, 1)))
        values = np.concatenate([values, normal.astype(of)])
    blocks = values.reshape(-1, across, height, width).swapaxes(1, 2)
    return list(blocks.reshape(-1, height if block == TENSOR else len(blocks) * height, across * width))


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
    shares = rng.random((count, size)) ** 4
    is_tie = rng.random((count, size)) < 0.5
    shares[is_tie] = rng.choice(ties, is_tie.sum())
    return shares * rng.choice([-1.0, 1.0], (count, size))


# 2 Comparison


def compare(of: Case, dtype: str, device: torch.device, *, special: bool) -> Entry:
    """How many codes and scales of the tables differ, how far, and the first that does."""
    scales, codes = list[tuple[Array, ...]](), list[tuple[Array, ...]]()
    for drawn in tables(dtype, of.block, special=special):
        wide = np.abs(drawn.astype(np.float32))
        is_outside = np.isfinite(wide) & ((wide < of.range[0]) | (wide > of.range[1]))
        x = np.where(is_outside, drawn.dtype.type(0), drawn)
        got, scale = (None if tensor is None else to_numpy(tensor.cpu()) for tensor in of.run(to_torch(x, device)))
        scale = None if scale is None else scale.reshape(grid_shape(x.shape, of.block))
        expected = quantize(x, of.dialect, block=of.block, scale=scale if of.dialect.scale is None else None)
        wanted = expected.codes
        if scale is not None and of.dialect.scale is not None:
            scale = scale.view(expected.scale.dtype) if scale.dtype == np.uint8 else scale
            if scale.dtype != expected.scale.dtype:
                raise TypeError(f"scales are {scale.dtype}, those of {of.dialect.name} {expected.scale.dtype}")
            scales.append((scale, expected.scale, block_amax(x, of.block)))
            # Codes are judged by the scale that the kernel has.
            by_scale = quantize(x, of.dialect, block=of.block, scale=scale).codes
            wanted = np.where(_spread(different(scale, expected.scale), x.shape, of.block), by_scale, wanted)
        if got is not None:
            codes.append((got, wanted, x, _spread(expected.scale, x.shape, of.block)))
    entry: Entry = {}
    for name, unit, pairs in (("scale", "scale_ulps", scales), ("code", "code_steps", codes)):
        columns = [np.concatenate([array.reshape(-1) for array in column]) for column in zip(*pairs, strict=True)]
        distance = _distance(*columns[:2]) if columns else np.zeros(0, np.int64)
        counts = {f"{name}s": distance.size, f"{name}s_differ": int((distance != 0).sum())}
        entry |= counts | {unit: int(distance.max(initial=0))}
        if distance.any():
            first = (float(column[(distance != 0).argmax()]).hex() for column in columns)
            entry[f"first_{name}"] = dict(zip(("got", "expected", "of", "s"), first, strict=False))
    return entry


def _distance(got: Array, expected: Array) -> Array:
    """In neighbours of the dtype; two NaN are equal, -0 is next to 0, NaN and infinity are far from numbers."""
    distance, is_apart = distances(got, expected)
    return np.where(is_apart, 1 << 31, np.maximum(np.abs(distance), 1)) * different(got, expected)


def _spread(of_block: Array, shape: tuple[int, ...], block: Block) -> Array:
    for axis, size in enumerate(_sizes(block, shape)):
        of_block = np.repeat(of_block, size, axis)
    return of_block[: shape[0], : shape[1]]


def _sizes(block: Block, shape: Sequence[int]) -> list[int]:
    return [size or extent for size, extent in zip(block, shape, strict=True)]


def judge(of: Case, device: torch.device) -> Iterator[Entry]:
    """An entry for each dtype of x. Its verdict, of finite x: `equal`, `within` the dialect's bounds, or `differs`."""
    for dtype in of.dtypes:
        entry: Entry = {"kernel": of.name, "dialect": of.dialect.name, "x": dtype}
        try:
            finite = compare(of, dtype, device, special=False)
            is_equal = not finite["scales_differ"] and not finite["codes_differ"]
            is_within = finite["scale_ulps"] <= of.dialect.scale_ulps and finite["code_steps"] <= of.dialect.code_steps
            entry |= {"verdict": "equal" if is_equal else "within" if is_within else "differs", **finite}
            if of.has_special:
                special = compare(of, dtype, device, special=True)
                counts = ("scales", "scales_differ", "codes", "codes_differ")
                entry["special"] = {count: special[count] for count in counts}
                entry["special_differ"] = special["scales_differ"] + special["codes_differ"]
        except Exception:  # the others go on
            entry |= _not_run(traceback.format_exc(limit=-3))
        yield entry


def _not_run(why: str) -> Entry:
    return {"verdict": "not run", "failed": why[-1500:]}


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

    def call(self, library: str, function: str, *arguments: Any) -> None:
        """A function of a library; one of C gets tensors as pointers."""
        module = _loaded(self.libraries / f"{library}.so")
        if isinstance(module, ctypes.CDLL):
            torch.cuda.synchronize()
            kinds = {int: ctypes.c_int, float: ctypes.c_float}
            passed = (ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else kinds[type(a)](a) for a in arguments)
            arguments = tuple(passed)
        getattr(module, function)(*arguments)

    def functions(self, file: str, *names: str, **needed: Any) -> Any:
        """A module of functions and methods of a source file, as the file has them; `needed` are its other globals.

        Of their decorators only Triton's stay.
        """
        text, parts = (self.sources / file).read_text(), [_HEADER]
        for name in names:
            nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
            function = next(node for node in nodes if node.name == name)
            kept = [decorator.lineno for decorator in function.decorator_list if "triton" in ast.unparse(decorator)]
            lines = text.splitlines()[min([function.lineno, *kept]) - 1 : function.end_lineno]
            parts.append("\n".join(line[function.col_offset :] for line in lines))
        path = self._made / f"{Path(file).stem}_{names[0]}.py"
        path.write_text("\n\n".join(parts))
        module = ModuleType(path.stem)
        module.__dict__.update(needed)
        sys.modules[path.stem] = module  # where the compiler looks for its names
        exec(compile(path.read_text(), path, "exec"), module.__dict__)
        return module


@functools.cache
def _loaded(library: Path) -> Any:
    """The operators that a library of vLLM registers, a module of tvm_ffi of SGLang, or functions of C."""
    if library.name.startswith("vllm"):
        torch.ops.load_library(str(library))
        return torch.ops._C
    is_module = library.name.startswith("sglang")
    return importlib.import_module("tvm_ffi").load_module(str(library)) if is_module else ctypes.CDLL(str(library))


class _Names:
    """An object with these attributes, such as a layer of a stack."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)

    def fp8_dtype(self) -> torch.dtype:
        return E4M3


def _bytes_of(packed: Tensor, groups: int) -> Tensor:
    """Bytes [rows, groups] of int32 [rows, ceil(groups / 4)]."""
    return packed.reshape(-1).view(torch.uint8).view(len(packed), -1)[:, :groups]


def _grid(x: Tensor, block: Block) -> Tensor:
    """[blocks, rows of a block, blocks, K of a block]."""
    rows, width = _sizes(block, x.shape)
    return x.view(-1, rows, x.shape[1] // width, width)


# 4 Stacks


def _vllm(kernels: Kernels) -> Iterator[Case]:
    def dynamic(x: Tensor, codes: Tensor, scale: Tensor, function: str, *rest: Any) -> None:
        kernels.call("vllm_common", function, codes, x, scale, *rest)

    def static(x: Tensor, codes: Tensor, scale: Tensor) -> None:
        kernels.call("vllm_common", "static_scaled_fp8_quant", codes, x, scale.fill_(0.00372), None)

    def group(x: Tensor, codes: Tensor, scale: Tensor, up: bool, by_columns: bool) -> None:
        laid, rest = scale.t().contiguous().t() if by_columns else scale, (128, 1e-10, -MAX, MAX, up, by_columns, False)
        kernels.call("vllm_group", "per_token_group_fp8_quant", x, codes, laid, *rest)
        scale.copy_(laid)

    def packed(x: Tensor) -> Result:
        groups, rows = x.shape[1] // 128, -(-len(x) // 4) * 4
        codes, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(-(-groups // 4), rows, dtype=torch.int32)
        scale = scale.t()[: len(x)]
        kernels.call("vllm_group", "per_token_group_fp8_quant_packed", x, codes, scale, 128, 1e-10, -MAX, MAX)
        return codes, _bytes_of(scale, groups)

    def silu(x: Tensor, codes: Tensor, scale: Tensor) -> None:
        # silu(gate) * up with so large a gate that sigmoid is 1: what is quantized is 256 * up, exactly.
        both = torch.cat([torch.full_like(x, 256.0), x], 1)
        kernels.call("vllm_silu", "silu_and_mul_per_block_quant", codes, both, scale, 128, None, False)
        scale /= 256

    def norm(x: Tensor, codes: Tensor, scale: Tensor, function: str, *rest: Any) -> None:
        # With so large an epsilon the norm is x * 2^-20, exactly, and the weight takes it back.
        weight = torch.full_like(x[0], 2.0**20)
        kernels.call("vllm_norm", function, codes, x, weight, scale, 2.0**40, None, None, *rest)

    normed: dict[str, Any] = {"dtypes": ("float32", "bfloat16"), "range": (0.0, 128.0), "has_special": False}
    by_log2 = variant("vllm_group_ue8m0", scale={"power_of_two": rules.PowerOfTwo.UP_LOG2})
    of_256 = variant("vllm_silu_group", scale={"scale_floor": 1 / (MAX * 512) / 256})
    token, of_group = "dynamic_per_token_scaled_fp8_quant", "vllm_layernorm_group"
    yield filling("vLLM per tensor", "vllm_tensor", TENSOR, dynamic, "dynamic_scaled_fp8_quant")
    yield filling("vLLM per token", "vllm_token", ROW, dynamic, token, None)
    yield filling("vLLM static", "vllm_static", TENSOR, static)
    yield filling("vLLM group", "vllm_group", GROUP, group, False, False)
    yield filling("vLLM group, columns", "vllm_group", GROUP, group, False, True)
    yield filling("vLLM group UE8M0", "vllm_group_ue8m0", GROUP, group, True, False, dtypes=HALVES)
    yield filling("vLLM group UE8M0, by log2", by_log2, GROUP, group, True, False, dtypes=("float32",))
    yield case("vLLM group UE8M0 packed", "vllm_group_ue8m0_packed", GROUP, packed, dtypes=HALVES)
    yield filling("vLLM silu group", of_256, GROUP, silu, dtypes=HALVES, range=(0.0, 128.0))
    yield filling("vLLM norm group", of_group, GROUP, norm, "rms_norm_per_block_quant", 128, False, **normed)
    yield filling("vLLM norm per token", "vllm_token", ROW, norm, "rms_norm_dynamic_per_token_quant", **normed)


def _vllm_torch(kernels: Kernels) -> Iterator[Case]:
    layers = "vllm/model_executor/layers/quantization"
    quant = kernels.functions(f"{layers}/utils/fp8_utils.py", "_per_token_group_quant_fp8")
    triton = quant._per_token_group_quant_fp8
    broadcast = kernels.functions(f"{layers}/utils/quant_utils.py", "group_broadcast").group_broadcast
    constants = {"_FP8_DTYPE": E4M3, "_FP8_MIN": -MAX, "_FP8_MAX": MAX, "_FP8_MIN_SCALING_FACTOR": 1 / (MAX * 512)}
    names = {"group_broadcast": broadcast, "GroupShape": _Names(PER_TOKEN="token", PER_TENSOR="tensor"), **constants}
    methods = ("forward_native", "_quantize_group_native")
    native = kernels.functions(f"{layers}/input_quant_fp8.py", *methods, **names)
    platform: dict[str, Any] = {"current_platform": _Names(), "get_fp8_min_max": lambda: (-MAX, MAX)}
    platform |= {"cdiv": lambda x, y: -(-x // y), "DEFAULT_BLOCK_SIZE": [128, 128]}
    parts = ("_align", "_ceil_to_ue8m0", "per_block_cast_to_fp8")
    cast = kernels.functions("vllm/utils/deep_gemm.py", *parts, **platform).per_block_cast_to_fp8

    for up, name in ((False, "vllm_group_triton"), (True, "vllm_group_triton_ue8m0")):
        options = {"fp8_min": -MAX, "fp8_max": MAX, "use_ue8m0": up, "BLOCK": 128, "num_warps": 1, "num_stages": 1}
        yield launching(f"vLLM Triton group{' UE8M0' * up}", name, triton, 128, 512, 512, 1e-10, **options)
    grouped = {"group_size": 128, "use_ue8m0": False, "column_major_scales": False, "tma_aligned_scales": False}
    plain = {"is_group_quant": False, "static": False, "num_token_padding": None}
    for kind, block, name, method, more in (
        ("token", ROW, "vllm_native_cuda", native.forward_native, plain),
        ("tensor", TENSOR, "vllm_native_cuda", native.forward_native, plain),
        ("group", GROUP, "vllm_native_group_cuda", native._quantize_group_native, grouped),
    ):
        layer = _Names(group_shape=kind, **more)
        yield case(f"QuantFP8 {kind}", name, block, functools.partial(method, layer))
        compiled = torch.compile(lambda x, method=method, layer=layer: method(layer, x), dynamic=False)
        yield case(f"QuantFP8 {kind}, compiled", variant(name, code_steps=1), block, compiled)
    compiled = torch.compile(cast, dynamic=True)
    for up, name in ((False, "vllm_weight_block_cuda"), (True, "vllm_weight_block_ue8m0")):
        for how, run in (("", cast), (", compiled", compiled)):
            yield case(f"vLLM per_block_cast_to_fp8{' UE8M0' * up}{how}", name, SQUARE, run, [128, 128], up)


def _sglang(kernels: Kernels) -> Iterator[Case]:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

    def call(kernel: str, x: Tensor, *rest: Tensor, library: str = "") -> None:
        kernels.call(f"sglang_{library or kernel}", f"{kernel}_{short[x.dtype]}", x, *rest)

    def up(x: Tensor) -> Result:
        groups = x.shape[1] // 128
        codes, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(len(x), -(-groups // 4), dtype=torch.int32)
        call("ue8m0", x, codes, scale, library="group")
        return codes, _bytes_of(scale, groups)

    def token(x: Tensor, codes: Tensor, scale: Tensor, rows: int) -> None:
        for part in zip(x.split(rows), codes.split(rows), scale.split(rows), strict=True):
            call("token", *part)

    def tensor(x: Tensor, codes: Tensor, scale: Tensor) -> None:
        call("tensor", x.view(-1), codes.view(-1), scale)

    quant = kernels.functions("sglang/kernels/ops/quantization/fp8_kernel.py", "_per_token_group_quant_8bit")
    names = ("input_to_float8", "ceil_to_ue8m0", "per_block_cast_to_fp8")
    needed = {"fp8_dtype": E4M3, "fp8_max": MAX, "_is_fp8_fnuz": False, "ceil_align": lambda x, y: -(-x // y) * y}
    of = kernels.functions("sglang/srt/layers/quantization/fp8_utils.py", *names, **needed)
    zeros = variant("sglang_token", code={"scale_floor": 2.0**-126})
    options = {"bit8_min": -MAX, "bit8_max": MAX, "BLOCK": 128, "num_warps": 1, "num_stages": 1}
    approximate = variant("vllm_group_triton", code={"rule": rules.CodeRule.INVERSE})
    normal: dict[str, Any] = {"range": (2.0**-100, math.inf)}  # fast math has no subnormal s
    # The approximate division by an amax above 2^126 gives 0.
    yield filling("SGLang group", "sglang_group", GROUP, functools.partial(call, "group"), range=(0.0, 2.0**126))
    yield case("SGLang group UE8M0", "sglang_group_ue8m0", GROUP, up)
    yield filling("SGLang per token, 1,024 rows", "sglang_token", ROW, token, 1024, **normal)
    yield filling("SGLang per token, 2,304 rows", zeros, ROW, token, 2304, **normal)
    yield filling("SGLang per tensor", "sglang_tensor", TENSOR, tensor)
    yield launching("SGLang Triton group", approximate, quant._per_token_group_quant_8bit, 128, 128, 1e-10, **options)
    yield case("SGLang input_to_float8", "sglang_weight_tensor", TENSOR, of.input_to_float8)
    yield case("SGLang per_block_cast_to_fp8", "sglang_weight_block_ue8m0", SQUARE, of.per_block_cast_to_fp8)


def _deepseek(kernels: Kernels) -> Iterator[Case]:
    names = [f"per_{kind}_cast_to_fp8" for kind in ("token", "channel", "block")]
    casts = kernels.functions("deep_gemm/utils/math.py", "ceil_div", "align", "ceil_to_ue8m0", *names)
    for name, block in zip(names, (GROUP, COLUMN, SQUARE), strict=True):
        for up, dialect in ((False, "deep_gemm_block_cuda"), (True, "deep_gemm_block_ue8m0")):
            yield case(f"DeepGEMM {name}{' UE8M0' * up}", dialect, block, getattr(casts, name), up)
    act_quant = kernels.functions("deepseek/kernel.py", "act_quant_kernel", "act_quant").act_quant
    yield case("DeepSeek-V3 act_quant", "deepseek_group", GROUP, act_quant, 128, None)
    yield case("DeepSeek-V3 act_quant UE8M0", "deepseek_group_ue8m0", GROUP, act_quant, 128, "ue8m0")


def _transformers(kernels: Kernels) -> Iterator[Case]:
    needed = {"_FP8_MAX": MAX, "_FP8_MIN": -MAX, "_FP8_DTYPE": E4M3}
    needed["_get_ue8m0_dtype"] = lambda: torch.float8_e8m0fnu
    methods = ("_resolve_block_size", "_quantize_one")
    of = kernels.functions("transformers/integrations/finegrained_fp8.py", *methods, **needed)
    act_quant = kernels.functions("finegrained_fp8/utils.py", "_fp8_act_quant_kernel")._fp8_act_quant_kernel
    sizes = {"BLOCK_SIZE": 128, "PADDED_BLOCK": 128}

    def weight(x: Tensor, size: list[int] | None, form: str) -> Result:
        config = SimpleNamespace(weight_block_size=size, scale_fmt=form)
        quantizer = SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=config))
        quantizer._resolve_block_size = functools.partial(of._resolve_block_size, quantizer)
        tensors = of._quantize_one(quantizer, "w.weight", x)
        return tensors["w.weight"], tensors["w.weight_scale_inv"]

    yield launching("finegrained-fp8 act_quant", "transformers_activation", act_quant, **sizes)
    for form, name in (("float", "transformers_block"), ("ue8m0", "transformers_block_ue8m0")):
        yield case(f"Fp8Quantize blocks {form}", name, SQUARE, weight, [128, 128], form)
        yield case(f"Fp8Quantize tensor {form}", name, TENSOR, weight, None, form)


def _fbgemm(kernels: Kernels) -> Iterator[Case]:
    def of_torch(x: Tensor, function: str, block: Block, use_triton: bool) -> Result:
        of = importlib.import_module("fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm")
        return getattr(of, function)(x, *(block if block == SQUARE else ()), use_triton=use_triton)

    def cuda(x: Tensor, codes: Tensor, scale: Tensor) -> None:
        kernels.call("small", "fbgemm_row", x, codes, scale, *x.shape)

    zero_is_one = {"amax_floor": 0.0, "small_amax": (0.0, MAX)}
    floors = {"bfloat16": {"amax_floor": float(ml_dtypes.bfloat16(1e-12))}, "float16": zero_is_one, "float32": {}}
    for function, block in (("quantize_fp8_row", ROW), ("quantize_fp8_block", SQUARE)):
        yield case(f"FBGEMM Triton {function}", "fbgemm_triton", block, of_torch, function, block, True)
        for dtype, scale in floors.items():
            dialect = variant("fbgemm_torch", scale=scale)
            yield case(f"FBGEMM torch {function}", dialect, block, of_torch, function, block, False, dtypes=(dtype,))
    yield filling("FBGEMM quantize_fp8_per_row", "fbgemm_cuda", ROW, cuda, dtypes=("bfloat16",))


def _transformer_engine(kernels: Kernels) -> Iterator[Case]:
    """Its function from amax to t, and 1/t as its kernels have it; the casts themselves were not compiled."""

    def amax_of(x: Tensor, block: Block) -> Tensor:
        return _grid(x.float().abs(), block).amax((1, 3)).contiguous()

    def scales(x: Tensor, block: Block, down: int, is_wide: bool) -> Result:
        amax, limit = amax_of(x, block), torch.finfo(torch.float32 if is_wide else x.dtype).max
        t, s = torch.empty_like(amax), torch.empty_like(amax)
        kernels.call("small", "te_scales", amax, t, s, amax.numel(), down, 0.0, float(limit))
        return None, s

    def bytes_of(x: Tensor) -> Result:
        amax = amax_of(x, MX_GROUP)
        exponents = torch.empty_like(amax, dtype=torch.uint8)
        kernels.call("small", "te_bytes", amax, exponents, amax.numel())
        return None, exponents

    parts = (("current", TENSOR), ("current_pow2", TENSOR), ("block_float", GROUP), ("block", GROUP), ("block", SQUARE))
    for kind, block in parts:
        name, rest = f"transformer_engine_{kind}", (block, int(kind in ("current_pow2", "block")), "current" in kind)
        yield case(f"compute_scale_from_amax, {kind} {block}", name, block, scales, *rest)
    yield case("float_to_e8m0", "transformer_engine_mxfp8", MX_GROUP, bytes_of)


def _torchao(_: Kernels) -> Iterator[Case]:
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
        scale = primitives._choose_scale_float8(x, _sizes(block, x.shape), E4M3)
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
    blocks = {"act_quant_lhs": GROUP, "act_quant_rhs": COLUMN, "act_quant_transposed_lhs": COLUMN}
    for name, block in (blocks | {"weight_quant_rhs": SQUARE, "weight_quant_transposed_rhs": SQUARE}).items():
        yield case(f"torchao Triton {name}", "torchao_blockwise", block, blockwise, name)
    # s is fl(amax * fl(1/448)), rounded to the dtype of x.
    on_cuda = {"division": rules.Division.RECIPROCAL, "arithmetic": rules.Arithmetic.FLOAT32}
    stored = rules.Stored(dtype="input")
    rounded = variant("torchao_inference", scale=on_cuda, code={"is_scale_rounded": True}, stored=stored)
    for what, block in (("row", ROW), ("tensor", TENSOR), ("block", SQUARE)):
        yield case(f"torchao inference {what}", rounded, block, inference, block)
    for mode in ("FLOOR", "CEIL", "EVEN", "RCEIL"):
        # As the caveats say: a byte of 255, for a NaN, and RCEIL's byte of 0 have codes of their own.
        rest: dict[str, Any] = {"range": (2.0**-100 if mode == "RCEIL" else 0.0, math.inf), "has_special": False}
        rest["dtypes"] = ("float32", "bfloat16")
        yield case(f"to_mx {mode}", f"torchao_mx_{mode.lower()}", MX_GROUP, mx, mode, **rest)


def _compressed_tensors(_: Kernels) -> Iterator[Case]:
    def run(x: Tensor, strategy: str, block: Block) -> Result:
        quantization = importlib.import_module("compressed_tensors.quantization")
        helpers = importlib.import_module("compressed_tensors.quantization.utils")
        forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
        more = {"block_structure": [128, 128]} if strategy == "block" else {}
        arguments = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **more)
        blocks = _grid(x, block)
        scale, _ = helpers.calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments)
        scale = scale.view(-1) if strategy == "tensor" else scale
        return forward.quantize(x, scale, None, arguments, dtype=E4M3), scale

    for strategy, block in (("tensor", TENSOR), ("channel", ROW), ("block", SQUARE)):
        yield case(f"compressed-tensors {strategy}", "compressed_tensors_cuda", block, run, strategy, block)


_OF_CUDA = (_vllm, _vllm_torch, _sglang, _deepseek, _transformers, _fbgemm, _transformer_engine)
STACKS = {stack.__name__.removeprefix("_"): stack for stack in (*_OF_CUDA, _torchao, _compressed_tensors)}


# 5 The command


BENCH = Bench(
    "benchmarks.proofs.dialects_on_gpu",
    __doc__,
    option("sources", Path("sources")),
    option("libraries", Path("libraries")),
    option("stacks", tuple(STACKS), choices=tuple(STACKS)),
    option("seconds", 300, "how long the stacks may take together"),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, entries = run.arguments, list[Entry]()
    # Every stack in a process of its own: an error on the device ends no other.
    start, processes = multiprocessing.get_context("spawn").Process, dict[Path, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for stack in arguments.stacks:
            path = Path(folder, stack)
            processes[path] = start(
                target=judge_stack, args=(stack, arguments.sources, arguments.libraries, run.device, path)
            )
            processes[path].start()
        end = time.monotonic() + arguments.seconds
        for path, process in processes.items():
            process.join(max(1.0, end - time.monotonic()))
            process.kill()  # where it has not ended
            process.join()
            entries += json.loads(path.read_text())["cases"] if path.exists() else []
            if process.exitcode:
                entries.append({"kernel": path.name, **_not_run(f"its process ended with {process.exitcode}")})
    run.record(cases=entries)
    columns = "x verdict scales:, scales_differ:, scale_ulps codes:, codes_differ:, code_steps special_differ:,"
    draw_entries("Kernels against dialects", entries, columns, of="kernel")
    for e in entries:
        if e["verdict"] == "differs":
            say(f"{e['kernel']} {e['x']}: {e.get('first_scale')} {e.get('first_code')}")
    verdicts = [entry["verdict"] for entry in entries]
    say(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts))))
    return int("differs" in verdicts)


def judge_stack(stack: str, sources: Path, libraries: Path, device: torch.device, path: Path) -> None:
    """Writes the entries of a stack after each of its cases: what a process that ends early has found is kept."""
    compile_without_limits()
    entries: list[Entry] = []
    try:
        for kernel_case in STACKS[stack](Kernels(sources, libraries)):
            entries += judge(kernel_case, device)
            write_json(path, {"cases": entries})
    except Exception:  # before its cases, such as a source that is not there
        write_json(path, {"cases": [*entries, {"kernel": stack, **_not_run(traceback.format_exc(limit=-3))}]})


if __name__ == "__main__":
    sys.exit(main())

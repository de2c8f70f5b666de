"""Recorded GEMMs: golden files read into cases, checked strictly, and written.

A golden file is a safetensors container whose metadata entry `cases` is a JSON list. Each case has `mode`,
`use_fast_accum`, `out_dtype`, `a_dtype`, `b_dtype`, `M N K` of the GEMM that ran, `kernels` ([name, grid] each) and
`tensors` (role -> key; cases share inputs). `a` is [M, K] codes, `b` is [N, K] codes: the GEMM is `a @ b^T`. A case
with `sampled_rows` and `sampled_cols` holds those rows and columns of a full-size GEMM.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.container import REMEDY, read_container, write_container
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import Family, GemmCase, Mode, Sample
from f8emu.shown import Shown
from f8emu.spec import BFLOAT16, HIGH_PRECISION, HOPPER, F8Error, Format, Granularity
from f8emu.spec.errors import GoldenFileError
from f8emu.spec.scaling import BLOCK
from f8emu.strict import Fault, choice, faults_as, parsed, part, read, require

SHIPPED = "h200_golden.safetensors"
Kernels = tuple[tuple[str, tuple[int, ...]], ...]  # (name, grid) of every kernel, in order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class GoldenCase(Shown):
    """One recorded GEMM: its operands, its output, and the kernels that ran."""

    name: str
    gemm: GemmCase
    out: np.ndarray
    """[M, N]; with a sample only the sampled outputs."""
    kernels: Kernels

    @property
    def id(self) -> str:
        return f"{self.gemm.id} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class GoldenFile(Shown):
    """The content of a golden file."""

    path: Path
    sha256: str
    metadata: dict[str, str]
    """Everything but the cases: device, torch, cuda, seed, ..."""
    cases: tuple[GoldenCase, ...]

    @property
    def device(self) -> str:
        return self.metadata.get("device", "unknown device")


def shipped_golden() -> GoldenFile:
    """The cases recorded on an H200, from the package's own data."""
    with as_file(files("f8emu.conformance") / "data" / SHIPPED) as path:
        return read_golden(path)


def read_golden(path: str | Path) -> GoldenFile:
    """The content of a golden file; its arrays are typed and read-only.

    Raises:
        GoldenFileError: missing, cut short, not a golden file, or inconsistent; the message says where and what to do.
    """
    path, call = Path(path), "read_golden"
    tensors, metadata, sha256 = read_container(path, call)
    with faults_as(GoldenFileError, call, path, REMEDY):
        require("cases" in metadata, "a golden file, whose metadata has 'cases'", f"{', '.join(metadata)} alone")
        entries = parsed(metadata.pop("cases"), "JSON as metadata 'cases'")
        is_list = isinstance(entries, list) and bool(entries)
        require(is_list, "metadata 'cases' to be a list with a case or more", repr(entries))
    cases = []
    for i, entry in enumerate(entries):
        with faults_as(GoldenFileError, call, f"{path}: case {i}", REMEDY):
            cases.append(_case(i, part(_Entry, entry), tensors))
    return GoldenFile(path=path, sha256=sha256, metadata=metadata, cases=tuple(cases))


def write_golden(path: str | Path, cases: Sequence[GoldenCase], metadata: Mapping[str, str]) -> None:
    """Write a golden file; `read_golden` gives the same cases back.

    Equal tensors are stored once. `metadata` should name device, torch, cuda and seed.
    """
    tensors: dict[str, np.ndarray] = {}
    known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def keep(key: str, array: np.ndarray) -> str:
        array = array.view(np.uint8) if array.dtype.itemsize == 1 else array  # float8 is stored as its codes
        digest = (array.dtype.name, array.shape, hashlib.sha256(np.array(array, order="C").tobytes()).digest())
        tensors.setdefault(known.setdefault(digest, key), array)
        return known[digest]

    entries = []
    for case in cases:
        gemm, sample = case.gemm, case.gemm.sample
        roles = {"a": gemm.a, "b": gemm.b, "out": case.out, **store_scales(gemm), "bias": gemm.bias, "offs": gemm.offs}
        m, n = gemm.full_size
        entry: dict[str, object] = {
            "id": gemm.id,
            "name": case.name,
            "mode": gemm.mode.value,
            "use_fast_accum": None if gemm.mode is Mode.BF16 else gemm.use_fast_accum,
            "out_dtype": gemm.out_dtype.name,
            "a_dtype": gemm.a.dtype.name,
            "b_dtype": gemm.b.dtype.name,
            "M": m,
            "N": n,
            "K": gemm.k,
            "kernels": [[name, list(grid)] for name, grid in case.kernels],
            "tensors": {role: keep(f"{gemm.id}.{role}", x) for role, x in roles.items() if x is not None},
        }
        if sample is not None:
            entry |= {"sampled_rows": list(sample.rows), "sampled_cols": list(sample.cols)}
        entries.append(entry)
    write_container(Path(path), tensors, {**metadata, "cases": json.dumps(entries)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    # One entry of `cases`, as its JSON has it.
    mode: Mode
    use_fast_accum: bool | None = None
    out_dtype: str
    a_dtype: str
    b_dtype: str
    M: int
    N: int
    K: int
    kernels: tuple[tuple[str, tuple[int, ...]], ...]
    tensors: dict[str, str]
    id: str | None = None
    name: str | None = None
    sampled_rows: tuple[int, ...] | None = None
    sampled_cols: tuple[int, ...] | None = None

    def sample(self) -> Sample | None:
        rows, cols = self.sampled_rows, self.sampled_cols
        if rows is None and cols is None:
            return None
        for key, places, size in (("sampled_rows", rows, self.M), ("sampled_cols", cols, self.N)):
            is_right = places is not None and len(set(places)) == len(places) and all(0 <= i < size for i in places)
            require(is_right, f"{key} to be different indices below {size}", repr(places))
        return Sample(m=self.M, n=self.N, rows=rows or (), cols=cols or ())


@dataclass(frozen=True, slots=True)
class _Tensors:
    # The tensors of one case by role, and those of the whole file by key.
    roles: Mapping[str, str]
    stored: Mapping[str, np.ndarray]

    def typed(self, role: str, dtype: Any, *shapes: tuple[int | None, ...]) -> np.ndarray:
        """The tensor of a role, of one of `shapes` (None is any size); stored codes get their type."""
        key = self.roles.get(role)
        require(key in self.stored, f"a tensor for {role!r}", "no such role" if key is None else f"no tensor {key!r}")
        array, dtype = self.stored[str(key)], np.dtype(dtype)
        stored = np.dtype(np.uint8) if dtype.itemsize == 1 else dtype
        require(array.dtype == stored, f"{role!r} of dtype {stored.name}", array.dtype.name)
        fits = (
            len(shape) == array.ndim and all(n in (None, size) for n, size in zip(shape, array.shape, strict=True))
            for shape in shapes
        )
        require(any(fits), f"{role!r} of shape {' or '.join(map(str, shapes))}", array.shape)
        return array.view(dtype)


def _case(index: int, entry: _Entry, stored: Mapping[str, np.ndarray]) -> GoldenCase:
    # 1. What the GEMM is.
    mode, k = entry.mode, entry.K
    require(not mode.is_microscaled, "a mode that GPUs were recorded in", mode.value)
    operands = {f.name: f for f in ((BFLOAT16,) if mode is Mode.BF16 else HOPPER.operand_formats)}
    a_format = dtype_of(choice(entry.a_dtype, operands, "a_dtype"))
    b_format = dtype_of(choice(entry.b_dtype, operands, "b_dtype"))
    out_format: Format = choice(entry.out_dtype, {f.name: f for f in HIGH_PRECISION}, "out_dtype")
    fast = False if mode is Mode.BF16 else read(bool, entry.use_fast_accum, "use_fast_accum")
    sample, m, n = entry.sample(), entry.M, entry.N
    if sample is not None:
        m, n = len(sample.rows), len(sample.cols)
    # 2. Its tensors, of the sizes that follow.
    tensors, offs = _Tensors(entry.tensors, stored), None
    if mode is Mode.GROUPED_ROWWISE:  # "N" is not used: torch's profile of a grouped GEMM gives the groups there
        a, b = (
            tensors.typed(role, fmt, (None, k), (None, None, k)) for role, fmt in (("a", a_format), ("b", b_format))
        )
        n = b.shape[-2]
        offs = tensors.typed("offs", np.int32, (None,)) if "offs" in entry.tensors else None
    else:
        a, b = tensors.typed("a", a_format, (m, k)), tensors.typed("b", b_format, (n, k))
    scale_a, of_a, scale_b, of_b = _scales(tensors, mode, m, n, k)
    # 3. [CHAIN-3] S, which only the grid of the kernel tells.
    require(all(min(grid, default=1) > 0 for _, grid in entry.kernels), "grids of positive sizes", entry.kernels)
    split_k = slices_of_k(entry.kernels, entry.M, entry.N)
    gemm = GemmCase(
        id=entry.id or f"{index:03d}",
        mode=mode,
        a=a,
        b=b,
        scale_a=scale_a,
        scale_b=scale_b,
        granularity_a=of_a,
        granularity_b=of_b,
        bias=tensors.typed("bias", ml_dtypes.bfloat16, (n,)) if "bias" in entry.tensors else None,
        offs=offs,
        out_dtype=out_format,
        use_fast_accum=fast,
        split_k=split_k,
        sample=sample,
        family=Family.RECORDED,
    )
    if mode is Mode.GROUPED_ROWWISE:
        try:
            is_whole = bool(gemm.groups()) and gemm.output_shape[0] == m
        except F8Error as error:
            raise Fault(str(error)) from None
        require(is_whole, f"an output of {m} rows", f"operands of {gemm.output_shape[0]}")
    out = tensors.typed("out", dtype_of(out_format), (m, n))
    return GoldenCase(name=entry.name or mode.value, gemm=gemm, out=out, kernels=entry.kernels)


_PADDED_TO = 4  # the library wants the K axis of 128x128 scales padded to this
_Scale = tuple[np.ndarray | None, Granularity]


def _scales(tensors: _Tensors, mode: Mode, m: int, n: int, k: int) -> tuple[*_Scale, *_Scale]:
    """The scales of a and of b in the layouts of the verbs, each with its granularity.

    Stored: tensorwise [1]; rowwise [M, 1] and [1, N]; 1x128 [rows, K/128]; 128x128 [K/128 padded to 4, rows/128];
    grouped as `GroupKind` has them. Only b's block scales have to be turned: the verbs see them through b's transpose.
    """
    match mode:
        case Mode.BF16:
            return None, Granularity.TENSORWISE, None, Granularity.TENSORWISE
        case Mode.BLOCKWISE:
            (scale_a, of_a), (scale_b, of_b) = (_blocks(tensors, *x, k) for x in (("scale_a", m), ("scale_b", n)))
            return scale_a, of_a, scale_b.T, of_b
        case Mode.TENSORWISE:
            shapes, kind = (((1,),), ((1,),)), Granularity.TENSORWISE
        case Mode.ROWWISE:
            shapes, kind = (((m, 1),), ((1, n),)), Granularity.ROWWISE
        case Mode.GROUPED_ROWWISE | Mode.MX | Mode.GROUPED_MX:  # of the last two nothing is recorded
            shapes, kind = ((((None,), (None, None))),) * 2, Granularity.ROWWISE
    scale_a, scale_b = (tensors.typed(f"scale_{x}", np.float32, *known) for x, known in zip("ab", shapes, strict=True))
    return scale_a, kind, scale_b, kind


def _blocks(tensors: _Tensors, role: str, rows: int, k: int) -> tuple[np.ndarray, Granularity]:
    """Scales [rows, K/128] or [rows/128, K/128]. The two stored shapes differ for all sizes that the library takes."""
    k_blocks = math.ceil(k / BLOCK)
    squares = (k_blocks + -k_blocks % _PADDED_TO, math.ceil(rows / BLOCK))
    stored = tensors.typed(role, np.float32, (rows, k_blocks), squares)
    if stored.shape == (rows, k_blocks):
        return stored, Granularity.BLOCKWISE_1X128
    return stored[:k_blocks].T, Granularity.BLOCKWISE_128X128


def store_scales(gemm: GemmCase) -> dict[str, np.ndarray]:
    """The scales of a GEMM by role, as they are stored: what `_scales` undoes."""
    a, b = gemm.scale_a, gemm.scale_b
    if a is None or b is None:
        return {}
    if gemm.mode is Mode.TENSORWISE:
        a, b = a.reshape(1), b.reshape(1)
    elif gemm.mode is Mode.BLOCKWISE:
        a, b = store_blocks(a, gemm.granularity_a), store_blocks(b.T, gemm.granularity_b)
    return {"scale_a": a, "scale_b": b}


def store_blocks(scale: np.ndarray, granularity: Granularity) -> np.ndarray:
    """Block scales [rows, blocks of K] of one operand in the library's shape [EPI-5], which says nothing of strides."""
    if granularity is Granularity.BLOCKWISE_128X128:
        return np.pad(scale.T, ((0, -scale.shape[1] % _PADDED_TO), (0, 0)))
    return scale


def slices_of_k(kernels: Sequence[tuple[str, tuple[int, ...]]], m: int, n: int) -> int:
    """[CHAIN-3] The number of slices into which the kernels that ran cut K; 1 if they use no split-K.

    S = blocks in the grid / output tiles, the tile being the first `AxB` in the name. Which of the two numbers lies
    along N is not written there: the order that divides is taken, A along N first, as in all that was recorded.
    """
    for name, grid in kernels:
        tile = re.search(r"_(\d+)x(\d+)_", name)
        if "splitK" not in name or "splitKreduce" in name or tile is None:
            continue
        first, second = int(tile[1]), int(tile[2])
        for along_n, along_m in ((first, second), (second, first)):
            slices, rest = divmod(math.prod(grid), math.ceil(n / along_n) * math.ceil(m / along_m))
            if slices and not rest:
                return slices
        raise Fault(f"expected a grid that holds whole output tiles [CHAIN-3]; found {name}, {grid}, for {m} x {n}")
    return 1

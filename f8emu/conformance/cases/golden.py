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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.container import LARGEST_FILE, REMEDY, decode_container, write_container
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import Family, GemmCase, Mode, Sample
from f8emu.spec import BFLOAT16, HIGH_PRECISION, HOPPER, Format, GoldenFileError, Granularity
from f8emu.untrusted import read_regular

SHIPPED = "h200_golden.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenCase:
    """One recorded GEMM: its operands, its output, and the kernels that ran."""

    name: str
    gemm: GemmCase
    out: np.ndarray
    """[M, N]; with a sample only the sampled outputs."""
    kernels: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, grid) of every kernel, in order."""

    @property
    def id(self) -> str:
        return f"{self.gemm.id} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenFile:
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
    path = Path(path)
    try:
        blob = read_regular(path, LARGEST_FILE)
    except OSError as error:
        raise GoldenFileError(f"read_golden: cannot read {path}: {error.strerror}; {REMEDY}") from None
    tensors, metadata = decode_container(blob, str(path))
    if "cases" not in metadata:
        raise GoldenFileError(
            f"read_golden: {path} is a safetensors file, but its metadata has no 'cases': not a golden file; {REMEDY}"
        )
    try:
        entries = json.loads(metadata.pop("cases"))
    except (ValueError, RecursionError) as error:
        raise GoldenFileError(f"read_golden: {path}: metadata 'cases' is not JSON: {error}; {REMEDY}") from None
    if not isinstance(entries, list) or not entries:
        raise GoldenFileError(f"read_golden: {path}: metadata 'cases' must be a list with a case or more; {REMEDY}")
    cases = tuple(_Reader(f"{path}: case {i}", entry, tensors).case(i) for i, entry in enumerate(entries))
    return GoldenFile(path=path, sha256=hashlib.sha256(blob).hexdigest(), metadata=metadata, cases=cases)


def write_golden(path: str | Path, cases: Sequence[GoldenCase], metadata: Mapping[str, str]) -> None:
    """Write a golden file; `read_golden` gives the same cases back.

    Equal tensors are stored once. `metadata` should name device, torch, cuda and seed.
    """
    tensors: dict[str, np.ndarray] = {}
    known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def keep(key: str, array: np.ndarray) -> str:
        digest = (array.dtype.name, array.shape, hashlib.sha256(np.array(array, order="C").tobytes()).digest())
        if digest not in known:
            known[digest] = key
            tensors[key] = array
        return known[digest]

    entries = []
    for case in cases:
        gemm, sample = case.gemm, case.gemm.sample
        # float8 is stored as uint8 codes
        a, b = (x.view(np.uint8) if x.dtype.itemsize == 1 else x for x in (gemm.a, gemm.b))
        roles = {"a": a, "b": b, "out": case.out, **store_scales(gemm)}
        roles |= {role: x for role, x in (("bias", gemm.bias), ("offs", gemm.offs)) if x is not None}
        m, n = gemm.output_shape if sample is None else (sample.m, sample.n)
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
            "tensors": {role: keep(f"{gemm.id}.{role}", x) for role, x in roles.items()},
        }
        if sample is not None:
            entry |= {"sampled_rows": list(sample.rows), "sampled_cols": list(sample.cols)}
        entries.append(entry)
    write_container(Path(path), tensors, {**metadata, "cases": json.dumps(entries)})


class _Reader:
    """Reads one entry of `cases`; every fault names the case and the key."""

    def __init__(self, place: str, entry: object, tensors: Mapping[str, np.ndarray]) -> None:
        self.place = place
        if not isinstance(entry, dict):
            raise self.fault("an object", repr(entry)[:80])
        self.entry: dict[str, Any] = entry
        self.tensors = tensors
        self.roles: dict[str, Any] = self.get("tensors", dict)

    def fault(self, expected: str, observed: str) -> GoldenFileError:
        return GoldenFileError(f"read_golden: {self.place}: expected {expected}; found {observed}; {REMEDY}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.entry.get(key, default)
        if type(value) is not kind:
            found = repr(value)[:80] if key in self.entry else "no such key"
            raise self.fault(f"{key!r} of type {kind.__name__}", found)
        return value

    def choice(self, key: str, known: Mapping[str, Any]) -> Any:
        name = self.get(key, str)
        if name not in known:
            raise self.fault(f"{key!r} to be one of {', '.join(known)}", repr(name))
        return known[name]

    def tensor(self, role: str, dtype: object, *shapes: tuple[int | None, ...]) -> np.ndarray:
        """The tensor of a role, of one of `shapes` (None is any size); stored codes get their type."""
        key = self.roles.get(role)
        if not isinstance(key, str) or key not in self.tensors:
            raise self.fault(f"a tensor for {role!r}", "no such role" if key is None else f"no tensor {key!r:.80}")
        array, dtype = self.tensors[key], np.dtype(dtype)  # type: ignore[call-overload]
        stored = np.dtype(np.uint8) if dtype.itemsize == 1 else dtype
        if array.dtype != stored:
            raise self.fault(f"{role!r} of dtype {stored.name}", array.dtype.name)
        fits = any(
            len(s) == array.ndim and all(n in (None, size) for n, size in zip(s, array.shape, strict=True))
            for s in shapes
        )
        if not fits:
            raise self.fault(f"{role!r} of shape {' or '.join(map(str, shapes))}", str(array.shape))
        return array.view(dtype)

    def case(self, index: int) -> GoldenCase:
        # 1. What the GEMM is.
        mode: Mode = self.choice("mode", {mode.value: mode for mode in Mode})
        operands = {f.name: f for f in ((BFLOAT16,) if mode is Mode.BF16 else HOPPER.operand_formats)}
        a_format: Format = self.choice("a_dtype", operands)
        b_format: Format = self.choice("b_dtype", operands)
        out_format: Format = self.choice("out_dtype", {f.name: f for f in HIGH_PRECISION})
        fast = False if mode is Mode.BF16 else self.get("use_fast_accum", bool)
        full_m, full_n, k = (self.get(key, int) for key in "MNK")
        sample = self.sample(full_m, full_n)
        m, n = (full_m, full_n) if sample is None else (len(sample.rows), len(sample.cols))
        out_dtype = dtype_of(out_format)
        # 2. Its tensors, of the sizes that follow.
        a = self.tensor("a", dtype_of(a_format), (m, k))
        offs = None
        if mode is Mode.GROUPED_ROWWISE:  # "N" is not used: torch's profile of a grouped GEMM gives the groups there
            b = self.tensor("b", dtype_of(b_format), (None, None, k))
            n = b.shape[1]
            offs = self.tensor("offs", np.int32, (b.shape[0],))
        else:
            b = self.tensor("b", dtype_of(b_format), (n, k))
        scale_a = scale_b = None
        granularities = (Granularity.TENSORWISE, Granularity.TENSORWISE)
        if mode is not Mode.BF16:
            scale_a, scale_b, granularities = load_scales(self.tensor, mode, m, n, k, groups=b.shape[0])
        # 3. [CHAIN-3] S, which only the grid of the kernel tells.
        kernels = self.kernels()
        try:
            split_k = slices_of_k(kernels, full_m, full_n)
        except ValueError as error:
            raise self.fault("a grid that holds whole output tiles [CHAIN-3]", str(error)) from None
        gemm = GemmCase(
            id=self.get("id", str, f"{index:03d}"),
            mode=mode,
            a=a,
            b=b,
            scale_a=scale_a,
            scale_b=scale_b,
            granularity_a=granularities[0],
            granularity_b=granularities[1],
            bias=self.tensor("bias", ml_dtypes.bfloat16, (n,)) if "bias" in self.roles else None,
            offs=offs,
            out_dtype=out_format,
            use_fast_accum=fast,
            split_k=split_k,
            sample=sample,
            family=Family.RECORDED,
        )
        out = self.tensor("out", out_dtype, (m, n))
        return GoldenCase(name=self.get("name", str, mode.value), gemm=gemm, out=out, kernels=kernels)

    def sample(self, m: int, n: int) -> Sample | None:
        if "sampled_rows" not in self.entry and "sampled_cols" not in self.entry:
            return None
        rows, cols = self.get("sampled_rows", list), self.get("sampled_cols", list)
        for key, places, size in (("sampled_rows", rows, m), ("sampled_cols", cols, n)):
            if not all(type(i) is int and 0 <= i < size for i in places) or len(set(places)) != len(places):
                raise self.fault(f"{key!r} to be different indices below {size}", repr(places)[:80])
        return Sample(m=m, n=n, rows=tuple(rows), cols=tuple(cols))

    def kernels(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        found = []
        for kernel in self.get("kernels", list):
            match kernel:
                case [str(name), [*grid]] if all(type(n) is int and n > 0 for n in grid):
                    found.append((name, tuple(grid)))
                case _:
                    raise self.fault("'kernels' to hold [name, grid] each", repr(kernel)[:80])
        return tuple(found)


_BLOCK = 128
_PADDED_TO = 4
"""The library wants the K axis of 128x128 scales padded to this."""

TensorOf = Callable[..., np.ndarray]
"""(role, dtype, *shapes) -> tensor, as the reader of a golden case has it."""


def load_scales(
    tensor: TensorOf, mode: Mode, m: int, n: int, k: int, *, groups: int
) -> tuple[np.ndarray, np.ndarray, tuple[Granularity, Granularity]]:
    """scale_a, scale_b in the layouts of the verbs, and their granularities.

    Stored: tensorwise [1]; rowwise [M, 1] and [1, N]; 1x128 [rows, K/128]; 128x128 [K/128 padded to 4, rows/128];
    grouped [M] and [G, N]. Only b's block scales have to be turned: the verbs see them through b's transpose.
    """
    if mode is Mode.BLOCKWISE:
        (scale_a, of_a), (scale_b, of_b) = (_load_blocks(tensor, *x, k) for x in (("scale_a", m), ("scale_b", n)))
        return scale_a, scale_b.T, (of_a, of_b)
    shape_a, shape_b, kind = {
        Mode.TENSORWISE: ((1,), (1,), Granularity.TENSORWISE),
        Mode.ROWWISE: ((m, 1), (1, n), Granularity.ROWWISE),
        Mode.GROUPED_ROWWISE: ((m,), (groups, n), Granularity.ROWWISE),
    }[mode]
    return tensor("scale_a", np.float32, shape_a), tensor("scale_b", np.float32, shape_b), (kind, kind)


def _load_blocks(tensor: TensorOf, role: str, rows: int, k: int) -> tuple[np.ndarray, Granularity]:
    """Scales [rows, K/128] or [rows/128, K/128]. The two stored shapes differ for all sizes that the library takes."""
    k_blocks = math.ceil(k / _BLOCK)
    squares = (k_blocks + -k_blocks % _PADDED_TO, math.ceil(rows / _BLOCK))
    stored = tensor(role, np.float32, (rows, k_blocks), squares)
    if stored.shape == (rows, k_blocks):
        return stored, Granularity.BLOCKWISE_1X128
    return stored[:k_blocks].T, Granularity.BLOCKWISE_128X128


def store_scales(gemm: GemmCase) -> dict[str, np.ndarray]:
    """The scales of a GEMM by role, as they are stored: what `load_scales` undoes."""
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

    Raises:
        ValueError: neither order divides.
    """
    for name, grid in kernels:
        tile = re.search(r"_(\d+)x(\d+)_", name)
        if "splitK" not in name or "splitKreduce" in name or tile is None:
            continue
        first, second = int(tile[1]), int(tile[2])
        blocks = math.prod(grid)
        for along_n, along_m in ((first, second), (second, first)):
            slices, rest = divmod(blocks, math.ceil(n / along_n) * math.ceil(m / along_m))
            if slices and not rest:
                return slices
        raise ValueError(f"{name} with grid {grid} for an output of {m} x {n}")
    return 1

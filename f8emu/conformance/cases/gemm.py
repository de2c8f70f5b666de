"""One GEMM as data, and how it is put to a subject by the verbs of f8emu."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from f8emu.shown import Shown
from f8emu.spec import BFLOAT16, HOPPER, Chip, Format, Granularity
from f8emu.spec.gemm_call import GroupKind, Shaped, group_parts, scaled_grouped_mm_call
from f8emu.spec.scaling import BLOCK

_SQUARE = Granularity.BLOCKWISE_128X128

Verbs = Mapping[str, Callable[..., Any]]  # verb -> function that takes and gives numpy arrays of ml_dtypes


class NotOffered(Exception):
    """The subject does not have the operation of a case: reported as such, never as equal or different."""


class Mode(Enum):
    """Which operation a GEMM is, named as in a golden file."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE = "blockwise"
    GROUPED_ROWWISE = "grouped_rowwise"
    BF16 = "bf16"
    MX = "mxfp8"
    """E8M0 scales of 32 along K [MX-2]; recorded nowhere, and so not in a golden file."""
    GROUPED_MX = "grouped mxfp8"

    @property
    def is_microscaled(self) -> bool:
        return self in (Mode.MX, Mode.GROUPED_MX)

    @property
    def is_grouped(self) -> bool:
        return self in (Mode.GROUPED_ROWWISE, Mode.GROUPED_MX)


class Family(Enum):
    """The purpose of a generated GEMM, in the words of a report."""

    CODES = "distributions of codes"
    SLICES = "slices of K"
    ROW = "one row"
    ROWS = "numbers of rows"
    COLUMNS = "numbers of columns"
    TILES = "tiles of rows and columns"
    K = "lengths of K"
    DECODE = "few rows of a layer"
    PREFILL = "many rows of a layer"
    EVERY_CODE = "every product of two codes"
    SCALES = "values of scales"
    BIAS = "values of the bias"
    STRIDES = "padded strides"
    ALIGNMENT = "alignment of pointers"
    ALIASES = "one array in two roles"
    TURNS = "calls in turn"
    GROUPS = "sizes of groups"
    BEHIND = "rows behind the last group"
    PROBES = "probes of the diagnosis"
    LAYERS = "layers of models"
    RECORDED = "recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Which rows and columns of a full-size GEMM a case holds."""

    m: int
    n: int
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    ends: tuple[int, ...] = ()
    """The ends of groups of rows in the whole GEMM."""
    is_run: bool = False
    """True: a kernel runs the whole GEMM wherever it runs; False: on a GPU alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Memory layout of the arrays of a GEMM, by their names. An implementation that copies them can ignore it."""

    paddings: Mapping[str, int] = field(default_factory=dict[str, int])
    """Elements from the end of a row of an operand to the begin of the next."""
    offsets: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes from a boundary of 256 to the first element."""
    is_turned: bool = False  # a is one row, a column of its memory: the stride of the row is 1, not K
    is_shared: bool = False  # a and b are one array where they are equal, and so are their scales

    @property
    def text(self) -> str:
        if self.is_turned:
            return "a row whose stride is 1"
        if self.is_shared:
            return "one array in two roles"
        words = [f"{name}'s rows {n} elements apart" for name, n in self.paddings.items()]
        return ", ".join([*words, *(f"{name} {n} bytes from a boundary" for name, n in self.offsets.items())])


class Memory(Enum):
    """The arrays of a call that follows another."""

    NEW = "arrays of its own"
    OBJECTS = "those of the call before, changed in place"
    ADDRESSES = "new arrays in the memory of those of the call before"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class GemmCase(Shown):
    """The operands and options of one GEMM `a @ b^T`.

    Scales have the layouts that the verbs take; the scales of b have the layout of its transpose.
    """

    id: str
    mode: Mode
    a: np.ndarray
    """[M, K], typed; with a sample only its rows. Groups as `GroupKind` says."""
    b: np.ndarray
    """[N, K], typed; with a sample only its columns. Groups of rows, or of a batch: [G, N, K]."""
    scale_a: np.ndarray | None = None
    scale_b: np.ndarray | None = None
    granularity_a: Granularity = Granularity.TENSORWISE
    granularity_b: Granularity = Granularity.TENSORWISE
    bias: np.ndarray | None = None
    offs: np.ndarray | None = None
    out_dtype: Format = BFLOAT16
    chip: Chip = HOPPER
    """The chip whose bits are expected."""
    use_fast_accum: bool = False
    split_k: int = 1
    """[CHAIN-3] How many slices of K the library chose."""
    sample: Sample | None = None
    distribution: str = ""
    """The distribution from which the operands were drawn, if they were drawn."""
    family: Family = Family.CODES
    placement: Placement | None = None
    """Memory layout of the operands, for a subject that is called with its own memory."""
    between: "tuple[GemmCase, ...]" = ()
    """GEMMs to run next, followed by this one again. All outputs are read after the last call."""
    memory: Memory = Memory.NEW
    """Which arrays a kernel gets, if another of its calls came before."""
    one_of: str = ""
    """A group of GEMMs, of which a kernel is asked the first that it does not refuse, and no other."""

    @property
    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.scale_a is not None and self.scale_b is not None, "only a GEMM of bfloat16 has none"
        return self.scale_a, self.scale_b

    @property
    def k(self) -> int:
        return self.a.shape[-1]

    @property
    def group_kind(self) -> GroupKind | None:
        """The dimension that has groups; None for an ordinary GEMM."""
        if not self.mode.is_grouped:
            return None
        dims = self.a.ndim, self.b.ndim
        return next(kind for kind in GroupKind if dims == (len(kind.value.a), len(kind.value.b)))

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading dimensions of the call's output: the number of groups if each has its own output, else none."""
        if (kind := self.group_kind) is None or kind.value.out == ("M", "N"):
            return ()
        return (len(self.a) if self.offs is None else len(self.offs),)

    @property
    def output_shape(self) -> tuple[int, int]:
        """M and N; outputs of groups lie one under the other."""
        return math.prod(self.leading) * self.a.shape[-2], self.b.shape[-2]

    @property
    def full_size(self) -> tuple[int, int]:
        """M and N of the GEMM that runs on hardware."""
        return self.output_shape if self.sample is None else (self.sample.m, self.sample.n)

    @property
    def verb(self) -> str:
        return "mm" if self.mode is Mode.BF16 else "scaled_grouped_mm" if self.mode.is_grouped else "scaled_mm"

    @property
    def in_turn(self) -> "dict[str, GemmCase]":
        """Name of a part -> the GEMM whose output it is, in the order of the calls."""
        turns = (self, *self.between, self) if self.between else ()
        return {f"call {number}": gemm for number, gemm in enumerate(turns, 1)} or {"": self}

    def run(self, verbs: Verbs) -> np.ndarray:
        """The output that a verb gives. Where operands lie is nothing to a verb."""
        if self.sample is not None and _SQUARE in (self.granularity_a, self.granularity_b):
            along = int(self.granularity_b is _SQUARE)
            return np.concatenate([block.run(verbs) for block in self._blocks()], axis=along)
        operands, options = (self.a, self.b.swapaxes(-1, -2)), dict[str, Any](out_dtype=self.out_dtype)
        if self.mode is Mode.BF16:
            return verbs[self.verb](*operands, **options, split_k=self.split_k)
        options |= {"use_fast_accum": self.use_fast_accum} | ({} if self.chip == HOPPER else {"chip": self.chip})
        if self.mode.is_grouped:
            out = verbs[self.verb](*operands, self.scale_a, self.scale_b, self.offs, **options)
            return out.reshape(-1, out.shape[-1]) if self.leading and out.ndim == 3 else out
        options |= {name: getattr(self, name) for name in ("granularity_a", "granularity_b", "bias", "split_k")}
        return verbs[self.verb](*operands, self.scale_a, self.scale_b, **options)

    def _blocks(self) -> "Iterator[GemmCase]":
        # The rows of a, or of b, of a sample that share 128x128 scales.
        sample, (scale_a, scale_b) = self.sample, self.scales
        assert sample is not None
        is_b = self.granularity_b is _SQUARE
        blocks = np.array(sample.cols if is_b else sample.rows) // BLOCK
        for block in np.unique(blocks):
            mine, at = blocks == block, slice(block, block + 1)
            fields = (
                {"b": self.b[mine], "scale_b": scale_b[:, at]} if is_b else {"a": self.a[mine], "scale_a": scale_a[at]}
            )
            yield replace(self, **fields, sample=None)

    def scaled(self, a: Any = 1, b: Any = 1) -> "GemmCase":
        """This GEMM with its scales times these float32 factors."""
        scale_a, scale_b = self.scales
        return replace(self, scale_a=scale_a * np.asarray(a, np.float32), scale_b=scale_b * np.asarray(b, np.float32))

    def groups(self) -> "list[tuple[GemmCase, tuple[Any, ...]]]":
        """The GEMM of each group, rowwise, and where in the output of the call it is; OperandError as the verb."""
        b_KN, (scale_a, scale_b) = self.b.swapaxes(-1, -2), self.scales
        arrays = (self.a, b_KN, scale_a, scale_b, self.offs)
        shaped = (Shaped(x.shape, x.dtype.name) for x in arrays if x is not None)
        call = scaled_grouped_mm_call(*shaped, chip=self.chip)
        is_mx = self.mode.is_microscaled
        granularity = Granularity.BLOCKWISE_1X32 if is_mx else Granularity.ROWWISE
        alone: dict[str, Any] = dict.fromkeys(("granularity_a", "granularity_b"), granularity)
        alone["mode"] = Mode.MX if is_mx else Mode.ROWWISE
        gemms: list[tuple[GemmCase, tuple[Any, ...]]] = []
        for part in group_parts(call, None if self.offs is None else self.offs.tolist()):
            of_a, of_b = scale_a[part.scale_a], scale_b[part.scale_b]
            scales = {"scale_a": of_a if is_mx else of_a[:, None], "scale_b": of_b if is_mx else of_b[None]}
            fields = {"a": self.a[part.a], "b": b_KN[part.b].T, **scales, "offs": None}
            gemms.append((replace(self, **fields, **alone), part.out))
        return gemms

    def alone(self, row: int, column: int) -> "tuple[GemmCase, int, int]":
        """The GEMM that an output comes from, and its row and column there: of a grouped one, the group's own."""
        if self.group_kind is None:
            return self, row, column
        # Every output has a number, by which its group is found.
        m, n = self.output_shape
        numbers = np.arange(m * n).reshape(*self.leading, -1, n)
        gemm, out = next(group for group in self.groups() if row * n + column in numbers[group[1]])
        ((row, column),) = np.argwhere(numbers[out] == row * n + column).tolist()
        return gemm, row, column

    def part(self, rows: np.ndarray, cols: np.ndarray) -> "GemmCase":
        """The GEMM of some rows and columns, which gives the same outputs; for tensorwise or rowwise scales."""
        assert self.mode in (Mode.TENSORWISE, Mode.ROWWISE)
        scale_a, scale_b = self.scales
        if self.mode is Mode.ROWWISE:
            scale_a, scale_b = scale_a[rows], scale_b[:, cols]
        bias = None if self.bias is None else self.bias[cols]
        a, b = self.a[rows], self.b[cols]
        return replace(self, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias, sample=None)

    def embedded(self, sample: Sample) -> "GemmCase":
        """This GEMM inside a larger one: its rows and columns at the places of `sample`, arbitrary codes elsewhere.

        An output of a GEMM depends on its own row and column alone, so the larger GEMM contains this one's outputs.
        128x128 scales are those of the larger one already. Of groups, those of rows alone can be embedded.
        """
        # Elsewhere scales are one and biases zero: noise among the codes is enough to show where it must not.
        rows, cols = list(sample.rows), list(sample.cols)
        whole: dict[str, Any] = {
            "a": _scatter(self.a, _noise((sample.m, self.k), self.a.dtype), rows),
            "b": _scatter(self.b, _noise((*self.b.shape[:-2], sample.n, self.k), self.b.dtype), cols),
        }
        if self.scale_a is not None and self.scale_b is not None:
            if self.mode in (Mode.ROWWISE, Mode.MX):
                for name, part, at in (("scale_a", self.scale_a, rows), ("scale_b", self.scale_b.T, cols)):
                    ones = np.ones((sample.m if name == "scale_a" else sample.n, part.shape[1]), part.dtype)
                    whole[name] = _scatter(part, ones, at)
                whole["scale_b"] = whole["scale_b"].T
            elif self.mode is Mode.BLOCKWISE:
                whole["scale_a"] = _of_whole(self.scale_a, self.granularity_a, sample.m, rows)
                whole["scale_b"] = _of_whole(self.scale_b.T, self.granularity_b, sample.n, cols).T
            elif self.mode is Mode.GROUPED_ROWWISE:
                whole["scale_a"] = np.ones(sample.m, np.float32)
                whole["scale_b"] = np.ones((len(self.b), sample.n), np.float32)
                whole["scale_a"][rows], whole["scale_b"][:, cols] = self.scale_a, self.scale_b
                whole["offs"] = np.array(sample.ends, np.int32)
        if self.bias is not None:
            whole["bias"] = np.zeros(sample.n, self.bias.dtype)
            whole["bias"][cols] = self.bias
        return replace(self, **whole, sample=None)

    def padded(self, multiple: int) -> tuple["GemmCase", Sample]:
        """This GEMM with M and N raised to a multiple, and where its own outputs are in the larger one."""
        m, n = self.output_shape
        up_m, up_n = -(-m // multiple) * multiple, -(-n // multiple) * multiple
        sample = Sample(m=up_m, n=up_n, rows=tuple(range(m)), cols=tuple(range(n)))
        return (self if (up_m, up_n) == (m, n) else self.embedded(sample)), sample


_FINITE = np.uint8(0xFB)  # without a bit that every code of infinity and NaN has, in both formats
_NOISE_PERIOD = 999_983  # a prime, so that rows differ: fresh noise for a layer of 70B would take longer than its GEMM


def _scatter(part: np.ndarray, whole: np.ndarray, places: list[int]) -> np.ndarray:
    whole[..., places, :] = part
    return whole


def _of_whole(scale: np.ndarray, granularity: Granularity, rows: int, places: list[int]) -> np.ndarray:
    # Rows beside a sample have the scales of the first sampled one in their block of 128: they may be one scale.
    if granularity is _SQUARE:
        return scale
    blocks, first = np.unique(np.array(places) // BLOCK, return_index=True)
    assert len(blocks) == -(-rows // BLOCK), "every block has a sampled row"
    return _scatter(scale, np.repeat(scale[first], BLOCK, axis=0)[:rows], places)


def _noise(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Arbitrary bit patterns: whatever stands beside a sample must not reach it. Those of 8 bits are finite."""
    period = np.frombuffer(np.random.default_rng(0).bytes(_NOISE_PERIOD), np.uint8)
    if dtype.itemsize == 1:  # emulations take longer for NaN
        period = period & _FINITE
    return np.resize(period, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

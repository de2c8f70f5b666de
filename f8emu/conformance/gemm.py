"""One GEMM as data, and how it is put to a subject by the verbs of f8emu."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from f8emu.spec import BFLOAT16, Format, Granularity

Verbs = Mapping[str, Callable[..., Any]]
"""Verb -> function that takes and gives numpy arrays of ml_dtypes."""


class NotOffered(Exception):
    """A subject that does not have the operation of a case: reported as such, never as equal or different."""


class Mode(Enum):
    """Which operation a GEMM is, named as in a golden file."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE = "blockwise"
    GROUPED_ROWWISE = "grouped_rowwise"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Which rows and columns of a full-size GEMM a case holds."""

    m: int
    n: int
    rows: tuple[int, ...]
    cols: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmCase:
    """The operands and options of one GEMM `a @ b^T`.

    Scales have the layouts that the verbs take: those of b are seen through its transpose.
    """

    id: str
    mode: Mode
    a: np.ndarray
    """[M, K], typed; with a sample its rows alone."""
    b: np.ndarray
    """[N, K], typed (grouped: [G, N, K]); with a sample its columns alone."""
    scale_a: np.ndarray | None = None
    scale_b: np.ndarray | None = None
    granularity_a: Granularity = Granularity.TENSORWISE
    granularity_b: Granularity = Granularity.TENSORWISE
    bias: np.ndarray | None = None
    offs: np.ndarray | None = None
    out_dtype: Format = BFLOAT16
    use_fast_accum: bool = False
    split_k: int = 1
    """[CHAIN-3] How many slices of K the library chose."""
    sample: Sample | None = None
    distribution: str = ""
    """Of the operands, where they were drawn."""

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def output_shape(self) -> tuple[int, int]:
        return self.a.shape[0], self.b.shape[-2]

    @property
    def verb(self) -> str:
        """The verb that computes it."""
        return {Mode.BF16: "mm", Mode.GROUPED_ROWWISE: "scaled_grouped_mm"}.get(self.mode, "scaled_mm")

    def run(self, verbs: Verbs) -> np.ndarray:
        """The output that `verbs` gives, [M, N]."""
        match self.mode:
            case Mode.BF16:
                return verbs[self.verb](self.a, self.b.T, out_dtype=self.out_dtype, split_k=self.split_k)
            case Mode.GROUPED_ROWWISE:
                return verbs[self.verb](
                    self.a,
                    self.b.swapaxes(1, 2),
                    self.scale_a,
                    self.scale_b,
                    self.offs,
                    out_dtype=self.out_dtype,
                    use_fast_accum=self.use_fast_accum,
                )
            case Mode.TENSORWISE | Mode.ROWWISE | Mode.BLOCKWISE:
                return verbs[self.verb](
                    self.a,
                    self.b.T,
                    self.scale_a,
                    self.scale_b,
                    granularity_a=self.granularity_a,
                    granularity_b=self.granularity_b,
                    bias=self.bias,
                    out_dtype=self.out_dtype,
                    use_fast_accum=self.use_fast_accum,
                    split_k=self.split_k,
                )

    def embedded(self, sample: Sample) -> "GemmCase":
        """This GEMM inside a larger one: its rows and columns at the places of `sample`, arbitrary codes elsewhere.

        An output of a GEMM depends on its own row and column alone, so the larger GEMM holds this one's outputs.
        Blockwise and grouped GEMMs have other neighbours and are not embedded.
        """
        assert self.mode in (Mode.TENSORWISE, Mode.ROWWISE, Mode.BF16)
        rows, cols = list(sample.rows), list(sample.cols)
        scale_a, scale_b = self.scale_a, self.scale_b
        if self.mode is Mode.ROWWISE:
            assert scale_a is not None and scale_b is not None
            scale_a = _scatter(scale_a, np.ones((sample.m, 1), np.float32), rows)
            scale_b = _scatter(scale_b.T, np.ones((sample.n, 1), np.float32), cols).T
        bias = self.bias
        if bias is not None:
            bias = _scatter(bias, np.zeros(sample.n, bias.dtype), cols)
        return replace(
            self,
            a=_scatter(self.a, _noise((sample.m, self.k), self.a.dtype), rows),
            b=_scatter(self.b, _noise((sample.n, self.k), self.b.dtype), cols),
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias,
            sample=None,
        )

    def padded(self, multiple: int) -> tuple["GemmCase", Sample]:
        """This GEMM with M and N raised to a multiple, and where its own outputs then are."""
        m, n = self.output_shape
        up_m, up_n = -(-m // multiple) * multiple, -(-n // multiple) * multiple
        sample = Sample(m=up_m, n=up_n, rows=tuple(range(m)), cols=tuple(range(n)))
        return (self if (up_m, up_n) == (m, n) else self.embedded(sample)), sample


_NOISE_PERIOD = 999_983
"""A prime, so that rows differ: fresh noise for a layer of 70B would take longer than its GEMM."""


def _scatter(part: np.ndarray, whole: np.ndarray, places: list[int]) -> np.ndarray:
    whole[places] = part
    return whole


def _noise(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Arbitrary bit patterns: whatever stands beside a sample must not reach it."""
    period = np.frombuffer(np.random.default_rng(0).bytes(_NOISE_PERIOD), np.uint8)
    return np.resize(period, shape[0] * shape[1] * dtype.itemsize).view(dtype).reshape(shape)

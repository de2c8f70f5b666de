"""Kernels that people write, each explained with every bit: in numpy, with altered scales, with groups.

The engine multiplies, where there is one: a kernel alters what it is given, or the groups.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.conformance.diagnosis.compute import Memory
from f8emu.conformance.diagnosis.probes import GROUPED, KINDS
from f8emu.conformance.diagnosis.search import Diagnosis, diagnose
from f8emu.conformance.kernels.kernel import K_BY_ROWS, Arg, Kernel
from f8emu.conformance.run.subject import Subject, kernel_subject, scaled_mm_kernel
from f8emu.numpy import emulation
from f8emu.report.diagnosis import diagnosis_lines
from f8emu.spec import HIGH_PRECISION
from tests.conformance.planted_gemm import subject_of

Array = np.ndarray
BY_NAME = {kind.name: kind for kind in (*KINDS, *GROUPED)}
SQUARE = "blockwise_1x128 x blockwise_128x128"
MEMORY = Memory()


def diagnosed(subject: Subject, *kinds: str) -> tuple[Diagnosis, ...]:
    diagnoses = diagnose(subject, kinds=[BY_NAME[kind] for kind in kinds], memory=MEMORY)
    assert [d.kind for d in diagnoses] == [*kinds] and not any(d.error or d.left_out for d in diagnoses), diagnoses
    assert all(d.is_right or (d.best is not None and d.best.is_complete) for d in diagnoses), diagnoses
    return diagnoses


def names(diagnosis: Diagnosis) -> set[str]:
    return set(diagnosis.best.alterations) if diagnosis.best is not None else set()


def written(accumulate: Callable[[Array, Array], Array]) -> Subject:
    """A kernel in numpy, as its author calls it: the scales one after the other, the bias, the output type."""

    def scaled_mm(
        a: Array, b: Array, scale_a: Array, scale_b: Array, *, bias: Array | None, out_dtype: Any, use_fast_accum: bool
    ) -> Array:
        with np.errstate(all="ignore"):
            y = accumulate(a, b) * scale_b * scale_a
            y = y if bias is None else y + bias.astype(y.dtype)
            return y.astype(out_dtype)

    return kernel_subject(scaled_mm_kernel("x", scaled_mm), arrays="numpy")


def in_16_lanes(a: Array, b: Array) -> Array:
    """`a @ b` in float32 as OpenBLAS adds on a CPU with AVX-512."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    sums = np.zeros((16, len(a), b.shape[1]), np.float32)
    for k in range(0, a.shape[1], 16):
        sums += a[:, k : k + 16].T[:, :, None] * b[k : k + 16, None]
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    return sums[0]


IN_NUMPY: dict[str, tuple[Callable[[Array, Array], Array], str, str]] = {
    "float32": (
        in_16_lanes,
        "float32 accumulation in 16 lanes",
        "it accumulates in float32 instead of the tensor core's cut steps; in tensorwise kinds it multiplies "
        "scale_b before scale_a, and keeps -0",
    ),
    "float64": (
        lambda a, b: a.astype(np.float64) @ b.astype(np.float64),
        "float64 throughout",
        "it computes in float64 up to the output type; in tensorwise kinds it multiplies scale_b before scale_a, and "
        "keeps -0",
    ),
}


@pytest.mark.parametrize(("accumulate", "name", "headline"), IN_NUMPY.values(), ids=IN_NUMPY)
def test_a_kernel_in_numpy_is_explained(accumulate: Callable[[Array, Array], Array], name: str, headline: str) -> None:
    """Three steps tensorwise, one rowwise; one headline, and each kind in a line of its own."""
    diagnoses = diagnosed(written(accumulate), "tensorwise fast", "rowwise promoted")
    assert list(map(names, diagnoses)) == [{name, "scales as (acc * sb) * sa", "-0 kept"}, {name}]
    lines = list(diagnosis_lines("x", diagnoses))
    assert lines[1] == f"  in short: {headline}" and len(headline.split()) <= 25
    starts = [line.split(":")[:2] for line in lines[2:] if not line.startswith("    the same bits")]
    assert starts == [["  tensorwise fast", " explained"], ["  rowwise promoted", " explained"]]
    assert ["acc * (sa * sb) + 0 [EPI-1]" in line for line in lines[2:4]] == [True, False], "the chip's order"


def power_of_two(up: bool) -> Callable[[Array], Array]:
    def rounded(scale: Array) -> Array:
        significand, exponent = np.frexp(np.abs(scale))
        return np.copysign(np.ldexp(np.float32(0.5), exponent + (up & (significand != 0.5))), scale)

    return rounded


def same(scale: Array) -> Array:
    return scale


def through(dtype: Any) -> Callable[[Array], Array]:
    return lambda scale: scale.astype(dtype).astype(np.float32)


def neighbours(scale: Array) -> Array:
    i = np.arange(scale.size)
    return scale[:, np.where(i ^ 1 < scale.size, i ^ 1, i)]


UP, DOWN, BFLOAT16 = power_of_two(True), power_of_two(False), through(ml_dtypes.bfloat16)
FAST, TENSORWISE = "rowwise fast", "tensorwise fast"
SCALES: list[tuple[str, Callable[[Array], Array], Callable[[Array], Array], str]] = [
    (FAST, BFLOAT16, BFLOAT16, "scales rounded to bfloat16"),
    (TENSORWISE, same, through(np.float16), "scale_b rounded to float16"),
    (SQUARE, UP, UP, "scales rounded up to a power of two"),
    (FAST, DOWN, same, "scale_a rounded down to a power of two"),
    (FAST, lambda s: np.copysign(np.exp2(np.rint(np.log2(np.abs(s)))), s), same, "log2 of scale_a rounded"),
    (TENSORWISE, same, np.ones_like, "scale_b ignored"),
    (SQUARE, same, lambda s: s.ravel().reshape(s.shape, order="F"), "grid of scale_b read as row-major"),
    (SQUARE, same, lambda s: s.T.ravel().reshape(s.shape), "grid of scale_b read as column-major"),
    (FAST, same, neighbours, "scale_b of column n xor 1"),
]


@pytest.mark.parametrize(("kind", "of_a", "of_b", "name"), SCALES, ids=[row[3] for row in SCALES])
def test_an_altered_scale_is_named(
    kind: str, of_a: Callable[[Array], Array], of_b: Callable[[Array], Array], name: str
) -> None:
    def scaled_mm(a: Array, b: Array, scale_a: Array, scale_b: Array, **options: Any) -> Array:
        with np.errstate(all="ignore"):
            scales = of_a(scale_a).astype(np.float32), of_b(scale_b).astype(np.float32)
        return emulation.scaled_mm(a, b, *scales, **options)

    (diagnosis,) = diagnosed(subject_of(scaled_mm), kind)
    assert names(diagnosis) == {name}


def test_an_epilogue_that_values_choose_is_not_taken_for_a_lost_zero() -> None:
    """Where all scales are equal the tensorwise epilogue, which adds 0; elsewhere -0 is kept."""

    def scaled_mm(a: Array, b: Array, scale_a: Array, scale_b: Array, **options: Any) -> Array:
        if scale_a.ndim == 2 and all((scale == scale[0, 0]).all() for scale in (scale_a, scale_b)):
            tensorwise = dict.fromkeys(("granularity_a", "granularity_b"), "tensorwise")
            return emulation.scaled_mm(a, b, scale_a[0, 0], scale_b[0, 0], **options | tensorwise)
        return emulation.scaled_mm(a, b, scale_a, scale_b, **options)

    right, wrong = diagnosed(subject_of(scaled_mm), "tensorwise fast", "rowwise fast")
    assert right.is_right and names(wrong) == {"equal scales as tensorwise"} and not wrong.alternatives


def inner(offs: Array) -> Array:
    """Which ends are not the last."""
    return offs < offs[-1]


def group(call: dict[str, Array]) -> Array:
    return np.searchsorted(call["offs"], np.arange(len(call["a"])), side="right")


def until_empty(call: dict[str, Array]) -> dict[str, Array]:
    first = np.flatnonzero(np.diff(call["offs"], prepend=0) == 0)
    offs = call["offs"][: first[0]] if len(first) else call["offs"]
    return {"offs": offs, "b": call["b"][: len(offs)], "scale_b": call["scale_b"][: len(offs)]}


GROUPS: dict[str, Callable[[dict[str, Array]], dict[str, Array]]] = {
    "": lambda call: {},
    "scale_b of the first group": lambda call: {"scale_b": call["scale_b"][:1].repeat(len(call["scale_b"]), 0)},
    "scale_b of group g - 1": lambda call: {"scale_b": call["scale_b"][np.maximum(np.arange(len(call["b"])) - 1, 0)]},
    "scale_a of the group": lambda call: {"scale_a": call["scale_a"][group(call)]},
    "scale_a of the row within its group": lambda call: {
        "scale_a": call["scale_a"][np.arange(len(call["a"])) - np.concatenate([[0], call["offs"]])[group(call)]]
    },
    "groups end 1 row late": lambda call: {"offs": call["offs"] + inner(call["offs"])},
    "group starts rounded up to 64": lambda call: {
        "offs": np.where(inner(call["offs"]), -(-call["offs"] // 64) * 64, call["offs"]).clip(max=len(call["a"]))
    },
    "stops at an empty group": until_empty,
}


@pytest.mark.parametrize(
    ("name", "change"), GROUPS.items(), ids=lambda one: one or "right" if isinstance(one, str) else ""
)
def test_a_grouped_kernel_is_explained(name: str, change: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
    def grouped(out_dtype: Any, fast: bool, **call: Array) -> Array:
        call |= change(call)
        b, offs = np.array(call["b"].swapaxes(-1, -2), order="C").swapaxes(-1, -2), call["offs"].astype(np.int32)
        operands = call["a"], b, call["scale_a"], call["scale_b"], offs
        return emulation.scaled_grouped_mm(*operands, out_dtype=np.dtype(out_dtype).name, use_fast_accum=fast)

    own = {"a": Arg.A, "b": Arg.B, "scale_a": Arg.SCALE_A, "scale_b": Arg.SCALE_B, "offs": Arg.OFFS}
    keywords = own | {"out_dtype": Arg.OUT_DTYPE, "fast": Arg.USE_FAST_ACCUM}
    kernel = Kernel(
        name="x", function=grouped, arguments=(), keywords=keywords, b=K_BY_ROWS, arrays="numpy",
        multiples=(1, 1, 1), out_dtypes=HIGH_PRECISION,
    )  # fmt: skip
    (diagnosis,) = diagnosed(kernel_subject(kernel), "grouped rowwise fast")
    assert names(diagnosis) == ({name} if name else set()) and diagnosis.is_right == (not name)

"""Diagnosis by hypothesis: planted wrong kernels are named, right ones are not accused.

Third parties at the end, which nobody here wrote: torch's own CPU `_scaled_mm`, XLA's CPU dot.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.diagnosis.alterations import ALTERATIONS
from f8emu.conformance.diagnosis.compute import Memory, compute
from f8emu.conformance.diagnosis.probes import GROUPED, KINDS, GemmKind, probes
from f8emu.conformance.diagnosis.rules import Rules, rules_of
from f8emu.conformance.diagnosis.search import diagnose
from f8emu.conformance.kernels.imported import INTERPRETED
from f8emu.conformance.kernels.kernel import BLOCKWISE_128X128, K_BY_ROWS, Arg, Kernel, ScaleLayout
from f8emu.conformance.run.subject import NotOffered, Subject, kernel_subject, load_subject
from f8emu.report.diagnosis import diagnosis_lines
from f8emu.spec import BFLOAT16, CHIPS, HIGH_PRECISION, HOPPER, Granularity, format_by_name
from tests.conformance.planted_gemm import Knobs, Number, failing, kernel, subject, subject_of

BY_NAME = {kind.name: kind for kind in (*KINDS, *GROUPED)}
MEMORY = Memory()
"""The probes are the same for every kernel."""


PROMOTED, FAST = "rowwise promoted", "rowwise fast"
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
VECTORS, SQUARE = "blockwise_1x128 x blockwise_1x128", "blockwise_1x128 x blockwise_128x128"
FLOAT16 = {"as_float16": True, "step": 16, "term_bits": 25, "sum_bits": 23}
TRITON = {**FLOAT16, "by_turns": True}
"""`tl.dot` on Hopper in small tiles: a thread's four neighbours of K become two registers of float16."""
FIRST_FROM_128: Callable[[Number], Number] = lambda i: np.where(i < 128, i, 0)  # noqa: E731
NEXT: Callable[[Number], Number] = lambda i: np.minimum(i + 1, len(i) - 1)  # noqa: E731
PLANTED: list[tuple[Any, ...]] = [
    (PROMOTED, {"promote": None}, "no promotion"),
    (PROMOTED, {"promote": 64}, "promotion every 64"),
    (PROMOTED, {"promote": 256}, "promotion every 256"),
    ("tensorwise promoted", {"promote": 32}, "promotion every 32"),
    (FAST, {"promote_fast": 128}, "promotion every 128"),
    (FAST, {"in_float32": True}, "float32 accumulation"),
    (FAST, {"order": "acc*(sa*sb)"}, "scales as acc * (sa * sb)"),
    (PROMOTED, {"order": "(acc*sa)*sb"}, "scales as (acc * sa) * sb"),
    ("tensorwise fast", {"order": "(acc*sb)*sa"}, "scales as (acc * sb) * sa"),
    ("tensorwise promoted with bias", {"keeps_minus_zero": True}, "-0 kept"),
    (FAST, {"keeps_minus_zero": False}, "-0 lost"),
    (VECTORS, {"keeps_minus_zero": False}, "-0 lost"),
    ("rowwise fast with bias", {"bias": "fma"}, "bias by FMA"),
    ("tensorwise fast with bias", {"bias": "ignored"}, "bias ignored"),
    (FAST, {"slices": 2}, "split-K 2"),
    ("tensorwise promoted", {"slices": 3}, "split-K 3"),
    (FAST, {"term_bits": 12, "sum_bits": 12}, "12 fraction bits"),
    (FAST, {"term_bits": 25, "sum_bits": 23}, "25 fraction bits"),
    (FAST, {"term_bits": 15}, "terms of 15 fraction bits"),
    (FAST, {"sum_bits": 23}, "sums of 23 fraction bits"),
    (PROMOTED, {"to_integer": np.rint}, "terms and sums rounded to nearest"),
    (FAST, {"step": 16}, "steps of 16"),
    (FAST, {"flush": True}, "subnormal operands flushed"),
    ("tensorwise promoted", {"cut_output": True}, "output cut toward zero"),
    (FAST, {"through": dtype_of(BFLOAT16)}, "output through bfloat16"),
    (PROMOTED, {"swap_scales": True}, "scales swapped"),
    (FAST, {"scales": lambda s: np.float32(1) / s}, "scales inverted"),
    (FAST, {"swap_operands": True}, "operands swapped"),
    (VECTORS, {"order": "(p*sa)*sb"}, "scales as (acc * sa) * sb"),
    (VECTORS, {"order": "fma(p,sa*sb)"}, "scales as fma(p, sa * sb, total)"),
    (SQUARE, {"order": "fma(p*sa,sb)"}, "scales as fma(p * sa, sb, total)"),
    (SQUARE, {"order": "p*(sa*sb)"}, "scales as acc * (sa * sb)"),
    (FAST, TRITON, "products of float16, no promotion"),
    ("tensorwise promoted", {**TRITON, "promote": 32}, "products of float16, promotion every 32"),
    (PROMOTED, TRITON, "products of float16, promotion every 128"),
    (SQUARE, TRITON, "products of float16, no promotion"),
    (FAST, FLOAT16, "products of float16 in the order of K, no promotion"),
    (FAST, {"slices_above": 1000, "slices": 3}, "split-K 3 of a long K"),
    *((FAST, {"tail": k}, f"tail of K beyond a multiple of {k} dropped") for k in (32, 64, 256)),
    (VECTORS, {"tail": 128}, "tail of K beyond a multiple of 128 dropped"),
    (FAST, {"last": 32}, "last 32 of K dropped"),
    (PROMOTED, {"read_a": E4M3, "read_b": E4M3}, "codes of a and b read as E4M3"),
    ("tensorwise fast", {"read_a": E4M3}, "codes of a read as E4M3"),
    (FAST, {"read_b": E5M2}, "codes of b read as E5M2"),
    (SQUARE, {"read_b": ml_dtypes.float8_e4m3fnuz}, "codes of b read as FNUZ"),
    (FAST, {"scale_a_of": lambda m: np.maximum(m - 1, 0)}, "scale_a of row m - 1"),
    (FAST, {"scale_b_of": lambda n: np.roll(n, -1)}, "scale_b of column n + 1 round about"),
    (PROMOTED, {"scale_a_of": lambda m: np.where(m ^ 64 < len(m), m ^ 64, m)}, "scale_a of row m xor 64"),
    (VECTORS, {"scale_b_of": lambda n: n % 128}, "scale_b of column n mod 128"),
    (FAST, {"scale_a_of": lambda m: np.where(m < 128, m, m - 128)}, "scale_a of row m - 128, for m >= 128"),
    (VECTORS, {"scale_a_of": FIRST_FROM_128}, "scale_a of row 0, for m >= 128"),
    (SQUARE, {"block_a_of": lambda g: np.maximum(g - 1, 0)}, "scale_a of block g - 1"),
    (VECTORS, dict.fromkeys(("block_a_of", "block_b_of"), NEXT), "scale_a of block g + 1 and scale_b of block g + 1"),
    (FAST, {"scale_a_of": lambda m: np.roll(m, 64)}, "scale_a of row m - 64 round about"),
    ("rowwise fast with bias", {"bias_of": NEXT}, "bias of column n + 1"),
    ("tensorwise fast", {"scales": np.abs}, "sign of scales dropped"),
    (FAST, {"spoil": lambda out: out[64:].fill(0)}, "output of row m is zero, for m >= 64"),
    ("tensorwise fast", {"spoil": lambda out: out[200:].fill(0)}, "output of row m is zero, for m >= 200"),
    (
        FAST,
        {"spoil": lambda out: np.copyto(out[:, 128:], out[:, np.arange(128, out.shape[1]) % 128])},
        "output of column n mod 128, for n >= 128",
    ),
    # faults together
    (PROMOTED, {"promote": 64, "order": "acc*(sa*sb)"}, "promotion every 64", "scales as acc * (sa * sb)"),
    ("rowwise fast with bias", {"step": 16, "bias": "fma"}, "steps of 16", "bias by FMA"),
    # 16 and no promotion is Ada's: that a chip's accumulation has another one says less
    (PROMOTED, {"step": 16, "promote": 64}, "steps of 16", "promotion every 64"),
    (FAST, {**TRITON, "nan_is_480": True}, "products of float16, no promotion", "NaN codes as numbers"),
    (FAST, {"step": 16, "scale_a_of": FIRST_FROM_128}, "steps of 16", "scale_a of row 0, for m >= 128"),
    (FAST, {"sum_bits": 23, "order": "acc*(sa*sb)"}, "sums of 23 fraction bits", "scales as acc * (sa * sb)"),
    # Inductor's template, as it ran on an H200
    (
        "rowwise promoted with bias",
        {**TRITON, "promote": 256, "order": "acc*(sa*sb)", "bias": "fma"},
        *("products of float16, promotion every 256", "scales as acc * (sa * sb)", "bias by FMA"),
    ),
]
"""The kind of GEMM that shows a fault, the fault, and the names that must be found."""
SAME_BITS: dict[str, set[str]] = {
    "sums of 23 fraction bits": {"sums of 18 fraction bits", "sums of 19 fraction bits"},
    "split-K 3": {"split-K 3 of a long K"},  # of short ones the second slice begins where a promotion does
}
"""What has the same bits, and is named beside it."""
SAME_NARROW = {"float32 accumulation": {"float32 accumulation in blocks of 128"}}
"""What has the same bits in bfloat16 too."""
SMALL = ("float32 acc", "scales as (acc * sa)", "bias by FMA", "12 fraction", "terms of", "sums of", "steps of")
"""Faults of which bfloat16 hides the most."""
NARROW = [
    (kind, {**knobs, "dtypes": ("bfloat16",)}, *names)
    for kind, knobs, *names in PLANTED
    if len(names) == 1 and names[0].startswith(SMALL)
]


@pytest.mark.parametrize("planted", [*PLANTED, *NARROW], ids=lambda row: f"{' and '.join(row[2:])}, {row[0]}")
def test_planted_kernels_are_named(planted: tuple[Any, ...]) -> None:
    kind, knobs, *names = planted
    (diagnosis,) = diagnose(subject(**knobs), kinds=[BY_NAME[kind]], memory=MEMORY)
    assert diagnosis.best is not None and set(diagnosis.best.alterations) == set(names), diagnosis
    assert diagnosis.best.is_complete and diagnosis.outputs_equal < diagnosis.outputs_total
    others = {name for other in diagnosis.alternatives for name in other.alterations} - set(names)
    same = {**SAME_BITS, **(SAME_NARROW if knobs.get("dtypes") == ("bfloat16",) else {})}
    assert others == set[str]().union(*(same.get(name, ()) for name in names)), diagnosis.alternatives


def test_what_explains_one_kind_is_named_in_another_without_what_it_has_not() -> None:
    """Three faults with bias: without bias two, and no word of the third."""
    knobs = {"step": 16, "promote_fast": 64, "bias": "ignored"}
    kinds = [BY_NAME[name] for name in ("rowwise fast with bias", FAST)]
    with_bias, without = diagnose(subject(**knobs), kinds=kinds, memory=MEMORY)
    assert with_bias.best is not None and without.best is not None and with_bias.best.is_complete
    assert set(with_bias.best.alterations) == {"steps of 16", "promotion every 64", "bias ignored"}
    assert without.best.is_complete and set(without.best.alterations) == {"steps of 16", "promotion every 64"}


def _squares(knobs: Knobs, repeats: int, *operands: Number) -> Number:
    """A planted kernel with 128x128 scales of b, as a declared one is called."""
    a, b, scale_a, scale_b, dtype = operands
    return kernel(
        knobs,
        *(a, b, np.repeat(scale_a, repeats, axis=0)[: len(a)], scale_b.T),
        granularity_a=Granularity.BLOCKWISE_1X128,
        granularity_b=Granularity.BLOCKWISE_128X128,
        bias=None,
        out_dtype=format_by_name(np.dtype(dtype).name),
    )


INVERSE = ScaleLayout(is_inverse=True)


@pytest.mark.parametrize(
    ("function", "scales", "named"),
    [
        # Scales of 128x128 on both sides are 1x128 ones whose rows repeat: every probe runs, and shows the fault.
        (partial(_squares, Knobs(order="fma(p*sa,sb)"), 128), BLOCKWISE_128X128, "scales as fma(p * sa, sb, total)"),
        # Declared to divide by its scales, the kernel multiplies: asked with powers of two, it still shows.
        (
            partial(_squares, Knobs(), 1),
            {(Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128): (INVERSE, INVERSE)},
            "scales inverted",
        ),
    ],
    ids=["squares", "inverse scales"],
)
def test_a_declared_kernel_runs_what_it_offers(function: Callable[..., Number], scales: Any, named: str) -> None:
    arguments = (Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, Arg.OUT_DTYPE)
    declared = Kernel(
        name="x", function=function, arrays="numpy", arguments=arguments, scales=scales, b=K_BY_ROWS,
        out_dtypes=HIGH_PRECISION,
    )  # fmt: skip
    (diagnosis,) = diagnose(kernel_subject(declared), kinds=[BY_NAME[SQUARE]], memory=MEMORY)
    assert diagnosis.cases > 15 and not diagnosis.alternatives
    best = diagnosis.best
    assert best is not None and best.is_complete and best.alterations == (named,), diagnosis


def test_what_nobody_knows_is_not_explained() -> None:
    """Promotion every 96 is no hypothesis: nothing may explain every bit, and the share is told."""
    (diagnosis,) = diagnose(subject(promote=96), kinds=[BY_NAME[PROMOTED]], memory=MEMORY)
    assert diagnosis.best is not None and not diagnosis.best.is_complete
    assert diagnosis.outputs_equal <= diagnosis.best.outputs_equal < diagnosis.outputs_total
    assert all(not tried.is_complete for tried in diagnosis.tried)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        # float32 in blocks that nobody has: one probe has a sum long and inexact enough to show it
        (
            {"in_float32": True, "promote_fast": 1000},
            r"nearly explained, 99\.\d %: float32 accumulation.*; what is left has K above 240 \(\d\.\d % of the "
            r"outputs there differ, 0 % of all others\)",
        ),
        (
            {"spoil": lambda out: np.multiply(out[128:], 2, out=out[128:], casting="unsafe")},
            r"NOT EXPLAINED, [\d,]+/[\d,]+ outputs equal under the chip's rules; what differs is in rows above 127 "
            r"\(100 % of the outputs there differ, 0 % of all others\)",
        ),
        (
            {"spoil": lambda out: np.negative(out, out=out) if len(out) == 1 else None},
            r"NOT EXPLAINED, .* what differs has M up to 1 \(100 % of the outputs there differ, 0 % of all others\)",
        ),
    ],
    ids=["blocks of 1000", "rows doubled", "one row"],
)
def test_what_is_left_is_told(knobs: dict[str, Any], said: str) -> None:
    diagnoses = diagnose(subject(**knobs), kinds=[BY_NAME[FAST]], memory=MEMORY)
    (line,) = (line for line in diagnosis_lines("x", diagnoses) if line.startswith(f"  {FAST}"))
    assert re.match(f"  {FAST}: {said}", line), line


SLOW = pytest.mark.exhaustive  # a minute of compiling


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("planted", KINDS),
        ("f8ref.numpy", KINDS),
        ("torch", KINDS[:1]),
        *(pytest.param(name, KINDS, marks=SLOW) for name in ("f8ref.jax", "torch", "f8emu.jax")),
    ],
)
def test_right_kernels_are_not_accused(name: str, kinds: tuple[GemmKind, ...]) -> None:
    if name not in ("planted", "f8ref.numpy"):
        pytest.importorskip("jax")
    if name == "torch":
        pytest.importorskip("torch")
    diagnoses = diagnose(subject() if name == "planted" else load_subject(name), kinds=kinds, memory=MEMORY)
    assert [right.kind for right in diagnoses] == [kind.name for kind in kinds] and diagnoses[0].cases > 20
    assert all(right.is_right and right.best is None and not right.error for right in diagnoses), diagnoses


def test_what_is_not_known_is_not_said() -> None:
    """No GEMM that is probed is offered; and an interpreter tells nothing of a GPU."""
    assert diagnose(Subject(name="x", engine="x", verbs={})) == ()
    assert list(diagnosis_lines("x", ()))[1:] == [
        "  no GEMM that is probed is offered: what differs cannot be diagnosed"
    ]
    (diagnosis,) = diagnose(replace(subject(), engine=f"x, {INTERPRETED}"), kinds=[BY_NAME[FAST]], memory=MEMORY)
    assert next(diagnosis_lines("x", (diagnosis,))) == f"x, diagnosed on small GEMMs {INTERPRETED}:"


def test_probes_on_which_a_kernel_raises_are_left_out() -> None:
    """The rest is diagnosed; where it tells nothing, the kernel is not called right."""
    compiles, right = (
        failing(lambda _, k, of=of: k == of, RuntimeError("compilation failed"), promote=promote)[0]
        for of, promote in ((128, 64), (240, 128))
    )
    (diagnosis,) = diagnose(compiles, kinds=[BY_NAME[PROMOTED]], memory=MEMORY)
    best, left_out = diagnosis.best, diagnosis.left_out
    assert best is not None and best.alterations == ("promotion every 64",) and best.is_complete
    assert "probes failed, first: " in left_out and "raised RuntimeError: compilation failed" in left_out
    assert not diagnosis.error
    assert list(diagnosis_lines("x", (diagnosis,)))[-1] == f"  {PROMOTED}: left out: {diagnosis.left_out}"
    (diagnosis,) = diagnose(right, kinds=[BY_NAME[PROMOTED]], memory=MEMORY)
    assert diagnosis.best is None and not diagnosis.is_right
    assert diagnosis.error.startswith("no probe that is left differs; ") and "compilation failed" in diagnosis.error


def test_a_kernel_that_fails_is_not_diagnosed() -> None:
    """Whatever it raises; after three crashes or hangs in a row its process answers no more: test_isolation.py."""
    error = RuntimeError("illegal access")
    broken, _ = failing(lambda *_: True, error)
    (diagnosis,) = diagnose(broken, kinds=[BY_NAME[FAST]], memory=MEMORY)
    assert str(error) in diagnosis.error and diagnosis.best is None and not diagnosis.is_right
    at_times, calls = failing(lambda call, _: call % 4 == 0, error, step=16)
    (diagnosis,) = diagnose(at_times, kinds=[BY_NAME[FAST]], memory=MEMORY)
    assert diagnosis.best is not None and diagnosis.best.is_complete and len(calls) > 12
    probed = len(calls) - 4  # the last ones ask again, whether its bits are random
    assert f"{probed // 4} of {probed} probes failed" in diagnosis.left_out


def test_bits_that_change_are_not_explained() -> None:
    """S of 1, 2 or 3 at random: no rules are looked for, and the headline says why."""
    draws = np.random.default_rng(0)

    def scaled_mm(*operands: Number, **options: Any) -> Number:
        return subject(slices=int(draws.integers(1, 4))).verbs["scaled_mm"](*operands, **options)

    lines = list(diagnosis_lines("x", diagnose(subject_of(scaled_mm), kinds=[BY_NAME[FAST]], memory=MEMORY)))
    sentence = "it gives other bits when the same GEMM is asked again: nothing else follows from them"
    assert lines[1:] == [f"  in short: {sentence}", f"  {FAST}: not diagnosed: {sentence}"]


SAME_KERNEL = (
    {"operands swapped", "output transposed"},  # tensorwise there is no scale of a row
    {f"sums of {bits} fraction bits" for bits in (23, 18, 19)},  # no sum of a step has more bits
    {f"scale_b of column n mod {tile}" for tile in (64, 128)},  # of squares of 128 columns
    # one pair of tensorwise scales
    {"scale_a rounded up to a power of two", "scale_a rounded to the nearest power of two", "log2 of scale_a rounded"},
    *({f"split-K {n}", f"split-K {n} of a long K"} for n in (2, 3, 4, 8)),  # short K is not split into multiples of 512
)
"""Alterations with another name and the same bits, beside those of chips."""
SAME_IN_BFLOAT16 = (
    {"output cut toward zero", "output cut toward zero in bfloat16"},
    {"float32 accumulation", "float32 accumulation in blocks of 128"},
    {"float32 accumulation", "float32 accumulation of OpenBLAS"},  # no sum in a block of 128 is long enough
    {"exact accumulation", "float64 throughout", "float64 throughout, output through float32"},
    {"equal scales as tensorwise", "equal scale_a as tensorwise"},
    {"scale_b rounded down to a power of two", "scale_b rounded to the nearest power of two"},
)


@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        *(("tensorwise fast", narrow) for narrow in (False, True)),
        *((name, True) for name in ("rowwise fast", "grouped rowwise fast", VECTORS, SQUARE)),
    ],
)
def test_probes_part_the_alterations(name: str, narrow: bool) -> None:
    """No two alterations that mean something for a kind of GEMM have the same bits on its probes; also in bfloat16."""
    cases: list[Any] = []
    for probe in probes(BY_NAME[name], takes_any_size=True):
        offered = [case for case in probe.cases() if not narrow or case.out_dtype == BFLOAT16]
        cases += [(case, probe.at) for case in (offered if probe.needs_all else offered[:1])]

    def bits(change: Callable[[Rules], Rules]) -> bytes:
        outputs = [compute(case, change(rules_of(HOPPER, case)), at=at, memory=MEMORY) for case, at in cases]
        return b"".join(np.where(np.isnan(x.astype(np.float32)), 0, x).astype(x.dtype).tobytes() for x in outputs)

    right_rules = {rules_of(HOPPER, case) for case, _ in cases}
    groups: dict[bytes, set[str]] = {}
    for alteration in ALTERATIONS:
        is_chip = "accumulation" in alteration.name and alteration.name.split("'")[0] in CHIPS
        if not is_chip and any(alteration.change(rules) != rules for rules in right_rules):
            groups.setdefault(bits(alteration.change), set()).add(alteration.name)
    right = bits(lambda rules: rules)
    silent = groups.pop(right, set())
    meaningless = (*MEANINGLESS[name], *(["output through bfloat16"] if narrow else []))
    assert all(name.startswith(meaningless) for name in silent), [x for x in silent if not x.startswith(meaningless)]
    allowed = [*SAME_KERNEL, *(SAME_IN_BFLOAT16 if narrow else [])]
    together = [names for names in groups.values() if len(names) > 1]
    assert all(any(names <= known for known in allowed) for names in together), together


BIAS = ("bias ",)
BLOCKS = ("grid of ", "first block's scales everywhere", "scale_a of block", "scale_b of block")
ONE_FORMAT = (
    "codes of a and b read as E4M3",
    *(f"codes of {x} read as {y}" for x in "ab" for y in ("E4M3", "the other's")),
)
IN_BLOCKS = (*BIAS, *(f"promotion every {k}" for k in (128, 256, 512)), *ONE_FORMAT, "formats swapped")
MEANINGLESS: dict[str, tuple[str, ...]] = {
    "tensorwise fast": (*BIAS, *BLOCKS, "scales swapped", "scale_a of row", "scale_b of column"),
    # a square of 128 columns has one scale
    SQUARE: (*IN_BLOCKS, "scales swapped", *(f"scale_b of column n {what}" for what in ("xor", "- n mod"))),
    VECTORS: IN_BLOCKS,
    "rowwise fast": (*BIAS, *BLOCKS),
    "grouped rowwise fast": (*BIAS, *BLOCKS),
}
"""What such a GEMM has nothing of."""


def test_torch_on_a_cpu_scales_first_and_adds_in_float32() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("here it is the hardware")
    (diagnosis,) = diagnose(load_subject("torch:_scaled_mm"), kinds=[BY_NAME["tensorwise fast"]], memory=MEMORY)
    assert diagnosis.best is not None and diagnosis.best.alterations[0].startswith("scales "), diagnosis
    # oneDNN has a kernel for each CPU, and adds in an order of its own: two in three of what differs are explained.
    unexplained = diagnosis.outputs_total - diagnosis.best.outputs_equal
    assert 3 * unexplained <= diagnosis.outputs_total - diagnosis.outputs_equal, diagnosis


def test_xla_on_a_cpu_adds_in_float32() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "cpu":
        pytest.skip("here it is the hardware")

    def dot(a: Number, b: Number, scale_a: Number, scale_b: Number, **options: Any) -> Number:
        if options["out_dtype"].name != "float32":
            raise NotOffered("float32 alone")
        product = jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=np.float32)
        return (np.asarray(product) * scale_b) * scale_a

    (diagnosis,) = diagnose(subject_of(dot), kinds=[BY_NAME[FAST]])
    assert diagnosis.best is not None and diagnosis.best.alterations[0].startswith("float32 accumulation"), diagnosis
    assert 10 * diagnosis.best.outputs_equal > 9 * diagnosis.outputs_total

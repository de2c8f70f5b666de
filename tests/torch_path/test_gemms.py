"""The emulated GEMMs of f8emu.torch: the oracle's values, in any layout, without aliasing; and what is refused.

Bad input is a clear error that names the remedy, for both engines.
"""

from typing import Any

import pytest
import torch

import f8emu.torch as f8
from f8emu.conformance import load_subject, verify
from f8emu.spec import HOPPER, Granularity, OperandError, SpecError, UnsupportedError
from tests.torch_path.bits import assert_same_bits, expect
from tests.torch_path.layers import COPIED, draw, gemm_operands, laid_out

E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
M, N, K = 48, 32, 288  # two full promotion intervals of 128 and a quarter
PAIRS = pytest.mark.parametrize("pair", HOPPER.granularity_pairs, ids=lambda p: f"{p[0].value}-{p[1].value}")
TENSORWISE_PAIR, ROWWISE_PAIR = HOPPER.granularity_pairs[:2]


def test_gemms_equal_the_oracle() -> None:
    """Recorded and generated ones: granularities, formats, chaining, split-K, specials, scales, biases, groups."""
    (found,) = verify([load_subject("torch")], stages=["golden", "gemms"]).subjects
    assert found.is_equal and [stage.cases_total > 150 for stage in found.stages] == [True, True]


@PAIRS
def test_granularities_follow_from_the_shapes(pair: tuple[Granularity, Granularity]) -> None:
    args = gemm_operands(pair, M, N, K)
    out = f8.scaled_mm(*args, out_dtype=F32)
    assert out.is_contiguous()
    assert_same_bits(out, f8.scaled_mm(*args, out_dtype=F32, granularity_a=pair[0], granularity_b=pair[1].value))


def test_layouts_of_scales_and_biases() -> None:
    a, b, *scales = gemm_operands(TENSORWISE_PAIR, M, N, K)
    bias = draw(2 * N, seed=7)
    expected = f8.scaled_mm(a, b, *scales, out_dtype=BF16, bias=bias[::2].contiguous())
    for shape in ((), (1,), (1, 1)):
        given = (x.reshape(shape) for x in scales)
        assert_same_bits(f8.scaled_mm(a, b, *given, out_dtype=BF16, bias=bias[::2]), expected)
    a, b, *scales = gemm_operands((Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128), M, N, K)
    expected = f8.scaled_mm(a, b, *scales, out_dtype=F32)
    assert_same_bits(f8.scaled_mm(a, b, *(s.t().contiguous().t() for s in scales), out_dtype=F32), expected)


@PAIRS
def test_one_row(pair) -> None:
    """The scales of 1x128 and 128x128 have the same shape here, so they are given; 1x128 takes four rows."""
    args = gemm_operands(pair, 4 if pair[0] is Granularity.BLOCKWISE_1X128 else 1, N, K)
    options = {"granularity_a": pair[0], "granularity_b": pair[1], "out_dtype": F32}
    assert_same_bits(f8.scaled_mm(*args, **options), expect("scaled_mm", *args, **options))


def test_one_row_of_block_scales_is_read_as_1x128() -> None:
    """It fits 128x128 as well, which has to be named: 1x128 takes no single row."""
    args = gemm_operands((Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128), 1, N, K)
    with pytest.raises(OperandError, match="with 1x128 scales of a, M must be a multiple of 4; got 1"):
        f8.scaled_mm(*args, out_dtype=F32)


def test_a_short_k_is_rowwise_unless_named() -> None:
    args = gemm_operands((Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128), 4, N, 128)
    for named in (None, Granularity.ROWWISE, Granularity.BLOCKWISE_1X128):
        options = {"granularity_a": named or Granularity.ROWWISE, "granularity_b": named or Granularity.ROWWISE}
        expected = expect("scaled_mm", *args, **options, out_dtype=F32)
        out = f8.scaled_mm(*args, granularity_a=named, granularity_b=named, out_dtype=F32)
        assert_same_bits(out, expected)


@pytest.mark.parametrize("layout", COPIED)
def test_layouts_that_are_copied(layout) -> None:
    a, b, *scales = gemm_operands(ROWWISE_PAIR, M, N, K)
    out = f8.scaled_mm(laid_out(a, layout), laid_out(b.t(), layout).t(), *scales, out_dtype=F32)
    assert_same_bits(out, f8.scaled_mm(a, b, *scales, out_dtype=F32))


def test_nothing_is_shared_with_a_result() -> None:
    """A result is the caller's: writing to it, or to an operand afterwards, changes nothing else."""
    args = gemm_operands(ROWWISE_PAIR, M, N, K)
    kept = [x.clone() for x in args]
    first = f8.scaled_mm(*args, out_dtype=F32)
    expected = first.clone()
    second = f8.scaled_mm(*args, out_dtype=F32)
    first.fill_(7)
    assert_same_bits(second, expected)
    for x, before in zip(args, kept, strict=True):
        assert_same_bits(x, before)
        x.copy_(torch.zeros_like(before))
    assert_same_bits(second, expected)


GROUPS = {
    "rows": ((52, K), (4, N, K), (52,), (4, N), [16, 16, 48, 49]),
    "columns": ((4, M, K), (64, K), (4, M), (64,), [16, 16, 48, 56]),
    "K": ((M, K), (N, K), (4 * M,), (4 * N,), [16, 16, 48, K - 16]),
    "batch": ((4, M, K), (4, N, K), (4, M), (4, N), None),
}
"""The dimension in groups: shapes of a, of b transposed, and of the scales, and where groups end; one is empty, and
something lies beyond the last."""


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_grouped_equals_the_oracle(use_fast_accum, kind) -> None:
    *shapes, ends = GROUPS[kind]
    of_a, of_b, *scales = [draw(*shape, seed=i, dtype=F32).abs() for i, shape in enumerate(shapes)]
    a, b = f8.cast(of_a, "float8_e4m3fn"), f8.cast(of_b, "float8_e4m3fn").mT
    args: Any = (a, b, *scales, None if ends is None else torch.tensor(ends, dtype=torch.int32))
    out = f8.scaled_grouped_mm(*args, use_fast_accum=use_fast_accum)
    expected = expect("scaled_grouped_mm", *args, use_fast_accum=use_fast_accum, out_dtype=torch.bfloat16)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("layout", ["row, column", "column, row"])
def test_bfloat16_mm_equals_the_oracle(layout: str) -> None:
    a, b = (draw(rows, K, seed=seed) for seed, rows in ((8, M), (9, N)))
    a, b = (a, b.t()) if layout == "row, column" else (a.t().contiguous().t(), b.t().contiguous())
    for split_k in (None, 3):
        out = f8.mm(a, b, out_dtype=F32, split_k=split_k)
        assert_same_bits(out, expect("mm", a, b, out_dtype=F32, split_k=split_k or 1))


# What is refused


def zeros(rows: int, k: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(rows, k, dtype=dtype)


GROUPED = f8.scaled_grouped_mm
GOOD: dict[Any, dict[str, Any]] = {
    f8.scaled_mm: {
        "a": zeros(32, 64),
        "b": zeros(48, 64).t(),
        "scale_a": torch.ones(()),
        "scale_b": torch.ones(()),
        "out_dtype": BF16,
    },
    GROUPED: {
        "a": zeros(32, 64),
        "b": zeros(2 * 16, 64).view(2, 16, 64).mT,
        "scale_a": torch.ones(32),
        "scale_b": torch.ones(2, 16),
        "offs": torch.tensor([16, 32], dtype=torch.int32),
    },
    f8.mm: {"a": zeros(32, 64, BF16), "b": zeros(32, 64, BF16).t()},
    f8.engine_of: {"device": "cpu"},
}
ROWWISE: dict[str, Any] = {"scale_a": torch.ones(32, 1), "scale_b": torch.ones(1, 48)}
BLOCKWISE: dict[str, Any] = {
    "a": zeros(32, 256),
    "b": zeros(48, 256).t(),
    "scale_a": torch.ones(32, 2),
    "scale_b": torch.ones(2, 1),
}
Bad = dict[str, tuple[dict[str, Any], type[Exception], str]]
"""A name -> what is changed in the good call, the error and its message."""
BAD: dict[Any, Bad] = {
    f8.scaled_mm: {
        # What f8emu.spec.gemm_call refuses (tests/spec/test_gemm_call.py) reaches it: one of each kind.
        "float32 operand": ({"a": zeros(32, 64, torch.float32)}, OperandError, "a must be float8.*got float32"),
        "weight not transposed": ({"b": zeros(48, 64)}, OperandError, r"got shapes \[32, 64\] and \[48, 64\]"),
        "scales of another granularity": (
            ROWWISE | {"granularity_a": "tensorwise"},
            OperandError,
            r"\[1, 1\] and \[1, 1\] for tensorwise x tensorwise; got \[32, 1\]",
        ),
        "N not a multiple": ({"b": zeros(40, 64).t()}, OperandError, "multiples of 16; got K = 64, N = 40; pad"),
        "blockwise, fast": (BLOCKWISE | {"use_fast_accum": True}, UnsupportedError, "use_fast_accum"),
        "bias of another size": ({"bias": torch.zeros(32, dtype=BF16)}, OperandError, r"shape \[N\] = \[48\]"),
        "split_k 0": ({"split_k": 0}, SpecError, "split_k must be a static integer of at least 1"),
        # What torch alone knows: tensors, strides, devices, engines.
        "an array": ({"a": [1.0]}, OperandError, r"scaled_mm: a must be a torch.Tensor; got list.*interop.to_torch"),
        "raw codes": ({"a": zeros(32, 64, torch.uint8)}, OperandError, "a must be float8.*got uint8"),
        "a column-major": ({"a": zeros(64, 32).t()}, OperandError, r"a must be row-major.*\[1, 32\].*a.contiguous\(\)"),
        "a strided": ({"a": zeros(32, 128)[:, ::2]}, OperandError, r"a must be row-major.*strides \[128, 2\]"),
        "a expanded": ({"a": zeros(1, 64).expand(32, 64)}, OperandError, r"a must be row-major.*strides \[0, 1\]"),
        "b row-major": ({"b": zeros(64, 48)}, OperandError, r"b must be column-major.*b.t\(\).contiguous\(\).t\(\)"),
        "strided rowwise scales": (
            ROWWISE | {"scale_b": torch.ones(1, 96)[:, ::2]},
            OperandError,
            r"rowwise scales must be contiguous; call scale.contiguous\(\)",
        ),
        "no out_dtype": (
            {"out_dtype": None},
            UnsupportedError,
            "out_dtype=None asks for float8.*pass out_dtype=torch.bf",
        ),
        "float8 out": ({"out_dtype": E4M3}, UnsupportedError, "out_dtype must be.*got torch.float8_e4m3fn; quantize"),
        "float64 out": ({"out_dtype": torch.float64}, UnsupportedError, "out_dtype must be.*got torch.float64"),
        "unknown out": ({"out_dtype": "float33"}, SpecError, "unknown format 'float33'"),
        "odd out": ({"out_dtype": 32}, OperandError, "out_dtype must be a torch.dtype, a Format or its name; got 32"),
        "unknown engine": (
            {"engine": "gpu"},
            OperandError,
            "engine must be one of auto, hardware, emulated; got 'gpu'",
        ),
        "another device": (
            {"scale_a": torch.ones((), device="meta")},
            OperandError,
            "one device; a is on cpu and scale_a",
        ),
        "a bias elsewhere": (
            {"bias": torch.zeros(48, dtype=BF16, device="meta")},
            OperandError,
            "a is on cpu and bias on meta; move",
        ),
    },
    GROUPED: {
        "2-d b": ({"b": zeros(16, 64).t()}, OperandError, r"where offs divides K; got"),
        "no groups": ({"b": zeros(16, 64)[None].mT[:0]}, OperandError, "groups"),
        "b row-major": ({"b": zeros(2 * 64, 16).view(2, 64, 16)}, OperandError, "b must be column-major"),
        "strided scale": ({"scale_a": torch.ones(64)[::2]}, OperandError, "scales must be contiguous"),
        "rows that are not there": ({"offs": torch.tensor([8, 33]).int()}, OperandError, r"got \[8, 33\]"),
        "ends that fall": ({"offs": torch.tensor([40, 32]).int()}, OperandError, r"got \[40, 32\]"),
    },
    f8.mm: {
        "N": ({"b": zeros(64, 8, BF16)}, OperandError, "K and N must be multiples of 16; got K = 64, N = 8"),
        "out": ({"out_dtype": torch.float64}, UnsupportedError, "mm: out_dtype must be"),
        "None": ({"a": None}, OperandError, "mm: a must be a torch.Tensor; got NoneType"),
    },
    f8.engine_of: {},
}
for _verb, _calls in BAD.items():  # no silent fallback: what was asked for by name runs or fails
    _needs = r"engine='hardware' needs tensors on a CUDA device.*9.0, Hopper; got cpu; .*engine='emulated'"
    _calls["hardware"] = {"engine": "hardware"}, UnsupportedError, f"{_verb.__name__}: {_needs}"


@pytest.mark.parametrize("verb", BAD, ids=lambda verb: verb.__name__)
def test_bad_calls_are_refused(verb: Any) -> None:
    for changes, error, message in BAD[verb].values():
        with pytest.raises(error, match=message):
            verb(**(GOOD[verb] | changes))


def test_the_good_calls_are_good() -> None:
    """Nothing is refused without the change that a bad call makes."""

    def on_meta(verb: Any, changes: dict[str, Any]) -> torch.Tensor:
        call = GOOD[verb] | changes
        return verb(**{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()})

    for changes in ({}, ROWWISE, BLOCKWISE):
        assert on_meta(f8.scaled_mm, changes).shape == (32, 48)
    assert on_meta(GROUPED, {}).shape == on_meta(f8.mm, {"b": zeros(16, 64, BF16).t()}).shape == (32, 16)

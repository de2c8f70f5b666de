"""The emulated GEMMs of f8emu.torch against the oracle: granularities, layouts, options, and no aliasing."""

import pytest
import torch

import f8emu.torch as f8
from f8emu.spec import E4M3FN, E5M2, HOPPER, Format, Granularity, OperandError

OUTPUTS = [torch.float32, torch.bfloat16, torch.float16]
M, N, K = 48, 32, 288  # two full promotion intervals of 128 and a quarter
PAIRS = pytest.mark.parametrize("pair", HOPPER.granularity_pairs, ids=lambda p: f"{p[0].value}-{p[1].value}")


def random_codes(seed: int, rows: int, k: int, format: Format = E4M3FN) -> torch.Tensor:
    """Finite codes [rows, k] in which each element has its own magnitude."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 6, (rows, k), generator=generator)
    return f8.cast(torch.randn(rows, k, generator=generator) * torch.exp2(exponents), format)


def random_scale(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Every entry of another magnitude, so that equal scales cannot hide an index error."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * torch.exp2(torch.randint(-8, 8, shape, generator=generator))


def operands(pair: tuple[Granularity, Granularity], m: int = M, n: int = N, k: int = K) -> tuple[torch.Tensor, ...]:
    """A call's a, b, scale_a and scale_b at these granularities."""
    scale_a = random_scale(3, pair[0].scale_shape(m, k))
    scale_b = random_scale(4, pair[1].scale_shape(n, k)).t()
    return random_codes(1, m, k), random_codes(2, n, k).t(), scale_a, scale_b.contiguous()


@PAIRS
@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
def test_every_granularity_equals_the_oracle(pair, out_dtype, expect, assert_same_bits) -> None:
    args = operands(pair)
    out = f8.scaled_mm(*args, out_dtype=out_dtype)  # the granularities follow from the shapes
    expected = expect("scaled_mm", *args, granularity_a=pair[0], granularity_b=pair[1], out_dtype=out_dtype)
    assert_same_bits(out, expected, nan_codes=True)
    assert out.is_contiguous()
    named = f8.scaled_mm(*args, out_dtype=out_dtype, granularity_a=pair[0], granularity_b=pair[1].value)
    assert_same_bits(named, expected)


@pytest.mark.parametrize("granularity", [Granularity.TENSORWISE, Granularity.ROWWISE], ids=lambda g: g.value)
@pytest.mark.parametrize("formats", [(E4M3FN, E5M2), (E5M2, E4M3FN)], ids=str)
def test_options_equal_the_oracle(granularity, formats, expect, assert_same_bits) -> None:
    """Formats, accumulation, a bias with gaps, slices of K."""
    args = list(operands((granularity, granularity)))
    args[0], args[1] = random_codes(5, M, K, formats[0]), random_codes(6, N, K, formats[1]).t()
    bias = random_scale(7, (2 * N,))[::2]
    of_scales = {"granularity_a": granularity, "granularity_b": granularity}
    for options in (
        *({"use_fast_accum": fast, "split_k": s, "out_dtype": OUTPUTS[0]} for fast in (False, True) for s in (1, 2, 3)),
        *({"bias": bias.to(out_dtype), "out_dtype": out_dtype} for out_dtype in OUTPUTS[1:]),
    ):
        assert_same_bits(f8.scaled_mm(*args, **options), expect("scaled_mm", *args, **of_scales, **options))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_tensorwise_scale_may_have_any_shape(shape, expect, assert_same_bits) -> None:
    a, b, scale_a, scale_b = operands((Granularity.TENSORWISE, Granularity.TENSORWISE))
    out = f8.scaled_mm(a, b, scale_a.reshape(shape), scale_b.reshape(shape), out_dtype=torch.bfloat16)
    assert_same_bits(out, expect("scaled_mm", a, b, scale_a, scale_b, out_dtype=torch.bfloat16))


def test_specials_equal_the_oracle(expect, assert_same_bits) -> None:
    _, b, scale_a, scale_b = operands((Granularity.TENSORWISE, Granularity.TENSORWISE))
    raw = random_codes(8, M, K, E5M2).view(torch.uint8)
    raw[0, 0], raw[1, 5], raw[2, 7], raw[3, 9], raw[4] = 0x7F, 0x7C, 0xFC, 0xFF, 0
    raw[5, 0], raw[5, 1] = 0x7C, 0xFC  # inf - inf
    args = (raw.view(torch.float8_e5m2), b, scale_a, scale_b)
    for out_dtype in OUTPUTS:
        expected = expect("scaled_mm", *args, out_dtype=out_dtype)
        assert_same_bits(f8.scaled_mm(*args, out_dtype=out_dtype), expected, nan_codes=True)


@pytest.mark.parametrize("scale", [1e-30, 3e38, 0.0, float("inf"), float("nan"), -1.5], ids=str)
def test_unusual_scales_equal_the_oracle(scale, expect, assert_same_bits) -> None:
    """Subnormal float32 results too: nothing is flushed."""
    a, b, *_ = operands((Granularity.TENSORWISE, Granularity.TENSORWISE))
    args = (a, b, torch.tensor(scale), torch.tensor(1e-9))
    assert_same_bits(
        f8.scaled_mm(*args, out_dtype=torch.float32),
        expect("scaled_mm", *args, out_dtype=torch.float32),
        nan_codes=True,
    )


@PAIRS
def test_one_row(pair, expect, assert_same_bits) -> None:
    """The scales of 1x128 and 128x128 have the same shape here, so they are given; 1x128 takes four rows."""
    args = operands(pair, m=4 if pair[0] is Granularity.BLOCKWISE_1X128 else 1)
    options = {"granularity_a": pair[0], "granularity_b": pair[1], "out_dtype": torch.float32}
    assert_same_bits(f8.scaled_mm(*args, **options), expect("scaled_mm", *args, **options))


def test_one_row_of_block_scales_is_read_as_1x128() -> None:
    """It fits 128x128 as well, which has to be named: 1x128 takes no single row."""
    args = operands((Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128), m=1)
    with pytest.raises(OperandError, match="with 1x128 scales of a, M must be a multiple of 4; got 1"):
        f8.scaled_mm(*args, out_dtype=torch.float32)


def test_a_short_k_is_rowwise_unless_named(expect, assert_same_bits) -> None:
    args = operands((Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128), m=4, k=128)
    for named in (None, Granularity.ROWWISE, Granularity.BLOCKWISE_1X128):
        options = {"granularity_a": named or Granularity.ROWWISE, "granularity_b": named or Granularity.ROWWISE}
        expected = expect("scaled_mm", *args, **options, out_dtype=torch.float32)
        out = f8.scaled_mm(*args, granularity_a=named, granularity_b=named, out_dtype=torch.float32)
        assert_same_bits(out, expected)


@pytest.mark.parametrize("layout", ["padded rows", "misaligned", "every other row"])
def test_layouts_that_are_copied(layout, assert_same_bits) -> None:
    a, b, *scales = operands((Granularity.ROWWISE, Granularity.ROWWISE))

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        rows, k = x.shape
        match layout:
            case "padded rows":
                place = torch.zeros(rows, k + 16, dtype=torch.uint8).view(x.dtype)[:, :k]
            case "misaligned":
                place = torch.zeros(rows * k + 1, dtype=torch.uint8).view(x.dtype)[1:].view(rows, k)
            case _:
                place = torch.zeros(2 * rows, k, dtype=torch.uint8).view(x.dtype)[::2]
        return place.copy_(x)

    out = f8.scaled_mm(laid_out(a), laid_out(b.t()).t(), *scales, out_dtype=torch.float32)
    assert_same_bits(out, f8.scaled_mm(a, b, *scales, out_dtype=torch.float32))


def test_block_scales_may_have_any_layout(assert_same_bits) -> None:
    pair = (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128)
    a, b, scale_a, scale_b = operands(pair)
    expected = f8.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32)
    scale_a, scale_b = (s.t().contiguous().t() for s in (scale_a, scale_b))
    assert_same_bits(f8.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32), expected)


def test_nothing_is_shared_with_a_result(assert_same_bits) -> None:
    """A result is the caller's: writing to it, or to an operand afterwards, changes nothing else."""
    args = operands((Granularity.ROWWISE, Granularity.ROWWISE))
    kept = [x.clone() for x in args]
    first = f8.scaled_mm(*args, out_dtype=torch.float32)
    expected = first.clone()
    second = f8.scaled_mm(*args, out_dtype=torch.float32)
    first.fill_(7)
    assert_same_bits(second, expected)
    for x, before in zip(args, kept, strict=True):
        assert_same_bits(x, before)
        x.copy_(torch.zeros_like(before))
    assert_same_bits(second, expected)


@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_grouped_equals_the_oracle(use_fast_accum, expect, assert_same_bits) -> None:
    """Groups of unequal size, one of them empty, each with its own matrix and scales."""
    a = random_codes(1, 52, K)
    b = torch.stack([random_codes(s, N, K) for s in (2, 3, 4, 5)]).mT
    args = (a, b, random_scale(6, (52,)), random_scale(7, (4, N)), torch.tensor([16, 16, 49, 52], dtype=torch.int32))
    out = f8.scaled_grouped_mm(*args, use_fast_accum=use_fast_accum)
    expected = expect("scaled_grouped_mm", *args, use_fast_accum=use_fast_accum, out_dtype=torch.bfloat16)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("split_k", [None, 3])
@pytest.mark.parametrize("layout", ["row, column", "column, row"])
def test_bfloat16_mm_equals_the_oracle(out_dtype, split_k, layout, expect, assert_same_bits) -> None:
    generator = torch.Generator().manual_seed(9)
    a = (torch.randn(M, K, generator=generator) * 10).bfloat16()
    b = torch.randn(N, K, generator=generator).bfloat16().t()
    if layout == "column, row":
        a, b = a.t().contiguous().t(), b.contiguous()
    out = f8.mm(a, b, out_dtype=out_dtype, split_k=split_k)
    assert_same_bits(out, expect("mm", a, b, out_dtype=out_dtype, split_k=split_k or 1))

"""The bound of a GEMM's error: never exceeded by an emulated chip, nearly reached by operands that lose the most."""

from functools import reduce
from typing import Any, cast, get_args

import ml_dtypes
import numpy as np
import pytest
import torch

import f8emu.numpy as hopper
from f8emu import interop
from f8emu.spec import CHIPS, ChipName, F8Error, HighPrecisionName, SpecError
from f8emu.testing import accumulator, gemm_tolerance, gemm_tolerance_from_maxima
from f8emu.testing.near import Near, power_of

Array = np.ndarray
LENGTHS = (1, 2, 15, 16, 31, 32, 33, 64, 127, 128, 129, 160, 256, 400, 640, 1024)
DRAWS = ("normal", "wide", "codes", "sparse", "cancelling")
UNIT = np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)


def dtypes_of(chip: ChipName) -> list[tuple[Any, Any]]:
    pairs = CHIPS[chip].format_pairs
    return [(np.dtype(getattr(ml_dtypes, a.name)), np.dtype(getattr(ml_dtypes, b.name))) for a, b in pairs]


def drawn(name: str, rows: int, k: int, dtype: Any, r: np.random.Generator) -> Array:
    """Finite codes [rows, K]."""
    x = r.standard_normal((rows, k)) * 16
    if name == "wide":
        x = np.exp2(r.uniform(-9, 7.5, (rows, k))) * r.choice([-1.0, 1.0], (rows, k))
    elif name == "codes":
        x = np.nan_to_num(r.integers(0, 256, (rows, k), np.uint8).view(dtype).astype(np.float64), posinf=0, neginf=0)
    elif name == "sparse":
        x = np.where(r.random((rows, k)) < 0.9, 0, x)
    elif name == "cancelling":
        x[:, k // 2 : k // 2 * 2] = -x[:, : k // 2]
    return np.clip(x, -240, 240).astype(dtype)


def scales_of(m: int, n: int, k: int, kind: str, r: np.random.Generator) -> tuple[Array, Array]:
    shapes = {"tensorwise": ((1, 1), (1, 1)), "rowwise": ((m, 1), (1, n))}
    shapes["blocks"] = ((m, -(-k // 128)), (-(-k // 128), n))
    shapes["squares"] = ((m, -(-k // 128)), (-(-k // 128), -(-n // 128)))
    first, second = (np.exp2(r.uniform(-6, 6, shape)).astype(np.float32) for shape in shapes[kind])
    return first, second


def exact(a: Array, b: Array, scale_a: Array, scale_b: Array) -> Array:
    """In float64; scales of blocks of K are those of each of its elements."""
    k, groups = a.shape[1], scale_a.shape[1]
    along = np.zeros(k, int) if groups == 1 else np.arange(k) // 128
    return (a.astype(np.float64) * scale_a[:, along]) @ (b.astype(np.float64) * scale_b[along])


def in_bounds(a: Array, b: Array, scales: tuple[Array, Array], chip: ChipName, **options: Any) -> Array:
    """The distances of a chip's outputs from the exact ones, in bounds; 0 where an output is infinite, as its bound."""
    with np.errstate(over="ignore"):
        output = hopper.scaled_mm(a, b, *scales, chip=chip, **options).astype(np.float64)
    is_infinite = np.isinf(output)
    allowed = gemm_tolerance(a, b, *scales, chip=chip, **options)
    assert allowed.shape == output.shape and allowed.dtype == np.float64
    assert np.isinf(allowed[is_infinite]).all() and not np.isnan(allowed).any()
    right = exact(a, b, *scales) + options.get("bias", np.zeros(1)).astype(np.float64)
    return np.abs(np.where(is_infinite, 0, output - right)) / np.where(is_infinite, 1, allowed)


def test_no_output_of_a_chip_is_beyond_its_bound() -> None:
    r, ratios = np.random.default_rng(0), {chip: np.zeros(0) for chip in CHIPS}
    lengths = [*LENGTHS * 24, *(2048, 4096) * 4]
    for number, k in enumerate(lengths):
        chip = cast("ChipName", [*CHIPS][number % 7 % len(CHIPS)])
        for turn, draw in enumerate(DRAWS):
            is_blockwise = (number + turn) % 3 == 0 and chip in ("Hopper", "H100")
            pair = dtypes_of(chip)[0 if is_blockwise else (number + turn) % len(dtypes_of(chip))]
            a, b = (drawn(draw, 4, k, dtype, r) for dtype in pair)
            kind = ("blocks", "squares")[number % 2] if is_blockwise else ("tensorwise", "rowwise")[turn % 2]
            scales = scales_of(4, 4, k, kind, r)
            options: dict[str, Any] = {
                "out_dtype": ("float32", "bfloat16", "float16")[(number + turn) % 3],
                "use_fast_accum": not is_blockwise and number // 7 % 2 == 0,
                "split_k": 1 + number % 3,
            }
            if is_blockwise:  # few K fit other granularities too
                of_b = "blockwise_1x128" if kind == "blocks" else "blockwise_128x128"
                options |= {"granularity_a": "blockwise_1x128", "granularity_b": of_b}
            elif number % 4 == 0:
                options["bias"] = r.standard_normal(4).astype(ml_dtypes.bfloat16)
            ratios[chip] = np.append(ratios[chip], in_bounds(a, b.T, scales, chip, **options))
    print({chip: (of_chip.size, round(float(of_chip.max()), 3)) for chip, of_chip in ratios.items()})
    assert sum(of_chip.size for of_chip in ratios.values()) == 16 * len(DRAWS) * len(lengths)
    assert max(float(of_chip.max()) for of_chip in ratios.values()) <= 1


def lossy(chip: ChipName, *, fast: bool, k: int = 4096) -> tuple[Array, Array]:
    """Operands [1, K] and [K, 1] that lose the most: in each chain a power of two, and then products just below the
    unit to which they are cut. The powers of two cancel each other where there are several."""
    model = CHIPS[chip].float8_fast if fast else CHIPS[chip].float8
    large = np.arange(k) % (model.promote_k or k) == 0
    if model.floored is not None:  # its unit is that of the products of a step, of which it adds every other
        large = np.arange(k) % model.step_k < model.floored.interleaved
    exponent = 14 - model.aligned_fraction_bits - 1  # 9/8 * 14/8 is 1.97
    first, second = dtypes_of(chip)[0]
    a = np.where(large, 2.0**7 * (-1.0) ** np.cumsum(large), 1.125 * 2.0 ** (exponent // 2))
    b = np.where(large, 2.0**7, 1.75 * 2.0 ** (exponent - exponent // 2))
    return a[None].astype(first), b[:, None].astype(second)


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize(
    ("chip", "least"),
    [
        ("H100", 0.93),
        ("Ada", 0.88),
        ("Blackwell mma.sync", 0.7),
        ("Blackwell tcgen05", 0.8),
        ("RTX Blackwell", 0.8),
        ("CDNA3", 0.7),
    ],
)
def test_the_bound_is_nearly_reached(chip: ChipName, least: float, fast: bool) -> None:
    a, b = lossy(chip, fast=fast)
    reached = in_bounds(a, b, UNIT, chip, out_dtype="float32", use_fast_accum=fast, split_k=1).item()
    print(f"{chip}: {reached:.3f} of the bound")
    assert least <= reached <= 1


def test_the_bound_of_block_scales_is_nearly_reached() -> None:
    a, b = lossy("H100", fast=False)
    ones = np.ones((1, 32), np.float32)
    named = {"granularity_a": "blockwise_1x128", "granularity_b": "blockwise_1x128"}
    assert 0.93 <= in_bounds(a, b, (ones, ones.T), "H100", out_dtype="float32", split_k=1, **named).item() <= 1


def added_in_float32(a: Array, b: Array, scales: tuple[Array, Array]) -> Array:
    """Product after product."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k, None].astype(np.float32) * b[k].astype(np.float32)
    return (total * scales[0]) * scales[1]


def test_a_kernel_that_adds_in_float32_has_a_bound_that_is_nearly_reached() -> None:
    e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
    a, b = np.full((1, 4096), 2.0**-4), np.full((4096, 1), 2.0**-6)
    a[0, 0] = b[0, 0] = 2.0**7  # half a unit of its last place is 2^-10, each of the others
    a, b = a.astype(e4m3), b.astype(e4m3)
    options = {"chip": None, "out_dtype": "float32"}
    allowed = gemm_tolerance(a, b, *UNIT, **options)
    assert 0.99 < (np.abs(added_in_float32(a, b, UNIT) - exact(a, b, *UNIT)) / allowed).item() <= 1
    r = np.random.default_rng(1)
    for k in (1, 16, 300, 2048):
        a, b, scales = (
            drawn("wide", 16, k, e4m3, r),
            drawn("normal", 16, k, e4m3, r).T,
            scales_of(16, 16, k, "rowwise", r),
        )
        mine, right = added_in_float32(a, b, scales), exact(a, b, *scales)
        allowed = gemm_tolerance(a, b, *scales, **options)
        assert (np.abs(mine - right) <= allowed).all()
        # Two implementations are no farther apart than the sum of their bounds.
        h100 = hopper.scaled_mm(a, b, *scales, out_dtype="float32", chip="H100").astype(np.float64)
        assert (np.abs(mine - h100) <= allowed + gemm_tolerance(a, b, *scales, out_dtype="float32")).all()


FAULTS = ("a unit of one bit less", "promotions are not rounded", "subnormals are normalised")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bound_that_is_derived_wrongly_is_exceeded(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, (a, b) = "H100", lossy("H100", fast=False)
    if fault == FAULTS[0]:
        monkeypatch.setattr(accumulator, "power_of", lambda magnitude: power_of(magnitude) / 2)
    elif fault == FAULTS[1]:  # to the first total nothing can be added
        chip, a, b = "Blackwell mma.sync", np.full((1, 4096), 1.5 * 2.0**-4), np.full((4096, 1), 2.0**-4)
        a[0, :32] = b[:32, 0] = 448
        monkeypatch.setattr(accumulator, "total", lambda parts, format: reduce(Near.plus, parts))
    else:  # the first product is a subnormal's, 2^-1, and has the exponent 2
        a, b = np.full((1, 32), 2.0**-9), np.full((32, 1), 1.875 * 2.0**-3)
        b[0] = 256
        of = accumulator.Operand.of
        monkeypatch.setattr(accumulator.Operand, "of", lambda values, smallest_normal: of(values, 0.0))
    a, b = a.astype(ml_dtypes.float8_e4m3fn), b.astype(ml_dtypes.float8_e4m3fn)
    options: dict[str, Any] = {"out_dtype": "float32", "split_k": 1}
    assert in_bounds(a, b, UNIT, chip, **options).item() > 1
    monkeypatch.undo()
    assert in_bounds(a, b, UNIT, chip, **options).item() <= 1


# From maxima alone


def test_a_bound_from_maxima_holds_for_every_operand_of_no_larger_magnitude() -> None:
    r, e4m3 = np.random.default_rng(2), np.dtype(ml_dtypes.float8_e4m3fn)
    for number, k in enumerate((1, 32, 128, 400, 4096) * 4):
        a, b, kind = drawn(DRAWS[number % 5], 4, k, e4m3, r), drawn(DRAWS[number % 3], 4, k, e4m3, r).T, number % 3
        scales = scales_of(4, 4, k, ("tensorwise", "rowwise", "blocks")[kind], r)
        granularity = ("tensorwise", "rowwise", "blockwise_1x128")[kind]
        options: dict[str, Any] = {"use_fast_accum": kind == 0, "split_k": 1 + number % 2}
        options |= {"granularity_a": granularity, "granularity_b": granularity}
        bias = r.standard_normal(4).astype(np.float32)
        amax_a, amax_b, scale_a, scale_b = (float(np.abs(x.astype(np.float64)).max()) for x in (a, b, *scales))
        for chip in ("H100", None):
            allowed = gemm_tolerance(a, b, *scales, bias=bias, chip=chip, **options)
            largest = {"scale_a": scale_a, "scale_b": scale_b, "bias": float(np.abs(bias).max())}
            assert allowed.max() <= gemm_tolerance_from_maxima(k, amax_a, amax_b, **largest, chip=chip, **options)


def test_a_bound_from_maxima_is_reached_to_a_third() -> None:
    """Products of the largest size for half of K, then those that lose the most beside such a sum."""
    a, b = np.full((1, 4096), 256.0), np.full((4096, 1), 256.0)
    a[0, 2048:], b[2048:] = 9 * 2.0**4, 14 * 2.0**3  # 1.97 * 2^13, below the unit of the sum, 2^(27 - 13)
    a, b = a.astype(ml_dtypes.float8_e4m3fn), b.astype(ml_dtypes.float8_e4m3fn)
    options: dict[str, Any] = {"out_dtype": "float32", "use_fast_accum": True, "split_k": 1}
    output = hopper.scaled_mm(a, b, *UNIT, chip="H100", **options)
    lost = np.abs(output - exact(a, b, *UNIT)).item()
    allowed = gemm_tolerance_from_maxima(4096, 256, 256, chip="H100", **options)
    print(f"{lost / allowed:.3f} of the bound")
    assert 1 / 3 < lost / allowed <= 1


# What is refused, and what has no bound


def test_arguments_are_those_of_the_verb() -> None:
    a = np.ones((16, 32), ml_dtypes.float8_e4m3fn)
    with pytest.raises(SpecError, match="chip must be one of"):
        gemm_tolerance(a, a.T, *UNIT, chip="H1000")  # pyright: ignore[reportArgumentType]
    with pytest.raises(F8Error, match=r"a must be \[M, K\] and b \[K, N\]"):
        gemm_tolerance(a, a, *UNIT)
    with pytest.raises(F8Error, match="no fast accumulation beside block scales"):
        gemm_tolerance(a, a.T, np.ones((16, 1), np.float32), np.ones((1, 16), np.float32), use_fast_accum=True,
                       granularity_a="blockwise_1x128", granularity_b="blockwise_1x128")  # fmt: skip
    assert gemm_tolerance(a[:, :0], a.T[:0], *UNIT).max() < 1e-40  # K = 0
    assert gemm_tolerance(a[:0], a.T, *UNIT).shape == (0, 16)


def test_an_output_that_may_overflow_or_is_not_finite_has_no_bound() -> None:
    a, b = np.full((3, 32), 8, ml_dtypes.float8_e4m3fn), np.full((32, 2), 448, ml_dtypes.float8_e4m3fn)
    a[1, 5] = np.nan
    a[2] = 1
    allowed = gemm_tolerance(a, b, *UNIT, out_dtype="float16")
    assert np.isinf(allowed).tolist() == [[True, True], [True, True], [False, False]]
    infinite = np.full((2, 32), [[np.inf], [0]], ml_dtypes.float8_e5m2)
    assert np.isinf(gemm_tolerance(infinite, np.zeros_like(b), *UNIT)).tolist() == [[True, True], [False, False]]


def test_arrays_of_any_framework_are_taken() -> None:
    import jax.numpy as jnp
    import torch

    r = np.random.default_rng(3)
    a, b = (
        drawn("normal", 4, 64, np.dtype(ml_dtypes.float8_e4m3fn), r),
        drawn("wide", 4, 64, np.dtype(ml_dtypes.float8_e4m3fn), r).T,
    )
    scales = scales_of(4, 4, 64, "rowwise", r)
    expected = gemm_tolerance(a, b, *scales)
    of_torch = interop.to_torch((a, b.T, *scales))
    assert isinstance(of_torch[0], torch.Tensor)
    assert np.array_equal(gemm_tolerance(of_torch[0], of_torch[1].t(), *of_torch[2:]), expected)
    assert np.array_equal(gemm_tolerance(*map(jnp.asarray, (a, b, *scales))), expected)


def test_the_output_s_dtype_may_be_torch_s() -> None:
    for name in get_args(HighPrecisionName):
        named, dtype = gemm_tolerance_from_maxima(64, 1, 1, out_dtype=name), getattr(torch, name)
        assert gemm_tolerance_from_maxima(64, 1, 1, out_dtype=dtype) == named
    with pytest.raises(SpecError, match="out_dtype must be one of"):
        gemm_tolerance_from_maxima(64, 1, 1, out_dtype=torch.int8)

"""f8emu.numpy: the oracle's bits, whatever the arguments are given as; and what it refuses."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8emu
import f8emu.numpy as f8
import f8ref.numpy as oracle
from f8emu.native import library
from f8emu.native.gemm import fits
from f8emu.spec import (
    ADA,
    E4M3FN,
    E5M2,
    FLOAT8,
    FLOAT16,
    HOPPER,
    Chip,
    Granularity,
    OperandError,
    Overflow,
    RecipeName,
    SpecError,
    UnsupportedError,
)

E4M3 = ml_dtypes.float8_e4m3fn
R = np.random.default_rng(0)


def values(*shape: int) -> np.ndarray:
    return R.standard_normal(shape).astype(np.float32)


def bits(x: Any) -> Any:
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}").tolist()


def quantized(x: np.ndarray, granularity: Granularity) -> tuple[np.ndarray, np.ndarray]:
    scales = f8.scale_from_amax(f8.amax(x, granularity), E4M3)
    return f8.quantize(x, scales.inv_scale, E4M3, granularity), scales.scale


@pytest.mark.parametrize("pair", HOPPER.granularity_pairs, ids=lambda pair: " x ".join(g.value for g in pair))
def test_granularities_follow_from_the_shapes_of_the_scales(pair: tuple[Granularity, Granularity]) -> None:
    (a, scale_a), (b, scale_b) = quantized(values(48, 384), pair[0]), quantized(values(144, 384), pair[1])
    observed = f8.scaled_mm(a, b.T, scale_a, scale_b.T, out_dtype=np.float32)
    expected = oracle.scaled_mm(
        a, b.T, scale_a, scale_b.T, granularity_a=pair[0], granularity_b=pair[1], out_dtype="float32"
    )
    assert observed.dtype == np.float32 and bits(observed) == bits(expected)


def test_ambiguous_shapes_can_be_named() -> None:
    """K of one block: [M, 1] and [1, N] are rowwise first, and 1x128 where that is asked for."""
    (a, scale_a), (b, scale_b) = (quantized(values(rows, 128), Granularity.ROWWISE) for rows in (16, 32))
    rowwise = f8.scaled_mm(a, b.T, scale_a, scale_b.T)
    blocks = f8.scaled_mm(a, b.T, scale_a, scale_b.T, granularity_a="blockwise_1x128", granularity_b="blockwise_1x128")
    for observed, name in ((rowwise, "rowwise"), (blocks, "blockwise_1x128")):
        expected = oracle.scaled_mm(a, b.T, scale_a, scale_b.T, granularity_a=name, granularity_b=name)
        assert bits(observed) == bits(expected)


@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_bits_are_those_of_the_other_backends(library: str, use_fast_accum: bool) -> None:
    """A K that the plan splits; a default split of 1 would show."""
    other: Any = pytest.importorskip(f"f8emu.{library}")
    interop: Any = pytest.importorskip("f8emu.interop")
    a, b = (values(rows, 8192).astype(E4M3) for rows in (16, 32))
    options: Any = {"out_dtype": "float32", "use_fast_accum": use_fast_accum}
    observed = f8.scaled_mm(a, b.T, 0.5, 2.0, **options)
    unit = np.ones((1, 1), np.float32)
    to = getattr(interop, f"to_{library}")
    operands = [to(a), to(b).T, to(unit * np.float32(0.5)), to(unit * np.float32(2))]
    assert bits(observed) == bits(interop.to_numpy(other.scaled_mm(*operands, **options)))
    if use_fast_accum:  # promoted sums of such values do not round
        assert bits(observed) != bits(f8.scaled_mm(a, b.T, 0.5, 2.0, split_k=1, **options))
    x, y = (values(rows, 8192).astype(ml_dtypes.bfloat16) for rows in (16, 32))
    y = np.ascontiguousarray(y.T)  # row-major, the layout of JAX's plan
    assert bits(f8.mm(x, y)) == bits(interop.to_numpy(other.mm(to(x), to(y))))


def test_a_layer_with_delayed_scales() -> None:
    recipe = f8emu.DELAYED
    assert recipe.delayed is not None
    initial = f8.initial_delayed_state(recipe.delayed)
    states = {"input": initial, "weight": initial}
    x, weight = values(16, 32), values(16, 32)
    trace = f8.linear("delayed", x, weight, delayed_state=states)
    assert bits(trace.result) == bits(f8.linear("tensorwise", x, weight).result), "its first step is dynamic"
    state = f8.update_delayed_state(states["input"], 2, "float8_e4m3fn", recipe.scale_rule, recipe.delayed)
    assert bits(state.inv_scale) == bits(np.float32(224))


@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_a_float64_is_rounded_once(format: Any) -> None:
    """Against the nearest of all values, in exact arithmetic of float64: ties, their neighbours, and the extremes."""
    codes = np.arange(format.max_code + 1, dtype=np.uint8)
    exact = f8.decode(codes.view(getattr(ml_dtypes, format.name))).astype(np.float64)
    ties = (exact[:-1] + exact[1:]) / 2
    near = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), ties * (1 + 2**-40), exact])
    x = np.concatenate([near, [5e-324, 1e-60, 1e300, format.max * 4]])
    distance = np.abs(np.minimum(x, 2 * format.max)[:, None] - exact)
    best = distance.argmin(axis=1)  # the lower one of a tie
    is_tie = (distance == distance.min(axis=1, keepdims=True)).sum(axis=1) > 1
    expected = best + (is_tie & (best % 2 == 1))
    sign = format.sign_mask
    assert (f8.cast(x, format).view(np.uint8) == expected).all()
    negative = np.where((expected == 0) & (not format.has_negative_zero), 0, expected | sign)
    assert (f8.cast(-x, format).view(np.uint8) == negative).all()
    assert f8.cast([np.nan, -np.inf], format).view(np.uint8).tolist() == [format.nan_code, format.max_code | sign]
    beyond = f8.cast([1e300], format, overflow=Overflow.NONFINITE).view(np.uint8)[0]
    assert beyond == (format.nan_code if format.infinity_code is None else format.infinity_code)


def test_not_by_way_of_float32() -> None:
    x = 1 + 2**-4 + 2**-40  # just above the tie of 1 and 1.125, which is what float32 makes of it
    assert f8.cast(x, E4M3).view(np.uint8) == 0x39 and f8.cast(np.float32(x), E4M3).view(np.uint8) == 0x38


@pytest.mark.parametrize("format", [E4M3FN, "float8_e4m3fn", E4M3, np.dtype(E4M3)], ids=repr)
def test_a_format_by_any_name(format: Any) -> None:
    x = values(4, 8)
    assert bits(f8.cast(x, format)) == bits(oracle.cast(x, E4M3FN))
    assert bits(f8.scale_from_amax(2.0, format).scale) == bits(oracle.scale_from_amax(np.float32(2), E4M3FN).scale)
    assert bits(f8.quantize(x, 2, format)) == bits(oracle.quantize(x, np.full((1, 1), 2, np.float32), E4M3FN))


def test_lists_numbers_and_leading_dimensions() -> None:
    assert f8.amax([[1, -3], [0.5, 2]], "rowwise").tolist() == [[3], [2]]
    assert f8.amax([[2**53, -(2**63)]]).tolist() == [[2**63]]
    x = values(2, 3, 256)
    scales = f8.scale_from_amax(f8.amax(x, "blockwise_1x128"), E4M3)
    codes = f8.quantize(x, scales.inv_scale, E4M3, "blockwise_1x128")
    assert codes.shape == x.shape
    flat = oracle.quantize(x.reshape(6, 256), scales.inv_scale, "float8_e4m3fn", "blockwise_1x128")
    assert bits(codes.reshape(6, 256)) == bits(flat)
    back = f8.dequantize(codes, scales.scale, "blockwise_1x128", out_dtype=ml_dtypes.bfloat16)
    assert back.shape == x.shape and back.dtype == ml_dtypes.bfloat16
    a = np.ones((4, 16), E4M3)
    b = np.ones((2, 16, 32), E4M3)
    grouped = f8.scaled_grouped_mm(a, b, [1, 2, 3, 4], np.ones((2, 32)), [1, 4], out_dtype=np.float32)
    assert grouped[:, 0].tolist() == [16, 32, 48, 64]
    assert f8.mm([[1.0, 2.0]], [[3.0], [4.0]], out_dtype="float32").tolist() == [[11]]
    assert f8.mma(a, a, [1.0] * 4).tolist() == [17] * 4
    assert f8.mma(a, a, [1.0] * 4, chip="Ada").tolist() == f8.mma(a, a, [1.0] * 4, chip=ADA).tolist()


X = values(4, 16)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "float64 that is no float32": (
        lambda: f8.quantize(X.astype(np.float64) / 3, 1.0, E4M3),
        OperandError,
        r"quantize: x is float64 and is taken as float32 where that is exact; -?[\d.e-]+ is no float32; round it "
        r"first, with np\.asarray\(x, np\.float32\)",
    ),
    "integer": (lambda: f8.amax([[2**24 + 1]]), OperandError, "16777217 is no float32"),
    "odd integer": (lambda: f8.amax([[2**53 + 1]]), OperandError, "9007199254740993 is no float32"),
    "large integer": (lambda: f8.amax([[2**63 - 1]]), OperandError, "9223372036854775807 is no float32"),
    "bfloat16": (lambda: f8.mm([[0.1]], [[1]]), OperandError, r"np\.asarray\(a, ml_dtypes\.bfloat16\)"),
    "format": (lambda: f8.cast(X, np.float64), SpecError, "format must be one of float8_e4m3fn, "),
    "no format": (lambda: f8.cast(X, "e4m3"), SpecError, "by name, as a dtype or as a Format; got 'e4m3'"),  # pyright: ignore[reportArgumentType]
    "no dtype": (lambda: f8.cast(X, object), SpecError, "got <class 'object'>"),
    "float8 output": (
        lambda: f8.scaled_mm(X.astype(E4M3), X.T.astype(E4M3), 1, 1, out_dtype=E5M2),
        UnsupportedError,
        "quantize the output instead",
    ),
    "rows": (lambda: f8.amax([[1], [2, 3]]), OperandError, "got rows of different lengths"),
    "text": (lambda: f8.amax("abc"), OperandError, "got a str; convert it first"),
    "scales of b": (
        lambda: f8.scaled_mm(X.astype(E4M3), X.T.astype(E4M3), np.ones((4, 1)), np.ones((4, 1))),
        OperandError,
        r"\[4, 1\] and \[1, 4\] for rowwise x rowwise; or .*; got \[4, 1\] and \[4, 1\]",
    ),
    "recipe": (lambda: f8.linear("rowise", X, X), SpecError, "unknown recipe 'rowise'"),  # pyright: ignore[reportArgumentType]
    "GEMM": (
        lambda: f8.linear("rowwise", X, X, split_k={"outputs": 2}),  # pyright: ignore[reportArgumentType]
        SpecError,
        "split_k must name GEMMs, output, ",
    ),
    "shapes": (lambda: f8.mm(X.astype(ml_dtypes.bfloat16), X.astype(ml_dtypes.bfloat16)), OperandError, r"weight\.T"),
    "chip": (lambda: f8.mm(X, X, chip="Turing"), SpecError, "chip must be one of 'Hopper'"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_tensor_of_torch_has_a_remedy() -> None:
    torch: Any = pytest.importorskip("torch")
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    with pytest.raises(OperandError, match=r"got a Tensor: .*f8emu\.interop\.to_numpy"):
        f8.scaled_mm(codes, codes, 1, 1)


def every_gemm(module: Any, chip: Chip) -> list[Any]:
    """The bits of each GEMM, K last and apart in memory, and of a layer."""
    wide = np.random.default_rng(1).standard_normal((12, 600)).astype(np.float32)[:, ::2]
    a, b = (x.astype(E4M3) for x in (wide[:5], wide[5:]))
    x, y = (x.astype(ml_dtypes.bfloat16) for x in (wide[:5], wide[5:]))
    scale_a, scale_b = wide[:5, :1] * 0.3, wide[5:, :1].T * 0.7
    rows: Any = {"granularity_a": Granularity.ROWWISE, "granularity_b": Granularity.ROWWISE}
    products = (
        module.scaled_mm(a, b.T, scale_a, scale_b, **rows, bias=x[0, :7], split_k=2, chip=chip),
        module.mm(x, y.T, split_k=1, chip=chip),
        module.scaled_grouped_mm(a, b.T[None], scale_a[:, 0], scale_b, np.array([5], np.int32), chip=chip),
        module.linear(f8emu.ROWWISE, x, y, split_k={"output": 2}, chip=chip).result,
    )
    return [bits(product) for product in products]


OWN = [
    replace(HOPPER, **{name: replace(getattr(HOPPER, name), **changed) for name in ("float8", "bfloat16")})
    for changed in ({"promote_k": 48}, {"step_k": 24}, {"order": (1, 0, 2)}, {"accumulator": FLOAT16})
]
"""Chips whose float8 the engine does not have."""


@pytest.mark.parametrize("chip", [HOPPER, *OWN], ids=range(5))
def test_gemms_are_the_oracles(chip: Chip) -> None:
    assert fits(chip.float8) == (chip is HOPPER)
    assert every_gemm(f8, chip) == every_gemm(oracle, chip)


def test_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    library._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"f8emu\.numpy: .* until then f8ref\.numpy computes") as said:
        products = every_gemm(f8, HOPPER)
    assert len(said) == 1 and products == every_gemm(oracle, HOPPER)


def test_a_shape_without_a_plan_is_said_once() -> None:
    from f8emu.split_k import ask

    ask._WARNED.clear()
    a = np.ones((1, 65536), E4M3)
    with pytest.warns(UserWarning, match=r"f8emu\.numpy: the plan of .* has no split-K for .* layers have no such"):
        f8.scaled_mm(a, a.T, 1, 1)
    f8.scaled_mm(a, a.T, 1, 1)  # a warning would be an error


@pytest.mark.parametrize("cast", [f8.cast, oracle.cast], ids=["f8emu.numpy", "f8ref.numpy"])
def test_overflow_is_a_member_or_its_name(cast: Callable[..., np.ndarray]) -> None:
    x = np.array([448, 1e9], np.float32)
    assert cast(x, "float8_e4m3fn", overflow="nonfinite").view(np.uint8).tolist() == [0x7E, 0x7F]
    with pytest.raises(SpecError, match="overflow must be one of saturate, nonfinite; got 'bogus'"):
        cast(x, "float8_e4m3fn", overflow="bogus")  # pyright: ignore[reportArgumentType]


def norm_ratio(part: np.ndarray, whole: np.ndarray) -> float:
    return float(np.linalg.norm(part) / np.linalg.norm(whole))


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise_with_gw_hp", "blockwise"))
def test_the_error_of_a_layer_in_its_parts(recipe: RecipeName) -> None:
    """The parts of every GEMM from codes and scales of `linear`, decoded here by ml_dtypes."""
    x, w, g = (values(*shape).astype(ml_dtypes.bfloat16) for shape in ((32, 256), (48, 256), (32, 48)))
    trace, errors = f8.linear(recipe, x, w, g), f8.linear_error(recipe, x, w, g)
    assert [*errors] == ["output", "grad_input", "grad_weight"]
    x64, w64, g64 = (tensor.astype(np.float64) for tensor in (x, w, g))
    exact = {"output": x64 @ w64.T, "grad_input": g64 @ w64, "grad_weight": g64.T @ x64}
    for name, parts in errors.items():
        gemm = getattr(trace, name)
        decoded = []
        for operand in (gemm.a, gemm.b):
            value = operand.codes.astype(np.float64)
            scales = np.ones((1, 1)) if operand.scale is None else operand.scale
            for axis in (0, 1):
                group = 1 if scales.shape[axis] == value.shape[axis] else min(128, value.shape[axis])
                group = value.shape[axis] if scales.shape[axis] == 1 else group
                scales = np.repeat(scales, group, axis)[: value.shape[0], : value.shape[1]]
            decoded.append(value * scales)
        dequantized, product = decoded[0] @ decoded[1].T, gemm.product.astype(np.float64)
        assert parts["error_quantization"] == pytest.approx(
            norm_ratio(dequantized - exact[name], exact[name]), rel=1e-9
        )
        assert parts["error_total"] == pytest.approx(norm_ratio(product - exact[name], exact[name]), rel=1e-9)
        behind = norm_ratio(product - dequantized, exact[name])  # accumulator and rounding together
        assert parts["error_accumulation"] > 0 and parts["error_rounding"] > 0
        assert abs(parts["error_accumulation"] - parts["error_rounding"]) <= behind
        assert behind <= parts["error_accumulation"] + parts["error_rounding"]
    of_output = f8.linear_error(recipe, x.astype(np.float32), w)
    assert [*of_output] == ["output"] and of_output["output"]["error_rounding"] == 0  # the product is float32


def test_an_exact_layer_has_no_error() -> None:
    x, w = np.eye(32, dtype=np.float32), np.full((16, 32), 2.0, np.float32)
    assert {*f8.linear_error("rowwise", x, w)["output"].values()} == {0.0}

"""The suite as assertions: right kernels, casts and quantizers pass; a wrong rule is told by its diagnosis."""

import warnings
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8emu.numpy as hopper
from f8emu.conformance import BLOCKWISE_1X128_128X128, Arg, Kernel
from f8emu.spec import Overflow, SpecError
from f8emu.testing import check_cast, check_gemm, check_quantizer

Array = np.ndarray
E4M3 = ml_dtypes.float8_e4m3fn
GEMM, CAST, QUANTIZER = (partial(check, arrays="numpy") for check in (check_gemm, check_cast, check_quantizer))


def message_of(check: Any, function: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as failure:
        check(function, **options)
    return str(failure.value)


# GEMMs


def right(*operands: Array, bias: Array | None, out_dtype: Any, use_fast_accum: bool) -> Array:
    with np.errstate(all="warn"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a shape that the plan does not know
        return hopper.scaled_mm(*operands, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


def never_promotes(*operands: Array, **options: Any) -> Array:
    return right(*operands, **{**options, "use_fast_accum": True})


def swaps_scales(a: Array, b: Array, scale_a: Array, scale_b: Array, **options: Any) -> Array:
    if scale_a.ndim == 0 or options["bias"] is not None or options["out_dtype"] != np.float32:
        raise NotImplementedError("row scales of float32 only")
    ones = np.ones_like(scale_a), np.ones_like(scale_b)
    with np.errstate(all="ignore"):
        return right(a, b, *ones, **options) * scale_a * scale_b


def raises(*operands: Array, **options: Any) -> Array:
    raise ValueError("out of shared memory")


def refuses(*operands: Array, **options: Any) -> Array:
    raise NotImplementedError("no such GEMM")


def in_float32(*operands: Array, **options: Any) -> Array:
    return right(*operands, **{**options, "out_dtype": np.float32})


def of_another_shape(*operands: Array, **options: Any) -> Array:
    return right(*operands, **options)[:-1]


BLOCKS = Kernel(
    name="blocks",
    function=lambda a, scale_a, b, scale_b: hopper.scaled_mm(a, b.T, scale_a, scale_b.T, split_k=1),
    arguments=(Arg.A, Arg.SCALE_A, Arg.B, Arg.SCALE_B),
    scales=BLOCKWISE_1X128_128X128,
    arrays="numpy",
)


def test_right_kernels_pass() -> None:
    GEMM(right)
    GEMM(BLOCKS)  # of which two GEMMs were recorded


@pytest.mark.parametrize(
    ("kernel", "texts"),
    [
        (never_promotes, ["NOT EQUAL: ", ":never_promotes (golden)", "in short: in promoted kinds it never promotes"]),
        (swaps_scales, ["in short: it multiplies scale_a before scale_b", "not offered: recorded GEMMs"]),
        (raises, ["148 cases differ, 496,384 outputs", "=> raised ValueError: out of shared memory"]),
        (refuses, ["NOT VERIFIED: ", "(nothing ran)", "not offered: recorded GEMMs: no such GEMM"]),
    ],
)
def test_a_wrong_kernel_is_told(kernel: Any, texts: list[str]) -> None:
    message = message_of(GEMM, kernel)
    assert all(text in message for text in texts), message


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (in_float32, "=> gave float32[64, 96], expected bfloat16[64, 96]"),
        (of_another_shape, "gave an output of shape [63, 96], expected [64, 96]"),
        (partial(raises), "tests.testing.test_checks:raises: 1 case differs"),
    ],
)
def test_another_dtype_shape_or_error_is_that_of_its_case(kernel: Any, text: str) -> None:
    assert text in message_of(GEMM, kernel, stages=["golden"], cases=["000 *"])


def test_a_case_is_run_again_by_its_name() -> None:
    message = message_of(GEMM, never_promotes, stages=["golden"], cases=["00*"], errors=2)
    assert "in short" not in message and message.count("  expected: ") == 2
    again = message.splitlines()[-1].removeprefix("this case again: cases=['").removesuffix("']")
    assert "1 case differs" in message_of(GEMM, never_promotes, cases=[again])
    GEMM(right, cases=[again])
    with pytest.raises(SpecError, match="no case is called 'nothing'"):
        GEMM(right, cases=["nothing"], stages=["golden"])


def test_stages_are_chosen() -> None:
    assert "nothing ran" in message_of(GEMM, right, stages=["live"])  # without a GPU
    assert "nothing ran" in message_of(GEMM, right, stages=["layers"])
    with pytest.raises(SpecError, match="unknown stage 'all'"):
        GEMM(right, stages=["all"])
    with pytest.raises(SpecError, match="arrays must be one of torch, numpy, jax"):
        check_gemm(right, arrays="tensorflow")  # pyright: ignore[reportArgumentType]


def test_thorough_runs_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from f8emu.testing import checks

    asked: list[str] = []
    verify = checks.verify

    def recorded(subjects: Any, *, only: Any, **options: Any) -> Any:
        asked.extend(stage.name for stage in only)
        return verify(subjects, only=only[-1:], **options)

    monkeypatch.setattr(checks, "verify", recorded)
    assert "nothing ran" in message_of(GEMM, right, thorough=True)  # of the last alone
    assert asked == ["golden", "gemms", "live"]


def test_ctrl_c_ends_the_test() -> None:
    def interrupted(*operands: Array, **options: Any) -> Array:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GEMM(interrupted)


def test_torch_s_own_kernel_passes_under_the_emulation_alone() -> None:
    import torch

    import f8emu.torch as f8

    kernel = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    some = partial(check_gemm, stages=["golden"], cases=["010 *", "000 *"])
    with f8.emulate(force=True):
        some(kernel)
    assert "2 cases differ" in message_of(some, kernel)


@pytest.mark.parametrize(
    ("check", "options", "text"),
    [
        (GEMM, {"errors": -1}, "check_gemm: errors must be an integer of at least 0; got -1"),
        (CAST, {"errors": "a"}, "check_cast: errors must be an integer of at least 0; got 'a'"),
        (GEMM, {"stages": 3}, "check_gemm: stages must be names, or one; got 3"),
        (GEMM, {"stages": "gold"}, "unknown stage 'gold'"),
        (QUANTIZER, {"cases": [1]}, r"check_quantizer: cases must be names, or one; got \[1\]"),
        (GEMM, {"stages": "golden", "cases": "nothing"}, "^verify: no case is called 'nothing'"),
        (CAST, {"overflow": "nope"}, "check_cast: overflow must be one of saturate, nonfinite; got 'nope'"),
    ],
)
def test_arguments_are_checked(check: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        check(right, **options)


# Casts and quantizers


def cast(x: Array) -> Array:
    return np.clip(x.astype(np.float32), -448, 448).astype(E4M3)


def cast_by_float16(x: Array) -> Array:
    return np.clip(x.astype(np.float32), -448, 448).astype(np.float16).astype(E4M3)


def nonfinite(x: Array) -> Array:
    return x.astype(E4M3)


def quantize(x: Array) -> tuple[Array, Array]:
    scales = hopper.scale_from_amax(hopper.amax(x, "rowwise"), "float8_e4m3fn")
    return hopper.quantize(x, scales.inv_scale, "float8_e4m3fn", "rowwise"), scales.scale


def quantize_by_quotient(x: Array) -> tuple[Array, Array]:
    _, scale = quantize(x)
    return cast(x.astype(np.float32) / scale), scale


def test_right_casts_and_quantizers_pass() -> None:
    CAST(cast)
    CAST(nonfinite)
    CAST(lambda x: cast(x).view(np.uint8), format="float8_e4m3fn")
    CAST(cast, overflow=Overflow.SATURATE, cases=["every bfloat16"])
    CAST(cast, overflow="saturate", cases="every bfloat16")
    QUANTIZER(quantize, granularity="rowwise")


@pytest.mark.parametrize(
    ("check", "function", "texts"),
    [
        (
            CAST,
            cast_by_float16,
            ["NOT EQUAL: ", "it rounds twice, through float16", "float32, by up to 2 ulps, 9 cases:"],
        ),
        (partial(CAST, overflow=Overflow.SATURATE), nonfinite, ["NOT EQUAL: ", "cases differ"]),
        (partial(CAST, overflow="saturate"), nonfinite, ["NOT EQUAL: ", "cases differ"]),
        (CAST, lambda x: x, ["bytes whose format format= names, are expected; got float32", "arrays='torch' or "]),
        (CAST, lambda x: 1 / 0, ["failed: ZeroDivisionError: division by zero"]),
        (QUANTIZER, quantize_by_quotient, ["NOT EQUAL: ", "quantized matrices"]),
        (QUANTIZER, cast, ["gave ndarray, expected codes and scales"]),
    ],
)
def test_a_wrong_cast_or_quantizer_is_told(check: Any, function: Any, texts: list[str]) -> None:
    message = message_of(check, function)
    assert all(text in message for text in texts), message

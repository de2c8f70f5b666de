"""MXFP8 by `f8emu.numpy`: the oracle's bits for every shape of scales, and what is refused."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import f8emu.numpy as f8
import f8ref.numpy as oracle
from f8emu.spec import BLACKWELL_TCGEN05, RTX_BLACKWELL, OperandError, UnsupportedError

R = np.random.default_rng(0)
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu


def codes(dtype: Any, *shape: int) -> Any:
    return R.standard_normal(shape).astype(dtype)


def scales(*shape: int) -> Any:
    return R.integers(117, 138, shape).astype(np.uint8).view(E8M0)


def bits(x: Any) -> Any:
    return x.view(f"u{x.itemsize}").tolist()


@pytest.mark.parametrize("chip", [BLACKWELL_TCGEN05, RTX_BLACKWELL], ids=str)
def test_one_gemm(chip: Any) -> None:
    a, b, scale_a, scale_b = codes(E4M3, 5, 100), codes(E5M2, 100, 7), scales(5, 4), scales(4, 7)
    options: dict[str, Any] = {"bias": np.arange(7, dtype=np.float32), "out_dtype": "float16", "split_k": 2}
    expected = oracle.scaled_mm(
        a, b, scale_a, scale_b, **options, granularity_a="blockwise_1x32", granularity_b="blockwise_1x32", chip=chip
    )
    assert bits(f8.scaled_mm(a, b, scale_a, scale_b, **options, chip=chip)) == bits(expected)
    assert bits(f8.scaled_mm(a, b, scale_a, scale_b, **options, chip=chip.name)) == bits(expected)


GROUPED: dict[str, tuple[tuple[int, ...], ...]] = {
    "rows": ((9, 72), (3, 72, 16), (9, 3), (3, 3, 16)),
    "columns": ((3, 8, 72), (72, 9), (3, 8, 3), (3, 9)),
    "K": ((5, 160), (160, 7), (5, 5), (5, 7)),
    "batches": ((3, 5, 72), (3, 72, 8), (3, 5, 3), (3, 3, 8)),
}
ENDS = {"rows": [2, 2, 7], "columns": [4, 9, 9], "K": [64, 64, 160], "batches": None}


@pytest.mark.parametrize("kind", GROUPED)
def test_every_kind_of_groups(kind: str) -> None:
    of_a, of_b, of_scale_a, of_scale_b = GROUPED[kind]
    ends = None if ENDS[kind] is None else np.array(ENDS[kind], np.int32)
    operands = codes(E4M3, *of_a), codes(E4M3, *of_b), scales(*of_scale_a), scales(*of_scale_b), ends
    observed = f8.scaled_grouped_mm(*operands, out_dtype="float32", chip="B200")
    expected = oracle.scaled_grouped_mm(*operands, out_dtype="float32", chip=BLACKWELL_TCGEN05)
    assert observed.any() and bits(observed) == bits(expected)


def test_single_instructions() -> None:
    a, b, scale = codes(E4M3, 6, 64), codes(E5M2, 6, 64), scales(6, 2)
    observed = f8.mma(a, b, [1.0] * 6, scale, scale[::-1], chip="RTX 5090")
    expected = oracle.mma(a, b, np.ones(6, np.float32), scale, scale[::-1], chip=RTX_BLACKWELL)
    assert bits(observed) == bits(expected) != bits(f8.mma(a, b, [1.0] * 6, chip="RTX 5090"))


A, B, SCALE = codes(E4M3, 4, 32), codes(E4M3, 32, 4), scales(4, 1)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "Hopper": (lambda: f8.scaled_mm(A, B, SCALE, SCALE.T), UnsupportedError, "choose the chip B200"),
    # [4, 1] and [1, 4] of float32 would be rowwise.
    "bytes": (
        lambda: f8.scaled_mm(A, B, SCALE.view(np.uint8), SCALE.view(np.uint8).T, chip="B200"),
        OperandError,
        "scale_a must be float32 or float8_e8m0fnu; got uint8",
    ),
    "one of them": (
        lambda: f8.scaled_mm(A, B, SCALE, np.ones((1, 4)), chip="B200"),
        OperandError,
        "scale_b must be float8_e8m0fnu; got float32",
    ),
    "half a pair": (lambda: f8.mma(A, A, [0.0] * 4, SCALE, chip="B200"), OperandError, "or absent"),
    "instructions": (lambda: f8.mma(A, A, [0.0] * 4, SCALE, SCALE), UnsupportedError, "with E8M0 scales"),
    "a group of K inside a block": (
        lambda: f8.scaled_grouped_mm(A, B, SCALE, SCALE.T, np.array([16, 32], np.int32), chip="B200"),
        OperandError,
        "multiples of 32; got one of 0 to 16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()

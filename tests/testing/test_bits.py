"""Equal bits: what is equal, what is not, and what the message says of it, for arrays of every framework."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from f8emu import interop
from f8emu.spec import F8Error, OperandError, SpecError
from f8emu.testing import assert_bits_equal

BFLOAT16, E4M3, E5M2 = (np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))
FRAMEWORKS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray,
    "torch": interop.to_torch,
    "jax": interop.to_jax,
}


def message_of(actual: Any, expected: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as failure:
        assert_bits_equal(actual, expected, **options)
    return str(failure.value)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("expected", FRAMEWORKS)
@pytest.mark.parametrize("actual", FRAMEWORKS)
def test_every_code_of_a_dtype_equals_itself_alone(actual: str, expected: str, dtype: Any) -> None:
    """Of 8 bits; of more those whose lower bits are zero. In any two frameworks, and then with one bit turned."""
    bits = np.arange(256, dtype=f"u{dtype.itemsize}") << np.array(8 * (dtype.itemsize - 1), f"u{dtype.itemsize}")
    codes = bits.view(dtype).reshape(16, 16)
    assert_bits_equal(FRAMEWORKS[actual](codes), FRAMEWORKS[expected](codes))
    turned = bits.copy()
    turned[32] ^= 1
    assert "1 output differs, by +1 ulp" in message_of(
        FRAMEWORKS[actual](turned.view(dtype).reshape(16, 16)), FRAMEWORKS[expected](codes)
    )


def test_nan_equals_any_nan_and_zeros_differ_by_their_sign() -> None:
    quiet, payload = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0xFFA5A5A5))
    assert_bits_equal(quiet, payload)
    zeros = np.array([-0.0, 0.0], np.float32)
    assert "zero of the other sign" in message_of(zeros, np.zeros(2, np.float32))
    assert "NaN for number 1" in message_of(quiet, np.ones(1, np.float32))


def test_the_message_has_places_codes_values_and_distances() -> None:
    expected = np.arange(12).reshape(3, 4).astype(E4M3)
    actual = expected.copy()
    actual[0, 1], actual[1, 2], actual[2, 0], actual[2, 3] = 1.125, 6.5, np.nan, -11
    assert message_of(torch.from_numpy(actual.view(np.uint8)).view(torch.float8_e4m3fn), jnp.asarray(expected)) == (
        "float8_e4m3fn[3, 4], of 12 elements: 4 outputs differ, by +1 ulp, most often +1 (50 %); "
        "NaN for number 1; number of the other sign 1\n"
        "  [0, 1] 0x39 (1.125), expected 0x38 (1), +1 ulp\n"
        "  [1, 2] 0x4d (6.5), expected 0x4c (6), +1 ulp\n"
        "  [2, 0] 0x7f (nan), expected 0x50 (8)\n"
        "  [2, 3] 0xd3 (-11), expected 0x53 (11), -166 ulps"
    )
    assert message_of(actual, expected, shown=1).splitlines()[1:] == [
        "  [0, 1] 0x39 (1.125), expected 0x38 (1), +1 ulp",
        "  and 3 more",
    ]


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        (np.ones((2, 3), np.float32), "gave float32[2, 3], expected bfloat16[2, 3]"),
        (np.ones((3, 2), BFLOAT16), "gave bfloat16[3, 2], expected bfloat16[2, 3]"),
        (np.ones(6, BFLOAT16), "gave bfloat16[6], expected bfloat16[2, 3]"),
        (np.ones((1, 3), BFLOAT16), "gave bfloat16[1, 3], expected bfloat16[2, 3]"),  # nothing is broadcast
        (np.ones((0, 3), BFLOAT16), "gave bfloat16[0, 3], expected bfloat16[2, 3]"),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_dtype_or_shape_is_named(framework: str, actual: Any, text: str) -> None:
    assert message_of(FRAMEWORKS[framework](actual), FRAMEWORKS["torch"](np.ones((2, 3), BFLOAT16))) == text


def test_what_is_no_array_is_refused() -> None:
    x = np.ones(3, np.float32)
    for actual in ([1.0, 1.0, 1.0], None, 1.0, {"x": x}):
        with pytest.raises(F8Error, match="actual must be an array of torch, JAX or numpy"):
            assert_bits_equal(actual, x)
    with pytest.raises(F8Error, match="no memory"):
        assert_bits_equal(torch.ones(3, device="meta"), x)
    assert_bits_equal(torch.ones(3, requires_grad=True), x)
    assert_bits_equal(np.float32(1), torch.ones(()))
    assert_bits_equal(np.ones((0, 3), np.float32), torch.ones(0, 3))


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "datetime64[s]", "longdouble", "object", "i2,f4"])
def test_other_dtypes_than_floats_integers_and_bools_are_refused(dtype: str) -> None:
    x = np.zeros(2, dtype)
    remedy = "compare the real and imaginary parts" if dtype.startswith("complex") else "convert it"
    with pytest.raises(OperandError, match=f"; got .*{remedy}"):
        assert_bits_equal(x, x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (np.float64(-1e300), np.float64(1), f"(-1e+300), expected 0x3ff0000000000000 (1.0), -{0xBE27E43C8800759C:,}"),
        (np.float64(1), np.float64(1 + 2**-52), "(1.0), expected 0x3ff0000000000001 (1.0000000000000002), -1 ulp"),
        (np.int64(2**63 - 1), np.int64(-(2**63)), f"{2**63 - 1}, expected {-(2**63)}, +{2**64 - 1:,} ulps"),
        (np.uint64(0), np.uint64(2**64 - 1), f"0, expected {2**64 - 1}, -{2**64 - 1:,} ulps"),
        (np.uint64(2**63), np.uint64(2**63 - 1), "+1 ulp"),
        (np.uint32(0x7F800001).view(np.float32), np.float32(1), "0x7f800001 (nan), expected 0x3f800000 (1)"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_64_bits_are_shown_and_subtracted_whole(actual: Any, expected: Any, text: str, shape: tuple[int, ...]) -> None:
    assert text in message_of(np.full(shape, actual), np.full(shape, expected))


@pytest.mark.parametrize("shown", [-1, "a", 1.5])
def test_shown_is_a_count(shown: Any) -> None:
    with pytest.raises(SpecError, match="assert_bits_equal: shown must be an integer of at least 0; got "):
        assert_bits_equal(np.ones(1), np.zeros(1), shown=shown)

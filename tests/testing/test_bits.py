"""Equal bits: what is equal, what is not, and what the message says of it, for arrays of every framework."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from f8emu import interop
from f8emu.spec import F8Error
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
        "float8_e4m3fn[3, 4], of 12 elements: 4 outputs differ, by -166 to +1 ulps, most often +1 (50 %); "
        "NaN for number 1\n"
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

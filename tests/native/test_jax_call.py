"""The custom call of XLA against f8ref.numpy: every kind of scale, groups, threads."""

import functools
import itertools
import threading
from typing import Any

import numpy as np
import pytest

import f8ref.numpy as reference
from f8emu.native import library
from f8emu.spec import BLACKWELL_TCGEN05, Granularity

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

import f8emu.jax as f8  # noqa: E402
from tests.jax_path.layers import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

M, N, K = 37, 50, 300
T, R, V, S = (Granularity.TENSORWISE, Granularity.ROWWISE, Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128)


def codes(*shape: int, seed: int, dtype: str = "float8_e4m3fn") -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return np.asarray(jnp.asarray(values).astype(dtype))


def scales(*shape: int, seed: int) -> np.ndarray:
    return np.exp2(np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def is_called(function: Any, *operands: Any) -> bool:
    return 'custom_call_target="f8emu_gemm"' in str(jax.jit(function).lower(*operands).compile().as_text())


@pytest.mark.parametrize(("pair", "bias", "split_k"), [
    *itertools.product([(T, T), (R, R)], [None, "bfloat16"], [1, 2]),
    *itertools.product([(V, V), (V, S), (S, V)], [None], [1, 2]),
])  # fmt: skip
def test_scaled_mm(pair: tuple[Granularity, Granularity], bias: str | None, split_k: int) -> None:
    a, b = codes(M, K, seed=0), codes(K, N, seed=1)
    scale_a, scale_b = scales(*pair[0].scale_shape(M, K), seed=2), scales(*pair[1].scale_shape(N, K)[::-1], seed=3)
    options: dict[str, Any] = {"granularity_a": pair[0], "granularity_b": pair[1], "split_k": split_k}
    options["bias"] = None if bias is None else codes(N, seed=4, dtype=bias)

    def call(*operands: Any) -> Any:
        return f8.scaled_mm(*operands, **options)

    expected = reference.scaled_mm(a, b, scale_a, scale_b, **options)
    assert is_called(call, a, b, scale_a, scale_b)
    assert_same_bits(call(*map(jnp.asarray, (a, b, scale_a, scale_b))), expected)
    assert_same_bits(jax.jit(call)(a, b, scale_a, scale_b), expected)


@pytest.mark.parametrize("ends", [(5, 5, 20, 30), (0, 0, 0, 0), (10, 20, 30, 37)])
def test_scaled_grouped_mm(ends: tuple[int, ...]) -> None:
    a, b, scale_a, scale_b = codes(M, K, seed=0), codes(4, K, N, seed=1), scales(M, seed=2), scales(4, N, seed=3)
    offs, last = np.array(ends, np.int32), ends[-1]
    expected = np.zeros((M, N), jnp.bfloat16)  # rows after the last group
    if last:
        expected[:last] = reference.scaled_grouped_mm(a[:last], b, scale_a[:last], scale_b, offs)
    assert is_called(f8.scaled_grouped_mm, a, b, scale_a, scale_b, offs)
    assert_same_bits(jax.jit(f8.scaled_grouped_mm)(a, b, scale_a, scale_b, offs), expected)


def bytes_of_scales(*shape: int, seed: int) -> np.ndarray:
    patterns = np.random.default_rng(seed).integers(117, 138, shape, dtype=np.uint8)
    return patterns.view(np.dtype(jnp.float8_e8m0fnu))


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.filterwarnings("ignore:.*no split-K plan")
def test_microscaled(split_k: int) -> None:
    """One GEMM, and two of a batch with one `scale_b` for both."""
    blocks = -(-K // 32)
    a, b, scale_a = codes(2, M, K, seed=0), codes(K, N, seed=1), bytes_of_scales(2, M, blocks, seed=2)
    scale_b, bias = bytes_of_scales(blocks, N, seed=3), codes(N, seed=4, dtype="bfloat16")

    def call(*operands: Any) -> Any:
        return f8.scaled_mm(*operands, bias=jnp.asarray(bias), split_k=split_k, chip="B200")

    options: dict[str, Any] = dict.fromkeys(("granularity_a", "granularity_b"), Granularity.BLOCKWISE_1X32)
    options |= {"bias": bias, "split_k": split_k, "chip": BLACKWELL_TCGEN05}
    expected = [reference.scaled_mm(a[i], b, scale_a[i], scale_b, **options) for i in range(2)]
    assert is_called(call, a[0], b, scale_a[0], scale_b)
    assert_same_bits(jax.jit(call)(a[0], b, scale_a[0], scale_b), expected[0])
    assert_same_bits(jax.jit(jax.vmap(call, (0, None, 0, None)))(a, b, scale_a, scale_b), np.stack(expected))


@pytest.mark.filterwarnings("ignore:.*no split-K plan")
def test_microscaled_groups() -> None:
    a, b, offs = codes(M, K, seed=0), codes(4, K, N, seed=1), np.array([5, 5, 20, 30], np.int32)
    operands = a, b, bytes_of_scales(M, 10, seed=2), bytes_of_scales(4, 10, N, seed=3), offs
    call = functools.partial(f8.scaled_grouped_mm, chip="B200")
    assert is_called(call, *operands)
    assert_same_bits(jax.jit(call)(*operands), reference.scaled_grouped_mm(*operands, chip=BLACKWELL_TCGEN05))


def test_ends_that_are_none_stay_inside_the_arrays() -> None:
    a, b, scale_a, scale_b = codes(M, K, seed=0), codes(4, K, N, seed=1), scales(M, seed=2), scales(4, N, seed=3)
    offs = np.array([-5, 100, 3, 2**31 - 1], np.int32)
    assert jax.jit(f8.scaled_grouped_mm)(a, b, scale_a, scale_b, offs).shape == (M, N)


def test_calls_from_many_threads() -> None:
    operands = codes(200, K, seed=0), codes(K, 300, seed=1), scales(200, 1, seed=2), scales(1, 300, seed=3)
    program, outputs = jax.jit(f8.scaled_mm), list[np.ndarray]()
    expected = np.asarray(program(*operands)).view(np.uint16)
    threads = [threading.Thread(target=lambda: outputs.append(np.asarray(program(*operands)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 8 and all((x.view(np.uint16) == expected).all() for x in outputs)


def test_an_exported_program_needs_no_engine() -> None:
    operands = codes(M, K, seed=0), codes(K, N, seed=1), scales(M, 1, seed=2), scales(1, N, seed=3)
    assert "f8emu_gemm" not in export.export(jax.jit(f8.scaled_mm))(*operands).mlir_module()


def test_options_of_another_version() -> None:
    operands = codes(M, K, seed=0), codes(K, N, seed=1)
    f8.mm(jnp.ones((2, 2), "bfloat16"), jnp.ones((2, 2), "bfloat16"))  # registers the call
    call = jax.ffi.ffi_call("f8emu_gemm", jax.ShapeDtypeStruct((M, N), jnp.bfloat16))
    with pytest.raises(Exception, match="another version of f8emu"):
        call(*operands, options=np.zeros(4, np.uint8))

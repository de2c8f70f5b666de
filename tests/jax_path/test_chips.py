"""`chip=` and `Recipe.chip` of f8emu.jax: the bits of another chip's profile."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import f8emu.jax as f8
import f8ref.numpy as reference
from f8emu.jax.gemm import call as planned
from f8emu.spec import ADA, BLOCKWISE, FLOAT32, HOPPER, TENSORWISE, SpecError, UnsupportedError
from f8emu.spec.gemm_call import layer_call
from f8emu.split_k import ask
from f8emu.split_k.gemm import Source, Split


@pytest.fixture(autouse=True)
def not_planned() -> Iterator[None]:
    """No other chip has a plan of splits, which is said once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="f8emu.jax: there is no split-K plan for Ada")
        yield


def is_same(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def drawn(rows: int, k: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)


def test_scaled_mm_of_another_chip() -> None:
    a, b = (jnp.asarray(drawn(rows, 160)).astype("float8_e4m3fn") for rows in (16, 32))
    scale = jnp.full((1, 1), 0.75)
    options: dict[str, Any] = {"out_dtype": "float32", "use_fast_accum": True, "chip": ADA}
    expected = reference.scaled_mm(np.asarray(a), np.asarray(b).T, np.asarray(scale), np.asarray(scale), **options)
    assert is_same(f8.scaled_mm(a, b.T, scale, scale, **options), expected)
    assert is_same(jax.jit(lambda *x: f8.scaled_mm(*x, **options))(a, b.T, scale, scale), expected)
    assert not is_same(f8.scaled_mm(a, b.T, scale, scale, out_dtype="float32", use_fast_accum=True), expected)


def test_on_the_gpu_whose_bits_are_wanted_its_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says 2 where the plan says 3."""
    monkeypatch.setattr(planned, "is_device_of", lambda chip, device: (chip, device) == (HOPPER, jax.devices()[0]))
    monkeypatch.setattr(ask, "split_k_at_hand", lambda gemm: Split(2, Source.ASKED))
    a, b = (jnp.asarray(drawn(rows, 8192)).astype("float8_e4m3fn") for rows in (8, 64))
    unit = jnp.ones((1, 1))
    options: dict[str, Any] = {"out_dtype": "float32", "use_fast_accum": True, "engine": "emulated"}
    products = {s: f8.scaled_mm(a, b.T, unit, unit, **options, split_k=s) for s in (None, 2, 3)}
    assert is_same(products[None], products[2]) and not is_same(products[None], products[3])
    assert is_same(f8.jit(lambda *xs: f8.scaled_mm(*xs, **options))(a, b.T, unit, unit), products[2])
    a, b = a.astype("bfloat16"), b.T.astype("bfloat16")
    assert is_same(*(f8.mm(a, b, out_dtype="float32", engine="emulated", split_k=s) for s in (None, 2)))
    assert planned.is_at_hand(HOPPER)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_on_a_hopper_gpu_its_library_is_asked() -> None:
    """An H100 and an H200 cut this otherwise; the kernel for block scales is given S."""
    m, n, k = 20, 512, 11904
    gemm = layer_call(BLOCKWISE.gemms["grad_weight"], (m, n, k), FLOAT32, HOPPER)
    split = ask.split_of(None, gemm, at_hand=planned.is_at_hand(HOPPER))
    assert split.source is Source.ASKED and split.split_k > 2
    a, b = (jnp.asarray(drawn(rows, k)).astype("float8_e4m3fn") for rows in (m, n))
    scale_a, scale_b = (jnp.exp(drawn(rows, k // 128)) for rows in (m, n))
    options: dict[str, Any] = {
        "out_dtype": "float32",
        "granularity_a": "blockwise_1x128",
        "granularity_b": "blockwise_1x128",
    }
    arrays = map(np.asarray, (a, b.T, scale_a, scale_b.T))
    expected = reference.scaled_mm(*arrays, **options, split_k=split.split_k)
    for engine in ("hardware", "emulated"):
        assert is_same(f8.scaled_mm(a, b.T, scale_a, scale_b.T, **options, engine=engine), expected)


def test_dot_general_follows_the_chip_of_its_recipe() -> None:
    recipe = replace(TENSORWISE, name="ada", chip="Ada")
    x, weight, grad = drawn(16, 160), drawn(32, 160), drawn(17, 32)[:16]
    expected = reference.linear(recipe, x, weight, grad)
    assert expected.grad_weight is not None and expected.grad_input is not None
    dot = f8.dot_general(recipe)
    output, pull = jax.vjp(lambda x, w: dot(x, w, (((1,), (1,)), ((), ()))), x, weight)
    gradients = pull(jnp.asarray(grad))
    for observed, trace in zip(
        (output, *gradients), (expected.output, expected.grad_input, expected.grad_weight), strict=True
    ):
        assert is_same(observed, trace.product)


def test_what_is_said_and_refused() -> None:
    cpu = jax.devices("cpu")[0]
    assert f8.engine_of(cpu, chip="Blackwell tcgen05") == "Blackwell tcgen05 emulated by f8emu.native on cpu"
    a = jnp.zeros((16, 16), "bfloat16")
    with pytest.raises(SpecError, match="mm: chip must be one of 'Hopper', 'H100', 'Ada'"):
        f8.mm(a, a, chip="Volta")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedError, match=r"engine='hardware' needs a device .* CDNA3, .* has no such device"):
        f8.mm(a, a, engine="hardware", chip="CDNA3")

"""The GEMMs of f8emu.jax: the oracle's bits, traced and not; what surrounds the dot on hardware; refusals.

The suite's stages (`f8emu verify f8emu.jax`) put all recorded and generated GEMMs to the verbs.
"""

import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import f8emu.jax as f8
import f8ref.jax
import f8ref.numpy as reference
from f8emu.jax.compiling import is_device_of
from f8emu.jax.gemm import engine, hardware
from f8emu.jax.gemm.call import EngineCall
from f8emu.jax.gemm.hardware import Form, form_of
from f8emu.spec import (
    BFLOAT16,
    CHIPS,
    E4M3FN,
    FLOAT16,
    FLOAT32,
    Format,
    Granularity,
    ScaleRule,
    UnsupportedError,
)
from f8emu.spec.gemm_call import GemmCall, Shaped, scaled_grouped_mm_call, scaled_mm_call
from tests.jax_path.layers import assert_same_bits, draw

TENSOR, ROW = Granularity.TENSORWISE, Granularity.ROWWISE
POWERS = ScaleRule(power_of_two=True)
M, N, K = 20, 24, 300
scaled_mm: Any = f8.scaled_mm  # takes arrays of numpy too


def codes(rows: int, k: int, seed: int, format: Format = E4M3FN) -> np.ndarray:
    return reference.cast(draw(rows, k, seed=seed, dtype="float32") * np.float32(16), format)


def scales(granularity: Granularity, rows: int, k: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.exp2(random.uniform(-6, 2, granularity.scale_shape(rows, k))).astype(np.float32)


def operands(pair: tuple[Granularity, Granularity]) -> tuple[np.ndarray, ...]:
    a, b = codes(M, K, 1), codes(N, K, 2)
    return a, b.T, scales(pair[0], M, K, 3), scales(pair[1], N, K, 4).T


def test_traced_and_mapped() -> None:
    """In a jit, and of a vmap one GEMM after another; granularities inferred; bias, split_k and float16."""
    a, b, scale_a, scale_b = operands((ROW, ROW))
    bias = draw(N, seed=5, dtype="float32")
    options: dict[str, Any] = {"bias": bias, "out_dtype": FLOAT16, "use_fast_accum": True, "split_k": 2}
    wanted = reference.scaled_mm(a, b, scale_a, scale_b, granularity_a=ROW, granularity_b=ROW, **options)
    assert_same_bits(scaled_mm(a, b, scale_a, scale_b, **options), wanted)
    stacked = jnp.stack([jnp.asarray(scale_a), jnp.asarray(scale_a) * 2])
    found = jax.jit(jax.vmap(lambda s: scaled_mm(a, b, s, scale_b, **options)))(stacked)
    assert_same_bits(found[0], wanted)
    doubled = reference.scaled_mm(a, b, scale_a * 2, scale_b, granularity_a=ROW, granularity_b=ROW, **options)
    assert_same_bits(found[1], doubled)


def test_grouped_on_hardware() -> None:
    """The emulation's are in `tests/native/test_jax_call`."""
    a, b = codes(40, 64, 1), np.stack([codes(24, 64, 2 + i).T for i in range(3)])
    scale_a, scale_b = scales(ROW, 40, 64, 6)[:, 0], np.stack([scales(ROW, 24, 64, 7 + i)[:, 0] for i in range(3)])
    arrays = a, b, scale_a, scale_b, np.array([8, 8, 40], np.int32)
    gemm = scaled_grouped_mm_call(*(Shaped(x.shape, x.dtype.name) for x in arrays))
    found = hardware_on_cpu(EngineCall(gemm), arrays)
    assert_same_bits(found, reference.scaled_grouped_mm(*arrays))


def emulated_dot(a: jax.Array, b: jax.Array, use_fast_accum: bool, dtype: Any) -> jax.Array:
    """What cuBLASLt gives for `hardware._dot`, as far as it is measured."""
    one = jnp.ones((1, 1), jnp.float32)
    return f8ref.jax.scaled_mm(a, b.T, one, one, out_dtype=jnp.dtype(dtype).name, use_fast_accum=use_fast_accum)


def hardware_on_cpu(call: EngineCall, arrays: tuple[Any, ...]) -> Any:
    """A product of `gemm.hardware` with the tensor core's dot emulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "_dot", emulated_dot)
        return hardware._product(tuple(map(jnp.asarray, arrays)), call, True)


@pytest.mark.parametrize(("pair", "out"), [((TENSOR, TENSOR), FLOAT32), ((ROW, ROW), BFLOAT16)], ids=["tensor", "row"])
def test_what_surrounds_the_dot_on_hardware(pair: tuple[Granularity, Granularity], out: Format) -> None:
    """Scales in their order, one rounding: the oracle's bits around the same accumulators."""
    arrays = operands(pair)
    options = {"granularity_a": pair[0], "granularity_b": pair[1], "out_dtype": out, "use_fast_accum": True}
    wanted = reference.scaled_mm(*arrays, **options)
    gemm = scaled_mm_call(*(Shaped(x.shape, x.dtype.name) for x in arrays), **options)
    for transposed in (False, True):
        call = EngineCall(gemm, is_transposed=transposed)
        assert_same_bits(hardware_on_cpu(call, arrays), wanted.T if transposed else wanted)


def test_forms() -> None:
    """The fastest form that is exact."""
    pairs = {"tensor": (TENSOR, TENSOR), "row": (ROW, ROW)}

    def form(
        pair: str, out: Format = BFLOAT16, *, bias: bool = False, powers: bool = True, excess: bool = True
    ) -> Form:
        gemm = GemmCall(
            call="scaled_mm", sizes=(16, 16, 16), formats=(E4M3FN, E4M3FN), granularities=pairs[pair], out=out
        )
        return form_of(EngineCall(gemm, powers_of_two=powers), has_bias=bias, excess_precision=excess)

    assert form("tensor") is Form.FOLDED and form("row") is Form.BFLOAT16
    others = [form("tensor", excess=False), form("row", powers=False)]
    others += [form(p, out) for p, out in itertools.product(("tensor", "row"), (FLOAT32, FLOAT16))]
    others += [form(p, bias=True) for p in ("tensor", "row")]
    assert set(others) == {Form.FLOAT32}


def test_powers_of_two_commute_with_rounding() -> None:
    """The claim of `form_of`, at the smallest and the largest accumulators and scales that E4M3 and the rule allow."""
    random = np.random.default_rng(0)
    # 1. Accumulators: multiples of 2^-25 with up to 24 significant bits, and the smallest ones.
    acc = np.ldexp(random.integers(1 << 20, 1 << 24, 20000), random.integers(-45, 15, 20000)).astype(np.float32)
    acc = np.concatenate([np.trunc(acc * 2.0**25) / np.float32(2.0**25), np.arange(1, 2000) * 2.0**-25]).astype(
        np.float32
    )
    # 2. Scales, of rows and columns: from those of an amax of 0 to the largest without overflow of `acc * scale_b`.
    assert float(reference.scale_from_amax(np.zeros((1, 1), np.float32), E4M3FN, POWERS).scale[0, 0]) == 2.0**-48
    for low, high in ((-48, -40), (-48, 90), (80, 90)):
        row, column = (np.ldexp(1.0, random.integers(low, high + 1, acc.size)).astype(np.float32) for _ in range(2))
        with np.errstate(over="ignore"):
            wanted = ((acc * column) * row).astype(jnp.bfloat16)
            found = ((acc.astype(jnp.bfloat16).astype(np.float32) * column) * row).astype(jnp.bfloat16)
        assert_same_bits(found, wanted)


ONE = jnp.ones((1, 1), jnp.float32)
A = jnp.ones((16, 32), jnp.float8_e4m3fn)


def test_split_k_is_refused_where_hardware_runs() -> None:
    traced = f8.jit(lambda a: f8.scaled_mm(a, a.T, ONE, ONE, split_k=2)).trace(A)
    traced.lower(lowering_platforms=("cpu",))
    with pytest.raises(UnsupportedError, match="on hardware the library chooses split_k"):
        traced.lower(lowering_platforms=("cuda",))
    assert f8.engine_of() == "emulated by f8emu.native on cpu"


def test_a_gpu_that_is_not_the_chip_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "cuda_devices", lambda: (gpu("8.9", "L40S"),))
    monkeypatch.setattr(engine.jax, "default_backend", lambda: "gpu")
    engine.warn_of_idle_gpu.cache_clear()

    def lowered() -> str:
        traced = f8.jit(lambda a: f8.scaled_mm(a, a.T, ONE, ONE)).trace(A)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    with pytest.warns(RuntimeWarning, match="the GPU is not Hopper, whose bits were requested"):
        assert "dot_general" not in lowered(), "it is emulated"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered()
        monkeypatch.setattr(engine, "cuda_devices", lambda: (gpu("9.0", "NVIDIA H200"),))
        assert "dot_general" in lowered()
    engine.warn_of_idle_gpu.cache_clear()


def gpu(capability: str, name: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=name)


def test_which_chip_a_gpu_is() -> None:
    """An H100 is itself and Hopper; no other GPU is an H100."""
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")
    found = [[chip.name for chip in CHIPS.values() if is_device_of(chip, gpu("9.0", name))] for name in names]
    assert found == [["Hopper"], ["Hopper", "H100"], ["Hopper"]]
    assert [chip.name for chip in CHIPS.values() if is_device_of(chip, gpu("8.9", "L40S"))] == ["Ada"]
    assert not any(is_device_of(chip, jax.devices("cpu")[0]) for chip in CHIPS.values())

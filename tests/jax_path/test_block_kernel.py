"""The GEMM with block scales as a Pallas kernel: what surrounds its tensor core, interpreted, and what Triton is given.

XLA's dot on a CPU is no tensor core. So the values here are small integers under powers of two, whose sums are exact,
and every block has a magnitude of its own: an index error shows.
"""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import f8emu.jax as f8
import f8ref.numpy as reference
from f8emu.jax import compiling
from f8emu.jax.gemm import block_kernel, hardware
from f8emu.jax.gemm.block_kernel import GemmLaunch
from f8emu.jax.gemm.call import EngineCall
from f8emu.spec import BFLOAT16, E4M3FN, FLOAT16, FLOAT32, Format, Granularity
from f8emu.spec.gemm_call import GemmCall
from tests.jax_path.layers import assert_same_bits

VECTOR, SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
PAIRS = {"vector-vector": (VECTOR, VECTOR), "vector-square": (VECTOR, SQUARE), "square-vector": (SQUARE, VECTOR)}
SMALL = GemmLaunch(rows=32, cols=64, parts=2, warps=4, stages=2, group=2, ahead=True, interpret=True)
TALL = GemmLaunch(rows=256, cols=128, parts=2, warps=8, stages=3, group=8, ahead=False, interpret=True)
TRITON = "@__gpu$xla.gpu.triton"


def operands(pair: tuple[Granularity, Granularity], m: int, n: int, k: int) -> list[np.ndarray]:
    """Codes of -2 to 2, and scales that differ between the blocks of a row and between neighbouring rows."""
    random = np.random.default_rng((m, n, k))
    arrays = [reference.cast(random.integers(-2, 3, (rows, k)).astype(np.float32), E4M3FN) for rows in (m, n)]
    for granularity, rows in zip(pair, (m, n), strict=True):
        row, block = np.indices(granularity.scale_shape(rows, k))
        arrays.append(np.exp2((3 * row + 2 * block) % 7 - 3).astype(np.float32))
    return arrays


def found_by_kernel(
    arrays: list[np.ndarray], pair: Any, out: Format, split_k: int, transposed: bool, **how: Any
) -> Any:
    """As `hardware` calls the kernel; b and its scales are [N, ...] in `arrays`."""
    a, b, scale_a, scale_b = arrays
    sizes, formats = (len(a), len(b), a.shape[1]), (E4M3FN, E4M3FN)
    options: dict[str, Any] = {"granularities": pair, "out": out, "split_k": split_k}
    gemm = GemmCall(call="scaled_mm", sizes=sizes, formats=formats, **options)
    call = EngineCall(gemm, is_transposed=transposed)
    return jax.jit(functools.partial(hardware._by_kernel, call, **how))(a, b.T, scale_a, scale_b.T)


@pytest.mark.parametrize(
    ("pair", "sizes", "out", "split_k", "launch", "transposed"),
    [
        ("vector-vector", (40, 200, 400), BFLOAT16, 1, SMALL, False),
        ("vector-square", (40, 200, 400), BFLOAT16, 1, SMALL, True),
        ("square-vector", (40, 200, 400), FLOAT16, 1, SMALL, False),
        ("vector-vector", (128, 64, 256), FLOAT32, 1, SMALL, True),
        ("square-vector", (300, 130, 140), FLOAT32, 1, TALL, False),
        ("vector-square", (130, 300, 140), FLOAT32, 1, TALL, True),
        ("vector-vector", (70, 33, 700), FLOAT16, 2, SMALL, False),
        ("vector-square", (70, 33, 1200), BFLOAT16, 2, SMALL, False),
        ("square-vector", (1, 1, 1), FLOAT32, 1, replace(block_kernel.SQUARE_LAUNCH, interpret=True), True),
    ],
)
def test_scales_meet_their_blocks(
    pair: str, sizes: Any, out: Format, split_k: int, launch: GemmLaunch, transposed: bool
) -> None:
    kinds = PAIRS[pair]
    a, b, scale_a, scale_b = arrays = operands(kinds, *sizes)
    wanted = reference.scaled_mm(
        a, b.T, scale_a, scale_b.T, granularity_a=kinds[0], granularity_b=kinds[1], out_dtype=out, split_k=split_k
    )
    observed = found_by_kernel(arrays, kinds, out, split_k, transposed, launch=launch)
    assert_same_bits(observed, wanted.T if transposed else wanted)


def test_order_of_two_vector_scales() -> None:
    """[EPI-5] `(p * scale_a) * scale_b`: an infinity where the first product overflows, whichever is left."""
    a, b = (reference.cast(np.ones((rows, 128), np.float32), E4M3FN) for rows in (2, 3))
    scales = [np.full((rows, 1), scale, np.float32) for rows, scale in ((2, 2.0**125), (3, 2.0**-125))]
    for transposed in (False, True):
        observed = found_by_kernel([a, b, *scales], (VECTOR, VECTOR), FLOAT32, 1, transposed, launch=SMALL)
        assert np.isposinf(observed).all()


def test_every_tile_has_one_program() -> None:
    for tiles, group in itertools.product([(1, 1), (17, 2), (3, 9)], (4, 8)):
        count = tiles[0] * tiles[1]
        programs = jnp.arange(count)
        launch = GemmLaunch(rows=1, cols=1, parts=1, warps=1, stages=1, group=group, ahead=False)
        problem = block_kernel._Problem(*tiles, 1, 1, (VECTOR, VECTOR), False, launch)
        rows, cols = problem.place(programs)
        assert set(zip(rows.tolist(), cols.tolist(), strict=True)) == set(itertools.product(*map(range, tiles)))


def lowered(pair: tuple[Granularity, Granularity], m: int = 256, n: int = 384, k: int = 512) -> str:
    """The program of a GEMM for a GPU."""

    def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    code = {"dtype": jnp.float8_e4m3fn}
    arrays = [shape(m, k, **code), shape(k, n, **code)]
    arrays += [shape(*pair[0].scale_shape(m, k)), shape(*pair[1].scale_shape(n, k)[::-1])]
    traced = f8.jit(lambda *xs: f8.scaled_mm(*xs, granularity_a=pair[0], granularity_b=pair[1])).trace(*arrays)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("pair", PAIRS)
def test_a_program_for_hopper_has_one_kernel(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lowered(PAIRS[pair]).count(TRITON) == 1
    with jax.enable_x64(True):
        assert lowered(PAIRS[pair], 17, 33, 40).count(TRITON) == 1
        assert lowered(PAIRS[pair], 64, 256, 16384).count(TRITON) == 1  # K in slices
    monkeypatch.setattr(block_kernel, "IS_AVAILABLE", False)
    assert lowered(PAIRS[pair]).count(TRITON) == 0


def test_other_chips_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ada, hopper = (SimpleNamespace(platform="gpu", compute_capability=capability) for capability in ("8.9", "9.0"))
    monkeypatch.setattr(compiling, "cuda_devices", lambda: (ada,))
    assert lowered((VECTOR, VECTOR)).count(TRITON) == 0
    monkeypatch.setattr(compiling, "cuda_devices", lambda: (hopper, hopper))
    assert lowered((VECTOR, VECTOR)).count(TRITON) == 1


@pytest.mark.parametrize("pair", PAIRS)
def test_what_triton_is_given(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chain a dot, and the multiply-add as an instruction: what a later JAX could change unnoticed."""
    lowering = pytest.importorskip("jax._src.pallas.triton.lowering")
    texts: list[str] = []
    lower = lowering.lower_jaxpr_to_triton_module

    def seen(*args: Any, **options: Any) -> Any:
        lowered_module = lower(*args, **options)
        texts.append(str(lowered_module.module))
        return lowered_module

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", seen)
    lowered(PAIRS[pair], 640, 512, 256)
    (text,) = texts
    parts = block_kernel.launch_of(PAIRS[pair]).parts
    dots = [line for line in text.splitlines() if "tt.dot" in line]
    assert len(dots) == parts
    assert all("maxNumImpreciseAcc = 1073741824 : i32" in line for line in dots)
    assert text.count("fma.rn.f32 $0, $1, $2, $3;") == parts
    assert "arith.addf" not in text


def test_fits() -> None:
    assert block_kernel.fits(8192, 14336, 4096, 1)
    assert not block_kernel.fits(0, 16, 16, 1)
    assert not block_kernel.fits(1 << 16, 1 << 15, 16, 1)
    assert not block_kernel.fits(16, 1 << 20, 2048, 1)

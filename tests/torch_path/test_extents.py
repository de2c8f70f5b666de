"""M and K rounded up for the emulation: the bits of the oracle, which rounds nothing up, and few compilations."""

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import HOPPER, RECIPES, TENSORS, Granularity
from f8emu.torch.gemm.extents import rounded_extents
from f8ref.numpy import initial_delayed_state

IN_FEATURES = 80
PAIRS = [pair for pair in HOPPER.granularity_pairs if pair[0].is_blockwise]


class Compilations:
    """The programs that JAX compiles, counted by what it logs."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def taken(self) -> int:
        """Programs since the last call."""
        count = sum(record.getMessage().startswith("Finished XLA compilation") for record in self._caplog.records)
        self._caplog.clear()
        return count


@pytest.fixture
def compilations(caplog: pytest.LogCaptureFixture) -> Any:
    """Nothing is compiled beforehand: small GEMMs of many shapes share programs."""
    jax.clear_caches()
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        yield Compilations(caplog)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Elements of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-6, 5, shape, generator=generator))


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_a_layer(name: str, compilations: Compilations, to_numpy: Any, assert_same_bits: Any) -> None:
    recipe = RECIPES[name]
    features = 128 if name == "delayed" else 112  # all GEMMs of delayed scaling are those of tensorwise
    compiled: dict[int, int] = {}
    for rows in (33, 34, 35, 47, 1, 129, 130, 2049, 2050):  # the last are too large to share programs with the first
        layer = f8.Float8Linear(IN_FEATURES, features, bias=False, recipe=recipe)
        x, grad_output = drawn(rows, rows, IN_FEATURES).requires_grad_(), drawn(rows + 1, rows, features)
        compilations.taken()
        output = layer(x)
        output.backward(grad_output)
        compiled[rows] = compilations.taken()
        initial = recipe.delayed and initial_delayed_state(recipe.delayed)
        states = None if initial is None else {name: initial for name in TENSORS}
        arrays = (to_numpy(t) for t in (x, layer.weight, grad_output))
        expected = reference.linear(recipe, *arrays, delayed_state=states)
        assert x.grad is not None and layer.weight.grad is not None
        assert expected.grad_input is not None and expected.grad_weight is not None
        assert_same_bits(output.detach(), expected.result)
        assert_same_bits(x.grad, expected.grad_input.product)
        assert_same_bits(layer.weight.grad, expected.grad_weight.product)
    assert compiled[33] > 0 and compiled[2049] > 0  # the count counts
    assert {rows: compiled[rows] for rows in (34, 35, 47, 130, 2050)} == {34: 0, 35: 0, 47: 0, 130: 0, 2050: 0}


def test_rows_of_groups(compilations: Compilations, to_numpy: Any, assert_same_bits: Any) -> None:
    b = f8.cast(drawn(1, 2, 112, IN_FEATURES), "float8_e4m3fn").mT
    scale_b = drawn(2, 2, 112).abs()
    for rows in (33, 34, 47):
        a, scale_a = f8.cast(drawn(rows, rows, IN_FEATURES), "float8_e4m3fn"), drawn(rows + 1, rows).abs()
        args = (a, b, scale_a, scale_b, torch.tensor([5, rows], dtype=torch.int32))
        expected = reference.scaled_grouped_mm(*map(to_numpy, args), out_dtype="bfloat16")
        compilations.taken()
        assert_same_bits(f8.scaled_grouped_mm(*args), expected)
        assert (compilations.taken() > 0) == (rows == 33)


@pytest.mark.parametrize("gemm", ["fast", "promoted", "bfloat16"])
def test_slices_of_a_rounded_k_begin_where_they_did(
    gemm: str, compilations: Compilations, to_numpy: Any, assert_same_bits: Any
) -> None:
    """Slices of 17 blocks are computed with 18; slices of 18 would give other bits."""
    block = 64 if gemm == "bfloat16" else 128
    options: dict[str, Any] = {"split_k": 2, "out_dtype": torch.float32}
    for k in (34 * block - 16, 34 * block - 32):
        a, b = drawn(1, 3, k), drawn(2, 16, k).t()
        assert rounded_extents(3, k, split_k=2, block_k=block) == (4, 2, 17 * block, 18 * block)
        compilations.taken()
        if gemm == "bfloat16":
            args, verb = (a.bfloat16(), b.bfloat16()), "mm"
        else:
            codes = (f8.cast(x, "float8_e4m3fn") for x in (a, b.t()))
            args, verb = (next(codes), next(codes).t(), torch.tensor(1.5), torch.tensor(0.7)), "scaled_mm"
            options["use_fast_accum"] = gemm == "fast"
        product = getattr(f8, verb)(*args, **options)
        assert (compilations.taken() > 0) == (k == 34 * block - 16)
        oracle = {**options, "out_dtype": "float32"}
        expected = getattr(reference, verb)(*map(to_numpy, args), **oracle)
        assert_same_bits(product, expected)
        if gemm != "promoted":
            assert (expected != getattr(reference, verb)(*map(to_numpy, args), **{**oracle, "split_k": 1})).any()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_slices_of_scaled_blocks_begin_where_they_did(
    pair: tuple[Granularity, Granularity], compilations: Compilations, to_numpy: Any, assert_same_bits: Any
) -> None:
    """As above; beside 128x128 scales, slices of 17 times four blocks with 18 times four. Every scale is another."""
    multiple = 1 if pair[0] is pair[1] else 4
    options: dict[str, Any] = {"granularity_a": pair[0], "granularity_b": pair[1], "split_k": 2}
    for k in (34 * multiple * 128 - 16, 34 * multiple * 128 - 160):
        extents = rounded_extents(4, k, split_k=2, block_k=128, slice_blocks=multiple)
        assert extents == (4, 2, 17 * multiple * 128, 18 * multiple * 128)
        a, b = (f8.cast(drawn(seed, rows, k), "float8_e4m3fn") for seed, rows in ((1, 4), (2, 16)))
        scale_a = drawn(3, *pair[0].scale_shape(4, k)).abs()
        scale_b = drawn(4, *pair[1].scale_shape(16, k)).abs().t().contiguous()
        args = (a, b.t(), scale_a, scale_b)
        compilations.taken()
        product = f8.scaled_mm(*args, **options, out_dtype=torch.float32)
        assert (compilations.taken() > 0) == (k == 34 * multiple * 128 - 16)
        expected, unsplit = (
            reference.scaled_mm(*map(to_numpy, args), **{**options, "split_k": s}, out_dtype="float32") for s in (2, 1)
        )
        assert_same_bits(product, expected)
        assert (expected != unsplit).any()


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_added_blocks_leave_minus_zero(
    pair: tuple[Granularity, Granularity], split_k: int, to_numpy: Any, assert_same_bits: Any
) -> None:
    """17 blocks are computed with 18. Each of the 17 adds -2^-158, which is rounded to -0."""
    m, n, k = 4, 16, 17 * 128
    a, b = (torch.zeros(rows, k, dtype=torch.uint8) for rows in (m, n))
    a[:, ::128] = b[:, ::128] = 1  # 2^-9
    a, b = (x.view(torch.float8_e4m3fn) for x in (a, b))
    scale_a = torch.full(pair[0].scale_shape(m, k), 2.0**-70)
    scale_b = torch.full(pair[1].scale_shape(n, k), -(2.0**-70)).t().contiguous()
    options: dict[str, Any] = {"granularity_a": pair[0], "granularity_b": pair[1], "split_k": split_k}
    args = (a, b.t(), scale_a, scale_b)
    product = f8.scaled_mm(*args, **options, out_dtype=torch.float32)
    assert torch.signbit(product).all() and not product.any()
    assert_same_bits(product, reference.scaled_mm(*map(to_numpy, args), **options, out_dtype="float32"))


def test_little_is_computed_in_vain() -> None:
    for extent in range(1, 20_000):
        m, k = (x := rounded_extents(extent, extent, split_k=1, block_k=128)).m, x.k
        assert extent <= m <= (max(extent + 15, extent * 9 / 8) if extent > 16 else 2 * extent - 1)
        as_emulated = math.ceil(extent / 128) * 128 if extent > 128 else math.ceil(extent / 32) * 32
        assert as_emulated <= k <= (as_emulated if extent <= 1024 else as_emulated * 9 / 8)
    rounded = [rounded_extents(extent, extent, split_k=1, block_k=128) for extent in range(1, 4097)]
    assert len({x.m for x in rounded}) == 5 + 7 + 5 * 8
    assert len({x.k for x in rounded}) == 4 + 7 + 2 * 8


def test_programs_are_kept_for_the_next_process(tmp_path: Path) -> None:
    """With the two lines of the README, which are JAX's own settings."""
    program = """
import sys, torch, jax, jax.monitoring
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
import f8emu.torch as f8
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rsplit("/", 1)[1]))
f8.mm(torch.ones(3, 32).bfloat16(), torch.ones(16, 32).bfloat16().t())
print(events.count("cache_hits"), events.count("cache_misses"))
"""
    counts: list[tuple[int, int]] = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
        hits, misses = map(int, run.stdout.split())
        counts.append((hits, misses))
    (hits, misses), again = counts
    assert hits == 0 < misses and again == (misses, 0)

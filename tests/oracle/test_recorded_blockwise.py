"""Blockwise GEMMs that an H200 cut along K, every bit: S by the kernel's grid, the length of slices by the outputs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import f8ref.numpy as reference
from f8emu.conformance.record.record import COLUMNS, emulated, revealing_operands
from f8emu.spec import HOPPER, Chip, Granularity
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, Source, planned_gemm
from f8emu.split_k.plan import CHIP, LIBRARY, shipped_plan, split_k
from tests.oracle import exactly

RECORDING = json.loads((Path(__file__).parents[2] / "benchmarks/results/blockwise_split_k-h200.json").read_text())
VECTOR = Granularity.BLOCKWISE_1X128
GEMMS: list[dict[str, Any]] = RECORDING["gemms"]


class Operands(NamedTuple):
    """The recorded rows of a and some columns of b, [rows, K], with their scales, [scale_shape]."""

    a: np.ndarray
    b: np.ndarray
    scale_a: np.ndarray
    scale_b: np.ndarray


def operands(gemm: dict[str, Any]) -> Iterator[Operands]:
    """As they were drawn for the whole GEMM, 128 of its columns at a time: these share one 128x128 scale."""
    m, n, k = gemm["m"], gemm["n"], gemm["k"]
    draw = np.random.default_rng([m, n, k])
    a, b = (
        np.clip(draw.standard_normal((rows, k), np.float32) * 60, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        for rows in (m, n)
    )
    pair = BLOCKWISE_GEMMS[gemm["gemm"]]
    scale_a, scale_b = (
        np.exp2(draw.uniform(-3, 3, granularity.scale_shape(rows, k))).astype(np.float32)
        for granularity, rows in zip(pair, (m, n), strict=True)
    )
    rows, columns = gemm["rows"], np.array(gemm["columns"])
    for square in range(-(-n // 128)):
        part = columns[columns // 128 == square]
        yield Operands(a[rows], b[part], scale_a[rows], scale_b[part if pair[1] is VECTOR else [square]])


def options_of(kind: str) -> dict[str, Any]:
    pair = BLOCKWISE_GEMMS[kind]
    return {"granularity_a": pair[0], "granularity_b": pair[1], "out_dtype": "float32"}


def recorded(gemm: dict[str, Any]) -> np.ndarray:
    return np.array([[int(word, 16) for word in row] for row in gemm["outputs"]], np.uint32)


def product(backend: Any, gemm: dict[str, Any], slices: int, chip: Chip = HOPPER) -> np.ndarray:
    """The recorded outputs as a backend computes them, their bits."""
    options = {**options_of(gemm["gemm"]), "split_k": slices, "chip": chip}
    parts = [backend.scaled_mm(x.a, x.b.T, x.scale_a, x.scale_b.T, **options) for x in operands(gemm)]
    return np.concatenate([np.asarray(part) for part in parts], axis=1).view(np.uint32)


def name(gemm: dict[str, Any]) -> str:
    return "{gemm} {m}x{n}x{k}".format(**gemm)


@pytest.mark.parametrize("gemm", GEMMS, ids=name)
def test_slices_are_added_as_recorded(gemm: dict[str, Any]) -> None:
    """[CHAIN-3] And one slice less or more gives other bits."""
    assert {g["split_k"] for g in GEMMS} == {1, 3, 5}
    wanted, s = recorded(gemm), gemm["split_k"]
    assert [np.array_equal(product(reference, gemm, slices), wanted) for slices in (s, max(s - 1, 2), s + 1)] == [
        True,
        False,
        False,
    ]


def test_the_multiple_beside_squares_is_measured() -> None:
    """K = 8192 in three slices: of 24 blocks, not of 22. So would multiples of 1,024 be: the next test."""
    gemm = next(g for g in GEMMS if g["gemm"] == "blockwise_1x128_128x128" and g["split_k"] == 3)
    for multiple in (128, 256, 1024):
        altered = replace(HOPPER, square_split_k_multiple=multiple)
        assert np.array_equal(product(reference, gemm, 3, altered), recorded(gemm)) == (multiple == 1024)


def test_slices_found_by_bits_are_no_multiples_of_1024() -> None:
    """[CHAIN-3] K = 10240 in three slices of 3,584: with multiples of 1,024 no S gives the bits that told S."""
    kind = planned_gemm(m=1, n=COLUMNS, k=10240, gemm="blockwise_1x128_128x128", out_dtype="float32")
    assert shipped_plan().recorded[kind.table, 4, 256, kind.k] == 3
    a_K, b_CK = revealing_operands(kind)
    pair = BLOCKWISE_GEMMS[kind.gemm]
    scales = [np.ones(g.scale_shape(n, kind.k), np.float32) for g, n in zip(pair, (1, COLUMNS), strict=True)]

    def row(slices: int, multiple: int) -> np.ndarray:
        options = {"split_k": slices, "chip": replace(HOPPER, square_split_k_multiple=multiple)}
        return reference.scaled_mm(a_K[None], b_CK.T, scales[0], scales[1].T, **options_of(kind.gemm), **options)[0]

    found = emulated(kind, a_K, b_CK, 3)
    assert np.array_equal(row(3, 512), found)
    assert not any(np.array_equal(row(slices, 1024), found) for slices in range(1, 11))


@pytest.mark.parametrize("gemm", [g for g in GEMMS if g["k"] == 8192], ids=name)
def test_jax_and_exact(gemm: dict[str, Any]) -> None:
    backend = pytest.importorskip("f8ref.jax")
    x = next(operands(gemm))
    wanted = recorded(gemm)[:, : len(x.b)]
    operands_and_scales = x.a, x.b.T, x.scale_a, x.scale_b.T
    options = {**options_of(gemm["gemm"]), "split_k": gemm["split_k"]}
    out = backend.scaled_mm(*operands_and_scales, **options)
    assert np.array_equal(np.asarray(out).view(np.uint32), wanted)
    one = exactly.scaled_mm(*operands_and_scales, at=([2], [0]), **options)
    assert one.view(np.uint32).item() == wanted[2, 0]


@pytest.mark.parametrize("gemm", GEMMS, ids=name)
def test_the_plan_knows_them(gemm: dict[str, Any]) -> None:
    assert (RECORDING["device"], RECORDING["library"]) == (CHIP, LIBRARY)
    for out_dtype, source in (("float32", Source.RECORDED), ("bfloat16", Source.PREDICTED)):
        asked = planned_gemm(m=gemm["m"], n=gemm["n"], k=gemm["k"], gemm=gemm["gemm"], out_dtype=out_dtype)
        assert split_k(asked) == (gemm["split_k"], source)

"""f8ref.jax against every GEMM recorded on an H200: all 174 cases, every bit of every output."""

import json
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import f8emu
from f8emu.spec import Granularity
from f8ref.jax import mm, scaled_grouped_mm, scaled_mm

Array = npt.NDArray[Any]
Case = dict[str, Any]

GOLDEN = Path(f8emu.__path__[0]) / "conformance" / "data" / "h200_golden.safetensors"
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
GRANULARITIES = {
    "BlockWise1x128": Granularity.BLOCKWISE_1X128,
    "BlockWise128x128": Granularity.BLOCKWISE_128X128,
}


def read_header() -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the JSON header of the safetensors file."""
    with GOLDEN.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


START, HEADER = read_header()
CASES: list[Case] = json.loads(HEADER["__metadata__"]["cases"])


@pytest.fixture(scope="module")
def data() -> bytes:
    return GOLDEN.read_bytes()


def tensor(data: bytes, key: str) -> Array:
    entry = HEADER[key]
    first, end = (START + offset for offset in entry["data_offsets"])
    return np.frombuffer(data[first:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])


def split_k(case: Case) -> int:
    """[CHAIN-3] The number of slices: blocks in the grid of a splitK kernel, by the number of output tiles."""
    for name, grid in case["kernels"]:
        tile = re.search(r"_(\d+)x(\d+)_", name)
        if "nvjet" in name and "splitK" in name and tile is not None:
            first, second = int(tile[1]), int(tile[2])
            for m, n in ((second, first), (first, second)):
                tiles = math.ceil(case["M"] / m) * math.ceil(case["N"] / n)
                if math.prod(grid) % tiles == 0:
                    return math.prod(grid) // tiles
            raise AssertionError(f"no tile order divides the grid of {name}")
    return 1


def run(case: Case, x: dict[str, Array]) -> Array:
    """The case's GEMM, `a @ b.T`."""
    options: dict[str, Any] = {"out_dtype": case["out_dtype"]}
    if case["mode"] == "bf16":
        return np.asarray(mm(x["a"], x["b"].T, split_k=split_k(case), **options))  # pyright: ignore[reportArgumentType]
    a, b = x["a"].view(case["a_dtype"]), x["b"].view(case["b_dtype"])
    scale_a, scale_b = x["scale_a"], x["scale_b"]
    options["use_fast_accum"] = case["use_fast_accum"]
    if case["mode"] == "grouped_rowwise":
        call: Any = scaled_grouped_mm
        return np.asarray(call(a, b.transpose(0, 2, 1), scale_a, scale_b, x["offs"], **options))
    granularities = [Granularity.TENSORWISE] * 2
    if case["mode"] == "rowwise":
        granularities = [Granularity.ROWWISE] * 2
        scale_a, scale_b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
    elif case["mode"] == "blockwise":
        granularities = [GRANULARITIES[word] for word in case["name"].split()[1:]]
        # 128x128 scales are stored as [K / 128 padded to 4, rows / 128].
        blocks = case["K"] // 128
        scale_a, scale_b = (
            s[:blocks].T if g is Granularity.BLOCKWISE_128X128 else s
            for s, g in zip((scale_a, scale_b), granularities, strict=True)
        )
        scale_b = scale_b.T
    call = scaled_mm
    return np.asarray(
        call(
            a,
            b.T,
            scale_a,
            scale_b,
            granularity_a=granularities[0],
            granularity_b=granularities[1],
            bias=x.get("bias"),
            split_k=split_k(case),
            **options,
        )
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['mode']}-{case['name']}")
def test_recorded_case(case: Case, data: bytes) -> None:
    x = {role: tensor(data, key) for role, key in case["tensors"].items()}
    observed, expected = run(case, x), x["out"]
    assert observed.dtype == expected.dtype
    assert observed.shape == expected.shape
    is_nan = np.isnan(expected.astype(np.float32))
    code = f"uint{8 * expected.dtype.itemsize}"
    assert np.array_equal(np.isnan(observed.astype(np.float32)), is_nan)
    assert np.array_equal(observed.view(code)[~is_nan], expected.view(code)[~is_nan])


def test_all_cases_are_here() -> None:
    assert len(CASES) == 174
    assert sum(math.prod(HEADER[case["tensors"]["out"]]["shape"]) for case in CASES) == 846_592

"""The kernels of the statistics against plain torch: on a GPU, and on any machine in Triton's interpreter.

Counts are equal; sums are of the same float64 terms in another order. As in test_kernels.py the interpreter has a
process of its own, and the conversions of ml_dtypes.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import f8emu.torch as f8
from f8emu.spec import (
    BLOCKWISE,
    E4M3FN,
    E5M2,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    Cast,
    E8M0Rule,
    Granularity,
    ScaleRule,
)
from f8emu.spec.recipe import OPERANDS, TRANSPOSED
from f8emu.torch.casts.operand import Delayed, Operand
from f8emu.torch.fused import availability
from f8emu.torch.inspection.config import OPERAND_STATISTICS, InspectConfig
from f8emu.torch.inspection.matrix import Matrix, operand_statistics
from f8emu.torch.inspection.recorder import Pending, Recorder, read
from f8emu.torch.inspection.statistics import Statistics
from f8emu.torch.layer.observers import GemmSeen, TensorSeen
from tests.torch_path.interpreter import DEVICE, INTERPRETED, ON_GPU, prepare

FLOATS = (torch.bfloat16, torch.float32, torch.float16)
VALUES = ("amax", "nan", "inf", "zero", "mean", "l1_norm", "l2_norm")
CASTS = ("underflow", "saturation", "sqnr", "mse")
SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 1e-13)
_SLACK = 1e-11
"""Relative. torch's own float64 norm of 8 million numbers is 8e-13 off on a CPU, as `math.fsum` tells."""
RULES = (ScaleRule(), ScaleRule(power_of_two=True, amax_floor=1e-3))
E8M0_RULES = (ScaleRule(e8m0=E8M0Rule.RCEIL), ScaleRule(e8m0=E8M0Rule.FLOOR))
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "gaps": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}
SHAPES = [(1, 300), (70, 130), (257, 5)]
if not INTERPRETED:
    SHAPES += [(1, 1), (3, 8192), (4096, 1000), (8192 + 16, 1024 + 8)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Calls a function so that kernels run, on tensors of the device."""
    runs = False
    if INTERPRETED:
        prepare(monkeypatch)
        monkeypatch.setattr(availability, "has_float8_hardware", lambda device: runs)

    def call(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal runs
        runs = True
        with np.errstate(all="ignore"):
            found = function(*args)
        runs = False
        return found

    yield call


def draw(shape: tuple[int, int], dtype: torch.dtype, specials: tuple[float, ...]) -> Tensor:
    """Each element of another magnitude, the last row half zero."""
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 12, shape, generator=generator))
    at = torch.randint(0, x.numel(), (len(specials),), generator=generator)
    x.view(-1)[at] = torch.tensor(specials)
    x[-1, : shape[1] // 2] = 0
    return x.to(dtype)


def numbers(statistics: Statistics) -> dict[str, float]:
    (found,) = read([Pending({}, statistics)])
    return found[1]


def assert_same(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    sizes = {**expected, "sqnr": 10.0, "mean": expected.get("l1_norm", 0)}
    for name, value in expected.items():
        slack = _SLACK * sizes[name] if name in ("l1_norm", "l2_norm", "mse", "sqnr", "dynamic_range", "mean") else 0
        same = found[name] == value or abs(found[name] - value) <= slack
        assert same or (math.isnan(value) and math.isnan(found[name])), f"{name}: {found[name]}, expected {value}"


INPUTS = pytest.mark.parametrize(
    ("shape", "dtype", "layout", "specials"),
    [
        (SHAPES[i % len(SHAPES)], FLOATS[i % len(FLOATS)], layout, specials)
        for i, (specials, layout) in enumerate(product((SPECIALS, SPECIALS[3:]), LAYOUTS))
    ],
    ids=str,
)


@ON_GPU
@INPUTS
def test_values(shape, dtype, layout, specials, kernels) -> None:
    x = draw(shape, dtype, specials)
    for wanted in (VALUES, ("amax", "zero"), (*VALUES, "std", "dynamic_range")):
        expected = numbers(Matrix(LAYOUTS[layout](x)).values(wanted))
        observed = kernels(lambda: numbers(Matrix(LAYOUTS[layout](x.to(DEVICE))).values(wanted)))  # noqa: B023
        expected["std"] = observed.get("std", math.nan)  # plain torch on both
        assert_same({"std": math.nan, **observed}, expected)


@ON_GPU
@INPUTS
@pytest.mark.parametrize("granularity", Granularity, ids=lambda one: one.value)
def test_casts(granularity, shape, dtype, layout, specials, kernels) -> None:
    """Rows and columns, each of another magnitude, by both formats and rules."""
    x = draw(shape, dtype, specials)
    rules = E8M0_RULES if granularity.is_microscaled else RULES

    def statistics(device: str) -> list[dict[str, float]]:
        matrix, observed = Matrix(LAYOUTS[layout](x.to(device))), list[Statistics]()
        matrix.values(["amax"])
        for transposed, (format, rule) in product((False, True), zip((E4M3FN, E5M2), rules, strict=True)):
            cast = Cast(format=format, granularity=granularity)
            observed.append(matrix.cast(cast, transposed, rule, CASTS, None))
        return [numbers(one) for one in observed]

    for observed, expected in zip(kernels(statistics, DEVICE), statistics("cpu"), strict=True):
        assert_same(observed, expected)


@ON_GPU
def test_delayed_casts(kernels) -> None:
    """Scales that are set and not set, and with which many values saturate."""
    x, cast = draw((40, 300), torch.bfloat16, SPECIALS[3:]), Cast(format=E4M3FN, granularity=Granularity.TENSORWISE)

    def statistics(device: str) -> list[dict[str, float]]:
        observed, matrix = list[dict[str, float]](), Matrix(x.to(device))
        matrix.values(["amax"])
        for inv_scale, transposed in product((0.0, 0.3, 50.0), (False, True)):
            one = torch.full((1, 1), inv_scale, device=device)
            state = Delayed(inv_scale=one, amax=torch.zeros(1, 1, device=device), margin=2)
            observed.append(numbers(matrix.cast(cast, transposed, ScaleRule(), CASTS, state)))
        return observed

    expected = statistics("cpu")
    assert expected[-1]["saturation"] > 0.1
    for observed, wanted in zip(kernels(statistics, DEVICE), expected, strict=True):
        assert_same(observed, wanted)


@pytest.mark.parametrize("format", (E4M3FN, E5M2), ids=str)
def test_codes(format) -> None:
    """Of every code, those that mean NaN, zero and the largest value."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(getattr(torch, format.name))
    values, scale = codes.float(), torch.linspace(-1, 1, 3)[:, None]
    counts = (values.isnan(), values == 0, values.abs() == format.max)
    cast = Cast(format=format, granularity=Granularity.ROWWISE)
    statistics = numbers(operand_statistics(Operand(codes, scale), cast, OPERAND_STATISTICS))
    assert statistics == dict(zip(OPERAND_STATISTICS, (-1, 1, *(int(count.sum()) for count in counts)), strict=True))


class Layer:
    """A layer, as far as a recorder asks."""

    delayed = None


@ON_GPU
@pytest.mark.parametrize("recipe", (ROWWISE_WITH_GW_HP, BLOCKWISE), ids=lambda recipe: recipe.name)
def test_records(recipe, kernels) -> None:
    """The records of a layer's step, under its own casts and others; the weight is known by its codes alone."""
    drawn = {
        name: draw(shape, torch.bfloat16, SPECIALS[3:])
        for name, shape in (("input", (40, 64)), ("weight", (48, 64)), ("grad_output", (40, 48)))
    }

    def operand(gemm: str, side: int) -> Operand:
        cast = getattr(recipe.gemms[gemm], "ab"[side])
        x = drawn[OPERANDS[gemm][side]]
        x = x.t().contiguous() if TRANSPOSED[gemm][side] else x
        if cast.format is None:
            return Operand(x, None)
        inv_scale, scale = f8.scale_from_amax(f8.amax(x, cast.granularity), cast.format, recipe.scale_rule)
        return Operand(f8.quantize(x, inv_scale, cast.format, cast.granularity), scale)

    gemms = {gemm: (operand(gemm, 0), operand(gemm, 1)) for gemm in recipe.gemms}

    def records(device: str) -> list[tuple[dict[str, Any], dict[str, float]]]:
        names = (*VALUES, *CASTS, *OPERAND_STATISTICS)
        config = InspectConfig(statistics=names, what_if=("tensorwise",))
        layers: Any = {"0": Layer()}
        recorder = Recorder(config, layers, 1, 0, lambda: None)
        for name, x in drawn.items():
            if name == "weight":
                continue
            recorder.tensor(TensorSeen("0", name, x.to(device), recipe))
        for gemm, pair in gemms.items():
            a, b = (Operand(x.codes.to(device), None if x.scale is None else x.scale.to(device)) for x in pair)
            product = drawn["grad_output"].to(device)
            recorder.gemm(GemmSeen("0", gemm, a, b, product, recipe.gemms[gemm], "hardware", 1, "recorded", recipe))
        return read(recorder.pending)

    expected = records("cpu")
    assert len(expected) == 9 + 4  # of the weight's two operands there is no other recipe's
    for (record, statistics), (wanted_record, wanted) in zip(kernels(records, DEVICE), expected, strict=True):
        assert record == wanted_record
        assert_same(statistics, wanted)


@ON_GPU
def test_nothing_is_known_of_an_empty_matrix(kernels) -> None:
    def check() -> None:
        x = torch.empty(0, 16, dtype=torch.bfloat16, device=DEVICE)
        operand = Operand(x.to(torch.float8_e4m3fn), torch.ones(1, 1, device=DEVICE))
        cast = TENSORWISE.output.a
        assert not Matrix(x).values(VALUES) and not Matrix(x).cast(cast, False, ScaleRule(), CASTS, None)
        assert not operand_statistics(operand, cast, OPERAND_STATISTICS)

    kernels(check)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="only a GPU can tell")
def test_more_elements_than_an_int32_counts() -> None:
    x = torch.ones(70000, 32768, dtype=torch.bfloat16, device="cuda")
    x[-1, -3:] = torch.tensor([3.0, -1e-9, math.nan])
    x[-2, 0] = 0
    for matrix in (Matrix(x), Matrix(x.t())):
        values = numbers(matrix.values(("amax", "nan", "zero", "l1_norm")))
        assert values["nan"] == values["zero"] == 1 and math.isnan(values["amax"])
    x[-1, -1] = 1
    cast = Cast(format=E4M3FN, granularity=Granularity.TENSORWISE)
    for transposed in (False, True):
        assert numbers(Matrix(x).cast(cast, transposed, ScaleRule(), CASTS, None))["underflow"] == 1 / x.numel()

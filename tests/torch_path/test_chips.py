"""`chip=` and `Recipe.chip`: torch gives the bits of another chip's profile, in verbs and in layers."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import ADA, CHIPS, E4M3FNUZ, TENSORWISE, Cast, ChipName, Gemm, Recipe, SpecError, UnsupportedError
from f8emu.split_k import ask
from tests.torch_path.bits import to_numpy
from tests.torch_path.layers import draw


@pytest.fixture(autouse=True)
def not_planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other chip has a plan of splits, which is said once."""
    monkeypatch.setattr(ask, "_WARNED", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="f8emu.torch: there is no split-K plan for Ada")
        yield


pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def test_scaled_mm_of_another_chip() -> None:
    a, b = (draw(rows, 160, seed=rows).to(torch.float8_e4m3fn) for rows in (16, 32))
    scale = torch.tensor(0.75)
    products = {}
    for chip in ("Hopper", "Ada"):
        for fast in (False, True):
            options: dict[str, Any] = {"out_dtype": torch.float32, "use_fast_accum": fast}
            products[chip, fast] = bits(to_numpy(f8.scaled_mm(a, b.t(), scale, scale, **options, chip=chip)))
            options["out_dtype"] = "float32"
            one = np.full((1, 1), 0.75, np.float32)
            expected = reference.scaled_mm(to_numpy(a), to_numpy(b).T, one, one, **options, chip=CHIPS[chip])
            assert np.array_equal(products[chip, fast], bits(expected))
    assert not np.array_equal(products["Hopper", True], products["Ada", True])
    x, y = draw(16, 96, seed=1, dtype=torch.bfloat16), draw(32, 96, seed=2, dtype=torch.bfloat16)
    of_ada = bits(to_numpy(f8.mm(x, y.t(), out_dtype=torch.float32, chip=ADA)))
    assert np.array_equal(of_ada, bits(reference.mm(to_numpy(x), to_numpy(y).T, out_dtype="float32", chip=ADA)))
    assert not np.array_equal(of_ada, bits(to_numpy(f8.mm(x, y.t(), out_dtype=torch.float32))))


def test_a_layer_follows_the_chip_of_its_recipe() -> None:
    recipe = replace(TENSORWISE, name="ada", chip="Ada")
    x, weight, grad = draw(16, 160, seed=1), draw(32, 160, seed=2), draw(16, 32, seed=3)
    expected = reference.linear(recipe, *map(to_numpy, (x, weight, grad)))
    of_hopper = reference.linear(TENSORWISE, *map(to_numpy, (x, weight, grad)))
    assert expected.grad_weight is not None and expected.grad_input is not None
    for compiled in (False, True):
        layer = f8.Float8Linear(160, 32, False, recipe=recipe)
        layer.weight = torch.nn.Parameter(weight.clone())
        source = x.clone().requires_grad_()
        output = (torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer)(source)
        output.backward(grad)
        assert source.grad is not None and layer.weight.grad is not None
        assert np.array_equal(bits(to_numpy(output.detach())), bits(expected.output.product))
        assert np.array_equal(bits(to_numpy(source.grad)), bits(expected.grad_input.product))
        assert np.array_equal(bits(to_numpy(layer.weight.grad)), bits(expected.grad_weight.product))
    assert not np.array_equal(bits(expected.output.product), bits(of_hopper.output.product))


def test_what_is_said_and_refused() -> None:
    assert f8.engine_of("cpu", chip="CDNA3").startswith("CDNA3 emulated by f8emu.native on ")
    assert f8.engine_of("cpu").startswith("emulated by f8emu.native on ")
    a = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    with pytest.warns(UserWarning, match=r"no split-K plan for Blackwell tcgen05 \(instructions agree with a"):
        f8.scaled_mm(a, a.t(), one, one, out_dtype=torch.float32, chip="Blackwell tcgen05")
    with pytest.raises(SpecError, match="scaled_mm: chip must be one of 'Hopper', 'H100', 'Ada'"):
        f8.scaled_mm(a, a.t(), one, one, out_dtype=torch.float32, chip="Volta")  # pyright: ignore[reportArgumentType]
    blocks = {"granularity_a": "blockwise_1x128", "granularity_b": "blockwise_1x128"}
    with pytest.raises(UnsupportedError, match="scaled_mm: Ada takes scales tensorwise x tensorwise"):
        f8.scaled_mm(a, a.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.float32, chip="Ada", **blocks)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        UnsupportedError, match=r"engine='hardware' needs tensors on a CUDA device .* 8.9, Ada; got cpu"
    ):
        f8.mm(a.bfloat16(), a.bfloat16(), engine="hardware", chip="Ada")


@pytest.mark.parametrize(("chip", "evidence"), [("Ada", "instructions recorded"), ("RTX 5090", "instructions agree")])
def test_a_plan_says_what_the_chip_stands_on(chip: ChipName, evidence: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    plan = f8.plan_conversion(model, config=replace(TENSORWISE, name="mine", chip=chip))
    assert f"1 converted; chip: {CHIPS[plan.recipe.chip].with_evidence}" in plan.summary and evidence in str(plan)
    assert "chip" not in f8.plan_conversion(model, config=TENSORWISE).summary


def test_a_layer_with_formats_of_another_chip_is_refused() -> None:
    cast = Cast(format=E4M3FNUZ)
    gemm = Gemm(a=cast, b=cast)
    recipe = Recipe(name="fnuz", output=gemm, grad_input=gemm, grad_weight=gemm, chip="CDNA3")
    message = r"Float8Linear: layers cast to .*; recipe fnuz \(.*\) on CDNA3 to float8_e4m3fnuz; train with"
    with pytest.raises(UnsupportedError, match=message):
        f8.Float8Linear(32, 32, recipe=recipe)

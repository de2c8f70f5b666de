"""What users write, on which pyright has nothing to say. `make types` checks it; `test_names` runs it."""

import torch
from torch import nn

import f8emu.jax as f8jax
import f8emu.numpy as f8np
import f8emu.torch as f8
from f8emu.dialects import DIALECTS, DialectName, quantize, zero_block_scale
from f8emu.spec import CHIPS, E4M3FN, HOPPER, RECIPES, Granularity, RecipeName, chip_by_name, recipe_by_name
from f8emu.testing import check_gemm


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 16)


def of_text(recipe: str, chip: str) -> None:
    """Text that a program computes goes through the functions that check it."""
    f8.convert_to_float8_training(Model(), config=recipe_by_name(recipe))
    f8np.mm([[1.0]], [[1.0]], chip=chip_by_name("mm", chip))


def of_names(recipe: RecipeName = "rowwise", dialect: DialectName = "vllm_token") -> None:
    model = f8.convert_to_float8_training(Model(), config=recipe, engine="emulated", cast_weight_from="bfloat16")
    model.proj.weight.sum()  # a Model, as it was
    size: int = f8.convert_to_float8_training(nn.Linear(32, 16), config=RECIPES[recipe]).in_features
    plain: nn.Linear = f8.dequantize_float8_training(f8.Float8Linear(size, 16))
    with f8.inspect(model, {"every": 10, "statistics": ["amax", "sqnr", "error"], "tensors": ("input", "product")}):
        f8.scale_from_amax(plain.weight.amax(), torch.float8_e5m2)
    codes = f8np.cast([[1.0]], "float8_e4m3fn")
    f8np.dequantize(codes, 1.0, Granularity.TENSORWISE, out_dtype=codes.dtype.type if codes.size == 0 else "bfloat16")
    f8np.linear(recipe, [[1.0]], [[1.0]], split_k={"output": 1}, chip=HOPPER)
    f8jax.dot_general("rowwise", engine="auto", sharded_k="gather")
    quantize(torch.ones(1, 1), dialect)
    f8.cast(torch.ones(2), E4M3FN)


def of_tables() -> None:
    for recipe in RECIPES:
        f8.convert_to_float8_training(nn.Linear(128, 128), config=recipe)
    for recipe, settings in RECIPES.items():
        f8np.linear(recipe if settings.delayed is None else "rowwise", [[1.0]], [[1.0]])
    for chip in CHIPS:
        f8np.mm([[1.0]], [[1.0]], chip=chip, split_k=1)
    for dialect, rules in DIALECTS.items():
        if rules.scale is not None:
            zero_block_scale(dialect)


def of_a_kernel(kernel: object) -> None:
    assert callable(kernel)
    check_gemm(kernel, arrays="numpy", stages="golden")
    check_gemm(kernel, stages=["golden", "gemms"])

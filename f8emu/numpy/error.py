"""The error of a linear layer's GEMMs in its parts: from the casts, the accumulator, and the output's rounding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.numpy.cast import chip_of, decode, typed
from f8emu.numpy.scaled_mm import linear, planned_slices
from f8emu.spec.chip import Chip
from f8emu.spec.gemm import OPERANDS, TRANSPOSED, Cast, OperandTrace, error_parts
from f8emu.spec.names import ChipName, GemmName, RecipeName
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.spec.scaling import DelayedState
from f8ref.numpy.scale import expand_scale


def linear_error(
    recipe: Recipe | RecipeName,
    input: ArrayLike,
    weight: ArrayLike,
    grad_output: ArrayLike | None = None,
    *,
    delayed_state: Mapping[str, DelayedState] | None = None,
    split_k: Mapping[GemmName, int] | None = None,
    chip: Chip | ChipName | None = None,
) -> dict[str, dict[str, float]]:
    """The relative error of each GEMM of `linear`, split into its causes: GEMM name -> part -> norm.

    `error_quantization` comes from the casts, `error_accumulation` from the tensor core up to float32, `error_rounding`
    from the rounding of the output; `error_total` is the three together. Each is the norm of that difference, divided
    by the norm of the product of `input`, `weight` and `grad_output` as they are. These are the parts that
    `f8emu.torch.inspect` records with the statistic "error", of all outputs instead of a sample.

    Shapes:
        as for `linear`; without grad_output the result has "output" alone.

    Exactness: operands and products are those of `linear`. Differences and norms are float64.

    Raises:
        OperandError, SpecError: as for `linear`.
    """
    # 1. The layer, and the same casts with float32 products, split along K alike.
    plan = recipe if isinstance(recipe, Recipe) else recipe_by_name(recipe)
    arrays = {"input": input, "weight": weight, "grad_output": grad_output}
    tensors = {name: typed("linear_error", name, x) for name, x in arrays.items() if x is not None}
    on = chip_of("linear_error", plan.chip if chip is None else chip)
    slices = planned_slices(plan, tensors, split_k, on)
    wide = {**tensors, "input": tensors["input"].astype(np.float32)}  # products have the dtype of input
    layers = [linear(plan, **x, delayed_state=delayed_state, split_k=slices, chip=on) for x in (tensors, wide)]
    # 2. The parts of each GEMM.
    errors: dict[str, dict[str, float]] = {}
    for name, gemm in plan.gemms.items():
        traced, accumulated = (getattr(layer, name) for layer in layers)
        if traced is not None:
            a, b = (
                (tensors[t].T if is_transposed else tensors[t]).astype(np.float64)
                for t, is_transposed in zip(OPERANDS[name], TRANSPOSED[name], strict=True)
            )
            exact, dequantized = a @ b.T, _values(traced.a, gemm.a) @ _values(traced.b, gemm.b).T
            products = accumulated.product.astype(np.float64), traced.product.astype(np.float64)
            parts, size = error_parts(exact, dequantized, *products), np.linalg.norm(exact)
            errors[name] = {part: float(np.linalg.norm(difference) / size) for part, difference in parts.items()}
    return errors


def _values(operand: OperandTrace, cast: Cast) -> NDArray[np.float64]:
    """The values that the codes stand for: a product of float8 and float32 has 28 bits, which float64 holds."""
    values = decode(operand.codes).astype(np.float64)
    if operand.scale is None:
        return values
    scale = operand.scale.astype(np.float32)  # E8M0 scales too
    return values * expand_scale(scale, cast.granularity, values.shape, "linear_error").astype(np.float64)

"""The verb `linear` of the engine: a layer made of its casts and GEMMs.

It shares no code with that of `f8ref.numpy`, whose judge it is.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.gemm import Verbs
from f8emu.spec import Cast, DelayedState, Granularity, LinearTrace, OperandTrace, Recipe, chip_by_name
from f8emu.spec.trace import GemmTrace


def linear(
    verbs: Verbs,
    recipe: Recipe,
    input: np.ndarray,
    weight: np.ndarray,
    grad_output: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    delayed_state: Mapping[str, DelayedState] | None = None,
    split_k: Mapping[str, int] | None = None,
) -> LinearTrace:
    """`f8ref.numpy.linear`, of `verbs`."""
    options = {"out_dtype": input.dtype.name, "chip": chip_by_name("linear", recipe.chip)}

    def operand(x: np.ndarray, cast: Cast, tensor: str) -> OperandTrace:
        if cast.format is None:
            with np.errstate(over="ignore", invalid="ignore"):
                return OperandTrace(None, None, None, x.astype(np.float32).astype(ml_dtypes.bfloat16))
        amax = verbs["amax"](x, cast.granularity)
        delayed = recipe.delayed_scaling_of(tensor)
        if delayed is not None and delayed_state is not None and delayed_state[tensor].initialized:
            inv_scale = np.float32(delayed_state[tensor].inv_scale).reshape(1, 1)
            with np.errstate(divide="ignore"):
                scale = np.float32(1) / inv_scale
        else:
            margin = 0 if delayed is None else delayed.margin
            inv_scale, scale = verbs["scale_from_amax"](amax, cast.format, recipe.scale_rule, margin=margin)
        return OperandTrace(amax, inv_scale, scale, verbs["quantize"](x, inv_scale, cast.format, cast.granularity))

    def product(name: str, a: OperandTrace, b: OperandTrace) -> GemmTrace:
        gemm, slices = recipe.gemms[name], (split_k or {}).get(name, 1)
        if gemm.a.format is None:
            return GemmTrace(a, b, verbs["mm"](a.codes, b.codes.T, split_k=slices, **options))
        kinds = gemm.scaled_gemm_granularities
        scales = [
            np.repeat(one.scale, len(one.codes), axis=0)
            if kind is Granularity.ROWWISE and one.scale.size == 1
            else one.scale
            for one, kind in zip((a, b), kinds, strict=True)
        ]
        of_scales: dict[str, Any] = {"granularity_a": kinds[0], "granularity_b": kinds[1]}
        found = verbs["scaled_mm"](
            a.codes, b.codes.T, scales[0], scales[1].T, **of_scales, **options,
            use_fast_accum=gemm.use_fast_accum, split_k=slices,
        )  # fmt: skip
        return GemmTrace(a, b, found)

    of_output, of_input, of_weight = recipe.output, recipe.grad_input, recipe.grad_weight
    output = product("output", operand(input, of_output.a, "input"), operand(weight, of_output.b, "weight"))
    result = output.product
    if bias is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            addend = bias.astype(result.dtype).astype(np.float32)
            result = (result.astype(np.float32) + addend).astype(result.dtype)
    grads = operand(grad_output, of_input.a, "grad_output"), operand(grad_output.T, of_weight.a, "grad_output")
    grad_input = product("grad_input", grads[0], operand(weight.T, of_input.b, "weight"))
    grad_weight = product("grad_weight", grads[1], operand(input.T, of_weight.b, "input"))
    return LinearTrace(output, grad_input, grad_weight, result)

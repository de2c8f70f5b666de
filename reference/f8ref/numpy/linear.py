"""A linear layer under a recipe, forward and backward, with everything that happens on the way.

- `output` [M, N] = `input` [M, K] @ (`weight` [N, K])^T
- `grad_input` [M, K] = `grad_output` [M, N] @ (`weight`^T [K, N])^T
- `grad_weight` [N, K] = `grad_output`^T [N, M] @ (`input`^T [K, M])^T
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import (
    BFLOAT16,
    CHIPS,
    HIGH_PRECISION,
    OPERANDS,
    TENSORS,
    TRANSPOSED,
    Cast,
    CastFrom,
    Chip,
    DelayedState,
    Format,
    Gemm,
    GemmTrace,
    Granularity,
    LinearTrace,
    OperandError,
    OperandTrace,
    Recipe,
    Scales,
)
from f8ref.numpy import checks
from f8ref.numpy.cast import convert, quantize
from f8ref.numpy.codec import Array, as_float32, canonical_nan, typed_array
from f8ref.numpy.scale import amax, scale_from_amax
from f8ref.numpy.scaled_mm import product

DelayedStates = Mapping[str, DelayedState]


class Verbs(NamedTuple):
    """The functions that compute a layer, with the arguments and the bits of those of `f8ref.numpy`."""

    amax: Callable[..., NDArray[np.float32]]
    scale_from_amax: Callable[..., Scales]
    quantize: Callable[..., Array]
    product: Callable[[checks.GemmArrays], Array]


def linear(
    recipe: Recipe,
    input: ArrayLike,
    weight: ArrayLike,
    grad_output: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    delayed_state: DelayedStates | None = None,
    split_k: Mapping[str, int] | None = None,
    chip: Chip | None = None,
) -> LinearTrace:
    """Every amax, scale, code and product of a linear layer; the backward too if `grad_output` is given.

    All products have the dtype of `input`. A bias is rounded to that dtype and added to the rounded output.
    `split_k` gives the slices of K of a GEMM by its name [CHAIN-3]; other GEMMs are not split.
    `chip` is a profile in place of the recipe's.
    Delayed scales come from `delayed_state` (tensor name -> state), which is not changed: the caller must call
    `update_delayed_state` once a step, with an amax of the trace. Until a state is initialised, a cast uses its own
    amax.

    Shapes: `input` [M, K], `weight` [N, K], `grad_output` [M, N], `bias` [N]; operands in the trace are
    [rows, summed dimension].
    Exactness: exact; the composition of `amax`, `scale_from_amax`, `quantize`, `scaled_mm` and `mm`, nothing else.

    Raises:
        OperandError: wrong dtypes or shapes; `delayed_state` missing, or given to a recipe without delayed scaling.
    """
    options: dict[str, Any] = {
        "delayed_state": delayed_state,
        "split_k": split_k or {},
        "chip": chip or CHIPS[recipe.chip],
    }
    verbs = Verbs(amax, scale_from_amax, quantize, product)
    return traced(recipe, input, weight, grad_output, bias, **options, verbs=verbs)


def traced(
    recipe: Recipe,
    input: ArrayLike,
    weight: ArrayLike,
    grad_output: ArrayLike | None,
    bias: ArrayLike | None,
    *,
    delayed_state: DelayedStates | None,
    split_k: Mapping[str, int],
    chip: Chip,
    verbs: Verbs,
) -> LinearTrace:
    """`linear` that `verbs` compute."""
    # 1. The tensors and the states of their scales.
    x, out_format = typed_array(input, HIGH_PRECISION, "linear: input")
    tensors = {"input": x, "weight": typed_array(weight, HIGH_PRECISION, "linear: weight")[0]}
    if grad_output is not None:
        tensors["grad_output"] = typed_array(grad_output, HIGH_PRECISION, "linear: grad_output")[0]
    _check_shapes(tensors)
    if recipe.cast_weight_from is CastFrom.BFLOAT16:
        tensors["weight"] = convert(as_float32(tensors["weight"], "linear: weight"), BFLOAT16)
    states = _delayed_states(recipe, delayed_state, tensors)

    # 2. A GEMM: each operand is cast along the dimension that this GEMM sums over, then multiplied.
    def gemm(name: str) -> GemmTrace:
        spec = recipe.gemms[name]
        a, b = (
            _operand(tensors[t].T if is_transposed else tensors[t], t, cast, recipe, states.get(t), verbs)
            for t, cast, is_transposed in zip(OPERANDS[name], (spec.a, spec.b), TRANSPOSED[name], strict=True)
        )
        return GemmTrace(a, b, _product(a, b, spec, out_format, split_k.get(name, 1), chip, verbs))

    # 3. The forward, the backward if there is a grad_output, and the bias.
    output = gemm("output")
    grad_input = grad_weight = None
    if grad_output is not None:
        grad_input, grad_weight = gemm("grad_input"), gemm("grad_weight")
    return LinearTrace(output, grad_input, grad_weight, _add_bias(output.product, bias, out_format))


def _operand(
    x: Array, tensor: str, cast: Cast, recipe: Recipe, state: DelayedState | None, verbs: Verbs
) -> OperandTrace:
    """One operand, made of `tensor` and seen as [rows, summed dimension], through its cast."""
    if cast.format is None:
        return OperandTrace(None, None, None, convert(as_float32(x, "linear"), BFLOAT16))
    # The amax is in the trace under delayed scaling too: the next steps need it.
    own_amax = verbs.amax(x, cast.granularity)
    delayed = recipe.delayed_scaling_of(tensor)
    if delayed is not None and state is not None and state.initialized:
        scales = _scales_of_state(state)
    else:
        margin = 0 if delayed is None else delayed.margin
        scales = verbs.scale_from_amax(own_amax, cast.format, recipe.rule_of(cast), margin=margin)
    codes = verbs.quantize(x, scales.inv_scale, cast.format, cast.granularity)
    return OperandTrace(own_amax, scales.inv_scale, scales.scale, codes)


def _scales_of_state(state: DelayedState) -> Scales:
    """The scales that earlier steps left, in the shape of a tensorwise scale."""
    inv_scale = np.asarray(state.inv_scale, np.float32).reshape(1, 1)
    with np.errstate(divide="ignore"):
        return Scales(inv_scale, canonical_nan(np.float32(1) / inv_scale))


def _product(
    a: OperandTrace, b: OperandTrace, gemm: Gemm, out_format: Format, split_k: int, chip: Chip, verbs: Verbs
) -> Array:
    """`a @ b^T` on the matrix unit that the recipe chose."""
    if gemm.is_high_precision:
        options = {"out_dtype": out_format, "split_k": split_k, "chip": chip}
        return verbs.product(checks.checked_mm(a.codes, b.codes.T, **options))
    granularity_a, granularity_b = gemm.scaled_gemm_granularities
    scale_a, scale_b = (
        # Beside rowwise, the one scale of a tensorwise operand is that of every row.
        np.broadcast_to(trace.scale, (trace.codes.shape[0], 1)) if granularity is Granularity.ROWWISE else trace.scale
        for trace, granularity in ((a, granularity_a), (b, granularity_b))
    )
    checked = checks.checked_scaled_mm(
        a.codes,
        b.codes.T,
        scale_a,
        scale_b.T,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        out_dtype=out_format,
        use_fast_accum=gemm.use_fast_accum,
        split_k=split_k,
        chip=chip,
    )
    return verbs.product(checked)


def _add_bias(product: Array, bias: ArrayLike | None, out_format: Format) -> Array:
    """`product + bias` in the dtype of the product: the bias is rounded to it, and the float32 sum again."""
    if bias is None:
        return product
    addend: NDArray[np.float32] = as_float32(bias, "linear: bias")
    if addend.shape != product.shape[1:]:
        raise OperandError(
            f"linear: bias must have shape {product.shape[1:]}, one value an output; got {addend.shape}; reshape it"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        # Two roundings, as torchao has them: the bias, then the sum.
        rounded = as_float32(convert(addend, out_format), "linear")
        return convert(as_float32(product, "linear") + rounded, out_format)


def _check_shapes(tensors: Mapping[str, Array]) -> None:
    input, weight, grad_output = (tensors.get(name) for name in TENSORS)
    assert input is not None and weight is not None
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1]:
        raise OperandError(
            f"linear: input must be [M, K] and weight [N, K]; got {input.shape} and {weight.shape}; "
            "flatten leading dimensions"
        )
    expected = (input.shape[0], weight.shape[0])
    if grad_output is not None and grad_output.shape != expected:
        raise OperandError(
            f"linear: grad_output must have the output's shape {expected}; got {grad_output.shape}; reshape it"
        )


def _delayed_states(recipe: Recipe, delayed_state: DelayedStates | None, tensors: Mapping[str, Array]) -> DelayedStates:
    """The state of every tensor that is cast with a delayed scale; empty under dynamic scaling."""
    if recipe.delayed is None:
        if delayed_state is not None:
            raise OperandError(
                f"linear: delayed_state must be None under recipe {recipe.name!r}, whose scales are dynamic; got one; "
                "leave it out"
            )
        return {}
    # A tensor that no GEMM casts to float8 needs no state.
    needed = {t for t in tensors if any(not cast.is_high_precision for _, _, cast in recipe.casts(t))}
    needed &= set(recipe.delayed.tensors)
    missing = sorted(needed - set(delayed_state or {}))
    if missing:
        raise OperandError(
            f"linear: recipe {recipe.name!r} needs delayed_state for {', '.join(sorted(needed))}; "
            f"got none for {', '.join(missing)}; start from initial_delayed_state(recipe.delayed)"
        )
    return delayed_state or {}

"""A linear layer under a recipe, forward and backward, with everything that it computes on the way.

Two pieces, put together three times: an operand is quantized under a `Cast`, and two operands are multiplied under a
`Gemm`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import OPERANDS, Cast, Gemm, Recipe
from f8emu.spec.scaling import DelayedScaling, ScaleRule
from f8emu.spec.trace import DelayedState, GemmTrace, LinearTrace, OperandTrace, Scales
from f8emu.torch.bias import add_bias
from f8emu.torch.cast import quantize
from f8emu.torch.dtypes import require_values
from f8emu.torch.gemm.scaled_mm import mm, scaled_mm
from f8emu.torch.scale import amax, reciprocal, scale_from_amax, scale_of_rows

_IS_TRANSPOSED = {
    ("output", "input"): False,
    ("output", "weight"): False,
    ("grad_input", "grad_output"): False,
    ("grad_input", "weight"): True,
    ("grad_weight", "grad_output"): True,
    ("grad_weight", "input"): True,
}
"""(GEMM, tensor): whether the operand [rows, summed dimension] is the transpose of the tensor."""


def quantize_operand(
    x: Tensor,
    cast: Cast,
    rule: ScaleRule,
    *,
    delayed: DelayedScaling | None = None,
    state: DelayedState | None = None,
) -> OperandTrace:
    """One operand under its cast; under `delayed` scaling with the inv_scale of `state`, once that is initialized.

    Shapes:
        x [rows, summed dimension], any layout -> row-major codes of that shape.

    Exactness: bit-exact to the operand traces of `f8ref.numpy.linear`.

    Raises:
        OperandError: wrong dtype or rank.
    """
    require_values("quantize_operand", x, ndim=2)
    x = x.detach().contiguous()
    if cast.format is None:
        return OperandTrace(amax=None, inv_scale=None, scale=None, codes=x.to(torch.bfloat16))
    largest = amax(x, cast.granularity)
    scales = scale_from_amax(largest, cast.format, rule, margin=0 if delayed is None else delayed.margin)
    if state is not None:
        scales = _delayed_scales(scales, state)
    codes = quantize(x, scales.inv_scale, cast.format, cast.granularity)
    return OperandTrace(amax=largest, inv_scale=scales.inv_scale, scale=scales.scale, codes=codes)


def gemm(a: OperandTrace, b: OperandTrace, spec: Gemm, *, out_dtype: torch.dtype, engine: str = "auto") -> Tensor:
    """`a @ b^T` of two operands under their GEMM.

    Shapes:
        a.codes [M, K], b.codes [N, K], row-major -> [M, N] of out_dtype.

    Exactness: that of `scaled_mm`, or of `mm` in high precision.

    Raises:
        OperandError: sizes that the hardware does not take.
        UnsupportedError: what the engine does not do.
    """
    if spec.is_high_precision:
        return mm(a.codes, b.codes.t(), out_dtype=out_dtype, engine=engine)
    granularity_a, granularity_b = spec.scaled_gemm_granularities
    return scaled_mm(
        a.codes,
        b.codes.t(),
        scale_of_rows(a.scale, a.codes, granularity_a),
        scale_of_rows(b.scale, b.codes, granularity_b).t(),
        out_dtype=out_dtype,
        use_fast_accum=spec.use_fast_accum,
        engine=engine,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
    )


def linear(
    recipe: Recipe,
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    delayed_state: Mapping[str, DelayedState] | None = None,
    engine: str = "auto",
) -> LinearTrace:
    """The three GEMMs of a linear layer under `recipe`; the backward ones where `grad_output` is given.

    Every cast reads the tensor's own values, whatever its dtype beside the others'. The three products have the dtype
    of `input`; a bias is rounded to it and added to the rounded output, in that dtype.

    Shapes:
        input [M, K], weight [N, K], grad_output [M, N], bias [N], each float32, bfloat16 or float16. The dimensions
        that a GEMM sums over, and its N, are multiples of 16.

    Exactness: bit-exact to `f8ref.numpy.linear`: every amax, scale, code, product and result; on the hardware as far
    as it is Hopper's.

    Args:
        recipe: what to do.
        input: activations.
        weight: weight, as `nn.Linear` keeps it.
        grad_output: gradient of the result.
        bias: bias.
        delayed_state: tensor name -> state; given if and only if the recipe is delayed. It is read, not updated.
        engine: as for `scaled_mm`.

    Raises:
        OperandError: wrong dtype, shape or size, or a delayed state that is missing or left over.
        UnsupportedError: what the engine does not do.
        MissingExtraError: the emulation without jax.
    """
    tensors = _checked(recipe, input, weight, grad_output, bias, delayed_state)
    traces: dict[str, GemmTrace | None] = {}
    for name, spec in recipe.gemms.items():
        sources = OPERANDS[name]
        if any(source not in tensors for source in sources):
            traces[name] = None
            continue
        operands = []
        for source, cast in zip(sources, (spec.a, spec.b), strict=True):
            x = tensors[source].t() if _IS_TRANSPOSED[name, source] else tensors[source]
            state = None if delayed_state is None else delayed_state[source]
            operands.append(quantize_operand(x, cast, recipe.scale_rule, delayed=recipe.delayed, state=state))
        a, b = operands
        traces[name] = GemmTrace(a=a, b=b, product=gemm(a, b, spec, out_dtype=input.dtype, engine=engine))
    output = traces["output"]
    assert output is not None, "input and weight are always there"
    result = output.product
    if bias is not None:
        result = add_bias(result, bias.detach())
    return LinearTrace(output=output, grad_input=traces["grad_input"], grad_weight=traces["grad_weight"], result=result)


def _checked(
    recipe: Recipe,
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor | None,
    bias: Tensor | None,
    delayed_state: Mapping[str, DelayedState] | None,
) -> dict[str, Tensor]:
    tensors = {"input": input, "weight": weight}
    if grad_output is not None:
        tensors["grad_output"] = grad_output
    for name, x in tensors.items():
        require_values("linear", x, name=name, ndim=2)
    (m, k), n = input.shape, weight.shape[0]
    shapes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    for name, x in tensors.items():
        if tuple(x.shape) != shapes[name]:
            raise OperandError(
                f"linear: input [M, K], weight [N, K] and grad_output [M, N] do not fit; {name} must be "
                f"{list(shapes[name])}; got {list(x.shape)}"
            )
    if bias is not None:
        require_values("linear", bias, name="bias")
        if tuple(bias.shape) != (n,):
            raise OperandError(f"linear: bias must be [N] = [{n}]; got {list(bias.shape)}")
    wanted = set() if recipe.delayed is None else set(tensors)
    given = set(delayed_state or {})
    if not wanted <= given or (recipe.delayed is None and delayed_state is not None):
        raise OperandError(
            f"linear: recipe {recipe.name!r} needs the delayed state of {sorted(wanted) or 'no tensor'}; got that of "
            f"{sorted(given) or 'none'}; start each with initial_delayed_state(recipe.delayed)"
        )
    return tensors


def _delayed_scales(own: Scales, state: DelayedState) -> Scales:
    inv_scale = torch.where(state.initialized, state.inv_scale, own.inv_scale.reshape(())).reshape(1, 1)
    return Scales(inv_scale=inv_scale, scale=reciprocal(inv_scale))

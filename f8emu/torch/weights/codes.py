"""The float8 codes of a weight: which recipes have weights of codes alone, and the casts of its two operands.

`output` multiplies the weight, `grad_input` its transpose. The codes of both are rows of the weight: so the codes of a
rank's rows are rows of the whole, and `transpose_codes` makes the operand of `grad_input` where it is multiplied. Under
one scale both have the same codes.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Granularity
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.columns import cast_columns
from f8emu.torch.layer.operands import Delayed, cast_delayed


class WeightScales(NamedTuple):
    """The scales of a whole weight, float32: each [1, 1], or a vector [N, 1] for its rows or [K, 1] for its columns."""

    row_amax: Tensor
    row_inv_scale: Tensor
    row_scale: Tensor
    """For the operand of `output`."""
    col_inv_scale: Tensor
    col_scale: Tensor
    """For the operand of `grad_input`."""


class WeightCodes(NamedTuple):
    """A weight [N, K] as float8."""

    rows: Tensor
    """[N, K], the operand of `output`."""
    row_scale: Tensor
    """[1, 1] or [N, 1]."""
    col_scale: Tensor
    """[1, 1] or [K, 1]."""
    cols: Tensor | None = None
    """[N, K], the operand of `grad_input` before its transpose; None where it is `rows`."""
    master_amax: Tensor | None = None
    """[1, 1], of a weight that rests as float8 under delayed scaling: each call of the layer records it."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "WeightCodes":
        """`function` of each tensor."""
        return WeightCodes(*[x if x is None else function(x) for x in self])  # pyright: ignore[reportArgumentType]


def require_codes(call: str, recipe: Recipe, option: str) -> None:
    """Raise UnsupportedError if float8 codes cannot stand for a weight under this recipe, which `option` asks for."""
    casts = (recipe.output.b, recipe.grad_input.b)
    formats = {None if cast.format is None else cast.format.name for cast in casts}
    if any(cast.granularity.is_blockwise for cast in casts if cast.format is not None):
        reason = "block scales are found where a weight is cast for each GEMM, and may reach over the rows of two ranks"
    elif None in formats:
        reason = "it multiplies the weight in high precision too"
    elif len(formats) > 1:
        reason = "it casts the weight to two formats"
    else:
        return
    raise UnsupportedError(
        f"{call}: with {option}=True float8 codes stand for a weight; under recipe {recipe.label!r} they cannot: "
        f"{reason}; use tensorwise, rowwise, rowwise_with_gw_hp or delayed, or leave the argument out"
    )


def format_of(recipe: Recipe) -> str:
    """The float8 format of the weight."""
    format = recipe.output.b.format
    assert format is not None, "require_codes"
    return format.name


def has_one_scale(recipe: Recipe) -> bool:
    """Whether both operands of a weight have the same codes."""
    return {recipe.output.b.granularity, recipe.grad_input.b.granularity} == {Granularity.TENSORWISE}


def cast_rows(x: Tensor, recipe: Recipe, scales: WeightScales, own: slice = slice(None)) -> Tensor:
    """The codes of `x`, the rows `own` of a weight, for `output`."""
    fmt, rule = format_of(recipe), recipe.scale_rule
    if scales.row_amax.numel() == 1:
        return fused.cast_pair_given(x, fmt, scales.row_inv_scale, True, False)[0]
    return fused.cast_pair(x, fmt, scales.row_amax[own], None, rule.power_of_two, rule.amax_floor)[0]


def cast_cols(x: Tensor, recipe: Recipe, scales: WeightScales) -> Tensor:
    """The codes of `x`, some rows of a weight, for `grad_input`."""
    if scales.col_inv_scale.numel() == 1:
        return fused.cast_pair_given(x, format_of(recipe), scales.col_inv_scale, True, False)[0]
    return cast_columns(x, format_of(recipe), scales.col_inv_scale)


def cast_rows_delayed(x: Tensor, recipe: Recipe, delayed: Delayed) -> tuple[Tensor, Tensor]:
    """The codes of `x` for `output` under the state of delayed scaling, and their scale."""
    operand, _, _ = cast_delayed(x, recipe.output.b, None, delayed, recipe.scale_rule)
    assert operand is not None and operand.scale is not None, "it was requested"
    return operand.codes, operand.scale


def cast_weight(x: Tensor, recipe: Recipe, scales: WeightScales) -> WeightCodes:
    """The codes of a whole weight `x` [N, K]."""
    cols = None if has_one_scale(recipe) else cast_cols(x, recipe, scales)
    return WeightCodes(cast_rows(x, recipe, scales), scales.row_scale, scales.col_scale, cols)

"""Every fused cast and what it should give: the table of calls that all witnesses judge.

The witnesses are the verbs and the oracle (test_fused.py), a compiler (there), Triton's interpreter and a GPU
(test_kernels.py).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from f8emu.spec import E4M3FN, E5M2, Format, Granularity, ScaleRule
from f8emu.spec.scaling import Scales
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.delayed import UNSET, cast_pair_delayed
from f8emu.torch.library import Operator

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (E4M3FN, E5M2)
RULES = (ScaleRule(), ScaleRule(power_of_two=True), ScaleRule(amax_floor=1e-3))
SPECIALS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 1e-13]
AMAXES = ("reduce_tensor", "row_amax", "reduce_rows_and_cols", "reduce_tiles")
_ROWWISE, _VECTORS, _SQUARES = Granularity.ROWWISE, Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128

Calls = dict[str, tuple[Any, tuple[Any, ...]]]
"""A name -> an operator and the arguments of one call, the matrix first."""


def drawn(shape: tuple[int, ...], dtype: torch.dtype, *, special: bool = True) -> Tensor:
    """Each element of another magnitude, half the last row zero; `special` puts NaN and infinities among them."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 12, shape, generator=generator))
    if special:
        at = torch.randint(0, x.numel(), (len(SPECIALS),), generator=generator)
        x.view(-1)[at] = torch.tensor(SPECIALS)
    x = x.to(dtype)
    x[-1, : shape[1] // 2] = 0
    return x


def settings(rule: ScaleRule) -> tuple[bool, float]:
    """A rule as the operators take it."""
    return rule.power_of_two, rule.amax_floor


def results(outcome: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a call, one or several."""
    return (outcome,) if isinstance(outcome, Tensor) else tuple(outcome)


def amaxes(size: int | None) -> Tensor | None:
    """For so many rows: they fit some and make others saturate."""
    return None if size is None else torch.linspace(40, 1600, size).reshape(size, 1)


def calls(x: Tensor, fmt: Format = E4M3FN, rule: ScaleRule = RULES[1]) -> Calls:
    """Calls of all fused casts on a matrix."""
    (m, n), name, of_rule = x.shape, fmt.name, settings(rule)
    one = torch.full((1, 1), 0.3)
    codes = torch.randint(0, 256, x.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    table: Calls = {
        "amax": (fused.reduce_tensor, (x,)),
        "row amaxes": (fused.row_amax, (x,)),
        "row and column amaxes": (fused.reduce_rows_and_cols, (x,)),
        "amaxes of tiles": (fused.reduce_tiles, (x,)),
        "scales": (fused.scales, (amaxes(m), name, *of_rule, 1)),
        "rows": (fused.cast_rows, (x, name, *of_rule)),
        "columns": (fused.cast_columns, (x, name, torch.linspace(0.01, 9, n)[:, None])),
        "transposed": (fused.transpose_codes, (codes.view(getattr(torch, name)), x.detach())),
        "recomputable": (fused.recomputable_cast_pair, (x, name, amaxes(1), amaxes(n), *of_rule)),
        "recomputable, given": (fused.recomputable_cast_pair_given, (x, name, torch.full((1, 1), 0.3), True, True)),
    }
    for key, pair in _pairs(x.detach(), rule).items():
        table[f"pair by {key}"] = (fused.cast_pair, (x, name, *pair, *of_rule))
    for key, (value, *wanted) in {"both": (0.3, 1, 1), "rows": (9.0, 1, 0), "columns": (2.0**-9, 0, 1)}.items():
        sides = map(bool, wanted)
        table[f"given, {key}"] = (fused.cast_pair_given, (x, name, torch.full((1, 1), value), *sides))
        for square in (False, True):
            arguments = (x, name, square, *map(bool, wanted), *of_rule)
            table[f"{'squares' if square else 'vectors'}, {key}"] = (fused.cast_blocks, arguments)
    for key, state in {"set": one, "unset": torch.full((1, 1), UNSET)}.items():
        arguments = (x, name, state, True, True, torch.zeros(1, 1), *of_rule, 2)
        table[f"delayed, {key}"] = (cast_pair_delayed, arguments)
    return table


def _pairs(x: Tensor, rule: ScaleRule) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Amaxes of both sides: given ones, and the matrix's own as our kernels give them and as a compiler does."""
    m, n = x.shape
    sizes = {"ones": (1, 1), "vectors": (m, n), "a vector and one": (m, 1), "one and a vector": (1, n)}
    found = {key: (amaxes(rows), amaxes(cols)) for key, (rows, cols) in sizes.items()}
    found |= {"one, rows": (amaxes(1), None), "a vector, columns": (None, amaxes(n))}
    three = torch.full((1, 1, 1), 300.0)
    found["one of three dimensions"] = (three, three)
    if x.numel():
        of_x, of_rows = x.abs().max().reshape(1, 1), x.abs().amax(dim=1).reshape(1, -1)
        found |= {"its own": (fused.tensor_amax(x), of_x), "its own of rows": (of_rows, of_rows)}
        if rule.power_of_two:
            rows, cols = fused.row_col_amax_of_tiles(x)
            found |= {"tiles": (rows, cols), "tiles, rows": (rows, None), "one and tiles": (of_x, cols)}
    return found


Verb = Callable[..., Any]
"""Calls a verb of f8emu.torch or of the oracle, by its name."""


def by_verbs(verb: Verb, operator: Operator, x: Tensor, *args: Any) -> list[Any]:
    """The results of a call in terms of the verbs; None for a result that was not requested."""
    match operator.name, args:
        case "reduce_tensor", _:
            return [verb("amax", x)]
        case "row_amax", _:
            return [verb("amax", x, _ROWWISE)]
        case "reduce_rows_and_cols", _:
            return [np.concatenate([np.ravel(verb("amax", side, _ROWWISE)) for side in (x, x.t())])]
        case "reduce_tiles", _:
            return [np.concatenate([np.ravel(verb("amax", side, _VECTORS).T) for side in (x, x.t())])]
        case "scales", (fmt, *rule, margin):
            return list(verb("scale_from_amax", x, fmt, _rule(rule), margin=margin))
        case "cast_rows", (fmt, *rule):
            largest = verb("amax", x, _ROWWISE)
            return [*_side(verb, x, fmt, largest, _ROWWISE, rule), largest]
        case "cast_columns", (fmt, inv_scale):
            return [verb("quantize", x.t(), inv_scale, fmt, _ROWWISE).T]
        case "transpose_codes", _:
            return [x.view(torch.uint8).t().contiguous().view(x.dtype)]
        case "cast_pair" | "recomputable_cast_pair", (fmt, row_amax, col_amax, *rule):
            rows, cols = _of_pair(verb, x, fmt, row_amax, rule), _of_pair(verb, x.t(), fmt, col_amax, rule)
            return [*rows, *cols]
        case "cast_pair_given" | "recomputable_cast_pair_given", (fmt, inv_scale, rows, cols):
            return _given(verb, x, fmt, inv_scale, rows, cols)
        case "cast_pair_delayed", (fmt, inv_scale, rows, cols, _, *rule, margin):
            used = verb("scale_from_amax", verb("amax", x), fmt, _rule(rule), margin=margin)
            if inv_scale.item() != UNSET:
                used = Scales(inv_scale, np.float32(1) / inv_scale.numpy())
            return [*_given(verb, x, fmt, used.inv_scale, rows, cols), *used]
        case "cast_blocks", (fmt, square, rows, cols, *rule):
            kind, found = _SQUARES if square else _VECTORS, []
            for side, is_wanted in ((x, rows), (x.t(), cols)):
                of_side = _side(verb, side, fmt, verb("amax", side, kind), kind, rule) if is_wanted else (None, None)
                found += of_side
            return found
    raise AssertionError(f"no such cast: {operator.name}")


def _rule(rule: list[Any]) -> ScaleRule:
    return ScaleRule(power_of_two=rule[0], amax_floor=rule[1])


def _given(verb: Verb, x: Tensor, fmt: str, inv_scale: Any, rows: bool, cols: bool) -> list[Any]:
    sides = ((x, rows), (x.t(), cols))
    return [verb("quantize", side, inv_scale, fmt) if is_wanted else None for side, is_wanted in sides]


def _of_pair(verb: Verb, x: Tensor, fmt: str, amax: Tensor | None, rule: list[Any]) -> tuple[Any, Any]:
    if amax is None:
        return None, None
    amax = amax.float()
    if amax.numel() == 1:
        return _side(verb, x, fmt, amax.reshape(1, 1), Granularity.TENSORWISE, rule)
    if amax.ndim == 3:
        return _side(verb, x, fmt, verb("amax", amax.squeeze(2).t(), _ROWWISE), _ROWWISE, rule)
    if amax.shape[0] == 1:
        return _side(verb, x, fmt, verb("amax", amax), Granularity.TENSORWISE, rule)
    return _side(verb, x, fmt, amax, _ROWWISE, rule)


def _side(verb: Verb, x: Tensor, fmt: str, amax: Any, granularity: Granularity, rule: list[Any]) -> tuple[Any, Any]:
    found = verb("scale_from_amax", amax, fmt, _rule(rule))
    return verb("quantize", x, found.inv_scale, fmt, granularity), found.scale

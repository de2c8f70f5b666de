"""Casts of a matrix whose scales belong to groups of its rows, as the experts of a mixture need them.

A matrix `x` [T, K] is sorted by group; `offs` [G] has the ends of the groups. It is an operand of two GEMMs: as it is,
and, group by group, transposed. Scales are those of rows [T, 1] and of each group's columns [G * K, 1], or one of each
group [G, 1]. Codes of columns are [K, P], P = `padded_rows(T, G)`: every group begins at a multiple of 16 and ends with
zeros, since the GEMM over tokens takes no others. Weights [G, N, K] are a matrix [G * N, K] of equal groups (`tiles`
None); their transposed codes are [G, K, N].

Exactness: for every group the codes and scales that `operators` gives its rows alone. Rows behind the last group have
no codes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import E4M3FN
from f8emu.spec.scaling import Granularity
from f8emu.torch.fused import eager, silu
from f8emu.torch.fused.availability import kernels_for
from f8emu.torch.fused.delayed import chosen_inv_scale, is_known_set, tell_owner
from f8emu.torch.fused.fused_cast import FusedCast, Output, codes_of, matrix, named_format, named_rule
from f8emu.torch.fused.launch import GROUP_MULTIPLE, GROUP_PLANES, padded_rows, tile_count
from f8emu.torch.library import fake, operator
from f8emu.torch.scale import reciprocal


def padded_offs(tiles: Tensor, groups: int) -> Tensor:
    """The ends of the groups in transposed codes, int32 [G]."""
    return tiles[groups : 2 * groups]


def group_slices(x: Tensor, tiles: Tensor | None, groups: int) -> Iterator[tuple[slice, slice]]:
    """The rows of each group in `x`, and in its transposed codes; waits for the device."""
    if tiles is None:
        rows = x.shape[0] // groups
        runs = [slice(i * rows, (i + 1) * rows) for i in range(groups)]
        yield from zip(runs, runs, strict=True)
        return
    start = place = 0
    for stop, end in torch.stack([tiles[:groups], padded_offs(tiles, groups)], dim=1).tolist():
        yield slice(start, stop), slice(place, place + stop - start)
        start, place = stop, end


def _tiles_outputs(offs: Tensor, rows: int) -> tuple[Output, ...]:
    if offs.ndim != 1 or offs.dtype is not torch.int32 or not offs.numel():
        raise OperandError(
            f"group_tiles: offs must be int32 [groups], the end of each group; got {offs.dtype} of shape "
            f"{list(offs.shape)}; take sizes.cumsum(0).to(torch.int32)"
        )
    return (Output((2 * offs.shape[0] + GROUP_PLANES * tile_count(rows, offs.shape[0]),), torch.int32),)


@FusedCast(
    outputs=_tiles_outputs,
    launch=lambda on, out, offs, rows: on.run(on.plans.group_tiles(on.count(offs), rows), offs, *out),
    is_lowered=False,
)
def group_tiles(offs: Tensor, rows: int) -> Tensor:
    """The ends of the groups in a matrix of `rows` rows, their padded ends, and a table of tiles, in one tensor."""
    ends = offs.clamp(0, rows)
    sizes = ends.diff(prepend=ends.new_zeros(1)).clamp(min=0)
    padded = ((sizes + GROUP_MULTIPLE - 1) // GROUP_MULTIPLE * GROUP_MULTIPLE).cumsum(0).to(torch.int32)
    return torch.cat([ends, padded, ends.new_zeros(GROUP_PLANES * tile_count(rows, offs.shape[0]))])


# 1. Amaxes.


def _stacked(rows: int, groups: int, tiles: Any) -> int:
    # The rows of each of equal groups; 0 of others.
    return rows // groups if tiles is None else 0


def amaxes_output(rows: int, columns: int, groups: int, by_group: bool) -> Output:
    """The amaxes of rows and of each group's columns in one vector, or one of each group."""
    return Output((groups, 1) if by_group else (rows + groups * columns,), is_zeroed=True)


def _launch_amaxes(on: Any, out: Any, x: Any, tiles: Any, groups: int, by_group: bool) -> None:
    (m, k), (amaxes,) = on.shape(x), out
    plan = on.plans.groups_amax(m, k, groups, _stacked(m, groups, tiles), by_group, on.has_pairs(x))
    on.run(plan, x, x if tiles is None else tiles, amaxes, amaxes if by_group else amaxes[m:])


@FusedCast(
    outputs=lambda x, tiles, groups, by_group: (amaxes_output(*matrix("amaxes_of_groups", x), groups, by_group),),
    launch=_launch_amaxes,
    is_lowered=False,
)
def amaxes_of_groups(x: Tensor, tiles: Tensor | None, groups: int, by_group: bool) -> Tensor:
    """The amaxes of the rows [T] and of the columns of each group [G, K], in one vector; or of each group, [G, 1]."""
    m, k = x.shape
    amaxes = amaxes_output(m, k, groups, by_group).new(x)
    for group, (rows, _) in enumerate(group_slices(x, tiles, groups)):
        if by_group:
            amaxes[group : group + 1] = eager.tensor_amax(x[rows])
        elif rows.start < rows.stop:
            of_rows, of_cols = eager.row_col_amax(x[rows])
            amaxes[rows], amaxes[m + group * k : m + (group + 1) * k] = of_rows.flatten(), of_cols.flatten()
    return amaxes


# 2. Codes.


def _col_codes(x: Tensor, tiles: Tensor | None, groups: int) -> tuple[int, ...]:
    m, k = x.shape
    return (groups, k, m // groups) if tiles is None else (k, padded_rows(m, groups))


def _cast_outputs(x: Tensor, tiles: Tensor | None, groups: int, fmt: str, *args: Any) -> tuple[Output, ...]:
    row, col, by_group, *_ = args
    named_format("cast_groups", fmt)
    m, k = matrix("cast_groups", x)
    codes = codes_of(fmt, m, k).dtype
    nothing = (0, 0)
    return (
        Output(nothing if row is None else (m, k), codes),
        Output(nothing if row is None or by_group else (m, 1)),
        Output(nothing if col is None else _col_codes(x, tiles, groups), codes),
        Output(nothing if col is None or by_group else (groups * k, 1)),
    )


def _launch_cast(on: Any, out: Any, x: Any, tiles: Any, groups: int, fmt: str, *args: Any) -> None:
    row, col, by_group, floor, amax = args
    m, k = on.shape(x)
    settings = floor, row is not None, col is not None, by_group, amax is not None
    plan = on.plans.cast_groups(m, k, groups, _stacked(m, groups, tiles), fmt, *settings)
    tensors = tiles, row, *out[:2], col, *out[2:], amax
    on.run(plan, x, *[x if y is None else y for y in tensors])


@FusedCast(outputs=_cast_outputs, launch=_launch_cast, mutates_args=("amax",), is_lowered=False)
def cast_groups(
    x: Tensor,
    tiles: Tensor | None,
    groups: int,
    fmt: str,
    row: Tensor | None,
    col: Tensor | None,
    by_group: bool,
    amax_floor: float,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of `x` and, group by group, of its transpose; None leaves one out.

    `row` [T, 1] and `col` [G * K, 1] are amaxes, whose scales are powers of two, or `by_group` inv_scales [G, 1]; then
    no scales are returned. `amax` [G, 1], if it is given, is updated by those of the groups.

    Returns:
        (row_codes, row_scale, col_codes, col_scale).
    """
    if amax is not None:
        for group, (rows, _) in enumerate(group_slices(x, tiles, groups)):
            eager.raise_amax(amax[group], x[rows])
    format, rule = named_rule("cast_groups", fmt, True, amax_floor)
    row_codes, row_scale, col_codes, col_scale = [
        y.new(x) for y in _cast_outputs(x, tiles, groups, fmt, row, col, by_group)
    ]
    col_codes.view(torch.uint8).zero_()

    def cast(side: Tensor, source: Tensor, scale: Tensor, places_of_scales: slice) -> Tensor:
        if by_group:
            return eager.cast_by(side, format, source[places_of_scales])
        codes, scale[places_of_scales] = eager.cast_rows_by(side, format, source[places_of_scales], rule)
        return codes

    for group, (rows, places) in enumerate(group_slices(x, tiles, groups)):
        of_group = slice(group, group + 1)
        if row is not None and rows.start < rows.stop:
            row_codes[rows] = cast(x[rows], row, row_scale, of_group if by_group else rows)
        if col is not None:
            places_of_scales = of_group if by_group else slice(group * x.shape[1], (group + 1) * x.shape[1])
            (col_codes[group] if tiles is None else col_codes[:, places]).copy_(
                cast(x[rows].t(), col, col_scale, places_of_scales)
            )
    return row_codes, row_scale, col_codes, col_scale


def _weight_outputs(x: Tensor, groups: int, fmt: str, *_: Any) -> tuple[Output, ...]:
    named_format("cast_rows_of_groups", fmt)
    m, k = matrix("cast_rows_of_groups", x)
    return codes_of(fmt, m, k), Output((m, 1)), Output((groups * k, 1), is_zeroed=True)


@FusedCast(
    outputs=_weight_outputs,
    launch=lambda on, out, x, groups, *rule: on.run(on.plans.cast_rows_of_groups(*on.shape(x), groups, *rule), x, *out),
    is_lowered=False,
)
def cast_rows_of_groups(x: Tensor, groups: int, fmt: str, amax_floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of the rows of weights [G * N, K], and the amaxes of each group's columns: one reading.

    Returns:
        (codes [G * N, K], scale [G * N, 1], col_amax [G * K, 1]); scales are powers of two.
    """
    format, rule = named_rule("cast_rows_of_groups", fmt, True, amax_floor)
    codes, scale, _ = eager.cast_by_own(x, format, Granularity.ROWWISE, rule)
    return codes, scale, torch.cat([eager.row_amax(x[rows].t()) for rows, _ in group_slices(x, None, groups)])


# 3. SiLU and product, computed in the casts; see `silu` for their arithmetic. `gate` [T, H] and `up` [T, H], or in one
# matrix [T, 2H], gate first (`up` None). bfloat16.


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    half = gate.shape[1] // 2
    return gate[:, :half], gate[:, half:]


def _hidden(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = _halves(gate, up)
    return silu.swiglu.function(gate.contiguous(), up)


def _width(gate: Any, up: Any) -> int:
    return gate.shape[1] // 2 if up is None else gate.shape[1]


def _launch_amaxes_of_hidden(on: Any, out: Any, gate: Any, up: Any, tiles: Any, groups: int, by_group: bool) -> None:
    m, h = gate.shape[0], _width(gate, up)
    plan = on.plans.groups_hidden(m, h, groups, up is None, E4M3FN.name, 1.0, False, by_group, False)
    (amaxes,) = out
    of_cols = amaxes if by_group else amaxes[m:]
    on.run(plan, gate, gate if up is None else up, tiles, amaxes, gate, gate, of_cols, gate)


@FusedCast(
    outputs=lambda gate, up, tiles, groups, by_group: (
        amaxes_output(gate.shape[0], _width(gate, up), groups, by_group),
    ),
    launch=_launch_amaxes_of_hidden,
    is_lowered=False,
)
def amaxes_of_hidden(gate: Tensor, up: Tensor | None, tiles: Tensor, groups: int, by_group: bool) -> Tensor:
    """`amaxes_of_groups` of `hidden`."""
    return amaxes_of_groups.function(_hidden(gate, up), tiles, groups, by_group)


def _hidden_outputs(gate: Tensor, up: Tensor | None, *args: Any) -> tuple[Output, ...]:
    _, _, fmt, _, by_group, *_ = args
    m, h = matrix("cast_hidden", gate)[0], _width(gate, up)
    return codes_of(fmt, m, h), Output((0, 0) if by_group else (m, 1))


def _launch_hidden(on: Any, out: Any, gate: Any, up: Any, tiles: Any, groups: int, fmt: str, *args: Any) -> None:
    source, by_group, floor, amax = args
    sizes = gate.shape[0], _width(gate, up), groups, up is None
    plan = on.plans.groups_hidden(*sizes, fmt, floor, True, by_group, amax is not None)
    tensors = up, tiles, source, *out, None, amax
    on.run(plan, gate, *[gate if y is None else y for y in tensors])


@FusedCast(outputs=_hidden_outputs, launch=_launch_hidden, mutates_args=("amax",), is_lowered=False)
def cast_hidden(
    gate: Tensor,
    up: Tensor | None,
    tiles: Tensor,
    groups: int,
    fmt: str,
    source: Tensor,
    by_group: bool,
    amax_floor: float,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`cast_groups` of the rows of `hidden`: (codes, scale)."""
    results = cast_groups.function(_hidden(gate, up), tiles, groups, fmt, source, None, by_group, amax_floor, amax)
    return results[0], results[1]


def _gradients(grad_hidden: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    # The gradients of gate and up, as one matrix where they are one.
    of_gate, of_up = _halves(gate, up)
    both = silu.swiglu_gradients.function(grad_hidden, of_gate.contiguous(), of_up)
    return [torch.cat(both, dim=1)] if up is None else [*both]


def _launch_amaxes_of_gradients(
    on: Any, out: Any, grad: Any, gate: Any, up: Any, tiles: Any, groups: int, by_group: bool
) -> None:
    m, h = on.shape(grad)
    plan = on.plans.groups_gradients_amax(m, h, groups, up is None, by_group)
    (of_gate, of_up), x = out, grad
    of_up = of_gate if of_up is None else of_up
    parts = [(y, y if by_group else y[m:]) for y in (of_gate, of_up)]
    (rows, cols), (up_rows, up_cols) = parts
    tensors = rows, x, x, cols, x, x, x, up_rows, x, x, up_cols, x, x, x, x, x, x
    on.run(plan, grad, gate, gate if up is None else up, tiles, *tensors)


def _amaxes_of_both(
    grad: Tensor, gate: Tensor, up: Tensor | None, tiles: Tensor, groups: int, by_group: bool
) -> tuple[Output, Output]:
    m, width = gate.shape
    amaxes = amaxes_output(m, width, groups, by_group)
    return amaxes, Output((0, 0)) if up is None else amaxes


@FusedCast(outputs=_amaxes_of_both, launch=_launch_amaxes_of_gradients, is_lowered=False)
def amaxes_of_gradients(
    grad_hidden: Tensor, gate: Tensor, up: Tensor | None, tiles: Tensor, groups: int, by_group: bool
) -> tuple[Tensor, Tensor]:
    """`amaxes_of_groups` of the gradients of gate and of up; of both in the first, where they are one matrix."""
    amaxes = [amaxes_of_groups.function(x, tiles, groups, by_group) for x in _gradients(grad_hidden, gate, up)]
    return amaxes[0], amaxes[1] if len(amaxes) > 1 else grad_hidden.new_empty(0, 0, dtype=torch.float32)


def _gradients_outputs(
    grad: Tensor, gate: Tensor, up: Tensor | None, tiles: Tensor, groups: int, fmt: str, hidden_fmt: str, *args: Any
) -> tuple[Output, ...]:
    _, _, _, rows, cols, hidden, by_group, *_ = args
    m, width = gate.shape
    h, places, nothing = _width(gate, up), padded_rows(m, groups), (0, 0)
    codes, hidden_codes = codes_of(fmt, 0, 0).dtype, codes_of(hidden_fmt, 0, 0).dtype
    of_gate = (
        Output((m, width) if rows else nothing, codes),
        Output((m, 1) if rows and not by_group else nothing),
        Output((width, places) if cols else nothing, codes),
        Output((groups * width, 1) if cols and not by_group else nothing),
    )
    other = of_gate if up is not None else [Output(nothing, y.dtype) for y in of_gate]
    of_hidden = Output((h, places) if hidden else nothing, hidden_codes)
    return *of_gate, *other, of_hidden, Output((groups * h, 1) if hidden and not by_group else nothing)


def _launch_gradients(
    on: Any, out: Any, grad: Any, gate: Any, up: Any, tiles: Any, groups: int, fmt: str, hidden_fmt: str, *args: Any
) -> None:
    gate_source, up_source, hidden_source, rows, cols, hidden, by_group, floor, gate_amax, up_amax = args
    (m, h), is_raised = on.shape(grad), gate_amax is not None
    settings = fmt, hidden_fmt, floor, rows, cols, hidden, by_group, is_raised
    plan = on.plans.groups_gradients(m, h, groups, up is None, *settings)
    gate_out = out[:4]
    up_source, up_amax, up_out = (gate_source, gate_amax, gate_out) if up is None else (up_source, up_amax, out[4:8])
    tensors: list[Any] = []
    for source, (row_codes, row_scale, col_codes, col_scale), amax in (
        (gate_source, gate_out, gate_amax),
        (up_source, up_out, up_amax),
    ):
        of_cols = source if by_group else source[m:]
        tensors += [source, row_codes, row_scale, of_cols, col_codes, col_scale, amax]
    tensors += [hidden_source, *out[8:]]
    on.run(plan, grad, gate, gate if up is None else up, tiles, *[grad if y is None else y for y in tensors])


@FusedCast(
    outputs=_gradients_outputs, launch=_launch_gradients, mutates_args=("gate_amax", "up_amax"), is_lowered=False
)
def cast_gradients(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor | None,
    tiles: Tensor,
    groups: int,
    fmt: str,
    hidden_fmt: str,
    gate_source: Tensor,
    up_source: Tensor | None,
    hidden_source: Tensor,
    rows: bool,
    cols: bool,
    hidden: bool,
    by_group: bool,
    amax_floor: float,
    gate_amax: Tensor | None,
    up_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_groups` of the gradients of gate and of up, and of the columns of `hidden`, from one reading.

    Sources are the vectors of `amaxes_of_gradients` and the amaxes [G * H, 1] of hidden's columns, or inv_scales.

    Returns:
        Four of gate's gradient, four of up's (empty where both are one matrix), and codes and scale of `hidden^T`.
    """
    gradients = _gradients(grad_hidden, gate, up)
    m, results = gate.shape[0], list[Tensor]()
    for x, source, amax in zip(gradients, (gate_source, up_source), (gate_amax, up_amax), strict=False):
        assert source is not None, "one for each"
        row, col = (source, source) if by_group else (source[:m, None], source[m:, None])
        wanted = row if rows else None, col if cols else None
        results += cast_groups.function(x, tiles, groups, fmt, *wanted, by_group, amax_floor, amax)
    if up is None:
        results += [x.new_empty(0, 0) for x in results]
    wanted = None, hidden_source if hidden else None
    settings = by_group, amax_floor, None
    results += cast_groups.function(_hidden(gate, up), tiles, groups, hidden_fmt, *wanted, *settings)[2:]
    return tuple(results)  # pyright: ignore[reportReturnType]


# 4. Delayed scaling.


@operator()
def scales_by_state(
    tensors: list[Tensor],
    kind: str,
    tiles: Tensor | None,
    groups: int,
    inv_scale: Tensor,
    fmt: str,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
    first: int,
) -> tuple[Tensor, Tensor]:
    """(inv_scale, scale), each [groups, 1], of a cast by the rows of `inv_scale` from `first` on, whose owner is told.

    A group whose inv_scale is not set takes that of its own amax. What is cast of `tensors`, by its kind: "matrix";
    "hidden", of gate and up, or both in one; "grad_gate" or "grad_up", of grad_hidden and these.
    """
    tell_owner(inv_scale)
    is_known, inv_scale = is_known_set(inv_scale), inv_scale[first : first + groups]
    if is_known and (plans := kernels_for(inv_scale)) is not None:
        scales = torch.empty_like(inv_scale), torch.empty_like(inv_scale)
        plans.used_scales(groups)(inv_scale, *scales)
        return scales
    used = inv_scale.clone()
    if not is_known:
        x, *rest = (*tensors, None, None)[:3]
        match kind:
            case "matrix":
                amax = amaxes_of_groups.function(x, tiles, groups, True)
            case "hidden":
                amax = amaxes_of_hidden.function(x, rest[0], tiles, groups, True)
            case _:
                amax = amaxes_of_gradients.function(x, *rest, tiles, groups, True)[kind == "grad_up"]
        used = chosen_inv_scale(amax, inv_scale, fmt, power_of_two, amax_floor, margin)
    return used, reciprocal(used)


@fake(scales_by_state)
def _(tensors: list[Tensor], kind: str, tiles: Any, groups: int, *_: Any) -> tuple[Tensor, Tensor]:
    found = [tensors[0].new_empty((groups, 1), dtype=torch.float32) for _ in range(2)]
    return found[0], found[1]

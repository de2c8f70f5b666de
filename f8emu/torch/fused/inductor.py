"""What torch.compile makes of the fused casts: kernels that Inductor launches, recomputed if that is wanted.

By default Inductor calls operators through Python. The lowerings here put the same plans into its code instead:
Inductor allocates the results, plans their memory and launches the kernels. A result without a reader is not computed:
if the two operands of a cast are used in different passes, each pass computes its own.

The partitioner recomputes only operators on its list of cheap ones. `recomputable_cast_pair` is added to that list: if
its input is saved anyway, or cheap to recompute, the backward pass recomputes the codes instead of saving them.

Both hooks use internals of torch (2.11 to 2.13). If sizes are unknown at compile time, the operators are called as they
are: same bits, more host time.
"""

import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from f8emu.torch.device import has_float8_hardware
from f8emu.torch.fused import columns, delayed, operators
from f8emu.torch.fused.arguments import CODES, block_granularity, tile_amaxes

_RECOMPUTABLE = (operators.recomputable_cast_pair,)
_REDUCTIONS = (
    operators.reduce_tensor,
    operators.reduce_rows_and_cols,
    operators.reduce_tiles,
    operators.row_amax,
    operators.scales,
)


def install() -> None:
    """Install the hooks in those parts of the compiler that are loaded."""
    if "torch._functorch.partitioners" in sys.modules:
        _allow_recomputation()
    if "torch._inductor.lowering" in sys.modules:
        _register_lowerings()


@cache
def _allow_recomputation() -> None:
    from torch._functorch import partitioners

    default = partitioners.get_default_op_list

    @wraps(default)
    def with_casts() -> Any:
        types = default()
        casts, reductions = (
            [operator.overload.overloadpacket for operator in of] for of in (_RECOMPUTABLE, _REDUCTIONS)
        )
        types.recomputable_ops.update(casts)
        # The partitioner does not recompute a node whose results are read by operators that are not fusible, nor one
        # that reads a tensor which such an operator has read before.
        types.fusible_ops.update([*casts, *reductions])
        return types

    partitioners.get_default_op_list = with_casts


@cache
def _register_lowerings() -> None:
    from torch._inductor import lowering

    for operator, lower in (
        (operators.reduce_rows_and_cols, _reduce_rows_and_cols),
        (operators.reduce_tiles, _reduce_tiles),
        (operators.row_amax, _row_amax),
        (operators.cast_pair, _cast_pair),
        (operators.recomputable_cast_pair, _cast_pair),
        (operators.cast_pair_given, _cast_pair_given),
        (delayed.cast_pair_delayed, _cast_pair_delayed),
        (operators.cast_rows, _cast_rows),
        (operators.cast_blocks, _cast_blocks),
        (columns.transpose_codes, _transpose_codes),
    ):
        lowering.add_needs_realized_inputs(operator.overload)
        lowering.register_lowering(operator.overload, type_promotion_kind=None)(_lowering(operator.overload, lower))


def _lowering(overload: torch._ops.OpOverload, lower: Callable[..., Any]) -> Callable[..., Any]:
    """`lower` if kernels run and sizes are known, otherwise a call of the operator itself."""
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    fallback = fallback_handler(overload, add_to_fallback_set=False)

    @wraps(lower)
    def lowered(x: Any, *args: Any) -> Any:
        sizes = [_known(size) for size in x.get_size()]
        is_plain = None in sizes or 0 in sizes or not has_float8_hardware(x.get_device())
        # Ahead of time there is no host code that could know whether a state is set.
        is_plain = is_plain or (V.graph.cpp_wrapper and overload is delayed.cast_pair_delayed.overload)
        if is_plain or operators.launches() is None:
            return fallback(x, *args)
        return lower(_contiguous(x), sizes, *args)

    return lowered


def _reduce_rows_and_cols(x: Any, sizes: list[int]) -> Any:
    from torch._inductor.lowering import lowerings

    m, n = sizes
    amaxes = lowerings[torch.ops.aten.full.default]([m + n], 0.0, dtype=torch.float32, device=x.get_device())
    amaxes.realize()
    _launch(_plans().row_col_amax(m, n, _has_pairs(x, n), False), x, amaxes)
    return amaxes


def _reduce_tiles(x: Any, sizes: list[int]) -> Any:
    m, n = sizes
    amaxes = _empty(x, torch.float32, sum(tile_amaxes(m, n)), strides=(1,))
    _launch(_plans().row_col_amax(m, n, _has_pairs(x, n), True), x, amaxes)
    return amaxes


def _has_pairs(x: Any, n: int) -> bool:
    from torch._inductor.virtualized import V

    # Ahead of time there is no host code that could look where the tensor begins.
    return not V.graph.cpp_wrapper and _plans().has_pairs(x.get_dtype(), n, x.get_device())


def _row_amax(x: Any, sizes: list[int]) -> Any:
    m, n = sizes
    amax = _empty(x, torch.float32, m, 1)
    _launch(_plans().row_amax(m, n), x, amax)
    return amax


def _cast_pair(
    x: Any, sizes: list[int], fmt: str, row_amax: Any, col_amax: Any, power_of_two: bool, amax_floor: float
) -> list[Any]:
    m, n = sizes
    used = _used()
    out: list[Any] = []
    tensors = [x]
    counts: list[int | None] = []
    for side, (amax, rows, k) in enumerate(((row_amax, m, n), (col_amax, n, m))):
        if amax is None or not used & {2 * side, 2 * side + 1}:
            out += [_empty(x, CODES[fmt], 0, 0), _empty(x, torch.float32, 0, 0)]
            tensors += [x, x, x]
            counts.append(None)
            continue
        count = operators.amax_count([int(size) for size in amax.get_size()])
        scale = _empty(x, torch.float32, 1 if count > 0 else rows, 1)
        if count == 0 and not power_of_two:
            inv_scale = _empty(x, torch.float32, rows, 1)
            _launch(_plans().scales(fmt, power_of_two, amax_floor, 0, rows), amax, inv_scale, scale)
            amax = inv_scale
        out += [_empty(x, CODES[fmt], rows, k), scale]
        tensors += [amax, *out[-2:]]
        counts.append(count)
    if counts != [None, None]:
        _launch(_plans().cast_pair(m, n, fmt, power_of_two, amax_floor, *counts), *tensors)
    return out


def _cast_pair_given(x: Any, sizes: list[int], fmt: str, inv_scale: Any, rows: bool, cols: bool) -> list[Any]:
    wanted, out, codes = _given_codes(x, sizes, fmt, rows, cols)
    if any(wanted):
        _launch(_plans().cast_pair_given(*sizes, fmt, *wanted), x, inv_scale, *codes, *[inv_scale] * 3)
    return out


def _cast_pair_delayed(
    x: Any, sizes: list[int], fmt: str, inv_scale: Any, rows: bool, cols: bool, amax: Any, *rule: Any
) -> list[Any]:
    wanted, out, codes = _given_codes(x, sizes, fmt, rows, cols)
    keep, scale = 2 in _used(), _empty(x, torch.float32, 1, 1)
    used = _empty(x, torch.float32, 1, 1) if keep else inv_scale
    _launch(_plans().cast_pair_delayed(*sizes, fmt, *wanted, keep, *rule), x, inv_scale, *codes, amax, scale, used)
    return [*out, used, scale]


def _given_codes(
    x: Any, sizes: list[int], fmt: str, rows: bool, cols: bool
) -> tuple[tuple[bool, bool], list[Any], list[Any]]:
    """Which codes have a reader, the results, and what a plan takes in their place."""
    (m, n), used = sizes, _used()
    wanted = rows and 0 in used, cols and 1 in used
    out = [
        _empty(x, CODES[fmt], *(shape if side else (0, 0)))
        for side, shape in zip(wanted, ((m, n), (n, m)), strict=True)
    ]
    return wanted, out, [codes if side else x for side, codes in zip(wanted, out, strict=True)]


def _cast_rows(x: Any, sizes: list[int], fmt: str, power_of_two: bool, amax_floor: float) -> list[Any]:
    m, n = sizes
    out = [_empty(x, CODES[fmt], m, n), _empty(x, torch.float32, m, 1), _empty(x, torch.float32, m, 1)]
    _launch(_plans().cast_rows(m, n, fmt, power_of_two, amax_floor), x, *out)
    return out


def _cast_blocks(
    x: Any, sizes: list[int], fmt: str, square: bool, rows: bool, cols: bool, power_of_two: bool, amax_floor: float
) -> list[Any]:
    m, n = sizes
    used = _used()
    wanted = bool(rows and used & {0, 1}), bool(cols and used & {2, 3})
    plans = _plans()
    out: list[Any] = []
    tensors = [x]
    for is_wanted, shape in zip(wanted, ((m, n), (n, m)), strict=True):
        if not is_wanted:
            out += [_empty(x, CODES[fmt], 0, 0), _empty(x, torch.float32, 0, 0)]
            tensors += [x, x] if square else [x, x, x]
            continue
        blocks = block_granularity(square).scale_shape(*shape)
        strides = (blocks[1], 1) if square else (1, blocks[0])
        out += [_empty(x, CODES[fmt], *shape), _empty(x, torch.float32, *blocks, strides=strides)]
        tensors += out[-2:] if square else [*out[-2:], _empty(x, torch.float32, *blocks)]
    if any(wanted):
        cast = plans.cast_squares if square else plans.cast_vectors
        _launch(cast(m, n, fmt, power_of_two, amax_floor, *wanted), *tensors)
    return out


def _transpose_codes(codes: Any, sizes: list[int], after: Any) -> Any:
    m, n = sizes
    out = _empty(codes, codes.get_dtype(), n, m)
    _launch(_plans().transpose_codes(m, n), codes, out)
    return out


def _launch(plan: Any, *tensors: Any) -> None:
    """Add the kernel of a plan to Inductor's graph, as a node."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = _with_warps(plan.kernel, plan.warps)
    names = plan.kernel.arg_names
    arguments = dict(zip(names, (*tensors, *plan.sizes), strict=False)) | plan.constants
    assert set(arguments) == set(names), "a plan fills all arguments of its kernel"
    node = _planned_kernel()(
        kernel_idx=kernel_side_table.add_kernel(kernel),
        grid=[(plan.programs, 1, 1)],
        tma_descriptor_metadata={},
        kernel_args=arguments,
    )
    node.plan = plan


@cache
def _planned_kernel() -> Any:
    """Inductor's node for a kernel, whose code calls the plan: half the host time of Inductor's own launch."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class PlannedKernel(ir.UserDefinedTritonKernel):
        plan: Any

        def can_fuse_epilogue(self) -> bool:
            return False

        def codegen(self, wrapper: Any) -> None:
            if V.graph.cpp_wrapper:  # ahead of time, without Python
                super().codegen(wrapper)
                return
            tensors = [x for x in self.ordered_kwargs_for_cpp_kernel if isinstance(self.kwargs[x], ir.IRNode)]
            values = [self.get_kwargs_value(x) for x in tensors]
            device, dtypes = values[0].get_device(), [str(x.get_dtype()) for x in values]
            bound = f"{self.plan.name}.bound({', '.join([str(device.index), *dtypes])})"
            name = "f8emu_" + re.sub(r"\W+", "_", bound)
            wrapper.add_import_once("from f8emu.torch.fused import launch as f8emu_launch")
            wrapper.add_import_once(f"f8emu_launch.require_sources({_plans().sources_digest()!r})")
            wrapper.add_import_once(f"{name} = f8emu_launch.{bound}")
            self.codegen_comment(wrapper, name)
            wrapper.writeline(f"{name}({', '.join(map(_pointer_to, values))})")

    return PlannedKernel


def _pointer_to(x: Any) -> str:
    """Code for a tensor with the pointer of `x`, of any shape: the base instead of a view that starts where it does."""
    from torch._inductor import ir

    if isinstance(x, ir.ReinterpretView) and x.layout.offset == 0 and not isinstance(x.data, ir.ReinterpretView):
        base = x.data
        if base.get_dtype() == x.get_dtype():
            return base.codegen_reference()
    return x.codegen_reference()


@cache
def _with_warps(kernel: Any, warps: int) -> Any:
    import triton

    return triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(kernel)


def _plans() -> Any:
    plans = operators.launches()
    assert plans is not None, "asked before"
    return plans


def _used() -> set[int]:
    """The indices of those results of the node being lowered that have a reader."""
    from torch._inductor.virtualized import V

    results: set[int] = set()
    for user in V.graph.current_node.users:
        index = user.args[1]
        assert isinstance(index, int), "only getitem reads a node of several results"
        if user.users:
            results.add(index)
    return results


def _empty(x: Any, dtype: torch.dtype, *shape: int, strides: tuple[int, ...] | None = None) -> Any:
    from torch._inductor.lowering import lowerings

    strides = (max(shape[1], 1), 1) if strides is None else strides
    empty = lowerings[torch.ops.aten.empty_strided.default]
    return empty(list(shape), list(strides), dtype=dtype, device=x.get_device())


def _contiguous(x: Any) -> Any:
    from torch._inductor import ir

    return ir.ExternKernel.require_contiguous(x)


def _known(size: Any) -> int | None:
    """A size as an int; None if it is unknown at compile time."""
    try:
        return int(size)
    except TypeError:  # a sympy expression with symbols
        return None

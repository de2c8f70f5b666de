"""What torch.compile makes of the fused casts: kernels that Inductor launches, recomputed if that is wanted.

By default Inductor calls operators through Python. The lowerings here put the same plans into its code instead:
Inductor allocates the results, plans their memory and launches the kernels. A result without a reader is not computed:
if the two operands of a cast are used in different passes, each pass computes its own.

The partitioner recomputes only operators on its list of cheap ones. A cast that `is_recomputable` is added to it: if
its input is saved anyway, or cheap to recompute, the backward pass recomputes the codes instead of saving them.

Both hooks use internals of torch (2.11 to 2.15). If sizes are unknown at compile time, the operators are called as they
are: same bits, more host time.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch

from f8emu.torch.chip import has_float8_hardware
from f8emu.torch.library import launch_plans

_lowerings: dict[torch._ops.OpOverload, Any] = {}


def add(overload: torch._ops.OpOverload, cast: Any) -> None:
    """Lower an operator as its `FusedCast` says."""
    _lowerings[overload] = cast


def install() -> None:
    """Install the hooks in those parts of the compiler that are loaded, before it needs them."""
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
        casts, reductions = set[Any](), set[Any]()
        for overload, cast in _lowerings.items():
            if cast.is_recomputable:
                casts.add(overload.overloadpacket)
            elif cast.is_reduction:
                reductions.add(overload.overloadpacket)
        types.recomputable_ops.update(casts)
        # The partitioner does not recompute a node whose results are read by operators that are not fusible, nor one
        # that reads a tensor which such an operator has read before.
        types.fusible_ops.update(casts | reductions)
        return types

    partitioners.get_default_op_list = with_casts


@cache
def _register_lowerings() -> None:
    from torch._inductor import lowering

    for overload, cast in _lowerings.items():
        lowering.add_needs_realized_inputs(overload)
        lowering.register_lowering(overload, type_promotion_kind=None)(_lowered(overload, cast))


def _lowered(overload: torch._ops.OpOverload, cast: Any) -> Callable[..., Any]:
    # The results of a cast as Inductor's buffers if kernels run and sizes are known; else a call of the operator.
    from torch._inductor.ir import ExternKernel
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    fallback = fallback_handler(overload, add_to_fallback_set=False)
    is_single = len(overload._schema.returns) == 1

    def lowered(x: Any, *args: Any) -> Any:
        described = [_described(arg) for arg in (x, *args)]
        is_plain = any(arg is _UNKNOWN for arg in described) or 0 in x.get_size()
        is_plain = is_plain or not has_float8_hardware(x.get_device())
        if is_plain or (cast.needs_host and V.graph.cpp_wrapper) or (plans := launch_plans()) is None:
            return fallback(x, *args)
        # 1. Which results there are, and which of them somebody reads, or what is computed with them.
        outputs = cast.outputs(*described)
        used = {0} if is_single else _used()
        sides = {output.side for i, output in enumerate(outputs) if i in used}
        outputs = [y if y.side is None or y.side in sides else y._replace(shape=(0, 0)) for y in outputs]
        # 2. The input, before the results: what computes it comes first, and the memory that it frees serves them.
        x = ExternKernel.require_contiguous(x)
        # 3. Their buffers, and the kernels that fill them.
        results = [_allocated(x, output) for output in outputs]
        out = [None if 0 in output.shape else result for output, result in zip(outputs, results, strict=True)]
        if any(result is not None for result in out):
            cast.launch(_InductorLauncher(plans), out, x, *args)
        return results[0] if is_single else results

    return lowered


_UNKNOWN: Any = object()


def _described(arg: Any) -> Any:
    # A tensor without data in place of a buffer, as a fake implementation has it; `_UNKNOWN` of unknown size.
    if not hasattr(arg, "get_size"):
        return arg
    try:
        sizes = [int(size) for size in arg.get_size()]
    except TypeError:  # a sympy expression with symbols
        return _UNKNOWN
    return torch.empty(sizes, dtype=arg.get_dtype(), device="meta")


def _used() -> set[int]:
    # Indices of those results of the node being lowered that have a reader.
    from torch._inductor.virtualized import V

    results: set[int] = set()
    for user in V.graph.current_node.users:
        index = user.args[1]
        assert isinstance(index, int), "only getitem reads a node of several results"
        if user.users:
            results.add(index)
    return results


def _allocated(x: Any, output: Any) -> Any:
    from torch._inductor.lowering import lowerings

    if not output.is_zeroed:
        return _empty(x, output.shape, output.dtype, output.is_transposed)
    options: dict[str, Any] = {"dtype": output.dtype, "device": x.get_device()}
    zeros = lowerings[torch.ops.aten.full.default](list(output.shape), 0.0, **options)
    zeros.realize()
    return zeros


def _empty(x: Any, shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool) -> Any:
    from torch._inductor.lowering import lowerings

    sizes = [max(size, 1) for size in shape]
    strides = [1, sizes[0]] if is_transposed else [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    options: dict[str, Any] = {"dtype": dtype, "device": x.get_device()}
    return lowerings[torch.ops.aten.empty_strided.default](list(shape), strides, **options)


class _InductorLauncher:
    """The `EagerLauncher` of compiled code: kernels become nodes of Inductor's graph."""

    def __init__(self, plans: ModuleType) -> None:
        self.plans = plans

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(int(size) for size in x.get_size())

    def count(self, x: Any) -> int:
        return math.prod(self.shape(x))

    def has_pairs(self, x: Any) -> bool:
        from torch._inductor.virtualized import V

        # Ahead of time there is no host code that could look where the tensor begins.
        return not V.graph.cpp_wrapper and self.plans.has_pairs(x.get_dtype(), self.shape(x)[1], x.get_device())

    def contiguous(self, x: Any) -> Any:
        return x  # amaxes and scales: vectors in buffers of their own

    def floats(self, x: Any, *shape: int) -> Any:
        return _empty(x, shape, torch.float32, is_transposed=False)

    def run(self, plan: Any, *tensors: Any) -> None:
        self.run_through(None, (), plan, *tensors)

    def run_through(self, host: Callable[..., Any] | None, settings: tuple[Any, ...], plan: Any, *tensors: Any) -> None:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        names = plan.kernel.arg_names
        arguments = dict(zip(names, (*tensors, *plan.sizes), strict=False)) | plan.constants
        assert set(arguments) == set(names), "a plan fills all arguments of its kernel"
        options = {"launch_kwargs": ()} if _has_launch_options() else {}
        node = _planned_kernel()(
            kernel_idx=kernel_side_table.add_kernel(_with_warps(plan.kernel, plan.warps)),
            grid=[(plan.programs, 1, 1)],
            tma_descriptor_metadata={},
            kernel_args=arguments,
            **options,
        )
        node.plan, node.host, node.host_settings = plan, host, settings


@cache
def _has_launch_options() -> bool:
    # torch 2.14 wants to be told which arguments of a launch are options of the compiler.
    from torch._inductor import ir

    return "launch_kwargs" in inspect.signature(ir.UserDefinedTritonKernel.__init__).parameters


@cache
def _planned_kernel() -> Any:
    # Inductor's node for a kernel, whose code calls the plan: half the host time of Inductor's own launch.
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    from f8emu.torch.fused.launch import sources_digest

    class PlannedKernel(ir.UserDefinedTritonKernel):
        plan: Any
        host: Callable[..., Any] | None
        host_settings: tuple[Any, ...]

        def can_fuse_epilogue(self) -> bool:
            return False

        def codegen(self, wrapper: Any) -> None:
            if V.graph.cpp_wrapper:  # ahead of time, without Python
                super().codegen(wrapper)
                return
            # 1. The tensors; their device and dtypes are known here, so the call need not look them up.
            tensors = [x for x in self.ordered_kwargs_for_cpp_kernel if isinstance(self.kwargs[x], ir.IRNode)]
            values = [self.get_kwargs_value(x) for x in tensors]
            device, dtypes = values[0].get_device(), [str(x.get_dtype()) for x in values]
            # 2. At the import of the code: the plan, bound to them, inside host code that runs with every launch.
            wrapper.add_import_once("from f8emu.torch.fused import launch as f8emu_launch, plans as f8emu_plans")
            wrapper.add_import_once(f"f8emu_launch.require_sources({sources_digest()!r})")
            bound = f"f8emu_plans.{self.plan.name}.bound({', '.join([str(device.index), *dtypes])})"
            if self.host is not None:
                wrapper.add_import_once(f"import {self.host.__module__}")
                settings = ", ".join([bound, *map(repr, self.host_settings)])
                bound = f"{self.host.__module__}.{self.host.__name__}({settings})"
            name = "f8emu_" + re.sub(r"\W+", "_", bound)
            wrapper.add_import_once(f"{name} = {bound}")
            # 3. The call.
            self.codegen_comment(wrapper, name)
            wrapper.writeline(f"{name}({', '.join(map(_pointer_to, values))})")

    return PlannedKernel


def _pointer_to(x: Any) -> str:
    # Code for a tensor of any shape with the pointer of `x`: the base instead of a view that starts where it does.
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

"""The lowerings of the fused casts: Inductor allocates the results, plans their memory and launches the kernels.

A result without a reader is not computed: if the two operands of a cast are used in different passes, each pass
computes its own. If sizes are unknown at compile time, the operators are called as they are: same bits, more host time.

All of this uses internals of Inductor (torch 2.11 to 2.15). Where one of them is gone, importing this module fails.
"""

import inspect
import math
import re
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import add_needs_realized_inputs, fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V

from f8emu.torch.chip import has_float8_hardware
from f8emu.torch.fused.availability import launch_plans
from f8emu.torch.fused.launch import COMPILER_OPTIONS, sources_digest


def register(overload: torch._ops.OpOverload, cast: Any) -> None:
    """Lower an operator as its `FusedCast` says."""
    add_needs_realized_inputs(overload)
    register_lowering(overload, type_promotion_kind=None)(_lowered(overload, cast))


def _lowered(overload: torch._ops.OpOverload, cast: Any) -> Callable[..., Any]:
    # The results of a cast as Inductor's buffers if kernels run and sizes are known; else a call of the operator.
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
        x = ir.ExternKernel.require_contiguous(x)
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
    results: set[int] = set()
    for user in V.graph.current_node.users:
        index = user.args[1]
        assert isinstance(index, int), "only getitem reads a node of several results"
        if user.users:
            results.add(index)
    return results


def _allocated(x: Any, output: Any) -> Any:
    if not output.is_zeroed:
        return _empty(x, output.shape, output.dtype, output.is_transposed)
    options: dict[str, Any] = {"dtype": output.dtype, "device": x.get_device()}
    zeros = lowerings[torch.ops.aten.full.default](list(output.shape), 0.0, **options)
    zeros.realize()
    return zeros


def _empty(x: Any, shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool) -> Any:
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
        # Ahead of time there is no host code that could look where the tensor begins.
        return not V.graph.cpp_wrapper and self.plans.has_pairs(x.get_dtype(), self.shape(x)[1], x.get_device())

    def contiguous(self, x: Any) -> Any:
        return x  # amaxes and scales: vectors in buffers of their own

    def floats(self, x: Any, *shape: int) -> Any:
        return _empty(x, shape, torch.float32, is_transposed=False)

    def run(self, plan: Any, *tensors: Any) -> None:
        self.run_through(None, (), plan, *tensors)

    def run_through(self, host: Callable[..., Any] | None, settings: tuple[Any, ...], plan: Any, *tensors: Any) -> None:
        names = plan.kernel.arg_names
        arguments = dict(zip(names, (*tensors, *plan.sizes), strict=False)) | plan.constants
        assert set(arguments) == set(names), "a plan fills all arguments of its kernel"
        node = _PlannedKernel(
            kernel_idx=kernel_side_table.add_kernel(_with_warps(plan.kernel, plan.warps)),
            grid=[(plan.programs, 1, 1)],
            tma_descriptor_metadata={},
            kernel_args=arguments | _OPTIONS,
            **_NAMED_OPTIONS,
        )
        node.plan, node.host, node.host_settings = plan, host, settings


class _PlannedKernel(ir.UserDefinedTritonKernel):
    """Inductor's node for a kernel, whose code calls the plan: half the host time of Inductor's own launch."""

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


# From torch 2.14 a node is told which of its arguments are options of Triton's compiler. Before, none could be passed:
# code that was compiled ahead of time has Triton's default, which was to fuse.
_NODE = inspect.signature(ir.UserDefinedTritonKernel)
_OPTIONS = COMPILER_OPTIONS if "launch_kwargs" in _NODE.parameters else {}
_NAMED_OPTIONS = {"launch_kwargs": tuple(_OPTIONS)} if _OPTIONS else {}

# What runs only when there is a graph is looked up here.
_NODE.bind(kernel_idx=0, grid=[], tma_descriptor_metadata={}, kernel_args={}, **_NAMED_OPTIONS)
for _method in ("codegen", "codegen_comment", "get_kwargs_value", "require_contiguous"):
    getattr(_PlannedKernel, _method)
if "add_import_once" not in PythonWrapperCodegen.__init__.__code__.co_names:
    raise AttributeError("PythonWrapperCodegen.add_import_once is not set")


def _pointer_to(x: Any) -> str:
    # Code for a tensor of any shape with the pointer of `x`: the base instead of a view that starts where it does.
    if isinstance(x, ir.ReinterpretView) and x.layout.offset == 0 and not isinstance(x.data, ir.ReinterpretView):
        base = x.data
        if base.get_dtype() == x.get_dtype():
            return base.codegen_reference()
    return x.codegen_reference()


@cache
def _with_warps(kernel: Any, warps: int) -> Any:
    import triton

    return triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(kernel)

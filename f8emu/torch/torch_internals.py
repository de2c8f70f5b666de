"""Parts of torch that are private or have no annotations, with the types that they have.

A release may drop one. `part` says what f8emu does then: the same bits, slower. What is used without it has no other
way, and its absence is an error when f8emu.torch is imported or where it is used.
"""
# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import copy
import importlib
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload as OpOverload
from torch.autograd import forward_ad
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """An autograd function with one result, which torch's annotations lack."""

        @classmethod
        def apply(cls, *args: Any) -> Tensor: ...

else:
    Function = torch.autograd.Function


def part(module: str, path: str, otherwise: Any) -> Any:
    """The object that `path` names in a module of torch; `otherwise` where this torch has none."""
    try:
        return operator.attrgetter(path)(importlib.import_module(module))
    except (AttributeError, ImportError):
        return otherwise


ConvNd = nn.modules.conv._ConvNd  # the base class of all convolutions

# The innermost hooks for saved tensors, or None; the argument: none while a compiler traces. Otherwise: others always.
top_saved_tensors_hooks: Callable[[bool], tuple[Any, Any] | None]
top_saved_tensors_hooks = part("torch._C", "_autograd._top_saved_tensors_default_hooks", lambda _: (lambda x: x, None))


def _copy_each(into: list[Tensor], new: list[Tensor]) -> None:
    for x, y in zip(into, new, strict=True):
        x.copy_(y)


# Copies the tensors of the second list into those of the first, by few launches.
foreach_copy: Callable[[list[Tensor], list[Tensor]], None] = part("torch", "_foreach_copy_", _copy_each)

# How many dispatch modes are active. Otherwise one, so that every call goes through the dispatcher.
dispatch_modes: Callable[[], int] = part("torch._C", "_len_torch_dispatch_stack", lambda: 1)

# The innermost transform of torch.func, or None; whether there is any; what torch.jit.trace records to, or None.
functorch_transform: Callable[[], Any] = part("torch._C", "_functorch.peek_interpreter_stack", lambda: None)
has_functorch: Callable[[], bool] = part(
    "torch._C", "_are_functorch_transforms_active", lambda: functorch_transform() is not None
)
torchscript_trace: Callable[[], Any] = part("torch._C", "_get_tracing_state", lambda: torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]

# Torch's launcher of compiled kernels, or None: Triton's then. The stream of a device, by its number, as an address.
launch_kernel: Any = part("torch._C", "_StaticCudaLauncher._launch_kernel", None)
current_stream: Callable[[int], int] = part(
    "torch._C", "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

# The elements of a tensor with dimensions.
to_list: Callable[[Tensor], list[Any]] = Tensor.tolist

# The function as one that a compiler does not trace into.
not_compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable  # pyright: ignore[reportAssignmentType]

# A context in which autograd does not notice a write to a tensor, which it may have saved.
keeping_version: Callable[[Tensor], Any] = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateImportUsage]

# The result of an operator on wrapper subclasses, as a view or as the argument where the operator's result is.
with_aliases: Callable[[Any, Any, Any, Any], Any] = return_and_correct_aliasing


def schema_of(operator: Any) -> Any:
    """The schema of an operator: its name, its arguments, what it returns and writes to."""
    return operator._schema


def memory_of(x: Any) -> tuple[int, int]:
    """Which memory a tensor has: its storage and its place there. Also of fake tensors, which have no address."""
    return x.untyped_storage()._cdata, x.storage_offset()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that `module` itself holds: none that is computed in every call."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers that `module` itself holds; reading them takes less time than attributes do."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The submodules that `module` itself holds."""
    return module._modules


def modules_of(module: nn.Module) -> list[nn.Module]:
    """`list(module.modules())`, in a quarter of the time."""
    modules: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [module]
    while left:
        current = left.pop()
        if current is not None and current not in modules:
            modules[current] = None
            if children := current._modules:
                left += [*children.values()][::-1]
    return list(modules)


# Where torch.compile, activation checkpointing and offloading, FSDP1 and Lightning Fabric hold what they wrap; two more
# hold it as `module`, a name that others use too.
_COMPILED = "_orig_mod"
_WRAPPED = (_COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)


def named_modules(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """`module.named_modules()`, by the names that the model had before parts of it, or all, were wrapped."""
    return _named_modules(module, "", set() if remove_duplicate else None)


def _named_modules(module: nn.Module, name: str, seen: set[nn.Module] | None) -> Iterator[tuple[str, nn.Module]]:
    if seen is not None:
        if module in seen:
            return
        seen.add(module)
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            is_wrapped = key in _WRAPPED or (key == "module" and isinstance(module, _PARALLEL))
            yield from _named_modules(child, name if is_wrapped else f"{name}.{key}" if name else key, seen)


_Module = TypeVar("_Module", bound=nn.Module)


def replace_modules(module: _Module, new: Mapping[int, nn.Module]) -> _Module:
    """The module with `new[id(part)]` in the place of each part, also of parts that hold others; changed in place."""
    kept = [part for part in modules_of(module) if id(part) not in new]
    for holder in (*kept, *new.values()):
        for name, part in [*holder._modules.items()]:
            if id(part) in new:
                holder.register_module(name, new[id(part)])
                if name == _COMPILED:
                    cast("Any", holder)._initialize()  # torch.compile has stored the old part's forward
    return cast("_Module", new.get(id(module), module))  # a new part has the class of the old one


def copied_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module`; its dicts, such as those of parameters and hooks, are copied.

    `module.compile()` sets one that is left out: it would run the forward of `module`.
    """
    attributes: dict[str, Any] = {name: x for name, x in module.__dict__.items() if name != "_compiled_call_impl"}
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in attributes.items()}


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the forward or backward pass of `module` itself."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor, without importing what only distributed programs have loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def checkpoint_modes() -> tuple[bool, bool]:
    """Whether dispatch modes of a checkpoint are active that keep results of operators, and that give what is kept."""
    modes = _get_current_dispatch_mode_stack()
    kinds = _checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode
    keeps, gives = (any(isinstance(mode, kind) for mode in modes) for kind in kinds)
    return keeps, gives


def is_batched(x: Any) -> bool:
    """Whether `x` is a batch of tensors under vmap, also that of `is_grads_batched`."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return isinstance(x, Tensor) and (functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x))


_TRACING_MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether forward-mode AD follows one of the tensors."""
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def has_tracing_mode() -> bool:
    """Whether make_fx or AOTAutograd traces the call, of itself or after Dynamo."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES)


def rank_of_process() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


_Method = TypeVar("_Method", bound=Callable[..., Any])


def with_known_signature(method: _Method) -> _Method:
    """The method, with its signature stored: FSDP2 asks for it at every gather, and Python would build it anew."""
    setattr(method, "__signature__", inspect.signature(method))  # noqa: B010
    return method


def compiles_backward() -> bool:
    """Whether torch.compile takes backward passes along (`torch._dynamo.config.compiled_autograd`)."""
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and config.compiled_autograd


setattr(compiles_backward, "_dynamo_marked_constant", True)  # noqa: B010

# For a subclass of Tensor: the results of its operators are what `__torch_dispatch__` returns.
no_torch_function: Any = torch._C._disabled_torch_function_impl

# The number of the backward pass that autograd runs on this thread; -1 if none.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]


def is_in_backward_pass() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return backward_pass() != -1


# Whether the backward pass of this thread may run again: `retain_graph=True`. Otherwise: always, and nothing is freed.
keeps_graph: Callable[[], bool] = part("torch._C", "_autograd._get_current_graph_task_keep_graph", lambda: True)

# Whether the backward pass of this thread computes a node of its graph. Otherwise: every one.
_will_run: Callable[[Any], bool] = part("torch._C", "_will_engine_execute_node", lambda node: True)


def gradients_asked_for(ctx: Any) -> tuple[bool, ...]:
    """`ctx.needs_input_grad`, without what the backward pass that runs leaves out, as `torch.autograd.grad` may."""
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])  # of the inputs that need a gradient
    return tuple([is_needed and _is_executed(next(nodes)) for is_needed in ctx.needs_input_grad])


def _is_executed(node: Any) -> bool:
    try:
        return _will_run(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns
        return True


def release(tensors: Sequence[Tensor]) -> None:
    """Free the memory of tensors that a backward pass saved and has read; not where it may run again."""
    if not torch.compiler.is_compiling() and not keeps_graph():
        for x in tensors:
            x.untyped_storage().resize_(0)


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Have autograd call `function` at the end of the backward pass that runs on this thread, if no error ends it."""
    if compiles_backward():  # Dynamo would trace the function
        function = not_compiled(function)
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


_tracing_context: Any = part("torch._guards", "TracingContext.try_get", None)
_unknown_traces = itertools.count(1)


def trace_number() -> int:
    """The number of the trace that a compiler is making; 0 outside of a trace. Otherwise a new one each time."""
    if _tracing_context is None:
        return next(_unknown_traces)
    context: object = _tracing_context()
    return 0 if context is None else id(context)


def is_in_autograd_function() -> bool:
    """Whether an autograd function calls that a gradient will flow back through: reentrant checkpointing."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, torch.autograd.function.FunctionCtx) and getattr(ctx, "next_functions", ()):
                return True
        frame = frame.f_back
    return False


def pipeline_stage() -> tuple[Any, bool] | None:
    """The stage of a pipeline of torch whose forward pass calls, and whether it is a trial; None without a stage.

    Before its first step a stage runs forward and backward on empty memory, to learn shapes (torch 2.13 to 2.15).
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    frame, namespace = None if module is None else inspect.currentframe(), getattr(module, "__dict__", None)
    while frame is not None and frame.f_globals is not namespace:
        frame = frame.f_back
    names, stage = set[str](), None
    while frame is not None and frame.f_globals is namespace:
        names.add(frame.f_code.co_name)
        stage, frame = frame.f_locals.get("self"), frame.f_back
    return None if stage is None else (stage, "forward_one_chunk" not in names)


def meshes_of_fsdp2(module: nn.Module) -> dict[int, Any]:
    """The id of each module in it whose weight FSDP2 shards, now gathered or not -> the mesh of its ranks."""
    fsdp, meshes = sys.modules.get("torch.distributed.fsdp"), dict[int, Any]()
    parts: list[Any] = [x for x in modules_of(module) if fsdp is not None and isinstance(x, fsdp.FSDPModule)]
    for state in [x._get_fsdp_state() for x in parts]:
        groups = getattr(state, "_fsdp_param_groups", None)  # one before torch 2.13
        for group in [state._fsdp_param_group] if groups is None else groups:
            for parameter in [] if group is None else group.fsdp_params:
                meshes[id(parameter._module_info.module)] = parameter.sharded_param.device_mesh
    return meshes


def base_of(view: Tensor) -> Tensor:
    """The tensor of which `view` is a view."""
    base = view._base
    assert base is not None, "it is a view"
    return base


# Otherwise: more than anybody expects.
_uses_of_storage: Callable[[int], int] = part("torch._C", "_storage_Use_Count", lambda _: sys.maxsize)
_uses_of_tensor: Callable[[Tensor], int] = part("torch", "Tensor._use_count", lambda _: sys.maxsize)


def references(x: Tensor) -> int:
    """How many tensors lie in the storage of `x`, and how many references to `x` itself there are outside of Python."""
    storage = x.untyped_storage()  # one more tensor's worth, while it lives
    return _uses_of_storage(storage._cdata) - 1 + _uses_of_tensor(x)


def wrapper_of(cls: Any, x: Tensor, dtype: torch.dtype | None = None) -> Any:
    """A tensor of a wrapper subclass, with the metadata of `x` and no elements."""
    return Tensor._make_wrapper_subclass(
        cls,
        x.shape,
        strides=x.stride(),
        storage_offset=x.storage_offset(),
        dtype=x.dtype if dtype is None else dtype,
        layout=x.layout,
        device=x.device,
        requires_grad=x.requires_grad,
    )


def is_described_to_a_tracer() -> bool:
    """Whether the method that calls this was called by what makes fake tensors, one for each storage."""
    frame = sys._getframe(2)
    return frame.f_globals.get("__name__") == "torch._subclasses.meta_utils"


def takes_for_uninvertible() -> bool:
    """Whether torch registers a parametrization: NotImplementedError then means to it that there is no inverse."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.utils.parametrize":
        frame = frame.f_back
    return frame is not None


def set_data(x: Tensor, new: Tensor) -> None:
    """`x.data = new` for tensors of a wrapper subclass: the sizes, the dtype and the device alone."""
    cast("Any", torch._C.TensorBase).data.__set__(x, new)


def like_dtensor(x: Any, local: Tensor) -> Any:
    """A DTensor with the placements of `x` and another part of this rank; `local` itself if `x` is none."""
    if not is_dtensor(x):
        return local
    spec = sys.modules["torch.distributed.tensor._dtensor_spec"]
    meta = spec.TensorMeta(x.shape, x.stride(), local.dtype)
    # Not `from_local`, which moves what FSDP2 keeps on the host to the device of the mesh.
    return type(x)(local, spec.DTensorSpec(x.device_mesh, x.placements, meta), requires_grad=local.requires_grad)


def reduced(x: Any) -> Any:
    """The DTensor with its partial results reduced over the ranks."""
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return x.redistribute(placements=[replicate if place.is_partial() else place for place in x.placements])


def replicated(x: Tensor, like: Any) -> Any:
    """`x`, which all ranks have, as a DTensor on the mesh of `like`; itself if that is none."""
    if not is_dtensor(like):
        return x
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return type(like).from_local(x, like.device_mesh, [replicate] * like.device_mesh.ndim, run_check=False)


def without_empty_parts(x: Any) -> Any:
    """The DTensor, replicated where it leaves a rank without elements: an empty part has no maximum."""

    def is_short(place: Any, ranks: int) -> bool:
        # Ranks take equal parts, rounded up, as long as there are any: 5 rows over 4 ranks are 2, 2, 1 and 0.
        size = x.shape[place.dim] if place.is_shard() else ranks
        return (ranks - 1) * -(-size // ranks) >= size

    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    pairs = enumerate(x.placements)
    return x.redistribute(placements=[replicate if is_short(p, x.device_mesh.size(i)) else p for i, p in pairs])


def set_local(x: Any, local: Tensor) -> None:
    """Make `local` the part of a DTensor that this rank holds."""
    if is_dtensor(x) and x._local_tensor is not local:
        x._local_tensor = local


def pickled_as(x: Tensor, protocol: Any) -> Any:
    """`x.__reduce_ex__(protocol)`."""
    return x.__reduce_ex__(protocol)


def store_of(group: Any) -> Any:
    """The key-value store of the ranks of a process group; None in a dry run, where there are no other ranks."""
    return None if dist.get_backend(group) == "fake" else dist.distributed_c10d._get_default_store()


# Collectives over the ranks of process groups: functional ones, which a compiler traces, and one into given memory.


def collective(name: str, x: Tensor, *arguments: Any) -> Tensor:
    """The result of a functional collective, which has arrived."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(getattr(functional, name)(x.contiguous(), *arguments))


def reduce_max(x: Tensor, groups: Sequence[Any]) -> Tensor:
    """The maximum over the ranks of all groups, element by element. A group is a process group, or its name."""
    for group in groups:
        x = collective("all_reduce", x, "max", group if isinstance(group, str) else group.group_name)
    return x


def reduce_amax(amax: Tensor, groups: Sequence[Any]) -> Tensor:
    """`reduce_max` of amaxes: as integers, so that infinity and NaN count as the largest."""
    if not groups:
        return amax
    # All bits of a float32 but its sign: as integers these have the order of the magnitudes, NaN above infinity.
    return reduce_max(amax.float().view(torch.int32) & 0x7FFFFFFF, groups).view(torch.float32)


def all_gather(out: Tensor, part_of_rank: Tensor, group: Any) -> None:
    """`own` of all ranks of a group, in their order, into `out`."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(out, part_of_rank, group)

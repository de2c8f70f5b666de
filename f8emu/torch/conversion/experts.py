"""Experts of mixtures that compute in float8: a converted module keeps its class, its parameters and their names.

Its class becomes a subclass of what it was, whose `forward` computes `float8_experts` of tokens sorted by expert. Of
experts that compute something else than `down(silu(gate) * up)` every grouped GEMM is under the recipe. The routing
weights, their product and the sum over a token's experts are those of the library.
"""

import weakref
from functools import cache
from itertools import pairwise, zip_longest
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import silu
from torch.overrides import TorchFunctionMode

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.names import EngineName
from f8emu.spec.recipe import Recipe
from f8emu.torch.casts.placements import own_experts, own_groups
from f8emu.torch.chip import CHIP, HIGH_PRECISION_DTYPES
from f8emu.torch.conversion.mixtures import TRANSFORMERS, WEIGHT_NAMES, Experts, WeightNames, file_of
from f8emu.torch.layer.delayed_update import UpdateGroup
from f8emu.torch.layer.experts import ExpertsSettings, Float8Experts, GroupedState
from f8emu.torch.layer.float8_layer import Float8Layer, LayersOfExperts
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.grouped_linear import grouped_linear
from f8emu.torch.torch_internals import Function, is_dtensor, not_compiled, own_buffers, own_parameters, to_list
from f8emu.torch.weights.sharded_weight import ShardedWeight

_OF_OBSERVERS = ("is_watched", "watched", "layers_of_experts")  # attributes that copies do not take along
_OF_FLOAT8_EXPERTS = WEIGHT_NAMES[TRANSFORMERS]


class ConvertedExperts(LayersOfExperts):
    """The first base class of converted experts."""

    converted_from: type[nn.Module]
    settings: ExpertsSettings
    weight_names: WeightNames | None
    is_watched: bool = False
    """Whether an observer watches a layer of `expert_layers`. Then these compute, one by one, to the same bits."""
    watched: int = 0  # how many are

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the class that was converted, in float8."""
        if file_of(self.converted_from) == TRANSFORMERS:
            return self._routed(*args, **kwargs)
        if self.weight_names is not None:
            return self._sorted(*args, **kwargs)
        return _with_grouped_gemms(self, args, kwargs)

    def _routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        # As `grouped_mm_experts_forward` of transformers. 1. Sorted by expert. Those of other ranks' experts, whose
        # index is beyond the last, come at the end.
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        count = self.weight_of("down_proj").shape[0]
        offs = torch.searchsorted(experts, torch.arange(count, device=experts.device), right=True).int()
        x = _Rows.apply(hidden_states, order // top_k_index.shape[-1], inverse.view_as(top_k_index))
        # 2. Multiplied, in the dtype of autocast, or that of the weights.
        device = x.device.type
        is_autocast = not x.is_meta and torch.is_autocast_enabled(device)
        x = x.to(torch.get_autocast_dtype(device) if is_autocast else self.weight_of("down_proj").dtype)
        if self.weight_names is not None:
            output = self._experts(x, offs, self.weight_names)
        else:
            output = self._one_by_one(x, offs, experts.clamp(max=count - 1))
        # 3. In the old order, weighted and added.
        output = _Rows.apply(output, inverse, order.unsqueeze(1)).view(*top_k_index.shape, -1)
        return (output * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    def _sorted(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        # As torchtitan's experts, which multiply in bfloat16.
        assert self.weight_names is not None, "its weights are known"
        offs = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        return self._experts(x.bfloat16(), offs, self.weight_names).type_as(x)

    def expert_layers(self) -> dict[str, Float8Layer]:
        layers: dict[str, Float8Layer] = self.__dict__.setdefault("layers_of_experts", {})
        names, states = self.weight_names.all if self.weight_names else (), list[Any](self.settings.states)
        for name, state in zip_longest(names, states):
            for group, matrix in enumerate(self.weight_of(name).detach(), own_groups(getattr(self, name)).start):
                layer: Any = layers.get(f"{name}.{group}")
                if layer is None:
                    layers[f"{name}.{group}"] = _ExpertLinear(self, matrix, state, group)
                elif state is not None:
                    layer.share(state)
        return layers

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse parts of each expert where a parallel style gives them, such as tensor parallelism of torchtitan."""
        if not is_dtensor(own_parameters(self).get(name)):  # of what is sharded, FSDP2's parts of rows may come back
            own_experts(type(self).__name__, param)
        super().register_parameter(name, param)

    def watch(self, count: int) -> None:
        self.watched += count
        self.is_watched = self.watched > 0

    def _experts(self, x: Tensor, offs: Tensor, weight_names: WeightNames) -> Tensor:
        if self.is_watched:
            return _layer_by_layer(self, x, offs, weight_names)
        *gate_up, down = (getattr(self, name) for name in weight_names.all)
        return self.settings(x, gate_up, down, offs)

    def _one_by_one(self, x: Tensor, offs: Tensor, experts: Tensor) -> Tensor:
        # The options of transformers' decorator, of which `_is_gated_silu` knows too.
        options: Any = self

        def product(x: Tensor, name: str) -> Tensor:
            weight = self.weight_of(name)
            weight = weight.transpose(-2, -1).contiguous() if options.is_transposed else weight
            output = grouped_linear(x, weight, offs, recipe=self.settings.recipe, engine=self.settings.engine)
            return output + self.weight_of(f"{name}_bias")[experts] if options.has_bias else output

        if options.has_gate:
            hidden = options._apply_gate(product(x, "gate_up_proj"))
        else:
            hidden = options.act_fn(product(x, "up_proj"))
        output = product(hidden, "down_proj")
        return options.post_expert_norm(output) if getattr(self, "has_post_expert_norm", False) else output

    def weight_of(self, name: str) -> Tensor:
        return own_experts(type(self).__name__, getattr(self, name))

    def precompute_weights(self) -> None:
        """Cast the weights once for all passes until they change: see `Float8Experts.precompute_weights`."""
        if self.weight_names is not None:
            self.settings.precompute(*(getattr(self, name) for name in self.weight_names.all))


class _Rows(Function):
    """`x[rows]`, where row i of `x` becomes the rows `places[i]`; its gradient is their sum, added in this order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        d_x = grads[0][places.squeeze(1)]
        return d_x if d_x.ndim == 2 else d_x.sum(dim=1), None, None


class _ExpertLinear(Float8Linear):
    """One matrix of one expert; setting and deleting its tap is counted by the module."""

    def __init__(self, owner: ConvertedExperts, matrix: Tensor, state: GroupedState | None, group: int) -> None:
        (n, k), settings = matrix.shape, owner.settings
        super().__init__(k, n, False, "meta", matrix.dtype, recipe=settings.recipe, engine=settings.engine)
        self.weight = nn.Parameter(matrix)
        self.owner, self.group = weakref.ref(owner), group
        if state is not None:
            self.update_with(None)  # the module updates the state of all groups
            self.share(state)

    def share(self, state: GroupedState) -> None:
        """Take the state of the group from that of the module."""
        assert state.delayed is not None and self.delayed is not None, "both have a state"
        for name, x in own_buffers(state.delayed).items():
            own_buffers(self.delayed)[name] = x[self.group] if x.ndim == 3 else x[self.group : self.group + 1]
        self.delayed.belong_to(state.delayed.owner)
        self.update_group = state.update_group

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "tap" and (owner := self.owner()) is not None:
            owner.watch(1)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "tap" and (owner := self.owner()) is not None:
            owner.watch(-1)


@not_compiled  # the host waits for the sizes of groups
def _layer_by_layer(module: ConvertedExperts, x: Tensor, offs: Tensor, weight_names: WeightNames) -> Tensor:
    # What `float8_experts` computes.
    layers, (*names, last) = module.expert_layers(), weight_names.all
    weights = {name: module.weight_of(name).unbind() for name in (*names, last)}
    first, ends, outputs = own_groups(getattr(module, last)).start, to_list(offs), list[Tensor]()
    sizes = [end - start for start, end in pairwise((0, *ends, x.shape[0]))]

    def product(x: Tensor, name: str, i: int) -> Tensor:
        return functional_call(layers[f"{name}.{first + i}"], {"weight": weights[name][i]}, (x,))

    *parts, behind = torch.split(x, sizes)
    for i, part in enumerate(parts):
        products = [product(part, name, i) for name in names]
        gate, up = products if len(products) == 2 else products[0].chunk(2, dim=-1)
        outputs.append(product(silu(gate) * up, last, i))
    return torch.cat([*outputs, torch.zeros_like(behind)])


@not_compiled  # Dynamo sends no call of `torch._grouped_mm` to a mode
def _with_grouped_gemms(module: ConvertedExperts, args: Any, kwargs: Any) -> Any:
    with _GroupedGemms(module.settings.recipe, module.settings.engine):
        return module.converted_from.forward(module, *args, **kwargs)


class _GroupedGemms(TorchFunctionMode):
    """Computes `torch._grouped_mm` of tokens [T, K] with experts' matrices [E, K, N] by `grouped_linear`."""

    def __init__(self, recipe: Recipe, engine: EngineName) -> None:
        super().__init__()
        self.recipe = recipe
        self.engine: EngineName = engine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "_grouped_mm" and [x.ndim for x in args[:2]] == [2, 3]:
            return self._multiplied(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _multiplied(self, a: Tensor, b: Tensor, offs: Tensor, bias: Any = None, out_dtype: Any = None) -> Tensor:
        weight = b.transpose(-2, -1).contiguous()  # a copy only of weights that are stored as [E, K, N]
        output = grouped_linear(a, weight, offs, recipe=self.recipe, engine=self.engine)
        output = output if bias is None else output + bias
        return output if out_dtype is None else output.to(out_dtype)


def why_not(module: nn.Module, experts: Experts, recipe: Recipe) -> str:
    """Why a module's experts are not converted; empty if they can be."""
    try:
        ExpertsSettings(recipe, "auto", 1, 1, "meta")
    except UnsupportedError as error:
        return str(error)
    if recipe.delayed is not None and experts.weight_names is None:
        return "delayed scaling is of known experts; these multiply in a way of their own"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    for weight in experts.weights.values():
        if weight.dtype not in HIGH_PRECISION_DTYPES:
            return f"its weights are {weight.dtype}"
        if any(size % CHIP.size_multiple for size in weight.shape[1:]):
            return f"not multiples of {CHIP.size_multiple}"
    return ""


def convert_experts(
    fqn: str, module: nn.Module, experts: Experts, recipe: Recipe, engine: EngineName, group: UpdateGroup
) -> None:
    """Make `module` compute under the recipe."""
    converted: Any = module
    names = experts.weight_names.all if experts.weight_names else ()
    weight = next(iter(experts.weights.values()))
    converted.settings = ExpertsSettings(recipe, engine, weight.shape[0], len(names), weight.device)
    states: list[Any] = list(converted.settings.states)
    for name, state in zip(names, states, strict=False):
        state.delayed.notes.name = f"{fqn}.{name}"
        state.update_with(group)
    module.__class__ = experts_subclass(type(module))
    converted.weight_names = experts.weight_names
    converted._compiled_call_impl = None  # set by module.compile(); it would run the old forward


def gather_experts_as_codes(module: nn.Module) -> bool:
    """Have FSDP2 gather the weights of `module`'s experts as float8, those of `Float8Experts` too; whether it has any.

    Experts under delayed scaling, or whose weights have two formats, are gathered as they are, and so are those that
    compute something else than `down(silu(gate) * up)`.
    """
    new: dict[int, nn.Parameter] = {}  # by identity: modules that share a weight go on sharing it
    for part in module.modules():
        if not isinstance(part, ConvertedExperts | Float8Experts):
            continue
        recipe = part.settings.recipe
        weight_names = part.weight_names if isinstance(part, ConvertedExperts) else _OF_FLOAT8_EXPERTS
        formats = {recipe.output.b.format, recipe.grad_input.b.format}
        if weight_names is None or recipe.delayed is not None or None in formats or len(formats) > 1:
            continue
        for name in weight_names.all:
            old = getattr(part, name)
            if id(old) not in new and not isinstance(old, ShardedWeight) and not is_dtensor(old):
                new[id(old)] = nn.Parameter(ShardedWeight(old.detach(), recipe), old.requires_grad)
                new[id(old)].grad = old.grad
            setattr(part, name, new.get(id(old), old))
    return bool(new)


def dequantize_experts(module: ConvertedExperts) -> None:
    """Make `module` what it was before."""
    setattr(module, "__class__", module.converted_from)  # noqa: B010
    del module.settings
    for name in ("weight_names", "_compiled_call_impl", *_OF_OBSERVERS):
        module.__dict__.pop(name, None)


@cache
def experts_subclass(of: type[nn.Module]) -> type[Any]:
    """The subclass of both `ConvertedExperts` and `of`."""

    def reduce(self: Any, _: object) -> tuple[Any, ...]:
        state = {name: x for name, x in self.__getstate__().items() if name not in _OF_OBSERVERS}
        return _new_experts, (of,), state  # this class cannot be imported

    attributes = {"__doc__": f"{of.__name__} in float8.", "__module__": of.__module__, "__reduce_ex__": reduce}
    attributes["converted_from"] = of
    bases = (ConvertedExperts, of)
    return new_class(f"Float8{of.__name__}", bases, exec_body=lambda namespace: namespace.update(attributes))


def _new_experts(of: type[nn.Module]) -> nn.Module:
    return nn.Module.__new__(experts_subclass(of))

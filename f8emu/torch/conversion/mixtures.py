"""Mixtures of experts: which modules hold experts, which layers choose among them, and where float8 experts are faster.

Neither transformers nor torchtitan is imported: their modules are known by the file that defines their `forward`.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from f8emu.spec.formats import E5M2
from f8emu.spec.recipe import Gemm, Recipe
from f8emu.torch import torch_internals as internals

TRANSFORMERS = "transformers.integrations.moe"
"""Where transformers defines the `forward` of all experts: its decorator `use_experts_implementation` replaces it."""


class WeightNames(NamedTuple):
    """Which parameters of a module are which weights of its experts, `down(silu(gate) * up)`."""

    gate_up: tuple[str, ...]
    """One parameter [E, 2H, D], the gate's rows first; or those of gate and of up, each [E, H, D]."""
    down: str
    """[E, D, H]."""

    @property
    def all(self) -> tuple[str, ...]:
        return *self.gate_up, self.down


WEIGHT_NAMES = {
    TRANSFORMERS: WeightNames(("gate_up_proj",), "down_proj"),
    "torchtitan.models.moe.moe": WeightNames(("w1", "w3"), "w2"),  # 0.2
    "torchtitan.models.common.moe": WeightNames(("w1_EFD", "w3_EFD"), "w2_EDF"),  # 0.3
}
"""The file that defines `forward` -> the parameters that it multiplies."""


class Experts(NamedTuple):
    """The weights of a module whose `forward` multiplies stacks of matrices by grouped GEMMs."""

    weights: dict[str, Tensor]
    """Name -> [E, N, K]."""
    weight_names: WeightNames | None
    """None: the module computes something else than `down(silu(gate) * up)`, for example with biases or a clamp."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, hidden_dim, dim); without names, the shape of the first stack."""
        if self.weight_names is None:
            return tuple(next(iter(self.weights.values())).shape)
        e, d, h = self.weights[self.weight_names.down].shape
        return e, h, d


def experts_of(module: nn.Module) -> Experts | None:
    """The experts of which `module` holds the weights; None if it holds none, or multiplies them in another way."""
    weights = _stacks_of(module)
    kind = converted_from(type(module))
    forward: Any = kind.forward
    file = file_of(kind)
    if weights and (weight_names := WEIGHT_NAMES.get(file)) and _is_gated_silu(module, weights, weight_names, file):
        return Experts(weights, weight_names)
    if weights and (file == TRANSFORMERS or _reaches_grouped_mm(forward, kind)):
        return Experts(weights, None)
    return None


def converted_from(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a conversion made `kind` from; `kind` itself if none did."""
    return getattr(kind, "converted_from", kind)


def file_of(kind: type[nn.Module]) -> str:
    """The file that defines `forward`, as a module's name."""
    return getattr(kind.forward, "__globals__", {}).get("__name__", "")


def _stacks_of(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, nn.Linear | internals.ConvNd):
        return {}
    parameters = {name: p for name, p in internals.own_parameters(module).items() if p is not None and not is_lazy(p)}
    return {name: p for name, p in parameters.items() if p.ndim == 3 and p.shape[0] > 1}


def _is_gated_silu(module: Any, weights: dict[str, Tensor], weight_names: WeightNames, file: str) -> bool:
    names = weight_names.all
    if sorted(weights) != sorted(names) or len(internals.own_parameters(module)) != len(names):
        return False
    e, d, h = weights[weight_names.down].shape
    if any(weights[name].shape != (e, 2 * h // len(weight_names.gate_up), d) for name in weight_names.gate_up):
        return False
    if file != TRANSFORMERS:
        return True
    others = ("is_transposed", "has_bias", "has_post_expert_norm")
    is_plain = module.has_gate and module.is_concatenated and not any(getattr(module, name, False) for name in others)
    activation = getattr(module, "act_fn", None)
    is_silu = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    return is_plain and is_silu and type(module)._apply_gate.__module__ == TRANSFORMERS  # not a gate of its own


def _reaches_grouped_mm(function: Callable[..., Any], owner: type, depth: int = 3) -> bool:
    # Whether the function, or one that it names, names torch's grouped GEMM.
    function = inspect.unwrap(function)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    if "_grouped_mm" in names or "grouped_mm" in names:
        return True
    known = getattr(function, "__globals__", {})
    called = (known.get(name, getattr(owner, name, None)) for name in names) if depth else ()
    return any(_reaches_grouped_mm(callee, owner, depth - 1) for callee in called if inspect.isfunction(callee))


def routers(module: nn.Module) -> set[int]:
    """The ids of the linear layers that choose among experts, or weigh a shared one.

    Such a layer lies in the block of the experts: the smallest module around them that has other parameters. There it
    is any layer of a module that is a router by its name or class; or it is named so, or a gate ("gate", "wg"), and
    has one output, or one for each expert.
    """
    modules = dict(internals.named_modules(module))
    ids: set[int] = set()
    for fqn, part in modules.items():
        stacks = _stacks_of(part)
        count = next(iter(stacks.values())).shape[0] if stacks else 0
        if isinstance(part, nn.ModuleList | nn.ModuleDict) and fqn.endswith("experts"):
            count = len(part)
        block, experts = fqn, set(part.modules())
        others = dict[str, nn.Module]()
        while count > 1 and block and not any(internals.own_parameters(other) for other in others.values()):
            block = block.rpartition(".")[0]
            around = internals.named_modules(modules[block])
            others = {name: other for name, other in around if other not in experts and other is not modules[block]}
        inside = set[nn.Module]()  # routers of several layers
        for name, other in others.items():
            parts = name.split(".")
            is_router = parts[-1].startswith("rout") and not parts[-1].startswith("routed")
            if (is_router or "router" in type(other).__name__.lower()) and not isinstance(other, nn.Linear):
                inside.update(other.modules())
            is_named = is_router or any(part == "wg" or part.endswith("gate") for part in parts)
            if isinstance(other, nn.Linear) and (other in inside or (is_named and other.out_features in (1, count))):
                ids.add(id(other))
    return ids


# A model of time: the operations of the nine GEMMs, and the bytes of GEMMs and casts. Its rates are fitted to one H100
# (Llama 4 Scout, DeepSeek-V3, Qwen3-30B and Mixtral; forward and backward against compiled bfloat16), and meet those
# GEMMs within 2 % and those ratios within 4 %; the rate of promoted sums to `rowwise` beside `rowwise_fast` on an H200,
# within 4 % too.
_OPERATIONS = {"bfloat16": 737e12, "float8": 1339e12, "float8 promoted": 1116e12}  # a second
_GEMM_BYTES = {"bfloat16": 4.37e12, "float8": 2.51e12}  # a second, as if every GEMM read each operand once
_CAST_BYTES = 2.95e12  # a second


def are_multiplied_apart(recipe: Recipe) -> bool:
    """Whether gradients are cast to E5M2, of which no library has grouped GEMMs."""
    return recipe.cast_plans.grad_output.both.format == E5M2


def speed_of_experts(shape: tuple[int, ...], tokens_per_expert: float, recipe: Recipe) -> float:
    """The predicted speed of float8 experts, times that of bfloat16, forward and backward, weights cast once a pass.

    It is of GEMMs of groups; E5M2 gradients, which are multiplied expert by expert, take longer.

    Shapes:
        shape is (experts, hidden_dim, dim).
    """
    # Elements of one expert: input, hidden, one of three weights.
    _, h, d = shape
    x, hidden, weight = tokens_per_expert * d, tokens_per_expert * h, h * d
    operations = 18 * tokens_per_expert * h * d  # three of each pass of forward, grad_input and grad_weight
    plain = operations / _OPERATIONS["bfloat16"] + (26 * x + 34 * hidden + 18 * weight) / _GEMM_BYTES["bfloat16"]
    multiply = sum(operations / 3 / _OPERATIONS[_arithmetic(gemm)] for gemm in recipe.gemms.values())
    multiply += (8 * x + 12 * hidden + 12 * weight) / _GEMM_BYTES["float8"]
    # Delayed scaling reads each matrix once, the others twice.
    casts = 18 * weight + 12 * x + 28 * hidden if recipe.delayed is None else 12 * weight + 8 * x + 18 * hidden
    return plain / (multiply + casts / _CAST_BYTES)


def _arithmetic(gemm: Gemm) -> str:
    if gemm.a.format is None:
        return "bfloat16"
    return "float8" if gemm.use_fast_accum else "float8 promoted"

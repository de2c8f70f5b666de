"""Who is timed: bfloat16, torchao and f8emu, on copies of one model, with and without activation checkpointing."""

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.runner import BASELINE, AbsentError
from f8emu.spec import RECIPES, Cast, Recipe, recipe_by_name
from f8emu.torch import Float8Weight, convert_to_float8_training, float8_checkpoint_policy
from f8emu.torch.weights.float8_weight import refill_all

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
AT_REST = "+at-rest"  # the suffix of subjects whose weights rest as float8 from one optimizer step to the next
SUBJECTS = (BASELINE, *(f"torchao/{name}" for name in TORCHAO_RECIPES), *(f"f8emu/{name}" for name in RECIPES))
RESTING = tuple(f"f8emu/{name}{AT_REST}" for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"))
MODES = ("compiled", "eager")
RECOMPUTE = "+recompute"  # the suffix of subjects with `recompute_casts`
Call = Callable[[Tensor], Tensor]


def torchao(module: str = "torchao.float8") -> Any:
    """A module of torchao.

    Raises:
        AbsentError: torchao is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise AbsentError(f"torchao is not installed ({error})") from error


def recipe_of(subject: str) -> Recipe | None:
    """None is bfloat16."""
    if subject == BASELINE:
        return None
    return recipe_by_name(subject.partition("/")[2].removesuffix(AT_REST).removesuffix(RECOMPUTE))


def fast(recipe: Recipe, **casts: Cast) -> Recipe:
    """Fast accumulation in the backward pass too, as torchao's experts have it."""
    gemms = {name: replace(recipe.gemms[name], use_fast_accum=True, **casts) for name in ("grad_input", "grad_weight")}
    return replace(recipe, name=f"{recipe.name}, fast", **gemms)


def converted(subject: str, model: nn.Module, *, left_out: Sequence[str] = ()) -> nn.Module:
    """The model under the subject's recipe, in place, but for layers with a name of `left_out`.

    torchao's casts are ordinary operations, which a compiler recomputes; f8emu's are under `RECOMPUTE`.
    """

    def is_wanted(_: nn.Module, name: str) -> bool:
        return not set(left_out) & set(name.split("."))

    library, _, name = subject.partition("/")
    if subject == BASELINE:
        return model
    if library == "f8emu":
        options: dict[str, Any] = {"module_filter_fn": is_wanted, "recompute_casts": name.endswith(RECOMPUTE)}
        options["float8_primary_weights"] = name.endswith(AT_REST)
        model = convert_to_float8_training(model, config=recipe_of(subject), **options)
    else:
        config = torchao().Float8LinearConfig.from_recipe_name(name)
        model = torchao().convert_to_float8_training(model, config=config, module_filter_fn=is_wanted)
    left = [name for name, module in model.named_modules() if type(module) is nn.Linear and is_wanted(module, name)]
    assert not left, f"{subject}: {', '.join(left)} not converted; its figures would be bfloat16's"
    return model


def compile_options(subject: str) -> dict[str, Any]:
    """For these sizes alone. torchao's rowwise recipes get the option that torchtitan gives them."""
    options = {"emulate_precision_casts": True} if subject.startswith("torchao/rowwise") else None
    return {"dynamic": False, "options": options}


def compiled(subject: str, model: nn.Module) -> Call:
    """The model as one graph."""
    return torch.compile(model, fullgraph=True, **compile_options(subject))


@dataclass(slots=True, kw_only=True)
class Subject:
    """A model with its own input, ready to step."""

    call: Call
    model: nn.Module
    x: Tensor
    grad_output: Tensor
    microbatches: int = 1
    at_rest: list[Float8Weight] = field(default_factory=list)

    def free(self) -> None:
        """Drops the gradients."""
        self.x.grad = None
        for p in self.model.parameters():
            p.grad = None

    def forward(self) -> Tensor:
        """The output.

        The input is a new tensor each time, as in training: f8emu casts one tensor once, whoever reads it.
        """
        return self.call(self.x.view_as(self.x))

    def step(self) -> None:
        """What training does a step, without the optimizer: passes that accumulate gradients, and the new codes."""
        self.free()
        for _ in range(self.microbatches):
            self.forward().backward(self.grad_output)
        refill_all(self.at_rest)

    def results(self) -> list[Tensor]:
        """Output and gradients of one more step."""
        self.free()
        output = self.forward()
        output.backward(self.grad_output)
        return [output.detach(), *self.gradients]

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the last pass."""
        grads = (self.x.grad, *(p.grad for p in self.model.parameters()))
        return [grad for grad in grads if grad is not None]


def make_subject(
    name: str,
    mode: str,
    model: nn.Module,
    x: Tensor,
    grad_output: Tensor,
    checkpointing: str = "none",
    microbatches: int = 1,
) -> Subject:
    """A subject on its own copy of `model` and `x`.

    Raises:
        AbsentError: its library is not installed.
    """
    copied = converted(name, copy.deepcopy(model))
    whole = checkpointed(name, copied, checkpointing)
    call = compiled(name, whole) if mode == "compiled" else whole
    at_rest: list[Float8Weight] = [weight for weight in copied.parameters() if isinstance(weight, Float8Weight)]
    for weight in at_rest:
        weight.take_master()  # as an optimizer does
    own_x = x.clone().requires_grad_()
    return Subject(
        call=call, model=copied, x=own_x, grad_output=grad_output, microbatches=microbatches, at_rest=at_rest
    )


# Activation checkpointing: which results are kept, and which are computed again

CHECKPOINTING = ("none", "full", "selective")
_aten = torch.ops.aten
ATTENTION_OPS: tuple[torch._ops.OpOverload, ...] = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)
BFLOAT16_OPS = (_aten.mm.default, _aten.addmm.default, *ATTENTION_OPS)
# With the maximum of a tensor, as torchtitan has it (its pull request 701): the amaxes of torchao's tensorwise.
TORCHAO_OPS = (_aten._scaled_mm.default, _aten.max.default, *BFLOAT16_OPS)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass, but for the results that `options` keep."""

    def __init__(self, block: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.block = block
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, **self.options)


def checkpointed(subject: str, model: nn.Module, checkpointing: str) -> nn.Module:
    """The subject's model under one of `CHECKPOINTING`; selective keeps GEMMs, attention and amaxes."""
    if checkpointing == "none":
        return model
    if checkpointing == "full":
        return Checkpointed(model, {})
    library = subject.partition("/")[0]
    kept: Any = list(TORCHAO_OPS if library == "torchao" else BFLOAT16_OPS)
    if library == "f8emu":
        kept = float8_checkpoint_policy(also=ATTENTION_OPS)
    return Checkpointed(model, {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)})

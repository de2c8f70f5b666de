"""Convert a model to float8 training: `nn.Linear` layers become `Float8Linear`, in place, and a report says which.

Experts of mixtures are converted too (`experts`). A layer that cannot be converted is reported here, at conversion, and
not in the middle of training.
"""

from __future__ import annotations  # short signatures in `help`

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, overload

from torch import Tensor, nn
from typing_extensions import deprecated

from f8emu.spec.chips import CHIPS
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.names import CastFromName, EngineName
from f8emu.spec.recipe import CastFrom, Recipe
from f8emu.torch.chip import CHIP
from f8emu.torch.conversion.experts import (
    ConvertedExperts,
    convert_experts,
    dequantize_experts,
    gather_experts_as_codes,
)
from f8emu.torch.conversion.filters import ModuleFilter
from f8emu.torch.conversion.mixtures import are_multiplied_apart
from f8emu.torch.conversion.report import (
    ConversionReport,
    Outcome,
    expert_modules,
    float8_subclass,
    float_layer,
    linear_class,
    linear_layers,
    report_of,
    sharded_layers,
)
from f8emu.torch.gemm.engine import resolve_engine
from f8emu.torch.layer.delayed_update import UpdateGroup
from f8emu.torch.layer.experts import ExpertsSettings
from f8emu.torch.layer.first_step import FirstStep
from f8emu.torch.layer.float8_layer import shortened
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.recipes import RecipeLike, resolve_recipe, torchao_options
from f8emu.torch.torch_internals import named_modules, own_parameters, rank_of_process, replace_modules
from f8emu.torch.weights.codes import require_codes
from f8emu.torch.weights.float8_weight import Float8Weight
from f8emu.torch.weights.sharded_weight import ShardedWeight

_log = logging.getLogger("f8emu")
_CALL = "convert_to_float8_training"
_Module = TypeVar("_Module", bound=nn.Module)
_DEFAULT = "tensorwise"  # the recipe of a conversion that names none, as in torchao


def convert_to_float8_training(
    module: _Module,
    *,
    config: RecipeLike | None = None,
    module_filter_fn: ModuleFilter | None = None,
    engine: EngineName = "auto",
    pad: bool = False,
    recompute_casts: bool = False,
    subclasses: Collection[type[nn.Linear]] = (),
    enable_fsdp_float8_all_gather: bool = False,
    float8_primary_weights: bool = False,
    cast_weight_from: CastFrom | CastFromName | None = None,
) -> _Module:
    """Replace every `nn.Linear` in `module` by a `Float8Linear` with the same parameters, and convert experts.

    Experts are those of transformers (all that have its `use_experts_implementation`) and of torchtitan, and other
    modules whose `forward` calls torch's grouped GEMM. They keep their class, as a base of the new one, and their
    parameters; the layers that choose among experts stay in high precision.

    Shared modules and parameters stay shared. A linear layer that contains others, such as adapters, keeps them, and
    they are converted too. A module that reads its layers' weights directly computes in high precision, as
    nn.TransformerEncoderLayer does in evaluation without gradients.

    The first rank logs the report at INFO on the logger "f8emu" and, after the first step of an optimizer, a warning if
    converted layers were never called or were replaced by plain ones.

    Args:
        module: the model, or a single linear layer. A single layer is not changed itself: its converted copy is
            returned, and the layers inside it are converted in place.
        config: the recipe, its name, or torchao's Float8LinearRecipeName or Float8LinearConfig for it, whose options
            `enable_fsdp_float8_all_gather`, `pad_inner_dim` and `emulate` count too. None is "tensorwise", torchao's
            default.
        module_filter_fn: (layer or module of experts, its name before the model was wrapped) -> whether to convert it;
            None converts all but heads (`lm_head`), which servers keep in high precision. Where it reads what experts
            lack, such as in_features, it is asked for each of their matrices as a layer.
        engine: as for `scaled_mm`. "hardware" is checked at once if the model is on an accelerator, else at the first
            call, so that a model can be converted before it moves.
        pad: also convert layers whose sizes are not multiples of 16, except adapters (`Outcome.ADAPTER`). Their GEMMs
            are zero-padded: the results are bit-identical, the copies cost time.
        recompute_casts: let compiled code repeat tensorwise, rowwise and delayed casts of a layer's input in the
            backward pass if that input is saved anyway or cheap to recompute: less memory, more time. The codes are
            those of the input as the backward pass computes it.
        subclasses: classes derived from nn.Linear to convert too. Their `forward` may only surround
            `super().forward()`, which then computes in float8; a class that never calls it is left alone. The new layer
            is an instance of both its old class and Float8Linear.
        enable_fsdp_float8_all_gather: under FSDP2 (`fully_shard` after this call) gather the weights as float8, with
            the scales of the whole weight: see `precompute_float8_dynamic_scale_for_fsdp`. The shards stay in high
            precision. Not for blockwise. So are the weights of experts, those of `Float8Experts` too, unless scaling is
            delayed. Experts must be whole on a rank: keep `shard_placement_fn` at its default, dimension 0.
        float8_primary_weights: like TransformerEngine's `fp8_model_init`: on the device a layer holds only float8 codes
            and scales of its weight, 1 byte an element under tensorwise and delayed, 2 under the rowwise
            recipes. The values move to the host, and become the float32 masters of the optimizer,
            `MasterWeights`, which is made after this call. The state dict holds these masters. Under FSDP2 and tensor
            parallelism each rank holds codes and float32 masters of its part, and FSDP2 gathers the codes. Not with
            blockwise, or weights that other modules read. Experts keep their weights.
        cast_weight_from: "bfloat16" casts the values that a bfloat16 copy of a weight holds: in every pass, for every
            gather, at rest and in an export, so that a trainer of float32 parameters multiplies the codes of a server
            that quantizes its bfloat16 checkpoint. Parameters, masters and gradients keep their dtypes. "parameter"
            casts the parameter in its own dtype. None: as the recipe says, which is "parameter" in all named ones.

    Returns:
        `module`, converted in place; for a single linear layer, the new one.

    Raises:
        SpecError: an unknown recipe or `cast_weight_from`, or a `module_filter_fn` that does not take (module, name).
        OperandError: sizes that are not multiples of 16, or a model that was converted under another recipe or engine;
            the model is unchanged.
        UnsupportedError: `engine="hardware"` on a device that is not the recipe's chip; formats that layers do not cast
            to; weights that are already sharded; weights that cannot be stored or gathered as float8.
    """
    # 1. What is done with each layer, and whether all of that is possible: nothing has changed before it is.
    recipe = resolve_recipe(_CALL, _DEFAULT if config is None else config, cast_weight_from)
    options = torchao_options(config)
    pad |= "pad_inner_dim" in options
    enable_fsdp_float8_all_gather |= "enable_fsdp_float8_all_gather" in options
    if "emulate" in options and engine == "hardware":
        raise OperandError(f'{_CALL}: engine must be "emulated" or left out with emulate=True; got "hardware"')
    engine = "emulated" if "emulate" in options else engine
    if enable_fsdp_float8_all_gather:
        require_codes(_CALL, recipe, "enable_fsdp_float8_all_gather")
    report = report_of(module, recipe, module_filter_fn, pad, subclasses)
    layers = dict(linear_layers(module))
    chosen = {fqn: layers[fqn] for fqn in report.names(Outcome.CONVERTED) if fqn in layers}
    already = {fqn: layer for fqn, layer in layers.items() if isinstance(layer, Float8Linear)}
    mixtures = {fqn: (part, experts) for fqn, part, experts in expert_modules(module)}
    chosen_experts = [(fqn, *mixtures[fqn]) for fqn in report.names(Outcome.CONVERTED) if fqn in mixtures]
    _check_report(report)
    of_experts = {fqn: part.settings for fqn, (part, _) in mixtures.items() if isinstance(part, ConvertedExperts)}
    _check_converted(report, {**already, **of_experts}, engine, recompute_casts)
    weights = [layer.weight for layer in chosen.values()]
    weights += [weight for _, _, experts in chosen_experts for weight in experts.weights.values()]
    for device in {weight.device for weight in weights}:
        if device.type not in ("cpu", "meta"):  # from these the model may still move
            resolve_engine(_CALL, device, engine, CHIPS[recipe.chip])
    if float8_primary_weights:
        _check_primary(recipe, module, chosen, already)
    # 2. The new layers. By the from_float of Float8Linear itself: a subclass may have one of its own.
    from_float = Float8Linear.__dict__["from_float"].__func__
    new: dict[int, Float8Linear] = {}
    group = UpdateGroup()
    for fqn, layer in chosen.items():
        if id(layer) not in new:
            cls, settings = float8_subclass(type(layer)), {"engine": engine, "recompute_casts": recompute_casts}
            made = new[id(layer)] = from_float(cls, layer, recipe=recipe, **settings)
            if made.delayed is not None:
                made.delayed.notes.name = fqn
                made.update_with(group)
    # 3. Their weights.
    if float8_primary_weights:
        _replace_weights(new.values(), lambda x: Float8Weight.of(x.weight, x.recipe, x.delayed))
    elif enable_fsdp_float8_all_gather:
        plain = [x for x in (*new.values(), *already.values()) if not isinstance(x.weight, ShardedWeight)]
        _replace_weights(plain, lambda x: ShardedWeight(x.weight.detach(), x.recipe))
    # 4. The model, and what is said of it.
    module = replace_modules(module, new)
    for fqn, part, experts in chosen_experts:
        if not isinstance(part, ConvertedExperts):  # one with several names
            convert_experts(fqn, part, experts, recipe, engine, group)
    if new:
        FirstStep(module, {fqn: new[id(layer)] for fqn, layer in chosen.items()})
    has_gathered = enable_fsdp_float8_all_gather and not float8_primary_weights and gather_experts_as_codes(module)
    messages: list[str] = []  # at WARNING, which is seen where no logging is set up
    if chosen_experts and are_multiplied_apart(recipe):
        messages.append(
            f"recipe {recipe.label!r} casts gradients to E5M2, which no library multiplies by groups: the GEMMs of "
            "each expert run one by one, and the host waits for their sizes; on a GPU config='rowwise' is faster"
        )
    excluded = {entry.fqn: entry.reason for entry in report.entries if entry.outcome is Outcome.TYPE}
    if left := [fqn for fqn in excluded if fqn in mixtures]:
        messages.append(f"experts stay in high precision: {shortened(left)}: {excluded[left[0]]}")
    if module_filter_fn is None and (heads := report.names(Outcome.FILTER)):
        messages.append(
            f"{shortened(heads)} stays in high precision, as servers keep it and `f8emu export` leaves it; to convert "
            "it too, pass module_filter_fn=lambda module, name: True"
        )
    if not chosen and not chosen_experts and not has_gathered:
        reasons = (f"{entry.fqn or 'the module'}: {entry.reason}" for entry in report.entries if entry.reason)
        known = f"{report.summary}; {first}" if (first := next(reasons, "")) else report.summary
        nothing = f"nothing to convert; {known}; plan_conversion(model) gives the report"
        warnings.warn(f"{_CALL}: {nothing}", UserWarning, stacklevel=2)
    elif config is None:
        messages.append(
            f"{report.summary}; float8 GEMMs multiply {report.share:.1%} of the parameters. This recipe is the "
            "default; name one to choose: config='rowwise' (`f8emu recipes`)"
        )
    if rank_of_process()[0] == 0:
        _log.info("%s: %s", _CALL, report.screen)
        for text in messages:
            _log.warning("%s: %s", _CALL, text)
    return module


@deprecated("swap_linear_with_float8_linear is an older name; call convert_to_float8_training, with the same arguments")
def swap_linear_with_float8_linear(module: _Module, **options: Any) -> _Module:
    """The older name of `convert_to_float8_training`; warns of it with a DeprecationWarning."""
    return convert_to_float8_training(module, **options)


def plan_conversion(
    module: nn.Module,
    *,
    config: RecipeLike | None = None,
    module_filter_fn: ModuleFilter | None = None,
    pad: bool = False,
    subclasses: Collection[type[nn.Linear]] = (),
    tokens_per_expert: float | None = None,
) -> ConversionReport:
    """Report what `convert_to_float8_training` would do, and which weights it would not consider; change nothing.

    With `tokens_per_expert`, how many tokens a pass gives each expert, the report predicts how fast experts are in
    float8, by the operations of their GEMMs and the bytes of their casts on an H100.

    Raises:
        SpecError: an unknown recipe.
    """
    recipe = resolve_recipe("plan_conversion", _DEFAULT if config is None else config)
    pad |= "pad_inner_dim" in torchao_options(config)
    return report_of(module, recipe, module_filter_fn, pad, subclasses, tokens_per_expert)


@overload
def dequantize_float8_training(module: Float8Linear) -> nn.Linear: ...
@overload
def dequantize_float8_training(module: _Module) -> _Module: ...
def dequantize_float8_training(module: nn.Module) -> nn.Module:
    """Turn every `Float8Linear` in `module` back into the `nn.Linear` that it was, and experts into what they were.

    The inverse of `convert_to_float8_training`. Hooks, mode and subclass stay, shared layers stay shared; the state of
    delayed scaling is dropped. The results are ordinary layers for other libraries, such as torchao's `quantize_`.

    Returns:
        `module`, changed in place; for a single layer, the new one.

    Raises:
        OperandError: a class derived from Float8Linear, which never was an nn.Linear; the model is unchanged.
        UnsupportedError: a sharded model; it is unchanged.
    """
    # 1. Whether all of it is possible: nothing has changed before it is.
    layers = {fqn: layer for fqn, layer in linear_layers(module) if isinstance(layer, Float8Linear)}
    sharded = sharded_layers(module)
    new: dict[int, nn.Linear] = {}
    for fqn, layer in layers.items():
        if id(layer) in sharded:
            raise UnsupportedError(
                f"dequantize_float8_training: the weights must be whole tensors; got sharded ones in "
                f"{fqn or 'the module'}; load the state dict into a model of nn.Linear, whose keys are the same"
            )
        cls = linear_class(type(layer))
        if cls is None:
            raise OperandError(
                f"dequantize_float8_training: {fqn or 'the module'} must be a Float8Linear that a conversion made; got "
                f"{type(layer).__name__}, a class of its own; replace it with the layer that it stands for"
            )
        if id(layer) not in new:
            new[id(layer)] = float_layer(layer, cls)
    experts = [part for part in module.modules() if isinstance(part, ConvertedExperts)]
    if any(id(part) in sharded for part in experts):
        raise UnsupportedError(
            "dequantize_float8_training: experts must not be managed by FSDP; load the state dict into a model that is "
            "not converted, whose keys are the same"
        )
    # 2. Weights in high precision, in the weights' dtype, and the layers in the model.
    _replace_weights([layer for layer in new.values() if isinstance(layer.weight, Float8Weight)], _values)
    for part in experts:
        dequantize_experts(part)
    return replace_modules(module, new)


def _values(layer: nn.Linear) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Float8Weight), "others stay"
    return weight.master.to(weight.device, weight.dtype, copy=True)


_Layer = TypeVar("_Layer", bound=nn.Linear)


def _replace_weights(layers: Iterable[_Layer], make: Callable[[_Layer], Tensor]) -> None:
    # By identity: layers that share a weight go on sharing it.
    new: dict[int, nn.Parameter] = {}
    for layer in layers:
        old = layer.weight
        if id(old) not in new:
            new[id(old)] = nn.Parameter(make(layer), old.requires_grad)
            new[id(old)].grad = old.grad
        layer.weight = new[id(old)]


def _check_report(report: ConversionReport) -> None:
    sharded = [fqn or "the module" for fqn in report.names(Outcome.SHARDED)]
    if sharded:
        raise UnsupportedError(
            f"{_CALL}: the weights must be whole tensors; got sharded ones in {', '.join(sharded)}; convert the model "
            "first, then call fully_shard or another sharding"
        )
    odd = [f"{e.fqn or 'the module'} {list(e.shape)}" for e in report.entries if e.outcome is Outcome.SIZE]
    if odd:
        raise OperandError(
            f"{_CALL}: in_features and out_features must be multiples of {CHIP.size_multiple}; got [out, in] of "
            f"{', '.join(odd)}; leave these layers out with module_filter_fn, or pass pad=True, which zero-pads their "
            "GEMMs"
        )


def _check_converted(
    report: ConversionReport, already: dict[str, Float8Linear | ExpertsSettings], engine: str, recompute_casts: bool
) -> None:
    for fqn, layer in already.items():
        recomputes = layer.recompute_casts if isinstance(layer, Float8Linear) else recompute_casts
        if (layer.recipe, layer.engine, recomputes) != (report.recipe, engine, recompute_casts):
            raise OperandError(
                f"{_CALL}: {fqn or 'the module'} is in float8 under recipe {layer.recipe.label!r}, engine "
                f"{layer.engine!r} and recompute_casts={recomputes} already; requested are "
                f"{report.recipe.label!r}, {engine!r} and {recompute_casts}; convert the model once, from nn.Linear"
            )


def _check_primary(
    recipe: Recipe,
    module: nn.Module,
    chosen: dict[str, nn.Linear],
    already: dict[str, Float8Linear],
) -> None:
    other = [fqn or "the module" for fqn, layer in already.items() if not isinstance(layer.weight, Float8Weight)]
    if other:
        raise OperandError(
            f"{_CALL}: with float8_primary_weights=True every converted layer holds only float8 weights; "
            f"{', '.join(other)} was converted without it; convert the model once, from nn.Linear"
        )
    require_codes(_CALL, recipe, "float8_primary_weights")
    _require_sole_reader(recipe, module, chosen)


def _require_sole_reader(recipe: Recipe, module: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Raise UnsupportedError for a weight that another module reads, or two layers with different scales."""
    # 1. Layers that share a weight: one scale for both. 2. Every other reader of a weight.
    owner: dict[int, tuple[str, nn.Linear]] = {}
    for fqn, layer in layers.items():
        first, known = owner.setdefault(id(layer.weight), (fqn, layer))
        if known is not layer and recipe.delayed is not None:
            raise UnsupportedError(
                f"{_CALL}: with float8_primary_weights=True a weight has one scale; under recipe {recipe.label!r} "
                f"{first} and {fqn} share a weight and have a scale each; leave one out with module_filter_fn"
            )
    ours = set(map(id, layers.values()))
    for fqn, part in named_modules(module):
        for name, parameter in own_parameters(part).items():
            if id(parameter) in owner and (id(part) not in ours or name != "weight"):
                raise UnsupportedError(
                    f"{_CALL}: with float8_primary_weights=True only float8 layers can read a weight; the one of "
                    f"{owner[id(parameter)][0]} is {fqn}.{name} too; leave the layer out with module_filter_fn"
                )

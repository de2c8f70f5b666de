"""The state of delayed scaling between torch's flat tensors and JAX's `Float8State` of every layer.

torch (`f8emu.torch.delayed_state_dict`): of a layer, stacked in the order of TENSORS,
    amax_history [3, history_length], inv_scale [3], initialized [3], counts [3, 3], amax [3]
JAX: `Float8State` of a `DelayedState` for each tensor that the recipe scales so,
    amax_history [history_length], inv_scale [], initialized [] float32

`amax` is what torch saw since the last update; JAX has it in its gradients, so that it does not travel. `counts` are
for reports, and begin at zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from f8emu.interop.arrays import to_jax, to_numpy, to_torch
from f8emu.interop.parameters import DEFAULT_RULES, ParameterRule, nested, renamed
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.names import RecipeName
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.spec.scaling import TENSORS, DelayedScaling, DelayedState, Float8State

_FIELDS = ("amax_history", "inv_scale", "initialized", "counts", "amax")
_UNCALLED = -1.0
"""`f8emu.torch`'s amax of a tensor without a cast since the last update."""


def float8_states_from_delayed_state_dict(
    state: Mapping[str, Any],
    recipe: Recipe | RecipeName = "delayed",
    *,
    rules: Sequence[ParameterRule] = DEFAULT_RULES,
) -> dict[str, Any]:
    """The state of a torch model for JAX: nested dicts as in the parameter tree, a `Float8State` for each layer.

    Args:
        state: the result of `f8emu.torch.delayed_state_dict`, also after it was saved and loaded.
        recipe: the recipe of all layers.
        rules: the rules of the parameters; a layer is renamed like its weight.

    Exactness: no bit changes; `initialized` becomes a number.

    Raises:
        SpecError: a recipe without delayed scaling.
        OperandError: missing or unknown entries, histories of another length, amaxes that no update has used yet.
    """
    call = "float8_states_from_delayed_state_dict"
    recipe, delayed = _delayed(call, recipe)
    # 1. The fields of each layer.
    layers: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = to_numpy(value, copy=None)
    # 2. A state for each, if its step is complete: an amax that no update has used would be lost.
    states: dict[str, Float8State] = {}
    for layer, values in layers.items():
        if set(values) != set(_FIELDS) or values["amax_history"].shape != (len(TENSORS), delayed.history_length):
            shapes = {name: list(value.shape) for name, value in sorted(values.items())}
            raise OperandError(
                f"{call}: layer {layer!r} must have {', '.join(_FIELDS)}, with {delayed.history_length} amaxes of each "
                f"tensor; got {shapes}; give what f8emu.torch.delayed_state_dict returned, and its recipe"
            )
        if not (values["amax"] == _UNCALLED).all():
            raise OperandError(
                f"{call}: layer {layer!r} has seen amaxes since its last update, {values['amax'].tolist()}, which "
                "would be lost; finish the backward pass, or call sync_float8_amax_and_scale_history(model), first"
            )
        of_tensors = (_state(values, i) if t in recipe.delayed_tensors else None for i, t in enumerate(TENSORS))
        states[_layer(call, layer, rules, to="flax")] = Float8State(*of_tensors)
    return nested(call, states)


def delayed_state_dict_from_float8_states(
    states: Any, recipe: Recipe | RecipeName = "delayed", *, rules: Sequence[ParameterRule] = DEFAULT_RULES
) -> dict[str, Any]:
    """The state of a JAX model, nested dicts of `Float8State`, for `f8emu.torch.load_delayed_state_dict`.

    The inverse of `float8_states_from_delayed_state_dict`, with its recipe and rules; `initialized` becomes a bool.

    Raises:
        SpecError: a recipe without delayed scaling.
        OperandError: a leaf that is not a `Float8State` of this recipe.
    """
    call = "delayed_state_dict_from_float8_states"
    recipe, delayed = _delayed(call, recipe)
    arrays: dict[str, Any] = {}
    for name, state in _layers(call, states, ""):
        got = tuple(tensor for tensor, of_tensor in zip(TENSORS, state, strict=True) if of_tensor is not None)
        if got != recipe.delayed_tensors:
            raise OperandError(
                f"{call}: layer {name!r} must have states of {' and '.join(recipe.delayed_tensors)}; got those of "
                f"{' and '.join(got)}; give the recipe of these states"
            )
        layer = _layer(call, name, rules, to="torch")
        fields = _stacked(to_numpy(state), delayed.history_length)
        arrays |= {f"{layer}.{field}" if layer else field: to_torch(array) for field, array in fields.items()}
    return arrays


def _state(values: Mapping[str, Any], i: int) -> DelayedState:
    amax_history, inv_scale, initialized = (values[name][i] for name in DelayedState._fields)
    return to_jax(DelayedState(amax_history, inv_scale, initialized.astype(inv_scale.dtype)))


def _stacked(state: Float8State, history_length: int) -> dict[str, Any]:
    # The tensors of torch's layer; for a tensor with dynamic scales, those before the first step.
    import numpy as np

    fields = {
        "amax_history": np.zeros((len(TENSORS), history_length), np.float32),
        "inv_scale": np.ones(len(TENSORS), np.float32),
        "initialized": np.zeros(len(TENSORS), np.bool_),
        "counts": np.zeros((3, len(TENSORS)), np.int64),
        "amax": np.full(len(TENSORS), _UNCALLED, np.float32),
    }
    for i, of_tensor in enumerate(state):
        if of_tensor is not None:
            fields["amax_history"][i] = of_tensor.amax_history
            fields["inv_scale"][i] = of_tensor.inv_scale
            fields["initialized"][i] = of_tensor.initialized is None or bool(of_tensor.initialized)
    return fields


def _delayed(call: str, recipe: Recipe | RecipeName) -> tuple[Recipe, DelayedScaling]:
    recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    if recipe.delayed is None:
        raise SpecError(f"{call}: recipe must have delayed scaling; got {recipe.name!r}, whose scales have no state")
    return recipe, recipe.delayed


def _layers(call: str, tree: Any, name: str) -> list[tuple[str, Float8State]]:
    if isinstance(tree, Float8State):
        return [(name, tree)]
    if isinstance(tree, Mapping):
        below = ((f"{name}.{key}" if name else str(key), value) for key, value in tree.items())
        return [layer for key, value in below for layer in _layers(call, value, key)]
    raise OperandError(
        f"{call}: {name or 'states'!r} must be a Float8State or a dict of them; got {type(tree).__name__}; give the "
        "states alone, without other variables"
    )


def _layer(call: str, layer: str, rules: Sequence[ParameterRule], *, to: str) -> str:
    # The layer's name on the other side, taken from its weight's, which has two axes.
    if not rules or not layer:
        return layer
    ours, theirs = (".weight", ".kernel") if to == "flax" else (".kernel", ".weight")
    try:
        name, _ = renamed(rules, layer + ours, 2, to=to)
    except OperandError as error:
        raise OperandError(f"{call}: {error}") from None
    if not name.endswith(theirs):
        raise OperandError(
            f"{call}: layer {layer!r}: the rules rename its weight to {name!r}, which is not a linear layer's; put a "
            "ParameterRule for it before the others"
        )
    return name.removesuffix(theirs)

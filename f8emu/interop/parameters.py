"""Whole models: torch's state dict, names with dots, and JAX's parameter tree, nested dicts or any pytree."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from f8emu.interop.arrays import to_jax, to_torch
from f8emu.interop.frameworks import library_of, require_jax
from f8emu.interop.rules import DEFAULT_RULES, ParameterRule, renamed
from f8emu.spec.errors import OperandError


def params_from_state_dict(
    state_dict: Mapping[str, Any],
    *,
    rules: Sequence[ParameterRule] = DEFAULT_RULES,
    like: Any = None,
    copy: bool | None = True,
) -> Any:
    """The parameters of a torch model as a tree of JAX arrays.

    Give `like` if names are ambiguous: an Embedding whose name does not contain `embed` looks like a linear layer
    to DEFAULT_RULES, and its table would be transposed. Names and shapes are compared with those of `like`.

        params = params_from_state_dict(model.state_dict(), rules=[*mine, *DEFAULT_RULES], like=variables["params"])

    Args:
        state_dict: name -> tensor, or numpy array, as safetensors loads it.
        rules: names and axes on either side; the first that fits holds. `rules=()` changes neither, for equinox, whose
            layers are laid out like torch's.
        like: a tree of the wanted structure: nested dicts, a flax state, an equinox module. Names and shapes must match
            it; leaves of it that are not arrays stay. None returns nested dicts, split at the dots.
        copy: as for `to_jax`; a weight [out, in] can share its memory with a kernel [in, out].

    Exactness: no bit and no dtype changes.

    Raises:
        OperandError: a name that no rule fits or that has no way back, two parameters of one name, an array that
            cannot be converted (`to_jax`), names or shapes other than those of `like`.
    """
    call = "params_from_state_dict"
    arrays: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        _convert(call, rules, name, tensor, copy, arrays, to="flax")
    return nested(call, arrays) if like is None else _filled(call, like, arrays)


def state_dict_from_params(
    params: Any,
    *,
    rules: Sequence[ParameterRule] = DEFAULT_RULES,
    like: Mapping[str, Any] | None = None,
    copy: bool | None = True,
) -> dict[str, Any]:
    """The parameters of a JAX model as a state dict of tensors: the inverse of `params_from_state_dict`.

    Args:
        params: nested dicts, or any pytree; leaves that are not arrays are left out.
        rules: as for `params_from_state_dict`.
        like: a state dict of the torch model, whose names and shapes must come out; None compares nothing.
        copy: as for `to_torch`.

    Raises:
        OperandError: as for `params_from_state_dict`.
    """
    call = "state_dict_from_params"
    state_dict: dict[str, Any] = {}
    for name, leaf in _named_leaves(params):
        if library_of(leaf) is not None:
            _convert(call, rules, name, leaf, copy, state_dict, to="torch")
    if like is not None:
        _require_same(call, {name: tuple(x.shape) for name, x in like.items()}, state_dict)
    return state_dict


def _convert(
    call: str,
    rules: Sequence[ParameterRule],
    name: str,
    x: Any,
    copy: bool | None,
    converted: dict[str, Any],
    *,
    to: str,
) -> None:
    if library_of(x) is None:
        kind = type(x).__name__
        raise OperandError(
            f"{call}: parameter {name!r} must be an array of torch, JAX or numpy; got {kind}; leave the entry out"
        )
    found = name
    try:
        if rules:
            found, rule = renamed(rules, name, x.ndim, to=to)
            x = rule.arranged(x, to=to)
    except OperandError as error:
        raise OperandError(f"{call}: {error}") from None
    if found in converted:
        remedy = "give one of them a ParameterRule of its own"
        raise OperandError(f"{call}: two parameters get the name {found!r}; {remedy}")
    try:
        converted[found] = (to_jax if to == "flax" else to_torch)(x, copy=copy)
    except OperandError as error:
        raise OperandError(f"{call}: parameter {name!r}: {error}; or leave the entry out") from None


def nested(call: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of values whose names have dots.

    Raises:
        OperandError: a name below another.
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        place: Any = tree
        for key in above:
            place = place.setdefault(key, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last in place:
            raise OperandError(f"{call}: {name!r} is below or above another parameter; rename one of them")
        place[last] = value
    return tree


def _filled(call: str, like: Any, arrays: Mapping[str, Any]) -> Any:
    jax = require_jax(f"interop.{call}")
    # Leaves that are no arrays (functions, sizes of an equinox module) stay as they are in `like`.
    leaves = list(_named_leaves(like))
    _require_same(call, {name: tuple(leaf.shape) for name, leaf in leaves if _is_parameter(leaf)}, arrays)
    filled = [arrays[name] if _is_parameter(leaf) else leaf for name, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), filled)


def _is_parameter(leaf: Any) -> bool:
    # An array, or the shape and dtype of one (`jax.eval_shape`).
    return library_of(leaf) is not None or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    jax = require_jax("interop.state_dict_from_params")
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        # a variable of flax nnx is around its array
        keys = path[:-1] if path and getattr(path[-1], "name", "") == "value" else path
        names = (next((getattr(key, f) for f in ("key", "name", "idx") if hasattr(key, f)), key) for key in keys)
        yield ".".join(map(str, names)), leaf


def _require_same(call: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Any]) -> None:
    # Names first: a shape is only compared where both sides have the parameter.
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise OperandError(
            f"{call}: the names must be those of `like`; missing {missing[:5]}, unknown {unknown[:5]}; give a "
            "ParameterRule that leads from one to the other"
        )
    for name, shape in wanted.items():
        got = tuple(found[name].shape)
        if got != shape:
            raise OperandError(
                f"{call}: {name!r} must have shape {list(shape)} as in `like`; got {list(got)}; give a ParameterRule "
                "with its axes, or the parameters of the same model"
            )

"""Whole models: torch's state dict, names with dots, and JAX's parameter tree, nested dicts or any pytree.

Rules, which read both ways, say how names and axes differ between torch and flax.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from f8emu.interop.arrays import to_jax, to_torch
from f8emu.interop.frameworks import library_of, require_jax
from f8emu.spec.errors import OperandError, SpecError

_FIELD = re.compile(r"\{(\w+)(\*?)\}")
_AXIS = re.compile(r"\(([^()]*)\)|(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRule:
    """One kind of parameter: its name and the order of its axes on either side.

        ParameterRule(
            torch="layers.{i}.attention.wq.weight",
            flax="layers_{i}.attention.query.kernel",
            axes="(heads head_dim) in -> in heads head_dim",
            sizes={"heads": 8},
        )

    Raises:
        SpecError: names with different fields, or axes that differ between the two sides.
    """

    torch: str
    """Name in a state dict. `{x}` stands for any characters but dots, `{x*}` for any characters; both may be empty."""
    flax: str
    """Name in a parameter tree, its keys joined by dots; the same fields."""
    axes: str | None = None
    """torch's axes -> flax's, as in einops: names, with parentheses around axes that are one axis in memory. None: any
    number of axes, unchanged."""
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Sizes of axes in parentheses; one axis of each pair of parentheses may be left out."""

    def __post_init__(self) -> None:
        # 1. Fields: a name must lead there and back. 2. Axes: the same on both sides, each once.
        fields = [sorted(_FIELD.findall(name)) for name in (self.torch, self.flax)]
        if fields[0] != fields[1]:
            raise SpecError(
                f"ParameterRule: both names need the same fields, or a name has no way back; got {self.torch!r} and "
                f"{self.flax!r}"
            )
        sides = [] if self.axes is None else self.axes.split("->")
        axes = [sorted(axis for group in _groups(side) for axis in group) for side in sides]
        if self.axes is not None and (len(sides) != 2 or axes[0] != axes[1] or len(set(axes[0])) != len(axes[0])):
            raise SpecError(
                "ParameterRule: axes must be 'torch axes -> flax axes' with the same names on both sides, each once, "
                f"as in 'out in -> in out'; got {self.axes!r}"
            )

    def renamed(self, name: str, *, to: str) -> str | None:
        """The name on side `to` (torch or flax); None if this rule does not match `name`."""
        source, target = (self.torch, self.flax) if to == "flax" else (self.flax, self.torch)
        match = _pattern(source).fullmatch(name)
        return None if match is None else _FIELD.sub(lambda field: match[field[1]], target)

    def takes(self, ndim: int, *, to: str) -> bool:
        """Whether an array with `ndim` axes fits the side that is not `to`."""
        return self.axes is None or len(self._sides(to)[0]) == ndim

    def arranged(self, array: Any, *, to: str) -> Any:
        """The array of torch, JAX or numpy with its axes in the order of side `to`; a view if the library gives one.

        Raises:
            OperandError: an axis in parentheses that its sizes do not divide, or sizes that are not given.
        """
        if self.axes is None:
            return array
        # The steps of einops: split the axes in parentheses, permute, join.
        source, target = self._sides(to)
        sizes = dict(self.sizes)
        for group, size in zip(source, array.shape, strict=True):
            sizes |= self._split(group, int(size))
        flat = [axis for group in source for axis in group]
        order = [flat.index(axis) for group in target for axis in group]
        split = array if len(flat) == array.ndim else array.reshape(tuple(sizes[axis] for axis in flat))
        turned = split.permute(order) if hasattr(split, "permute") else split.transpose(order)
        shape = tuple(math.prod(sizes[axis] for axis in group) for group in target)
        return turned if len(flat) == len(shape) else turned.reshape(shape)

    def _sides(self, to: str) -> tuple[Sequence[tuple[str, ...]], Sequence[tuple[str, ...]]]:
        # of a rule for any number of axes: none
        torch, flax = (_groups(side) for side in (self.axes or "->").split("->"))
        return (torch, flax) if to == "flax" else (flax, torch)

    def _split(self, group: tuple[str, ...], size: int) -> dict[str, int]:
        # One axis of a group follows from the others.
        sizes = {axis: self.sizes[axis] for axis in group if axis in self.sizes}
        left = [axis for axis in group if axis not in sizes]
        known = math.prod(sizes.values())
        if len(left) > 1 or size % known or (not left and size != known):
            raise OperandError(
                f"ParameterRule {self.torch!r}: axis ({' '.join(group)}) of size {size} must be split by sizes of all "
                f"of its axes but one; got {dict(self.sizes)}; give the sizes of this model"
            )
        return sizes | {axis: size // known for axis in left}


def renamed(rules: Sequence[ParameterRule], name: str, ndim: int, *, to: str) -> tuple[str, ParameterRule]:
    """The name on side `to` (torch or flax), and the rule that gives it: the first that fits name and axes."""
    back = "torch" if to == "flax" else "flax"
    first = _first(rules, name, ndim, to=to)
    if first is None:
        raise OperandError(
            f"parameter {name!r} with {ndim} axes: no rule fits its name on the side of {back}; add a ParameterRule, "
            "or end the rules with DEFAULT_RULES"
        )
    # A name without a way back would be another parameter after the next conversion.
    target = len(first[1]._sides(to)[1]) if first[1].axes is not None else ndim
    returned, _ = _first(rules, first[0], target, to=back) or (None, None)
    if returned != name:
        raise OperandError(
            f"parameter {name!r}: the rules rename it to {first[0]!r}, and that to {returned!r}; put a ParameterRule "
            "for this name before the others, so that it has a way back"
        )
    return first


def _first(rules: Sequence[ParameterRule], name: str, ndim: int, *, to: str) -> tuple[str, ParameterRule] | None:
    for rule in rules:
        target = rule.renamed(name, to=to)
        if target is not None and rule.takes(ndim, to=to):
            return target, rule
    return None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts: list[str] = []
    end = 0
    for match in _FIELD.finditer(name):
        parts += [re.escape(name[end : match.start()]), f"(?P<{match[1]}>{'.*' if match[2] else '[^.]*'})"]
        end = match.end()
    return re.compile("".join([*parts, re.escape(name[end:])]))


@cache
def _groups(side: str) -> tuple[tuple[str, ...], ...]:
    # The axes of one side; those in one pair of parentheses together.
    return tuple(tuple((match[1] or match[2]).split()) for match in _AXIS.finditer(side))


DEFAULT_RULES = (
    ParameterRule(
        torch="{path*}embed{rest}.weight", flax="{path*}embed{rest}.embedding", axes="vocabulary d -> vocabulary d"
    ),
    ParameterRule(torch="{path*}.weight", flax="{path*}.kernel", axes="out in -> in out"),
    ParameterRule(torch="{path*}.weight", flax="{path*}.kernel", axes="out in h w -> h w in out"),
    ParameterRule(torch="{path*}.weight", flax="{path*}.kernel", axes="out in w -> w in out"),
    ParameterRule(torch="{path*}.weight", flax="{path*}.scale", axes="d -> d"),
    ParameterRule(torch="{path*}.weight_scale", flax="{path*}.kernel_scale", axes="out in -> in out"),
    ParameterRule(torch="{path*}.weight_scale", flax="{path*}.kernel_scale"),
    ParameterRule(torch="{path*}.weight", flax="{path*}.embedding", axes="vocabulary d -> vocabulary d"),
    ParameterRule(torch="{path*}", flax="{path*}"),
)
"""Rules for layers that have the same names in both models. The first rule that fits a name and its number of axes
holds: embeddings, recognised by their names; linear layers and convolutions; norms; scales of float8 weights, which are
transposed with them; everything else, such as biases, unchanged.

Transposed convolutions need a rule of their own: by names and axes they look like convolutions, and torch has
[in, out, h, w]."""


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
    target = name
    try:
        if rules:
            target, rule = renamed(rules, name, x.ndim, to=to)
            x = rule.arranged(x, to=to)
    except OperandError as error:
        raise OperandError(f"{call}: {error}") from None
    if target in converted:
        remedy = "give one of them a ParameterRule of its own"
        raise OperandError(f"{call}: two parameters get the name {target!r}; {remedy}")
    try:
        converted[target] = (to_jax if to == "flax" else to_torch)(x, copy=copy)
    except OperandError as error:
        raise OperandError(f"{call}: parameter {name!r}: {error}; or leave the entry out") from None


def nested(call: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of values whose names have dots."""
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


def _require_same(call: str, wanted: Mapping[str, tuple[int, ...]], arrays: Mapping[str, Any]) -> None:
    # Names first: a shape is only compared where both sides have the parameter.
    missing, unknown = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    if missing or unknown:
        raise OperandError(
            f"{call}: the names must be those of `like`; missing {missing[:5]}, unknown {unknown[:5]}; give a "
            "ParameterRule that leads from one to the other"
        )
    for name, shape in wanted.items():
        got = tuple(arrays[name].shape)
        if got != shape:
            raise OperandError(
                f"{call}: {name!r} must have shape {list(shape)} as in `like`; got {list(got)}; give a ParameterRule "
                "with its axes, or the parameters of the same model"
            )

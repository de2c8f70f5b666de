"""equinox: linear layers replaced by float8 ones.

    model = convert_linears(model, "rowwise", where=lambda path, linear: linear.out_features % 16 == 0)

In equinox a layer takes one token, and `jax.vmap` maps it over all tokens. A float8 layer gathers the mapped tokens
into the rows of one matrix, so that a tensor has one scale, not one per token. A gradient taken inside `jax.vmap` is
not gathered: gradients of single examples have the bits of single calls.

`eqx.filter_jit` does not set the compiler options that a GPU needs. On a GPU write the step as a function of
`f8emu.jax.jit` that takes `params` of `params, static = eqx.partition(model, eqx.is_array)` and rebuilds the model with
`eqx.combine(params, static)`.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from f8emu.jax.compiling import is_eager, lower_jaxpr
from f8emu.jax.layer.delayed import linear_delayed_state, overwrite_with_gradient
from f8emu.jax.layer.dot_general import delayed_dot_general, dot_general
from f8emu.spec.errors import require_arguments, required_by
from f8emu.spec.exports import public
from f8emu.spec.names import EngineName, RecipeName
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.spec.scaling import Float8State

with required_by("f8emu.jax.hosts.equinox"):
    import equinox as eqx
    import wadler_lindig as wl  # equinox prints with it

_Model = TypeVar("_Model")


class Float8Linear(eqx.Module):
    """`equinox.nn.Linear` under a recipe, for `x [in]`, or `x [..., in]` with every leading axis as rows.

    Under delayed scaling the gradient of `state` is its next value. Split it off (`eqx.partition`) before the optimizer
    sees the others. Call the layer once per pass, or under one `jax.vmap`.
    """

    weight: jax.Array
    """[out, in]."""
    bias: jax.Array | None
    state: Float8State | None
    recipe: Recipe = eqx.field(static=True)
    engine: EngineName = eqx.field(static=True)

    def __init__(self, linear: eqx.nn.Linear, recipe: Recipe | RecipeName, *, engine: EngineName = "auto") -> None:
        self.recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
        self.weight, self.bias, self.engine = linear.weight, linear.bias, engine
        self.state = None if self.recipe.delayed is None else linear_delayed_state(self.recipe)

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """The layer's output; `key` is not used, as in equinox.

        Raises:
            OperandError, UnsupportedError: as for `f8emu.jax.dot_general`.
        """
        # The leaves go into one primitive, so that a vmap over examples sees rows, not layers.
        state = None if self.state is None else overwrite_with_gradient(self.state, self.recipe)
        leaves, tree = jax.tree.flatten((x, self.weight, state))
        y = _bind(_Product(self.recipe, self.engine, tree), *leaves)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape).astype(y.dtype)

    def __pdoc__(self, *, indent: int, **options: Any) -> wl.AbstractDoc:
        """What equinox prints: the fields that the layer had before, and its recipe."""
        fields = {"weight": self.weight, "bias": self.bias}
        if hasattr(self.weight, "shape"):  # of a model that was partitioned there is none
            n, k = self.weight.shape
            fields |= {"in_features": k, "out_features": n, "use_bias": self.bias is not None}
        docs = wl.named_objs({**fields, "recipe": self.recipe.label}.items(), indent=indent, **options)
        begin, end = wl.TextDoc(f"{type(self).__name__}("), wl.TextDoc(")")
        return wl.bracketed(begin=begin, docs=docs, sep=wl.comma, end=end, indent=indent)


@overload
def convert_linears(
    model: eqx.nn.Linear,
    recipe: Recipe | RecipeName,
    *,
    where: Callable[[str, eqx.nn.Linear], bool] = ...,
    engine: EngineName = "auto",
) -> Any: ...
@overload
def convert_linears(
    model: _Model,
    recipe: Recipe | RecipeName,
    *,
    where: Callable[[str, eqx.nn.Linear], bool] = ...,
    engine: EngineName = "auto",
) -> _Model: ...
def convert_linears(
    model: Any,
    recipe: Recipe | RecipeName,
    *,
    where: Callable[[str, eqx.nn.Linear], bool] = lambda path, linear: True,
    engine: EngineName = "auto",
) -> Any:
    """The model with every `equinox.nn.Linear` that `where` selects replaced by a `Float8Linear`.

    Warns with a UserWarning where it replaces none.

    Args:
        model: any tree of equinox.
        recipe: the recipe of all these layers.
        where: (path in the model, such as ".layers[0].proj", layer) -> whether to convert it. Layers with "scalar"
            features are never converted.
        engine: as for `f8emu.jax.dot_general`.

    Raises:
        SpecError: an unknown recipe, or a `where` that does not take (path, linear).
    """
    recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    require_arguments("convert_linears", "where", where, "path, linear")
    is_chosen: dict[str, bool] = {}

    def convert(path: Any, leaf: Any) -> Any:
        if not _is_linear(leaf) or "scalar" in (leaf.in_features, leaf.out_features):
            return leaf
        name = jax.tree_util.keystr(path)
        is_chosen[name] = bool(where(name, leaf))
        return Float8Linear(leaf, recipe, engine=engine) if is_chosen[name] else leaf

    converted = jax.tree_util.tree_map_with_path(convert, model, is_leaf=_is_linear)
    if not any(is_chosen.values()):
        names = ", ".join(name or "the model itself" for name in [*is_chosen][:4]) + (
            ", ..." if len(is_chosen) > 4 else ""
        )
        reason = f"where selects none of its layers: {names}" if names else "no equinox.nn.Linear in it"
        warnings.warn(f"convert_linears: nothing to convert; {reason}", UserWarning, stacklevel=2)
    return converted


def _is_linear(x: Any) -> bool:
    return isinstance(x, eqx.nn.Linear)


class _Product(NamedTuple):
    """`x [..., K], weight [N, K], state -> [..., N]`, as a function of the leaves of its arguments."""

    recipe: Recipe
    engine: EngineName
    tree: Any

    def __call__(self, *leaves: jax.Array) -> jax.Array:
        x, weight, state = jax.tree.unflatten(self.tree, leaves)
        dimensions = ((x.ndim - 1,), (1,)), ((), ())
        if state is None:
            return dot_general(self.recipe, engine=self.engine)(x, weight, dimensions)
        return delayed_dot_general(self.recipe, engine=self.engine)(x, weight, state, dimensions)


def _bind(product: _Product, *leaves: jax.Array) -> jax.Array:
    """`product(*leaves)`, whose rows `jax.vmap` gathers."""
    if is_eager(leaves):
        return product(*leaves)
    return _linear.bind(*leaves, product=product, jaxpr=jax.make_jaxpr(product)(*leaves))


# A primitive, since `custom_vmap` has no gradient: one taken inside of `jax.vmap` is that of each example by itself,
# and one taken outside that of all rows, which were gathered before.
_linear = Primitive("f8emu_linear")
_linear.def_impl(lambda *leaves, product, jaxpr: product(*leaves))
_linear.def_abstract_eval(lambda *_, product, jaxpr: jaxpr.out_avals[0])


def _batch(leaves: Any, axes: Any, *, product: _Product, jaxpr: ClosedJaxpr) -> tuple[jax.Array, int]:
    # Only x has an axis of examples: its rows are those of one layer, with one amax.
    x, *rest = leaves
    if all(axis is None for axis in axes[1:]):
        return _bind(product, jnp.moveaxis(x, axes[0], 0), *rest), 0
    return jax.vmap(product, tuple(axes))(*leaves), 0  # an ensemble: every member is a layer of its own


def _jvp(primals: Any, tangents: Any, *, product: _Product, jaxpr: ClosedJaxpr) -> tuple[jax.Array, jax.Array]:
    # Leaves without a tangent stay constants.
    changing = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_given(*changed: jax.Array) -> jax.Array:
        leaves = list(primals)
        for i, leaf in zip(changing, changed, strict=True):
            leaves[i] = leaf
        return product(*leaves)

    return jax.jvp(of_given, [primals[i] for i in changing], [tangents[i] for i in changing])


mlir.register_lowering(_linear, lambda ctx, *leaves, jaxpr, product: lower_jaxpr(ctx, jaxpr, leaves))
batching.primitive_batchers[_linear] = _batch
ad.primitive_jvps[_linear] = _jvp


__all__, __dir__ = public(__name__)

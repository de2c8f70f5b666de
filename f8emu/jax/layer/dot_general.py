"""`dot_general(recipe)`: float8 in place of `jax.lax.dot_general`, for whatever takes such a function.

The left operand is the recipe's `input`, the right one its `weight`. Their dimensions are brought to [B, M, K] and
[B, N, K]; every entry of the batch is a linear layer of its own, with its own scales. A matrix that lies transposed, as
a kernel [K, N] of flax does, is not moved: its two operands change places.
"""

from __future__ import annotations  # short signatures in `help`

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.jax.bits import format_of, output_format, require_known_sizes
from f8emu.jax.gemm.call import SUM, ShardedK, check_sharded_k
from f8emu.jax.gemm.engine import check_engine
from f8emu.jax.layer.matmul import LayerCall, Tap, float8_matmul
from f8emu.jax.layer.sharding import (
    Specs,
    check_specs,
    divided,
    explicit_mesh,
    product_sharding,
    require_checked_axes,
    vary_alike,
)
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import changed_fields
from f8emu.spec.names import EngineName, RecipeName
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.spec.scaling import DelayedState, Float8State

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""((contracting of lhs, of rhs), (batch of lhs, of rhs)), as `jax.lax.dot_general` takes them."""


def dot_general(
    recipe: Recipe | RecipeName,
    *,
    engine: EngineName = "auto",
    in_specs: Specs | None = None,
    sharded_k: ShardedK = SUM,
) -> DotGeneral:
    """`jax.lax.dot_general` under a recipe: a frozen, hashable function with its signature and gradients.

    Equal recipes give equal functions, inside a trace and outside, so that the function may be a static argument or the
    `dot_general` of a module.

    Args:
        recipe: a recipe or its name. For delayed scaling, which has a state, use `delayed_dot_general`.
        engine: "auto" (the hardware on a CUDA device with float8, else the emulation), "hardware" or "emulated".
        in_specs: the PartitionSpecs of lhs and rhs, for a call in `jax.shard_map`, where an array is one device's part:
            amaxes are then taken over the whole matrices. Without it every device has its own scales.
        sharded_k: what `jax.jit` does if both operands of a GEMM are sharded along the dimension that is summed, as the
            tokens of grad_weight under data parallelism. "sum": each device multiplies its part and the products are
            added, as for `jax.lax.dot_general`. "gather": codes are gathered; the bits of one device.

    Raises:
        SpecError: an unknown recipe, one with delayed scaling, or one that is not static.
        OperandError: an unknown engine, an unknown `sharded_k`, or `in_specs` that are not PartitionSpecs.
    """
    settings = checked_settings("dot_general", recipe, engine, in_specs, sharded_k, is_delayed=False)
    return DotGeneral(**settings)


def delayed_dot_general(
    recipe: Recipe | RecipeName = "delayed",
    *,
    engine: EngineName = "auto",
    in_specs: Specs | None = None,
    sharded_k: ShardedK = SUM,
) -> DelayedDotGeneral:
    """`dot_general` for a recipe with delayed scaling: the function takes a `Float8State` after its operands.

    The gradient of the state is made of amaxes, for `linear_delayed_update`. Arguments and errors are as for
    `dot_general`.
    """
    settings = checked_settings("delayed_dot_general", recipe, engine, in_specs, sharded_k, is_delayed=True)
    return DelayedDotGeneral(**settings)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class _Layer:
    recipe: Recipe
    engine: EngineName = "auto"
    in_specs: Specs | None = None
    sharded_k: ShardedK = SUM
    tap: Tap | None = None
    """The tap of a capture; `f8emu.jax.Capture.named` sets it."""

    def __repr__(self) -> str:
        return changed_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DotGeneral(_Layer):
    """A function like `jax.lax.dot_general`, returned by `dot_general`."""

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Dimensions,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The three GEMMs of the recipe, one now and two in the backward pass.

        Shapes:
            as for `jax.lax.dot_general`; float32, bfloat16 or float16 -> `preferred_element_type`, or the dtype of lhs.
            Gradients have the dtypes of lhs and rhs.

        Exactness: every code, scale and product equals that of `f8ref.numpy.linear`, on Hopper and emulated. Two
            exceptions on Hopper: a bfloat16 product under power-of-two row scales may be infinite where a row of the
            weight has an amax above 2^98 (`gemm.hardware.form_of`), and cuBLAS chooses the split-K of a GEMM in high
            precision.

        Raises:
            OperandError: wrong dtypes or dimensions.
            UnsupportedError: a `precision`, which is the recipe's to decide; a second derivative; a call that the
                engine does not support.
        """
        return _dot_general(
            "dot_general", self, lhs, rhs, None, dimension_numbers, precision, preferred_element_type, out_sharding
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DelayedDotGeneral(_Layer):
    """A function like `jax.lax.dot_general` with a state, returned by `delayed_dot_general`."""

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        state: Float8State,
        dimension_numbers: Dimensions,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`DotGeneral.__call__` with scales of earlier steps from `state`.

        Batch dimensions are refused: a state belongs to one layer, and `jax.vmap` maps over states too.

        Raises:
            OperandError: wrong dtypes or dimensions, or the state of another recipe.
            UnsupportedError: as for `DotGeneral.__call__`; a gradient of the state under a `jax.vmap` over operands but
                not over the state.
        """
        call = "delayed_dot_general"
        _require_state(call, self.recipe, state)
        return _dot_general(
            call, self, lhs, rhs, state, dimension_numbers, precision, preferred_element_type, out_sharding
        )


def _dot_general(
    call: str,
    function: _Layer,
    lhs: Any,
    rhs: Any,
    state: Float8State | None,
    dimension_numbers: Dimensions,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> jax.Array:
    # 1. What was given.
    input_dtype, weight_dtype = format_of(call, "lhs", lhs), format_of(call, "rhs", rhs)
    refuse_precision(call, precision)
    out_dtype = input_dtype
    if preferred_element_type is not None:
        out_dtype = output_format(call, preferred_element_type, name="preferred_element_type")
    require_known_sizes(call, lhs, rhs)
    lhs_shape, rhs_shape = tuple(lhs.shape), tuple(rhs.shape)
    (lhs_k, rhs_k), (lhs_b, rhs_b) = _dimensions(call, dimension_numbers, lhs_shape, rhs_shape)
    lhs_free = [i for i in range(len(lhs_shape)) if i not in (*lhs_k, *lhs_b)]
    rhs_free = [i for i in range(len(rhs_shape)) if i not in (*rhs_k, *rhs_b)]
    along, rhs_shape = divided(call, function.in_specs, (len(lhs_shape), lhs_free, lhs_k), (rhs_shape, rhs_free, rhs_k))
    _require_equal(call, (lhs_shape, rhs_shape), (lhs_k, rhs_k), (lhs_b, rhs_b))
    if state is not None and lhs_b:
        raise OperandError(
            f"{call}: a state belongs to one layer, so there must be no batch dimensions; got {lhs_b} of lhs; use "
            "jax.vmap over operands and states, or move the batch into the rows of lhs"
        )
    require_checked_axes(call, state)
    mesh = explicit_mesh(lhs, rhs)
    if mesh is not None:
        # Sharding in types: the product's by JAX's rule for dot_general, casts and GEMMs as XLA divides them.
        wanted = product_sharding(mesh, lhs, rhs, dimension_numbers, out_sharding)
        rest = dimension_numbers, precision, preferred_element_type, None
        automatic: Any = jax.sharding.auto_axes(
            lambda lhs, rhs, state: _dot_general(call, function, lhs, rhs, state, *rest),
            axes=mesh.explicit_axes,
            out_sharding=wanted,
        )
        return automatic(lhs, rhs, state)
    # 2. Both operands as matrices, or stacks of them.
    lhs, rhs = vary_alike(jnp.asarray(lhs), jnp.asarray(rhs))
    x, input_is_t = _as_matrices(lhs, lhs_b, lhs_free, lhs_k)
    w, weight_is_t = _as_matrices(rhs, rhs_b, rhs_free, rhs_k)
    shape = [*(lhs_shape[i] for i in (*lhs_b, *lhs_free)), *(rhs_shape[i] for i in rhs_free)]
    # 3. The product.
    layer = LayerCall(
        recipe=function.recipe,
        engine=function.engine,
        out_dtype=out_dtype,
        input_dtype=input_dtype,
        weight_dtype=weight_dtype,
        is_input_transposed=input_is_t,
        is_weight_transposed=weight_is_t,
        sharded_k=function.sharded_k,
        divided=along,
        tap=function.tap,
    )
    if state is not None:
        # What is empty gets zeros, so that a state has its gradient: without amaxes, which leaves the scale as it is.
        if 0 in (*x.shape, *w.shape):
            x, w = (jnp.pad(matrix, [(0, int(n == 0)) for n in matrix.shape]) for matrix in (x, w))
        product = float8_matmul(layer, x, w, state)
        product = product.reshape(-1)[:0] if 0 in shape else product
    elif 0 in (*lhs_shape, *rhs_shape):
        product = jnp.zeros(shape, out_dtype.name)  # of no layer: there is nothing to cast
    elif lhs_b:
        product: jax.Array = jax.vmap(functools.partial(float8_matmul, layer), in_axes=(0, 0, None))(x, w, None)
    else:
        product = float8_matmul(layer, x, w, None)
    product = product.reshape(shape)
    return product if out_sharding is None else jax.sharding.reshard(product, out_sharding)


def _as_matrices(
    x: jax.Array, batch: Sequence[int], free: Sequence[int], contracting: Sequence[int]
) -> tuple[jax.Array, bool]:
    """`x` as [B, rows, K] or [B, K, rows], without the B where there are no batch dimensions; whether the latter."""
    is_transposed = bool(free) and bool(contracting) and list(contracting) == sorted(contracting)
    is_transposed = is_transposed and max(contracting) < min(free)
    order = [*batch, *(contracting if is_transposed else free), *(free if is_transposed else contracting)]
    sizes = [math.prod(x.shape[i] for i in group) for group in (batch, free, contracting)]
    matrix = (sizes[2], sizes[1]) if is_transposed else (sizes[1], sizes[2])
    moved = x if order == list(range(x.ndim)) else lax.transpose(x, order)
    return moved.reshape((sizes[0], *matrix) if batch else matrix), is_transposed


_Pair = tuple[list[int], list[int]]


def _dimensions(call: str, numbers: Any, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[_Pair, _Pair]:
    try:
        (lhs_k, rhs_k), (lhs_b, rhs_b) = ((list(map(int, a)), list(map(int, b))) for a, b in numbers)
    except (TypeError, ValueError):
        raise OperandError(
            f"{call}: dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs batch)); got "
            f"{numbers!r}; a linear layer's are (((lhs.ndim - 1,), (0,)), ((), ()))"
        ) from None
    for side, shape, k, b in (("lhs", lhs, lhs_k, lhs_b), ("rhs", rhs, rhs_k, rhs_b)):
        used = [*k, *b]
        if len(set(used)) < len(used) or any(not 0 <= i < len(shape) for i in used):
            raise OperandError(
                f"{call}: contracting and batch dimensions of {side} must be different ones of its {len(shape)}; got "
                f"{k} and {b}"
            )
    if not lhs_k:
        raise OperandError(
            f"{call}: a linear layer sums over a dimension; got dimension_numbers without a contracting one; use "
            "jax.lax.dot_general, or a multiplication"
        )
    return (lhs_k, rhs_k), (lhs_b, rhs_b)


def _require_equal(call: str, shapes: tuple[tuple[int, ...], ...], contracting: _Pair, batch: _Pair) -> None:
    of_k, of_b = (
        [[shape[i] for i in dims] for shape, dims in zip(shapes, pair, strict=True)] for pair in (contracting, batch)
    )
    if of_k[0] != of_k[1] or of_b[0] != of_b[1]:
        lhs, rhs = map(list, shapes)
        raise OperandError(
            f"{call}: contracting and batch dimensions must have equal sizes in lhs {lhs} and rhs {rhs}; "
            f"got {of_k[0]} and {of_k[1]}, {of_b[0]} and {of_b[1]}; check dimension_numbers"
        )


def refuse_precision(call: str, precision: Any) -> None:
    """Raise UnsupportedError for a precision that is not the default."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in (None, "default", lax.Precision.DEFAULT) for p in precisions):
        raise UnsupportedError(
            f"{call}: the recipe decides how a float8 GEMM accumulates, so precision must be None; got {precision}; "
            "set use_fast_accum of the recipe's GEMMs, or keep this layer in jax.lax.dot_general"
        )


def _require_state(call: str, recipe: Recipe, state: Any) -> None:
    delayed = recipe.delayed
    assert delayed is not None, "it was checked when the function was made"
    shapes = {"amax_history": (delayed.history_length,), "inv_scale": (), "initialized": ()}

    def fits(tensor: str, of_tensor: Any) -> bool:
        if of_tensor is None or tensor not in recipe.delayed_tensors:
            return of_tensor is None and tensor not in recipe.delayed_tensors
        return isinstance(of_tensor, DelayedState) and all(
            leaf is None or (jnp.result_type(leaf) == jnp.float32 and jnp.shape(leaf) == shapes[name])
            for name, leaf in of_tensor._asdict().items()
        )

    if not (isinstance(state, Float8State) and all(map(fits, Float8State._fields, state))):
        raise OperandError(
            f"{call}: state must be the Float8State of recipe {recipe.name!r}, all float32, histories of "
            f"{delayed.history_length}; got {described_state(state)}; start with linear_delayed_state(recipe), or "
            "restore with linear_delayed_state(recipe) as the template"
        )


def described_state(state: Any) -> str:
    """The type of what should be a `Float8State`; dtypes and shapes of one, for errors."""
    if not isinstance(state, Float8State):
        return type(state).__name__
    leaves = [
        f"{jax.tree_util.keystr(path)[1:]} {getattr(leaf, 'dtype', type(leaf).__name__)}{jnp.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]
    return f"Float8State of {', '.join(leaves) or 'nothing'}"


def checked_settings(
    call: str, recipe: Any, engine: str, in_specs: Any, sharded_k: str, *, is_delayed: bool
) -> dict[str, Any]:
    """The settings of a layer; `is_delayed` is the kind of scaling that the recipe must have."""
    check_engine(call, engine)
    check_sharded_k(call, sharded_k)
    if isinstance(recipe, str):
        recipe = recipe_by_name(recipe)
    if not isinstance(recipe, Recipe):
        raise SpecError(
            f"{call}: recipe must be a Recipe or the name of one, known when the function is traced; got "
            f"{type(recipe).__name__}; close over it, or make it a static argument of jit"
        )
    if (recipe.delayed is not None) != is_delayed:
        sibling = call.removeprefix("delayed_") if is_delayed else f"delayed_{call}"
        other = f"{sibling}, which takes {'no' if is_delayed else 'a'} state"
        kind = "without" if is_delayed else "with"
        raise SpecError(f"{call}: got recipe {recipe.name!r} {kind} delayed scaling; use {other}")
    specs = None if in_specs is None else check_specs(call, in_specs)
    return {"recipe": recipe, "engine": engine, "in_specs": specs, "sharded_k": sharded_k}

"""`ragged_dot`: `jax.lax.ragged_dot` in float8, a linear layer for each group of rows, as of the experts of a mixture.

XLA has no grouped GEMM of codes, and no extents that an array decides. The groups are therefore computed one after
another: each as the layer that it is (`layer.matmul`), of its rows and of rows of zeros that fill them up to the next
of a few extents. Zeros change no scale, and at the end of what is summed no bit of a product [ACC-1], [ACC-2].
"""

from __future__ import annotations  # short signatures in `help`

import bisect
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero

from f8emu.jax.bits import format_of, output_format, require_known_sizes
from f8emu.jax.compiling import differentiable_no_more, jit, reverse_mode
from f8emu.jax.gemm.call import GATHER, is_at_hand
from f8emu.jax.layer.dot_general import checked_settings, refuse_precision
from f8emu.jax.layer.matmul import TWICE, LayerCall, float8_matmul
from f8emu.jax.layer.sharding import explicit_mesh, vary_alike
from f8emu.spec.chips import CHIPS
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, E4M3FN
from f8emu.spec.gemm import GEMM_NAMES, LAYER_LAYOUTS
from f8emu.spec.gemm_call import layer_call
from f8emu.spec.names import EngineName, RecipeName
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.split_k.ask import split_of
from f8emu.split_k.gemm import unsplit_rows

_Case = tuple[int, LayerCall]
"""The rows of a group with padding, and how it is computed."""
_LEAST_ROWS = 64
"""The smallest extent of a group with padding, where T allows it."""


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe | RecipeName = "rowwise",
    engine: EngineName = "auto",
) -> jax.Array:
    """`lhs[rows of g] @ rhs[g]` for every group g of rows, each a linear layer of its own under a recipe.

    The first `group_sizes[0]` rows are group 0, the next `group_sizes[1]` rows group 1, and so on. A group may have any
    size; the gradient of the matrix of an empty one is zeros. Rows beyond the last group give zeros, and so is their
    gradient. Every scale is a group's own: a tensorwise one is of the group's rows, or of its matrix.

    The backward pass keeps lhs and rhs and casts them again. One group is computed after another, padded with zeros to
    the largest of 64 rows, a quarter of the mean size and twice its own, at most: on a GPU a grouped GEMM would be
    faster.

    Shapes:
        lhs [T, K], rhs [E, K, N], float32, bfloat16 or float16, group_sizes [E], integers -> [T, N] of
        `preferred_element_type`, or of the dtype of lhs. Gradients have the dtypes of lhs and rhs.

    Exactness: every code, scale and product equals that of `f8ref.numpy.grouped_linear`. The emulation splits GEMMs as
    those of the group alone are split along K [CHAIN-3], but none of E4M3 or bfloat16 with a bfloat16 product. On a
    Hopper GPU cuBLASLt chooses, for the padded group: in float8 it splits none with a K up to 5,120 or with 131,072
    outputs [PLAN-2], [PLAN-4]. The two exceptions of `DotGeneral.__call__` hold here too.

    Args: `recipe` is a recipe or its name, with tensorwise or rowwise scales that are dynamic; `engine` is that of
    `dot_general`. The others are those of `jax.lax.ragged_dot`. It needs an `out_sharding` too where the types of
    arrays have a sharding.

    Raises:
        OperandError: wrong dtypes or shapes, or an unknown engine.
        SpecError: an unknown recipe.
        UnsupportedError: delayed or block scales; a `precision`, which is the recipe's to decide; a `group_offset`; a
            missing `out_sharding`; a second derivative; a call that the engine does not support.
    """
    call = "ragged_dot"
    # 1. What was given.
    input_dtype, weight_dtype = format_of(call, "lhs", lhs), format_of(call, "rhs", rhs)
    out_dtype = input_dtype
    if preferred_element_type is not None:
        out_dtype = output_format(call, preferred_element_type, name="preferred_element_type")
    refuse_precision(call, precision)
    if group_offset is not None:
        raise UnsupportedError(f"{call}: all groups of rhs are computed; got a group_offset; pass zeros as other sizes")
    if isinstance(recipe, str):
        recipe = recipe_by_name(recipe)
    if isinstance(recipe, Recipe) and (recipe.delayed or any(p.both.has_blocks for p in recipe.cast_plans)):
        raise UnsupportedError(
            f"{call}: scales are tensorwise or rowwise, of the step's own amaxes; got recipe {recipe.name!r} with "
            f"{'delayed' if recipe.delayed else 'block'} scales; use another, or dot_general for each expert"
        )
    settings = checked_settings(call, recipe, engine, None, GATHER, is_delayed=False)
    require_known_sizes(call, lhs, rhs, group_sizes)
    _require_shapes(lhs, rhs, group_sizes)
    rows, k, n = *lhs.shape, rhs.shape[2]
    mesh = explicit_mesh(lhs, rhs)
    if mesh is not None:
        # Sharding in types: casts and GEMMs as XLA divides them.
        if out_sharding is None:
            raise UnsupportedError(
                f"{call}: JAX infers no sharding of a ragged dot; got arrays whose types have one; pass out_sharding"
            )
        dot = functools.partial(ragged_dot, preferred_element_type=out_dtype.name, recipe=recipe, engine=engine)
        automatic: Any = jax.sharding.auto_axes(dot, axes=mesh.explicit_axes, out_sharding=out_sharding)
        return automatic(lhs, rhs, group_sizes)
    # 2. Where each group ends.
    ends = jnp.clip(jnp.cumsum(jnp.asarray(group_sizes).astype(jnp.int32)), 0, rows).astype(jnp.int32)
    if 0 in (rows, k, n, len(rhs)):
        return jnp.zeros((rows, n), out_dtype.name)
    # 3. The products.
    layout: dict[str, Any] = {"is_input_transposed": False, "is_weight_transposed": True, "sharded_k": GATHER}
    layer = LayerCall(settings["recipe"], engine, out_dtype, input_dtype, weight_dtype, **layout)
    lhs, rhs = reverse_mode(jnp.asarray(lhs)), reverse_mode(jnp.asarray(rhs))
    product: Any = reverse_mode(_ragged_dot(layer, *vary_alike(lhs, rhs, ends)))
    return product if out_sharding is None else jax.sharding.reshard(product, out_sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(layer: LayerCall, lhs: jax.Array, rhs: jax.Array, ends: jax.Array) -> jax.Array:
    return _output(layer, lhs, rhs, ends)


def _forward_rule(layer: LayerCall, lhs: Any, rhs: Any, ends: Any) -> tuple[jax.Array, Any]:
    x, w = differentiable_no_more((lhs.value, rhs.value), TWICE)
    wanted = tuple(() if operand.perturbed else None for operand in (lhs, rhs))  # a tree without leaves is static
    return _output(layer, x, w, ends.value), (wanted, x, w, ends.value)


def _backward_rule(layer: LayerCall, kept: Any, grad_output: Any) -> tuple[Any, Any, None]:
    if isinstance(grad_output, SymbolicZero):
        return None, None, None
    wanted, *operands = kept
    grad_output = differentiable_no_more(grad_output, TWICE)
    return *_gradients(layer, tuple(w is not None for w in wanted), *operands, grad_output), None


_ragged_dot.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


@functools.partial(jit, static_argnums=0)
def _output(layer: LayerCall, *operands: jax.Array) -> jax.Array:
    """The output; an eager call is one program."""

    @sequential_vmap
    def of_groups(lhs: jax.Array, rhs: jax.Array, ends: jax.Array) -> jax.Array:
        def of_group(case: _Case, total: jax.Array, weight: jax.Array, start: jax.Array, size: jax.Array) -> Any:
            product: Any = float8_matmul(case[1], _group(lhs, case, start, size), weight, None)
            return _placed(total, product, start, size), None

        total = _space(lhs, rhs.shape[2], layer.out_dtype.name)
        return _for_groups(layer, of_group, lambda total: (total, None), total, len(lhs), rhs, ends)[0][: len(lhs)]

    return of_groups(*operands)


@functools.partial(jit, static_argnums=(0, 1))
def _gradients(layer: LayerCall, wanted: tuple[bool, bool], *operands: jax.Array) -> Any:
    """The gradients of lhs and rhs, None of one that is not wanted."""

    @sequential_vmap
    def of_groups(lhs: jax.Array, rhs: jax.Array, ends: jax.Array, grad_output: jax.Array) -> Any:
        def of_group(case: _Case, total: Any, weight: jax.Array, start: jax.Array, size: jax.Array) -> Any:
            x, g = (_group(matrix, case, start, size) for matrix in (lhs, grad_output))
            _, pull = jax.vjp(lambda x, w: float8_matmul(case[1], x, w, None), x, weight)
            d_x, d_weight = pull(g)  # XLA leaves out what is not wanted, and the output
            return _placed(total, d_x, start, size) if wanted[0] else None, d_weight if wanted[1] else None

        def of_empty(total: Any) -> Any:
            return total, vary_alike(jnp.zeros(rhs.shape[1:], rhs.dtype), rhs)[0] if wanted[1] else None

        total = _space(lhs, lhs.shape[1], lhs.dtype) if wanted[0] else None
        d_lhs, d_rhs = _for_groups(layer, of_group, of_empty, total, len(lhs), rhs, ends)
        return None if d_lhs is None else d_lhs[: len(lhs)], d_rhs

    return of_groups(*operands)


def _for_groups(
    layer: LayerCall,
    of_group: Callable[..., Any],
    of_empty: Callable[[Any], Any],
    total: Any,
    rows: int,
    rhs: Any,
    ends: Any,
) -> Any:
    """A scan of `of_group(case, total, weight, start, size)` over the groups, of `of_empty(total)` over empty ones."""
    cases, case_of = _cases(layer, rows, *rhs.shape)
    branches = [lambda total, *_: of_empty(total), *(functools.partial(of_group, case) for case in cases)]
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    groups = rhs, starts, jnp.maximum(ends - starts, 0)
    return lax.scan(lambda total, g: lax.switch(jnp.asarray(case_of)[g[-1]], branches, total, *g), total, groups)


@functools.lru_cache(maxsize=256)
def _cases(layer: LayerCall, rows: int, groups: int, k: int, n: int) -> tuple[list[_Case], np.ndarray]:
    """The cases of groups of up to `rows` rows, and for every size the number of its case: 0 is empty, 1 the first."""
    # 1. The extents: half the one above, to a multiple of 16, down to a part of the mean size that costs little.
    extents, least = [rows], max(_LEAST_ROWS, rows // (4 * groups))
    while extents[0] > least:
        extents.insert(0, math.ceil(extents[0] / 32) * 16)
    # 2. The sizes that are computed alike.
    sizes_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for size in range(1, rows + 1):
        sizes = {"output": (size, n, k), "grad_input": (size, k, n), "grad_weight": (n, k, size)}
        split_k = tuple(_split_k(layer, name, *sizes[name]) for name in GEMM_NAMES)
        sizes_of.setdefault((extents[bisect.bisect_left(extents, size)], split_k), []).append(size)
    case_of, cases = np.zeros(rows + 1, np.int32), list[_Case]()
    for (extent, split_k), members in sorted(sizes_of.items()):
        cases.append((extent, layer._replace(split_k=tuple(zip(GEMM_NAMES, split_k, strict=True)))))
        case_of[members] = len(cases)
    return cases, case_of


def _split_k(layer: LayerCall, name: str, m: int, n: int, k: int) -> int:
    """[CHAIN-3] S of a group's GEMM: one that a grouped GEMM would take is not split."""
    spec, dtype = layer.recipe.gemms[name], layer.out_dtype if name == "output" else layer.input_dtype
    is_grouped = spec.a.format == spec.b.format and spec.a.format in (E4M3FN, None) and dtype == BFLOAT16
    # [PLAN-2], [PLAN-4] Others are not asked for, of which there may be one a size.
    is_never = spec.a.format is not None and unsplit_rows(m, n, k) == m
    if is_grouped or is_never:
        return 1
    call = layer_call(spec, (m, n, k), dtype, CHIPS[layer.recipe.chip])
    return split_of(None, call, LAYER_LAYOUTS[name], at_hand=is_at_hand(call.chip)).split_k


def _group(x: jax.Array, case: _Case, start: jax.Array, size: jax.Array) -> jax.Array:
    """A group's rows of `x`, then zeros."""
    place = jnp.arange(case[0], dtype=start.dtype)
    rows = jnp.take(x, start + place, axis=0, mode="clip")
    return jnp.where((place < size)[:, None], rows, jnp.zeros((), x.dtype))


def _placed(total: jax.Array, product: jax.Array, start: jax.Array, size: jax.Array) -> jax.Array:
    """`total` with a group's rows. What follows them is zeros until later groups are placed."""
    is_own = jnp.arange(len(product), dtype=start.dtype) < size
    product = jnp.where(is_own[:, None], product, jnp.zeros((), product.dtype))
    return lax.dynamic_update_slice_in_dim(total, product, start, 0)


def _space(lhs: jax.Array, columns: int, dtype: Any) -> jax.Array:
    """Zeros for the rows of `lhs`, and for the padding of the last group."""
    return vary_alike(jnp.zeros((2 * len(lhs), columns), dtype), lhs)[0]


def _require_shapes(lhs: Any, rhs: Any, group_sizes: Any) -> None:
    shapes, dtype = [list(jnp.shape(x)) for x in (lhs, rhs, group_sizes)], jnp.result_type(group_sizes)
    fits = [len(shape) for shape in shapes] == [2, 3, 1] and jnp.issubdtype(dtype, jnp.integer)
    if not (fits and shapes[0][1] == shapes[1][1] and shapes[1][0] == shapes[2][0]):
        raise OperandError(
            "ragged_dot: lhs must be [T, K], rhs [E, K, N] and group_sizes [E], integers; got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}, {dtype}; a matrix of rhs is as flax keeps its kernel, [in, out]"
        )

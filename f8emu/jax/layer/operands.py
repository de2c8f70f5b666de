"""The two operands that a linear layer makes of one matrix.

A matrix `x` [M, N] is an operand of two GEMMs: of one as it is, with K = N ("rows"), and of another transposed, with
K = M ("cols"). Both are cast at once: one pass over `x` for the amaxes and one for the codes, or a single one where the
scales are those of blocks, of rows alone, or of earlier steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.jax import fused
from f8emu.jax.layer.sharding import Axes, global_amax, require_whole_blocks
from f8emu.jax.scale import reciprocal, scales_of
from f8emu.spec.cast_plan import CastPlan
from f8emu.spec.formats import Format
from f8emu.spec.scaling import DelayedState, Granularity, Scales


class Operand(NamedTuple):
    """One operand of a GEMM."""

    codes: jax.Array
    """[rows, K]; in high precision bfloat16 values."""
    scale: jax.Array | None
    """Float32, or E8M0, of `Granularity.scale_shape`; None in high precision."""


class Deferred(NamedTuple):
    """An operand that is still to be cast."""

    x: jax.Array
    """[M, N], the matrix; of an operand in high precision bfloat16."""
    scales: Scales | None
    """The scales of the operand; None for block scales, which its cast finds again, and in high precision."""

    def operand(self, plan: CastPlan, side: int, after: Any) -> Operand:
        """The operand `side`: 0 of the matrix, 1 of its transpose; `plan` is for it alone."""
        if plan.format is None:
            return Operand(self.x.T if side else self.x, None)
        # Barrier: otherwise XLA casts early and holds the codes until the backward pass.
        x, _ = lax.optimization_barrier((self.x, after))
        if self.scales is None:
            blocks = fused.cast_blocks(x, plan.format, plan.rule, *plan.by_blocks)[side]
            assert blocks is not None, "it was wanted"
            return Operand(blocks[0], blocks[1].scale)
        inv_scale = self.scales.inv_scale
        codes = fused.cast_pair(x, plan.format, *((None, inv_scale) if side else (inv_scale, None)))[side]
        assert codes is not None, "they were wanted"
        return Operand(codes, self.scales.scale)


Side = Operand | Deferred | None
"""An operand of a matrix, or of its transpose; None if none is wanted."""


def cast_matrix(
    x: jax.Array,
    plan: CastPlan,
    state: DelayedState | None,
    axes: tuple[Axes, Axes],
    *,
    is_transposed: bool = False,
    keeps_cols: bool = False,
    defers_cols: bool = False,
) -> tuple[Side, Side, jax.Array | None]:
    """Both operands of a matrix [M, N] by its plan; and with a state, whose scale earlier steps gave, the matrix's amax
    [] for the next update, 0 without a cast.

    `x` is the matrix, or its transpose if `is_transposed`. A state whose `initialized` is None is known to be
    initialized: then amax and codes take one pass. `axes` of `jax.shard_map` are those along which M and N are divided:
    scales are the whole matrix's. With `keeps_cols` the second operand is for later: in high precision, or with
    `defers_cols`, it is `Deferred`.

    Exactness: the codes and scales of `f8ref.numpy.linear`.
    """
    turn, kept = (-1, 0) if is_transposed else (1, 1)
    later = kept if keeps_cols else None, kept if defers_cols else None
    sides, amax = _cast_sides(x, plan.turned() if is_transposed else plan, state, axes[::turn], *later)
    of_rows, of_cols = sides[::turn]
    return of_rows, of_cols, amax


def _cast_sides(
    x: jax.Array,
    plan: CastPlan,
    state: DelayedState | None,
    axes: tuple[Axes, ...],
    kept: int | None,
    deferred: int | None,
) -> tuple[list[Side], jax.Array | None]:
    """The operands of `x` and of `x^T`, and the amax; the side `kept` is for later, and `deferred` is cast later."""
    # 1. High precision.
    sides: list[Side] = [None, None]
    for side, is_high in enumerate(plan.in_bfloat16):
        if is_high:
            values = x.astype(jnp.bfloat16)
            sides[side] = Deferred(values, None) if side == kept else Operand(values.T if side else values, None)
    format, amax = plan.format, None
    if format is None:
        return sides, None if state is None else jnp.zeros((), jnp.float32)
    if state is None:
        # 2. Blocks: amax, scale and codes in one pass.
        require_whole_blocks(plan.by_blocks, x.shape, axes)
        blocks = [None if side == deferred else kind for side, kind in enumerate(plan.by_blocks)]
        if deferred is not None and plan.by_blocks[deferred] is not None:
            sides[deferred] = Deferred(x, None)
        if any(blocks):
            for side, cast in enumerate(fused.cast_blocks(x, format, plan.rule, blocks[0], blocks[1])):
                if cast is not None:
                    sides[side] = Operand(cast[0], cast[1].scale)
        # 3. Rows alone: likewise.
        if plan.is_one_pass and deferred != 0 and not axes[1]:
            codes, scales = fused.cast_rows(x, format, plan.rule)
            return [Operand(codes, scales.scale), sides[1]], None
        # 4. Amaxes in one pass, codes in another.
        both = _scales(x, format, plan, axes)
    else:
        # 5. The scale of earlier steps.
        in_use, amax = _delayed_scales(x, format, plan, state, axes)
        both = tuple(None if kind is None else in_use for kind in plan.by_amax)
    # 6. Codes under these scales.
    now = [None if side == deferred or scales is None else scales.inv_scale for side, scales in enumerate(both)]
    if state is not None and amax is None and any(scale is not None for scale in now):
        wanted = {"rows": now[0] is not None, "cols": now[1] is not None}
        *made, amax = fused.cast_pair_amax(x, format, jnp.reshape(state.inv_scale, (1, 1)), **wanted)
        amax = global_amax(amax, axes[0] + axes[1])
    else:
        made = fused.cast_pair(x, format, *now)
    for side, (scales, codes) in enumerate(zip(both, made, strict=True)):
        if scales is not None:
            sides[side] = Deferred(x, scales) if codes is None else Operand(codes, scales.scale)
    if state is not None:
        amax = jnp.reshape(global_amax(fused.tensor_amax(x), axes[0] + axes[1]) if amax is None else amax, ())
    return sides, amax


def _delayed_scales(
    x: jax.Array, format: Format, plan: CastPlan, state: DelayedState, axes: tuple[Axes, ...]
) -> tuple[Scales, jax.Array | None]:
    """The scales that a state gives, [1, 1], and the amax of `x` if a first step may need it: then they are its own."""
    inv_scale, amax = jnp.reshape(state.inv_scale, (1, 1)), None
    if state.initialized is not None:
        amax = global_amax(fused.tensor_amax(x), axes[0] + axes[1])
        first = scales_of(amax, format, plan.rule, margin=plan.margin)
        inv_scale = jnp.where(jnp.reshape(state.initialized, (1, 1)) != 0, inv_scale, first.inv_scale)
    return Scales(inv_scale, reciprocal(inv_scale)), amax


def _scales(
    x: jax.Array, format: Format, plan: CastPlan, axes: tuple[Axes, ...]
) -> tuple[Scales | None, Scales | None]:
    """The scales of the operands of `plan.by_amax`, tensorwise or rowwise."""
    row_kind, col_kind = plan.by_amax
    of_rows = of_cols = of_tensor = None
    if col_kind is Granularity.ROWWISE:
        of_rows, of_cols = fused.row_col_amax(x)
    elif row_kind is Granularity.ROWWISE:
        of_rows = fused.row_amax(x)
    if Granularity.TENSORWISE in plan.by_amax:
        amax = global_amax(fused.tensor_amax(x if of_rows is None else of_rows), axes[0] + axes[1])
        of_tensor = scales_of(amax, format, plan.rule)

    def scales(kind: Granularity | None, amaxes: jax.Array | None, along: Axes) -> Scales | None:
        if kind is not Granularity.ROWWISE:
            return None if kind is None else of_tensor
        assert amaxes is not None, "they were found above"
        return scales_of(global_amax(amaxes, along), format, plan.rule)

    return scales(row_kind, of_rows, axes[1]), scales(col_kind, of_cols, axes[0])

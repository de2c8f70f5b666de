"""The GEMM with block scales [EPI-5] as a Pallas kernel, for Triton on a Hopper GPU: XLA has none of its own.

A program owns a tile of the output and walks along K. For every 128 of K it takes the codes through the tensor core,
from zero, and adds the scaled partial to a float32 total that stays in registers.

Exactness: the bits of `f8ref.jax.scaled_mm`, for these reasons.
- `tensor_core_dot` over 128 codes is one chain of four steps [CHAIN-2]. Triton promotes a chain as often as an
  attribute of its `tt.dot` says. Pallas leaves that at 0: then Triton takes the float16 tensor core, other bits at a
  quarter of the speed. Hence a primitive of our own, which sets it; nothing public does.
- The multiply-add is an instruction, `fma.rn.f32`, so that no compiler decides which product is fused. The product
  before it is `mul`, which has no sum to fuse with.
- A K beyond the end is padded with zero codes, whose partial is +0, under scales that exist and are the caller's: NaN
  or infinite ones give NaN as they do in the oracle, whose last block is as short of codes.

Operands are checked by the verbs and layers.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive

from f8emu.jax.kernels import MOST_ELEMENTS, NOT_VARYING
from f8emu.spec.formats import Format
from f8emu.spec.scaling import BLOCK, Granularity

_SQUARE = Granularity.BLOCKWISE_128X128
_NEVER_PROMOTED = 1 << 30
_FMA = "fma.rn.f32 $0, $1, $2, $3;"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmLaunch:
    """How the output is cut into programs."""

    rows: int
    cols: int
    """Extents of the tile that a program has, powers of two; `cols` up to 128, to lie in one block of 128x128."""
    parts: int
    """How many dots the rows of a tile are given to, up to 128 for each: fewer rows need fewer registers at once."""
    warps: int
    stages: int
    """How many steps of K are on their way to shared memory."""
    group: int
    """How many rows of tiles run together before the next column of tiles, for the sake of the L2 cache."""
    interpret: bool = False
    """Whether a CPU runs it, with XLA's dot: for tests."""
    ahead: bool
    """Whether scales of columns are loaded one step early: with as many threads as columns Triton passes them through
    shared memory, and would wait for them before the dot. It takes registers."""


SQUARE_LAUNCH = GemmLaunch(rows=64, cols=128, parts=1, warps=4, stages=3, group=8, ahead=True)
"""With a 128x128 side. Chosen from 15 on an H200: larger tiles were faster for a long N and slower for a long K."""
VECTORS_LAUNCH = GemmLaunch(rows=128, cols=64, parts=2, warps=4, stages=3, group=8, ahead=False)
"""With 1x128 scales on both sides."""


def launch_of(granularities: tuple[Granularity, Granularity]) -> GemmLaunch:
    """The launch for a pair of scales."""
    return SQUARE_LAUNCH if _SQUARE in granularities else VECTORS_LAUNCH


def fits(m: int, n: int, k: int, slices: int) -> bool:
    """Whether the kernel takes a GEMM of these extents."""
    padded_k = -(-k // BLOCK) * BLOCK
    return IS_AVAILABLE and 0 < m * n * k and max(m * padded_k, n * padded_k, slices * m * n) <= MOST_ELEMENTS


class _Problem(NamedTuple):
    """The static part of a GEMM."""

    m: int
    n: int
    blocks: int
    """The number of blocks along K."""
    slice_blocks: int
    granularities: tuple[Granularity, Granularity]
    """The granularities of left and right."""
    right_first: bool
    launch: GemmLaunch

    @property
    def tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.m, self.launch.rows), pl.cdiv(self.n, self.launch.cols)

    def place(self, program: Any) -> tuple[Any, Any]:
        """The tile of a program: down a few rows of tiles, then to the next column: operands stay in the cache."""
        tiles, group = self.tiles, self.launch.group
        programs = group * tiles[1]
        first = program // programs * group
        height = jnp.minimum(tiles[0] - first, group)
        return first + program % programs % height, program % programs // height


def block_mm(
    left: jax.Array,
    right: jax.Array,
    scale_left: jax.Array,
    scale_right: jax.Array,
    granularities: tuple[Granularity, Granularity],
    *,
    out_dtype: Format,
    slice_blocks: int,
    right_first: bool = False,
    launch: GemmLaunch | None = None,
) -> jax.Array:
    """[EPI-5] `left @ right^T` of codes with block scales, K in slices of `slice_blocks` blocks [CHAIN-3].

    `granularities` are those of left and right. `right_first`: the partial meets the right scale before the left one;
    it matters where both operands have 1x128 scales.

    Shapes: left [M, K], right [N, K], of any extents; scales as `Granularity.scale_shape` -> [slices, M, N]: of one
    slice rounded to `out_dtype`, of several the float32 totals of each, to be added in order.
    """
    (m, k), n = left.shape, right.shape[0]
    launch, blocks = launch or launch_of(granularities), -(-k // BLOCK)
    problem = _Problem(m, n, blocks, slice_blocks, granularities, right_first, launch)
    tiles, slices = problem.tiles, -(-blocks // slice_blocks)
    # 1. K in whole blocks, in which every row starts at a multiple of 16 bytes.
    left, right = (lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, -k % BLOCK, 0))) for x in (left, right))
    # 2. Scales of 1x128 so that those of a step of K are contiguous. The casts write them so, then transpose as here.
    scales = [s if g is _SQUARE else s.T for s, g in zip((scale_left, scale_right), granularities, strict=True)]

    def scale_spec(scale: jax.Array, granularity: Granularity, axis: int) -> Any:
        if granularity is _SQUARE:
            return pl.BlockSpec(scale.shape, lambda i, s: (0, 0))
        return pl.BlockSpec((blocks, (launch.rows, launch.cols)[axis]), lambda i, s: (0, problem.place(i)[axis]))

    dtype = jnp.dtype(out_dtype.name if slices == 1 else "float32")
    return pl.pallas_call(
        functools.partial(_kernel, problem),
        grid=(tiles[0] * tiles[1], slices),
        in_specs=[
            pl.BlockSpec((launch.rows, left.shape[1]), lambda i, s: (problem.place(i)[0], 0)),
            pl.BlockSpec((launch.cols, right.shape[1]), lambda i, s: (problem.place(i)[1], 0)),
            *(scale_spec(scale, g, axis) for axis, (scale, g) in enumerate(zip(scales, granularities, strict=True))),
        ],
        out_specs=pl.BlockSpec((None, launch.rows, launch.cols), lambda i, s: (s, *problem.place(i))),
        out_shape=jax.ShapeDtypeStruct((slices, m, n), dtype, **NOT_VARYING),
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=launch.interpret,
        name="f8emu_block_mm",
    )(left, right, *scales)


def _kernel(
    problem: _Problem, left_ref: Any, right_ref: Any, left_scale_ref: Any, right_scale_ref: Any, out_ref: Any
) -> None:
    m, n, blocks, slice_blocks, granularities, right_first, launch = problem
    row, col = problem.place(pl.program_id(0))
    part_rows = launch.rows // launch.parts
    # 1. Where the tile overhangs; None: nowhere, in no program.
    rows_inside = [_inside(row, launch.rows, m, part * part_rows, part_rows) for part in range(launch.parts)]
    cols_inside = _inside(col, launch.cols, n, 0, launch.cols)

    def one_part(part: int, block: Any, ks: Any) -> tuple[jax.Array, jax.Array]:
        """Codes of some rows in a block of K, and their scales: a column, or the one that they share."""
        rows = pl.ds(part * part_rows, part_rows)
        codes = _load(left_ref.at[rows, ks], _wide(rows_inside[part]))
        if granularities[0] is _SQUARE:
            square = (row * launch.rows + part * part_rows) // BLOCK
            return codes, left_scale_ref[jnp.minimum(square, left_scale_ref.shape[0] - 1), block]  # some overhang
        return codes, _load(left_scale_ref.at[block, rows], rows_inside[part])[:, None]

    def col_scales(block: Any) -> jax.Array:
        if granularities[1] is _SQUARE:
            return right_scale_ref[col * launch.cols // BLOCK, block]
        return _load(right_scale_ref.at[block, :], cols_inside)

    def one_block(block: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # 2. Everything is on its way before the first dot waits.
        if launch.ahead:
            of_cols, *totals = carry
            carried = [col_scales(jnp.minimum(block + 1, blocks - 1))]
        else:
            of_cols, totals = col_scales(block), carry
            carried = []
        of_cols = of_cols[None, :] if of_cols.ndim else of_cols
        ks = pl.ds(block * BLOCK, BLOCK)
        right = _load(right_ref.at[:, ks], _wide(cols_inside))
        parts = [one_part(part, block, ks) for part in range(launch.parts)]
        sums: list[jax.Array] = []
        for (left, of_rows), total in zip(parts, totals, strict=True):
            # 3. Four steps of the tensor core; then the second product is in one rounding with the sum.
            partial = _xla_dot(left, right) if launch.interpret else tensor_core_dot(left, right)
            if _SQUARE in granularities:
                scale = of_rows * of_cols
            else:
                factors = of_rows, of_cols
                partial, scale = partial * factors[right_first], factors[not right_first]
            scale = jnp.broadcast_to(scale, partial.shape)
            sums.append(partial * scale + total if launch.interpret else _fma(partial, scale, total))
        return (*carried, *sums)

    # 4. A slice of K, from zero.
    first, end = 0, blocks
    if slice_blocks < blocks:
        first = pl.program_id(1) * slice_blocks
        end = jnp.minimum(first + slice_blocks, blocks)
    zeros = (jnp.zeros((part_rows, launch.cols), jnp.float32),) * launch.parts
    carry = (col_scales(jnp.asarray(first, jnp.int32)), *zeros) if launch.ahead else zeros
    for part, total in enumerate(lax.fori_loop(first, end, one_block, carry)[launch.ahead :]):
        inside = _both(rows_inside[part], cols_inside)
        out = out_ref.at[pl.ds(part * part_rows, part_rows), :]
        plgpu.store(out, total.astype(out_ref.dtype), mask=inside)  # [EPI-4] to nearest even


def _inside(tile: Any, extent: int, size: int, start: int, count: int) -> jax.Array | None:
    """Which of `count` rows from `start` of a tile exist; None for all of them in every tile."""
    if size % extent == 0:
        return None
    return tile * extent + start + lax.iota(jnp.int32, count) < size


def _wide(inside: jax.Array | None) -> jax.Array | None:
    return None if inside is None else jnp.broadcast_to(inside[:, None], (inside.shape[0], BLOCK))


def _both(rows: jax.Array | None, cols: jax.Array | None) -> jax.Array | None:
    if rows is None or cols is None:
        return rows[:, None] if rows is not None else cols[None, :] if cols is not None else None
    return rows[:, None] & cols[None, :]


def _load(ref: Any, inside: jax.Array | None) -> jax.Array:
    return plgpu.load(ref) if inside is None else plgpu.load(ref, mask=inside, other=jnp.zeros((), ref.dtype))


def tensor_core_dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left [M, 128] @ right [N, 128]^T` of codes, float32, as one chain from zero; in kernels only."""
    return _dot.bind(left, right)


def _fma(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    shape, constraints = jax.ShapeDtypeStruct(x.shape, jnp.float32), "=f,f,f,f"
    (result,) = plgpu.elementwise_inline_asm(
        _FMA, args=[x, y, z], constraints=constraints, pack=1, result_shape_dtypes=[shape]
    )
    return result


def _xla_dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


_dot = Primitive("f8emu_tensor_core_dot")
_dot.def_abstract_eval(lambda left, right: ShapedArray((left.shape[0], right.shape[0]), jnp.dtype(jnp.float32)))


def _is_lowered_by_pallas() -> bool:
    # JAX has no public way to say how a primitive is lowered to Triton: a JAX without this one gets no kernel.
    try:
        from jax._src.pallas.triton import lowering
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith
        from jaxlib.triton import dialect

        register = lowering.register_lowering
    except (AttributeError, ImportError):
        return False
    given: tuple[Any, ...] = (ir, arith, dialect, register)
    ir, arith, dialect, register = given

    def lower(ctx: Any, left: Any, right: Any) -> Any:
        kind = ir.RankedTensorType.get(ctx.avals_out[0].shape, ir.F32Type.get())
        zero = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get_f32(0.0)))
        return dialect.dot(left, dialect.trans(right, (1, 0)), zero, max_num_imprecise_acc=_NEVER_PROMOTED)

    register(_dot)(lower)
    return True


IS_AVAILABLE = _is_lowered_by_pallas()
"""Whether this JAX can lower the kernel."""

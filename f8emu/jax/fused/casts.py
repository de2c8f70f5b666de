"""The casts that a linear layer needs, each from one reading of its matrix: Pallas kernels on a GPU, else `plain`.

A linear layer needs each matrix `x` [M, N] as two operands: `x` itself, with K = N ("rows"), and `x^T`, with K = M
("cols"), both row-major. A scale or an amax has the `Granularity.scale_shape` of its operand.

Exactness: the kernels and `plain` give the same bits, those of the verbs `amax`, `scale_from_amax` and `quantize`.
`choice` says where kernels run. Empty and very large matrices, and formats that the chip does not multiply, take plain
JAX everywhere.

Raises: OperandError for a wrong dtype, rank or shape; SpecError for an unknown format.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from f8emu.jax.dtypes import CHIP, float8_format, format_of, require_values
from f8emu.jax.fused import block_kernels, kernels, plain
from f8emu.jax.fused.choice import kernel_or_plain
from f8emu.jax.fused.plain import Cast
from f8emu.jax.sharing import is_shared
from f8emu.spec.errors import OperandError
from f8emu.spec.formats import FLOAT32, Format
from f8emu.spec.scaling import Granularity, ScaleRule


def tensor_amax(x: jax.Array) -> jax.Array:
    """Largest magnitude of `x` [M, N], [1, 1]."""
    require_values("tensor_amax", x, ndim=2)
    return plain.tensor_amax(x)  # one reduction, which XLA fuses with what computes x


def row_amax(x: jax.Array) -> jax.Array:
    """Largest magnitude of each row of `x` [M, N], [M, 1]."""
    require_values("row_amax", x, ndim=2)
    return plain.row_amax(x)  # one reduction, which XLA fuses with what computes x


def row_col_amax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest magnitudes of the rows of `x` [M, N], [M, 1], and of its columns, [N, 1], in one pass."""
    require_values("row_col_amax", x, ndim=2)
    return _row_col_amax(x)


def cast_pair(
    x: jax.Array, format: Any, row_inv_scale: jax.Array | None, col_inv_scale: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Codes of `x` [M, N] and of `x^T` [N, M], each under its inv_scale; None leaves an operand out.

    An inv_scale is [1, 1], or one a row of its operand: [M, 1] for `x`, [N, 1] for `x^T`. One array given for both is
    applied once.
    """
    require_values("cast_pair", x, ndim=2)
    for name, inv_scale, rows in (("row", row_inv_scale, x.shape[0]), ("col", col_inv_scale, x.shape[1])):
        if inv_scale is not None:
            _require_inv_scale("cast_pair", f"{name}_inv_scale", inv_scale, ((1, 1), (rows, 1)))
    format = float8_format("cast_pair", format)
    if row_inv_scale is not None and row_inv_scale is col_inv_scale:
        return _cast_both(x, row_inv_scale, format=format)
    return _cast_pair(x, row_inv_scale, col_inv_scale, format=format)


def cast_pair_amax(
    x: jax.Array, format: Any, inv_scale: jax.Array, rows: bool = True, cols: bool = True
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Codes of `x` [M, N] if `rows`, of `x^T` [N, M] if `cols`, under one inv_scale [1, 1], and the amax of `x`."""
    require_values("cast_pair_amax", x, ndim=2)
    _require_inv_scale("cast_pair_amax", "inv_scale", inv_scale, ((1, 1),))
    return _cast_pair_amax(x, inv_scale, format=float8_format("cast_pair_amax", format), rows=rows, cols=cols)


def cast_rows(x: jax.Array, format: Any, rule: ScaleRule = ScaleRule()) -> Cast:
    """Codes [M, N] and scales [M, 1] of the rows of `x` [M, N], each scaled by its own amax."""
    require_values("cast_rows", x, ndim=2)
    return _cast_rows(x, format=float8_format("cast_rows", format), rule=rule)


def cast_blocks(
    x: jax.Array,
    format: Any,
    rule: ScaleRule,
    row_granularity: Granularity | None,
    col_granularity: Granularity | None,
) -> tuple[Cast | None, Cast | None]:
    """Codes and scales of `x` [M, N] and of `x^T` [N, M], each by blocks of its own; None leaves an operand out."""
    require_values("cast_blocks", x, ndim=2)
    for name, granularity in (("row_granularity", row_granularity), ("col_granularity", col_granularity)):
        if granularity is not None and not granularity.is_blockwise:
            raise OperandError(
                f"cast_blocks: {name} must be blockwise_1x128, blockwise_128x128 or None; got {granularity.value}; "
                "cast_pair and cast_rows serve the others"
            )
    return _cast_blocks(
        x,
        format=float8_format("cast_blocks", format),
        rule=rule,
        row_granularity=row_granularity,
        col_granularity=col_granularity,
    )


def _program(small: Callable[..., Any], *static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: one program, in which XLA fuses what the function does; `small` where its parts share programs."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        whole = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def call(x: jax.Array, *args: Any, **settings: Any) -> Any:
            return (small if is_shared(x) else whole)(x, *args, **settings)

        return call

    return compiled


@_program(plain.row_col_amax)
def _row_col_amax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not _fits(x):
        return plain.row_col_amax(x)
    return kernel_or_plain(kernels.row_col_amax, plain.row_col_amax, x)


def _under_one(cast_pair: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, inv_scale, *, format: cast_pair(x, inv_scale, inv_scale, format=format)


@_program(_under_one(plain.cast_pair), "format")
def _cast_both(x: jax.Array, inv_scale: jax.Array, *, format: Format) -> Any:
    given, small = (functools.partial(_under_one(one), format=format) for one in (kernels.cast_pair, plain.cast_pair))
    if not _fits(x, format):
        return small(x, inv_scale)
    return kernel_or_plain(given, small, x, inv_scale)


@_program(plain.cast_pair, "format")
def _cast_pair(
    x: jax.Array, row_inv_scale: jax.Array | None, col_inv_scale: jax.Array | None, *, format: Format
) -> Any:
    args = x, row_inv_scale, col_inv_scale
    if not _fits(x, format) or (row_inv_scale is None and col_inv_scale is None):
        return plain.cast_pair(*args, format=format)
    given = functools.partial(kernels.cast_pair, format=format)
    return kernel_or_plain(given, functools.partial(plain.cast_pair, format=format), *args)


@_program(plain.cast_pair_amax, "format", "rows", "cols")
def _cast_pair_amax(x: jax.Array, inv_scale: jax.Array, **settings: Any) -> Any:
    if not _fits(x, settings["format"]) or not (settings["rows"] or settings["cols"]):
        return plain.cast_pair_amax(x, inv_scale, **settings)
    given = functools.partial(kernels.cast_pair_amax, **settings)
    return kernel_or_plain(given, functools.partial(plain.cast_pair_amax, **settings), x, inv_scale)


@_program(plain.cast_rows, "format", "rule")
def _cast_rows(x: jax.Array, **settings: Any) -> Cast:
    if not _fits(x, settings["format"]) or x.shape[1] > kernels.LONGEST_ROW:
        return plain.cast_rows(x, **settings)
    given = functools.partial(kernels.cast_rows, **settings)
    return kernel_or_plain(given, functools.partial(plain.cast_rows, **settings), x)


@_program(plain.cast_blocks, "format", "rule", "row_granularity", "col_granularity")
def _cast_blocks(x: jax.Array, **settings: Any) -> Any:
    is_nothing = settings["row_granularity"] is None and settings["col_granularity"] is None
    if not _fits(x, settings["format"]) or is_nothing:
        return plain.cast_blocks(x, **settings)
    given = functools.partial(block_kernels.cast_blocks, **settings)
    return kernel_or_plain(given, functools.partial(plain.cast_blocks, **settings), x)


def _fits(x: jax.Array, format: Format | None = None) -> bool:
    """Whether the kernels take a matrix and a format, wherever they run."""
    return 0 < x.size <= kernels.MOST_ELEMENTS and (format is None or format in CHIP.operand_formats)


def _require_inv_scale(call: str, name: str, inv_scale: Any, shapes: tuple[tuple[int, int], ...]) -> None:
    format_of(call, name, inv_scale, (FLOAT32.name,))
    if tuple(inv_scale.shape) not in shapes:
        known = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise OperandError(f"{call}: {name} must have shape {known}; got {list(inv_scale.shape)}")

"""What a GEMM accepts, checked before either engine runs, so that code tested without a GPU also runs on one."""

from typing import Any

import jax.numpy as jnp

from f8emu.jax.dtypes import HIGH_PRECISION_NAMES, format_of, output_format
from f8emu.spec.chip import Chip
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, FLOAT32, HIGH_PRECISION, Format
from f8emu.spec.scaling import Granularity


def check_scaled_mm(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    *,
    bias: Any,
    use_fast_accum: bool,
    granularity_a: Granularity | str | None,
    granularity_b: Granularity | str | None,
    split_k: int | None,
    chip: Chip,
) -> tuple[tuple[Any, ...], tuple[Granularity, Granularity]]:
    """The operands of a `scaled_mm`, a bias of None left out, and the granularities of its scales.

    Raises:
        OperandError: wrong dtype, shape or scales.
        SpecError: an unknown granularity, or a `split_k` below 1.
        UnsupportedError: a combination that the chip has no GEMM for, or that is not modelled.
    """
    call = "scaled_mm"
    names = tuple(format.name for format in chip.operand_formats)
    formats = format_of(call, "a", a, names), format_of(call, "b", b, names)
    m, n, k = _extents(call, a, b)
    check_split_k(call, split_k)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        format_of(call, name, scale, (FLOAT32.name,))
    shapes = tuple(scale_a.shape), tuple(scale_b.shape)
    pair = chip.granularities_of(call, (m, n, k), shapes, (granularity_a, granularity_b))
    refusal = chip.refusal(formats, pair, use_fast_accum=use_fast_accum)
    if refusal is not None:
        raise UnsupportedError(f"{call}: {refusal}")
    if bias is not None:
        format_of(call, "bias", bias, HIGH_PRECISION_NAMES)
        if tuple(bias.shape) != (n,):
            raise OperandError(
                f"{call}: bias must have shape [N] = [{n}], one for each column of b; got {list(bias.shape)}"
            )
    if pair[0] is Granularity.TENSORWISE:
        scale_a, scale_b = jnp.reshape(scale_a, (1, 1)), jnp.reshape(scale_b, (1, 1))
    return (a, b, scale_a, scale_b, *(() if bias is None else (bias,))), pair


def check_scaled_grouped_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, chip: Chip) -> None:
    """The operands of a `scaled_grouped_mm` [EPI-6].

    Raises:
        OperandError: wrong dtype or shape.
    """
    call = "scaled_grouped_mm"
    for name, x in (("a", a), ("b", b)):
        format_of(call, name, x, (chip.format_pairs[0][0].name,))
    for name, x in (("scale_a", scale_a), ("scale_b", scale_b)):
        format_of(call, name, x, (FLOAT32.name,))
    if str(getattr(offs, "dtype", None)) != "int32":
        raise OperandError(
            f"{call}: offs must be an array of int32, the end of each group's rows; got "
            f"{getattr(offs, 'dtype', type(offs).__name__)}; take jnp.cumsum(sizes, dtype=jnp.int32)"
        )
    found = [list(x.shape) for x in (a, b, scale_a, scale_b, offs)]
    fits = [len(shape) for shape in found] == [2, 3, 1, 2, 1]
    if fits:
        (m, k), (groups, _, n) = found[0], found[1]
        fits = found[1:] == [[groups, k, n], [m], [groups, n], [groups]]
    if not fits:
        raise OperandError(
            f"{call}: a, b, scale_a, scale_b and offs must be [total_M, K], [groups, K, N], [total_M], [groups, N] and "
            f"[groups]; got {', '.join(map(str, found))}; a b of two dimensions has no groups: that is scaled_mm"
        )


def check_mm(a: Any, b: Any, split_k: int | None) -> None:
    """The operands of the bfloat16 `mm` [BF16-1].

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: a `split_k` below 1.
    """
    for name, x in (("a", a), ("b", b)):
        format_of("mm", name, x, (BFLOAT16.name,))
    _extents("mm", a, b)
    check_split_k("mm", split_k)


def check_output(call: str, out_dtype: Any, *, name: str = "out_dtype") -> Format:
    """The format of an output, which the caller gave as the argument `name`.

    Raises:
        SpecError: no such format.
        UnsupportedError: one that no GEMM gives.
    """
    found = output_format(call, out_dtype, name=name)
    if found not in HIGH_PRECISION:
        known = ", ".join(HIGH_PRECISION_NAMES)
        raise UnsupportedError(
            f"{call}: {name} must be one of {known}; got {found}; quantize the result: float8 output is not modelled"
        )
    return found


def check_split_k(call: str, split_k: int | None) -> None:
    """Raise SpecError unless `split_k` is None or a number of slices."""
    if split_k is not None and (type(split_k) is not int or split_k < 1):
        raise SpecError(
            f"{call}: split_k must be a static integer of at least 1, which means no split-K; got {split_k!r}; leave "
            "it out to take the plan's"
        )


def _extents(call: str, a: Any, b: Any) -> tuple[int, int, int]:
    """M, N and K."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise OperandError(
            f"{call}: a must be [M, K] and b [K, N]; got shapes {list(a.shape)} and {list(b.shape)}; pass a weight "
            "[N, K] as weight.T, flatten leading dimensions with a.reshape(-1, K)"
        )
    return a.shape[0], b.shape[1], a.shape[1]

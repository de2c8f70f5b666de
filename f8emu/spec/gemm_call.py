"""One call of a GEMM as data: its shapes, formats and options, and what is refused. Arrays do not appear here.

A backend describes its arrays by shape and dtype (`Shaped`). It gets a `GemmCall`, or the error that its caller sees,
which is the same in every backend. Strides and devices are the backend's own business.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, E8M0FNU, FLOAT32, FORMATS, HIGH_PRECISION, Format, output_format
from f8emu.spec.gemm import Gemm
from f8emu.spec.scaling import MX_BLOCK, Granularity


class Shaped(NamedTuple):
    """The shape and dtype of an array: all that the checks need."""

    shape: tuple[int, ...]
    dtype: str
    """The name of its dtype, which need not be the name of a format."""


class _Dims(NamedTuple):
    """The dimensions of a grouped GEMM, in the order of its arguments; "G*M" are those of all groups in a row."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    scale_a: tuple[str, ...]
    scale_b: tuple[str, ...]
    out: tuple[str, ...]
    divided: str | None  # what `offs` divides into groups


class GroupKind(Enum):
    """Which dimension of a `scaled_grouped_mm` has groups, which the dimensions of a and b tell."""

    ROWS = _Dims(("M", "K"), ("G", "K", "N"), ("M",), ("G", "N"), ("M", "N"), "M")
    COLUMNS = _Dims(("G", "M", "K"), ("K", "N"), ("G", "M"), ("N",), ("M", "N"), "N")
    INNER = _Dims(("M", "K"), ("K", "N"), ("G*M",), ("G*N",), ("G", "M", "N"), "K")
    BATCH = _Dims(("G", "M", "K"), ("G", "K", "N"), ("G", "M"), ("G", "N"), ("G", "M", "N"), None)

    @classmethod
    def of(cls, a: int, b: int) -> "GroupKind":
        """The kind of operands that have so many dimensions; ROWS where no kind has."""
        return next((kind for kind in cls if (len(kind.value.a), len(kind.value.b)) == (a, b)), cls.ROWS)

    def scale_dims(self, *, is_microscaled: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The dimensions of scale_a and scale_b. E8M0 scales have those of their operand, "B" blocks of 32 for K."""
        a, b, scale_a, scale_b, *_ = self.value
        if not is_microscaled:
            return scale_a, scale_b
        return tuple("B" if dim == "K" else dim for dim in a), tuple("B" if dim == "K" else dim for dim in b)

    @property
    def description(self) -> str:
        """The kind in words, for messages."""
        return "every group has its own a and b" if self.value.divided is None else f"offs divides {self.value.divided}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCall:
    """A GEMM `[M, K] @ [K, N]` that is not refused; `scaled_mm_call` and its neighbours make it."""

    call: str
    """The name of what was called, for messages."""
    sizes: tuple[int, int, int]
    """M, N and K; what is divided into groups counts that of all."""
    formats: tuple[Format, Format]
    granularities: tuple[Granularity, Granularity] | None = None
    """The granularities of scale_a and scale_b; None: bfloat16 operands, without scales."""
    out: Format = BFLOAT16
    use_fast_accum: bool = False
    split_k: int | None = None
    """The slices of K [CHAIN-3]; None: as the library or its plan says."""
    chip: Chip = HOPPER
    groups: int = 0
    """Number of groups [EPI-6]; 0 for an ordinary GEMM."""
    group_kind: GroupKind | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        sizes = dict(zip("MNKG", (*self.sizes, self.groups), strict=True))
        return self.sizes[:2] if self.group_kind is None else tuple([sizes[dim] for dim in self.group_kind.value.out])

    @property
    def verb(self) -> str:
        """The name of the function that multiplies so, in `f8emu.numpy` and its like."""
        return "scaled_grouped_mm" if self.groups else "mm" if self.granularities is None else "scaled_mm"

    @property
    def model(self) -> AccumulationModel:
        """How the chip accumulates it."""
        return self.chip.accumulation(self.granularities, use_fast_accum=self.use_fast_accum)


class GroupPart(NamedTuple):
    """A group of a grouped GEMM: a GEMM, and the indices of its operands, scale vectors and output."""

    gemm: GemmCall
    a: tuple[Any, ...]
    b: tuple[Any, ...]
    scale_a: tuple[Any, ...]
    scale_b: tuple[Any, ...]
    out: tuple[Any, ...]


def scaled_mm_call(
    a: Shaped,
    b: Shaped,
    scale_a: Shaped,
    scale_b: Shaped,
    bias: Shaped | None = None,
    *,
    granularity_a: Granularity | str | None = None,
    granularity_b: Granularity | str | None = None,
    out_dtype: Format | str = BFLOAT16,
    use_fast_accum: bool = False,
    split_k: int | None = None,
    chip: Chip = HOPPER,
) -> GemmCall:
    """A `scaled_mm`; granularities that are None follow from the shapes of the scales."""
    # The order is the one in which a caller mends a call: dtypes, shapes, scales, then what the chip pairs.
    call = "scaled_mm"
    formats = _format(call, "a", a, chip.operand_formats), _format(call, "b", b, chip.operand_formats)
    sizes = _sizes(call, a, b)
    _check_split_k(call, split_k)
    scales = _scale_format(call, scale_a, scale_b)
    pair = chip.granularities_of(call, sizes, (scale_a.shape, scale_b.shape), (granularity_a, granularity_b), scales)
    _check_paired(call, chip, formats, pair, use_fast_accum)
    out = output_format(call, out_dtype)
    if bias is not None:
        _format(call, "bias", bias, HIGH_PRECISION)
        if bias.shape != sizes[1:2]:
            raise OperandError(
                f"{call}: bias must have shape [N] = [{sizes[1]}], one value for each column of b; "
                f"got {list(bias.shape)}"
            )
    return GemmCall(
        call=call,
        sizes=sizes,
        formats=formats,
        granularities=pair,
        out=out,
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=chip,
    )


def scaled_grouped_mm_call(
    a: Shaped,
    b: Shaped,
    scale_a: Shaped,
    scale_b: Shaped,
    offs: Shaped | None = None,
    *,
    out_dtype: Format | str = BFLOAT16,
    use_fast_accum: bool = False,
    chip: Chip = HOPPER,
) -> GemmCall:
    """A `scaled_grouped_mm` [EPI-6]; `group_parts` checks the values of `offs`."""
    # 1. Dtypes.
    call = "scaled_grouped_mm"
    formats = _format(call, "a", a, chip.operand_formats), _format(call, "b", b, chip.operand_formats)
    is_microscaled = _scale_format(call, scale_a, scale_b) == E8M0FNU
    kind_of_scales = Granularity.BLOCKWISE_1X32 if is_microscaled else Granularity.ROWWISE
    pair = (kind_of_scales, kind_of_scales)
    # 2. Shapes, which depend on each other: one message names all.
    operands = (a, b, scale_a, scale_b) if offs is None else (a, b, scale_a, scale_b, offs)
    shapes = [list(x.shape) for x in operands]
    kind = GroupKind.of(len(a.shape), len(b.shape))
    sizes = dict(zip((*kind.value.a, *kind.value.b), (*a.shape, *b.shape), strict=False))
    sizes["G"] = sizes.get("G", offs.shape[0] if offs is not None and offs.shape else -1)
    sizes["B"] = -(-sizes["K"] // MX_BLOCK)
    named = (*kind.value[:2], *kind.scale_dims(is_microscaled=is_microscaled))
    expected = [[math.prod(sizes.get(size, -1) for size in dim.split("*")) for dim in dims] for dims in named]
    expected += [] if offs is None else [[sizes["G"]]]
    if shapes != expected or (offs is None) != (kind is GroupKind.BATCH):
        wanted = ", ".join(f"[{', '.join(dims)}]" for dims in named) + (", B = ceil(K / 32)," if is_microscaled else "")
        ends = "absent" if kind is GroupKind.BATCH else "[G]"
        raise OperandError(
            f"{call}: a, b, scale_a, scale_b and offs must be {wanted} and {ends} where {kind.description}; got "
            f"{', '.join(map(str, shapes))}{' and no offs' if offs is None else ''}; without groups it is scaled_mm"
        )
    if not sizes["G"]:
        raise OperandError(f"{call}: there are no groups, and nothing to compute; skip the call")
    if offs is not None and offs.dtype != "int32":
        raise OperandError(
            f"{call}: offs must be int32, the end of each group; got {offs.dtype}; take the cumulative sum of the "
            "groups' sizes as int32"
        )
    # 3. What the chip pairs.
    _check_paired(call, chip, formats, pair, use_fast_accum)
    return GemmCall(
        call=call,
        sizes=(sizes["M"], sizes["N"], sizes["K"]),
        formats=formats,
        granularities=pair,
        out=output_format(call, out_dtype),
        use_fast_accum=use_fast_accum,
        split_k=1,
        chip=chip,
        groups=sizes["G"],
        group_kind=kind,
    )


def mm_call(
    a: Shaped,
    b: Shaped,
    *,
    out_dtype: Format | str = BFLOAT16,
    split_k: int | None = None,
    chip: Chip = HOPPER,
) -> GemmCall:
    """The bfloat16 `mm` [BF16-1]."""
    formats = _format("mm", "a", a, (BFLOAT16,)), _format("mm", "b", b, (BFLOAT16,))
    sizes = _sizes("mm", a, b)
    _check_split_k("mm", split_k)
    out = output_format("mm", out_dtype)
    return GemmCall(call="mm", sizes=sizes, formats=formats, out=out, split_k=split_k, chip=chip)


def layer_call(gemm: Gemm, sizes: tuple[int, int, int], out: Format, chip: Chip) -> GemmCall:
    """A GEMM of a layer: one of a recipe's, which was checked when the recipe was made."""
    is_plain = gemm.is_high_precision
    return GemmCall(
        call="mm" if is_plain else "scaled_mm",
        sizes=sizes,
        formats=(gemm.a.format or BFLOAT16, gemm.b.format or BFLOAT16),
        granularities=None if is_plain else gemm.scaled_gemm_granularities,
        out=out,
        use_fast_accum=gemm.use_fast_accum,
        split_k=None if gemm.split_k else 1,
        chip=chip,
    )


def check_library(gemm: GemmCall, bias: Shaped | None = None) -> None:
    """Raise for what the GPU's library refuses besides: unpadded sizes, most biases, most formats of grouped GEMMs."""
    call, chip, (m, n, k) = gemm.call, gemm.chip, gemm.sizes
    # 1. Groups.
    if gemm.groups:
        for name, format, expected in zip("ab", gemm.formats, chip.format_pairs[0], strict=True):
            if format != expected:
                raise OperandError(f"{call}: {name} must be {expected}; got {format}; quantize or cast it first")
        if gemm.out != BFLOAT16:
            raise UnsupportedError(f"{call}: out_dtype must be bfloat16; got {gemm.out}; convert the result")
        kind, pair = gemm.group_kind, gemm.granularities
        if pair and pair[0].is_microscaled and kind in (GroupKind.COLUMNS, GroupKind.BATCH):
            raise UnsupportedError(
                f"{call}: torch has E8M0 scales where offs divides M or K alone; here {kind.description}; call "
                "scaled_mm for each group"
            )
    # 2. Sizes, which hold for every GEMM.
    if not (m and n and k):
        raise OperandError(
            f"{call}: empty operands, M, N, K = {m}, {n}, {k}; skip the GEMM: its result is empty, or zeros if only K "
            "is 0"
        )
    multiple = chip.size_multiple
    if k % multiple or n % multiple:
        raise OperandError(
            f"{call}: K and N must be multiples of {multiple}; got K = {k}, N = {n}; pad the operands with zeros"
        )
    if gemm.granularities is None:
        return
    if gemm.granularities[0] is Granularity.BLOCKWISE_1X128 and m % chip.vector_multiple:
        raise OperandError(
            f"{call}: with 1x128 scales of a, M must be a multiple of {chip.vector_multiple}; got {m}; pad a and "
            "scale_a"
        )
    # 3. A bias.
    if bias is None:
        return
    if gemm.granularities[0].is_blockwise and not gemm.granularities[0].is_microscaled:
        raise UnsupportedError(f"{call}: a bias with blockwise scales is not modelled; add it to the result instead")
    if gemm.out == FLOAT32:
        raise UnsupportedError(
            f"{call}: the hardware adds no bias to a float32 output; add it to the result, or pass another out_dtype"
        )
    if bias.dtype != gemm.out.name:
        raise OperandError(f"{call}: bias must be of out_dtype {gemm.out}; got {bias.dtype}; convert it")


def group_parts(gemm: GemmCall, ends: Sequence[int] | None) -> list[GroupPart]:
    """The groups of a `scaled_grouped_mm`, each as a GEMM of its own."""
    # 1. Which of M, N and K each group has, from where to where; a batch divides none.
    kind = gemm.group_kind
    assert kind is not None, "only such a GEMM has groups"
    divided = kind.value.divided
    if divided is None or ends is None:
        runs = [slice(None)] * gemm.groups
    else:
        total = gemm.sizes["MNK".index(divided)]
        if [0, *ends] != sorted([0, *ends]) or [0, *ends][-1] > total:
            raise OperandError(
                f"{gemm.call}: offs must rise to at most the {total} of {divided}; got {list(ends)}; give the end of "
                "each group"
            )
        runs = [slice(start, stop) for start, stop in pairwise([0, *ends])]
    # 2. An index for each dimension: the group's number, its run, or all. Scales of a divided K follow one another.
    is_microscaled = gemm.granularities is not None and gemm.granularities[0].is_microscaled
    named = (*kind.value[:2], *kind.scale_dims(is_microscaled=is_microscaled), kind.value.out)
    whole, parts = slice(None), list[GroupPart]()
    for group, run in enumerate(runs):
        places = {"G": group, divided: run}
        if divided == "K" and is_microscaled:
            places["B"] = _blocks_of(gemm, run)
        sizes = [run.stop - run.start if dim == divided else size for dim, size in zip("MNK", gemm.sizes, strict=True)]
        m, n, _ = sizes
        places |= {"G*M": slice(group * m, (group + 1) * m), "G*N": slice(group * n, (group + 1) * n)}
        indices = [tuple([places.get(dim, whole) for dim in dims]) for dims in named]
        parts.append(GroupPart(replace(gemm, sizes=tuple(sizes)), *indices))
    return parts


def _format(call: str, name: str, x: Shaped, allowed: tuple[Format, ...]) -> Format:
    format = FORMATS.get(x.dtype)
    if format is None or format not in allowed:
        known = " or ".join(format.name for format in allowed)
        remedy = "quantize or cast it first" if name in "ab" else "convert it first"
        remedy = "view bytes that are codes as their dtype" if x.dtype == "uint8" else remedy
        raise OperandError(f"{call}: {name} must be {known}; got {x.dtype}; {remedy}")
    return format


def _blocks_of(gemm: GemmCall, run: slice) -> slice:
    """The blocks of 32 of a group of K; every group has whole ones, but the last may end with K."""
    if run.stop % MX_BLOCK and run.stop != gemm.sizes[2]:
        raise OperandError(
            f"{gemm.call}: groups of K with E8M0 scales must end at multiples of {MX_BLOCK}; got one of "
            f"{run.start} to {run.stop}; pad it with zeros"
        )
    return slice(-(-run.start // MX_BLOCK), -(-run.stop // MX_BLOCK))


def _scale_format(call: str, scale_a: Shaped, scale_b: Shaped) -> Format:
    """Of both scales: float32, or E8M0."""
    format = _format(call, "scale_a", scale_a, (FLOAT32, E8M0FNU))
    return _format(call, "scale_b", scale_b, (format,))


def _check_paired(
    call: str, chip: Chip, formats: tuple[Format, Format], pair: tuple[Granularity, Granularity], use_fast_accum: bool
) -> None:
    refusal = chip.refusal(formats, pair, use_fast_accum=use_fast_accum)
    if refusal is not None:
        raise UnsupportedError(f"{call}: {refusal}")


def _sizes(call: str, a: Shaped, b: Shaped) -> tuple[int, int, int]:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise OperandError(
            f"{call}: a must be [M, K] and b [K, N]; got shapes {list(a.shape)} and {list(b.shape)}; pass a weight "
            "[N, K] as weight.T, flatten leading dimensions with a.reshape(-1, K)"
        )
    return a.shape[0], b.shape[1], a.shape[1]


def _check_split_k(call: str, split_k: int | None) -> None:
    if split_k is not None and (type(split_k) is not int or split_k < 1):
        raise SpecError(
            f"{call}: split_k must be a static integer of at least 1, which means no split-K; got {split_k!r}; leave "
            "it out to take the plan's"
        )

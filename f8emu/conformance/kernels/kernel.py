"""Anyone's scaled GEMM, declared as data: how it is called, what it takes, what it should give.

    from f8emu.conformance import Arg, Kernel, ROWWISE_VECTORS

    KERNEL = Kernel(
        name="my_library.gemm_nt",
        function="my_library:gemm_nt",
        arguments=((Arg.A, Arg.SCALE_A), (Arg.B, Arg.SCALE_B), Arg.OUT),
        scales=ROWWISE_VECTORS,
    )

`f8emu verify my_module:KERNEL` puts the suite's GEMMs to it. `f8emu.conformance.kernels` declares known ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from f8emu.conformance.cases.distributions import codes_of
from f8emu.numpy import swizzle_scales
from f8emu.spec import BFLOAT16, HOPPER, Chip, Format, Granularity, SpecError
from f8emu.spec.chips import chip_by_name
from f8emu.spec.gemm_call import GroupKind
from f8emu.spec.members import member_by_name
from f8emu.spec.names import ArraysName
from f8emu.spec.swizzle import TILE_BLOCKS, TILE_ROWS


class Arg(Enum):
    """A placeholder for an argument of a call. Everything else in a declaration is passed as it is."""

    A = "a"
    B = "b"
    SCALE_A = "scale_a"
    SCALE_B = "scale_b"
    SCALE_PRODUCT = "scale_a * scale_b"
    """The float32 product of tensorwise scales, as a Python float."""
    BIAS = "bias"  # [N] of the output's type, or None
    OUT_DTYPE = "out_dtype"
    USE_FAST_ACCUM = "use_fast_accum"
    USE_SPLIT_ACCUMULATOR = "not use_fast_accum"
    GRANULARITY_A = "granularity of a"  # as `Kernel.granularity_word` spells it
    GRANULARITY_B = "granularity of b"
    OFFS = "offs"
    """int32 [groups], the end of each group; None of a batch. The kernel is then a grouped one."""
    GROUP_SIZES = "group sizes"
    """int32 [groups], the size of each group; None of a batch. The kernel is then a grouped one."""
    OUT = "out"
    """The output, preallocated. Without it the kernel returns its output."""
    ZEROS = "zeros"
    """Zeros of the output's shape and type, for a kernel that insists on adding to something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandLayout:
    """The memory layout of an operand of R rows: `a` has M rows, `b` has N, each of length K."""

    k_first: bool = False
    """False: shape [R, K]; True: [K, R]."""
    k_contiguous: bool = True
    """Whether K is contiguous, as the tensor core reads float8; some kernels transpose on the way."""
    takes_padding: bool = False
    """Whether there may be gaps between the contiguous rows: the other stride is then larger than their length."""

    @property
    def column_major(self) -> bool:
        """Whether the first of the two dimensions is the contiguous one."""
        return self.k_first == self.k_contiguous


ROWS_BY_K = OperandLayout()
"""[R, K] row-major: `a` of every library, `b` of those called `nt` or `TN`."""
K_BY_ROWS = OperandLayout(k_first=True)
"""[K, R] column-major, a transposed view: `b` of torch."""
PADDED_ROWS_BY_K, PADDED_K_BY_ROWS = (replace(layout, takes_padding=True) for layout in (ROWS_BY_K, K_BY_ROWS))
"""`a` and `b` of torch: rows of `a`, or columns of `b`, may be apart."""
K_BY_ROWS_ROW_MAJOR = OperandLayout(k_first=True, k_contiguous=False)
"""[K, R] row-major."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLayout:
    """The memory layout of the scales of an operand of R rows: `[groups of R, groups of K]` by default."""

    k_first: bool = False
    """True: [groups of K, groups of R]."""
    column_major: bool = False
    ndim: int = 2
    """1: a vector, of tensorwise or rowwise scales; 0: one element without dimensions."""
    k_multiple: int = 1
    """The groups of K are padded to this with zeros."""
    as_float: bool = False
    """One element, passed as a Python float."""
    is_inverse: bool = False
    """The kernel takes the factor that was multiplied while quantising, `1 / scale`. The suite then uses powers of two,
    whose reciprocals alone are exact."""
    is_swizzled: bool = False
    """E8M0 scales in tiles of 128 rows and 4 blocks, as cuBLASLt and torch's SWIZZLE_32_4_4 have them; what a tile has
    beyond the operand is NaN. The tiles of a group follow those of the group before."""


Scales = Mapping[tuple[Granularity, Granularity], tuple[ScaleLayout, ScaleLayout]]
"""(granularity of a, of b) -> how their scales lie."""

_BLOCKS = ScaleLayout()
TENSORWISE_SCALARS: Scales = {
    (Granularity.TENSORWISE, Granularity.TENSORWISE): (ScaleLayout(ndim=0), ScaleLayout(ndim=0))
}
"""One element each, without dimensions."""
ROWWISE_VECTORS: Scales = {(Granularity.ROWWISE, Granularity.ROWWISE): (ScaleLayout(ndim=1), ScaleLayout(ndim=1))}
"""[M] and [N]."""
ROWWISE_MATRICES: Scales = {(Granularity.ROWWISE, Granularity.ROWWISE): (ScaleLayout(), ScaleLayout(k_first=True))}
"""[M, 1] and [1, N], as torch takes them."""
BLOCKWISE_1X128_128X128: Scales = {(Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128): (_BLOCKS, _BLOCKS)}
"""[M, K/128] and [N/128, K/128], row-major."""
BLOCKWISE_128X128: Scales = {(Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_128X128): (_BLOCKS, _BLOCKS)}
"""[M/128, K/128] and [N/128, K/128], row-major. The judge takes 1x128 by 128x128 scales whose rows repeat."""
_MX = Granularity.BLOCKWISE_1X32, Granularity.BLOCKWISE_1X32
_TILES = ScaleLayout(is_swizzled=True, ndim=1)
MXFP8: Scales = {_MX: (_BLOCKS, _BLOCKS)}
"""E8M0, [M, K/32] and [N, K/32], row-major; of groups as their operands, with K/32 in place of K."""
MXFP8_SWIZZLED: Scales = {_MX: (_TILES, _TILES)}
"""E8M0, swizzled: flat, or [G, ..] of an operand that has a dimension of groups."""


class Accumulation(Enum):
    """The accumulation of a kernel that takes no argument for it."""

    FAST = "fast"
    PROMOTED = "promoted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A scaled GEMM `a @ b^T`, and how to call it with the suite's cases.

    Features that a kernel does not declare are skipped. A call that raises `NotImplementedError` is "not offered",
    which never counts as a pass.

    Raises:
        SpecError: a declaration that contradicts itself.
    """

    name: str
    function: Callable[..., Any] | str
    """The kernel, or `package.module:attribute`, which is imported when the kernel is run."""
    arguments: tuple[Any, ...]
    """Positional arguments: `Arg`s, tuples and lists of them, and constants."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    scales: Scales = field(default_factory=dict)
    """The granularities that the kernel takes, and their layouts. Empty for a grouped kernel: vectors, as
    `GroupKind` has them."""
    a: OperandLayout = ROWS_BY_K
    b: OperandLayout = ROWS_BY_K
    """The layout of `b`; groups that have their own `a` or `b` are in front."""
    group_multiples: Mapping[GroupKind, int] = field(default_factory=lambda: {GroupKind.ROWS: 1})
    """The dimensions that a grouped kernel takes groups of, and the multiple of their sizes."""
    formats: tuple[tuple[Format, Format], ...] = HOPPER.format_pairs
    chip: Chip | str = HOPPER
    """The chip whose bits are expected, or its name: of a kernel with E8M0 scales one that has them, `"B200"`."""
    out_dtypes: tuple[Format, ...] = (BFLOAT16,)
    out_column_major: bool = False
    accumulation: Accumulation = Accumulation.PROMOTED
    """The accumulation, if no argument selects it."""
    granularity_word: Callable[[Granularity], Any] = attrgetter("value")
    multiples: tuple[int, int, int] = (1, 16, 16)
    """Multiples of M, N and K. Smaller cases are padded with zeros, which change no other output: where that of M is
    more than 1 the kernel is never called with one row. With E8M0 scales K has whole blocks of 32 besides."""
    block_multiples: tuple[int, int, int] = (1, 16, 128)
    """Multiples of M, N and K with block scales."""
    leaves_rows_behind: bool = False
    """Whether a grouped kernel may leave the rows behind the last group as they are; otherwise they must be zeros."""
    arrays: ArraysName | None = None
    """torch, numpy or jax; None leaves it to the command line."""
    imports: tuple[str, ...] = ()
    """Modules to import before the function; `package.module:function` must be there too."""
    install: str = ""
    """How to install the package; without the package the kernel is "not offered"."""
    needs_gpu: bool = False
    predicted: str = ""
    """The expected outcome in a sentence; printed beside the engine."""
    seen: str = ""
    """The recorded outcome, if there is one; printed after the prediction."""

    def __post_init__(self) -> None:
        call = f"Kernel {self.name!r}"
        object.__setattr__(self, "accumulation", member_by_name(call, "accumulation", Accumulation, self.accumulation))
        chip = chip_by_name(call, self.chip)
        object.__setattr__(self, "chip", chip)
        fault = ""
        if any((pair == _MX) != (chip is not HOPPER) for pair in self.scales or {(): ()}):
            fault = (
                "expected chip='B200', or another with E8M0 scales, beside MXFP8 or MXFP8_SWIZZLED, and Hopper beside "
                f"other scales; got {chip}; pass chip='B200', or declare two kernels"
            )
        elif self.is_microscaled and chip.microscaled is None:
            fault = f"{chip} has no GEMM with E8M0 scales; pass chip='B200'"
        for arg in (Arg.A, Arg.B):
            if (count := self.args.count(arg)) != 1:
                fault = f"expected Arg.{arg.name} once among its arguments; found it {count} times"
        if not self.is_grouped and not self.scales:
            fault = "expected the layouts of its scales; found none; pass scales=, for instance ROWWISE_VECTORS"
        if not self.out_dtypes or not self.formats or any(n < 1 for n in (*self.multiples, *self.block_multiples)):
            fault = (
                "expected at least one output type and pair of formats, and multiples of at least 1; got "
                f"{self.out_dtypes}, {self.formats}, {self.multiples}, {self.block_multiples}"
            )
        if fault:
            raise SpecError(f"{call}: {fault}")
        self.require_writable(self.arrays)

    def require_writable(self, arrays: str | None) -> None:
        """Raises SpecError if the kernel writes its output, which an array of this framework does not allow."""
        if Arg.OUT in self.args and arrays == "jax":
            raise SpecError(f"Kernel {self.name!r}: a jax.Array cannot be written to; let the kernel return its output")

    @property
    def args(self) -> tuple[Arg, ...]:
        return tuple(_args((self.arguments, tuple(self.keywords.values()))))

    @property
    def is_grouped(self) -> bool:
        return Arg.OFFS in self.args or Arg.GROUP_SIZES in self.args

    @property
    def is_microscaled(self) -> bool:
        return _MX in self.scales

    @property
    def takes_bias(self) -> bool:
        return Arg.BIAS in self.args

    @property
    def chooses_accumulation(self) -> bool:
        """Whether an argument selects fast accumulation."""
        return Arg.USE_FAST_ACCUM in self.args or Arg.USE_SPLIT_ACCUMULATOR in self.args

    def has_accumulation(self, pair: tuple[Granularity, Granularity], use_fast_accum: bool) -> bool:
        """Whether the kernel can accumulate so with scales of this pair; block scales have one accumulation."""
        is_fixed = not self.chooses_accumulation and not pair[0].is_blockwise
        return not is_fixed or use_fast_accum is (self.accumulation is Accumulation.FAST)

    def outline(self) -> "Kernel":
        """The declaration without its call: it decides which cases are run, and can be sent to another process."""
        word = attrgetter("value")
        return replace(
            self,
            scales=dict(self.scales),
            group_multiples=dict(self.group_multiples),
            function="",
            arguments=self.args,
            keywords={},
            granularity_word=word,
        )


def _args(value: Any) -> list[Arg]:
    if isinstance(value, Arg):
        return [value]
    return [arg for item in value for arg in _args(item)] if isinstance(value, tuple | list) else []


def filled(template: Any, values: Mapping[Arg, Any]) -> Any:
    """A declaration's arguments with every `Arg` replaced by its value; tuples and lists stay what they are."""
    if isinstance(template, Arg):
        return values[template]
    if isinstance(template, tuple | list):
        return type(template)(filled(item, values) for item in template)
    return template


class Laid(NamedTuple):
    """An array, and how it is to lie in the kernel's memory."""

    array: np.ndarray
    column_major: bool = False
    padding: int = 0
    """Elements between its contiguous rows."""
    offset: int = 0
    """Bytes from a boundary to its first element."""


def laid_operand(codes: np.ndarray, shape: tuple[int, int], layout: OperandLayout) -> Laid:
    """Codes [.., R, K], padded with zeros to `shape`."""
    whole = np.zeros((*codes.shape[:-2], *shape), codes.dtype)
    whole[..., : codes.shape[-2], : codes.shape[-1]] = codes
    return Laid(whole.swapaxes(-1, -2) if layout.k_first else whole, layout.column_major)


def laid_scale(
    scale: np.ndarray, granularity: Granularity, shape: tuple[int, int], layout: ScaleLayout
) -> Laid | float:
    """Scales [groups of R, groups of K] of an operand that was padded to `shape`, as the kernel takes them."""
    rows, groups = granularity.scale_shape(*shape)
    if granularity.is_microscaled:
        return laid_blocks(scale, (rows, groups), [...], layout)
    scale = np.pad(scale, ((0, rows - scale.shape[0]), (0, groups - scale.shape[1])), constant_values=1)
    if layout.is_inverse:
        with np.errstate(divide="ignore"):
            scale = np.float32(1) / scale
    if layout.as_float:
        return float(scale[0, 0])
    scale = np.pad(scale, ((0, 0), (0, -scale.shape[1] % layout.k_multiple)))
    if layout.ndim < 2:
        return Laid(scale.reshape((-1,) if layout.ndim else ()))
    return Laid(scale.T if layout.k_first else scale, layout.column_major)


_ONE, _NAN = 127, 255


def laid_blocks(scale: np.ndarray, shape: tuple[int, int], groups: Sequence[Any], layout: ScaleLayout) -> Laid:
    """E8M0 scales [.., rows, blocks] of an operand that was padded to `shape`, as the kernel takes them.

    `groups` are the indices of each group's own.
    """
    # The kernel's own padding of operands has scales of one.
    wider = [*[(0, 0)] * (scale.ndim - 2), *((0, size - n) for size, n in zip(shape, scale.shape[-2:], strict=True))]
    scale = np.pad(codes_of(scale), wider, constant_values=_ONE).view(scale.dtype)
    if layout.is_swizzled:
        tiles = [swizzle_scales(scale[group], padding=_NAN) for group in groups]
        flat = np.stack(tiles) if scale.ndim > 2 else np.concatenate(tiles)
        rows, blocks = (-(-n // tile) * tile for n, tile in zip(shape, (TILE_ROWS, TILE_BLOCKS), strict=True))
        matrix = (rows, -1) if scale[groups[0]].shape[-2] == shape[0] else (-1, blocks)
        return Laid(flat if layout.ndim < 2 else flat.reshape(*scale.shape[:-2], *matrix))
    wider = [*[(0, 0)] * (scale.ndim - 1), (0, -scale.shape[-1] % layout.k_multiple)]
    scale = np.pad(codes_of(scale), wider, constant_values=_NAN).view(scale.dtype)
    return Laid(scale.swapaxes(-1, -2) if layout.k_first else scale, layout.column_major)

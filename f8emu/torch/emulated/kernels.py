"""Kernels of torch's float8 GEMM operators, `aten::_scaled_mm` and its like, that compute the bits of a chip.

A kernel has the arguments of its operator after the chip. It refuses what the operator refuses on a GPU of the chip, in
the class that torch raises there: `OperandError` is a ValueError, `Refused` and `UnsupportedError` are RuntimeErrors.
`tests/torch_path/operator_calls-h100.json` and `-h200.json` record what GPUs give and refuse. What a Blackwell GPU
refuses of E8M0 scales was read in torch's ScaledBlas.cpp and GroupedBlas.cpp, and never seen.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from f8emu.spec.chip import Chip
from f8emu.spec.errors import F8Error, OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import FLOAT8
from f8emu.spec.scaling import MX_BLOCK, Granularity
from f8emu.spec.swizzle import swizzled_size
from f8emu.torch.cast import cast
from f8emu.torch.chip import dtype_of, name_of
from f8emu.torch.emulated import scales as scale_rules
from f8emu.torch.emulated.scales import Scales
from f8emu.torch.gemm import operators

_EMULATED = "emulated"
_FLOAT8 = frozenset(map(dtype_of, FLOAT8))
_MULTIPLE = 16  # of N, of K, of the bytes from row to row, and of those before the first element


class Refused(F8Error, RuntimeError):
    """An operand that torch's operator refuses on a GPU with a RuntimeError."""


def _refuses(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """OperandErrors as `Refused`: the class of torch's first generation of operators."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        try:
            return function(*args, **kwargs)
        except OperandError as error:
            raise Refused(str(error)) from None

    return call


def _require_operands(call: str, a: Tensor, b: Tensor) -> None:
    """What torch refuses of the matrices, whatever their scales."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise OperandError(f"{call}: mat1 must be [M, K] and mat2 [K, N]; got {list(a.shape)} and {list(b.shape)}")
    # torch's words, which other projects' tests match.
    for name, x, dimension in (
        ("trailing dimension of mat1", a, a.shape[1]),
        ("last dimension of mat2", b, b.shape[1]),
    ):
        if dimension % _MULTIPLE:
            raise OperandError(
                f"{call}: Expected {name} to be divisible by {_MULTIPLE} but got {name.split()[-1]} shape: "
                f"({x.shape[0]}x{x.shape[1]}); pad K and N with zeros"
            )
    if not {a.dtype, b.dtype} <= _FLOAT8:
        raise OperandError(f"{call}: mat1 and mat2 must be float8; got {a.dtype} and {b.dtype}")
    if a.dtype is b.dtype is torch.float8_e5m2:
        raise SpecError(f"{call}: torch has no GEMM of two float8_e5m2 matrices; cast one to float8_e4m3fn")


def _require_layouts(call: str, a: Tensor, b: Tensor) -> None:
    """Row-major times column-major, each row (column) at a multiple of 16 bytes."""
    for name, x in (("mat1 row-major", a), ("mat2 column-major", b.t())):
        is_major = x.stride(1) == 1 and (x.shape[0] == 1 or x.stride(0) >= x.shape[1])
        if not is_major or (x.shape[0] > 1 and x.stride(0) % _MULTIPLE):
            raise Refused(
                f"{call}: a GPU multiplies {name}, rows {_MULTIPLE} bytes apart; got strides "
                f"{list(a.stride())} and {list(b.stride())}; pass a row-major a, and b as w.t() of a row-major w [N, K]"
            )


def _require_alignment(call: str, **tensors: Tensor | None) -> None:
    """Every tensor starts at a multiple of 16 bytes of its memory, where a GPU's allocator aligns the memory."""
    for name, x in tensors.items():
        if x is not None and x.storage_offset() * x.itemsize % _MULTIPLE:
            raise Refused(
                f"{call}: a GPU reads {name} at a multiple of {_MULTIPLE} bytes; got a view that starts "
                f"{x.storage_offset() * x.itemsize} bytes behind the start of its memory; pass {name}.clone()"
            )


def _require_bias(call: str, bias: Tensor | None, columns: int, out_dtype: torch.dtype) -> None:
    if bias is None:
        return
    is_other = bias.dtype != out_dtype and out_dtype not in _FLOAT8
    if bias.numel() != columns or out_dtype is torch.float32 or is_other:
        raise OperandError(
            f"{call}: bias must have N = {columns} values of the output's dtype, which must not be float32; got "
            f"{list(bias.shape)} of {bias.dtype} for {out_dtype}"
        )


def require_offs(call: str, a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    """Groups are divided by `offs`, unless each has matrices of its own."""
    if (offs is None) != (a.ndim == b.ndim == 3):
        raise OperandError(
            f"{call}: offs must be given unless every group has matrices of its own, both of 3 dimensions; got "
            f"{list(a.shape)} and {list(b.shape)} {'without' if offs is None else 'with'} offs"
        )


def _scaled(
    call: str,
    chip: Chip,
    a: Tensor,
    b: Tensor,
    stored: tuple[Tensor, Tensor],
    scales: Scales,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """The product of operands that torch takes; `stored` are the scales as they lie in memory."""
    _require_bias(call, bias, b.shape[1], out_dtype)
    is_microscaled = scales.pair[0].is_microscaled
    use_fast_accum &= not is_microscaled  # it is for Hopper alone, and torch takes and ignores it
    if 0 in (*a.shape, b.shape[1]):
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    _require_layouts(call, a, b)
    _require_alignment(call, mat1=a, mat2=b, scale_a=stored[0], scale_b=stored[1], bias=bias)
    if out_dtype is torch.float8_e5m2 and a.dtype is b.dtype:
        raise UnsupportedError(f"{call}: a Hopper GPU gives two float8_e4m3fn matrices no float8_e5m2 product")
    if out_dtype in _FLOAT8 and is_microscaled:
        raise UnsupportedError(f"{call}: a {out_dtype} product of E8M0 scales is not modelled; pass out_dtype")

    def product(bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        pair = [granularity.value for granularity in scales.pair]
        options = dtype, use_fast_accum, _EMULATED, *pair, None, chip.name
        return operators.run_scaled_mm.function(a, b, scales.a, scales.b, bias, *options)

    bias = None if bias is None else bias.reshape(-1)
    if out_dtype not in _FLOAT8 and (bias is None or not scales.pair[0].is_blockwise):
        return product(bias, out_dtype)
    # Float8 outputs and biases of block scales: both follow the scaled accumulator in float32, rounded once.
    exact = product(None, torch.float32)
    exact = exact if bias is None else exact + bias.float()
    return cast(exact, out_dtype) if out_dtype in _FLOAT8 else exact.to(out_dtype)


@_refuses
def scaled_mm(
    chip: Chip,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten::_scaled_mm`. A Hopper GPU ignores `scale_result`, also for float8 outputs."""
    call = "torch._scaled_mm"
    _require_operands(call, a, b)
    scales = scale_rules.by_shape(a, b, scale_a, scale_b)
    if scales is None:
        raise OperandError(
            f"{call}: the scales of operands {list(a.shape)} and {list(b.shape)} fit no scaling; got scale_a "
            f"{name_of(scale_a.dtype)} {list(scale_a.shape)}, strides {list(scale_a.stride())}, and scale_b "
            f"{name_of(scale_b.dtype)} {list(scale_b.shape)}, strides {list(scale_b.stride())}; pass float32: one "
            "element each, contiguous [M, 1] and [1, N], block scales in torch's layouts, or swizzled E8M0 ones"
        )
    for x, granularity in ((scales.a, scales.pair[0]), (scales.b.t(), scales.pair[1])):
        if granularity is Granularity.BLOCKWISE_128X128 and x.shape[0] > 1 and x.shape[1] % scale_rules.PADDED_BLOCKS:
            raise UnsupportedError(
                f"{call}: a GPU reads 128x128 scales of {x.shape[1]} blocks of K as if there were a multiple of 4, and "
                "so beyond them; call torch.nn.functional.scaled_mm, which takes padded ones"
            )
    return _scaled(call, chip, a, b, (scale_a, scale_b), scales, bias, out_dtype or a.dtype, use_fast_accum)


def scaled_mm_v2(
    chip: Chip,
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten::_scaled_mm_v2`, which `torch.nn.functional.scaled_mm` calls. Float32 scales are never swizzled."""
    call = "torch.nn.functional.scaled_mm"
    _require_operands(call, a, b)
    scales, remedy = None, "pass one scale each, in torch's dtype and layout for its recipe"
    if len(scale_a) == len(scale_b) == len(recipe_a) == len(recipe_b) == 1:
        pair = _granularities(call, recipe_a[0], recipe_b[0])
        if pair[0].is_microscaled:
            _require_swizzled(call, swizzle_a, swizzle_b)
            remedy += ": float8_e8m0fnu as f8emu.torch.swizzle_scales gives it"
        scales = scale_rules.by_recipe(a, b, scale_a[0], scale_b[0], pair)
    if scales is None:
        raise OperandError(
            f"{call}: the scales do not fit the recipes {list(recipe_a)} and {list(recipe_b)} of operands "
            f"{list(a.shape)} and {list(b.shape)}; got shapes {[list(x.shape) for x in scale_a]} and "
            f"{[list(x.shape) for x in scale_b]}, strides {[list(x.stride()) for x in scale_a]} and "
            f"{[list(x.stride()) for x in scale_b]}; {remedy}"
        )
    return _scaled(call, chip, a, b, (scale_a[0], scale_b[0]), scales, bias, out_dtype or a.dtype, use_fast_accum)


def _granularities(call: str, recipe_a: int, recipe_b: int) -> tuple[Granularity, Granularity]:
    pair = scale_rules.RECIPES.get(recipe_a), scale_rules.RECIPES.get(recipe_b)
    if pair not in (*scale_rules.PAIRS, scale_rules.MICROSCALED):
        raise OperandError(
            f"{call}: no chip has a GEMM for the scale recipes {recipe_a} and {recipe_b}; there are TensorWise, "
            "RowWise, BlockWise1x128 with BlockWise1x128 or BlockWise128x128, and BlockWise1x32"
        )
    return pair  # pyright: ignore[reportReturnType]


def _require_swizzled(call: str, *swizzles: Sequence[int]) -> None:
    if any(list(swizzle) != [SwizzleType.SWIZZLE_32_4_4.value] for swizzle in swizzles):
        raise OperandError(
            f"{call}: a Blackwell GPU reads swizzled E8M0 scales; got swizzles {[list(s) for s in swizzles]}; swizzle "
            "them and pass SwizzleType.SWIZZLE_32_4_4, or call f8emu.torch.scaled_mm, which takes them plain"
        )


def scaled_grouped_mm(
    chip: Chip,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten::_scaled_grouped_mm`. Rows and columns beyond the last group, which a GPU leaves undefined, are zeros."""
    call = "torch._scaled_grouped_mm"
    if bias is not None or scale_result is not None or out_dtype not in (None, torch.bfloat16):
        raise OperandError(f"{call}: torch takes no bias and no scale_result, and gives bfloat16; leave them out")
    require_offs(call, a, b, offs)
    if a.shape[-1] % _MULTIPLE or b.shape[-1] % _MULTIPLE:
        raise Refused(f"{call}: K and N must be multiples of {_MULTIPLE}; got {list(a.shape)} and {list(b.shape)}")
    _require_alignment(call, mat_a=a, mat_b=b)
    if scale_a.dtype is scale_b.dtype is torch.float8_e8m0fnu:
        scales = _scales_of_groups(call, a, b, scale_a, scale_b, offs)
        return operators.scaled_grouped_mm.function(a, b, *scales, offs, torch.bfloat16, False, _EMULATED, chip.name)
    groups = offs.shape[0] if offs is not None and a.ndim == b.ndim == 2 else 1
    if [*scale_a.shape, *scale_b.shape] != [*a.shape[:-2], a.shape[-2] * groups, *b.shape[:-2], b.shape[-1] * groups]:
        raise Refused(
            f"{call}: the scales must be one for each row of mat_a and each column of mat_b, of each group; got "
            f"{list(scale_a.shape)} and {list(scale_b.shape)} for {list(a.shape)} and {list(b.shape)}"
        )
    operands = a, b, scale_a, scale_b, offs
    return operators.scaled_grouped_mm.function(*operands, torch.bfloat16, use_fast_accum, _EMULATED, chip.name)


def _scales_of_groups(
    call: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What torch refuses of a grouped GEMM with E8M0 scales; and these, plain."""
    if a.ndim != 2 or offs is None:
        raise OperandError(f"{call}: with E8M0 scales offs must divide the rows of mat_a, or K; got {list(a.shape)}")
    if b.ndim == 3 and a.shape[1] % MX_BLOCK:
        raise UnsupportedError(f"{call}: a GPU reads beyond E8M0 scales of K = {a.shape[1]}; pad K to blocks of 32")
    of_b = (b.shape[0], swizzled_size(b.shape[2], -(-b.shape[1] // MX_BLOCK))) if b.ndim == 3 else None
    is_of_b = scale_b.shape == of_b if of_b else scale_b.ndim == 2 and scale_b.shape[0] >= b.shape[1]
    is_of_a = scale_a.ndim == 2 and scale_a.shape[0] >= a.shape[0]
    if not (is_of_a and is_of_b and scale_a.is_contiguous() and scale_b.is_contiguous()):
        raise Refused(
            f"{call}: E8M0 scales must be contiguous, swizzled group by group, of 2 dimensions, [{a.shape[0]} or more, "
            f"any] and {list(of_b) if of_b else f'[{b.shape[1]} or more, any]'}; got {list(scale_a.shape)} and "
            f"{list(scale_b.shape)}"
        )
    return scale_rules.of_groups(call, a, b, scale_a, scale_b, offs)


def scaled_grouped_mm_v2(
    chip: Chip,
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten::_scaled_grouped_mm_v2`, of which a Hopper GPU has rowwise scales alone."""
    call = "torch.nn.functional.scaled_grouped_mm"
    dtypes = {ScalingType.RowWise.value: torch.float32, ScalingType.BlockWise1x32.value: torch.float8_e8m0fnu}
    dtype = dtypes.get(recipe_a[0]) if len(recipe_a) == 1 else None
    if dtype is None or list(recipe_a) != list(recipe_b) or [x.dtype for x in (*scale_a, *scale_b)] != [dtype] * 2:
        raise OperandError(
            f"{call}: grouped GEMMs have RowWise scales in float32, or BlockWise1x32 ones in float8_e8m0fnu; got "
            f"recipes {list(recipe_a)} and {list(recipe_b)} of {[x.dtype for x in (*scale_a, *scale_b)]}"
        )
    if dtype is torch.float8_e8m0fnu:
        _require_swizzled(call, swizzle_a, swizzle_b)
    return scaled_grouped_mm(chip, a, b, scale_a[0], scale_b[0], offs, bias, None, out_dtype, use_fast_accum)

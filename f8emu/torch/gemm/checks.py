"""The hardware's rules for the operands of a GEMM, checked before either engine runs.

Both engines refuse the same calls, so that code tested without a GPU also runs on one. The
rules are those of `torch._scaled_mm`, `torch.nn.functional.scaled_mm` and `torch._scaled_grouped_mm` on CUDA
(torch 2.11 to 2.13), which torch's CPU versions do not enforce. All checks but `check_group_ends` read only
shapes, strides, dtypes and devices, so they work on fake tensors too.
"""

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import FORMATS, Format
from f8emu.spec.scaling import Granularity
from f8emu.torch.dtypes import CHIP, HIGH_PRECISION_DTYPES

SIZE_MULTIPLE = CHIP.size_multiple
"""K and N must be multiples of this."""
VECTOR_MULTIPLE = CHIP.vector_multiple
"""With 1x128 scales of `a`, M must be a multiple of this."""


def check_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    granularity_a: str | None,
    granularity_b: str | None,
    split_k: int | None,
    chip: Chip = CHIP,
) -> tuple[Granularity, Granularity]:
    """Check the operands of a `scaled_mm` and return the granularities of `a` and `b`.

    Raises:
        OperandError: wrong dtype, shape, size, layout or device.
        SpecError: an unknown granularity, or a `split_k` below 1.
        UnsupportedError: a combination that the chip has no GEMM for, or that is not modelled.
    """
    call = "scaled_mm"
    m, k, n = _check_matrices(call, a, b, _dtypes(chip.operand_formats))
    _check_float8_layout(call, a, b, k)
    _check_split_k(call, split_k)
    _check_scale_dtypes(call, a, scale_a, scale_b)
    shapes = tuple(scale_a.shape), tuple(scale_b.shape)
    pair = chip.granularities_of(call, (m, n, k), shapes, (granularity_a, granularity_b))
    if pair[0] is Granularity.ROWWISE and not (scale_a.is_contiguous() and scale_b.is_contiguous()):
        raise OperandError(f"{call}: rowwise scales must be contiguous; call scale.contiguous() first")
    refusal = chip.refusal((_format(a), _format(b)), pair, use_fast_accum=use_fast_accum)
    if refusal is not None:
        raise UnsupportedError(f"{call}: {refusal}")
    if pair[0] is Granularity.BLOCKWISE_1X128 and m % VECTOR_MULTIPLE:
        raise OperandError(
            f"{call}: with 1x128 scales of a, M must be a multiple of {VECTOR_MULTIPLE}; got {m}; pad a and scale_a"
        )
    if pair[0].is_blockwise and bias is not None:
        raise UnsupportedError(f"{call}: a bias with blockwise scales is not modelled; add it to the result instead")
    _check_output(call, out_dtype, HIGH_PRECISION_DTYPES)
    _check_bias(call, a, n, bias, out_dtype)
    return pair


def check_scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, *, out_dtype: torch.dtype, chip: Chip = CHIP
) -> None:
    """Check the operands of a `scaled_grouped_mm` [EPI-6].

    Raises:
        OperandError: wrong dtype, shape, size, layout or device.
        UnsupportedError: a combination that the hardware has no GEMM for.
    """
    call = "scaled_grouped_mm"
    if a.ndim != 2 or b.ndim != 3:
        raise OperandError(
            f"{call}: a must be [total_M, K] and b [groups, K, N]; got shapes {list(a.shape)} and {list(b.shape)}"
        )
    if b.shape[0] == 0:
        raise OperandError(f"{call}: b has no groups; there is nothing to compute, skip the call")
    total_m, k, n = _check_matrices(call, a, b[0], _dtypes(chip.format_pairs[0][:1]))
    _check_float8_layout(call, a, b[0], k)
    groups = b.shape[0]
    _check_scale_dtypes(call, a, scale_a, scale_b)
    if tuple(scale_a.shape) != (total_m,) or tuple(scale_b.shape) != (groups, n):
        raise OperandError(
            f"{call}: scale_a must be [total_M] = [{total_m}] and scale_b [groups, N] = [{groups}, {n}]; got "
            f"{list(scale_a.shape)} and {list(scale_b.shape)}; flatten rowwise scales first"
        )
    if not scale_a.is_contiguous() or scale_b.stride(-1) != 1:
        raise OperandError(f"{call}: scales must be contiguous; call scale.contiguous() first")
    if offs.dtype is not torch.int32 or tuple(offs.shape) != (groups,):
        raise OperandError(
            f"{call}: offs must be int32 of shape [{groups}], the end of each group's rows; got {offs.dtype} of shape "
            f"{list(offs.shape)}; take sizes.cumsum(0, dtype=torch.int32)"
        )
    _check_devices(call, a, offs=offs)
    _check_output(call, out_dtype, (torch.bfloat16,))


def check_group_ends(offs: Tensor, total_m: int) -> None:
    """Check that `offs` divides all rows into groups. It reads the values, so call it for CPU tensors only.

    Raises:
        OperandError: ends that decrease, or the last of them is not total_M.
    """
    ends = [0, *offs.tolist()]
    if ends != sorted(ends) or ends[-1] != total_m:
        raise OperandError(
            f"scaled_grouped_mm: offs must rise from group to group and end at total_M = {total_m}; got {ends[1:]}"
        )


def check_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, split_k: int | None) -> None:
    """Check the operands of the bfloat16 `mm` [BF16-1].

    Raises:
        OperandError: wrong dtype, shape, size or device.
        SpecError: a `split_k` below 1.
        UnsupportedError: an output dtype that no GEMM has.
    """
    _check_matrices("mm", a, b, (torch.bfloat16,))
    _check_output("mm", out_dtype, HIGH_PRECISION_DTYPES)
    _check_split_k("mm", split_k)


def _dtypes(formats: tuple[Format, ...]) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, format.name) for format in formats)


def _format(x: Tensor) -> Format:
    return FORMATS[str(x.dtype).removeprefix("torch.")]


def _check_matrices(call: str, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int, int]:
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise OperandError(f"{call}: {name} must be {known}; got {x.dtype}; quantize or cast it first")
    if a.ndim != 2 or b.ndim != 2:
        raise OperandError(
            f"{call}: a must be [M, K] and b [K, N]; got shapes {list(a.shape)} and {list(b.shape)}; "
            "flatten the leading dimensions of a with a.reshape(-1, K)"
        )
    m, k = a.shape
    n = b.shape[1]
    if b.shape[0] != k:
        raise OperandError(
            f"{call}: a is [M, K] = {list(a.shape)}, so b must be [K, N] with K = {k}; got {list(b.shape)}; "
            "a weight [N, K] is passed as weight.t()"
        )
    if m == 0 or k == 0 or n == 0:
        raise OperandError(
            f"{call}: empty operands, [M, K] = {list(a.shape)} and [K, N] = {list(b.shape)}; skip the GEMM: its result "
            "is empty, or zeros where only K is 0"
        )
    if k % SIZE_MULTIPLE or n % SIZE_MULTIPLE:
        raise OperandError(
            f"{call}: K and N must be multiples of {SIZE_MULTIPLE}; got K = {k}, N = {n}; pad the operands with zeros"
        )
    _check_devices(call, a, b=b)
    return m, k, n


def _check_float8_layout(call: str, a: Tensor, b: Tensor, k: int) -> None:
    if a.stride(1) != 1 or (a.shape[0] > 1 and a.stride(0) < k):
        raise OperandError(
            f"{call}: a must be row-major, strides [>= K, 1]; got strides {list(a.stride())} for shape "
            f"{list(a.shape)}; call a.contiguous()"
        )
    if b.stride(0) != 1 or b.stride(1) < k:
        raise OperandError(
            f"{call}: b must be column-major, strides [1, >= K]; got strides {list(b.stride())} for shape "
            f"{list(b.shape)}; pass the transpose of a row-major [N, K], such as b.t().contiguous().t()"
        )


def _check_scale_dtypes(call: str, a: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype is not torch.float32:
            raise OperandError(f"{call}: {name} must be float32; got {scale.dtype}; convert it with {name}.float()")
    _check_devices(call, a, scale_a=scale_a, scale_b=scale_b)


def _check_devices(call: str, a: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.device != a.device:
            raise OperandError(
                f"{call}: all tensors must be on one device; a is on {a.device} and {name} on {x.device}; "
                "move one of them"
            )


def _check_output(call: str, out_dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> None:
    if out_dtype not in dtypes:
        known = " or ".join(str(dtype) for dtype in dtypes)
        raise UnsupportedError(
            f"{call}: out_dtype must be {known}; got {out_dtype}; quantize or convert the result: float8 output is not "
            "modelled"
        )


def _check_bias(call: str, a: Tensor, n: int, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if bias is None:
        return
    if out_dtype is torch.float32:
        raise UnsupportedError(
            f"{call}: the hardware adds no bias to a float32 output; add it to the result, or pass another out_dtype"
        )
    if bias.dtype is not out_dtype or tuple(bias.shape) != (n,):
        raise OperandError(
            f"{call}: bias must be of out_dtype {out_dtype} and shape [N] = [{n}]; got {bias.dtype} of shape "
            f"{list(bias.shape)}"
        )
    _check_devices(call, a, bias=bias)


def _check_split_k(call: str, split_k: int | None) -> None:
    if split_k is not None and split_k < 1:
        raise SpecError(f"{call}: split_k must be at least 1, which means no split-K; got {split_k}")

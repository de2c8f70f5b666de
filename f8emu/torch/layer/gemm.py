"""One GEMM of a recipe on operands of any sizes: the one place where torch's GEMMs are padded."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity
from f8emu.torch.dtypes import CHIP
from f8emu.torch.gemm import operators
from f8emu.torch.layer.operands import Operand
from f8emu.torch.library import is_known
from f8emu.torch.scale import scale_of_rows


def gemm(
    a: Operand,
    b: Operand,
    spec: Gemm,
    dtype: torch.dtype,
    engine: str,
    chip: str = CHIP.name,
    *,
    split_k: int | None = None,
) -> Tensor:
    """`a @ b^T` as one GEMM of the recipe, of any sizes.

    K and N are zero-padded to the multiples that the tensor core takes; results are bit-identical, since a zero product
    takes no part in the accumulation [ACC-1], [ACC-2]. `split_k` as for `scaled_mm`.

    Shapes:
        a.codes [M, K], b.codes [N, K] -> [M, N] of dtype.
    """
    m, k = a.codes.shape
    n = b.codes.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros((m, n), dtype=dtype, device=a.codes.device)
    # 1. Pad K and N, and M where scales of rows of 128 are read as vectors [EPI-5].
    granularity_a, granularity_b = _granularities(spec)
    pad_k, pad_n = _to_multiple(k, CHIP.size_multiple), _to_multiple(n, CHIP.size_multiple)
    pad_m = _to_multiple(m, CHIP.vector_multiple) if granularity_a is Granularity.BLOCKWISE_1X128 else 0
    padded_a, padded_b = _padded(a.codes, pad_m, pad_k), _padded(b.codes, pad_n, pad_k)
    # 2. Multiply.
    if spec.a.format is None:
        product = operators.mm(padded_a, padded_b.t(), dtype, engine, split_k, chip)
    else:
        product = operators.scaled_mm(
            padded_a,
            padded_b.t(),
            _padded_scale(a, granularity_a, pad_m),
            _padded_scale(b, granularity_b, pad_n).t() if granularity_b is not Granularity.TENSORWISE else b.scale,
            None,
            dtype,
            spec.use_fast_accum,
            engine,
            granularity_a.value,
            granularity_b.value,
            split_k,
            chip,
        )
    # 3. Leave the padding out.
    return _first_of(product, m, n)


def _granularities(spec: Gemm) -> tuple[Granularity, Granularity]:
    """`Gemm.scaled_gemm_granularities`, written so that Dynamo 2.11 can trace it."""
    a, b = spec.a.granularity, spec.b.granularity
    if Granularity.ROWWISE in (a, b):
        return Granularity.ROWWISE, Granularity.ROWWISE
    return a, b


def _to_multiple(size: int, multiple: int) -> int:
    """What `size` lacks of a multiple; not `-size % multiple`: of this sum a compiler knows that it is one."""
    return -(-size // multiple) * multiple - size


def _padded(codes: Tensor, rows: int, cols: int) -> Tensor:
    """The codes, zero-padded by `rows` rows and `cols` columns."""
    if is_known(rows + cols == 0):
        return codes
    if codes.dtype is torch.bfloat16:
        return pad(codes, (0, cols, 0, rows))
    return pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


def _padded_scale(operand: Operand, granularity: Granularity, rows: int) -> Tensor:
    """The operand's scale at the GEMM's granularity, zero-padded by `rows` rows if every row has its own scale."""
    assert operand.scale is not None, "a float8 operand has a scale"
    scale = scale_of_rows(operand.scale, operand.codes, granularity)
    has_own = granularity in (Granularity.ROWWISE, Granularity.BLOCKWISE_1X128)
    return pad(scale, (0, 0, 0, rows)) if has_own and not is_known(rows == 0) else scale


def _first_of(product: Tensor, m: int, n: int) -> Tensor:
    """The product without its padding, as a separate tensor.

    Not a view of the first rows: compiled on CUDA (torch 2.11), a gradient that was such a view came out as zeros.
    """
    rows, columns = product.shape
    if is_known(rows == m) and is_known(columns == n):
        return product
    if is_known(rows >= m) and is_known(columns >= n):
        return product[:m, :n].clone(memory_format=torch.contiguous_format)
    # Of a symbolic M a slice would add the guard that the product is no shorter.
    chosen = (torch.arange(size, device=product.device) for size in (m, n))
    return product.index_select(0, next(chosen)).index_select(1, next(chosen))

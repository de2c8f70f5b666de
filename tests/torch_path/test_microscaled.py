"""MXFP8 in torch: our GEMMs with E8M0 scales, and torch's own operators under `emulate("B200")`, against the oracle."""

# pyright: reportCallIssue=false

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

import f8emu.torch as f8
from f8emu.spec import BLACKWELL_TCGEN05, UnsupportedError
from f8emu.torch.gemm import emulation, hardware
from f8emu.torch.gemm.engine import checked_scaled_grouped_mm, checked_scaled_mm
from tests.torch_path.bits import assert_same_bits, expect
from tests.torch_path.operator_calls import columns, draw, shifted

pytestmark = pytest.mark.filterwarnings("ignore:f8emu.torch. there is no split-K plan for Blackwell tcgen05")
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MX, ROW, SWIZZLED, NOT = (
    ScalingType.BlockWise1x32,
    ScalingType.RowWise,
    SwizzleType.SWIZZLE_32_4_4,
    SwizzleType.NO_SWIZZLE,
)
scaled_mm_of_torch: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
grouped_mm_of_torch: Any = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]
grouped_mm_v2_of_torch: Any = F.scaled_grouped_mm  # pyright: ignore[reportAttributeAccessIssue]
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def scales(*shape: int, seed: int = 0) -> Tensor:
    """A scale of its own in almost every block, and the corners: byte 0, and the largest."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    codes = torch.randint(100, 155, shape, generator=generator, dtype=torch.uint8)
    codes.view(-1)[:2] = torch.tensor([0, 254], dtype=torch.uint8)[: codes.numel()]
    return codes.view(E8M0)


def operands(m: int = 70, n: int = 48, k: int = 176, dtype: torch.dtype = E4M3) -> Operands:
    blocks = math.ceil(k / 32)
    return draw(m, k), columns(draw(k, n, dtype=dtype)), scales(m, blocks), scales(blocks, n, seed=1)


def of_torch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Operands:
    """As torch's operators take them."""
    return a, b, f8.swizzle_scales(scale_a), f8.swizzle_scales(scale_b.t())


@pytest.fixture
def blackwell() -> Iterator[None]:
    with f8.emulate("B200", force=True):
        yield


# Our own GEMMs


@pytest.mark.parametrize("out", [BF16, F16, F32])
@pytest.mark.parametrize(("sizes", "dtype"), [((70, 48, 176), E4M3), ((1, 16, 16), E5M2), ((5, 32, 1056), E4M3)])
def test_scaled_mm(sizes: tuple[int, int, int], dtype: torch.dtype, out: torch.dtype) -> None:
    inputs = operands(*sizes, dtype)
    bias = None if out is F32 else draw(sizes[1], dtype=out)
    observed = f8.scaled_mm(*inputs, bias=bias, out_dtype=out, chip="B200")
    options: dict[str, Any] = {"bias": bias, "out_dtype": out, "split_k": 1, "chip": BLACKWELL_TCGEN05}
    wide = dict.fromkeys(("granularity_a", "granularity_b"), "blockwise_1x32")
    assert_same_bits(observed, expect("scaled_mm", *inputs, **options, **wide))
    a, b, scale_a, scale_b = inputs
    strided = a, b, columns(scale_a.view(torch.uint8)).view(E8M0), columns(scale_b.view(torch.uint8)).view(E8M0)
    assert_same_bits(f8.scaled_mm(*strided, bias=bias, out_dtype=out, chip="B200"), observed)


ENDS = torch.tensor([5, 5, 60], dtype=torch.int32)
ENDS_OF_K = torch.tensor([32, 32, 192], dtype=torch.int32)
GROUPED: dict[str, tuple[Any, ...]] = {
    "rows": (draw(70, 160), columns(draw(3, 160, 48)), scales(70, 5), scales(3, 48, 5).mT, ENDS),
    "columns": (draw(3, 70, 160), columns(draw(160, 80)), scales(3, 70, 5), scales(5, 80), ENDS),
    "K": (draw(70, 256), columns(draw(256, 48)), scales(70, 8), scales(48, 8).t(), ENDS_OF_K),
    "batches": (draw(3, 70, 160), columns(draw(3, 160, 48)), scales(3, 70, 5), scales(3, 48, 5).mT, None),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_scaled_grouped_mm(kind: str) -> None:
    inputs: Any = GROUPED[kind]
    if kind in ("columns", "batches"):
        with pytest.raises(UnsupportedError, match="call scaled_mm for each group"):
            f8.scaled_grouped_mm(*inputs, chip="B200")
        return
    observed = f8.scaled_grouped_mm(*inputs, chip="B200")
    assert_same_bits(observed, expect("scaled_grouped_mm", *inputs, out_dtype=BF16, chip=BLACKWELL_TCGEN05))
    assert observed.any()


def test_compiled_code_has_the_same_bits() -> None:
    for call, inputs in ((f8.scaled_mm, operands()), (f8.scaled_grouped_mm, GROUPED["rows"])):
        compiled = torch.compile(lambda *x, call=call: call(*x, out_dtype=BF16, chip="B200"), fullgraph=True)
        assert_same_bits(compiled(*inputs), call(*inputs, out_dtype=BF16, chip="B200"))


def test_another_chip_is_named() -> None:
    with pytest.raises(UnsupportedError, match="choose the chip B200"):
        f8.scaled_mm(*operands(), out_dtype=BF16)
    with pytest.raises(UnsupportedError, match="choose the chip B200"):
        f8.scaled_grouped_mm(*GROUPED["rows"])


@pytest.mark.usefixtures("blackwell")
@pytest.mark.filterwarnings("ignore:.*unverified")
def test_what_a_blackwell_gpu_is_to_compute_is_the_same_gemm() -> None:
    """The operators that `engine="hardware"` calls, with the operands that they get, emulated."""
    inputs: Any = operands()
    bias = draw(48, dtype=BF16)
    gemm, _ = checked_scaled_mm(*inputs, bias, BF16, False, "emulated", None, None, None, "B200")
    assert_same_bits(hardware.scaled_mm(*inputs, bias, gemm), emulation.scaled_mm(*inputs, bias, gemm))
    for kind in ("rows", "K"):
        inputs = GROUPED[kind]
        gemm, _ = checked_scaled_grouped_mm(*inputs, BF16, False, "emulated", "B200")
        assert_same_bits(hardware.scaled_grouped_mm(*inputs, gemm), emulation.scaled_grouped_mm(*inputs, gemm))


@pytest.mark.usefixtures("blackwell")
def test_that_it_is_unverified_is_said_once() -> None:
    hardware._warn_unverified.cache_clear()  # pyright: ignore[reportPrivateUsage]
    inputs = operands()
    gemm, _ = checked_scaled_mm(*inputs, None, BF16, False, "emulated", None, None, None, "B200")
    with pytest.warns(RuntimeWarning, match="Blackwell tcgen05 .* unverified"):
        hardware.scaled_mm(*inputs, None, gemm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hardware.scaled_mm(*inputs, None, gemm)


# torch's operators


@pytest.mark.usefixtures("blackwell")
def test_an_operator_multiplies_swizzled_scales() -> None:
    inputs, bias = operands(), draw(48, dtype=BF16)
    a, b, scale_a, scale_b = of_torch(*inputs)
    poison = f8.swizzle_scales(inputs[2], padding=255)  # NaN
    assert not torch.equal(poison.view(torch.uint8), scale_a.view(torch.uint8))
    for scale in (scale_a, scale_a.view(-1, 16), poison):
        for out in (BF16, F16, F32):
            expected = f8.scaled_mm(*inputs, out_dtype=out, chip="B200")
            for fast in (False, True):
                observed = scaled_mm_of_torch(a, b, scale, scale_b, out_dtype=out, use_fast_accum=fast)
                assert_same_bits(observed, expected)
            assert_same_bits(F.scaled_mm(a, b, scale, MX, scale_b, MX, SWIZZLED, SWIZZLED, output_dtype=out), expected)
    expected = f8.scaled_mm(*inputs, bias=bias, out_dtype=BF16, chip="B200")
    assert_same_bits(scaled_mm_of_torch(a, b, scale_a, scale_b, bias=bias, out_dtype=BF16), expected)
    compiled = torch.compile(lambda *x: scaled_mm_of_torch(*x, bias=bias, out_dtype=BF16), fullgraph=True)
    assert_same_bits(compiled(a, b, scale_a, scale_b), expected)


def groups(kind: str) -> tuple[Any, ...]:
    """A grouped GEMM as torch takes it, whose tiles are written by hand: the groups of ENDS, and of ENDS_OF_K."""
    a, b, scale_a, scale_b, offs = GROUPED[kind]
    if kind == "rows":
        of_a = [f8.swizzle_scales(scale_a[:5]).view(-1, 8), f8.swizzle_scales(scale_a[5:60]).view(-1, 8)]
        return a, b, torch.cat(of_a), torch.stack([f8.swizzle_scales(expert.t()) for expert in scale_b]), offs
    runs = (slice(0, 1), slice(1, 6))  # blocks of the first and of the last group; one is empty
    of_a, of_b = ([f8.swizzle_scales(x[:, run]).view(128, -1) for run in runs] for x in (scale_a, scale_b.t()))
    # Of a group after the other, not beside it.
    one_after_other = [torch.cat([x.flatten() for x in tiles]).view(128, -1) for tiles in (of_a, of_b)]
    return a, b, *one_after_other, offs


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("kind", ["rows", "K"])
def test_a_grouped_operator_multiplies_swizzled_scales(kind: str) -> None:
    expected = f8.scaled_grouped_mm(*GROUPED[kind], chip="B200")
    a, b, scale_a, scale_b, offs = groups(kind)
    assert_same_bits(grouped_mm_of_torch(a, b, scale_a, scale_b, offs), expected)
    options = {"swizzle_a": SWIZZLED, "swizzle_b": SWIZZLED, "offs": offs}
    assert_same_bits(grouped_mm_v2_of_torch(a, b, scale_a, MX, scale_b, MX, **options), expected)
    beyond = torch.cat([scale_a, scale_a.view(torch.uint8).new_full(scale_a.shape, 255).view(E8M0)])
    assert_same_bits(grouped_mm_of_torch(a, b, beyond, scale_b, offs), expected)


A, B, SCALE_A, SCALE_B = of_torch(*operands())
ROWS, INNER = groups("rows"), groups("K")
VECTOR, ENDS_IN_A_BLOCK = ScalingType.BlockWise1x128, torch.tensor([48, 192], dtype=torch.int32)


def first(scale_a: Tensor = SCALE_A, scale_b: Tensor = SCALE_B, out: torch.dtype | None = BF16) -> Callable[[], Tensor]:
    return lambda: scaled_mm_of_torch(A, B, scale_a, scale_b, out_dtype=out)


def second(
    *swizzles: Any, a: Tensor = A, b: Tensor = B, scale_a: Tensor = SCALE_A, scale_b: Tensor = SCALE_B,
    recipes: tuple[ScalingType, ScalingType] = (MX, MX),
) -> Callable[[], Tensor]:  # fmt: skip
    return lambda: F.scaled_mm(a, b, scale_a, recipes[0], scale_b, recipes[1], *swizzles)


def grouped(*arguments: Tensor) -> Callable[[], Tensor]:
    return lambda: grouped_mm_of_torch(*arguments)


REFUSED: list[tuple[type[Exception], str, Callable[[], Tensor]]] = [
    (RuntimeError, "fit no scaling", first(SCALE_A[:512])),
    (RuntimeError, "fit no scaling", first(scales(70, 6), scales(6, 48))),
    (RuntimeError, "fit no scaling", first(SCALE_A, torch.ones(6, 48))),
    (RuntimeError, "fit no scaling", first(SCALE_A.view(32, -1).t())),
    (RuntimeError, "at a multiple of 16 bytes", first(shifted(SCALE_A.view(torch.uint8), 8).view(E8M0))),
    (NotImplementedError, "not modelled", first(out=None)),
    (ValueError, "do not fit the recipes", second(SWIZZLED, SWIZZLED, scale_a=SCALE_A[:512])),
    (ValueError, "float8_e8m0fnu as .*swizzle_scales gives it", second(SWIZZLED, SWIZZLED, scale_a=torch.ones(1024))),
    (ValueError, "SWIZZLE_32_4_4", second(SWIZZLED, NOT)),
    (ValueError, "SWIZZLE_32_4_4", second()),
    (ValueError, "no chip has a GEMM", second(SWIZZLED, SWIZZLED, scale_b=torch.ones(1, 48), recipes=(MX, ROW))),
    (ValueError, "two float8_e5m2", second(a=A.view(E5M2), b=B.view(E5M2))),
    (
        NotImplementedError,
        "takes scales",  # of 128 on Hopper alone
        second(scale_a=columns(torch.ones(70, 2)), scale_b=columns(torch.ones(48, 2)), recipes=(VECTOR, VECTOR)),
    ),
    (RuntimeError, "of 2 dimensions", grouped(*ROWS[:2], ROWS[2].flatten(), *ROWS[3:])),
    (RuntimeError, "of 2 dimensions", grouped(*ROWS[:3], ROWS[3][:, 1:], ROWS[4])),
    (ValueError, "must have 2048 bytes or more", grouped(*ROWS[:2], ROWS[2][:128], *ROWS[3:])),
    (ValueError, "offs must divide the rows", grouped(*GROUPED["columns"])),
    (ValueError, "multiples of 32", grouped(*INNER[:4], ENDS_IN_A_BLOCK)),
    (NotImplementedError, "pad K", grouped(draw(70, 144), columns(draw(3, 144, 48)), *ROWS[2:])),
    (ValueError, "SWIZZLE", lambda: grouped_mm_v2_of_torch(*ROWS[:3], MX, ROWS[3], MX, offs=ROWS[4])),
]


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(("kind", "message", "call"), REFUSED)
def test_an_operator_refuses(kind: type[Exception], message: str, call: Callable[[], Tensor]) -> None:
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("call", [first(), second(SWIZZLED, SWIZZLED), grouped(*ROWS)])
def test_hopper_names_the_chip_that_has_it(call: Callable[[], Tensor]) -> None:
    with f8.emulate("H100", force=True), pytest.raises(UnsupportedError, match="choose the chip B200"):
        call()

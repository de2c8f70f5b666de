"""The Triton kernels against plain eager torch, bit for bit: on a GPU, and on any machine in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the same tests run a second time in a process of their own,
with TRITON_INTERPRET=1. It is exact but for conversions: those to float8 are not rounded to the nearest even, and
subnormal bfloat16 are lost. They are replaced here by those of ml_dtypes, so that only the GPU can tell whether the
hardware's own conversion is right.
"""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import f8emu.torch as f8
from f8emu.spec import E4M3FN, E5M2, Format, ScaleRule
from f8emu.torch.fused import delayed
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.launch import COMPILER_OPTIONS
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.fused_casts import AMAXES, FLOATS, RULES, SPECIALS, calls, drawn, results, settings
from tests.torch_path.interpreter import DEVICE, INTERPRETED, ON_GPU, run_interpreted

NOT_INTERPRETED = pytest.mark.skipif(INTERPRETED, reason="only a GPU can tell")

FORMATS = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
RULE = (False, 1e-12, 0)
"""power_of_two, amax_floor, margin."""
_RULES = [ScaleRule(), ScaleRule(power_of_two=True, amax_floor=1e-3)]
SHAPES = [(1, 300), (130, 70), (129 if INTERPRETED else 257, 144)]  # tails in both directions, and a multiple of 16
if not INTERPRETED:
    SHAPES += [(1, 1), (1000, 1), (2048, 4096), (8192 + 16, 1024 + 8)]
# In the interpreter every shape has two of the dtypes, and every dtype two of the shapes.
INPUTS = [
    (shape, dtype)
    for (i, shape), (j, dtype) in product(enumerate(SHAPES), enumerate(FLOATS))
    if not INTERPRETED or i + j != 2
]


_ONE, _OTHER = list(zip((E4M3FN, E5M2), _RULES, strict=True))
EVERY_CAST = pytest.mark.parametrize(
    ("given", "cast"),
    list(zip(INPUTS, (_ONE, _OTHER, _OTHER, _ONE, _ONE, _OTHER), strict=True))
    if INTERPRETED
    else list(product(INPUTS, product((E4M3FN, E5M2), _RULES))),
    ids=str,
)
"""An input, and a format and a rule. In the interpreter, which is slow, each shape and each dtype has both formats."""


@pytest.fixture(scope="module", params=INPUTS, ids=str)
def x(request) -> torch.Tensor:
    """Special values are among the elements. Not to be written to."""
    return drawn(*request.param)


@pytest.fixture
def compare(kernels) -> Callable[..., None]:
    """Kernel and plain torch of one call: equal bits, codes of NaN and NaN amaxes too; a NaN scale equals any NaN."""

    def call(operator: Any, *args: Any) -> None:
        plain = tuple(y.clone() if isinstance(y, torch.Tensor) and y.numel() == 1 else y for y in args)
        expected = results(operator(*plain))
        is_amax = getattr(operator, "name", AMAXES[0]) in AMAXES
        for observed, wanted in zip(kernels(operator, *args), expected, strict=True):
            assert_same_bits(observed, wanted, nan_codes=is_amax or observed.dtype is not torch.float32)
            assert observed.stride() == wanted.stride()
        for observed, wanted in zip(args, plain, strict=True):  # an amax that is raised
            if isinstance(wanted, torch.Tensor) and wanted.numel() == 1:
                assert_same_bits(observed, wanted)

    return call


@ON_GPU
@EVERY_CAST
def test_every_cast(given, cast, compare) -> None:
    """The matrix is cast as it is and, where it is small, finite and zero."""
    x, (fmt, rule) = drawn(*given), cast
    finite = torch.where(x.isfinite(), x, torch.ones_like(x))
    for values in (x, finite, torch.zeros_like(x))[: 3 if x.numel() < 1 << 20 else 1]:
        for name, (operator, args) in calls(values, fmt, rule).items():
            if values is x or "its own" in name or "tiles" in name or "delayed" in name:
                compare(operator, *args)


@ON_GPU
def test_amaxes_from_amid_a_word(x, compare) -> None:
    def call(x: torch.Tensor, operator: Any) -> Any:
        return operator(torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape))

    for operator, _ in calls(x).values():
        if operator.name in AMAXES:
            compare(call, x, operator)


@ON_GPU
@FORMATS
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_scales(rule, fmt: Format, compare) -> None:
    powers = torch.from_numpy(np.ldexp(np.float32(1), np.arange(-140, 128)))[:, None]
    powers = torch.cat([powers, torch.tensor([[rule.amax_floor]])])  # as a float32, 1e-3 is above itself
    near = [torch.nextafter(powers, torch.full((), end)) for end in (0.0, float("inf"))]
    amax = torch.cat([powers, *near, powers * 1.75, torch.tensor(SPECIALS).abs()[:, None]])
    for margin in (0, 3):
        compare(fused.scales, amax, fmt.name, *settings(rule), margin)


@ON_GPU
@FORMATS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pairs_by_any_amax(dtype, fmt: Format, compare) -> None:
    """Powers of two and their neighbours, specials, and 448 and 57344, which are the quotient of 1."""
    powers = torch.exp2(torch.arange(-24, 16).float())
    powers = torch.cat([powers, powers * 1.75, powers * (1 + 2**-7)])
    if INTERPRETED:  # float32 sees every third; the others are converted to it without rounding
        powers = powers[:: 3 if dtype is torch.float32 else 7]
    amaxes = torch.cat([powers, torch.tensor([448.0, 57344.0, 65504.0, *SPECIALS])])
    x = torch.linspace(-500, 500, 33).reshape(3, 11)
    for amax in amaxes.abs().to(dtype):
        compare(fused.cast_pair, x, fmt.name, amax.reshape(1, 1), amax.reshape(1, 1), False, 1e-12)


@ON_GPU
def test_a_given_amax_is_raised(x, compare) -> None:
    finite = torch.where(x.isfinite(), x, torch.ones_like(x))
    for start, values in ((0.0, finite), (1e9, finite), (float("nan"), finite), (2.0, x)):
        amax = torch.full((1,), start)
        compare(delayed.cast_pair_delayed, values, E4M3FN.name, torch.ones(1, 1), True, True, amax, *RULE)


@ON_GPU
@pytest.mark.parametrize("is_most_recent", [False, True])
def test_the_update_of_a_model(is_most_recent, kernels, monkeypatch) -> None:
    """Many layers; states that are set or not, and amaxes of every kind."""
    generator = torch.Generator().manual_seed(1)
    layers, length = 40 if INTERPRETED else 400, 5
    kinds = torch.tensor([delayed.UNCALLED, 0.0, 1e-45, 1e-3, 2.5, 3e38, float("inf"), float("nan")])
    amaxes = kinds[torch.randint(len(kinds), (3 * layers,), generator=generator)]
    histories = torch.rand(layers, 3, length, generator=generator) * (torch.rand(layers, 1, 1) > 0.3)
    inv_scales = torch.rand(3 * layers, generator=generator) * (torch.rand(3 * layers, generator=generator) > 0.5)
    counts = torch.randint(0, 3, (layers, 3, 3), generator=generator)
    rule = ("float8_e4m3fn,,float8_e5m2", False, 1e-12, 1, is_most_recent)

    def run(call: Any, *, is_idle: bool) -> list[torch.Tensor]:
        """The report is where the host reads it."""
        device = "cpu" if call is None else DEVICE
        own = torch.full_like(amaxes, delayed.UNCALLED) if is_idle else amaxes
        parts = [own, histories, inv_scales, counts]
        shapes = (1, 1), (3, length), (1, 1), (3, 3)
        lists = [[y.clone().reshape(s) for y in part.to(device)] for part, s in zip(parts, shapes, strict=True)]
        of_amaxes, of_histories, of_scales, of_counts = lists
        states: list[torch.Tensor] = []
        for i in range(layers):
            states += of_histories[i], of_counts[i], *of_scales[3 * i : 3 * i + 3], *of_amaxes[3 * i : 3 * i + 3]
        report = torch.full((layers, 3), -1, dtype=torch.int32, pin_memory=device == "cuda")

        def update() -> tuple[torch.Tensor, ...]:
            delayed.update_delayed(states, report, delayed.amaxes_of(of_amaxes), *rule)
            if device == "cuda":
                torch.cuda.synchronize()
            return (report,)

        outcome = update() if call is None else call(update)
        return [*outcome, *(torch.stack(part).cpu() for part in lists)]

    for is_idle in (False, True):
        observed, wanted = (run(call, is_idle=is_idle) for call in (kernels, None))
        assert not is_idle or (torch.equal(wanted[-3], histories) and torch.equal(wanted[-1], counts))
        for ours, theirs in zip(observed, wanted, strict=True):
            integers = ours.dtype is not torch.float32
            assert (
                torch.equal(ours, theirs) if integers else torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
            )


@ON_GPU
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_rows(dtype, compare, monkeypatch) -> None:
    if INTERPRETED:
        from f8emu.torch.fused import plans

        monkeypatch.setattr(plans, "ROWS_LONGEST", 64)
        monkeypatch.setattr(plans, "LONG_ROWS_BLOCK", 64)
    generator = torch.Generator().manual_seed(1)
    for columns in (300, 256) if INTERPRETED else (16384 + 8, 53248):
        x = torch.randn(5, columns, generator=generator).to(dtype)
        x[1, columns - 1], x[2, 3], x[3] = float("nan"), float("inf"), 0
        compare(fused.cast_rows, x, E4M3FN.name, False, 1e-12)


@ON_GPU
@pytest.mark.parametrize("strip", [32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES[1:2] if INTERPRETED else SHAPES, ids=str)
def test_blocks_in_strips(shape, strip: int, compare, monkeypatch) -> None:
    """Every width, of which one is in use; each is a kernel to compile, a third of a second."""
    from f8emu.torch.fused import plans

    monkeypatch.setattr(plans, "BLOCKS_STRIP", strip)
    monkeypatch.setattr(plans, "cast_blocks", plans.cast_blocks.__wrapped__)  # type: ignore[attr-defined]
    for rule in _RULES:
        for operator, args in calls(drawn(shape, torch.bfloat16), E4M3FN, rule).values():
            if operator is fused.cast_blocks:
                compare(operator, *args)


@ON_GPU
def test_any_layout_of_x(compare) -> None:
    x = torch.randn(150, 140, generator=torch.Generator().manual_seed(2)).bfloat16()
    for view in (x.t(), x[::2, ::3], x[1:, 1:], x[:1].expand(130, 140)):
        compare(fused.cast_rows, view, E4M3FN.name, False, 1e-12)


@pytest.mark.gpu
@NOT_INTERPRETED
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", calls(torch.zeros(1, 1)))
def test_every_cast_in_compiled_code(name: str) -> None:
    """The lowerings: Inductor's code launches the kernels."""
    torch._dynamo.reset()
    operator, args = calls(drawn((257, 144), torch.bfloat16))[name]
    moved = tuple(y.cuda() if isinstance(y, torch.Tensor) else y for y in args)
    copies = tuple(y.clone() if isinstance(y, torch.Tensor) else y for y in moved)
    compiled = torch.compile(lambda *args: operator(*args), fullgraph=True, dynamic=False)
    for observed, wanted in zip(results(compiled(*copies)), results(operator(*moved)), strict=True):
        assert_same_bits(observed, wanted, nan_codes=observed.dtype is not torch.float32)
        assert observed.stride() == wanted.stride()
    for observed, wanted in zip(copies, moved, strict=True):  # the amax that is raised, and what is not touched
        if isinstance(wanted, torch.Tensor):
            assert_same_bits(observed, wanted)


NEEDS_TRITON = pytest.mark.skipif(
    INTERPRETED or find_spec("triton") is None, reason="Triton is not installed (pip install triton), or interprets"
)


@NEEDS_TRITON
@pytest.mark.parametrize(("fmt", "instruction"), [(E4M3FN, "e4m3x2"), (E5M2, "e5m2x2")], ids=str)
def test_instructions_of_a_hopper_gpu(fmt: Format, instruction, monkeypatch, tmp_path) -> None:
    """Compiled without a GPU: conversion, product and quotient round to the nearest, and nothing flushes subnormals."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource, compile  # pyright: ignore[reportMissingImports]

    from f8emu.torch.fused import block_kernels
    from f8emu.torch.fused import cast_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rule: dict[str, Any] = {"QUOTIENT": fmt.max, "FLOOR": 2.0**-40, "AT_FLOOR": 2.0**49, "POWER_OF_TWO": False}
    dtypes = (("x", "*bf16"), ("row_source", "*bf16"))
    pair = {"LIMIT": fmt.max, "ROWS": True, "COLS": True, "BM": 128, "BN": 64}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (kernels.cast_rows_kernel, {**rule, "BM": 2, "BN": 4096}),
        (kernels.cast_pair_kernel, {**rule, **pair, "ROW_BLOCK": 1, "COL_BLOCK": 1}),
        (block_kernels.cast_vectors_kernel, {**rule, "ROWS": True, "COLS": True, "STRIP": 64}),
    ]
    for kernel, constants in cases if fmt is E4M3FN else cases[:1]:  # a kernel takes seconds
        constants = {**constants, "DTYPE": kernels.DTYPES[fmt.name]}
        signature = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(constants, "constexpr")
        signature |= {
            name: "i32" for name in ("M", "N", "tiles_m", "tiles_n", "row_count", "col_count") if name in signature
        }
        signature |= {name: f"*{kernels.DTYPES[fmt.name]}" for name in signature if name.endswith("codes")}
        signature |= {name: kind for name, kind in dtypes if name in signature}
        at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=at)
        code = compile(source, target=GPUTarget("cuda", 90, 32), options=COMPILER_OPTIONS).asm["ptx"]
        for wanted in (f"cvt.rn.satfinite.{instruction}.f32", "div.rn.f32", "mul.f32"):
            assert wanted in code
        for unwanted in ("div.full", "div.approx", "rcp.", ".ftz", "fma."):
            assert unwanted not in code


# What only a GPU can answer.


@pytest.mark.gpu
@NOT_INTERPRETED
@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_input_is_converted_as_on_the_cpu(dtype, fmt: Format, compare) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    for inv_scale in (1.0, 0.75, 2.0**-9, 2.0**20):
        compare(fused.cast_pair_given, x, fmt.name, torch.full((1, 1), inv_scale), True, True)


@pytest.mark.gpu
@NOT_INTERPRETED
@FORMATS
def test_float32_near_every_tie_is_converted_as_on_the_cpu(fmt: Format, compare) -> None:
    codes = torch.arange(fmt.max_code + 1, dtype=torch.uint8).view(getattr(torch, fmt.name)).double()
    ties = ((codes[1:] + codes[:-1]) / 2).float()
    near = [torch.nextafter(ties, torch.full((), end)) for end in (0.0, float("inf"))]
    x = torch.stack([ties, *near, codes[1:].float()])
    compare(fused.cast_pair_given, torch.cat([x, -x]), fmt.name, torch.ones(1, 1), True, True)


@pytest.mark.gpu
@NOT_INTERPRETED
@FORMATS
def test_every_mantissa_has_the_correctly_rounded_scales(fmt: Format, compare) -> None:
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    for exponent in (127, 107, 150):
        compare(fused.scales, (mantissas | exponent << 23).view(torch.float32)[:, None], fmt.name, False, 1e-12, 0)


@pytest.mark.gpu
@NOT_INTERPRETED
def test_more_than_2_to_the_31_elements() -> None:
    """The last rows and columns of 4.3 GB, on the device; all offsets are beyond 32 bits there."""
    m, n = 131_088, 16_400
    x = torch.empty(m, n, dtype=torch.bfloat16, device="cuda").normal_(generator=torch.Generator("cuda").manual_seed(3))
    x[-1, -1] = 1000.0
    assert x.numel() > 2**31
    amax = fused.tensor_amax(x)
    assert amax.item() == 1000.0
    inv_scale, _ = fused.scales(amax, E4M3FN.name, False, 1e-12, 0)
    raised = torch.zeros((), device="cuda")
    rows, cols, *_ = delayed.cast_pair_delayed(x, E4M3FN.name, inv_scale, True, True, raised, *RULE)
    assert raised.item() == 1000.0
    tail = f8.quantize(x[-300:], inv_scale, E4M3FN)
    assert_same_bits(rows[-300:], tail)
    assert_same_bits(cols[:, -300:], tail.t())
    row_codes, _, col_codes, _ = fused.cast_pair(x, E4M3FN.name, amax, amax, False, 1e-12)
    assert_same_bits(row_codes[-300:], tail)
    assert_same_bits(col_codes[:, -300:], tail.t())
    del rows, cols, row_codes, col_codes
    row_amax, col_amax = fused.row_col_amax(x)
    assert_same_bits(row_amax[-300:], fused.row_amax(x[-300:]))
    assert col_amax[-1].item() == 1000.0
    for observed, wanted in zip(fused.row_col_amax_of_tiles(x), (row_amax, col_amax), strict=True):
        assert_same_bits(observed.amax(dim=0), wanted)
    for observed, wanted in zip(
        fused.cast_rows(x, E4M3FN.name, True, 1e-12), fused.cast_rows(x[-300:], E4M3FN.name, True, 1e-12), strict=True
    ):
        assert_same_bits(observed[-300:], wanted)
    for square in (False, True):  # the last 144 rows are a block and its tail: m is 16 more than a multiple of 128
        large = fused.cast_blocks(x, E4M3FN.name, square, True, True, False, 1e-12)
        small = fused.cast_blocks(x[-144:], E4M3FN.name, square, True, True, False, 1e-12)
        assert_same_bits(large[0][-144:], small[0])
        assert_same_bits(large[2][:, -144:], small[2])
        assert_same_bits(large[1][-small[1].shape[0] :], small[1])
        assert_same_bits(large[3][:, -small[3].shape[1] :], small[3])
        del large, small


@pytest.mark.gpu
@NOT_INTERPRETED
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_than_the_current_device() -> None:
    x = torch.randn(130, 70)
    for observed, wanted in zip(
        fused.cast_rows(x.to("cuda:1"), E4M3FN.name, False, 1e-12),
        fused.cast_rows(x, E4M3FN.name, False, 1e-12),
        strict=True,
    ):
        assert observed.device.index == 1
        assert_same_bits(observed, wanted)


FILES = [f"tests/torch_path/test_{name}.py" for name in ("kernels", "grouped_kernels", "inspection_kernels", "silu")]


@NEEDS_TRITON
def test_kernels_in_the_interpreter() -> None:
    """The kernels of all files in one process, which loads torch once."""
    run_interpreted(*FILES)

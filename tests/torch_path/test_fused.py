"""The fused casts as operators: the eager path against the verbs and the oracle, and what a compiler makes of them."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import E4M3FN, E5M2, Granularity, OperandError, ScaleRule, SpecError, UnsupportedError
from f8emu.torch import library
from f8emu.torch.fused import columns, delayed
from f8emu.torch.fused import operators as fused

# Loading and running the compiler warns about torch's own old code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (1, 300), (130, 70), (257, 129), (300, 1)]
RULES = [ScaleRule(), ScaleRule(power_of_two=True), ScaleRule(amax_floor=1e-3)]
SPECIALS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 1e-13]
E4M3 = "float8_e4m3fn"


def cast_delayed(x, fmt, inv_scale, rows, cols, amax):
    """Both codes, with the scale rule and the margin that do not matter where the state's inv_scale is set."""
    return delayed.cast_pair_delayed(x, fmt, inv_scale, rows, cols, amax, False, 1e-12, 0)[:2]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, *, special: bool) -> torch.Tensor:
    """Each element of another magnitude; `special` puts NaN, infinities, zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 12, shape, generator=generator))
    if special:
        at = torch.randint(0, x.numel(), (len(SPECIALS),), generator=generator)
        x.view(-1)[at] = torch.tensor(SPECIALS)
    x = x.to(dtype)
    x[-1, : shape[1] // 2] = 0
    return x


@pytest.fixture(params=["verbs", "oracle"])
def witness(request, to_numpy) -> Callable[..., Any]:
    """Calls a verb of f8emu.torch, or of the oracle with the tensors as arrays."""
    if request.param == "verbs":
        return lambda verb, *args, **options: getattr(f8, verb)(*args, **options)

    def call(verb: str, *args: Any, **options: Any) -> Any:
        return getattr(reference, verb)(*(to_numpy(x) if isinstance(x, torch.Tensor) else x for x in args), **options)

    return call


@pytest.fixture(params=[(s, d, True) for s in SHAPES for d in FLOATS] + [(s, torch.bfloat16, False) for s in SHAPES])
def x(request) -> torch.Tensor:
    shape, dtype, special = request.param
    return drawn(shape, dtype, special=special)


def test_amaxes_equal_the_verbs(x, witness, assert_same_bits) -> None:
    rowwise = Granularity.ROWWISE
    assert_same_bits(fused.tensor_amax(x), witness("amax", x), nan_codes=True)
    assert_same_bits(fused.row_amax(x), witness("amax", x, rowwise), nan_codes=True)
    rows, cols = fused.row_col_amax(x)
    assert_same_bits(rows, witness("amax", x, rowwise), nan_codes=True)
    assert_same_bits(cols, witness("amax", x.t(), rowwise), nan_codes=True)
    vectors = Granularity.BLOCKWISE_1X128
    for found, matrix in zip(fused.row_col_amax_of_tiles(x), (x, x.t()), strict=True):
        assert_same_bits(found.squeeze(2), witness("amax", matrix, vectors).T, nan_codes=True)


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_scales_equal_the_verbs(fmt, rule, margin, witness, assert_same_bits) -> None:
    powers = torch.from_numpy(np.ldexp(np.float32(1), np.arange(-140, 128)))[:, None]
    others = torch.tensor([rule.amax_floor, *SPECIALS]).abs()[:, None]
    amax = torch.cat([powers, powers * 1.75, others])
    expected = witness("scale_from_amax", amax, fmt, rule, margin=margin)
    for found, wanted in zip(fused.scales(amax, fmt.name, *arguments(rule), margin), expected, strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_scales_of_a_16_bit_amax_are_those_of_its_value(dtype, assert_same_bits) -> None:
    amax = torch.tensor([0.0, 1e-7, 0.3, 448.0, 6e4, float("inf"), float("nan")], dtype=dtype)[:, None]
    settings = (E4M3FN.name, False, 1e-12, 0)
    for found, wanted in zip(fused.scales(amax, *settings), fused.scales(amax.float(), *settings), strict=True):
        assert_same_bits(found, wanted)


def amaxes(size: int | None) -> torch.Tensor | None:
    """For so many rows: they fit some and make others saturate."""
    return None if size is None else torch.linspace(40, 1600, size).reshape(size, 1)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_pairs_equal_the_verbs(fmt, rule, x, witness, assert_same_bits) -> None:
    """By one amax and by one a row, on each side; by several a row, the largest counts."""
    m, n = x.shape
    if rule.power_of_two:
        of_tiles = [torch.stack([amax * 0.5, amax, amax * 0]) for amax in map(amaxes, x.shape) if amax is not None]
        for both in (of_tiles, (of_tiles[0], amaxes(1)), (None, of_tiles[1])):
            wanted = (None if amax is None else amax[1] if amax.ndim == 3 else amax for amax in both)
            for found, expected in zip(
                fused.cast_pair(x, fmt.name, *both, *arguments(rule)),
                fused.cast_pair(x, fmt.name, *wanted, *arguments(rule)),
                strict=True,
            ):
                assert_same_bits(found, expected, nan_codes=True)
                assert found.shape == expected.shape
    for rows, cols in ((1, 1), (m, n), (m, 1), (1, n), (1, None), (None, n)):
        both = amaxes(rows), amaxes(cols)
        found = fused.cast_pair(x, fmt.name, *both, *arguments(rule))
        for matrix, amax, codes, scale in zip((x, x.t()), both, found[::2], found[1::2], strict=True):
            if amax is None:
                assert codes.shape == scale.shape == (0, 0)
                continue
            granularity = Granularity.TENSORWISE if amax.numel() == 1 else Granularity.ROWWISE
            expected = witness("scale_from_amax", amax, fmt, rule)
            assert_same_bits(scale, expected.scale)
            assert_same_bits(codes, witness("quantize", matrix, expected.inv_scale, fmt, granularity), nan_codes=True)
            assert codes.is_contiguous()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_pairs_by_their_own_amax_equal_the_verbs(fmt, x, witness, assert_same_bits) -> None:
    """The amax as the verb gives it, and as a compiler does: in the dtype of `x`, any NaN in it."""
    expected = witness("scale_from_amax", witness("amax", x), fmt)
    for amax in (fused.tensor_amax(x), x.abs().max().reshape(1, 1)):
        rows, row_scale, cols, col_scale = fused.cast_pair(x, fmt.name, amax, amax, *arguments(ScaleRule()))
        assert_same_bits(row_scale, expected.scale)
        assert_same_bits(col_scale, expected.scale)
        assert_same_bits(rows, witness("quantize", x, expected.inv_scale, fmt), nan_codes=True)
        assert_same_bits(cols, rows.t(), nan_codes=True)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_pairs_under_a_given_scale_equal_the_verbs(fmt, x, witness, assert_same_bits) -> None:
    for value, wanted in ((0.3, (True, True)), (9.0, (True, False)), (2.0**-9, (False, True))):
        inv_scale, amax = torch.full((1, 1), value), torch.zeros(1, 1)
        found = fused.cast_pair_given(x, fmt.name, inv_scale, *wanted)
        for matrix, codes, is_wanted in zip((x, x.t()), found, wanted, strict=True):
            if is_wanted:
                assert_same_bits(codes, witness("quantize", matrix, inv_scale, fmt), nan_codes=True)
                assert codes.is_contiguous()
            else:
                assert codes.shape == (0, 0)
        raising = cast_delayed(x, fmt.name, inv_scale, *wanted, amax)
        for codes, expected in zip(raising, found, strict=True):
            assert_same_bits(codes, expected, nan_codes=True)
        assert_same_bits(amax, witness("amax", x), nan_codes=True)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_rows_equal_the_verbs(fmt, rule, x, witness, assert_same_bits) -> None:
    codes, scale, amax = fused.cast_rows(x, fmt.name, *arguments(rule))
    largest = witness("amax", x, Granularity.ROWWISE)
    expected = witness("scale_from_amax", largest, fmt, rule)
    assert_same_bits(amax, largest, nan_codes=True)
    assert_same_bits(scale, expected.scale)
    assert_same_bits(codes, witness("quantize", x, expected.inv_scale, fmt, Granularity.ROWWISE), nan_codes=True)


@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_blocks_equal_the_verbs(rule, square, x, witness, assert_same_bits) -> None:
    granularity = Granularity.BLOCKWISE_128X128 if square else Granularity.BLOCKWISE_1X128
    both = fused.cast_blocks(x, E4M3, square, True, True, *arguments(rule))
    for matrix, codes, scale in ((x, *both[:2]), (x.t(), *both[2:])):
        expected = witness("scale_from_amax", witness("amax", matrix, granularity), E4M3FN, rule)
        assert_same_bits(scale, expected.scale)
        assert_same_bits(codes, witness("quantize", matrix, expected.inv_scale, E4M3FN, granularity), nan_codes=True)
        assert (scale if square else scale.t()).is_contiguous()
    rows = fused.cast_blocks(x, E4M3, square, True, False, *arguments(rule))
    cols = fused.cast_blocks(x, E4M3, square, False, True, *arguments(rule))
    for found, expected in zip((*rows[:2], *cols[2:]), both, strict=True):
        assert_same_bits(found, expected, nan_codes=True)
    assert all(left_out.numel() == 0 for left_out in (*rows[2:], *cols[:2]))


def test_a_given_amax_is_raised_and_keeps_what_is_not_finite(assert_same_bits) -> None:
    """The maximum of all passes, as integers: infinity above every number, NaN above infinity."""
    one = torch.ones(1, 1)
    for shape in ((), (1,), (1, 1)):
        amax = torch.zeros(shape)
        for value, expected in ((-3.0, 3.0), (2.0, 3.0), (-float("inf"), float("inf")), (5.0, float("inf"))):
            rows, cols = cast_delayed(torch.full((2, 3), value), E4M3, one, True, True, amax)
            assert amax.item() == expected
            assert (rows.shape, cols.shape) == ((2, 3), (3, 2))
        for value in (float("nan"), 1.0, float("inf")):
            cast_delayed(torch.full((2, 3), value), E4M3, one, True, False, amax)
            assert amax.view(torch.int32).item() == 0x7FFFFFFF
    amaxes = torch.zeros(4)  # one buffer of a whole model
    x = drawn((130, 70), torch.bfloat16, special=False)
    version = amaxes._version
    cast_delayed(x, E4M3, one, True, True, amaxes[2])
    assert amaxes._version > version, "autograd must see that it has changed"
    assert_same_bits(amaxes, torch.stack([torch.zeros(()), torch.zeros(()), f8.amax(x).reshape(()), torch.zeros(())]))


@pytest.mark.parametrize("shape", [(0, 0), (0, 40), (40, 0)], ids=str)
def test_nothing_gives_nothing(shape, witness, assert_same_bits) -> None:
    x = torch.zeros(shape)
    m, n = shape
    assert_same_bits(fused.tensor_amax(x), torch.zeros(1, 1))
    for found, size in zip(fused.row_col_amax(x), shape, strict=True):
        assert_same_bits(found, torch.zeros(size, 1))
    amax = torch.full((), 2.0)
    rows, cols = cast_delayed(x, E4M3, torch.ones(1, 1), True, True, amax)
    assert (rows.shape, cols.shape, amax.item()) == ((m, n), (n, m), 2.0)
    for row_amax, col_amax in ((torch.zeros(m, 1), torch.zeros(n, 1)), (torch.zeros(1, 1), torch.zeros(1, 1))):
        rows, row_scale, cols, col_scale = fused.cast_pair(x, E4M3, row_amax, col_amax, False, 1e-12)
        assert (rows.shape, cols.shape) == ((m, n), (n, m))
        assert_same_bits(row_scale, witness("scale_from_amax", row_amax, E4M3FN).scale)
        assert_same_bits(col_scale, witness("scale_from_amax", col_amax, E4M3FN).scale)
    codes, scale, found = fused.cast_rows(x, E4M3, False, 1e-12)
    assert_same_bits(scale, witness("scale_from_amax", torch.zeros(m, 1), E4M3FN).scale)
    assert (codes.shape, found.shape) == ((m, n), (m, 1))
    for square in (False, True):
        rows, row_scale, cols, col_scale = fused.cast_blocks(x, E4M3, square, True, True, False, 1e-12)
        granularity = Granularity.BLOCKWISE_128X128 if square else Granularity.BLOCKWISE_1X128
        assert (rows.shape, cols.shape) == ((m, n), (n, m))
        assert (row_scale.shape, col_scale.shape) == (granularity.scale_shape(m, n), granularity.scale_shape(n, m))


def test_any_layout_of_x_gives_the_same(assert_same_bits) -> None:
    base = drawn((257, 129), torch.bfloat16, special=True)
    for view in (base.t(), base[::2, ::3], base[1:, 1:], base[:1].expand(130, 129)):
        for operator, arguments in (call for name, call in calls(view).items() if name != "scales"):
            copied = (arguments[0].clone(memory_format=torch.contiguous_format), *arguments[1:])
            expected = results(operator(*[y.clone() if isinstance(y, torch.Tensor) else y for y in copied]))
            for found, wanted in zip(results(operator(*arguments)), expected, strict=True):
                assert_same_bits(found, wanted, nan_codes=True)
                assert found.stride() == wanted.stride()


# What a compiler makes of them.


def calls(x: torch.Tensor) -> dict[str, tuple[Any, tuple]]:
    """A name -> an operator and the arguments of one call; `x` is the first, if at all there."""
    rows, cols = torch.rand(x.shape[0], 1), torch.rand(x.shape[1], 1)
    return {
        "reduce_tensor": (fused.reduce_tensor, (x,)),
        "row_amax": (fused.row_amax, (x,)),
        "reduce_rows_and_cols": (fused.reduce_rows_and_cols, (x,)),
        "reduce_tiles": (fused.reduce_tiles, (x,)),
        "scales": (fused.scales, (rows, E4M3, True, 1e-12, 1)),
        "cast_pair": (fused.cast_pair, (x, E4M3, rows, cols, True, 1e-12)),
        "cast_pair by one amax": (fused.cast_pair, (x, "float8_e5m2", rows[:1].bfloat16(), None, False, 1e-12)),
        "cast_pair by tiles": (fused.cast_pair, (x, E4M3, torch.stack([rows, rows * 2]), cols[None], True, 1e-12)),
        "cast_pair_given": (fused.cast_pair_given, (x, E4M3, rows[:1], True, True)),
        "cast_pair_delayed": (
            delayed.cast_pair_delayed,
            (x, E4M3, rows[:1], True, True, torch.ones(1), False, 1e-12, 0),
        ),
        "cast_rows": (fused.cast_rows, (x, E4M3, True, 1e-12)),
        "cast_blocks": (fused.cast_blocks, (x, E4M3, False, True, True, False, 1e-12)),
        "cast_columns": (columns.cast_columns, (x, E4M3, cols)),
        "transpose_codes": (columns.transpose_codes, ((x.detach() > 0).to(torch.uint8), x)),
        "cast_blocks, squares": (fused.cast_blocks, (x, E4M3, True, True, False, False, 1e-12)),
    }


NAMES = list(calls(torch.zeros(1, 1)))


def results(outcome: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (outcome,) if isinstance(outcome, torch.Tensor) else tuple(outcome)


def arguments(rule: ScaleRule) -> tuple[bool, float]:
    return rule.power_of_two, rule.amax_floor


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name) -> None:
    """Torch's own check of an operator: schema, aliasing, the fake implementation, autograd, dynamic shapes."""
    for shape in ((130, 70), (1, 300)):
        operator, arguments = calls(drawn(shape, torch.bfloat16, special=False))[name]
        torch.library.opcheck(operator.overload, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_whole_and_with_any_size(name, assert_same_bits) -> None:
    operator = calls(torch.zeros(1, 1))[name][0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: operator(*args), fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((130, 70), (257, 129)):
        x = drawn(shape, torch.bfloat16, special=True)
        eager, traced = (calls(x)[name][1] for _ in range(2))
        traced = tuple(y.clone() if isinstance(y, torch.Tensor) else y for y in eager)
        for found, expected in zip(results(compiled(*traced)), results(operator(*eager)), strict=True):
            assert_same_bits(found, expected, nan_codes=True)
            assert found.stride() == expected.stride()
        for found, expected in zip(traced, eager, strict=True):  # the amax that is raised, and what is not touched
            if isinstance(expected, torch.Tensor):
                assert_same_bits(found, expected, nan_codes=True)


class Delayed(torch.autograd.Function):
    """Casts that raise amaxes in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *amaxes: torch.Tensor) -> torch.Tensor:
        one = torch.ones(1, 1)
        x_codes, xt = cast_delayed(x, E4M3, one, True, True, amaxes[0])
        w_codes, wt = cast_delayed(weight, E4M3, one, True, True, amaxes[1])
        ctx.save_for_backward(xt, wt)
        ctx.grad_amax = amaxes[2]  # saved, it would have to stay as it is until the backward pass
        return x_codes.float() @ w_codes.float().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        xt, wt = ctx.saved_tensors
        one = torch.ones(1, 1)
        codes, transposed = cast_delayed(grad, "float8_e5m2", one, True, True, ctx.grad_amax)
        return codes.float() @ wt.float().t(), transposed.float() @ xt.float().t(), None, None, None


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(drawn((32, 32), torch.float32, special=False))
        for name in ("amax_input", "amax_weight", "amax_grad_output"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Delayed.apply(x, self.weight, self.amax_input, self.amax_weight, self.amax_grad_output)


class Model(torch.nn.Module):
    """Two layers, one of them used twice."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        layers = [Layer(), Layer()]
        self.layers = torch.nn.Sequential(*layers, layers[0])
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)


@pytest.mark.parametrize(
    ("checkpointed", "pending", "backend"),
    [(False, 2, "inductor"), (False, 2, "aot_eager"), (True, 1, "aot_eager")],
    ids=["plain-inductor", "plain", "checkpointed"],
)
def test_amaxes_are_raised_in_a_compiled_forward_and_backward(checkpointed, pending, backend, assert_same_bits) -> None:
    """Two passes are accumulated, forward and backward in turn, or (`pending` 2) both forward before both backward.

    Checkpointed and compiled, the latter is what torch 2.13 refuses: it would recompute from amaxes that have changed.
    """

    def trace(*, compiled: bool) -> list[torch.Tensor]:
        model = Model(checkpointed=checkpointed)
        run: Any = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        outputs: list[torch.Tensor] = []
        for factors in ((1, 3),) if pending == 2 else ((1,), (3,)):
            outputs += [run(drawn((48, 32), torch.float32, special=False) * factor) for factor in factors]
            for output in outputs[-len(factors) :]:
                output.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [*outputs, *gradients, *model.buffers()]

    torch._dynamo.reset()
    expected = trace(compiled=False)
    assert len(expected) == 2 + 2 + 6 and all(amax > 0 for amax in expected[-6:])
    for found, wanted in zip(trace(compiled=True), expected, strict=True):
        assert_same_bits(found, wanted)


# Bad input and missing parts.


def bad_calls(device: str) -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    x, one = torch.zeros(4, 6, device=device), torch.ones(1, 1, device=device)
    elsewhere = "meta" if device == "cpu" else "cpu"
    return {
        "a double": (
            lambda: fused.row_amax(x.double()),
            OperandError,
            "row_amax: x must be float32.*got torch.float64",
        ),
        "a vector": (
            lambda: fused.cast_rows(x[0], E4M3, False, 1e-12),
            OperandError,
            "cast_rows: x must have 2 dimensions",
        ),
        "a stack": (
            lambda: fused.cast_blocks(x[None], E4M3, *[True] * 4, 1e-12),
            OperandError,
            "cast_blocks: x must have 2 dimensions",
        ),
        "a format": (lambda: fused.cast_rows(x, "float16", False, 1e-12), SpecError, "cast_rows: format must be"),
        "no format": (lambda: fused.cast_pair_given(x, "fp8", one, True, False), SpecError, "unknown format 'fp8'"),
        "a format of pairs": (
            lambda: fused.cast_pair(x, "float32", one, None, False, 1e-12),
            SpecError,
            "cast_pair: format must be",
        ),
        "a format of blocks": (
            lambda: fused.cast_blocks(x, "float32", True, True, False, False, 1e-12),
            SpecError,
            "cast_blocks: format must be",
        ),
        "a format of scales": (
            lambda: fused.scales(one, "float16", False, 1e-12, 0),
            SpecError,
            "scales: format must be",
        ),
        "a floor": (lambda: fused.cast_rows(x, E4M3, False, 0.0), SpecError, "amax_floor must be in"),
        "a floor of pairs": (
            lambda: fused.cast_pair(x, E4M3, one, None, False, 1.0),
            SpecError,
            "amax_floor must be in.*got 1.0",
        ),
        "a floor of blocks": (
            lambda: fused.cast_blocks(x, E4M3, True, True, False, False, -1.0),
            SpecError,
            "amax_floor must be in.*got -1.0",
        ),
        "a floor of scales": (
            lambda: fused.scales(one, E4M3, False, float("nan"), 0),
            SpecError,
            "amax_floor must be in.*got nan",
        ),
        "a margin": (
            lambda: fused.scales(one, E4M3, False, 1e-12, 7),
            SpecError,
            r"scales: margin must be in 0\.\.6; got 7",
        ),
        "amaxes of rows": (
            lambda: fused.cast_pair(x, E4M3, None, x[:, :1], False, 1e-12),
            OperandError,
            r"cast_pair: col_amax must be .* one element, of shape \[1, any number\], \[6, 1\] or, for powers of two, "
            r"\[any number, 6, 1\]; got torch.float32 of shape \[4, 1\]",
        ),
        "amaxes of no tile": (
            lambda: fused.cast_pair(x, E4M3, x.new_zeros(0, 4, 1), None, True, 1e-12),
            OperandError,
            r"cast_pair: row_amax must be .*; got torch.float32 of shape \[0, 4, 1\]",
        ),
        "amaxes of tiles": (
            lambda: fused.cast_pair(x, E4M3, x[None, :, :1], None, False, 1e-12),
            OperandError,
            r"cast_pair: row_amax must be .* for powers of two, .*; got torch.float32 of shape \[1, 4, 1\]",
        ),
        "double amaxes of rows": (
            lambda: fused.cast_pair(x, E4M3, x[:, :1].double(), None, False, 1e-12),
            OperandError,
            "cast_pair: row_amax must be float32, bfloat16 or float16.*got torch.float64",
        ),
        "an amax elsewhere": (
            lambda: fused.cast_pair(x, E4M3, torch.ones(1, 1, device=elsewhere), None, False, 1e-12),
            OperandError,
            f"row_amax is on {elsewhere} and x on {device}",
        ),
        "a double scale": (
            lambda: cast_delayed(x, E4M3, one.double(), True, False, torch.zeros((), device=device)),
            OperandError,
            "cast_pair_delayed: inv_scale must be one float32; got torch.float64",
        ),
        "a scale elsewhere": (
            lambda: fused.cast_pair_given(x, E4M3, torch.ones(1, 1, device=elsewhere), True, False),
            OperandError,
            f"inv_scale is on {elsewhere} and x on {device}",
        ),
        "two amaxes": (
            lambda: cast_delayed(x, E4M3, one, True, False, torch.zeros(2, device=device)),
            OperandError,
            r"cast_pair_delayed: amax must be one float32; got torch.float32 of shape \[2\]",
        ),
        "a double amax": (
            lambda: fused.scales(one.double(), E4M3, False, 1e-12, 0),
            OperandError,
            "scales: amax must be float32, bfloat16 or float16; got torch.float64",
        ),
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", bad_calls("cpu"))
def test_bad_input_is_refused(name, device) -> None:
    """With data and without: a fake implementation checks what the operator does."""
    call, error, message = bad_calls(device)[name]
    with pytest.raises(error, match=message):
        call()


def test_a_refused_cast_does_not_touch_the_amax() -> None:
    x, one, amax = torch.zeros(4, 6), torch.ones(1, 1), torch.zeros(1)
    for bad in ((x.double(), E4M3, one), (x, "float16", one), (x, E4M3, one.double())):
        with pytest.raises((OperandError, SpecError)):
            cast_delayed(*bad, True, True, amax)
    assert amax._version == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_refused(name) -> None:
    """At the call, of any tensor, eager and compiled; not where none would be recorded."""
    operator, arguments = calls(torch.ones(4, 6))[name]
    floats = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    trained: tuple[Any, ...] = ()
    for i in reversed(floats):
        trained = (*arguments[:i], arguments[i].clone().requires_grad_(), *arguments[i + 1 :])
        with pytest.raises(UnsupportedError, match="casts are not differentiable"):
            operator(*trained)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: operator(*args), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="casts are not differentiable"):
        compiled(*trained)
    with torch.no_grad():
        assert not any(y.requires_grad for y in results(operator(*trained)))


def test_missing_triton_is_said_once(monkeypatch) -> None:
    from f8emu.torch import fused as package

    monkeypatch.setitem(sys.modules, "triton", None)
    modules = [name for name in sys.modules if name.startswith("f8emu.torch.fused.kernels")]
    for name in ("f8emu.torch.fused.plans", *modules):  # an import finds them in sys.modules
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("plans", "kernels"):  # and in their package
        monkeypatch.delattr(package, name, raising=False)
    monkeypatch.setattr(library, "has_float8_hardware", lambda device: True)
    library.launch_plans.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="Triton is not installed.*same bits.*pip install triton"):
            first = fused.row_amax(torch.ones(2, 3))
        np.testing.assert_array_equal(first.numpy(), np.ones((2, 1)))
        fused.row_amax(torch.ones(2, 3))  # a second warning would be an error here
    finally:
        library.launch_plans.cache_clear()

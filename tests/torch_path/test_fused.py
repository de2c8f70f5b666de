"""The fused casts as operators: plain torch against the verbs and the oracle, and what a compiler makes of them."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import Granularity, OperandError, SpecError, UnsupportedError
from f8emu.torch.fused import availability, delayed
from f8emu.torch.fused import operators as fused
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits, to_numpy
from tests.torch_path.fused_casts import (
    AMAXES,
    FLOATS,
    FORMATS,
    RULES,
    SPECIALS,
    by_verbs,
    calls,
    drawn,
    results,
    settings,
)

SHAPES = [(1, 1), (1, 300), (130, 70), (257, 129), (300, 1)]
E4M3 = "float8_e4m3fn"
NAMES = list(calls(torch.zeros(1, 1)))
ONE_EACH = list({operator.name: name for name, (operator, _) in calls(torch.zeros(1, 1)).items()}.values())
"""One call of each operator."""


def cast_delayed(x, fmt, inv_scale, rows, cols, amax):
    """Both codes, with the scale rule and the margin that do not matter where the state's inv_scale is set."""
    return delayed.cast_pair_delayed(x, fmt, inv_scale, rows, cols, amax, False, 1e-12, 0)[:2]


@pytest.fixture(params=["verbs", "oracle"])
def witness(request) -> Callable[..., Any]:
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


def check(call: Any, verb: Any) -> None:
    """A call gives what the verbs say, row-major but for 1x128 scales."""
    operator, args = call
    found = results(operator(*args))
    for i, (ours, theirs) in enumerate(zip(found, by_verbs(verb, operator, *args), strict=True)):
        if theirs is None:
            assert ours.shape == (0, 0)
            continue
        is_exact = ours.dtype is not torch.float32 or operator.name in AMAXES or (operator.name, i) == ("cast_rows", 2)
        assert_same_bits(ours, theirs, nan_codes=is_exact)  # only a NaN scale equals any NaN
        is_transposed = operator.name == "cast_blocks" and not args[2] and i % 2
        assert (ours.t() if is_transposed else ours).is_contiguous()
    if operator is delayed.cast_pair_delayed:
        assert_same_bits(args[5], verb("amax", args[0]), nan_codes=True)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_casts_equal_the_verbs(fmt, rule, x, witness) -> None:
    for call in calls(x, fmt, rule).values():
        check(call, witness)


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scales_of_every_amax_equal_the_verbs(fmt, rule, margin, witness) -> None:
    powers = torch.from_numpy(np.ldexp(np.float32(1), np.arange(-140, 128)))[:, None]
    others = torch.tensor([rule.amax_floor, *SPECIALS]).abs()[:, None]
    amax = torch.cat([powers, powers * 1.75, others])
    check((fused.scales, (amax, fmt.name, *settings(rule), margin)), witness)
    for dtype in FLOATS[1:]:  # as their values
        small = torch.tensor([0.0, 1e-7, 0.3, 448.0, 6e4, float("inf"), float("nan")], dtype=dtype)[:, None]
        arguments = (fmt.name, *settings(rule), margin)
        assert_all_same_bits(fused.scales(small, *arguments), fused.scales(small.float(), *arguments))


def test_a_given_amax_is_raised_and_keeps_what_is_not_finite() -> None:
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
def test_nothing_gives_nothing(shape, witness) -> None:
    x, (m, n) = torch.zeros(shape), shape
    assert_same_bits(fused.tensor_amax(x), torch.zeros(1, 1))
    for found, size in zip(fused.row_col_amax(x), shape, strict=True):
        assert_same_bits(found, torch.zeros(size, 1))
    amax = torch.full((), 2.0)
    rows, cols = cast_delayed(x, E4M3, torch.ones(1, 1), True, True, amax)
    assert (rows.shape, cols.shape, amax.item()) == ((m, n), (n, m), 2.0)
    for both in ((torch.zeros(m, 1), torch.zeros(n, 1)), (torch.zeros(1, 1), torch.zeros(1, 1))):
        rows, row_scale, cols, col_scale = fused.cast_pair(x, E4M3, *both, False, 1e-12)
        assert (rows.shape, cols.shape) == ((m, n), (n, m))
        for scale, amax in zip((row_scale, col_scale), both, strict=True):
            assert_same_bits(scale, witness("scale_from_amax", amax, E4M3).scale)
    codes, scale, found = fused.cast_rows(x, E4M3, False, 1e-12)
    assert_same_bits(scale, witness("scale_from_amax", torch.zeros(m, 1), E4M3).scale)
    assert (codes.shape, found.shape) == ((m, n), (m, 1))
    for granularity in (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128):
        square = granularity is Granularity.BLOCKWISE_128X128
        rows, row_scale, cols, col_scale = fused.cast_blocks(x, E4M3, square, True, True, False, 1e-12)
        assert (rows.shape, cols.shape) == ((m, n), (n, m))
        assert (row_scale.shape, col_scale.shape) == (granularity.scale_shape(m, n), granularity.scale_shape(n, m))


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments in memory of their own, contiguous."""
    whole = torch.contiguous_format
    return tuple(y.clone(memory_format=whole) if isinstance(y, torch.Tensor) else y for y in arguments)


def assert_same_results(found: Any, expected: Any) -> None:
    """Equal results with equal strides."""
    for ours, theirs in zip(results(found), results(expected), strict=True):
        assert_same_bits(ours, theirs, nan_codes=True)
        assert ours.stride() == theirs.stride()


def test_any_layout_of_x_gives_the_same() -> None:
    base = drawn((257, 129), torch.bfloat16)
    for view in (base.t(), base[::2, ::3], base[1:, 1:], base[:1].expand(130, 129)):
        for operator, arguments in calls(view).values():
            expected = operator(*copied(arguments))
            assert_same_results(operator(*arguments), expected)


# What a compiler makes of them.


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name) -> None:
    """Torch's own check of an operator: schema, aliasing, the fake implementation, autograd, dynamic shapes."""
    for shape in ((130, 70), (1, 300)) if name in ONE_EACH else ((130, 70),):
        operator, (x, *others) = calls(drawn(shape, torch.bfloat16, special=False))[name]
        arguments = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x, *others)  # opcheck takes no float8
        torch.library.opcheck(operator.overload, arguments)


@pytest.mark.parametrize("name", ONE_EACH)
def test_compiled_whole_and_with_any_size(name) -> None:
    operator = calls(torch.zeros(1, 1))[name][0]
    compiled = torch.compile(lambda *args: operator(*args), fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((130, 70), (257, 129)):
        eager = calls(drawn(shape, torch.bfloat16))[name][1]
        traced = copied(eager)
        assert_same_results(compiled(*traced), operator(*eager))
        for observed, expected in zip(traced, eager, strict=True):  # the amax that is raised, and what is not touched
            if isinstance(expected, torch.Tensor):
                assert_same_bits(observed, expected, nan_codes=True)


# Bad input and missing parts.


BadCalls = list[tuple[Any, tuple[Any, ...], str]]
"""Operator, arguments and message."""


def bad_calls(device: str) -> dict[type[Exception], BadCalls]:
    x, one = torch.zeros(4, 6, device=device), torch.ones(1, 1, device=device)
    elsewhere = "meta" if device == "cpu" else "cpu"
    away, state = torch.ones(1, 1, device=elsewhere), torch.zeros((), device=device)
    pair, rows, blocks = fused.cast_pair, fused.cast_rows, fused.cast_blocks
    given, scales = fused.cast_pair_given, fused.scales
    rule, column, double = (False, 1e-12), x[:, :1], one.double()
    message = (
        r"cast_pair: {}_amax must be .* one element, of shape \[1, any number\], \[{}, 1\] or, for powers of two, .*"
    )
    of_rows, of_cols = message.format("row", 4), message.format("col", 6)
    operands: BadCalls = [
        (fused.row_amax, (x.double(),), "row_amax: x must be float32.*got torch.float64"),
        (rows, (x[0], E4M3, *rule), "cast_rows: x must have 2 dimensions"),
        (blocks, (x[None], E4M3, *[True] * 4, 1e-12), "cast_blocks: x must have 2 dimensions"),
        (pair, (x, E4M3, None, column, *rule), of_cols + r"float32 of shape \[4, 1\]"),
        (pair, (x, E4M3, x.new_zeros(0, 4, 1), None, True, 1e-12), of_rows + r"float32 of shape \[0, 4, 1\]"),
        (pair, (x, E4M3, column[None], None, *rule), of_rows + r"of shape \[1, 4, 1\]"),
        (pair, (x, E4M3, column.double(), None, *rule), of_rows + "torch.float64"),
        (pair, (x, E4M3, away, None, *rule), f"row_amax is on {elsewhere} and x on {device}"),
        (cast_delayed, (x, E4M3, double, True, False, state), "delayed: inv_scale must be one float32; got"),
        (cast_delayed, (x, E4M3, one, True, False, x[0, :2]), r"amax must be one float32; got .* of shape \[2\]"),
        (given, (x, E4M3, away, True, False), f"inv_scale is on {elsewhere} and x on {device}"),
        (scales, (double, E4M3, *rule, 0), "scales: amax must be float32.*got torch.float64"),
        (fused.cast_columns, (x, E4M3, one), r"cast_columns: inv_scale must be float32 of shape \[6, 1\]"),
    ]
    specs: BadCalls = [
        (rows, (x, "float16", *rule), "cast_rows: format must be"),
        (given, (x, "fp8", one, True, False), "unknown format 'fp8'"),
        (pair, (x, "float32", one, None, *rule), "cast_pair: format must be"),
        (blocks, (x, "float32", True, True, False, *rule), "cast_blocks: format must be"),
        (scales, (one, "float16", *rule, 0), "scales: format must be"),
        (rows, (x, E4M3, False, 0.0), "amax_floor must be in"),
        (pair, (x, E4M3, one, None, False, 1.0), "amax_floor must be in.*got 1.0"),
        (blocks, (x, E4M3, *[True] * 3, False, -1.0), "amax_floor must be in.*got -1.0"),
        (scales, (one, E4M3, False, float("nan"), 0), "amax_floor must be in.*got nan"),
        (scales, (one, E4M3, *rule, 7), r"scales: margin must be in 0\.\.6; got 7"),
    ]
    return {OperandError: operands, SpecError: specs}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_input_is_refused(device) -> None:
    """With data and without: a fake implementation checks what the operator does."""
    for error, bad in bad_calls(device).items():
        for operator, arguments, message in bad:
            with pytest.raises(error, match=message):
                operator(*arguments)


def test_a_refused_cast_does_not_touch_the_amax() -> None:
    x, one, amax = torch.zeros(4, 6), torch.ones(1, 1), torch.zeros(1)
    for bad in ((x.double(), E4M3, one), (x, "float16", one), (x, E4M3, one.double())):
        with pytest.raises((OperandError, SpecError)):
            cast_delayed(*bad, True, True, amax)
    assert amax._version == 0


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_gradient_is_refused(name) -> None:
    """At the call, of any tensor, eager and compiled; not where none would be recorded."""
    operator, arguments = calls(torch.ones(4, 6))[name]
    floats = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    trained: tuple[Any, ...] = ()
    for i in reversed(floats):
        trained = (*arguments[:i], arguments[i].clone().requires_grad_(), *arguments[i + 1 :])
        with pytest.raises(UnsupportedError, match="casts are not differentiable"):
            operator(*trained)
    compiled = torch.compile(lambda *args: operator(*args), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="casts are not differentiable"):
        compiled(*trained)
    with torch.no_grad():
        assert not any(y.requires_grad for y in results(operator(*trained)))


def test_missing_triton_is_said_once(monkeypatch) -> None:
    from f8emu.torch import fused as package

    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("plans", "block_kernels", "cast_kernels", "scale_kernels", "silu_kernels"):
        monkeypatch.delitem(sys.modules, f"f8emu.torch.fused.{name}", raising=False)  # an import finds them here
        monkeypatch.delattr(package, name, raising=False)  # and in their package
    monkeypatch.setattr(availability, "has_float8_hardware", lambda device: True)
    availability.launch_plans.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="Triton is not installed.*same bits.*pip install triton"):
            first = fused.row_amax(torch.ones(2, 3))
        np.testing.assert_array_equal(first.numpy(), np.ones((2, 1)))
        fused.row_amax(torch.ones(2, 3))  # a second warning would be an error here
    finally:
        availability.launch_plans.cache_clear()

"""The GEMMs and casts as a compiler sees them: operators, fake tensors, autograd, torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import f8emu.torch as f8
from f8emu.spec import E4M3FN, DelayedScaling, Granularity, Overflow, ScaleRule, UnsupportedError
from f8emu.torch.gemm import operators as gemm_operators
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.layers import draw_codes

BF16 = torch.bfloat16


def gemm_arguments() -> dict[str, tuple[Any, tuple]]:
    """Operator name -> operator and the arguments of one call."""
    a, b = draw_codes(32, 64, seed=1), draw_codes(48, 64, seed=2).t()
    scales = torch.rand(32, 1), torch.rand(1, 48)
    offs = torch.tensor([16, 32], dtype=torch.int32)
    high = torch.randn(32, 64).bfloat16()
    bias = torch.zeros(48, dtype=BF16)
    return {
        "run_scaled_mm": (
            gemm_operators.run_scaled_mm,
            (a, b, *scales, None, BF16, True, "emulated", "rowwise", "rowwise", 1),
        ),
        "run_scaled_mm, all given": (
            gemm_operators.run_scaled_mm,
            (a, b, *scales, bias, BF16, False, "emulated", "rowwise", "rowwise", 2),
        ),
        "scaled_grouped_mm": (
            gemm_operators.scaled_grouped_mm,
            (a, draw_codes(2, 48, 64, seed=3).mT, torch.rand(32), torch.rand(2, 48), offs, BF16, False, "auto"),
        ),
        "scaled_grouped_mm, a batch": (
            gemm_operators.scaled_grouped_mm,
            (
                draw_codes(2, 32, 64, seed=4),
                draw_codes(2, 48, 64, seed=3).mT,
                *(torch.rand(2, n) for n in (32, 48)),
                None,
                BF16,
                False,
                "auto",
            ),
        ),
        "run_mm": (gemm_operators.run_mm, (high, high.t(), torch.float32, "emulated", 1)),
    }


@pytest.mark.parametrize("name", gemm_arguments())
def test_opcheck(name, monkeypatch) -> None:
    """Torch's own check of an operator: no mutation, no aliasing, the fake implementation and autograd fit.

    It compares operands before and after by allclose, which torch 2.13 lacks for float8 on the CPU.
    """
    allclose = torch.allclose

    def compare(x: torch.Tensor, y: torch.Tensor, **options: object) -> bool:
        if x.dtype.itemsize == 1:
            return torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        return allclose(x, y, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "allclose", compare)
    operator, arguments = gemm_arguments()[name]
    torch.library.opcheck(operator.overload, arguments)


def test_a_backward_through_a_gemm_is_refused() -> None:
    """At the call, of a scale as of a bias, eager and compiled; not where no gradient would be recorded."""
    a, b = draw_codes(32, 64, seed=1), draw_codes(48, 64, seed=2).t()
    one, bias = torch.ones(()), torch.zeros(48, dtype=BF16)

    def multiply(scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return f8.scaled_mm(a, b, scale, one, bias=bias, out_dtype=BF16)

    compiled = torch.compile(multiply, backend="aot_eager", fullgraph=True)
    for scale, addend in ((one.clone().requires_grad_(), bias), (one, bias.clone().requires_grad_())):
        with pytest.raises(UnsupportedError, match=r"scaled_mm: .*not differentiable.*linear layer"):
            multiply(scale, addend)
        with pytest.raises(RuntimeError, match="not differentiable"):
            compiled(scale, addend)
        with torch.no_grad():
            assert not multiply(scale, addend).requires_grad


def quantize_and_multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """All verbs of a rowwise forward."""
    rule = ScaleRule(power_of_two=False)
    scales_x = f8.scale_from_amax(f8.amax(x, Granularity.ROWWISE), E4M3FN, rule)
    scales_w = f8.scale_from_amax(f8.amax(w, Granularity.ROWWISE), E4M3FN, rule)
    a = f8.quantize(x, scales_x.inv_scale, E4M3FN, Granularity.ROWWISE)
    b = f8.quantize(w, scales_w.inv_scale, E4M3FN, Granularity.ROWWISE)
    return f8.scaled_mm(a, b.t(), scales_x.scale, scales_w.scale.t(), bias=bias, out_dtype=x.dtype)


OVERFLOWS, GRANULARITIES = tuple(Overflow), tuple(Granularity)  # torch 2.11 does not trace iteration over an enum


def cast_everything(x: torch.Tensor) -> list[torch.Tensor]:
    """The elementwise verbs, all formats and policies."""
    out = []
    for format in ("float8_e4m3fn", "float8_e5m2"):
        for overflow in OVERFLOWS:
            out.append(f8.cast(x, format, overflow=overflow).view(torch.uint8))
        out.append(f8.decode(f8.cast(x, format)).view(torch.int32))
    for granularity in GRANULARITIES:
        amax = f8.amax(x, granularity)
        for rule in (ScaleRule(), ScaleRule(power_of_two=True)):
            scales = f8.scale_from_amax(amax, E4M3FN, rule)
            out += [amax.view(torch.int32), scales.inv_scale.view(torch.int32), scales.scale.view(torch.int32)]
        codes = f8.quantize(x, scales.inv_scale, E4M3FN, granularity)
        out += [codes.view(torch.uint8), f8.dequantize(codes, scales.scale, granularity).view(torch.int32)]
    delayed = DelayedScaling(history_length=4)
    state = f8.update_delayed_state(f8.initial_delayed_state(delayed), f8.amax(x), E4M3FN, ScaleRule(), delayed)
    return [*out, state.amax_history.view(torch.int32), state.inv_scale.view(torch.int32)]


def test_compiled_casts_and_scales_equal_eager() -> None:
    """All bfloat16 numbers, and tails of blocks: torch 2.13 compiles a scale that is repeated and cut wrongly there."""
    x = torch.randn(272, 400, generator=torch.Generator().manual_seed(4)).bfloat16()
    x[:256, :256] = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(BF16).view(256, 256)
    compiled = torch.compile(cast_everything, backend="inductor", fullgraph=True)
    for observed, expected in zip(compiled(x), cast_everything(x), strict=True):
        is_nan = expected > 0x7F800000 if expected.dtype is torch.int32 else torch.zeros((), dtype=torch.bool)
        same_kind = (observed & 0x7FFFFFFF) > 0x7F800000 if observed.dtype is torch.int32 else is_nan
        assert bool(((observed == expected) | (is_nan & same_kind)).all())


def test_a_dynamic_number_of_rows_compiles_once() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(quantize_and_multiply, backend=backend, fullgraph=True, dynamic=True)
    w = torch.randn(48, 64)
    for rows in (16, 32, 80):
        x = torch.randn(rows, 64)
        assert_same_bits(compiled(x, w), quantize_and_multiply(x, w))
    assert len(seen) == 1


def test_bad_input_of_compiled_code_names_the_remedy() -> None:
    """The compiler wraps the error and keeps its text."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return f8.scaled_mm(x, x.t(), torch.ones(()), torch.ones(()), out_dtype=BF16)

    with pytest.raises(RuntimeError, match=r"multiples of 16; got K = 24.*pad the operands"):
        torch.compile(multiply, backend="eager", fullgraph=True)(draw_codes(16, 24, seed=1))

"""The suite tests itself where people train: bugs planted into f8emu.torch, each caught at the stage of layers.

Each says which part of a layer must be the first that differs, so that a report leads to the mistake. Without a bug
the same cases are equal: tests/torch_path/test_layers.py.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from f8emu.conformance import Status, load_subject, verify
from f8emu.conformance.layers.layer import LayerCase, LayerMode
from f8emu.conformance.layers.layer_cases import COMPILED, ODD, REGULAR, SITUATIONS, layer_cases
from f8emu.conformance.run import stages
from f8emu.report.verify import mismatch_lines
from f8emu.spec import BFLOAT16, DELAYED, FLOAT32, RECIPES, TENSORWISE, Recipe

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from f8emu.torch.delayed import update as delayed_update  # noqa: E402
from f8emu.torch.gemm import emulation, hardware  # noqa: E402
from f8emu.torch.layer import casts, float8_linear, matmul, operands  # noqa: E402
from f8emu.torch.layer import gemm as padded_gemm  # noqa: E402
from f8emu.torch.layer.casts import LastInput  # noqa: E402

Planted = Iterator[Any]
"""Patches."""


def patched_gemm(bug: Callable[..., Any]) -> Planted:
    """`bug(gemm, a, b, spec, dtype, engine)` instead of the layer's gemm."""
    gemm = matmul.gemm
    yield patch.object(matmul, "gemm", lambda *args: bug(gemm, *args))


def patched_casts(bug: Callable[..., Any]) -> Planted:
    """`bug(cast_both, *args)` instead of every cast."""
    cast_both = operands.cast_both
    for module in (operands, casts):
        yield patch.object(module, "cast_both", lambda *args, **options: bug(cast_both, *args, **options))


def is_grad_weight(spec: Any) -> bool:
    return any(spec is recipe.grad_weight for recipe in RECIPES.values())


def is_grad_input(spec: Any) -> bool:
    return any(spec is recipe.grad_input for recipe in RECIPES.values())


def zeroed(cast_both: Any, *args: Any, **options: Any) -> Any:
    return tuple(
        x and x._replace(codes=torch.zeros_like(x.codes.view(torch.uint8)).view(x.codes.dtype))
        for x in cast_both(*args, **options)
    )


def casts_zeroed() -> Planted:
    yield from patched_casts(zeroed)


def grad_weight_tripled() -> Planted:
    yield from patched_gemm(
        lambda gemm, a, b, spec, *rest: gemm(a, b, spec, *rest) * (3 if is_grad_weight(spec) else 1)
    )


def scales_swapped() -> Planted:
    yield from patched_gemm(lambda gemm, a, b, *rest: gemm(a._replace(scale=b.scale), b._replace(scale=a.scale), *rest))


def stale_input() -> Planted:
    """The operands of the first input serve all later ones."""
    kept: dict[Any, Any] = {}
    yield patch.object(LastInput, "keep", lambda self, input, key, x: kept.setdefault(key, x))
    yield patch.object(LastInput, "find", lambda self, input, key: kept.get(key))


def tail_dropped() -> Planted:
    def whole(x: Any) -> Any:
        return x._replace(codes=x.codes[:, : x.codes.shape[1] // 16 * 16])

    yield from patched_gemm(lambda gemm, a, b, *rest: gemm(whole(a), whole(b), *rest))


def padding_not_zero() -> Planted:
    """K is padded with what a buffer happens to hold: zeros in one operand hide it, so the products stay right."""
    padded = padded_gemm._padded

    def dirty(codes: Any, rows: int, cols: int) -> Any:
        found = padded(codes, rows, cols)
        found.view(torch.uint8)[:, codes.shape[1] :] = 0x38 if codes.shape[0] == ODD[0] else 0
        return found

    yield patch.object(padded_gemm, "_padded", dirty)


def other_accumulation() -> Planted:
    def flipped(gemm: Any, a: Any, b: Any, spec: Any, *rest: Any) -> Any:
        other = replace(spec, use_fast_accum=not spec.use_fast_accum) if is_grad_input(spec) else spec
        return gemm(a, b, other, *rest)

    yield from patched_gemm(flipped)


def engine_ignores_fast_accum() -> Planted:
    for module in (emulation, hardware):
        run = module.scaled_mm
        # The description that the engine got, the last argument, holds the option too.
        yield patch.object(module, "scaled_mm", lambda *a, _run=run: _run(*a[:5], replace(a[5], use_fast_accum=True)))


def bias_twice() -> Planted:
    add_bias = float8_linear.add_bias
    yield patch.object(float8_linear, "add_bias", lambda output, bias: add_bias(add_bias(output, bias), bias))


def gradient_rounded() -> Planted:
    def rounded(gemm: Any, a: Any, b: Any, spec: Any, dtype: Any, *options: Any) -> Any:
        product = gemm(a, b, spec, dtype, *options)
        return product.bfloat16().to(dtype) if is_grad_weight(spec) else product

    yield from patched_gemm(rounded)


def weight_rounded() -> Planted:
    """A float32 weight is brought to the dtype of the input before it is cast."""
    cast_rows_first = casts.cast_rows_first
    yield patch.object(casts, "cast_rows_first", lambda x, *rest: cast_rows_first(x.bfloat16(), *rest))


def amax_not_raised() -> Planted:
    cast_delayed = operands.cast_delayed

    def lost(x: Any, rows: Any, cols: Any, state: Any, rule: Any) -> Any:
        return cast_delayed(x, rows, cols, state._replace(amax=state.amax.clone()), rule)

    yield patch.object(casts, "cast_delayed", lost)


def update_skipped() -> Planted:
    yield patch.object(delayed_update, "update_delayed", lambda *_: None)


class Bug(NamedTuple):
    """What is planted, the case that must show it, and the first part that must differ."""

    plant: Callable[[], Planted]
    fields: dict[str, Any]
    first: str
    recipe: Recipe = TENSORWISE
    mode: LayerMode = LayerMode.EAGER


BATCH, AUTOCAST, LONG = (SITUATIONS[name] for name in ("batch", "autocast", "long"))
WIDE = {"shape": REGULAR, "dtype": FLOAT32, "weight_dtype": FLOAT32}
BUGS = {
    "casts zeroed": Bug(casts_zeroed, BATCH, "output.a.codes"),
    "grad_weight tripled": Bug(grad_weight_tripled, BATCH, "weight.grad"),
    "scales swapped": Bug(scales_swapped, BATCH, "output.a.scale"),
    "stale shared input": Bug(stale_input, LONG, "step 1 pass 2 output.a.scale"),
    "padded tail dropped": Bug(tail_dropped, BATCH, "output.a.codes"),
    "padding not zero": Bug(padding_not_zero, BATCH, "output.a.padding"),
    "other accumulation in grad_input": Bug(other_accumulation, WIDE, "grad_input.product"),
    "fast accumulation everywhere": Bug(engine_ignores_fast_accum, WIDE, "grad_input.product"),
    "bias twice": Bug(bias_twice, BATCH, "result"),
    "grad_weight rounded to bfloat16": Bug(gradient_rounded, WIDE, "weight.grad"),
    "weight rounded before its cast": Bug(weight_rounded, AUTOCAST, "output.b.scale"),
    "delayed amax not raised": Bug(amax_not_raised, LONG, "step 1 pass 2 output.a.scale", DELAYED),
    "delayed update skipped": Bug(update_skipped, LONG, "step 1 pass 2 output.a.scale", DELAYED),
    "casts zeroed, compiled": Bug(casts_zeroed, COMPILED[1], "output.a.codes", mode=LayerMode.COMPILED),
    "grad_weight tripled, compiled": Bug(grad_weight_tripled, COMPILED[1], "weight.grad", mode=LayerMode.COMPILED),
}


def chosen(bug: Bug) -> LayerCase:
    """The one case of the table that the bug is shown to."""
    fields = {"shape": ODD, "dtype": BFLOAT16, "weight_dtype": BFLOAT16} | bug.fields
    (case, *_) = (
        case
        for case in layer_cases()
        if case.recipe is bug.recipe
        and case.mode is bug.mode
        and all(getattr(case, name) == value for name, value in fields.items())
    )
    return case


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_training_path_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    case = chosen(bug)
    monkeypatch.setattr(stages, "layer_cases", lambda full_size: (case,))
    torch.compiler.reset()
    try:
        with ExitStack() as stack:
            for planted in bug.plant():
                stack.enter_context(planted)
            result = verify([load_subject("torch")], stages=["layers"])
    finally:
        torch.compiler.reset()
    (stage,) = result.subjects[0].stages
    assert stage.status is Status.DIFFERENT
    assert list(stage.first_differences) == [bug.first]
    line = mismatch_lines(result.subjects[0], 1)[1]
    assert line.startswith(f"{bug.recipe.name} ") and f" {bug.mode.value}: {bug.first}" in line
    assert "expected" in line

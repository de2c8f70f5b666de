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

from f8emu.torch.casts import operand  # noqa: E402
from f8emu.torch.casts.shared_input import LastInput  # noqa: E402
from f8emu.torch.gemm import emulation, hardware, operators  # noqa: E402
from f8emu.torch.layer import (  # noqa: E402
    casts,
    delayed_update,
    float8_linear,
    matmul,
)

Planted = Callable[[], Iterator[Any]]
"""Gives patches."""


def gemm_with(bug: Callable[..., Any]) -> Planted:
    """`bug(gemm, a, b, spec, dtype, engine)` instead of the layer's gemm."""
    gemm = matmul.gemm
    return lambda: iter([patch.object(matmul, "gemm", lambda *args: bug(gemm, *args))])


def with_attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> Planted:
    """What `make` makes of an attribute."""
    return lambda: iter([patch.object(owner, name, make(getattr(owner, name)))])


def is_grad(name: str, spec: Any) -> bool:
    return any(spec is getattr(recipe, f"grad_{name}") for recipe in RECIPES.values())


def casts_zeroed() -> Iterator[Any]:
    cast_matrix = operand.cast_matrix

    def zeroed(*args: Any, **options: Any) -> Any:
        return tuple(
            x and x._replace(codes=torch.zeros_like(x.codes.view(torch.uint8)).view(x.codes.dtype))
            for x in cast_matrix(*args, **options)
        )

    for module in (operand, casts):
        yield patch.object(module, "cast_matrix", zeroed)


def stale_input() -> Iterator[Any]:
    """The operands of the first input serve all later ones."""
    kept: dict[Any, Any] = {}
    yield patch.object(LastInput, "keep", lambda self, input, key, x: kept.setdefault(key, x))
    yield patch.object(LastInput, "find", lambda self, input, key: kept.get(key))


def whole(x: Any) -> Any:
    """Without the tail of K."""
    return x._replace(codes=x.codes[:, : x.codes.shape[1] // 16 * 16])


def dirty(padded: Any) -> Any:
    """K is padded with what a buffer happens to hold: zeros in one operand hide it, so the products stay right."""

    def call(codes: Any, rows: int, cols: int) -> Any:
        spoilt = padded(codes, rows, cols)
        spoilt.view(torch.uint8)[:, codes.shape[1] :] = 0x38 if codes.shape[0] == ODD[0] else 0
        return spoilt

    return call


def flipped(spec: Any) -> Any:
    return replace(spec, use_fast_accum=not spec.use_fast_accum) if is_grad("input", spec) else spec


def engine_ignores_fast_accum() -> Iterator[Any]:
    for module in (emulation, hardware):
        run = module.scaled_mm
        # The description that the engine got, the last argument, holds the option too.
        yield patch.object(module, "scaled_mm", lambda *a, _run=run: _run(*a[:5], replace(a[5], use_fast_accum=True)))


def rounded(gemm: Any, a: Any, b: Any, spec: Any, dtype: Any, *options: Any) -> Any:
    product = gemm(a, b, spec, dtype, *options)
    return product.bfloat16().to(dtype) if is_grad("weight", spec) else product


def lost(cast_delayed: Any) -> Any:
    """The amax is not raised."""

    def cast(x: Any, plan: Any, state: Any, **options: Any) -> Any:
        return cast_delayed(x, plan, state._replace(amax=state.amax.clone()), **options)

    return cast


tripled = gemm_with(lambda gemm, a, b, spec, *rest: gemm(a, b, spec, *rest) * (3 if is_grad("weight", spec) else 1))
swapped = gemm_with(lambda gemm, a, b, *rest: gemm(a._replace(scale=b.scale), b._replace(scale=a.scale), *rest))
tail_dropped = gemm_with(lambda gemm, a, b, *rest: gemm(whole(a), whole(b), *rest))
other_accumulation = gemm_with(lambda gemm, a, b, spec, *rest: gemm(a, b, flipped(spec), *rest))
padding_not_zero = with_attribute(operators, "padded", dirty)
bias_twice = with_attribute(float8_linear, "add_bias", lambda add: lambda output, bias: add(add(output, bias), bias))
# A float32 weight is brought to the dtype of the input before it is cast.
weight_rounded = with_attribute(casts, "cast_rows_first", lambda cast: lambda x, *rest: cast(x.bfloat16(), *rest))
amax_not_raised = with_attribute(operand, "cast_delayed", lost)
update_skipped = with_attribute(delayed_update, "update_delayed", lambda update: lambda *_: None)


class Bug(NamedTuple):
    """What is planted, the case that must show it, and the first part that must differ."""

    plant: Planted
    fields: dict[str, Any]
    first: str
    recipe: Recipe = TENSORWISE
    mode: LayerMode = LayerMode.EAGER


BATCH, AUTOCAST, LONG = (SITUATIONS[name] for name in ("batch", "autocast", "long"))
WIDE = {"shape": REGULAR, "dtype": FLOAT32, "weight_dtype": FLOAT32}
BUGS = {
    "casts zeroed": Bug(casts_zeroed, BATCH, "output.a.codes"),
    "grad_weight tripled": Bug(tripled, BATCH, "weight.grad"),
    "scales swapped": Bug(swapped, BATCH, "output.a.scale"),
    "stale shared input": Bug(stale_input, LONG, "step 1 pass 2 output.a.scale"),
    "padded tail dropped": Bug(tail_dropped, BATCH, "output.a.codes"),
    "padding not zero": Bug(padding_not_zero, BATCH, "output.a.padding"),
    "other accumulation in grad_input": Bug(other_accumulation, WIDE, "grad_input.product"),
    "fast accumulation everywhere": Bug(engine_ignores_fast_accum, WIDE, "grad_input.product"),
    "bias twice": Bug(bias_twice, BATCH, "result"),
    "grad_weight rounded to bfloat16": Bug(gemm_with(rounded), WIDE, "weight.grad"),
    "weight rounded before its cast": Bug(weight_rounded, AUTOCAST, "output.b.scale"),
    "delayed amax not raised": Bug(amax_not_raised, LONG, "step 1 pass 2 output.a.scale", DELAYED),
    "delayed update skipped": Bug(update_skipped, LONG, "step 1 pass 2 output.a.scale", DELAYED),
    "casts zeroed, compiled": Bug(casts_zeroed, COMPILED[1], "output.a.codes", mode=LayerMode.COMPILED),
    "grad_weight tripled, compiled": Bug(tripled, COMPILED[1], "weight.grad", mode=LayerMode.COMPILED),
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

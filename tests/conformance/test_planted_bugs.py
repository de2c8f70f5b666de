"""The suite tests itself: planted bugs, one per stage and rule family, each caught at its stage with exit status 1.

A planted subject is f8ref.numpy with one verb replaced. The replacements of GEMMs are a small tensor core of floats,
`planted_gemm`, whose rules can be bent; straight, it must pass.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import f8ref.numpy as reference
from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.gemm import Family
from f8emu.conformance.cases.tables import gemm_cases
from f8emu.conformance.layers.layer import LayerCase
from f8emu.conformance.layers.layer_cases import REGULAR, layer_cases
from f8emu.conformance.layers.trace import engine_linear
from f8emu.conformance.run import stages, subject
from f8emu.conformance.run.runner import Runner
from f8emu.conformance.run.subject import Subject, load_subject
from f8emu.spec import (
    BFLOAT16,
    DelayedState,
    Format,
    Granularity,
    LinearTrace,
    Overflow,
    Recipe,
    ScaleRule,
    Scales,
)
from tests.conformance.command import few_recorded, invoke
from tests.conformance.planted_gemm import Knobs, kernel

Verb = Callable[..., Any]

# The GEMMs of `planted_gemm`, of which one rule is bent.


def bent(knobs: Knobs, *args: Any, **options: Any) -> np.ndarray:
    if options["granularity_a"].is_blockwise:  # float64 has no fma of float32 numbers
        return reference.scaled_mm(*args, **options)
    return kernel(knobs, *args, **options)


def gemm(**knobs: Any) -> dict[str, Verb]:
    return {"scaled_mm": partial(bent, Knobs(**knobs))}


def row_scale_first(*args: Any, **options: Any) -> np.ndarray:
    is_rowwise = options["granularity_a"] is Granularity.ROWWISE
    return bent(Knobs(order="(acc*sa)*sb" if is_rowwise else ""), *args, **options)


def two_roundings(*args: Any, **options: Any) -> np.ndarray:
    """In place of the fma of block scales."""
    of_a, of_b = options["granularity_a"], options["granularity_b"]
    if not of_a.is_blockwise:
        return bent(Knobs(), *args, **options)
    return kernel(Knobs(order="(p*sa)*sb" if of_a is of_b else "p*(sa*sb)"), *args, **options)


# A linear layer, put together from the verbs, of which each may have a bug.


def without_bugs(*args: Any, **options: Any) -> LinearTrace:
    return engine_linear({**vars(reference)}, *args, **options)


def layer_of(**verbs: Verb) -> dict[str, Verb]:
    """The layer made of the oracle's verbs, some of them replaced."""
    return {"linear": partial(engine_linear, {**vars(reference), **verbs})}


def always_fast(*args: Any, **options: Any) -> np.ndarray:
    fast = options["use_fast_accum"] or not options["granularity_a"].is_blockwise
    return reference.scaled_mm(*args, **options | {"use_fast_accum": fast})


def stateless(*args: Any, delayed_state: Any = None, **options: Any) -> LinearTrace:
    return without_bugs(*args, **options)


def biased(
    recipe: Recipe, input: np.ndarray, weight: np.ndarray, grad_output: np.ndarray, bias: np.ndarray | None = None,
    *, before_rounding: bool, **options: Any,
) -> LinearTrace:  # fmt: skip
    """The bias is added before the product is rounded, or is not rounded itself."""
    trace = without_bugs(recipe, input, weight, grad_output, bias, **options)
    if bias is None:
        return trace
    product = trace.output.product
    addend, dtype = bias.astype(np.float32), product.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        if before_rounding:
            wide = recipe, *(x.astype(np.float32) for x in (input, weight, grad_output))
            product, addend = without_bugs(*wide, **options).output.product, bias.astype(dtype).astype(np.float32)
        return trace._replace(result=(product.astype(np.float32) + addend).astype(dtype))


# The bugs.


def recoded(change: Callable[[np.ndarray, Format, np.ndarray], object]) -> dict[str, Verb]:
    """The oracle's cast, then `change(x, format, codes)` in place."""

    def cast(x: np.ndarray, format: Format, *, overflow: Overflow) -> np.ndarray:
        codes = codes_of(reference.cast(x, format, overflow=overflow)).copy()
        change(x, format, codes)
        return codes.view(dtype_of(format))

    return {"cast": cast}


def half_away(x: np.ndarray, format: Format, codes: np.ndarray) -> None:
    nearest = codes.view(dtype_of(format)).astype(np.float64)
    upper = np.minimum(codes & 0x7F, format.max_code - 1) + 1
    above = upper.astype(np.uint8).view(dtype_of(format)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        is_tie = np.abs(x.astype(np.float64)) * 2 == np.abs(nearest) + above
    codes[is_tie & np.isfinite(nearest)] += 1


def flushed(x: np.ndarray, format: Format, codes: np.ndarray) -> None:
    codes[(codes & 0x7F) <= format.fraction_mask] &= 0x80


def nan_to_max(x: np.ndarray, format: Format, codes: np.ndarray) -> None:
    codes[np.isnan(x)] = format.max_code


def unsigned_zero(x: np.ndarray) -> np.ndarray:
    return reference.decode(x) + np.float32(0)


def reciprocal_scale(amax: np.ndarray, format: Format, rule: ScaleRule, *, margin: int = 0) -> Scales:
    scales = reference.scale_from_amax(amax, format, rule, margin=margin)
    with np.errstate(all="ignore"):
        floored = np.maximum(amax, np.float32(rule.amax_floor))
        rough = np.float32(format.max * 2.0**-margin) * (np.float32(1) / floored)
    return Scales(scales.inv_scale if rule.power_of_two else rough, scales.scale)


def rounded_power_of_two(amax: np.ndarray, format: Format, rule: ScaleRule, *, margin: int = 0) -> Scales:
    scales = reference.scale_from_amax(amax, format, replace(rule, power_of_two=False), margin=margin)
    if not rule.power_of_two:
        return scales
    with np.errstate(all="ignore"):
        inv_scale = np.exp2(np.round(np.log2(scales.inv_scale))).astype(np.float32)
        return Scales(inv_scale, np.float32(1) / inv_scale)


def rolled_the_wrong_way(state: DelayedState, amax: np.ndarray, *rest: Any) -> DelayedState:
    right = reference.update_delayed_state(state, amax, *rest)
    history = np.roll(right.amax_history, -2)
    return right._replace(amax_history=history)


def column_major(scale: np.ndarray) -> np.ndarray:
    """Block scales read in the wrong order."""
    return np.ravel(scale).reshape(scale.shape, order="F")


def scaled_operands(
    a: np.ndarray, b: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, **options: Any
) -> np.ndarray:
    if options["granularity_a"].is_blockwise:
        return reference.scaled_mm(a, b, scale_a, scale_b, **options)
    with np.errstate(all="ignore"):
        product = (a.astype(np.float32) * scale_a) @ (b.astype(np.float32) * scale_b)
        if options["bias"] is not None:
            product = product + options["bias"].astype(np.float32)
        return product.astype(dtype_of(options["out_dtype"]))


def float32_mm(a: np.ndarray, b: np.ndarray, *, out_dtype: Format, split_k: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(dtype_of(out_dtype))


def given(name: str, change: Callable[..., tuple[Any, ...]]) -> dict[str, Verb]:
    """The oracle's verb, called with other arguments: `change(*args, **options)`."""
    return {name: lambda *args, **options: getattr(reference, name)(*change(*args, **options), **options)}


SQUARE, TENSORWISE = Granularity.BLOCKWISE_128X128, Granularity.TENSORWISE
ONE_SCALE = given(
    "quantize", lambda x, s, fmt, of: (x, s[:1, :1], fmt, TENSORWISE) if of.is_blockwise else (x, s, fmt, of)
)
GROUPS_ENDING_EARLY = given(
    "scaled_grouped_mm", lambda a, b, sa, sb, offs, **_: (a, b, sa, sb, np.append(offs[:-1] - 1, offs[-1]).astype("i4"))
)
BLOCKS_TURNED = given(
    "scaled_mm",
    lambda a, b, sa, sb, **to: (a, b, column_major(sa) if to["granularity_a"] is SQUARE else sa, sb),
)


class Bug(NamedTuple):
    stage: str
    verbs: dict[str, Verb]
    first_difference: str = ""


BUGS: dict[str, Bug] = {
    "round half away from zero": Bug("formats", recoded(half_away)),
    "subnormals flushed": Bug("formats", recoded(flushed)),
    "NaN becomes max": Bug("formats", recoded(nan_to_max)),
    "-0 loses its sign": Bug("formats", {"decode": unsigned_zero}),
    "amax drops NaN": Bug("scales", given("amax", lambda x, of: (np.where(np.isnan(x), np.zeros_like(x), x), of))),
    "scale by reciprocal": Bug("scales", {"scale_from_amax": reciprocal_scale}),
    "power of two by rounding": Bug("scales", {"scale_from_amax": rounded_power_of_two}),
    "history rolled the wrong way": Bug("scales", {"update_delayed_state": rolled_the_wrong_way}),
    "block scales of quantize column-major": Bug(
        "scales", given("quantize", lambda x, s, fmt, of: (x, column_major(s) if of is SQUARE else s, fmt, of))
    ),
    "ACC-2 products normalised": Bug("golden", gemm(normalises=True)),
    "ACC-3 floor instead of toward zero": Bug("golden", gemm(to_integer=np.floor)),
    "ACC-3 14 bits": Bug("golden", gemm(term_bits=14, sum_bits=14)),
    "CHAIN-1 fast accumulation ignored": Bug("golden", gemm(promote_fast=128)),
    "CHAIN-2 promotion every 96": Bug("golden", gemm(promote=96)),
    "CHAIN-2 promotion every 160": Bug("golden", gemm(promote=160)),
    "CHAIN-3 slices not rounded": Bug("golden", gemm(slice_multiple=32)),
    "EPI-1 scales applied before the GEMM": Bug("golden", {"scaled_mm": scaled_operands}),
    "EPI-2 row scale first": Bug("golden", {"scaled_mm": row_scale_first}),
    "EPI-2 row and column scales swapped": Bug("golden", gemm(swap_scales=True)),
    "EPI-3 bias before scales": Bug("golden", gemm(bias="first")),
    "EPI-5 two roundings instead of fma": Bug("golden", {"scaled_mm": two_roundings}),
    "EPI-5 block scales column-major": Bug("golden", BLOCKS_TURNED),
    "EPI-6 group ends off by one": Bug("golden", GROUPS_ENDING_EARLY),
    "BF16-1 float32 matmul": Bug("golden", {"mm": float32_mm}),
    "layer: amax of a rounded copy": Bug(
        "layers", layer_of(**given("amax", lambda x, of: (x.astype(dtype_of(BFLOAT16)), of))), "output.a.amax"
    ),
    "layer: scale rule ignored": Bug(
        "layers",
        layer_of(**given("scale_from_amax", lambda amax, fmt, rule, **_: (amax, fmt, ScaleRule()))),
        "output.a.inv_scale",
    ),
    "layer: delayed state ignored": Bug("layers", {"linear": stateless}, "step 2 output.a.inv_scale"),
    "layer: one scale for all blocks": Bug("layers", layer_of(**ONE_SCALE), "output.a.codes"),
    "layer: fast gradients": Bug("layers", layer_of(scaled_mm=always_fast), "grad_input.product"),
    "layer: bias added before rounding": Bug("layers", {"linear": partial(biased, before_rounding=True)}, "result"),
    "layer: bias not rounded": Bug("layers", {"linear": partial(biased, before_rounding=False)}, "result"),
}
"""Name -> what is wrong, and the first stage that must notice."""

KEPT = (0, 2, 5, 6, 10, 14, 23, 46, 50, 54, 75, 123, 129, 140, 148, 150, 158, 161, 163, 167, 168, 170, 172)
"""Recorded cases that together exercise every rule, in little time."""


@pytest.fixture(scope="module")
def golden_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "few.safetensors"
    few_recorded(path, *KEPT)
    return path


def few_layers(*, full_size: bool) -> tuple[LayerCase, ...]:
    """The small layers, and one whose sums are long enough for promotion to show."""
    long = {"tensorwise float32", "tensorwise bfloat16", "rowwise bfloat16"}
    return tuple(c for c in layer_cases() if c.shape != REGULAR or f"{c.recipe.name} {c.dtype}" in long)


ANSWERS: dict[Any, Any] = {}
"""What the oracle answers of each case: the same for every bug."""


def answered(run: Runner, begin: Callable[..., None], *args: Any) -> None:
    """A run that knows the answers of earlier ones."""
    begin(run, *args)
    run.known = ANSWERS


def run_cli(planted: Subject, golden: Path, json_path: Path, *stage_names: str) -> tuple[int, dict[str, Any], str]:
    stage_options = [word for name in stage_names for word in ("--stage", name)]
    arguments = ["verify", planted.name, "--golden", str(golden), "--json", str(json_path), *stage_options]
    arguments.append("--no-diagnose")  # tests/conformance/test_diagnosis.py has planted kernels of its own
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(subject.SUBJECTS, planted.name, lambda: planted)
        patch.setattr(stages, "layer_cases", few_layers)
        patch.setattr(Runner, "__init__", partialmethod(answered, Runner.__init__))
        status, out, _ = invoke(*arguments)
    return status, json.loads(json_path.read_text()), out


def plant(name: str, verbs: dict[str, Verb]) -> Subject:
    original = load_subject("f8ref.numpy")
    return replace(original, name=name, engine="planted", verbs={**original.verbs, **verbs})


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught_at_its_stage(name: str, golden_path: Path, tmp_path: Path) -> None:
    bug = BUGS[name]
    order = list(stages.STAGES)
    # up to the stage that must notice; the generated GEMMs come after the recorded ones and are not needed here
    until = [stage for stage in order[: order.index(bug.stage) + 1] if stage != "gemms"]
    if bug.stage == "layers":
        until.remove("golden")
    status, report, output = run_cli(plant("planted", bug.verbs), golden_path, tmp_path / "out.json", *until)

    assert status == 1
    assert not report["equal"]
    ran = {stage["stage"]: stage for stage in report["subjects"][0]["stages"]}
    assert [stage for stage in until if ran[stage]["status"] != "equal"] == [bug.stage]
    assert ran[bug.stage]["outputs_equal"] < ran[bug.stage]["outputs_total"]
    if bug.first_difference:
        assert bug.first_difference in ran[bug.stage]["first_differences"]
    assert "  expected: 0x" in output and "=> 0x" in output


@pytest.mark.parametrize(
    "verbs", [gemm(), layer_of()], ids=["the bendable tensor core, straight", "the bendable layer, straight"]
)
def test_what_carries_the_bugs_is_right(verbs: dict[str, Verb], golden_path: Path, tmp_path: Path) -> None:
    """Without a bug the same code passes: so it is the bug that the suite catches."""
    stage = ["golden", "gemms"] if "scaled_mm" in verbs else ["layers"]
    status, report, output = run_cli(plant("straight", verbs), golden_path, tmp_path / "out.json", *stage)
    assert status == 0, output
    assert report["equal"]


def test_generated_gemms_catch_what_few_recorded_ones_show(
    golden_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage that any kernel's author can run without a recording; values of scales and biases tell nothing here."""
    of_rules = [case for case in gemm_cases() if case.family in (Family.CODES, Family.SLICES)]
    assert len(of_rules) > 50
    monkeypatch.setattr(stages, "gemm_cases", lambda: of_rules)
    for name in ("ACC-2 products normalised", "CHAIN-2 promotion every 96", "CHAIN-3 slices not rounded"):
        status, report, _ = run_cli(plant("planted", BUGS[name].verbs), golden_path, tmp_path / "out.json", "gemms")
        assert status == 1, name
        assert report["subjects"][0]["stages"][0]["status"] == "different", name

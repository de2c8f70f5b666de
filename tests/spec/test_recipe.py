"""Named recipes against torchao's table, impossible combinations, content hashes and explanations."""

import dataclasses
import pickle
import re
from collections.abc import Callable

import pytest

from f8emu.spec.errors import SpecError
from f8emu.spec.formats import E4M3FN, E5M2, E8M0FNU, FLOAT16
from f8emu.spec.gemm import GEMM_NAMES, HIGH_PRECISION_CAST, OPERANDS, Cast, Gemm
from f8emu.spec.recipe import (
    BLOCKWISE,
    DELAYED,
    RECIPE_ALIASES,
    RECIPES,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    Recipe,
    recipe_by_name,
)
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, Granularity, ScaleRule

SQUARE = Granularity.BLOCKWISE_128X128
VECTOR = Granularity.BLOCKWISE_1X128

# Casts of a and b, `granularity/format`; "bf16" is an operand kept in high precision. The first three recipes are from
# torchao 0.19: `Float8LinearConfig.from_recipe_name` (ten = tensorwise, axs = axiswise) and its default target dtypes.
CASTS = {
    "tensorwise": {
        "output": ("ten/e4m3fn", "ten/e4m3fn"),
        "grad_input": ("ten/e5m2", "ten/e4m3fn"),
        "grad_weight": ("ten/e5m2", "ten/e4m3fn"),
    },
    "rowwise": {
        "output": ("axs/e4m3fn", "axs/e4m3fn"),
        "grad_input": ("axs/e4m3fn", "axs/e4m3fn"),
        "grad_weight": ("axs/e4m3fn", "axs/e4m3fn"),
    },
    "rowwise_with_gw_hp": {
        "output": ("axs/e4m3fn", "axs/e4m3fn"),
        "grad_input": ("axs/e4m3fn", "ten/e4m3fn"),
        "grad_weight": ("bf16", "bf16"),
    },
    "delayed": {
        "output": ("ten/e4m3fn", "ten/e4m3fn"),
        "grad_input": ("ten/e5m2", "ten/e4m3fn"),
        "grad_weight": ("ten/e5m2", "ten/e4m3fn"),
    },
    "blockwise": {
        "output": ("1x128/e4m3fn", "128x128/e4m3fn"),
        "grad_input": ("1x128/e4m3fn", "128x128/e4m3fn"),
        "grad_weight": ("1x128/e4m3fn", "1x128/e4m3fn"),
    },
}
ABBREVIATIONS = {Granularity.TENSORWISE: "ten", Granularity.ROWWISE: "axs", VECTOR: "1x128", SQUARE: "128x128"}
# recipe -> fast accumulation of output, grad_input, grad_weight (torchao: output only); power-of-two scales.
FAST_AND_POWER_OF_TWO = {
    "tensorwise": ((True, False, False), False),
    "rowwise": ((True, False, False), True),
    "rowwise_with_gw_hp": ((True, False, False), True),
    "delayed": ((True, False, False), False),
    "blockwise": ((False, False, False), False),
}
HASHES = {
    "tensorwise": "7b2408b92d5b8c7cb25178174e4744ebd00d181171d227e0733e51e4f50fb8a0",
    "rowwise": "2e879072581ddcc96a6ce25c2fd3c6c6668fbc96213c3cd4afd8d00b8dd50bcd",
    "rowwise_with_gw_hp": "27d6c3e1fb002de73cc72e55efab0b067a1e65ccb64fff1b490bfd23ebfc9445",
    "delayed": "0aedd2334dbb44a29269fb047e8dee0017c9e1d58410c4a95ef850be9392e241",
    "blockwise": "c0ec3af7adec30b1da9c8941fef54807f13bdc0b105ce9bb2cedc9c35495d687",
}


def short(cast: Cast) -> str:
    if cast.format is None:
        return "bf16"
    return f"{ABBREVIATIONS[cast.granularity]}/{cast.format.name.removeprefix('float8_')}"


def test_the_named_recipes_are_those_of_the_table() -> None:
    assert [recipe.name for recipe in RECIPES.values()] == list(RECIPES) == list(CASTS) == list(FAST_AND_POWER_OF_TWO)
    for name, recipe in RECIPES.items():
        fast, power_of_two = FAST_AND_POWER_OF_TWO[name]
        assert {key: (short(gemm.a), short(gemm.b)) for key, gemm in recipe.gemms.items()} == CASTS[name]
        assert tuple(gemm.use_fast_accum for gemm in recipe.gemms.values()) == fast
        assert recipe.scale_rule == ScaleRule(power_of_two=power_of_two, amax_floor=1e-12)
        expected = DelayedScaling(history_length=16, reduction=AmaxHistoryReduction.MAX, margin=0)
        assert recipe.delayed == (expected if name == "delayed" else None)


def test_gemms_and_their_operands() -> None:
    assert GEMM_NAMES == ("output", "grad_input", "grad_weight")
    assert OPERANDS == {
        "output": ("input", "weight"),
        "grad_input": ("grad_output", "weight"),
        "grad_weight": ("grad_output", "input"),
    }
    assert tuple(TENSORWISE.gemms) == GEMM_NAMES


def test_casts_name_the_gemm_and_the_tensor() -> None:
    assert [(gemm, tensor) for gemm, tensor, _ in TENSORWISE.casts()] == [
        ("output", "input"),
        ("output", "weight"),
        ("grad_input", "grad_output"),
        ("grad_input", "weight"),
        ("grad_weight", "grad_output"),
        ("grad_weight", "input"),
    ]
    assert list(ROWWISE_WITH_GW_HP.casts("weight")) == [
        ("output", "weight", ROWWISE_WITH_GW_HP.output.b),
        ("grad_input", "weight", ROWWISE_WITH_GW_HP.grad_input.b),
    ]


def test_recipes_are_found_by_name_and_by_older_names() -> None:
    assert all(recipe_by_name(name) is recipe for name, recipe in RECIPES.items())
    older = {"all_tensorwise": TENSORWISE, "all_axiswise": ROWWISE, "lw_axiswise_with_gw_hp": ROWWISE_WITH_GW_HP}
    assert {name: recipe_by_name(name) for name in RECIPE_ALIASES} == older


@pytest.mark.parametrize("name", ["rowise", "TENSORWISE", "", "axiswise"])
def test_unknown_recipe_lists_the_known(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        recipe_by_name(name)
    assert str(caught.value) == (
        f"recipe_by_name: unknown recipe {name!r}; known recipes: tensorwise, rowwise, rowwise_with_gw_hp, delayed, "
        "blockwise; older names: all_tensorwise (= tensorwise), all_axiswise (= rowwise), "
        "lw_axiswise_with_gw_hp (= rowwise_with_gw_hp)"
    )


def e4m3(granularity: Granularity = Granularity.TENSORWISE) -> Cast:
    return Cast(format=E4M3FN, granularity=granularity)


IMPOSSIBLE: dict[str, tuple[Callable[[], object], str]] = {
    "float16 operand": (
        lambda: Cast(format=FLOAT16),
        "Cast: format must be the Format float8_e4m3fn or float8_e5m2 or float8_e4m3fnuz or float8_e5m2fnuz, "
        "or None for high precision; "
        "got the Format float16",
    ),
    "E8M0 operand": (lambda: Cast(format=E8M0FNU), "got the Format float8_e8m0fnu"),
    "name in place of a format": (
        lambda: Cast(format="float8_e4m3fn"),  # type: ignore[arg-type]
        "got the str float8_e4m3fn",
    ),
    "high precision with scales": (
        lambda: Cast(format=None, granularity=Granularity.ROWWISE),
        "Cast: a high precision operand has no scales; got granularity rowwise. "
        "Leave the granularity out, or give a float8 format",
    ),
    "float8 beside high precision": (
        lambda: Gemm(a=e4m3(), b=HIGH_PRECISION_CAST),
        "Gemm: both operands must be float8 or both high precision; got float8_e4m3fn tensorwise and bfloat16. "
        "No matrix unit multiplies the two kinds; set format=None for both, or for neither",
    ),
    "high precision beside float8": (
        lambda: Gemm(a=HIGH_PRECISION_CAST, b=e4m3()),
        "got bfloat16 and float8_e4m3fn tensorwise",
    ),
    "E5M2 x E5M2": (
        lambda: Gemm(a=Cast(format=E5M2), b=Cast(format=E5M2)),
        "Gemm: Hopper multiplies float8_e4m3fn x float8_e4m3fn, float8_e5m2 x float8_e4m3fn, "
        "float8_e4m3fn x float8_e5m2; got float8_e5m2 x float8_e5m2; cast to one of these",
    ),
    "fast accumulation in high precision": (
        lambda: Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST, use_fast_accum=True),
        "Gemm: use_fast_accum needs float8 operands; a high precision GEMM has no such mode",
    ),
    "tensorwise beside blocks": (
        lambda: Gemm(a=e4m3(), b=e4m3(SQUARE)),
        "Gemm: Hopper takes scales tensorwise x tensorwise, rowwise x rowwise, blockwise_1x128 x blockwise_1x128, "
        "blockwise_1x128 x blockwise_128x128, blockwise_128x128 x blockwise_1x128; "
        "got tensorwise x blockwise_128x128; to use a tensorwise scale beside rowwise ones, repeat it for every row",
    ),
    "rows beside blocks": (lambda: Gemm(a=e4m3(VECTOR), b=e4m3(Granularity.ROWWISE)), "got blockwise_1x128 x rowwise"),
    "two squares": (lambda: Gemm(a=e4m3(SQUARE), b=e4m3(SQUARE)), "got blockwise_128x128 x blockwise_128x128"),
    "fast accumulation of blocks": (
        lambda: Gemm(a=e4m3(VECTOR), b=e4m3(SQUARE), use_fast_accum=True),
        "Gemm: Hopper has no fast accumulation beside block scales; pass use_fast_accum=False",
    ),
    "E5M2 blocks": (
        lambda: Gemm(a=Cast(format=E5M2, granularity=VECTOR), b=e4m3(SQUARE)),
        "Gemm: Hopper takes block scales of float8_e4m3fn x float8_e4m3fn; got float8_e5m2 x float8_e4m3fn; "
        "cast to one of these, or scale by row",
    ),
    "beside E5M2 blocks": (
        lambda: Gemm(a=e4m3(VECTOR), b=Cast(format=E5M2, granularity=VECTOR)),
        "Gemm: Hopper takes block scales of float8_e4m3fn x float8_e4m3fn; got float8_e4m3fn x float8_e5m2",
    ),
    "one tensor in two formats": (
        lambda: dataclasses.replace(TENSORWISE, output=Gemm(a=Cast(format=E5M2), b=e4m3())),
        "Recipe 'tensorwise': input is cast to float8_e4m3fn and float8_e5m2; "
        "one tensor has one float8 format in all its GEMMs",
    ),
    "delayed rows": (
        lambda: dataclasses.replace(ROWWISE, delayed=DelayedScaling()),
        "Recipe 'rowwise': delayed scaling keeps one amax a tensor, so every cast of one must be tensorwise; "
        "input of output is rowwise; leave input out of delayed.tensors",
    ),
    "delayed blocks": (
        lambda: dataclasses.replace(BLOCKWISE, delayed=DelayedScaling(), output=ROWWISE_WITH_GW_HP.grad_weight),
        "every cast of one must be tensorwise; grad_output of grad_input is blockwise_1x128",
    ),
    "no such delayed tensor": (
        lambda: DelayedScaling(tensors=("weight", "input")),
        "tensors must be some of input, weight, grad_output, in this order; got ('weight', 'input')",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_combination_is_refused(case: str) -> None:
    build, text = IMPOSSIBLE[case]
    with pytest.raises(SpecError, match=re.escape(text)):
        build()


def test_granularities_of_the_gemm_that_runs() -> None:
    """One scale beside rowwise ones is repeated for every row."""
    t, r = Granularity.TENSORWISE, Granularity.ROWWISE
    for pair, runs_as in {(t, t): (t, t), (r, t): (r, r), (t, r): (r, r), (VECTOR, SQUARE): (VECTOR, SQUARE)}.items():
        assert Gemm(a=e4m3(pair[0]), b=e4m3(pair[1])).scaled_gemm_granularities == runs_as


def test_delayed_may_keep_one_gemm_in_high_precision() -> None:
    recipe = dataclasses.replace(DELAYED, grad_weight=Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST))
    assert recipe.grad_weight.is_high_precision


def test_tensors_with_a_state_of_delayed_scaling() -> None:
    """Those with delayed scales that are cast at all."""
    assert RECIPES["tensorwise"].delayed_tensors == ()
    assert RECIPES["delayed"].delayed_tensors == ("input", "weight", "grad_output")
    plain = Gemm(a=Cast(format=None), b=Cast(format=None))
    forward_only = dataclasses.replace(RECIPES["delayed"], grad_input=plain, grad_weight=plain)
    assert forward_only.delayed_tensors == ("input", "weight")


def test_content_hashes_are_pinned() -> None:
    """A changed hash says that recorded results belong to other bits: it needs a line under "Bit changes"."""
    assert {name: recipe.content_hash for name, recipe in RECIPES.items()} == HASHES


def test_content_hash_and_equality_ignore_the_name() -> None:
    renamed = dataclasses.replace(TENSORWISE, name="mine")
    assert renamed.name == "mine"
    assert renamed.content_hash == TENSORWISE.content_hash
    assert renamed == TENSORWISE
    assert hash(renamed) == hash(TENSORWISE)


VARIANTS: dict[str, Recipe] = {
    **RECIPES,
    "power of two": dataclasses.replace(TENSORWISE, scale_rule=ScaleRule(power_of_two=True)),
    "floor": dataclasses.replace(TENSORWISE, scale_rule=ScaleRule(amax_floor=1e-4)),
    "slow output": dataclasses.replace(TENSORWISE, output=dataclasses.replace(TENSORWISE.output, use_fast_accum=False)),
    "fast grad_input": dataclasses.replace(
        TENSORWISE, grad_input=dataclasses.replace(TENSORWISE.grad_input, use_fast_accum=True)
    ),
    "fast grad_weight": dataclasses.replace(
        TENSORWISE, grad_weight=dataclasses.replace(TENSORWISE.grad_weight, use_fast_accum=True)
    ),
    "E4M3 gradients": dataclasses.replace(
        TENSORWISE, grad_input=Gemm(a=e4m3(), b=e4m3()), grad_weight=Gemm(a=e4m3(), b=e4m3())
    ),
    "history": dataclasses.replace(DELAYED, delayed=DelayedScaling(history_length=15)),
    "reduction": dataclasses.replace(DELAYED, delayed=DelayedScaling(reduction=AmaxHistoryReduction.MOST_RECENT)),
    "margin": dataclasses.replace(DELAYED, delayed=DelayedScaling(margin=1)),
    "tensorwise b": dataclasses.replace(ROWWISE, grad_input=ROWWISE_WITH_GW_HP.grad_input),
    "high precision": dataclasses.replace(ROWWISE, grad_weight=ROWWISE_WITH_GW_HP.grad_weight),
}


def test_every_field_but_the_name_changes_the_content_hash() -> None:
    assert len({recipe.content_hash for recipe in VARIANTS.values()}) == len(VARIANTS)
    assert len(set(VARIANTS.values())) == len(VARIANTS)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_immutable_values(name: str) -> None:
    recipe = RECIPES[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.delayed = None  # type: ignore[misc]
    loaded = pickle.loads(pickle.dumps(recipe))
    assert loaded == recipe
    assert hash(loaded) == hash(recipe)
    assert loaded.name == name


EXPLANATIONS = {
    "rowwise_with_gw_hp": """\
rowwise_with_gw_hp  (27d6c3e1fb00)
scales: dynamic, from the amax of the tensor that is cast
        inv_scale = max / max(amax, 1e-12), cut to a power of two
output [M, N] = cast(input [M, K]) @ cast(weight [N, K]^T), summed over K
    a: float8_e4m3fn rowwise
    b: float8_e4m3fn rowwise
    fast accumulation: one chain
grad_input [M, K] = cast(grad_output [M, N]) @ cast(weight [N, K]), summed over N
    a: float8_e4m3fn rowwise
    b: float8_e4m3fn tensorwise
    accumulation promoted to float32 every 128
grad_weight [N, K] = cast(grad_output [M, N]^T) @ cast(input [M, K]), summed over M
    a: bfloat16
    b: bfloat16
    bfloat16 matmul, one chain""",
}


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_explanation(name: str) -> None:
    assert RECIPES[name].explain() == EXPLANATIONS[name]


def test_explanation_of_scales() -> None:
    """The lines that other recipes do not show: a delayed rule, and a floor with all its digits."""
    recipe = Recipe(
        name="mine",
        output=DELAYED.output,
        grad_input=DELAYED.grad_input,
        grad_weight=DELAYED.grad_weight,
        scale_rule=ScaleRule(power_of_two=True, amax_floor=1.23456789e-10),
        delayed=DelayedScaling(history_length=4, reduction=AmaxHistoryReduction.MOST_RECENT, margin=2),
    )
    lines = recipe.explain().splitlines()
    assert lines[0] == f"mine  ({recipe.content_hash[:12]})"
    assert lines[1] == "scales: delayed, from the most_recent of the last 4 amaxes, margin 2 (format max * 2^-2)"
    assert lines[2] == "        inv_scale = max / max(amax, 1.23456789e-10), cut to a power of two"
    assert lines[3:] == DELAYED.explain().splitlines()[3:]

"""Named recipes against torchao's table, impossible combinations, content hashes and explanations."""

import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from enum import Enum
from functools import partial

import pytest

from f8emu.conformance.kernels.kernel import Accumulation
from f8emu.conformance.kernels.known import KERNELS
from f8emu.spec.cast_plan import CastPlan
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import E4M3FN, E5M2, E8M0FNU, FLOAT16
from f8emu.spec.gemm import GEMM_NAMES, HIGH_PRECISION_CAST, OPERANDS, Cast, Gemm
from f8emu.spec.names import RecipeName
from f8emu.spec.recipe import (
    BLOCKWISE,
    BLOCKWISE_UE8M0,
    DELAYED,
    MXFP8,
    NAMED_RECIPES,
    RECIPE_ALIASES,
    RECIPES,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    CastFrom,
    Recipe,
    recipe_by_name,
)
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, Granularity, ScaleRule

SQUARE = Granularity.BLOCKWISE_128X128
VECTOR = Granularity.BLOCKWISE_1X128

# Recipe -> casts of a and b in output, grad_input and grad_weight, `granularity/format`; "bf16" is an operand kept in
# high precision. Then fast accumulation of these (torchao: output only), and power-of-two scales. The first three are
# from torchao 0.19: `Float8LinearConfig.from_recipe_name` (ten = tensorwise, axs = axiswise) and its default dtypes.
TEN, AXS = "ten/e4m3fn ten/e4m3fn", "axs/e4m3fn axs/e4m3fn"
CASTS: dict[str, tuple[tuple[str, str, str], tuple[bool, bool, bool], bool]] = {
    "tensorwise": ((TEN, "ten/e5m2 ten/e4m3fn", "ten/e5m2 ten/e4m3fn"), (True, False, False), False),
    "rowwise": ((AXS, AXS, AXS), (True, False, False), True),
    "rowwise_fast": ((AXS, AXS, AXS), (True, True, True), True),
    "rowwise_with_gw_hp": ((AXS, "axs/e4m3fn ten/e4m3fn", "bf16 bf16"), (True, False, False), True),
    "delayed": ((TEN, "ten/e5m2 ten/e4m3fn", "ten/e5m2 ten/e4m3fn"), (True, False, False), False),
    "blockwise": (
        ("1x128/e4m3fn 128x128/e4m3fn", "1x128/e4m3fn 128x128/e4m3fn", "1x128/e4m3fn 1x128/e4m3fn"),
        (False, False, False),
        False,
    ),
}
ABBREVIATIONS = {Granularity.TENSORWISE: "ten", Granularity.ROWWISE: "axs", VECTOR: "1x128", SQUARE: "128x128"}
HASHES = {
    "tensorwise": "7b2408b92d5b8c7cb25178174e4744ebd00d181171d227e0733e51e4f50fb8a0",
    "rowwise": "2e879072581ddcc96a6ce25c2fd3c6c6668fbc96213c3cd4afd8d00b8dd50bcd",
    "rowwise_fast": "2db765a30f91f8b2aac07a4e863d2331a01a037aa621c00218d595b133749c66",
    "rowwise_with_gw_hp": "27d6c3e1fb002de73cc72e55efab0b067a1e65ccb64fff1b490bfd23ebfc9445",
    "delayed": "0aedd2334dbb44a29269fb047e8dee0017c9e1d58410c4a95ef850be9392e241",
    "blockwise": "c0ec3af7adec30b1da9c8941fef54807f13bdc0b105ce9bb2cedc9c35495d687",
    "blockwise_ue8m0": "d6c5baa333245d58eeb0e9dfecff3f20a92d23b04af87ddb364c227a78b889c3",
    "mxfp8": "f9d82d78f098926d8afb991a0ead6bb0168c4a6da2c22ffcd3e32ccee2fad325",
    "mxfp8_floor": "11f4ad6a19e089aa0419a579e0b7f65655a0aad7188a8967c380882f7519d8f6",
}


def short(cast: Cast) -> str:
    if cast.format is None:
        return "bf16"
    return f"{ABBREVIATIONS[cast.granularity]}/{cast.format.name.removeprefix('float8_')}"


def test_the_named_recipes_are_those_of_the_table() -> None:
    assert [recipe.name for recipe in RECIPES.values()] == list(RECIPES) == list(CASTS)
    for name, recipe in RECIPES.items():
        casts, fast, power_of_two = CASTS[name]
        assert tuple(f"{short(gemm.a)} {short(gemm.b)}" for gemm in recipe.gemms.values()) == casts
        assert tuple(gemm.use_fast_accum for gemm in recipe.gemms.values()) == fast
        assert recipe.scale_rule == ScaleRule(power_of_two=power_of_two, amax_floor=1e-12)
        expected = DelayedScaling(history_length=16, reduction=AmaxHistoryReduction.MAX, margin=0)
        assert recipe.delayed == (expected if name == "delayed" else None)


def test_gemms_and_their_operands() -> None:
    operands = (("input", "weight"), ("grad_output", "weight"), ("grad_output", "input"))
    assert tuple(TENSORWISE.gemms) == GEMM_NAMES == ("output", "grad_input", "grad_weight")
    assert dict(zip(GEMM_NAMES, operands, strict=True)) == OPERANDS
    pairs = zip(GEMM_NAMES, operands, strict=True)
    assert [(gemm, x) for gemm, x, _ in TENSORWISE.casts()] == [(gemm, x) for gemm, pair in pairs for x in pair]
    assert list(ROWWISE_WITH_GW_HP.casts("weight")) == [
        ("output", "weight", ROWWISE_WITH_GW_HP.output.b),
        ("grad_input", "weight", ROWWISE_WITH_GW_HP.grad_input.b),
    ]


def test_recipes_are_found_by_name_and_by_older_names() -> None:
    assert all(recipe_by_name(name) is recipe for name, recipe in RECIPES.items())
    older = {"all_tensorwise": TENSORWISE, "all_axiswise": ROWWISE, "lw_axiswise_with_gw_hp": ROWWISE_WITH_GW_HP}
    with pytest.warns(DeprecationWarning, match="is an older name; write") as warned:
        assert {name: recipe_by_name(name) for name in RECIPE_ALIASES} == older
    assert {warning.filename for warning in warned} == {__file__}, "the line that uses the name"


@pytest.mark.parametrize(("name", "near"), [("rowise", " (did you mean rowwise?)"), ("TENSORWISE", ""), ("", "")])
def test_unknown_recipe_lists_the_known(name: str, near: str) -> None:
    with pytest.raises(SpecError) as caught:
        recipe_by_name(name)
    assert str(caught.value) == (
        f"recipe_by_name: unknown recipe {name!r}{near}; known recipes: tensorwise, rowwise, rowwise_fast, "
        "rowwise_with_gw_hp, delayed, blockwise, blockwise_ue8m0, mxfp8, mxfp8_floor; older names: "
        "all_tensorwise (= tensorwise), all_axiswise (= rowwise), lw_axiswise_with_gw_hp (= rowwise_with_gw_hp)"
    )


def e4m3(granularity: Granularity = Granularity.TENSORWISE) -> Cast:
    return Cast(format=E4M3FN, granularity=granularity)


HIGH = HIGH_PRECISION_CAST
IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Cast(format=FLOAT16),
        "Cast: format must be the Format float8_e4m3fn or float8_e5m2 or float8_e4m3fnuz or",
    ),
    (lambda: Cast(format=FLOAT16), "or None for high precision; got the Format float16"),
    (lambda: Cast(format=E8M0FNU), "got the Format float8_e8m0fnu"),
    (lambda: Cast(format="float8_e4m3fn"), "got the str float8_e4m3fn"),  # type: ignore[arg-type]
    (
        lambda: Cast(format=None, granularity=Granularity.ROWWISE),
        "Cast: a high precision operand has no scales; got granularity rowwise. Leave the granularity out, or give a",
    ),
    (
        lambda: Cast(format=None, scale_rule=ScaleRule()),
        "Cast: a high precision operand has no scales; got ScaleRule(). Leave scale_rule out",
    ),
    (
        lambda: replace(BLOCKWISE, output=BLOCKWISE_UE8M0.output),
        "Recipe 'blockwise': the casts of input have different scale rules; one reading of a tensor gives both, so",
    ),
    (
        lambda: replace(
            TENSORWISE, output=Gemm(a=e4m3(), b=replace(e4m3(), scale_rule=ScaleRule())), delayed=DelayedScaling()
        ),
        "the casts of weight have different scale rules",
    ),
    (lambda: Gemm(a=e4m3(), b=e4m3(), split_k=False), "split_k=False needs 1x128 scales of a; got float8_e4m3fn tens"),
    (
        lambda: Gemm(a=e4m3(), b=HIGH),
        "Gemm: both operands must be float8 or both high precision; got float8_e4m3fn tensorwise and bfloat16. "
        "No matrix unit multiplies the two kinds; set format=None for both, or for neither",
    ),
    (lambda: Gemm(a=HIGH, b=e4m3()), "got bfloat16 and float8_e4m3fn tensorwise"),
    (
        lambda: Gemm(a=Cast(format=E5M2), b=Cast(format=E5M2)),
        "Gemm: Hopper multiplies float8_e4m3fn x float8_e4m3fn, float8_e5m2 x float8_e4m3fn, "
        "float8_e4m3fn x float8_e5m2; got float8_e5m2 x float8_e5m2; cast to one of these",
    ),
    (lambda: Gemm(a=HIGH, b=HIGH, use_fast_accum=True), "Gemm: use_fast_accum needs float8 operands; a high precision"),
    (
        lambda: Gemm(a=e4m3(), b=e4m3(SQUARE)),
        "Gemm: Hopper takes scales tensorwise x tensorwise, rowwise x rowwise, blockwise_1x128 x blockwise_1x128, "
        "blockwise_1x128 x blockwise_128x128, blockwise_128x128 x blockwise_1x128; "
        "got tensorwise x blockwise_128x128; to use a tensorwise scale beside rowwise ones, repeat it for every row",
    ),
    (lambda: Gemm(a=e4m3(VECTOR), b=e4m3(Granularity.ROWWISE)), "got blockwise_1x128 x rowwise"),
    (lambda: Gemm(a=e4m3(SQUARE), b=e4m3(SQUARE)), "got blockwise_128x128 x blockwise_128x128"),
    (
        lambda: Gemm(a=e4m3(VECTOR), b=e4m3(SQUARE), use_fast_accum=True),
        "Gemm: Hopper has no fast accumulation beside block scales; pass use_fast_accum=False",
    ),
    (
        lambda: replace(MXFP8.output, use_fast_accum=True),
        "Gemm: Blackwell tcgen05 has no fast accumulation beside block scales; pass use_fast_accum=False",
    ),
    (
        lambda: Gemm(a=Cast(format=E5M2, granularity=VECTOR), b=e4m3(SQUARE)),
        "Gemm: Hopper takes block scales of float8_e4m3fn x float8_e4m3fn; got float8_e5m2 x float8_e4m3fn; cast to",
    ),
    (
        lambda: Gemm(a=e4m3(VECTOR), b=Cast(format=E5M2, granularity=VECTOR)),
        "Gemm: Hopper takes block scales of float8_e4m3fn x float8_e4m3fn; got float8_e4m3fn x float8_e5m2",
    ),
    (
        lambda: replace(TENSORWISE, output=Gemm(a=Cast(format=E5M2), b=e4m3())),
        "Recipe 'tensorwise': input is cast to float8_e4m3fn and float8_e5m2; one tensor has one float8 format in all",
    ),
    (
        lambda: replace(ROWWISE, delayed=DelayedScaling()),
        "Recipe 'rowwise': delayed scaling keeps one amax a tensor, so every cast of one must be tensorwise; "
        "input of output is rowwise; leave input out of delayed.tensors",
    ),
    (
        lambda: replace(BLOCKWISE, delayed=DelayedScaling(), output=ROWWISE_WITH_GW_HP.grad_weight),
        "every cast of one must be tensorwise; grad_output of grad_input is blockwise_1x128",
    ),
    (
        lambda: DelayedScaling(tensors=("weight", "input")),
        "tensors must be some of input, weight, grad_output, in this order; got ('weight', 'input')",
    ),
]


@pytest.mark.parametrize(("build", "text"), IMPOSSIBLE, ids=[text[-40:] for _, text in IMPOSSIBLE])
def test_impossible_combination_is_refused(build: Callable[[], object], text: str) -> None:
    with pytest.raises(SpecError, match=re.escape(text)):
        build()


def test_granularities_of_the_gemm_that_runs() -> None:
    """One scale beside rowwise ones is repeated for every row."""
    t, r = Granularity.TENSORWISE, Granularity.ROWWISE
    for pair, runs_as in {(t, t): (t, t), (r, t): (r, r), (t, r): (r, r), (VECTOR, SQUARE): (VECTOR, SQUARE)}.items():
        assert Gemm(a=e4m3(pair[0]), b=e4m3(pair[1])).scaled_gemm_granularities == runs_as


# Recipe -> the passes from which the operands rows and cols of input, weight and grad_output come.
BY_AMAX, BY_BLOCKS = "amaxes, then codes", "blocks in one reading"
PASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "tensorwise": ((BY_AMAX, BY_AMAX),) * 3,
    "rowwise": ((BY_AMAX, BY_AMAX),) * 3,
    "rowwise_fast": ((BY_AMAX, BY_AMAX),) * 3,
    "rowwise_with_gw_hp": (("rows in one pass", "bf16"), (BY_AMAX, BY_AMAX), ("rows in one pass", "bf16")),
    "delayed": ((BY_AMAX, BY_AMAX),) * 3,
    "blockwise": ((BY_BLOCKS, BY_BLOCKS),) * 3,
    "blockwise_ue8m0": ((BY_BLOCKS, BY_BLOCKS),) * 3,
    "mxfp8": ((BY_BLOCKS, BY_BLOCKS),) * 3,
    "mxfp8_floor": ((BY_BLOCKS, BY_BLOCKS),) * 3,
}


def passes(plan: CastPlan) -> tuple[str, ...]:
    by_amax = "rows in one pass" if plan.is_one_pass else BY_AMAX
    ways: dict[str, tuple[object, object]] = {
        BY_BLOCKS: plan.by_blocks,
        by_amax: plan.by_amax,
        "bf16": plan.in_bfloat16,
    }
    return tuple("".join(way for way, sides in ways.items() if sides[side]) for side in (0, 1))


@pytest.mark.parametrize("recipe", NAMED_RECIPES.values(), ids=lambda recipe: recipe.name)
def test_passes_from_which_operands_come(recipe: Recipe) -> None:
    """Each operand comes from one way; alone, it comes from the same, but that rows then take one pass."""
    plans = recipe.cast_plans
    assert tuple(passes(plan.both) for plan in plans) == PASSES[recipe.name]
    for tensor, plan in recipe.cast_plans._asdict().items():
        (_, _, rows), (_, _, cols) = recipe.casts(tensor)
        alone = "rows in one pass" if rows.granularity is Granularity.ROWWISE else passes(plan.both)[0]
        assert passes(plan.rows) == (alone, "")
        assert passes(plan.cols) == ("", passes(plan.both)[1])
        assert passes(plan.nothing) == ("", "")
        assert passes(plan.both.turned()) == tuple(
            way.replace("rows in one pass", BY_AMAX) for way in passes(plan.both)[::-1]
        )
        assert plan.both.granularities == tuple(None if c.format is None else c.granularity for c in (rows, cols))
        assert (plan.both.rule, plan.wanted(rows=True, cols=False)) == (recipe.rule_of(rows), plan.rows)


def test_tensors_with_a_state_of_delayed_scaling() -> None:
    """Those with delayed scales that are cast at all."""
    plain = Gemm(a=HIGH, b=HIGH)
    forward_only = replace(DELAYED, grad_input=plain, grad_weight=plain)
    tensors = [recipe.delayed_tensors for recipe in (TENSORWISE, DELAYED, forward_only)]
    assert tensors == [(), ("input", "weight", "grad_output"), ("input", "weight")]


def test_content_hashes_are_pinned() -> None:
    """A changed hash says that recorded results belong to other bits: it needs a line under "Bit changes"."""
    assert {name: recipe.content_hash for name, recipe in NAMED_RECIPES.items()} == HASHES


def test_content_hash_and_equality_ignore_the_name() -> None:
    renamed = replace(TENSORWISE, name="mine")
    assert renamed.name == "mine"
    assert renamed.content_hash == TENSORWISE.content_hash
    assert renamed == TENSORWISE
    assert hash(renamed) == hash(TENSORWISE)


VARIANTS: dict[str, Recipe] = {
    **RECIPES,
    "a rule of its own": BLOCKWISE_UE8M0,
    "power of two": replace(TENSORWISE, scale_rule=ScaleRule(power_of_two=True)),
    "floor": replace(TENSORWISE, scale_rule=ScaleRule(amax_floor=1e-4)),
    "slow output": replace(TENSORWISE, output=replace(TENSORWISE.output, use_fast_accum=False)),
    "fast grad_input": replace(TENSORWISE, grad_input=replace(TENSORWISE.grad_input, use_fast_accum=True)),
    "fast grad_weight": replace(TENSORWISE, grad_weight=replace(TENSORWISE.grad_weight, use_fast_accum=True)),
    "E4M3 gradients": replace(TENSORWISE, grad_input=Gemm(a=e4m3(), b=e4m3()), grad_weight=Gemm(a=e4m3(), b=e4m3())),
    "history": replace(DELAYED, delayed=DelayedScaling(history_length=15)),
    "reduction": replace(DELAYED, delayed=DelayedScaling(reduction=AmaxHistoryReduction.MOST_RECENT)),
    "margin": replace(DELAYED, delayed=DelayedScaling(margin=1)),
    "tensorwise b": replace(ROWWISE, grad_input=ROWWISE_WITH_GW_HP.grad_input),
    "high precision": replace(ROWWISE, grad_weight=ROWWISE_WITH_GW_HP.grad_weight),
}


def test_every_field_but_the_name_changes_the_content_hash() -> None:
    assert len({recipe.content_hash for recipe in VARIANTS.values()}) == len(VARIANTS)
    assert len(set(VARIANTS.values())) == len(VARIANTS)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_immutable_values(name: RecipeName) -> None:
    recipe = RECIPES[name]
    with pytest.raises(FrozenInstanceError):
        recipe.delayed = None  # type: ignore[misc]
    loaded = pickle.loads(pickle.dumps(recipe))
    assert loaded == recipe
    assert hash(loaded) == hash(recipe)
    assert loaded.name == name


EXPLANATION = """\
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
    bfloat16 matmul, one chain"""


def test_explanation() -> None:
    assert ROWWISE_WITH_GW_HP.explain() == EXPLANATION


def test_explanation_of_scales() -> None:
    """The lines that other recipes do not show: a delayed rule, and a floor with all its digits."""
    delayed = DelayedScaling(history_length=4, reduction=AmaxHistoryReduction.MOST_RECENT, margin=2)
    recipe = replace(
        DELAYED, name="mine", scale_rule=ScaleRule(power_of_two=True, amax_floor=1.23456789e-10), delayed=delayed
    )
    lines = recipe.explain().splitlines()
    assert lines[0] == f"mine  ({recipe.content_hash[:12]})"
    assert lines[1] == "scales: delayed, from the most_recent of the last 4 amaxes, margin 2 (format max * 2^-2)"
    assert lines[2] == "        inv_scale = max / max(amax, 1.23456789e-10), cut to a power of two"
    assert lines[3:] == DELAYED.explain().splitlines()[3:]


def test_explanation_of_a_rule_of_its_own() -> None:
    """The floors of vLLM and DeepGEMM: 1e-10 of a scale of activations, 1e-4 in float32 of an amax of weights."""
    rules = (
        "max / max(amax, 1e-12)",
        "of input: max / max(amax, 4.48e-08)",
        "of weight: max / max(amax, 9.99999975e-05)",
    )
    cut = [line.split("  ")[-1] for line in BLOCKWISE_UE8M0.explain().splitlines() if "cut to a power of two" in line]
    assert cut == [f"{'inv_scale = ' * (i == 0)}{rule}, cut to a power of two" for i, rule in enumerate(rules)]
    assert BLOCKWISE_UE8M0 == recipe_by_name("blockwise_ue8m0") and str(BLOCKWISE_UE8M0) == "Recipe('blockwise_ue8m0')"


@pytest.mark.parametrize(
    ("make", "argument", "member"),
    [
        (partial(Cast, format=E4M3FN), "granularity", Granularity.ROWWISE),
        (DelayedScaling, "reduction", AmaxHistoryReduction.MOST_RECENT),
        (partial(replace, TENSORWISE), "cast_weight_from", CastFrom.BFLOAT16),
        (partial(replace, KERNELS["torch._scaled_mm"]), "accumulation", Accumulation.FAST),
    ],
    ids=["Cast", "DelayedScaling", "Recipe", "Kernel"],
)
def test_an_option_is_a_member_or_its_name(make: Callable[..., object], argument: str, member: Enum) -> None:
    assert getattr(make(**{argument: member.value}), argument) is member
    with pytest.raises(SpecError, match=f"{argument} must be one of .*; got 'bogus'"):
        make(**{argument: "bogus"})

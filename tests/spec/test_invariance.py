"""The verdicts of batch invariance, beside the bits of layers whose batch grows."""

from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

import f8emu.numpy as f8
from f8emu.spec import RECIPES, SERVING_RECIPES, Recipe, SpecError
from f8emu.spec.chips import CHIPS
from f8emu.split_k.invariance import Dependence, Invariance, invariance
from f8emu.split_k.plan import weights_from_json

N, K, ROWS = 256, 16384, 96


def _rows_differ(recipe: Recipe, rows: int, more: int) -> bool:
    """Whether the first rows of an output have other bits among `more` rows, of which the last are large."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((more, K)) * np.where(np.arange(more) < rows, 1, 5)[:, None]
    w = rng.standard_normal((N, K)).astype(bfloat16)
    one, all_ = (f8.linear(recipe, x[:m].astype(bfloat16), w).result[:rows].view(np.uint16) for m in (rows, more))
    return not np.array_equal(one, all_)


DYNAMIC = {name: recipe for name, recipe in (RECIPES | SERVING_RECIPES).items() if recipe.delayed is None}


@pytest.mark.parametrize("recipe", DYNAMIC.values(), ids=DYNAMIC)
def test_a_verdict_is_what_the_bits_are(recipe: Recipe) -> None:
    verdict = invariance(recipe, N, K, rows=ROWS)
    if len(verdict.splits) > 1:  # at the first M that has another S, and just below
        rows = verdict.splits[1][0] - 1
        assert _rows_differ(recipe, rows, rows + 1)
    else:
        assert _rows_differ(recipe, 8, ROWS) != verdict.is_invariant
    short = invariance(recipe, N, 2048, rows=ROWS)
    assert short.verdict is (Dependence.DEPENDS if verdict.recipe == "tensorwise" else Dependence.BY_RULE)


def test_the_plan_decides_where_no_rule_does() -> None:
    found = invariance(RECIPES["delayed"], 4096, 14336)
    assert (found.verdict, found.splits) == (Dependence.DEPENDS, ((1, 2), (32, 1)))
    assert invariance(RECIPES["delayed"], 4096, 14336, rows=31).verdict is Dependence.BY_PLAN
    assert invariance(RECIPES["delayed"], 4096, 65536).verdict is Dependence.UNKNOWN
    # The gradient of the input sums over n.
    assert invariance(RECIPES["delayed"], 14336, 4096, gemm="grad_input").splits == found.splits


def test_what_nobody_measured_is_unknown() -> None:
    def on(chip: str) -> Invariance:
        return invariance(replace(RECIPES["rowwise"], chip=chip), N, K)

    unplanned = [
        chip.name for chip in CHIPS.values() if not chip.plan and RECIPES["rowwise"].output.refusal(chip) is None
    ]
    assert unplanned and all(on(name).verdict is Dependence.UNKNOWN for name in unplanned)
    assert on("H100").verdict is Dependence.BY_RULE


def test_refusals() -> None:
    with pytest.raises(SpecError, match="whose rows are tokens; got 'grad_weight'"):
        invariance(RECIPES["rowwise"], N, K, gemm="grad_weight")
    with pytest.raises(SpecError, match="must be at least 1; got 0, 16384 and 8192"):
        invariance(RECIPES["rowwise"], 0, K)
    assert weights_from_json('[{"n": 3, "k": 4, "m": 1}]', "file") == [(3, 4)]

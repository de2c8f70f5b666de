"""Batch invariance: whether a row of a GEMM's output has the same bits whatever the other rows are, and by what.

Two things can make a row depend on the others: a scale that rows share, and an S that the library chooses by M.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby
from operator import itemgetter

from f8emu.spec.chips import CHIPS
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import BFLOAT16
from f8emu.spec.gemm import OPERANDS
from f8emu.spec.gemm_call import layer_call
from f8emu.spec.recipe import Recipe
from f8emu.split_k.gemm import PlannedGemm, Source, planned
from f8emu.split_k.plan import shipped_plan
from f8emu.split_k.trees import SplitPlan

ROWS = 8192
"""The largest M of the range, unless the caller names another."""
LLAMA_3_8B = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
"""The weights of a layer of Llama-3 8B, (n, k)."""
GEMMS = ("output", "grad_input")
"""The GEMMs whose rows are tokens. `grad_weight` is a sum over them."""


class Dependence(Enum):
    """Whether, and why, a row's bits do not depend on the others."""

    BY_RULE = "invariant by rule"
    """For every number of rows: nothing that a row's bits follow from is shared, and the library cannot choose."""
    BY_PLAN = "invariant by the plan"
    """For every M of the range: the library's heuristic, recorded or predicted, has one S for all of them."""
    DEPENDS = "depends on the batch"
    UNKNOWN = "unknown"
    """The library chooses S by M, and there is no plan for this chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariance:
    """The answer for one GEMM of a layer with a weight [n, k]."""

    recipe: str
    gemm: str
    n: int
    k: int
    chip: str
    verdict: Dependence
    because: str
    splits: tuple[tuple[int, int], ...] = ()
    """(the first M, S) of each range of rows with one S, in order; empty where the verdict needs no S."""
    share_recorded: float = 0.0
    """How many of these S were recorded; the others are predicted."""

    @property
    def is_invariant(self) -> bool:
        return self.verdict in (Dependence.BY_RULE, Dependence.BY_PLAN)


def invariance(
    recipe: Recipe, n: int, k: int, *, gemm: str = "output", rows: int = ROWS, plan: SplitPlan | None = None
) -> Invariance:
    """Whether a row of a `gemm` of a layer with a weight [n, k] depends on the other rows, of up to `rows`.

    1. A scale over rows: a tensorwise scale of the tensor at hand follows from the amax of all rows. A delayed one is
       known before the call.
    2. S: a recipe may rule that K is whole (`Gemm.split_k`). The library never splits a rowwise GEMM [CHAIN-3], nor one
       whose K is short [PLAN-2]. For the others `plan`, or that of the recipe's chip, gives S for every M; the
       outputs are bfloat16.

    Exactness: as good as the plan is, by `reference/EVIDENCE.md`. `f8emu fit KERNEL --m 1 --m 64` measures a kernel.
    """
    if gemm not in GEMMS:
        raise SpecError(f"invariance: gemm must be {' or '.join(GEMMS)}, whose rows are tokens; got {gemm!r}")
    if min(n, k, rows) < 1:
        raise SpecError(f"invariance: n, k and rows must be at least 1; got {n}, {k} and {rows}")
    spec, chip, tensor = recipe.gemms[gemm], CHIPS[recipe.chip], OPERANDS[gemm][0]
    answer = partial(Invariance, recipe=recipe.label, gemm=gemm, n=n, k=k, chip=chip.name)
    # 1. Scales.
    is_delayed, is_plain = recipe.delayed_scaling_of(tensor) is not None, spec.is_high_precision
    if not is_plain and not is_delayed and spec.a.granularity.block[0] != 1:
        because = f"the rows of {tensor} share a scale: it follows from the amax of all of them"
        return answer(verdict=Dependence.DEPENDS, because=because)
    scale = "no scales" if is_plain else "scales of earlier steps" if is_delayed else "a row has its own scales"
    # 2. S.
    if not spec.split_k:
        return answer(verdict=Dependence.BY_RULE, because=f"{scale}, and the recipe never splits K")
    if plan is None and not chip.plan:
        because = f"{scale}, but there is no split-K plan for {chip.with_evidence}"
        return answer(verdict=Dependence.UNKNOWN, because=because)
    plan, sizes = plan or shipped_plan(chip.plan), (n, k) if gemm == "output" else (k, n)

    def of_rows(m: int) -> PlannedGemm:
        return planned(layer_call(spec, (m, *sizes), BFLOAT16, chip), "tn")

    one_row = of_rows(1)
    if one_row.gemm == "rowwise":
        return answer(verdict=Dependence.BY_RULE, because=f"{scale}, and a rowwise GEMM is never split [CHAIN-3]")
    if plan.slice_bytes is not None and one_row.bytes_of_k <= 2 * plan.slice_bytes:
        return answer(verdict=Dependence.BY_RULE, because=f"{scale}, and K is too short to be split [PLAN-2]")
    planned_splits = [plan.split_k(of_rows(m)) for m in range(1, rows + 1)]
    for m, split in enumerate(planned_splits, 1):
        if split.source is Source.UNKNOWN:
            return answer(verdict=Dependence.UNKNOWN, because=f"{scale}, but the plan does not reach M = {m}")
    ranges = groupby(enumerate((split.split_k for split in planned_splits), 1), key=itemgetter(1))
    splits = tuple(next(of_one_s) for _, of_one_s in ranges)
    verdict, because = Dependence.BY_PLAN, f"{scale}, and S = {splits[0][1]} up to M = {rows}"
    if len(splits) > 1:
        verdict, because = Dependence.DEPENDS, f"{scale}, but S depends on M"
    share = sum(split.source is Source.RECORDED for split in planned_splits) / rows
    return answer(verdict=verdict, because=because, splits=splits, share_recorded=share)

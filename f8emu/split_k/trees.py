"""The plan of one library on one chip: recorded shapes, and decision trees for the others [PLAN-1..6]."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from f8emu.split_k.gemm import UNKNOWN, PlannedGemm, Source, Split

# [PLAN-4] The range of the shapes on which the trees were fitted
MAX_M, MAX_N, MAX_K = 8192, 32768, 32768


# A power of two is the largest one, up to 128, that divides a size: so rows lie in memory. Slices by K are the most
# that [PLAN-2] leaves, slices the most that [PLAN-2] and [PLAN-4] leave.
PLAIN_FEATURES = (
    *("m", "n", "k", "m n", "power of two in m", "power of two in n", "power of two in k"),
    *("slices by k", "slices"),
)
# A question of a tree about a GEMM: one of `PLAIN_FEATURES`; (n, m): of how many tiles of n by m the output consists;
# (n, m, "at least", blocks): the fewest slices with so many tiles; (n, m, "at most", blocks): the most slices with no
# more tiles. Neither is above slices.
Feature = str | tuple[int, int] | tuple[int, int, str, int]
LEAF = 128


class Tree(NamedTuple):
    """A decision tree over integers, its nodes in preorder. The first branch is taken up to the limit."""

    codes: bytes  # 128 + S of a leaf, or the index of a feature
    to_come: bytes
    """The number of subtrees that start at a node or behind it: one more after an inner node, one less after a leaf."""
    limits: Sequence[int]  # the limits of the inner nodes

    def split_k(self, value: Callable[[int], int]) -> int:
        codes, to_come, limits = self
        at = 0
        while (code := codes[at]) < LEAF:
            # Inner nodes before this one: all before it are inner nodes or leaves, and to_come is 1 + their difference.
            inner = (at + to_come[at] - 1) // 2
            # The second branch starts where as many subtrees are to come as here: the first branch adds one.
            at = at + 1 if value(code) <= limits[inner] else to_come.find(to_come[at], at + 1)
        return code - LEAF


class FittedTree(NamedTuple):
    """S of a tree, and no more than [PLAN-2] and [PLAN-4] leave."""

    tree: Callable[[], Tree]  # decodes the tree on its first use; raises SpecError for a damaged file
    features: tuple[Feature, ...]
    workspace_bytes: int  # [PLAN-4] The float32 results of all slices take less
    slice_bytes: int  # [PLAN-2] A slice of K is longer than this

    def split_k(self, gemm: PlannedGemm) -> int:
        # 1. The most slices: of more than `slice_bytes` [PLAN-2], and with float32 results that fit the workspace
        #    [PLAN-4]; one slice stores none.
        sizes = rows, n, _ = gemm.rows, gemm.n, gemm.k
        by_k = max(1, (gemm.bytes_of_k - 1) // self.slice_bytes)
        slices = min(by_k, max(1, (self.workspace_bytes - 1) // (rows * n * 4)))
        if slices == 1:
            return 1

        # 2. What the tree may ask.
        powers = (min(size & -size, 128) for size in sizes)
        plain = (*sizes, rows * n, *powers, by_k, slices)
        plain_features = dict(zip(PLAIN_FEATURES, plain, strict=True))

        def value(index: int) -> int:
            feature = self.features[index]
            if isinstance(feature, str):
                return plain_features[feature]
            tiles = -(-n // feature[0]) * -(-rows // feature[1])
            if len(feature) == 2:
                return tiles
            return min(slices, -(-feature[3] // tiles) if feature[2] == "at least" else feature[3] // tiles)

        # 3. Its answer; a tree was fitted to shapes, and may go beyond the bound.
        return min(self.tree().split_k(value), slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The plan of one library on one chip."""

    library: str
    chip: str
    torch: str = ""  # the version of torch that called the library
    recorded: Mapping[tuple[str, int, int, int], int]  # (table, M, N, K) -> S
    rules: Mapping[str, FittedTree] = field(default_factory=dict[str, FittedTree])
    more_rules: Callable[[], Mapping[str, FittedTree]] = field(default=dict[str, FittedTree], compare=False)
    """Reads the trees of the GEMMs that have none in `rules`."""
    slice_bytes: int | None = None
    """[PLAN-2] A slice of K is longer than this; None in a file that holds recorded shapes only."""

    def split_k(self, gemm: PlannedGemm) -> Split:
        # A measured S holds, whatever the trees say.
        slices = self.recorded.get((gemm.table, gemm.rows, gemm.n, gemm.k))
        return self.predicted(gemm) if slices is None else Split(slices, Source.RECORDED)

    def over(self, base: "SplitPlan") -> "SplitPlan":
        """This plan, with what `base` knows besides if both are of the same library and chip."""
        if (self.library, self.chip) != (base.library, base.chip):
            return self
        return replace(base, recorded={**base.recorded, **self.recorded})

    def predicted(self, gemm: PlannedGemm) -> Split:
        """S of a GEMM by the rule alone; unknown beyond the range of the rule."""
        if self.slice_bytes is None or not gemm.is_aligned:
            return UNKNOWN
        if gemm.gemm == "rowwise" or gemm.bytes_of_k <= 2 * self.slice_bytes:
            return Split(1, Source.PREDICTED)
        if gemm.k > MAX_K:
            return UNKNOWN
        # [PLAN-6] Of block scales, float16 outputs have the rule of bfloat16 ones.
        rule = self.rules.get(gemm.table) or self.rules.get(f"{gemm.gemm} bfloat16")
        rule = rule or self.more_rules().get(gemm.table)
        if rule is None:
            return UNKNOWN
        if 8 * gemm.rows * gemm.n >= rule.workspace_bytes:  # [PLAN-4]: two slices would not fit
            return Split(1, Source.PREDICTED)
        if gemm.m > MAX_M or gemm.n > MAX_N:
            return UNKNOWN
        return Split(rule.split_k(gemm), Source.PREDICTED)

"""Which operands of a matrix come from which passes: the plan of its casts, which every layer executes.

A matrix `x` [M, N] of a linear layer is an operand of two GEMMs: of one as it is, with K = N ("rows"), and of another
transposed, with K = M ("cols"). A pass reads `x` once. A plan has, for each of the two operands, one of three entries:

    in_bfloat16   values rounded to bfloat16, without scales
    by_blocks     one pass finds the amaxes of blocks, the scales and the codes
    by_amax       one pass finds the amaxes of rows, of columns or of `x`, and another casts both operands;
                  a single one does both where only rows are scaled (`is_one_pass`), and where the scale is that of
                  earlier steps, under delayed scaling

The bits do not depend on passes: they are those of `amax`, `scale_from_amax` and `quantize` of each operand. So the
oracles have no plan, and a CPU, whose engine finds amaxes, scales and codes of an operand in one reading, needs the
granularities alone (`granularities`).
"""

from typing import NamedTuple

from f8emu.spec.formats import Format
from f8emu.spec.gemm import Cast
from f8emu.spec.scaling import Granularity, ScaleRule

Kinds = tuple[Granularity | None, Granularity | None]
"""The granularities of the operands rows and cols; None for one that does not take this way."""


class CastPlan(NamedTuple):
    """The passes over a matrix for its operands "rows" and "cols", or for one of them."""

    format: Format | None
    """The float8 format, which all casts of a matrix share; None: no operand has codes."""
    rule: ScaleRule
    in_bfloat16: tuple[bool, bool]
    by_blocks: Kinds
    by_amax: Kinds
    granularities: Kinds
    """`by_blocks` and `by_amax` in one."""
    margin: int
    """The margin of delayed scales; 0 under dynamic scaling."""

    @property
    def is_one_pass(self) -> bool:
        """Whether `by_amax` is of rows alone: amaxes, scales and codes then come from one pass."""
        return self.by_amax[0] is Granularity.ROWWISE and self.by_amax[1] is None

    @property
    def has_blocks(self) -> bool:
        return self.by_blocks[0] is not None or self.by_blocks[1] is not None

    def turned(self) -> "CastPlan":
        """The plan for `x^T`, whose operands change places."""
        return self._replace(
            in_bfloat16=self.in_bfloat16[::-1],
            by_blocks=self.by_blocks[::-1],
            by_amax=self.by_amax[::-1],
            granularities=self.granularities[::-1],
        )


class CastPlans(NamedTuple):
    """The plans of one tensor: for both of its operands, for each alone, and for none."""

    both: CastPlan
    rows: CastPlan
    cols: CastPlan
    nothing: CastPlan

    def wanted(self, *, rows: bool, cols: bool) -> CastPlan:
        """The plan for the operands that are wanted."""
        if rows:
            return self.both if cols else self.rows
        return self.cols if cols else self.nothing


class RecipePlans(NamedTuple):
    """The plans of the three tensors of a layer; no dict, which Dynamo of torch 2.11 cannot compare."""

    input: CastPlans
    weight: CastPlans
    grad_output: CastPlans

    def of(self, tensor: str) -> CastPlans:
        """The plans of a tensor by name."""
        return getattr(self, tensor)


def cast_plans(rows: Cast, cols: Cast, rule: ScaleRule, margin: int) -> CastPlans:
    """The plans of a matrix that is cast under `rows`, and its transpose under `cols`."""
    sides = (rows, cols), (rows, None), (None, cols), (None, None)
    return CastPlans(*(_plan(*casts, rule, margin) for casts in sides))


def _plan(rows: Cast | None, cols: Cast | None, rule: ScaleRule, margin: int) -> CastPlan:
    casts = (rows, cols)
    scaled = [None if cast is None or cast.format is None else cast for cast in casts]
    kinds = [None if cast is None else cast.granularity for cast in scaled]
    by_blocks = [kind if kind is not None and kind.is_blockwise else None for kind in kinds]
    by_amax = [None if kind is block else kind for kind, block in zip(kinds, by_blocks, strict=True)]
    return CastPlan(
        format=next((cast.format for cast in scaled if cast is not None), None),
        rule=rule,
        in_bfloat16=(rows is not None and rows.format is None, cols is not None and cols.format is None),
        by_blocks=(by_blocks[0], by_blocks[1]),
        by_amax=(by_amax[0], by_amax[1]),
        granularities=(kinds[0], kinds[1]),
        margin=margin,
    )

"""The scales of a whole weight, of which every rank holds some rows.

Exactness: amaxes and scales are those of the whole weight on one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Granularity
from f8emu.torch.collectives import reduce_amax
from f8emu.torch.fused import operators as fused
from f8emu.torch.torch_internals import foreach_copy, is_dtensor
from f8emu.torch.weights.codes import WeightScales, format_of

_ALIGNMENT = 4
"""Floats: the GEMMs take scales that lie at multiples of 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows:
    """Which rows of a weight this rank holds, and who holds the others."""

    n: int
    """Rows of the whole."""
    ranks: int = 1
    rank: int = 0
    group: Any = None
    """The process group of these ranks; None if there is one rank."""
    others: tuple[tuple[Any, int], ...] = ()
    """(process group, dimension) where tensor parallelism has cut the whole before."""

    @classmethod
    def of(cls, mesh: Any, outer_size: torch.Size, module: Any, x: Tensor) -> "OwnRows":
        """What FSDP2 tells its hooks.

        Raises:
            UnsupportedError: a weight that is sharded along K.
        """
        if x.shape[1] != outer_size[1]:
            raise UnsupportedError(
                f"Float8Linear: with enable_fsdp_float8_all_gather a weight must be sharded along its rows, dimension "
                f"0; got a shard {list(x.shape)} of {list(outer_size)}; leave shard_placement_fn at its default"
            )
        weight = module._parameters.get("weight")
        others: list[tuple[Any, int]] = []
        if is_dtensor(weight):
            names = weight.device_mesh.mesh_dim_names or ()
            for i, placement in enumerate(weight.placements):
                if placement.is_shard() and names[i : i + 1] != mesh.mesh_dim_names and len(names) > 1:
                    others.append((weight.device_mesh.get_group(i), placement.dim))
        return cls(
            n=outer_size[0], ranks=mesh.size(), rank=mesh.get_local_rank(), group=mesh.get_group(), others=tuple(others)
        )

    @property
    def padded(self) -> int:
        """The rows of every rank, padding included."""
        return -(-self.n // self.ranks)

    @property
    def rows(self) -> slice:
        """The rows of this rank."""
        return slice(min(self.n, self.rank * self.padded), min(self.n, (self.rank + 1) * self.padded))

    @property
    def groups(self) -> tuple[Any, ...]:
        """All groups that hold parts of the weight."""
        return (*(() if self.group is None else (self.group,)), *(group for group, _ in self.others))

    def pad(self, codes: Tensor) -> Tensor:
        """The codes of this rank as bytes, zero-padded to the rows that every rank sends."""
        codes = codes.view(torch.uint8)
        missing = self.padded - codes.shape[0]
        return pad(codes, (0, 0, 0, missing)) if missing else codes


class LocalWeight(NamedTuple):
    """A rank's rows of a weight."""

    values: Tensor
    recipe: Recipe
    own: OwnRows


class _Part(NamedTuple):
    """Amaxes of one operand of a weight, [n, 1], of which a rank knows some."""

    own: Tensor
    n: int
    begin: int = 0
    """The first of the own."""

    @property
    def size(self) -> int:
        """The numbers that it takes in a tensor of all."""
        return self.n + -self.n % _ALIGNMENT


@torch.no_grad()
def global_scales(weights: Sequence[LocalWeight]) -> list[WeightScales]:
    """The scales of whole weights: one all-reduce, and one kernel for the scales, for all of the same ranks and recipe.

    A rank fills in the amaxes of its own rows and leaves zeros for the others.
    """
    together: dict[Any, list[int]] = {}
    for i, (values, recipe, own) in enumerate(weights):
        together.setdefault((values.device, recipe, own.group), []).append(i)
    found: dict[int, WeightScales] = {}
    for (_, recipe, group), members in together.items():
        # 1. The amaxes that this rank knows, in one tensor, by few launches for the hundreds of weights of a model.
        parts = [part for i in members for part in _own_amaxes(weights[i])]
        sizes = [part.size for part in parts]
        flat = weights[members[0]].values.new_zeros(sum(sizes), dtype=torch.float32)
        places = zip(flat.split(sizes), parts, strict=True)
        own_places = [place.narrow(0, part.begin, part.own.numel()) for place, part in places]
        foreach_copy(own_places, [part.own.flatten() for part in parts])
        # 2. Those of the whole weights.
        flat = reduce_amax(flat, () if group is None else (group,))
        amaxes = _split(flat, parts)
        for i, row, col in zip(members, amaxes[::2], amaxes[1::2], strict=True):
            _reduce_over_others(weights[i].own, row, col)
        # 3. Their scales.
        rule = recipe.scale_rule
        both = fused.scales(flat, format_of(recipe), rule.power_of_two, rule.amax_floor, 0)
        inv_scales, scales = (_split(x, parts) for x in both)
        for at, i in enumerate(members):
            row, col = 2 * at, 2 * at + 1
            found[i] = WeightScales(amaxes[row], inv_scales[row], scales[row], inv_scales[col], scales[col])
    return [found[i] for i in range(len(weights))]


def _split(flat: Tensor, parts: list[_Part]) -> list[Tensor]:
    """Views of `flat`, each [n, 1]."""
    pieces = flat.split([part.size for part in parts])
    return [piece[: part.n].view(part.n, 1) for piece, part in zip(pieces, parts, strict=True)]


def _own_amaxes(weight: LocalWeight) -> tuple[_Part, _Part]:
    """The amaxes of this rank's rows: for `output` and for `grad_input`."""
    x, recipe, own = weight
    by_row = recipe.output.b.granularity is Granularity.ROWWISE
    by_col = recipe.grad_input.b.granularity is Granularity.ROWWISE
    of_rows = of_cols = None
    if by_col:
        of_rows, of_cols = fused.row_col_amax(x)
    elif by_row:
        of_rows = fused.row_amax(x)
    of_all = None if by_row and by_col else fused.tensor_amax(x if of_rows is None else of_rows)
    rows, cols = of_rows if by_row else of_all, of_cols if by_col else of_all
    assert rows is not None and cols is not None, "each operand has scales of one kind or the other"
    row_part = _Part(rows, own.n, own.rows.start) if by_row else _Part(rows, 1)
    return row_part, _Part(cols, cols.numel())


def _reduce_over_others(own: OwnRows, row_amax: Tensor, col_amax: Tensor) -> None:
    """Tensor parallelism along N, dimension 0, has cut the columns; along K, the rows. In place."""
    for group, dim in own.others:
        for amax, cut in ((row_amax, 1), (col_amax, 0)):
            if amax.numel() == 1 or cut == dim:
                amax.copy_(reduce_amax(amax, (group,)))


def local_tensor(x: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor is itself."""
    return getattr(x, "_local_tensor", x)

"""The pages of `f8emu plan`: the split-K of GEMMs, and whether a row's bits depend on the other rows."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from f8emu.report.page import Cell, Page, Row, Section, Table, Text, Tone
from f8emu.split_k.invariance import Dependence, Invariance

_KEYS = ("m", "n", "k", "gemm", "accumulation", "layout", "a_dtype", "b_dtype", "out_dtype", "split_k", "source")
_TONES: dict[Dependence, Tone] = {Dependence.DEPENDS: "bad", Dependence.UNKNOWN: "warn"}


def plan_page(items: Sequence[Mapping[str, Any]], of: str) -> Page:
    """One row for each GEMM of `f8emu.split_k.plan.with_splits`; `of` is the library and the chip."""
    keys = [key for key in _KEYS if any(item.get(key) for item in items)]
    numeric = frozenset(i for i, key in enumerate(keys) if key in ("m", "n", "k", "split_k"))
    names = frozenset(range(len(keys))) - numeric - {len(keys) - 1}
    rows = [[str(item.get(key) or "") for key in keys] for item in items]
    table = Table(caption=f"split-K of {of}", columns=keys, rows=rows, numeric=numeric, names=names)
    return Page(title="Split-K", sections=[Section(title=of, blocks=[table])])


def invariance_page(results: Sequence[Invariance], of: str) -> Page:
    """One row for each answer, which weights may share."""
    rows: list[Row] = []
    for (recipe, gemm, verdict, because, splits), group in groupby(
        results, key=lambda result: (result.recipe, result.gemm, result.verdict, result.because, result.splits)
    ):
        weights = ", ".join(f"{member.n} x {member.k}" for member in group)
        changes = ", ".join(f"{s} from M = {m}" for m, s in splits[:4]) + (", ..." if len(splits) > 4 else "")
        why = f"{because}: S = {changes}" if len(splits) > 1 else because
        rows.append([recipe, gemm, weights, Cell(text=verdict.value, tone=_TONES.get(verdict, "good")), why])
    columns = ("recipe", "gemm", "weights [n, k]", "verdict", "because")
    table = Table(caption=of, columns=columns, rows=rows, names=frozenset((0, 1)))
    last = Text(points=["grad_weight is a sum over the rows: it depends on all of them"])
    return Page(title="Batch invariance", sections=[Section(title=of, blocks=[table, last])])
